// The kernel of CPUs that multiply polynomials in vectors of 32 bytes: x86-64 with AVX2 and
// VPCLMULQDQ.
//
// Such a product and the crc32c instruction use different parts of a core, and each sums as many
// bytes as the other on some CPUs. So of each block one half is summed by either, word by word
// together: three streams by the instruction, as in crc32c_hardware.cpp, and what follows them by
// products, as in crc32c_wide.cpp. What the four come to is put together by products too.
#include "crc32c_kernels.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>

#define DEEPNVME_FUSED __attribute__((target("avx2,pclmul,vpclmulqdq,sse4.2,crc32")))

namespace deepnvme {

namespace {

constexpr std::size_t cache_line = 64;
constexpr std::size_t vector = 32;
constexpr std::size_t carried = 4 * vector;
constexpr std::size_t word = 8;
// In each turn three streams go on by so many words, and the products by `carried` bytes.
constexpr std::size_t words = 5;
constexpr std::size_t turns = 32;
constexpr std::size_t stream = turns * words * word;
constexpr std::size_t block = 3 * stream + turns * carried;

// As in crc32c_wide.cpp.
constexpr std::uint64_t low_factor = std::uint64_t{polynomial::shift_by(carried + 4)} << 1;
constexpr std::uint64_t high_factor = std::uint64_t{polynomial::shift_by(carried - 4)} << 1;

// What a state is multiplied by to be moved over so many bytes, if the crc32c instruction then sums
// the product, which multiplies by x^32, and the product has its bits one place too low.
[[nodiscard]] constexpr long long over(std::size_t nbytes) noexcept {
    return polynomial::product(polynomial::shift_by(nbytes - 5), polynomial::one >> 7);
}

[[nodiscard]] DEEPNVME_FUSED inline std::uint64_t product(std::uint64_t state,
                                                          long long factor) noexcept {
    const __m128i both = _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<long long>(state)),
                                              _mm_cvtsi64_si128(factor), 0x00);
    return static_cast<std::uint64_t>(_mm_cvtsi128_si64(both));
}

[[nodiscard]] DEEPNVME_FUSED inline __m256i load(const std::byte* data) noexcept {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
}

[[nodiscard]] DEEPNVME_FUSED inline __m256i carry(__m256i bytes, __m256i factors,
                                                  const std::byte* onto) noexcept {
    const __m256i low = _mm256_clmulepi64_epi128(bytes, factors, 0x00);
    const __m256i high = _mm256_clmulepi64_epi128(bytes, factors, 0x11);
    return _mm256_xor_si256(_mm256_xor_si256(low, high), load(onto));
}

// The state after a block, from the one before it. As many bytes from `ahead` on are prefetched:
// four streams hide from the CPU's own prefetcher that all of them are read.
[[nodiscard]] DEEPNVME_FUSED std::uint64_t after_block(std::uint64_t state, const std::byte* data,
                                                       const std::byte* ahead) noexcept {
    const auto low = static_cast<long long>(low_factor);
    const auto high = static_cast<long long>(high_factor);
    const __m256i factors = _mm256_set_epi64x(high, low, high, low);
    const std::byte* carried_from = data + 3 * stream;
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    std::uint64_t first = 0, second = 0, third = 0;
    for (std::size_t turn = 0; turn < turns; ++turn, carried_from += carried) {
        for (std::size_t i = 0; i < block / turns; i += cache_line, ahead += cache_line)
            __builtin_prefetch(ahead);
        a = carry(a, factors, carried_from);
        b = carry(b, factors, carried_from + vector);
        c = carry(c, factors, carried_from + 2 * vector);
        d = carry(d, factors, carried_from + 3 * vector);
#pragma GCC unroll 5
        for (std::size_t i = 0; i < words; ++i, data += word) {
            first = _mm_crc32_u64(first, load_word(data));
            second = _mm_crc32_u64(second, load_word(data + stream));
            third = _mm_crc32_u64(third, load_word(data + 2 * stream));
        }
    }
    alignas(vector) std::byte rest[carried];
    const auto store = [&rest](std::size_t at, __m256i bytes) DEEPNVME_FUSED {
        _mm256_store_si256(reinterpret_cast<__m256i*>(rest + at), bytes);
    };
    store(0, a);
    store(vector, b);
    store(2 * vector, c);
    store(3 * vector, d);
    std::uint64_t last = 0;
    for (std::size_t at = 0; at < carried; at += word)
        last = _mm_crc32_u64(last, load_word(rest + at));
    constexpr std::size_t behind = turns * carried;
    const std::uint64_t before =
        product(state, over(block)) ^ product(first, over(2 * stream + behind)) ^
        product(second, over(stream + behind)) ^ product(third, over(behind));
    return _mm_crc32_u64(0, before) ^ last;
}

[[nodiscard]] DEEPNVME_FUSED std::uint32_t sum(std::uint32_t crc, const std::byte* data,
                                               std::size_t nbytes) noexcept {
    std::uint64_t state = std::uint32_t{~crc};
    std::size_t at = 0;
    // Two blocks ahead, and at the end hardly past it.
    for (; nbytes - at >= block; at += block)
        state = after_block(state, data + at, data + std::min(at + 2 * block, nbytes - block));
    return crc32c_hardware_kernel()->sum(~static_cast<std::uint32_t>(state), data + at,
                                         nbytes - at);
}

}  // namespace

const Crc32cKernel* crc32c_fused_kernel() noexcept {
    __builtin_cpu_init();
    const bool has_it =
        __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("vpclmulqdq") != 0;
    if (!has_it || crc32c_hardware_kernel() == nullptr) return nullptr;
    // A copy waits for memory, however it is summed.
    static const Crc32cKernel kernel = {"avx2", &sum, crc32c_hardware_kernel()->copy};
    return &kernel;
}

}  // namespace deepnvme

#else

namespace deepnvme {

const Crc32cKernel* crc32c_fused_kernel() noexcept {
    return nullptr;
}

}  // namespace deepnvme

#endif
