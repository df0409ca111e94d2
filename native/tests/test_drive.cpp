// What becomes of operations: chunks, budgets, short transfers, errors, cancellation, closing. On memory and
// fault backends, so that every path is taken on purpose; the Python suite repeats the user's view on real
// drives.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "deepnvme/drive.hpp"
#include "deepnvme/error.hpp"
#include "deepnvme/pool.hpp"
#include "deepnvme/queue.hpp"

using namespace deepnvme;

namespace {

constexpr std::uint32_t chunk = 64 << 10;

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
        : queue(std::move(options)), file(queue.open("file", OpenMode::create, DirectIO::automatic, 0600)) {}

    std::uint64_t submit(Verb verb, std::vector<std::byte>& memory, std::uint64_t offset,
                         AtEndOfFile at_end = AtEndOfFile::fails) {
        Operation operation;
        operation.id = next++;
        operation.verb = verb;
        operation.at_end_of_file = at_end;
        operation.file = file;
        operation.memory = memory.data();
        operation.length = memory.size();
        operation.offset = offset;
        queue.submit(std::move(operation));
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
    Bench bench(in_memory(one_rule({.kind = FaultRule::Kind::shorten, .every = 1, .length = 24576})));
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
    Bench bench(in_memory(
        one_rule({.kind = FaultRule::Kind::delay, .verbs = {Verb::write}, .every = 1, .delay_us = 3000})));
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
    bench.queue.submit(std::move(operation));
    CHECK_EQ(bench.outcome(999).ending, Ending::cancelled);
    CHECK_EQ(bench.outcome(blocker).ending, Ending::succeeded);
    CHECK(untouched == std::vector<std::byte>(chunk, std::byte{0xEE}));
}

TEST(closing_drains_what_was_submitted) {
    Bench bench(in_memory(one_rule({.kind = FaultRule::Kind::delay, .every = 4, .delay_us = 2000})));
    std::vector<std::vector<std::byte>> all;
    for (unsigned i = 0; i < 20; ++i) all.push_back(pattern(chunk, i));
    for (unsigned i = 0; i < 20; ++i) (void)bench.submit(Verb::write, all[i], std::uint64_t{i} * chunk);
    bench.queue.close();
    CHECK_EQ(bench.queue.pending(), 0);
    for (std::uint64_t id = 1; id <= 20; ++id) CHECK_EQ(bench.outcome(id).ending, Ending::succeeded);
    CHECK(bench.queue.wait_ended().empty());
    std::vector<std::byte> late(1);
    CHECK_THROWS(bench.submit(Verb::write, late, 0), ClosedError);
    CHECK_EQ(bench.stats().operations, 20);
}

TEST(a_full_queue_refuses_or_waits) {
    QueueOptions options = in_memory(one_rule({.kind = FaultRule::Kind::delay, .nth = 1, .delay_us = 20000}));
    options.max_pending = 2;
    Bench bench(std::move(options));
    std::vector<std::byte> memory = pattern(chunk, 12);
    (void)bench.submit(Verb::write, memory, 0);
    (void)bench.submit(Verb::write, memory, 0);
    Operation third;
    third.id = 77;
    third.verb = Verb::write;
    third.file = bench.file;
    third.memory = memory.data();
    third.length = memory.size();
    const bool taken = bench.queue.try_submit(third);
    if (taken) {  // only if both had ended already
        CHECK_EQ(bench.outcome(77).ending, Ending::succeeded);
    } else {
        bench.queue.submit(third);
        CHECK_EQ(bench.outcome(77).ending, Ending::succeeded);
    }
    CHECK_EQ(bench.outcome(1).ending, Ending::succeeded);
    CHECK_EQ(bench.outcome(2).ending, Ending::succeeded);
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
                bench.queue.submit(std::move(operation));
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

TEST(an_exhausted_pool_says_what_is_free) {
    const std::shared_ptr<Pool> pool = Pool::make(1 << 20);
    const std::shared_ptr<Block> held = pool->take(700 << 10);
    try {
        (void)pool->take(500 << 10);
        CHECK(false);
    } catch (const PoolExhausted& error) {
        CHECK_EQ(error.free, (1U << 20) - (700U << 10));
        CHECK_EQ(error.largest, error.free);
    }
}
