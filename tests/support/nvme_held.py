"""Queues at a standstill, for tests of what happens meanwhile: a drive that is busy, a completing
thread that is.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from deepnvme import FaultPlan, File, IOFuture, IOQueue, WhenFull
from support.nvme_io import CHUNK, TIMEOUT_S, pattern

HOLD_US = 700_000
COMPLETER = "deepnvme-futures"  # the name of a queue's own thread
# after which what should take milliseconds counts as hanging, where it is known to have done so
HANG_S = 10.0


@contextmanager
def held(
    backend: str,
    path: Path,
    *,
    max_pending: int = 1024,
    when_full: WhenFull = WhenFull.BLOCK,
    hold_us: int = HOLD_US,
    faults: FaultPlan | None = None,
) -> Iterator[tuple[IOQueue, File, IOFuture[int]]]:
    """Yield a queue, a file of three chunks, and the write of its first chunk, which is under way
    and slow.

    `faults` come on top; that write is the first request they see.
    """
    if backend != "memory":
        path.write_bytes(bytes(3 * CHUNK))
    slow = (faults or FaultPlan()).delay(delay_us=hold_us, nth=1)
    limits = {"chunk_bytes": CHUNK, "inflight_bytes": CHUNK, "max_pending": max_pending}
    with (
        IOQueue(backend, **limits, when_full=when_full, faults=slow) as queue,  # type: ignore[arg-type]
        queue.open(path, "w") as file,
    ):
        file.truncate(3 * CHUNK)
        first = file.pwrite(pattern(CHUNK, seed=1))
        until(lambda: any(drive.chunks for drive in queue.stats().drives.values()))
        yield queue, file, first


@contextmanager
def completer_held(file: File) -> Iterator[threading.Event]:
    """Keep the queue's own thread in a callback until the event that is yielded is set, at the
    latest at the end.
    """
    begun, release = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        if threading.current_thread().name == COMPLETER:
            begun.set()
            release.wait(TIMEOUT_S)

    try:
        while not begun.is_set():
            future = file.pwrite(b"")
            future.add_done_callback(hold)  # runs here if it has ended: then once more
            future.result(TIMEOUT_S)
            begun.wait(0.1)
        yield release
    finally:
        release.set()


def until(holds: Callable[[], object]) -> None:
    """Wait for what another thread is about to bring about; fail when it does not."""
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.001)


def until_waiting(thread: threading.Thread) -> None:
    """Wait until the thread waits for an operation, or has done so and ended."""

    def waits() -> bool:
        if not thread.is_alive():
            return True
        frame = sys._current_frames().get(thread.ident or 0)
        while frame is not None and frame.f_code is not IOFuture._wait.__code__:
            frame = frame.f_back
        return frame is not None

    until(waits)
