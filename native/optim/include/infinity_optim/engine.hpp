// The update rules on the CPU: checks the segments, cuts them into chunks and runs a home's kernels
// on a pool of threads. A home is a set of kernels for one kind of processor. Every home and every
// number of threads gives the same bits (docs/decisions/0006-optimizer-kernels.md).
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

// A gradient in memory, or a part of one that begins where a block of the norm does.
struct Gradient {
    u64 address;
    Format format;
    u64 numel;
};

// How many blocks of the norm `numel` elements have.
[[nodiscard]] u64 block_count(u64 numel);

// Updates every segment. Throws std::invalid_argument for a segment that cannot be right, before
// anything is changed.
void update(std::span<const Segment> segments, ThreadPool& pool, const Kernels& kernels);

// Updates every segment, and computes the checksums of `summed` before and after it. That memory is
// sorted by address and does not overlap. Each stream of a segment lies in it whole or not at all.
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

// Adds neighbours 2i and 2i + 1, over and over, until one value is left; an odd last one moves up.
// 0 for no sums. Overwrites `sums`.
[[nodiscard]] double tree_sum(std::span<double> sums);

// Reads and writes what an Adam update of the segments would, with almost no arithmetic: the speed
// that the memory allows. Their values are useless afterwards.
void sweep(std::span<const Segment> segments, ThreadPool& pool, const Kernels& kernels);

}  // namespace infinity_optim
