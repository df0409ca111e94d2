#define INFINITY_HOME compact_home
#include "infinity_optim/compact.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "infinity_optim/shared/rounding.hpp"

namespace infinity_optim {
namespace {

using namespace compact_home;

constexpr u64 elements_at_once = 65536;
constexpr u64 blocks_at_once = elements_at_once / nf4_block;
constexpr u64 packed_block = nf4_block / 2;  // bytes
constexpr u64 named = 16;                    // values that four bits can name

template <Format format>
[[nodiscard]] auto rounded(float value) {
    const u32 bits = bits_(canonical_(value));
    if constexpr (format == format_bf16) return static_cast<u16>(to_bf16_(bits));
    if constexpr (format == format_fp16) return static_cast<u16>(to_fp16_(bits));
    if constexpr (format == format_fp32) return bits;
}

template <Format format>
void expand_blocks(const Nf4& weight, u64 into, u64 begin, u64 end) {
    using Element = decltype(rounded<format>(0.0F));
    const auto* scales = reinterpret_cast<const float*>(weight.scales);
    const auto* values = reinterpret_cast<const float*>(weight.values);
    for (u64 block = begin; block < end; ++block) {
        // 16 products and 64 looks at them, in place of 64 products.
        Element products[named];
        for (u64 k = 0; k < named; ++k) products[k] = rounded<format>(values[k] * scales[block]);
        const auto* packed = reinterpret_cast<const u8*>(weight.packed) + block * packed_block;
        auto* elements = reinterpret_cast<Element*>(into) + block * nf4_block;
        for (u64 k = 0; k < packed_block; ++k) {
            elements[2 * k] = products[packed[k] >> 4];
            elements[2 * k + 1] = products[packed[k] & 15U];
        }
    }
}

template <Format format>
void expand_rows(const Int8& weight, u64 into, u64 begin, u64 end) {
    using Element = decltype(rounded<format>(0.0F));
    const auto* scales = reinterpret_cast<const float*>(weight.scales);
    for (u64 row = begin; row < end; ++row) {
        const auto* integers =
            reinterpret_cast<const signed char*>(weight.integers) + row * weight.columns;
        auto* elements = reinterpret_cast<Element*>(into) + row * weight.columns;
        const float scale = scales[row];
        for (u64 k = 0; k < weight.columns; ++k)
            elements[k] = rounded<format>(static_cast<float>(integers[k]) * scale);
    }
}

void check(const char* what, u64 address, u64 alignment) {
    if (address == 0 || address % alignment != 0) {
        throw std::invalid_argument(std::string(what) + " must be at an address aligned to " +
                                    std::to_string(alignment) + " bytes, got " +
                                    std::to_string(address));
    }
}

// Calls expand.operator()<format>(begin, end) for all of `count` rows or blocks, on the pool.
template <class Expand>
void for_all(u64 count, u64 at_once, u64 into, Format format, ThreadPool& pool,
             const Expand& expand) {
    check("what is expanded", into, format == format_fp32 ? 4 : 2);
    const auto on_pool = [&]<Format known>() {
        pool.run((count + at_once - 1) / at_once, [&](u64 number) {
            const u64 begin = number * at_once;
            expand.template operator()<known>(begin, std::min(begin + at_once, count));
        });
    };
    switch (format) {
        case format_fp32:
            return on_pool.template operator()<format_fp32>();
        case format_bf16:
            return on_pool.template operator()<format_bf16>();
        case format_fp16:
            return on_pool.template operator()<format_fp16>();
        default:
            throw std::invalid_argument("a weight is not expanded to the format of number " +
                                        std::to_string(format));
    }
}

}  // namespace

void expand(const Nf4& weight, u64 into, Format format, ThreadPool& pool) {
    check("packed elements", weight.packed, 1);
    check("scales", weight.scales, 4);
    check("values", weight.values, 4);
    for_all(
        weight.blocks, blocks_at_once, into, format, pool,
        [&]<Format known>(u64 begin, u64 end) { expand_blocks<known>(weight, into, begin, end); });
}

void expand(const Int8& weight, u64 into, Format format, ThreadPool& pool) {
    check("integers", weight.integers, 1);
    check("scales", weight.scales, 4);
    const u64 rows_at_once = std::max<u64>(1, elements_at_once / std::max<u64>(1, weight.columns));
    for_all(weight.rows, rows_at_once, into, format, pool, [&]<Format known>(u64 begin, u64 end) {
        expand_rows<known>(weight, into, begin, end);
    });
}

}  // namespace infinity_optim
