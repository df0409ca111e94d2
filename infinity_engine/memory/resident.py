"""`ResidentMemory`: the process's real size in RAM, to compare with what the engine counts.

Records a baseline when it is made; the budget's promise is that RSS stays under it plus the host's
limit.
"""

from __future__ import annotations

import ctypes
import re
from contextlib import suppress
from pathlib import Path

import psutil

__all__ = ["FreedMemory", "ResidentMemory", "return_freed_memory"]

_HIGH_WATER = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


def return_freed_memory() -> None:
    """Return freed memory that malloc keeps to the system: tensors leave holes of their size.

    Does nothing where the C library has no malloc_trim.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # 0: keep nothing at the heap's top


class FreedMemory:
    """Counts what is freed in pieces: after every `most` bytes, malloc gives back what it keeps.

    As soon as something small lies in the hole that a tensor left, the next tensor of that size
    does not fit there. Without this, a process that many tensors pass through grows by almost all
    of them.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._freed = 0

    def freed(self, nbytes: int) -> None:
        """Note that so many bytes were freed."""
        self._freed += nbytes
        if self._freed >= self._most:
            self._freed = 0
            return_freed_memory()


class ResidentMemory:
    """The process's resident bytes, compared with those at the moment when it was made."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self.baseline_bytes = self.now_bytes()

    def now_bytes(self) -> int:
        """Return what is resident now."""
        return int(self._process.memory_info().rss)

    def above_baseline(self) -> int:
        """Return what is resident now and was not at the baseline; 0 where it has become less."""
        return max(0, self.now_bytes() - self.baseline_bytes)

    def peak_bytes(self) -> int | None:
        """Return the most that was ever resident, since the process began; None: unknown."""
        found = _HIGH_WATER.search(Path("/proc/self/status").read_text())
        # The kernel writes kB and means KiB.
        return int(found[1]) * 1024 if found else None
