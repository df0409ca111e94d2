#include "deepnvme/pool.hpp"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

namespace deepnvme {

namespace {

constexpr std::size_t round_up(std::size_t nbytes) {
    return (nbytes + Pool::granularity - 1) / Pool::granularity * Pool::granularity;
}

}  // namespace

PoolExhausted::PoolExhausted(std::size_t asked_bytes, std::size_t free_bytes, std::size_t largest_bytes,
                             std::size_t capacity_bytes)
    : std::runtime_error("the pool has no free piece of " + std::to_string(asked_bytes) +
                         " bytes: " + std::to_string(free_bytes) + " of " + std::to_string(capacity_bytes) +
                         " bytes are free, the largest piece has " + std::to_string(largest_bytes)),
      asked(asked_bytes),
      free(free_bytes),
      largest(largest_bytes),
      capacity(capacity_bytes) {}

Block::Block(std::shared_ptr<Pool> pool, std::size_t arena, std::size_t offset, std::size_t nbytes)
    : pool_(std::move(pool)),
      arena_(arena),
      offset_(offset),
      nbytes_(nbytes),
      data_(pool_->arenas_[arena]->data() + offset) {}

Block::~Block() {
    pool_->give_back(arena_, offset_, nbytes_);
}

std::shared_ptr<Pool> Pool::make(std::size_t nbytes, std::optional<unsigned> numa_node) {
    return std::shared_ptr<Pool>(new Pool(nbytes, numa_node));
}

Pool::Pool(std::size_t nbytes, std::optional<unsigned> numa_node) {
    if (nbytes == 0) throw std::invalid_argument("a pool needs at least one byte");
    while (capacity_ < nbytes) {
        arenas_.push_back(std::make_shared<Arena>(std::min(nbytes - capacity_, Arena::max_bytes), numa_node));
        capacity_ += arenas_.back()->size();
        free_.push_back({{0, arenas_.back()->size()}});
    }
}

void Pool::pin_with(const std::shared_ptr<CudaHost>& cuda) {
    const std::lock_guard lock(mutex_);
    if (pinned_) return;
    for (const auto& arena : arenas_) arena->pin_with(cuda);
    pinned_ = true;
}

bool Pool::pinned() const {
    const std::lock_guard lock(mutex_);
    return pinned_;
}

// Best fit: the smallest piece that holds it, so that large ones stay whole.
std::shared_ptr<Block> Pool::take(std::size_t nbytes) {
    if (nbytes == 0 || nbytes > Arena::max_bytes) {
        throw std::invalid_argument("a buffer holds 1 to " + std::to_string(Arena::max_bytes) +
                                    " bytes, asked: " + std::to_string(nbytes));
    }
    const std::size_t wanted = round_up(nbytes);
    std::size_t arena = 0;
    std::size_t offset = 0;
    {
        const std::lock_guard lock(mutex_);
        std::size_t best = ~std::size_t{0};
        for (std::size_t index = 0; index < free_.size(); ++index) {
            for (const auto& [at, length] : free_[index]) {
                if (length >= wanted && length < best) {
                    best = length;
                    arena = index;
                    offset = at;
                }
            }
        }
        if (best == ~std::size_t{0}) throw PoolExhausted(nbytes, free_locked(), largest_locked(), capacity_);
        free_[arena].erase(offset);
        if (best > wanted) free_[arena].emplace(offset + wanted, best - wanted);
        peak_ = std::max(peak_, capacity_ - free_locked());
    }
    return std::make_shared<Block>(shared_from_this(), arena, offset, nbytes);
}

void Pool::give_back(std::size_t arena, std::size_t offset, std::size_t nbytes) noexcept {
    const std::lock_guard lock(mutex_);
    auto& pieces = free_[arena];
    auto place = pieces.emplace(offset, round_up(nbytes)).first;
    if (const auto next = std::next(place);
        next != pieces.end() && place->first + place->second == next->first) {
        place->second += next->second;
        pieces.erase(next);
    }
    if (place == pieces.begin()) return;
    if (const auto previous = std::prev(place); previous->first + previous->second == place->first) {
        previous->second += place->second;
        pieces.erase(place);
    }
}

std::size_t Pool::free_bytes() const {
    const std::lock_guard lock(mutex_);
    return free_locked();
}

std::size_t Pool::largest_free() const {
    const std::lock_guard lock(mutex_);
    return largest_locked();
}

std::size_t Pool::peak_bytes() const {
    const std::lock_guard lock(mutex_);
    return peak_;
}

std::size_t Pool::free_locked() const {
    std::size_t total = 0;
    for (const auto& pieces : free_) {
        for (const auto& piece : pieces) total += piece.second;
    }
    return total;
}

std::size_t Pool::largest_locked() const {
    std::size_t largest = 0;
    for (const auto& pieces : free_) {
        for (const auto& piece : pieces) largest = std::max(largest, piece.second);
    }
    return largest;
}

}  // namespace deepnvme
