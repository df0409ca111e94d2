// `aio`: Linux AIO by its system calls, without libaio. Containers that forbid io_uring usually
// allow it. The kernel signals completions on an eventfd; wake() signals the same one, and waiting
// is a poll() of it.
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstddef>
#include <memory>
#include <system_error>
#include <vector>

#include "backends.hpp"

namespace deepnvme {
namespace {

enum class AioVerb : std::uint16_t { pread = 0, pwrite = 1, fsync = 2, fdsync = 3 };

constexpr std::uint32_t flag_resfd = 1U << 0;  // signal Iocb::resfd when done

// The kernel's struct iocb, as it is on little-endian machines.
static_assert(std::endian::native == std::endian::little);
struct Iocb {
    std::uint64_t data = 0;
    std::uint32_t key = 0;
    std::uint32_t rw_flags = 0;
    AioVerb verb = AioVerb::pread;
    std::int16_t priority = 0;
    std::uint32_t fd = 0;
    std::uint64_t memory = 0;
    std::uint64_t length = 0;
    std::int64_t offset = 0;
    std::uint64_t reserved = 0;
    std::uint32_t flags = 0;
    std::uint32_t resfd = 0;
};
static_assert(sizeof(Iocb) == 64 && offsetof(Iocb, verb) == 16 && offsetof(Iocb, fd) == 20);
static_assert(offsetof(Iocb, memory) == 24 && offsetof(Iocb, offset) == 40 &&
              offsetof(Iocb, flags) == 56);

// The kernel's struct io_event.
struct IoEvent {
    std::uint64_t data;
    std::uint64_t iocb;
    std::int64_t result;
    std::int64_t result2;
};
static_assert(sizeof(IoEvent) == 32);

using Context = unsigned long;

[[nodiscard]] AioVerb aio_verb(Verb verb) noexcept {
    switch (verb) {
        case Verb::read:
            return AioVerb::pread;
        case Verb::write:
            return AioVerb::pwrite;
        case Verb::sync_data:
            return AioVerb::fdsync;
        case Verb::sync_all:
            return AioVerb::fsync;
    }
    return AioVerb::fsync;
}

class AioBackend final : public Backend {
  public:
    explicit AioBackend(unsigned depth) : depth_(depth), signal_(EFD_NONBLOCK) {
        refused_.reserve(depth);
        pushed_.reserve(depth);
        for (unsigned i = 0; i < depth; ++i) pointers_.push_back(pushed_.data() + i);
        if (::syscall(SYS_io_setup, depth, &context_) != 0) throw_errno("aio: io_setup");
    }

    ~AioBackend() override {
        IoEvent event{};
        while (in_kernel_ > 0) {
            const long count = ::syscall(SYS_io_getevents, context_, 1L, 1L, &event, nullptr);
            if (count < 0 && errno != EINTR) break;
            if (count > 0) --in_kernel_;
        }
        ::syscall(SYS_io_destroy, context_);
    }

    [[nodiscard]] std::string_view name() const noexcept override { return "aio"; }
    [[nodiscard]] unsigned capacity() const noexcept override { return depth_; }

    [[nodiscard]] bool push(const Request& request) override {
        if (pushed_.size() + refused_.size() + in_kernel_ == depth_) return false;
        if (request.buffer >= 0) {
            refused_.push_back(
                {request.token, -EFAULT});  // no buffers are registered with Linux AIO
            return true;
        }
        Iocb iocb;
        iocb.data = request.token;
        iocb.verb = aio_verb(request.verb);
        iocb.fd = static_cast<std::uint32_t>(request.fd);
        iocb.flags = flag_resfd;
        iocb.resfd = static_cast<std::uint32_t>(signal_.number());
        if (!is_sync(iocb)) {  // the kernel refuses a sync that carries any of these
            iocb.memory = reinterpret_cast<std::uintptr_t>(request.memory);
            iocb.length = request.length;
            iocb.offset = static_cast<std::int64_t>(request.offset);
        }
        pushed_.push_back(iocb);
        return true;
    }

    [[nodiscard]] std::size_t submit_and_reap(std::span<Completion> out, Wait wait) override {
        for (;;) {
            submit();
            const std::size_t count = reap(out);
            const bool woken = wait != Wait::none && woken_.exchange(false);
            if (count > 0 || woken || wait == Wait::none) return count;
            // What the kernel had no room for is tried again soon, as nothing says when there is
            // room.
            const int patience = is_brief(wait) ? static_cast<int>(brief.count()) : -1;
            const bool signalled = sleep_until_signalled(pushed_.empty() ? patience : 1);
            if (is_brief(wait) && !signalled) return 0;
        }
    }

    [[nodiscard]] bool serves_any_thread() const noexcept override { return true; }

    void wake() noexcept override {
        woken_.store(true);
        signal_.signal();
    }

  private:
    [[noreturn]] static void throw_errno(const char* what) {
        throw std::system_error(errno, std::generic_category(), what);
    }

    [[nodiscard]] static bool is_sync(const Iocb& iocb) noexcept {
        return iocb.verb == AioVerb::fsync || iocb.verb == AioVerb::fdsync;
    }

    // Hands over what was pushed, in order, as far as the kernel has room.
    void submit() override {
        std::size_t first = 0;
        while (first < pushed_.size()) {
            const long count = ::syscall(SYS_io_submit, context_, pushed_.size() - first,
                                         pointers_.data() + first);
            if (count > 0) {
                first += static_cast<std::size_t>(count);
                in_kernel_ += static_cast<unsigned>(count);
                continue;
            }
            const int error = count == 0 ? EAGAIN : errno;
            if (error == EAGAIN) break;
            if (error != EINTR) refuse(pushed_[first++], error);
        }
        pushed_.erase(pushed_.begin(), pushed_.begin() + static_cast<std::ptrdiff_t>(first));
    }

    // io_submit stopped at this one with an error of its own.
    void refuse(const Iocb& iocb, int error) {
        std::int64_t result = -error;
        if (error == EINVAL && is_sync(iocb)) {
            // Before Linux 4.18 there was no sync in AIO. Done here it stops the drive, but it is
            // done.
            const Verb verb = iocb.verb == AioVerb::fsync ? Verb::sync_all : Verb::sync_data;
            result = execute({.verb = verb, .fd = static_cast<int>(iocb.fd)});
        }
        refused_.push_back({iocb.data, result});
    }

    [[nodiscard]] std::size_t reap(std::span<Completion> out) {
        std::size_t filled = std::min(out.size(), refused_.size());
        const auto refused = static_cast<std::ptrdiff_t>(filled);
        std::copy_n(refused_.begin(), refused, out.begin());
        refused_.erase(refused_.begin(), refused_.begin() + refused);

        std::array<IoEvent, 64> events;
        while (filled < out.size() && in_kernel_ > 0) {
            const std::size_t room = std::min(events.size(), out.size() - filled);
            const long count =
                ::syscall(SYS_io_getevents, context_, 0L, room, events.data(), nullptr);
            if (count < 0 && errno == EINTR) continue;
            if (count < 0) throw_errno("aio: io_getevents");
            for (long i = 0; i < count; ++i) {
                const IoEvent& event = events[static_cast<std::size_t>(i)];
                out[filled++] = {event.data, event.result};
            }
            in_kernel_ -= static_cast<unsigned>(count);
            if (static_cast<std::size_t>(count) < room) break;
        }
        return filled;
    }

    // Clears the signal before the caller looks again, so that one in between is not lost.
    // False: the time was up, or a signal handler has run.
    bool sleep_until_signalled(int timeout_ms) {
        pollfd one{signal_.number(), POLLIN, 0};
        const int ready = ::poll(&one, 1, timeout_ms);
        if (ready < 0 && errno != EINTR) throw_errno("aio: poll");
        signal_.clear();
        return ready > 0;
    }

    const unsigned depth_;
    EventFd signal_;
    std::atomic<bool> woken_ = false;
    Context context_ = 0;
    std::vector<Iocb> pushed_;         // never grows beyond depth_, so that it never moves
    std::vector<Iocb*> pointers_;      // to the places of pushed_, as io_submit wants them
    std::vector<Completion> refused_;  // completed without the kernel, not yet reaped
    unsigned in_kernel_ = 0;
};

}  // namespace

std::unique_ptr<Backend> make_aio_backend(unsigned depth) {
    return std::make_unique<AioBackend>(depth);
}

}  // namespace deepnvme
