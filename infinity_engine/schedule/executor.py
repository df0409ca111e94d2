"""`Executor`: walks a StepPlan, op by op, in the one order that keeps every lane at work.

Knows order and dependencies, not what an op does: that is the Carrier's. One thread; it is busy itself with what is in
the HOST lane, and waits for nothing else before the end but what the HOST lane needs next. What it waits is a span, and
counted.

[Note: who waits for whom] Streams of a device wait for one another's events, so their ops are submitted at once. Drives
cannot wait: their ops, and those of streams that come after I/O, are submitted when what they come after has ended.
That is looked at between the host's updates, and whenever one of them has to wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from infinity_engine.accel import Event as StreamEvent
from infinity_engine.memory import Event
from infinity_engine.plan.ops import Lane, Op
from infinity_engine.plan.step import StepPlan
from infinity_engine.telemetry import Telemetry

__all__ = ["WAIT_FOR_OPS", "Carrier", "Executor"]

WAIT_FOR_OPS = "wait for ops"
_DRIVES = frozenset({Lane.NVME_READ, Lane.NVME_WRITE})


class Carrier(Protocol):
    """Whoever carries out ops."""

    def carry_out(self, op: Op, after: Sequence[StreamEvent]) -> Event | None:
        """Submit an op, to begin when `after` have passed; None where it has ended on return."""


class Executor:
    """Walks plans with one carrier."""

    def __init__(self, carrier: Carrier, telemetry: Telemetry) -> None:
        self._carrier = carrier
        self._telemetry = telemetry

    def run(self, plan: StepPlan) -> None:
        """Carry out every op of the plan and wait until all have ended.

        Raises:
            RuntimeError: an op failed; names it. Those that were submitted have ended, later ones were not begun.
        """
        walk = _Walk(plan, self._carrier, self._telemetry)
        failed = walk.submit_all()
        with self._telemetry.timed(WAIT_FOR_OPS):
            failed = walk.wait_for_all(failed)
        if failed is not None:
            number, cause = failed
            op = plan.ops[number]
            raise RuntimeError(
                f"op {number} of the plan, {op.name} of subgroup {op.subgroup}, failed: {type(cause).__name__}: {cause}"
            ) from cause


_Failed = tuple[int, Exception]


class _Walk:
    """One walk along a plan: what was submitted, and what waits to be."""

    def __init__(self, plan: StepPlan, carrier: Carrier, telemetry: Telemetry) -> None:
        self._plan = plan
        self._carrier = carrier
        self._telemetry = telemetry
        self._events: dict[int, Event | None] = {}
        self._held_back: dict[Lane, deque[int]] = {}  # [Note: who waits for whom]

    def submit_all(self) -> _Failed | None:
        """Submit every op; return the first that failed, where one did, and submit none after it."""
        for number in self._plan.submission_order():
            failed = self._take(number)
            if failed is not None:
                return failed
        while any(self._held_back.values()):
            failed = self._let_go_of_one()
            if failed is not None:
                return failed
        return None

    def wait_for_all(self, failed: _Failed | None) -> _Failed | None:
        """Wait for the end of all that was submitted; return the op with the lowest number that failed."""
        for number, submitted in self._events.items():
            try:
                if submitted is not None:
                    submitted.wait()
            except Exception as error:
                if failed is None or number < failed[0]:
                    failed = (number, error)
        return failed

    def _take(self, number: int) -> _Failed | None:
        """Submit an op of the plan's order, or hold it back; what was held back is submitted where it can be."""
        op = self._plan.ops[number]
        failed = self._advance()
        if failed is not None:
            return failed
        if op.lane is not Lane.HOST:
            if self._held_back.get(op.lane) or not self._can_submit(op):
                self._held_back.setdefault(op.lane, deque()).append(number)
                return None
            return self._submit(number)
        while any(other not in self._events for other in op.after):
            failed = self._let_go_of_one()
            if failed is not None:
                return failed
        return self._submit(number)

    def _can_submit(self, op: Op) -> bool:
        for other in op.after:
            if other not in self._events:
                return False
            event = self._events[other]
            if event is not None and self._has_to_end(other, op) and not event.done():
                return False
        return True

    def _advance(self) -> _Failed | None:
        """Submit what was held back and can be submitted, each lane in its order."""
        moved = True
        while moved:
            moved = False
            for waiting in self._held_back.values():
                while waiting and self._can_submit(self._plan.ops[waiting[0]]):
                    moved = True
                    failed = self._submit(waiting.popleft())
                    if failed is not None:
                        return failed
        return None

    def _let_go_of_one(self) -> _Failed | None:
        """Wait until the first op that is held back can be submitted, and submit it."""
        number = min(waiting[0] for waiting in self._held_back.values() if waiting)
        for other in self._plan.ops[number].after:
            event = self._events[other]
            if event is not None:
                try:
                    self._wait_for(event)
                except Exception as error:
                    return other, error
        return self._advance()

    def _submit(self, number: int) -> _Failed | None:
        op = self._plan.ops[number]
        after: list[StreamEvent] = []
        for other in op.after:
            event = self._events[other]
            if event is None:
                continue
            if not self._has_to_end(other, op):
                assert isinstance(event, StreamEvent), "only drives have other ones, and what is theirs has to end"
                after.append(event)
                continue
            try:
                self._wait_for(event)
            except Exception as error:
                return other, error
        try:
            self._events[number] = self._carrier.carry_out(op, after)
        except Exception as error:
            return number, error
        return None

    def _has_to_end(self, other: int, op: Op) -> bool:
        """Tell whether one op has to have ended before another is submitted: streams alone wait for streams."""
        return op.lane is Lane.HOST or op.lane in _DRIVES or self._plan.ops[other].lane in _DRIVES

    def _wait_for(self, event: Event) -> None:
        if event.done():
            event.wait()  # which raises what failed
        else:
            with self._telemetry.timed(WAIT_FOR_OPS):
                event.wait()
