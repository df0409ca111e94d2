// Compiled with this instruction set's flags and run only where the CPU has it; empty on other
// architectures.
#if defined(__AVX2__)
#define INFINITY_HOME avx2_home
#define INFINITY_LANES 8
#include "vectors.hpp"

namespace infinity_optim::avx2_home {
using Value = Floats;
}  // namespace infinity_optim::avx2_home

#include "kernels.inc"

const infinity_optim::Kernels infinity_optim::avx2_kernels = avx2_home::all_kernels;
#endif
