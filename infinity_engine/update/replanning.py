"""`Replanner`: whether another plan would be better at the rates that were measured while training.

Plans that it proposes leave every state where it is and need no memory that was not taken: they
change which subgroups visit the device, and in which order. Looks at counters and simulates; the
engine adopts a plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from types import MappingProxyType

from deepnvme.sizes import PAGE
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.lanes.meter import busy_counter, update_counter
from infinity_engine.parameters.describing import pieces_of
from infinity_engine.placement.pieces import GradientPiece
from infinity_engine.placement.placing import Plan, Wish, place
from infinity_engine.placement.sizing import Sizing
from infinity_engine.placement.training import Means, Training
from infinity_engine.plan import HostOnly, Interleaved, Lane, Rates, StaticSplit, Strategy, Tier
from infinity_engine.plan.ops import UpdateOnDevice, UpdateOnHost
from infinity_engine.plan.step import Home
from infinity_engine.sim.timeline import time_step
from infinity_engine.units import align_up, format_rate

__all__ = ["KeptPlan", "Question", "Replan", "Replanner"]

_WARMING_UP = 2  # steps after a change of plan that are not looked at
_FIRST_LOOK = 5  # before the first look
_LAST_LOOK = 1000
_VAGUE = 0.03  # of a median, that it may be off by
_OTHER_RATE = 1.1  # times: less is not worth a look
_WORTH_IT = 0.95  # of the time with the plan that there is
_PARTS = 8  # of all that is not resident, from which the search begins
_LEAST_PART = 1 / 64
_AMOUNTS = MappingProxyType(
    {
        "host_update_params_per_s": (
            update_counter(UpdateOnHost, "params"),
            update_counter(UpdateOnHost, "ns"),
        ),
        "device_update_params_per_s": (
            update_counter(UpdateOnDevice, "params"),
            update_counter(UpdateOnDevice, "ns"),
        ),
        "h2d_bytes_per_s": (busy_counter(Lane.H2D, "bytes"), busy_counter(Lane.H2D, "ns")),
        "d2h_bytes_per_s": (busy_counter(Lane.D2H, "bytes"), busy_counter(Lane.D2H, "ns")),
    }
)
_NAMES = MappingProxyType(
    {
        "host_update_params_per_s": "updates on the host",
        "device_update_params_per_s": "updates on the device",
        "h2d_bytes_per_s": "the link to the device",
        "d2h_bytes_per_s": "the link to the host",
    }
)


@dataclass(frozen=True, kw_only=True)
class Question:
    """The planner's question, and its answer: `wish` has its choice."""

    training: Training
    means: Means
    wish: Wish


@dataclass(frozen=True, kw_only=True)
class Replan:
    """Another plan, the pieces in which it needs gradients, and why it is better."""

    plan: Plan
    pieces: Sequence[Sequence[GradientPiece]]
    why: str


class KeptPlan:
    """Stands where the first plan is that of every step."""

    watches = False

    def note_step(self, totals: Mapping[str, int]) -> None:
        """Do nothing: there is no other plan."""

    def take(self) -> Replan | None:
        """Return nothing."""
        return None

    def adopt(self, replan: Replan) -> None:
        """Do nothing."""


class Replanner:
    """Watches the steps of one engine: its plan answered `question`, and its memory stays as it is.

    It looks at the medians of some steps, of more where these differ much, and at rates that are
    off by more than that. Each change of plan doubles the least number of steps to the next look.
    So noise does not make it change forth and back.
    """

    def __init__(self, question: Question, sizing: Sizing, plan: Plan, *, trained: int) -> None:
        self._question = question
        self._sizing = sizing
        self._plan = plan
        self._trained = trained
        # Bytes of the host that were freed between leases, in pieces that may be too small to use.
        self._lost = 0
        # that the plan was made or looked at with
        self._rates = question.means.rates.both_at_once()
        self._before: dict[str, int] = {}
        self._samples: dict[str, list[float]] = {name: [] for name in _AMOUNTS}
        # Negative while it warms up.
        self._steps = -_WARMING_UP
        self._look_after = self._wanted = _FIRST_LOOK
        self._better: Replan | None = None  # until `take`

    @property
    def watches(self) -> bool:
        """Whether counters are worth reading: no better plan is known."""
        return self._better is None

    @staticmethod
    def can_watch(question: Question, sizing: Sizing, plan: Plan) -> bool:
        """Tell whether anything of a plan may change: whether states on the host could visit."""
        homes = set(plan.steps.homes().values())
        parameters = plan.steps.parameters
        return (
            not sizing.unified
            and not plan.layouts
            and not plan.demand.nvme
            and _resident_part(question.wish.strategy) is not None
            and homes != {Home.RESIDENT}
            # Masters that are in place for the host's updates are not in place for visitors.
            and all(
                sizing.in_place(subgroup, Home.HOST, parameters)
                == sizing.in_place(subgroup, Home.VISITING, parameters)
                for subgroup in sizing.subgroups
            )
        )

    def note_step(self, totals: Mapping[str, int]) -> Replan | None:
        """Take the totals of all counters after a step; return a better plan, if one is found.

        It looks only now and then. The engine takes the plan when it can, and calls `adopt`.
        """
        before, self._before = self._before, dict(totals)
        self._steps += 1
        if self._steps <= 0:
            return None
        for name, (amount, ns) in _AMOUNTS.items():
            # Counters only grow: the difference is this step's.
            taken_ns = totals.get(ns, 0) - before.get(ns, 0)
            if taken_ns > 0:
                self._samples[name].append(
                    (totals.get(amount, 0) - before.get(amount, 0)) * 1e9 / taken_ns
                )
        if self._steps < self._wanted:
            return None
        # Too much noise for so few steps.
        if self._wanted < _LAST_LOOK and any(map(_is_vague, self._samples.values())):
            self._wanted *= 2
            return None
        self._steps, self._wanted = 0, self._look_after
        others = {
            name: median(samples)
            for name, samples in self._samples.items()
            if _differs(samples, getattr(self._rates, name))
        }
        # Steps before this look say nothing of those after it.
        for samples in self._samples.values():
            samples.clear()
        self._better = self._look(others) if others else None
        return self._better

    def take(self) -> Replan | None:
        """Return the better plan once: one that does not fit now is not tried at every step."""
        found, self._better = self._better, None
        return found

    def adopt(self, replan: Replan) -> None:
        """Note that its plan is the engine's from now on."""
        self._lost += self._copies_that_go(replan.plan)
        self._plan = replan.plan
        self._steps = -_WARMING_UP
        self._look_after = self._wanted = min(2 * self._look_after, _LAST_LOOK)

    def _look(self, others: Mapping[str, float]) -> Replan | None:
        """Look for a better plan where these rates are others than they were."""
        changes = "; ".join(
            f"{_NAMES[name]} at {_shown(name, rate)}, "
            f"not {_shown(name, getattr(self._rates, name))}"
            for name, rate in others.items()
        )
        # Kept even if no plan is better, so that the same difference is not looked at again.
        self._rates = measured = _with(self._rates, others)
        now_ns = self._ns(self._plan, measured)
        best, best_ns = self._best(measured)
        # A small gain is within the noise.
        if best is None or best_ns > _WORTH_IT * now_ns:
            return None
        numel = sum(subgroup.numel for subgroup in self._sizing.subgroups)
        was, is_ = (plan.steps.params_at(Home.VISITING) / numel for plan in (self._plan, best))
        why = (
            f"{changes}: {is_:.0%} visit, before {was:.0%}; updates and moves take "
            f"{1 - best_ns / now_ns:.0%} less time"
        )
        return Replan(plan=best, pieces=pieces_of(self._sizing, best, self._trained), why=why)

    # --- plans ------------------------------------------------------------------------------------

    def _best(self, rates: Rates) -> tuple[Plan | None, float]:
        """Return the fastest plan that can be adopted, and its time: from coarse to fine."""
        tried: dict[float, tuple[Plan | None, float]] = {}

        def ns_with(share: float) -> float:
            if share not in tried:
                plan = self._plan_with(share, rates)
                # A share that cannot be adopted loses against every other.
                tried[share] = plan, float("inf") if plan is None else self._ns(plan, rates)
            return tried[share][1]

        best = min((part / _PARTS for part in range(_PARTS + 1)), key=ns_with)
        step = 1 / _PARTS
        while step > _LEAST_PART:
            step /= 2
            best = min(
                (share for share in (best, best - step, best + step) if 0 <= share <= 1),
                key=ns_with,
            )
        return tried[best]

    def _plan_with(self, share: float, rates: Rates) -> Plan | None:
        """Return the plan in which such a share visits, None where it cannot be adopted."""
        resident = _resident_part(self._question.wish.strategy)
        assert resident is not None, "the strategy says how much is resident"
        wish = replace(
            self._question.wish,
            strategy=Interleaved(share=share, resident=resident),
            tiers=(self._plan.steps.parameters,),
            rates=rates,
        )
        try:
            # io_bytes is 0: a plan with something on drives is not watched.
            plan = place(self._sizing, wish, self._question.means.budget, io_bytes=0)
        except (CapacityError, ConfigError):
            return None
        there, taken = self._plan.demand, plan.demand
        staying = max(taken.staying, there.staying)  # for which the budget may have more
        device = taken.device
        if plan.steps.parameters is not Tier.DEVICE:  # with the room that there is to fetch into
            # Staging sets and fetched parameters share one room: the larger of the two counts.
            staged = sum(plan.steps.staging_bytes)
            device += max(staged, there.fetched) - max(staged, taken.fetched)
        fits = (
            taken.host + self._lost + self._copies_that_go(plan) <= there.host
            and device <= there.device
            and there.device + staying <= self._question.means.budget.device
        )
        if not fits or _residents(plan) != _residents(self._plan):
            return None
        # What it takes less stays taken.
        return replace(plan, demand=replace(there, staying=staying))

    def _copies_that_go(self, plan: Plan) -> int:
        """Return the host bytes of new parameters of subgroups that would visit from now on."""
        before, after = self._plan.steps.homes(), plan.steps.homes()
        leaving = (
            subgroup
            for subgroup in self._sizing.subgroups
            if before[subgroup.index] is Home.HOST and after[subgroup.index] is Home.VISITING
        )
        return sum(
            align_up(subgroup.formats.width * subgroup.numel, PAGE)
            for subgroup in leaving
            if subgroup.formats.has_copies
        )

    def _ns(self, plan: Plan, rates: Rates) -> int:
        """Return what updates and moves of a step take."""
        means = replace(self._question.means, rates=rates)
        return time_step(plan, self._sizing, self._question.training, means).ns


def _with(rates: Rates, found: Mapping[str, float]) -> Rates:
    """Return the rates with those that were found."""
    return replace(
        rates,
        host_update_params_per_s=found.get(
            "host_update_params_per_s", rates.host_update_params_per_s
        ),
        device_update_params_per_s=found.get(
            "device_update_params_per_s", rates.device_update_params_per_s
        ),
        # Measured in updates, where both directions are busy: it stands for both.
        h2d_bytes_per_s=found.get("h2d_bytes_per_s", rates.h2d_bytes_per_s),
        d2h_bytes_per_s=found.get("d2h_bytes_per_s", rates.d2h_bytes_per_s),
        duplex_h2d_bytes_per_s=found.get("h2d_bytes_per_s", rates.duplex_h2d_bytes_per_s),
        duplex_d2h_bytes_per_s=found.get("d2h_bytes_per_s", rates.duplex_d2h_bytes_per_s),
    )


def _resident_part(strategy: Strategy) -> float | None:
    """Return how much a strategy keeps resident, None where it does not say just that."""
    if isinstance(strategy, HostOnly):
        return 0.0
    if isinstance(strategy, StaticSplit):
        return float(strategy.ratio)
    return float(strategy.resident) if isinstance(strategy, Interleaved) else None


def _residents(plan: Plan) -> frozenset[int]:
    return frozenset(index for index, home in plan.steps.homes().items() if home is Home.RESIDENT)


def _differs(samples: Sequence[float], rate: float | None) -> bool:
    """Tell whether samples show another rate: by more than a look is worth and than they differ."""
    if rate is None or not samples:
        return False
    middle, (low, high) = median(samples), _middle_half(samples)
    return max(rate, middle) > _OTHER_RATE * min(rate, middle) and not low <= rate <= high


def _is_vague(samples: Sequence[float]) -> bool:
    """Tell whether samples are too few for as much as they differ."""
    if not samples:
        return False
    low, high = _middle_half(samples)
    # The error of a median falls with the root of the number of samples.
    return bool(high - low > _VAGUE * median(samples) * math.sqrt(len(samples)))


def _middle_half(samples: Sequence[float]) -> tuple[float, float]:
    """Return what half of the samples lie between."""
    ordered, quarter = sorted(samples), len(samples) // 4
    return ordered[quarter], ordered[-1 - quarter]


def _shown(name: str, rate: float) -> str:
    return format_rate(rate) if name.endswith("bytes_per_s") else f"{rate / 1e9:.3g} G/s"
