"""`Executor`: walks a StepPlan, op by op, in the one order that keeps every lane at work.

Knows order and dependencies, not what an op does: that is the Carrier's. One thread; it is busy itself with what is in
the HOST lane, and never waits for anything else before the end. What it waits is a span, and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from infinity_engine.accel import Event
from infinity_engine.plan.ops import Lane, Op
from infinity_engine.plan.step import StepPlan
from infinity_engine.telemetry import Telemetry

__all__ = ["WAIT_FOR_OPS", "Carrier", "Executor"]

WAIT_FOR_OPS = "wait for ops"


class Carrier(Protocol):
    """Whoever carries out ops."""

    def carry_out(self, op: Op, after: Sequence[Event]) -> Event | None:
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
        events: dict[int, Event | None] = {}
        failed: tuple[int, Exception] | None = None
        for number in plan.submission_order():
            op = plan.ops[number]
            after = [event for event in (events[other] for other in op.after) if event is not None]
            try:
                if op.lane is Lane.HOST and after:
                    with self._telemetry.timed(WAIT_FOR_OPS):
                        _wait_for(after)
                    after = []
                events[number] = self._carrier.carry_out(op, after)
            except Exception as error:
                failed = (number, error)
                break
        with self._telemetry.timed(WAIT_FOR_OPS):
            for number, submitted in events.items():
                try:
                    _wait_for([submitted] if submitted is not None else [])
                except Exception as error:
                    if failed is None or number < failed[0]:
                        failed = (number, error)
        if failed is not None:
            number, cause = failed
            op = plan.ops[number]
            raise RuntimeError(
                f"op {number} of the plan, {op.name} of subgroup {op.subgroup}, failed: {type(cause).__name__}: {cause}"
            ) from cause


def _wait_for(events: Sequence[Event]) -> None:
    for event in events:
        event.wait()
