// Copying between tensors and the memory that drives read and write: many pieces at once, each
// summed on the way where that is wanted. Large pieces go past the caches, as in crc32c_copy(): a
// drive reads them next, or the program much later. Never allocates and never fails; any thread may
// call it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace deepnvme {

// One piece, its source and its destination do not overlap.
struct Copy {
    std::byte* destination;
    const std::byte* source;
    std::size_t nbytes;
};

void copy(const Copy& piece) noexcept;

// `count` copies as the first one, at equal distances in the destination and in the source.
struct StridedCopy {
    Copy first;
    std::size_t count;
    std::size_t destination_stride;
    std::size_t source_stride;
};

void copy_strided(const StridedCopy& copies) noexcept;

void copy_each(std::span<const Copy> pieces) noexcept;

// The crc32c of each piece goes to `sums`, which has room for as many.
void copy_each(std::span<const Copy> pieces, std::span<std::uint32_t> sums) noexcept;

}  // namespace deepnvme
