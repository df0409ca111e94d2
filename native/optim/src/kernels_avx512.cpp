// Compiled with this instruction set's flags and run only where the CPU has it; empty on other
// architectures.
#if defined(__AVX512F__)
#define INFINITY_HOME avx512_home
#define INFINITY_LANES 16
#include "vectors.hpp"

namespace infinity_optim::avx512_home {
using Value = Floats;
}  // namespace infinity_optim::avx512_home

#include "kernels.inc"

const infinity_optim::Kernels infinity_optim::avx512_kernels = avx512_home::all_kernels;
#endif
