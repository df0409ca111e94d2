// Adds the update kernels to infinity_engine._native: addresses and records of segments in, block
// sums out. Called by infinity_module.cpp.
#pragma once

#include <pybind11/pybind11.h>

void bind_optim(pybind11::module_& module);
