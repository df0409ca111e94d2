// The fault backend must do exactly what its plan says, every time, and lose nothing while it does.
#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backend_bench.hpp"
#include "check.hpp"
#include "deepnvme/backend.hpp"

using namespace bench;
using namespace std::chrono_literals;
using deepnvme::FaultPlan;
using deepnvme::FaultRule;
using Kind = FaultRule::Kind;
using Clock = std::chrono::steady_clock;

namespace {

std::unique_ptr<Backend> faulty(std::string_view inner, unsigned depth, FaultPlan plan) {
    auto backend =
        deepnvme::make_fault_backend(deepnvme::make_backend(inner, depth), std::move(plan));
    backend->attach();
    return backend;
}

std::unique_ptr<Backend> faulty(std::vector<FaultRule> rules) {
    return faulty("memory", 64, {.rules = std::move(rules)});
}

// Tokens in the order in which they complete, when all are pushed at once.
std::vector<std::uint64_t> order_of(Backend& backend, const std::vector<Request>& requests) {
    for (const Request& request : requests) CHECK(backend.push(request));
    std::vector<std::uint64_t> order;
    std::array<Completion, 64> out;
    while (order.size() < requests.size()) {
        const std::size_t count = backend.submit_and_reap(out, Wait::some);
        for (const Completion& one : std::span(out).first(count)) order.push_back(one.token);
    }
    return order;
}

using Order = std::vector<std::uint64_t>;

// Tokens that failed.
Order failures_of(Backend& backend, const std::vector<Request>& requests) {
    Order failed;
    for (const auto& [token, result] : run(backend, requests)) {
        if (result < 0) failed.push_back(token);
    }
    return failed;
}

}  // namespace

// ---- which requests a rule strikes
// --------------------------------------------------------------------------------

TEST(each_nth_request_of_a_workload_can_fail_and_no_other_does) {
    constexpr std::size_t count = 60;
    constexpr std::uint32_t chunk = 512;
    for (std::uint64_t nth = 1; nth <= count; ++nth) {
        const Memory source(count * chunk);
        source.fill(0x77);
        const Memory target(count * chunk);
        target.fill(0x11);
        const TestFile file(target.bytes());
        std::vector<Request> requests = cover(Verb::write, file.plain(), source, chunk);
        for (Request& request : requests) {
            if (request.token % 3 == 1)
                request.verb = Verb::read, request.memory = target.at(request.offset);
            if (request.token % 3 == 2) request.verb = Verb::sync_data;
        }

        const auto backend = faulty({{.kind = Kind::fail, .nth = nth, .error = ENOSPC}});
        for (const auto& [token, result] : run(*backend, requests)) {
            CHECK_EQ(result, token + 1 == nth ? -ENOSPC : token % 3 == 2 ? 0 : 512);
        }

        CHECK_EQ(::pread(file.plain(), target.at(0), target.size(), 0), target.size());
        for (std::size_t i = 0; i < count; ++i) {
            const bool written = i % 3 == 0 && i + 1 != nth;
            CHECK(*target.at(i * chunk) == std::byte(written ? 0x77 : 0x11));
        }
    }
}

TEST(a_rule_counts_only_the_verbs_that_it_names) {
    const Memory memory(64 * kib);
    const TestFile file(memory.bytes());
    std::vector<Request> requests = cover(Verb::read, file.plain(), memory, 8 * kib);
    for (Request& request : requests) {
        if (request.token % 2 == 1) request.verb = Verb::sync_all;
    }

    const auto backend =
        faulty({{.kind = Kind::fail, .verbs = {Verb::sync_all, Verb::write}, .nth = 2}});

    CHECK_EQ(failures_of(*backend, requests), Order{3});
}

TEST(a_rule_can_strike_every_so_many) {
    const Memory memory(64 * kib);
    const TestFile file(memory.bytes());

    const auto backend = faulty({{.kind = Kind::fail, .every = 3}});

    CHECK_EQ(failures_of(*backend, cover(Verb::read, file.plain(), memory, 8 * kib)),
             (Order{2, 5}));
}

TEST(a_refused_push_is_not_counted) {
    const Memory memory(64 * kib);
    const TestFile file(memory.bytes());
    const auto requests = cover(Verb::read, file.plain(), memory, 8 * kib);
    const auto backend = faulty("memory", 2, {.rules = {{.kind = Kind::fail, .nth = 3}}});
    CHECK(backend->push(requests[0]));
    CHECK(backend->push(requests[1]));
    for (int i = 0; i < 10; ++i) CHECK(!backend->push(requests[2]));

    std::array<Completion, 4> out;
    CHECK_EQ(backend->submit_and_reap(out, Wait::some), 2);

    CHECK_EQ(failures_of(*backend, {requests[2], requests[3]}), Order{2});
}

TEST(probability_is_drawn_from_the_seed_and_nothing_else) {
    const Memory memory(500 * 512);
    const TestFile file(memory.bytes());
    const auto requests = cover(Verb::read, file.plain(), memory, 512);
    const auto failed = [&](std::uint64_t seed, double probability, std::string_view inner) {
        const FaultRule rule{.kind = Kind::fail, .probability = probability};
        return failures_of(*faulty(inner, 16, {.seed = seed, .rules = {rule}}), requests);
    };

    const Order of_seed_1 = failed(1, 0.3, "memory");

    CHECK_EQ(of_seed_1, failed(1, 0.3, "memory"));
    CHECK_EQ(of_seed_1, failed(1, 0.3, "threads"));
    CHECK(of_seed_1 != failed(2, 0.3, "memory"));
    CHECK(of_seed_1.size() > 100 && of_seed_1.size() < 200);
    CHECK_EQ(failed(1, 0.0, "memory").size(), 0);
    CHECK_EQ(failed(1, 1.0, "memory").size(), 500);
}

TEST(a_rule_draws_the_same_whatever_rules_stand_beside_it) {
    const Memory memory(100 * 512);
    const TestFile file(memory.bytes());
    const auto requests = cover(Verb::read, file.plain(), memory, 512);
    const FaultRule rule{.kind = Kind::fail, .probability = 0.2};
    const FaultRule beside{.kind = Kind::shorten, .probability = 0.5, .length = 100};

    const Order alone = failures_of(*faulty({rule}), requests);

    CHECK(!alone.empty());
    CHECK_EQ(failures_of(*faulty({rule, beside}), requests), alone);
}

// ---- what a rule does
// ------------------------------------------------------------------------------------------

TEST(a_shortened_request_moves_that_many_bytes_and_no_more) {
    const Memory content(64 * kib);
    content.fill(0x77);
    const TestFile file(content.bytes());
    for (const auto& [asked, limit, expected] :
         std::vector<std::array<std::uint32_t, 3>>{{8192, 100, 100},
                                                   {8192, 0, 4096},
                                                   {3000, 0, 1024},
                                                   {1000, 0, 500},
                                                   {2, 0, 1},
                                                   {1, 0, 1},
                                                   {50, 100, 50}}) {
        const Memory target(64 * kib);
        const auto backend = faulty({{.kind = Kind::shorten, .every = 1, .length = limit}});

        const auto result =
            run_one(*backend, {.fd = file.plain(), .memory = target.at(0), .length = asked});

        CHECK_EQ(result, expected);
        CHECK(*target.at(expected - 1) == std::byte(0x77));
        CHECK(*target.at(expected) == std::byte(0));
    }
}

TEST(a_shortened_write_leaves_the_rest_of_the_file_alone_and_a_sync_stays_whole) {
    const Memory memory(8192);
    memory.fill(0x11);
    const TestFile file(memory.bytes());
    memory.fill(0x22);
    const auto backend = faulty({{.kind = Kind::shorten, .every = 1}});

    CHECK_EQ(
        run_one(*backend,
                {.verb = Verb::write, .fd = file.plain(), .memory = memory.at(0), .length = 8192}),
        4096);
    CHECK_EQ(run_one(*backend, {.verb = Verb::sync_data, .fd = file.plain()}), 0);

    CHECK_EQ(::pread(file.plain(), memory.at(0), 8192, 0), 8192);
    CHECK(*memory.at(4095) == std::byte(0x22));
    CHECK(*memory.at(4096) == std::byte(0x11));
}

TEST(a_delayed_request_completes_no_earlier_and_others_pass_it) {
    const Memory memory(16 * kib);
    const TestFile file(memory.bytes());
    const auto backend = faulty({{.kind = Kind::delay, .nth = 2, .delay_us = 30'000}});

    const auto start = Clock::now();
    const Order order = order_of(*backend, cover(Verb::read, file.plain(), memory, 4 * kib));

    CHECK_EQ(order, (Order{0, 2, 3, 1}));
    CHECK(Clock::now() - start >= 30ms);
}

TEST(a_failure_can_be_delayed) {
    const auto backend = faulty(
        {{.kind = Kind::fail, .every = 1}, {.kind = Kind::delay, .every = 1, .delay_us = 10'000}});

    const auto start = Clock::now();

    CHECK_EQ(run_one(*backend, {.verb = Verb::sync_all}), -EIO);
    CHECK(Clock::now() - start >= 10ms);
}

TEST(a_reordered_request_is_overtaken_by_so_many) {
    const Memory memory(32 * kib);
    const TestFile file(memory.bytes());
    const auto requests = cover(Verb::read, file.plain(), memory, 4 * kib);

    CHECK_EQ(order_of(*faulty({{.kind = Kind::reorder, .nth = 2, .hold = 3}}), requests),
             (Order{0, 2, 3, 4, 1, 5, 6, 7}));
    CHECK_EQ(order_of(*faulty({{.kind = Kind::reorder, .every = 2, .hold = 2}}), requests),
             (Order{0, 2, 4, 1, 6, 3, 5, 7}));
}

TEST(a_reordered_request_is_let_go_when_nothing_else_is_in_flight) {
    const Memory memory(16 * kib);
    const TestFile file(memory.bytes());
    const auto requests = cover(Verb::read, file.plain(), memory, 4 * kib);
    for (const std::string_view inner : {"memory", "threads"}) {
        const auto backend =
            faulty(inner, 8, {.rules = {{.kind = Kind::reorder, .every = 1, .hold = 1000}}});

        CHECK_EQ(run(*backend, requests).size(), requests.size());
        CHECK_EQ(run(*backend, {requests[0]}).size(), 1);
    }
}

TEST(a_reordered_request_waits_for_what_the_wrapped_backend_still_has) {
    const Memory memory(16 * kib);
    const TestFile file(memory.bytes());
    auto slow = deepnvme::make_fault_backend(
        deepnvme::make_backend("memory", 8),
        {.rules = {{.kind = Kind::delay, .nth = 2, .delay_us = 10'000}}});
    const auto backend = deepnvme::make_fault_backend(
        std::move(slow), {.rules = {{.kind = Kind::reorder, .nth = 1, .hold = 1}}});
    backend->attach();

    CHECK_EQ(backend->name(), "fault(fault(memory))");
    CHECK_EQ(order_of(*backend, cover(Verb::read, file.plain(), memory, 8 * kib)), (Order{1, 0}));
}

TEST(throttled_completions_take_at_least_their_time) {
    const Memory memory(64 * kib);
    const TestFile file(memory.bytes());
    const auto backend = faulty({{.kind = Kind::throttle, .every = 1, .bytes_per_s = 2.0 * mib}});

    const auto start = Clock::now();
    const Order order = order_of(*backend, cover(Verb::read, file.plain(), memory, 16 * kib));

    CHECK_EQ(order, (Order{0, 1, 2, 3}));
    CHECK(Clock::now() - start >= 31ms);  // 64 KiB at 2 MiB/s
}

TEST(several_rules_can_strike_one_request_and_the_first_failure_counts) {
    const Memory memory(8192);
    const TestFile file(memory.bytes());
    const Request request{.fd = file.plain(), .memory = memory.at(0), .length = 8192};
    const auto shortened_twice = faulty(
        {{.kind = Kind::shorten, .every = 1}, {.kind = Kind::shorten, .every = 1, .length = 1000}});
    const auto failed_twice = faulty({{.kind = Kind::fail, .every = 1, .error = ENOSPC},
                                      {.kind = Kind::fail, .every = 1, .error = EIO}});

    CHECK_EQ(run_one(*shortened_twice, request), 1000);
    CHECK_EQ(run_one(*failed_twice, request), -ENOSPC);
}

// ---- nothing is lost
// ------------------------------------------------------------------------------------------

TEST(under_all_rules_at_once_every_request_completes_exactly_once) {
    const Memory memory(256 * kib);
    const TestFile file(memory.bytes());
    std::string refused;
    for (const std::string inner : {"uring", "aio", "threads", "memory"}) {
        for (std::uint64_t seed = 0; seed < 5; ++seed) {
            const FaultPlan plan{
                .seed = seed,
                .rules = {{.kind = Kind::fail, .probability = 0.1},
                          {.kind = Kind::shorten, .probability = 0.2},
                          {.kind = Kind::delay, .probability = 0.2, .delay_us = 300},
                          {.kind = Kind::reorder, .probability = 0.3, .hold = 5},
                          {.kind = Kind::throttle, .probability = 0.3, .bytes_per_s = 64.0 * mib}}};
            std::unique_ptr<Backend> backend;
            try {
                backend = faulty(inner, 7, plan);
            } catch (const std::system_error& error) {
                refused = error.what();
                break;
            }
            std::map<std::uint64_t, std::int64_t> expected;
            for (const auto& [token, result] :
                 run(*faulty("memory", 7, plan), cover(Verb::read, file.fd(), memory, 4 * kib))) {
                expected[token] = result;
            }

            const auto results = run(*backend, cover(Verb::read, file.fd(), memory, 4 * kib));

            CHECK_EQ(results.size(), 64);
            CHECK(results == expected);
        }
    }
    if (!refused.empty()) SKIP("the others passed, but this kernel refuses " + refused);
}

TEST(held_completions_count_as_pending) {
    const Memory memory(64 * kib);
    const TestFile file(memory.bytes());
    const auto requests = cover(Verb::read, file.plain(), memory, 4 * kib);
    const auto backend = faulty(
        "memory", 2, {.rules = {{.kind = Kind::delay, .every = 1, .delay_us = 3'600'000'000}}});
    std::array<Completion, 4> out;
    CHECK(backend->push(requests[0]));
    CHECK(backend->push(requests[1]));

    CHECK_EQ(backend->submit_and_reap(out, Wait::none), 0);

    CHECK(!backend->push(requests[2]));
}

TEST(a_wake_ends_a_wait_for_held_completions) {
    const Memory memory(64 * kib);
    const TestFile file(memory.bytes());
    const auto backend = faulty(
        "threads", 4, {.rules = {{.kind = Kind::delay, .every = 1, .delay_us = 3'600'000'000}}});
    std::array<Completion, 4> out;
    for (int round = 0; round < 3; ++round) {
        const auto place = static_cast<std::uint64_t>(round) * 4096;
        CHECK(backend->push({.fd = file.plain(), .memory = memory.at(place), .length = 4096}));
        const std::jthread other([&] {
            std::this_thread::sleep_for(5ms);
            backend->wake();
        });
        CHECK_EQ(backend->submit_and_reap(out, Wait::some), 0);
    }
    // And so it goes, an hour early, with three completions held.
}

TEST(a_wake_ends_a_wait_with_nothing_in_flight) {
    const auto backend = faulty({});
    std::array<Completion, 4> out;
    std::atomic<bool> called = false;
    const std::jthread other([&] {
        std::this_thread::sleep_for(20ms);
        called = true;
        backend->wake();
    });

    const std::size_t count = backend->submit_and_reap(out, Wait::some);

    CHECK_EQ(count, 0);
    CHECK(called);
}

TEST(a_wake_before_the_wait_is_not_lost) {
    const auto backend = faulty({{.kind = Kind::delay, .every = 1, .delay_us = 1}});
    std::array<Completion, 4> out;
    for (int round = 0; round < 3; ++round) {
        backend->wake();
        CHECK_EQ(backend->submit_and_reap(out, Wait::none), 0);
        CHECK_EQ(backend->submit_and_reap(out, Wait::some), 0);
    }
}

TEST(wakes_from_many_threads_disturb_no_held_completion) {
    const Memory memory(256 * kib);
    const TestFile file(memory.bytes());
    const auto backend = faulty("threads", 5,
                                {.rules = {{.kind = Kind::delay, .every = 2, .delay_us = 100},
                                           {.kind = Kind::reorder, .every = 3, .hold = 2}}});
    std::atomic<bool> stop = false;
    std::vector<std::thread> others;
    for (int i = 0; i < 2; ++i) {
        others.emplace_back([&] {
            while (!stop) {
                backend->wake();
                std::this_thread::yield();
            }
        });
    }

    std::string failure;
    try {
        for (const auto& [token, result] :
             run(*backend, cover(Verb::read, file.plain(), memory, kib))) {
            CHECK_EQ(result, kib);
        }
    } catch (const std::exception& error) {
        failure = error.what();
    }
    stop = true;
    for (std::thread& other : others) other.join();

    CHECK_EQ(failure, "");
}

// ---- the wrapping
// ------------------------------------------------------------------------------------------

TEST(it_says_what_it_wraps_and_has_its_room_and_registration) {
    const Memory memory(4096);
    const std::array buffers = {memory.vector()};
    const auto backend = faulty("memory", 9, {});

    CHECK_EQ(backend->name(), "fault(memory)");
    CHECK_EQ(backend->capacity(), 9);
    CHECK_EQ(backend->register_buffers(buffers), EOPNOTSUPP);
}

TEST(a_rule_that_means_nothing_is_refused) {
    for (const FaultRule& rule :
         std::vector<FaultRule>{{.kind = Kind::fail, .error = 0},
                                {.kind = Kind::fail, .error = -5},
                                {.kind = Kind::fail, .probability = 1.5},
                                {.kind = Kind::fail, .probability = -0.1},
                                {.kind = Kind::delay, .delay_us = 0},
                                {.kind = Kind::reorder, .hold = 0},
                                {.kind = Kind::throttle, .bytes_per_s = 0.0}}) {
        CHECK_THROWS(faulty({rule}), std::invalid_argument);
    }
    CHECK_THROWS(deepnvme::make_fault_backend(nullptr, {}), std::invalid_argument);
}
