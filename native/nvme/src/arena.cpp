#include "deepnvme/arena.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace deepnvme {

namespace {

constexpr std::size_t page = 4096;
constexpr std::size_t huge_page = std::size_t{2} << 20;
constexpr std::size_t most_bytes = std::size_t{1}
                                   << 56;  // more than any address space has; sums do not wrap

constexpr std::size_t round_up(std::size_t value, std::size_t unit) {
    return (value + unit - 1) / unit * unit;
}

#if !defined(MADV_POPULATE_WRITE)
#define MADV_POPULATE_WRITE 23
#endif

}  // namespace

void populate(std::byte* memory, std::size_t nbytes) noexcept {
    if (::madvise(memory, nbytes, MADV_POPULATE_WRITE) == 0) return;
    for (std::size_t at = 0; at < nbytes; at += page) {
        reinterpret_cast<volatile std::byte*>(memory)[at] = std::byte{0};
    }
}

Mapping::Mapping(std::size_t nbytes, std::optional<unsigned> numa_node) : owner_(::getpid()) {
    reserve(nbytes);
    if (numa_node) {
        try {
            bind_to(*numa_node);
        } catch (...) {
            ::munmap(data_, size_);
            throw;
        }
    }
    touch(0);
}

Mapping::Mapping(std::size_t nbytes, Untouched /*pages*/) : owner_(::getpid()) {
    reserve(nbytes);
}

std::size_t Mapping::size_for(std::size_t nbytes) {
    if (nbytes > most_bytes) throw std::bad_alloc();
    return round_up(nbytes, page);
}

void Mapping::reserve(std::size_t nbytes) {
    if (nbytes == 0) throw std::invalid_argument("memory for I/O has at least one byte");
    size_ = size_for(nbytes);
    // Private and anonymous: shared mappings never become huge pages. One huge page more than
    // asked, and both ends that the alignment leaves over are given back.
    const std::size_t mapped = size_ + huge_page;
    void* const raw =
        ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) throw std::bad_alloc();
    const auto start = reinterpret_cast<std::uintptr_t>(raw);
    const std::uintptr_t aligned = round_up(start, huge_page);
    if (aligned > start) ::munmap(raw, aligned - start);
    const std::uintptr_t end = aligned + size_;
    if (start + mapped > end) ::munmap(reinterpret_cast<void*>(end), start + mapped - end);
    data_ = reinterpret_cast<std::byte*>(aligned);
    advise();
}

// Before the first touch, so before a ring or CUDA registers the pages. Advice that is refused
// costs speed, not correctness: a kernel without huge pages gives small ones.
void Mapping::advise() const noexcept {
    (void)::madvise(data_, size_, MADV_HUGEPAGE);
    (void)::madvise(data_, size_, MADV_DONTFORK);
}

// One huge page at a time, which always lies within one of the kernel's areas: before
// Linux 6.17 a move across two is refused, and later it may end between them.
std::size_t Mapping::take_over(Mapping& donor, std::size_t at) {
    std::size_t moved = 0;
    while (donor.size_ >= huge_page && size_ - at - moved >= huge_page) {
        std::byte* const target = data_ + at + moved;
        if (::mremap(donor.data_, huge_page, huge_page, MREMAP_MAYMOVE | MREMAP_FIXED, target) ==
            MAP_FAILED) {
            // Whether the target is mapped yet is not known, and another thread may have something
            // there by now: it is neither mapped over nor unmapped. That loses addresses, no
            // memory.
            std::byte* const behind = target + huge_page;
            ::munmap(behind, static_cast<std::size_t>(data_ + size_ - behind));
            size_ = at + moved;
            throw std::bad_alloc();
        }
        donor.data_ += huge_page;
        donor.size_ -= huge_page;
        moved += huge_page;
    }
    if (donor.size_ < huge_page && donor.size_ > 0 && moved > 0) {
        ::munmap(donor.data_, donor.size_);
        donor.size_ = 0;
    }
    return moved;
}

std::size_t Mapping::shrink(std::size_t at_least) noexcept {
    const std::size_t given = round_up(at_least, huge_page);
    if (given >= size_) return 0;
    ::munmap(data_, given);
    data_ += given;
    size_ -= given;
    return given;
}

// Preferred, not required: a node that is full costs speed, and no memory at all would cost the
// run.
void Mapping::bind_to(unsigned node) {
    constexpr int prefer = 1;  // MPOL_PREFERRED
    constexpr unsigned bits_per_word = 64;
    std::array<std::uint64_t, 16> nodes{};
    const bool countable = node < nodes.size() * bits_per_word;
    if (countable) nodes[node / bits_per_word] = std::uint64_t{1} << (node % bits_per_word);
    // The kernel reads one bit less than the number it gets.
    if (!countable || ::syscall(SYS_mbind, data_, size_, prefer, nodes.data(),
                                nodes.size() * bits_per_word + 1, 0) != 0) {
        throw std::invalid_argument("memory cannot be placed on NUMA node " + std::to_string(node) +
                                    ": " +
                                    std::generic_category().message(countable ? errno : EINVAL));
    }
}

Mapping::~Mapping() {
    // A forked child does not have this memory (MADV_DONTFORK). Other code may have mapped
    // something there since.
    if (::getpid() != owner_) return;
    if (cuda_) cuda_->unregister_memory(data_);
    if (size_ > 0) ::munmap(data_, size_);
}

void Mapping::pin_with(std::shared_ptr<CudaHost> cuda) {
    cuda->register_memory(data_, size_);
    cuda_ = std::move(cuda);
}

Arena::Arena(std::shared_ptr<Mapping> mapping, std::size_t offset, std::size_t nbytes)
    : mapping_(std::move(mapping)), data_(mapping_->data() + offset), size_(nbytes) {
    if (nbytes == 0 || nbytes > max_bytes || offset > mapping_->size() ||
        nbytes > mapping_->size() - offset) {
        throw std::invalid_argument("an arena holds 1 to " + std::to_string(max_bytes) +
                                    " bytes of its mapping, asked: " + std::to_string(nbytes) +
                                    " at " + std::to_string(offset));
    }
}

Arena::Arena(std::size_t nbytes)
    : Arena(std::make_shared<Mapping>(nbytes), 0, round_up(nbytes, page)) {}

}  // namespace deepnvme
