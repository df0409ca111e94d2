// Memory for I/O: 2 MiB-aligned, advised to be huge pages, kept out of forked children, touched
// once. The only place in the project that maps such memory. Pool hands out pieces of it, PageStock
// reuses its pages, drives register its arenas with their rings.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <optional>

#include "deepnvme/cuda_host.hpp"

namespace deepnvme {

// Lets the kernel make all pages of new memory now, which begins at a page: in one call where it
// can (Linux 5.14), else by a page fault for each. The memory stays zeros.
void populate(std::byte* memory, std::size_t nbytes) noexcept;

// One run of addresses, mapped and touched as a whole.
class Mapping {
  public:
    // How large a mapping is that holds so many bytes. Throws std::bad_alloc for more than one can
    // hold.
    [[nodiscard]] static std::size_t size_for(std::size_t nbytes);

    // Throws std::bad_alloc where the kernel gives no memory, std::invalid_argument for 0 bytes or
    // for a NUMA node that does not exist.
    explicit Mapping(std::size_t nbytes, std::optional<unsigned> numa_node = std::nullopt);

    // Addresses without pages: `touch` adds new pages, `take_over` those of another mapping.
    struct Untouched {};
    Mapping(std::size_t nbytes, Untouched /*pages*/);
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    [[nodiscard]] std::byte* data() const noexcept { return data_; }
    [[nodiscard]] std::size_t size() const noexcept { return size_; }

    // Page-locks it for CUDA until it is unmapped. Throws std::runtime_error with the driver's
    // reason.
    void pin_with(std::shared_ptr<CudaHost> cuda);

    // Makes the pages from `start` on.
    void touch(std::size_t start) noexcept { populate(data_ + start, size_ - start); }

    // Moves huge pages from the front of `donor`, which is neither used nor registered, to `at`,
    // where there are no pages yet, as far as there is room for whole ones. Returns the bytes
    // moved. What is left of the donor is unmapped where it is less than a huge page. Throws
    // std::bad_alloc where the kernel refuses; this mapping can then only be destroyed.
    [[nodiscard]] std::size_t take_over(Mapping& donor, std::size_t at);

    // Gives huge pages from its front back to the system, at least so many bytes, while it is
    // neither used nor registered. Returns the bytes given; 0 where none would be left.
    std::size_t shrink(std::size_t at_least) noexcept;

  private:
    void reserve(std::size_t nbytes);
    void advise() const noexcept;
    void bind_to(unsigned node);

    std::shared_ptr<CudaHost> cuda_;  // empty: not page-locked
    std::byte* data_ = nullptr;
    std::size_t size_ = 0;
    pid_t owner_ = 0;
};

// The part of a mapping that is registered with a ring as one buffer.
class Arena {
  public:
    // A larger registered buffer is refused by the kernel (EFAULT).
    static constexpr std::size_t max_bytes = std::size_t{1} << 30;

    // Throws std::invalid_argument for 0 bytes, more than max_bytes, or bytes outside the mapping.
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
