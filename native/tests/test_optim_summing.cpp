// Sums made while an update runs are those of the memory before and after it, whatever of the
// memory the update reaches.
#include <algorithm>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"
#include "deepnvme/crc32c.hpp"
#include "infinity_optim/engine.hpp"
#include "optim_cases.hpp"

namespace {

using namespace infinity_optim;

using Sums = std::vector<u32>;

// The rows of a subgroup of several segments, as an optimizer's states lie in a buffer: masters,
// then each moment; behind them the 16-bit values of each segment on pages of their own.
struct Subgroup {
    explicit Subgroup(const std::vector<u64>& numels, std::uint64_t seed) : numels(numels) {
        for (const u64 numel : numels) total += numel;
        optim_cases::Floats floats(seed);
        states.resize(3 * total);
        for (u32& word : states) word = floats.ordinary();
        gradient.resize(total);
        for (u32& word : gradient) word = floats.ordinary();
        for (const u64 numel : numels) values.emplace_back(numel);
    }

    std::vector<u64> numels;
    u64 total = 0;
    std::vector<u32> states, gradient;
    std::vector<std::vector<u16>> values;

    // Of the segments whose number is not left out.
    [[nodiscard]] std::vector<Segment> segments(std::size_t left_out) {
        std::vector<Segment> made;
        u64 offset = 0;
        for (std::size_t i = 0; i < numels.size(); offset += numels[i++]) {
            if (i == left_out) continue;
            Segment s{};
            s.numel = numels[i];
            s.gradient = reinterpret_cast<u64>(gradient.data() + offset);
            s.master = reinterpret_cast<u64>(states.data() + offset);
            s.states[0] = s.master + 4 * total;
            s.states[1] = s.master + 8 * total;
            s.parameter = reinterpret_cast<u64>(values[i].data());
            s.gradient_format = format_fp32;
            s.parameter_format = format_bf16;
            s.state_format = format_fp32;
            optim_cases::set_constants(s, rule_adam, flag_decoupled_decay);
            made.push_back(s);
        }
        return made;
    }

    // Sorted by address.
    [[nodiscard]] std::vector<Summed> summed(u64 block) {
        std::vector<Summed> made = {
            {reinterpret_cast<u64>(states.data()), 4 * states.size(), block, true, {}, {}}};
        for (std::vector<u16>& value : values) {
            made.push_back(
                {reinterpret_cast<u64>(value.data()), 2 * value.size(), 4096, false, {}, {}});
        }
        std::ranges::sort(made, {}, &Summed::address);
        return made;
    }
};

[[nodiscard]] Sums sums_of(const Summed& summed) {
    Sums sums;
    for (u64 at = 0; at < summed.nbytes; at += summed.block) {
        const auto* const data = reinterpret_cast<const std::byte*>(summed.address + at);
        sums.push_back(deepnvme::crc32c(0, data, std::min(summed.block, summed.nbytes - at)));
    }
    return sums;
}

void check_sums(const std::vector<u64>& numels, u64 block, std::size_t left_out,
                std::size_t threads) {
    ThreadPool pool(std::vector<int>(threads, -1));
    Subgroup subgroup(numels, 11), plain = subgroup;
    std::vector<Summed> summed = subgroup.summed(block);
    std::vector<Sums> before;
    for (const Summed& one : summed) before.push_back(one.with_before ? sums_of(one) : Sums{});
    update(subgroup.segments(left_out), summed, pool, kernels_of(homes().back()));
    for (std::size_t i = 0; i < summed.size(); ++i) {
        CHECK(summed[i].before == before[i]);
        CHECK(summed[i].after == sums_of(summed[i]));
    }
    update(plain.segments(left_out), pool, kernels_of(homes().back()));
    CHECK(subgroup.states == plain.states);
    CHECK(subgroup.values == plain.values);
}

constexpr std::size_t none = 1000;
constexpr u64 mib = u64{1} << 20;

}  // namespace

TEST(sums_made_during_an_update_are_those_of_the_memory_before_and_after_it) {
    check_sums({300'000}, mib, none, 2);
    check_sums({300'001, 7, 65'536, 1}, mib, none, 3);
}

TEST(blocks_may_be_smaller_than_what_a_thread_takes_at_once) {
    check_sums({70'000, 12'345}, 4096, none, 2);
}

TEST(bytes_that_no_segment_of_the_update_has_are_summed_too) {
    for (std::size_t left_out = 0; left_out < 3; ++left_out)
        check_sums({40'000, 50'000, 3'000}, mib, left_out, 2);
}

TEST(what_an_update_writes_without_reading_it_has_its_sums_from_before) {
    ThreadPool pool(std::vector<int>(2, -1));
    Subgroup subgroup({20'000, 30'000}, 5);
    for (std::vector<u16>& value : subgroup.values) std::ranges::fill(value, u16{7});
    std::vector<Summed> summed = subgroup.summed(mib);
    for (Summed& one : summed) one.with_before = true;
    std::vector<Sums> before;
    for (const Summed& one : summed) before.push_back(sums_of(one));
    update(subgroup.segments(none), summed, pool, kernels_of("scalar"));
    for (std::size_t i = 0; i < summed.size(); ++i) CHECK(summed[i].before == before[i]);
}

TEST(segments_of_a_few_elements_share_blocks) {
    check_sums(std::vector<u64>(500, 3), mib, none, 2);
    check_sums(std::vector<u64>(500, 3), 64, 250, 2);
}

TEST(an_update_that_reaches_nothing_of_the_memory_leaves_its_sums) {
    ThreadPool pool(std::vector<int>(2, -1));
    Subgroup subgroup({10'000}, 3), other({5'000}, 4);
    std::vector<Summed> summed = other.summed(mib);
    update(subgroup.segments(none), summed, pool, kernels_of("scalar"));
    for (const Summed& one : summed) CHECK(one.after == sums_of(one));
}

TEST(memory_that_overlaps_or_is_not_sorted_is_refused) {
    ThreadPool pool(std::vector<int>(1, -1));
    Subgroup subgroup({10'000, 10'000}, 3), before = subgroup;
    std::vector<Summed> twice = {subgroup.summed(mib).front(), subgroup.summed(mib).front()};
    std::vector<Summed> without_blocks = subgroup.summed(mib);
    without_blocks.front().block = 0;
    for (std::vector<Summed>* wrong : {&twice, &without_blocks}) {
        std::string said;
        try {
            update(subgroup.segments(none), *wrong, pool, kernels_of("scalar"));
        } catch (const std::invalid_argument& error) {
            said = error.what();
        }
        CHECK(said.starts_with("memory that is summed is sorted by address"));
    }
    CHECK(subgroup.states == before.states);
}
