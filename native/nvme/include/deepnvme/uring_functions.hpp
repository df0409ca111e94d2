// The functions of a ring that a RingBackend calls, as a table. One table is bound from liburing's
// library, so its signatures are liburing's and no header is needed; the other is our own system
// calls. A ring is an opaque block that only its table understands. Called by make_backend, and by
// tests that put refusals of the kernel in between.
#pragma once

#include <signal.h>
#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <memory>
#include <string_view>

#include "deepnvme/backend.hpp"
#include "deepnvme/uring_abi.hpp"

namespace deepnvme {

// liburing's ring has 216 bytes, ours fewer.
struct alignas(std::max_align_t) RingBlock {
    std::array<std::byte, 4096> bytes{};
};

// Every int is a count, 0, or a negated errno.
struct UringFunctions {
    std::string_view name;  // of the backend: "uring" or "liburing"

    // Makes the ring; `params` goes in with flags and comes back with features.
    int (*queue_init_params)(unsigned entries, RingBlock* ring, uring::Params* params) = nullptr;
    void (*queue_exit)(RingBlock* ring) = nullptr;
    // The next free submission, which the caller fills before the next submit; nullptr: none free.
    uring::Sqe* (*get_sqe)(RingBlock* ring) = nullptr;
    // Submits, returns how many the kernel took, waits until `wait_nr` completions are there.
    int (*submit_and_wait)(RingBlock* ring, unsigned wait_nr) = nullptr;
    // The same for at most `patience`, or until a signal handler has run: -ETIME, -EINTR then, or
    // how many the kernel took. `cqe` is the first completion, if there is one.
    int (*submit_and_wait_timeout)(RingBlock* ring, uring::Cqe** cqe, unsigned wait_nr,
                                   uring::Timespec* patience, sigset_t* mask) = nullptr;
    // How many submissions the kernel has not taken. The count above does not say: liburing's is 0
    // where a completion was there already.
    unsigned (*sq_ready)(const RingBlock* ring) = nullptr;
    // Waits for one completion without submitting anything.
    int (*wait_cqe)(RingBlock* ring, uring::Cqe** cqe) = nullptr;
    // Sets pointers to completions, without taking them, and returns how many. Lets the kernel post
    // those that it deferred.
    unsigned (*peek_batch_cqe)(RingBlock* ring, uring::Cqe** cqes, unsigned count) = nullptr;
    void (*cq_advance)(RingBlock* ring, unsigned count) = nullptr;
    int (*register_buffers)(RingBlock* ring, const iovec* buffers, unsigned count) = nullptr;
    int (*unregister_buffers)(RingBlock* ring) = nullptr;
    int (*register_eventfd)(RingBlock* ring, int descriptor) = nullptr;

    std::shared_ptr<void> library = nullptr;  // keeps the code loaded
};

// Our own ring, on system calls 425 to 427.
[[nodiscard]] UringFunctions own_ring_functions();

// python-liburing's, from the path given to set_liburing_path. Throws std::system_error with ENOENT
// where the library is not loaded or lacks a function, naming which.
[[nodiscard]] UringFunctions liburing_functions();

[[nodiscard]] std::unique_ptr<Backend> make_ring_backend(UringFunctions functions, unsigned depth);

}  // namespace deepnvme
