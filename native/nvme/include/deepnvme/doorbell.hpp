// How a drive and a queue wake an event loop: by a descriptor.
#pragma once

#include <atomic>

namespace deepnvme {

// An event loop watches `descriptor()`, which is readable while the bell rings: from ring(), or a
// completion on a drive that it watches, until answer(). Any thread.
class Doorbell {
  public:
    Doorbell();  // throws std::system_error
    ~Doorbell();
    Doorbell(const Doorbell&) = delete;
    Doorbell& operator=(const Doorbell&) = delete;

    [[nodiscard]] int descriptor() const noexcept { return poll_; }
    void ring() noexcept;
    // Rings at every event on `descriptor` from now on, until that is closed.
    void watch(int descriptor);
    // Stops ringing, and ignores ring() until listen(): the caller handles all that has ended by
    // then.
    void answer() noexcept;
    void listen() noexcept { rung_ = false; }

  private:
    int poll_;
    int signal_;
    std::atomic<bool> rung_ = false;  // it rings, or was answered and does not listen yet
};

}  // namespace deepnvme
