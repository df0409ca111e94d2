"""`BorrowedMemory`: leases of memory that torch has allocated, so that records can have it.

The lease keeps the memory until it is closed and its events have passed. Counts nothing: torch's
own memory is outside of the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from infinity_engine.memory.lease import Backing, Lease, Lessor, typed_view
from infinity_engine.memory.ledger import Reservation
from infinity_engine.plan import Tier

if TYPE_CHECKING:
    import torch

__all__ = ["BorrowedMemory", "TensorMemory"]


class _Exposed:
    """The bytes of a tensor, as numpy takes them; an array that is made of it keeps the tensor."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat
        self.__array_interface__ = {
            "shape": (flat.numel(),),
            "typestr": "|u1",
            "data": (flat.data_ptr(), False),
            "version": 3,
        }


class TensorMemory:
    """Flat bytes of a tensor's memory, which is its user's."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat: torch.Tensor | None = flat
        self.nbytes = flat.numel()

    @property
    def view(self) -> memoryview | None:
        """The bytes for I/O; None where no I/O can reach them."""
        assert self._flat is not None, "a lease that is closed has no backing"
        if self._flat.device.type != "cpu":
            return None
        # Not by torch's own numpy(), after which no code could resize the tensor's storage.
        return np.asarray(_Exposed(self._flat)).data

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> torch.Tensor:
        """Return a view from byte `offset` on."""
        assert self._flat is not None, "a lease that is closed has no backing"
        return typed_view(self._flat, dtype, shape, offset)

    def release(self) -> None:
        """Keep it no more."""
        self._flat = None


class BorrowedMemory(Lessor):
    """Makes leases of `tier` from tensors."""

    def __init__(self, tier: Tier, reservation: Reservation) -> None:
        # Of no bytes: only its name is used, by messages.
        super().__init__(tier, reservation)

    def borrow(self, flat: torch.Tensor, *, holder: str) -> Lease:
        """Return a lease of the memory of a flat uint8 tensor, which it keeps."""
        backing = TensorMemory(flat)
        with self._lock:
            return self._lease_of(backing, backing.nbytes, holder)

    def _memory(self, backing: Backing) -> object | None:
        return None

    def _free(self, backing: Backing) -> None:
        assert isinstance(backing, TensorMemory), "leases of this memory are made by `borrow`"
        backing.release()

    def _uncount(self, nbytes: int) -> None:
        """Nothing was counted."""

    def _free_bytes(self) -> int:
        return 0

    def _shut_down(self) -> None:
        """Nothing is left to release."""
