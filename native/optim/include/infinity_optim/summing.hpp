// Checksums of the memory that an update changes, computed while the caches hold it: a
// separate pass over the memory would cost more time than the update's arithmetic.
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

// The part of one block of a Summed that belongs to one stream of one segment: its elements from
// `first` on, up to `last`.
struct Piece {
    const std::byte* data;  // of element `first`
    u64 first;
    u64 last;
    u32 width;  // of an element
    bool with_before;
    u32 before = 0;
    u32 after = 0;

    [[nodiscard]] u64 nbytes() const { return (last - first) * width; }
    // Add the bytes of elements `begin` to `end`, as far as they are in this piece, to its
    // checksum. The calls of either follow one another without a gap.
    void sum_before(u64 begin, u64 end);
    void sum_after(u64 begin, u64 end);

  private:
    void go_on(u32& crc, u64 begin, u64 end) const;
};

// Adds the pieces of `summed` that the update of a segment's elements from `begin` to `end`
// changes. `summed` is sorted by address.
void add_pieces(std::vector<Piece>& pieces, std::span<const Summed> summed, const Segment& segment,
                u64 begin, u64 end);

// Joins the checksums of all pieces to those of their blocks, bytes that no piece has included.
void join(std::span<Summed> summed, std::vector<Piece>& pieces);

}  // namespace infinity_optim
