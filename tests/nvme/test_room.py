"""Waiting for room in a full queue without blocking the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from deepnvme import ClosedError, FaultPlan, File, IOFuture, IOQueue, QueueFull, WhenFull
from support.nvme_held import held
from support.nvme_io import TIMEOUT_S, contents

T = TypeVar("T")
HOLD_US = 200_000


def run(main: Awaitable[T]) -> T:
    """Run it on an event loop; a hang is a failure."""

    async def bounded() -> T:
        return await asyncio.wait_for(main, TIMEOUT_S)

    return asyncio.run(bounded())


@contextlib.contextmanager
def full(
    path: Path, when_full: WhenFull = WhenFull.RAISE
) -> Iterator[tuple[IOQueue, File, list[IOFuture[int]]]]:
    """Yield a queue for two operations, of which two are pending for a while, a file, and those
    two.
    """
    with held("memory", path, max_pending=2, when_full=when_full, hold_us=HOLD_US) as (
        queue,
        file,
        first,
    ):
        yield queue, file, [first, file.pwrite(b"second", 6)]


def test_a_queue_that_is_not_full_has_room_at_once(tmp_path: Path, queue: IOQueue) -> None:
    async def main() -> bool:
        waiting = asyncio.ensure_future(queue.room())
        await asyncio.sleep(0)
        return waiting.done()

    with queue.open(tmp_path / "file", "w"):
        assert run(main())


def test_coroutines_that_wait_for_room_never_find_the_queue_full(
    tmp_path: Path, backend: str
) -> None:
    async def one(queue: IOQueue, file: File, number: int) -> int:
        await queue.room()
        return await file.pwrite(bytes([number]) * 100, number * 100)

    async def main(queue: IOQueue, file: File) -> list[int]:
        return await asyncio.gather(*(one(queue, file, number) for number in range(100)))

    slow = FaultPlan(seed=1).delay(delay_us=500, every=3)
    with (
        IOQueue(backend, max_pending=2, when_full=WhenFull.RAISE, faults=slow) as queue,
        queue.open(tmp_path / "file", "w") as file,
    ):
        assert run(main(queue, file)) == [100] * 100
        assert contents(queue, tmp_path / "file") == b"".join(
            bytes([number]) * 100 for number in range(100)
        )


def test_failures_and_cancellations_make_room_too(tmp_path: Path) -> None:
    async def main(queue: IOQueue, file: File) -> None:
        fails = [file.pread(bytearray(10), 1 << 40) for _ in range(2)]
        await queue.room()
        assert await file.pwrite(b"abc") == 3
        assert all(future.exception(0) for future in fails)

    with full(tmp_path / "file", WhenFull.BLOCK) as (queue, file, (_, second)):
        assert second.cancel()
        run(main(queue, file))


def test_waiting_for_room_leaves_the_event_loop_to_others(tmp_path: Path) -> None:
    async def main(queue: IOQueue) -> int:
        waiting = asyncio.ensure_future(queue.room())
        turns = 0
        while not waiting.done():
            await asyncio.sleep(0.001)
            turns += 1
        return turns

    with full(tmp_path / "file") as (queue, _, (first, second)):
        assert run(main(queue)) > 1
        assert [first.result(TIMEOUT_S), second.result(TIMEOUT_S)] == [65536, 6]


def test_a_cancelled_wait_for_room_takes_no_room_and_harms_no_other(tmp_path: Path) -> None:
    async def main(queue: IOQueue, file: File) -> int:
        given_up, other = asyncio.ensure_future(queue.room()), asyncio.ensure_future(queue.room())
        await asyncio.sleep(0)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        await other
        return await file.pwrite(b"abc")

    with full(tmp_path / "file") as (queue, file, _):
        assert run(main(queue, file)) == 3


def test_an_event_loop_that_closed_meanwhile_keeps_no_room_from_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def abandon(queue: IOQueue) -> None:
        waiting = asyncio.ensure_future(queue.room())
        await asyncio.sleep(0)
        assert not waiting.done()

    with full(tmp_path / "file") as (queue, _, (first, second)):
        run(abandon(queue))
        run(queue.room())
        assert [first.result(TIMEOUT_S), second.result(TIMEOUT_S)] == [65536, 6]
    assert not caplog.records


def test_room_comes_when_the_queue_closes_and_submitting_says_that_it_did(tmp_path: Path) -> None:
    async def main(queue: IOQueue, file: File) -> None:
        waiting = asyncio.ensure_future(queue.room())
        await asyncio.sleep(0)
        threading.Thread(target=queue.close).start()
        await waiting
        with pytest.raises((ClosedError, QueueFull)):  # closing refuses at once and drains then
            file.pwrite(b"abc")

    with full(tmp_path / "file") as (queue, file, _):
        run(main(queue, file))
        queue.close()
        run(queue.room())


def test_two_event_loops_in_two_threads_both_get_room(tmp_path: Path, backend: str) -> None:
    """Either may take it first, so full queues are waited for again."""
    wrong: list[BaseException] = []

    async def one(queue: IOQueue, file: File, number: int) -> None:
        while True:
            await queue.room()
            with contextlib.suppress(QueueFull):
                assert await file.pwrite(bytes([number]) * 10, number * 10) == 10
                return

    async def main(queue: IOQueue, file: File, numbers: range) -> None:
        await asyncio.gather(*(one(queue, file, number) for number in numbers))

    def work(queue: IOQueue, file: File, numbers: range) -> None:
        try:
            run(main(queue, file, numbers))
        except BaseException as error:  # shown below
            wrong.append(error)

    with (
        IOQueue(backend, max_pending=2, when_full=WhenFull.RAISE) as queue,
        queue.open(tmp_path / "file", "w") as file,
    ):
        threads = [
            threading.Thread(target=work, args=(queue, file, range(n * 50, n * 50 + 50)))
            for n in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert not wrong
        assert contents(queue, tmp_path / "file") == b"".join(
            bytes([number]) * 10 for number in range(100)
        )
