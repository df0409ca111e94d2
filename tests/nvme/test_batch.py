"""Operations waited for together: all of them, whatever becomes of some."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from deepnvme import BatchError, ClosedError, FaultPlan, File, IOFuture, IOQueue, NVMeError
from deepnvme.queue import future as future_module
from deepnvme.queue import pending as pending_module
from deepnvme.queue.queue import Batch
from support.interrupts import interruptions
from support.nvme_held import held, until
from support.nvme_io import CHUNK, PAGE, TIMEOUT_S, contents, pattern

HOLD_US = 200_000


@contextlib.contextmanager
def behind_a_slow_write(path: Path, *failing: int) -> Iterator[tuple[IOQueue, File]]:
    """Yield a queue whose drive is busy, and a file; of the requests from then on fail those,
    counted from 1.
    """
    faults = FaultPlan()
    for nth in failing:
        faults.fail(nth=1 + nth)
    with held("memory", path, hold_us=HOLD_US, faults=faults) as (queue, file, _):
        yield queue, file


def three_writes(batch: Batch, file: File) -> None:
    for number in range(3):
        batch.pwrite(file, pattern(CHUNK, seed=number), number * CHUNK)


def test_a_batch_of_which_one_was_cancelled_waits_for_the_others(tmp_path: Path) -> None:
    with behind_a_slow_write(tmp_path / "file") as (queue, file):
        batch = queue.batch()
        three_writes(batch, file)
        futures = list(batch.futures)
        assert futures[1].cancel()
        with pytest.raises(CancelledError):
            batch.wait()
        assert [future.done() for future in futures] == [True] * 3
        assert contents(queue, tmp_path / "file")[2 * CHUNK :] == pattern(CHUNK, seed=2)


@pytest.mark.parametrize("cancelled", [0, 1, 2])
def test_leaving_a_batch_of_which_one_was_cancelled_says_so_after_the_others_ended(
    tmp_path: Path, cancelled: int
) -> None:
    with behind_a_slow_write(tmp_path / "file") as (queue, file):
        batch = queue.batch()
        three_writes(batch, file)
        futures = list(batch.futures)
        assert futures[cancelled].cancel()
        with pytest.raises(CancelledError), batch:
            pass
        assert [future.cancelled() for future in futures] == [
            number == cancelled for number in range(3)
        ]
        assert all(future.done() for future in futures)


def test_a_batch_of_which_one_failed_and_one_was_cancelled_tells_the_failure(
    tmp_path: Path,
) -> None:
    with behind_a_slow_write(tmp_path / "file", 1) as (queue, file):
        batch = queue.batch()
        three_writes(batch, file)
        futures = list(batch.futures)
        assert futures[0].cancel()  # the first request behind the slow one is then the second write
        with pytest.raises(NVMeError) as caught:
            batch.wait()
        assert (caught.value.offset, type(caught.value)) == (CHUNK, NVMeError)
        assert futures[2].result(0) == CHUNK


def test_a_batch_of_which_several_failed_tells_them_all_in_order_and_no_cancellation(
    tmp_path: Path,
) -> None:
    with behind_a_slow_write(tmp_path / "file", 1, 2) as (queue, file):
        batch = queue.batch()
        three_writes(batch, file)
        assert batch.futures[1].cancel()
        with pytest.raises(BatchError) as caught:
            batch.wait()
        assert [error.offset for error in caught.value.errors] == [0, 2 * CHUNK]


def test_a_batch_is_empty_once_it_was_waited_for_and_can_be_used_again(tmp_path: Path) -> None:
    with behind_a_slow_write(tmp_path / "file") as (queue, file):
        batch = queue.batch()
        three_writes(batch, file)
        assert batch.futures[0].cancel()
        with pytest.raises(CancelledError):
            batch.wait()
        assert batch.wait() == 0
        three_writes(batch, file)
        assert batch.wait() == 3 * CHUNK


def test_a_batch_whose_body_fails_waits_and_lets_that_error_through(tmp_path: Path) -> None:
    with behind_a_slow_write(tmp_path / "file", 2) as (queue, file):
        batch = queue.batch()
        three_writes(batch, file)
        futures = list(batch.futures)
        assert futures[0].cancel()
        with pytest.raises(RuntimeError, match="the program's own"), batch:
            raise RuntimeError("the program's own")
        assert all(future.done() for future in futures)


@pytest.mark.parametrize("count", [64, 200])
def test_a_batch_hands_many_operations_to_the_kernel_at_once(
    tmp_path: Path, disk_backend: str, count: int
) -> None:
    data = pattern(count * PAGE, seed=5)
    (tmp_path / "file").write_bytes(data)
    buffers = [bytearray(PAGE) for _ in range(count)]
    with IOQueue(disk_backend, max_requests=256) as queue, queue.open(tmp_path / "file") as file:
        with queue.batch() as batch:
            for number, buffer in enumerate(buffers):
                batch.pread(file, buffer, number * PAGE)
        (drive,) = queue.stats().drives.values()
    assert b"".join(buffers) == data
    assert drive.operations == count
    assert drive.submissions <= 2 * (count // 64 + 1)


def test_a_sync_covers_the_writes_that_a_batch_has_gathered(tmp_path: Path, queue: IOQueue) -> None:
    with queue.open(tmp_path / "file", "w") as file:
        batch = queue.batch()
        batch.pwrite(file, b"abc")
        file.sync().result(TIMEOUT_S)
        assert batch.futures[0].done()
        assert batch.wait() == 3


def test_waiting_for_one_operation_of_a_batch_submits_all(tmp_path: Path, queue: IOQueue) -> None:
    with queue.open(tmp_path / "file", "w") as file:
        batch = queue.batch()
        three_writes(batch, file)
        futures = list(batch.futures)
        assert futures[1].result(TIMEOUT_S) == CHUNK
        del batch
        assert [future.result(TIMEOUT_S) for future in futures] == [CHUNK] * 3


def test_closing_a_queue_ends_what_a_batch_has_gathered(tmp_path: Path, backend: str) -> None:
    queue = IOQueue(backend)
    with queue.open(tmp_path / "file", "w") as file:
        batch = queue.batch()
        batch.pwrite(file, b"abc")
        queue.close()
    assert batch.wait() == 3


def test_a_batch_whose_future_was_given_a_callback_ends_without_a_wait(
    tmp_path: Path, queue: IOQueue
) -> None:
    ended = threading.Event()
    with queue.open(tmp_path / "file", "w") as file:
        batch = queue.batch()
        batch.pwrite(file, b"abc")
        batch.futures[0].add_done_callback(lambda _: ended.set())
        assert ended.wait(TIMEOUT_S)


def test_threads_gather_batches_of_one_queue_at_a_time(tmp_path: Path, queue: IOQueue) -> None:
    def write(number: int) -> int:
        with queue.batch() as batch:
            for turn in range(100):
                batch.pwrite(file, bytes([number]), number * 100 + turn)
            return len(batch.futures)

    with queue.open(tmp_path / "file", "w") as file:
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(write, range(8))) == [100] * 8
        assert contents(queue, tmp_path / "file") == b"".join(
            bytes([number]) * 100 for number in range(8)
        )


def test_a_batch_waits_for_room_in_its_queue(tmp_path: Path, backend: str) -> None:
    with (
        IOQueue(backend, max_pending=5) as queue,
        queue.open(tmp_path / "file", "w") as file,
        queue.batch() as batch,
    ):
        for number in range(100):
            batch.pwrite(file, b"x", number)
        assert batch.wait() == 100


@contextlib.contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Raise KeyboardInterrupt once, in the main thread."""

    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def three_reads(batch: Batch, file: File, buffers: list[bytearray]) -> None:
    for number, buffer in enumerate(buffers):
        batch.pread(file, buffer, number * CHUNK)


def test_what_an_interrupted_batch_has_gathered_is_written_at_once(tmp_path: Path) -> None:
    """Left in the batch, it would be written later, over what came after."""
    with IOQueue("threads") as queue, queue.open(tmp_path / "file", "w") as file:
        batch = queue.batch()
        batch.pwrite(file, b"kept")
        with pytest.raises(KeyboardInterrupt), batch:
            raise KeyboardInterrupt
        until(lambda: (tmp_path / "file").read_bytes() == b"kept")


@pytest.mark.parametrize("body", [Batch.wait, lambda batch: None, lambda batch: time.sleep(10)])
def test_a_batch_that_is_interrupted_keeps_its_memory_until_the_drive_is_done(
    tmp_path: Path, body: Callable[[Batch], object]
) -> None:
    """In its wait, where it is left, or in what its block does: Ctrl-C waits for nothing."""
    buffers = [bytearray(CHUNK) for _ in range(3)]
    with behind_a_slow_write(tmp_path / "file") as (queue, file):
        batch = queue.batch()
        three_reads(batch, file, buffers)
        futures = list(batch.futures)
        with pytest.raises(KeyboardInterrupt), interrupted_after(0.02), batch:
            body(batch)
        with pytest.raises(BufferError):
            buffers[2].append(0)
        assert [future.result() for future in futures] == [CHUNK] * 3
        for buffer in buffers:
            buffer.append(0)


class RefusedBeside:
    """A closed native queue: while it refuses a batch, another thread's call was refused too."""

    def __init__(self, queue: IOQueue) -> None:
        self._queue = queue
        self._is_alone = True

    def submit_many(self, _group: Any, _patience_s: float) -> bool:
        if self._is_alone:
            self._is_alone = False
            self._queue._pending.send()
        raise ClosedError("the queue is closed")


def test_two_threads_whose_batch_is_refused_end_each_future_once(tmp_path: Path) -> None:
    with IOQueue("memory") as queue, queue.open(tmp_path / "file", "w") as file:
        batch = queue.batch()
        three_writes(batch, file)
        native = queue._native
        queue._pending._native = RefusedBeside(queue)  # type: ignore[assignment]
        try:
            queue._pending.send()
        finally:
            queue._pending._native = native
        with pytest.raises(BatchError, match="3 operations of the batch failed"):
            batch.wait()


def test_each_future_of_a_refused_batch_ends_wherever_it_is_interrupted(tmp_path: Path) -> None:
    with ExitStack() as queues:
        futures: list[IOFuture[int]] = []
        callback_calls: list[object] = []

        def prepare() -> Callable[[], object]:
            queue = queues.enter_context(IOQueue("memory"))
            batch = queue.batch()
            three_writes(batch, queue.open(tmp_path / "file", "w"))
            futures[:] = batch.futures
            callback_calls.clear()
            # Not by add_done_callback, which would submit what is gathered.
            vars(futures[1]).update(_seen=True, _done_callbacks=[callback_calls.append])
            while not queue._native.close(TIMEOUT_S):
                pass
            return queue._pending.send

        for _ in interruptions(prepare, pending_module, future_module):
            for future in futures:
                assert isinstance(future.exception(TIMEOUT_S), ClosedError)
            assert len(callback_calls) <= 1
