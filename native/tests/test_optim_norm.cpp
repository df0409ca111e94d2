// Block sums: their definition, the same bits in every home and with any threads, and what tells an
// overflow.
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "check.hpp"
#include "infinity_optim/engine.hpp"
#include "optim_cases.hpp"

namespace {

using namespace infinity_optim;

[[nodiscard]] u64 address(const auto& values) {
    return reinterpret_cast<u64>(values.data());
}

[[nodiscard]] std::vector<u64> bits_of(const std::vector<double>& sums) {
    std::vector<u64> bits;
    for (const double sum : sums) bits.push_back(std::bit_cast<u64>(sum));
    return bits;
}

[[nodiscard]] std::vector<double> sums_of(const std::vector<u32>& gradient, Format format,
                                          u64 numel, std::string_view home, std::size_t threads) {
    ThreadPool pool(std::vector<int>(threads, -1));
    std::vector<double> sums(block_count(numel));
    block_sums({address(gradient), format, numel}, sums, pool, kernels_of(home));
    return sums;
}

[[nodiscard]] std::vector<u32> values(u64 numel, bool special) {
    optim_cases::Floats floats(numel);
    std::vector<u32> all(numel);
    for (u32& one : all) one = special ? floats.any() : floats.ordinary();
    return all;
}

}  // namespace

TEST(a_block_is_summed_in_32_lanes_and_a_tree) {
    const std::vector<u32> gradient = values(4096 + 1000, false);
    const auto expected = [&](u64 begin, u64 end) {
        double lanes[32] = {};
        for (u64 i = begin; i < end; ++i)
            lanes[(i - begin) % 32] += std::pow(std::bit_cast<float>(gradient[i]), 2.0);
        for (int half = 16; half > 0; half /= 2) {
            for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
        }
        return lanes[0];
    };

    const auto sums = sums_of(gradient, format_fp32, gradient.size(), "scalar", 1);

    CHECK_EQ(sums.size(), 2);
    CHECK_EQ(sums[0], expected(0, 4096));
    CHECK_EQ(sums[1], expected(4096, 5096));
}

TEST(block_sums_have_the_same_bits_in_every_home_and_with_any_threads) {
    for (const u64 numel : {1ull, 31ull, 33ull, 4095ull, 4097ull, 100'003ull}) {
        for (const bool special : {false, true}) {
            const std::vector<u32> gradient = values(numel, special);
            for (const Format format : {format_fp32, format_bf16, format_fp16}) {
                const auto expected = bits_of(sums_of(gradient, format, numel, "scalar", 1));
                for (const std::string_view home : homes()) {
                    for (const std::size_t threads : {1, 2, 8})
                        CHECK(bits_of(sums_of(gradient, format, numel, home, threads)) == expected);
                }
            }
        }
    }
}

TEST(a_sum_is_finite_exactly_where_every_element_is) {
    std::vector<u32> gradient(4096, 0x7f7fffff);  // the largest fp32
    CHECK(std::isfinite(sums_of(gradient, format_fp32, 4096, homes().back(), 1)[0]));
    for (const u32 bad : {0x7f800000u, 0xff800000u, 0x7fc00000u, 0x7f800001u}) {
        gradient[1234] = bad;
        CHECK(!std::isfinite(sums_of(gradient, format_fp32, 4096, homes().back(), 1)[0]));
    }
}

TEST(accumulating_adds_in_fp32_and_returns_the_sums_of_the_result) {
    const u64 numel = 5003;
    ThreadPool pool(std::vector<int>(2, -1));
    const std::vector<u32> first = values(numel, true), second = values(numel + 1, true);
    std::vector<u32> expected;
    std::vector<double> expected_sums;
    for (const std::string_view home : homes()) {
        std::vector<u32> into(
            numel, 0x7fc00000);  // what was there before the first gradient does not matter
        std::vector<double> sums(block_count(numel));
        accumulate(address(into), {address(first), format_bf16, numel}, Sum::begins, sums, pool,
                   kernels_of(home));
        accumulate(address(into), {address(second), format_fp32, numel}, Sum::goes_on, sums, pool,
                   kernels_of(home));
        CHECK(bits_of(sums) == bits_of(sums_of(into, format_fp32, numel, "scalar", 1)));
        if (expected.empty()) expected = into, expected_sums = sums;
        CHECK(into == expected);
        CHECK(bits_of(sums) == bits_of(expected_sums));
    }
}

TEST(the_tree_adds_neighbours_and_an_odd_last_one_moves_up) {
    std::vector<double> five = {1e16, 1.0, 1.0, 1.0, 3.0};
    const double expected = ((1e16 + 1.0) + (1.0 + 1.0)) + 3.0;
    CHECK_EQ(tree_sum(five), expected);
    CHECK_EQ(tree_sum({}), 0.0);
}

TEST(room_for_another_number_of_blocks_is_refused) {
    ThreadPool pool(std::vector<int>(1, -1));
    const std::vector<u32> gradient(5000);
    std::vector<double> sums(1);
    CHECK_THROWS(
        block_sums({address(gradient), format_fp32, 5000}, sums, pool, kernels_of("scalar")),
        std::invalid_argument);
}
