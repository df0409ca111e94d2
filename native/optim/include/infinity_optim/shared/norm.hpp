// The sum of squares of a gradient, in fixed blocks from a parameter's first element on, and in a
// fixed order within a block and over blocks: it is the same whichever thread or device computes a
// block. The sum of a block is finite if and only if all its elements are.
#pragma once

#include "infinity_optim/shared/update.hpp"

namespace infinity_optim::INFINITY_HOME {

// A gradient as it lies in memory.
struct Reading {
    u64 gradient;
    u32 format;

    template <class V>
    INFINITY_FN V at(u64 i) const {
        return load_float_<V>(gradient, format, i);
    }
};

// A gradient that is added to an fp32 sum as it is read, or begins it; the squares are those of the
// sum.
struct Accumulating {
    u64 into;
    u64 gradient;
    u32 format;
    bool begins;

    template <class V>
    INFINITY_FN V at(u64 i) const {
        V value = load_float_<V>(gradient, format, i);
        if (!begins) value = add_(load32_<V>(into, i), value);
        value = canonical_(value);
        store32_<V>(into, i, value);
        return value;
    }
};

INFINITY_FN double canonical_sum_(double sum) {
    return sum != sum ? double_(0x7ff8000000000000ULL) : sum;
}

#if !defined(__CUDACC__)

// Adds lanes j and j + 16, then + 8, 4, 2, 1.
INFINITY_FN double lane_tree_(double (&lanes)[norm_lanes]) {
    for (u32 half = norm_lanes / 2; half > 0; half /= 2) {
        for (u32 j = 0; j < half; ++j) lanes[j] = add_(lanes[j], lanes[j + half]);
    }
    return canonical_sum_(lanes[0]);
}

#endif

}  // namespace infinity_optim::INFINITY_HOME
