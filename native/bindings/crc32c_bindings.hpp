// Adds crc32c, crc32c_copy and crc32c_combine to deepnvme._native; called by deepnvme_module.cpp.
#pragma once

#include <pybind11/pybind11.h>

void bind_crc32c(pybind11::module_& module);
