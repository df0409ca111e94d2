// One run of memory, handed out in page-aligned pieces of exactly the bytes asked for. Thread-safe.
// A Block gives its piece back when its last holder lets go. The memory lives until the pool and
// all blocks are gone.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "deepnvme/arena.hpp"

namespace deepnvme {

// The pool has no such piece now; the message says what is free.
class PoolExhausted : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

class Pool;

// The pieces of a run of memory: offset -> bytes.
using Pieces = std::map<std::size_t, std::size_t>;

class Block {
  public:
    // `piece` is the map node that goes back to the pool, so that giving back needs no memory.
    Block(std::shared_ptr<Pool> pool, Pieces::node_type piece, std::size_t nbytes);
    ~Block();
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;

    [[nodiscard]] std::byte* data() const noexcept { return data_; }
    [[nodiscard]] std::size_t size() const noexcept { return nbytes_; }

  private:
    std::shared_ptr<Pool> pool_;
    Pieces::node_type piece_;
    std::size_t nbytes_;
    std::byte* data_;
};

class Pool : public std::enable_shared_from_this<Pool> {
  public:
    static constexpr std::size_t granularity = 4096;

    // Maps and touches all of its memory now. Throws std::bad_alloc, std::invalid_argument.
    [[nodiscard]] static std::shared_ptr<Pool> make(
        std::size_t nbytes, std::optional<unsigned> numa_node = std::nullopt);

    // Throws PoolExhausted; ForkedError; std::invalid_argument for 0 bytes.
    [[nodiscard]] std::shared_ptr<Block> take(std::size_t nbytes);

    // The piece at `offset`, for a caller that plans the pool's use. Throws PoolExhausted where a
    // Block has some of it; ForkedError; std::invalid_argument for 0 bytes, an offset within a
    // page, or bytes outside the pool.
    [[nodiscard]] std::shared_ptr<Block> take_at(std::size_t offset, std::size_t nbytes);

    // Page-locks all of it for CUDA, so that copies to and from a GPU need no staging. Again: does
    // nothing. Throws std::runtime_error; the pool is then usable as before.
    void pin_with(const std::shared_ptr<CudaHost>& cuda);
    [[nodiscard]] bool pinned() const;

    // The memory in parts that a ring can register, each as large as the kernel takes. A piece may
    // lie across two.
    [[nodiscard]] const std::vector<std::shared_ptr<Arena>>& arenas() const noexcept {
        return arenas_;
    }
    [[nodiscard]] std::size_t capacity() const noexcept { return mapping_->size(); }
    [[nodiscard]] std::size_t free_bytes() const;
    [[nodiscard]] std::size_t largest_free() const;
    [[nodiscard]] std::size_t peak_bytes() const;

  private:
    friend class Block;
    Pool(std::size_t nbytes, std::optional<unsigned> numa_node);
    [[nodiscard]] std::shared_ptr<Block> cut_locked(std::size_t piece, std::size_t offset,
                                                    std::size_t nbytes);
    void give_back(Pieces::node_type piece) noexcept;
    void put_locked(Pieces::node_type piece) noexcept;
    [[nodiscard]] std::size_t largest_locked() const;
    [[nodiscard]] PoolExhausted exhausted_locked(const std::string& what) const;
    [[nodiscard]] bool belongs_to_a_parent() const noexcept;
    void refuse_if_forked() const;

    std::shared_ptr<Mapping> mapping_;
    std::vector<std::shared_ptr<Arena>> arenas_;
    mutable std::mutex mutex_;
    Pieces free_;  // no two are adjacent: they would be one
    std::size_t free_bytes_ = 0;
    std::size_t peak_ = 0;
    bool pinned_ = false;
    const pid_t owner_;
};

}  // namespace deepnvme
