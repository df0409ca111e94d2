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
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [this] { return started_ == threads_.size(); });
    if (refused_ == 0) return;
    const int core = cores[refused_ - 1];
    lock.unlock();
    close();
    throw std::system_error(
        refusal_, std::generic_category(),
        "core " + std::to_string(core) +
            " cannot be used: it does not exist, or this process may not run on it");
}

ThreadPool::~ThreadPool() {
    if (getpid() == owner_) {
        close();
    } else {
        for (std::thread& thread : threads_)
            thread.detach();  // a forked child has the objects, not the threads
    }
}

void ThreadPool::close() {
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
    }
    begun_.notify_all();
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
    const std::lock_guard one_caller(callers_);
    Task task{work, count};
    std::unique_lock lock(mutex_);
    task_ = &task;
    ++number_;
    busy_ = threads_.size();
    begun_.notify_all();
    ended_.wait(lock, [this] { return busy_ == 0; });
    task_ = nullptr;
}

void ThreadPool::serve(int core, std::size_t place) {
    const int refusal = pin(core);
    std::unique_lock lock(mutex_);
    if (refusal != 0 && refused_ == 0) {
        refused_ = place + 1;
        refusal_ = refusal;
    }
    ++started_;
    ended_.notify_all();
    for (std::uint64_t seen = 0;;) {
        begun_.wait(lock, [&] { return closing_ || number_ != seen; });
        if (closing_) return;
        seen = number_;
        Task& task = *task_;
        lock.unlock();
        {
            const DefaultFloatEnvironment environment;
            for (std::uint64_t i;
                 (i = task.next.fetch_add(1, std::memory_order_relaxed)) < task.count;)
                task.work(i);
        }
        lock.lock();
        if (--busy_ == 0) ended_.notify_all();
    }
}

}  // namespace infinity_optim
