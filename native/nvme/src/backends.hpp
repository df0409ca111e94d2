// What only the files of the backends use: their makers, a wake-up descriptor, one request carried
// out in the calling thread.
#pragma once

#include <cstdint>
#include <memory>

#include "deepnvme/backend.hpp"

namespace deepnvme {

[[nodiscard]] std::unique_ptr<Backend> make_aio_backend(unsigned depth);
[[nodiscard]] std::unique_ptr<Backend> make_threads_backend(unsigned depth);
[[nodiscard]] std::unique_ptr<Backend> make_memory_backend(unsigned depth);

// Does the request in the calling thread. Returns the bytes moved (0 for a sync), or -errno.
[[nodiscard]] std::int64_t execute(const Request& request) noexcept;

// The counter through which another thread, or the kernel, interrupts a wait.
class EventFd {
  public:
    explicit EventFd(int flags);  // of eventfd(2); throws std::system_error
    EventFd(const EventFd&) = delete;
    EventFd& operator=(const EventFd&) = delete;
    ~EventFd();

    [[nodiscard]] int number() const noexcept { return number_; }
    void signal() noexcept;
    void clear() noexcept;  // needs EFD_NONBLOCK

  private:
    int number_;
};

}  // namespace deepnvme
