#include "deepnvme/uring_functions.hpp"

#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <new>
#include <numeric>
#include <string>
#include <system_error>

namespace deepnvme {
namespace {

// --- our own ring -------------------------------------------------------------------------------

[[nodiscard]] std::uint32_t load(std::uint32_t* word) noexcept {
    return std::atomic_ref(*word).load(std::memory_order_acquire);
}

void store(std::uint32_t* word, std::uint32_t value) noexcept {
    std::atomic_ref(*word).store(value, std::memory_order_release);
}

// A mapping of one of the ring's areas, unmapped when it goes.
class Area {
  public:
    Area() = default;
    Area(const Area&) = delete;
    Area& operator=(const Area&) = delete;
    ~Area() {
        if (start_ != nullptr) ::munmap(start_, nbytes_);
    }

    // Returns 0 or an errno.
    [[nodiscard]] int map(int ring_fd, std::uint64_t offset, std::size_t nbytes) noexcept {
        void* start = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                             ring_fd, static_cast<off_t>(offset));
        if (start == MAP_FAILED) return errno;
        start_ = start;
        nbytes_ = nbytes;
        return 0;
    }

    template <typename T>
    [[nodiscard]] T* at(std::size_t offset) const noexcept {
        return reinterpret_cast<T*>(static_cast<std::byte*>(start_) + offset);
    }

  private:
    void* start_ = nullptr;
    std::size_t nbytes_ = 0;
};

// The two queues shared with the kernel. The kernel moves the submission head and the completion
// tail, this class the other two, each word released by its writer and acquired by its reader.
class OwnRing {
  public:
    OwnRing() = default;
    OwnRing(const OwnRing&) = delete;
    OwnRing& operator=(const OwnRing&) = delete;
    ~OwnRing() {
        if (fd_ >= 0) ::close(fd_);
    }

    [[nodiscard]] int open(unsigned entries, uring::Params& params) noexcept {
        fd_ = static_cast<int>(::syscall(uring::syscall_setup, entries, &params));
        if (fd_ < 0) return -errno;
        if ((params.features & uring::feature_single_mmap) == 0) return -ENOSYS;
        const std::size_t submission_nbytes =
            params.sq_off.array + params.sq_entries * sizeof(std::uint32_t);
        const std::size_t completion_nbytes =
            params.cq_off.cqes + params.cq_entries * sizeof(uring::Cqe);
        int error = rings_.map(fd_, uring::mmap_offset_sq_ring,
                               std::max(submission_nbytes, completion_nbytes));
        if (error == 0) {
            error = sqes_.map(fd_, uring::mmap_offset_sqes, params.sq_entries * sizeof(uring::Sqe));
        }
        if (error != 0) return -error;

        sq_head_ = rings_.at<std::uint32_t>(params.sq_off.head);
        sq_tail_ = rings_.at<std::uint32_t>(params.sq_off.tail);
        sq_flags_ = rings_.at<std::uint32_t>(params.sq_off.flags);
        sq_entries_ = params.sq_entries;
        cq_head_ = rings_.at<std::uint32_t>(params.cq_off.head);
        cq_tail_ = rings_.at<std::uint32_t>(params.cq_off.tail);
        cq_mask_ = params.cq_entries - 1;
        cqes_ = rings_.at<uring::Cqe>(params.cq_off.cqes);
        // Slot i of the queue always is entry i of the array, so it is written once.
        auto* array = rings_.at<std::uint32_t>(params.sq_off.array);
        std::iota(array, array + sq_entries_, 0U);
        return 0;
    }

    [[nodiscard]] uring::Sqe* next_sqe() noexcept {
        if (filled_ - load(sq_head_) == sq_entries_) return nullptr;
        return sqes_.at<uring::Sqe>((filled_++ & (sq_entries_ - 1)) * sizeof(uring::Sqe));
    }

    // Without `patience` for as long as it takes.
    [[nodiscard]] int submit_and_wait(unsigned wait_nr, uring::Timespec* patience) noexcept {
        store(sq_tail_, filled_);
        const bool reaches_completions = wait_nr > 0 || has_deferred();
        if (unsubmitted() == 0 && !reaches_completions) return 0;
        if (patience == nullptr) {
            return enter(unsubmitted(), wait_nr, reaches_completions ? uring::enter_getevents : 0);
        }
        const uring::GeteventsArg argument{
            .sigmask = 0,
            .sigmask_size = 0,
            .min_wait_us = 0,
            .timespec = reinterpret_cast<std::uintptr_t>(patience),
        };
        return enter(unsubmitted(), wait_nr, uring::enter_getevents | uring::enter_ext_arg,
                     &argument, sizeof(argument));
    }

    // What next_sqe() gave and the kernel has not taken.
    [[nodiscard]] unsigned unsubmitted() const noexcept { return filled_ - load(sq_head_); }

    [[nodiscard]] int wait_cqe(uring::Cqe** cqe) noexcept {
        while (peek(cqe, 1) == 0) {
            const int result = enter(0, 1, uring::enter_getevents);
            if (result < 0) return result;
        }
        return 0;
    }

    [[nodiscard]] unsigned peek(uring::Cqe** cqes, unsigned count) noexcept {
        std::uint32_t ready = load(cq_tail_) - *cq_head_;
        if (ready == 0 && has_deferred()) {
            // A refusal changes nothing: nothing is ready then.
            [[maybe_unused]] const int result = enter(0, 0, uring::enter_getevents);
            ready = load(cq_tail_) - *cq_head_;
        }
        const unsigned taken = std::min(ready, count);
        for (unsigned i = 0; i < taken; ++i) cqes[i] = &cqes_[(*cq_head_ + i) & cq_mask_];
        return taken;
    }

    void advance(unsigned count) noexcept { store(cq_head_, *cq_head_ + count); }

    [[nodiscard]] int call_register(std::uint32_t opcode, const void* argument,
                                    unsigned count) noexcept {
        const long result = ::syscall(uring::syscall_register, fd_, opcode, argument, count);
        return result < 0 ? -errno : static_cast<int>(result);
    }

  private:
    // Whether the kernel holds completions that it posts only when it is entered.
    [[nodiscard]] bool has_deferred() const noexcept {
        return (load(sq_flags_) & (uring::sq_cq_overflow | uring::sq_taskrun)) != 0;
    }

    [[nodiscard]] int enter(unsigned to_submit, unsigned min_complete, std::uint32_t flags,
                            const void* argument = nullptr,
                            std::size_t argument_size = 0) const noexcept {
        const long result = ::syscall(uring::syscall_enter, fd_, to_submit, min_complete, flags,
                                      argument, argument_size);
        return result < 0 ? -errno : static_cast<int>(result);
    }

    int fd_ = -1;
    Area rings_;
    Area sqes_;
    std::uint32_t* sq_head_ = nullptr;
    std::uint32_t* sq_tail_ = nullptr;
    std::uint32_t* sq_flags_ = nullptr;
    std::uint32_t sq_entries_ = 0;
    std::uint32_t filled_ = 0;  // the tail that the next submit makes known
    std::uint32_t* cq_head_ = nullptr;
    std::uint32_t* cq_tail_ = nullptr;
    std::uint32_t cq_mask_ = 0;
    uring::Cqe* cqes_ = nullptr;
};
static_assert(sizeof(OwnRing) <= sizeof(RingBlock) && alignof(OwnRing) <= alignof(RingBlock));

[[nodiscard]] OwnRing& own(RingBlock* block) noexcept {
    return *std::launder(reinterpret_cast<OwnRing*>(block->bytes.data()));
}

[[nodiscard]] const OwnRing& own(const RingBlock* block) noexcept {
    return *std::launder(reinterpret_cast<const OwnRing*>(block->bytes.data()));
}

[[nodiscard]] int own_init(unsigned entries, RingBlock* block, uring::Params* params) {
    auto* ring = new (block->bytes.data()) OwnRing;
    const int result = ring->open(entries, *params);
    if (result < 0) ring->~OwnRing();
    return result;
}

// --- python-liburing's library ------------------------------------------------------------------

struct LiburingPath {
    std::mutex mutex;
    std::string value;
};

[[nodiscard]] LiburingPath& liburing_path() {
    static LiburingPath path;
    return path;
}

[[noreturn]] void throw_unusable(const std::string& why) {
    throw std::system_error(ENOENT, std::generic_category(), "liburing: " + why);
}

}  // namespace

UringFunctions own_ring_functions() {
    return {
        .name = "uring",
        .queue_init_params = own_init,
        .queue_exit = [](RingBlock* ring) { own(ring).~OwnRing(); },
        .get_sqe = [](RingBlock* ring) { return own(ring).next_sqe(); },
        .submit_and_wait =
            [](RingBlock* ring, unsigned wait_nr) {
                return own(ring).submit_and_wait(wait_nr, nullptr);
            },
        .submit_and_wait_timeout =
            [](RingBlock* ring, uring::Cqe** /*cqe*/, unsigned wait_nr, uring::Timespec* patience,
               sigset_t* /*mask*/) { return own(ring).submit_and_wait(wait_nr, patience); },
        .sq_ready = [](const RingBlock* ring) { return own(ring).unsubmitted(); },
        .wait_cqe = [](RingBlock* ring, uring::Cqe** cqe) { return own(ring).wait_cqe(cqe); },
        .peek_batch_cqe = [](RingBlock* ring, uring::Cqe** cqes,
                             unsigned count) { return own(ring).peek(cqes, count); },
        .cq_advance = [](RingBlock* ring, unsigned count) { own(ring).advance(count); },
        .register_buffers =
            [](RingBlock* ring, const iovec* buffers, unsigned count) {
                return own(ring).call_register(uring::register_buffers, buffers, count);
            },
        .unregister_buffers =
            [](RingBlock* ring) {
                return own(ring).call_register(uring::unregister_buffers, nullptr, 0);
            },
        .register_eventfd =
            [](RingBlock* ring, int descriptor) {
                return own(ring).call_register(uring::register_eventfd, &descriptor, 1);
            },
    };
}

void set_liburing_path(const std::string& path) {
    LiburingPath& known = liburing_path();
    const std::lock_guard lock(known.mutex);
    known.value = path;
}

UringFunctions liburing_functions() {
    std::string path;
    {
        LiburingPath& known = liburing_path();
        const std::lock_guard lock(known.mutex);
        path = known.value;
    }
    if (path.empty()) throw_unusable("python-liburing is not imported in this process");
    // NOLOAD: its library needs symbols of the interpreter, and only an import brings it in
    // properly.
    const std::shared_ptr<void> library(::dlopen(path.c_str(), RTLD_NOLOAD | RTLD_NOW),
                                        [](void* handle) {
                                            if (handle != nullptr) ::dlclose(handle);
                                        });
    if (library == nullptr) throw_unusable(path + " is not loaded in this process");

    UringFunctions functions{.name = "liburing", .library = library};
    const auto bind = [&](const char* name, auto& function) {
        void* symbol = ::dlsym(library.get(), name);
        if (symbol == nullptr) throw_unusable(path + " has no function " + name);
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
    };
    bind("io_uring_queue_init_params", functions.queue_init_params);
    bind("io_uring_queue_exit", functions.queue_exit);
    bind("io_uring_get_sqe", functions.get_sqe);
    bind("io_uring_submit_and_wait", functions.submit_and_wait);
    bind("io_uring_submit_and_wait_timeout", functions.submit_and_wait_timeout);
    bind("io_uring_sq_ready", functions.sq_ready);
    bind("io_uring_wait_cqe", functions.wait_cqe);
    bind("io_uring_peek_batch_cqe", functions.peek_batch_cqe);
    bind("io_uring_cq_advance", functions.cq_advance);
    bind("io_uring_register_buffers", functions.register_buffers);
    bind("io_uring_unregister_buffers", functions.unregister_buffers);
    bind("io_uring_register_eventfd", functions.register_eventfd);
    return functions;
}

}  // namespace deepnvme
