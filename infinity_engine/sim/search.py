"""The search for the shortest step: estimates rank the forms, simulations decide.

What forms.py estimates to be best is placed and simulated; from the best of these the search goes
on to parts nearby, and to other sizes. Its work is counted in simulated subgroups and ends at a
limit, so that an answer takes about a second on any machine. Called by planner.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import inf, isinf
from operator import attrgetter, itemgetter
from typing import NamedTuple

from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.optim import NORM_BLOCK
from infinity_engine.plan import Interleaved, Tier
from infinity_engine.plan.step import Home
from infinity_engine.sim.candidate import Candidate, Choice, Evaluator
from infinity_engine.sim.forms import (
    APART,
    COUNTS,
    FEW,
    WAYS,
    WORTH_IT,
    Family,
    Form,
    Forms,
    Kind,
    Ranked,
    best_of_each_kind,
    coarsest_near_the_best,
    few_of_each_kind,
)
from infinity_engine.sim.room import Parts

__all__ = ["Search"]

_MOST_SUBGROUPS = 50_000
_FEW = 300  # subgroups: with more, the policy alone takes seconds to find its share
_ENOUGH = 46  # that are not resident
_MOST_WORK = 6500  # simulated subgroups: about a second of one core
_PLACED = 40  # simulated subgroups take as long as to find whether a plan fits
_HOPEFUL = 1.1  # times the best step: what is estimated to take longer is not simulated
_GAIN = 0.97  # of a known step: a short search simulates no form that is estimated to take more
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
_STARTS = 5  # of each kind, from which estimates lead on
_AS_GOOD = 1.02  # times the estimate of a step: neighbours with more are not tried
_EXCEEDED = 1.05  # times its estimate: a step that takes longer has less room than was estimated
_BESIDE = 0.85  # of its estimate: a step takes no less where its update goes on beside a forward
_MOST_LAST = 4  # plans that are tried at the end
_TRUSTED = 1.25  # times its estimate: a step that takes longer is not ranked by estimates

_WholeSubgroups = tuple[Family, int, int, int]
"""A family, the size of subgroups, and how many of them are resident and visit."""


class _Tried(NamedTuple):
    """A choice that was placed, and simulated if it fits."""

    choice: Choice
    form: Form
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
        self._forms = Forms(planner)
        self._tried: dict[Choice, _Tried] = {}
        # The first choice of those with as many whole subgroups in each place.
        self._alike: dict[_WholeSubgroups, Choice] = {}
        self._in_memory: dict[_WholeSubgroups, bool] = {}  # whether these fit without drives
        self._work = 0
        training = planner.training
        # Of further micro-batches one is simulated, which stands for all.
        self._passes = len(training.model.modules) * min(training.accumulation_steps, 2)
        self._least_ns = inf
        self._least_of_kind: dict[tuple[str, str, Tier], float] = {}
        self._known_ns = inf  # what a step takes that the caller knows of
        self._exceeded: list[Ranked] = []  # took much longer than their estimates
        # For each kind, the least of a simulated step's time over its estimate.
        self._times: dict[Kind, float] = {}

    def run(self) -> list[Candidate]:
        """Return what fits of all that looks best.

        Raises:
            CapacityError: nothing fits.
            ConfigError: subgroups of the size that is asked for are too many.
        """
        self._check_size()
        self._planner.check_all()
        numels = self._forms.numels()
        entries = list(self._forms.entries(numels))
        explored = coarsest_near_the_best(entries)
        alike = [entry for entry in entries if entry.numel == explored]
        alike += self._forms.refined_from(alike, most=_STARTS)
        for entry in best_of_each_kind(alike):
            self._simulate(entry)
        self._explore(alike)
        if self._best is None and not self._first_that_fits():
            frugal = self._forms.choice(self._forms.frugal, numels[-1])
            self._planner.placed(frugal)  # raises what is missing
            raise ConfigError(
                field="strategy", value=self._forms.given, expected="one that can be carried out"
            )
        self._go_on(_FIRST_STEPS, starts=2, most_work=_MOST_WORK // 2)
        self._other_sizes(entries)
        self._try_last(entries)
        self._try_fewer()
        self._polish(entries)
        self._left_to_rates()
        return [tried.candidate for tried in self._tried.values() if tried.candidate is not None]

    def _check_size(self) -> None:
        """Refuse subgroups of which there would be more than can be planned."""
        asked, least = self._planner.subgroup_numel, self._planner.trained_numel // _MOST_SUBGROUPS
        if asked is not None and NORM_BLOCK <= asked < least:
            most = f"more than {_MOST_SUBGROUPS:,} subgroups take over ten seconds to plan"
            expected = f"at least {least}, as {most}"
            raise ConfigError(field="subgroup_numel", value=asked, expected=expected)

    def look(self, *, below_ns: float = inf) -> Candidate | None:
        """Return the best of the few best estimates; None: none of these fits.

        A short search, for a question that differs a little from one that was searched. Where no
        step takes less than `below_ns`, which is that of a plan already known, the one returned may
        not be the best.
        """
        self._known_ns = below_ns
        numels = self._forms.numels()
        # Smaller subgroups make room for more, and take longer to simulate: they have to be worth
        # it.
        worth = {numel: _GAIN**number for number, numel in enumerate(numels)}
        ranked = sorted(
            self._forms.promising(numels), key=lambda entry: entry.estimate_ns / worth[entry.numel]
        )
        for entry in ranked:
            if entry.estimate_ns < _GAIN * self._least_ns:
                self._simulate(entry)
        return self._best

    def missing(self, tier: Tier) -> float:
        """Return about how many bytes of a tier are missing, of the machine, or of one device; 0
        where `run` would find anything. Plans are placed, and nothing is simulated.

        Of the plans that lack bytes of this tier, the one that lacks least counts; where there are
        none, of the others. inf: no plan can be carried out.
        """
        least: dict[bool, int] = {}
        for refusal in self._refusals():
            if refusal is None:
                return 0
            is_of_tier, short = refusal.tier == tier.name, max(refusal.asked - refusal.free, 1)
            least[is_of_tier] = min(short, least.get(is_of_tier, short))
        ranks = 1 if tier is Tier.DEVICE else self._planner.means.ranks
        return ranks * least.get(True, least.get(False, inf))

    def _refusals(self) -> Iterator[CapacityError | None]:
        """Yield why each plan that may fit does not, up to the first that does: None."""
        try:
            self._planner.check_all()
        except CapacityError as error:
            yield error
            return
        in_doubt = (self._forms.choice(form, numel) for form, numel in self._forms.in_doubt())
        for choice in dict.fromkeys(in_doubt):
            try:
                self._planner.outlined(choice)
            except CapacityError as error:
                yield error
            except ConfigError:
                continue
            else:
                yield None

    # --- what is simulated ------------------------------------------------------------------------

    @property
    def _best(self) -> Candidate | None:
        ranked = self._ranked()
        return ranked[0].candidate if ranked else None

    def _simulate(self, entry: Ranked) -> None:
        """Simulate a form if it may beat the best so far; if it does not fit, the one inside."""
        expected_ns = entry.estimate_ns * self._times.get(entry.form.kind, 1.0)
        if expected_ns > _HOPEFUL * self._least_ns or self._work > _MOST_WORK:
            return
        found = self._try(entry.form, entry.numel)
        if found is not None:
            if found.timeline.ns > _EXCEEDED * entry.estimate_ns:
                self._exceeded.append(entry)
        elif entry.inside != entry.form:
            self._try(entry.inside, entry.numel)

    def _explore(self, entries: list[Ranked]) -> None:
        """Simulate more of what is estimated to be better than the best that was simulated.

        Where estimates are right there is none.
        """
        ranked = sorted(entries, key=lambda entry: entry.estimate_ns)
        for entry in few_of_each_kind(ranked, most=len(ranked)):
            if entry.estimate_ns < self._least_ns and 2 * self._work <= _MOST_WORK:
                self._simulate(entry)

    def _first_that_fits(self) -> bool:
        for form, numel in self._forms.in_doubt():
            if self._known_of(self._forms.choice(form, numel), form) is not None:
                return True
        return False

    def _is_placed(self, form: Form, numel: int) -> bool:
        try:
            self._planner.outlined(self._forms.choice(form, numel))
        except (CapacityError, ConfigError):
            return False
        return True

    def _go_on(self, steps: Iterable[float], *, starts: int, most_work: int) -> None:
        """Walk downhill from the best, and from the best of another kind."""
        if not self._forms.are_free:
            return
        for tried in self._of_each_kind()[:starts]:
            self._downhill(tried.form, tried.choice.subgroup_numel, steps, most_work)

    def _ranked(self) -> list[_Tried]:
        fitting = (tried for tried in self._tried.values() if tried.candidate is not None)
        return sorted(fitting, key=attrgetter("ns"))

    def _downhill(self, form: Form, numel: int, steps: Iterable[float], most_work: int) -> None:
        room = self._forms.room(form.family, numel)
        here = self._try(form, numel)
        if not room.may_visit or here is None:
            return
        for step in steps:
            if step < room.whole / 2:
                break
            onwards = list(WAYS)
            while onwards and self._work <= most_work:
                way = onwards.pop(0)
                there = form._replace(parts=room.nearby(form.parts, step * way[0], step * way[1]))
                # Estimates say little where a step takes much longer than its own.
                most_ns = max(
                    _AS_GOOD * self._forms.estimate_ns(form, numel), here.timeline.ns / _TRUSTED
                )
                hopeful = self._forms.estimate_ns(there, numel) <= most_ns
                candidate = self._try(there, numel) if hopeful and room.holds(there.parts) else None
                if candidate is not None and candidate.timeline.ns < WORTH_IT * here.timeline.ns:
                    form, here = there, candidate
                    onwards = [
                        way,
                        *(other for other in WAYS if other not in (way, (-way[0], -way[1]))),
                    ]

    def _other_sizes(self, entries: list[Ranked]) -> None:
        """Try other sizes: smaller subgroups have smaller buffers, larger ones fewer starts."""
        if not self._planner.has_any_size:
            return
        best = self._best
        assert best is not None, "something fits"
        homes = [*best.plan.steps.homes().values()]
        others = len(homes) - homes.count(Home.RESIDENT)
        more = [len(homes) * _ENOUGH // others] if 0 < others < _ENOUGH else []
        numels = dict.fromkeys([*(entry.numel for entry in entries), *self._forms.numels(more)])
        times = self._times_the_estimate()
        tried: list[Ranked] = []
        for best_of_kind in self._of_each_kind():
            for numel in numels:
                if numel != best_of_kind.choice.subgroup_numel:
                    inside = self._forms.within(best_of_kind.form, numel)
                    tried.append(
                        Ranked(self._forms.estimate_ns(inside, numel), inside, numel, inside)
                    )
        for numel in {entry.numel for entry in entries}:
            alike = [entry for entry in entries if entry.numel == numel]
            tried += self._forms.refined_from(alike, most=1)

        def expected_ns(entry: Ranked) -> float:
            return entry.estimate_ns * times.get(entry.form.kind, 1.0)

        for entry in sorted(tried, key=expected_ns):
            if expected_ns(entry) < self._least_ns:
                self._simulate(entry)
        self._go_on(_LAST_STEPS, starts=1, most_work=_MOST_WORK)

    def _try_last(self, entries: Sequence[Ranked]) -> None:
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
        tried += [
            (self._may_take_ns(entry), entry.form, entry.numel)
            for entry in entries
            if self._may_update_beside(entry.form)
        ]
        for least_ns, form, numel in sorted(tried, key=itemgetter(0))[:_MOST_LAST]:
            if least_ns < self._least_ns:
                self._try(form, numel)

    def _may_update_beside(self, form: Form) -> bool:
        """Tell whether an update on the host may go on beside a forward."""
        is_asked = self._planner.training.overlap is not False
        return is_asked and form.family.tier is Tier.HOST and form.parts == Parts()

    def _may_take_ns(self, entry: Ranked) -> float:
        """Return what an entry may take at least: estimates have one after the other."""
        return (_BESIDE if self._may_update_beside(entry.form) else 1.0) * entry.estimate_ns

    def _try_fewer(self) -> None:
        """Try a few large subgroups, where starting an op costs time."""
        rates = self._planner.means.rates
        starts = (rates.host_start_s, rates.device_start_s, rates.copy_start_s, rates.io_start_s)
        if not self._planner.has_any_size or not any(starts):
            return
        numels = self._forms.numels(FEW)
        for entry in best_of_each_kind(self._forms.entries(numels)):
            # What smaller subgroups of its kind took says little of these.
            hopeful = entry.estimate_ns < _HOPEFUL * self._least_ns
            if hopeful and self._try(entry.form, entry.numel) is None:
                self._try(entry.inside, entry.numel)
        best = {tried.form.kind: tried.form for tried in reversed(self._ranked())}
        for form, numel in product(best.values(), numels):
            self._try(self._forms.within(form, numel), numel)
        self._go_on(_LAST_STEPS, starts=2, most_work=_MOST_WORK)

    def _polish(self, entries: Sequence[Ranked]) -> None:
        """Look once more around the best, and at what is alike and apart from it.

        Whole subgroups and modules make the time of a step rugged: a neighbour, or other parts that
        are estimated alike, may be a few hundredths shorter. The more so, the more the best differs
        from its estimate.
        """
        self._double_or_halve()
        self._quarter()
        choice, form, _ = self._ranked()[0]
        numel = choice.subgroup_numel
        estimate_ns = self._forms.estimate_ns(form, numel)
        if self._least_ns > _RUGGED * estimate_ns:
            self._look_elsewhere(entries, form.kind)
        is_smooth = abs(self._least_ns - estimate_ns) <= _SMOOTH * estimate_ns
        more_work = _POLISHING_SMOOTH if is_smooth else _POLISHING
        self._go_on(_POLISHING_STEPS, starts=1, most_work=self._work + more_work)

    def _double_or_halve(self) -> None:
        """Try the best parts with twice and half as many subgroups."""
        if not self._planner.has_any_size:
            return
        choice, form, _ = self._ranked()[0]
        numel = choice.subgroup_numel
        for other in (numel // 2, 2 * numel):
            whole = max(other - other % NORM_BLOCK, NORM_BLOCK)
            if COUNTS[0] <= self._planner.trained_numel // whole <= COUNTS[1]:
                self._try(self._forms.within(form, whole), whole)

    def _quarter(self) -> None:
        """Try the best parts with subgroups a quarter as large, where less is estimated.

        They take nearer to what is estimated than large ones do. Where they do not, they are beyond
        an edge, which lies elsewhere for each size: so they are tried a little further inside.
        """
        choice, form, _ = self._ranked()[0]
        numel = choice.subgroup_numel // 4 // NORM_BLOCK * NORM_BLOCK
        if not self._planner.has_any_size or not numel:
            return
        if self._planner.trained_numel // numel > COUNTS[-1]:
            return
        there = self._forms.within(form, numel)
        estimate_ns = self._forms.estimate_ns(there, numel)
        if estimate_ns >= self._least_ns:
            return
        found = self._try(there, numel)
        if found is None or found.timeline.ns > _EXCEEDED * estimate_ns:
            fewer = max(there.parts.visiting - _INSIDE, 0.0)
            self._try(there._replace(parts=there.parts._replace(visiting=fewer)), numel)

    def _look_elsewhere(self, entries: Iterable[Ranked], kind: Kind) -> None:
        """Try a few parts of the best kind that are apart from those that were simulated."""
        numel = self._forms.numels(COUNTS[:2])[-1]  # small enough, and simulated soon
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
            if all(entry.form.parts.distance(parts) >= APART for parts in tried):
                tried.append(entry.form.parts)
                self._try(entry.form, numel)

    def _of_each_kind(self) -> list[_Tried]:
        """Return the best of each kind that is near the best of all."""
        best: dict[Kind, _Tried] = {}
        for tried in self._ranked():
            if tried.ns <= _NEAR * self._least_ns:
                best.setdefault(tried.form.kind, tried)
        return list(best.values())

    def _times_the_estimate(self) -> dict[Kind, float]:
        """Return how many times its estimate the best of each kind took."""
        found: dict[Kind, float] = {}
        for tried in self._ranked():
            estimate_ns = self._forms.estimate_ns(tried.form, tried.choice.subgroup_numel)
            if 0 < estimate_ns < inf:
                found.setdefault(tried.form.kind, tried.ns / estimate_ns)
        return found

    def _left_to_rates(self) -> None:
        """Try the best with the share left to the policy, which knows the update alone."""
        for tried in self._ranked():
            if not self._forms.has_any_strategy or tried.ns > _NEAR * self._least_ns:
                return
            choice = tried.choice
            count = self._planner.trained_numel // choice.subgroup_numel
            if isinstance(choice.strategy, Interleaved) and count <= _FEW:
                strategy = replace(choice.strategy, share=None)
                # Rates may settle on no share where drives hold states: what was found stands.
                with suppress(ConfigError):
                    self._known_of(replace(choice, strategy=strategy), tried.form)
                return

    # --- one of them ------------------------------------------------------------------------------

    def _try(self, form: Form, numel: int) -> Candidate | None:
        # with how many subgroups resident, and how many that visit
        count = self._planner.trained_numel / numel
        resident, visiting = int(count * form.parts.resident + 1e-6), count * form.parts.visiting
        key = (form.family, numel, resident, round(visiting))
        if key in self._alike:
            choice = self._alike[key]
        else:
            choice = self._alike[key] = self._forms.choice(form, numel)
        if choice in self._tried:
            return self._tried[choice].candidate
        if form.family.drives and self._forms.has_any_strategy:
            if key not in self._in_memory:
                in_memory = form._replace(family=form.family._replace(drives=False))
                self._in_memory[key] = not isinf(
                    self._forms.estimate_ns(in_memory, numel)
                ) and self._is_placed(in_memory, numel)
            if self._in_memory[key]:
                return None  # what fits there would not rest on drives
        return self._known_of(choice, form)

    def _known_of(self, choice: Choice, form: Form) -> Candidate | None:
        if choice not in self._tried:
            tried = self._tried[choice] = _Tried(choice, form, None)
            self._work += _PLACED
            with suppress(CapacityError):
                below_ns = min(self._least_ns, self._known_ns)
                alike_ns = self._least_of_kind.get(choice.kind, self._known_ns)
                candidate = self._planner.candidate(choice, below_ns=below_ns, alike_ns=alike_ns)
                self._least_of_kind[choice.kind] = min(alike_ns, candidate.timeline.ns)
                self._tried[choice] = tried._replace(candidate=candidate)
                subgroups = self._planner.trained_numel // choice.subgroup_numel
                # Passing a module takes as long as a subgroup.
                self._work += max(subgroups, self._passes)
                self._least_ns = min(self._least_ns, candidate.timeline.ns)
                estimate_ns = self._forms.estimate_ns(form, choice.subgroup_numel)
                if 0 < estimate_ns < inf:
                    times = candidate.timeline.ns / estimate_ns
                    self._times[form.kind] = min(times, self._times.get(form.kind, inf))
        return self._tried[choice].candidate


def _by_size(entry: Ranked) -> tuple[int, float]:
    return entry.numel, entry.estimate_ns
