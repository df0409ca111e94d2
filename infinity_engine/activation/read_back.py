"""`ReadBackMemory`: host memory that saved tensors are read back into, used again in a backward.

Fresh memory costs a page fault for each of its pages: a third of what the drive's thread took. See
decision 0045.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray

from deepnvme.sizes import PAGE

__all__ = ["ReadBackMemory"]

_Bytes = NDArray[np.uint8]
_ALIGNED_FROM = 16 * PAGE  # bytes; of less, the rest of a page would be more than it is


class ReadBackMemory:
    """Makes flat memory of `device`. On the CPU it begins on a page, so that drives write to it,
    and what nothing uses any more is kept for the next of its size, until `keep_at_most` lets it
    go.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle: dict[int, list[_Bytes]] = {}  # by size
        self._idle_bytes = 0
        self._gone: deque[_Bytes] = deque()  # what was used until now
        self._closed = False

    @property
    def idle_bytes(self) -> int:
        """The bytes that it keeps of what nothing uses."""
        self._note_gone()
        return self._idle_bytes

    def take(self, nbytes: int) -> torch.Tensor:
        """Return uninitialized memory. It is free again when its last view has gone."""
        if self._device.type != "cpu" or nbytes < _ALIGNED_FROM:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._note_gone()
        idle = self._idle.get(nbytes)
        if idle:
            whole = idle.pop()
            self._idle_bytes -= nbytes
        else:
            whole = np.empty(nbytes + PAGE, np.uint8)
        begin = -whole.__array_interface__["data"][0] % PAGE
        # An array of its own for each use: the tensor, and all that shares its storage, keeps it.
        used = whole[begin : begin + nbytes]
        weakref.finalize(used, self._end_use, whole)
        return torch.from_numpy(used)

    def keep_at_most(self, nbytes: int) -> None:
        """Of the memory that nothing uses, keep at most so many bytes, and give the rest back."""
        self._note_gone()
        while self._idle_bytes > nbytes:
            # The size that came first: the blocks that had it may all be done.
            size, idle = next(iter(self._idle.items()))
            if idle:
                idle.pop()
                self._idle_bytes -= size
            else:
                del self._idle[size]

    def close(self) -> None:
        """Give all back, and from here on what is still used when its use ends."""
        self._closed = True
        self.keep_at_most(0)

    # Runs wherever a graph goes, so it only appends.
    def _end_use(self, whole: _Bytes) -> None:
        if not self._closed:
            self._gone.append(whole)

    def _note_gone(self) -> None:
        while self._gone:
            whole = self._gone.popleft()
            size = _size_of(whole)
            self._idle.setdefault(size, []).append(whole)
            self._idle_bytes += size


def _size_of(whole: _Bytes) -> int:
    """Return the bytes for use in it: the page beside them lets these begin where a page does."""
    return whole.nbytes - PAGE
