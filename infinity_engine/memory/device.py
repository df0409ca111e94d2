"""`DeviceMemory`: the device memory of one reservation, as leases of what the accelerator allocates.

Counts and keeps the limit; how the device hands out memory is the accelerator's business. What it was given back is the
device's again, and views of it are dead. Where DEVICE is the host's own memory, views keep it, and so it counts as held
for as long as there is one.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from infinity_engine.errors import CapacityError
from infinity_engine.memory.lease import Backing, Lease, Lessor, NoBytes
from infinity_engine.memory.ledger import Reservation
from infinity_engine.plan import Tier

__all__ = ["Allocator", "DeviceMemory"]

_Buffer = TypeVar("_Buffer", bound=Backing)


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

    def lease(self, nbytes: int, *, holder: str) -> Lease:
        """Return a buffer of `nbytes` on the device.

        Raises:
            CapacityError: the reservation has not so much left, and no closed lease will give it back.
        """
        return self._lease(
            nbytes,
            holder,
            take=lambda: self._take(nbytes),
            in_the_way=lambda _: True,
            refusal=lambda: self._refusal(nbytes, holder),
        )

    def _take(self, nbytes: int) -> Backing | None:
        if not nbytes:
            return NoBytes()
        if nbytes > self._free_bytes():
            return None
        self.reservation.hold(nbytes)
        try:
            return self._accelerator.allocate(nbytes)
        except BaseException as failure:
            self.reservation.release(nbytes)
            # Free bytes that lie in pieces, or that others took: what is closing may make room.
            if isinstance(failure, CapacityError) and self._closing:
                return None
            raise

    def _memory(self, backing: Backing) -> object | None:
        if isinstance(backing, NoBytes) or self.reservation.tier is Tier.DEVICE:
            return None
        import torch

        return backing.tensor(torch.uint8, (backing.nbytes,)).untyped_storage()

    def _free(self, backing: Backing) -> None:
        if not isinstance(backing, NoBytes):
            self._accelerator.free(backing)  # type: ignore[arg-type]  # only `_take` makes backings of this pool

    def _uncount(self, nbytes: int) -> None:
        self.reservation.release_soon(nbytes)

    def _free_bytes(self) -> int:
        return self.reservation.nbytes - self.reservation.held

    def _shut_down(self) -> None:
        pass
