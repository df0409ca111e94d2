#include "deepnvme/pool.hpp"

#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "deepnvme/error.hpp"

namespace deepnvme {

namespace {

constexpr std::size_t round_up(std::size_t nbytes) {
    return (nbytes + Pool::granularity - 1) / Pool::granularity * Pool::granularity;
}

}  // namespace

Block::Block(std::shared_ptr<Pool> pool, Pieces::node_type piece, std::size_t nbytes)
    : pool_(std::move(pool)),
      piece_(std::move(piece)),
      nbytes_(nbytes),
      data_(pool_->mapping_->data() + piece_.key()) {}

Block::~Block() {
    pool_->give_back(std::move(piece_));
}

std::shared_ptr<Pool> Pool::make(std::size_t nbytes, std::optional<unsigned> numa_node) {
    return std::shared_ptr<Pool>(new Pool(nbytes, numa_node));
}

Pool::Pool(std::size_t nbytes, std::optional<unsigned> numa_node)
    : mapping_(std::make_shared<Mapping>(nbytes, numa_node)),
      free_bytes_(mapping_->size()),
      owner_(::getpid()) {
    for (std::size_t start = 0; start < capacity(); start += Arena::max_bytes) {
        const std::size_t length = std::min(capacity() - start, Arena::max_bytes);
        arenas_.push_back(std::make_shared<Arena>(mapping_, start, length));
    }
    free_.emplace(0, capacity());
}

void Pool::pin_with(const std::shared_ptr<CudaHost>& cuda) {
    const std::lock_guard lock(mutex_);
    if (pinned_) return;
    mapping_->pin_with(cuda);
    pinned_ = true;
}

bool Pool::pinned() const {
    const std::lock_guard lock(mutex_);
    return pinned_;
}

// Best fit: the smallest piece that holds it, so that large ones stay whole.
std::shared_ptr<Block> Pool::take(std::size_t nbytes) {
    if (nbytes == 0) throw std::invalid_argument("a buffer holds at least 1 byte, asked: 0");
    refuse_if_forked();
    const std::lock_guard lock(mutex_);
    std::size_t best = ~std::size_t{0};
    std::size_t offset = 0;
    for (const auto& [at, length] : free_) {
        if (length >= nbytes && length < best) {
            best = length;
            offset = at;
        }
    }
    if (best == ~std::size_t{0})
        throw exhausted_locked("the pool has no free piece of " + std::to_string(nbytes) +
                               " bytes");
    return cut_locked(offset, offset, nbytes);
}

std::shared_ptr<Block> Pool::take_at(std::size_t offset, std::size_t nbytes) {
    if (nbytes == 0 || offset % granularity != 0 || offset > capacity() ||
        nbytes > capacity() - offset) {
        throw std::invalid_argument(
            "a buffer's place is 1 byte or more from a multiple of " + std::to_string(granularity) +
            " on, within the pool's " + std::to_string(capacity()) +
            " bytes; asked: " + std::to_string(nbytes) + " at " + std::to_string(offset));
    }
    refuse_if_forked();
    const std::lock_guard lock(mutex_);
    const auto after = free_.upper_bound(offset);
    const auto piece = after == free_.begin() ? free_.end() : std::prev(after);
    if (piece == free_.end() || piece->first + piece->second < offset + nbytes) {
        throw exhausted_locked("bytes " + std::to_string(offset) + " to " +
                               std::to_string(offset + nbytes) + " of the pool are not all free");
    }
    return cut_locked(piece->first, offset, nbytes);
}

// Takes `nbytes` at `offset` out of the free piece that begins at `piece`. Where there is no memory
// for the bookkeeping, nothing is taken.
std::shared_ptr<Block> Pool::cut_locked(std::size_t piece, std::size_t offset, std::size_t nbytes) {
    Pieces made;
    made.emplace(offset, round_up(nbytes));
    Pieces::node_type taken = made.extract(made.begin());
    const std::size_t behind = offset + taken.mapped();
    const std::size_t end = piece + free_.at(piece);
    if (behind < end) free_.emplace(behind, end - behind);
    if (piece < offset) {
        free_.at(piece) = offset - piece;
    } else {
        free_.erase(piece);
    }
    free_bytes_ -= taken.mapped();
    try {
        std::shared_ptr<Block> block =
            std::make_shared<Block>(shared_from_this(), std::move(taken), nbytes);
        peak_ = std::max(peak_, capacity() - free_bytes_);
        return block;
    } catch (const std::bad_alloc&) {
        put_locked(std::move(taken));
        throw;
    }
}

// A forked child does not have the memory, nor the thread that may have held the lock.
bool Pool::belongs_to_a_parent() const noexcept {
    return ::getpid() != owner_;
}

void Pool::refuse_if_forked() const {
    if (!belongs_to_a_parent()) return;
    throw ForkedError("this pool belongs to process " + std::to_string(owner_) +
                      "; a forked child makes its own");
}

void Pool::give_back(Pieces::node_type piece) noexcept {
    if (belongs_to_a_parent()) return;
    const std::lock_guard lock(mutex_);
    put_locked(std::move(piece));
}

void Pool::put_locked(Pieces::node_type piece) noexcept {
    free_bytes_ += piece.mapped();
    auto place = free_.insert(std::move(piece)).position;
    if (const auto next = std::next(place);
        next != free_.end() && place->first + place->second == next->first) {
        place->second += next->second;
        free_.erase(next);
    }
    if (place == free_.begin()) return;
    if (const auto previous = std::prev(place);
        previous->first + previous->second == place->first) {
        previous->second += place->second;
        free_.erase(place);
    }
}

std::size_t Pool::free_bytes() const {
    if (belongs_to_a_parent()) return 0;
    const std::lock_guard lock(mutex_);
    return free_bytes_;
}

std::size_t Pool::largest_free() const {
    if (belongs_to_a_parent()) return 0;
    const std::lock_guard lock(mutex_);
    return largest_locked();
}

std::size_t Pool::peak_bytes() const {
    if (belongs_to_a_parent()) return 0;
    const std::lock_guard lock(mutex_);
    return peak_;
}

PoolExhausted Pool::exhausted_locked(const std::string& what) const {
    return PoolExhausted(what + ": " + std::to_string(free_bytes_) + " of " +
                         std::to_string(capacity()) + " bytes are free, the largest piece has " +
                         std::to_string(largest_locked()) +
                         ". Let go of buffers of this pool, or make a larger one");
}

std::size_t Pool::largest_locked() const {
    std::size_t largest = 0;
    for (const auto& piece : free_) largest = std::max(largest, piece.second);
    return largest;
}

}  // namespace deepnvme
