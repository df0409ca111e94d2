"""deepnvme as the benches of its streams run it: whole files through the public API, in a process
of its own.

Imports deepnvme only when called: benches load this before they have entered the environment that
holds it. Called by scripts/bench/nvme_vs_fio, nvme_settings and others that measure a drive.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import bench
import env
import fio
from fio import CPU, GIB, RATE, THREAD_CPU

if TYPE_CHECKING:
    from deepnvme.measuring.measure import Workload

__all__ = [
    "INFLIGHT",
    "MIB",
    "Memory",
    "Stream",
    "data_file",
    "drop_from_cache",
    "folder_to_measure",
    "kind",
    "least_seconds",
    "stream",
]

MIB = 1 << 20
INFLIGHT = 16 * MIB


class Memory(Enum):
    """Whose memory deepnvme moves."""

    POOL = auto()
    ZERO_COPY = auto()  # ordinary small pages, page-aligned, used as they are
    BOUNCE = auto()  # the same, copied through the queue's own huge pages


@dataclass(frozen=True)
class Stream:
    """One measurement of deepnvme."""

    path: Path
    file_bytes: int
    workload: Workload
    seconds: float
    backend: str
    memory: Memory = Memory.POOL
    operation_bytes: int = 256 * MIB
    pending: int = 2
    chunk_bytes: int = MIB
    memory_bytes: int | None = None  # used again and again; None: what pending operations need


def kind(workload: Workload) -> str:
    """Return how figures name a workload."""
    return workload.name.lower()


@contextmanager
def folder_to_measure() -> Iterator[Path]:
    """Make a folder on the drive that INFINITY_BENCH_DIR names, else on the checkout's, and remove
    it at the end.
    """
    parent = Path(os.environ.get("INFINITY_BENCH_DIR", env.BUILD))
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=parent) as folder:
        yield Path(folder)


@contextmanager
def data_file(nbytes: int) -> Iterator[Path]:
    """Make a file of random bytes, all of them on the drive, and remove it at the end."""
    with folder_to_measure() as folder:
        path = folder / "data"
        block = os.urandom(16 * MIB)
        with path.open("wb") as file:
            for _ in range(nbytes // len(block)):
                file.write(block)
        drop_from_cache(path)
        yield path


def drop_from_cache(path: Path) -> None:
    """Have a file on the drive, and nowhere in the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def least_seconds(
    read: float, written: float, *, reads: float, writes: float, mixed: float
) -> float:
    """Return the seconds that a drive takes at least for so many bytes, at its rates in bytes per
    second.

    Both directions at once as far as they are even, the rest in its one direction.
    """
    both = min(read, written)
    return 2 * both / mixed + (read - both) / reads + (written - both) / writes


def stream(planned: Stream) -> dict[str, float]:
    """Move bytes for the planned time and return the numbers."""
    import deepnvme
    from deepnvme.measuring.measure import cut, fill, keep_pending, small_pages, transfers

    wanted = (
        deepnvme.UserMemory.BOUNCE
        if planned.memory is Memory.BOUNCE
        else deepnvme.UserMemory.ZERO_COPY
    )
    window = planned.memory_bytes or planned.pending * planned.operation_bytes
    pool = deepnvme.Pool(window) if planned.memory is Memory.POOL else None
    take = pool.buffer if pool is not None else small_pages
    memory = take(window)
    fill(memory)
    piece_bytes = min(planned.operation_bytes, window)
    pieces = cut(memory, piece_bytes, window // piece_bytes)
    buffers = [pieces[number % len(pieces)] for number in range(planned.pending)]
    try:
        queue = deepnvme.IOQueue(
            planned.backend,
            chunk_bytes=planned.chunk_bytes,
            inflight_bytes=INFLIGHT,
            user_memory=wanted,
            pool=pool,
        )
    except deepnvme.BackendUnavailableError as reason:
        raise bench.UnavailableError(str(reason)) from None
    with queue, queue.open(planned.path, "r+") as file:
        course = transfers(planned.workload, planned.file_bytes, planned.operation_bytes)
        moved = 0

        def start(writes: bool, offset: int, buffer: memoryview) -> deepnvme.IOFuture[int]:
            places = range(offset, offset + planned.operation_bytes, piece_bytes)
            if len(places) == 1:
                return (file.pread, file.pwrite)[writes](buffer, offset)
            return (file.pread_many, file.pwrite_many)[writes]([buffer] * len(places), places)

        def work() -> None:
            nonlocal moved
            starts = (partial(start, writes, offset) for writes, offset in course)
            moved = keep_pending(starts, buffers, planned.seconds)

        before_s = _io_threads_s()
        cost = bench.cost_of(work)
        threads_s = _io_threads_s() - before_s
        (drive,) = queue.stats().drives.values()
    gib = moved / GIB
    return {
        RATE: gib / cost.wall_s,
        CPU: cost.cpu_s / gib,
        THREAD_CPU: threads_s / gib,
        fio.P99: drive.p99_us / 1e3,
    }


def _io_threads_s() -> float:
    """Return the CPU time of this process's threads that do I/O, as its scheduler counts it."""
    tasks = Path("/proc/self/task").iterdir()
    mine = (task for task in tasks if (task / "comm").read_text().strip() == "deepnvme-io")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in mine) / 1e9
