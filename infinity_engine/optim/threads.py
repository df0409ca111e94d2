"""Threads for the update kernels on given cores; how many of them the memory's bandwidth feeds.

The threads sleep between updates and never spin, so that torch and the I/O keep their cores. A pool
cannot be used in a forked child.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from infinity_engine import _native
from infinity_engine.errors import ConfigError
from infinity_engine.optim.subgroup import segment_dtype

__all__ = ["ENOUGH", "UpdateThreads", "bandwidth_by_threads", "knee"]

ENOUGH = 0.95  # At this share of the best bandwidth a further core is not worth having.
# Of fp32 values: the gradient is read, the master and two moments are read and written.
_BYTES_PER_ELEMENT = 28


class UpdateThreads:
    """A pool of threads, each pinned to one of the cores given."""

    def __init__(self, cores: Sequence[int]) -> None:
        """Start one thread per entry; a core may be named more than once.

        Raises:
            ConfigError: there are no cores, or the system refuses one.
        """
        self.cores = tuple(cores)
        try:
            self.native = _native.ThreadPool(self.cores)
        except (ValueError, OSError, RuntimeError) as refusal:
            raise ConfigError(
                field="cores",
                value=self.cores,
                expected=f"cores that this process may run on (the system says: {refusal})",
            ) from refusal

    @classmethod
    def anywhere(cls, count: int) -> UpdateThreads:
        """Return `count` threads that the system places on any cores."""
        return cls([-1] * count)

    @classmethod
    def within(cls, cores: Collection[int], count: int) -> UpdateThreads:
        """Return `count` threads that the system places on these cores, and nowhere else.

        Raises:
            ConfigError: the system refuses these cores.
        """
        # Of this thread alone: 0 is the calling thread, not the process.
        before = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(0, cores)
        except (OSError, ValueError) as refusal:
            raise ConfigError(
                field="cores",
                value=sorted(cores),
                expected=f"cores that this process may run on (the system says: {refusal})",
            ) from refusal
        try:
            return cls.anywhere(count)  # new threads inherit the affinity of this one
        finally:
            os.sched_setaffinity(0, before)

    def __len__(self) -> int:
        """How many threads there are."""
        return len(self.native)


def bandwidth_by_threads(
    cores: Sequence[int],
    *,
    home: str,
    numel: int = 1 << 24,
    rounds: int = 5,
    clock: Callable[[], float] | None = None,
) -> Mapping[int, float]:
    """Measure the bytes per second of a sweep over an update's streams with 1, 2, ... of the cores.

    Takes 16 bytes of memory per element; the default is 256 MiB, much more than caches hold.
    """
    now = clock or time.perf_counter
    # Written, not only allocated: untouched pages would all be the kernel's one page of zeros.
    streams = [np.ones(numel, np.float32) for _ in range(4)]
    record = np.zeros(1, segment_dtype())
    # Formats 1 are fp32.
    record["numel"], record["gradient_format"], record["state_format"] = numel, 1, 1
    record["gradient"], record["master"] = streams[0].ctypes.data, streams[1].ctypes.data
    record["states"][0, :2] = [stream.ctypes.data for stream in streams[2:]]
    rates = {}
    for count in range(1, len(cores) + 1):
        threads = UpdateThreads(cores[:count])
        seconds = []
        for _ in range(rounds):
            started = now()
            _native.sweep(record, threads.native, home)
            seconds.append(now() - started)
        rates[count] = numel * _BYTES_PER_ELEMENT / statistics.median(seconds)
    return MappingProxyType(rates)


def knee(rates: Mapping[int, float]) -> int:
    """Return the fewest threads that reach ENOUGH of the best rate.

    Raises:
        ConfigError: nothing was measured.
    """
    if not rates:
        raise ConfigError(
            field="rates", value=dict(rates), expected="a rate for at least one number of threads"
        )
    return min(count for count, rate in rates.items() if rate >= ENOUGH * max(rates.values()))
