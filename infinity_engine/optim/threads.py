"""Threads for the update kernels, on given cores or on any.

The threads sleep between updates and never spin, so that torch and the I/O keep their cores. A pool
cannot be used in a forked child.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from infinity_engine import _native
from infinity_engine.errors import ConfigError

__all__ = ["UpdateThreads"]


class UpdateThreads:
    """A pool of threads, each pinned to one core, or none of them."""

    def __init__(self, cores: Sequence[int]) -> None:
        """Start one thread per entry, pinned to that core; -1 pins to none. Cores may repeat.

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
