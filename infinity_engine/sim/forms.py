"""What a plan may be made of, and what each such form takes by estimates: the choices of a search.

A form is a tier for parameters, states on drives or not, and the parts of the states that are
resident or visit. Forms are where edges of the memory meet, and on a grid; the estimates of totals
rank them, and lead from one to better ones nearby. Nothing is placed or simulated. Called by
search.py and planner.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain, groupby, islice, product
from math import inf, isinf
from operator import attrgetter, itemgetter
from typing import NamedTuple, TypeVar

from infinity_engine.errors import CapacityError
from infinity_engine.optim import NORM_BLOCK
from infinity_engine.plan import (
    Auto,
    DeviceOnly,
    HostOnly,
    Interleaved,
    NvmeStreamed,
    StaticSplit,
    Strategy,
    Tier,
)
from infinity_engine.sim.candidate import Choice, Evaluator
from infinity_engine.sim.estimate import Pace, StepEstimate
from infinity_engine.sim.room import NO_ROOM, MemoryEdges, Parts

__all__ = [
    "APART",
    "COUNTS",
    "FEW",
    "WAYS",
    "WORTH_IT",
    "Family",
    "Form",
    "Forms",
    "Kind",
    "Ranked",
    "best_of_each_kind",
    "coarsest_near_the_best",
    "few_of_each_kind",
]

COUNTS = (64, 256, 1024)  # subgroups; below 46, filling and draining cost more than 5%
FEW = (2, 4, 8, 16, 32)  # subgroups: where starts cost something, fewer may be better
_LEAST_NUMEL = 2**20  # a subgroup's transfers below this cost more to start than they take
_GRID = (0.0, 0.05, 0.1, 0.175, 0.25, 0.35, 0.5, 0.625, 0.75, 0.875, 1.0)
_GRID_OF_PARTS = tuple(Parts(resident, visiting) for resident, visiting in product(_GRID, _GRID))
_OFF = 2.0  # subgroups that rounding may be off by, where a corner does not fit
_EACH_KIND = 2  # of the best estimates of each tier and size, with visitors and without
_KINDS = 2  # of which a short search knows the best parts
_COARSE = 1.08  # times the best estimate: subgroups that large are good enough to explore with
APART = 0.05  # of all: parts nearer than that are alike
_SHORT = 1 / 1.02  # of the memory: with as little, a form is placed, as estimates are off by that
_IN_DOUBT = 4  # forms of each kind that are placed to tell if anything fits
_NEAREST = 3  # forms that are placed though they seem not to fit
_ESTIMATED_STEPS = (1 / 64, 1 / 16, 1 / 64, 1 / 256)  # the first one crosses an edge nearby
_PROMISING = 1.3  # times the best estimate: from what takes longer, none leads to the best
WAYS = ((0, 1), (0, -1), (1, 0), (-1, 0), (1, -1), (-1, 1))  # of what is resident, and what visits
WORTH_IT = 0.998  # of a step: parts nearby that save less are not gone on from


class Family(NamedTuple):
    """Where parameters stay, and whether states may rest on drives."""

    tier: Tier
    drives: bool


class Form(NamedTuple):
    """What makes candidates of different sizes alike."""

    family: Family
    parts: Parts

    @property
    def kind(self) -> Kind:
        """What its family is, and whether some visit."""
        return self.family, self.parts.visiting > 0

    @property
    def is_plain(self) -> bool:
        """Whether all is updated in one place."""
        resident = _rounded(self.parts.resident)
        ends = {0.0} if self.family.drives else {0.0, 1.0}
        return not _rounded(self.parts.visiting) and resident in ends

    @property
    def strategy(self) -> Strategy:
        """The strategy that has these parts."""
        resident = _rounded(self.parts.resident)
        others = 1 - resident
        share = _rounded(self.parts.visiting / others) if others else 0.0
        if self.family.drives and not (resident or share):
            return NvmeStreamed()
        if self.family.drives or share:
            update = Interleaved(share=share, resident=resident)
            return NvmeStreamed(update=update) if self.family.drives else update
        if 0 < resident < 1:
            return StaticSplit(ratio=resident)
        return DeviceOnly() if resident else HostOnly()


Kind = tuple[Family, bool]
"""A family, with visitors or without."""


class Ranked(NamedTuple):
    """A form with subgroups of one size; `inside` is for where it does not fit."""

    estimate_ns: float
    form: Form
    numel: int
    inside: Form


class _RoomOfForm(NamedTuple):
    """How many times what a form needs is there; `inside` is for where it does not fit."""

    roominess: float
    form: Form
    inside: Form


_Entry = TypeVar("_Entry", Ranked, _RoomOfForm)


class Forms:
    """The forms that one planner may choose from, and what is estimated of them."""

    def __init__(self, planner: Evaluator) -> None:
        self._planner = planner
        self._means = planner.means
        self.given = None if isinstance(planner.strategy, Auto) else planner.strategy
        """The strategy that is asked for; None: any."""
        self._rooms: dict[tuple[Family, int], MemoryEdges] = {}
        self._corners: dict[tuple[Family, int], list[Parts]] = {}
        self._estimates: dict[tuple[Family, int], StepEstimate | None] = {}

    @property
    def has_any_strategy(self) -> bool:
        """Whether no strategy is asked for."""
        return self.given is None

    @property
    def are_free(self) -> bool:
        """Whether parts may be chosen: two memories, and no strategy that is asked for."""
        return self.has_any_strategy and not self._means.unified

    def least_estimate_ns(self, numel: int) -> float:
        """Return the best estimate with subgroups of this size; inf where nothing seems to fit."""
        return min(self._promising_estimates_ns(numel), default=inf)

    def may_take_less(self, numel: int, ns: float) -> bool:
        """Tell whether the best estimate is less than `ns`: once one is, no other is made."""
        corners = (at for family in self._families() for at in self._corners_ns(family, numel))
        return any(at_ns < ns for at_ns in chain(corners, self._promising_estimates_ns(numel)))

    def _promising_estimates_ns(self, numel: int) -> Iterator[float]:
        for family in self._promising_families(numel):
            for parts in self._points(family, numel)[0]:
                yield self.estimate_ns(Form(family, parts), numel)

    def _corners_ns(self, family: Family, numel: int) -> Iterator[float]:
        for parts in self._points(family, numel, with_grid=False)[0]:
            yield self.estimate_ns(Form(family, parts), numel)

    def seems_to_fit(self) -> bool:
        """Tell if anything fits, by estimates alone, which are off by a hundredth or two."""
        return any(entry.roominess >= 1 for entry in self._rooms_of_forms())

    def least(self, tier: Tier) -> float:
        """Return about how many bytes of a tier are enough; inf where no amount is.

        Of the device, those of one; of the host and the drives, those of the machine.
        """
        planner, ranks = self._planner, 1 if tier is Tier.DEVICE else self._means.ranks
        [numel] = self.numels()[-1:]
        computes_here = tier is (Tier.HOST if self._means.unified else Tier.DEVICE)
        making = planner.making(planner.sizing(numel)) if computes_here else 0
        found = (
            estimate.least(tier, form.parts)
            for family in self._families()
            if (estimate := self._estimate_of(family, numel)) is not None
            for form, _ in self._all_forms(family, numel)
        )
        return ranks * (min(found, default=inf) + making)

    def entries(self, numels: Iterable[int]) -> Iterator[Ranked]:
        """Yield every form that may fit, with its estimate."""
        for numel, family in product(numels, list(self._families())):
            for form, inside in self._all_forms(family, numel):
                estimate_ns = self.estimate_ns(form, numel)
                yield Ranked(estimate_ns, form, numel, inside)

    def promising(self, numels: Sequence[int]) -> list[Ranked]:
        """Return for each size the few kinds with the best estimates, each with the best parts that
        estimates alone lead to.
        """
        smallest = numels[-1]  # whatever fits at all does with these
        entries = [
            Ranked(self.estimate_ns(form, smallest), form, smallest, inside)
            for family in self._promising_families(smallest)
            for form, inside in self._all_forms(family, smallest)
        ]
        best: dict[Kind, Ranked] = {}
        for entry in sorted(entries, key=attrgetter("estimate_ns")):
            best.setdefault(entry.form.kind, entry)
        found = []
        for entry in islice(best.values(), _KINDS):
            finest = self.refined(entry)
            larger = (self._as_large(finest.form, numel) for numel in numels[:-1])
            found += [*map(self.refined, larger), finest]
        return found

    def _as_large(self, form: Form, numel: int) -> Ranked:
        """Return about the same form with subgroups of another size."""
        there = self.within(form, numel)
        _, middle = self._points(form.family, numel, with_grid=False)
        inside = there.parts.towards(middle, _OFF * self.room(form.family, numel).whole)
        return Ranked(self.estimate_ns(there, numel), there, numel, there._replace(parts=inside))

    def _promising_families(self, numel: int) -> list[Family]:
        """Return the families that may have the best of all with subgroups of this size.

        Where edges meet, the others take much longer already.
        """
        least = {family: min(self._corners_ns(family, numel)) for family in self._families()}
        most_ns = _PROMISING * min(least.values(), default=inf)
        return [family for family, ns in least.items() if ns <= most_ns]

    def _all_forms(self, family: Family, numel: int) -> Iterator[tuple[Form, Form]]:
        """Yield the forms of a family, each with one further from the edges, if it does not fit."""
        points, middle = self._points(family, numel)
        room = self.room(family, numel)
        for parts in points:
            inside = parts.towards(middle, _OFF * room.whole)
            yield Form(family, parts), Form(family, inside)

    def _points(
        self, family: Family, numel: int, *, with_grid: bool = True
    ) -> tuple[list[Parts], Parts]:
        """Return the parts to try of a family, and the middle between edges.

        First those where edges meet, then those of a grid.
        """
        if not self.are_free:
            return [Parts()], Parts()
        room = self.room(family, numel)
        if (family, numel) not in self._corners:
            self._corners[family, numel] = list(room.corners().values())
        points = [*self._corners[family, numel]]
        if not family.drives and room.most_resident >= 1:
            points.append(self._split())
        held = [parts for parts in points if room.holds(parts)] or points
        middle = Parts(
            sum(parts.resident for parts in held) / len(held),
            sum(parts.visiting for parts in held) / len(held),
        )
        points.append(middle)
        if room.may_visit and with_grid:
            points += filter(room.holds, _GRID_OF_PARTS)
        apart: dict[tuple[int, int], Parts] = {}
        for parts in points:
            key = round(parts.resident / room.whole), round(parts.visiting / room.whole)
            apart.setdefault(key, parts)
        return list(apart.values()), middle

    def room(self, family: Family, numel: int) -> MemoryEdges:
        """Return the edges of a family's memory; NO_ROOM where its parameters do not fit."""
        if (family, numel) not in self._rooms:
            self._rooms[family, numel] = NO_ROOM
            planner = self._planner
            sizing = planner.sizing(numel)
            with suppress(CapacityError):
                self._rooms[family, numel] = MemoryEdges.of(
                    sizing,
                    self._means,
                    planner.left(sizing),
                    tier=family.tier,
                    drives=family.drives,
                )
        return self._rooms[family, numel]

    def estimate_ns(self, form: Form, numel: int) -> float:
        """Return a form's estimate; inf where it does not fit."""
        estimate = self._estimate_of(form.family, numel)
        if estimate is None:
            return inf
        return estimate.ns(form.parts) if self.has_any_strategy else 0.0

    def _estimate_of(self, family: Family, numel: int) -> StepEstimate | None:
        """Return the estimates of a family; None where activations alone take all memory."""
        known = family, numel
        if known not in self._estimates:
            self._estimates[known] = None
            planner = self._planner
            sizing = planner.sizing(numel)
            with suppress(CapacityError):
                self._estimates[known] = StepEstimate(
                    sizing,
                    planner.training,
                    self._means,
                    planner.left(sizing),
                    self._pace,
                    tier=family.tier,
                    drives=family.drives,
                )
        return self._estimates[known]

    @cached_property
    def _pace(self) -> Pace:
        return Pace.of(self._planner.training, self._means)

    def _split(self) -> Parts:
        """Return the split with which neither device nor host waits, where all has room."""
        rates = self._means.rates
        # Without a rate, the host updates nothing.
        host, device = rates.host_update_params_per_s or 0.0, rates.device_update_params_per_s
        return Parts(device / (device + host) if device else 1.0)

    def _families(self) -> Iterator[Family]:
        has_drives = bool(self._means.budget.nvme)
        for tier in self._tiers():
            if not self.has_any_strategy:
                yield Family(tier, isinstance(self.given, NvmeStreamed))
                continue
            yield Family(tier, False)
            if has_drives:
                yield Family(tier, True)

    def _tiers(self) -> Iterator[Tier]:
        asked, means = self._planner.parameters, self._means
        if asked is not None:
            yield Tier.DEVICE if means.unified and asked is Tier.HOST else asked
            return
        yield Tier.DEVICE
        if not means.unified:
            yield Tier.HOST
        if means.budget.nvme:
            yield Tier.NVME

    @property
    def frugal(self) -> Form:
        """The form that needs least of the device and the host."""
        return Form(list(self._families())[-1], Parts())

    def numels(self, counts: Iterable[int] = COUNTS) -> tuple[int, ...]:
        """Return the sizes of subgroups to try, those first of which there are few."""
        planner = self._planner
        if planner.subgroup_numel is not None:
            return (planner.subgroup_numel,)
        numel = planner.trained_numel
        wanted = (max(numel // count, min(_LEAST_NUMEL, numel // COUNTS[0])) for count in counts)
        return tuple(dict.fromkeys(max(numel - numel % NORM_BLOCK, NORM_BLOCK) for numel in wanted))

    def refined_from(self, entries: list[Ranked], *, most: int) -> list[Ranked]:
        """Return what estimates lead to from the best entries of each kind."""
        ranked = sorted(entries, key=attrgetter("estimate_ns"))
        most_ns = _PROMISING * ranked[0].estimate_ns if ranked else inf
        return [
            self.refined(entry)
            for entry in few_of_each_kind(ranked, most=most)
            if entry.estimate_ns <= most_ns
        ]

    def refined(self, entry: Ranked) -> Ranked:
        """Return the entry with the best parts that estimates alone lead to, downhill from its own.

        Estimates take microseconds, where a simulation takes milliseconds.
        """
        estimate_ns, form, numel, inside = entry
        room = self.room(form.family, numel)
        if not self.are_free or isinf(estimate_ns):
            return entry
        if not room.may_visit:
            return entry
        for step in _ESTIMATED_STEPS:
            while step >= room.whole / 2:
                ways = (room.nearby(form.parts, step * way[0], step * way[1]) for way in WAYS)
                around = (Form(form.family, parts) for parts in ways if room.holds(parts))
                times = [(self.estimate_ns(there, numel), there) for there in around]
                there_ns, there = min(times, key=itemgetter(0), default=(inf, form))
                if there_ns >= WORTH_IT * estimate_ns:
                    break
                form, estimate_ns = there, there_ns
        parts = form.parts.towards(inside.parts, _OFF * room.whole)
        return Ranked(estimate_ns, form, numel, form._replace(parts=parts))

    def in_doubt(self) -> Iterator[tuple[Form, int]]:
        """Yield what seems to fit, the roomiest first, then what would with 2% more memory.

        With the smallest subgroups, which need least of it.
        """
        rooms = sorted(self._rooms_of_forms(), key=lambda entry: -entry.roominess)
        fitting = [entry for entry in rooms if entry.roominess >= 1]
        short = [entry for entry in rooms if _SHORT <= entry.roominess < 1]
        [numel] = self.numels()[-1:]
        # Also those much alike: at an edge, whole subgroups decide which of them fits.
        few = sorted(
            few_of_each_kind(fitting, most=_IN_DOUBT, apart=0.0),
            key=lambda entry: -entry.roominess,
        )
        for entry in few:
            yield from dict.fromkeys([(entry.form, numel), (entry.inside, numel)])
        for entry in short[:_NEAREST]:
            yield entry.inside, numel
        if not fitting:
            yield self.frugal, numel

    def _rooms_of_forms(self) -> Iterator[_RoomOfForm]:
        """Yield every form with the smallest subgroups, and how roomy the memory is for it."""
        [numel] = self.numels()[-1:]
        for family in self._families():
            estimate = self._estimate_of(family, numel)
            for form, inside in self._all_forms(family, numel):
                there = 0.0
                if estimate is not None:  # which knows nothing of a strategy that is asked for
                    there = estimate.roominess(form.parts) if self.has_any_strategy else 1.0
                yield _RoomOfForm(there, form, inside)

    def within(self, form: Form, numel: int) -> Form:
        """Return the form with parts for which there is room with subgroups of another size."""
        room = self.room(form.family, numel)
        if room.holds(form.parts) or not room.may_visit:
            return form
        return form._replace(parts=room.nearby(Parts(), form.parts.resident, form.parts.visiting))

    def choice(self, form: Form, numel: int) -> Choice:
        """Return the engine's settings for a form with subgroups of this size."""
        strategy = self.given or form.strategy
        return Choice(strategy=strategy, parameters=form.family.tier, subgroup_numel=numel)


def coarsest_near_the_best(entries: list[Ranked]) -> int:
    """Return the largest subgroups with a best estimate near the best of all."""
    least: dict[int, float] = {}
    for entry in entries:
        least[entry.numel] = min(entry.estimate_ns, least.get(entry.numel, inf))
    near = [numel for numel, ns in least.items() if ns <= _COARSE * min(least.values())]
    return max(near)


def best_of_each_kind(entries: Iterable[Ranked]) -> list[Ranked]:
    """Return the few best estimates of each kind and size, the fastest first."""
    fitting = (entry for entry in entries if not isinf(entry.estimate_ns))
    by_size = groupby(
        sorted(fitting, key=lambda entry: (entry.numel, entry.estimate_ns)),
        key=lambda entry: entry.numel,
    )
    kept = [entry for _, alike in by_size for entry in few_of_each_kind(alike)]
    return sorted(kept, key=lambda entry: entry.estimate_ns)


def few_of_each_kind(
    entries: Iterable[_Entry], *, most: int = _EACH_KIND, apart: float = APART
) -> list[_Entry]:
    """Return the first few entries of each kind, no two of them nearer to one another."""
    kept: dict[Kind, list[_Entry]] = {}
    for entry in entries:
        form, others = entry.form, kept.setdefault(entry.form.kind, [])
        alike = any(other.form.parts.distance(form.parts) < apart for other in others)
        if (len(others) < most and not alike) or form.is_plain:
            others.append(entry)
    return [entry for entries in kept.values() for entry in entries]


def _rounded(part: float) -> float:
    """Return a part of all, a little less, that prints well."""
    return min(max(int(part * 10_000 + 1e-2), 0) / 10_000, 1.0)
