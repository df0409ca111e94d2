"""The planner: of all strategies that fit, the one whose step ends first in simulation, and what it
takes.

Pure. Each candidate is placed as the engine would place it, by the same policies and the same
bytes, and its StepPlan is simulated; nothing is taken from a formula alone. What does not fit is
for remedies.py to explain. Called by the command line, and by the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from deepnvme.sizes import PAGE
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.optim import NORM_BLOCK
from infinity_engine.optim.policy import HOST_BUFFERS
from infinity_engine.placement.placing import Plan, Wish, place
from infinity_engine.placement.sizing import Sizing
from infinity_engine.placement.training import Means, Training
from infinity_engine.plan import (
    Auto,
    DeviceOnly,
    HostOnly,
    Interleaved,
    Lane,
    NvmeStreamed,
    ResolvedBudget,
    StaticSplit,
    Strategy,
    Tier,
)
from infinity_engine.plan.step import BytesPerParameter, Home
from infinity_engine.sim.bound import update_bound
from infinity_engine.sim.room import MemoryEdges, Parts
from infinity_engine.sim.simulate import simulate
from infinity_engine.sim.timeline import (
    StepTimeline,
    rates_of_update,
    time_quickest_step,
    undisturbed,
)

__all__ = ["Candidate", "Choice", "Decision", "Planner", "decide"]

_COUNTS = (64, 256)  # subgroups; below 46, filling and draining cost more than 5%
_FINER = (1024,)  # where buffers and staging sets of those are too large
_ENOUGH = 46  # that are not resident
_LEAST_NUMEL = 2**20  # a subgroup's transfers below this cost more to start than they take
_FP32 = 4
_HEADER_BYTES = 3 * PAGE  # of each drive, for the swap file's own and for whole pages
_GATHERED = 2  # modules at once
_FINALISTS = 4  # forms that are looked at with more subgroups
# of a step: parts nearby that save less than the rest are not gone on from
_WORTH_IT = Fraction(997, 1000)
_FIRST_STEPS = (1 / 8, 1 / 16, 1 / 32, 1 / 64)  # of all, to parts nearby
_LAST_STEPS = (1 / 8, 1 / 32, 1 / 128)
# more or less of what is resident, and of what visits
_WAYS = ((0, 1), (0, -1), (1, 0), (-1, 0), (1, -1), (-1, 1))
# that are gone on from, of those that are not this much slower than the best
_FIRST_STARTS, _LAST_STARTS = 3, 2
_NEAR = 1.15
_OFF = 2.0  # subgroups that rounding may be off by, where a corner does not fit


class _Family(NamedTuple):
    """Where parameters stay, and whether states may rest on drives."""

    tier: Tier
    drives: bool


@dataclass(frozen=True, slots=True)
class _Form:
    """What makes candidates of different sizes alike: the parts, and the corner that they come
    from.
    """

    family: _Family
    name: str
    parts: Parts

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What can be chosen, as settings of the engine."""

    strategy: Strategy
    parameters: Tier
    subgroup_numel: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A choice that fits: where everything is, and when everything happens.

    All bytes are one rank's.
    """

    choice: Choice
    sizing: Sizing
    plan: Plan
    budget: ResolvedBudget
    """What it was placed with."""
    beside: int
    """What PyTorch has allocated where modules compute, of the budget: gradients, and activations
    and modules that are gathered where it is for these too."""
    timeline: StepTimeline
    overlap: bool = True
    """Whether the end of an update goes on beside the next forward, where that is possible."""

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.timeline.ns / 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The best candidate, and what it was chosen from."""

    training: Training
    means: Means
    best: Candidate
    others: tuple[Candidate, ...]
    """The best of each other strategy and tier, the fastest first."""
    least_update_ns: float | None
    """What no plan with as much resident can update in less, None where a rate is missing."""


def decide(
    training: Training,
    means: Means,
    *,
    strategy: Strategy | None = None,
    parameters: Tier | None = None,
    subgroup_numel: int | None = None,
) -> Decision:
    """Return the best plan; of this strategy, tier and size of subgroups where they are given.

    Raises:
        CapacityError: nothing fits; the error is that of what comes nearest.
        ConfigError: something is asked for that cannot be, or a rate is missing.
    """
    return Planner(
        training, means, strategy=strategy, parameters=parameters, subgroup_numel=subgroup_numel
    ).decide()


@dataclass(frozen=True)
class Planner:
    """The search among choices, for one training with certain means."""

    training: Training
    means: Means
    strategy: Strategy | None = field(default=None, kw_only=True)
    parameters: Tier | None = field(default=None, kw_only=True)
    subgroup_numel: int | None = field(default=None, kw_only=True)
    _sizings: dict[int, Sizing] = field(default_factory=dict, init=False, repr=False, compare=False)

    def decide(self) -> Decision:
        """Return the best plan; `decide` says what is raised."""
        ranked = sorted(
            _Search(self).run(), key=lambda each: (each.timeline.ns, each.timeline.update_ns)
        )
        best = ranked[0]
        kinds = {_kind(best.choice): best}
        for each in ranked:
            kinds.setdefault(_kind(each.choice), each)
        return Decision(
            training=self.training,
            means=self.means,
            best=best,
            others=tuple(kinds.values())[1:],
            least_update_ns=self._least_ns(best),
        )

    @cached_property
    def trained_numel(self) -> int:
        """How many parameters one rank trains."""
        return sum(
            -(-each.numel // self.means.ranks) for each in self.training.ordered() if each.trained
        )

    def candidate(self, choice: Choice) -> Candidate:
        """Return what becomes of one choice.

        Raises:
            CapacityError: it does not fit.
            ConfigError: the choice cannot be carried out, or a rate is missing.
        """
        sizing, plan, budget = self.placed(choice)
        timeline, overlap = time_quickest_step(plan, sizing, self.training, self.means)
        beside = sizing.of_backward(plan.demand.staying) + self.making(sizing)
        return Candidate(
            choice=choice,
            sizing=sizing,
            plan=plan,
            budget=budget,
            beside=beside,
            timeline=timeline,
            overlap=overlap,
        )

    def check_all(self) -> None:
        """Refuse at once what all tiers together cannot hold: masters, states, parameters and
        gradients.

        Raises:
            CapacityError: that is so.
        """
        width, budget = self.training.width, self.means.of_one_rank()
        each = 4 * len(self.training.state_names) + width
        each += 0 if self.training.in_memory else 4 + (width if width < _FP32 else 0)
        numel = self.trained_numel
        there = (
            (0 if self.means.unified else budget.device) + budget.host + sum(budget.nvme.values())
        )
        if each * numel > there:
            tier = Tier.NVME if budget.nvme else Tier.HOST
            raise _short(
                tier, each * numel, there, "give a tier more: all of them together are too small"
            )

    # --- one choice -------------------------------------------------------------------------------

    def sizing(self, subgroup_numel: int) -> Sizing:
        """Return what one rank has to hold, with states in subgroups of up to so many
        parameters.
        """
        if subgroup_numel not in self._sizings:
            self._sizings[subgroup_numel] = self.means.sizing(self.training, subgroup_numel)
        return self._sizings[subgroup_numel]

    def placed(self, choice: Choice) -> tuple[Sizing, Plan, ResolvedBudget]:
        """Return the plan, and the budget that it was made with.

        Raises:
            CapacityError: it does not fit.
        """
        sizing = self.sizing(choice.subgroup_numel)
        wish = Wish(
            strategy=choice.strategy,
            tiers=(choice.parameters,),
            accumulation_steps=self.training.accumulation_steps,
            small_bytes=self.training.small_bytes,
            rates=rates_of_update(self.means.rates),
        )
        budget = self.left(sizing)
        plan = place(sizing, wish, budget, io_bytes=self.means.io_bytes)
        _check(plan, sizing, budget)
        return sizing, plan, budget

    def left(self, sizing: Sizing) -> ResolvedBudget:
        """Return one rank's budget without what PyTorch holds in the making.

        Raises:
            CapacityError: that, with activations, is all of it.
        """
        budget, making = self.means.of_one_rank(), self.making(sizing)
        tier = Tier.HOST if self.means.unified else Tier.DEVICE
        there = getattr(budget, tier.value)
        if making and making + sizing.activations >= there:
            change = "take smaller batches or shorter sequences, or checkpoint"
            raise _short(tier, making + sizing.activations, there, change)
        return replace(budget, **{tier.value: there - making})

    def making(self, sizing: Sizing) -> int:
        """Return what PyTorch holds in the making where modules compute, where that is of the
        budget: a gradient.

        And where parameters are divided among ranks, modules that are gathered.
        """
        if not self.means.for_all:
            return 0
        largest = max((each.numel for each in self.training.ordered() if each.trained), default=0)
        return sizing.width * largest + self.gathered(sizing)

    def gathered(self, sizing: Sizing) -> int:
        """Return what modules take whose parameters are gathered of all ranks: one that computes,
        and the next.
        """
        return _GATHERED * sizing.deepest if self.means.ranks > 1 else 0

    def _least_ns(self, best: Candidate) -> float | None:
        """Return what no plan can update in less, with as much resident and as much on the drives
        as this one.

        Each lane at its rate while nothing else disturbs it, and host memory as fast as needs be:
        plans are not timed by it, but by updates whose measured rates have it in them.
        """
        steps = best.plan.steps
        numel = sum(each.numel for each in steps.subgroups)
        states = 4 * (1 + len(best.sizing.state_names))
        rates = replace(undisturbed(self.means), dram_bytes_per_s=None)
        busy = simulate(steps, rates, free=self.means.free_lanes()).busy_ns
        if self.means.unified:
            return max(busy.values())
        try:
            bound = update_bound(
                rates,
                per_parameter=BytesPerParameter(states=states, parameter=best.sizing.width),
                resident=Fraction(steps.params_at(Home.RESIDENT), max(numel, 1)),
                at_home=steps.parameters is not Tier.DEVICE,
            )
        except ConfigError:
            return None
        return max(float(bound.least_ns(numel)), busy[Lane.NVME_READ], busy[Lane.NVME_WRITE])


class _Search:
    """What has been tried for one planner: candidates by choice, None where they do not fit."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._means = planner.means
        given = planner.strategy
        self._given = None if isinstance(given, Auto) else given
        self._known: dict[Choice, Candidate | None] = {}
        # those with as many subgroups everywhere
        self._alike: dict[tuple[_Family, int, int, int], Choice] = {}

    def run(self) -> list[Candidate]:
        """Return what fits: from all corners, at the coarsest size at which any fits, downhill and
        to finer ones.

        Raises:
            CapacityError: nothing does.
        """
        self._planner.check_all()
        counts, finer = self._numels(_COUNTS), self._numels(_FINER)
        for numel in (*counts, *finer):
            found = dict(self._corners(numel, _cheap if numel in finer else _all))
            if found:
                break
        else:
            self._planner.placed(self._frugal((*counts, *finer)[-1]))
            raise ConfigError(
                field="strategy", value=self._given, expected="one that can be carried out"
            )
        if numel not in finer:
            self._descend(found, numel, _FIRST_STEPS, starts=_FIRST_STARTS)
        for finer_numel in [each for each in counts if each < numel]:
            refined = self._refined(found, finer_numel)
            self._descend(refined, finer_numel, _LAST_STEPS, starts=_LAST_STARTS)
            found |= refined
        self._more_subgroups(found)
        self._left_to_rates(found)
        return [each for each in self._known.values() if each is not None]

    # --- where to look ----------------------------------------------------------------------------

    def _corners(
        self, numel: int, wanted: Callable[[_Form], bool]
    ) -> Iterator[tuple[_Form, Candidate]]:
        """Yield what fits of the corners of all families, where they are wanted."""
        for family in self._families():
            for corner, inside in self._forms(family, numel):
                for form in (corner, inside) if wanted(corner) else ():
                    candidate = self._try(form, numel)
                    if candidate is not None:
                        yield form, candidate
                        break

    def _forms(self, family: _Family, numel: int) -> Iterator[tuple[_Form, _Form]]:
        """Yield the corners of a family that are worth trying, each with what is tried where it
        does not fit.

        That is further from the edges, by as much as whole subgroups may be off.
        """
        room = None if self._given is not None or self._means.unified else self._room(family, numel)
        if room is None:
            nothing = _Form(family, "nothing", Parts())
            yield nothing, nothing
            return
        corners = room.corners()
        if not family.drives and room.most_resident >= 1:
            corners["split"] = self._split()
        middle = Parts(
            sum(each.resident for each in corners.values()) / len(corners),
            sum(each.visiting for each in corners.values()) / len(corners),
        )
        seen: list[Parts] = []
        for name, parts in corners.items():
            if all(parts.distance(other) > room.whole / 2 for other in seen):
                seen.append(parts)
                yield (
                    _Form(family, name, parts),
                    _Form(family, name, parts.towards(middle, _OFF * room.whole)),
                )

    def _room(self, family: _Family, numel: int) -> MemoryEdges | None:
        planner = self._planner
        sizing = planner.sizing(numel)
        try:
            budget = planner.left(sizing)
        except CapacityError:
            return None
        return MemoryEdges.of(sizing, self._means, budget, tier=family.tier, drives=family.drives)

    def _split(self) -> Parts:
        """Return how states are divided where all would fit on the device: so that neither it nor
        the host waits.
        """
        rates = self._means.rates
        host, device = rates.host_update_params_per_s, rates.device_update_params_per_s
        return Parts(1.0 if host is None or device is None else device / (device + host))

    def _families(self) -> Iterator[_Family]:
        drives = bool(self._means.budget.nvme)
        tiers = list(self._tiers())
        for tier in tiers:
            if self._given is not None:
                yield _Family(tier, isinstance(self._given, NvmeStreamed))
                continue
            if tier is Tier.NVME and Tier.HOST in tiers and self._fits_on_host():
                continue  # states rest on drives before parameters do, which are read twice
            yield _Family(tier, False)
            if drives:
                yield _Family(tier, True)

    def _fits_on_host(self) -> bool:
        """Tell whether the host has room for parameters, and for the largest buffers where states
        rest on drives.
        """
        numel = self._numels(_COUNTS)[0]
        families = (_Family(Tier.HOST, drives) for drives in (False, True))
        return any(
            self._try(_Form(family, "nothing", Parts()), numel) is not None for family in families
        )

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

    def _frugal(self, numel: int) -> Choice:
        """Return the choice that needs least of the device and the host."""
        family = list(self._families())[-1]
        return self._choice(_Form(family, "nothing", Parts()), numel)

    def _numels(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sizes of subgroups to try, those first of which there are few."""
        planner = self._planner
        if planner.subgroup_numel is not None:
            return (planner.subgroup_numel,) if counts == _COUNTS else ()
        every = planner.trained_numel
        wanted = (max(every // count, min(_LEAST_NUMEL, every // _COUNTS[0])) for count in counts)
        return tuple(dict.fromkeys(max(numel - numel % NORM_BLOCK, NORM_BLOCK) for numel in wanted))

    # --- from there on ----------------------------------------------------------------------------

    def _descend(
        self, found: dict[_Form, Candidate], numel: int, steps: tuple[float, ...], *, starts: int
    ) -> None:
        """Go on from the best of the best families, with visitors and without, to parts nearby that
        are faster.
        """
        best: dict[tuple[_Family, bool], _Form] = {}
        for form in sorted(found, key=lambda each: found[each].timeline.ns):
            best.setdefault((form.family, form.parts.visiting > 0), form)
        least = min((each.timeline.ns for each in found.values()), default=0)
        for form in tuple(best.values())[:starts]:
            if (
                self._given is None
                and not self._means.unified
                and found[form].timeline.ns <= _NEAR * least
            ):
                self._downhill(form, found, numel, steps)

    def _downhill(
        self, form: _Form, found: dict[_Form, Candidate], numel: int, steps: tuple[float, ...]
    ) -> None:
        room = self._room(form.family, numel)
        if room is None or not room.may_visit:
            return
        for step in steps:
            onwards = list(_WAYS)
            while onwards:
                way = onwards.pop(0)
                there = replace(form, parts=room.nearby(form.parts, step * way[0], step * way[1]))
                candidate = self._try(there, numel) if room.holds(there.parts) else None
                if (
                    candidate is not None
                    and candidate.timeline.ns < _WORTH_IT * found[form].timeline.ns
                ):
                    found[there] = candidate
                    form, onwards = (
                        there,
                        [way, *(each for each in _WAYS if each not in (way, (-way[0], -way[1])))],
                    )

    def _refined(self, found: Mapping[_Form, Candidate], numel: int) -> dict[_Form, Candidate]:
        """Return the best with smaller subgroups, and what was too large before, as buffers are
        smaller.

        And the best of each family of which the host had no room for all buffers, or in which some
        visit, as buffers and staging sets of smaller ones leave room.
        """
        fastest = sorted({each.timeline.ns for each in found.values()})[:_FINALISTS]
        forms = [form for form, each in found.items() if each.timeline.ns in fastest]
        forms += [form for form in (*_cramped(found), *_staging(found)) if form not in forms]
        refined = {}
        for form in forms:
            candidate = self._try(form, numel)
            if candidate is not None:
                refined[form] = candidate
        corners = {(form.family, form.name) for form in forms}
        there = {form.family for form in found}
        # what fits in memory does not rest on drives
        there |= {family._replace(drives=True) for family in there}
        return refined | dict(
            self._corners(
                numel,
                lambda form: (form.family, form.name) in corners or form.family not in there,
            )
        )

    def _more_subgroups(self, found: dict[_Form, Candidate]) -> None:
        """Try the best with smaller subgroups, where so much is resident that few are left to hide
        one another.
        """
        best = _fastest(found)
        homes = [*best.plan.steps.homes().values()]
        others = len(homes) - homes.count(Home.RESIDENT)
        if not others or others >= _ENOUGH or self._planner.subgroup_numel is not None:
            return
        count = min(len(homes) * _COUNTS[0] // others, _FINER[-1])
        numel = self._numels((count,))[0]
        if count > len(homes) and numel < best.choice.subgroup_numel:
            form = next(form for form, each in found.items() if each is best)
            candidate = self._try(form, numel)
            if candidate is not None:
                found[form] = candidate

    def _left_to_rates(self, found: dict[_Form, Candidate]) -> None:
        """Try the best with the share left to the policy, which knows nothing of forwards and of
        gradients' room.
        """
        choice = _fastest(found).choice
        if self._given is None and isinstance(choice.strategy, Interleaved):
            self._known_of(replace(choice, strategy=replace(choice.strategy, share=None)))

    # --- one of them ------------------------------------------------------------------------------

    def _try(self, form: _Form, numel: int) -> Candidate | None:
        choice = self._alike.setdefault(
            (form.family, numel, *self._wholes(form, numel)), self._choice(form, numel)
        )
        states = 4 * (
            len(self._planner.training.state_names)
            + (self._planner.training.formats.parameter is not None)
        )
        left = (
            states
            * self._planner.trained_numel
            * (1 - (form.parts.resident if self._given is None else 1))
        )
        if left > self._means.of_one_rank().host and not form.family.drives:
            return None
        if form.family.drives and self._given is None:
            in_memory = replace(form, family=form.family._replace(drives=False))
            if self._try(in_memory, numel) is not None:
                return None  # what fits there would not rest on drives
        return self._known_of(choice)

    def _wholes(self, form: _Form, numel: int) -> tuple[int, int]:
        """Return how many subgroups are resident, and how many visit, as near as that can be
        said.
        """
        count = self._planner.trained_numel / numel
        resident = int(count * form.parts.resident + 1e-6)
        return resident, round(count * form.parts.visiting)

    def _known_of(self, choice: Choice) -> Candidate | None:
        if choice not in self._known:
            self._known[choice] = None
            with suppress(CapacityError):
                self._known[choice] = self._planner.candidate(choice)
        return self._known[choice]

    def _choice(self, form: _Form, numel: int) -> Choice:
        strategy = form.strategy if self._given is None else self._given
        return Choice(strategy=strategy, parameters=form.family.tier, subgroup_numel=numel)


def _all(form: _Form) -> bool:
    return True


def _cheap(form: _Form) -> bool:
    """Tell whether plans of the form are quickly made, of however many subgroups."""
    return not form.parts.visiting


def _cramped(found: Mapping[_Form, Candidate]) -> list[_Form]:
    """Return the best form of each family that had to do with fewer host buffers than let drives
    read and write.
    """
    return [
        form
        for form in _best_of_families(found)
        if 0 < len(found[form].plan.steps.buffer_bytes) < HOST_BUFFERS
    ]


def _staging(found: Mapping[_Form, Candidate]) -> list[_Form]:
    """Return the best form of each family of those in which some visit, where it is near the best
    of all.
    """
    visited = {form: each for form, each in found.items() if form.parts.visiting > 0}
    near = _NEAR * min((each.timeline.ns for each in found.values()), default=0)
    return [form for form in _best_of_families(visited) if found[form].timeline.ns <= near]


def _best_of_families(found: Mapping[_Form, Candidate]) -> list[_Form]:
    best: dict[_Family, _Form] = {}
    for form in sorted(found, key=lambda each: found[each].timeline.ns):
        best.setdefault(form.family, form)
    return list(best.values())


def _fastest(found: Mapping[_Form, Candidate]) -> Candidate:
    return min(found.values(), key=lambda each: each.timeline.ns)


def _kind(choice: Choice) -> tuple[str, str, Tier]:
    """Return what makes choices differ in more than numbers."""
    update = choice.strategy.update.name if isinstance(choice.strategy, NvmeStreamed) else ""
    return choice.strategy.name, update, choice.parameters


def _rounded(part: float) -> float:
    """Return a part of all, a little less, that prints well."""
    return min(max(int(part * 1000 + 1e-6), 0) / 1000, 1.0)


def _check(plan: Plan, sizing: Sizing, budget: ResolvedBudget) -> None:
    """Refuse what the host or the drives cannot hold."""
    change = "raise the budget's host, or let more rest on drives"
    held = sizing.held_on_host(plan.demand)
    if held > budget.host:
        raise _short(Tier.HOST, held, budget.host, change)
    drives = sum(max(limit - _HEADER_BYTES, 0) for limit in budget.nvme.values())
    if plan.demand.nvme > drives:
        raise _short(Tier.NVME, plan.demand.nvme, drives, "raise the budget's nvme, or its host")


def _short(tier: Tier, asked: int, free: int, change: str) -> CapacityError:
    return CapacityError(tier=tier.name, asked=asked, free=free, limit=free, change=change)
