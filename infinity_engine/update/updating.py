"""`Updates`: carries out one update after the other, each along the plan.

With a deferral, part of an update goes on beside the next forward. An op that fails ends the walk;
the next call of the engine resumes it. Between two updates, a better plan may replace the plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from infinity_engine.errors import CapacityError
from infinity_engine.gradients.keeper import GradientKeeper
from infinity_engine.lanes.meter import Meter
from infinity_engine.outcome import StepResult
from infinity_engine.parameters.deferred import DeferredUpdate, Follower, Part
from infinity_engine.parameters.providing import NothingFetched, Provider
from infinity_engine.plan.step import StepPlan
from infinity_engine.schedule import Executor, Walk
from infinity_engine.update.early import EarlyUpdates, NoEarlyUpdates
from infinity_engine.update.replanning import KeptPlan, Replanner
from infinity_engine.update.states import StateKeeper
from infinity_engine.update.under_way import StepInputs, StepUnderWay

__all__ = ["Deferral", "Updates"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Deferral:
    """Which part of an update can wait until modules need it: all subgroups but those in `now`."""

    now: Collection[int]
    parts: Mapping[int, Sequence[Part]]
    """The parts of each parameter that subgroups hold."""
    follower: Follower
    """What gives modules their parameters, and lets them wait for new values."""
    defers: bool = True
    """Whether an update goes on after its step at all."""

    @classmethod
    def none(cls) -> Deferral:
        """Return that of updates that end in their step."""
        return cls(now=(), parts={}, follower=NothingFetched(), defers=False)


class Updates:
    """The updates of one engine."""

    def __init__(
        self,
        plan: StepPlan,
        executor: Executor,
        *,
        states: StateKeeper,
        early: EarlyUpdates | NoEarlyUpdates,
        gradients: GradientKeeper,
        fetcher: Provider,
        meter: Meter,
        deferral: Deferral,
        replanner: Replanner | KeptPlan,
    ) -> None:
        self._deferral = deferral
        self._executor = executor
        self._states = states
        self._early = early
        self._gradients = gradients
        self._fetcher = fetcher
        self._meter = meter
        self._replanner = replanner
        self._plan = plan
        self._planned_again: str | None = None
        self._walk: Walk | None = None  # of the update in flight, None between two updates
        self._made = 0

    @property
    def plan(self) -> StepPlan:
        """The plan of the update in flight, or of the next one."""
        return self._plan

    @property
    def made(self) -> int:
        """How many updates were made. One in flight counts as soon as nothing can stop it."""
        return self._made

    @property
    def under_way(self) -> bool:
        """Whether an update goes on after its step."""
        return self._walk is not None

    def begin(self, inputs: StepInputs, result: StepResult) -> None:
        """Let a step be under way, with what its backward has updated, unless one is."""
        if not self._states.begun:
            made = self._early.made
            step = StepUnderWay(inputs, result, updated=dict(made), made_early=frozenset(made))
            self._fetcher.moved(self._states.begin_step(step))
            self._early.end()

    def make(self) -> None:
        """Make the update that has begun, except for what can wait.

        Raises:
            RuntimeError: an op failed. `resume` goes on from there.
        """
        walk = self._begin_walk()
        with self._failing_ends():
            if self._deferral.defers:
                walk.arrive(self._deferral.now)
            else:
                walk.finish()
        if not self._deferral.defers:
            self._conclude()

    def defer_rest(self) -> None:
        """Let modules wait for the rest of the update."""
        walk = self._walk
        if walk is not None:
            with self._failing_ends():
                # Before poll(): what is made in it goes to modules out of its buffer. This may
                # also end the walk.
                self._defer(walk)
                walk.poll()

    def end_step(self) -> None:
        """Count the update as made. Drop the gradients, unless the rest of it still needs them."""
        if self.under_way:
            self._count()
        else:
            self._gradients.clear()

    def tell(self) -> None:
        """Raise the failure of a deferred update, if no module has.

        Raises:
            RuntimeError: an op failed. `resume` goes on from there.
        """
        if self._walk is not None:
            self._walk.tell()

    def resume(self) -> None:
        """Resume a deferred update that failed; end or forget an interrupted step's walk."""
        self._drop_failed_walk()
        if not self._states.begun:
            return
        step = self._states.step
        if not step.is_counted and self._walk is not None:
            # `Engine.step` will repeat it, so the walk must not go on beside that.
            with self._failing_ends():
                self._walk.finish()
            self._leave_walk()
        elif step.is_counted and not self.under_way:
            # A deferred update has failed: its step has ended, so nothing else repeats it.
            self._defer(self._begin_walk())

    def end(self) -> None:
        """Carry out the rest of the update.

        Raises:
            RuntimeError: an op failed. The next call resumes there.
        """
        walk = self._walk
        if walk is None:
            return
        with self._failing_ends():
            walk.finish()
        self._conclude()

    def _conclude(self) -> None:
        """End an update after its last op."""
        self._meter.end_update()
        self._count()
        self._leave_walk()
        self._follow_no_more()
        self._gradients.clear()
        self._states.end_step()
        self._adopt_plan()

    def drop(self) -> None:
        """Forget gradients, and the early updates of a backward that no step has adopted."""
        self._follow_no_more()
        self._early.drop()
        self._gradients.clear()

    def _follow_no_more(self) -> None:
        """Let modules use all parameters: no update is in flight."""
        self._deferral.follower.follow_update(None)

    def continue_from(self, made: int) -> None:
        """Count from `made` updates, as a checkpoint says."""
        self._made = made

    def look_for_a_plan(self, counters: Callable[[], Mapping[str, int]]) -> None:
        """Ask whether the counters of the last step show that another plan is better."""
        if self._replanner.watches:
            self._replanner.note_step(counters())
        if not self.under_way:
            self._adopt_plan()

    def why_planned_again(self) -> str | None:
        """Return why the plan was replaced since the last call, or None."""
        why, self._planned_again = self._planned_again, None
        return why

    def _begin_walk(self) -> Walk:
        """Begin to carry out the plan."""
        self._states.lease_for_step()
        self._meter.begin_update()
        self._walk = self._executor.begin(self._plan)
        return self._walk

    def _defer(self, walk: Walk) -> None:
        made_early = self._states.step.made_early
        update = DeferredUpdate(walk, self._deferral.parts, self.end, made_early)
        self._deferral.follower.follow_update(update)

    def _count(self) -> None:
        """Count a step with an update that nothing can stop: an interrupt does not repeat it."""
        if self._states.begun and self._states.step.count():
            self._made += 1

    @contextmanager
    def _failing_ends(self) -> Iterator[None]:
        """Forget the walk if it fails in the body."""
        try:
            # finally, not except: an op's failure and an interrupt both end the walk.
            yield
        finally:
            self._drop_failed_walk()

    def _drop_failed_walk(self) -> None:
        if self._walk is not None and self._walk.failed:
            self._leave_walk()

    def _leave_walk(self) -> None:
        """Forget a walk that ended before its step; another walk resumes what it has not done."""
        self._walk = None
        self._states.note_arrivals()

    def _adopt_plan(self) -> None:
        """Replace the plan by a better one between two updates, while there are no gradients."""
        gradients = self._gradients
        if gradients.any or self._states.begun:
            return
        replan = self._replanner.take()
        if replan is None:
            return
        before = gradients.room
        try:
            gradients.make_room(replan.plan.demand.staying)
            self._states.adopt_plan(replan.plan.steps)
        except CapacityError as problem:  # enough is free, but not in one piece
            gradients.make_room(before)
            _LOG.warning("The plan is kept, as a better one does not fit: %s", problem)
            return
        # Only after both: from here on gradients come in the new plan's pieces.
        gradients.keep_in(replan.pieces)
        self._replanner.adopt(replan)
        self._plan, self._planned_again = replan.plan.steps, replan.why
        _LOG.info("The plan was replaced: %s", replan.why)
