// Checksums of the memory that an update reads and writes, made while the caches hold it: as a pass
// of its own over memory, checksums cost a step more than the update's arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "infinity_optim/shared/layout.hpp"

namespace infinity_optim {

// Memory with a crc32c for each `block` of its bytes; the last block may be shorter.
struct Summed {
    u64 address;
    u64 nbytes;
    u64 block;
    bool with_before;
    std::vector<u32> before;  // as the update found it; empty unless it is wanted
    std::vector<u32> after;   // as the update left it
};

// Bytes of one block of a Summed that one stream of one segment has: elements from `first` on, up
// to `last`.
struct Piece {
    const std::byte* data;  // of element `first`
    u64 first;
    u64 last;
    u32 width;  // of an element
    bool with_before;
    u32 before = 0;
    u32 after = 0;

    [[nodiscard]] u64 nbytes() const { return (last - first) * width; }
    // Go on with what elements from `begin` to `end` have of it. Each is called with neighbours, in
    // their order.
    void sum_before(u64 begin, u64 end);
    void sum_after(u64 begin, u64 end);

  private:
    void go_on(u32& crc, u64 begin, u64 end) const;
};

// Adds the pieces of `summed` that the update of a segment's elements from `begin` to `end` reads
// or writes. `summed` is sorted by address.
void add_pieces(std::vector<Piece>& pieces, std::span<const Summed> summed, const Segment& segment,
                u64 begin, u64 end);

// Puts the sums of all pieces together, and adds those of the bytes that no piece has.
void join(std::span<Summed> summed, std::vector<Piece>& pieces);

}  // namespace infinity_optim
