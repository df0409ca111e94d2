"""Gives freed memory that malloc keeps back to the system, so that the process's real size in RAM
stays near what the engine counts.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

__all__ = ["FreedMemory", "return_freed_memory"]


def return_freed_memory() -> None:
    """Return freed memory that malloc keeps to the system: tensors leave holes of their size.

    Does nothing where the C library has no malloc_trim.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # 0: keep nothing at the heap's top


class FreedMemory:
    """Counts what is freed, and after every `return_after_bytes` has malloc return what it keeps.

    As soon as something small lies in the hole that a tensor left, the next tensor of that size
    does not fit there. Without this, a process that many tensors pass through grows by almost all
    of them.
    """

    def __init__(self, return_after_bytes: int) -> None:
        self._return_after_bytes = return_after_bytes
        self._freed = 0

    def freed(self, nbytes: int) -> None:
        """Note that so many bytes were freed."""
        self._freed += nbytes
        if self._freed >= self._return_after_bytes:
            self._freed = 0
            return_freed_memory()
