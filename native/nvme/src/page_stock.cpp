#include "deepnvme/page_stock.hpp"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "deepnvme/error.hpp"

namespace deepnvme {

Pages::Pages(std::shared_ptr<PageStock> stock, std::unique_ptr<Mapping> mapping, std::size_t nbytes)
    : stock_(std::move(stock)), mapping_(std::move(mapping)), nbytes_(nbytes) {}

Pages::~Pages() {
    stock_->give_back(std::move(mapping_));
}

std::shared_ptr<PageStock> PageStock::make() {
    return std::shared_ptr<PageStock>(new PageStock());
}

PageStock::PageStock() : owner_(::getpid()) {}

std::shared_ptr<Pages> PageStock::take(std::size_t nbytes, std::size_t keep) {
    if (nbytes == 0) throw std::invalid_argument("a buffer holds at least 1 byte, asked: 0");
    if (belongs_to_a_parent()) {
        throw ForkedError("this stock of pages belongs to process " + std::to_string(owner_) +
                          "; a forked child makes its own");
    }
    std::unique_ptr<Mapping> taken = same_or_filled(nbytes, keep);
    if (taken == nullptr) taken = std::make_unique<Mapping>(nbytes);
    return std::make_shared<Pages>(shared_from_this(), std::move(taken), nbytes);
}

// Returns null where the kernel refuses to move pages.
std::unique_ptr<Mapping> PageStock::same_or_filled(std::size_t nbytes, std::size_t keep) {
    {
        const std::lock_guard lock(mutex_);
        if (std::unique_ptr<Mapping> same = same_locked(nbytes)) {
            keep_locked(keep);
            return same;
        }
    }
    auto fresh = std::make_unique<Mapping>(nbytes, Mapping::Untouched{});
    std::optional<std::size_t> filled;
    {
        const std::lock_guard lock(mutex_);
        filled = fill_locked(*fresh);
        keep_locked(keep);
    }
    if (!filled) return nullptr;
    fresh->touch(*filled);
    return fresh;
}

void PageStock::keep_at_most(std::size_t nbytes) {
    if (belongs_to_a_parent()) return;
    const std::lock_guard lock(mutex_);
    keep_locked(nbytes);
}

void PageStock::close() {
    if (belongs_to_a_parent()) return;
    const std::lock_guard lock(mutex_);
    closed_ = true;
    keep_locked(0);
}

std::size_t PageStock::idle_bytes() const {
    if (belongs_to_a_parent()) return 0;
    const std::lock_guard lock(mutex_);
    return idle_bytes_;
}

// Where there is no memory for the bookkeeping, the pages go back to the system.
void PageStock::give_back(std::unique_ptr<Mapping> mapping) noexcept {
    if (belongs_to_a_parent()) return;
    try {
        const std::lock_guard lock(mutex_);
        if (closed_) return;
        const std::size_t size = mapping->size();
        idle_.push_back(std::move(mapping));
        idle_bytes_ += size;
    } catch (const std::exception&) {
        mapping.reset();
    }
}

std::unique_ptr<Mapping> PageStock::same_locked(std::size_t nbytes) {
    const std::size_t size = Mapping::size_for(nbytes);
    const auto same = std::ranges::find_if(
        idle_.rbegin(), idle_.rend(), [=](const auto& mapping) { return mapping->size() == size; });
    if (same == idle_.rend()) return nullptr;
    std::unique_ptr<Mapping> found = std::move(*same);
    idle_.erase(std::next(same).base());
    idle_bytes_ -= size;
    return found;
}

// Moves idle pages to the front of `fresh`; returns how many bytes of it have pages now, nothing
// where the kernel refuses.
std::optional<std::size_t> PageStock::fill_locked(Mapping& fresh) {
    std::optional<std::size_t> filled = 0;
    try {
        for (auto donor = idle_.rbegin(); donor != idle_.rend(); ++donor)
            *filled += fresh.take_over(**donor, *filled);
    } catch (const std::bad_alloc&) {
        filled.reset();
    }
    std::erase_if(idle_, [](const auto& mapping) { return mapping->size() == 0; });
    idle_bytes_ = 0;
    for (const auto& mapping : idle_) idle_bytes_ += mapping->size();
    return filled;
}

void PageStock::keep_locked(std::size_t nbytes) {
    while (idle_bytes_ > nbytes) {
        Mapping& oldest = *idle_.front();
        if (const std::size_t given = oldest.shrink(idle_bytes_ - nbytes)) {
            idle_bytes_ -= given;
        } else {
            idle_bytes_ -= oldest.size();
            idle_.pop_front();
        }
    }
}

bool PageStock::belongs_to_a_parent() const noexcept {
    return ::getpid() != owner_;
}

}  // namespace deepnvme
