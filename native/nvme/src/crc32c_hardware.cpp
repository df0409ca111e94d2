// The kernel of CPUs that have a crc32c instruction: SSE4.2, or the CRC32 extension of AArch64.
//
// The instruction takes three cycles and can begin anew in each, so three streams are summed side
// by side, over neighbouring thirds of a block, and put together by a table. Three streams hide
// from the CPU's own prefetcher that memory is read from its beginning to its end, so the kernel
// prefetches itself.
#include <algorithm>
#include <array>

#include "crc32c_kernels.hpp"

#if defined(__x86_64__)
#include <nmmintrin.h>
#define DEEPNVME_HAS_CRC32C 1
#define DEEPNVME_WITH_CRC32C __attribute__((target("sse4.2,crc32")))
#elif defined(__aarch64__) && defined(__AARCH64EL__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#define DEEPNVME_HAS_CRC32C 1
#define DEEPNVME_WITH_CRC32C __attribute__((target("+crc")))
#endif

namespace deepnvme {

#if defined(DEEPNVME_HAS_CRC32C)

namespace {

constexpr std::size_t cache_line = 64;
// A block just fits a page, whole lines in each third.
constexpr std::size_t third = 21 * cache_line;
constexpr std::size_t block = 3 * third;
static_assert(block <= 4096 && 4096 - block < 3 * cache_line);

#if defined(__x86_64__)

constexpr std::string_view kernel_name = "sse4.2";

[[nodiscard]] bool cpu_has_it() noexcept {
    __builtin_cpu_init();
    return __builtin_cpu_supports("sse4.2") != 0;
}

DEEPNVME_WITH_CRC32C inline std::uint64_t step(std::uint64_t state, std::uint64_t word) noexcept {
    return _mm_crc32_u64(state, word);
}

DEEPNVME_WITH_CRC32C inline std::uint64_t step_byte(std::uint64_t state, std::byte byte) noexcept {
    return _mm_crc32_u8(static_cast<std::uint32_t>(state), std::to_integer<std::uint8_t>(byte));
}

// Past the caches: otherwise every line of the destination would be read before it is overwritten.
void store_word(std::byte* destination, std::uint64_t word) noexcept {
    _mm_stream_si64(reinterpret_cast<long long*>(destination), static_cast<long long>(word));
}

// What is stored later, a flag that the copy is there for one, must not be seen before it.
void finish_stores() noexcept {
    _mm_sfence();
}

#else

constexpr std::string_view kernel_name = "aarch64";

[[nodiscard]] bool cpu_has_it() noexcept {
    return (::getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
}

DEEPNVME_WITH_CRC32C inline std::uint64_t step(std::uint64_t state, std::uint64_t word) noexcept {
    return __crc32cd(static_cast<std::uint32_t>(state), word);
}

DEEPNVME_WITH_CRC32C inline std::uint64_t step_byte(std::uint64_t state, std::byte byte) noexcept {
    return __crc32cb(static_cast<std::uint32_t>(state), std::to_integer<std::uint8_t>(byte));
}

void store_word(std::byte* destination, std::uint64_t word) noexcept {
    std::memcpy(destination, &word, sizeof word);
}

void finish_stores() noexcept {}

#endif

// after_a_third[i][v]: what the value v in byte i of a state becomes after `third` zero bytes.
constexpr std::array<std::array<std::uint32_t, 256>, 4> after_a_third = [] {
    std::array<std::array<std::uint32_t, 256>, 4> made{};
    for (std::size_t i = 0; i < made.size(); ++i) {
        for (std::uint32_t value = 1; value < 256; ++value) {
            const std::uint32_t rest = value & (value - 1);
            const std::uint32_t lowest = value ^ rest;
            made[i][value] =
                rest != 0 ? made[i][rest] ^ made[i][lowest]
                          : polynomial::product(value << (8 * i), polynomial::shift_by(third));
        }
    }
    return made;
}();

[[nodiscard]] std::uint64_t shifted_by_a_third(std::uint64_t state) noexcept {
    return after_a_third[0][state & 0xFF] ^ after_a_third[1][(state >> 8) & 0xFF] ^
           after_a_third[2][(state >> 16) & 0xFF] ^ after_a_third[3][(state >> 24) & 0xFF];
}

// What run() does with what it has summed: nothing, or store it.
struct Forget {
    void word(std::size_t, std::uint64_t) const noexcept {}
    void byte(std::size_t, std::byte) const noexcept {}
};

struct Store {
    std::byte* destination;

    void word(std::size_t at, std::uint64_t word) const noexcept {
        store_word(destination + at, word);
    }
    void byte(std::size_t at, std::byte byte) const noexcept { destination[at] = byte; }
};

template <typename Output>
[[nodiscard]] DEEPNVME_WITH_CRC32C std::uint32_t run(std::uint32_t crc, const std::byte* data,
                                                     std::size_t nbytes, Output output) noexcept {
    std::uint64_t state = ~crc;
    std::size_t at = 0;
    for (; nbytes - at >= block; at += block) {
        // Two blocks ahead, and never past the end.
        const std::byte* ahead = data + std::min(at + 2 * block, nbytes - block);
        std::uint64_t second = 0;
        std::uint64_t last = 0;
        for (std::size_t line = at; line < at + third;
             line += cache_line, ahead += 3 * cache_line) {
            __builtin_prefetch(ahead);
            __builtin_prefetch(ahead + cache_line);
            __builtin_prefetch(ahead + 2 * cache_line);
            for (std::size_t i = line; i < line + cache_line; i += 8) {
                const std::uint64_t a = load_word(data + i);
                const std::uint64_t b = load_word(data + i + third);
                const std::uint64_t c = load_word(data + i + 2 * third);
                output.word(i, a);
                output.word(i + third, b);
                output.word(i + 2 * third, c);
                state = step(state, a);
                second = step(second, b);
                last = step(last, c);
            }
        }
        state = shifted_by_a_third(shifted_by_a_third(state) ^ second) ^ last;
    }
    for (; nbytes - at >= 8; at += 8) {
        const std::uint64_t word = load_word(data + at);
        output.word(at, word);
        state = step(state, word);
    }
    for (; at < nbytes; ++at) {
        output.byte(at, data[at]);
        state = step_byte(state, data[at]);
    }
    return ~static_cast<std::uint32_t>(state);
}

[[nodiscard]] std::uint32_t sum(std::uint32_t crc, const std::byte* data,
                                std::size_t nbytes) noexcept {
    return run(crc, data, nbytes, Forget{});
}

[[nodiscard]] std::uint32_t copy(std::uint32_t crc, std::byte* destination, const std::byte* source,
                                 std::size_t nbytes) noexcept {
    if (nbytes < crc32c_streaming_bytes)
        return copy_in_pieces(&sum, crc, destination, source, nbytes);
    // Whole lines only: parts of one that leave the CPU apart cost a memory access each.
    const std::size_t head = -reinterpret_cast<std::uintptr_t>(destination) % cache_line;
    crc = copy_in_pieces(&sum, crc, destination, source, head);
    crc = run(crc, source + head, nbytes - head, Store{destination + head});
    finish_stores();
    return crc;
}

constexpr Crc32cKernel kernel = {kernel_name, &sum, &copy};

}  // namespace

const Crc32cKernel* crc32c_hardware_kernel() noexcept {
    return cpu_has_it() ? &kernel : nullptr;
}

#else

const Crc32cKernel* crc32c_hardware_kernel() noexcept {
    return nullptr;
}

#endif

}  // namespace deepnvme
