// The io_uring user ABI: the structures, numbers and flags that this library exchanges with the
// kernel. Written from the documented ABI so that building needs no <linux/io_uring.h>;
// test_probe.cpp compares it with that header where there is one. Declares only: the system calls
// are made by their callers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace deepnvme::uring {

// The same numbers on x86-64, aarch64 and every architecture that joined Linux later.
inline constexpr long syscall_setup = 425;
inline constexpr long syscall_enter = 426;
inline constexpr long syscall_register = 427;

// io_uring_params.flags
inline constexpr std::uint32_t setup_submit_all = 1U << 7;      // 5.18
inline constexpr std::uint32_t setup_single_issuer = 1U << 12;  // 6.0
inline constexpr std::uint32_t setup_defer_taskrun = 1U << 13;  // 6.1, needs setup_single_issuer

// io_uring_params.features
inline constexpr std::uint32_t feature_single_mmap = 1U << 0;
inline constexpr std::uint32_t feature_rsrc_tags = 1U << 10;

// Offsets for mmap() of the ring's areas: both queues, and the submissions.
inline constexpr std::uint64_t mmap_offset_sq_ring = 0;
inline constexpr std::uint64_t mmap_offset_sqes = 0x10000000;

// The word at SqOffsets::flags, written by the kernel.
inline constexpr std::uint32_t sq_cq_overflow = 1U << 1;
inline constexpr std::uint32_t sq_taskrun = 1U << 2;

// io_uring_enter flags
inline constexpr std::uint32_t enter_getevents = 1U << 0;
inline constexpr std::uint32_t enter_ext_arg = 1U << 3;

// io_uring_register opcodes
inline constexpr std::uint32_t register_buffers = 0;
inline constexpr std::uint32_t unregister_buffers = 1;
inline constexpr std::uint32_t register_eventfd = 4;
inline constexpr std::uint32_t register_probe = 8;

enum class Op : std::uint8_t {
    fsync = 3,
    read_fixed = 4,
    write_fixed = 5,
    read = 22,
    write = 23,
};

// Sqe::op_flags of Op::fsync
inline constexpr std::uint32_t fsync_datasync = 1U << 0;

// ProbeOp::flags
inline constexpr std::uint16_t op_supported = 1U << 0;

struct SqOffsets {
    std::uint32_t head;
    std::uint32_t tail;
    std::uint32_t ring_mask;
    std::uint32_t ring_entries;
    std::uint32_t flags;
    std::uint32_t dropped;
    std::uint32_t array;
    std::uint32_t reserved;
    std::uint64_t user_addr;
};

struct CqOffsets {
    std::uint32_t head;
    std::uint32_t tail;
    std::uint32_t ring_mask;
    std::uint32_t ring_entries;
    std::uint32_t overflow;
    std::uint32_t cqes;
    std::uint32_t flags;
    std::uint32_t reserved;
    std::uint64_t user_addr;
};

struct Params {
    std::uint32_t sq_entries;
    std::uint32_t cq_entries;
    std::uint32_t flags;
    std::uint32_t sq_thread_cpu;
    std::uint32_t sq_thread_idle;
    std::uint32_t features;
    std::uint32_t wq_fd;
    std::uint32_t reserved[3];
    SqOffsets sq_off;
    CqOffsets cq_off;
};

// A submission. The kernel's unions are named here after what this library puts into them.
struct Sqe {
    Op opcode;
    std::uint8_t flags;
    std::uint16_t ioprio;
    std::int32_t fd;
    std::uint64_t offset;
    std::uint64_t addr;
    std::uint32_t len;
    std::uint32_t op_flags;
    std::uint64_t user_data;
    std::uint16_t buf_index;
    std::uint16_t personality;
    std::uint32_t file_index;
    std::uint64_t addr3;
    std::uint64_t reserved;
};

// A completion: `res` is a byte count, or a negated errno.
struct Cqe {
    std::uint64_t user_data;
    std::int32_t res;
    std::uint32_t flags;
};

// The kernel's struct __kernel_timespec.
struct Timespec {
    std::int64_t seconds;
    std::int64_t nanoseconds;
};

// The argument of an enter with enter_ext_arg.
struct GeteventsArg {
    std::uint64_t sigmask;
    std::uint32_t sigmask_size;
    std::uint32_t min_wait_us;
    std::uint64_t timespec;
};

struct ProbeOp {
    std::uint8_t op;
    std::uint8_t reserved;
    std::uint16_t flags;
    std::uint32_t reserved2;
};

// An opcode is one byte, so 256 answers are all there can ever be.
struct Probe {
    std::uint8_t last_op;
    std::uint8_t ops_len;
    std::uint16_t reserved;
    std::uint32_t reserved2[3];
    ProbeOp ops[256];
};

static_assert(sizeof(SqOffsets) == 40 && offsetof(SqOffsets, array) == 24);
static_assert(sizeof(CqOffsets) == 40 && offsetof(CqOffsets, cqes) == 20);
static_assert(sizeof(Params) == 120 && offsetof(Params, features) == 20);
static_assert(offsetof(Params, sq_off) == 40 && offsetof(Params, cq_off) == 80);
static_assert(sizeof(Sqe) == 64 && offsetof(Sqe, fd) == 4 && offsetof(Sqe, offset) == 8);
static_assert(offsetof(Sqe, addr) == 16 && offsetof(Sqe, len) == 24 &&
              offsetof(Sqe, op_flags) == 28);
static_assert(offsetof(Sqe, user_data) == 32 && offsetof(Sqe, buf_index) == 40 &&
              offsetof(Sqe, addr3) == 48);
static_assert(sizeof(Cqe) == 16 && offsetof(Cqe, res) == 8);
static_assert(sizeof(Timespec) == 16 && sizeof(GeteventsArg) == 24);
static_assert(sizeof(ProbeOp) == 8 && offsetof(Probe, ops) == 16);
static_assert(std::is_trivial_v<Sqe> && std::is_trivial_v<Params> && std::is_trivial_v<Probe>);

}  // namespace deepnvme::uring
