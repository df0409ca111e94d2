// crc32c (Castagnoli; RFC 3720, appendix B.4): the checksum of what is stored. Summing alone, and
// summing while copying, so that the source is read from memory once. Never allocates and never
// fails; any thread may call it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace deepnvme {

// The crc of everything so far, `crc` being that of what came before: 0 at the start.
[[nodiscard]] std::uint32_t crc32c(std::uint32_t crc, const std::byte* data,
                                   std::size_t nbytes) noexcept;

// The crc of what has `first` followed by `nbytes` of which alone the crc is `second`.
[[nodiscard]] std::uint32_t crc32c_joined(std::uint32_t first, std::uint32_t second,
                                          std::uint64_t nbytes) noexcept;

// crc32c() of `source`, copied to `destination` in the same pass. The two do not overlap. Large
// copies go past the caches: they are for memory that is read next by a drive, or much later.
[[nodiscard]] std::uint32_t crc32c_copy(std::uint32_t crc, std::byte* destination,
                                        const std::byte* source, std::size_t nbytes) noexcept;

}  // namespace deepnvme
