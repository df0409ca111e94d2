// The specification: one element at a time.
#define INFINITY_HOME scalar_home
#include "infinity_optim/shared/update.hpp"

namespace infinity_optim::scalar_home {
using Value = float;
}  // namespace infinity_optim::scalar_home

#include "kernels.inc"

const infinity_optim::Kernels infinity_optim::scalar_kernels = scalar_home::all_kernels;
