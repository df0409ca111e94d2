"""`TimedCarrier`: carries out the ops of a plan in time alone, so that the executor's own walk is
what is simulated.

Pure: a copy or an update is an event with a time. The thread that walks waits by moving its clock.
Called by timeline.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from infinity_engine.plan import Lane, LaneClocks, OpTime
from infinity_engine.plan.ops import Op

__all__ = ["TimedCarrier", "TimedEvent"]


class TimedEvent:
    """The end of an op, at `end_ns` of the clock of `carrier`."""

    __slots__ = ("_carrier", "end_ns")

    def __init__(self, carrier: TimedCarrier, end_ns: int) -> None:
        self._carrier = carrier
        self.end_ns = end_ns

    def done(self) -> bool:
        """Tell whether the walking thread has come to that time."""
        return self.end_ns <= self._carrier.now_ns

    def wait(self) -> None:
        """Let the walking thread do nothing until then."""
        self._carrier.wait_until(self.end_ns)


class TimedCarrier:
    """Times ops on these clocks; `now_ns` is the time that the walking thread has come to.

    `note` is called with each op and its time.
    """

    def __init__(self, clocks: LaneClocks, note: Callable[[Op, OpTime], None]) -> None:
        self.now_ns = 0
        self._clocks = clocks
        self._note = note

    def wait_until(self, ns: int) -> None:
        """Let the thread do nothing until then."""
        self.now_ns = max(self.now_ns, ns)

    def carry_out(self, op: Op, after: Sequence[TimedEvent]) -> TimedEvent | None:
        """Put an op into its lane; the walking thread makes updates on the host itself."""
        begin_ns = max((event.end_ns for event in after), default=0)
        time = self._clocks.work(
            op.lane,
            self._clocks.duration_ns(op.lane, op.amount),
            after_ns=max(self.now_ns, begin_ns),
        )
        self._note(op, time)
        if op.lane is Lane.HOST:
            self.now_ns = time.end_ns
            return None
        return TimedEvent(self, time.end_ns)
