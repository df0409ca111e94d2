#include "deepnvme/copy.hpp"

#include <cstring>

#include "crc32c_kernels.hpp"
#include "deepnvme/crc32c.hpp"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace deepnvme {

namespace {

#if defined(__x86_64__)

constexpr std::size_t cache_line = 64;

// Whole lines to memory that begins with one. Otherwise every line of it would be read before it is
// overwritten.
void stream_lines(std::byte* destination, const std::byte* source, std::size_t nbytes) noexcept {
    for (std::size_t at = 0; at < nbytes; at += cache_line) {
        const auto* const from = reinterpret_cast<const __m128i*>(source + at);
        auto* const to = reinterpret_cast<__m128i*>(destination + at);
        const __m128i a = _mm_loadu_si128(from);
        const __m128i b = _mm_loadu_si128(from + 1);
        const __m128i c = _mm_loadu_si128(from + 2);
        const __m128i d = _mm_loadu_si128(from + 3);
        _mm_stream_si128(to, a);
        _mm_stream_si128(to + 1, b);
        _mm_stream_si128(to + 2, c);
        _mm_stream_si128(to + 3, d);
    }
    _mm_sfence();  // what is stored later, a flag that the copy is there for one, must not be seen
                   // before it
}

void copy_large(std::byte* destination, const std::byte* source, std::size_t nbytes) noexcept {
    const std::size_t head = -reinterpret_cast<std::uintptr_t>(destination) % cache_line;
    const std::size_t lines = (nbytes - head) / cache_line * cache_line;
    std::memcpy(destination, source, head);
    stream_lines(destination + head, source + head, lines);
    const std::size_t done = head + lines;
    std::memcpy(destination + done, source + done, nbytes - done);
}

#else

void copy_large(std::byte* destination, const std::byte* source, std::size_t nbytes) noexcept {
    std::memcpy(destination, source, nbytes);
}

#endif

}  // namespace

void copy(const Copy& piece) noexcept {
    if (piece.nbytes >= crc32c_streaming_bytes) {
        copy_large(piece.destination, piece.source, piece.nbytes);
    } else if (piece.nbytes != 0) {
        std::memcpy(piece.destination, piece.source, piece.nbytes);
    }
}

void copy_strided(const StridedCopy& copies) noexcept {
    const Copy& first = copies.first;
    for (std::size_t i = 0; i < copies.count; ++i) {
        copy({first.destination + i * copies.destination_stride,
              first.source + i * copies.source_stride, first.nbytes});
    }
}

void copy_each(std::span<const Copy> pieces) noexcept {
    for (const Copy& piece : pieces) copy(piece);
}

void copy_each(std::span<const Copy> pieces, std::span<std::uint32_t> sums) noexcept {
    for (std::size_t i = 0; i < pieces.size(); ++i) {
        sums[i] = crc32c_copy(0, pieces[i].destination, pieces[i].source, pieces[i].nbytes);
    }
}

}  // namespace deepnvme
