#include "optim_bindings.hpp"

#include <pybind11/stl.h>

#include <cstring>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "infinity_optim/compact.hpp"
#include "infinity_optim/engine.hpp"
#include "infinity_optim/sources.hpp"

namespace py = pybind11;

namespace {

using namespace infinity_optim;  // NOLINT: this file is about nothing else

// Name, numpy's format and offset of each field of a Segment.
std::vector<std::tuple<std::string, std::string, std::size_t>> segment_fields() {
    return {
        {"numel", "u8", offsetof(Segment, numel)},
        {"first_element", "u8", offsetof(Segment, first_element)},
        {"key", "u8", offsetof(Segment, key)},
        {"gradient", "u8", offsetof(Segment, gradient)},
        {"master", "u8", offsetof(Segment, master)},
        {"remainder", "u8", offsetof(Segment, remainder)},
        {"parameter", "u8", offsetof(Segment, parameter)},
        {"states", "3u8", offsetof(Segment, states)},
        {"rule", "u4", offsetof(Segment, rule)},
        {"gradient_format", "u4", offsetof(Segment, gradient_format)},
        {"parameter_format", "u4", offsetof(Segment, parameter_format)},
        {"state_format", "u4", offsetof(Segment, state_format)},
        {"flags", "u4", offsetof(Segment, flags)},
        {"gradient_factor", "f4", offsetof(Segment, gradient_factor)},
        {"weight_decay", "f4", offsetof(Segment, weight_decay)},
        {"decay", "f4", offsetof(Segment, decay)},
        {"step", "f4", offsetof(Segment, step)},
        {"keep1", "f4", offsetof(Segment, keep1)},
        {"take1", "f4", offsetof(Segment, take1)},
        {"keep2", "f4", offsetof(Segment, keep2)},
        {"take2", "f4", offsetof(Segment, take2)},
        {"root", "f4", offsetof(Segment, root)},
        {"eps", "f4", offsetof(Segment, eps)},
    };
}

std::vector<Segment> segments_in(const py::buffer& records) {
    const py::buffer_info info = records.request();
    const auto nbytes = static_cast<std::size_t>(info.size * info.itemsize);
    if (info.ndim != 1 || (info.size > 0 && info.strides[0] != info.itemsize) ||
        nbytes % sizeof(Segment) != 0) {
        throw py::value_error("segments are one contiguous row of records of " +
                              std::to_string(sizeof(Segment)) + " bytes");
    }
    std::vector<Segment> segments(nbytes / sizeof(Segment));
    if (nbytes > 0) std::memcpy(segments.data(), info.ptr, nbytes);
    return segments;
}

// A list of doubles goes to Python as the bytes of an array.
template <class Fill>
py::bytearray doubles(u64 count, const Fill& fill) {
    std::vector<double> values(count);
    {
        const py::gil_scoped_release released;
        fill(std::span<double>(values));
    }
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(double)};
}

// Address, bytes, bytes of a block, and whether the sums from before the update are wanted.
using SummedMemory = std::tuple<u64, u64, u64, bool>;

py::bytes bytes_of(const std::vector<u32>& sums) {
    return {reinterpret_cast<const char*>(sums.data()), sums.size() * sizeof(u32)};
}

// Returns, for each memory in the order given, its sums before and after as the bytes of arrays.
py::list update_and_sum(const py::buffer& records, ThreadPool& pool, const std::string& home,
                        const std::vector<SummedMemory>& memories) {
    const std::vector<Segment> segments = segments_in(records);
    std::vector<Summed> summed;
    for (const auto& [address, nbytes, block, with_before] : memories)
        summed.push_back({address, nbytes, block, with_before, {}, {}});
    {
        const py::gil_scoped_release released;
        update(segments, summed, pool, kernels_of(home));
    }
    py::list sums;
    for (const Summed& one : summed)
        sums.append(py::make_tuple(bytes_of(one.before), bytes_of(one.after)));
    return sums;
}

}  // namespace

void bind_optim(py::module_& module) {
    py::class_<ThreadPool>(module, "ThreadPool")
        // Not a call_guard, which would let go of the GIL while pybind11 enters the new object in
        // its table of instances.
        .def(py::init([](const std::vector<int>& cores) {
                 const py::gil_scoped_release released;
                 return std::make_unique<ThreadPool>(cores);
             }),
             py::arg("cores"))
        .def("__len__", &ThreadPool::size);

    module.attr("SEGMENT_NBYTES") = sizeof(Segment);
    module.attr("NORM_BLOCK") = norm_block;
    module.def("segment_fields", &segment_fields);
    module.def("sources", &sources);
    module.def("homes", &homes);
    module.def(
        "update",
        [](const py::buffer& segments, ThreadPool& pool, const std::string& home) {
            const std::vector<Segment> copied = segments_in(segments);
            const py::gil_scoped_release released;
            update(copied, pool, kernels_of(home));
        },
        py::arg("segments"), py::arg("pool"), py::arg("home"));
    module.def("update_and_sum", &update_and_sum, py::arg("segments"), py::arg("pool"),
               py::arg("home"), py::arg("memories"));
    module.def(
        "sweep",
        [](const py::buffer& segments, ThreadPool& pool, const std::string& home) {
            const std::vector<Segment> copied = segments_in(segments);
            const py::gil_scoped_release released;
            sweep(copied, pool, kernels_of(home));
        },
        py::arg("segments"), py::arg("pool"), py::arg("home"));
    module.def(
        "block_sums",
        [](u64 gradient, u32 format, u64 numel, ThreadPool& pool, const std::string& home) {
            return doubles(block_count(numel), [&](std::span<double> sums) {
                block_sums({gradient, static_cast<Format>(format), numel}, sums, pool,
                           kernels_of(home));
            });
        },
        py::arg("gradient"), py::arg("format"), py::arg("numel"), py::arg("pool"), py::arg("home"));
    module.def(
        "accumulate",
        [](u64 into, u64 gradient, u32 format, u64 numel, bool begins, ThreadPool& pool,
           const std::string& home) {
            return doubles(block_count(numel), [&](std::span<double> sums) {
                accumulate(into, {gradient, static_cast<Format>(format), numel},
                           begins ? Sum::begins : Sum::goes_on, sums, pool, kernels_of(home));
            });
        },
        py::arg("into"), py::arg("gradient"), py::arg("format"), py::arg("numel"),
        py::arg("begins"), py::arg("pool"), py::arg("home"));
    module.def(
        "expand_nf4",
        [](u64 packed, u64 scales, u64 values, u64 blocks, u64 into, u32 format, ThreadPool& pool) {
            const py::gil_scoped_release released;
            expand(Nf4{packed, scales, values, blocks}, into, static_cast<Format>(format), pool);
        },
        py::arg("packed"), py::arg("scales"), py::arg("values"), py::arg("blocks"), py::arg("into"),
        py::arg("format"), py::arg("pool"));
    module.def(
        "expand_int8",
        [](u64 integers, u64 scales, u64 rows, u64 columns, u64 into, u32 format,
           ThreadPool& pool) {
            const py::gil_scoped_release released;
            expand(Int8{integers, scales, rows, columns}, into, static_cast<Format>(format), pool);
        },
        py::arg("integers"), py::arg("scales"), py::arg("rows"), py::arg("columns"),
        py::arg("into"), py::arg("format"), py::arg("pool"));
    module.attr("NF4_BLOCK") = nf4_block;
    module.def(
        "tree_sum", [](std::vector<double> sums) { return tree_sum(sums); }, py::arg("sums"));
}
