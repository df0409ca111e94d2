"""`ReadBackMemory`: host memory that saved tensors are read back into, used again in a backward.

On the CPU its pages are huge ones where the system has them, and are used again for other sizes: a
new page costs as much time as filling it, and drives take several times as long for many small
pages. See decision 0045.
"""

from __future__ import annotations

import torch

from deepnvme import PageStock
from deepnvme.sizes import PAGE

__all__ = ["ReadBackMemory"]

_PAGES_FROM = 16 * PAGE  # bytes; of less, the rest of a page would be more than it is


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
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return torch.frombuffer(self._pages.take(nbytes, keep=keep), dtype=torch.uint8)

    def give_back(self) -> None:
        """Give all that is idle back to the system."""
        self._pages.keep_at_most(0)

    def close(self) -> None:
        """Give all back, and from here on what is still used when its use ends."""
        self._pages.close()
