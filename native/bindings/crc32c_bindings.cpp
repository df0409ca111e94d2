// The Python face of crc32c: checks buffers, drops the GIL where that pays. No logic.
#include "crc32c_bindings.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "deepnvme/crc32c.hpp"

namespace py = pybind11;
using namespace deepnvme;  // NOLINT(google-build-using-namespace): this file is about nothing else

namespace {

// The memory of an object with the buffer protocol. No format is asked for: numpy has none for bfloat16.
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
    [[nodiscard]] std::size_t nbytes() const noexcept { return static_cast<std::size_t>(view_.len); }

  private:
    Py_buffer view_ = {};
};

// Lets the interpreter run while many bytes are summed; for few of them, asking for the GIL again costs more.
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

// One crc for every `piece` bytes of memory that deepnvme.buffers.Memory describes, and keeps alive.
py::list sums_of(const std::vector<std::uint32_t>& sums) {
    py::list list(sums.size());
    for (std::size_t i = 0; i < sums.size(); ++i) list[i] = sums[i];
    return list;
}

template <typename Sum>
py::list in_pieces(std::size_t nbytes, std::size_t piece, const Sum& sum_of) {
    if (piece == 0) throw py::value_error("a piece has at least 1 byte, got 0");
    std::vector<std::uint32_t> sums;
    sums.reserve((nbytes + piece - 1) / piece);
    {
        const UnlockedForMany unlocked(nbytes);
        for (std::size_t at = 0; at < nbytes; at += piece) {
            sums.push_back(sum_of(at, std::min(piece, nbytes - at)));
        }
    }
    return sums_of(sums);
}

py::list sum_pieces(std::uintptr_t address, std::size_t nbytes, std::size_t piece) {
    const auto* const data = reinterpret_cast<const std::byte*>(address);
    return in_pieces(nbytes, piece,
                     [&](std::size_t at, std::size_t length) { return crc32c(0, data + at, length); });
}

py::list copy_pieces(std::uintptr_t destination, std::uintptr_t source, std::size_t nbytes,
                     std::size_t piece) {
    auto* const to = reinterpret_cast<std::byte*>(destination);
    const auto* const from = reinterpret_cast<const std::byte*>(source);
    return in_pieces(nbytes, piece, [&](std::size_t at, std::size_t length) {
        return crc32c_copy(0, to + at, from + at, length);
    });
}

}  // namespace

void bind_crc32c(py::module_& module) {
    module.def("crc32c", &sum, py::arg("buffer"), py::arg("crc") = 0);
    module.def("crc32c_pieces", &sum_pieces, py::arg("address"), py::arg("nbytes"), py::arg("piece"));
    module.def("crc32c_copy_pieces", &copy_pieces, py::arg("destination"), py::arg("source"),
               py::arg("nbytes"), py::arg("piece"));
}
