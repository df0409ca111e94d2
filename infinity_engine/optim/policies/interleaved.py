"""Host and device update at once: subgroups visit the device while the CPU updates others.

The interleaving of Deep Optimizer States. Pure: from the rates it decides which subgroups visit, in
which order their copies share the links, and where residents fill the gaps. Used by name, by
strategy, and by the published references that differ in their share alone.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, lru_cache
from itertools import repeat
from math import inf

from infinity_engine.optim.policies.times import LaneWork, TimedDraft, UpdateCosts, UpdateTimes
from infinity_engine.optim.policy import Limits, OffloadPolicy, split_residents
from infinity_engine.plan.rates import Rates
from infinity_engine.plan.step import Home, StepPlan, SubgroupSpec

__all__ = [
    "INTERLEAVED",
    "TWO_ENDED",
    "Assignment",
    "UpdateLayout",
    "end_of",
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
    """An assignment as ops, and when they are done."""

    def __init__(self, assignment: Assignment, rates: Rates, limits: Limits) -> None:
        self._draft = TimedDraft(
            (*assignment.host, *assignment.visiting, *assignment.residents), rates, limits
        )
        _Race(assignment, self._draft)

    @property
    def end_ns(self) -> int:
        """When all is done."""
        return self._draft.end_ns

    def plan(self) -> StepPlan:
        """Return the plan."""
        return self._draft.plan()


def end_of(assignment: Assignment, costs: UpdateCosts) -> int:
    """Return `end_ns` of the assignment's layout, where these are its subgroups' costs.

    Makes no ops: a search asks for the ends of dozens of updates, and for the ops of one.
    """
    times = UpdateTimes(costs)
    _Race(assignment, times)
    return times.end_ns


class _Race:
    """Decides in which order an assignment's work is begun.

    States go up as soon as a staging set is free, and between them the parameters that the CPU has
    updated meanwhile. Residents are updated while the last visitors go home; those that are too
    many for that, in the gaps in which the device waits for states.
    """

    def __init__(self, assignment: Assignment, update: TimedDraft | UpdateTimes) -> None:
        self._update = update
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

    def _too_many_for_the_end(self, assignment: Assignment) -> int:
        """Return how many residents there is no time for during the last download."""
        costs = self._update.costs
        room_ns = costs.visit(assignment.visiting[-1]).down_ns
        durations_ns = (
            costs.resident(subgroup).device_ns for subgroup in reversed(assignment.residents)
        )
        # Counted from the end: the last residents fit beside the last download while their sum
        # does.
        return sum(end_ns > room_ns for end_ns in itertools.accumulate(durations_ns))

    def _visit(self, subgroup: SubgroupSpec, *, late: int) -> None:
        """Let a subgroup visit; first update the early residents that its upload leaves time for.

        No more than `late` of those are left after it: otherwise a device that is as busy as the
        links would waste the gaps that are shorter than an update.
        """
        start_ns = self._update.next_visit_ns
        # Parameters that are ready before these states may go up take the link first.
        while self._can_upload_parameters(start_ns):
            self._upload_parameters()
            start_ns = self._update.next_visit_ns
        if self._early:
            up_ns = start_ns + self._update.costs.visit(subgroup).up_ns
            while self._early and (self._early > late or self._resident_end_ns() <= up_ns):
                self._update.resident(self._residents.popleft())
                self._early -= 1
        self._update.visit(subgroup)

    def _finish(self) -> None:
        while self._host or self._updated:
            # Up it goes where nothing is left to update, or where it was ready before the host is
            # free again.
            if self._updated and (not self._host or self._updated[0][1] <= self._update.host_ns):
                self._upload_parameters()
            else:
                self._update_on_host()
        while self._residents:
            self._update.resident(self._residents.popleft())

    def _can_upload_parameters(self, at_ns: int) -> bool:
        # The CPU is ahead of the link: what it has updated by then may go up.
        while self._host and self._update.host_ns <= at_ns:
            self._update_on_host()
        return bool(self._updated) and self._updated[0][1] <= at_ns

    def _resident_end_ns(self) -> int:
        return self._update.device_ns + self._update.costs.resident(self._residents[0]).device_ns

    def _update_on_host(self) -> None:
        subgroup = self._host.popleft()
        self._updated.append((subgroup, self._update.update_on_host(subgroup)))

    def _upload_parameters(self) -> None:
        subgroup, _ = self._updated.popleft()
        self._update.upload_parameters(subgroup)


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
    costs = UpdateCosts((*others, *residents), rates, limits)
    most = len(others)

    def end_ns(visits: Sequence[bool]) -> int:
        return end_of(_assigned(others, visits, residents), costs)

    @cache
    def evenly(count: int) -> list[bool]:
        return spread(others, Fraction(count, max(most, 1)))

    # Without a buffer that states on drives need, the plan or its outline is refused.
    if not costs.sets or not costs.has_buffers:
        return [False] * most
    # At most 2^8 layouts: few enough to make all of them.
    if 0 < most <= _FEW:
        choices = itertools.product((False, True), repeat=most)
        return min(choices, key=end_ns)
    work = LaneWork(others, residents, costs)
    return evenly(
        _earliest(
            lambda count: end_ns(evenly(count)),
            lambda count: work.busiest_ns(evenly(count)),
            most,
        )
    )


def two_ended(*, resident: float = 0.0, name: str = "two_ended") -> OffloadPolicy:
    """Return the policy in which the CPU takes the queue's front and the device its back.

    It ends when `interleaved` does; but the parameters that come last are those in the middle of
    the next forward.
    """

    def decide(subgroups: Sequence[SubgroupSpec], rates: Rates, limits: Limits) -> StepPlan:
        others, residents = split_residents(subgroups, resident)

        costs = UpdateCosts(subgroups, rates, limits)

        def back(count: int) -> Assignment:
            # The device goes backwards, so that both ends meet in the middle.
            first = len(others) - count
            visiting = tuple(reversed(others[first:]))
            return Assignment(host=others[:first], visiting=visiting, residents=residents)

        most = len(others) if costs.sets and costs.has_buffers else 0
        count = 0
        if most:
            work = LaneWork(others, residents, costs)
            count = _earliest(
                lambda many: end_of(back(many), costs),
                lambda many: work.busiest_ns([*repeat(False, most - many), *repeat(True, many)]),
                most,
            )
        return UpdateLayout(back(count), rates, limits).plan()

    return OffloadPolicy(name, decide)


INTERLEAVED = interleaved()
TWO_ENDED = two_ended()


def spread(subgroups: Sequence[SubgroupSpec], share: Fraction) -> list[bool]:
    """Return whether each subgroup visits, so that about `share` of the parameters so far do."""
    part, whole = share.as_integer_ratio()
    if part in (0, whole):
        return [part > 0] * len(subgroups)
    owed = 0  # parameters that should have visited so far and have not, times the denominator
    chosen = []
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


def _earliest(end_ns: Callable[[int], int], least_ns: Callable[[int], int], most: int) -> int:
    """Return which of 0 to `most` visitors end first: of a grid, then ever finer.

    None ends before its `least_ns`, which takes less time to tell than its `end_ns`.
    """
    known: dict[int, int] = {}  # laid out already

    def first_of(counts: Collection[int]) -> int:
        """Return the first of those that end first."""
        found_ns = min((known[count] for count in counts if count in known), default=inf)
        for count in sorted(set(counts).difference(known), key=least_ns):
            if least_ns(count) > found_ns:
                break
            known[count] = end_ns(count)
            found_ns = min(found_ns, known[count])
        return min((count for count in counts if count in known), key=known.__getitem__)

    step = max(most // _GRID, 1)
    best = first_of(range(0, most + 1, step))
    while True:
        # 0 comes first: among equal ends the present one stays, and so the search ends.
        near = (best + step * many for many in (0, -2, -1, 1, 2))
        nearest = first_of([count for count in near if 0 <= count <= most])
        if nearest == best and step == 1:
            return best
        step = max(step // 2, 1) if nearest == best else step
        best = nearest
