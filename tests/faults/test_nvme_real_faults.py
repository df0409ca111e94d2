"""Faults of the machine rather than of our own making: full disks, limits, broken and coarse
drives, refused rights.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import json
import os
import platform
import resource
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import deepnvme
from deepnvme import (
    BackendUnavailableError,
    Direct,
    FaultPlan,
    File,
    IOQueue,
    NVMeError,
    Pool,
    ShortReadError,
)
from support import seccomp
from support.nvme_disks import DiskUnavailableError, loop_device, loop_ext4, tmpfs
from support.nvme_fuse import (
    Behaviour,
    DirectIO,
    FuseUnavailableError,
    Identity,
    byte_pattern,
    failing_files,
)
from support.nvme_io import CHUNK, ON_DISK, PAGE, TIMEOUT_S, assert_same, backend_or_skip, pattern
from support.nvme_programs import output_of, run_program

MIB = 1 << 20
NOBODY = 65534


@pytest.fixture(autouse=True)
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no profile of this machine decide what is tested."""
    monkeypatch.setenv("DEEPNVME_PROFILE", "")


@pytest.fixture(params=ON_DISK)
def backend(request: pytest.FixtureRequest) -> str:
    return backend_or_skip(request.param)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Yield what undoes the mounts of a test, whatever became of it."""
    with ExitStack() as stack:
        yield stack


def failed(future: object) -> NVMeError:
    """Return the error that the operation ended with."""
    error = future.exception(TIMEOUT_S)  # type: ignore[attr-defined]
    assert isinstance(error, NVMeError)
    return error


# --- a full disk ----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["tmpfs", "ext4"])
def small_disk(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Yield a file system with room for less than 10 MiB."""
    folder = tmp_path_factory.mktemp("small")
    with ExitStack() as stack:
        try:
            make = {
                "tmpfs": lambda: tmpfs(folder, 10 * MIB),
                "ext4": lambda: loop_ext4(folder, 10 * MIB),
            }
            yield stack.enter_context(make[request.param]())
        except DiskUnavailableError as refusal:
            pytest.skip(str(refusal))


def test_a_write_that_the_disk_has_no_room_for_is_an_error_and_says_how_much_arrived(
    small_disk: Path, backend: str
) -> None:
    path = small_disk / f"file-{backend}"
    data = pattern(12 * MIB + 5, seed=1)
    try:
        with IOQueue(backend) as queue, queue.open(path, "w") as file:
            error = failed(file.pwrite(data))
            assert error.errno == errno.ENOSPC
            assert "the file system is full" in str(error)
            # Threads may fill the disk with later parts before the first one is written.
            assert (0 if backend == "threads" else 1) <= error.done <= 10 * MIB
            assert_same(path.read_bytes()[: error.done], data[: error.done])
    finally:
        path.unlink()


def test_closing_a_file_object_tells_of_a_full_disk_once(small_disk: Path, backend: str) -> None:
    path = small_disk / f"file-{backend}"
    filler = small_disk / "filler"
    try:
        space = os.statvfs(small_disk)
        filler.write_bytes(bytes(space.f_bavail * space.f_frsize - MIB))
        with IOQueue(backend) as queue:
            file = deepnvme.open(path, "wb", queue=queue)
            for _ in range(5):
                file.write(bytes(MIB // 2))  # collected, and written meanwhile: no call waits
            with pytest.raises(NVMeError) as failed:
                file.close()
            file.close()
            assert (file.closed, queue.stats().pending) == (True, 0)
    finally:
        filler.unlink()
        path.unlink()
    errors = getattr(failed.value, "errors", [failed.value])
    assert {(error.errno, error.op, error.path) for error in errors} == {
        (errno.ENOSPC, "write", str(path))
    }
    assert {error.offset % MIB for error in errors} == {0}


def test_a_disk_that_was_full_is_used_again_when_there_is_room(
    small_disk: Path, backend: str
) -> None:
    path = small_disk / f"file-{backend}"
    data = pattern(2 * MIB + 5, seed=1)
    try:
        with IOQueue(backend) as queue, queue.open(path, "w") as file:
            assert failed(file.pwrite(bytes(12 * MIB))).errno == errno.ENOSPC
            file.truncate(0)
            assert file.pwrite(data).result(TIMEOUT_S) == len(data)
            file.sync().result(TIMEOUT_S)
        assert_same(path.read_bytes(), data)
    finally:
        path.unlink()


def test_reserving_more_than_the_disk_has_is_told_when_the_file_is_opened(
    small_disk: Path, backend: str
) -> None:
    path = small_disk / f"file-{backend}"
    with (
        IOQueue(backend) as queue,
        pytest.raises(OSError, match="the file system is full") as caught,
    ):
        queue.open(path, "w", size=20 * MIB)
    path.unlink()
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert not [
        fd for fd in Path("/proc/self/fd").iterdir() if os.path.realpath(fd).startswith(str(path))
    ]


FALLOCATE = {"x86_64": 285, "aarch64": 47}
RESERVING = """
import json, os, sys
from deepnvme import IOQueue

path = sys.argv[1]
with open(path, "wb") as made:
    made.truncate(1 << 20)
with IOQueue("threads") as queue, queue.open(path, "r+") as file:
    file.preallocate(1 << 20)
    before_the_end = os.stat(path).st_blocks * 512
    file.preallocate((3 << 20) + 5)
    print(json.dumps([before_the_end, os.stat(path).st_blocks * 512, file.size]))
"""


def told_without_fallocate(program: str, path: Path) -> Any:
    if platform.machine() not in FALLOCATE:
        pytest.skip(f"the number of the system call fallocate is not known on {platform.machine()}")
    done = run_program(
        program,
        path,
        folder=path.parent,
        launcher=seccomp.refusing("EOPNOTSUPP", FALLOCATE[platform.machine()]),
    )
    return json.loads(output_of(done))


def test_where_nothing_can_be_reserved_zeros_come_behind_the_end_and_nothing_before_it(
    tmp_path: Path,
) -> None:
    before_the_end, after_it, size = told_without_fallocate(RESERVING, tmp_path / "file")
    assert before_the_end == 0  # a byte written in a block would have made it one of the file's
    assert after_it >= 2 * MIB
    assert size == 3 * MIB + 5
    assert (tmp_path / "file").read_bytes() == bytes(size)


MAKING_A_VOLUME = """
import json, os, sys
from deepnvme.volume.volume import Volume

with Volume.create(sys.argv[1], 4 << 20):
    pass
data = os.stat(os.path.join(sys.argv[1], "data"))
print(json.dumps([data.st_size, data.st_blocks * 512]))
"""


def test_a_volume_has_all_its_bytes_where_nothing_can_be_reserved(tmp_path: Path) -> None:
    length, on_the_drive = told_without_fallocate(MAKING_A_VOLUME, tmp_path / "volume")
    assert length >= 4 * MIB
    assert on_the_drive >= length


# --- the limit on a file's size -------------------------------------------------------------------

LIMITED = """
import json, resource, sys
from deepnvme import IOQueue, NVMeError

backend, limit, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
with IOQueue(backend) as queue, queue.open(path, "w") as file:
    error = file.pwrite(bytes([7]) * (4 << 20)).exception(60)
    beyond = file.pwrite(b"x", limit).exception(60)
    within = file.pwrite(b"y", 0).result(60)
print(json.dumps([error.errno, error.done, str(error), beyond.errno, within]))
"""


@pytest.mark.parametrize("limit", [2 * MIB, 2 * MIB + 100], ids=["aligned", "unaligned"])
def test_a_write_beyond_the_limit_on_file_sizes_is_an_error(
    tmp_path: Path, backend: str, limit: int
) -> None:
    told = output_of(run_program(LIMITED, backend, limit, tmp_path / "file", folder=tmp_path))
    code, done, message, beyond, within = json.loads(told)
    assert (code, beyond, within) == (errno.EFBIG, errno.EFBIG, 1)
    assert "may not grow that large" in message
    assert 0 < done <= limit
    content = (tmp_path / "file").read_bytes()
    assert len(content) <= limit
    assert_same(content[1:done], b"\7" * (done - 1))


# --- the end of a file ----------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, PAGE, 3 * CHUNK + 17])
def test_reading_past_the_end_is_an_error_with_the_bytes_that_there_were(
    tmp_path: Path, backend: str, length: int
) -> None:
    (tmp_path / "file").write_bytes(pattern(length, seed=1))
    buffer = bytearray(length + 2 * CHUNK)
    with IOQueue(backend, chunk_bytes=CHUNK) as queue, queue.open(tmp_path / "file") as file:
        error = failed(file.pread(buffer))
    assert isinstance(error, ShortReadError)
    assert error.done == length
    assert_same(buffer[:length], pattern(length, seed=1))


# --- too little memory ----------------------------------------------------------------------------

WITHOUT_MEMORY = """
import json, resource, sys
from deepnvme import IOQueue, NVMeError

GIB = 1 << 30
vast = {"chunk_bytes": 64 << 20, "inflight_bytes": 16 * GIB}  # slots of 1 GiB for what must be copied
data = memoryview(bytearray(8192))[1:4097]
told = []
with IOQueue(sys.argv[1], **vast) as queue, queue.open(sys.argv[2], "w") as file:
    told.append(file.direct)
    file.pwrite(b"x").result(60)
    with open("/proc/self/statm") as status:
        used = int(status.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + GIB // 2, before[1]))
    for _ in range(2):
        try:
            told.append(file.pwrite(data, 0).result(60))
        except NVMeError as error:
            told.append([error.errno, error.done])
    told.append(file.pwrite(b"small", 4097).result(60))
    resource.setrlimit(resource.RLIMIT_AS, before)
    told.append(file.pwrite(b"more", 4102).result(60))
print(json.dumps(told))
"""


def test_an_operation_that_there_is_no_memory_to_copy_through_fails_alone(
    tmp_path: Path, backend: str
) -> None:
    told = json.loads(
        output_of(run_program(WITHOUT_MEMORY, backend, tmp_path / "file", folder=tmp_path))
    )
    direct, *rest = told
    if not direct:
        pytest.skip("the file system here takes no direct I/O")
    assert rest == [[errno.ENOMEM, 0], [errno.ENOMEM, 0], 5, 4]


# --- no descriptors, no threads -------------------------------------------------------------------


@contextmanager
def no_more_descriptors(beside: int = 0) -> Iterator[None]:
    """Let this process open nothing more than so many."""
    free = [os.open(os.devnull, os.O_RDONLY) for _ in range(beside + 1)]
    for descriptor in free:
        os.close(descriptor)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_await_without_a_descriptor_says_so_and_the_next_one_works(
    tmp_path: Path, backend: str
) -> None:
    async def main(file: File) -> int:
        with no_more_descriptors(), pytest.raises(OSError, match="ulimit -n") as caught:
            await file.pwrite(b"abc")
        assert caught.value.errno == errno.EMFILE
        assert not isinstance(caught.value, NVMeError)
        return await file.pwrite(b"defg", 3)

    slow = FaultPlan().delay(nth=1, delay_us=50_000)
    with IOQueue(backend, faults=slow) as queue, queue.open(tmp_path / "file", "w") as file:
        assert asyncio.run(main(file)) == 4
    assert (tmp_path / "file").read_bytes() == b"abcdefg"


@pytest.mark.parametrize("named", ["auto", "uring", "liburing", "aio"])
def test_a_queue_without_a_descriptor_does_not_blame_its_backend(
    named: str, recwarn: pytest.WarningsRecorder
) -> None:
    if named != "auto":
        backend_or_skip(named)
    IOQueue(named).close()  # a library that it needs is loaded now
    recwarn.clear()
    with no_more_descriptors(), pytest.raises(OSError, match="ulimit -n") as caught:
        IOQueue(named)
    assert caught.value.errno == errno.EMFILE
    assert not isinstance(caught.value, NVMeError)
    assert not recwarn.list


def test_a_second_drive_without_a_descriptor_does_not_get_another_backend(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    with ExitStack() as stack:
        try:
            other = stack.enter_context(tmpfs(tmp_path, 10 * MIB))
        except DiskUnavailableError as refusal:
            pytest.skip(str(refusal))
        queue = stack.enter_context(IOQueue())
        if queue.backend == "threads":
            pytest.skip("IOQueue() chose the backend `threads` here, which needs no descriptor")
        stack.enter_context(queue.open(tmp_path / "first", "w"))
        recwarn.clear()
        # One for the file.
        with no_more_descriptors(beside=1), pytest.raises(OSError, match="ulimit -n") as caught:
            queue.open(other / "file", "w", direct=Direct.NEVER)
        assert caught.value.errno == errno.EMFILE
        assert not isinstance(caught.value, NVMeError)
        assert not recwarn.list
        with queue.open(other / "file", "w") as file:
            assert file.pwrite(b"abc").result(TIMEOUT_S) == 3


@contextmanager
def no_more_native_threads() -> Iterator[None]:
    """Let native code of this process start no thread: its stack would not fit."""
    libc = ctypes.CDLL(None)
    usual, impossible = ctypes.create_string_buffer(64), ctypes.create_string_buffer(64)
    assert libc.pthread_getattr_default_np(usual) == 0
    assert libc.pthread_attr_init(impossible) == 0
    assert libc.pthread_attr_setstacksize(impossible, ctypes.c_size_t(1 << 60)) == 0
    assert libc.pthread_setattr_default_np(impossible) == 0
    try:
        yield
    finally:
        assert libc.pthread_setattr_default_np(usual) == 0


def test_a_drive_without_a_thread_does_not_blame_its_backend(tmp_path: Path, backend: str) -> None:
    with IOQueue(backend) as queue:
        with no_more_native_threads(), pytest.raises(OSError, match="no thread") as caught:
            queue.open(tmp_path / "file", "w")
        assert caught.value.errno == errno.EAGAIN
        assert not isinstance(caught.value, NVMeError)
        with queue.open(tmp_path / "file", "w") as file:
            assert file.pwrite(b"abc").result(TIMEOUT_S) == 3


# --- a broken drive -------------------------------------------------------------------------------

SIZE = 3 * MIB + 11
FILES = {
    "sound": Behaviour(SIZE),
    "short": Behaviour(SIZE, longest=70_001),
    "very short": Behaviour(70_000, longest=1000),
    "broken": Behaviour(SIZE, fails_from=MIB + 4321),
    "full": Behaviour(SIZE, fails_from=MIB + 4321, error=errno.ENOSPC),
    "replaced": Behaviour(SIZE, identity=Identity.REPLACED),
}


@pytest.fixture(scope="module", params=DirectIO, ids=lambda answer: answer.name.lower())
def broken_disk(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Yield a directory of FILES, from file systems of both kinds."""
    with ExitStack() as stack:
        try:
            yield stack.enter_context(
                failing_files(tmp_path_factory.mktemp("broken"), FILES, request.param)
            )
        except FuseUnavailableError as refusal:
            pytest.skip(str(refusal))


@pytest.mark.parametrize("name", ["sound", "short", "very short"])
def test_reads_that_a_file_system_cuts_short_are_completed(
    broken_disk: Path, backend: str, name: str
) -> None:
    expected = byte_pattern(FILES[name].nbytes)
    buffer = bytearray(len(expected))
    with IOQueue(backend) as queue, queue.open(broken_disk / name) as file:
        assert file.pread(buffer).result(TIMEOUT_S) == len(expected)
        (drive,) = queue.stats().drives.values()
    assert_same(buffer, expected)
    assert bool(drive.short_transfers) == (name != "sound")


@pytest.mark.parametrize("name", ["sound", "short", "very short"])
def test_writes_that_a_file_system_cuts_short_are_completed_or_an_error(
    broken_disk: Path, backend: str, name: str
) -> None:
    """The kernel itself may make an error of a FUSE file system's short write, but not of a
    synchronous one.
    """
    before, data = byte_pattern(FILES[name].nbytes), pattern(50_000, seed=1)
    with IOQueue(backend) as queue, queue.open(broken_disk / name, "r+") as file:
        future = file.pwrite(data, 1234)
        error = future.exception(TIMEOUT_S)
        if error is None:
            assert_same((broken_disk / name).read_bytes()[1234:51_234], data)
        else:
            assert (name == "sound" or backend == "threads", failed(future).errno) == (
                False,
                errno.EIO,
            )
    with IOQueue("threads") as queue, queue.open(broken_disk / name, "r+") as file:
        file.pwrite(before).result(TIMEOUT_S)
    assert_same((broken_disk / name).read_bytes(), before)


def test_a_read_that_the_drive_fails_is_an_error_and_never_invented_bytes(
    broken_disk: Path, backend: str
) -> None:
    buffer = bytearray(b"\xee" * SIZE)
    with IOQueue(backend) as queue, queue.open(broken_disk / "broken") as file:
        error = failed(file.pread(buffer))
        good = bytearray(MIB)
        assert file.pread(good, 17).result(TIMEOUT_S) == MIB
    assert error.errno == errno.EIO
    assert error.done <= MIB + 4321
    assert_same(buffer[: error.done], byte_pattern(SIZE)[: error.done])
    assert_same(good, byte_pattern(SIZE)[17 : 17 + MIB])


@pytest.mark.parametrize(("name", "code"), [("broken", errno.EIO), ("full", errno.ENOSPC)])
def test_a_write_that_the_drive_fails_is_an_error(
    broken_disk: Path, backend: str, name: str, code: int
) -> None:
    data = byte_pattern(SIZE)
    with IOQueue(backend) as queue, queue.open(broken_disk / name, "r+") as file:
        error = failed(file.pwrite(data))
        assert file.pwrite(data[:1000]).result(TIMEOUT_S) == 1000
    assert error.errno == code
    assert error.done <= MIB + 4321


@pytest.mark.parametrize(
    "require", ["io_uring", "uring", ("liburing", "uring"), ("io_uring", "aio")]
)
def test_a_ring_that_is_required_is_refused_where_threads_must_do_its_work(
    broken_disk: Path, require: str | tuple[str, ...]
) -> None:
    before = (broken_disk / "sound").read_bytes()
    try:
        queue = IOQueue(require=require)
    except BackendUnavailableError as refusal:
        pytest.skip(str(refusal))
    with (
        queue,
        pytest.raises(
            BackendUnavailableError, match=r"on a FUSE file system \(fuse\.failing\)"
        ) as caught,
    ):
        queue.open(broken_disk / "sound", "w")
    assert (caught.value.errno, caught.value.path) == (errno.ENOTSUP, str(broken_disk / "sound"))
    assert "'threads')" in str(caught.value)
    assert_same((broken_disk / "sound").read_bytes(), before)


def test_a_ring_that_is_required_is_refused_for_a_file_that_is_yet_to_be_made(
    broken_disk: Path,
) -> None:
    with (
        IOQueue(require=backend_or_skip("uring")) as queue,
        pytest.raises(BackendUnavailableError, match="on a FUSE file system"),
    ):
        queue.open(broken_disk / "new", "w")
    assert not (broken_disk / "new").exists()


@pytest.mark.parametrize("options", [{"require": ("io_uring", "threads")}, {"backend": "auto"}])
def test_threads_do_the_work_of_a_ring_where_they_are_acceptable(
    broken_disk: Path, options: dict[str, Any]
) -> None:
    with IOQueue(**options) as queue, queue.open(broken_disk / "sound") as file:
        assert file.pread(bytearray(SIZE)).result(TIMEOUT_S) == SIZE
        (drive,) = queue.stats().drives.values()
    assert drive.backend == "threads"


# --- a file that is replaced ----------------------------------------------------------------------


@pytest.mark.parametrize("direct", [Direct.AUTO, Direct.REQUIRED])
def test_a_file_replaced_between_its_two_opens_is_an_error_that_leaves_nothing_open(
    broken_disk: Path, direct: Direct
) -> None:
    path = broken_disk / "replaced"
    with (
        IOQueue("threads") as queue,
        pytest.raises(OSError, match="another file took its name meanwhile") as caught,
    ):
        queue.open(path, direct=direct)
    assert (caught.value.errno, caught.value.filename) == (errno.ESTALE, str(path))
    assert not [
        fd for fd in Path("/proc/self/fd").iterdir() if os.path.realpath(fd).startswith(str(path))
    ]


def test_a_file_that_is_opened_once_may_be_replaced_meanwhile(broken_disk: Path) -> None:
    buffer = bytearray(SIZE)
    with (
        IOQueue("threads") as queue,
        queue.open(broken_disk / "replaced", direct=Direct.NEVER) as file,
    ):
        assert file.pread(buffer).result(TIMEOUT_S) == SIZE
    assert_same(buffer, byte_pattern(SIZE))


# --- a ring that breaks ---------------------------------------------------------------------------

BREAKING = """
import json, os, sys
from deepnvme import FaultPlan, IOQueue

backend, path = sys.argv[1:]
slow = FaultPlan().delay(delay_us=300_000, nth=1)
with IOQueue(backend, chunk_bytes=65536, inflight_bytes=65536, faults=slow) as queue, queue.open(path, "w") as file:
    under_way, cancelled = file.pwrite(bytes(3 * 65536)), file.pwrite(b"never")
    while not any(drive.chunks for drive in queue.stats().drives.values()):
        pass
    taken_back = cancelled.cancel()
    for number in range(256):
        link = f"/proc/self/fd/{number}"
        if os.path.lexists(link) and "io_uring" in os.readlink(link):
            os.dup2(os.open("/dev/null", os.O_RDWR), number)  # the ring is gone
    ends = [type(file.pwrite(b"after").exception(10)).__name__ for _ in range(2)]
    print(json.dumps([type(under_way.exception(10)).__name__, taken_back, cancelled.cancelled(), *ends]))
"""


@pytest.mark.parametrize("ring", ["liburing", "uring"])
def test_a_ring_that_breaks_fails_what_was_submitted_and_what_comes_but_not_what_was_cancelled(
    tmp_path: Path, ring: str
) -> None:
    done = run_program(BREAKING, backend_or_skip(ring), tmp_path / "file", folder=tmp_path)
    assert json.loads(output_of(done)) == ["NVMeError", True, True, "NVMeError", "NVMeError"]
    assert done.stderr == ""


# --- refused backends -----------------------------------------------------------------------------

IO_SETUP = {"x86_64": 206, "aarch64": 0}.get(platform.machine(), 0)

CHOOSING = """
import json, sys
from deepnvme import IOQueue, NVMeError

require = json.loads(sys.argv[2])
try:
    queue = IOQueue(require=require)
except (NVMeError, ValueError) as error:
    print(json.dumps([type(error).__name__, getattr(error, "errno", None), str(error)]))
    raise SystemExit(0)
with queue, queue.open(sys.argv[1], "w") as file:
    file.pwrite(b"works" * 10_000).result(60)
    back = bytearray(50_000)
    file.pread(back).result(60)
    print(json.dumps([queue.backend, queue.stats().backend, bytes(back) == b"works" * 10_000]))
"""


def choose(
    folder: Path,
    *,
    refused: dict[int, str] | None = None,
    require: Any = None,
    environment: dict[str, str] | None = None,
) -> tuple[list[Any], list[str]]:
    """Return what a program that makes a queue printed, and the lines of warning it gave."""
    launcher = [
        part for number, name in (refused or {}).items() for part in seccomp.refusing(name, number)
    ]
    if launcher and not seccomp.is_supported():
        pytest.skip(f"no system call filter for {platform.machine()} here")
    arguments = (folder / "file", json.dumps(require))
    done = run_program(
        CHOOSING, *arguments, folder=folder, launcher=launcher, environment=environment
    )
    told: list[Any] = json.loads(output_of(done))
    return told, [line for line in done.stderr.splitlines() if "Warning" in line]


@pytest.mark.parametrize("code", ["ENOSYS", "EPERM"])
def test_where_io_uring_is_refused_linux_aio_is_used_and_one_line_says_why(
    tmp_path: Path, code: str
) -> None:
    told, warnings = choose(tmp_path, refused={seccomp.IO_URING_SETUP: code})
    assert told == ["aio", "aio", True]
    assert len(warnings) == 1
    assert "BackendFallbackWarning: deepnvme uses aio: " in warnings[0]
    assert "uring: " in warnings[0]


def test_where_linux_aio_is_refused_too_threads_are_used_and_one_line_says_why(
    tmp_path: Path,
) -> None:
    told, warnings = choose(tmp_path, refused={seccomp.IO_URING_SETUP: "EPERM", IO_SETUP: "ENOSYS"})
    assert told == ["threads", "threads", True]
    assert len(warnings) == 1
    assert "deepnvme uses threads: " in warnings[0]
    assert "uring: " in warnings[0]
    assert "aio: " in warnings[0]


@pytest.mark.parametrize("require", ["io_uring", "uring", ["liburing", "uring"]])
def test_a_backend_that_is_required_is_never_replaced(tmp_path: Path, require: Any) -> None:
    (kind, code, message), warnings = choose(
        tmp_path, refused={seccomp.IO_URING_SETUP: "EPERM"}, require=require
    )
    assert (kind, code) == ("BackendUnavailableError", errno.ENOTSUP)
    assert "uring: " in message
    assert not warnings


def test_a_requirement_that_is_met_further_down_the_chain_is_no_fallback(tmp_path: Path) -> None:
    told, warnings = choose(tmp_path, require="threads")
    assert told == ["threads", "threads", True]
    assert not warnings


def test_the_environment_names_the_backend(tmp_path: Path) -> None:
    told, warnings = choose(tmp_path, environment={"DEEPNVME_BACKEND": "threads"})
    assert told == ["threads", "threads", True]
    assert not warnings


def test_a_backend_named_by_the_environment_is_not_replaced_where_it_is_refused(
    tmp_path: Path,
) -> None:
    told, _ = choose(
        tmp_path,
        refused={seccomp.IO_URING_SETUP: "EPERM"},
        environment={"DEEPNVME_BACKEND": "uring"},
    )
    assert told[0] == "BackendUnavailableError"
    assert "uring: " in told[2]


def test_an_unknown_backend_in_the_environment_is_told_with_the_variable_and_the_choices(
    tmp_path: Path,
) -> None:
    (kind, _, message), _ = choose(tmp_path, environment={"DEEPNVME_BACKEND": "iouring"})
    assert kind == "ValueError"
    for part in ("'iouring'", "DEEPNVME_BACKEND", "liburing, uring, aio, threads"):
        assert part in message


def test_an_empty_variable_is_as_good_as_none(tmp_path: Path) -> None:
    told, _ = choose(tmp_path, environment={"DEEPNVME_BACKEND": ""})
    assert told[2] is True


# --- rights ---------------------------------------------------------------------------------------


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Yield a directory that every user may enter and only its owner may write to."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


WITHOUT_RIGHTS = """
import json, os, sys
from deepnvme import IOQueue

backend, folder, nobody = sys.argv[1], sys.argv[2], int(sys.argv[3])
queue = IOQueue(backend)
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(nobody)
    os.setuid(nobody)
told = {}
for name, mode in (("secret", "r"), ("readable", "r+"), ("locked/new", "w")):
    try:
        queue.open(os.path.join(folder, name), mode)
    except OSError as error:
        told[name] = [type(error).__name__, error.filename]
with queue.open(os.path.join(folder, "readable")) as file:
    buffer = bytearray(5)
    told["read"] = file.pread(buffer).result(60)
print(json.dumps(told))
"""


def test_a_user_without_rights_is_refused_with_the_path(open_folder: Path, backend: str) -> None:
    for name, mode in (("secret", 0o000), ("readable", 0o444)):
        (open_folder / name).write_bytes(b"bytes")
        (open_folder / name).chmod(mode)
    (open_folder / "locked").mkdir(mode=0o555)
    told = json.loads(
        output_of(run_program(WITHOUT_RIGHTS, backend, open_folder, NOBODY, folder=open_folder))
    )
    for name in ("secret", "readable", "locked/new"):
        assert told[name] == ["PermissionError", str(open_folder / name)]
    assert told["read"] == 5


UNREGISTERED = """
import json, os, resource, sys
from deepnvme import IOQueue, Pool

backend, path, nobody = sys.argv[1], sys.argv[2], int(sys.argv[3])
file_descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
os.fchmod(file_descriptor, 0o666)
pool = Pool(8 << 20)
with IOQueue(backend):  # imports what another user may not be able to read
    pool.empty(1)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))  # room for the ring itself, not for the pool
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(nobody)
    os.setuid(nobody)
with IOQueue(backend, pool=pool) as queue, queue.open(path, "r+") as file:
    data = pool.empty(3 << 20)
    data[:] = 9
    file.pwrite(data).result(60)
    odd = bytearray(1 << 20)
    file.pread(odd, 100).result(60)
    data[:] = 0
    file.pread(data).result(60)
    (drive,) = queue.stats().drives.values()
print(json.dumps([drive.registration_error, drive.registered_bytes, int(data.min()), min(odd)]))
"""


@pytest.mark.parametrize("ring", ["liburing", "uring"])
def test_memory_over_the_memlock_limit_goes_unregistered_and_says_so(
    open_folder: Path, ring: str
) -> None:
    told = output_of(
        run_program(
            UNREGISTERED, backend_or_skip(ring), open_folder / "file", NOBODY, folder=open_folder
        )
    )
    assert json.loads(told) == [errno.ENOMEM, 0, 9, 9]


@pytest.mark.parametrize("ring", ["liburing", "uring"])
def test_memory_within_the_memlock_limit_is_registered(tmp_path: Path, ring: str) -> None:
    pool = Pool(2 * MIB)
    with IOQueue(backend_or_skip(ring), pool=pool) as queue, queue.open(tmp_path / "file", "w"):
        (drive,) = queue.stats().drives.values()
    if drive.registration_error == errno.ENOMEM:
        pytest.skip("this process may not lock 2 MiB")
    assert (drive.registration_error, drive.registered_bytes) == (0, 2 * MIB)


UNDER_A_LIMIT = """
import json, os, resource, sys, warnings
from deepnvme import IOQueue, NVMeError

limit, user, elsewhere = int(sys.argv[1]), int(sys.argv[2]), sys.argv[4]
for backend in ("auto", "liburing"):  # imports what another user may not be able to read
    try:
        IOQueue(backend).close()
    except NVMeError:
        pass
resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
told = {}
with warnings.catch_warnings(record=True) as given:
    warnings.simplefilter("always")
    with IOQueue() as queue:
        told["backend"] = queue.backend
        told["works"] = []
        for folder in (sys.argv[3], elsewhere):
            with queue.open(os.path.join(folder, f"limited-{os.getpid()}"), "w") as file:
                os.unlink(file.path)
                written, back = file.pwrite(b"bytes").result(60), bytearray(5)
                told["works"].append([written, file.pread(back).result(60), back.decode()])
told["warnings"] = [str(one.message) for one in given]
told["places"] = [one.filename for one in given]
kept = []  # rings, until no more are given
try:
    for _ in range(200):
        kept.append(IOQueue(require="io_uring"))
except NVMeError as refusal:
    told["refusal"] = [type(refusal).__name__, refusal.errno, str(refusal)]
print(json.dumps(told))
"""


def under_memlock_limit(
    folder: Path, limit: int, *, elsewhere: Path | None = None
) -> dict[str, Any]:
    """Return what a program saw that may lock so much memory, as a user of its own: the kernel
    counts by user.
    """
    folder.chmod(0o777)
    user = 100_000 + os.getpid()
    done = run_program(UNDER_A_LIMIT, limit, user, folder, elsewhere or folder, folder=folder)
    told: dict[str, Any] = json.loads(output_of(done))
    return told


@pytest.mark.parametrize("limit", [0, 64 << 10])
def test_under_a_small_memlock_limit_a_queue_works_and_one_warning_says_what_it_cost(
    open_folder: Path, limit: int
) -> None:
    told = under_memlock_limit(open_folder, limit)
    assert told["works"] == [[5, 5, "bytes"]] * 2
    if told["backend"] in ("liburing", "uring"):
        assert not told["warnings"]
        return
    (warning,) = told["warnings"]
    assert warning.startswith(f"deepnvme uses {told['backend']}: ")
    refused = warning.count("io_uring_setup")  # twice, where this CPU can use liburing
    assert warning.count("limit on locked memory (ulimit -l)") == refused > 0
    assert told["places"] == [str(open_folder / "program.py")]


def test_under_a_small_memlock_limit_a_second_drive_works_too(open_folder: Path) -> None:
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == open_folder.stat().st_dev:
        pytest.skip("there is no second file system at /dev/shm")
    told = under_memlock_limit(open_folder, 64 << 10, elsewhere=elsewhere)
    assert told["works"] == [[5, 5, "bytes"]] * 2


def test_a_ring_that_the_memlock_limit_refuses_is_refused_with_its_name_once(
    open_folder: Path,
) -> None:
    told = under_memlock_limit(open_folder, 0)
    if "refusal" not in told:
        pytest.skip("this kernel does not count rings against the memlock limit")
    kind, code, message = told["refusal"]
    assert (kind, code) == ("BackendUnavailableError", errno.ENOTSUP)
    assert "limit on locked memory (ulimit -l)" in message
    for name in ("uring: ", "aio: ", "threads: "):
        assert message.replace("liburing: ", "").count(name) == 1, message


# --- a drive of 4 KiB sectors ---------------------------------------------------------------------


def test_any_size_and_offset_works_on_a_drive_of_4_kib_sectors(
    tmp_path: Path, backend: str, stack: ExitStack
) -> None:
    try:
        folder = stack.enter_context(loop_ext4(tmp_path, 32 * MIB, sector_bytes=4096))
    except DiskUnavailableError as refusal:
        pytest.skip(str(refusal))
    pool = Pool(4 * MIB)
    with (
        IOQueue(backend, chunk_bytes=CHUNK, pool=pool) as queue,
        queue.open(folder / "file", "w") as file,
    ):
        assert file.alignment == 4096
        for offset in (0, 1, 512, PAGE, 12345):
            for nbytes in (1, 512, PAGE - 1, PAGE + 1, MIB + 3):
                data = pattern(nbytes, seed=offset + nbytes)
                block = pool.empty(nbytes)
                block[:] = bytearray(data)
                assert file.pwrite(block, offset).result(TIMEOUT_S) == nbytes
                back = bytearray(nbytes)
                assert file.pread(back, offset).result(TIMEOUT_S) == nbytes
                assert_same(back, data)
                assert_same((folder / "file").read_bytes()[offset : offset + nbytes], data)
        (drive,) = queue.stats().drives.values()
        if file.direct:
            assert drive.buffered_bytes < drive.written_bytes + drive.read_bytes
        assert drive.direct_refused == 0


@pytest.mark.parametrize("sector_bytes", [512, 4096])
def test_a_whole_drive_is_a_file_too(
    tmp_path: Path, backend: str, stack: ExitStack, sector_bytes: int
) -> None:
    try:
        device = stack.enter_context(loop_device(tmp_path, 8 * MIB, sector_bytes=sector_bytes))
    except DiskUnavailableError as refusal:
        pytest.skip(str(refusal))
    data = pattern(2 * MIB + 5, seed=1)
    with IOQueue(backend) as queue, queue.open(device, "r+") as file:
        assert file.size == 8 * MIB
        assert file.pwrite(data, 12345).result(TIMEOUT_S) == len(data)
        file.sync().result(TIMEOUT_S)
        back = bytearray(len(data))
        file.pread(back, 12345).result(TIMEOUT_S)
        error = failed(file.pwrite(data, 8 * MIB - PAGE))
    assert_same(back, data)
    assert error.errno == errno.ENOSPC
    assert os.stat(tmp_path / "image").st_size == 8 * MIB
