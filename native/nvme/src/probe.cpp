#include "deepnvme/probe.hpp"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <type_traits>
#include <utility>

#include "deepnvme/uring_abi.hpp"

namespace deepnvme {
namespace {

// An open descriptor, or the errno of why there is none.
class Descriptor {
  public:
    Descriptor() = default;
    explicit Descriptor(long result)
        : number_(static_cast<int>(result)), error_(result < 0 ? errno : 0) {}
    Descriptor(Descriptor&& other) noexcept
        : number_(std::exchange(other.number_, -1)), error_(other.error_) {}
    Descriptor& operator=(Descriptor&&) = delete;
    ~Descriptor() {
        if (number_ >= 0) ::close(number_);
    }

    [[nodiscard]] bool valid() const { return number_ >= 0; }
    [[nodiscard]] int number() const { return number_; }
    [[nodiscard]] int error() const { return error_; }

  private:
    int number_ = -1;
    int error_ = 0;
};

[[nodiscard]] Descriptor setup_ring(uring::Params& params) {
    return Descriptor(::syscall(uring::syscall_setup, 4U, &params));
}

[[nodiscard]] std::vector<std::uint8_t> supported_opcodes(const Descriptor& ring) {
    uring::Probe probe{};
    constexpr auto capacity = static_cast<unsigned>(std::extent_v<decltype(probe.ops)>);
    std::vector<std::uint8_t> opcodes;
    if (::syscall(uring::syscall_register, ring.number(), uring::register_probe, &probe, capacity) <
        0) {
        return opcodes;
    }
    for (const uring::ProbeOp& one : probe.ops) {
        if ((one.flags & uring::op_supported) != 0) opcodes.push_back(one.op);
    }
    return opcodes;
}

// struct statx of the kernel up to the direct-I/O fields (Linux 6.1), which C libraries learned
// later.
struct StatxRecord {
    std::uint32_t mask;
    std::byte between[148];
    std::uint32_t dio_memory_align;
    std::uint32_t dio_offset_align;
    std::byte rest[96];
};
static_assert(sizeof(StatxRecord) == 256);
static_assert(offsetof(StatxRecord, dio_memory_align) == 152);

constexpr unsigned statx_dioalign = 0x2000;

#if defined(SYS_statx)
constexpr long syscall_statx = SYS_statx;
#elif defined(__x86_64__)
constexpr long syscall_statx = 332;
#else
constexpr long syscall_statx = 291;
#endif

[[nodiscard]] std::optional<DioAlignment> statx_alignment(int directory, const char* path,
                                                          int flags) {
    StatxRecord record{};
    if (::syscall(syscall_statx, directory, path, flags, statx_dioalign, &record) != 0)
        return std::nullopt;
    if ((record.mask & statx_dioalign) == 0) return std::nullopt;
    return DioAlignment{record.dio_memory_align, record.dio_offset_align};
}

[[nodiscard]] Descriptor open_file(const char* path, int flags) {
    return Descriptor(::open(path, flags | O_RDWR | O_CLOEXEC, 0600));
}

// Files without a name in one directory, so that nothing stays behind: one opened as usual, one
// with O_DIRECT.
struct ScratchFiles {
    Descriptor plain;
    Descriptor direct;
};

[[nodiscard]] ScratchFiles open_scratch_files(const std::filesystem::path& directory) {
    Descriptor nameless = open_file(directory.c_str(), O_TMPFILE);
    if (nameless.valid())
        return {std::move(nameless), open_file(directory.c_str(), O_TMPFILE | O_DIRECT)};

    // Not every file system has nameless files (FUSE, NFS): there the name lives for as long as
    // both opens take.
    std::string name = (directory / ".deepnvme-probe-XXXXXX").string();
    Descriptor named(::mkostemp(name.data(), O_CLOEXEC));
    if (!named.valid()) return {std::move(named), Descriptor()};
    Descriptor direct = open_file(name.c_str(), O_DIRECT);
    ::unlink(name.c_str());
    return {std::move(named), std::move(direct)};
}

class AlignedBlock {
  public:
    explicit AlignedBlock(std::size_t nbytes)
        : nbytes_(nbytes),
          bytes_(static_cast<std::byte*>(::operator new(nbytes, std::align_val_t{nbytes}))) {
        fill(0);
    }
    AlignedBlock(const AlignedBlock&) = delete;
    AlignedBlock& operator=(const AlignedBlock&) = delete;
    ~AlignedBlock() { ::operator delete(bytes_, std::align_val_t{nbytes_}); }

    [[nodiscard]] std::byte* data() const { return bytes_; }
    [[nodiscard]] std::size_t size() const { return nbytes_; }
    void fill(int value) const { std::memset(bytes_, value, nbytes_); }
    [[nodiscard]] bool holds_only(int value) const {
        return std::all_of(bytes_, bytes_ + nbytes_,
                           [=](std::byte one) { return one == std::byte(value); });
    }

  private:
    std::size_t nbytes_;
    std::byte* bytes_;
};

// 0, or the errno of what went wrong; EIO for a short count, of one block at offset 0.
[[nodiscard]] int error_of(ssize_t done, std::size_t asked) {
    if (done < 0) return errno;
    return static_cast<std::size_t>(done) == asked ? 0 : EIO;
}

[[nodiscard]] int write_block(const Descriptor& file, const AlignedBlock& block) {
    return error_of(::pwrite(file.number(), block.data(), block.size(), 0), block.size());
}

[[nodiscard]] int read_block(const Descriptor& file, const AlignedBlock& block) {
    return error_of(::pread(file.number(), block.data(), block.size(), 0), block.size());
}

[[nodiscard]] int write_and_read_back(const Descriptor& file, const AlignedBlock& block) {
    constexpr int pattern = 0x5A;
    block.fill(pattern);
    if (const int error = write_block(file, block); error != 0) return error;
    block.fill(0);
    if (const int error = read_block(file, block); error != 0) return error;
    return block.holds_only(pattern) ? 0 : EIO;
}

// 4 KiB serves every drive in use; a file system that asks for more (64 KiB blocks) is given more.
[[nodiscard]] std::size_t block_size_for(const std::optional<DioAlignment>& alignment) {
    constexpr std::size_t usual = 4096;
    if (!alignment) return usual;
    return std::max({usual, std::size_t{alignment->memory}, std::size_t{alignment->offset}});
}

}  // namespace

UringProbe probe_uring() {
    UringProbe result;
    uring::Params plain{};
    const Descriptor ring = setup_ring(plain);
    if (!ring.valid()) {
        result.error = ring.error();
        return result;
    }
    result.features = plain.features;
    result.opcodes = supported_opcodes(ring);

    uring::Params deferred{};
    deferred.flags = uring::setup_single_issuer | uring::setup_defer_taskrun;
    result.defer_taskrun = setup_ring(deferred).valid();
    return result;
}

int probe_linux_aio() {
    unsigned long context = 0;
    if (::syscall(SYS_io_setup, 1U, &context) != 0) return errno;
    return ::syscall(SYS_io_destroy, context) == 0 ? 0 : errno;
}

std::optional<DioAlignment> dio_alignment(const std::filesystem::path& path) {
    return statx_alignment(AT_FDCWD, path.c_str(), 0);
}

DirectoryProbe probe_directory(const std::filesystem::path& directory) {
    DirectoryProbe result;
    const ScratchFiles files = open_scratch_files(directory);
    if (!files.plain.valid()) {
        result.plain_error = result.direct_error = files.plain.error();
        return result;
    }
    result.alignment = statx_alignment(files.plain.number(), "", AT_EMPTY_PATH);
    const AlignedBlock block(block_size_for(result.alignment));
    result.plain_error = write_block(files.plain, block);
    result.direct_error =
        files.direct.valid() ? write_and_read_back(files.direct, block) : files.direct.error();
    return result;
}

}  // namespace deepnvme
