#include "deepnvme/bounce_memory.hpp"

#include <algorithm>
#include <utility>

#include "deepnvme/open_file.hpp"

namespace deepnvme {

namespace {

constexpr std::uint64_t block_unit = largest_offset_alignment;
constexpr std::uint64_t block_share = 8;  // of the bytes in flight

// 0: there would be too few to be of use.
std::uint64_t block_bytes_for(std::uint64_t chunk_bytes, std::uint64_t inflight_bytes) {
    const std::uint64_t nbytes = inflight_bytes / block_share / block_unit * block_unit;
    const bool fits =
        nbytes >= BounceMemory::largest_block && inflight_bytes - nbytes >= chunk_bytes;
    return fits ? std::min<std::uint64_t>(nbytes, Arena::max_bytes) : 0;
}

}  // namespace

BounceMemory::BounceMemory(std::uint64_t chunk_bytes, std::uint64_t inflight_bytes,
                           std::size_t most_chunks)
    : chunk_bytes_(chunk_bytes),
      inflight_bytes_(inflight_bytes),
      most_chunks_(most_chunks),
      block_bytes_(block_bytes_for(chunk_bytes, inflight_bytes)) {}

bool BounceMemory::has_room(std::size_t nbytes) const {
    if (fits_block(nbytes)) return !blocks_ || blocks_->largest_free() >= nbytes;
    return !slots_ || !free_slots_.empty();
}

BounceMemory::Place BounceMemory::take(std::size_t nbytes) {
    if (fits_block(nbytes)) {
        if (!blocks_) {
            blocks_ = Pool::make(block_bytes_);
            bytes_ += blocks_->capacity();
        }
        std::shared_ptr<Block> block = blocks_->take(nbytes);
        std::byte* const data = block->data();
        return {.data = data, .block = std::move(block)};
    }
    if (!slots_) make_slots();
    const std::int32_t slot = free_slots_.back();
    free_slots_.pop_back();
    return {.data = slots_->data() + static_cast<std::size_t>(slot) * chunk_bytes_, .slot = slot};
}

void BounceMemory::give_back(Place place) {
    if (place.slot >= 0) free_slots_.push_back(place.slot);
}

// As many as chunks can be in flight beside the blocks, and no more than one arena holds.
void BounceMemory::make_slots() {
    const std::uint64_t most =
        std::min<std::uint64_t>(inflight_bytes_ - block_bytes_, Arena::max_bytes) / chunk_bytes_;
    const auto count = static_cast<std::int32_t>(
        std::clamp<std::uint64_t>(most, 1, std::max<std::size_t>(most_chunks_, 1)));
    free_slots_.reserve(static_cast<std::size_t>(count));
    slots_ = std::make_shared<Arena>(static_cast<std::size_t>(count) * chunk_bytes_);
    for (std::int32_t slot = 0; slot < count; ++slot) free_slots_.push_back(slot);
    bytes_ += slots_->size();
}

std::vector<std::shared_ptr<Arena>> BounceMemory::arenas() const {
    std::vector<std::shared_ptr<Arena>> all;
    if (slots_) all.push_back(slots_);
    if (blocks_) all.insert(all.end(), blocks_->arenas().begin(), blocks_->arenas().end());
    return all;
}

}  // namespace deepnvme
