"""What plain Python threads reach on the same load: the rival that needs no library.

Each thread calls `preadv` or `pwritev` with direct I/O on a buffer of its own, and begins the next
call when that has ended. Shown beside deepnvme by `deepnvme bench`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from deepnvme.measuring.measure import Load, Measured, transfers

__all__ = ["MOST_THREADS", "measure_threads", "percentile"]

MOST_THREADS = 16
"""More do not help: they wait for Python's lock."""


def measure_threads(load: Load, buffers: Sequence[memoryview]) -> Measured:
    """Put the load on its file, with one thread for each buffer.

    CPU seconds are those of this whole process, latencies those of one call each.
    """
    course = _Course(load)
    of_threads: list[list[float]] = [[] for _ in buffers]
    failures: list[OSError] = []

    def work(buffer: memoryview, latencies_s: list[float]) -> None:
        try:
            _transfer(course, load.path, buffer, latencies_s)
        except OSError as error:
            failures.append(error)

    threads = [
        threading.Thread(target=work, args=arguments)
        for arguments in zip(buffers, of_threads, strict=True)
    ]
    # Before the threads start: a drive is at work from the first one on.
    before_s, start_s = time.process_time(), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - before_s
    if failures:
        raise failures[0]
    all_s = sorted(latency for latencies_s in of_threads for latency in latencies_s)
    return Measured(
        nbytes=len(all_s) * load.operation_bytes,
        seconds=seconds,
        cpu_s=cpu_s,
        p50_us=percentile(all_s, 0.50) * 1e6,
        p99_us=percentile(all_s, 0.99) * 1e6,
    )


def percentile(ascending: Sequence[float], share: float) -> float:
    """Return the value that this share of the values does not exceed."""
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]


class _Course:
    """The transfers of a load in order; any thread asks for the next one."""

    def __init__(self, load: Load) -> None:
        self._transfers: Iterator[tuple[bool, int]] = transfers(
            load.workload, load.file_bytes, load.operation_bytes
        )
        self.end_s = time.perf_counter() + load.seconds
        self._asking = threading.Lock()

    def next(self) -> tuple[bool, int]:
        with self._asking:
            return next(self._transfers)


def _transfer(course: _Course, path: Path, buffer: memoryview, latencies_s: list[float]) -> None:
    descriptor = _opened(path)
    try:
        # Once in any case: a median needs a value, however short the time.
        while not latencies_s or time.perf_counter() < course.end_s:
            writes, offset = course.next()
            start_s = time.perf_counter()
            (os.pwritev if writes else os.preadv)(descriptor, [buffer], offset)
            latencies_s.append(time.perf_counter() - start_s)
    finally:
        os.close(descriptor)


def _opened(path: Path) -> int:
    with suppress(OSError):  # a file system may have no direct I/O
        return os.open(path, os.O_RDWR | os.O_DIRECT)
    return os.open(path, os.O_RDWR)
