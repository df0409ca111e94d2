// What becomes of operations: chunks, budgets, short transfers, errors, cancellation, closing. On
// memory and fault backends, so that every path is taken on purpose; the Python suite repeats the
// user's view on real drives.
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "deepnvme/drive.hpp"
#include "deepnvme/error.hpp"
#include "deepnvme/pool.hpp"
#include "deepnvme/queue.hpp"

using namespace deepnvme;

namespace {

using namespace std::chrono_literals;

constexpr std::uint32_t chunk = 64 << 10;
constexpr auto long_enough = 60s;

std::vector<std::byte> pattern(std::size_t nbytes, unsigned seed) {
    std::vector<std::byte> bytes(nbytes);
    for (std::size_t i = 0; i < nbytes; ++i)
        bytes[i] = static_cast<std::byte>((i * 2654435761U + seed * 97U) >> 13);
    return bytes;
}

QueueOptions in_memory(FaultPlan plan = {}) {
    QueueOptions options;
    options.backend = "memory";
    options.drive.chunk_bytes = chunk;
    options.drive.inflight_bytes = 4 * chunk;
    options.max_pending = 64;
    if (!plan.rules.empty()) options.faults = std::move(plan);
    return options;
}

FaultPlan one_rule(FaultRule rule) {
    return FaultPlan{7, {std::move(rule)}};
}

// A queue with one file, and outcomes by operation.
struct Bench {
    explicit Bench(QueueOptions options = in_memory())
        : queue(std::move(options)),
          file(queue.open("file", OpenMode::create, DirectIO::automatic, 0600)) {}

    std::uint64_t submit(Verb verb, std::vector<std::byte>& memory, std::uint64_t offset,
                         AtEndOfFile at_end = AtEndOfFile::fails,
                         std::shared_ptr<Ticket> ticket = nullptr) {
        Operation operation;
        operation.id = next++;
        operation.ticket = std::move(ticket);
        operation.verb = verb;
        operation.at_end_of_file = at_end;
        operation.file = file;
        operation.memory = memory.data();
        operation.length = memory.size();
        operation.offset = offset;
        CHECK(queue.submit(std::move(operation), long_enough));
        return next - 1;
    }

    std::uint64_t sync() {
        std::vector<std::byte> none;
        return submit(Verb::sync_data, none, 0);
    }

    Outcome outcome(std::uint64_t id) {
        while (!outcomes.contains(id)) {
            for (const Outcome& ended : queue.wait_ended()) {
                outcomes[ended.id] = ended;
                order.push_back(ended.id);
            }
        }
        return outcomes[id];
    }

    Outcome run(Verb verb, std::vector<std::byte>& memory, std::uint64_t offset,
                AtEndOfFile at_end = AtEndOfFile::fails) {
        return outcome(submit(verb, memory, offset, at_end));
    }

    std::shared_ptr<Ticket> sync_with_ticket() {
        auto ticket = std::make_shared<Ticket>();
        std::vector<std::byte> none;
        (void)submit(Verb::sync_data, none, 0, AtEndOfFile::fails, ticket);
        return ticket;
    }

    DriveStats stats() { return queue.stats().begin()->second; }

    Queue queue;
    std::shared_ptr<OpenFile> file;
    std::uint64_t next = 1;
    std::map<std::uint64_t, Outcome> outcomes;
    std::vector<std::uint64_t> order;
};

}  // namespace

TEST(what_is_written_is_read_back_whatever_the_size) {
    Bench bench;
    for (const std::size_t nbytes :
         {1UL, 511UL, 4096UL, std::size_t{chunk}, chunk + 1UL, 10UL * chunk + 77}) {
        std::vector<std::byte> written = pattern(nbytes, 1);
        CHECK_EQ(bench.run(Verb::write, written, 123).done, nbytes);
        std::vector<std::byte> read(nbytes);
        const Outcome outcome = bench.run(Verb::read, read, 123);
        CHECK_EQ(outcome.ending, Ending::succeeded);
        CHECK_EQ(outcome.done, nbytes);
        CHECK(read == written);
    }
}

TEST(an_empty_operation_succeeds_without_a_chunk) {
    Bench bench;
    std::vector<std::byte> none;
    CHECK_EQ(bench.run(Verb::write, none, 0).ending, Ending::succeeded);
    CHECK_EQ(bench.stats().chunks, 0);
}

TEST(the_bytes_in_flight_never_exceed_the_budget) {
    Bench bench(in_memory(one_rule({.kind = FaultRule::Kind::reorder, .every = 3, .hold = 2})));
    std::vector<std::byte> written = pattern(50 * chunk, 2);
    CHECK_EQ(bench.run(Verb::write, written, 0).ending, Ending::succeeded);
    CHECK(bench.stats().peak_inflight_bytes <= 4 * chunk);
    CHECK(bench.stats().peak_inflight_bytes > chunk);
}

TEST(every_request_shortened_still_moves_every_byte) {
    Bench bench(
        in_memory(one_rule({.kind = FaultRule::Kind::shorten, .every = 1, .length = 24576})));
    std::vector<std::byte> written = pattern(5 * chunk + 100, 3);
    CHECK_EQ(bench.run(Verb::write, written, 0).ending, Ending::succeeded);
    std::vector<std::byte> read(written.size());
    CHECK_EQ(bench.run(Verb::read, read, 0).ending, Ending::succeeded);
    CHECK(read == written);
    CHECK(bench.stats().short_transfers > 10);
}

TEST(a_failed_request_ends_its_operation_with_the_certain_prefix) {
    Bench bench(in_memory(one_rule({.kind = FaultRule::Kind::fail, .nth = 3, .error = ENOSPC})));
    std::vector<std::byte> written = pattern(8 * chunk, 4);
    const Outcome outcome = bench.run(Verb::write, written, 0);
    CHECK_EQ(outcome.ending, Ending::failed);
    CHECK_EQ(outcome.error, ENOSPC);
    CHECK_EQ(outcome.done, 2 * chunk);
    std::vector<std::byte> again = pattern(chunk, 5);
    CHECK_EQ(bench.run(Verb::write, again, 0).ending, Ending::succeeded);
}

TEST(interrupted_requests_are_issued_again_but_not_for_ever) {
    Bench some(in_memory(one_rule({.kind = FaultRule::Kind::fail, .every = 2, .error = EINTR})));
    std::vector<std::byte> written = pattern(6 * chunk, 6);
    CHECK_EQ(some.run(Verb::write, written, 0).ending, Ending::succeeded);
    CHECK(some.stats().retries > 0);
    Bench all(in_memory(one_rule({.kind = FaultRule::Kind::fail, .every = 1, .error = EAGAIN})));
    const Outcome outcome = all.run(Verb::write, written, 0);
    CHECK_EQ(outcome.ending, Ending::failed);
    CHECK_EQ(outcome.error, EAGAIN);
}

TEST(the_end_of_the_file_is_an_error_or_the_end_as_asked) {
    Bench bench;
    std::vector<std::byte> written = pattern(chunk + 10, 7);
    CHECK_EQ(bench.run(Verb::write, written, 0).ending, Ending::succeeded);
    std::vector<std::byte> read(3 * chunk);
    const Outcome fails = bench.run(Verb::read, read, 0);
    CHECK_EQ(fails.ending, Ending::end_of_file);
    CHECK_EQ(fails.done, chunk + 10);
    const Outcome stops = bench.run(Verb::read, read, 5, AtEndOfFile::stops);
    CHECK_EQ(stops.ending, Ending::succeeded);
    CHECK_EQ(stops.done, chunk + 5);
    CHECK(std::memcmp(read.data(), written.data() + 5, stops.done) == 0);
}

TEST(a_file_cut_behind_our_back_is_an_error_even_where_the_end_may_come) {
    Bench bench;
    std::vector<std::byte> written = pattern(2 * chunk, 8);
    CHECK_EQ(bench.run(Verb::write, written, 0).ending, Ending::succeeded);
    CHECK_EQ(::ftruncate(bench.file->descriptor(), chunk), 0);
    std::vector<std::byte> read(2 * chunk);
    const Outcome outcome = bench.run(Verb::read, read, 0, AtEndOfFile::stops);
    CHECK_EQ(outcome.ending, Ending::end_of_file);
    CHECK_EQ(outcome.done, chunk);
}

TEST(a_sync_ends_after_the_writes_submitted_before_it) {
    Bench bench(in_memory(one_rule(
        {.kind = FaultRule::Kind::delay, .verbs = {Verb::write}, .every = 1, .delay_us = 3000})));
    std::vector<std::byte> first = pattern(2 * chunk, 9);
    std::vector<std::byte> second = pattern(2 * chunk, 10);
    const std::uint64_t a = bench.submit(Verb::write, first, 0);
    const std::uint64_t b = bench.submit(Verb::write, second, 2 * chunk);
    const std::uint64_t sync = bench.sync();
    CHECK_EQ(bench.outcome(sync).ending, Ending::succeeded);
    CHECK_EQ(bench.order.back(), sync);
    CHECK(bench.outcomes.contains(a) && bench.outcomes.contains(b));
}

TEST(an_operation_cancelled_before_it_began_touches_no_memory) {
    Bench bench(in_memory(one_rule({.kind = FaultRule::Kind::delay, .nth = 1, .delay_us = 20000})));
    std::vector<std::byte> large = pattern(4 * chunk, 11);
    const std::uint64_t blocker = bench.submit(Verb::write, large, 0);
    std::vector<std::byte> untouched(chunk, std::byte{0xEE});
    Operation operation;
    operation.id = 999;
    operation.ticket = std::make_shared<Ticket>();
    CHECK(operation.ticket->cancel());
    operation.verb = Verb::read;
    operation.file = bench.file;
    operation.memory = untouched.data();
    operation.length = untouched.size();
    CHECK(bench.queue.submit(std::move(operation), long_enough));
    CHECK_EQ(bench.outcome(999).ending, Ending::cancelled);
    CHECK_EQ(bench.outcome(blocker).ending, Ending::succeeded);
    CHECK(untouched == std::vector<std::byte>(chunk, std::byte{0xEE}));
}

TEST(closing_drains_what_was_submitted) {
    Bench bench(
        in_memory(one_rule({.kind = FaultRule::Kind::delay, .every = 4, .delay_us = 2000})));
    std::vector<std::vector<std::byte>> all;
    for (unsigned i = 0; i < 20; ++i) all.push_back(pattern(chunk, i));
    for (unsigned i = 0; i < 20; ++i)
        (void)bench.submit(Verb::write, all[i], std::uint64_t{i} * chunk);
    CHECK(bench.queue.close(long_enough));
    CHECK_EQ(bench.queue.pending(), 0);
    for (std::uint64_t id = 1; id <= 20; ++id)
        CHECK_EQ(bench.outcome(id).ending, Ending::succeeded);
    CHECK(bench.queue.wait_ended().empty());
    std::vector<std::byte> late(1);
    CHECK_THROWS(bench.submit(Verb::write, late, 0), ClosedError);
    CHECK_EQ(bench.stats().operations, 20);
}

TEST(a_close_whose_time_is_up_takes_no_more_and_ends_when_called_again) {
    Bench bench(
        in_memory(one_rule({.kind = FaultRule::Kind::delay, .nth = 1, .delay_us = 200'000})));
    std::vector<std::byte> memory = pattern(chunk, 12);
    const std::uint64_t slow = bench.submit(Verb::write, memory, 0);
    CHECK(!bench.queue.close(0ns));
    CHECK_THROWS(bench.submit(Verb::write, memory, 0), ClosedError);
    CHECK_EQ(bench.queue.pending(), 1);
    CHECK(bench.queue.close(long_enough));
    CHECK(bench.queue.close(0ns));
    CHECK_EQ(bench.outcome(slow).ending, Ending::succeeded);
    CHECK(bench.queue.wait_ended().empty());
}

TEST(a_full_queue_takes_nothing_before_there_is_room) {
    QueueOptions options =
        in_memory(one_rule({.kind = FaultRule::Kind::delay, .nth = 1, .delay_us = 200'000}));
    options.max_pending = 1;
    Bench bench(std::move(options));
    std::vector<std::byte> memory = pattern(chunk, 12);
    const std::uint64_t slow = bench.submit(Verb::write, memory, 0);
    Operation another;
    another.id = 77;
    another.ticket = std::make_shared<Ticket>();
    another.verb = Verb::write;
    another.file = bench.file;
    another.memory = memory.data();
    another.length = memory.size();
    CHECK(!bench.queue.submit(std::move(another), 0ns));
    CHECK(!bench.queue.submit(std::move(another), 1ms));
    CHECK(!another.ticket->taken());
    CHECK_EQ(bench.queue.pending(), 1);
    CHECK(bench.queue.submit(Operation(another), long_enough));
    CHECK(another.ticket->taken());
    CHECK_EQ(bench.outcome(77).ending, Ending::succeeded);
    CHECK_EQ(bench.outcome(slow).ending, Ending::succeeded);
    CHECK_EQ(bench.stats().operations, 2);
}

TEST(an_operation_on_a_file_of_another_queue_is_refused_and_takes_no_room) {
    QueueOptions options = in_memory();
    options.max_pending = 1;
    Bench bench(std::move(options));
    Operation foreign;
    foreign.ticket = std::make_shared<Ticket>();
    foreign.file =
        std::make_shared<OpenFile>("/proc/self/exe", OpenMode::read, DirectIO::never, 0600);
    CHECK_THROWS((void)bench.queue.submit(std::move(foreign), long_enough), ClosedError);
    CHECK(!foreign.ticket->taken());
    CHECK_EQ(bench.queue.pending(), 0);
    std::vector<std::byte> memory = pattern(chunk, 12);
    CHECK_EQ(bench.run(Verb::write, memory, 0).ending, Ending::succeeded);
}

TEST(pools_come_and_go_while_threads_submit_and_the_queue_closes) {
    Bench bench;
    constexpr unsigned threads = 4;
    std::vector<std::byte> block = pattern(3000, 1);
    std::atomic<std::uint64_t> taken{0};
    std::atomic<std::uint64_t> ended{0};
    std::thread reaper([&] {
        for (auto some = bench.queue.wait_ended(); !some.empty(); some = bench.queue.wait_ended())
            ended += some.size();
    });
    std::vector<std::thread> others;
    for (unsigned i = 0; i < threads; ++i) {
        others.emplace_back([&, i] {
            Operation operation;
            operation.verb = Verb::write;
            operation.file = bench.file;
            operation.memory = block.data();
            operation.length = block.size();
            operation.offset = std::uint64_t{i} * 4096;
            try {
                while (bench.queue.submit(Operation(operation), long_enough)) ++taken;
            } catch (const ClosedError&) {
            }
        });
    }
    const std::shared_ptr<Pool> pool = Pool::make(1 << 20);
    others.emplace_back([&] {
        try {
            while (true) {
                bench.queue.use_pool(pool);
                (void)bench.queue.pools_settled(long_enough);
                bench.queue.forget_pool(pool);
            }
        } catch (const ClosedError&) {
        }
    });
    while (ended < 2000) std::this_thread::yield();
    CHECK(bench.queue.close(long_enough));
    for (std::thread& other : others) other.join();
    reaper.join();
    CHECK_EQ(ended.load(), taken.load());
    CHECK_EQ(pool.use_count(), 1);
}

TEST(many_threads_may_submit_at_once) {
    Bench bench;
    constexpr unsigned threads = 16;
    constexpr unsigned each = 50;
    std::vector<std::vector<std::byte>> blocks;
    for (unsigned i = 0; i < threads; ++i) blocks.push_back(pattern(3000, i));
    std::atomic<unsigned> ended{0};
    std::thread reaper([&] {
        while (ended < threads * each) {
            for (const Outcome& outcome : bench.queue.wait_ended()) {
                if (outcome.ending == Ending::succeeded) ++ended;
            }
        }
    });
    std::vector<std::thread> submitters;
    for (unsigned i = 0; i < threads; ++i) {
        submitters.emplace_back([&, i] {
            for (unsigned n = 0; n < each; ++n) {
                Operation operation;
                operation.id = i * each + n;
                operation.verb = Verb::write;
                operation.file = bench.file;
                operation.memory = blocks[i].data();
                operation.length = blocks[i].size();
                operation.offset = std::uint64_t{i} * 3000;
                (void)bench.queue.submit(std::move(operation), long_enough);
            }
        });
    }
    for (std::thread& submitter : submitters) submitter.join();
    reaper.join();
    for (unsigned i = 0; i < threads; ++i) {
        std::vector<std::byte> read(3000);
        CHECK_EQ(bench.run(Verb::read, read, std::uint64_t{i} * 3000).ending, Ending::succeeded);
        CHECK(read == blocks[i]);
    }
}

// --- waiting for one of them
// ------------------------------------------------------------------------------------------

namespace {

QueueOptions with_slow_syncs(std::uint32_t delay_us) {
    return in_memory(one_rule({.kind = FaultRule::Kind::delay,
                               .verbs = {Verb::sync_data},
                               .every = 1,
                               .delay_us = delay_us}));
}

std::vector<std::uint64_t> ids_of(const std::vector<Outcome>& outcomes) {
    std::vector<std::uint64_t> ids;
    for (const Outcome& outcome : outcomes) ids.push_back(outcome.id);
    std::sort(ids.begin(), ids.end());
    return ids;
}

// A thread behind wait_ended(), as a queue's own. Closes the queue at its end.
class Listener {
  public:
    explicit Listener(Queue& queue) : queue_(queue), thread_([this] { listen(); }) {}
    ~Listener() {
        (void)queue_.close(long_enough);
        thread_.join();
    }
    Listener(const Listener&) = delete;
    Listener& operator=(const Listener&) = delete;

    [[nodiscard]] bool hears(std::size_t count) {
        std::unique_lock lock(mutex_);
        return heard_more_.wait_for(lock, long_enough, [&] { return heard_.size() >= count; });
    }
    [[nodiscard]] std::vector<std::uint64_t> heard() {
        const std::lock_guard lock(mutex_);
        std::vector<std::uint64_t> sorted = heard_;
        std::sort(sorted.begin(), sorted.end());
        return sorted;
    }

  private:
    void listen() {
        for (auto ended = queue_.wait_ended(); !ended.empty(); ended = queue_.wait_ended()) {
            const std::lock_guard lock(mutex_);
            for (const Outcome& outcome : ended) heard_.push_back(outcome.id);
            heard_more_.notify_all();
        }
    }

    Queue& queue_;
    std::mutex mutex_;
    std::condition_variable heard_more_;
    std::vector<std::uint64_t> heard_;
    std::thread thread_;
};

}  // namespace

TEST(whoever_waits_for_one_takes_all_that_have_ended) {
    Bench bench;
    std::vector<std::byte> memory = pattern(100, 1);
    for (int i = 0; i < 5; ++i) (void)bench.submit(Verb::write, memory, 0);
    const std::shared_ptr<Ticket> last = bench.sync_with_ticket();
    const auto ended = bench.queue.wait_for(*last, long_enough);
    CHECK(ended.has_value());
    CHECK(ids_of(*ended) == std::vector<std::uint64_t>({1, 2, 3, 4, 5, 6}));
    CHECK_EQ(bench.queue.pending(), 0);
}

TEST(a_wait_for_what_has_ended_needs_no_time_and_may_find_that_another_took_it) {
    Bench bench;
    const std::shared_ptr<Ticket> ticket = bench.sync_with_ticket();
    const auto first = bench.queue.wait_for(*ticket, long_enough);
    CHECK(first.has_value());
    CHECK_EQ(first->size(), 1);
    const auto again = bench.queue.wait_for(*ticket, 0ns);
    CHECK(again.has_value());
    CHECK(again->empty());
}

TEST(a_wait_whose_time_is_up_returns_nothing_and_leaves_nothing_behind) {
    Bench bench(with_slow_syncs(300'000));
    const std::shared_ptr<Ticket> ticket = bench.sync_with_ticket();
    for (const std::chrono::nanoseconds timeout : {-1ns, 0ns, 1ns, std::chrono::nanoseconds(1ms)}) {
        CHECK(!bench.queue.wait_for(*ticket, timeout).has_value());
    }
    // Had one of them counted as still waiting, this would wait for it to take the outcome.
    CHECK_EQ(bench.outcome(1).ending, Ending::succeeded);
    CHECK(bench.queue.wait_for(*ticket, 0ns)->empty());
}

TEST(a_wait_ends_when_a_signal_handler_has_run_and_the_operation_goes_on) {
    Bench bench(with_slow_syncs(300'000));
    const std::shared_ptr<Ticket> ticket = bench.sync_with_ticket();
    struct sigaction action = {};
    action.sa_handler = [](int) {};
    CHECK_EQ(::sigaction(SIGUSR1, &action, nullptr), 0);
    std::atomic<bool> over = false;
    std::thread signals([&, waiter = ::pthread_self()] {
        while (!over) {  // one that comes before the wait ends nothing
            ::pthread_kill(waiter, SIGUSR1);
            std::this_thread::sleep_for(1ms);
        }
    });
    CHECK(!bench.queue.wait_for(*ticket, long_enough).has_value());
    over = true;
    signals.join();
    CHECK_EQ(bench.outcome(1).ending, Ending::succeeded);
}

TEST(waiters_can_be_released_before_the_end_and_still_find_it_when_it_comes) {
    Bench bench(with_slow_syncs(300'000));
    const std::shared_ptr<Ticket> ticket = bench.sync_with_ticket();
    std::thread waiter([&] { CHECK(!bench.queue.wait_for(*ticket, long_enough).has_value()); });
    ticket->release_waiters();
    waiter.join();
    CHECK(!bench.queue.wait_for(*ticket, long_enough).has_value());
    CHECK_EQ(bench.outcome(1).ending, Ending::succeeded);
    CHECK(bench.queue.wait_for(*ticket, 0ns)->empty());
}

TEST(of_many_that_wait_for_one_operation_one_takes_it_and_all_are_woken) {
    Bench bench(with_slow_syncs(50'000));
    const std::shared_ptr<Ticket> ticket = bench.sync_with_ticket();
    std::atomic<unsigned> woken{0};
    std::atomic<unsigned> taken{0};
    std::vector<std::thread> waiters;
    for (int i = 0; i < 8; ++i) {
        waiters.emplace_back([&] {
            const auto ended = bench.queue.wait_for(*ticket, long_enough);
            if (!ended) return;
            ++woken;
            taken += static_cast<unsigned>(ended->size());
        });
    }
    for (std::thread& waiter : waiters) waiter.join();
    CHECK_EQ(woken.load(), 8);
    CHECK_EQ(taken.load(), 1);
}

TEST(what_a_waiter_takes_wait_ended_never_sees_and_what_it_hands_back_it_does) {
    Bench bench(with_slow_syncs(20'000));
    std::vector<Outcome> taken;
    {
        Listener listener(bench.queue);
        const std::shared_ptr<Ticket> kept = bench.sync_with_ticket();
        const std::shared_ptr<Ticket> returned = bench.sync_with_ticket();
        unsigned takes = 0;
        // The waiters may come too late, when the listener has heard already: then there is nothing
        // to see.
        for (const std::shared_ptr<Ticket>& ticket : {kept, returned}) {
            auto ended = bench.queue.wait_for(*ticket, long_enough);
            CHECK(ended.has_value());
            if (!ended->empty()) ++takes;
            for (Outcome& outcome : *ended) taken.push_back(std::move(outcome));
        }
        const std::vector<std::uint64_t> seen = listener.heard();
        const std::vector<std::uint64_t> mine = ids_of(taken);
        for (const std::uint64_t id : mine)
            CHECK(std::find(seen.begin(), seen.end(), id) == seen.end());
        for (; takes > 0; --takes) bench.queue.hand_back(std::exchange(taken, {}));
        CHECK(listener.hears(2));
        CHECK(bench.queue.close(long_enough));
        CHECK(listener.heard() == std::vector<std::uint64_t>({1, 2}));
    }
}

TEST(what_is_handed_back_reaches_wait_ended_while_a_waiter_is_about_to_take_more) {
    Bench bench(with_slow_syncs(30'000));
    std::vector<std::byte> memory = pattern(100, 1);
    auto ticket = std::make_shared<Ticket>();
    (void)bench.submit(Verb::write, memory, 0, AtEndOfFile::fails, ticket);
    auto taken = bench.queue.wait_for(*ticket, long_enough);
    CHECK(taken.has_value());
    const std::shared_ptr<Ticket> slow = bench.sync_with_ticket();
    std::thread waiter([&] { (void)bench.queue.wait_for(*slow, long_enough); });
    bench.queue.hand_back(std::move(*taken));
    const std::vector<Outcome> ended = bench.queue.wait_ended();
    waiter.join();
    CHECK_EQ(ended.front().id, 1);
}

TEST(what_was_handed_back_before_the_queue_closed_is_still_returned) {
    Bench bench;
    const std::shared_ptr<Ticket> ticket = bench.sync_with_ticket();
    auto taken = bench.queue.wait_for(*ticket, long_enough);
    CHECK(taken.has_value());
    bench.queue.hand_back(std::move(*taken));
    CHECK(bench.queue.close(long_enough));
    CHECK_EQ(bench.outcome(1).ending, Ending::succeeded);
    CHECK(bench.queue.wait_ended().empty());
}

TEST(closing_wakes_whoever_waits_with_what_they_wait_for) {
    Bench bench(with_slow_syncs(50'000));
    const std::shared_ptr<Ticket> ticket = bench.sync_with_ticket();
    std::atomic<bool> woken{false};
    std::thread waiter([&] { woken = bench.queue.wait_for(*ticket, long_enough).has_value(); });
    CHECK(bench.queue.close(long_enough));
    waiter.join();
    CHECK(woken.load());
    const auto late = bench.queue.wait_for(*ticket, 0ns);
    CHECK(late.has_value());
}

TEST(a_cancelled_operation_ends_for_whoever_waits_for_it) {
    Bench bench(
        in_memory(one_rule({.kind = FaultRule::Kind::delay, .nth = 1, .delay_us = 20'000})));
    std::vector<std::byte> large = pattern(4 * chunk, 11);
    (void)bench.submit(Verb::write, large, 0);
    std::vector<std::byte> small = pattern(chunk, 12);
    auto ticket = std::make_shared<Ticket>();
    CHECK(ticket->cancel());
    const std::uint64_t cancelled = bench.submit(Verb::write, small, 0, AtEndOfFile::fails, ticket);
    const auto ended = bench.queue.wait_for(*ticket, long_enough);
    CHECK(ended.has_value());
    for (const Outcome& outcome : *ended) bench.outcomes[outcome.id] = outcome;
    CHECK(bench.outcomes.contains(cancelled));
    CHECK_EQ(bench.outcomes[cancelled].ending, Ending::cancelled);
    CHECK(bench.queue.close(long_enough));  // the large one still reads its memory
}

TEST(every_operation_reaches_exactly_one_of_those_that_wait_and_listen) {
    Bench bench(in_memory(one_rule({.kind = FaultRule::Kind::reorder, .every = 5, .hold = 3})));
    constexpr unsigned threads = 6;
    constexpr unsigned each = 60;
    std::vector<std::vector<std::uint64_t>> taken(threads);
    std::vector<std::uint64_t> heard;
    {
        Listener listener(bench.queue);
        std::vector<std::thread> workers;
        for (unsigned i = 0; i < threads; ++i) {
            workers.emplace_back([&, i] {
                std::vector<std::byte> memory = pattern(1000, i);
                for (unsigned n = 0; n < each; ++n) {
                    Operation operation;
                    operation.id = i * each + n;
                    operation.ticket = std::make_shared<Ticket>();
                    operation.verb = Verb::write;
                    operation.file = bench.file;
                    operation.memory = memory.data();
                    operation.length = memory.size();
                    operation.offset = std::uint64_t{i} * 1000;
                    const std::shared_ptr<Ticket> ticket = operation.ticket;
                    CHECK(bench.queue.submit(std::move(operation), long_enough));
                    const std::chrono::nanoseconds timeout =
                        n % 3 == 0 ? 1us : std::chrono::nanoseconds(long_enough);
                    auto ended = bench.queue.wait_for(*ticket, timeout);
                    if (!ended) continue;
                    std::vector<Outcome> declined;
                    for (Outcome& outcome : *ended) {
                        if (outcome.id % 4 == 0)
                            declined.push_back(std::move(outcome));
                        else
                            taken[i].push_back(outcome.id);
                    }
                    if (!ended->empty()) bench.queue.hand_back(std::move(declined));
                }
            });
        }
        for (std::thread& worker : workers) worker.join();
        CHECK(bench.queue.close(long_enough));
        std::size_t mine = 0;
        for (const auto& ids : taken) mine += ids.size();
        CHECK(listener.hears(threads * each - mine));
        heard = listener.heard();
    }
    for (const auto& ids : taken) heard.insert(heard.end(), ids.begin(), ids.end());
    std::sort(heard.begin(), heard.end());
    CHECK_EQ(heard.size(), threads * each);
    for (std::size_t id = 0; id < heard.size(); ++id) CHECK_EQ(heard[id], id);
}

namespace {

// Counts how often it is woken.
class Woken final : public Backend {
  public:
    Woken(std::unique_ptr<Backend> inner, std::atomic<int>& times)
        : inner_(std::move(inner)), times_(times) {}
    [[nodiscard]] std::string_view name() const noexcept override { return inner_->name(); }
    void attach() override { inner_->attach(); }
    [[nodiscard]] unsigned capacity() const noexcept override { return inner_->capacity(); }
    [[nodiscard]] bool push(const Request& request) override { return inner_->push(request); }
    [[nodiscard]] std::size_t submit_and_reap(std::span<Completion> out, Wait wait) override {
        return inner_->submit_and_reap(out, wait);
    }
    void wake() noexcept override {
        ++times_;
        inner_->wake();
    }

  private:
    std::unique_ptr<Backend> inner_;
    std::atomic<int>& times_;
};

// Remembers how many requests were handed over at a time.
class Grouped final : public Backend {
  public:
    Grouped(std::unique_ptr<Backend> inner, std::vector<std::size_t>& groups)
        : inner_(std::move(inner)), groups_(groups) {}
    [[nodiscard]] std::string_view name() const noexcept override { return inner_->name(); }
    [[nodiscard]] unsigned capacity() const noexcept override { return inner_->capacity(); }
    [[nodiscard]] bool push(const Request& request) override {
        ++pushed_;
        return inner_->push(request);
    }
    void submit() override { end_group(); }
    [[nodiscard]] std::size_t submit_and_reap(std::span<Completion> out, Wait wait) override {
        end_group();
        return inner_->submit_and_reap(out, wait);
    }
    void wake() noexcept override { inner_->wake(); }

  private:
    void end_group() {
        if (pushed_ > 0) groups_.push_back(pushed_);
        pushed_ = 0;
    }

    std::unique_ptr<Backend> inner_;
    std::vector<std::size_t>& groups_;
    std::size_t pushed_ = 0;
};

// The groups in which an operation of 48 requests of that length is handed over, 16 at a time.
std::vector<std::size_t> groups_of_requests(std::uint32_t length) {
    Bench other;  // for its file
    std::vector<std::size_t> groups;
    std::vector<std::byte> memory(std::size_t{48} * length);
    {
        Drive drive(std::make_unique<Grouped>(make_backend("memory", 16), groups),
                    {.chunk_bytes = std::max(chunk, length), .inflight_bytes = 64 << 20},
                    [](const std::vector<Outcome>&) {});
        Operation operation;
        operation.verb = Verb::write;
        operation.file = other.file;
        operation.length = memory.size();
        for (std::size_t at = 0; at < memory.size(); at += length) {
            operation.pieces.push_back({memory.data() + at, length, at});
        }
        drive.submit(std::span(&operation, 1), Issue::now);
    }
    return groups;
}

}  // namespace

TEST(requests_that_waited_for_room_go_together_the_more_the_larger_they_are) {
    using Groups = std::vector<std::size_t>;
    Groups pairs(17, 2);
    pairs.front() = 16;  // the new ones
    CHECK_EQ(groups_of_requests(4 << 10), pairs);
    CHECK_EQ(groups_of_requests(64 << 10), (Groups{16, 8, 8, 8, 8}));
    CHECK_EQ(groups_of_requests(1 << 20), (Groups{16, 16, 16}));
}

TEST(a_drive_that_has_no_room_is_not_woken_for_what_it_could_not_begin) {
    Bench other;  // for its file
    std::atomic<int> wakes = 0;
    std::atomic<int> ended = 0;
    FaultPlan slow = one_rule({.kind = FaultRule::Kind::delay, .every = 1, .delay_us = 50'000});
    auto backend = std::make_unique<Woken>(
        make_fault_backend(make_backend("memory", 64), std::move(slow)), wakes);
    Drive drive(
        std::move(backend), {.chunk_bytes = chunk, .inflight_bytes = chunk},
        [&](const std::vector<Outcome>& outcomes) { ended += static_cast<int>(outcomes.size()); });
    std::vector<std::byte> memory = pattern(3 * chunk, 1);
    const auto submit = [&] {
        Operation operation;
        operation.verb = Verb::write;
        operation.file = other.file;
        operation.memory = memory.data();
        operation.length = memory.size();
        drive.submit(std::span(&operation, 1), Issue::now);
    };
    submit();
    while (drive.stats().chunks == 0) std::this_thread::sleep_for(1ms);
    for (int i = 0; i < 10; ++i) submit();
    drive.stop();
    CHECK_EQ(ended.load(), 11);
    CHECK(wakes <= 2);  // for the first, and to stop
}

namespace {

// While an event loop leads, something is submitted at each of its steps, as if by another thread.
class Fed final : public Backend {
  public:
    Fed(std::unique_ptr<Backend> inner, const std::function<void()>& feed)
        : inner_(std::move(inner)), feed_(feed) {}
    [[nodiscard]] std::string_view name() const noexcept override { return "fed"; }
    [[nodiscard]] bool serves_any_thread() const noexcept override { return true; }
    [[nodiscard]] unsigned capacity() const noexcept override { return inner_->capacity(); }
    [[nodiscard]] bool push(const Request& request) override { return inner_->push(request); }
    [[nodiscard]] std::size_t submit_and_reap(std::span<Completion> out, Wait wait) override {
        if (std::this_thread::get_id() == loop_) feed_();
        return inner_->submit_and_reap(out, wait);
    }
    void wake() noexcept override { inner_->wake(); }

  private:
    std::unique_ptr<Backend> inner_;
    const std::function<void()>& feed_;
    const std::thread::id loop_ = std::this_thread::get_id();
};

}  // namespace

TEST(an_event_loop_that_serves_a_busy_drive_gets_its_turn_back) {
    Bench other;  // for its file
    constexpr int most = 1000;
    std::vector<std::byte> memory = pattern(100, 1);
    int submitted = 0;
    std::atomic<int> ended = 0;
    std::function<void()> feed = [] {};
    Drive drive(
        std::make_unique<Fed>(make_backend("memory", 4), feed), {.chunk_bytes = chunk},
        [&](const std::vector<Outcome>& outcomes) { ended += static_cast<int>(outcomes.size()); });
    feed = [&] {
        if (submitted == most) return;
        ++submitted;
        Operation operation;
        operation.verb = Verb::write;
        operation.file = other.file;
        operation.memory = memory.data();
        operation.length = memory.size();
        drive.submit(std::span(&operation, 1), Issue::now);
    };
    CHECK(drive.lead_for_loops());
    CHECK(submitted < most);
    drive.stop();
    CHECK_EQ(ended.load(), submitted);
}

namespace {

// Completes nothing before it is let go.
class Hanging final : public Backend {
  public:
    struct Gate {
        void let_go() {
            const std::lock_guard lock(mutex);
            is_open = true;
            changed.notify_all();
        }
        void until_it_waits(int times) {
            std::unique_lock lock(mutex);
            changed.wait(lock, [&] { return waits >= times; });
        }

        std::mutex mutex;
        std::condition_variable changed;
        bool is_open = false;
        bool is_woken = false;
        int waits = 0;
    };

    Hanging(std::unique_ptr<Backend> inner, Gate& gate) : inner_(std::move(inner)), gate_(gate) {}
    [[nodiscard]] std::string_view name() const noexcept override { return "hanging"; }
    [[nodiscard]] unsigned capacity() const noexcept override { return inner_->capacity(); }
    [[nodiscard]] bool push(const Request& request) override { return inner_->push(request); }
    [[nodiscard]] std::size_t submit_and_reap(std::span<Completion> out, Wait wait) override {
        std::unique_lock lock(gate_.mutex);
        if (wait != Wait::none) {
            ++gate_.waits;
            gate_.changed.notify_all();
            const auto is_news = [&] { return gate_.is_open || gate_.is_woken; };
            if (is_brief(wait))
                gate_.changed.wait_for(lock, brief, is_news);
            else
                gate_.changed.wait(lock, is_news);
            gate_.is_woken = false;
        }
        return gate_.is_open ? inner_->submit_and_reap(out, Wait::none) : 0;
    }
    void wake() noexcept override {
        const std::lock_guard lock(gate_.mutex);
        gate_.is_woken = true;
        gate_.changed.notify_all();
    }

  private:
    std::unique_ptr<Backend> inner_;
    Gate& gate_;
};

// A drive with room for one chunk, which hangs with operation 1 in the kernel.
struct Hung {
    Hung() {
        (void)submit(1);
        gate.until_it_waits(1);
    }
    ~Hung() { gate.let_go(); }

    std::shared_ptr<Ticket> submit(std::uint64_t id,
                                   Clock::time_point deadline = Clock::time_point::max()) {
        Operation operation;
        operation.id = id;
        operation.ticket = std::make_shared<Ticket>();
        operation.verb = Verb::write;
        operation.file = other.file;
        operation.memory = memory.data();
        operation.length = memory.size();
        operation.deadline = deadline;
        const std::shared_ptr<Ticket> ticket = operation.ticket;
        drive.submit(std::span(&operation, 1), Issue::now);
        return ticket;
    }

    // The first outcome while the drive hangs.
    Outcome first() {
        std::unique_lock lock(mutex);
        CHECK(ended.wait_for(lock, long_enough, [&] { return !outcomes.empty(); }));
        return outcomes.front();
    }

    Bench other;  // for its file
    std::vector<std::byte> memory = pattern(chunk, 1);
    std::mutex mutex;
    std::condition_variable ended;
    std::vector<Outcome> outcomes;
    Hanging::Gate gate;
    Drive drive{std::make_unique<Hanging>(make_backend("memory", 4), gate),
                {.chunk_bytes = chunk, .inflight_bytes = chunk},
                [this](std::vector<Outcome> some) {
                    const std::lock_guard lock(mutex);
                    std::move(some.begin(), some.end(), std::back_inserter(outcomes));
                    ended.notify_all();
                }};
};

}  // namespace

TEST(a_deadline_ends_what_waits_for_a_drive_that_hangs) {
    Hung hung;
    (void)hung.submit(2, Clock::now() + 200ms);
    const Outcome outcome = hung.first();
    CHECK_EQ(outcome.id, 2);
    CHECK_EQ(outcome.error, ETIMEDOUT);
}

TEST(a_stop_ends_what_waits_for_a_drive_that_hangs) {
    Hung hung;
    const std::shared_ptr<Ticket> ticket = hung.submit(2);
    hung.gate.until_it_waits(2);
    ticket->stop();
    hung.drive.end_stopped();
    const Outcome outcome = hung.first();
    CHECK_EQ(outcome.id, 2);
    CHECK_EQ(outcome.error, ECANCELED);
}

TEST(a_deadline_ends_what_waits_for_memory_to_be_registered) {
    Hung hung;
    hung.drive.use_arenas({});
    (void)hung.submit(2, Clock::now());
    const Outcome outcome = hung.first();
    CHECK_EQ(outcome.id, 2);
    CHECK_EQ(outcome.error, ETIMEDOUT);
}

namespace {

// Breaks at its first request, and is destroyed slowly: not before `left_alone` is set.
class Breaking final : public Backend {
  public:
    struct Signals {
        // Relaxed, so that they order nothing between the drive's thread and the test's.
        std::atomic<bool> being_destroyed = false;
        std::atomic<bool> left_alone = false;
    };

    explicit Breaking(Signals& signals) : signals_(signals) {}
    ~Breaking() override {
        signals_.being_destroyed.store(true, std::memory_order_relaxed);
        while (!signals_.left_alone.load(std::memory_order_relaxed))
            std::this_thread::sleep_for(1ms);
    }
    [[nodiscard]] std::string_view name() const noexcept override { return "breaking"; }
    [[nodiscard]] bool serves_any_thread() const noexcept override { return true; }
    [[nodiscard]] unsigned capacity() const noexcept override { return 4; }
    [[nodiscard]] bool push(const Request& /*request*/) override { return true; }
    [[nodiscard]] std::size_t submit_and_reap(std::span<Completion> /*out*/,
                                              Wait /*wait*/) override {
        throw std::system_error(EIO, std::generic_category(), "broken");
    }
    void wake() noexcept override {}

  private:
    Signals& signals_;
};

}  // namespace

// The thread sanitizer sees a loop that takes the backend while it is let go of.
TEST(a_loop_that_comes_while_a_broken_backend_is_destroyed_does_not_find_it) {
    Bench other;  // for its file
    Breaking::Signals signals;
    std::atomic<int> failed = 0;
    Drive drive(std::make_unique<Breaking>(signals), {.chunk_bytes = chunk},
                [&](const std::vector<Outcome>& outcomes) {
                    for (const Outcome& outcome : outcomes) failed += outcome.error == EIO ? 1 : 0;
                });
    std::vector<std::byte> memory = pattern(100, 1);
    Operation operation;
    operation.verb = Verb::write;
    operation.file = other.file;
    operation.memory = memory.data();
    operation.length = memory.size();
    drive.submit(std::span(&operation, 1), Issue::now);
    while (!signals.being_destroyed.load(std::memory_order_relaxed))
        std::this_thread::sleep_for(1ms);
    const bool found = drive.serve_loop(std::make_shared<Doorbell>());
    signals.left_alone.store(true, std::memory_order_relaxed);
    drive.stop();
    CHECK(!found);
    CHECK_EQ(failed.load(), 1);
}

// Threads that wait lead the drive in turn; one of them serves an event loop's bell instead.
TEST(threads_that_submit_wait_and_serve_a_loop_lose_no_operation) {
    for (const std::string name : {"uring", "aio", "threads"}) {
        std::string path = (std::filesystem::temp_directory_path() / "deepnvme-XXXXXX").string();
        const int descriptor = ::mkostemp(path.data(), O_CLOEXEC);
        CHECK(descriptor >= 0);
        ::close(descriptor);
        QueueOptions options = in_memory();
        options.backend = name;
        try {
            Queue queue(options);
            const auto file = queue.open(path, OpenMode::update, DirectIO::automatic, 0600);
            constexpr unsigned threads = 4;
            constexpr unsigned each = 60;
            std::atomic<unsigned> taken{0};
            const auto take = [&](const std::vector<Outcome>& outcomes) {
                for (const Outcome& outcome : outcomes) {
                    CHECK_EQ(outcome.ending, Ending::succeeded);
                }
                taken += static_cast<unsigned>(outcomes.size());
                if (!outcomes.empty()) queue.hand_back({});
            };
            std::thread listener([&] {
                for (auto ended = queue.wait_ended(); !ended.empty(); ended = queue.wait_ended()) {
                    taken += static_cast<unsigned>(ended.size());
                }
            });
            std::vector<std::thread> workers;
            for (unsigned i = 0; i < threads; ++i) {
                workers.emplace_back([&, i] {
                    const auto bell = std::make_shared<Doorbell>();
                    const Arena memory(2U << 20);
                    for (unsigned n = 0; n < each; ++n) {
                        Operation operation;
                        operation.ticket = std::make_shared<Ticket>();
                        operation.verb = n % 3 == 0 ? Verb::read : Verb::write;
                        operation.at_end_of_file = AtEndOfFile::stops;
                        operation.file = file;
                        operation.memory = memory.data();
                        operation.length = n % 7 == 0 ? 3 * chunk : 4096;
                        operation.offset = std::uint64_t{i} * (1U << 20) + n % 5 * 100;
                        const std::shared_ptr<Ticket> ticket = operation.ticket;
                        CHECK(queue.submit(std::move(operation), long_enough));
                        if (i == 0) {
                            queue.hear(*ticket, bell);
                            queue.serve_loop(*bell);
                            take(queue.take_ended());
                        }
                        std::optional<std::vector<Outcome>> ended;
                        while (!ended) ended = queue.wait_for(*ticket, n % 2 == 0 ? 1s : 1ms);
                        take(*ended);
                    }
                });
            }
            for (std::thread& worker : workers) worker.join();
            CHECK(queue.close(long_enough));
            listener.join();
            CHECK_EQ(taken.load(), threads * each);
        } catch (const std::system_error& refusal) {
            if (refusal.code().value() != EPERM && refusal.code().value() != ENOSYS) throw;
        }
        ::unlink(path.c_str());
    }
}

namespace {

// A backend that gets no threads of its own.
class Alone final : public Backend {
  public:
    [[nodiscard]] std::string_view name() const noexcept override { return "alone"; }
    void attach() override {
        throw std::system_error(EAGAIN, std::generic_category(), "no thread");
    }
    [[nodiscard]] unsigned capacity() const noexcept override { return 1; }
    [[nodiscard]] bool push(const Request& /*request*/) override { return false; }
    [[nodiscard]] std::size_t submit_and_reap(std::span<Completion> /*out*/,
                                              Wait /*wait*/) override {
        return 0;
    }
    void wake() noexcept override {}
};

}  // namespace

TEST(a_backend_that_gets_no_thread_is_not_blamed_for_it) {
    int told = 0;
    try {
        Drive drive(std::make_unique<Alone>(), {.chunk_bytes = chunk},
                    [](const std::vector<Outcome>&) {});
    } catch (const BackendError&) {
        CHECK(false);
    } catch (const std::system_error& error) {
        told = error.code().value();
        CHECK(std::string_view(error.what()).find("ulimit -u") != std::string_view::npos);
    }
    CHECK_EQ(told, EAGAIN);
}

TEST(wrong_options_are_refused_before_a_thread_starts) {
    QueueOptions odd = in_memory();
    odd.drive.chunk_bytes = 100000;
    CHECK_THROWS(Queue{odd}, std::invalid_argument);
    QueueOptions unknown = in_memory();
    unknown.backend = "floppy";
    CHECK_THROWS(Queue{unknown}, std::invalid_argument);
}

TEST(a_file_that_cannot_be_opened_says_why) {
    Queue queue(in_memory());
    try {
        (void)queue.open("missing", OpenMode::read, DirectIO::automatic, 0600);
        CHECK(false);
    } catch (const FileError& error) {
        CHECK_EQ(error.code().value(), ENOENT);
        CHECK_EQ(error.path(), "missing");
    }
}

namespace {

std::function<void()> after_fstat;  // empty: nothing
bool can_reserve = true;
int sync_error = 0;

std::string path_of_new_file() {
    std::string path = (std::filesystem::temp_directory_path() / "deepnvme-XXXXXX").string();
    const int descriptor = ::mkostemp(path.data(), O_CLOEXEC);
    CHECK(descriptor >= 0);
    ::close(descriptor);
    return path;
}

}  // namespace

// In place of the C library's, for the library under test too. Before 2.33 it was no function.
// Other C libraries have no __GLIBC_PREREQ.
#ifdef __GLIBC_PREREQ
#if __GLIBC_PREREQ(2, 33)
extern "C" int fstat(int descriptor, struct stat* status) noexcept {
    const int result = ::fstatat(descriptor, "", status, AT_EMPTY_PATH);
    if (after_fstat) after_fstat();
    return result;
}
#endif
#endif

extern "C" int fallocate(int descriptor, int mode, off_t offset, off_t length) {
    if (can_reserve)
        return static_cast<int>(::syscall(SYS_fallocate, descriptor, mode, offset, length));
    errno = EOPNOTSUPP;
    return -1;
}

extern "C" int fdatasync(int descriptor) {
    if (sync_error == 0) return static_cast<int>(::syscall(SYS_fdatasync, descriptor));
    errno = sync_error;
    return -1;
}

TEST(opening_a_file_again_forgets_no_write_that_ended_meanwhile) {
    std::string path = (std::filesystem::temp_directory_path() / "deepnvme-XXXXXX").string();
    const int descriptor = ::mkostemp(path.data(), O_CLOEXEC);
    CHECK(descriptor >= 0);
    OpenFile file(path, OpenMode::update, DirectIO::never, 0600);
    std::uint64_t writes = 0;
    after_fstat = [&] {
        if (writes == 5) return;
        CHECK_EQ(::pwrite(descriptor, "x", 1, static_cast<off_t>(writes)), 1);
        file.wrote_until(++writes);
    };
    const OpenFile again(path, OpenMode::read, DirectIO::never, 0600);
    after_fstat = nullptr;
    ::close(descriptor);
    ::unlink(path.c_str());
    if (writes == 0) SKIP("the C library's fstat is no function that a test can take the place of");
    CHECK_EQ(file.expected_length(), file.length());
}

TEST(zeros_in_place_of_a_reservation_end_a_piece_behind_what_was_asked_for_at_most) {
    constexpr std::uint64_t asked = 4 << 20;
    constexpr std::uint64_t piece = 64 << 10;
    const std::string path = path_of_new_file();
    OpenFile file(path, OpenMode::update, DirectIO::never, 0600);
    const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    bool written = false;
    after_fstat = [&] {
        if (std::exchange(written, true)) return;
        CHECK_EQ(::pwrite(descriptor, "x", 1, asked - 2), 1);
    };
    can_reserve = false;
    file.preallocate(asked);
    can_reserve = true;
    after_fstat = nullptr;
    char kept = 0;
    CHECK_EQ(::pread(descriptor, &kept, 1, asked - 2), 1);
    ::close(descriptor);
    ::unlink(path.c_str());
    if (!written) SKIP("the C library's fstat is no function that a test can take the place of");
    CHECK(kept == 'x');
    CHECK(file.length() >= asked);
    CHECK(file.length() < asked + piece);
}

TEST(a_reservation_by_zeros_fails_where_they_find_no_room_when_they_are_written_back) {
    const std::string path = path_of_new_file();
    OpenFile file(path, OpenMode::update, DirectIO::never, 0600);
    can_reserve = false;
    sync_error = ENOSPC;
    int told = 0;
    try {
        file.preallocate(1 << 20);
    } catch (const FileError& error) {
        told = error.code().value();
    }
    can_reserve = true;
    sync_error = 0;
    ::unlink(path.c_str());
    CHECK_EQ(told, ENOSPC);
}

TEST(pool_pieces_do_not_overlap_and_come_back_whole) {
    const std::shared_ptr<Pool> pool = Pool::make(8 << 20);
    std::vector<std::shared_ptr<Block>> blocks;
    for (const std::size_t nbytes : {1UL, 4096UL, 5000UL, 1UL << 20, 3UL << 20})
        blocks.push_back(pool->take(nbytes));
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        CHECK_EQ(reinterpret_cast<std::uintptr_t>(blocks[i]->data()) % 4096, 0);
        std::memset(blocks[i]->data(), static_cast<int>(i + 1), blocks[i]->size());
    }
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        CHECK_EQ(static_cast<std::size_t>(blocks[i]->data()[0]), i + 1);
        CHECK_EQ(static_cast<std::size_t>(blocks[i]->data()[blocks[i]->size() - 1]), i + 1);
    }
    blocks.erase(blocks.begin() + 1);
    blocks.clear();
    CHECK_EQ(pool->largest_free(), pool->capacity());
}

TEST(a_planned_piece_is_where_the_plan_says_and_nowhere_else) {
    const std::shared_ptr<Pool> pool = Pool::make(1 << 20);
    const std::shared_ptr<Block> first = pool->take_at(8192, 5000);
    CHECK_EQ(pool->largest_free(), (1U << 20) - 16384);
    CHECK_THROWS((void)pool->take_at(4096, 4097), PoolExhausted);
    CHECK_THROWS((void)pool->take_at(12288, 1), PoolExhausted);
    const std::shared_ptr<Block> before = pool->take_at(0, 8192);
    const std::shared_ptr<Block> after = pool->take_at(16384, (1 << 20) - 16384);
    CHECK_EQ(before->data() + 8192, first->data());
    CHECK_EQ(pool->free_bytes(), 0);
}

TEST(a_place_outside_of_the_pool_or_within_a_page_is_refused) {
    const std::shared_ptr<Pool> pool = Pool::make(1 << 20);
    CHECK_THROWS((void)pool->take_at(100, 10), std::invalid_argument);
    CHECK_THROWS((void)pool->take_at(0, 0), std::invalid_argument);
    CHECK_THROWS((void)pool->take_at(1 << 20, 1), std::invalid_argument);
    CHECK_THROWS((void)pool->take_at(4096, ~std::size_t{0}), std::invalid_argument);
    CHECK_EQ(pool->free_bytes(), pool->capacity());
}

TEST(an_exhausted_pool_says_what_is_free) {
    const std::shared_ptr<Pool> pool = Pool::make(1 << 20);
    const std::shared_ptr<Block> held = pool->take(700 << 10);
    try {
        (void)pool->take(500 << 10);
        CHECK(false);
    } catch (const PoolExhausted& error) {
        const std::string left = std::to_string((1U << 20) - (700U << 10));
        CHECK(std::string(error.what())
                  .find(left + " of 1048576 bytes are free, the largest piece has " + left) !=
              std::string::npos);
    }
}
