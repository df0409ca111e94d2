// A drive's own memory, through which it copies what cannot go directly. Small chunks use blocks of
// any size: in slots, each of a whole chunk, few of them would be in flight. Larger chunks use
// slots. Both are taken from the system when first needed. Used by the leading thread alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "deepnvme/arena.hpp"
#include "deepnvme/pool.hpp"

namespace deepnvme {

class BounceMemory {
  public:
    // A chunk of more bytes goes through a slot.
    static constexpr std::uint64_t largest_block = 128 << 10;

    // Where a chunk's bytes are while they travel. Empty: no bounce memory.
    struct Place {
        std::byte* data = nullptr;
        std::int32_t slot = -1;                  // -1: a block
        std::shared_ptr<Block> block = nullptr;  // empty: a slot
        [[nodiscard]] explicit operator bool() const noexcept { return data != nullptr; }
    };

    // Blocks get a share of the bytes in flight, slots the rest, for at most `most_chunks`.
    BounceMemory(std::uint64_t chunk_bytes, std::uint64_t inflight_bytes, std::size_t most_chunks);

    // Whether there can be blocks. Without them, small reads of parts of pages go through the page
    // cache.
    [[nodiscard]] bool has_blocks() const noexcept { return block_bytes_ > 0; }
    // Whether there is a place for so many bytes now; true before the memory is taken.
    [[nodiscard]] bool has_room(std::size_t nbytes) const;
    // Only where has_room() is true. Throws std::bad_alloc where the system has no memory.
    [[nodiscard]] Place take(std::size_t nbytes);
    void give_back(Place place);

    // For rings to register.
    [[nodiscard]] std::vector<std::shared_ptr<Arena>> arenas() const;
    // Taken from the system so far.
    [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

  private:
    [[nodiscard]] bool fits_block(std::size_t nbytes) const noexcept {
        return has_blocks() && nbytes <= largest_block;
    }
    void make_slots();

    const std::uint64_t chunk_bytes_;
    const std::uint64_t inflight_bytes_;
    const std::size_t most_chunks_;
    const std::uint64_t block_bytes_;  // of blocks_, once it is made
    std::shared_ptr<Pool> blocks_;
    std::shared_ptr<Arena> slots_;
    std::vector<std::int32_t> free_slots_;
    std::uint64_t bytes_ = 0;
};

}  // namespace deepnvme
