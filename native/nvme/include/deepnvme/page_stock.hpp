// Memory for I/O in runs of any size, each with addresses of its own, that reuses the pages of
// earlier runs: clearing a new page takes the kernel as long as filling it, moving an old page only
// changes a page table. Thread-safe.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>

#include "deepnvme/arena.hpp"

namespace deepnvme {

class PageStock;

// One run of memory. Its destructor gives the pages back to the stock.
class Pages {
  public:
    Pages(std::shared_ptr<PageStock> stock, std::unique_ptr<Mapping> mapping, std::size_t nbytes);
    ~Pages();
    Pages(const Pages&) = delete;
    Pages& operator=(const Pages&) = delete;

    [[nodiscard]] std::byte* data() const noexcept { return mapping_->data(); }
    [[nodiscard]] std::size_t size() const noexcept { return nbytes_; }

  private:
    std::shared_ptr<PageStock> stock_;
    std::unique_ptr<Mapping> mapping_;
    std::size_t nbytes_;
};

class PageStock : public std::enable_shared_from_this<PageStock> {
  public:
    [[nodiscard]] static std::shared_ptr<PageStock> make();

    // Returns a run, whose bytes are zeros or those of an earlier run. At most `keep` bytes
    // stay idle; the others go back to the system before it asks for new pages. Throws
    // std::bad_alloc; ForkedError; std::invalid_argument for 0 bytes.
    [[nodiscard]] std::shared_ptr<Pages> take(std::size_t nbytes, std::size_t keep);

    // Gives idle pages back to the system, the longest idle first, until at most `nbytes` are left.
    void keep_at_most(std::size_t nbytes);

    // Gives all idle pages back, and from here on each run's when it goes.
    void close();

    [[nodiscard]] std::size_t idle_bytes() const;

  private:
    friend class Pages;
    PageStock();
    void give_back(std::unique_ptr<Mapping> mapping) noexcept;
    [[nodiscard]] std::unique_ptr<Mapping> same_or_filled(std::size_t nbytes, std::size_t keep);
    [[nodiscard]] std::unique_ptr<Mapping> same_locked(std::size_t nbytes);
    [[nodiscard]] std::optional<std::size_t> fill_locked(Mapping& fresh);
    void keep_locked(std::size_t nbytes);
    [[nodiscard]] bool belongs_to_a_parent() const noexcept;

    mutable std::mutex mutex_;
    std::deque<std::unique_ptr<Mapping>> idle_;  // longest idle first
    std::size_t idle_bytes_ = 0;
    bool closed_ = false;
    const pid_t owner_;
};

}  // namespace deepnvme
