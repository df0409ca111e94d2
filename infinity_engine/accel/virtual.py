"""The emulated device under a virtual clock: one thread, exact times, operations as late as can be.

An operation gets its time when it is submitted: it starts when its stream and its link are free,
all that it waits for has ended and the host has come so far, and takes its bytes over the link's
rate, rounded up to whole nanoseconds. It is carried out when the host learns that it or an
operation behind it has ended, and not before. So code that reads, changes or frees too early works
with NaN or the wrong bytes every time. hazards.py does the same for operations of two streams.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from infinity_engine.accel.base import Accelerator, Buffer, Stream, StreamKind
from infinity_engine.accel.emulated import (
    NAN_BYTE,
    EmulatedAccelerator,
    Emulation,
    ceil_ns,
    op_start_ns,
)
from infinity_engine.accel.hazards import Footprint, carry_out_copy, carry_out_work
from infinity_engine.accel.operation import (
    Copy,
    Failure,
    Mark,
    Operation,
    OperationOwner,
    Submission,
    Work,
)

__all__ = ["VirtualAccelerator", "VirtualOperation", "clock_of"]


class VirtualOperation(Operation):
    """An operation with its time and with the operations that come before it."""

    def __init__(self, owner: OperationOwner, submission: Submission) -> None:
        super().__init__(owner, submission)
        # The span on the clock. The bytes move at another moment: when the host has to learn of it.
        self.start_ns = self.end_ns = 0
        self.behind: Sequence[VirtualOperation] = ()
        self.footprint: Footprint | None = None
        # how many operations had been submitted when it was carried out
        self.carried_at = math.inf
        self._before: dict[Stream, int] = {}

    def place(
        self,
        *,
        start_ns: int,
        end_ns: int,
        behind: Sequence[VirtualOperation],
        before: dict[Stream, int],
    ) -> None:
        """Note its time and the newest operation of each stream that ends before it begins."""
        self.start_ns, self.end_ns = start_ns, end_ns
        self.behind = behind
        self._before = before

    def touch(self, footprint: Footprint) -> None:
        """Note the bytes that it copies."""
        self.footprint = footprint

    @property
    def is_pending(self) -> bool:
        """Whether it was not carried out yet."""
        return self.carried_at == math.inf

    @property
    def upto(self) -> dict[Stream, int]:
        """For each stream, the newest operation that has ended when this one has."""
        # Operations of a stream end in order, so the newest number stands for all before it.
        return {**self._before, self.stream: self.number}

    def begins_after(self, other: VirtualOperation) -> bool:
        """Tell whether it cannot begin before the other has ended."""
        return self._before.get(other.stream, -1) >= other.number

    def carry(self, at: int) -> None:
        """Note that it was carried out."""
        self.carried_at = at
        # Else each operation would keep the one before it: a chain as long as the training.
        self.behind = ()


class VirtualAccelerator(EmulatedAccelerator[VirtualOperation]):
    """An emulated device with computed time: `wait` and `host_work` advance it, not `done`."""

    clock = "virtual"

    def __init__(self, emulation: Emulation) -> None:
        super().__init__(VirtualOperation, emulation)
        self._random = random.Random(emulation.seed)  # noqa: S311 - draws an order, keeps no secret
        self._now_ns = 0
        rate = emulation.rates.host_update_params_per_s if emulation.host_takes_time else None
        self._host_ratio = None if rate is None else rate.as_integer_ratio()
        self._host_start_ns = op_start_ns(emulation.rates.host_start_s)
        self._link_free_ns = {StreamKind.H2D: 0, StreamKind.D2H: 0}
        # The newest operation of each stream that the host knows to have ended.
        self._host_knows: dict[Stream, int] = {}
        # In the order of submission, which _forget() relies on to find the oldest.
        self._pending: dict[int, VirtualOperation] = {}
        # copies that a pending operation may be unordered with
        self._copies: list[VirtualOperation] = []
        # freed blocks that a pending operation may still write
        self._freed: list[tuple[int, torch.Tensor]] = []

    @property
    def now_ns(self) -> int:
        """The host's time."""
        return self._now_ns

    def host_work(self, ns: int) -> None:
        """Keep the host busy for `ns` nanoseconds."""
        if ns < 0:
            raise ValueError(f"expected 0 ns or more, got {ns}")
        self._now_ns += ns

    def host_updated(self, params: int) -> None:
        """Keep the host busy for as long as its updates take at its rate, where that is given."""
        if self._host_ratio is not None:
            self._now_ns += self._host_start_ns + ceil_ns(params, self._host_ratio)

    def free(self, buffer: Buffer) -> None:
        """Give a buffer back; a later read of it shows NaN, whatever is still written there."""
        memory = buffer.release()
        self._memory.free(memory)
        # Operations submitted before this may still write there; NaN follows each of them again.
        # The block is kept until those have ended, though the ledger has its bytes back already.
        self._freed.append((self._submitted, memory))
        self._forget()

    def _start(self, operation: VirtualOperation, behind: Sequence[VirtualOperation]) -> None:
        action, stream = operation.action, operation.stream
        start_ns = max([self._now_ns, *(other.end_ns for other in behind)])
        if isinstance(action, Copy):
            start_ns = max(start_ns, self._link_free_ns[stream.kind])
        end_ns = start_ns + self._duration_ns(stream, action)
        # A vector clock: what has ended before this begins, through any chain of waits.
        before = _newest([self._host_knows, *(other.upto for other in behind)])
        operation.place(start_ns=start_ns, end_ns=end_ns, behind=behind, before=before)
        if isinstance(action, Copy):
            self._link_free_ns[stream.kind] = end_ns
            # A view of the block, as a footprint outlives the copy's own tensors.
            device = self._memory.part(
                action.target if stream.kind is StreamKind.H2D else action.source
            )
            operation.touch(
                Footprint.of(action, name=operation.name, kind=stream.kind, device=device)
            )
            self._copies.append(operation)
        if not isinstance(action, Mark):
            self._note(operation, start_ns, end_ns)
        self._pending[operation.number] = operation

    def _has_ended(self, operation: VirtualOperation) -> bool:
        # The clock alone decides, not whether the bytes have moved: that depends on the seed.
        if self._now_ns < operation.end_ns:
            return False
        self._learn([operation])
        return True

    def _wait(self, operation: VirtualOperation) -> None:
        # Waiting for what has ended already takes no time.
        self._now_ns = max(self._now_ns, operation.end_ns)
        self._learn([operation])
        self._raise_failure(operation)

    def _drain(self) -> None:
        pending = list(self._pending.values())
        # Draining is waiting for all, so the clock goes to the latest end.
        self._now_ns = max([self._now_ns, *(operation.end_ns for operation in pending)])
        self._learn(pending)

    def _learn(self, ended: list[VirtualOperation]) -> None:
        """Note that the host knows that these have ended: carry out what they need."""
        self._carry_out_all(ended)
        self._host_knows = _newest([self._host_knows, *(operation.upto for operation in ended)])
        self._forget()

    def _carry_out_all(self, ended: list[VirtualOperation]) -> None:
        """Carry out these and what they wait for, whether or not the host learns of it."""
        for operation in self._in_some_order(_closure(ended)):
            self._carry_out(operation)

    def _in_some_order(self, needed: dict[int, VirtualOperation]) -> Iterator[VirtualOperation]:
        """Yield the operations in one of the orders that what they wait for allows."""
        missing = {
            number: {other.number for other in operation.behind if other.is_pending}
            for number, operation in needed.items()
        }
        ready = sorted(number for number, others in missing.items() if not others)
        followers: dict[int, list[int]] = {}
        for number, others in missing.items():
            for other in others:
                followers.setdefault(other, []).append(number)
        while ready:
            # Any order that the waits allow may happen on a device, so a seeded one is as good as
            # another.
            # In a set order by number until here, so that one seed gives one order.
            number = ready.pop(self._random.randrange(len(ready)))
            yield needed[number]
            for follower in followers.get(number, ()):
                missing[follower].remove(number)
                if not missing[follower]:
                    ready.append(follower)

    def _carry_out(self, operation: VirtualOperation) -> None:
        failure = operation.inherited()
        if failure is None:
            try:
                self._perform(operation)
            except Exception as error:
                failure = Failure(error)
        operation.carry(self._submitted)
        self._finish(operation, failure)
        del self._pending[operation.number]
        # Freed after this operation was submitted: its bytes must still show NaN.
        for since, memory in self._freed:
            if operation.number < since:
                memory.fill_(NAN_BYTE)

    def _perform(self, operation: VirtualOperation) -> None:
        action = operation.action
        if isinstance(action, Mark):
            return
        self._raise_fault(operation)
        # Neither begins after the other's end: on a real device they may run at the same time.
        unordered = [
            other.footprint
            for other in self._copies
            if other is not operation
            and other.footprint is not None
            and not other.begins_after(operation)
            and not operation.begins_after(other)
        ]
        if isinstance(action, Copy):
            carry_out_copy(action, unordered)
        elif isinstance(action, Work):
            carry_out_work(action.call, unordered, name=operation.name)

    def _forget(self) -> None:
        """Drop what cannot matter any more: all that is pending was submitted later."""
        # Dictionaries keep insertion order, so the first pending operation is the oldest.
        oldest = next(iter(self._pending), self._submitted)
        self._copies = [op for op in self._copies if op.carried_at > oldest]
        self._freed = [(since, memory) for since, memory in self._freed if since > oldest]


def clock_of(accelerator: Accelerator) -> Callable[[], int]:
    """Return the clock of an accelerator's times: the device's, where it computes its time."""
    if isinstance(accelerator, VirtualAccelerator):
        return lambda: accelerator.now_ns
    return time.perf_counter_ns


def _newest(known: Iterable[dict[Stream, int]]) -> dict[Stream, int]:
    """Return the newest operation of each stream over all of `known`."""
    newest: dict[Stream, int] = {}
    for operations in known:
        for stream, number in operations.items():
            newest[stream] = max(number, newest.get(stream, -1))
    return newest


def _closure(ended: list[VirtualOperation]) -> dict[int, VirtualOperation]:
    """Return these and all that they wait for, except what was carried out."""
    needed: dict[int, VirtualOperation] = {}
    left = [operation for operation in ended if operation.is_pending]
    while left:
        operation = left.pop()
        if operation.number not in needed:
            needed[operation.number] = operation
            left += [other for other in operation.behind if other.is_pending]
    return needed
