"""How fast a drive is through the public API: one file, one load on it, bytes and CPU seconds
counted.

`measure` and the memory functions touch the machine; the rest is pure, apart from the functions and
clocks that it is given. Shared by `deepnvme bench` and `deepnvme tune`; prints nothing.
"""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TypeVar

from deepnvme.machine.profile import Settings
from deepnvme.memory.pool import Pool
from deepnvme.queue.queue import IOQueue

__all__ = [
    "GIB",
    "MIB",
    "MOST_PENDING",
    "Load",
    "Measured",
    "Workload",
    "cut",
    "fill",
    "in_turn",
    "keep_pending",
    "measure",
    "pending_for",
    "small_pages",
    "transfers",
]

MIB, GIB = 1 << 20, 1 << 30
MOST_PENDING = 64
"""The most operations that are pending: more small ones would wait for one another."""

_Point = TypeVar("_Point")
_Result = TypeVar("_Result")


class Workload(Enum):
    """What is done to the file, from its start to its end and again."""

    READ = "read"
    OVERWRITE = "overwrite"  # of bytes that were written before
    MIXED = "mixed"  # reads and overwrites in turn, each going through the file on its own


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is asked of a drive: operations of one size, one pending on each buffer."""

    path: Path
    file_bytes: int
    workload: Workload
    operation_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured of a load: bytes, time, CPU seconds, latencies.

    `measure` counts the CPU of this whole process, and latencies of whole operations from
    submission to end, waiting included. Other ways of measuring say what theirs are.
    """

    nbytes: int
    seconds: float
    cpu_s: float
    p50_us: float
    p99_us: float

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second, in both directions together."""
        return self.nbytes / self.seconds

    @property
    def cpu_s_per_gib(self) -> float:
        """CPU seconds per GiB moved."""
        return self.cpu_s / (self.nbytes / GIB)


def measure(
    load: Load,
    buffers: Sequence[memoryview],
    settings: Settings,
    *,
    backend: str,
    pool: Pool | None = None,
) -> Measured:
    """Put the load on its file through a queue of its own.

    One operation on each buffer comes before. Only the latencies count these.
    """
    with (
        IOQueue(
            backend,
            chunk_bytes=settings.chunk_bytes,
            inflight_bytes=settings.inflight_bytes,
            user_memory=settings.user_memory,
            pool=pool,
        ) as queue,
        queue.open(load.path, "r+") as file,
    ):
        verbs = (file.pread, file.pwrite)
        course = transfers(load.workload, load.file_bytes, load.operation_bytes)
        starts = (partial(verbs[writes], offset=offset) for writes, offset in course)
        # First reads and writes pay for slots, registration and cold caches.
        keep_pending(starts, buffers, 0.0)
        before_s, start_s = time.process_time(), time.perf_counter()
        nbytes = keep_pending(starts, buffers, load.seconds)
        seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - before_s
        (drive,) = queue.stats().drives.values()
    return Measured(
        nbytes=nbytes, seconds=seconds, cpu_s=cpu_s, p50_us=drive.p50_us, p99_us=drive.p99_us
    )


def pending_for(operation_bytes: int, inflight_bytes: int) -> int:
    """Return how many operations keep those bytes in flight, with the next ones waiting."""
    return min(MOST_PENDING, max(2, 2 * inflight_bytes // operation_bytes))


def transfers(
    workload: Workload, file_bytes: int, operation_bytes: int
) -> Iterator[tuple[bool, int]]:
    """Yield for ever whether the next operation writes, and at which offset."""
    places = {writes: _cycle(file_bytes, operation_bytes) for writes in (False, True)}
    turn = {Workload.READ: (False,), Workload.OVERWRITE: (True,), Workload.MIXED: (False, True)}[
        workload
    ]
    while True:
        for writes in turn:
            yield writes, next(places[writes])


def keep_pending(
    starts: Iterator[Callable[[memoryview], Future[int]]],
    buffers: Iterable[memoryview],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Keep one operation pending on each buffer until the time is up; return the bytes moved."""
    end = clock() + seconds
    pending = deque((buffer, next(starts)(buffer)) for buffer in buffers)
    moved = 0
    while pending:
        # The oldest first: a buffer is used again only when its own operation has ended.
        buffer, future = pending.popleft()
        moved += future.result()
        if clock() < end:
            pending.append((buffer, next(starts)(buffer)))
    return moved


def in_turn(
    points: Sequence[_Point],
    measure_one: Callable[[_Point], _Result],
    *,
    rounds: int,
    seconds: float = float("inf"),
    clock: Callable[[], float] = time.perf_counter,
) -> dict[_Point, list[_Result]]:
    """Measure every point once per round, so that disturbances hit all alike; return the results.

    The first round is always whole; later ones stop when the time is up. Every other round goes
    backwards.
    """
    end = clock() + seconds
    results: dict[_Point, list[_Result]] = {point: [] for point in points}
    for number in range(rounds):
        for point in points if number % 2 == 0 else reversed(points):
            if number > 0 and clock() >= end:
                return results
            results[point].append(measure_one(point))
    return results


def small_pages(nbytes: int) -> memoryview:
    """Return page-aligned memory of ordinary pages, whatever the system's policy on huge ones."""
    # Before its pages are touched: those that are there already would stay huge.
    mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_NOHUGEPAGE)
    return memoryview(mapped)


def fill(buffer: memoryview) -> None:
    """Put random bytes into the buffer: its pages are there then, and no drive compresses them."""
    # One MiB again and again: drawing more would take longer than writing it.
    block = os.urandom(min(MIB, buffer.nbytes))
    for start in range(0, buffer.nbytes, len(block)):
        buffer[start : start + len(block)] = block[: buffer.nbytes - start]


def cut(memory: memoryview, operation_bytes: int, count: int) -> list[memoryview]:
    """Return the first `count` pieces of the memory, each for one operation."""
    return [
        memory[start : start + operation_bytes]
        for start in range(0, count * operation_bytes, operation_bytes)
    ]


def _cycle(file_bytes: int, operation_bytes: int) -> Iterator[int]:
    while True:
        yield from range(0, file_bytes - operation_bytes + 1, operation_bytes)
