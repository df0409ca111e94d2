"""The search for the shortest step: estimates rank the choices, simulations decide.

Tiers, parts of the states that are resident or visit, and sizes of subgroups are estimated from
totals. What looks best is placed and simulated; from the best of these the search goes on to parts
nearby, and to other sizes. Its work is counted in simulated subgroups and ends at a limit, so that
an answer takes about a second on any machine. Called by planner.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import groupby, product
from math import inf, isinf
from operator import attrgetter, itemgetter
from typing import NamedTuple, TypeVar

from infinity_engine.errors import CapacityError, ConfigError
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
from infinity_engine.plan.step import Home
from infinity_engine.sim.candidate import Candidate, Choice, Evaluator
from infinity_engine.sim.estimate import Pace, StepEstimate
from infinity_engine.sim.room import MemoryEdges, Parts

__all__ = ["Search"]

_COUNTS = (64, 256, 1024)  # subgroups; below 46, filling and draining cost more than 5%
_MOST_SUBGROUPS = 50_000
_FEW = 300  # subgroups: with more, the policy alone takes seconds to find its share
_ENOUGH = 46  # that are not resident
_LEAST_NUMEL = 2**20  # a subgroup's transfers below this cost more to start than they take
_GRID = (0.0, 0.05, 0.1, 0.175, 0.25, 0.35, 0.5, 0.625, 0.75, 0.875, 1.0)
_GRID_OF_PARTS = tuple(Parts(resident, visiting) for resident, visiting in product(_GRID, _GRID))
_OFF = 2.0  # subgroups that rounding may be off by, where a corner does not fit
_MOST_WORK = 6500  # simulated subgroups: about a second of one core
_PLACED = 40  # simulated subgroups take as long as to find whether a plan fits
_EACH_KIND = 2  # of the best estimates of each tier and size, with visitors and without
_COARSE = 1.08  # times the best estimate: subgroups that large are good enough to explore with
_APART = 0.05  # of all: parts nearer than that are alike
_HOPEFUL = 1.1  # times the best step: what is estimated to take longer is not simulated
_LOOKS = 2  # simulated plans of a short search
_GAIN = 0.97  # of a known step: a short search simulates no form that is estimated to take more
_SHORT = 1 / 1.02  # of the memory: with as little, a form is placed, as estimates are off by that
_IN_DOUBT = 4  # forms of each kind that are placed to tell if anything fits
_NEAREST = 3  # forms that are placed though they seem not to fit
_NEAR = 1.12  # times the best: what is slower is not gone on from
_FIRST_STEPS = (1 / 8, 1 / 16, 1 / 32, 1 / 64)  # of all, to parts nearby
_LAST_STEPS = (1 / 32, 1 / 128)
# From the best at the end; the third one crosses a hill between two valleys.
_POLISHING_STEPS = (1 / 128, 1 / 64, 1 / 32, 1 / 256)
_INSIDE = 1 / 64  # of all that visit less, where small subgroups do not take what was estimated
# Work beyond the limit, as the best is often found when it is reached; less where it takes as long
# as estimated, so that small changes matter little.
_POLISHING, _POLISHING_SMOOTH = 5000, 1500
_SMOOTH = 0.015  # of its estimate: the best takes so much more or less at most
_RUGGED = 1.03  # times its estimate: the best takes longer, so that other parts may be better
_ELSEWHERE = 4  # plans of the best kind that are apart from all others that were simulated
_WORTH_A_LOOK = 1.04  # times the best estimate of a kind: estimates are off by as much
_ESTIMATED_STEPS = (1 / 64, 1 / 16, 1 / 64, 1 / 256)  # the first one crosses an edge nearby
_STARTS = 4  # of each kind, from which estimates lead on
_PROMISING = 1.3  # times the best estimate: from what takes longer, none leads to the best
_WAYS = ((0, 1), (0, -1), (1, 0), (-1, 0), (1, -1), (-1, 1))  # of what is resident, and what visits
_AS_GOOD = 1.02  # times the estimate of a step: neighbours with more are not tried
_EXCEEDED = 1.05  # times its estimate: a step that takes longer has less room than was estimated
_BESIDE = 0.85  # of its estimate: a step takes no less where its update goes on beside a forward
_MOST_LAST = 4  # plans that are tried at the end
_TRUSTED = 1.25  # times its estimate: a step that takes longer is not ranked by estimates
_WORTH_IT = 0.998  # of a step: parts nearby that save less are not gone on from


class _Family(NamedTuple):
    """Where parameters stay, and whether states may rest on drives."""

    tier: Tier
    drives: bool


class _Form(NamedTuple):
    """What makes candidates of different sizes alike."""

    family: _Family
    parts: Parts

    @property
    def kind(self) -> _Kind:
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


_Kind = tuple[_Family, bool]
"""A family, with visitors or without."""

_WholeSubgroups = tuple[_Family, int, int, int]
"""A family, the size of subgroups, and how many of them are resident and visit."""


class _Ranked(NamedTuple):
    """A form with subgroups of one size; `inside` is for where it does not fit."""

    estimate_ns: float
    form: _Form
    numel: int
    inside: _Form


class _RoomOfForm(NamedTuple):
    """How many times what a form needs is there; `inside` is for where it does not fit."""

    roominess: float
    form: _Form
    inside: _Form


_Entry = TypeVar("_Entry", _Ranked, _RoomOfForm)


class _Tried(NamedTuple):
    """A choice that was placed, and simulated if it fits."""

    choice: Choice
    form: _Form
    candidate: Candidate | None

    @property
    def ns(self) -> int:
        """What its step takes."""
        assert self.candidate is not None, "it fits"
        return self.candidate.timeline.ns


class Search:
    """What has been tried for one planner."""

    def __init__(self, planner: Evaluator) -> None:
        self._planner = planner
        self._means = planner.means
        given = planner.strategy
        self._given = None if isinstance(given, Auto) else given
        self._tried: dict[Choice, _Tried] = {}
        # The first choice of those with as many whole subgroups in each place.
        self._alike: dict[_WholeSubgroups, Choice] = {}
        self._in_memory: dict[_WholeSubgroups, bool] = {}  # whether these fit without drives
        self._rooms: dict[tuple[_Family, int], MemoryEdges | None] = {}
        self._estimates: dict[tuple[_Family, int], StepEstimate | None] = {}
        self._work = 0
        self._least_ns = inf
        self._least_of_kind: dict[tuple[str, str, Tier], float] = {}
        self._known_ns = inf  # what a step takes that the caller knows of
        self._exceeded: list[_Ranked] = []  # took much longer than their estimates
        # For each kind, the least of a simulated step's time over its estimate.
        self._times: dict[_Kind, float] = {}

    def run(self) -> list[Candidate]:
        """Return what fits of all that looks best.

        Raises:
            CapacityError: nothing fits.
            ConfigError: subgroups of the size that is asked for are too many.
        """
        self._planner.check_all()
        self._check_size()
        numels = self._numels(_COUNTS)
        entries = list(self._entries(numels))
        explored = _coarsest_near_the_best(entries)
        alike = [entry for entry in entries if entry.numel == explored]
        alike += self._refined_from(alike, most=_STARTS)
        for entry in _best_of_each_kind(alike):
            self._simulate(entry)
        self._explore(alike)
        if self._best is None and not self._first_that_fits():
            self._planner.placed(self._choice(self._frugal, numels[-1]))  # raises what is missing
            raise ConfigError(
                field="strategy", value=self._given, expected="one that can be carried out"
            )
        self._go_on(_FIRST_STEPS, starts=2, most_work=_MOST_WORK // 2)
        self._other_sizes(entries)
        self._try_last(entries)
        self._polish(entries)
        self._left_to_rates()
        return [tried.candidate for tried in self._tried.values() if tried.candidate is not None]

    def _check_size(self) -> None:
        """Refuse subgroups of which there would be more than can be planned."""
        asked, least = self._planner.subgroup_numel, self._planner.trained_numel // _MOST_SUBGROUPS
        if asked is not None and NORM_BLOCK <= asked < least:
            expected = f"at least {least}, as more than {_MOST_SUBGROUPS:,} subgroups take minutes"
            raise ConfigError(field="subgroup_numel", value=asked, expected=expected)

    def look(self, *, below_ns: float = inf) -> Candidate | None:
        """Return the best of the few best estimates; None: none of these fits.

        A short search, for a question that differs a little from one that was searched. Where no
        step takes less than `below_ns`, which is that of a plan already known, the one returned may
        not be the best.
        """
        self._known_ns = below_ns
        entries = self._promising(self._numels(_COUNTS))
        numel = _coarsest_near_the_best(entries)
        alike = [entry for entry in entries if entry.numel == numel]
        for entry in _best_of_each_kind(alike)[:_LOOKS]:
            self._simulate(entry)
        # Smaller subgroups make room for more, and take longer to simulate.
        for smaller in sorted({entry.numel for entry in entries if entry.numel < numel})[::-1]:
            best = min(
                (entry for entry in entries if entry.numel == smaller),
                key=attrgetter("estimate_ns"),
            )
            refined = self._refined(best)
            if refined.estimate_ns < _GAIN * self._least_ns:
                self._simulate(refined)
        return self._best

    def least_estimate_ns(self, numel: int) -> float:
        """Return the best estimate with subgroups of this size; inf where nothing seems to fit."""
        return min(
            (
                self._estimate_ns(_Form(family, parts), numel)
                for _, family in self._promising_families([numel])
                for parts in self._points(family, numel)[0]
            ),
            default=inf,
        )

    def fits(self) -> bool:
        """Tell whether `run` would find anything; plans are placed, and nothing is simulated."""
        try:
            self._planner.check_all()
        except CapacityError:
            return False
        return any(self._is_placed(form, numel) for form, numel in self._in_doubt())

    def seems_to_fit(self) -> bool:
        """Tell the same by estimates alone, which are off by a hundredth or two."""
        return any(entry.roominess >= 1 for entry in self._rooms_of_forms())

    def least(self, tier: Tier) -> float:
        """Return about how many bytes of a tier are enough; inf where no amount is.

        Of the device, those of one; of the host and the drives, those of the machine.
        """
        planner, ranks = self._planner, 1 if tier is Tier.DEVICE else self._means.ranks
        [numel] = self._numels(_COUNTS)[-1:]
        computes_here = tier is (Tier.HOST if self._means.unified else Tier.DEVICE)
        making = planner.making(planner.sizing(numel)) if computes_here else 0
        found = (
            estimate.least(tier, form.parts)
            for family in self._families()
            if (estimate := self._estimate_of(family, numel)) is not None
            for form, _ in self._all_forms(family, numel)
        )
        return ranks * (min(found, default=inf) + making)

    # --- what there is ----------------------------------------------------------------------------

    def _entries(self, numels: Iterable[int]) -> Iterator[_Ranked]:
        """Yield every form that may fit, with its estimate."""
        for numel, family in product(numels, list(self._families())):
            for form, inside in self._all_forms(family, numel):
                estimate_ns = self._estimate_ns(form, numel)
                yield _Ranked(estimate_ns, form, numel, inside)

    def _promising(self, numels: Sequence[int]) -> list[_Ranked]:
        """Return the entries of those families and sizes that may have the best of all."""
        return [
            _Ranked(self._estimate_ns(form, numel), form, numel, inside)
            for numel, family in self._promising_families(numels)
            for form, inside in self._all_forms(family, numel)
        ]

    def _promising_families(self, numels: Sequence[int]) -> list[tuple[int, _Family]]:
        """Return sizes and families that may have the best of all.

        Where edges meet, the others take much longer already.
        """
        least = {
            (numel, family): min(
                self._estimate_ns(_Form(family, parts), numel)
                for parts in self._points(family, numel, with_grid=False)[0]
            )
            for numel, family in product(numels, list(self._families()))
        }
        most_ns = _PROMISING * min(least.values(), default=inf)
        return [known for known, ns in least.items() if ns <= most_ns]

    def _all_forms(self, family: _Family, numel: int) -> Iterator[tuple[_Form, _Form]]:
        """Yield the forms of a family, each with one further from the edges, if it does not fit."""
        points, middle = self._points(family, numel)
        room = self._room(family, numel)
        for parts in points:
            inside = parts if room is None else parts.towards(middle, _OFF * room.whole)
            yield _Form(family, parts), _Form(family, inside)

    def _points(
        self, family: _Family, numel: int, *, with_grid: bool = True
    ) -> tuple[list[Parts], Parts]:
        """Return the parts to try of a family, and the middle between edges.

        First those where edges meet, then those of a grid.
        """
        room = None
        if self._given is None and not self._means.unified:
            room = self._room(family, numel)
        if room is None:
            return [Parts()], Parts()
        points = list(room.corners().values())
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

    def _room(self, family: _Family, numel: int) -> MemoryEdges | None:
        if (family, numel) not in self._rooms:
            self._rooms[family, numel] = None
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

    def _estimate_ns(self, form: _Form, numel: int) -> float:
        """Return a form's estimate; inf where it does not fit."""
        estimate = self._estimate_of(form.family, numel)
        if estimate is None:
            return inf
        return estimate.ns(form.parts) if self._given is None else 0.0

    def _estimate_of(self, family: _Family, numel: int) -> StepEstimate | None:
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
        host, device = rates.host_update_params_per_s, rates.device_update_params_per_s
        return Parts(1.0 if host is None or device is None else device / (device + host))

    def _families(self) -> Iterator[_Family]:
        has_drives = bool(self._means.budget.nvme)
        for tier in self._tiers():
            if self._given is not None:
                yield _Family(tier, isinstance(self._given, NvmeStreamed))
                continue
            yield _Family(tier, False)
            if has_drives:
                yield _Family(tier, True)

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
    def _frugal(self) -> _Form:
        """The form that needs least of the device and the host."""
        return _Form(list(self._families())[-1], Parts())

    def _numels(self, counts: Iterable[int]) -> tuple[int, ...]:
        """Return the sizes of subgroups to try, those first of which there are few."""
        planner = self._planner
        if planner.subgroup_numel is not None:
            return (planner.subgroup_numel,)
        numel = planner.trained_numel
        wanted = (max(numel // count, min(_LEAST_NUMEL, numel // _COUNTS[0])) for count in counts)
        return tuple(dict.fromkeys(max(numel - numel % NORM_BLOCK, NORM_BLOCK) for numel in wanted))

    # --- what is simulated ------------------------------------------------------------------------

    @property
    def _best(self) -> Candidate | None:
        ranked = self._ranked()
        return ranked[0].candidate if ranked else None

    def _simulate(self, entry: _Ranked) -> None:
        """Simulate a form if it may beat the best so far; if it does not fit, the one inside."""
        expected_ns = entry.estimate_ns * self._times.get(entry.form.kind, 1.0)
        if expected_ns > _HOPEFUL * self._least_ns or self._work > _MOST_WORK:
            return
        found = self._try(entry.form, entry.numel)
        if found is None and entry.inside != entry.form:
            self._try(entry.inside, entry.numel)
        elif found is not None and found.timeline.ns > _EXCEEDED * entry.estimate_ns:
            self._exceeded.append(entry)

    def _refined_from(self, entries: list[_Ranked], *, most: int) -> list[_Ranked]:
        """Return what estimates lead to from the best entries of each kind."""
        ranked = sorted(entries, key=attrgetter("estimate_ns"))
        most_ns = _PROMISING * ranked[0].estimate_ns if ranked else inf
        return [
            self._refined(entry)
            for entry in _few_of_each_kind(ranked, most=most)
            if entry.estimate_ns <= most_ns
        ]

    def _refined(self, entry: _Ranked) -> _Ranked:
        """Return the entry with the best parts that estimates alone lead to, downhill from its own.

        Estimates take microseconds, where a simulation takes milliseconds.
        """
        estimate_ns, form, numel, inside = entry
        room = self._room(form.family, numel)
        if self._given is not None or self._means.unified or isinf(estimate_ns):
            return entry
        if room is None or not room.may_visit:
            return entry
        for step in _ESTIMATED_STEPS:
            while step >= room.whole / 2:
                ways = (room.nearby(form.parts, step * way[0], step * way[1]) for way in _WAYS)
                around = (_Form(form.family, parts) for parts in ways if room.holds(parts))
                times = [(self._estimate_ns(there, numel), there) for there in around]
                there_ns, there = min(times, key=itemgetter(0), default=(inf, form))
                if there_ns >= _WORTH_IT * estimate_ns:
                    break
                form, estimate_ns = there, there_ns
        parts = form.parts.towards(inside.parts, _OFF * room.whole)
        return _Ranked(estimate_ns, form, numel, form._replace(parts=parts))

    def _explore(self, entries: list[_Ranked]) -> None:
        """Simulate more of what is estimated to be better than the best that was simulated.

        Where estimates are right there is none.
        """
        ranked = sorted(entries, key=lambda entry: entry.estimate_ns)
        for entry in _few_of_each_kind(ranked, most=len(ranked)):
            if entry.estimate_ns < self._least_ns and 2 * self._work <= _MOST_WORK:
                self._simulate(entry)

    def _first_that_fits(self) -> bool:
        for form, numel in self._in_doubt():
            if self._known_of(self._choice(form, numel), form) is not None:
                return True
        return False

    def _in_doubt(self) -> Iterator[tuple[_Form, int]]:
        """Yield what seems to fit, the roomiest first, then what would with 2% more memory.

        With the smallest subgroups, which need least of it.
        """
        rooms = sorted(self._rooms_of_forms(), key=lambda entry: -entry.roominess)
        fitting = [entry for entry in rooms if entry.roominess >= 1]
        short = [entry for entry in rooms if _SHORT <= entry.roominess < 1]
        [numel] = self._numels(_COUNTS)[-1:]
        # Also those much alike: at an edge, whole subgroups decide which of them fits.
        few = sorted(
            _few_of_each_kind(fitting, most=_IN_DOUBT, apart=0.0),
            key=lambda entry: -entry.roominess,
        )
        for entry in few:
            yield from dict.fromkeys([(entry.form, numel), (entry.inside, numel)])
        for entry in short[:_NEAREST]:
            yield entry.inside, numel
        if not fitting:
            yield self._frugal, numel

    def _rooms_of_forms(self) -> Iterator[_RoomOfForm]:
        """Yield every form with the smallest subgroups, and how roomy the memory is for it."""
        [numel] = self._numels(_COUNTS)[-1:]
        for family in self._families():
            estimate = self._estimate_of(family, numel)
            for form, inside in self._all_forms(family, numel):
                there = 0.0
                if estimate is not None:  # which knows nothing of a strategy that is asked for
                    there = estimate.roominess(form.parts) if self._given is None else 1.0
                yield _RoomOfForm(there, form, inside)

    def _is_placed(self, form: _Form, numel: int) -> bool:
        try:
            self._planner.outlined(self._choice(form, numel))
        except (CapacityError, ConfigError):
            return False
        return True

    def _go_on(self, steps: Iterable[float], *, starts: int, most_work: int) -> None:
        """Walk downhill from the best, and from the best of another kind."""
        if self._given is not None or self._means.unified:
            return
        for tried in self._of_each_kind()[:starts]:
            self._downhill(tried.form, tried.choice.subgroup_numel, steps, most_work)

    def _ranked(self) -> list[_Tried]:
        fitting = (tried for tried in self._tried.values() if tried.candidate is not None)
        return sorted(fitting, key=attrgetter("ns"))

    def _downhill(self, form: _Form, numel: int, steps: Iterable[float], most_work: int) -> None:
        room = self._room(form.family, numel)
        here = self._try(form, numel)
        if room is None or not room.may_visit or here is None:
            return
        for step in steps:
            if step < room.whole / 2:
                break
            onwards = list(_WAYS)
            while onwards and self._work <= most_work:
                way = onwards.pop(0)
                there = form._replace(parts=room.nearby(form.parts, step * way[0], step * way[1]))
                # Estimates say little where a step takes much longer than its own.
                most_ns = max(
                    _AS_GOOD * self._estimate_ns(form, numel), here.timeline.ns / _TRUSTED
                )
                hopeful = self._estimate_ns(there, numel) <= most_ns
                candidate = self._try(there, numel) if hopeful and room.holds(there.parts) else None
                if candidate is not None and candidate.timeline.ns < _WORTH_IT * here.timeline.ns:
                    form, here = there, candidate
                    onwards = [
                        way,
                        *(other for other in _WAYS if other not in (way, (-way[0], -way[1]))),
                    ]

    def _other_sizes(self, entries: list[_Ranked]) -> None:
        """Try other sizes: smaller subgroups have smaller buffers, larger ones fewer starts."""
        if self._planner.subgroup_numel is not None:
            return
        best = self._best
        assert best is not None, "something fits"
        homes = [*best.plan.steps.homes().values()]
        others = len(homes) - homes.count(Home.RESIDENT)
        more = [len(homes) * _ENOUGH // others] if 0 < others < _ENOUGH else []
        numels = dict.fromkeys([*(entry.numel for entry in entries), *self._numels(more)])
        times = self._times_the_estimate()
        tried: list[_Ranked] = []
        for best_of_kind in self._of_each_kind():
            for numel in numels:
                if numel != best_of_kind.choice.subgroup_numel:
                    inside = self._within(best_of_kind.form, numel)
                    tried.append(_Ranked(self._estimate_ns(inside, numel), inside, numel, inside))
        for numel in {entry.numel for entry in entries}:
            alike = [entry for entry in entries if entry.numel == numel]
            tried += self._refined_from(alike, most=1)
        for entry in sorted(tried, key=lambda entry: entry.estimate_ns):
            expected_ns = entry.estimate_ns * times.get(entry.form.kind, 1.0)
            if expected_ns < self._least_ns:
                self._simulate(entry)
        self._go_on(_LAST_STEPS, starts=1, most_work=_MOST_WORK)

    def _try_last(self, entries: Sequence[_Ranked]) -> None:
        """Try a few plans of which estimates say too little, where they may be shorter yet.

        At an edge, whole subgroups decide how many staging sets are left: a little further inside
        there may be one more. And an update on the host beside the next forward may take less than
        one after the other, which is what is estimated.
        """
        tried = [(entry.estimate_ns, entry.inside, entry.numel) for entry in self._exceeded]
        for kind in dict.fromkeys(entry.form.kind for entry in self._exceeded):
            # Nor does a large subgroup at an edge tell what small ones of its kind take.
            smallest = min((entry for entry in entries if entry.form.kind == kind), key=_by_size)
            tried.append((smallest.estimate_ns, smallest.inside, smallest.numel))
        if self._planner.training.overlap is not False:
            tried += [
                (_BESIDE * entry.estimate_ns, entry.form, entry.numel)
                for entry in entries
                if entry.form.family.tier is Tier.HOST and entry.form.parts == Parts()
            ]
        for least_ns, form, numel in sorted(tried, key=itemgetter(0))[:_MOST_LAST]:
            if least_ns < self._least_ns:
                self._try(form, numel)

    def _polish(self, entries: Sequence[_Ranked]) -> None:
        """Look once more around the best, and at what is alike and apart from it.

        Whole subgroups and modules make the time of a step rugged: a neighbour, or other parts that
        are estimated alike, may be a few hundredths shorter. The more so, the more the best differs
        from its estimate.
        """
        self._double_or_halve()
        self._quarter()
        choice, form, _ = self._ranked()[0]
        numel = choice.subgroup_numel
        estimate_ns = self._estimate_ns(form, numel)
        if self._least_ns > _RUGGED * estimate_ns:
            self._look_elsewhere(entries, form.kind)
        is_smooth = abs(self._least_ns - estimate_ns) <= _SMOOTH * estimate_ns
        more_work = _POLISHING_SMOOTH if is_smooth else _POLISHING
        self._go_on(_POLISHING_STEPS, starts=1, most_work=self._work + more_work)

    def _double_or_halve(self) -> None:
        """Try the best parts with twice and half as many subgroups."""
        if self._planner.subgroup_numel is not None:
            return
        choice, form, _ = self._ranked()[0]
        numel = choice.subgroup_numel
        for other in (numel // 2, 2 * numel):
            whole = max(other - other % NORM_BLOCK, NORM_BLOCK)
            if _COUNTS[0] <= self._planner.trained_numel // whole <= _COUNTS[1]:
                self._try(self._within(form, whole), whole)

    def _quarter(self) -> None:
        """Try the best parts with subgroups a quarter as large, where less is estimated.

        They take nearer to what is estimated than large ones do. Where they do not, they are beyond
        an edge, which lies elsewhere for each size: so they are tried a little further inside.
        """
        choice, form, _ = self._ranked()[0]
        numel = choice.subgroup_numel // 4 // NORM_BLOCK * NORM_BLOCK
        if self._planner.subgroup_numel is not None or not numel:
            return
        if self._planner.trained_numel // numel > _COUNTS[-1]:
            return
        there = self._within(form, numel)
        estimate_ns = self._estimate_ns(there, numel)
        if estimate_ns >= self._least_ns:
            return
        found = self._try(there, numel)
        if found is None or found.timeline.ns > _EXCEEDED * estimate_ns:
            fewer = max(there.parts.visiting - _INSIDE, 0.0)
            self._try(there._replace(parts=there.parts._replace(visiting=fewer)), numel)

    def _look_elsewhere(self, entries: Iterable[_Ranked], kind: _Kind) -> None:
        """Try a few parts of the best kind that are apart from those that were simulated."""
        numel = self._numels(_COUNTS[:2])[-1]  # small enough, and simulated soon
        alike = (entry for entry in entries if (entry.form.kind, entry.numel) == (kind, numel))
        ranked = sorted(alike, key=attrgetter("estimate_ns"))
        tried = [
            known.form.parts
            for known in self._tried.values()
            if known.choice.subgroup_numel == numel
        ]
        most = len(tried) + _ELSEWHERE
        for entry in ranked:
            if len(tried) == most or entry.estimate_ns > _WORTH_A_LOOK * ranked[0].estimate_ns:
                return
            if all(entry.form.parts.distance(parts) >= _APART for parts in tried):
                tried.append(entry.form.parts)
                self._try(entry.form, numel)

    def _of_each_kind(self) -> list[_Tried]:
        """Return the best of each kind that is near the best of all."""
        best: dict[_Kind, _Tried] = {}
        for tried in self._ranked():
            if tried.ns <= _NEAR * self._least_ns:
                best.setdefault(tried.form.kind, tried)
        return list(best.values())

    def _times_the_estimate(self) -> dict[_Kind, float]:
        """Return how many times its estimate the best of each kind took."""
        found: dict[_Kind, float] = {}
        for tried in self._ranked():
            estimate_ns = self._estimate_ns(tried.form, tried.choice.subgroup_numel)
            if 0 < estimate_ns < inf:
                found.setdefault(tried.form.kind, tried.ns / estimate_ns)
        return found

    def _within(self, form: _Form, numel: int) -> _Form:
        """Return the form with parts for which there is room with subgroups of another size."""
        room = self._room(form.family, numel)
        if room is None or room.holds(form.parts) or not room.may_visit:
            return form
        return form._replace(parts=room.nearby(Parts(), form.parts.resident, form.parts.visiting))

    def _left_to_rates(self) -> None:
        """Try the best with the share left to the policy, which knows the update alone."""
        for tried in self._ranked():
            if self._given is not None or tried.ns > _NEAR * self._least_ns:
                return
            choice = tried.choice
            count = self._planner.trained_numel // choice.subgroup_numel
            if isinstance(choice.strategy, Interleaved) and count <= _FEW:
                strategy = replace(choice.strategy, share=None)
                self._known_of(replace(choice, strategy=strategy), tried.form)
                return

    # --- one of them ------------------------------------------------------------------------------

    def _try(self, form: _Form, numel: int) -> Candidate | None:
        # with how many subgroups resident, and how many that visit
        count = self._planner.trained_numel / numel
        resident, visiting = int(count * form.parts.resident + 1e-6), count * form.parts.visiting
        key = (form.family, numel, resident, round(visiting))
        if key in self._alike:
            choice = self._alike[key]
        else:
            choice = self._alike[key] = self._choice(form, numel)
        if choice in self._tried:
            return self._tried[choice].candidate
        if form.family.drives and self._given is None:
            if key not in self._in_memory:
                in_memory = form._replace(family=form.family._replace(drives=False))
                self._in_memory[key] = not isinf(
                    self._estimate_ns(in_memory, numel)
                ) and self._is_placed(in_memory, numel)
            if self._in_memory[key]:
                return None  # what fits there would not rest on drives
        return self._known_of(choice, form)

    def _known_of(self, choice: Choice, form: _Form) -> Candidate | None:
        if choice not in self._tried:
            tried = self._tried[choice] = _Tried(choice, form, None)
            self._work += _PLACED
            with suppress(CapacityError):
                below_ns = min(self._least_ns, self._known_ns)
                alike_ns = self._least_of_kind.get(choice.kind, self._known_ns)
                candidate = self._planner.candidate(choice, below_ns=below_ns, alike_ns=alike_ns)
                self._least_of_kind[choice.kind] = min(alike_ns, candidate.timeline.ns)
                self._tried[choice] = tried._replace(candidate=candidate)
                self._work += self._planner.trained_numel // choice.subgroup_numel
                self._least_ns = min(self._least_ns, candidate.timeline.ns)
                estimate_ns = self._estimate_ns(form, choice.subgroup_numel)
                if 0 < estimate_ns < inf:
                    times = candidate.timeline.ns / estimate_ns
                    self._times[form.kind] = min(times, self._times.get(form.kind, inf))
        return self._tried[choice].candidate

    def _choice(self, form: _Form, numel: int) -> Choice:
        strategy = form.strategy if self._given is None else self._given
        return Choice(strategy=strategy, parameters=form.family.tier, subgroup_numel=numel)


def _coarsest_near_the_best(entries: list[_Ranked]) -> int:
    """Return the largest subgroups with a best estimate near the best of all."""
    least: dict[int, float] = {}
    for entry in entries:
        least[entry.numel] = min(entry.estimate_ns, least.get(entry.numel, inf))
    near = [numel for numel, ns in least.items() if ns <= _COARSE * min(least.values())]
    return max(near)


def _best_of_each_kind(entries: Iterable[_Ranked]) -> list[_Ranked]:
    """Return the few best estimates of each kind and size, the fastest first."""
    fitting = (entry for entry in entries if not isinf(entry.estimate_ns))
    by_size = groupby(
        sorted(fitting, key=lambda entry: (entry.numel, entry.estimate_ns)),
        key=lambda entry: entry.numel,
    )
    kept = [entry for _, alike in by_size for entry in _few_of_each_kind(alike)]
    return sorted(kept, key=lambda entry: entry.estimate_ns)


def _few_of_each_kind(
    entries: Iterable[_Entry], *, most: int = _EACH_KIND, apart: float = _APART
) -> list[_Entry]:
    """Return the first few entries of each kind, no two of them nearer to one another."""
    kept: dict[_Kind, list[_Entry]] = {}
    for entry in entries:
        form, others = entry.form, kept.setdefault(entry.form.kind, [])
        alike = any(other.form.parts.distance(form.parts) < apart for other in others)
        if (len(others) < most and not alike) or form.is_plain:
            others.append(entry)
    return [entry for entries in kept.values() for entry in entries]


def _by_size(entry: _Ranked) -> tuple[int, float]:
    return entry.numel, entry.estimate_ns


def _rounded(part: float) -> float:
    """Return a part of all, a little less, that prints well."""
    return min(max(int(part * 10_000 + 1e-2), 0) / 10_000, 1.0)
