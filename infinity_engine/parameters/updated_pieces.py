"""`UpdatedPieces`: values that an update hands over piece by piece, so that they need no read.

An update beside the next forward makes the parameters of a module one subgroup after another. Where
there is room until that module runs, the pieces are collected as they are made; only those that
were written before are read from the drives.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from infinity_engine.errors import TransferError
from infinity_engine.lanes.lanes import Lanes
from infinity_engine.lanes.meter import Cargo
from infinity_engine.memory import Lease, Views
from infinity_engine.parameters.deferred import DeferredUpdate
from infinity_engine.parameters.parameters import ModelParameter
from infinity_engine.plan.ops import Lane
from infinity_engine.residence import Mover, ShardRecord
from infinity_engine.schedule import NEVER, ResidentSet
from infinity_engine.storage import Hop, Hops, Transfer

__all__ = ["Fetched", "UpdatedPieces"]


@dataclass(slots=True)
class Fetched:
    """A parameter that is resident, or in flight; `needed`: a module has needed it since."""

    lease: Lease
    transfer: Transfer
    needed: bool = False

    def note_need(self) -> None:
        """Remember that a module has needed it."""
        self.needed = True


@dataclass(slots=True)
class _Collected:
    """The memory of one parameter, and which of its pieces are still missing."""

    lease: Lease
    missing: dict[int, int]  # the first byte of each piece, and its bytes
    reading: list[Hop] = field(default_factory=list)


class UpdatedPieces:
    """Collects pieces of those `records` that rest on drives, in room reserved in `resident`.

    `collects` is False where that is another memory than the host's: pieces are made in the host's.
    """

    def __init__(
        self,
        parameters: Mapping[int, ModelParameter],
        records: Mapping[int, ShardRecord],
        resident: ResidentSet[Fetched],
        lanes: Lanes,
        mover: Mover,
        *,
        collects: bool,
    ) -> None:
        self.update: DeferredUpdate | None = None  # the one under way
        self._parameters = parameters
        self._records = records
        self._resident = resident
        self._lanes = lanes
        self._mover = mover
        self._collects = collects
        self._collected: dict[int, _Collected] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._collected

    def follow_update(self, update: DeferredUpdate | None) -> None:
        """Collect what this update makes; None: everything is made."""
        self.drop_all()
        self.update = update

    def make(self, numbers: Collection[int]) -> None:
        """Go on with the update until these are resident, or at home with their new values.

        Raises:
            RuntimeError: an op of the update failed.
        """
        update = self.update
        if update is not None:
            update.go_on()
            # Updated first: what is in a buffer is handed over from there.
            update.reach(number for number in numbers if number not in self._resident)
            self.read_all()
            # The rest has to be where the update leaves it.
            update.make(number for number in numbers if number not in self._resident)
            self.read_all()

    def is_unmade(self, number: int) -> bool:
        """Tell whether a parameter is not at home with its new values yet. Does not wait."""
        return self.update is not None and not self.update.has_made(number)

    def may_expect(self, number: int) -> bool:
        """Tell whether to reserve memory for a parameter that the update makes piece by piece."""
        parameter = self._parameters.get(number)
        return (
            self.update is not None
            and self._collects
            and parameter is not None
            and parameter.on_drives
            and number not in self._resident
            and self._resident.next_use(number) != NEVER
        )

    def expect(self, number: int) -> None:
        """Reserve memory for the pieces of a parameter, if there is room for it."""
        # Room in the limit and memory of the device are two things: both are asked for.
        update, parameter = self.update, self._parameters[number]
        if update is None or parameter.nbytes > self._resident.free:
            return
        lease = self._lanes.device.try_lease(
            parameter.nbytes, holder=f"parameter {parameter.name}", views=Views.KEEP
        )
        if lease is None:
            return
        width = parameter.dtype.itemsize
        pieces = {width * part.first_element: width * part.numel for part in update.parts(number)}
        self._resident.reserve(number)
        self._collected[number] = _Collected(lease, pieces)

    def receive(self, number: int, start: int, values: torch.Tensor) -> None:
        """Copy a piece's new values, if they are expected; its first byte is `start`."""
        collected = self._collected.get(number)
        if collected is not None and start in collected.missing:
            # Copied now: the buffer is reused as soon as its subgroup is stored.
            collected.lease.flat()[start : start + values.numel()].copy_(values)
            del collected.missing[start]
            if not collected.missing:
                self._complete(number, collected)

    def read_all(self) -> None:
        """Start to read the missing pieces that are at home by now, the earliest use first."""
        for number in sorted(self._collected, key=self._resident.next_use):
            self.read(number)

    def read(self, number: int) -> None:
        """Start to read those of one parameter, if its pieces are collected."""
        update, collected = self.update, self._collected.get(number)
        if update is None or collected is None:
            return
        parameter = self._parameters[number]
        width = parameter.dtype.itemsize
        # Still to be handed over by the update.
        unmade = {width * part.first_element for part in update.missing(number)}
        memory = collected.lease.flat().numpy().data
        for start, nbytes in list(collected.missing.items()):
            if start not in unmade:
                piece = memory[start : start + nbytes]
                # Noted before anything else: whatever interrupts this waits for the read.
                collected.reading.append(self._mover.read_part(self._records[number], start, piece))
                self._lanes.meter.count_copy(
                    Lane.NVME_READ,
                    Cargo.PARAMETERS,
                    nbytes,
                    None,
                    name="parameter",
                    parameter=parameter.name,
                )
                del collected.missing[start]
        if not collected.missing:
            self._complete(number, collected)

    def drop(self, number: int) -> None:
        """Give the memory of a parameter's pieces back; nothing where none are collected."""
        collected = self._collected.get(number)
        if collected is not None:
            with suppress(TransferError):
                # The reads go into this memory.
                Hops(collected.reading).wait()
            collected.lease.close()
            del self._collected[number]
            self._resident.cancel(number)

    def drop_all(self) -> None:
        """Drop all of them."""
        for number in list(self._collected):
            self.drop(number)

    def _complete(self, number: int, collected: _Collected) -> None:
        """Make a parameter a member, as all of its pieces are here or in flight."""
        transfer = self._mover.load_with(
            self._records[number], into=collected.lease, hop=Hops(collected.reading)
        )
        # What the update handed over was found in memory, as if a module had needed it before.
        entry = Fetched(collected.lease, transfer, needed=not collected.reading)
        self._resident.complete(number, entry)
        del self._collected[number]
