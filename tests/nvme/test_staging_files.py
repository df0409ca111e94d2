"""Device arrays given to files: which operations take that way, and that a queue's life covers
them.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deepnvme.compat
import deepnvme.queue.queue
from deepnvme import ClosedError, FaultPlan, IOQueue, QueueFull, ShortReadError, WhenFull
from support.nvme_held import until
from support.nvme_io import TIMEOUT_S, assert_same, pattern
from support.nvme_programs import output_of, run_program


class OnDevice:
    """An array that `memory_of` takes for a GPU's; its copies wait until `held` is set."""

    __cuda_array_interface__ = "here"

    def __init__(self, data: bytes, held: threading.Event | None = None) -> None:
        self.values = np.frombuffer(bytearray(data), np.uint8)
        self.nbytes = len(data)
        self._held = held

    def begin(self) -> None:
        pass

    def synchronize(self) -> None:
        assert self._held is None or self._held.wait(TIMEOUT_S)

    def to_host(self, start: int, target: memoryview) -> Any:
        target[:] = self.values[start : start + len(target)].data
        return self

    def to_device(self, start: int, source: memoryview) -> Any:
        self.values[start : start + len(source)] = source
        return self


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the library take these arrays for a GPU's."""
    for module in (deepnvme.queue.queue, deepnvme.compat):
        monkeypatch.setattr(
            module,
            "device_array_of",
            lambda thing, writable: thing if isinstance(thing, OnDevice) else None,
        )


@pytest.fixture
def queue() -> Iterator[IOQueue]:
    with IOQueue("threads") as queue:
        yield queue


def test_reads_and_writes_of_device_arrays_are_staged(tmp_path: Path, queue: IOQueue) -> None:
    data = pattern(100_000, seed=1)
    with queue.open(tmp_path / "file", "w") as file:
        assert file.pwrite(OnDevice(data), 5).result(TIMEOUT_S) == 100_000
        back, short = OnDevice(bytes(100_000)), OnDevice(bytes(100_000))
        assert file.pread(back, 5).result(TIMEOUT_S) == 100_000
        assert file.readinto(short, 99_005).result(TIMEOUT_S) == 1000
        with pytest.raises(ShortReadError):
            file.pread(short, 6).result(TIMEOUT_S)
    assert_same(back.values, data)
    assert_same((tmp_path / "file").read_bytes()[5:], data)


def test_a_handle_of_compat_moves_device_arrays(tmp_path: Path) -> None:
    data = pattern(5000, seed=1)
    back = OnDevice(bytes(5000))
    with closing(deepnvme.compat.aio_handle()) as handle:
        assert handle.sync_pwrite(OnDevice(data), tmp_path / "file") == 1
        assert handle.sync_pread(back, tmp_path / "file") == 1
    assert_same(back.values, data)


def test_what_is_neither_host_nor_device_memory_is_refused_as_before(
    tmp_path: Path, queue: IOQueue
) -> None:
    with (
        queue.open(tmp_path / "file", "w") as file,
        pytest.raises(TypeError, match="buffer protocol"),
    ):
        file.pwrite(object())
    with queue.open(tmp_path / "file", "w") as file, pytest.raises(ValueError, match="negative"):
        file.pwrite(OnDevice(b"abc"), -1)


def test_a_sync_waits_for_staged_writes(tmp_path: Path, queue: IOQueue) -> None:
    held = threading.Event()
    with queue.open(tmp_path / "file", "w") as file:
        write = file.pwrite(OnDevice(b"abc", held))
        sync = file.sync()
        assert queue.stats().pending == 2
        assert not sync.done()
        held.set()
        assert sync.result(TIMEOUT_S) == 0
        assert write.done()


def test_staged_operations_are_awaited_on_an_event_loop(tmp_path: Path, queue: IOQueue) -> None:
    async def main() -> list[int]:
        held = threading.Event()
        with queue.open(tmp_path / "file", "w") as file:
            operations = asyncio.gather(
                file.pwrite(OnDevice(b"abc", held)), file.sync(), file.pwrite(OnDevice(b"d"), 3)
            )
            asyncio.get_running_loop().call_later(0.05, held.set)
            done = await asyncio.wait_for(operations, TIMEOUT_S)
            with pytest.raises(ShortReadError):
                await asyncio.wait_for(file.pread(OnDevice(bytes(9))), TIMEOUT_S)
            return list(done)

    assert asyncio.run(main()) == [3, 0, 1]


def test_room_comes_when_a_staged_operation_ends(tmp_path: Path) -> None:
    held = threading.Event()

    async def main(queue: IOQueue) -> int:
        with queue.open(tmp_path / "file", "w") as file:
            first = file.pwrite(OnDevice(b"abc", held))
            room = asyncio.ensure_future(queue.room())
            await asyncio.sleep(0.05)
            assert not room.done()
            held.set()
            await asyncio.wait_for(room, TIMEOUT_S)
            return await file.pwrite(OnDevice(b"de"), 3) + await first

    with IOQueue("threads", max_pending=1, when_full=WhenFull.RAISE) as queue:
        assert asyncio.run(main(queue)) == 5


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt])
def test_the_staging_thread_goes_on_after_a_callback_that_raises(
    raised: type[BaseException],
    tmp_path: Path,
    queue: IOQueue,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: object) -> None:
        raise raised

    shown: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda details: shown.append(details.exc_type))
    held = threading.Event()
    with queue.open(tmp_path / "file", "w") as file:
        first = file.pwrite(OnDevice(b"abc", held))
        first.add_done_callback(fail)
        held.set()
        assert first.result(TIMEOUT_S) == 3
        assert file.pwrite(OnDevice(b"def"), 3).result(TIMEOUT_S) == 3
    assert shown == ([] if raised is SystemExit else [raised])


def test_a_queue_told_to_refuse_refuses_device_arrays_too(tmp_path: Path) -> None:
    held = threading.Event()
    with (
        IOQueue("threads", max_pending=1, when_full=WhenFull.RAISE) as queue,
        queue.open(tmp_path / "file", "w") as file,
    ):
        first = file.pwrite(OnDevice(b"abc", held))
        with pytest.raises(QueueFull):
            file.pwrite(OnDevice(b"def"))
        held.set()
        assert first.result(TIMEOUT_S) == 3


def test_closing_a_queue_finishes_what_is_staged(tmp_path: Path) -> None:
    held = threading.Event()
    queue = IOQueue("threads")
    file = queue.open(tmp_path / "file", "w")
    futures = [file.pwrite(OnDevice(pattern(5000, n), held), 5000 * n) for n in range(20)]
    threading.Timer(0.1, held.set).start()
    queue.close()
    assert [future.done() for future in futures] == [True] * 20
    assert_same((tmp_path / "file").read_bytes(), b"".join(pattern(5000, n) for n in range(20)))
    with pytest.raises(ClosedError):
        file.pwrite(OnDevice(b"abc"))


@pytest.mark.parametrize("staged", [True, False])
def test_a_callback_may_close_a_queue_with_staged_operations(tmp_path: Path, staged: bool) -> None:
    closed = threading.Event()
    held = threading.Event()
    # so that the callback is called back
    queue = IOQueue("threads", faults=FaultPlan().delay(delay_us=100_000, nth=1))

    def close(_: object) -> None:
        queue.close()
        closed.set()

    file = queue.open(tmp_path / "file", "w")
    futures = [file.pwrite(OnDevice(b"abc", held), 3 * n) for n in range(5)]
    (futures[0] if staged else file.pwrite(b"x" * 10, 100)).add_done_callback(close)
    if not staged:
        assert closed.wait(TIMEOUT_S)
    held.set()
    assert closed.wait(TIMEOUT_S)
    assert [future.result(TIMEOUT_S) for future in futures] == [3] * 5
    assert queue.closed


def test_a_queue_that_nobody_holds_is_collected_though_it_staged_something(tmp_path: Path) -> None:
    queue = IOQueue("threads")
    queue.open(tmp_path / "file", "w").pwrite(OnDevice(b"abc")).result(TIMEOUT_S)
    threads = list(queue._staging._threads)
    watch = weakref.ref(queue)
    del queue
    gc.collect()
    until(lambda: watch() is None)  # its own threads may be at work on the last of it
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def test_what_is_staged_when_a_queue_is_let_go_of_is_finished(tmp_path: Path) -> None:
    held = threading.Event()
    queue = IOQueue("threads")
    future = queue.open(tmp_path / "file", "w").pwrite(OnDevice(b"abc", held))
    threading.Timer(0.1, held.set).start()
    del queue
    gc.collect()
    assert future.result(TIMEOUT_S) == 3
    assert (tmp_path / "file").read_bytes() == b"abc"


EXITING = """
import sys, time
import deepnvme.queue.queue
from deepnvme import IOQueue

class Array:
    __cuda_array_interface__ = "here"
    nbytes = 3
    def begin(self):
        pass
    def synchronize(self):
        time.sleep(0.02)
    def to_host(self, start, target):
        target[:] = b"abc"
        return self

deepnvme.queue.queue.device_array_of = lambda thing, writable: thing
queue = IOQueue("threads")
file = queue.open(sys.argv[1], "w")
futures = [file.pwrite(Array(), 3 * n) for n in range(20)]
"""


def test_a_program_that_ends_with_staged_operations_finishes_them_in_silence(
    tmp_path: Path,
) -> None:
    done = run_program(EXITING, tmp_path / "file", folder=tmp_path)
    assert (output_of(done), done.stderr) == ("", "")
    assert (tmp_path / "file").read_bytes() == b"abc" * 20
