// The CPU's side of the update rules: checks what it is told, cuts it into chunks and runs a home's
// kernels on a pool. Every home and every number of threads gives the same bits
// (docs/decisions/0006-optimizer-kernels.md).
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "infinity_optim/shared/layout.hpp"
#include "infinity_optim/summing.hpp"
#include "infinity_optim/thread_pool.hpp"

namespace infinity_optim {

struct Kernels;

// The names of the homes that this CPU can run: "scalar" and "lanes16" everywhere, "avx2",
// "avx512".
[[nodiscard]] std::vector<std::string_view> homes();

// The kernels of a home. Throws std::invalid_argument for a name that is not in homes().
[[nodiscard]] const Kernels& kernels_of(std::string_view home);

// A gradient as it lies in memory, from a block's first element on.
struct Gradient {
    u64 address;
    Format format;
    u64 numel;
};

// Blocks of the norm in so many elements.
[[nodiscard]] u64 block_count(u64 numel);

// Updates every segment. Throws std::invalid_argument, before anything is changed, for a segment
// that cannot be right.
void update(std::span<const Segment> segments, ThreadPool& pool, const Kernels& kernels);

// Updates every segment and sums this memory, which is sorted by address and does not overlap,
// before and after it. Streams of the segments lie in it whole or not at all.
void update(std::span<const Segment> segments, std::span<Summed> summed, ThreadPool& pool,
            const Kernels& kernels);

// Writes the sum of squares of each of the gradient's blocks; `sums` has block_count(numel) places.
void block_sums(const Gradient& gradient, std::span<double> sums, ThreadPool& pool,
                const Kernels& kernels);

enum class Sum { begins, goes_on };

// Adds the gradient to the fp32 values at `into`, or begins them with it, and writes the sums of
// squares of the result.
void accumulate(u64 into, const Gradient& gradient, Sum sum, std::span<double> sums,
                ThreadPool& pool, const Kernels& kernels);

// Adds neighbours 2i and 2i + 1 until one is left, an odd last one moving up; 0 for none.
// Overwrites `sums`.
[[nodiscard]] double tree_sum(std::span<double> sums);

// Reads and writes what an Adam update of the segments would, with almost no arithmetic; their
// values become useless.
void sweep(std::span<const Segment> segments, ThreadPool& pool, const Kernels& kernels);

}  // namespace infinity_optim
