"""Device arrays in file operations, on a device that is not there: its memory is touched by its own
threads only.

Copies happen a moment after they were asked for, so that whatever forgets to wait sees or leaves
wrong bytes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import gc
import itertools
import os
import random
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepnvme import (
    ClosedError,
    FaultPlan,
    File,
    IOFuture,
    IOQueue,
    NVMeError,
    QueueFull,
    Requests,
    ShortReadError,
    _native,
)
from deepnvme.memory import device_arrays
from deepnvme.memory.device_arrays import device_array_of
from deepnvme.queue.staging import Staging
from support.nvme_io import CHUNK, PAGE, TIMEOUT_S, assert_same, backend_or_skip, pattern
from support.nvme_programs import output_of, run_program

STAGING = 2 << 20  # the smallest pool: two pieces
PIECE = STAGING // 2
FRESH = 0xEE  # what the device's memory holds before anything is copied to it
READ, WRITE, SYNC = _native.Verb.READ, _native.Verb.WRITE, _native.Verb.SYNC_DATA
STOPS = _native.AtEndOfFile.STOPS


# --- a device -------------------------------------------------------------------------------------


class CopyError(Exception):
    """What this device's library raises."""


class Stream:
    """Work done in order by a thread of its own, each piece a moment later."""

    def __init__(self) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._moments = random.Random(7)

    def do(self, work: Callable[[], None]) -> Event:
        """Queue `work`; return what waits for it."""
        moment = self._moments.uniform(0, 0.002)

        def later() -> None:
            time.sleep(moment)
            work()

        return Event(self._thread.submit(later))

    def mark(self) -> Event:
        """Return what waits for everything queued so far."""
        return self.do(lambda: None)

    def close(self) -> None:
        """Finish."""
        self._thread.shutdown()


@dataclass
class Event:
    """A place in a stream."""

    ended: concurrent.futures.Future[None]

    def synchronize(self) -> None:
        """Wait until the stream has got there."""
        self.ended.result(TIMEOUT_S)


@dataclass(eq=False)
class DeviceBytes:
    """A piece of the device's memory."""

    values: np.ndarray[Any, np.dtype[np.uint8]]


@dataclass
class Device:
    """Three streams, the program's and one of copies for each direction, and what is to go
    wrong.
    """

    program: Stream = field(default_factory=Stream)
    up: Stream = field(default_factory=Stream)
    down: Stream = field(default_factory=Stream)
    refuse_copy: int = -1  # the byte of an array from which on a copy cannot be started
    fail_copy: int = -1  # the byte from which on one fails while it is under way
    refuse_begin: bool = False
    hold_copy: int = 0  # the copy that waits for `held`
    held: threading.Event = field(default_factory=threading.Event)
    started: int = 0
    # what it was given; a traceback may keep these too
    views: list[memoryview] = field(default_factory=list)

    def memory(self, data: bytes) -> DeviceBytes:
        """Return device memory that holds `data`."""
        return DeviceBytes(np.frombuffer(bytearray(data), np.uint8))

    def fresh(self, nbytes: int) -> DeviceBytes:
        """Return device memory that nothing was copied to."""
        return self.memory(bytes([FRESH]) * nbytes)

    def close(self) -> None:
        """Finish what is queued."""
        self.held.set()
        self.program.close()
        self.up.close()
        self.down.close()


class FakeArray:
    """Device memory as `Staging` sees it, as torch's and cupy's are."""

    def __init__(
        self, device: Device, memory: DeviceBytes, start: int = 0, nbytes: int | None = None
    ) -> None:
        self.nbytes = len(memory.values) - start if nbytes is None else nbytes
        self._device = device
        self._memory = memory
        self._start = start
        self._submitted = device.program.mark()

    def begin(self) -> None:
        if self._device.refuse_begin:
            raise CopyError("no stream")
        submitted = self._submitted
        self._device.up.do(submitted.synchronize)
        self._device.down.do(submitted.synchronize)

    def to_host(self, start: int, target: memoryview) -> Event:
        place = self._place(start, len(target))

        def copy() -> None:
            np.frombuffer(target, np.uint8)[:] = place

        return self._do(self._device.down, start, target, copy)

    def to_device(self, start: int, source: memoryview) -> Event:
        place = self._place(start, len(source))

        def copy() -> None:
            place[:] = np.frombuffer(source, np.uint8)

        return self._do(self._device.up, start, source, copy)

    def _place(self, start: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        assert 0 <= start <= start + nbytes <= self.nbytes
        assert nbytes
        return self._memory.values[self._start + start : self._start + start + nbytes]

    def _do(self, stream: Stream, start: int, host: memoryview, copy: Callable[[], None]) -> Event:
        device = self._device
        device.views.append(host)
        device.started += 1
        number = device.started
        if start == device.refuse_copy:
            raise CopyError("the copy was refused")

        def work() -> None:
            if number == device.hold_copy:
                assert device.held.wait(TIMEOUT_S)
            if start == device.fail_copy:
                raise CopyError("the device is lost")
            copy()

        return stream.do(work)


@dataclass
class Rig:
    """A queue, its staging and a device."""

    queue: IOQueue
    staging: Staging
    device: Device

    def write(self, file: File, memory: DeviceBytes, offset: int = 0) -> IOFuture[int]:
        return self.staging.submit(WRITE, file._open(), FakeArray(self.device, memory), offset)

    def pread(self, file: File, memory: DeviceBytes, offset: int = 0) -> IOFuture[int]:
        return self.staging.submit(READ, file._open(), FakeArray(self.device, memory), offset)

    def readinto(self, file: File, memory: DeviceBytes, offset: int = 0) -> IOFuture[int]:
        return self.staging.submit(
            READ, file._open(), FakeArray(self.device, memory), offset, STOPS
        )

    def sync(self, file: File) -> IOFuture[int]:
        return self.staging.submit(SYNC, file._open(), None, 0)

    def assert_idle(self) -> None:
        """Fail if anything is still pending or holds staging memory."""
        assert self.staging.pending == 0
        pool = self.staging._memory.pool
        assert pool is not None
        assert pool.free_bytes == pool.capacity


@contextmanager
def rig(
    backend: str = "threads",
    *,
    faults: FaultPlan | None = None,
    chunk_bytes: int = CHUNK,
    max_pending: int = 1024,
    patience_s: float | None = None,
    staging_bytes: int = STAGING,
) -> Iterator[Rig]:
    device = Device()
    limits = {"chunk_bytes": chunk_bytes, "inflight_bytes": 4 * chunk_bytes}
    try:
        with IOQueue(backend_or_skip(backend), **limits, faults=faults) as queue:  # type: ignore[arg-type]
            staged = Staging(
                queue._native,
                queue._pending,
                max_pending=max_pending,
                patience_s=patience_s,
                staging_bytes=staging_bytes,
            )
            try:
                yield Rig(queue, staged, device)
            finally:
                device.held.set()
                staged.close()
    finally:
        device.close()


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)


def drive_of(queue: IOQueue) -> Any:
    [drive] = queue.stats().drives.values()
    return drive


@pytest.fixture(params=["uring", "threads"])
def backend(request: pytest.FixtureRequest) -> str:
    return backend_or_skip(request.param)


# --- bytes ----------------------------------------------------------------------------------------

EXTENTS = (
    (1, 0),
    (1, PAGE - 1),
    (PAGE, PAGE),
    (PAGE + 1, 100),
    (PIECE - 1, 0),
    (PIECE, 0),
    (PIECE, 1),
    (PIECE + 1, 3 * PAGE),
    (3 * PIECE, 0),
    (5 * PIECE + 17, 12345),
)


@pytest.mark.parametrize(("nbytes", "offset"), EXTENTS)
def test_device_memory_comes_back_from_a_file_as_it_was(
    tmp_path: Path, backend: str, nbytes: int, offset: int
) -> None:
    data = pattern(nbytes, seed=nbytes)
    with rig(backend) as it, it.queue.open(tmp_path / "file", "w") as file:
        assert it.write(file, it.device.memory(data), offset).result(TIMEOUT_S) == nbytes
        assert_same((tmp_path / "file").read_bytes(), bytes(offset) + data)
        back = it.device.fresh(nbytes)
        assert it.pread(file, back, offset).result(TIMEOUT_S) == nbytes
        assert_same(back.values, data)
        it.assert_idle()


@settings(max_examples=30)
@given(
    offset=st.integers(0, 5 * PAGE),
    start=st.integers(0, 3),
    nbytes=st.integers(0, 9 * PAGE),
    seed=st.integers(0, 1 << 30),
)
def test_neither_the_file_nor_the_device_changes_beside_the_piece_that_moves(
    tmp_path_factory: pytest.TempPathFactory, offset: int, start: int, nbytes: int, seed: int
) -> None:
    path = tmp_path_factory.mktemp("beside") / "file"
    old = pattern(15 * PAGE, seed=seed)
    path.write_bytes(old)
    data = pattern(nbytes, seed=seed + 1)
    with rig(staging_bytes=4 * PAGE) as it, it.queue.open(path, "r+") as file:
        source = FakeArray(
            it.device, it.device.memory(b"abc"[:start] + data + b"beyond"), start, nbytes
        )
        assert it.staging.submit(WRITE, file._open(), source, offset).result(TIMEOUT_S) == nbytes
        assert_same(path.read_bytes(), old[:offset] + data + old[offset + nbytes :])
        around = it.device.fresh(start + nbytes + 6)
        target = FakeArray(it.device, around, start, nbytes)
        assert it.staging.submit(READ, file._open(), target, offset).result(TIMEOUT_S) == nbytes
        assert_same(around.values, bytes([FRESH]) * start + data + bytes([FRESH]) * 6)
        it.assert_idle()


def test_all_but_an_operations_ends_passes_without_another_copy(tmp_path: Path) -> None:
    with rig() as it, it.queue.open(tmp_path / "file", "w") as file:
        if not file.direct:
            pytest.skip("the file system here takes no direct I/O")
        it.write(file, it.device.memory(pattern(3 * PIECE, seed=1)), 100).result(TIMEOUT_S)
        drive = drive_of(it.queue)
        assert drive.bounced_bytes == 0
        assert drive.buffered_bytes < 2 * PAGE


def test_many_operations_of_several_threads_all_arrive(tmp_path: Path, backend: str) -> None:
    sizes = [(number * 7919) % (3 * CHUNK) for number in range(40)]
    slots = [4 * CHUNK * number + number for number in range(40)]

    def work(numbers: range) -> None:
        for number in numbers:
            data = pattern(sizes[number], seed=number)
            assert (
                it.write(file, it.device.memory(data), slots[number]).result(TIMEOUT_S)
                == sizes[number]
            )
            back = it.device.fresh(sizes[number])
            assert it.pread(file, back, slots[number]).result(TIMEOUT_S) == sizes[number]
            assert_same(back.values, data)

    with rig(backend) as it, it.queue.open(tmp_path / "file", "w") as file:
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            for done in [threads.submit(work, range(first, 40, 4)) for first in range(4)]:
                done.result(TIMEOUT_S)
        it.assert_idle()


def test_reads_and_writes_that_are_all_submitted_at_once_all_arrive(
    tmp_path: Path, backend: str
) -> None:
    old = [pattern(PIECE + 11 * number, seed=number) for number in range(8)]
    new = [pattern(PIECE // 2 + number, seed=number + 100) for number in range(8)]
    (tmp_path / "old").write_bytes(b"".join(old))
    starts = [0, *itertools.accumulate(len(data) for data in old)]
    with (
        rig(backend) as it,
        it.queue.open(tmp_path / "old") as source,
        it.queue.open(tmp_path / "new", "w") as target,
    ):
        seen = [it.device.fresh(len(data)) for data in old]
        futures = []
        for number in range(8):
            futures.append(it.pread(source, seen[number], starts[number]))
            futures.append(it.write(target, it.device.memory(new[number]), number * PIECE))
        assert [future.result(TIMEOUT_S) for future in futures[::2]] == [len(data) for data in old]
        assert [future.result(TIMEOUT_S) for future in futures[1::2]] == [len(data) for data in new]
        written = (tmp_path / "new").read_bytes()
        for number in range(8):
            assert_same(seen[number].values, old[number])
            assert_same(written[number * PIECE :][: len(new[number])], new[number])
        it.assert_idle()


# --- the device's order ---------------------------------------------------------------------------


def test_a_write_sees_what_the_program_queued_on_the_device_before(tmp_path: Path) -> None:
    data = pattern(PIECE + 5, seed=1)
    with rig() as it, it.queue.open(tmp_path / "file", "w") as file:
        memory = it.device.fresh(len(data))

        def compute() -> None:
            time.sleep(0.1)
            memory.values[:] = np.frombuffer(data, np.uint8)

        it.device.program.do(compute)
        it.write(file, memory).result(TIMEOUT_S)
        assert_same((tmp_path / "file").read_bytes(), data)


def test_a_read_does_not_overwrite_what_a_kernel_still_looks_at(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(pattern(PIECE, seed=2))
    old = pattern(PIECE, seed=1)
    seen: list[bytes] = []
    with rig() as it, it.queue.open(tmp_path / "file") as file:
        memory = it.device.memory(old)

        def look() -> None:
            time.sleep(0.1)
            seen.append(memory.values.tobytes())

        it.device.program.do(look)
        it.pread(file, memory).result(TIMEOUT_S)
        assert_same(seen[0], old)
        assert_same(memory.values, pattern(PIECE, seed=2))


# --- at the same time -----------------------------------------------------------------------------


def test_the_drive_reads_on_while_a_piece_is_copied_to_the_device(tmp_path: Path) -> None:
    data = pattern(3 * PIECE, seed=1)
    (tmp_path / "file").write_bytes(data)
    with rig() as it, it.queue.open(tmp_path / "file") as file:
        it.device.hold_copy = 1
        back = it.device.fresh(3 * PIECE)
        future = it.pread(file, back)
        wait_until(lambda: drive_of(it.queue).read_bytes == 2 * PIECE)
        assert not future.done()
        it.device.held.set()
        assert future.result(TIMEOUT_S) == 3 * PIECE
        assert_same(back.values, data)


def test_the_drive_writes_while_the_next_piece_is_copied_from_the_device(tmp_path: Path) -> None:
    data = pattern(3 * PIECE, seed=1)
    with rig() as it, it.queue.open(tmp_path / "file", "w") as file:
        it.device.hold_copy = 2
        future = it.write(file, it.device.memory(data))
        wait_until(lambda: drive_of(it.queue).written_bytes == PIECE)
        assert not future.done()
        it.device.held.set()
        assert future.result(TIMEOUT_S) == 3 * PIECE
        assert_same((tmp_path / "file").read_bytes(), data)


def test_the_next_piece_is_copied_from_the_device_while_the_drive_writes(tmp_path: Path) -> None:
    slow = FaultPlan().delay(delay_us=500_000, every=1)
    with rig(faults=slow, chunk_bytes=PIECE) as it, it.queue.open(tmp_path / "file", "w") as file:
        future = it.write(file, it.device.memory(pattern(3 * PIECE, seed=1)))
        wait_until(lambda: it.device.started == 2)
        assert drive_of(it.queue).written_bytes == 0
        assert future.result(TIMEOUT_S) == 3 * PIECE


def test_an_operation_that_comes_later_does_not_wait_for_the_drive_to_end_the_first(
    tmp_path: Path,
) -> None:
    slow = FaultPlan().delay(delay_us=500_000, every=1)
    with rig(faults=slow) as it, it.queue.open(tmp_path / "file", "w") as file:
        first = it.write(file, it.device.memory(b"first"))
        wait_until(lambda: drive_of(it.queue).chunks == 1)
        second = it.write(file, it.device.memory(b"second"), PAGE)
        wait_until(lambda: it.device.started == 2)
        assert not first.done()
        assert [first.result(TIMEOUT_S), second.result(TIMEOUT_S)] == [5, 6]


def test_a_read_does_not_wait_for_a_write_of_what_the_device_has_yet_to_compute(
    tmp_path: Path,
) -> None:
    data = pattern(PIECE // 2, seed=1)
    (tmp_path / "source").write_bytes(data)
    with (
        rig() as it,
        it.queue.open(tmp_path / "source") as source,
        it.queue.open(tmp_path / "target", "w") as target,
    ):
        it.device.hold_copy = 1
        write = it.write(target, it.device.memory(b"computed"))
        wait_until(lambda: it.device.started == 1)
        back = it.device.fresh(len(data))
        assert it.pread(source, back).result(TIMEOUT_S) == len(data)
        assert_same(back.values, data)
        assert not write.done()
        it.device.held.set()
        assert write.result(TIMEOUT_S) == 8


def test_no_more_staging_memory_is_used_than_there_is(tmp_path: Path) -> None:
    with rig() as it, it.queue.open(tmp_path / "file", "w") as file:
        it.device.hold_copy = 1
        futures = [it.write(file, it.device.memory(pattern(PIECE, n)), n * PIECE) for n in range(5)]
        wait_until(lambda: it.device.started == 2)
        assert it.staging._memory.pool is not None
        assert it.staging._memory.pool.capacity == STAGING
        assert it.staging.pending == 5
        it.device.held.set()
        assert [future.result(TIMEOUT_S) for future in futures] == [PIECE] * 5


def test_small_operations_share_the_staging_memory(tmp_path: Path) -> None:
    with rig() as it, it.queue.open(tmp_path / "file", "w") as file:
        it.device.hold_copy = 1
        futures = [it.write(file, it.device.memory(b"x"), n * PAGE) for n in range(50)]
        wait_until(lambda: it.device.started == 50)
        it.device.held.set()
        assert [future.result(TIMEOUT_S) for future in futures] == [1] * 50


# --- the end of the file, and errors --------------------------------------------------------------

LENGTHS = (0, 1, PAGE - 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 77, 4 * PIECE - 1)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_read_beyond_the_end_of_the_file_says_how_far_it_came(
    tmp_path: Path, backend: str, length: int
) -> None:
    data = pattern(length, seed=length)
    (tmp_path / "file").write_bytes(bytes(10) + data)
    with rig(backend) as it, it.queue.open(tmp_path / "file") as file:
        back = it.device.fresh(4 * PIECE)
        with pytest.raises(ShortReadError, match=f"end of the file after {length} B") as caught:
            it.pread(file, back, 10).result(TIMEOUT_S)
        error = caught.value
        assert (error.op, error.path, error.offset) == ("read", str(tmp_path / "file"), 10)
        assert (error.asked, error.done, error.backend) == (4 * PIECE, length, backend)
        assert_same(back.values, data + bytes([FRESH]) * (4 * PIECE - length))
        it.assert_idle()


@pytest.mark.parametrize("length", LENGTHS)
def test_readinto_ends_in_the_bytes_that_there_were(
    tmp_path: Path, backend: str, length: int
) -> None:
    data = pattern(length, seed=length)
    (tmp_path / "file").write_bytes(bytes(10) + data)
    with rig(backend) as it, it.queue.open(tmp_path / "file") as file:
        back = it.device.fresh(4 * PIECE)
        assert it.readinto(file, back, 10).result(TIMEOUT_S) == length
        assert_same(back.values, data + bytes([FRESH]) * (4 * PIECE - length))
        it.assert_idle()


def test_nothing_is_read_from_beyond_the_end_of_the_file_but_what_was_under_way(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    with rig(staging_bytes=4 * PAGE) as it, it.queue.open(tmp_path / "file") as file:
        assert it.readinto(file, it.device.fresh(STAGING * 4)).result(TIMEOUT_S) == 3
        pieces_at_once = STAGING // (2 * PAGE)  # a pool has no less memory
        assert drive_of(it.queue).operations <= 2 * pieces_at_once


@pytest.mark.parametrize("nth", range(1, 5))
def test_a_failing_write_tells_the_prefix_that_is_on_the_drive(
    tmp_path: Path, backend: str, nth: int
) -> None:
    broken = FaultPlan().fail(nth=nth, errno=errno.ENOSPC, requests=Requests.WRITES)
    data = pattern(4 * PIECE, seed=1)
    with (
        rig(backend, faults=broken, chunk_bytes=PIECE) as it,
        it.queue.open(tmp_path / "file", "w") as file,
    ):
        with pytest.raises(NVMeError, match="file system is full") as caught:
            it.write(file, it.device.memory(data), PAGE).result(TIMEOUT_S)
        error = caught.value
        assert (error.errno, error.op, error.offset) == (errno.ENOSPC, "write", PAGE)
        assert (error.asked, error.done, error.backend) == (4 * PIECE, (nth - 1) * PIECE, backend)
        assert_same((tmp_path / "file").read_bytes()[PAGE : PAGE + error.done], data[: error.done])
        it.assert_idle()
        assert it.write(file, it.device.memory(data), PAGE).result(TIMEOUT_S) == 4 * PIECE
        assert_same((tmp_path / "file").read_bytes()[PAGE:], data)


@pytest.mark.parametrize("nth", range(1, 5))
def test_a_failing_read_tells_the_prefix_that_is_on_the_device(
    tmp_path: Path, backend: str, nth: int
) -> None:
    broken = FaultPlan().fail(nth=nth, requests=Requests.READS)
    data = pattern(4 * PIECE, seed=1)
    (tmp_path / "file").write_bytes(data)
    with (
        rig(backend, faults=broken, chunk_bytes=PIECE) as it,
        it.queue.open(tmp_path / "file") as file,
    ):
        back = it.device.fresh(4 * PIECE)
        with pytest.raises(NVMeError) as caught:
            it.readinto(file, back).result(TIMEOUT_S)
        error = caught.value
        assert (error.errno, error.op, error.offset) == (errno.EIO, "read", 0)
        assert (error.asked, error.done) == (4 * PIECE, (nth - 1) * PIECE)
        assert_same(back.values[: error.done], data[: error.done])
        it.assert_idle()
        assert it.readinto(file, back).result(TIMEOUT_S) == 4 * PIECE
        assert_same(back.values, data)


def test_a_file_that_somebody_else_cut_is_an_error_that_says_so(
    tmp_path: Path, backend: str
) -> None:
    (tmp_path / "file").write_bytes(pattern(3 * PIECE, seed=1))
    with rig(backend) as it, it.queue.open(tmp_path / "file") as file:
        os.truncate(tmp_path / "file", PIECE + 10)
        with pytest.raises(ShortReadError, match="another process cut it") as caught:
            it.readinto(file, it.device.fresh(3 * PIECE)).result(TIMEOUT_S)
        assert (caught.value.asked, caught.value.done) == (3 * PIECE, PIECE + 10)
        with pytest.raises(ShortReadError, match=r"readinto\(\) accepts fewer"):
            it.pread(file, it.device.fresh(PIECE), PIECE).result(TIMEOUT_S)
        it.assert_idle()


def test_an_error_within_a_piece_counts_what_came_before_it(tmp_path: Path) -> None:
    broken = FaultPlan().fail(nth=3, requests=Requests.READS)
    data = pattern(PIECE, seed=1)
    (tmp_path / "file").write_bytes(data)
    with rig(faults=broken) as it, it.queue.open(tmp_path / "file") as file:
        back = it.device.fresh(PIECE)
        error = it.pread(file, back).exception(TIMEOUT_S)
        assert isinstance(error, NVMeError)
        assert error.done == 2 * CHUNK
        assert_same(back.values[: error.done], data[: error.done])


def test_after_an_error_nothing_more_of_the_operation_is_written(tmp_path: Path) -> None:
    broken = FaultPlan().fail(nth=1, requests=Requests.WRITES)
    with rig(faults=broken, chunk_bytes=PIECE) as it, it.queue.open(tmp_path / "file", "w") as file:
        it.device.hold_copy = 2
        future = it.write(file, it.device.memory(pattern(4 * PIECE, seed=1)))
        wait_until(lambda: drive_of(it.queue).failed == 1)
        it.queue.open(tmp_path / "other", "w").pwrite(b"x").add_done_callback(
            lambda _: it.device.held.set()
        )
        assert isinstance(future.exception(TIMEOUT_S), NVMeError)
        assert it.device.started == 2
        assert drive_of(it.queue).written_bytes == 1


def test_the_first_of_two_errors_is_told(tmp_path: Path) -> None:
    late = FaultPlan().delay(delay_us=500_000, nth=1).fail(nth=1, errno=errno.ENXIO)
    with rig(faults=late, chunk_bytes=PIECE) as it, it.queue.open(tmp_path / "file", "w") as file:
        it.device.fail_copy = PIECE
        it.device.hold_copy = 2
        future = it.write(file, it.device.memory(pattern(2 * PIECE, seed=1)))
        wait_until(lambda: drive_of(it.queue).chunks == 1)
        it.device.held.set()
        error = future.exception(TIMEOUT_S)
        assert isinstance(error, NVMeError)
        assert (error.errno, error.done) == (errno.EIO, 0)
        assert isinstance(error.__cause__, CopyError)
        assert drive_of(it.queue).failed == 1


@pytest.mark.parametrize("seed", range(4))
def test_short_late_and_reordered_requests_change_nothing(
    tmp_path: Path, backend: str, seed: int
) -> None:
    awkward = (
        FaultPlan(seed)
        .shorten(probability=0.2)
        .delay(delay_us=3000, probability=0.2)
        .reorder(hold=2, probability=0.2)
        .fail(errno=errno.EINTR, probability=0.1)
    )
    data = pattern(4 * PIECE + 99, seed=seed)
    with rig(backend, faults=awkward) as it, it.queue.open(tmp_path / "file", "w") as file:
        assert it.write(file, it.device.memory(data), 7).result(TIMEOUT_S) == len(data)
        back = it.device.fresh(len(data))
        assert it.pread(file, back, 7).result(TIMEOUT_S) == len(data)
        assert_same(back.values, data)
        it.assert_idle()


@pytest.mark.parametrize("every", [2, 3, 5])
def test_one_failing_operation_harms_no_other(tmp_path: Path, every: int) -> None:
    broken = FaultPlan().fail(every=every, requests=Requests.WRITES)
    with rig(faults=broken, chunk_bytes=PIECE) as it, it.queue.open(tmp_path / "file", "w") as file:
        data = [pattern(2 * PIECE, seed=n) for n in range(6)]
        futures = [it.write(file, it.device.memory(data[n]), 2 * PIECE * n) for n in range(6)]
        errors = [future.exception(TIMEOUT_S) for future in futures]
        assert any(errors)
        written = (tmp_path / "file").read_bytes()
        for number, error in enumerate(errors):
            done = error.done if isinstance(error, NVMeError) else futures[number].result()
            assert_same(written[2 * PIECE * number :][:done], data[number][:done])
        it.assert_idle()


def test_writing_to_a_file_opened_for_reading_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    with rig() as it, it.queue.open(tmp_path / "file") as file:
        future = it.write(file, it.device.memory(b"xyz"))
        with pytest.raises(NVMeError, match="opened for reading only"):
            future.result(TIMEOUT_S)


@pytest.mark.parametrize("way", ["refuse_copy", "fail_copy"])
@pytest.mark.parametrize("start", range(0, 4 * PIECE, PIECE))
def test_a_copy_from_the_device_that_fails_is_the_operations_error(
    tmp_path: Path, way: str, start: int
) -> None:
    data = pattern(4 * PIECE, seed=1)
    with rig() as it, it.queue.open(tmp_path / "file", "w") as file:
        setattr(it.device, way, start)
        with pytest.raises(
            NVMeError, match="copying between host and device failed: CopyError"
        ) as caught:
            it.write(file, it.device.memory(data)).result(TIMEOUT_S)
        error = caught.value
        assert (error.errno, error.op, error.asked) == (errno.EIO, "write", 4 * PIECE)
        assert isinstance(error.__cause__, CopyError)
        # a piece may have come from the device and not have been written yet
        assert error.done <= start
        assert_same((tmp_path / "file").read_bytes()[: error.done], data[: error.done])
        it.assert_idle()
        setattr(it.device, way, -1)
        assert it.write(file, it.device.memory(data)).result(TIMEOUT_S) == 4 * PIECE


@pytest.mark.parametrize("way", ["refuse_copy", "fail_copy"])
@pytest.mark.parametrize("start", range(0, 4 * PIECE, PIECE))
def test_a_copy_to_the_device_that_fails_is_the_operations_error(
    tmp_path: Path, way: str, start: int
) -> None:
    data = pattern(4 * PIECE, seed=1)
    (tmp_path / "file").write_bytes(data)
    with rig() as it, it.queue.open(tmp_path / "file") as file:
        setattr(it.device, way, start)
        back = it.device.fresh(4 * PIECE)
        with pytest.raises(
            NVMeError, match="copying between host and device failed: CopyError"
        ) as caught:
            it.pread(file, back).result(TIMEOUT_S)
        error = caught.value
        assert (error.op, error.asked, error.done) == ("read", 4 * PIECE, start)
        assert_same(back.values[: error.done], data[: error.done])
        it.assert_idle()
        setattr(it.device, way, -1)
        assert it.pread(file, back).result(TIMEOUT_S) == 4 * PIECE
        assert_same(back.values, data)


def test_a_device_that_gives_no_stream_is_the_operations_error(tmp_path: Path) -> None:
    with rig() as it, it.queue.open(tmp_path / "file", "w") as file:
        it.device.refuse_begin = True
        with pytest.raises(NVMeError, match="no stream"):
            it.write(file, it.device.memory(b"abc")).result(TIMEOUT_S)
        it.assert_idle()


# --- syncs ----------------------------------------------------------------------------------------


def test_a_sync_comes_after_the_writes_that_were_staged_before_it(tmp_path: Path) -> None:
    with rig(faults=FaultPlan().fail(nth=1, requests=Requests.SYNCS)) as it:
        with it.queue.open(tmp_path / "file", "w") as file:
            it.device.hold_copy = 2
            write = it.write(file, it.device.memory(pattern(2 * PIECE, seed=1)))
            failing = it.sync(file)
            sync = it.sync(file)
            wait_until(lambda: drive_of(it.queue).written_bytes == PIECE)
            assert drive_of(it.queue).operations == 1
            it.device.held.set()
            with pytest.raises(NVMeError) as caught:
                failing.result(TIMEOUT_S)
            assert (caught.value.op, caught.value.errno) == ("sync_data", errno.EIO)
            assert write.done()
            assert sync.result(TIMEOUT_S) == 0
        it.assert_idle()


# --- what keeps what ------------------------------------------------------------------------------


def test_the_array_is_kept_until_the_end_and_let_go_then(tmp_path: Path) -> None:
    with rig() as it, it.queue.open(tmp_path / "file", "w") as file:
        memory = it.device.memory(pattern(2 * PIECE, seed=1))
        watch = weakref.ref(memory)
        it.device.hold_copy = 1
        future = it.write(file, memory)
        gone: list[bool] = []
        future.add_done_callback(lambda _: gone.append(watch() is None))
        del memory
        wait_until(lambda: it.device.started == 2)
        gc.collect()
        assert watch() is not None
        it.device.held.set()
        future.result(TIMEOUT_S)
        wait_until(lambda: gone == [True])


@pytest.mark.parametrize("way", ["refuse_copy", "fail_copy"])
def test_the_error_of_a_failed_copy_does_not_keep_the_array(tmp_path: Path, way: str) -> None:
    with rig() as it, it.queue.open(tmp_path / "file", "w") as file:
        setattr(it.device, way, 0)
        memory = it.device.memory(b"abc")
        watch = weakref.ref(memory)
        future = it.write(file, memory)
        del memory
        assert isinstance(future.exception(TIMEOUT_S), NVMeError)
        it.device.close()
        wait_until(lambda: gc.collect() >= 0 and watch() is None)


def test_a_file_may_be_closed_while_its_operation_is_under_way(tmp_path: Path) -> None:
    with rig() as it:
        with it.queue.open(tmp_path / "file", "w") as file:
            it.device.hold_copy = 1
            future = it.write(file, it.device.memory(b"abc"))
        it.device.held.set()
        assert future.result(TIMEOUT_S) == 3


# --- cancelling, room, closing --------------------------------------------------------------------


def test_what_has_not_begun_can_be_cancelled_and_what_has_begun_cannot(tmp_path: Path) -> None:
    with rig() as it, it.queue.open(tmp_path / "file", "w") as file:
        it.device.hold_copy = 1
        first = it.write(file, it.device.memory(pattern(2 * PIECE, seed=1)))
        wait_until(lambda: it.device.started == 2)  # all of the staging memory is in use
        data = it.device.memory(b"never")
        watch = weakref.ref(data)
        second = it.write(file, data, 4 * PIECE)
        third = it.write(file, it.device.memory(b"third"), 2 * PIECE)
        del data
        assert second.cancel()
        assert not first.cancel()
        it.device.held.set()
        assert first.result(TIMEOUT_S) == 2 * PIECE
        assert third.result(TIMEOUT_S) == 5
        with pytest.raises(concurrent.futures.CancelledError):
            second.result(TIMEOUT_S)
        done, waiting = concurrent.futures.wait([first, second, third], timeout=TIMEOUT_S)
        assert (len(done), len(waiting)) == (3, 0)
        assert not third.cancel()
        del second, done
        assert (tmp_path / "file").stat().st_size == 2 * PIECE + 5
        wait_until(lambda: watch() is None)
        it.assert_idle()


def test_a_queue_full_of_staged_operations_refuses_another(tmp_path: Path) -> None:
    with rig(max_pending=2, patience_s=0) as it, it.queue.open(tmp_path / "file", "w") as file:
        it.device.hold_copy = 1
        futures = [it.write(file, it.device.memory(b"abc"), 3 * n) for n in range(2)]
        with pytest.raises(QueueFull, match="2 operations are pending"):
            it.write(file, it.device.memory(b"one too many"))
        it.device.held.set()
        assert [future.result(TIMEOUT_S) for future in futures] == [3, 3]
        assert it.write(file, it.device.memory(b"now")).result(TIMEOUT_S) == 3


@pytest.mark.parametrize("most", [1, 3])
def test_a_full_queue_blocks_until_there_is_room(tmp_path: Path, most: int) -> None:
    with rig(max_pending=most) as it, it.queue.open(tmp_path / "file", "w") as file:
        futures = []
        for number in range(60):
            futures.append(it.write(file, it.device.memory(bytes([number]) * 10), 10 * number))
            assert it.staging.pending <= most
        assert [future.result(TIMEOUT_S) for future in futures] == [10] * 60
        assert (tmp_path / "file").read_bytes() == b"".join(bytes([n]) * 10 for n in range(60))


def test_a_cancelled_operation_gives_its_room_back(tmp_path: Path) -> None:
    with rig(max_pending=2) as it, it.queue.open(tmp_path / "file", "w") as file:
        it.device.hold_copy = 1
        first = it.write(file, it.device.memory(pattern(2 * PIECE, seed=1)))
        wait_until(lambda: it.device.started == 2)
        assert it.write(file, it.device.memory(b"never")).cancel()
        it.device.held.set()
        assert it.write(file, it.device.memory(b"abc")).result(TIMEOUT_S) == 3
        assert first.result(TIMEOUT_S) == 2 * PIECE


@pytest.mark.parametrize("staged", [True, False], ids=["of a staged operation", "of another"])
def test_a_callback_may_submit_more_although_the_queue_is_full(
    tmp_path: Path, staged: bool
) -> None:
    """Callbacks run on the two threads that make room: they would wait for themselves."""
    finished = threading.Event()
    slow = FaultPlan().delay(delay_us=500_000, nth=2)
    with rig(max_pending=1, faults=slow) as it, it.queue.open(tmp_path / "file", "w") as file:

        def write_next(number: int) -> None:
            if number == 20:
                finished.set()
                return
            future = it.write(file, it.device.memory(bytes([number])), number)
            future.add_done_callback(lambda _: write_next(number + 1))

        it.write(file, it.device.memory(b"x")).result(TIMEOUT_S)
        if staged:
            write_next(0)
        else:
            it.device.hold_copy = 2
            file.pwrite(b"x", 2 * PAGE).add_done_callback(lambda _: write_next(0))
            it.write(file, it.device.memory(b"x"), PAGE)
            wait_until(lambda: it.staging.pending == 2)
            it.device.held.set()
        assert finished.wait(TIMEOUT_S)
        assert (tmp_path / "file").read_bytes()[:20] == bytes(range(20))


def test_closing_waits_for_everything_pending(tmp_path: Path, backend: str) -> None:
    slow = FaultPlan().delay(delay_us=5000, every=3)
    with rig(backend, faults=slow) as it, it.queue.open(tmp_path / "file", "w") as file:
        data = [pattern(PIECE + n, seed=n) for n in range(6)]
        futures = [it.write(file, it.device.memory(data[n]), 2 * PIECE * n) for n in range(6)]
        it.staging.close()
        assert [future.done() for future in futures] == [True] * 6
        for number in range(6):
            assert futures[number].result() == len(data[number])
            assert_same(
                (tmp_path / "file").read_bytes()[2 * PIECE * number :][: len(data[number])],
                data[number],
            )
        assert it.staging._memory.pool is None
        with pytest.raises(ClosedError):
            it.write(file, it.device.memory(b"abc"))
        it.staging.close()


def test_whoever_waits_for_room_is_told_that_the_queue_closes(tmp_path: Path) -> None:
    with rig(max_pending=1) as it, it.queue.open(tmp_path / "file", "w") as file:
        it.device.hold_copy = 1
        it.write(file, it.device.memory(b"abc"))
        with concurrent.futures.ThreadPoolExecutor(2) as others:
            waiting = others.submit(it.write, file, it.device.memory(b"late"), 0)
            closing = others.submit(it.staging.close)
            with pytest.raises(ClosedError):
                waiting.result(TIMEOUT_S)
            assert not closing.done()
            it.device.held.set()
            closing.result(TIMEOUT_S)


def test_a_callback_is_told_that_closing_would_wait_for_itself(tmp_path: Path) -> None:
    told: list[bool] = []
    slow = FaultPlan().delay(delay_us=500_000, nth=2)
    with rig(faults=slow) as it, it.queue.open(tmp_path / "file", "w") as file:
        it.write(file, it.device.memory(b"x")).result(TIMEOUT_S)
        it.device.hold_copy = 2
        file.pwrite(b"slow").add_done_callback(
            lambda _: told.append(it.staging.needs_this_thread())
        )
        first = it.write(file, it.device.memory(b"abc"), 4)
        first.add_done_callback(lambda _: told.append(it.staging.needs_this_thread()))
        second = it.write(file, it.device.memory(b"def"), 7)
        assert not it.staging.needs_this_thread()
        wait_until(lambda: len(told) == 1)
        it.device.held.set()
        assert [first.result(TIMEOUT_S), second.result(TIMEOUT_S)] == [3, 3]
        assert told == [True, True]


def test_a_queue_that_sees_no_device_array_has_neither_thread_nor_memory_for_them() -> None:
    with rig() as it:
        assert it.staging._memory.pool is None
        assert not it.staging._threads


FORKING = """
import os, sys, threading
from deepnvme import ForkedError, IOQueue, _native
from deepnvme.queue.staging import Staging

release = threading.Event()

class Event:
    def synchronize(self):
        release.wait(60)

class Array:
    nbytes = 3
    def begin(self):
        pass
    def to_host(self, start, target):
        target[:] = b"abc"
        return Event()

queue = IOQueue("threads")
staging = Staging(queue._native, queue._pending, max_pending=9, patience_s=None)
os.register_at_fork(after_in_child=staging.end_in_child)
file = queue.open(sys.argv[1], "w")
future = staging.submit(_native.Verb.WRITE, file._native, Array(), 0)

def refused(call):
    try:
        call()
    except ForkedError:
        return True
    return False

pid = os.fork()
if pid == 0:
    told = [
        refused(lambda: future.result(10)),
        refused(lambda: staging.submit(_native.Verb.WRITE, file._native, Array(), 0)),
    ]
    print(told, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
release.set()
print(future.result(60))
staging.close()
queue.close()
"""


def test_a_forked_child_is_refused_and_the_parent_goes_on(tmp_path: Path) -> None:
    done = run_program(FORKING, tmp_path / "file", folder=tmp_path)
    assert output_of(done) == "[True, True]\n3\n"
    assert (tmp_path / "file").read_bytes() == b"abc"


# --- the libraries, without their devices ---------------------------------------------------------


class StandInStream:
    """What torch.cuda and cupy.cuda streams have in common; notes what is asked of it."""

    ptr = 77

    def __init__(self, *_: object, **__: object) -> None:
        self.waited: list[object] = []

    def wait_event(self, event: object) -> None:
        self.waited.append(event)

    def record(self, event: object = "mark") -> object:
        return event

    record_event = record


class StandInEvent:
    def __init__(self, **_: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


def torch_array(tensor: Any) -> Any:
    """Return the tensor's memory as it were a GPU's: its class with real torch, but for streams."""
    torch = pytest.importorskip("torch")
    cuda = types.SimpleNamespace(
        Stream=StandInStream,
        Event=StandInEvent,
        stream=lambda _: contextlib.nullcontext(),
        current_stream=lambda _: StandInStream(),
    )
    used = {name: getattr(torch, name) for name in ("strided", "uint8", "empty", "frombuffer")}
    return device_arrays._TorchArray(tensor, types.SimpleNamespace(cuda=cuda, **used))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex64", "float8_e4m3fn"])
def test_a_tensors_bytes_are_read_and_written_in_place(tmp_path: Path, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    raw = torch.randint(0, 2, (4 * 5000,), dtype=torch.uint8)
    whole = raw.view(getattr(torch, dtype)) if dtype != "bool" else raw.bool()
    tensor = whole[16:-16].requires_grad_(whole.is_floating_point() and dtype != "float8_e4m3fn")
    with rig(staging_bytes=4 * PAGE) as it, it.queue.open(tmp_path / "file", "w") as file:
        size = tensor.numel() * tensor.element_size()
        assert (
            it.staging.submit(WRITE, file._open(), torch_array(tensor), 0).result(TIMEOUT_S) == size
        )
        expected = whole.view(torch.uint8)[16 * tensor.element_size() :][:size]
        assert_same((tmp_path / "file").read_bytes(), expected.numpy())
        with torch.inference_mode():
            back = torch.zeros_like(whole)
            array = torch_array(back[16:-16])
        assert it.staging.submit(READ, file._open(), array, 0).result(TIMEOUT_S) == size
        assert_same(
            back.view(torch.uint8)[16 * tensor.element_size() :][:size].numpy(), expected.numpy()
        )
        assert not back.view(torch.uint8)[: 16 * tensor.element_size()].any()


def test_a_tensors_copies_wait_for_the_stream_that_was_current() -> None:
    torch = pytest.importorskip("torch")
    array = torch_array(torch.zeros(4))
    array.begin()
    assert array._stream.waited == ["mark"]


def test_a_tensor_that_is_no_single_piece_of_values_is_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match=r"not contiguous.*\.contiguous\(\)"):
        torch_array(torch.zeros(4, 4).t())
    with pytest.raises(ValueError, match="lazy conjugate"):
        torch_array(torch.zeros(4, dtype=torch.complex64).conj())
    with pytest.raises(TypeError, match="dense"):
        torch_array(torch.zeros(4).to_sparse())


def test_host_memory_is_no_device_array() -> None:
    torch = pytest.importorskip("torch")
    for thing in (torch.zeros(4), np.zeros(4), bytearray(4), object()):
        assert device_array_of(thing, writable=True) is None


class StandInCupyArray:
    """An array as cupy's, in host memory."""

    def __init__(
        self, values: np.ndarray[Any, Any], device: object, *, read_only: bool = False
    ) -> None:
        self.values = values
        self.nbytes, self.flags, self.strides, self.device = (
            values.nbytes,
            values.flags,
            values.strides,
            device,
        )
        self.data = types.SimpleNamespace(ptr=values.ctypes.data)
        self.__cuda_array_interface__ = {"data": (values.ctypes.data, read_only), "version": 3}


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install a module that is to cupy what StandInCupyArray is to its arrays."""
    import ctypes
    import sys

    def memcpy_async(target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        assert kind in (1, 2)
        assert stream == StandInStream.ptr
        ctypes.memmove(target, source, nbytes)

    runtime = types.SimpleNamespace(
        memcpyHostToDevice=1, memcpyDeviceToHost=2, memcpyAsync=memcpy_async
    )
    module: Any = types.ModuleType("cupy")
    module.cuda = types.SimpleNamespace(
        Stream=StandInStream, Event=StandInEvent, runtime=runtime, get_current_stream=StandInStream
    )
    module.asarray = lambda thing: thing
    module.device = contextlib.nullcontext()
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


def test_a_cupy_arrays_bytes_are_read_and_written_in_place(tmp_path: Path, cupy: Any) -> None:
    data = np.frombuffer(pattern(40000, seed=1), np.uint16).copy()
    back = np.zeros_like(data)
    with rig(staging_bytes=4 * PAGE) as it, it.queue.open(tmp_path / "file", "w") as file:
        source = device_array_of(StandInCupyArray(data, cupy.device), writable=False)
        target = device_array_of(StandInCupyArray(back, cupy.device), writable=True)
        assert it.staging.submit(WRITE, file._open(), source, 5).result(TIMEOUT_S) == 40000
        assert it.staging.submit(READ, file._open(), target, 5).result(TIMEOUT_S) == 40000
        assert (data == back).all()


def test_a_device_array_that_cannot_be_used_as_it_is_is_refused(cupy: Any) -> None:
    with pytest.raises(ValueError, match=r"not contiguous.*ascontiguousarray"):
        device_array_of(StandInCupyArray(np.zeros((4, 4)).T[1:], cupy.device), writable=False)
    with pytest.raises(BufferError, match="read-only"):
        device_array_of(StandInCupyArray(np.zeros(4), cupy.device, read_only=True), writable=True)
    assert device_array_of(
        StandInCupyArray(np.zeros(4), cupy.device, read_only=True), writable=False
    )


def test_an_array_that_cupy_would_copy_is_refused(cupy: Any) -> None:
    cupy.asarray = lambda thing: StandInCupyArray(thing.values.copy(), cupy.device)
    with pytest.raises(TypeError, match="only as a copy"):
        device_array_of(StandInCupyArray(np.zeros(4), cupy.device), writable=True)


def test_another_librarys_array_without_cupy_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(TypeError, match="needs cupy"):
        device_array_of(StandInCupyArray(np.zeros(4), None), writable=True)
