// The primitives, one value at a time: fma without the instruction, roundings to 16 bits and back,
// the split master.
#define INFINITY_HOME test_home
#define INFINITY_LANES 16
#include "../optim/src/vectors.hpp"

#include <cmath>
#include <cstdint>
#include <limits>

#include "check.hpp"
#include "optim_cases.hpp"

namespace {

using namespace infinity_optim;
using namespace infinity_optim::test_home;
using optim_cases::special;

[[nodiscard]] bool same(float a, float b) {
    return bits_(a) == bits_(b) || (a != a && b != b);
}

// To nearest even, by comparing with the two neighbours that 16 bits have; `widen` gives their
// values.
template <class Widen>
[[nodiscard]] u32 nearest(float x, u32 largest, const Widen& widen) {
    const u32 sign = std::signbit(x) ? 0x8000 : 0;
    const double wanted = std::fabs(double(x));
    u32 low = 0;
    for (u32 step = 0x4000; step > 0; step /= 2) {
        if (low + step <= largest && double(widen(low + step)) <= wanted) low += step;
    }
    const double below = double(widen(low));
    // above the largest comes what would be next, were the exponent not taken for infinity
    const double above =
        low == largest ? 2 * below - double(widen(low - 1)) : double(widen(low + 1));
    const bool up =
        wanted - below > above - wanted || (wanted - below == above - wanted && (low & 1) == 1);
    return sign | (low + (up ? 1 : 0));
}

[[nodiscard]] float wide_bf16(u32 x) {
    return float_(from_bf16_(x));
}
[[nodiscard]] float wide_fp16(u32 x) {
    return float_(from_fp16_(x));
}

}  // namespace

TEST(fma_by_parts_rounds_once) {
    optim_cases::Floats floats(1);
    for (int i = 0; i < 2'000'000; ++i) {
        const float a = float_(floats.any()), b = float_(floats.any()), c = float_(floats.any());
        CHECK(same(fma_by_parts(a, b, c), std::fma(a, b, c)));
    }
}

TEST(fma_by_parts_rounds_once_where_the_sum_nearly_cancels_and_where_it_is_subnormal) {
    optim_cases::Floats floats(2);
    for (int i = 0; i < 500'000; ++i) {
        const float a = float_(floats.ordinary()), b = float_(floats.ordinary());
        const float near = float_(bits_(-(a * b)) + static_cast<u32>(floats.bits() % 5) - 2);
        CHECK(same(fma_by_parts(a, b, near), std::fma(a, b, near)));
        const float tiny = float_(static_cast<u32>(floats.bits() & 0x80ffffff));
        const float small = float_((bits_(a) & 0x807fffff) | 0x01000000);
        CHECK(same(fma_by_parts(small, b, tiny), std::fma(small, b, tiny)));
    }
}

TEST(every_bf16_comes_back_from_fp32) {
    for (u32 x = 0; x < 0x10000; ++x) {
        const bool nan = wide_bf16(x) != wide_bf16(x);
        const u32 wide = bits_(canonical_(wide_bf16(x)));
        CHECK_EQ(to_bf16_(wide), nan ? bf16_nan : x);
        CHECK_EQ(to_bf16_stochastic_(wide, 0xffffu), nan ? bf16_nan : x);
    }
}

TEST(every_fp16_comes_back_from_fp32) {
    for (u32 x = 0; x < 0x10000; ++x) {
        const bool nan = wide_fp16(x) != wide_fp16(x);
        CHECK_EQ(to_fp16_(bits_(canonical_(wide_fp16(x)))), nan ? fp16_nan : x);
    }
}

TEST(fp16_means_what_ieee_says) {
    CHECK(same(wide_fp16(0x3c00), 1.0f));
    CHECK(same(wide_fp16(0x8001), -std::ldexp(1.0f, -24)));
    CHECK(same(wide_fp16(0x03ff), std::ldexp(1023.0f, -24)));
    CHECK(same(wide_fp16(0x0400), std::ldexp(1.0f, -14)));
    CHECK(same(wide_fp16(0x7bff), 65504.0f));
    CHECK(same(wide_fp16(0xfc00), -std::numeric_limits<float>::infinity()));
}

TEST(rounding_to_16_bits_is_to_nearest_even_subnormals_and_overflow_included) {
    optim_cases::Floats floats(3);
    for (int i = 0; i < 300'000; ++i) {
        u32 x = floats.any();
        if (i % 3 == 0) x = (x & 0xffff0000) | 0x8000;  // ties of bf16
        if (i % 3 == 1)
            x = (x & 0x80000000) | ((102 + x % 44) << 23) | (x & 0x7fe000) |
                0x1000;  // ties of fp16
        const float value = float_(x);
        if (std::isnan(value) || std::isinf(value)) continue;
        CHECK_EQ(to_bf16_(x), nearest(value, 0x7f7f, wide_bf16));
        CHECK_EQ(to_fp16_(x), nearest(value, 0x7bff, wide_fp16));
    }
}

TEST(a_stored_nan_is_the_canonical_one) {
    for (const u32 x : special) {
        if (float_(x) == float_(x)) continue;
        const u32 canonical = bits_(canonical_(float_(x)));
        CHECK_EQ(canonical, fp32_nan);
        CHECK_EQ(to_bf16_(canonical), bf16_nan);
        CHECK_EQ(to_fp16_(canonical), fp16_nan);
        CHECK_EQ(to_bf16_stochastic_(canonical, 0xffffu), bf16_nan);
    }
}

TEST(a_split_master_comes_back_from_its_halves) {
    optim_cases::Floats floats(4);
    for (int i = 0; i < 2'000'000; ++i) {
        const u32 x = bits_(canonical_(float_(floats.any())));
        const u32 high = split_high_(x), low = split_low_(x);
        CHECK(high <= 0xffff && low <= 0xffff);
        CHECK_EQ(split_join_(high, low), x);
    }
}

TEST(the_high_half_differs_from_nearest_even_in_ties_of_even_halves_alone) {
    for (u32 top = 0; top < 0x7f80; ++top) {
        for (const u32 lower : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
            const u32 x = (top << 16) | lower;
            const u32 expected = to_bf16_(x) + (lower == 0x8000 && top % 2 == 0 ? 1 : 0);
            CHECK_EQ(split_high_(x), expected);
        }
    }
}

TEST(stochastic_rounding_goes_up_as_often_as_what_is_cut_off_says) {
    const u32 x = 0x3f804000;  // a quarter of the way from one bf16 to the next
    int ups = 0;
    for (u64 i = 0; i < 40'000; ++i)
        ups += to_bf16_stochastic_(x, random_<u32>(99, i) & 0xffffu) == 0x3f81;
    CHECK(ups > 9'600 && ups < 10'400);
    ups = 0;
    for (u64 i = 0; i < 40'000; ++i)
        ups += to_bf16_stochastic_(x, random_<u32>(99, i) >> 16) == 0x3f81;
    CHECK(ups > 9'600 && ups < 10'400);
}

TEST(random_bits_are_those_of_the_element_whatever_the_lanes) {
    for (const u64 first : {0ull, 5ull, 0xfffffff8ull, 0x1fffffffbull}) {
        const Words wide = random_<Words>(0xfeedfacecafebeef, first);
        for (u32 k = 0; k < 16; ++k) CHECK_EQ(wide[k], random_<u32>(0xfeedfacecafebeef, first + k));
    }
    CHECK(random_<u32>(1, 0) != random_<u32>(1, 1) &&
          random_<u32>(1, 0) != random_<u32>(1, 1ull << 32));
}

TEST(max_and_sign_pass_a_nan_on) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    CHECK(max_(nan, 1.0f) != max_(nan, 1.0f));
    CHECK(max_(1.0f, nan) != max_(1.0f, nan));
    CHECK_EQ(max_(1.0f, 2.0f), 2.0f);
    CHECK(sign_(nan) != sign_(nan));
    CHECK_EQ(sign_(-0.0f), 0.0f);
    CHECK_EQ(sign_(-3.0f), -1.0f);
}
