// The probes against this kernel, and our io_uring ABI against the system's header where there is
// one.
#include "deepnvme/probe.hpp"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <string>

#include "check.hpp"
#include "deepnvme/uring_abi.hpp"

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>

namespace uring = deepnvme::uring;

#define SAME(ours, theirs) static_assert((ours) == (theirs))
#define SAME_FIELD(Ours, our_field, Theirs, their_field)                              \
    static_assert(offsetof(uring::Ours, our_field) == offsetof(Theirs, their_field)); \
    static_assert(sizeof(uring::Ours::our_field) == sizeof(Theirs::their_field))

#ifdef SYS_io_uring_setup
SAME(uring::syscall_setup, SYS_io_uring_setup);
SAME(uring::syscall_enter, SYS_io_uring_enter);
SAME(uring::syscall_register, SYS_io_uring_register);
#endif

SAME(sizeof(uring::Sqe), sizeof(io_uring_sqe));
SAME_FIELD(Sqe, opcode, io_uring_sqe, opcode);
SAME_FIELD(Sqe, flags, io_uring_sqe, flags);
SAME_FIELD(Sqe, ioprio, io_uring_sqe, ioprio);
SAME_FIELD(Sqe, fd, io_uring_sqe, fd);
SAME_FIELD(Sqe, offset, io_uring_sqe, off);
SAME_FIELD(Sqe, addr, io_uring_sqe, addr);
SAME_FIELD(Sqe, len, io_uring_sqe, len);
SAME_FIELD(Sqe, op_flags, io_uring_sqe, rw_flags);
SAME_FIELD(Sqe, user_data, io_uring_sqe, user_data);
SAME_FIELD(Sqe, buf_index, io_uring_sqe, buf_index);
SAME_FIELD(Cqe, user_data, io_uring_cqe, user_data);
SAME_FIELD(Cqe, res, io_uring_cqe, res);
SAME_FIELD(Cqe, flags, io_uring_cqe, flags);

SAME(sizeof(uring::Params), sizeof(io_uring_params));
SAME_FIELD(Params, sq_entries, io_uring_params, sq_entries);
SAME_FIELD(Params, cq_entries, io_uring_params, cq_entries);
SAME_FIELD(Params, flags, io_uring_params, flags);
SAME_FIELD(Params, sq_off, io_uring_params, sq_off);
SAME_FIELD(Params, cq_off, io_uring_params, cq_off);
SAME_FIELD(SqOffsets, head, io_sqring_offsets, head);
SAME_FIELD(SqOffsets, tail, io_sqring_offsets, tail);
SAME_FIELD(SqOffsets, ring_mask, io_sqring_offsets, ring_mask);
SAME_FIELD(SqOffsets, ring_entries, io_sqring_offsets, ring_entries);
SAME_FIELD(SqOffsets, flags, io_sqring_offsets, flags);
SAME_FIELD(SqOffsets, dropped, io_sqring_offsets, dropped);
SAME_FIELD(SqOffsets, array, io_sqring_offsets, array);
SAME_FIELD(CqOffsets, head, io_cqring_offsets, head);
SAME_FIELD(CqOffsets, tail, io_cqring_offsets, tail);
SAME_FIELD(CqOffsets, ring_mask, io_cqring_offsets, ring_mask);
SAME_FIELD(CqOffsets, ring_entries, io_cqring_offsets, ring_entries);
SAME_FIELD(CqOffsets, overflow, io_cqring_offsets, overflow);
SAME_FIELD(CqOffsets, cqes, io_cqring_offsets, cqes);

SAME(uring::mmap_offset_sq_ring, IORING_OFF_SQ_RING);
SAME(uring::mmap_offset_sqes, IORING_OFF_SQES);
SAME(uring::enter_getevents, IORING_ENTER_GETEVENTS);
SAME(uring::fsync_datasync, IORING_FSYNC_DATASYNC);

#ifdef IORING_SETUP_SUBMIT_ALL
SAME(uring::setup_submit_all, IORING_SETUP_SUBMIT_ALL);
#endif
#ifdef IORING_SETUP_SINGLE_ISSUER
SAME(uring::setup_single_issuer, IORING_SETUP_SINGLE_ISSUER);
#endif
#ifdef IORING_SETUP_DEFER_TASKRUN
SAME(uring::setup_defer_taskrun, IORING_SETUP_DEFER_TASKRUN);
#endif
#ifdef IORING_FEAT_SINGLE_MMAP
SAME(uring::feature_single_mmap, IORING_FEAT_SINGLE_MMAP);
#endif
#ifdef IORING_FEAT_RSRC_TAGS
SAME(uring::feature_rsrc_tags, IORING_FEAT_RSRC_TAGS);
#endif
#ifdef IORING_SQ_CQ_OVERFLOW
SAME(uring::sq_cq_overflow, IORING_SQ_CQ_OVERFLOW);
#endif
#ifdef IORING_SQ_TASKRUN
SAME(uring::sq_taskrun, IORING_SQ_TASKRUN);
#endif
#ifdef IORING_ENTER_EXT_ARG
SAME(uring::enter_ext_arg, IORING_ENTER_EXT_ARG);
#endif
#ifdef IO_URING_OP_SUPPORTED
SAME(uring::op_supported, IO_URING_OP_SUPPORTED);
SAME_FIELD(Probe, last_op, io_uring_probe, last_op);
SAME_FIELD(Probe, ops_len, io_uring_probe, ops_len);
SAME(offsetof(uring::Probe, ops), sizeof(io_uring_probe));
SAME(sizeof(uring::ProbeOp), sizeof(io_uring_probe_op));
SAME_FIELD(ProbeOp, op, io_uring_probe_op, op);
SAME_FIELD(ProbeOp, flags, io_uring_probe_op, flags);
#endif

// Enumerators cannot be asked for by #ifdef; a macro of the same or a later kernel stands for them.
#ifdef IORING_FEAT_FAST_POLL  // 5.7
SAME(static_cast<int>(uring::Op::fsync), IORING_OP_FSYNC);
SAME(static_cast<int>(uring::Op::read_fixed), IORING_OP_READ_FIXED);
SAME(static_cast<int>(uring::Op::write_fixed), IORING_OP_WRITE_FIXED);
SAME(static_cast<int>(uring::Op::read), IORING_OP_READ);
SAME(static_cast<int>(uring::Op::write), IORING_OP_WRITE);
SAME(uring::register_buffers, IORING_REGISTER_BUFFERS);
SAME(uring::unregister_buffers, IORING_UNREGISTER_BUFFERS);
SAME(uring::register_eventfd, IORING_REGISTER_EVENTFD);
SAME(uring::register_probe, IORING_REGISTER_PROBE);
#endif
#ifdef IORING_FEAT_RSRC_TAGS  // 5.13
SAME_FIELD(Sqe, personality, io_uring_sqe, personality);
SAME_FIELD(Sqe, file_index, io_uring_sqe, splice_fd_in);
#endif
#endif

namespace {

namespace fs = std::filesystem;

class TemporaryDirectory {
  public:
    TemporaryDirectory() {
        std::string name = (fs::temp_directory_path() / "deepnvme-test-XXXXXX").string();
        if (::mkdtemp(name.data()) == nullptr)
            throw std::runtime_error("cannot make a temporary directory");
        path_ = name;
    }
    TemporaryDirectory(const TemporaryDirectory&) = delete;
    TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
    ~TemporaryDirectory() { fs::remove_all(path_); }

    [[nodiscard]] const fs::path& path() const { return path_; }

  private:
    fs::path path_;
};

[[nodiscard]] auto open_descriptors() {
    return std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator());
}

[[nodiscard]] bool supports(const deepnvme::UringProbe& probe, deepnvme::uring::Op op) {
    return std::ranges::count(probe.opcodes, static_cast<std::uint8_t>(op)) == 1;
}

}  // namespace

TEST(a_ring_lists_the_reads_and_writes_that_it_supports) {
    const deepnvme::UringProbe probe = deepnvme::probe_uring();
    if (probe.error != 0)
        SKIP(std::string("io_uring is not available here: ") + std::strerror(probe.error));
    if (probe.opcodes.empty()) SKIP("this kernel cannot list its opcodes");
    CHECK(supports(probe, deepnvme::uring::Op::read));
    CHECK(supports(probe, deepnvme::uring::Op::write_fixed));
    CHECK(probe.opcodes.size() < 256);
}

TEST(an_unavailable_ring_reports_an_error_and_nothing_else) {
    const deepnvme::UringProbe probe = deepnvme::probe_uring();
    if (probe.error == 0) {
        CHECK(probe.features != 0);
    } else {
        CHECK_EQ(probe.features, 0);
        CHECK(!probe.defer_taskrun);
        CHECK(probe.opcodes.empty());
    }
}

TEST(probing_leaves_no_descriptor_and_no_file) {
    const TemporaryDirectory directory;
    const auto before = open_descriptors();
    (void)deepnvme::probe_uring();
    (void)deepnvme::probe_linux_aio();
    (void)deepnvme::probe_directory(directory.path());
    CHECK_EQ(open_descriptors(), before);
    CHECK(fs::is_empty(directory.path()));
}

TEST(linux_aio_answers_twice_the_same) {
    CHECK_EQ(deepnvme::probe_linux_aio(), deepnvme::probe_linux_aio());
}

TEST(a_temporary_directory_can_be_written) {
    const TemporaryDirectory directory;
    CHECK_EQ(deepnvme::probe_directory(directory.path()).plain_error, 0);
}

TEST(a_missing_directory_is_an_answer_not_an_exception) {
    const TemporaryDirectory directory;
    const deepnvme::DirectoryProbe probe = deepnvme::probe_directory(directory.path() / "missing");
    CHECK_EQ(probe.plain_error, ENOENT);
    CHECK_EQ(probe.direct_error, ENOENT);
    CHECK(!probe.alignment.has_value());
}

TEST(a_file_is_not_a_directory_to_probe) {
    const TemporaryDirectory directory;
    const fs::path file = directory.path() / "file";
    std::fclose(std::fopen(file.c_str(), "w"));
    CHECK_EQ(deepnvme::probe_directory(file).plain_error, ENOTDIR);
}

TEST(a_file_and_its_directory_report_the_same_alignment) {
    const TemporaryDirectory directory;
    const fs::path file = directory.path() / "file";
    std::fclose(std::fopen(file.c_str(), "w"));
    const auto of_file = deepnvme::dio_alignment(file);
    const auto of_directory = deepnvme::probe_directory(directory.path()).alignment;
    CHECK_EQ(of_file.has_value(), of_directory.has_value());
    if (!of_file) SKIP("this kernel or file system reports no direct-I/O alignment");
    CHECK_EQ(of_file->memory, of_directory->memory);
    CHECK_EQ(of_file->offset, of_directory->offset);
    CHECK(of_file->offset >= of_file->memory);
}

TEST(a_missing_file_reports_no_alignment) {
    const TemporaryDirectory directory;
    CHECK(!deepnvme::dio_alignment(directory.path() / "missing").has_value());
}
