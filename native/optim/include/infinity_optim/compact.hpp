// Weights in 8 and in 4 bits, as infinity_engine/compact/weights.py describes them.
#pragma once

#include "infinity_optim/shared/layout.hpp"
#include "infinity_optim/thread_pool.hpp"

namespace infinity_optim {

// Elements that share a scale.
constexpr u64 nf4_block = 64;

// Addresses of a weight's packed elements, of the fp32 scale of each block, and of the 16 fp32
// values that elements name.
struct Nf4 {
    u64 packed;
    u64 scales;
    u64 values;
    u64 blocks;
};

// Addresses of a weight's signed bytes, row by row, and of the fp32 scale of each row.
struct Int8 {
    u64 integers;
    u64 scales;
    u64 rows;
    u64 columns;
};

// Writes value times scale of every element to `into`: computed in fp32, rounded once to nearest
// even. Throws std::invalid_argument for a format or an address that cannot be right.
void expand(const Nf4& weight, u64 into, Format format, ThreadPool& pool);
void expand(const Int8& weight, u64 into, Format format, ThreadPool& pool);

}  // namespace infinity_optim
