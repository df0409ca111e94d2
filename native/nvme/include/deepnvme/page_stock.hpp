// Memory for I/O in runs of any size, each with addresses of its own; their pages are used again
// for other runs: the kernel clears a new page, which takes as long as to fill it, and moves an old
// one by its table. Thread-safe.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>

#include "deepnvme/arena.hpp"

namespace deepnvme {

class PageStock;

// Goes back to its stock in the end.
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

    // Beside it, at most `keep` bytes are idle when it returns, and were before it asked for new
    // pages. Its bytes are zeros or of an earlier run. Throws std::bad_alloc; ForkedError;
    // std::invalid_argument for 0 bytes.
    [[nodiscard]] std::shared_ptr<Pages> take(std::size_t nbytes, std::size_t keep);

    // Gives idle pages back to the system, what has been idle longest first, until at most so much
    // is left.
    void keep_at_most(std::size_t nbytes);

    [[nodiscard]] std::size_t idle_bytes() const;

  private:
    friend class Pages;
    PageStock();
    void give_back(std::unique_ptr<Mapping> mapping) noexcept;
    [[nodiscard]] std::unique_ptr<Mapping> same_or_filled(std::size_t nbytes, std::size_t keep);
    [[nodiscard]] std::unique_ptr<Mapping> same_locked(std::size_t nbytes);
    [[nodiscard]] std::size_t fill_locked(Mapping& fresh);
    void keep_locked(std::size_t nbytes);
    [[nodiscard]] std::size_t idle_locked() const noexcept;
    [[nodiscard]] bool belongs_to_a_parent() const noexcept;

    mutable std::mutex mutex_;
    std::deque<std::unique_ptr<Mapping>> idle_;  // what went back last, last
    const pid_t owner_;
};

}  // namespace deepnvme
