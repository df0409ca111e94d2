// One open file: a direct and a buffered descriptor of it, the alignment direct I/O asks for, the
// length it should have. Closes its descriptors when the last operation that holds it has ended.
// Starts no I/O.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace deepnvme {

enum class OpenMode : std::uint8_t {
    read,       // must exist, read only
    update,     // must exist, read and write
    create,     // read and write, made where missing, emptied where present
    exclusive,  // read and write, must not exist
};

enum class DirectIO : std::uint8_t {
    automatic,  // where the file system takes it
    never,      // page cache only
    required,   // opening fails where the file system refuses it
};

// Whether a file of that name lies, or would be made, on a FUSE file system. With some FUSE servers
// a ring repeats the start of a short read or write in place of its rest, and reports success
// (seen on Linux 6.18). Other backends do not.
[[nodiscard]] bool on_fuse(const std::string& path);

// No device asks for offsets that are multiples of more.
inline constexpr std::uint32_t largest_offset_alignment = 65536;

class OpenFile {
  public:
    // Throws FileError.
    OpenFile(std::string path, OpenMode mode, DirectIO direct, unsigned permissions);
    // A file that exists in memory only, for the memory backend. Takes a duplicate of `memfd`.
    OpenFile(std::string name, int memfd, OpenMode mode);
    ~OpenFile();
    OpenFile(const OpenFile&) = delete;
    OpenFile& operator=(const OpenFile&) = delete;

    [[nodiscard]] const std::string& path() const noexcept { return path_; }
    // Sets the name in errors, for a file that has no name or has lost it. Before any I/O on it.
    void show_as(std::string name) { path_ = std::move(name); }
    [[nodiscard]] bool writable() const noexcept { return mode_ != OpenMode::read; }
    // -1 where direct I/O is refused or not wanted.
    [[nodiscard]] int direct_descriptor() const noexcept { return direct_; }
    [[nodiscard]] int descriptor() const noexcept { return buffered_; }
    // What memory addresses, and file offsets and lengths, must be multiples of on the direct
    // descriptor. Offsets are held to whole pages even where the device would take less: see
    // docs/decisions/0003, "An operation's way".
    [[nodiscard]] std::uint64_t memory_alignment() const noexcept { return memory_alignment_; }
    [[nodiscard]] std::uint64_t offset_alignment() const noexcept { return offset_alignment_; }
    [[nodiscard]] dev_t device() const noexcept { return device_; }
    [[nodiscard]] bool is_same_file_as(const OpenFile& other) const noexcept {
        return device_ == other.device_ && inode_ == other.inode_;
    }
    // See on_fuse() above.
    [[nodiscard]] bool spoiled_by_rings() const noexcept { return on_fuse_; }

    // The length the file should have: as found when it was last opened, then as this process's
    // writes and truncations left it, through any of its handles. A read that ends before it means
    // that another process cut the file.
    [[nodiscard]] std::uint64_t expected_length() const noexcept {
        return expected_length_->load(std::memory_order_relaxed);
    }
    void wrote_until(std::uint64_t end) noexcept;

    // Asks the kernel for the length. These three throw FileError.
    [[nodiscard]] std::uint64_t length() const;
    // Reserves without touching the bytes that are there. Where the file system cannot reserve,
    // only what lies behind the end of the file is, by zeros.
    void preallocate(std::uint64_t nbytes);
    void truncate(std::uint64_t nbytes);

  private:
    void learn_from_kernel();
    void open_directly();
    void append_zeros_until(std::uint64_t end);
    void close_all() noexcept;

    std::string path_;
    OpenMode mode_;
    int buffered_ = -1;
    int direct_ = -1;
    std::uint64_t memory_alignment_ = 1;
    std::uint64_t offset_alignment_ = 4096;
    dev_t device_ = 0;
    ino_t inode_ = 0;
    bool on_fuse_ = false;
    // One for all handles of the file.
    std::shared_ptr<std::atomic<std::uint64_t>> expected_length_;
};

}  // namespace deepnvme
