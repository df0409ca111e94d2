"""`DeviceMemory`: the device memory of one reservation, as leases of what the accelerator allocates.

Counts and keeps the limit; how the device hands out memory is the accelerator's business.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from infinity_engine.errors import ConfigError
from infinity_engine.memory.lease import Backing, Lease, Lessor, NoBytes
from infinity_engine.memory.ledger import Reservation
from infinity_engine.plan import Tier

__all__ = ["Allocator", "DeviceMemory"]

_Buffer = TypeVar("_Buffer", bound=Backing)


class Allocator(Protocol[_Buffer]):
    """The part of an accelerator that is needed here."""

    def allocate(self, nbytes: int) -> _Buffer:
        """Return a new buffer of the device's memory."""

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
        if nbytes < 0:
            raise ConfigError(field=f"bytes leased for {holder}", value=nbytes, expected="0 or more bytes")
        return self._lease(nbytes, holder, lambda: self._take(nbytes))

    def _take(self, nbytes: int) -> Backing | None:
        if not nbytes:
            return NoBytes()
        if nbytes > self._free_bytes():
            return None
        self.reservation.hold(nbytes)
        try:
            return self._accelerator.allocate(nbytes)
        except BaseException:
            self.reservation.release(nbytes)
            raise

    def _drop(self, backing: Backing) -> None:
        if isinstance(backing, NoBytes):
            return
        self._accelerator.free(backing)  # type: ignore[arg-type]  # only `_take` makes backings of this pool
        self.reservation.release(backing.nbytes)

    def _free_bytes(self) -> int:
        return self.reservation.nbytes - self.reservation.held

    def _shut_down(self) -> None:
        pass
