"""`TimedWalk`: times the one thread that updates beside the next forward: the executor's walk
without bytes.

Pure. Goes along a plan's order of submission, as far as it is asked to, and is busy itself with
what is in the HOST lane; everything else is submitted when it comes by. Called by timeline.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from infinity_engine.plan import Lane, LaneClocks, OpTime
from infinity_engine.plan.ops import Op
from infinity_engine.plan.step import StepPlan

__all__ = ["TimedWalk"]


class TimedWalk:
    """A walk along `plan` on these clocks, and the time that its thread has come to.

    `note` is told of each op.
    """

    def __init__(
        self, plan: StepPlan, clocks: LaneClocks, note: Callable[[Op, OpTime], None]
    ) -> None:
        self.now_ns = 0
        self._ops = plan.ops
        self._clocks = clocks
        self._note = note
        self._order = plan.submission_order()
        self._at = 0  # in this order
        self._ends_ns: dict[int, int] = {}  # of the ops that were submitted
        self._arrivals = plan.arrivals()
        self._updates = {
            op.subgroup: number for number, op in enumerate(plan.ops) if op.lane is Lane.HOST
        }
        self._last_ns = 0

    def wait_until(self, ns: int) -> None:
        """Let the thread do nothing until then."""
        self.now_ns = max(self.now_ns, ns)

    def has_arrived(self, subgroups: Collection[int]) -> bool:
        """Tell whether the new parameters of these are where the plan leaves them."""
        return all(
            self._ends_ns.get(self._arrivals[index], self.now_ns + 1) <= self.now_ns
            for index in subgroups
        )

    def poll(self) -> bool:
        """Submit what waits for no update on the host, and make one of these, if it can begin; tell
        whether so.
        """
        self._submit_others()
        if self._at == len(self._order):
            return False
        after = self._ops[self._order[self._at]].after
        if any(self._ends_ns.get(number, self.now_ns + 1) > self.now_ns for number in after):
            return False
        self._submit()
        self._submit_others()
        return True

    def reach(self, subgroups: Iterable[int]) -> None:
        """Make the host's updates of these, and all that comes before them."""
        self._submit_until(self._updates[index] for index in subgroups if index in self._updates)
        self._submit_others()

    def arrive(self, subgroups: Collection[int]) -> None:
        """Go on until the new parameters of these are where the plan leaves them."""
        wanted = [self._arrivals[index] for index in subgroups]
        self._submit_until(wanted)
        self.wait_until(max((self._ends_ns[number] for number in wanted), default=0))

    def finish(self) -> None:
        """Do all that is left, and wait for its end."""
        while self._at < len(self._order):
            self._submit()
        self.wait_until(self._last_ns)

    def _submit_until(self, wanted: Iterable[int]) -> None:
        for number in wanted:
            while number not in self._ends_ns:
                self._submit()

    def _submit_others(self) -> None:
        while (
            self._at < len(self._order) and self._ops[self._order[self._at]].lane is not Lane.HOST
        ):
            self._submit()

    def _submit(self) -> None:
        """Submit the next op of the order; updates on the host have ended then."""
        number = self._order[self._at]
        op = self._ops[number]
        after_ns = max([self.now_ns, *(self._ends_ns[other] for other in op.after)])
        time = self._clocks.work(
            op.lane, self._clocks.duration_ns(op.lane, op.amount), after_ns=after_ns
        )
        if op.lane is Lane.HOST:
            self.now_ns = time.end_ns
        self._ends_ns[number] = time.end_ns
        self._last_ns = max(self._last_ns, time.end_ns)
        self._at += 1
        self._note(op, time)
