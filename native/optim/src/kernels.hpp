// What each home's file gives to the rest: loops over a range of elements. Nothing here checks,
// allocates or throws.
#pragma once

#include "infinity_optim/shared/layout.hpp"

namespace infinity_optim {

struct Kernels {
    // Elements begin to end of a segment, by its rule.
    using Update = void (*)(const Segment& segment, u64 begin, u64 end);
    Update update[rule_count];

    // The sum of squares of one block, elements begin to end.
    double (*block_sum)(u64 gradient, u32 format, u64 begin, u64 end);
    // The same of `into`, to which the gradient is added first; `begins`: which it becomes.
    double (*accumulate)(u64 into, u64 gradient, u32 format, bool begins, u64 begin, u64 end);

    // Reads and writes the streams of an Adam update with almost no arithmetic: what the memory
    // allows.
    Update sweep;
};

extern const Kernels scalar_kernels;
extern const Kernels lanes16_kernels;
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;

}  // namespace infinity_optim
