// What the kernel lets this process do for storage: io_uring, Linux AIO, direct I/O in a directory.
// Every function asks the kernel and returns what it said; "not available" is an answer, not an
// exception. They leave nothing behind: no ring, no context, no file. Called by
// deepnvme/machine/probing.py; dio_alignment by OpenFile.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

namespace deepnvme {

struct UringProbe {
    int error = 0;               // errno of io_uring_setup, 0 when a ring could be made
    std::uint32_t features = 0;  // uring::feature_* of that ring
    bool defer_taskrun = false;  // SINGLE_ISSUER | DEFER_TASKRUN are accepted
    // Numbers of the operations that it supports, uring::Op among them; empty where the kernel
    // lists none.
    std::vector<std::uint8_t> opcodes;
};

[[nodiscard]] UringProbe probe_uring();

// errno of io_setup, 0 when Linux AIO works.
[[nodiscard]] int probe_linux_aio();

// Alignments in bytes that the kernel asks of direct I/O. Both 0: the file cannot be opened for it.
struct DioAlignment {
    std::uint32_t memory = 0;
    std::uint32_t offset = 0;
};

// Empty where the kernel (before 6.1), the file system or the kind of file reports none, or there
// is no file.
[[nodiscard]] std::optional<DioAlignment> dio_alignment(const std::filesystem::path& path);

struct DirectoryProbe {
    // 0, or the errno of making a file there and writing one block.
    int plain_error = 0;
    // 0, or the errno of writing and reading back one block with O_DIRECT.
    int direct_error = 0;
    std::optional<DioAlignment> alignment;  // of a file in that directory
};

[[nodiscard]] DirectoryProbe probe_directory(const std::filesystem::path& directory);

}  // namespace deepnvme
