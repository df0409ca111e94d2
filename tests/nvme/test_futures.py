"""An operation under way: waiting for it, awaiting it, taking it back, being told, and a queue that
is full.

A drive is held by its first request, which is slow; the budget has room for that one chunk only.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import logging
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepnvme import (
    File,
    IOFuture,
    IOQueue,
    NVMeError,
    QueueFull,
    ShortReadError,
    WhenFull,
)
from deepnvme.queue.pending import Pending
from support.nvme_held import held, until
from support.nvme_io import CHUNK, TIMEOUT_S, assert_same, contents, pattern

# A held request waits in the fault backend, above all others: what happens meanwhile is the same on
# each.
anyhow_held = pytest.mark.parametrize(
    "backend",
    [
        "uring",
        "memory",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("liburing", "aio", "threads")),
    ],
    indirect=True,
)
BRIEFLY_US = 200_000  # for tests that fail of nothing when it is over early

# --- cancelling -----------------------------------------------------------------------------------


@anyhow_held
def test_cancelling_what_has_not_begun_succeeds_and_touches_nothing(
    tmp_path: Path, backend: str
) -> None:
    with held(backend, tmp_path / "file") as (queue, file, first):
        buffer = bytearray(b"\xee" * CHUNK)
        next_in_turn = file.pread(buffer)
        kept = file.pwrite(pattern(CHUNK, seed=2), CHUNK)
        further_behind = file.pwrite(pattern(CHUNK, seed=3), 2 * CHUNK)
        assert next_in_turn.cancel()
        assert further_behind.cancel()
        assert next_in_turn.cancelled()
        with pytest.raises(concurrent.futures.CancelledError):
            further_behind.result(TIMEOUT_S)
        assert [first.result(TIMEOUT_S), kept.result(TIMEOUT_S)] == [CHUNK, CHUNK]
        file.sync().result(TIMEOUT_S)  # behind the cancelled ones: the drive is past them
        assert_same(buffer, b"\xee" * CHUNK)
        assert_same(
            contents(queue, tmp_path / "file")[CHUNK:], pattern(CHUNK, seed=2) + bytes(CHUNK)
        )


def test_cancelling_again_says_again_that_it_is_cancelled(tmp_path: Path) -> None:
    with held("memory", tmp_path / "file") as (_, file, _first):
        future = file.pwrite(b"x")
        assert future.cancel()
        assert future.cancel()


@anyhow_held
def test_cancelling_what_has_begun_fails_and_it_runs_to_its_end(
    tmp_path: Path, backend: str
) -> None:
    with held(backend, tmp_path / "file", hold_us=BRIEFLY_US) as (queue, _file, first):
        assert not first.cancel()
        assert first.result(TIMEOUT_S) == CHUNK
        assert not first.cancel()
        assert_same(contents(queue, tmp_path / "file")[:CHUNK], pattern(CHUNK, seed=1))


def test_an_operation_of_several_chunks_has_begun_with_its_first(tmp_path: Path) -> None:
    with held("memory", tmp_path / "file", hold_us=BRIEFLY_US) as (queue, file, first):
        long = file.pwrite(pattern(2 * CHUNK, seed=2))
        first.result(TIMEOUT_S)
        assert long.result(TIMEOUT_S) == 2 * CHUNK
        assert not long.cancel()
        assert_same(contents(queue, tmp_path / "file")[: 2 * CHUNK], pattern(2 * CHUNK, seed=2))


def test_a_sync_that_waits_for_a_write_can_be_cancelled(tmp_path: Path) -> None:
    with held("memory", tmp_path / "file") as (_, file, first):
        sync = file.sync()
        assert sync.cancel()
        assert file.sync().result(TIMEOUT_S) == 0
        assert first.done()


def test_memory_of_a_cancelled_operation_is_let_go(tmp_path: Path) -> None:
    with held("memory", tmp_path / "file") as (_, file, first):
        buffer = np.zeros(CHUNK, np.uint8)
        watch = weakref.ref(buffer)
        future = file.pread(buffer)
        assert future.cancel()
        del buffer
        first.result(TIMEOUT_S)
        # not at once: the queue's own thread may be at it
        until(lambda: watch() is None)


def test_memory_of_a_released_memoryview_stays_until_its_operation_ends(tmp_path: Path) -> None:
    with held("memory", tmp_path / "file") as (queue, file, _):
        buffer = bytearray(b"kept")
        view = memoryview(buffer)
        write = file.pwrite(view, CHUNK)
        view.release()
        with pytest.raises(BufferError):
            buffer.clear()
        assert write.result(TIMEOUT_S) == 4
        assert contents(queue, tmp_path / "file")[CHUNK : CHUNK + 4] == b"kept"
        until(lambda: queue.stats().pending == 0)
        buffer.clear()


def test_cancelled_operations_count_as_ended_for_concurrent_futures_wait(tmp_path: Path) -> None:
    with held("memory", tmp_path / "file") as (_, file, first):
        futures = [first, file.pwrite(b"a"), file.pwrite(b"b")]
        futures[1].cancel()
        done, waiting = concurrent.futures.wait(futures, timeout=TIMEOUT_S)
        assert (len(done), len(waiting)) == (3, 0)


# --- awaiting -------------------------------------------------------------------------------------


def test_many_operations_can_be_awaited_together(tmp_path: Path, queue: IOQueue) -> None:
    async def main(file: File) -> list[bytearray]:
        written = await asyncio.gather(
            *(file.pwrite(pattern(5000, n), n * 5000) for n in range(100))
        )
        assert written == [5000] * 100
        await file.sync()
        buffers = [bytearray(5000) for _ in range(100)]
        await asyncio.gather(*(file.pread(buffer, n * 5000) for n, buffer in enumerate(buffers)))
        return buffers

    with queue.open(tmp_path / "file", "w") as file:
        buffers = asyncio.run(asyncio.wait_for(main(file), TIMEOUT_S))
    assert buffers == [pattern(5000, n) for n in range(100)]


def test_a_failed_operation_raises_where_it_is_awaited(tmp_path: Path, queue: IOQueue) -> None:
    async def main(file: File) -> None:
        with pytest.raises(ShortReadError):
            await file.pread(bytearray(1), 100)
        results = await asyncio.gather(
            file.pread(bytearray(1), 5), file.pwrite(b"abc"), return_exceptions=True
        )
        assert isinstance(results[0], ShortReadError)
        assert results[1] == 3

    with queue.open(tmp_path / "file", "w") as file:
        asyncio.run(asyncio.wait_for(main(file), TIMEOUT_S))


@pytest.mark.parametrize("begun", [True, False], ids=["begun", "not begun"])
def test_cancelling_an_await_leaves_the_operation_running_and_its_memory_held(
    tmp_path: Path, begun: bool
) -> None:
    async def main(future: IOFuture[int]) -> None:
        async def wait() -> None:
            await future

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not future.cancelled()
        assert await future == CHUNK

    with held("memory", tmp_path / "file") as (_, file, first):
        buffer = bytearray(CHUNK)
        future = first if begun else file.pread(buffer)
        asyncio.run(asyncio.wait_for(main(future), TIMEOUT_S))
        if not begun:
            assert_same(buffer, pattern(CHUNK, seed=1))


def test_an_event_loop_has_one_answer_queued_when_its_reader_has_answered() -> None:
    """A loop and a native queue of the test: what a loop calls next is not left to a drive."""
    queued: list[tuple[Any, ...]] = []
    readers: list[tuple[Any, ...]] = []

    class Loop:
        def add_reader(self, _descriptor: int, *call: Any) -> None:
            readers.append(call)

        def call_soon(self, *call: Any) -> None:
            queued.append(call)

    class Ended:
        """Whenever it is asked, something has ended."""

        def hear(self, _future: object, _bell: object) -> None:
            pass

        def serve_loop(self, *_arguments: object) -> bool:
            return True

    loop: Any = Loop()
    native: Any = Ended()
    pending = Pending(native, "memory", 1)
    pending.hear_on(loop, IOFuture(pending, ()))
    pending._answer_soon(loop, pending._listeners[loop])

    [(reader, *arguments)] = readers
    reader(*arguments)  # the loop's turn begins with its readers
    pending._answer_soon(loop, pending._listeners[loop])  # as a submission in that turn does

    assert len(queued) == 1
    [(answer, *arguments)] = queued
    answer(*arguments)
    assert len(queued) == 2, "what the coroutines submit that were woken needs another one"


def test_a_timeout_around_an_await_leaves_the_operation_running(tmp_path: Path) -> None:
    async def main(first: IOFuture[int]) -> int:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(first, 0.01)
        return await first

    with held("memory", tmp_path / "file") as (_, _file, first):
        assert asyncio.run(asyncio.wait_for(main(first), TIMEOUT_S)) == CHUNK


def test_an_event_loop_that_closed_meanwhile_is_no_ones_problem(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(first: IOFuture[int]) -> None:
        async def wait() -> None:
            await first

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()

    with held("memory", tmp_path / "file") as (_, _file, first):
        asyncio.run(main(first))
        assert first.result(TIMEOUT_S) == CHUNK
    assert not caplog.records


def test_nobody_is_told_of_the_failure_of_an_operation_whose_await_was_cancelled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(file: File) -> None:
        async def wait() -> None:
            await future

        future = file.pread(bytearray(1), 9 * CHUNK)
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(ShortReadError):
            await future
        gc.collect()

    with held("memory", tmp_path / "file") as (_, file, _first):
        asyncio.run(main(file))
    gc.collect()
    assert not caplog.records


# --- being told -----------------------------------------------------------------------------------


def test_a_callback_is_told_once_with_the_future(tmp_path: Path, queue: IOQueue) -> None:
    told: list[object] = []
    with queue.open(tmp_path / "file", "w") as file:
        future = file.pwrite(b"abc")
        future.add_done_callback(told.append)
        future.result(TIMEOUT_S)
    queue.close()
    assert told == [future]


def test_a_callback_may_submit_more(tmp_path: Path, backend: str) -> None:
    finished = threading.Event()
    last: list[int] = []
    with IOQueue(backend, max_pending=1) as queue, queue.open(tmp_path / "file", "w") as file:

        def write_next(number: int) -> None:
            if number == 50:
                finished.set()
                return
            future = file.pwrite(bytes([number]), number)
            last.append(number)
            future.add_done_callback(lambda _: write_next(number + 1))

        write_next(0)
        assert finished.wait(TIMEOUT_S)
        assert contents(queue, tmp_path / "file") == bytes(range(50))


def test_a_callback_that_raises_harms_no_other_operation(
    tmp_path: Path, queue: IOQueue, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("a mistake of the program")

    with (
        caplog.at_level(logging.CRITICAL + 1, "concurrent.futures"),
        queue.open(tmp_path / "file", "w") as file,
    ):
        future = file.pwrite(b"abc")
        future.add_done_callback(fail)
        assert future.result(TIMEOUT_S) == 3
        assert file.pwrite(b"def", 3).result(TIMEOUT_S) == 3


def test_a_callback_may_close_the_queue(tmp_path: Path, backend: str) -> None:
    closed = threading.Event()
    queue = IOQueue(backend)

    def close(_: object) -> None:
        queue.close()
        closed.set()

    with queue.open(tmp_path / "file", "w") as file:
        file.pwrite(b"abc").add_done_callback(close)
        assert closed.wait(TIMEOUT_S)
    assert queue.closed


CLOSING_IN_A_CALLBACK = """
import sys
from deepnvme import FaultPlan, IOQueue

# One request after the other, each 5 ms long: most wait when the program ends.
queue = IOQueue(max_requests=1, faults=FaultPlan().delay(delay_us=5000, every=1))
file = queue.open(sys.argv[1], "w")
first, *_ = [file.pwrite(bytes(65536), 65536 * place) for place in range(40)]
first.add_done_callback(lambda _: queue.close())
while not queue.closed:
    pass
"""


CLOSING_IN_A_CALLBACK_AT_THE_END = """
import atexit, sys, threading
from deepnvme import FaultPlan, IOQueue

queue = IOQueue(max_requests=1, faults=FaultPlan().delay(delay_us=5000, every=1))
file = queue.open(sys.argv[1], "w")
first, *_ = [file.pwrite(bytes(65536), 65536 * place) for place in range(40)]
ends, closed = threading.Event(), threading.Event()

def close(_):
    # Not where that write ended before this was added: then this is the thread that sets `ends`.
    if threading.current_thread() is not threading.main_thread():
        ends.wait()
        queue.close()
    closed.set()

first.add_done_callback(close)
# Before the queue's own end, and after the interpreter has waited for threads.
atexit.register(lambda: (ends.set(), closed.wait()))
"""


@pytest.mark.parametrize("program", [CLOSING_IN_A_CALLBACK, CLOSING_IN_A_CALLBACK_AT_THE_END])
def test_program_end_waits_for_a_queue_closed_in_a_callback(program: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", program, str(tmp_path / "file")]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    assert (tmp_path / "file").stat().st_size == 40 * 65536


# --- a full queue ---------------------------------------------------------------------------------


def test_a_full_queue_refuses_when_told_to_and_takes_more_when_there_is_room(
    tmp_path: Path,
) -> None:
    with held("memory", tmp_path / "file", max_pending=2, when_full=WhenFull.RAISE) as (
        queue,
        file,
        first,
    ):
        second = file.pwrite(pattern(CHUNK, seed=2), CHUNK)
        with pytest.raises(QueueFull, match="2 operations are pending") as caught:
            file.pwrite(b"one too many", 2 * CHUNK)
        assert isinstance(caught.value, NVMeError)
        assert queue.stats().pending == 2
        assert [first.result(TIMEOUT_S), second.result(TIMEOUT_S)] == [CHUNK, CHUNK]
        assert file.pwrite(b"now", 2 * CHUNK).result(TIMEOUT_S) == 3


def test_a_refused_operation_lets_its_memory_go(tmp_path: Path) -> None:
    with held("memory", tmp_path / "file", max_pending=1, when_full=WhenFull.RAISE) as (
        _,
        file,
        _first,
    ):
        buffer = bytearray(8)
        with pytest.raises(QueueFull):
            file.pread(buffer)
        buffer.append(0)


def test_a_full_queue_blocks_until_there_is_room_and_loses_nothing(
    tmp_path: Path, backend: str
) -> None:
    with IOQueue(backend, max_pending=3) as queue, queue.open(tmp_path / "file", "w") as file:
        futures = []
        for number in range(200):
            futures.append(file.pwrite(bytes([number]) * 100, number * 100))
            assert queue.stats().pending <= 3
        assert [future.result(TIMEOUT_S) for future in futures] == [100] * 200
        assert_same(
            contents(queue, tmp_path / "file"),
            b"".join(bytes([number]) * 100 for number in range(200)),
        )


def test_other_threads_run_while_one_waits_for_room(tmp_path: Path) -> None:
    with held("memory", tmp_path / "file", max_pending=1, hold_us=BRIEFLY_US) as (_, file, first):
        began = threading.Event()

        def submit() -> int:
            began.set()
            return file.pwrite(b"abc").result(TIMEOUT_S)

        with concurrent.futures.ThreadPoolExecutor(1) as other:
            waiting = other.submit(submit)
            assert began.wait(TIMEOUT_S)
            # this thread has the interpreter meanwhile
            assert not first.done() or waiting.result(TIMEOUT_S) == 3
            assert waiting.result(TIMEOUT_S) == 3


def test_any_whole_number_of_seconds_can_be_waited(tmp_path: Path, queue: IOQueue) -> None:
    with queue.open(tmp_path / "file", "w") as file:
        assert file.pwrite(b"x").result(10**400) == 1


# --- what it shows --------------------------------------------------------------------------------


def test_a_future_shows_file_offset_size_and_state(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with held("memory", path) as (_, file, first):
        later = file.pwrite(b"abc", 7)
        many = file.pwrite_many([b"ab", b"c"], [20, 30])
        cancelled = file.pread(bytearray(3))
        assert cancelled.cancel()
        sync = file.sync()
        assert repr(later) == f"<IOFuture: write of 3 B at offset 7, {path}, under way>"
        assert repr(cancelled) == f"<IOFuture: read of 3 B at offset 0, {path}, cancelled>"
        assert repr(sync) == f"<IOFuture: sync data, {path}, under way>"
        first.result(TIMEOUT_S)
        assert many.result(TIMEOUT_S) == 3
        assert repr(many) == (
            f"<IOFuture: write of 3 B at offset 20 and 1 more, {path}, ended with 3>"
        )
        assert later.result(TIMEOUT_S) == 3
        assert repr(later) == f"<IOFuture: write of 3 B at offset 7, {path}, ended with 3>"
        failed = file.pread(bytearray(10), 1 << 30)
        assert isinstance(failed.exception(TIMEOUT_S), ShortReadError)
        assert f"{path}, failed: " in repr(failed)


def test_showing_a_future_neither_waits_nor_asks_for_its_end(tmp_path: Path) -> None:
    with held("memory", tmp_path / "file") as (_, _, first):
        assert "under way" in repr(first)
        assert not first._seen
        assert "_condition" not in first.__dict__


# --- its native half ------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [True, False])
def test_a_future_that_refers_to_itself_is_collected(tmp_path: Path, *, ends: bool) -> None:
    with held("memory", tmp_path / "file", hold_us=BRIEFLY_US) as (_, file, first):
        buffer = bytearray(b"abc")
        future: Any = file.pwrite(buffer, CHUNK)
        future.itself = future
        if ends:
            assert future.result(TIMEOUT_S) == 3
        watch = weakref.ref(future)
        del future
        gc.collect()
        if not ends:
            assert watch() is not None, "a drive may be at work on its memory"
            assert first.result(TIMEOUT_S) == CHUNK
            until(lambda: not file._queue.stats().pending)
            until(lambda: gc.collect() >= 0 and watch() is None)
        assert watch() is None
        buffer.clear()


def test_a_future_lets_go_of_memory_whose_end_looks_at_it(tmp_path: Path) -> None:
    """What held the memory may run Python at its end, which finds the future under way."""
    seen: list[bool] = []

    class Owner(np.ndarray):
        def __del__(self) -> None:
            seen.append(future.cancelled())
            future.add_done_callback(lambda ended: told.append(ended.result()))

    told: list[int] = []
    with held("memory", tmp_path / "file") as (_, file, first):
        future = file.pwrite(np.full(3, 7, np.uint8).view(Owner), CHUNK)
        assert first.result(TIMEOUT_S) == CHUNK
        assert future.result(TIMEOUT_S) == 3
        until(lambda: told == [3])
    assert seen == [False]


def test_what_runs_at_the_end_of_a_dropped_future_may_wait_for_one_that_ended_with_it(
    tmp_path: Path, queue: IOQueue
) -> None:
    got: list[int] = []
    with queue.open(tmp_path / "file", "w") as file:
        file.truncate(8 * CHUNK)
        dropped, *others = [file.pread(bytearray(CHUNK), CHUNK * number) for number in range(8)]
        neighbour = others[0]
        weakref.finalize(dropped, lambda: got.append(neighbour.result(TIMEOUT_S)))
        del dropped
        assert others[-1].result(TIMEOUT_S) == CHUNK
        until(lambda: got == [CHUNK])


class Interrupted(Exception):  # noqa: N818 - what a signal handler of the program raises
    pass


def interrupt_once(pending: Pending) -> list[int]:
    """Let a signal come the next time that Python is to complete something; return a list of how
    many operations that time had.
    """
    complete = pending._complete_others
    came: list[int] = []

    def interrupted(ended: list[Any], awaited: Any = ()) -> list[int]:
        # Python runs handlers on the main thread only.
        if came or threading.current_thread() is not threading.main_thread():
            return complete(ended, awaited)
        came.append(len(ended) + len(awaited))
        raise Interrupted

    pending._complete_others = interrupted  # type: ignore[method-assign]
    return came


def test_a_coroutine_whose_wake_up_a_signal_interrupts_is_woken_by_the_queues_own_thread(
    tmp_path: Path,
) -> None:
    with held("memory", tmp_path / "file", hold_us=BRIEFLY_US) as (queue, file, first):

        async def main() -> tuple[int, int]:
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda _, what: told.append(what["exception"]))
            # Awaited here first, so that the second one is completed on this loop.
            waiting = asyncio.gather(first, file.pwrite(b"abc", CHUNK))
            came.append(interrupt_once(queue._pending))
            return await asyncio.wait_for(waiting, TIMEOUT_S)

        told: list[Any] = []
        came: list[list[int]] = []
        assert [*asyncio.run(main())] == [CHUNK, 3]
        assert came[0], "nothing was interrupted"
        until(lambda: not queue._pending._futures)


@pytest.mark.parametrize("wants_room", [True, False])
def test_an_interrupted_wait_completes_its_operation_all_the_same(
    tmp_path: Path, *, wants_room: bool
) -> None:
    with held("memory", tmp_path / "file", max_pending=2, hold_us=BRIEFLY_US) as (
        queue,
        file,
        first,
    ):
        buffer = bytearray(b"abc")
        second = file.pwrite(buffer, CHUNK)
        loop = asyncio.new_event_loop()
        room = loop.create_future()
        if wants_room:
            queue._pending._want_room.append((loop, room))
        else:
            first.add_done_callback(lambda _: None)
        came = interrupt_once(queue._pending)
        with pytest.raises(Interrupted):
            first.result(TIMEOUT_S)
        assert came
        assert [first.result(TIMEOUT_S), second.result(TIMEOUT_S)] == [CHUNK, 3]
        buffer.clear()
        if wants_room:
            loop.run_until_complete(asyncio.wait_for(room, TIMEOUT_S))
        loop.close()


def test_native_code_refuses_what_is_no_future(queue: IOQueue) -> None:
    thing: Any = object()
    with pytest.raises(TypeError, match="expected an IOFuture"):
        queue._native.stop(thing)
    with pytest.raises(TypeError, match="expected an IOFuture"):
        queue._native.hear(thing, None)
    nothing: Any = IOFuture
    with pytest.raises(TypeError, match="missing required argument 'waiter'"):
        nothing()
