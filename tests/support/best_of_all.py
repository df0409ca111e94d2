"""The best of all strategies, sought without the planner's search: a fine grid of everything that
fits, simulated.

What cannot be faster than the best so far, by the work of its busiest lane alone, is not simulated;
so the grid costs a part of itself, and finds what all of it would find. Used by the planner's
tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from math import inf

from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.optim.policies.interleaved import spread
from infinity_engine.optim.policy import split_residents
from infinity_engine.placement.sizing import Sizing
from infinity_engine.placement.training import Training
from infinity_engine.plan import (
    DeviceOnly,
    HostOnly,
    Interleaved,
    Lane,
    LaneClocks,
    NvmeStreamed,
    StaticSplit,
    Strategy,
    Tier,
)
from infinity_engine.plan.step import Home
from infinity_engine.sim.candidate import Candidate, Choice
from infinity_engine.sim.planner import Planner

__all__ = ["Bounds", "best_of_all", "everything"]

_SHARES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
_RESIDENTS = (0.0, 0.05, 0.1, 0.175, 0.25, 0.35, 0.5, 0.75)
_SPLITS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)
_COUNTS = (64, 256)  # of subgroups
_FEW = (4, 16)  # likewise, where each op has a cost


def everything(planner: Planner) -> Iterator[Choice]:
    """Yield all strategies, over a grid of their settings, in all tiers and two sizes of
    subgroups; in four where each op has a cost.
    """
    means, every = planner.means, planner.trained_numel
    drives = bool(means.budget.nvme)
    tiers = [Tier.DEVICE, *([] if means.unified else [Tier.HOST]), *([Tier.NVME] if drives else [])]
    strategies: list[Strategy] = [HostOnly()]
    if not means.unified:
        strategies += [DeviceOnly(), *(StaticSplit(ratio=part) for part in _SPLITS)]
        strategies += [
            Interleaved(share=part, resident=there) for part in _SHARES for there in _RESIDENTS
        ]
    if drives:
        strategies += [
            NvmeStreamed(update=each) for each in strategies if isinstance(each, Interleaved)
        ]
        strategies.append(NvmeStreamed())
    counts = _COUNTS if means.rates.host_start_s is None else _FEW + _COUNTS
    for numel in (max(every // count // 4096 * 4096, 4096) for count in counts):
        for tier in tiers:
            for strategy in strategies:
                yield Choice(strategy=strategy, parameters=tier, subgroup_numel=numel)


def best_of_all(planner: Planner, *, below_ns: float = inf) -> Candidate | None:
    """Return the fastest of everything that takes less than `below_ns`, None where nothing does."""
    bounds, best = Bounds(planner), None
    ranked = [
        (bounds.least_ns(choice), number, choice)
        for number, choice in enumerate(everything(planner))
    ]
    for least, _, choice in sorted(ranked, key=lambda each: each[:2]):
        if least >= below_ns:
            break
        try:
            candidate = planner.candidate(choice, below_ns=below_ns, alike_ns=below_ns)
        except (CapacityError, ConfigError):
            continue
        if candidate.timeline.ns < below_ns:
            best, below_ns = candidate, candidate.timeline.ns
    return best


class Bounds:
    """What a step of each choice takes at least, for one training and means: every lane works
    without a pause.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        training, means = planner.training, planner.means
        # A drive's lane may have it alone for a part of the time, however much the other one does.
        reads, writes = (means.undisturbed(*both) for both in ((1, 0), (0, 1)))
        self._clocks = LaneClocks(reads, free=means.free_lanes())
        self._write_clocks = LaneClocks(writes)
        self._sizings: dict[int, Sizing] = {}
        self._homes: dict[tuple[int, Strategy], tuple[int, int, int]] = {}
        self._compute = Lane.HOST if means.unified else Lane.DEVICE
        rate = means.compute_rate(training)
        flops = [
            module.flops(training.sequence) * training.tokens for module in training.model.modules
        ]
        again = sum(work * training.runs_again(place) for place, work in enumerate(flops))
        backward = training.tokens * sum(
            module.backward_flops(training.sequence) for module in training.model.modules
        )
        self._forward_ns = 1e9 * sum(flops) / rate.forward if rate else 0.0
        self._backward_ns = 1e9 * (again / rate.again + backward / rate.backward) if rate else 0.0
        self._written = _on_drives(training, means.ranks, trained=True)
        frozen = means.budget.nvme and _on_drives(training, means.ranks, trained=False)
        # Nothing of it is written beside it, so drives read it at their full rate.
        apart = LaneClocks(means.alone or means.rates)
        self._frozen_ns = apart.duration_ns(Lane.NVME_READ, frozen) if frozen else 0

    def least_ns(self, choice: Choice) -> float:
        """Return nanoseconds that no step of this choice ends before; inf where it cannot fit."""
        training, means, tier = self._planner.training, self._planner.means, choice.parameters
        sizing = self._sizing(choice.subgroup_numel)
        on_host, visiting, resident = self._numels(choice, sizing)
        parameters, states = sum(sizing.parameters), 4 * (1 + len(training.state_names))
        fetched = 0 if tier is Tier.DEVICE or means.unified else parameters
        read, frozen_ns = 0, 0
        if fetched and tier is Tier.NVME:
            read, frozen_ns = self._written, self._frozen_ns
        room = self._room(choice, sizing, visiting, resident)
        rests = self._rests(choice, sizing, on_host, visiting)
        if room < 0 or (rests and not isinstance(choice.strategy, NvmeStreamed)):
            return inf
        again = max(fetched - room, 0)
        update = {
            Lane.HOST: on_host,
            Lane.DEVICE: visiting + resident,
            Lane.H2D: states * visiting + (fetched or sizing.width * on_host),
            Lane.D2H: states * visiting + (sizing.width * (visiting + resident) if fetched else 0),
            Lane.NVME_READ: rests + read,
        }
        update_ns = {lane: self._ns(lane, amount) for lane, amount in update.items()}
        update_ns[self._compute] += self._forward_ns
        update_ns[Lane.NVME_READ] += frozen_ns
        more, gradients = (
            training.accumulation_steps - 1,
            sizing.wire(sizing.subgroups[0]) * on_host,
        )
        backward_ns = max(self._backward_ns, self._ns(Lane.D2H, gradients))
        step_ns = max(
            max(update_ns.values()) + backward_ns,
            self._ns(Lane.H2D, update[Lane.H2D] + again),
            self._ns(Lane.NVME_READ, update[Lane.NVME_READ] + max(read - room, 0)) + frozen_ns,
            self._ns(Lane.NVME_WRITE, rests + read),
        )
        # The next forward does not wait for gradients to come down.
        return max(
            step_ns + more * (self._forward_ns + self._backward_ns),
            self._ns(Lane.D2H, update[Lane.D2H] + (1 + more) * gradients),
        )

    def _ns(self, lane: Lane, amount: float) -> float:
        clocks = self._write_clocks if lane is Lane.NVME_WRITE else self._clocks
        return clocks.duration_ns(lane, int(amount)) if amount else 0.0

    def _sizing(self, numel: int) -> Sizing:
        if numel not in self._sizings:
            self._sizings[numel] = self._planner.means.sizing(self._planner.training, numel)
        return self._sizings[numel]

    def _numels(self, choice: Choice, sizing: Sizing) -> tuple[int, int, int]:
        """Return how many parameters the host updates, how many visit the device, and how many are
        resident there.
        """
        strategy = (
            choice.strategy.update if isinstance(choice.strategy, NvmeStreamed) else choice.strategy
        )
        known = choice.subgroup_numel, strategy
        if known not in self._homes:
            self._homes[known] = _numels(sizing, strategy)
        return self._homes[known]

    def _room(self, choice: Choice, sizing: Sizing, visiting: int, resident: int) -> float:
        """Return the bytes of the device that are left to fetch parameters; -inf where other things
        do not fit.
        """
        if self._planner.means.unified:
            return inf
        try:
            budget = self._planner.left(sizing)
        except CapacityError:
            return -inf
        one, tier = sizing.subgroups[0], choice.parameters
        gradients = (4 if sizing.sums else sizing.wire(one)) * (visiting + resident)
        states = resident * sizing.states_bytes(one, Home.RESIDENT, tier) // one.numel
        left = budget.device - states - sizing.on_their_way - sizing.of_backward(gradients)
        needed = sum(sizing.parameters) if tier is Tier.DEVICE else sizing.deepest
        return -inf if left < needed else left

    def _rests(self, choice: Choice, sizing: Sizing, on_host: int, visiting: int) -> int:
        """Return the bytes of states and gradients that the host has no room for."""
        one, tier = sizing.subgroups[0], choice.parameters
        states = (
            sizing.states_bytes(one, home, tier) * numel // one.numel
            for home, numel in ((Home.HOST, on_host), (Home.VISITING, visiting))
        )
        there = (
            sum(states)
            + sizing.wire(one) * on_host
            + (sum(sizing.parameters) if tier is Tier.HOST else 0)
        )
        return max(there - self._planner.means.of_one_rank().host, 0)


def _on_drives(training: Training, ranks: int, *, trained: bool) -> int:
    """Return the bytes of one rank's parameters that may rest on drives, trained or frozen ones;
    small ones stay in memory.
    """
    nbytes = (
        -(-parameter.numel // ranks) * (parameter.element_bytes or training.width)
        for parameter in training.model.parameters
        if parameter.trained is trained
    )
    return sum(size for size in nbytes if size >= training.small_bytes)


def _numels(sizing: Sizing, strategy: Strategy) -> tuple[int, int, int]:
    share, part = 0.0, 0.0
    if isinstance(strategy, Interleaved):
        share, part = strategy.share or 0.0, strategy.resident
    elif isinstance(strategy, StaticSplit | DeviceOnly):
        part = strategy.ratio if isinstance(strategy, StaticSplit) else 1.0
    others, residents = split_residents(sizing.specs({}), part)
    visits = spread(others, Fraction(share))
    visiting = sum(each.numel for each, visit in zip(others, visits, strict=True) if visit)
    resident = sum(each.numel for each in residents)
    return sum(each.numel for each in sizing.subgroups) - visiting - resident, visiting, resident
