"""`GradientReducer`: sums the gradients of all ranks, and leaves each rank the sums of its shards.

Gets whole gradients as a backward makes them, and frees them bucket by bucket. It keeps nothing
between backwards, and never more than it has room for. The keeper keeps the sums.

[Note: reduces have an order of their own] All ranks reduce buckets in one order, in a sequence of
collectives beside that of gathers. First come the buckets of expected gradients, then all buckets
in turns, for gradients that come after their bucket. Where ranks use different parameters (experts,
branches), a rank that has a bucket full starts to reduce it. Another rank joins when its backward
ends, or when the first has no room and waits: [Note: who waits for whom]. A rank sends zeros for
gradients that it does not have. Where no rank has any gradient of a bucket, no data moves.
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
"""How many reduces are in flight at once, each with a buffer of its own."""

# Bytes. glibc's malloc may keep freed memory; more than this is returned at once.
_MOST_FREED = 16 << 20
_Deliver = Callable[[int, torch.Tensor], None]


class KernelAdder:
    """Sums with the kernels that sum gradients everywhere else, so that the bits are the same."""

    def __init__(self, kernels: HostKernels) -> None:
        self._kernels = kernels

    def begin(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """Write values to `into`, which is fp32."""
        # The kernels take addresses, which an empty tensor may lack.
        if values.numel():
            self._kernels.begin_sum(Values.of(values), Values.of(into))

    def add(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """Add values to `into`, which is fp32."""
        if values.numel():
            self._kernels.add_to_sum(Values.of(values), Values.of(into))


def buckets_of(members: Sequence[GroupMember], bucket_bytes: int) -> list[tuple[int, ...]]:
    """Return the numbers of each bucket's members: neighbours, the last first, as backwards go."""
    buckets: list[list[int]] = []
    room = 0
    for number in reversed(range(len(members))):
        nbytes = _nbytes(members[number])
        # A bit for each member is announced, so a bucket has no more members than bits.
        if nbytes > room or not buckets or len(buckets[-1]) == MOST_ANNOUNCED:
            buckets.append([])
            # A larger member has a bucket of its own.
            room = max(bucket_bytes, nbytes)
        buckets[-1].append(number)
        room -= nbytes
    return [tuple(bucket) for bucket in buckets]


@dataclass(frozen=True, slots=True)
class Room:
    """The bytes of device memory that reduces need, equal on all ranks."""

    wire: int
    """Of each buffer that a reduce passes."""
    gradients: int
    """Of whole gradients held at once."""
    sums: int
    """Of sums in flight."""
    freed: int
    """Of freed memory that malloc may not have returned yet."""

    @property
    def held(self) -> int:
        """All but the buffers."""
        return self.gradients + self.sums + self.freed

    @property
    def nbytes(self) -> int:
        """All of it."""
        return REDUCES * self.wire + self.held

    @classmethod
    def of(
        cls, members: Sequence[GroupMember], ranks: Ranks, *, adds_up: bool, on_host: bool
    ) -> Room:
        """Return the room for the gradients of `members`.

        They are on the host or, if not `on_host`, on a device with memory of its own.

        With less room, gradients are reduced before their bucket is full.
        """
        most = ranks.config.bucket_bytes
        groups = [
            ranks.group("all", [members[number] for number in numbers])
            for numbers in buckets_of(members, most)
        ]
        nbytes = [_nbytes(member) for member in members]
        gradients = sum(nbytes)
        # Without a store a rank may not reduce early, and sums wait for the last micro-batch: both
        # hold all gradients.
        if ranks.gradients.can_stall and not adds_up:
            gradients = min(gradients, max(nbytes) + REDUCES * most)
        # Of the largest shards, so that all ranks plan alike.
        of_a_rank = max(
            sum(max(shard.numel for shard in member.spec.shards) for member in group.members)
            for group in groups
        )
        # A reduce sends and receives, so its buffer has two halves.
        wire = wire_of(
            max(group.reduce_bytes() for group in groups), 2 * ranks.shards.size, 2 * most
        )
        if ranks.replicas is not None:
            of_replicas = ReplicaSums(ranks.replicas).wire_bytes(of_a_rank)
            wire = max(wire, wire_of(of_replicas, 2 * ranks.replicas.size, 2 * most))
        # Sums are fp32.
        sums = REDUCES * 4 * of_a_rank
        freed = min(gradients + sums, _MOST_FREED) if on_host else 0
        return cls(wire=wire, gradients=gradients, sums=sums, freed=freed)


def _nbytes(member: GroupMember) -> int:
    return member.spec.numel * member.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Reduce:
    """A reduce in flight, and where its sums go."""

    numbers: Sequence[int]
    sums: Sequence[torch.Tensor]
    event: CollectiveEvent | HybridReduce
    wire: Lease
    gradient_bytes: int


@dataclass(frozen=True, slots=True)
class _Progress:
    """How many reduces a rank has started at its backward's end, and how many gradients wait."""

    started: int
    waiting: Mapping[int, int]

    def pack(self) -> bytes:
        # As pairs: JSON would turn the keys of a dict into text.
        return json.dumps([self.started, list(self.waiting.items())]).encode()

    @classmethod
    def unpack(cls, payload: bytes) -> _Progress:
        started, waiting = json.loads(payload)
        return cls(started, dict(waiting))


class _Backward:
    """One backward: which bucket all ranks reduce at which turn, and which gradients wait."""

    def __init__(self, buckets: Sequence[tuple[int, ...]], expected: Collection[int]) -> None:
        self._buckets = buckets
        # Buckets keep their members' order; without an expected one they are left out.
        first = (tuple(number for number in bucket if number in expected) for bucket in buckets)
        self._first = [bucket for bucket in first if bucket]
        self.started = 0
        # Gradients that are in no reduce yet, by the number of their parameter.
        self.waiting: dict[int, deque[torch.Tensor]] = {}
        self.reduced: set[int] = set()
        self.open = False

    def note_gradient(self) -> None:
        """Remember that a gradient has come since the last end."""
        self.open = True

    def close(self) -> None:
        """Remember that all that came is reduced, or dropped."""
        self.open = False

    def bucket(self, turn: int) -> tuple[int, ...]:
        """Return the bucket of a turn: first those of what is expected, then all of them again."""
        after = turn - len(self._first)
        # In turns, for gradients that come after their bucket.
        return self._first[turn] if after < 0 else self._buckets[after % len(self._buckets)]

    @property
    def expected(self) -> tuple[int, ...]:
        """The next bucket of expected gradients, empty after the last one."""
        return self._first[self.started] if self.started < len(self._first) else ()

    def start(self) -> tuple[int, ...]:
        """Count the next turn as started; return its bucket."""
        bucket = self.bucket(self.started)
        self.started += 1
        return bucket


class _ReduceMemory:
    """What reduces hold of the device: whole gradients, sums, and buffers (`wires`)."""

    def __init__(self, room: Room, held: Reservation, wires: Sequence[Lease]) -> None:
        self.wires = list(wires)
        self._room = room
        self._held = held
        self._gradients = 0  # bytes of whole gradients
        self._freed = FreedMemory(room.freed) if room.freed else None

    def has_room_for(self, nbytes: int) -> bool:
        """Tell whether another whole gradient fits."""
        return self._gradients + nbytes <= self._room.gradients

    def hold_gradient(self, nbytes: int) -> None:
        """Count a whole gradient."""
        self._held.hold(nbytes)
        self._gradients += nbytes

    def release_gradient(self, nbytes: int) -> None:
        """Count it no more."""
        self._held.release(nbytes)
        self._gradients -= nbytes

    def hold_sums(self, nbytes: int) -> None:
        """Count sums in flight."""
        self._held.hold(nbytes)

    def release_sums(self, nbytes: int) -> None:
        """Count them no more."""
        self._held.release(nbytes)

    def note_freed(self, nbytes: int) -> None:
        """Return memory that was freed to the system, once there is enough of it."""
        if self._freed is not None:
            self._freed.freed(nbytes)

    def close(self) -> None:
        """Count nothing any more."""
        self._held.release(self._held.held)


class _BucketReduces:
    """Reduces of buckets: over the shards, then over replicas where there are some."""

    def __init__(self, members: Sequence[GroupMember], ranks: Ranks, adder: KernelAdder) -> None:
        self._members = members
        self._ranks = ranks
        self._adder = adder
        self._replicas = None if ranks.replicas is None else ReplicaSums(ranks.replicas)
        self._groups: dict[tuple[int, ...], ShardGroup] = {}
        self._not_summed: deque[HybridReduce] = deque()

    def group(self, numbers: tuple[int, ...]) -> ShardGroup:
        """Return the group of a bucket."""
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

    def start(
        self,
        group: ShardGroup,
        gradients: Sequence[torch.Tensor | None],
        sums: Sequence[torch.Tensor],
        wire: torch.Tensor,
    ) -> CollectiveEvent | HybridReduce:
        """Begin to sum the gradients of a bucket, through `wire`."""
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


class GradientReducer:
    """Reduces the gradients of `members`, the trained parameters; `deliver` gets this rank's sums.

    A bucket is reduced when all its gradients have come that came to any rank in the backward
    before. It is reduced earlier where there is no `room` for more. Reduces pass `wires`; what is
    held beside them counts as `held`. A gradient that comes after its bucket is reduced once more.
    With `adds_up`, members are fp32, and whole gradients are summed here until the last micro-batch
    of a step.
    """

    def __init__(
        self,
        members: Sequence[GroupMember],
        ranks: Ranks,
        lanes: Lanes,
        deliver: _Deliver,
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
        self._lanes = lanes
        self._adder = KernelAdder(lanes.kernels)
        self._reduces = _BucketReduces(self._members, ranks, self._adder)
        self._memory = _ReduceMemory(room, held, wires)
        self._deliver = deliver
        self._all_buckets = buckets_of(members, ranks.config.bucket_bytes)
        self._under_way: deque[_Reduce] = deque()
        # Nothing was seen yet: all are expected.
        self._begin(range(len(members)))
        # Another rank may wait for a bucket that this one has not come to.
        ranks.gradients.on_stall(self._join)

    def _begin(self, expected: Collection[int]) -> None:
        """Begin a backward in which these gradients are expected."""
        self._backward = _Backward(self._all_buckets, frozenset(expected))

    @property
    def open(self) -> bool:
        """Whether a gradient has come since the last `finish`."""
        return self._backward.open

    def accumulate(self, number: int, gradient: torch.Tensor) -> None:
        """Add a whole gradient, which the reducer owns from here on.

        Raises:
            CollectiveError: there was no room before another reduce, and that failed.
        """
        self._backward.note_gradient()
        flat = gradient.detach().contiguous().view(-1)
        del gradient  # a copy that is contiguous already must not keep the original alive
        if not self.adds_up:
            self._make_room(flat.nbytes)
            self._memory.hold_gradient(flat.nbytes)
            self._backward.waiting.setdefault(number, deque()).append(flat)
            # At once, so that the bucket travels while the backward goes on.
            self.go_on()
        elif number in self._sums:
            self._adder.add(flat, self._sums[number])
        else:
            # The members are fp32 here, whatever the gradient's own dtype is.
            self._memory.hold_gradient(_nbytes(self._members[number]))
            # A copy: gradients of views, such as of `a.unsqueeze(0) + b.unsqueeze(0)`, may share
            # their memory, and the next ones are added in place.
            self._sums[number] = flat.to(torch.float32, copy=True)

    def go_on(self) -> None:
        """Start reduces of full buckets and end those that are done, without waiting. Called often
        in a backward.

        Raises:
            CollectiveError: a reduce failed.
        """
        # In order: a later reduce cannot have ended before an earlier one.
        while self._under_way and self._under_way[0].event.done():
            self._end()
        while self._memory.wires and (bucket := self._backward.expected):
            # Only full buckets: one that is reduced early costs another reduce for what comes late.
            if any(number not in self._backward.waiting for number in bucket):
                return
            self._start(self._backward.start())

    def drop(self) -> None:
        """Drop all gradients, on all ranks. Gradients that are being reduced are reduced first."""
        self._memory.release_gradient(sum(total.nbytes for total in self._sums.values()))
        self._sums.clear()
        # Other ranks may have started reduces of this backward: this one has to take part.
        if self._backward.open and not self.adds_up:
            self.finish()
        self._backward.close()

    def finish(self) -> None:
        """Reduce all gradients that have come to any rank. Every rank calls this at the end of its
        backward.

        Raises:
            CollectiveError: another rank does something else, or has failed.
        """
        while self._sums:
            number, values = self._sums.popitem()
            self._backward.waiting[number] = deque([values])
        own = _Progress(
            self._backward.started,
            {number: len(some) for number, some in self._backward.waiting.items()},
        )
        with self._lanes.meter.timed_wait(Wait.GRADIENTS):
            all_progress = [
                _Progress.unpack(answer)
                for answer in self._ranks.collectives.share("what has a gradient", own.pack())
            ]
            # The others start what the furthest rank has started, so that all are at one turn.
            most = max(progress.started for progress in all_progress)
            while self._backward.started < most:
                self._start(self._backward.start())
            left = [self._left(progress, most) for progress in all_progress]
            # All ranks compute the same turns from the same answers.
            for turn in range(
                max((count for counts in left for count in counts.values()), default=0)
            ):
                came = {
                    number for counts in left for number, count in counts.items() if count > turn
                }
                for bucket in self._all_buckets:
                    self._start([number for number in bucket if number in came])
            while self._under_way:
                self._end()
        # What came in this backward is expected in the next; after one without any, everything is.
        self._begin(self._backward.reduced or range(len(self._members)))

    def close(self) -> None:
        """Forget all gradients. No reduce is in flight."""
        self._sums.clear()
        self._backward.waiting.clear()
        self._under_way.clear()
        self._memory.close()

    def _left(self, progress: _Progress, most: int) -> Counter[int]:
        """Return how many gradients of each parameter a rank has left after so many reduces."""
        left = Counter(progress.waiting)
        # The turns that this rank has joined took one gradient each of its buckets' members.
        for turn in range(progress.started, most):
            # Subtraction of Counters drops what is not positive.
            left -= Counter(self._backward.bucket(turn))
        return left

    # --- room -------------------------------------------------------------------------------------

    def _make_room(self, nbytes: int) -> None:
        """Make room for a gradient: wait for reduces in flight, and start some early.

        Which ones are started early depends on which gradients have come, never on time: all ranks
        must start the same.
        """
        # Otherwise another rank could wait for this one in its own backward, and both for ever.
        if not self._ranks.gradients.can_stall:
            return
        while not self._memory.has_room_for(nbytes):
            with self._lanes.meter.timed_wait(Wait.GRADIENTS):
                self.go_on()
                if self._under_way:
                    self._end()
                elif not self._memory.has_room_for(nbytes):
                    # go_on() may just have freed enough; if not, reduce a bucket that is not full.
                    self._start(self._backward.start())

    # --- buckets ----------------------------------------------------------------------------------

    def _join(self, number: int) -> None:
        """Start the reduces that other ranks wait for, up to this one in the sequence: [Note: who
        waits for whom].
        """
        while self._ranks.gradients.started < number:
            self._start(self._backward.start())

    def _start(self, numbers: Sequence[int]) -> None:
        """Reduce the oldest gradient of each of these."""
        if not numbers:
            return
        while not self._memory.wires:
            self._end()
        wire = self._memory.wires.pop()
        # None where this rank has no gradient of it: zeros are sent.
        gradients = [self._next_of(number) for number in numbers]
        group = self._reduces.group(tuple(numbers))
        sums = [
            torch.empty(
                group.shard(place).numel,
                dtype=torch.float32,
                device=self._lanes.accelerator.torch_device,
            )
            for place in range(len(numbers))
        ]
        # Before the reduce starts: it writes to them.
        self._memory.hold_sums(sum(total.nbytes for total in sums))
        nbytes = sum(gradient.nbytes for gradient in gradients if gradient is not None)
        event = self._reduces.start(group, gradients, sums, wire.flat())
        self._under_way.append(_Reduce(numbers, sums, event, wire, nbytes))

    def _next_of(self, number: int) -> torch.Tensor | None:
        waiting = self._backward.waiting.get(number)
        if waiting is None:
            return None
        first = waiting.popleft()
        if not waiting:
            del self._backward.waiting[number]
        return first

    def _end(self) -> None:
        """Wait for the oldest reduce in flight, and deliver its sums."""
        # A function of its own: its frame has the last references to the sums.
        self._memory.note_freed(self._finish(self._under_way.popleft()))

    def _finish(self, ended: _Reduce) -> int:
        """Wait for a reduce, deliver its sums, and return how many bytes it frees."""
        ended.event.wait()
        # Only now: until the reduce has ended, other ranks' bytes arrive there.
        self._memory.wires.append(ended.wire)
        self._memory.release_gradient(ended.gradient_bytes)
        sums_bytes = sum(total.nbytes for total in ended.sums)
        self._memory.release_sums(sums_bytes)
        # A bit for each member that any rank had a gradient of: sums of zeros are not delivered.
        had = 0
        for bits in ended.event.announced:
            had |= bits
        for place, (number, total) in enumerate(zip(ended.numbers, ended.sums, strict=True)):
            if had >> place & 1:
                self._backward.reduced.add(number)
                self._deliver(number, total)
        return ended.gradient_bytes + sums_bytes
