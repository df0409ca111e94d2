// Threads for the update kernels: pinned to the cores given, asleep between tasks, never spinning.
// The caller waits and computes nothing; tasks run in the default floating-point environment
// whatever the threads inherited.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
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
    ~ThreadPool();  // joins the threads; in a forked child, which has none, it does nothing
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

    // What the threads share with callers.
    struct Meeting {
        std::mutex callers;  // held by the caller whose task runs

        std::mutex mutex;  // of all below
        std::condition_variable begun;
        std::condition_variable ended;
        Task* task = nullptr;
        std::uint64_t number = 0;  // of the task; a thread works on each number once
        std::size_t busy = 0;      // threads that have not ended it
        std::size_t started = 0;   // threads whose pinning is decided
        std::size_t refused = 0;   // 1 + place of the first that the system refused a core
        int refusal = 0;           // its errno
        bool closing = false;
    };
    std::unique_ptr<Meeting> meeting_ = std::make_unique<Meeting>();

    pid_t owner_;
    std::vector<std::thread> threads_;

    void close();
};

}  // namespace infinity_optim
