#include "deepnvme/doorbell.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <system_error>

namespace deepnvme {

Doorbell::Doorbell()
    : poll_(::epoll_create1(EPOLL_CLOEXEC)), signal_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    const int error = errno;
    try {
        if (poll_ < 0 || signal_ < 0)
            throw std::system_error(error, std::generic_category(),
                                    "no descriptor to wake an event loop: close some, or allow "
                                    "more (ulimit -n)");
        watch(signal_);
    } catch (...) {
        if (poll_ >= 0) ::close(poll_);
        if (signal_ >= 0) ::close(signal_);
        throw;
    }
}

Doorbell::~Doorbell() {
    ::close(poll_);
    ::close(signal_);
}

void Doorbell::ring() noexcept {
    if (rung_.exchange(true)) return;
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(signal_, &one, sizeof(one));
}

void Doorbell::watch(int descriptor) {
    epoll_event event = {};
    event.events = EPOLLIN | EPOLLET;  // each signal is an event, whether the last was read or not
    event.data.fd = descriptor;
    if (::epoll_ctl(poll_, EPOLL_CTL_ADD, descriptor, &event) != 0 && errno != EEXIST) {
        throw std::system_error(errno, std::generic_category(), "epoll_ctl");
    }
}

void Doorbell::answer() noexcept {
    rung_ = true;
    std::array<epoll_event, 16> events;
    // Nothing is read from the descriptors: taking the event of an edge is enough, and their
    // counters are full only after 2^64 signals.
    [[maybe_unused]] const int count = ::epoll_wait(poll_, events.data(), events.size(), 0);
}

}  // namespace deepnvme
