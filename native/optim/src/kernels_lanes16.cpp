// 16 lanes on any machine, as the compiler lowers them: how the code that AVX-512 runs is tested
// without it.
#define INFINITY_HOME lanes16_home
#define INFINITY_LANES 16
#include "vectors.hpp"

namespace infinity_optim::lanes16_home {
using Value = Floats;
}  // namespace infinity_optim::lanes16_home

#include "kernels.inc"

const infinity_optim::Kernels infinity_optim::lanes16_kernels = lanes16_home::all_kernels;
