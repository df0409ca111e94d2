// The kernel of CPUs that multiply polynomials in vectors of 64 bytes: x86-64 with AVX-512F and
// VPCLMULQDQ.
//
// A message modulo the polynomial stays what it is when its first 16 bytes are replaced by their
// remainder further on (Gopal et al., "Fast CRC Computation for Generic Polynomials Using
// PCLMULQDQ", 2009). So 256 bytes are carried along over all that follow, and what they are at the
// end is summed by the CPU's crc32c instruction.
#include "crc32c_kernels.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

#define DEEPNVME_WIDE __attribute__((target("avx512f,vpclmulqdq,sse4.2,crc32")))

namespace deepnvme {

namespace {

constexpr std::size_t vector = 64;
constexpr std::size_t carried = 4 * vector;
constexpr std::size_t worthwhile = 4 * carried;

// What the two halves of 16 bytes are multiplied by to be carried over `carried` bytes. A product
// of two reflected polynomials has its bits one place too low.
constexpr std::uint64_t low_factor = std::uint64_t{polynomial::shift_by(carried + 4)} << 1;
constexpr std::uint64_t high_factor = std::uint64_t{polynomial::shift_by(carried - 4)} << 1;

struct Forget {
    DEEPNVME_WIDE void operator()(std::size_t, __m512i) const noexcept {}
};

// Past the caches; see crc32c_hardware.cpp.
struct Store {
    std::byte* destination;

    DEEPNVME_WIDE void operator()(std::size_t at, __m512i bytes) const noexcept {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(destination + at), bytes);
    }
};

template <typename Output>
DEEPNVME_WIDE inline __m512i load(const std::byte* data, std::size_t at,
                                  const Output& output) noexcept {
    const __m512i bytes = _mm512_loadu_si512(data + at);
    output(at, bytes);
    return bytes;
}

DEEPNVME_WIDE inline __m512i carry(__m512i bytes, __m512i factors, __m512i onto) noexcept {
    const __m512i low = _mm512_clmulepi64_epi128(bytes, factors, 0x00);
    const __m512i high = _mm512_clmulepi64_epi128(bytes, factors, 0x11);
    return _mm512_xor_si512(_mm512_xor_si512(low, high), onto);
}

// Sums `nbytes`, a multiple of `carried` and not 0.
template <typename Output>
[[nodiscard]] DEEPNVME_WIDE std::uint32_t run(std::uint32_t crc, const std::byte* data,
                                              std::size_t nbytes, const Output& output) noexcept {
    const auto low = static_cast<long long>(low_factor);
    const auto high = static_cast<long long>(high_factor);
    const __m512i factors = _mm512_set_epi64(high, low, high, low, high, low, high, low);
    const __m512i state =
        _mm512_set_epi64(0, 0, 0, 0, 0, 0, 0, static_cast<long long>(std::uint32_t{~crc}));
    __m512i a = _mm512_xor_si512(load(data, 0, output), state);
    __m512i b = load(data, vector, output);
    __m512i c = load(data, 2 * vector, output);
    __m512i d = load(data, 3 * vector, output);
    for (std::size_t at = carried; at < nbytes; at += carried) {
        a = carry(a, factors, load(data, at, output));
        b = carry(b, factors, load(data, at + vector, output));
        c = carry(c, factors, load(data, at + 2 * vector, output));
        d = carry(d, factors, load(data, at + 3 * vector, output));
    }
    alignas(vector) std::byte rest[carried];
    _mm512_store_si512(rest, a);
    _mm512_store_si512(rest + vector, b);
    _mm512_store_si512(rest + 2 * vector, c);
    _mm512_store_si512(rest + 3 * vector, d);
    std::uint64_t sum = 0;
    for (std::size_t at = 0; at < carried; at += 8) sum = _mm_crc32_u64(sum, load_word(rest + at));
    return ~static_cast<std::uint32_t>(sum);
}

[[nodiscard]] std::uint32_t sum(std::uint32_t crc, const std::byte* data,
                                std::size_t nbytes) noexcept {
    const std::size_t most = nbytes / carried * carried;
    if (nbytes < worthwhile) return crc32c_hardware_kernel()->sum(crc, data, nbytes);
    crc = run(crc, data, most, Forget{});
    return crc32c_hardware_kernel()->sum(crc, data + most, nbytes - most);
}

[[nodiscard]] std::uint32_t copy(std::uint32_t crc, std::byte* destination, const std::byte* source,
                                 std::size_t nbytes) noexcept {
    if (nbytes < crc32c_streaming_bytes)
        return copy_in_pieces(&sum, crc, destination, source, nbytes);
    const std::size_t head = -reinterpret_cast<std::uintptr_t>(destination) % vector;
    const std::size_t most = (nbytes - head) / carried * carried;
    const std::size_t done = head + most;
    crc = copy_in_pieces(&sum, crc, destination, source, head);
    crc = run(crc, source + head, most, Store{destination + head});
    _mm_sfence();
    return copy_in_pieces(&sum, crc, destination + done, source + done, nbytes - done);
}

constexpr Crc32cKernel kernel = {"avx512", &sum, &copy};

}  // namespace

const Crc32cKernel* crc32c_wide_kernel() noexcept {
    __builtin_cpu_init();
    const bool has_it =
        __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("vpclmulqdq") != 0;
    return has_it && crc32c_hardware_kernel() != nullptr ? &kernel : nullptr;
}

}  // namespace deepnvme

#else

namespace deepnvme {

const Crc32cKernel* crc32c_wide_kernel() noexcept {
    return nullptr;
}

}  // namespace deepnvme

#endif
