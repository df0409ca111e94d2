#include "deepnvme/backend.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>

#include "backends.hpp"
#include "deepnvme/error.hpp"
#include "deepnvme/uring_functions.hpp"

namespace deepnvme {
namespace {

[[nodiscard]] std::int64_t carry_out(const Request& request) noexcept {
    switch (request.verb) {
        case Verb::read:
            return ::pread(request.fd, request.memory, request.length,
                           static_cast<off_t>(request.offset));
        case Verb::write:
            return ::pwrite(request.fd, request.memory, request.length,
                            static_cast<off_t>(request.offset));
        case Verb::sync_data:
            return ::fdatasync(request.fd);
        case Verb::sync_all:
            return ::fsync(request.fd);
    }
    errno = EINVAL;
    return -1;
}

[[nodiscard]] std::unique_ptr<Backend> make_known(std::string_view name, unsigned depth) {
    if (name == "liburing") return make_ring_backend(liburing_functions(), depth);
    if (name == "uring") return make_ring_backend(own_ring_functions(), depth);
    if (name == "aio") return make_aio_backend(depth);
    if (name == "threads") return make_threads_backend(depth);
    if (name == "memory") return make_memory_backend(depth);
    throw std::invalid_argument("no backend is called \"" + std::string(name) +
                                "\"; there are liburing, uring, aio, threads and memory");
}

}  // namespace

std::int64_t execute(const Request& request) noexcept {
    // What a ring answers to an index under which nothing is registered.
    if (request.buffer >= 0) return -EFAULT;
    const std::int64_t result = carry_out(request);
    return result < 0 ? -errno : result;
}

EventFd::EventFd(int flags) : number_(::eventfd(0, flags | EFD_CLOEXEC)) {
    if (number_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

EventFd::~EventFd() {
    ::close(number_);
}

void EventFd::signal() noexcept {
    const std::uint64_t one = 1;
    // Refused only when the counter is full, and then the reader has been signalled already.
    [[maybe_unused]] const ssize_t written = ::write(number_, &one, sizeof(one));
}

void EventFd::clear() noexcept {
    std::uint64_t count = 0;
    [[maybe_unused]] const ssize_t read = ::read(number_, &count, sizeof(count));
}

std::unique_ptr<Backend> make_backend(std::string_view name, unsigned depth) {
    if (depth == 0)
        throw std::invalid_argument("a backend needs room for at least 1 request, got depth 0");
    try {
        return make_known(name, depth);
    } catch (const std::system_error& refusal) {
        const int error = refusal.code().value();
        if (error != EMFILE && error != ENFILE) throw BackendError(refusal);
        throw std::system_error(refusal.code(), std::string(name) +
                                                    ": no descriptor for a drive: close some, or "
                                                    "allow more (ulimit -n)");
    }
}

}  // namespace deepnvme
