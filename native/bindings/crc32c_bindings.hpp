// Adds crc32c and its sums by pieces to deepnvme._native; called by deepnvme_module.cpp.
#pragma once

#include <pybind11/pybind11.h>

void bind_crc32c(pybind11::module_& module);
