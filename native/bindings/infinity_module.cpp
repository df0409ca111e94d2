// infinity_engine._native: the optimizer kernels for Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "infinity_optim/simd.hpp"
#include "optim_bindings.hpp"

namespace py = pybind11;

namespace {

std::string_view chosen_simd_name(const std::optional<std::string>& wanted) {
    return infinity_optim::name_of(infinity_optim::chosen_simd(wanted ? wanted->c_str() : nullptr));
}

}  // namespace

PYBIND11_MODULE(_native, module) {
    module.doc() = "The optimizer kernels of infinity_engine, in C++.";
    module.def("cpu_features", &infinity_optim::cpu_features);
    module.def("chosen_simd", &chosen_simd_name, py::arg("wanted"));
    bind_optim(module);
}
