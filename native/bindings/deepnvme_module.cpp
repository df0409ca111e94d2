// deepnvme._native: the storage core for Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include "crc32c_bindings.hpp"
#include "deepnvme/probe.hpp"
#include "queue_bindings.hpp"

namespace py = pybind11;

namespace {

void bind_probe(py::module_& module) {
    using namespace deepnvme;
    using without_gil = py::call_guard<py::gil_scoped_release>;

    py::class_<UringProbe>(module, "UringProbe")
        .def_readonly("error", &UringProbe::error)
        .def_readonly("features", &UringProbe::features)
        .def_readonly("defer_taskrun", &UringProbe::defer_taskrun)
        .def_property_readonly("opcodes", [](const UringProbe& self) {
            return std::vector<unsigned>(self.opcodes.begin(), self.opcodes.end());
        });
    py::class_<DioAlignment>(module, "DioAlignment")
        .def_readonly("memory", &DioAlignment::memory)
        .def_readonly("offset", &DioAlignment::offset);
    py::class_<DirectoryProbe>(module, "DirectoryProbe")
        .def_readonly("plain_error", &DirectoryProbe::plain_error)
        .def_readonly("direct_error", &DirectoryProbe::direct_error)
        .def_readonly("alignment", &DirectoryProbe::alignment);

    module.def("probe_uring", &probe_uring, without_gil());
    module.def("probe_linux_aio", &probe_linux_aio, without_gil());
    module.def("probe_directory", &probe_directory, py::arg("directory"), without_gil());
}

}  // namespace

PYBIND11_MODULE(_native, module) {
    module.doc() = "The storage core of deepnvme, in C++.";
    bind_probe(module);
    bind_queue(module);
    bind_crc32c(module);
}
