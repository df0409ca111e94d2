#include "deepnvme/latencies.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>

namespace deepnvme {

// Four buckets per power of two of nanoseconds.
void Latencies::add(std::chrono::nanoseconds latency) noexcept {
    const auto ns = static_cast<std::uint64_t>(std::max<std::int64_t>(latency.count(), 4));
    const auto power = static_cast<unsigned>(std::bit_width(ns)) - 1;
    counts_[power * 4 + ((ns >> (power - 2)) & 3)].fetch_add(1, std::memory_order_relaxed);
}

double Latencies::quantile_us(double share) const noexcept {
    std::uint64_t total = 0;
    for (const auto& count : counts_) total += count.load(std::memory_order_relaxed);
    if (total == 0) return 0.0;
    auto left = static_cast<std::uint64_t>(share * static_cast<double>(total - 1)) + 1;
    for (std::size_t bucket = 0; bucket < counts_.size(); ++bucket) {
        const std::uint64_t count = counts_[bucket].load(std::memory_order_relaxed);
        if (count >= left) {
            const double low = std::exp2(static_cast<double>(bucket / 4));
            return low * (1.0 + (static_cast<double>(bucket % 4) + 0.5) / 4.0) / 1e3;
        }
        left -= count;
    }
    return 0.0;
}

}  // namespace deepnvme
