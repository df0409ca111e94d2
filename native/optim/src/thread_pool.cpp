#include "infinity_optim/thread_pool.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <system_error>

#include "float_environment.hpp"

namespace infinity_optim {
namespace {

// Signals are for the threads of the program, which know what to do with them.
class AllSignalsBlocked {
  public:
    AllSignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~AllSignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    AllSignalsBlocked(const AllSignalsBlocked&) = delete;
    AllSignalsBlocked& operator=(const AllSignalsBlocked&) = delete;

  private:
    sigset_t before_;
};

[[nodiscard]] int pin(int core) {
    if (core < 0) return 0;
    if (core >= CPU_SETSIZE) return EINVAL;
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    return pthread_setaffinity_np(pthread_self(), sizeof cores, &cores);
}

}  // namespace

struct ThreadPool::Task {
    const std::function<void(std::uint64_t)>& work;
    const std::uint64_t count;
    std::atomic<std::uint64_t> next = 0;
};

ThreadPool::ThreadPool(std::span<const int> cores) : owner_(getpid()) {
    if (cores.empty())
        throw std::invalid_argument("a thread pool needs at least one core; got none");
    const AllSignalsBlocked inherited;
    try {
        for (const int core : cores) {
            threads_.emplace_back([this, core, place = threads_.size()] { serve(core, place); });
        }
    } catch (...) {
        close();
        throw;
    }
    std::unique_lock lock(meeting_->mutex);
    meeting_->ended.wait(lock, [this] { return meeting_->started == threads_.size(); });
    if (meeting_->refused == 0) return;
    const int core = cores[meeting_->refused - 1];
    lock.unlock();
    close();
    throw std::system_error(
        meeting_->refusal, std::generic_category(),
        "core " + std::to_string(core) +
            " cannot be used: it does not exist, or this process may not run on it");
}

ThreadPool::~ThreadPool() {
    if (getpid() == owner_) {
        close();
    } else {
        for (std::thread& thread : threads_)
            thread.detach();  // a forked child has the objects, not the threads
        // Never freed here: glibc does not destroy a condition variable before its waiters have
        // left, and those that the parent's threads wait on would be waited for here for ever.
        (void)meeting_.release();
    }
}

void ThreadPool::close() {
    {
        const std::lock_guard lock(meeting_->mutex);
        meeting_->closing = true;
    }
    meeting_->begun.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
}

void ThreadPool::run(std::uint64_t count, const std::function<void(std::uint64_t)>& work) {
    if (getpid() != owner_) {
        throw std::logic_error(
            "this thread pool was made before a fork and has no threads here; make one in the "
            "child");
    }
    if (count == 0) return;
    const std::lock_guard one_caller(meeting_->callers);
    Task task{work, count};
    std::unique_lock lock(meeting_->mutex);
    meeting_->task = &task;
    ++meeting_->number;
    meeting_->busy = threads_.size();
    meeting_->begun.notify_all();
    meeting_->ended.wait(lock, [this] { return meeting_->busy == 0; });
    meeting_->task = nullptr;
}

void ThreadPool::serve(int core, std::size_t place) {
    const int refusal = pin(core);
    std::unique_lock lock(meeting_->mutex);
    if (refusal != 0 && meeting_->refused == 0) {
        meeting_->refused = place + 1;
        meeting_->refusal = refusal;
    }
    ++meeting_->started;
    meeting_->ended.notify_all();
    for (std::uint64_t seen = 0;;) {
        meeting_->begun.wait(lock, [&] { return meeting_->closing || meeting_->number != seen; });
        if (meeting_->closing) return;
        seen = meeting_->number;
        Task& task = *meeting_->task;
        lock.unlock();
        {
            const DefaultFloatEnvironment environment;
            for (std::uint64_t i;
                 (i = task.next.fetch_add(1, std::memory_order_relaxed)) < task.count;)
                task.work(i);
        }
        lock.lock();
        if (--meeting_->busy == 0) meeting_->ended.notify_all();
    }
}

}  // namespace infinity_optim
