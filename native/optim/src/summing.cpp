#include "infinity_optim/summing.hpp"

#include <algorithm>

#include "deepnvme/crc32c.hpp"

namespace infinity_optim {
namespace {

struct Stream {
    u64 address;  // of the segment's first element
    u32 width;
};

[[nodiscard]] u32 width_of(u32 format) {
    return format == format_fp32 ? 4 : 2;
}

// What an update changes. What it only reads, a gradient, is summed where it is read.
[[nodiscard]] std::vector<Stream> streams_of(const Segment& segment) {
    std::vector<Stream> streams;
    if (segment.master != 0) streams.push_back({segment.master, 4});
    if (segment.remainder != 0) streams.push_back({segment.remainder, 2});
    if (segment.parameter != 0)
        streams.push_back({segment.parameter, width_of(segment.parameter_format)});
    for (const u64 address : segment.states) {
        if (address != 0) streams.push_back({address, width_of(segment.state_format)});
    }
    return streams;
}

[[nodiscard]] u64 address_of(const Piece& piece) {
    return reinterpret_cast<u64>(piece.data);
}

[[nodiscard]] const std::byte* memory_at(u64 address) {
    return reinterpret_cast<const std::byte*>(address);
}

}  // namespace

void Piece::go_on(u32& crc, u64 begin, u64 end) const {
    const u64 from = std::max(begin, first), to = std::min(end, last);
    if (from < to) crc = deepnvme::crc32c(crc, data + (from - first) * width, (to - from) * width);
}

void Piece::sum_before(u64 begin, u64 end) {
    if (with_before) go_on(before, begin, end);
}

void Piece::sum_after(u64 begin, u64 end) {
    go_on(after, begin, end);
}

void add_pieces(std::vector<Piece>& pieces, std::span<const Summed> summed, const Segment& segment,
                u64 begin, u64 end) {
    for (const Stream& stream : streams_of(segment)) {
        // The last one that begins at the stream's address or before.
        const auto behind =
            std::upper_bound(summed.begin(), summed.end(), stream.address,
                             [](u64 address, const Summed& one) { return address < one.address; });
        if (behind == summed.begin()) continue;
        const Summed& one = *(behind - 1);
        const u64 summed_end = one.address + one.nbytes;
        for (u64 first = begin; first < end;) {
            const u64 at = stream.address + first * stream.width;
            if (at >= summed_end) break;
            const u64 block_end = at - (at - one.address) % one.block + one.block;
            const u64 last = std::min(end, first + (block_end - at) / stream.width);
            pieces.push_back({memory_at(at), first, last, stream.width, one.with_before});
            first = last;
        }
    }
}

void join(std::span<Summed> summed, std::vector<Piece>& pieces) {
    std::ranges::sort(pieces, {}, address_of);
    auto piece = pieces.begin();
    for (Summed& one : summed) {
        const u64 end = one.address + one.nbytes;
        for (u64 at = one.address; at < end;) {
            const u64 block_end = std::min(at + one.block, end);
            u32 before = 0, after = 0;
            while (at < block_end) {
                const bool is_piece = piece != pieces.end() && address_of(*piece) == at;
                if (is_piece) {
                    before = deepnvme::crc32c_joined(before, piece->before, piece->nbytes());
                    after = deepnvme::crc32c_joined(after, piece->after, piece->nbytes());
                    at += piece->nbytes();
                    ++piece;
                    continue;
                }
                // Up to the next piece nothing was changed.
                const u64 next = piece == pieces.end() ? block_end : address_of(*piece);
                const u64 nbytes = std::min(next, block_end) - at;
                before = deepnvme::crc32c(before, memory_at(at), nbytes);
                after = deepnvme::crc32c(after, memory_at(at), nbytes);
                at += nbytes;
            }
            if (one.with_before) one.before.push_back(before);
            one.after.push_back(after);
        }
    }
}

}  // namespace infinity_optim
