// Memory for I/O: 2 MiB-aligned, advised to be huge pages, kept out of forked children, touched
// once. The only place in the project that maps such memory; Pool cuts it up, PageStock uses its
// pages again, Drives register its arenas with their rings.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <optional>

#include "deepnvme/cuda_host.hpp"

namespace deepnvme {

// Lets the kernel make the pages of new memory, which begins with one, now: in one call where it
// can (Linux 5.14), else by touching each, which costs a fault each. The memory is zeros, as it
// was.
void populate(std::byte* memory, std::size_t nbytes) noexcept;

// One run of addresses, mapped and touched as a whole.
class Mapping {
  public:
    // Throws std::bad_alloc where the kernel gives no memory, std::invalid_argument for 0 bytes or
    // a NUMA node that there is not.
    explicit Mapping(std::size_t nbytes, std::optional<unsigned> numa_node = std::nullopt);

    // Without pages as yet: `touch` asks for new ones, `take_over` takes another's.
    struct Untouched {};
    Mapping(std::size_t nbytes, Untouched /*pages*/);
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    [[nodiscard]] std::byte* data() const noexcept { return data_; }
    [[nodiscard]] std::size_t size() const noexcept { return size_; }

    // Page-locks it for CUDA too, until it is unmapped. Throws std::runtime_error with the driver's
    // reason.
    void pin_with(std::shared_ptr<CudaHost> cuda);

    // Has pages from `start` on.
    void touch(std::size_t start) noexcept { populate(data_ + start, size_ - start); }

    // Moves huge pages from the front of `donor`, which is neither used nor registered, to
    // `at`, where there are none yet, as far as there is room for whole ones; returns how many
    // bytes that were. A donor that has less than one left has nothing left. Throws std::bad_alloc
    // where the kernel refuses to; this can then only be destroyed.
    [[nodiscard]] std::size_t take_over(Mapping& donor, std::size_t at);

  private:
    void reserve(std::size_t nbytes);
    void advise() const noexcept;
    void bind_to(unsigned node);

    std::shared_ptr<CudaHost> cuda_;  // set: registered there
    std::byte* data_ = nullptr;
    std::size_t size_ = 0;
    pid_t owner_ = 0;
};

// The part of a mapping that is registered with a ring as one buffer.
class Arena {
  public:
    // A larger registered buffer is refused by the kernel (EFAULT).
    static constexpr std::size_t max_bytes = std::size_t{1} << 30;

    // Throws std::invalid_argument for no bytes, more than max_bytes, or bytes that are not in the
    // mapping.
    Arena(std::shared_ptr<Mapping> mapping, std::size_t offset, std::size_t nbytes);

    // A mapping of its own.
    explicit Arena(std::size_t nbytes);

    [[nodiscard]] std::byte* data() const noexcept { return data_; }
    [[nodiscard]] std::size_t size() const noexcept { return size_; }
    [[nodiscard]] bool holds(const std::byte* memory, std::size_t nbytes) const noexcept {
        return memory >= data_ && nbytes <= size_ &&
               static_cast<std::size_t>(memory - data_) <= size_ - nbytes;
    }

  private:
    std::shared_ptr<Mapping> mapping_;
    std::byte* data_;
    std::size_t size_;
};

}  // namespace deepnvme
