// `threads`: a few workers that call pread, pwrite, fdatasync and fsync. What remains where the
// kernel has, or allows, neither io_uring nor Linux AIO.
#include <sys/eventfd.h>

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "backends.hpp"

namespace deepnvme {
namespace {

constexpr unsigned most_workers = 16;

class ThreadsBackend final : public Backend {
  public:
    explicit ThreadsBackend(unsigned depth) : depth_(depth) {
        pushed_.reserve(depth);
        done_.reserve(depth);
    }

    ~ThreadsBackend() override {
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        work_added_.notify_all();
        for (std::thread& worker : workers_) worker.join();
    }

    [[nodiscard]] std::string_view name() const noexcept override { return "threads"; }
    [[nodiscard]] unsigned capacity() const noexcept override { return depth_; }

    void attach() override {
        const unsigned count = std::min(depth_, most_workers);
        workers_.reserve(count);
        while (workers_.size() < count) workers_.emplace_back([this] { work(); });
    }

    [[nodiscard]] bool serves_any_thread() const noexcept override { return true; }

    [[nodiscard]] bool push(const Request& request) override {
        if (pending_ == depth_) return false;
        pushed_.push_back(request);
        ++pending_;
        return true;
    }

    [[nodiscard]] std::size_t submit_and_reap(std::span<Completion> out, Wait wait) override {
        std::unique_lock lock(mutex_);
        for (const Request& request : pushed_) {
            queue_.push_back(request);
            work_added_.notify_one();
        }
        pushed_.clear();
        if (wait != Wait::none) {
            const auto is_news = [this] { return !done_.empty() || woken_; };
            if (is_brief(wait)) {
                progress_.wait_for(lock, brief, is_news);
            } else {
                progress_.wait(lock, is_news);
            }
            woken_ = false;
        }
        const auto count = static_cast<std::ptrdiff_t>(std::min(out.size(), done_.size()));
        std::copy_n(done_.begin(), count, out.begin());
        done_.erase(done_.begin(), done_.begin() + count);
        pending_ -= static_cast<unsigned>(count);
        return static_cast<std::size_t>(count);
    }

    [[nodiscard]] int completion_descriptor() override {
        const std::lock_guard lock(mutex_);
        if (!completed_) completed_.emplace(EFD_NONBLOCK);
        return completed_->number();
    }

    void wake() noexcept override {
        const std::lock_guard lock(mutex_);
        woken_ = true;
        progress_.notify_one();
    }

  private:
    // A worker's life. What is still queued when the backend goes is dropped: the kernel never saw
    // it.
    void work() {
        std::unique_lock lock(mutex_);
        for (;;) {
            work_added_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
            if (stopping_) return;
            const Request request = queue_.front();
            queue_.pop_front();
            lock.unlock();
            const Completion completion{request.token, execute(request)};
            lock.lock();
            done_.push_back(completion);
            progress_.notify_one();
            if (completed_) completed_->signal();
        }
    }

    const unsigned depth_;
    unsigned pending_ = 0;         // pushed and not reaped
    std::vector<Request> pushed_;  // the driving thread's own
    std::vector<std::thread> workers_;

    std::mutex mutex_;  // guards what follows
    std::condition_variable work_added_;
    std::condition_variable progress_;
    std::deque<Request> queue_;
    std::vector<Completion> done_;      // has room for all, so that a worker never allocates
    std::optional<EventFd> completed_;  // see completion_descriptor()
    bool woken_ = false;
    bool stopping_ = false;
};

}  // namespace

std::unique_ptr<Backend> make_threads_backend(unsigned depth) {
    return std::make_unique<ThreadsBackend>(depth);
}

}  // namespace deepnvme
