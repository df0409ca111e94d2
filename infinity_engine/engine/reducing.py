"""`GradientReducer`: adds the gradients of all ranks up, and hands each rank the sums of its shards.

Takes whole gradients as a backward makes them, and lets go of them bucket by bucket; keeps nothing between backwards.
Who keeps the sums is the keeper's business.

[Note: reduces have an order of their own] Buckets are reduced in one order on all ranks, in a sequence of collectives
beside that of gathers. So where ranks use different parameters (experts, branches), one that has a bucket full starts
to reduce it and goes on, and another joins when its backward is over. Nobody waits for a reduce inside of a backward.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from infinity_engine.engine.lanes import Lanes
from infinity_engine.engine.meter import Wait
from infinity_engine.engine.ranks import Ranks, wire_of
from infinity_engine.memory import Lease
from infinity_engine.optim import HostKernels
from infinity_engine.optim import Stream as Values
from infinity_engine.partition import CollectiveEvent, GroupMember, ShardGroup

__all__ = ["GradientReducer", "KernelAdder", "buckets_of", "room_of_reduces"]

_Take = Callable[[int, torch.Tensor], None]


class KernelAdder:
    """Additions by the kernels that add gradients everywhere else."""

    def __init__(self, kernels: HostKernels) -> None:
        self._kernels = kernels

    def begin(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """Write values to `into`, which is fp32."""
        if values.numel():
            self._kernels.begin_sum(Values.of(values), Values.of(into))

    def add(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """Add values to `into`, which is fp32."""
        if values.numel():
            self._kernels.add_to_sum(Values.of(values), Values.of(into))


def buckets_of(members: Sequence[GroupMember], bucket_bytes: int) -> list[tuple[int, ...]]:
    """Return the numbers of those that are reduced together: neighbours, the last first, as in a backward."""
    buckets: list[list[int]] = []
    room = 0
    for number in reversed(range(len(members))):
        nbytes = members[number].spec.numel * members[number].dtype.itemsize
        if nbytes > room or not buckets:
            buckets.append([])
            room = max(bucket_bytes, nbytes)
        buckets[-1].append(number)
        room -= nbytes
    return [tuple(bucket) for bucket in buckets]


def room_of_reduces(members: Sequence[GroupMember], ranks: Ranks) -> int:
    """Return the bytes of the buffer that reduces go through."""
    buckets = buckets_of(members, ranks.config.bucket_bytes)
    needed = max(ranks.group("all", [members[number] for number in each]).reduce_bytes() for each in buckets)
    return wire_of(needed, 2 * ranks.size, 2 * ranks.config.bucket_bytes)


@dataclass(frozen=True, slots=True)
class _Reduce:
    """A reduce that was started, and where its sums go."""

    numbers: Sequence[int]
    sums: Sequence[torch.Tensor]
    event: CollectiveEvent


@dataclass(frozen=True, slots=True)
class _Said:
    """How far a rank is when its backward is over: what it has of buckets that it did not start, and what came late."""

    started: int
    came: Sequence[int]
    late: Mapping[int, int]  # how many of each

    def pack(self) -> bytes:
        return json.dumps([self.started, self.came, list(self.late.items())]).encode()

    @classmethod
    def unpack(cls, payload: bytes) -> _Said:
        started, came, late = json.loads(payload)
        return cls(started, came, dict(late))


class GradientReducer:
    """Reduces gradients of `members`, one for each trained parameter; `take` gets the sums of this rank's shards.

    A bucket is reduced when all has come of it that came in the backward before, to any rank. What comes after that, or
    was not expected, is reduced when the backward is over. `wire` is the buffer that reduces go through, one at a time.
    Where it `adds_up`, members are fp32, and whole gradients are added up here until the last micro-batch of a step.
    """

    def __init__(
        self,
        members: Sequence[GroupMember],
        ranks: Ranks,
        lanes: Lanes,
        wire: Lease,
        take: _Take,
        *,
        adds_up: bool = False,
    ) -> None:
        self.adds_up = adds_up
        self._sums: dict[int, torch.Tensor] = {}  # of whole gradients
        self._members = tuple(members)
        self._ranks = ranks
        self._meter = lanes.meter
        self._adder = KernelAdder(lanes.kernels)
        self._wire = wire
        self._device = lanes.accelerator.torch_device
        self._take = take
        self._groups: dict[tuple[int, ...], ShardGroup] = {}
        self._all_buckets = buckets_of(members, ranks.config.bucket_bytes)
        self._expect(frozenset(range(len(members))))

    def _expect(self, numbers: Collection[int]) -> None:
        """Begin with a backward in which these are expected."""
        buckets = [tuple(number for number in bucket if number in numbers) for bucket in self._all_buckets]
        self._buckets = [bucket for bucket in buckets if bucket]
        self._bucket_of = {number: place for place, bucket in enumerate(self._buckets) for number in bucket}
        self._next = 0  # the first that was not started
        self._came: dict[int, torch.Tensor] = {}  # of buckets that were not started
        self._late: dict[int, list[torch.Tensor]] = {}
        self._under_way: _Reduce | None = None
        self._reduced: set[int] = set()
        self._open = False

    @property
    def open(self) -> bool:
        """Whether a gradient has come since all were reduced."""
        return self._open

    def take(self, number: int, gradient: torch.Tensor) -> None:
        """Take a whole gradient, which is the reducer's from here on."""
        self._open = True
        flat = gradient.detach().contiguous().view(-1)
        if not self.adds_up:
            self._enter(number, flat)
        elif number in self._sums:
            self._adder.add(flat, self._sums[number])
        else:
            self._sums[number] = flat.float()

    def _enter(self, number: int, flat: torch.Tensor) -> None:
        if number in self._came or self._bucket_of.get(number, -1) < self._next:
            self._late.setdefault(number, []).append(flat)
        else:
            self._came[number] = flat
        self._go_on()

    def drop(self) -> None:
        """Drop what has come, on all ranks; what they reduce they reduce first."""
        self._sums.clear()
        if self._open and not self.adds_up:
            self.finish()
        self._open = False

    def finish(self) -> None:
        """Reduce all that has come to any rank; every rank comes to this when its backward is over.

        Raises:
            CollectiveError: another rank does something else, or has failed.
        """
        while self._sums:
            self._enter(*self._sums.popitem())
        late = {number: len(some) for number, some in self._late.items()}
        mine = _Said(self._next, sorted(self._came), late)
        with self._meter.waits(Wait.GRADIENTS):
            said = [_Said.unpack(each) for each in self._ranks.collectives.share("what has a gradient", mine.pack())]
            while self._next < max(each.started for each in said):  # with zeros for what has not come here
                self._start_next()
            came = {number for each in said for number in each.came}
            for bucket in self._buckets[self._next :]:
                self._start([number for number in bucket if number in came])
            for turn in range(max((count for each in said for count in each.late.values()), default=0)):
                self._reduce_late(
                    turn, {number for each in said for number, count in each.late.items() if count > turn}
                )
            self._end()
        self._expect(self._reduced or self._bucket_of)

    # --- buckets --------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Start what is complete, without waiting: [Note: reduces have an order of their own]."""
        while self._next < len(self._buckets):
            if self._under_way is not None and not self._under_way.event.done():
                return
            if any(number not in self._came for number in self._buckets[self._next]):
                return
            self._start_next()

    def _start_next(self) -> None:
        numbers, self._next = self._buckets[self._next], self._next + 1
        self._start(numbers)

    def _start(self, numbers: Sequence[int]) -> None:
        self._reduce(numbers, [self._came.pop(number, None) for number in numbers])

    def _reduce_late(self, turn: int, numbers: Collection[int]) -> None:
        """Reduce what of each of these came late, and after so many others."""
        for bucket in self._all_buckets:
            some = [number for number in bucket if number in numbers]
            of_each = [self._late.get(number, [])[turn : turn + 1] for number in some]
            self._reduce(some, [each[0] if each else None for each in of_each])

    def _reduce(self, numbers: Sequence[int], gradients: Sequence[torch.Tensor | None]) -> None:
        self._end()
        if not numbers:
            return
        group = self._group(tuple(numbers))
        sums = [
            torch.empty(group.shard(place).numel, dtype=torch.float32, device=self._device)
            for place in range(len(numbers))
        ]
        event = group.reduce(gradients, sums, adder=self._adder, wire=self._wire.flat())
        self._under_way = _Reduce(numbers, sums, event)

    def _end(self) -> None:
        """Wait until what is under way has ended, and hand its sums on."""
        if self._under_way is None:
            return
        ended, self._under_way = self._under_way, None
        ended.event.wait()
        for number, total in zip(ended.numbers, ended.sums, strict=True):
            self._reduced.add(number)
            self._take(number, total)

    def _group(self, numbers: tuple[int, ...]) -> ShardGroup:
        if numbers not in self._groups:
            names = [self._members[number].name for number in (numbers[0], numbers[-1])]
            name = f"gradient of {names[0]}" if len(numbers) == 1 else f"gradients of {names[0]} to {names[1]}"
            members = [self._members[number] for number in numbers]
            self._groups[numbers] = self._ranks.group(name, members, self._ranks.gradients)
        return self._groups[numbers]
