// How a drive and a queue wake an event loop: by a descriptor.
#pragma once

#include <atomic>

namespace deepnvme {

// Rings until it is answered, by a descriptor that can be read: when ring() is called, and when
// something completes on a drive that it watches. For an event loop. Any thread.
class Doorbell {
  public:
    Doorbell();  // throws std::system_error
    ~Doorbell();
    Doorbell(const Doorbell&) = delete;
    Doorbell& operator=(const Doorbell&) = delete;

    [[nodiscard]] int descriptor() const noexcept { return poll_; }
    void ring() noexcept;
    // Lets it ring each time that an event is signalled on `descriptor`, until that is closed.
    void watch(int descriptor);
    // Stops ringing. What ring() is called for until listen() makes no sound: the caller looks
    // after all that has ended by then.
    void answer() noexcept;
    void listen() noexcept { rung_ = false; }

  private:
    int poll_;
    int signal_;
    std::atomic<bool> rung_ = false;  // and not answered, or answered just now
};

}  // namespace deepnvme
