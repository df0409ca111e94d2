// The choice of a kernel, combining, and the kernel for every CPU: eight tables, eight bytes at a
// time.
#include "deepnvme/crc32c.hpp"

#include <array>
#include <bit>

#include "crc32c_kernels.hpp"

namespace deepnvme {

namespace {

using Table = std::array<std::uint32_t, 256>;

// tables[k][v]: what the byte v adds to the state when k more bytes of the same word follow it.
constexpr std::array<Table, 8> tables = [] {
    std::array<Table, 8> made{};
    for (std::uint32_t value = 0; value < 256; ++value) {
        std::uint32_t state = value;
        for (int bit = 0; bit < 8; ++bit) state = polynomial::times_x(state);
        made[0][value] = state;
    }
    for (std::size_t k = 1; k < made.size(); ++k) {
        for (std::size_t value = 0; value < 256; ++value) {
            const std::uint32_t before = made[k - 1][value];
            made[k][value] = (before >> 8) ^ made[0][before & 0xFF];
        }
    }
    return made;
}();

[[nodiscard]] std::uint32_t step(std::uint32_t state, std::uint64_t word) noexcept {
    if constexpr (std::endian::native == std::endian::big) word = __builtin_bswap64(word);
    word ^= state;
    std::uint32_t next = 0;
    for (std::size_t i = 0; i < 8; ++i) next ^= tables[7 - i][(word >> (8 * i)) & 0xFF];
    return next;
}

[[nodiscard]] std::uint32_t sum(std::uint32_t crc, const std::byte* data,
                                std::size_t nbytes) noexcept {
    std::uint32_t state = ~crc;
    std::size_t at = 0;
    for (; nbytes - at >= 8; at += 8) state = step(state, load_word(data + at));
    for (; at < nbytes; ++at) {
        state = (state >> 8) ^ tables[0][(state ^ std::to_integer<std::uint32_t>(data[at])) & 0xFF];
    }
    return ~state;
}

[[nodiscard]] std::uint32_t copy(std::uint32_t crc, std::byte* destination, const std::byte* source,
                                 std::size_t nbytes) noexcept {
    return copy_in_pieces(&sum, crc, destination, source, nbytes);
}

struct Kernels {
    std::array<Crc32cKernel, 4> known = {Crc32cKernel{"tables", &sum, &copy}};
    std::size_t count = 1;

    Kernels() noexcept {
        for (const Crc32cKernel* kernel :
             {crc32c_hardware_kernel(), crc32c_fused_kernel(), crc32c_wide_kernel()}) {
            if (kernel != nullptr) known[count++] = *kernel;
        }
    }
};

[[nodiscard]] const Crc32cKernel& chosen() noexcept {
    return crc32c_kernels().back();
}

}  // namespace

std::span<const Crc32cKernel> crc32c_kernels() noexcept {
    static const Kernels kernels;
    return {kernels.known.data(), kernels.count};
}

std::uint32_t crc32c(std::uint32_t crc, const std::byte* data, std::size_t nbytes) noexcept {
    return chosen().sum(crc, data, nbytes);
}

std::uint32_t crc32c_joined(std::uint32_t first, std::uint32_t second,
                            std::uint64_t nbytes) noexcept {
    return polynomial::product(first, polynomial::shift_by(nbytes)) ^ second;
}

std::uint32_t crc32c_copy(std::uint32_t crc, std::byte* destination, const std::byte* source,
                          std::size_t nbytes) noexcept {
    return chosen().copy(crc, destination, source, nbytes);
}

}  // namespace deepnvme
