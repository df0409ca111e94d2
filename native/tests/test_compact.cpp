// Weights in 4 and 8 bits: each element is the value that it names, or its integer, times its
// scale, rounded once.
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "infinity_optim/compact.hpp"
#include "optim_cases.hpp"

namespace {

using namespace infinity_optim;

constexpr u64 blocks = 2500;  // more than a thread takes at once

struct Weight {
    std::vector<u8> packed = std::vector<u8>(blocks * nf4_block / 2);
    std::vector<float> scales = std::vector<float>(blocks);
    std::vector<float> values = std::vector<float>(16);

    Weight() {
        optim_cases::Floats floats(1);
        for (u8& one : packed) one = static_cast<u8>(floats.ordinary() >> 13);
        for (float& one : scales) one = std::bit_cast<float>(floats.ordinary());
        for (float& one : values) one = std::bit_cast<float>(floats.ordinary());
        scales[1] = 1e-42F;  // products that are no normal numbers
        scales[2] = std::numeric_limits<float>::infinity();
        values[7] = 0;
    }

    [[nodiscard]] Nf4 addresses() const {
        return {reinterpret_cast<u64>(packed.data()), reinterpret_cast<u64>(scales.data()),
                reinterpret_cast<u64>(values.data()), blocks};
    }
    [[nodiscard]] float element(u64 i) const {
        const u8 both = packed[i / 2];
        return values[i % 2 == 0 ? both >> 4 : both & 15] * scales[i / nf4_block];
    }
};

template <class Element>
[[nodiscard]] std::vector<Element> expanded(const Weight& weight, Format format, int threads) {
    ThreadPool pool(std::vector<int>(static_cast<std::size_t>(threads), -1));
    std::vector<Element> elements(blocks * nf4_block);
    expand(weight.addresses(), reinterpret_cast<u64>(elements.data()), format, pool);
    return elements;
}

// To nearest even, by halves of the distance to the neighbours.
[[nodiscard]] u16 to_bf16(float x) {
    if (std::isnan(x)) return 0x7fc0;
    const auto bits = std::bit_cast<u32>(x);
    const u32 cut = bits & 0xffffU, half = 0x8000U;
    const bool up = cut > half || (cut == half && (bits >> 16) % 2 == 1);
    return static_cast<u16>((bits >> 16) + (up ? 1 : 0));
}

}  // namespace

TEST(an_element_is_the_value_that_it_names_times_the_scale_of_its_block) {
    const Weight weight;
    const std::vector<u32> elements = expanded<u32>(weight, format_fp32, 1);
    for (u64 i = 0; i < elements.size(); ++i) {
        const float expected = weight.element(i);
        if (std::isnan(expected))
            CHECK_EQ(elements[i], 0x7fc00000U);
        else
            CHECK_EQ(elements[i], std::bit_cast<u32>(expected));
    }
}

TEST(in_16_bits_it_is_rounded_once_to_nearest_even) {
    const Weight weight;
    const std::vector<u16> elements = expanded<u16>(weight, format_bf16, 1);
    for (u64 i = 0; i < elements.size(); ++i) CHECK_EQ(elements[i], to_bf16(weight.element(i)));
}

TEST(an_element_in_8_bits_is_its_integer_times_the_scale_of_its_row) {
    constexpr u64 rows = 300, columns = 513;
    optim_cases::Floats floats(2);
    std::vector<signed char> integers(rows * columns);
    std::vector<float> scales(rows);
    for (signed char& one : integers) one = static_cast<signed char>(floats.ordinary() >> 13);
    for (float& one : scales) one = std::bit_cast<float>(floats.ordinary());
    std::vector<u16> elements(rows * columns);
    ThreadPool pool(std::vector<int>{-1, -1});

    expand(Int8{reinterpret_cast<u64>(integers.data()), reinterpret_cast<u64>(scales.data()), rows,
                columns},
           reinterpret_cast<u64>(elements.data()), format_bf16, pool);

    for (u64 i = 0; i < elements.size(); ++i)
        CHECK_EQ(elements[i], to_bf16(static_cast<float>(integers[i]) * scales[i / columns]));
}

TEST(any_number_of_threads_expands_to_the_same_bits) {
    const Weight weight;
    CHECK(expanded<u16>(weight, format_fp16, 1) == expanded<u16>(weight, format_fp16, 3));
    CHECK(expanded<u16>(weight, format_bf16, 1) == expanded<u16>(weight, format_bf16, 3));
}

TEST(a_format_or_an_address_that_cannot_be_right_is_refused) {
    const Weight weight;
    ThreadPool pool(std::vector<int>{-1});
    std::vector<u16> elements(blocks * nf4_block);
    const u64 into = reinterpret_cast<u64>(elements.data());
    CHECK_THROWS(expand(weight.addresses(), into, format_none, pool), std::invalid_argument);
    CHECK_THROWS(expand(weight.addresses(), into + 1, format_bf16, pool), std::invalid_argument);
    Nf4 without = weight.addresses();
    without.scales = 0;
    CHECK_THROWS(expand(without, into, format_bf16, pool), std::invalid_argument);
}
