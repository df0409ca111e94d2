// What the files of crc32c share, and its test uses to hold the kernels to one another: the kernels
// of this CPU, the arithmetic of the polynomial, and copying piece by piece.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

namespace deepnvme {

// One way of computing it; the contracts are those of crc32c() and crc32c_copy().
struct Crc32cKernel {
    std::string_view name;  // "avx512", "avx2", "sse4.2", "aarch64" or "tables"
    std::uint32_t (*sum)(std::uint32_t crc, const std::byte* data, std::size_t nbytes) noexcept;
    std::uint32_t (*copy)(std::uint32_t crc, std::byte* destination, const std::byte* source,
                          std::size_t nbytes) noexcept;
};

// Those that this CPU can run, found once, slowest first: the last is the one in use.
[[nodiscard]] std::span<const Crc32cKernel> crc32c_kernels() noexcept;

// The one that uses the CPU's crc32c instruction, or null where there is none.
[[nodiscard]] const Crc32cKernel* crc32c_hardware_kernel() noexcept;

// The one that uses it beside products in vectors of 32 bytes, or null where the CPU cannot.
[[nodiscard]] const Crc32cKernel* crc32c_fused_kernel() noexcept;

// The one that multiplies in vectors of 64 bytes, or null where the CPU cannot.
[[nodiscard]] const Crc32cKernel* crc32c_wide_kernel() noexcept;

// From this size on a hardware copy sums and stores word by word, past the caches where the CPU
// can. Below it, whatever is gained where the destination is not cached is lost where it is.
inline constexpr std::size_t crc32c_streaming_bytes = std::size_t{32} << 10;

// Polynomials over GF(2) modulo Castagnoli's, reflected as the crc is: bit 31 is the coefficient
// of 1.
namespace polynomial {

inline constexpr std::uint32_t castagnoli = 0x82F63B78;
inline constexpr std::uint32_t one = std::uint32_t{1} << 31;

[[nodiscard]] constexpr std::uint32_t times_x(std::uint32_t a) noexcept {
    return (a >> 1) ^ ((a & 1) != 0 ? castagnoli : 0);
}

[[nodiscard]] constexpr std::uint32_t product(std::uint32_t a, std::uint32_t b) noexcept {
    std::uint32_t sum = 0;
    for (; b != 0; b <<= 1, a = times_x(a)) {
        if ((b & one) != 0) sum ^= a;
    }
    return sum;
}

// x^(8 * nbytes): times this, the state of a crc is what it would be with that many zero bytes
// more.
[[nodiscard]] constexpr std::uint32_t shift_by(std::uint64_t nbytes) noexcept {
    std::uint32_t power = one;
    for (std::uint32_t square = one >> 8; nbytes != 0;
         nbytes >>= 1, square = product(square, square)) {
        if ((nbytes & 1) != 0) power = product(power, square);
    }
    return power;
}

}  // namespace polynomial

[[nodiscard]] inline std::uint64_t load_word(const std::byte* data) noexcept {
    std::uint64_t word;
    std::memcpy(&word, data, sizeof word);
    return word;
}

// Copies piece by piece and sums each while the nearest cache holds it.
[[nodiscard]] inline std::uint32_t copy_in_pieces(decltype(Crc32cKernel::sum) sum,
                                                  std::uint32_t crc, std::byte* destination,
                                                  const std::byte* source,
                                                  std::size_t nbytes) noexcept {
    constexpr std::size_t piece = std::size_t{16} << 10;
    for (std::size_t at = 0; at < nbytes; at += piece) {
        const std::size_t now = std::min(piece, nbytes - at);
        std::memcpy(destination + at, source + at, now);
        crc = sum(crc, destination + at, now);
    }
    return crc;
}

}  // namespace deepnvme
