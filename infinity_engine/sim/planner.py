"""The planner: of all strategies that fit, the one whose step ends first in simulation, and what it takes.

Pure. Each candidate is placed as the engine would place it, by the same policies and the same bytes, and its StepPlan
is simulated; nothing is taken from a formula alone. What does not fit is for remedies.py to explain. Called by the
command line, and by whoever has rates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction

from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.optim import NORM_BLOCK
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
from infinity_engine.sim.placing import Plan, Wish, place
from infinity_engine.sim.simulate import simulate
from infinity_engine.sim.sizing import Sizing
from infinity_engine.sim.timeline import StepTimeline, rates_of_update, time_step
from infinity_engine.sim.training import Means, Training

__all__ = ["Candidate", "Choice", "Decision", "Planner", "decide"]

_COUNTS = (64, 128, 256)  # subgroups; below 46, filling and draining cost more than 5%
_FINER = (1024,)  # where buffers and staging sets of those are too large
_ENOUGH = 46  # that are not resident
_LEAST_NUMEL = 2**20  # a subgroup's transfers below this cost more to start than they take
_FP32 = 4
_HEADER_BYTES = 3 * 4096  # of each drive, for the swap file's own and for whole pages
_GATHERED = 2  # modules at once
_FINALISTS = (4, 2)  # forms that are looked at with more subgroups, and with still more
_WORTH_IT = Fraction(997, 1000)  # of a step: smaller subgroups that save less than the rest are not looked for
_MOST_ROUNDS = 4  # to find what PyTorch holds beside a plan that leaves it that much


_Form = tuple[Tier, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What can be chosen, as settings of the engine."""

    strategy: Strategy
    parameters: Tier
    subgroup_numel: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A choice that fits: where everything is, and when everything happens. All bytes are one rank's."""

    choice: Choice
    sizing: Sizing
    plan: Plan
    budget: ResolvedBudget
    """What is left to the engine."""
    beside: int
    """What PyTorch holds of the device, or of the one memory that there is: activations, and gradients that stay."""
    timeline: StepTimeline

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
    return Planner(training, means, strategy=strategy, parameters=parameters, subgroup_numel=subgroup_numel).decide()


@dataclass(frozen=True)
class Planner:
    """The search among choices, for one training with certain means."""

    training: Training
    means: Means
    strategy: Strategy | None = field(default=None, kw_only=True)
    parameters: Tier | None = field(default=None, kw_only=True)
    subgroup_numel: int | None = field(default=None, kw_only=True)

    def decide(self) -> Decision:
        """Return the best plan; `decide` says what is raised."""
        ranked = sorted(self._search(), key=lambda each: (each.timeline.ns, each.timeline.update_ns))
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

    def candidate(self, choice: Choice) -> Candidate:
        """Return what becomes of one choice.

        Raises:
            CapacityError: it does not fit.
            ConfigError: the choice cannot be carried out, or a rate is missing.
        """
        sizing, plan, budget, beside = self.placed(choice)
        timeline = time_step(plan, sizing, self.training, self.means)
        return Candidate(choice=choice, sizing=sizing, plan=plan, budget=budget, beside=beside, timeline=timeline)

    # --- the search -----------------------------------------------------------------------------------------------

    def _search(self) -> list[Candidate]:
        """Return what fits: all forms at the coarsest size at which any fits, and the best of these at finer ones.

        Raises:
            CapacityError: nothing does.
        """
        self.check_all()
        counts, finer = self._numels(_COUNTS), self._numels(_FINER)
        for numel in (*counts, *finer):
            found = dict(self._candidates(self._choices(numel, cheap=numel in finer)))
            if found:
                break
        else:
            self.placed(self._frugal((*counts, *finer)[-1]))
            raise ConfigError(field="strategy", value=self.strategy, expected="one that can be carried out")
        every = [*found.values()]
        best = min(each.timeline.ns for each in every)
        for number, (size, finalists) in enumerate(
            zip((each for each in counts if each < numel), _FINALISTS, strict=False)
        ):
            fastest = sorted({each.timeline.ns for each in found.values()})[:finalists]
            forms = {form for form, each in found.items() if each.timeline.ns in fastest}
            # At first also what was too large before: staging sets and buffers are smaller now.
            tried = (each for each in self._choices(size) if each[0] in forms or (not number and each[0] not in found))
            refined = dict(self._candidates(tried))
            # And the very shares that were best, as what rests on drives can hang on a small part of them.
            again = {(each[0], f"{each[1]}, again"): replace(found[each].choice, subgroup_numel=size) for each in forms}
            refined |= dict(self._candidates(again.items()))
            every += refined.values()
            found |= refined
            least = min((each.timeline.ns for each in refined.values()), default=best)
            if number and least > _WORTH_IT * best:
                break
            best = min(least, best)
        return [*every, *self._finer(min(every, key=lambda each: each.timeline.ns), found)]

    def _finer(self, best: Candidate, found: Mapping[_Form, Candidate]) -> Iterator[Candidate]:
        """Yield the best with smaller subgroups, where so much is resident that few are left to hide one another."""
        homes = [*best.plan.steps.homes().values()]
        others = len(homes) - homes.count(Home.RESIDENT)
        if not others or others >= _ENOUGH or self.subgroup_numel is not None:
            return
        count = min(len(homes) * _COUNTS[0] // others, _FINER[-1])
        form = next((form for form, each in found.items() if each.choice == best.choice), None)
        numel = self._numels((count,))[0]
        if form is not None and count > len(homes) and numel < best.choice.subgroup_numel:
            for _, candidate in self._candidates(each for each in self._choices(numel) if each[0] == form):
                yield candidate

    def _candidates(self, choices: Iterable[tuple[_Form, Choice]]) -> Iterator[tuple[_Form, Candidate]]:
        """Yield those that fit."""
        known: dict[Choice, Candidate] = {}
        for form, choice in choices:
            with suppress(CapacityError):
                if choice not in known:  # as where the best share is also the largest for which there is room
                    known[choice] = self.candidate(choice)
                yield form, known[choice]

    def check_all(self) -> None:
        """Refuse at once what all tiers together cannot hold: masters, states, parameters and gradients.

        Raises:
            CapacityError: that is so.
        """
        width, budget = self.training.width, self.means.of_one_rank()
        each = 4 * len(self.training.state_names) + (width if self.means.for_all else 0)
        each += 0 if self.training.in_memory else 4 + (width if width < _FP32 else 0)
        numel = sum(-(-each.numel // self.means.ranks) for each in self.training.ordered() if each.trained)
        there = (0 if self.means.unified else budget.device) + budget.host + sum(budget.nvme.values())
        if each * numel > there:
            tier = Tier.NVME if budget.nvme else Tier.HOST
            raise _short(tier, each * numel, there, "give a tier more: all of them together are too small")

    def _frugal(self, numel: int) -> Choice:
        """Return the choice that needs least of the device and the host."""
        tier = list(self._tiers())[-1]
        drives = bool(self.means.budget.nvme)
        strategy = self.strategy if self.strategy is not None and not isinstance(self.strategy, Auto) else None
        return Choice(
            strategy=strategy or (NvmeStreamed() if drives else HostOnly()), parameters=tier, subgroup_numel=numel
        )

    def _numels(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sizes of subgroups to try, those first of which there are few."""
        if self.subgroup_numel is not None:
            return (self.subgroup_numel,) if counts == _COUNTS else ()
        every = sum(-(-each.numel // self.means.ranks) for each in self.training.ordered() if each.trained)
        wanted = (max(every // count, min(_LEAST_NUMEL, every // _COUNTS[0])) for count in counts)
        return tuple(dict.fromkeys(max(numel - numel % NORM_BLOCK, NORM_BLOCK) for numel in wanted))

    def _choices(self, numel: int, *, cheap: bool = False) -> Iterator[tuple[_Form, Choice]]:
        """Yield what may fit, with subgroups of this size; of many forms only those whose plans are `cheap` to make."""
        sizing = self.means.sizing(self.training, numel)
        held = 4 * len(sizing.state_names) + (0 if sizing.formats.parameter is None else 4)
        every = held * sum(each.numel for each in sizing.subgroups)
        host = self.means.of_one_rank().host
        for tier in self._tiers():
            for number, strategy in self._strategies(sizing, tier, cheap=cheap):
                if every * (1 - _resident(strategy)) > host and not isinstance(strategy, NvmeStreamed):
                    continue
                yield (tier, number), Choice(strategy=strategy, parameters=tier, subgroup_numel=numel)

    def _tiers(self) -> Iterator[Tier]:
        if self.parameters is not None:
            yield Tier.DEVICE if self.means.unified and self.parameters is Tier.HOST else self.parameters
            return
        yield Tier.DEVICE
        if not self.means.unified:
            yield Tier.HOST
        if self.means.budget.nvme:
            yield Tier.NVME

    def _strategies(self, sizing: Sizing, tier: Tier, *, cheap: bool) -> Iterator[tuple[str, Strategy]]:
        """Yield the strategies to try, with names that say which of different sizes are alike."""
        given = self.strategy
        if given is not None and not isinstance(given, Auto):
            yield "given", given
            return
        drives = bool(self.means.budget.nvme)
        yield "host", HostOnly()
        if drives:
            yield "drives", NvmeStreamed()
        room = None if self.means.unified else _Room.of(self, sizing, tier)
        if room is None:
            return
        if room.most_resident >= 1:
            yield "device", DeviceOnly()
        if 0 < (split := self._split(room)) < 1:
            yield "split", StaticSplit(ratio=split)
        if room.best_share is None or cheap:
            return
        residents = {"": 0.0, "with some resident": room.balanced, "with most resident": room.most_beside_staging}
        for name, resident in residents.items():
            if name and not resident:
                continue
            shares = room.shares(resident)
            if tier is not Tier.NVME:  # where the best share would change what passes the host, and that the share
                yield f"interleaved {name}", Interleaved(resident=resident)
            small = bool(shares) and shares[-1] < room.best_share  # no room for more gradients
            for number, share in enumerate(shares):
                update = Interleaved(share=share, resident=resident)
                if tier is Tier.NVME or (small and share == shares[-1]):
                    yield f"interleaved {number} {name}", update
                if drives:
                    yield f"drives and interleaved {number} {name}", NvmeStreamed(update=update)

    def _split(self, room: _Room) -> float:
        """Return the part to be resident where nothing visits: what fits, and no more than is done with the rest."""
        host, device = self.means.rates.host_update_params_per_s, self.means.rates.device_update_params_per_s
        if room.most_resident < 1 or host is None or device is None:
            return room.most_resident
        return _rounded(device / (device + host))

    # --- one choice -----------------------------------------------------------------------------------------------

    def placed(self, choice: Choice) -> tuple[Sizing, Plan, ResolvedBudget, int]:
        """Return the plan that leaves PyTorch what it holds beside it, its budget, and that.

        Raises:
            CapacityError: it does not fit.
        """
        sizing = self.means.sizing(self.training, choice.subgroup_numel)
        wish = Wish(
            strategy=choice.strategy,
            tiers=(choice.parameters,),
            accumulation_steps=self.training.accumulation_steps,
            small_bytes=self.training.small_bytes,
            rates=rates_of_update(self.means.rates),
        )
        beside = self.beside(sizing, None)
        for _ in range(_MOST_ROUNDS):
            budget = self.less(beside)
            plan = place(sizing, wish, budget, io_bytes=self.means.io_bytes)
            _check(plan, sizing, budget)
            needed = self.beside(sizing, plan)
            if needed <= beside or not self.means.for_all:
                return sizing, plan, budget, beside
            beside = needed
        raise _short(self._tier_beside, needed, beside, "keep fewer states there, whose gradients stay with them")

    @property
    def _tier_beside(self) -> Tier:
        return Tier.HOST if self.means.unified else Tier.DEVICE

    def less(self, beside: int) -> ResolvedBudget:
        """Return one rank's budget without what PyTorch holds.

        Raises:
            CapacityError: PyTorch alone needs more.
        """
        budget = self.means.of_one_rank()
        if not self.means.for_all:
            return budget
        name = self._tier_beside.value
        there = getattr(budget, name)
        if beside >= there:
            raise _short(self._tier_beside, beside, there, "take smaller batches or shorter sequences, or checkpoint")
        return replace(budget, **{name: there - beside})

    def beside(self, sizing: Sizing, plan: Plan | None) -> int:
        """Return what PyTorch holds where modules compute: activations, a gradient in the making, those that stay.

        And where parameters are divided among ranks, modules that are gathered.
        """
        training = self.training
        largest = max((each.numel for each in training.ordered() if each.trained), default=0)
        activations = training.activation_bytes()
        making = sizing.width * largest + self.gathered(sizing)
        if plan is None:
            return activations + making
        homes = plan.steps.homes()
        staying = sum(
            each.numel
            for each in sizing.subgroups
            if (plan.demand.nvme == 0 if sizing.unified else homes[each.index] is not Home.HOST)
        )
        if sizing.sums:  # the newest beside the sum, whose forward they wait through
            return activations + making + (4 + sizing.width) * staying
        # As a backward goes on, gradients take the place of activations.
        return max(activations, sizing.width * staying) + making

    def gathered(self, sizing: Sizing) -> int:
        """Return what modules take whose parameters are gathered of all ranks: one that computes, and the next."""
        return _GATHERED * sizing.deepest if self.means.ranks > 1 else 0

    def _least_ns(self, best: Candidate) -> float | None:
        """Return what no plan can update in less, with as much resident and as much on the drives as this one."""
        steps = best.plan.steps
        numel = sum(each.numel for each in steps.subgroups)
        states = 4 * (1 + len(best.sizing.state_names))
        rates = rates_of_update(self.means.rates)
        busy = simulate(steps, rates, free=self.means.free_lanes()).busy_ns
        if self.means.unified:
            return max(busy.values())
        try:
            bound = update_bound(
                rates,
                per_parameter=BytesPerParameter(states=states, parameter=best.sizing.width),
                resident=Fraction(steps.params_at(Home.RESIDENT), max(numel, 1)),
            )
        except ConfigError:
            return None
        return max(float(bound.least_ns(numel)), busy[Lane.NVME_READ], busy[Lane.NVME_WRITE])


@dataclass(frozen=True, slots=True)
class _Room:
    """What of the device is left to states and to their gradients, where parameters are in a certain tier.

    All of it is in parts of what all states need. Gradients that stay take the place of activations.
    """

    residents: float
    beside_staging: float
    gradients: float
    """What the gradients of all parameters need."""
    activations: float
    whole: float
    """The part of all that one subgroup is."""
    best_share: Fraction | None
    """The share of all that should visit, by the bound; None where a rate is missing."""

    @classmethod
    def of(cls, planner: Planner, sizing: Sizing, tier: Tier) -> _Room | None:
        """Return it; None where parameters alone do not fit there."""
        means = planner.means
        try:
            limits = sizing.limits(planner.less(planner.beside(sizing, None)), tier)
        except CapacityError:
            return None
        numel = sum(each.numel for each in sizing.subgroups)
        every = limits.device_bytes(numel)
        largest = max(each.numel for each in sizing.subgroups)
        staged = limits.staging_sets * limits.device_bytes(largest)
        used = staged if tier is Tier.DEVICE else max(staged, sizing.deepest)
        gradient = (sizing.width + (4 if sizing.sums else 0)) * numel
        activations = 0 if sizing.sums else planner.training.activation_bytes()
        try:
            bound = update_bound(rates_of_update(means.rates), per_parameter=limits.per_parameter)
        except ConfigError:
            bound = None
        return cls(
            residents=limits.resident_bytes / every,
            beside_staging=(limits.staging_bytes - used) / every,
            gradients=gradient / every if means.for_all else 0.0,
            activations=activations / every,
            whole=largest / numel,
            best_share=None if bound is None else bound.best_share,
        )

    @property
    def most_resident(self) -> float:
        """The most that can be resident where nothing visits."""
        return self._fitting(self.residents)

    @property
    def most_beside_staging(self) -> float:
        """The most that can be resident beside staging sets."""
        return self._fitting(self.beside_staging)

    @property
    def balanced(self) -> float:
        """The most that can be resident while of the others as many visit as is best, whose gradients stay as well."""
        visitors = float(self.best_share or 0) * self.gradients
        left = self.beside_staging + self.activations - visitors - self.whole * self.gradients
        return _rounded(min(left / (1 + self.gradients - visitors), self.beside_staging, 1.0))

    def _fitting(self, left: float) -> float:
        return _rounded(min(left, (left + self.activations) / (1 + self.gradients), 1.0))

    def shares(self, resident: float) -> list[float]:
        """Return parts of what is not resident that may visit, up to the one whose gradients just fit."""
        others = 1 - resident
        if self.best_share is None or others <= 0 or self.beside_staging < resident:
            return []
        most = 1.0
        if self.gradients:
            left = self.beside_staging + self.activations - resident * (1 + self.gradients)
            most = min(most, (left / self.gradients - self.whole) / others)
        best = min(float(self.best_share), most)
        parts = [best, most] if resident else [best / 2, best, (best + most) / 2, most]
        return [_rounded(part) for part in parts]


def _resident(strategy: Strategy) -> float:
    if isinstance(strategy, DeviceOnly):
        return 1.0
    if isinstance(strategy, StaticSplit):
        return strategy.ratio
    return strategy.resident if isinstance(strategy, Interleaved) else 0.0


def _kind(choice: Choice) -> tuple[str, str, Tier]:
    """Return what makes choices differ in more than numbers."""
    update = choice.strategy.update.name if isinstance(choice.strategy, NvmeStreamed) else ""
    return choice.strategy.name, update, choice.parameters


def _rounded(part: float) -> float:
    """Return a part of all, a little less, that prints well."""
    return max(int(part * 1000), 0) / 1000


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
