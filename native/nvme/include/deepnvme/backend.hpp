// One way of asking the kernel for I/O. A Backend is driven by one thread at a time: push,
// submit_and_reap. Only wake() may be called from elsewhere. It never retries, never interprets a
// result, never prints. Every backend passes native/tests/test_backends.cpp; `fault` wraps any
// other.
#pragma once

#include <sys/uio.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace deepnvme {

enum class Verb : std::uint8_t { read, write, sync_data, sync_all };

[[nodiscard]] constexpr std::string_view name_of(Verb verb) noexcept {
    switch (verb) {
        case Verb::read:
            return "read";
        case Verb::write:
            return "write";
        case Verb::sync_data:
            return "sync_data";
        case Verb::sync_all:
            return "sync_all";
    }
    return "unknown";
}

// One request to the kernel, at most one chunk. Descriptor and memory stay valid until its
// Completion is reaped.
struct Request {
    Verb verb = Verb::read;
    int fd = -1;
    std::uint64_t offset = 0;
    std::byte* memory = nullptr;  // unused by syncs
    std::uint32_t length = 0;     // unused by syncs
    // Index of the registered buffer that holds [memory, memory + length), or -1.
    std::int32_t buffer = -1;
    std::uint64_t token = 0;  // comes back in the Completion; any value but Backend::reserved_token
};

// result: bytes moved (0 for a sync), or -errno.
struct Completion {
    std::uint64_t token = 0;
    std::int64_t result = 0;
};

enum class Wait : std::uint8_t {
    none,  // take what has completed, do not block
    // Block until there is a completion, or wake() was called since the last return.
    some,
    // As some, but return nothing once a signal handler has run in this thread, or after `brief`.
    // For a thread of the program, which has to handle its signals.
    briefly,
    // As briefly, but a backend may sleep through one completion, and through a wake() until the
    // next completion. For a caller that has nothing to submit and enough in flight: each wake-up
    // costs.
    several_briefly,
};

[[nodiscard]] constexpr bool is_brief(Wait wait) noexcept {
    return wait == Wait::briefly || wait == Wait::several_briefly;
}

inline constexpr std::chrono::milliseconds brief{100};

class Backend {
  public:
    static constexpr std::uint64_t reserved_token = ~std::uint64_t{0};

    Backend() = default;
    Backend(const Backend&) = delete;
    Backend& operator=(const Backend&) = delete;
    // Returns only when the kernel touches no request's memory any more: it waits for what is in
    // flight, without reaping it, and drops what was pushed and never submitted. Runs in the thread
    // that attached.
    virtual ~Backend() = default;

    [[nodiscard]] virtual std::string_view name() const noexcept = 0;

    // Called once by the thread that will drive it, before anything else but wake(). Throws
    // std::system_error.
    virtual void attach() {}

    // Whether different threads may drive it, one at a time, each for the length of a call.
    [[nodiscard]] virtual bool serves_any_thread() const noexcept { return false; }

    // How many requests can be pushed and not yet reaped.
    [[nodiscard]] virtual unsigned capacity() const noexcept = 0;

    // Queues one request; false when capacity() are pending already, and then nothing has happened.
    [[nodiscard]] virtual bool push(const Request& request) = 0;

    // Hands what was pushed to the kernel now, as far as the kernel has room. Does nothing in a
    // backend that submits in submit_and_reap alone. Throws as submit_and_reap does.
    virtual void submit() {}

    // Hands everything pushed to the kernel, then fills `out` (which has room for at least one)
    // with what has completed and returns how many; the rest stays for the next call. A request
    // that the kernel refuses is completed with its -errno: nothing pushed is ever lost. EINTR,
    // EAGAIN and EBUSY of the submitting call itself are handled here. A wake() is used up by the
    // waiting call that returns after it, never by Wait::none. Throws std::system_error only when
    // the backend as a whole is broken; what was in flight then is still drained by the destructor.
    [[nodiscard]] virtual std::size_t submit_and_reap(std::span<Completion> out, Wait wait) = 0;

    // A descriptor that is readable when something has completed since it was last read, counted
    // from the first call here; -1 where there is none. Any thread may call, one at a time.
    [[nodiscard]] virtual int completion_descriptor() { return -1; }

    // Makes a blocked or the next submit_and_reap(..., Wait::some) return. Any thread, at any time
    // after construction.
    virtual void wake() noexcept = 0;

    // Registers buffers, replacing those registered before; only while nothing is in flight.
    // Returns 0 or an errno (ENOMEM: the memlock limit; EFAULT: more than 1 GiB in one); after a
    // failure none are registered and requests must carry buffer == -1. A request with an index
    // that is not registered completes with -EFAULT.
    [[nodiscard]] virtual int register_buffers(std::span<const iovec> buffers) noexcept {
        return buffers.empty() ? 0 : EOPNOTSUPP;
    }
};

// Makes the backend of that name with room for `depth` requests. Throws BackendError with the errno
// of the failed probe (ENOSYS, EPERM, ENOENT when python-liburing's library is not loaded, ...),
// std::system_error where there is no descriptor for it, std::invalid_argument for an unknown name.
[[nodiscard]] std::unique_ptr<Backend> make_backend(std::string_view name, unsigned depth);

// Where the library of the `liburing` backend is. Importing python-liburing has loaded it. ""
// forgets the path.
void set_liburing_path(const std::string& path);

// One rule of a fault plan: which requests it applies to, and what happens to them. `nth` and
// `every` count the pushed requests that match `verbs`.
struct FaultRule {
    enum class Kind : std::uint8_t {
        fail,  // completes with -error; nothing is done
        // At most `length` bytes are asked of the wrapped backend. 0: half of the request, in
        // multiples of 512 where that leaves any. A sync stays as it is.
        shorten,
        delay,  // completes `delay_us` later than in the wrapped backend
        // Held back until `hold` later completions have overtaken it, or nothing else is in flight.
        reorder,
        throttle,  // completions are spread so that no more than `bytes_per_s` pass
    };
    Kind kind = Kind::fail;
    std::vector<Verb> verbs = {};  // empty: all
    // The rule applies to a request that any of these three chooses.
    std::uint64_t nth = 0;       // the nth request, counted from 1; 0: none
    std::uint64_t every = 0;     // each every-th request; 0: none
    double probability = 0.0;    // drawn for each request from the plan's seed
    int error = EIO;             // for fail
    std::uint32_t length = 0;    // for shorten
    std::uint32_t delay_us = 0;  // for delay
    std::uint32_t hold = 0;      // for reorder
    double bytes_per_s = 0.0;    // for throttle
};

struct FaultPlan {
    std::uint64_t seed = 0;
    std::vector<FaultRule> rules;
};

// Wraps another backend and does to its requests what the plan says, the same for the same seed and
// requests. Several rules may strike one request. Throws std::invalid_argument for a rule that
// means nothing.
[[nodiscard]] std::unique_ptr<Backend> make_fault_backend(std::unique_ptr<Backend> inner,
                                                          FaultPlan plan);

}  // namespace deepnvme
