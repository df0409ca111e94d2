// How long operations took, in buckets: any thread may ask while one adds.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace deepnvme {

class Latencies {
  public:
    void add(std::chrono::nanoseconds latency) noexcept;
    // The latency that `share` of the operations did not exceed, to about an eighth.
    [[nodiscard]] double quantile_us(double share) const noexcept;

  private:
    std::array<std::atomic<std::uint64_t>, 256> counts_{};
};

}  // namespace deepnvme
