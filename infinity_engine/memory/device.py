"""`DeviceMemory`: the device memory of one reservation, as leases of what the accelerator allocates.

Counts and keeps the limit; how the device hands out memory is the accelerator's business. What it was given back is the
device's again, and views of it are dead, unless the lease was asked for with views that keep it. Where DEVICE is the
host's own memory, all views keep it. What is kept counts as held for as long as there is a view.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from infinity_engine.errors import CapacityError
from infinity_engine.memory.lease import Backing, Lease, Lessor, NoBytes
from infinity_engine.memory.ledger import Reservation
from infinity_engine.plan import Tier

if TYPE_CHECKING:
    import torch

__all__ = ["Allocator", "DeviceMemory", "SharedBacking", "Views"]


class Views(Enum):
    """What views of a lease are worth once it is closed and its events have passed."""

    DIE = "die"  # Nothing: the device has the memory again.
    KEEP = "keep"  # They keep the memory, which goes back with the last of them.


class SharedBacking(Backing, Protocol):
    """Memory that can be shared with whoever has views of it."""

    def shared(self) -> tuple[torch.Tensor, object]:
        """Return all bytes as a flat tensor, and what lives until the last view of that is gone. Keep neither."""


_Buffer = TypeVar("_Buffer", bound=SharedBacking)


class Allocator(Protocol[_Buffer]):
    """The part of an accelerator that is needed here."""

    def allocate(self, nbytes: int) -> _Buffer:
        """Return a new buffer of the device's memory; raise CapacityError where there is none."""

    def free(self, buffer: _Buffer) -> None:
        """Take it back."""


class DeviceMemory(Lessor, Generic[_Buffer]):
    """Device memory of `accelerator`, at most what `reservation` promises at any time."""

    def __init__(self, accelerator: Allocator[_Buffer], reservation: Reservation) -> None:
        super().__init__(Tier.DEVICE, reservation)
        self._accelerator = accelerator
        self._gone: deque[_Buffer] = deque()  # the last view is gone, and the accelerator does not know yet

    def lease(self, nbytes: int, *, holder: str, views: Views = Views.DIE) -> Lease:
        """Return a buffer of `nbytes` on the device.

        Raises:
            CapacityError: the reservation has not so much left, and no closed lease will give it back.
        """
        return self._lease(
            nbytes,
            holder,
            take=lambda: self._take(nbytes, views),
            in_the_way=lambda _: True,
            refusal=lambda: self._refusal(nbytes, holder),
        )

    def _take(self, nbytes: int, views: Views) -> Backing | None:
        if not nbytes:
            return NoBytes()
        if nbytes > self._free_bytes():
            return None
        self._free_gone()
        self.reservation.hold(nbytes)
        try:
            buffer = self._accelerator.allocate(nbytes)
        except BaseException as failure:
            self.reservation.release(nbytes)
            # Free bytes that lie in pieces, or that others took: what is closing may make room.
            if isinstance(failure, CapacityError) and self._closing:
                return None
            raise
        if views is Views.DIE or self.reservation.tier is not Tier.DEVICE:
            return buffer
        tensor, owner = buffer.shared()
        weakref.finalize(owner, self._gone.append, buffer)
        return _Kept(tensor, owner)

    def _memory(self, backing: Backing) -> object | None:
        if isinstance(backing, _Kept):
            return backing.owner()
        if isinstance(backing, NoBytes) or self.reservation.tier is Tier.DEVICE:
            return None
        import torch

        return backing.tensor(torch.uint8, (backing.nbytes,)).untyped_storage()

    def _free(self, backing: Backing) -> None:
        if isinstance(backing, _Kept):
            backing.release()
        elif not isinstance(backing, NoBytes):
            self._accelerator.free(backing)  # type: ignore[arg-type]  # only `_take` makes backings of this pool

    def _free_gone(self) -> None:
        while self._gone:
            self._accelerator.free(self._gone.popleft())

    def _uncount(self, nbytes: int) -> None:
        self.reservation.release_soon(nbytes)

    def _free_bytes(self) -> int:
        return self.reservation.nbytes - self.reservation.held

    def _shut_down(self) -> None:
        self._free_gone()


class _Kept:
    """A buffer that its views keep: the tensor that they are views of."""

    def __init__(self, tensor: torch.Tensor, owner: object) -> None:
        self.nbytes = tensor.numel()
        self._tensor: torch.Tensor | None = tensor
        self._owner = weakref.ref(owner)

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> torch.Tensor:
        """Return a view from byte `offset` on."""
        assert self._tensor is not None, "a lease that is closed has no backing"
        return self._tensor[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))

    def owner(self) -> object:
        """Return what lives until the last view is gone."""
        return self._owner()

    def release(self) -> None:
        """Leave the memory to its views."""
        self._tensor = None
