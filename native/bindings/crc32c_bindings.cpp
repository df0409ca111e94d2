// crc32c and copying for Python: checks buffers, and drops the GIL where that pays.
#include "crc32c_bindings.hpp"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <vector>

#include "deepnvme/copy.hpp"
#include "deepnvme/crc32c.hpp"

namespace py = pybind11;
using namespace deepnvme;  // NOLINT(google-build-using-namespace): this file is about nothing else

namespace {

// The memory of an object with the buffer protocol. No format is asked for: numpy has none for
// bfloat16.
class Memory {
  public:
    explicit Memory(const py::object& object) {
        if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_ND | PyBUF_C_CONTIGUOUS) != 0) {
            throw py::error_already_set();
        }
    }
    ~Memory() { PyBuffer_Release(&view_); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    [[nodiscard]] std::byte* data() const noexcept { return static_cast<std::byte*>(view_.buf); }
    [[nodiscard]] std::size_t nbytes() const noexcept {
        return static_cast<std::size_t>(view_.len);
    }

  private:
    Py_buffer view_ = {};
};

// Lets the interpreter run while many bytes are summed; for few of them, asking for the GIL again
// costs more.
class UnlockedForMany {
  public:
    explicit UnlockedForMany(std::size_t nbytes) {
        if (nbytes > std::size_t{64} << 10) unlocked_.emplace();
    }

  private:
    std::optional<py::gil_scoped_release> unlocked_;
};

std::uint32_t sum(const py::object& buffer, std::uint32_t crc) {
    const Memory memory(buffer);
    const UnlockedForMany unlocked(memory.nbytes());
    return crc32c(crc, memory.data(), memory.nbytes());
}

py::list list_of(const std::vector<std::uint32_t>& sums) {
    py::list list(sums.size());
    for (std::size_t i = 0; i < sums.size(); ++i) list[i] = sums[i];
    return list;
}

// One crc for every `piece` bytes of memory that deepnvme.memory.buffers.Memory describes, and
// keeps alive.
py::list sum_pieces(std::uintptr_t address, std::size_t nbytes, std::size_t piece) {
    if (piece == 0) throw py::value_error("a piece has at least 1 byte, got 0");
    const auto* const data = reinterpret_cast<const std::byte*>(address);
    std::vector<std::uint32_t> sums;
    sums.reserve((nbytes + piece - 1) / piece);
    {
        const UnlockedForMany unlocked(nbytes);
        for (std::size_t at = 0; at < nbytes; at += piece) {
            sums.push_back(crc32c(0, data + at, std::min(piece, nbytes - at)));
        }
    }
    return list_of(sums);
}

using Addresses = std::vector<std::uintptr_t>;
using Sizes = std::vector<std::size_t>;

std::vector<Copy> copies_of(const Addresses& destinations, const Addresses& sources,
                            const Sizes& sizes) {
    if (destinations.size() != sizes.size() || sources.size() != sizes.size()) {
        throw py::value_error("every copy has a destination, a source and a size");
    }
    std::vector<Copy> copies(sizes.size());
    for (std::size_t i = 0; i < copies.size(); ++i) {
        copies[i] = {reinterpret_cast<std::byte*>(destinations[i]),
                     reinterpret_cast<const std::byte*>(sources[i]), sizes[i]};
    }
    return copies;
}

std::size_t total_of(const Sizes& sizes) {
    return std::accumulate(sizes.begin(), sizes.end(), std::size_t{0});
}

void copy_pieces(const Addresses& destinations, const Addresses& sources, const Sizes& sizes) {
    const std::vector<Copy> copies = copies_of(destinations, sources, sizes);
    const UnlockedForMany unlocked(total_of(sizes));
    copy_each(copies);
}

// Addresses are those of the first of each group of copies.
void copy_strided_pieces(const Addresses& destinations, const Sizes& destination_strides,
                         const Addresses& sources, const Sizes& source_strides, const Sizes& sizes,
                         const Sizes& counts) {
    const std::vector<Copy> first = copies_of(destinations, sources, sizes);
    if (destination_strides.size() != first.size() || source_strides.size() != first.size() ||
        counts.size() != first.size()) {
        throw py::value_error("every group of copies has a count and two strides");
    }
    std::size_t nbytes = 0;
    for (std::size_t i = 0; i < first.size(); ++i) nbytes += sizes[i] * counts[i];
    const UnlockedForMany unlocked(nbytes);
    for (std::size_t i = 0; i < first.size(); ++i)
        copy_strided({first[i], counts[i], destination_strides[i], source_strides[i]});
}

py::list copy_and_sum_pieces(const Addresses& destinations, const Addresses& sources,
                             const Sizes& sizes) {
    const std::vector<Copy> copies = copies_of(destinations, sources, sizes);
    std::vector<std::uint32_t> sums(copies.size());
    {
        const UnlockedForMany unlocked(total_of(sizes));
        copy_each(copies, sums);
    }
    return list_of(sums);
}

}  // namespace

void bind_crc32c(py::module_& module) {
    module.def("crc32c", &sum, py::arg("buffer"), py::arg("crc") = 0);
    module.def("crc32c_pieces", &sum_pieces, py::arg("address"), py::arg("nbytes"),
               py::arg("piece"));
    module.def("copy_each", &copy_pieces, py::arg("destinations"), py::arg("sources"),
               py::arg("sizes"));
    module.def("copy_strided", &copy_strided_pieces, py::arg("destinations"),
               py::arg("destination_strides"), py::arg("sources"), py::arg("source_strides"),
               py::arg("sizes"), py::arg("counts"));
    module.def("crc32c_copy_each", &copy_and_sum_pieces, py::arg("destinations"),
               py::arg("sources"), py::arg("sizes"));
}
