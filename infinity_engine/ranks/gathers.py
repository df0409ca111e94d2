"""`Gathers`: the gathers that are in flight, and the shards and buffers that each of them uses.

[Note: all ranks decide alike] A gather is a collective, so which ones are started, and in which
order, must be the same on all ranks. Everything here and in gathering.py is decided by the order of
uses, by whole sizes and by a limit, which are the same on all ranks; never by time, by what memory
happens to be free, or by what this rank's drives have got to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from infinity_engine.lanes.lanes import Lanes
from infinity_engine.lanes.meter import Wait
from infinity_engine.memory import DeviceMemory, Lease
from infinity_engine.parameters.parameters import ModelParameter
from infinity_engine.parameters.providing import ModuleProvider
from infinity_engine.partition import CollectiveEvent, GroupMember, ShardGroup, ShardSpec
from infinity_engine.ranks.ranks import Ranks, wire_of
from infinity_engine.schedule import Use

__all__ = ["WIRES", "CutParameter", "Gather", "Gathers", "LocalShards", "room_of_wires"]

WIRES = 2
"""The gathers that may be in flight at once, each with a buffer of its own."""


@dataclass(frozen=True, kw_only=True)
class CutParameter:
    """A parameter of the model, this rank's shard of it, and how it is cut."""

    whole: ModelParameter
    shard: ModelParameter
    spec: ShardSpec

    @property
    def dtype(self) -> torch.dtype:
        """What modules compute with it in."""
        return self.whole.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of the whole."""
        return self.spec.numel * self.dtype.itemsize

    @property
    def largest_shard(self) -> int:
        """The bytes of the largest shard that a rank has."""
        return max(shard.numel for shard in self.spec.shards) * self.dtype.itemsize

    @property
    def member(self) -> GroupMember:
        """It as part of a group."""
        return GroupMember(self.whole.name, self.spec, self.dtype)


def room_of_wires(
    model: torch.nn.Module,
    parameters: Sequence[CutParameter],
    ranks: Ranks,
    leaves: Collection[str],
) -> int:
    """Return the bytes of each buffer that gathers go through, those of `leaves` as a whole."""
    # By identity: a tied parameter has several names in the model.
    known = {id(cut.whole.parameter): cut for cut in parameters if cut.spec.numel}
    groups = [
        [
            known[id(parameter)]
            for parameter in module.parameters(recurse=name in leaves)
            if id(parameter) in known
        ]
        for name, module in model.named_modules()
    ]
    # Empty for modules without parameters of their own.
    needed = max(
        ranks.group("all", [cut.member for cut in some]).gather_bytes() for some in groups if some
    )
    return wire_of(needed, ranks.shards.size + 1, ranks.config.bucket_bytes)


class LocalShards:
    """This rank's shards of `parameters`, where gathers find them.

    `below` brings those of `fetched`, which are at home elsewhere, to the device. Where some rank
    has such, gathers in flight use no more than `limit` bytes of the largest shards on any rank.
    """

    def __init__(
        self,
        parameters: Mapping[int, CutParameter],
        below: ModuleProvider | None,
        fetched: Collection[int],
        device: torch.device,
        limit: int | None,
    ) -> None:
        self._below = below
        self._parameters = parameters
        self._fetched = frozenset(fetched)
        self._device = device
        self._limit = limit

    def fits(self, numbers: Iterable[int]) -> bool:
        """Tell whether these may be on the device together: [Note: all ranks decide alike]."""
        # By the largest shard of any rank, so that all ranks answer alike.
        return self._limit is None or (
            sum(self._parameters[number].largest_shard for number in numbers) <= self._limit
        )

    def hold(self, name: str, numbers: Iterable[int]) -> Sequence[int]:
        """Bring the shards of these, which `name` needs; return which are held until `let_go`."""
        brought = tuple(number for number in numbers if number in self._fetched)
        if brought and self._below is not None:
            # Held until the gather has ended: the collective reads the shard where it lies.
            self._below.resident.hold(brought)
            try:
                self._below.need(Use(name, brought))
            except BaseException:
                self._below.resident.let_go(brought)
                raise
        return brought

    def let_go(self, numbers: Sequence[int]) -> None:
        """Undo `hold`, which has returned these."""
        if self._below is not None:
            self._below.resident.let_go(numbers)

    @contextmanager
    def on_device(self, number: int) -> Iterator[torch.Tensor]:
        """Have the flat shard of one parameter on the device within the body."""
        # Without a fetcher, all shards are at home on the device.
        with nullcontext() if self._below is None else self._below.gathered([number]):
            yield self.values(number)

    def values(self, number: int) -> torch.Tensor:
        """Return the flat shard of a parameter that is held, or at home on the device."""
        cut = self._parameters[number]
        if not cut.shard.numel:
            return torch.empty(0, dtype=cut.dtype, device=self._device)
        if self._below is not None and number in self._fetched:
            return self._below.shown.values(number)
        return cut.shard.values

    def write_home(self, number: int) -> None:
        """Bring the values home that were written into a shard on the device."""
        if self._below is not None and number in self._fetched:
            self._below.write_home(number)


@dataclass(eq=False, slots=True)
class Gather:
    """One gather, and what it uses until it has ended."""

    group: ShardGroup
    numbers: Sequence[int]
    event: CollectiveEvent
    wire: Lease | None  # None: shards arrive where they belong
    held: Sequence[int]  # of the shards
    ended: bool = False

    def note_end(self) -> None:
        """Remember that what it used is free."""
        self.ended = True


class Gathers:
    """Starts gathers of `parameters`, each through one of `WIRES` buffers of `wire_bytes`."""

    def __init__(
        self,
        parameters: Mapping[int, CutParameter],
        ranks: Ranks,
        lanes: Lanes,
        memory: DeviceMemory[Any],
        *,
        shards: LocalShards,
        wire_bytes: int,
    ) -> None:
        self._parameters = parameters
        self._ranks = ranks
        self._lanes = lanes
        self._shards = shards
        self._wire_bytes = wire_bytes
        self._wires = [
            memory.lease(wire_bytes, holder="buffers of collectives") for _ in range(WIRES)
        ]
        # A gather takes one and returns it at its end; with none left, the oldest one is ended.
        self._free_wires = list(self._wires)
        self._in_flight: deque[Gather] = deque()
        # A group lays its wire out once, for all steps.
        self._groups: dict[tuple[int, ...], ShardGroup] = {}

    def parts(self, name: str, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Yield which of these are gathered together, in the order in which that starts.

        Together they need a buffer. Where it is too small for all, those that need none when they
        are alone go first, each by itself. The others share gathers as far as their shards may be
        on the device together.
        """
        alone: list[int] = []
        # Alone, a parameter may be one run in memory, which needs no buffer.
        if self._group(name, numbers).gather_bytes() > self._wire_bytes:
            alone = [number for number in numbers if not self._group(name, [number]).gather_bytes()]
        for number in alone:
            yield [number]
        part: list[int] = []
        for number in numbers:
            if number in alone:
                continue
            if part and not self._shards.fits([*part, number]):
                yield part
                part = []
            part.append(number)
        if part:
            yield part

    def start(
        self, name: str, numbers: Sequence[int], lease_for: Callable[[int], Lease]
    ) -> tuple[Gather, list[Lease]]:
        """Start to make these whole, in leases that `lease_for` returns; return them too.

        Raises:
            CapacityError: there is no room for one of them.
            CollectiveError: another rank does something else, or has failed.
            TransferError: a shard could not be fetched.
        """
        group = self._group(name, numbers)
        # Waits for the oldest gather where none is free, before anything is held for this one.
        wire = self._take_wire() if group.gather_bytes() else None
        held: Sequence[int] = ()
        leases: list[Lease] = []
        try:
            held = self._shards.hold(name, numbers)
            leases += [lease_for(number) for number in numbers]
            into = [
                lease.tensor(self._parameters[number].dtype)
                for lease, number in zip(leases, numbers, strict=True)
            ]
            event = group.gather(
                [self._shards.values(number) for number in numbers],
                into,
                wire=None if wire is None else wire.flat(),
            )
        # Also for an interrupt: what is held for a gather that never started would stay for ever.
        except BaseException:
            # The leases are new: no collective knows them yet.
            for lease in leases:
                lease.close()
            self._give_back(wire, held)
            raise
        gather = Gather(group, tuple(numbers), event, wire, held)
        self._in_flight.append(gather)
        return gather, leases

    def make_way(self, numbers: Sequence[int]) -> None:
        """End the oldest gathers until the shards of these may be on the device beside the rest."""
        while self._in_flight and not self._shards.fits(
            [*numbers, *(number for gather in self._in_flight for number in gather.numbers)]
        ):
            self.end(self._in_flight[0])

    def end(self, gather: Gather) -> None:
        """Wait until a gather has ended, and free what it used."""
        if gather.ended:
            return
        try:
            if not gather.event.done():
                # Only a wait is counted: a gather that has ended costs nothing.
                with self._lanes.meter.timed_wait(Wait.PARAMETERS):
                    gather.event.wait()
            gather.event.wait()  # raises what failed
        finally:
            # After an interrupt it may still be in flight, and then it keeps what it uses.
            if gather in self._in_flight and gather.event.done():
                self._in_flight.remove(gather)
                self._give_back(gather.wire, gather.held)
        gather.note_end()

    def close(self) -> None:
        """Give the buffers back; no gather is waited for, as other ranks may have left."""
        # Buffers of gathers that never end are closed with all others.
        self._in_flight.clear()
        for wire in self._wires:
            wire.close()

    def _give_back(self, wire: Lease | None, held: Sequence[int]) -> None:
        if wire is not None:
            self._free_wires.append(wire)
        self._shards.let_go(held)

    def _take_wire(self) -> Lease:
        """Return a free buffer, or that of the oldest gather: [Note: all ranks decide alike]."""
        while not self._free_wires:
            self.end(self._in_flight[0])
        return self._free_wires.pop()

    def _group(self, name: str, numbers: Sequence[int]) -> ShardGroup:
        # The name is for messages; the parameters alone make the group.
        key = tuple(numbers)
        if key not in self._groups:
            members = [self._parameters[number].member for number in numbers]
            self._groups[key] = self._ranks.group(
                members[0].name if len(members) == 1 else name, members
            )
        return self._groups[key]
