"""Host and device update at once: subgroups visit the device while the CPU updates others.

The interleaving of Deep Optimizer States. Pure: from the rates it decides which subgroups visit, in
which order their copies share the links, and where residents fill the gaps. Used by name, by
strategy, and by the published references that differ in their share alone.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, lru_cache

from infinity_engine.optim.policy import Limits, OffloadPolicy, PlanDraft, split_residents
from infinity_engine.plan.ops import Lane
from infinity_engine.plan.rates import Rates
from infinity_engine.plan.step import Home, StepPlan, SubgroupSpec
from infinity_engine.plan.timing import LaneClocks

__all__ = [
    "INTERLEAVED",
    "TWO_ENDED",
    "Assignment",
    "UpdateLayout",
    "interleaved",
    "spread",
    "two_ended",
]

_FEW = 8  # up to so many subgroups, every choice of visitors is tried
# How many numbers of visitors are tried before the search turns finer.
_GRID = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Which subgroups are updated where, each in the order in which that is to happen."""

    host: tuple[SubgroupSpec, ...]
    visiting: tuple[SubgroupSpec, ...]
    residents: tuple[SubgroupSpec, ...]


class UpdateLayout:
    """An assignment as ops, and when they are done.

    States go up as soon as a staging set is free, and between them the parameters that the CPU has
    updated meanwhile. Residents are updated while the last visitors go home; those that are too
    many for that, in the gaps in which the device waits for states.
    """

    def __init__(self, assignment: Assignment, rates: Rates, limits: Limits) -> None:
        self._draft = PlanDraft(
            (*assignment.host, *assignment.visiting, *assignment.residents), limits
        )
        self._clocks = LaneClocks(rates)
        self._per_parameter = limits.per_parameter
        # Not updated yet.
        self._host = deque(assignment.host)
        # not uploaded yet, and when they can be
        self._updated: deque[tuple[SubgroupSpec, int]] = deque()
        self._residents = deque(assignment.residents)
        # How many residents are updated between visits. Without visitors there are no gaps to fill.
        early = self._too_many_for_the_end(assignment) if assignment.visiting else 0
        self._early = early
        for number, subgroup in enumerate(assignment.visiting):
            # Early residents are spread evenly over the visits: `late` of them may be left after
            # this one.
            self._visit(subgroup, late=early - early * number // len(assignment.visiting))
        self._finish()

    @property
    def end_ns(self) -> int:
        """When all is done."""
        return self._clocks.end_ns

    def plan(self) -> StepPlan:
        """Return the plan."""
        return self._draft.plan()

    def _too_many_for_the_end(self, assignment: Assignment) -> int:
        """Return how many residents there is no time for during the last download."""
        nbytes = assignment.visiting[-1].numel * self._per_parameter.states
        room_ns = self._clocks.duration_ns(Lane.D2H, nbytes)
        durations_ns = (
            self._clocks.duration_ns(Lane.DEVICE, subgroup.numel)
            for subgroup in reversed(assignment.residents)
        )
        # Counted from the end: the last residents fit beside the last download while their sum
        # does.
        return sum(end_ns > room_ns for end_ns in itertools.accumulate(durations_ns))

    def _visit(self, subgroup: SubgroupSpec, *, late: int) -> None:
        """Let a subgroup visit; first update the early residents that its upload leaves time for.

        No more than `late` of those are left after it: otherwise a device that is as busy as the
        links would waste the gaps that are shorter than an update.
        """
        start_ns = self._upload_start_ns()
        # Parameters that are ready before these states may go up take the link first.
        while self._can_upload_parameters(start_ns):
            self._upload_parameters()
            start_ns = self._upload_start_ns()
        up_ns = start_ns + self._clocks.duration_ns(
            Lane.H2D, subgroup.numel * self._per_parameter.states
        )
        while self._early and (self._early > late or self._resident_end_ns() <= up_ns):
            self._update_resident()
            self._early -= 1
        for op in self._draft.visit(subgroup):
            self._clocks.run(op)

    def _finish(self) -> None:
        while self._host or self._updated:
            # Up it goes where nothing is left to update, or where it was ready before the host is
            # free again.
            if self._updated and (
                not self._host or self._updated[0][1] <= self._clocks.free_ns(Lane.HOST)
            ):
                self._upload_parameters()
            else:
                self._update_on_host()
        while self._residents:
            self._update_resident()

    def _upload_start_ns(self) -> int:
        """Return when the upload of the next states can begin."""
        emptied = self._draft.next_set_after
        # A set is free once the states that were in it are down.
        set_ns = 0 if emptied is None else self._clocks.times[emptied].end_ns
        return max(self._clocks.free_ns(Lane.H2D), set_ns)

    def _can_upload_parameters(self, at_ns: int) -> bool:
        # The CPU is ahead of the link: what it has updated by then may go up.
        while self._host and self._clocks.free_ns(Lane.HOST) <= at_ns:
            self._update_on_host()
        return bool(self._updated) and self._updated[0][1] <= at_ns

    def _resident_end_ns(self) -> int:
        duration_ns = self._clocks.duration_ns(Lane.DEVICE, self._residents[0].numel)
        return self._clocks.free_ns(Lane.DEVICE) + duration_ns

    def _update_on_host(self) -> None:
        subgroup = self._host.popleft()
        for op in self._draft.update_on_host(subgroup):
            time = self._clocks.run(op)
            # The same call may load and store too; the update itself is the op in the lane HOST.
            if op.lane is Lane.HOST:
                self._updated.append((subgroup, time.end_ns))

    def _upload_parameters(self) -> None:
        subgroup, _ = self._updated.popleft()
        for op in self._draft.upload_parameters(subgroup):
            self._clocks.run(op)

    def _update_resident(self) -> None:
        for op in self._draft.resident(self._residents.popleft()):
            self._clocks.run(op)


def interleaved(
    share: Fraction | None = None, *, resident: float = 0.0, name: str = "interleaved"
) -> OffloadPolicy:
    """Return the policy that lets `share` of the rest visit; None finds the share that ends first.

    The rest is all that is not resident.

    Host and device take from one queue, in the order in which the next forward needs the subgroups.
    """

    def split(
        subgroups: Sequence[SubgroupSpec], rates: Rates, limits: Limits
    ) -> tuple[tuple[SubgroupSpec, ...], Sequence[bool], tuple[SubgroupSpec, ...]]:
        """Return the others, which of them visit, and the residents."""
        others, residents = split_residents(subgroups, resident)
        if share is not None:
            return others, spread(others, share), residents
        alone = _staging_alone(limits, subgroups)
        return others, _earliest_visits(others, residents, rates, alone), residents

    def decide(subgroups: Sequence[SubgroupSpec], rates: Rates, limits: Limits) -> StepPlan:
        return UpdateLayout(_assigned(*split(subgroups, rates, limits)), rates, limits).plan()

    def homes_at(
        subgroups: Sequence[SubgroupSpec], rates: Rates, limits: Limits
    ) -> dict[int, Home]:
        return _homes(*split(subgroups, rates, limits))

    def homes(subgroups: Sequence[SubgroupSpec]) -> dict[int, Home]:
        assert share is not None, "else the rates decide"
        others, residents = split_residents(subgroups, resident)
        return _homes(others, spread(others, share), residents)

    return OffloadPolicy(
        name, decide, None if share is None else homes, homes_at=homes_at, is_drafted=True
    )


@lru_cache(maxsize=32)
def _earliest_visits(
    others: tuple[SubgroupSpec, ...],
    residents: tuple[SubgroupSpec, ...],
    rates: Rates,
    limits: Limits,
) -> Sequence[bool]:
    """Return which of the others visit in the update that ends first.

    Kept, as a search for memory that is enough asks the same with every amount of host memory, and
    dozens of updates are laid out for each answer.
    """

    def end_ns(visits: Sequence[bool]) -> int:
        return UpdateLayout(_assigned(others, visits, residents), rates, limits).end_ns

    def evenly(count: int) -> list[bool]:
        return spread(others, Fraction(count, max(most, 1)))

    most = len(others) if limits.can_stage((*others, *residents)) else 0
    # At most 2^8 layouts: few enough to make all of them.
    if 0 < most <= _FEW:
        choices = itertools.product((False, True), repeat=most)
        return min(choices, key=end_ns)
    return evenly(_earliest(lambda count: end_ns(evenly(count)), most))


def two_ended(*, resident: float = 0.0, name: str = "two_ended") -> OffloadPolicy:
    """Return the policy in which the CPU takes the queue's front and the device its back.

    It ends when `interleaved` does; but the parameters that come last are those in the middle of
    the next forward.
    """

    def decide(subgroups: Sequence[SubgroupSpec], rates: Rates, limits: Limits) -> StepPlan:
        others, residents = split_residents(subgroups, resident)

        def back(count: int) -> UpdateLayout:
            # The device goes backwards, so that both ends meet in the middle.
            first = len(others) - count
            visiting = tuple(reversed(others[first:]))
            return UpdateLayout(
                Assignment(host=others[:first], visiting=visiting, residents=residents),
                rates,
                limits,
            )

        most = len(others) if limits.can_stage(subgroups) else 0
        return back(_earliest(lambda count: back(count).end_ns, most)).plan()

    return OffloadPolicy(name, decide)


INTERLEAVED = interleaved()
TWO_ENDED = two_ended()


def spread(subgroups: Sequence[SubgroupSpec], share: Fraction) -> list[bool]:
    """Return whether each subgroup visits, so that about `share` of the parameters so far do."""
    owed = 0  # parameters that should have visited so far and have not, times the denominator
    chosen = []
    part, whole = share.as_integer_ratio()
    for subgroup in subgroups:
        numel = subgroup.numel
        owed += part * numel
        # Rounds to the nearest, in integers: floats would choose others in large models.
        visits = 2 * owed >= whole * numel
        owed -= whole * numel * visits
        chosen.append(visits)
    return chosen


def _assigned(
    others: Sequence[SubgroupSpec], visits: Sequence[bool], residents: tuple[SubgroupSpec, ...]
) -> Assignment:
    return Assignment(
        host=tuple(subgroup for subgroup, visit in zip(others, visits, strict=True) if not visit),
        visiting=tuple(subgroup for subgroup, visit in zip(others, visits, strict=True) if visit),
        residents=residents,
    )


def _homes(
    others: Sequence[SubgroupSpec], visits: Sequence[bool], residents: Sequence[SubgroupSpec]
) -> dict[int, Home]:
    found = {subgroup.index: Home.RESIDENT for subgroup in residents}
    for subgroup, visit in zip(others, visits, strict=True):
        found[subgroup.index] = Home.VISITING if visit else Home.HOST
    return found


def _staging_alone(limits: Limits, subgroups: Sequence[SubgroupSpec]) -> Limits:
    """Return limits with as many staging sets, which do not tell other memory apart."""
    largest = max((subgroup.numel for subgroup in subgroups), default=1)
    staging = limits.sets_for(largest) * limits.device_bytes(largest)
    return replace(limits, resident_bytes=0, staging_bytes=staging)


def _earliest(end_ns: Callable[[int], int], most: int) -> int:
    """Return which of 0 to `most` visitors end first: of a grid, then ever finer."""
    known = cache(end_ns)  # it lays out an update
    step = max(most // _GRID, 1)
    best = min(range(0, most + 1, step), key=known)
    while True:
        # 0 comes first: among equal ends the present one stays, and so the search ends.
        near = (best + step * many for many in (0, -2, -1, 1, 2))
        nearest = min((count for count in near if 0 <= count <= most), key=known)
        if nearest == best and step == 1:
            return best
        step = max(step // 2, 1) if nearest == best else step
        best = nearest
