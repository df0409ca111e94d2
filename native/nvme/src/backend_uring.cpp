// `uring` and `liburing`: one class over two tables of functions. A wake-up is a read of an eventfd
// that stands in the ring, so that a blocked enter needs no polling; its completion carries
// reserved_token and stays in here.
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "backends.hpp"
#include "deepnvme/uring_functions.hpp"

namespace deepnvme {
namespace {

// The next is tried when a kernel does not know (EINVAL) a flag. None that ties the ring to one
// thread, as setup_single_issuer and setup_defer_taskrun do: a thread that waits for an operation
// drives the ring. Nor COOP_TASKRUN: what a thread submitted would be completed only at that
// thread's next call of the kernel, which may be long in coming.
constexpr std::array<std::uint32_t, 2> setup_ladder = {uring::setup_submit_all, 0};

// Waiting for several completions at once saves wake-ups. The requests beside them have to keep the
// drive at work meanwhile.
constexpr unsigned several = 2;
constexpr unsigned least_beside_several = 3;
constexpr unsigned share_of_many = 8;

// Linux 5.13: from then on buffers can be registered while the wake-up's read is in flight.
constexpr std::uint32_t required_feature = uring::feature_rsrc_tags;

class RingBackend final : public Backend {
  public:
    RingBackend(UringFunctions functions, unsigned depth)
        : functions_(std::move(functions)), depth_(depth), wake_signal_(0) {
        int result = -EINVAL;
        uring::Params params{};
        for (const std::uint32_t flags : setup_ladder) {
            params = {};
            params.flags = flags;
            result =
                functions_.queue_init_params(depth + 1, &ring_, &params);  // one for the wake-up
            if (result != -EINVAL) break;
        }
        if (result < 0) throw_error(-result, "io_uring_setup");
        if ((params.features & required_feature) == 0) {
            functions_.queue_exit(&ring_);
            throw_error(ENOSYS, "the kernel is older than Linux 5.13");
        }
    }

    ~RingBackend() override {
        drain();
        functions_.queue_exit(&ring_);
    }

    [[nodiscard]] std::string_view name() const noexcept override { return functions_.name; }
    [[nodiscard]] unsigned capacity() const noexcept override { return depth_; }

    [[nodiscard]] bool serves_any_thread() const noexcept override { return true; }

    [[nodiscard]] bool push(const Request& request) override {
        if (pending_ == depth_) return false;
        add(submission_of(request));
        ++pending_;
        return true;
    }

    void submit() override { (void)enter(0, false); }

    [[nodiscard]] std::size_t submit_and_reap(std::span<Completion> out, Wait wait) override {
        std::chrono::milliseconds without_room{0};
        for (;;) {
            if (!wake_armed_ && wait != Wait::none) arm_wake();
            const bool waits = wait != Wait::none && !woken_;
            const bool has_room = enter(waits ? least_of(wait) : 0, is_brief(wait));
            const std::size_t count = reap(out);
            const bool is_over = is_brief(wait) && (has_room || without_room >= brief);
            if (count > 0 || woken_ || !waits || is_over) {
                if (wait != Wait::none) woken_ = false;
                return count;
            }
            if (has_room) continue;
            // Nothing says when the kernel has room again.
            constexpr std::chrono::milliseconds pause{1};
            std::this_thread::sleep_for(pause);
            without_room += pause;
        }
    }

    void wake() noexcept override { wake_signal_.signal(); }

    [[nodiscard]] int completion_descriptor() override {
        if (!completed_) {
            completed_.emplace(EFD_NONBLOCK);
            if (functions_.register_eventfd(&ring_, completed_->number()) < 0) {
                completed_.reset();
                return -1;
            }
        }
        return completed_->number();
    }

    [[nodiscard]] int register_buffers(std::span<const iovec> buffers) noexcept override {
        if (has_buffers_) {
            const int result = functions_.unregister_buffers(&ring_);
            if (result < 0) return -result;
            has_buffers_ = false;
        }
        if (buffers.empty()) return 0;
        const int result = functions_.register_buffers(&ring_, buffers.data(),
                                                       static_cast<unsigned>(buffers.size()));
        if (result < 0) return -result;
        has_buffers_ = true;
        return 0;
    }

  private:
    [[noreturn]] void throw_error(int error, const std::string& what) const {
        throw std::system_error(error, std::generic_category(),
                                std::string(functions_.name) + ": " + what);
    }

    [[nodiscard]] static uring::Sqe submission_of(const Request& request) noexcept {
        uring::Sqe sqe{};
        sqe.fd = request.fd;
        sqe.user_data = request.token;
        if (request.verb == Verb::sync_data || request.verb == Verb::sync_all) {
            sqe.opcode = uring::Op::fsync;
            sqe.op_flags = request.verb == Verb::sync_data ? uring::fsync_datasync : 0;
            return sqe;
        }
        const bool reads = request.verb == Verb::read;
        sqe.offset = request.offset;
        sqe.addr = reinterpret_cast<std::uintptr_t>(request.memory);
        sqe.len = request.length;
        if (request.buffer >= 0) {
            sqe.opcode = reads ? uring::Op::read_fixed : uring::Op::write_fixed;
            sqe.buf_index = static_cast<std::uint16_t>(std::min(request.buffer, 0xFFFF));
        } else {
            sqe.opcode = reads ? uring::Op::read : uring::Op::write;
        }
        return sqe;
    }

    void arm_wake() {
        uring::Sqe sqe{};
        sqe.opcode = uring::Op::read;
        sqe.fd = wake_signal_.number();
        sqe.offset = ~std::uint64_t{0};  // an eventfd has no positions
        sqe.addr = reinterpret_cast<std::uintptr_t>(&wake_count_);
        sqe.len = sizeof(wake_count_);
        sqe.user_data = reserved_token;
        add(sqe);
        wake_armed_ = true;
    }

    void add(const uring::Sqe& sqe) {
        uring::Sqe* slot = functions_.get_sqe(&ring_);
        if (slot == nullptr) throw_error(EBUSY, "the submission queue is full");
        *slot = sqe;
        ++unsubmitted_;
    }

    // How many completions to wait for.
    [[nodiscard]] unsigned least_of(Wait wait) const noexcept {
        const bool one = wait == Wait::some || wait == Wait::briefly ||
                         pending_ < several + least_beside_several;
        return one ? 1 : std::max(several, pending_ / share_of_many);
    }

    // Submits what was added and waits for so many completions, or until `brief` is over.
    // False when the kernel had no room for all: completions have to be taken before it is tried
    // again.
    [[nodiscard]] bool enter(unsigned least, bool briefly) {
        while (least > 0 || unsubmitted_ > 0) {
            const int result =
                briefly ? wait_briefly(least) : functions_.submit_and_wait(&ring_, least);
            const unsigned submitted = unsubmitted_ - functions_.sq_ready(&ring_);
            unsubmitted_ -= submitted;
            in_kernel_ += submitted;
            const bool time_is_up = result == -EINTR || result == -ETIME;
            if (time_is_up && !(briefly && unsubmitted_ == 0)) continue;
            if (result == -EAGAIN || result == -EBUSY) return false;
            if (result < 0 && !time_is_up) throw_error(-result, "io_uring_enter");
            if (unsubmitted_ == 0) return true;
            // The kernel stopped at one that it refused, without waiting: go on behind it.
            if (submitted == 0) return false;
        }
        return true;
    }

    [[nodiscard]] int wait_briefly(unsigned least) {
        uring::Timespec patience{0, std::chrono::nanoseconds(brief).count()};
        uring::Cqe* first = nullptr;
        return functions_.submit_and_wait_timeout(&ring_, &first, least, &patience, nullptr);
    }

    [[nodiscard]] std::size_t reap(std::span<Completion> out) {
        std::size_t filled = 0;
        std::array<uring::Cqe*, 64> cqes;
        while (filled < out.size()) {
            const auto room = static_cast<unsigned>(std::min(cqes.size(), out.size() - filled));
            const unsigned count = functions_.peek_batch_cqe(&ring_, cqes.data(), room);
            int wake_error = 0;
            for (unsigned i = 0; i < count; ++i) {
                if (cqes[i]->user_data == reserved_token) {
                    wake_armed_ = false;
                    woken_ = true;
                    wake_error = std::min(cqes[i]->res, 0);
                } else {
                    out[filled++] = {cqes[i]->user_data, cqes[i]->res};
                    --pending_;
                }
            }
            functions_.cq_advance(&ring_, count);
            in_kernel_ -= count;
            // Arming it again and again would turn waiting into a busy loop. ECANCELED: the thread
            // that armed it has ended.
            if (wake_error < 0 && wake_error != -EINTR && wake_error != -EAGAIN &&
                wake_error != -ECANCELED) {
                throw_error(-wake_error, "reading the wake-up eventfd");
            }
            if (count < room) break;
        }
        return filled;
    }

    // Waits for all that the kernel has: closing a ring does not stop what is in flight, and a DMA
    // into freed memory is the worst that can happen. Submits nothing.
    void drain() noexcept {
        if (in_kernel_ > 0) wake();
        while (in_kernel_ > 0) {
            uring::Cqe* cqe = nullptr;
            const int result = functions_.wait_cqe(&ring_, &cqe);
            if (result == -EINTR || result == -EAGAIN || result == -EBUSY) continue;
            if (result < 0) return;
            functions_.cq_advance(&ring_, 1);
            --in_kernel_;
        }
    }

    UringFunctions functions_;
    RingBlock ring_;
    const unsigned depth_;
    bool has_buffers_ = false;
    unsigned pending_ = 0;      // the caller's, pushed and not reaped
    unsigned unsubmitted_ = 0;  // in the submission queue, the wake-up included
    unsigned in_kernel_ = 0;    // submitted and not reaped, the wake-up included

    std::optional<EventFd> completed_;  // see completion_descriptor()
    EventFd wake_signal_;
    std::uint64_t wake_count_ = 0;  // where the kernel reads it to
    bool wake_armed_ = false;
    bool woken_ = false;  // seen in the ring, not yet told to the caller
};

}  // namespace

std::unique_ptr<Backend> make_ring_backend(UringFunctions functions, unsigned depth) {
    return std::make_unique<RingBackend>(std::move(functions), depth);
}

}  // namespace deepnvme
