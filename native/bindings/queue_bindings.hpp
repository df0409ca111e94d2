// Adds Pool, Queue, OpenFile and what they need to deepnvme._native; called by deepnvme_module.cpp.
#pragma once

#include <pybind11/pybind11.h>

void bind_queue(pybind11::module_& module);
