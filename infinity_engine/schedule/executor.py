"""`Executor`: walks a StepPlan, op by op, in the one order that keeps every lane at work.

Knows order and dependencies; the Carrier knows what an op does. It carries out the HOST lane
itself, or on a thread of its own, which then has a few updates ahead. The walk waits only for what
the HOST lane needs next, until the end. A walk can be paused and resumed, while submitted ops go on
by themselves. Its waits are spans, and counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from infinity_engine.kept_errors import kept
from infinity_engine.plan.ops import Lane, Op
from infinity_engine.plan.step import StepPlan
from infinity_engine.telemetry import Telemetry

if TYPE_CHECKING:  # the planner walks too, without torch
    from infinity_engine.memory import Waitable

__all__ = ["WAIT_FOR_OPS", "WAIT_FOR_READS", "WAIT_FOR_WRITES", "Carrier", "Executor", "Walk"]

WAIT_FOR_OPS = "wait for ops"
WAIT_FOR_READS = "wait for reads"
WAIT_FOR_WRITES = "wait for writes"
_AHEAD = 2  # updates that the host's thread is given at most: so many end after an interrupt
# Ops on a link, in one direction, that may not have ended, at most. A stream of a GPU takes some
# 1,000 commands, and an op is several; then the driver lets the thread wait that submits more. And
# what modules launch comes after updates of the device that wait for what is queued on the links.
_QUEUED = 16
_DRIVES = MappingProxyType({Lane.NVME_READ: WAIT_FOR_READS, Lane.NVME_WRITE: WAIT_FOR_WRITES})
# [Note: which ops wait on the host] Streams of a device wait for one another's events, so their ops
# are submitted at once. Drives cannot wait: their ops, and those of streams that come after I/O,
# are submitted when the ops before them have ended. So are those after an update that the host's
# thread makes; that thread waits for its own updates by itself. Ops of a link that is full wait
# for room. The walk checks that between the host's updates, and whenever one of them has to
# wait.
_ENDED_FIRST: Mapping[Lane, frozenset[Lane]] = MappingProxyType(
    {
        Lane.HOST: frozenset(Lane) - {Lane.HOST},
        Lane.DEVICE: frozenset({Lane.HOST, *_DRIVES}),
        Lane.H2D: frozenset({Lane.HOST, *_DRIVES}),
        Lane.D2H: frozenset({Lane.HOST, *_DRIVES}),
        Lane.NVME_READ: frozenset(Lane),
        Lane.NVME_WRITE: frozenset(Lane),
    }
)
"""By the lane of an op: the lanes whose ops must have ended before it is submitted."""


class Carrier(Protocol):
    """Carries out ops: the engine with copies and updates, or a stand-in of a test or bench."""

    def carry_out(self, op: Op, after: Sequence[Any]) -> Waitable | None:
        """Submit an op, to begin when `after` have passed; None where it has ended on return.

        `after` are events that it has returned for ops of streams, and of the HOST lane for the ops
        of that lane, which end in the order in which they are submitted.
        """


def _nothing() -> None:
    pass


class Executor:
    """Walks plans with one carrier; calls `safe_point` between ops, where raising does no harm.

    At most `queued` ops are under way on the device's link, in each direction.
    """

    def __init__(
        self,
        carrier: Carrier,
        telemetry: Telemetry,
        safe_point: Callable[[], None] = _nothing,
        *,
        queued: int = _QUEUED,
    ) -> None:
        self.carrier = carrier
        self.telemetry = telemetry
        self.safe_point = safe_point
        self.most = {Lane.HOST: _AHEAD, Lane.H2D: queued, Lane.D2H: queued}

    def begin(self, plan: StepPlan) -> Walk:
        """Return a walk along the plan, which goes on as far as each call says."""
        return Walk(plan, self)


class Walk:
    """One walk along a plan. An op that fails ends it, and every call raises the failure again."""

    def __init__(self, plan: StepPlan, executor: Executor) -> None:
        self._plan = plan
        self._executor = executor
        self._order = deque(plan.submission_order())
        self._lanes = [op.lane for op in plan.ops]
        # None: the op is known to have ended, without an error.
        self._events: dict[int, Waitable | None] = {}
        self._held_back: dict[Lane, deque[int]] = {}  # [Note: who waits for whom]
        # By lane, what keeps its first held-back op: an op that has not ended, or one that is not
        # submitted. An entry may outlive its op. That does no harm: an event that is done stays
        # done, a submitted op stays in `_events`, and an op leaves its lane's queue only after both
        # were so.
        self._awaited: dict[Lane, Waitable] = {}
        self._missing: dict[Lane, int] = {}
        self._arrivals = plan.arrivals()  # of subgroups that are not known to have arrived
        self._updates = {
            op.subgroup: number for number, op in enumerate(plan.ops) if op.lane is Lane.HOST
        }
        # Ops that may not have ended, in lanes that take so many.
        self._under_way: dict[Lane, deque[int]] = {lane: deque() for lane in executor.most}
        self._failure = _Failure(plan.ops, self._events, executor.telemetry)

    @property
    def failed(self) -> bool:
        """Whether an op has failed."""
        return self._failure.is_known

    def leave_untold(self) -> None:
        """Note that the caller keeps the failure that was just raised to itself."""
        self._failure.leave_untold()

    def tell(self) -> None:
        """Raise a failure that was left untold, once.

        Raises:
            RuntimeError: an op failed, as `finish` says.
        """
        self._failure.tell()

    def has_arrived(self, subgroup: int) -> bool:
        """Tell whether the new parameters of a subgroup are where the plan leaves them.

        Does not wait.

        Raises:
            RuntimeError: an op failed, as `finish` says.
        """
        # Asked after each module, of all that the next modules need.
        number = self._arrivals.get(subgroup)
        if number is None:
            return True
        if number not in self._events:
            return False
        event = self._events[number]
        if event is not None and not event.done():
            return False
        with self._failure:
            self._has_ended(number)
            self._keep_working()
        del self._arrivals[subgroup]
        return True

    def poll(self) -> bool:
        """Submit ops that need no wait, and the host's next update if it can begin; tell if it did.

        The host's thread gets as many as it takes.

        Raises:
            RuntimeError: an op failed, as `finish` says.
        """
        with self._failure:
            updates = self._update_on_host()
            self._keep_working()
            self._advance()
        return updates

    def reach(self, subgroups: Iterable[int]) -> None:
        """Carry out the host's updates of these subgroups and those before; begin what follows.

        Does not wait for what follows.

        Raises:
            RuntimeError: an op failed, as `finish` says.
        """
        wanted = [self._updates[index] for index in subgroups if index in self._updates]
        while any(number not in self._events for number in wanted):
            # Outside of the block below: what a safe point raises does not end the walk.
            self._executor.safe_point()
            with self._failure:
                self._submit_next()
        with self._failure:
            self._submit_others()
            self._advance()
            for number in wanted:
                self._wait_for(number)

    def arrive(self, subgroups: Iterable[int]) -> None:
        """Go on until the new parameters of these subgroups are where the plan leaves them.

        Raises:
            RuntimeError: an op failed, as `finish` says.
        """
        chosen = [index for index in subgroups if index in self._arrivals]
        self._carry_out([self._arrivals[index] for index in chosen])
        for index in chosen:
            self._arrivals.pop(index, None)

    def finish(self) -> None:
        """Carry out the remaining ops, and wait for the end of all.

        Raises:
            RuntimeError: an op failed; names it. Those that were submitted have ended, later ones
                were not begun.
        """
        self._carry_out(range(len(self._plan.ops)))

    def _carry_out(self, wanted: Sequence[int]) -> None:
        """Carry out these ops and those before them, and wait for their end."""
        # A walk that failed raises here, also when nothing is left to do.
        self._failure.check()
        # One op after another: asking for all of them after each submission would take time that
        # grows with the square of the plan.
        for number in wanted:
            while number not in self._events:
                self._executor.safe_point()
                with self._failure:
                    if self._order:
                        self._submit_next()
                    else:
                        self._wait_for_held_back()
        # Asked one by one: an op may end while another one is waited for.
        ends = (number for number in wanted if self._events[number] is not None)
        waited = True
        while waited:
            self._executor.safe_point()
            with self._failure:
                self._keep_working()
                waited = any(map(self._wait_for, ends))

    def _submit_next(self) -> None:
        """Submit held-back ops that can go, then hold back what comes next, up to an op that can be
        submitted; submit that one, unless it is an update of the host that others were before.
        """
        self._advance()
        is_behind = self._hold_back()
        if not self._order:
            return
        op = self._plan.ops[self._order[0]]
        if op.lane is Lane.HOST:
            if is_behind:
                return
            while self._is_full(Lane.HOST):
                self._wait_for(self._under_way[Lane.HOST][0])
                self._advance()
            # Ops that the update needs are held back: these go first.
            while any(other not in self._events for other in op.after):
                self._wait_for_held_back()
            for other in op.after:
                if self._lanes[other] in _ENDED_FIRST[Lane.HOST]:
                    self._wait_for(other)
        after = self._inputs(op)
        assert after is not None, "it waits for nothing more"
        self._submit(self._order.popleft(), after)

    def _hold_back(self) -> bool:
        """Hold back the next ops of the order that cannot be submitted yet; tell if there are any.

        The host's updates are not held back: the walk waits for what they need.
        """
        order, ops, held_back = self._order, self._plan.ops, self._held_back
        before = len(order)
        while order:
            op = ops[order[0]]
            lane = op.lane
            # Behind one that is held back, too: a lane keeps its order.
            if lane is Lane.HOST or not (held_back.get(lane) or self._inputs(op) is None):
                break
            held_back.setdefault(lane, deque()).append(order.popleft())
        return len(order) < before

    def _submit_others(self) -> None:
        """Submit or hold back the ops before the host's next update."""
        while self._order and self._plan.ops[self._order[0]].lane is not Lane.HOST:
            self._submit_next()

    def _update_on_host(self) -> bool:
        """Submit the host's next update if it can begin, and what is around it; tell if it did."""
        # First: an update has to be next, as other ops keep the order of their lane.
        self._submit_others()
        after = self._inputs(self._plan.ops[self._order[0]]) if self._order else None
        if after is None:
            return False
        self._submit(self._order.popleft(), after)
        self._submit_others()
        return True

    def _keep_working(self) -> None:
        """Give the host's thread what it takes, if there is one and it is at work."""
        while self._under_way[Lane.HOST] and self._update_on_host():
            pass

    def _is_full(self, lane: Lane) -> bool:
        """Tell whether a lane has as many ops as it takes."""
        under_way = self._under_way.get(lane)
        if not under_way:
            return False
        most = self._executor.most[lane]
        # Only of the host's thread it matters whether it is at work at all.
        if len(under_way) < most and lane is not Lane.HOST:
            return False
        # All that have ended, so that most of the next ops find room by number alone.
        while under_way and self._has_ended(under_way[0]):
            under_way.popleft()
        return len(under_way) >= most

    def _inputs(self, op: Op) -> list[Waitable] | None:
        """Return the events that an op is handed; None where it cannot be submitted yet.

        It cannot while an op before it is not submitted, or has to end first ([Note: which ops wait
        on the host]), or while its lane is full.
        """
        # Asked several times for each op, of all that are held back.
        events, lanes, lane = self._events, self._lanes, op.lane
        ended_first = _ENDED_FIRST[lane]
        after = []
        for other in op.after:
            if other not in events:
                self._missing[lane] = other
                return None
            event = events[other]
            if event is None:
                continue
            if lanes[other] not in ended_first:
                after.append(event)
            elif event.done():
                self._end(other)  # raises its error, if any
            else:
                self._awaited[lane] = event
                return None
        return None if self._under_way.get(lane) and self._is_full(lane) else after

    def _advance(self) -> None:
        """Submit the held-back ops that can be submitted, each lane in its order."""
        ops, inputs_of = self._plan.ops, self._inputs
        awaited, missing, events = self._awaited, self._missing, self._events
        moved = True
        while moved:
            moved = False
            for lane, waiting in self._held_back.items():
                if (
                    not waiting
                    or (lane in missing and missing[lane] not in events)
                    or (lane in awaited and not awaited[lane].done())
                ):
                    continue
                while waiting and (after := inputs_of(ops[waiting[0]])) is not None:
                    moved = True
                    self._submit(waiting.popleft(), after)

    def _wait_for_held_back(self) -> None:
        """Wait until the first held-back op can be submitted, and submit all that can be then."""
        # The first in the plan never waits for one that is held back itself.
        op = self._plan.ops[min(waiting[0] for waiting in self._held_back.values() if waiting)]
        if self._is_full(op.lane):
            self._wait_for(self._under_way[op.lane][0])
        for other in op.after:
            self._wait_for(other)
        self._advance()

    def _submit(self, number: int, after: Sequence[Waitable]) -> None:
        op = self._plan.ops[number]
        try:
            event = self._events[number] = self._executor.carrier.carry_out(op, after)
        except Exception as error:
            raise _OpError(number, error) from error
        if event is not None and op.lane in self._under_way:
            self._under_way[op.lane].append(number)

    def _wait_for(self, number: int) -> bool:
        """Wait for the end of an op; tell whether it had not ended."""
        if self._has_ended(number):
            return False
        with self._executor.telemetry.timed(_DRIVES.get(self._lanes[number], WAIT_FOR_OPS)):
            self._end(number)
        return True

    def _has_ended(self, number: int) -> bool:
        """Tell whether an op has ended."""
        event = self._events[number]
        if event is not None:
            if not event.done():
                return False
            self._end(number)  # raises its error, if any
        return True

    def _end(self, number: int) -> None:
        event = self._events[number]
        assert event is not None, "the carrier returned one"
        try:
            event.wait()
        except Exception as error:
            raise _OpError(number, error) from error
        # Ops that come after this one need not ask its event again.
        self._events[number] = None


class _Failure:
    """Why a walk cannot go on, once that is known. What fails in its context is the failure."""

    def __init__(
        self, ops: Sequence[Op], events: Mapping[int, Waitable | None], telemetry: Telemetry
    ) -> None:
        self._ops = ops
        self._events = events
        self._telemetry = telemetry
        self._message = ""
        self._cause: BaseException | None = None
        self._is_untold = False

    @property
    def is_known(self) -> bool:
        """Whether an op has failed, or the walk was interrupted."""
        return bool(self._message)

    def leave_untold(self) -> None:
        """Note that the caller keeps the failure that was just raised to itself."""
        self._is_untold = True

    def tell(self) -> None:
        """Raise a failure that was left untold, once."""
        if self._is_untold:
            self.check()

    def check(self) -> None:
        """Refuse to go on after a failure."""
        if self._message:
            self._is_untold = False
            raise RuntimeError(self._message) from self._cause

    def __enter__(self) -> None:
        if self._message:
            self.check()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if isinstance(error, _OpError):
            kept(error)  # it becomes the context of the error that is raised
            # Of several failures the first one in the plan: the others may follow from it.
            number, self._cause = min(
                [(error.number, error.cause), *self._end()], key=lambda failure: failure[0]
            )
            op = self._ops[number]
            self._message = (
                f"op {number} of the plan, {op.name} of subgroup {op.subgroup}, failed: "
                f"{type(self._cause).__name__}: {self._cause}"
            )
            self.check()
        elif error is not None:
            # Without a cause to keep: the interrupt itself is raised on.
            self._message = "the update was interrupted between two of its ops and cannot go on"
            self._end()  # submitted reads would go on into buffers that are about to be reused

    def _end(self) -> list[tuple[int, Exception]]:
        """Wait until all submitted ops have ended; return which failed, and why."""
        failed = []
        with self._telemetry.timed(WAIT_FOR_OPS):
            for number, submitted in self._events.items():
                try:
                    if submitted is not None:
                        submitted.wait()
                except Exception as error:
                    failed.append((number, kept(error)))
        return failed


class _OpError(Exception):
    """An op of the plan failed."""

    def __init__(self, number: int, cause: Exception) -> None:
        super().__init__(number, cause)
        self.number = number
        self.cause = cause
