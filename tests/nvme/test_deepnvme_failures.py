"""What DeepSpeed's DeepNVMe 0.19.8 gets wrong, as measured: each docstring says how, each test
shows it right here.
"""

from __future__ import annotations

import errno
import json
import platform
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepnvme import FaultPlan, IOQueue, NVMeError, Requests, ShortReadError
from support import seccomp
from support.nvme_disks import DiskUnavailableError, tmpfs
from support.nvme_io import CHUNK, TIMEOUT_S, assert_same, pattern
from support.nvme_programs import output_of, run_program

MIB = 1 << 20


# --- success that was none ------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1000, 3 * 1000, 513, 1])
def test_lengths_that_are_no_multiple_of_a_sector_are_written_whole(
    tmp_path: Path, disk_queue: IOQueue, nbytes: int
) -> None:
    """There: 1 for success, and nothing or a part in the file; so too a share per thread of 1000
    bytes.
    """
    data = pattern(nbytes, seed=1)
    with disk_queue.open(tmp_path / "file", "w") as file:
        assert file.pwrite(data).result(TIMEOUT_S) == nbytes
    assert (tmp_path / "file").read_bytes() == data


def test_offsets_that_are_no_multiple_of_a_sector_are_written_to(
    tmp_path: Path, disk_queue: IOQueue
) -> None:
    """There: 1 for success, and nothing in the file."""
    with disk_queue.open(tmp_path / "file", "w") as file:
        assert file.pwrite(pattern(4096, seed=1), 100).result(TIMEOUT_S) == 4096
    assert (tmp_path / "file").read_bytes() == bytes(100) + pattern(4096, seed=1)


def test_a_part_of_a_file_is_read_from_where_it_is(tmp_path: Path, disk_queue: IOQueue) -> None:
    """There: `read` takes an offset, but wants a buffer of the whole file's size and reads that
    much from there.
    """
    (tmp_path / "file").write_bytes(pattern(10_000, seed=1))
    buffer = bytearray(100)
    with disk_queue.open(tmp_path / "file") as file:
        assert file.pread(buffer, 9000).result(TIMEOUT_S) == 100
    assert buffer == pattern(10_000, seed=1)[9000:9100]


def test_a_write_that_fills_the_disk_fails(tmp_path: Path, disk_backend: str) -> None:
    """There: 1 for success with 80 of 160 MiB in the file, no result of a request being looked
    at.
    """
    try:
        with (
            tmpfs(tmp_path, MIB) as folder,
            IOQueue(disk_backend) as queue,
            queue.open(folder / "file", "w") as file,
            pytest.raises(NVMeError) as caught,
        ):
            file.pwrite(bytes(2 * MIB)).result(TIMEOUT_S)
    except DiskUnavailableError as refusal:
        pytest.skip(str(refusal))
    assert caught.value.errno == errno.ENOSPC


TOO_LARGE = """
import resource, sys
from deepnvme import IOQueue

resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
with IOQueue(sys.argv[1]) as queue, queue.open(sys.argv[2], "w") as file:
    print(file.pwrite(bytes(2 << 20)).exception(60).errno)
"""


def test_a_write_beyond_the_limit_on_file_sizes_fails(tmp_path: Path, disk_backend: str) -> None:
    """There: 1 for success with the file cut at the limit."""
    told = output_of(run_program(TOO_LARGE, disk_backend, tmp_path / "file", folder=tmp_path))
    assert int(told) == errno.EFBIG


def test_writes_that_the_kernel_cuts_short_are_completed(tmp_path: Path, disk_backend: str) -> None:
    """There: what is missing stays missing; the file is shorter than the tensor."""
    data = pattern(5 * CHUNK + 3, seed=1)
    faults = FaultPlan().shorten(every=1, requests=Requests.WRITES)
    with (
        IOQueue(disk_backend, chunk_bytes=CHUNK, faults=faults) as queue,
        queue.open(tmp_path / "file", "w") as file,
    ):
        assert file.pwrite(data).result(TIMEOUT_S) == len(data)
    assert_same((tmp_path / "file").read_bytes(), data)


def test_a_read_that_the_drive_fails_fails(tmp_path: Path, disk_backend: str) -> None:
    """There: 1 for success with 2.5 MiB of the buffer's old bytes among what was read."""
    (tmp_path / "file").write_bytes(bytes(6 * CHUNK))
    faults = FaultPlan().fail(nth=3, requests=Requests.READS)
    with (
        IOQueue(disk_backend, chunk_bytes=CHUNK, faults=faults) as queue,
        queue.open(tmp_path / "file") as file,
    ):
        error = file.pread(bytearray(6 * CHUNK)).exception(TIMEOUT_S)
    assert isinstance(error, NVMeError)
    assert (error.errno, error.done) == (errno.EIO, 2 * CHUNK)


def test_reading_into_scattered_memory_is_refused(tmp_path: Path, disk_queue: IOQueue) -> None:
    """There: success, the buffer unchanged: what is read goes to a contiguous copy that is
    dropped.
    """
    (tmp_path / "file").write_bytes(b"\1" * 64)
    matrix = np.zeros((8, 16), np.uint8)
    with (
        disk_queue.open(tmp_path / "file") as file,
        pytest.raises(ValueError, match="not contiguous"),
    ):
        file.pread(matrix[:, :8])
    assert not matrix.any()


def test_reading_into_a_scattered_tensor_is_refused(tmp_path: Path, disk_queue: IOQueue) -> None:
    """There: success, the tensor unchanged."""
    torch: Any = pytest.importorskip("torch")
    (tmp_path / "file").write_bytes(b"\1" * 64)
    with (
        disk_queue.open(tmp_path / "file") as file,
        pytest.raises(ValueError, match="not contiguous"),
    ):
        file.pread(torch.zeros(4, 4).t())


def test_a_shorter_rewrite_leaves_no_tail_of_the_longer_file(
    tmp_path: Path, disk_queue: IOQueue
) -> None:
    """There: files are opened without truncation, and the old end stays."""
    for data in (pattern(100_000, seed=1), pattern(10, seed=2)):
        with disk_queue.open(tmp_path / "file", "w") as file:
            file.pwrite(data).result(TIMEOUT_S)
    assert (tmp_path / "file").read_bytes() == pattern(10, seed=2)


def test_a_failed_sync_is_told(tmp_path: Path, disk_backend: str) -> None:
    """There: nothing is ever synced, so nothing can be durable."""
    faults = FaultPlan().fail(every=1, requests=Requests.SYNCS)
    with IOQueue(disk_backend, faults=faults) as queue, queue.open(tmp_path / "file", "w") as file:
        assert isinstance(file.sync().exception(TIMEOUT_S), NVMeError)


def test_two_users_of_one_path_can_keep_out_of_each_others_way(
    tmp_path: Path, disk_queue: IOQueue
) -> None:
    """There: the second of two jobs overwrites the first one's files, and both go on with wrong
    numbers.
    """
    with disk_queue.open(tmp_path / "file", "x") as first:
        first.pwrite(b"mine").result(TIMEOUT_S)
        with pytest.raises(FileExistsError):
            disk_queue.open(tmp_path / "file", "x")
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_files_get_the_permissions_asked_for(tmp_path: Path, disk_queue: IOQueue) -> None:
    """There: 0600, whatever the umask says."""
    disk_queue.open(tmp_path / "file", "w", permissions=0o640).close()
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


# --- one result for all ---------------------------------------------------------------------------


def test_each_operation_has_its_own_result(tmp_path: Path, disk_backend: str) -> None:
    """There: `wait()` gives a count for all of a handle's operations; which one failed cannot be
    told.
    """
    with (
        IOQueue(disk_backend, faults=FaultPlan().fail(nth=2)) as queue,
        queue.open(tmp_path / "file", "w") as file,
    ):
        futures = [file.pwrite(b"x" * 4096, number * 4096) for number in range(4)]
        assert [future.exception(TIMEOUT_S) is None for future in futures] == [
            True,
            False,
            True,
            True,
        ]


def test_a_slow_operation_holds_up_no_other(tmp_path: Path, disk_backend: str) -> None:
    """There: whoever needs one tensor waits for every operation of the handle."""
    with (
        IOQueue(disk_backend, faults=FaultPlan().delay(nth=1, delay_us=700_000)) as queue,
        queue.open(tmp_path / "file", "w") as file,
    ):
        slow, quick = file.pwrite(b"slow"), file.pwrite(b"quick", 4)
        assert quick.result(TIMEOUT_S) == 5
        assert not slow.done()


# --- aborts of the whole program ------------------------------------------------------------------

# Each runs in a program of its own, which a call of abort() would end by a signal.
MISUSE = {
    "reading past the end": """
        with queue.open(path) as file:
            told(file.pread(bytearray(1 << 20)).exception(60))
            told(file.pread(bytearray(10), 1 << 30).exception(60))
    """,
    "waiting with nothing pending": """
        told(queue.batch().wait())
        with queue.batch():
            pass
        future = queue.open(path).pread(bytearray(4))
        told(future.result(60), future.result(60))
    """,
    "dropping the queue with operations pending": """
        file = queue.open(path, "r+")
        futures = [file.pwrite(b"x" * 100_000, number * 100_000) for number in range(50)]
        del file, queue
        told(sum(future.result(60) for future in futures))
    """,
    "closing twice and submitting after": """
        file = queue.open(path)
        queue.close()
        queue.close()
        try:
            file.pread(bytearray(1))
        except ValueError as error:
            told(error)
    """,
    "a folder that is not there": """
        try:
            queue.open(path + "/missing/file", "w")
        except OSError as error:
            told(error)
    """,
    "memory of no kind": """
        for thing in (None, "text", 7):
            try:
                queue.open(path).pread(thing)
            except TypeError as error:
                told(error)
    """,
}
MISUSING = """
import sys
from deepnvme import IOQueue

path = sys.argv[2]
queue = IOQueue(sys.argv[1])

def told(*what):
    for one in what:
        print(type(one).__name__)

"""
TOLD = {
    "reading past the end": ["ShortReadError", "ShortReadError"],
    "waiting with nothing pending": ["int", "int", "int"],
    "dropping the queue with operations pending": ["int"],
    "closing twice and submitting after": ["ClosedError"],
    "a folder that is not there": ["NotADirectoryError"],
    "memory of no kind": ["TypeError"] * 3,
}


@pytest.mark.parametrize("backend", ["auto", "threads"])
@pytest.mark.parametrize("misuse", MISUSE)
def test_misuse_is_an_exception_or_nothing_at_all(
    tmp_path: Path, backend: str, misuse: str
) -> None:
    """There: the interpreter aborts: past the end of the file, with nothing to wait for, with
    something pending.
    """
    (tmp_path / "file").write_bytes(b"some bytes")
    lines = [line[8:] for line in MISUSE[misuse].splitlines()]
    program = MISUSING + "\n".join(lines)
    done = run_program(program, backend, tmp_path / "file", folder=tmp_path)
    assert output_of(done).split() == TOLD[misuse]
    assert done.stderr == ""


EXHAUSTED = """
import json, sys
from deepnvme import IOQueue, NVMeError

try:
    IOQueue("aio")
except NVMeError as error:
    told = str(error)
with IOQueue() as queue, queue.open(sys.argv[1], "w") as file:
    print(json.dumps([told, queue.backend, file.pwrite(b"x" * 5000).result(60)]))
"""


def test_no_more_aio_contexts_is_told_when_the_queue_is_made(tmp_path: Path) -> None:
    """There: with fs.aio-max-nr used up the handle is made, and its first operation aborts the
    interpreter.
    """
    if platform.machine() != "x86_64":
        pytest.skip("the number of io_setup is known for x86-64 only")
    launcher = [*seccomp.refusing("EAGAIN", 206), *seccomp.refusing("EPERM")]
    told = output_of(run_program(EXHAUSTED, tmp_path / "file", folder=tmp_path, launcher=launcher))
    message, backend, written = json.loads(told)
    assert "aio" in message
    assert (backend, written) == ("threads", 5000)


def test_a_file_shorter_than_it_should_be_is_an_error(tmp_path: Path, disk_queue: IOQueue) -> None:
    """There: resuming with fewer ranks reads past the ends of their files, and aborts."""
    (tmp_path / "file").write_bytes(bytes(1000))
    with (
        disk_queue.open(tmp_path / "file") as file,
        pytest.raises(ShortReadError, match="after 1000 B"),
    ):
        file.pread(bytearray(2000)).result(TIMEOUT_S)


# --- asserts that do the work ---------------------------------------------------------------------

WORKING = """
import sys
from deepnvme import IOQueue

with IOQueue(sys.argv[1]) as queue, queue.open(sys.argv[2], "w") as file:
    for number in range(10):
        file.pwrite(bytes([number]) * 1000, number * 1000).result(60)
    file.sync().result(60)
"""


def test_a_program_run_without_asserts_writes_what_it_should(
    tmp_path: Path, disk_backend: str
) -> None:
    """There: the calls that read and write stand in assert statements, and under `python -O` they
    are gone.
    """
    output_of(run_program(WORKING, disk_backend, tmp_path / "file", folder=tmp_path, python=["-O"]))
    assert (tmp_path / "file").read_bytes() == b"".join(
        bytes([number]) * 1000 for number in range(10)
    )
