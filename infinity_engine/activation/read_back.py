"""`ReadBackMemory`: host memory that saved tensors are read back into, used again in a backward.

On the CPU its pages are huge ones where the system has them, and are used again for other sizes: a
new page costs as much time as filling it, and drives take several times as long for many small
pages. What is smaller than a huge page has memory of its own. See decision 0045.
"""

from __future__ import annotations

import numpy as np
import torch

from deepnvme import PageStock
from deepnvme.sizes import PAGE
from infinity_engine.units import MiB

__all__ = ["ReadBackMemory"]

# Bytes: a huge page. Each run takes one of the kernel's areas, of which a process has 65,530.
_PAGES_FROM = 2 * MiB
_ALIGNED_FROM = 16 * PAGE  # bytes; of less, the rest of a page would be more than it is


class ReadBackMemory:
    """Makes flat memory of `device`; of the CPU's, what nothing uses any more stays idle."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pages = PageStock()

    @property
    def idle_bytes(self) -> int:
        """The bytes that it keeps of what nothing uses."""
        return self._pages.idle_bytes

    def take(self, nbytes: int, *, keep: int) -> torch.Tensor:
        """Return memory, with arbitrary content, and keep at most so many bytes idle beside it.

        It is idle when its last view has gone.
        """
        if self._device.type != "cpu" or nbytes < _PAGES_FROM:
            self._pages.keep_at_most(keep)
            return self._small(nbytes)
        return torch.frombuffer(self._pages.take(nbytes, keep=keep), dtype=torch.uint8)

    def _small(self, nbytes: int) -> torch.Tensor:
        if self._device.type != "cpu" or nbytes < _ALIGNED_FROM:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        whole = np.empty(nbytes + PAGE, np.uint8)
        begin = -whole.__array_interface__["data"][0] % PAGE  # where drives write without a copy
        return torch.from_numpy(whole[begin : begin + nbytes])

    def give_back(self) -> None:
        """Give all that is idle back to the system."""
        self._pages.keep_at_most(0)

    def close(self) -> None:
        """Give all back, and from here on what is still used when its use ends."""
        self._pages.close()
