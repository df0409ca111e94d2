// The thread pool: every piece of work once, several callers, cores that do not exist, forks, the
// float environment.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "check.hpp"
#include "infinity_optim/engine.hpp"
#include "infinity_optim/thread_pool.hpp"

namespace {

using infinity_optim::ThreadPool;

[[nodiscard]] std::vector<int> anywhere(std::size_t count) {
    return std::vector<int>(count, -1);
}

}  // namespace

TEST(every_piece_of_work_is_done_once) {
    ThreadPool pool(anywhere(4));
    std::vector<std::atomic<int>> times(1000);
    pool.run(times.size(), [&](std::uint64_t i) { ++times[i]; });
    for (const auto& one : times) CHECK_EQ(one.load(), 1);
}

TEST(nothing_to_do_is_done_at_once) {
    ThreadPool pool(anywhere(2));
    pool.run(0, [](std::uint64_t) { throw 1; });
}

TEST(the_caller_computes_nothing) {
    ThreadPool pool(anywhere(2));
    std::atomic<bool> seen = false;
    const auto caller = std::this_thread::get_id();
    pool.run(100, [&](std::uint64_t) { seen = seen || std::this_thread::get_id() == caller; });
    CHECK(!seen);
}

TEST(several_callers_take_turns) {
    ThreadPool pool(anywhere(2));
    std::atomic<int> total = 0;
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 4; ++caller) {
        callers.emplace_back([&] {
            for (int round = 0; round < 50; ++round) pool.run(7, [&](std::uint64_t) { ++total; });
        });
    }
    for (std::thread& caller : callers) caller.join();
    CHECK_EQ(total.load(), 4 * 50 * 7);
}

TEST(a_core_that_does_not_exist_is_refused) {
    const std::vector<int> cores = {-1, 100'000};
    CHECK_THROWS(ThreadPool(cores), std::system_error);
    CHECK_THROWS(ThreadPool(std::vector<int>{}), std::invalid_argument);
}

TEST(a_forked_child_is_told_that_it_has_no_threads) {
    ThreadPool pool(anywhere(1));
    const pid_t child = fork();
    if (child == 0) {
        int status = 1;
        try {
            pool.run(1, [](std::uint64_t) {});
        } catch (const std::logic_error&) {
            status = 0;
        }
        _exit(status);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(a_forked_child_destroys_a_pool_with_sleeping_threads) {
    auto pool = std::make_unique<ThreadPool>(anywhere(2));
    pool->run(1, [](std::uint64_t) {});  // from here on, both threads sleep until the next task
    const pid_t child = fork();
    if (child == 0) {
        alarm(60);
        pool.reset();
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

#if defined(__x86_64__)
TEST(threads_work_in_the_default_float_environment_and_the_caller_keeps_its_own) {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);   // flush to zero, subnormals are zeros
    ThreadPool pool(anywhere(1));  // inherits it
    std::atomic<unsigned> seen = 0;
    pool.run(1, [&](std::uint64_t) { seen = _mm_getcsr(); });
    const unsigned mine = _mm_getcsr();
    _mm_setcsr(before);
    CHECK_EQ(seen.load() & 0xffc0, 0x1f80);
    CHECK_EQ(mine & 0x8040, 0x8040);
}
#endif
