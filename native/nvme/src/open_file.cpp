#include "deepnvme/open_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "deepnvme/error.hpp"
#include "deepnvme/probe.hpp"

namespace deepnvme {

namespace {

constexpr std::uint64_t page = 4096;
// Of zeros behind the end of a file: hardly slower than larger pieces.
constexpr std::size_t zeros_at_once = 64 << 10;
constexpr auto fuse_magic = 0x65735546;  // statfs::f_type of every FUSE file system

int flags_of(OpenMode mode) {
    switch (mode) {
        case OpenMode::read:
            return O_RDONLY;
        case OpenMode::update:
            return O_RDWR;
        case OpenMode::create:
            return O_RDWR | O_CREAT | O_TRUNC;
        case OpenMode::exclusive:
            return O_RDWR | O_CREAT | O_EXCL;
    }
    return O_RDONLY;
}

int open_retrying(const char* path, int flags, unsigned permissions) {
    int descriptor;
    do {
        descriptor = ::open(path, flags | O_CLOEXEC, permissions);
    } while (descriptor < 0 && errno == EINTR);
    return descriptor;
}

// Opening a pipe would wait until its other end is opened, whatever signals come.
void refuse_what_is_no_file(const std::string& path) {
    struct stat status = {};
    if (::stat(path.c_str(), &status) != 0 || S_ISREG(status.st_mode) || S_ISBLK(status.st_mode))
        return;
    if (S_ISDIR(status.st_mode)) throw FileError(EISDIR, "open", path);
    throw FileError(EINVAL, "open (not a file)", path);
}

// The length that all handles of one file share. An inode is not given to another file while a
// handle is open.
std::shared_ptr<std::atomic<std::uint64_t>> length_shared_by_handles(dev_t device, ino_t inode) {
    static std::mutex mutex;
    static std::map<std::pair<dev_t, ino_t>, std::weak_ptr<std::atomic<std::uint64_t>>> lengths;
    const std::lock_guard lock(mutex);
    std::erase_if(lengths, [](const auto& entry) { return entry.second.expired(); });
    std::weak_ptr<std::atomic<std::uint64_t>>& known = lengths[{device, inode}];
    std::shared_ptr<std::atomic<std::uint64_t>> length = known.lock();
    if (!length) known = length = std::make_shared<std::atomic<std::uint64_t>>(0);
    return length;
}

// Where there is such a file or directory, only a FUSE server can leave the question unanswered.
bool is_fuse(int result, const struct statfs& file_system) {
    constexpr std::array nothing_there = {ENOENT, ENOTDIR, EACCES, ELOOP, ENAMETOOLONG};
    if (result == 0) return file_system.f_type == fuse_magic;
    return std::find(nothing_there.begin(), nothing_there.end(), errno) == nothing_there.end();
}

}  // namespace

bool on_fuse(const std::string& path) {
    struct statfs file_system = {};
    int result = ::statfs(path.c_str(), &file_system);
    if (result != 0 && errno == ENOENT) {
        const std::filesystem::path folder = std::filesystem::path(path).parent_path();
        result = ::statfs(folder.c_str(), &file_system);
    }
    return is_fuse(result, file_system);
}

OpenFile::OpenFile(std::string path, OpenMode mode, DirectIO direct, unsigned permissions)
    : path_(std::move(path)), mode_(mode) {
    refuse_what_is_no_file(path_);
    buffered_ = open_retrying(path_.c_str(), flags_of(mode), permissions);
    if (buffered_ < 0) throw FileError(errno, "open", path_);
    try {
        learn_from_kernel();
        if (direct != DirectIO::never) {
            open_directly();
            const int refused = direct_ < 0 ? errno : 0;
            const auto alignment = dio_alignment(path_);
            if (direct_ >= 0 && alignment && alignment->memory == 0 && alignment->offset == 0) {
                ::close(std::exchange(direct_, -1));
            }
            if (direct_ < 0 && direct == DirectIO::required) {
                throw FileError(refused == 0 ? EINVAL : refused, "open with O_DIRECT", path_);
            }
            if (alignment && alignment->memory > 0) {
                memory_alignment_ = alignment->memory;
                offset_alignment_ = std::max<std::uint64_t>(page, alignment->offset);
            } else {
                memory_alignment_ = page;
            }
        }
        // Pages that the kernel read ahead would be stale once a direct write to these has ended,
        // here or through another handle. The drive orders requests by the pages they ask for.
        const bool has_direct_writes = direct == DirectIO::never || direct_ >= 0;
        if (has_direct_writes) (void)::posix_fadvise(buffered_, 0, 0, POSIX_FADV_RANDOM);
    } catch (...) {
        close_all();
        throw;
    }
}

OpenFile::OpenFile(std::string name, int memfd, OpenMode mode)
    : path_(std::move(name)), mode_(mode) {
    buffered_ = ::fcntl(memfd, F_DUPFD_CLOEXEC, 0);
    if (buffered_ < 0) throw FileError(errno, "duplicate", path_);
    try {
        learn_from_kernel();
        if (mode == OpenMode::create) truncate(0);
    } catch (...) {
        close_all();
        throw;
    }
}

OpenFile::~OpenFile() {
    close_all();
}

void OpenFile::close_all() noexcept {
    for (int* descriptor : {&direct_, &buffered_}) {
        if (*descriptor >= 0) ::close(std::exchange(*descriptor, -1));
    }
}

void OpenFile::learn_from_kernel() {
    struct stat status = {};
    if (::fstat(buffered_, &status) != 0) throw FileError(errno, "stat", path_);
    if (S_ISDIR(status.st_mode)) throw FileError(EISDIR, "open", path_);
    if (!S_ISREG(status.st_mode) && !S_ISBLK(status.st_mode))
        throw FileError(EINVAL, "open (not a file)", path_);
    device_ = S_ISBLK(status.st_mode) ? status.st_rdev : status.st_dev;
    inode_ = status.st_ino;
    struct statfs file_system = {};
    on_fuse_ = is_fuse(::fstatfs(buffered_, &file_system), file_system);
    expected_length_ = length_shared_by_handles(device_, inode_);
    // A write that ends in between lengthens the file, and the kernel is asked again.
    std::uint64_t known = expected_length_->load();
    while (!expected_length_->compare_exchange_weak(known, length())) {
    }
}

// Leaves errno as the kernel set it where it refuses.
void OpenFile::open_directly() {
    const int access = writable() ? O_RDWR : O_RDONLY;
    direct_ = open_retrying(path_.c_str(), access | O_DIRECT, 0);
    if (direct_ < 0) return;
    struct stat status = {};
    if (::fstat(direct_, &status) != 0) throw FileError(errno, "stat", path_);
    const dev_t device = S_ISBLK(status.st_mode) ? status.st_rdev : status.st_dev;
    if (device != device_ || status.st_ino != inode_) {
        throw FileError(ESTALE, "open (another file took its name meanwhile)", path_);
    }
}

std::uint64_t OpenFile::length() const {
    struct stat status = {};
    if (::fstat(buffered_, &status) != 0) throw FileError(errno, "stat", path_);
    if (!S_ISBLK(status.st_mode)) return static_cast<std::uint64_t>(status.st_size);
    const off_t end = ::lseek(buffered_, 0, SEEK_END);
    if (end < 0) throw FileError(errno, "seek", path_);
    return static_cast<std::uint64_t>(end);
}

void OpenFile::wrote_until(std::uint64_t end) noexcept {
    std::uint64_t known = expected_length_->load(std::memory_order_relaxed);
    while (known < end &&
           !expected_length_->compare_exchange_weak(known, end, std::memory_order_relaxed)) {
    }
}

void OpenFile::preallocate(std::uint64_t nbytes) {
    if (nbytes == 0) return;  // fallocate calls that invalid
    // Not posix_fallocate: where the file system cannot reserve, the C library writes to each block
    // what it has read there, over what a drive has written meanwhile.
    int result;
    do {
        result = ::fallocate(buffered_, 0, 0, static_cast<off_t>(nbytes));
    } while (result != 0 && errno == EINTR);
    if (result != 0 && errno == EOPNOTSUPP) return append_zeros_until(nbytes);
    if (result != 0) throw FileError(errno, "preallocate", path_);
    wrote_until(nbytes);
}

// Appends, as another write may lengthen the file at any time: the bytes that are there stay. The
// file may then end behind `end`, by a piece at most. To cut it could cut what another write wrote.
void OpenFile::append_zeros_until(std::uint64_t end) {
    std::vector<std::byte> zeros(zeros_at_once);
    for (std::uint64_t found = length(); found < end; found = length()) {
        const iovec piece{zeros.data(), std::min<std::uint64_t>(zeros.size(), end - found)};
        const ssize_t written = ::pwritev2(buffered_, &piece, 1, 0, RWF_APPEND);
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) throw FileError(written < 0 ? errno : EIO, "preallocate", path_);
    }
    // Where the file system finds room only when it writes back what the page cache has.
    int result;
    do {
        result = ::fdatasync(buffered_);
    } while (result != 0 && errno == EINTR);
    if (result != 0) throw FileError(errno, "preallocate", path_);
    wrote_until(end);
}

void OpenFile::truncate(std::uint64_t nbytes) {
    int result;
    do {
        result = ::ftruncate(buffered_, static_cast<off_t>(nbytes));
    } while (result != 0 && errno == EINTR);
    if (result != 0) throw FileError(errno, "truncate", path_);
    expected_length_->store(nbytes, std::memory_order_relaxed);
}

}  // namespace deepnvme
