// The update kernels as Python sees them: addresses and records of segments in, block sums out.
#pragma once

#include <pybind11/pybind11.h>

void bind_optim(pybind11::module_& module);
