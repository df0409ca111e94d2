"""`GradientReducer`: adds the gradients of all ranks up, and hands each rank the sums of its
shards.

Takes whole gradients as a backward makes them, and lets go of them bucket by bucket; keeps nothing
between backwards, and never more than it has room for. Who keeps the sums is the keeper's business.

[Note: reduces have an order of their own] Buckets are reduced in one order on all ranks, in a
sequence of collectives beside that of gathers: first those of what is expected, then all of them in
turns, for what comes after its bucket. Where ranks use different parameters (experts, branches),
one that has a bucket full starts to reduce it, and another joins when its backward is over, or when
the first has no room and waits: [Note: who waits for whom]. A rank sends zeros for what it has not;
where no rank has anything of a bucket, no data moves.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from infinity_engine.lanes.lanes import Lanes
from infinity_engine.lanes.meter import Wait
from infinity_engine.memory import FreedMemory, Lease, Reservation
from infinity_engine.optim import HostKernels, Values
from infinity_engine.partition import (
    MOST_ANNOUNCED,
    CollectiveEvent,
    GroupMember,
    HybridReduce,
    ReplicaSums,
    ShardGroup,
)
from infinity_engine.ranks.ranks import Ranks, wire_of

__all__ = ["REDUCES", "GradientReducer", "KernelAdder", "Room", "buckets_of"]

REDUCES = 2
"""So many reduces are under way at once, each with a buffer of its own."""

_MOST_FREED = 16 << 20
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
    """Return the numbers of those that are reduced together: neighbours, the last first, as in a
    backward.
    """
    buckets: list[list[int]] = []
    room = 0
    for number in reversed(range(len(members))):
        nbytes = _nbytes(members[number])
        if nbytes > room or not buckets or len(buckets[-1]) == MOST_ANNOUNCED:
            buckets.append([])
            room = max(bucket_bytes, nbytes)
        buckets[-1].append(number)
        room -= nbytes
    return [tuple(bucket) for bucket in buckets]


@dataclass(frozen=True, slots=True)
class Room:
    """The bytes that reduces take of the device: the same on all ranks."""

    wire: int
    """Of each buffer that they go through."""
    gradients: int
    """Of whole gradients that are held at once."""
    sums: int
    """Of sums that are being made."""
    freed: int
    """That malloc may have of what was let go of."""

    @property
    def held(self) -> int:
        """What is held beside buffers."""
        return self.gradients + self.sums + self.freed

    @property
    def nbytes(self) -> int:
        """All of it."""
        return REDUCES * self.wire + self.held

    @classmethod
    def of(
        cls, members: Sequence[GroupMember], ranks: Ranks, *, adds_up: bool, on_host: bool
    ) -> Room:
        """Return it for the gradients of these, which are tensors on the host or on a device that
        has its own memory.

        Without it, gradients are let go of before their bucket is full.
        """
        most = ranks.config.bucket_bytes
        groups = [
            ranks.group("all", [members[number] for number in each])
            for each in buckets_of(members, most)
        ]
        nbytes = [_nbytes(each) for each in members]
        gradients = sum(nbytes)
        if ranks.gradients.can_stall and not adds_up:
            gradients = min(gradients, max(nbytes) + REDUCES * most)
        of_a_rank = max(
            sum(max(shard.numel for shard in each.spec.shards) for each in group.members)
            for group in groups
        )
        wire = wire_of(
            max(group.reduce_bytes() for group in groups), 2 * ranks.shards.size, 2 * most
        )
        if ranks.replicas is not None:
            of_replicas = ReplicaSums(ranks.replicas).wire_bytes(of_a_rank)
            wire = max(wire, wire_of(of_replicas, 2 * ranks.replicas.size, 2 * most))
        sums = REDUCES * 4 * of_a_rank
        freed = min(gradients + sums, _MOST_FREED) if on_host else 0
        return cls(wire=wire, gradients=gradients, sums=sums, freed=freed)


def _nbytes(member: GroupMember) -> int:
    return member.spec.numel * member.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Reduce:
    """A reduce that was started, and where its sums go."""

    numbers: Sequence[int]
    sums: Sequence[torch.Tensor]
    event: CollectiveEvent | HybridReduce
    wire: Lease
    gradient_bytes: int


@dataclass(frozen=True, slots=True)
class _Said:
    """How far a rank is when its backward is over: how many of what it has of each, after so many
    reduces.
    """

    started: int
    waiting: Mapping[int, int]

    def pack(self) -> bytes:
        return json.dumps([self.started, list(self.waiting.items())]).encode()

    @classmethod
    def unpack(cls, payload: bytes) -> _Said:
        started, waiting = json.loads(payload)
        return cls(started, dict(waiting))


class GradientReducer:
    """Reduces gradients of `members`, one for each trained parameter; `take` gets the sums of this
    rank's shards.

    A bucket is reduced when all has come of it that came in the backward before, to any rank;
    before that where there is no `room` for more: reduces go through `wires`, and what is held
    beside them counts as `held`. What comes after its bucket is reduced once more. Where it
    `adds_up`, members are fp32, and whole gradients are added up here until the last micro-batch of
    a step.
    """

    def __init__(
        self,
        members: Sequence[GroupMember],
        ranks: Ranks,
        lanes: Lanes,
        take: _Take,
        *,
        room: Room,
        wires: Sequence[Lease],
        held: Reservation,
        adds_up: bool = False,
    ) -> None:
        self.adds_up = adds_up
        self._sums: dict[int, torch.Tensor] = {}  # of whole gradients
        self._members = tuple(members)
        self._ranks = ranks
        self._meter = lanes.meter
        self._adder = KernelAdder(lanes.kernels)
        self._replicas = None if ranks.replicas is None else ReplicaSums(ranks.replicas)
        self._room = room
        self._free_wires = list(wires)
        self._held = held
        self._holds = 0  # bytes of gradients
        self._freed = FreedMemory(room.freed) if room.freed else None
        self._device = lanes.accelerator.torch_device
        self._take = take
        self._groups: dict[tuple[int, ...], ShardGroup] = {}
        self._all_buckets = buckets_of(members, ranks.config.bucket_bytes)
        self._under_way: deque[_Reduce] = deque()
        self._not_summed: deque[HybridReduce] = deque()
        self._expect(frozenset(range(len(members))))
        ranks.gradients.on_stall(self._join)

    def _expect(self, numbers: Collection[int]) -> None:
        """Begin with a backward in which these are expected."""
        buckets = [
            tuple(number for number in bucket if number in numbers) for bucket in self._all_buckets
        ]
        self._buckets = [bucket for bucket in buckets if bucket]
        self._next = 0  # how many were started, which `_bucket` counts
        self._waiting: dict[int, deque[torch.Tensor]] = {}  # what is in no reduce yet, by number
        self._reduced: set[int] = set()
        self._open = False

    def _bucket(self, turn: int) -> tuple[int, ...]:
        """Return what is reduced then, on all ranks, in a backward."""
        after = turn - len(self._buckets)
        return (
            self._buckets[turn] if after < 0 else self._all_buckets[after % len(self._all_buckets)]
        )

    @property
    def open(self) -> bool:
        """Whether a gradient has come since all were reduced."""
        return self._open

    def take(self, number: int, gradient: torch.Tensor) -> None:
        """Take a whole gradient, which is the reducer's from here on.

        Raises:
            CollectiveError: there is no room for it before another is reduced, and that failed.
        """
        self._open = True
        flat = gradient.detach().contiguous().view(-1)
        del gradient
        if not self.adds_up:
            self._make_room(flat.nbytes)
            self._hold(flat.nbytes)
            self._waiting.setdefault(number, deque()).append(flat)
            self.go_on()
        elif number in self._sums:
            self._adder.add(flat, self._sums[number])
        else:
            self._hold(_nbytes(self._members[number]))
            self._sums[number] = flat.float()

    def go_on(self) -> None:
        """Start what is complete and end what has ended, without waiting: whoever has a moment
        calls it.

        Raises:
            CollectiveError: a reduce failed.
        """
        while self._under_way and self._under_way[0].event.done():
            self._end()
        while self._next < len(self._buckets) and self._free_wires:
            if any(number not in self._waiting for number in self._buckets[self._next]):
                return
            self._start_next()

    def drop(self) -> None:
        """Drop what has come, on all ranks; what they reduce they reduce first."""
        self._release(sum(each.nbytes for each in self._sums.values()))
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
            number, values = self._sums.popitem()
            self._waiting[number] = deque([values])
        mine = _Said(self._next, {number: len(some) for number, some in self._waiting.items()})
        with self._meter.waits(Wait.GRADIENTS):
            said = [
                _Said.unpack(each)
                for each in self._ranks.collectives.share("what has a gradient", mine.pack())
            ]
            most = max(each.started for each in said)
            while self._next < most:
                self._start_next()
            left = [self._left(each, most) for each in said]
            for turn in range(max((count for each in left for count in each.values()), default=0)):
                came = {number for each in left for number, count in each.items() if count > turn}
                for bucket in self._all_buckets:
                    self._start([number for number in bucket if number in came])
            while self._under_way:
                self._end()
        self._expect(self._reduced or range(len(self._members)))

    def close(self) -> None:
        """Forget what has come. Nothing is under way any more."""
        self._sums.clear()
        self._waiting.clear()
        self._under_way.clear()
        self._held.release(self._held.held)

    def _left(self, said: _Said, most: int) -> Counter[int]:
        """Return how many of each are left of what a rank has, after so many reduces."""
        left = Counter(said.waiting)
        for turn in range(said.started, most):
            left -= Counter(self._bucket(turn))  # which keeps what is positive
        return left

    # --- room -------------------------------------------------------------------------------------

    def _make_room(self, nbytes: int) -> None:
        """Let there be room for a gradient: wait for others that are being reduced, and reduce some
        early for it.

        What is started early depends on what has come, never on time.
        """
        if not self._ranks.gradients.can_stall:  # then nobody may wait in a backward
            return
        while self._holds + nbytes > self._room.gradients:
            with self._meter.waits(Wait.GRADIENTS):
                self.go_on()
                if self._under_way:
                    self._end()
                elif self._holds + nbytes > self._room.gradients:
                    # nothing that has ended just now has made room
                    self._start_next()

    def _hold(self, nbytes: int) -> None:
        self._held.hold(nbytes)
        self._holds += nbytes

    def _release(self, nbytes: int) -> None:
        self._held.release(nbytes)
        self._holds -= nbytes

    # --- buckets ----------------------------------------------------------------------------------

    def _join(self, number: int) -> None:
        """Start what others wait for, up to this one in the sequence: [Note: who waits for
        whom].
        """
        while self._ranks.gradients.started < number:
            self._start_next()

    def _start_next(self) -> None:
        turn, self._next = self._next, self._next + 1
        self._start(self._bucket(turn))

    def _start(self, numbers: Sequence[int]) -> None:
        """Reduce what has come first of each of these."""
        if not numbers:
            return
        while not self._free_wires:
            self._end()
        wire = self._free_wires.pop()
        gradients = [self._next_of(number) for number in numbers]
        group = self._group(tuple(numbers))
        sums = [
            torch.empty(group.shard(place).numel, dtype=torch.float32, device=self._device)
            for place in range(len(numbers))
        ]
        self._held.hold(sum(each.nbytes for each in sums))
        nbytes = sum(each.nbytes for each in gradients if each is not None)
        event = self._reduce(group, gradients, sums, wire.flat())
        self._under_way.append(_Reduce(numbers, sums, event, wire, nbytes))

    def _reduce(
        self,
        group: ShardGroup,
        gradients: Sequence[torch.Tensor | None],
        sums: Sequence[torch.Tensor],
        wire: torch.Tensor,
    ) -> CollectiveEvent | HybridReduce:
        reduce = partial(group.reduce, gradients, sums, adder=self._adder, wire=wire)
        replicas = self._replicas
        if replicas is None:
            return reduce()
        return HybridReduce(
            lambda ended: reduce(ended=ended),
            lambda had: replicas.start(
                group.name, sums, announces=had, adder=self._adder, wire=wire
            ),
            self._not_summed,
        )

    def _next_of(self, number: int) -> torch.Tensor | None:
        some = self._waiting.get(number)
        if some is None:
            return None
        first = some.popleft()
        if not some:
            del self._waiting[number]
        return first

    def _end(self) -> None:
        """Wait until the oldest under way has ended, and hand on what any rank had of it."""
        nbytes = self._hand_on(self._under_way.popleft())
        if self._freed is not None:
            self._freed.freed(nbytes)

    def _hand_on(self, ended: _Reduce) -> int:
        """Wait until it has ended, and return the bytes that are let go of then."""
        ended.event.wait()
        self._free_wires.append(ended.wire)
        self._release(ended.gradient_bytes)
        sums_bytes = sum(each.nbytes for each in ended.sums)
        self._held.release(sums_bytes)
        had = 0
        for bits in ended.event.announced:
            had |= bits
        for place, (number, total) in enumerate(zip(ended.numbers, ended.sums, strict=True)):
            if had >> place & 1:
                self._reduced.add(number)
                self._take(number, total)
        return ended.gradient_bytes + sums_bytes

    def _group(self, numbers: tuple[int, ...]) -> ShardGroup:
        if numbers not in self._groups:
            names = [self._members[number].name for number in (numbers[0], numbers[-1])]
            name = (
                f"gradient of {names[0]}"
                if len(numbers) == 1
                else f"gradients of {names[0]} to {names[1]}"
            )
            members = [self._members[number] for number in numbers]
            self._groups[numbers] = self._ranks.group(name, members, self._ranks.gradients)
        return self._groups[numbers]
