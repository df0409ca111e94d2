// The kernels of a home, made by its file: loops over a range of elements. They check nothing,
// allocate nothing and throw nothing.
#pragma once

#include "infinity_optim/shared/layout.hpp"

namespace infinity_optim {

struct Kernels {
    // Updates the elements from `begin` to `end` of a segment, for each rule.
    using Update = void (*)(const Segment& segment, u64 begin, u64 end);
    Update update[rule_count];

    // The sum of squares of one block, elements `begin` to `end`.
    double (*block_sum)(u64 gradient, u32 format, u64 begin, u64 end);
    // The same of `into`, after the gradient was added to it, or copied to it where `begins`.
    double (*accumulate)(u64 into, u64 gradient, u32 format, bool begins, u64 begin, u64 end);

    // See sweep() in engine.hpp.
    Update sweep;
};

extern const Kernels scalar_kernels;
extern const Kernels lanes16_kernels;
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;

}  // namespace infinity_optim
