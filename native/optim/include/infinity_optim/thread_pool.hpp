// Threads for the update kernels: pinned to the cores given, asleep between tasks, never spinning.
// The caller waits and computes nothing; tasks run in the default floating-point environment
// whatever the threads inherited.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

namespace infinity_optim {

class ThreadPool {
  public:
    // One thread per entry, pinned to that core; -1 leaves it unpinned. Throws
    // std::invalid_argument for no cores and std::system_error, naming the core, where the system
    // refuses one.
    explicit ThreadPool(std::span<const int> cores);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    [[nodiscard]] std::size_t size() const { return threads_.size(); }

    // Calls work(0) to work(count - 1), each once, on any of the threads, and returns when all have
    // ended. One caller at a time; others wait. `work` must not throw. Throws std::logic_error in a
    // forked child, which has no threads.
    void run(std::uint64_t count, const std::function<void(std::uint64_t)>& work);

  private:
    struct Task;
    void serve(int core, std::size_t place);

    std::mutex callers_;  // held by the caller whose task runs

    std::mutex mutex_;  // of all below
    std::condition_variable begun_;
    std::condition_variable ended_;
    Task* task_ = nullptr;
    std::uint64_t number_ = 0;  // of the task; a thread works on each number once
    std::size_t busy_ = 0;      // threads that have not ended it
    std::size_t started_ = 0;   // threads whose pinning is decided
    std::size_t refused_ = 0;   // 1 + place of the first that the system refused a core
    int refusal_ = 0;           // its errno
    bool closing_ = false;

    pid_t owner_;
    std::vector<std::thread> threads_;

    void close();
};

}  // namespace infinity_optim
