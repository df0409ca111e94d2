"""`Choice`, `Candidate` and `Evaluator`: settings of the engine, placed and simulated.

Pure. A choice is placed as the engine would place it, by the same policies and the same bytes, and
its StepPlan is simulated; nothing is taken from a formula alone. Called by forms.py,
search.py, planner.py and remedies.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import TypeVar

from deepnvme.sizes import PAGE
from infinity_engine.errors import CapacityError
from infinity_engine.placement.models import ModelShape
from infinity_engine.placement.placing import Outlined, Plan, Wish, outline
from infinity_engine.placement.sizing import Demand, Sizing
from infinity_engine.placement.tiles import tiled_by_room
from infinity_engine.placement.training import Means, Training, beside_inputs
from infinity_engine.plan import NvmeStreamed, ResolvedBudget, Strategy, Tier
from infinity_engine.sim.timeline import StepTimeline, time_quickest_step
from infinity_engine.sim.walking import GATHERED

__all__ = ["Candidate", "Choice", "Evaluator"]

_FP32 = 4
_HEADER_BYTES = 3 * PAGE  # of each drive, for the swap file's own and for whole pages
_Maker = TypeVar("_Maker", bound="Evaluator")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What can be chosen, as settings of the engine."""

    strategy: Strategy
    parameters: Tier
    subgroup_numel: int

    @property
    def kind(self) -> tuple[str, str, Tier]:
        """What makes choices differ in more than numbers."""
        update = self.strategy.update.name if isinstance(self.strategy, NvmeStreamed) else ""
        return self.strategy.name, update, self.parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A choice that fits: where every byte is, and when everything happens, of one rank."""

    choice: Choice
    sizing: Sizing
    plan: Plan
    budget: ResolvedBudget
    """What it was placed with."""
    beside: int
    """Bytes of the budget that PyTorch holds where modules compute: gradients, activations and
    gathered modules."""
    timeline: StepTimeline
    overlap: bool = True
    """Whether the end of an update goes on beside the next forward, where that is possible."""

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.timeline.ns / 1e9


@dataclass(frozen=True)
class Evaluator:
    """Places and simulates choices, for one training with certain means."""

    training: Training
    means: Means
    strategy: Strategy | None = field(default=None, kw_only=True)
    parameters: Tier | None = field(default=None, kw_only=True)
    subgroup_numel: int | None = field(default=None, kw_only=True)
    whole_model: ModelShape | None = field(default=None, kw_only=True)
    """With `tiling="auto"`, the model before it is cut, so that another memory or training gets
    tiles of its own; None: the training's model stays as it is."""
    sizings: dict[tuple[int, bool], Sizing] = field(
        default_factory=dict, kw_only=True, repr=False, compare=False
    )
    """What `sizing` has returned, by the size of subgroups and whether there are drives; shared
    with all that are made of this one for the same training."""

    @property
    def has_any_size(self) -> bool:
        """Whether no size of subgroups is asked for."""
        return self.subgroup_numel is None

    @property
    def cuts_layers(self) -> bool:
        """Whether another memory or training gets tiles of its own."""
        return self.whole_model is not None

    def with_budget(self: _Maker, budget: ResolvedBudget) -> _Maker:
        """Return the same with other memory, of which moved inputs take nothing."""
        return self._given(replace(self.means, budget=budget, whole=None))

    def with_training(self: _Maker, training: Training) -> _Maker:
        """Return the same for another training, less what its moved inputs take."""
        means = beside_inputs(training, self.means)
        return replace(self, training=self._cut(training, means), means=means, sizings={})

    def _given(self: _Maker, means: Means) -> _Maker:
        training, room = self.training, means.room_for_layers(self.training)
        if room != self.means.room_for_layers(training):
            training = self._cut(training, means)
        sizings = self.sizings if training is self.training else {}
        return replace(self, training=training, means=means, sizings=sizings)

    def _cut(self, training: Training, means: Means) -> Training:
        """Return the training with the layers in tiles that have no room there, where
        `tiling="auto"` is asked for.
        """
        if self.whole_model is None:
            return training
        room = means.room_for_layers(training)
        tiled = tiled_by_room(self.whole_model, width=training.width, room=room)
        model = self.whole_model if tiled is None else tiled.model
        return training if model == training.model else replace(training, model=model)

    @cached_property
    def trained_numel(self) -> int:
        """How many parameters one rank trains."""
        return sum(
            -(-parameter.numel // self.means.ranks)
            for parameter in self.training.ordered()
            if parameter.trained
        )

    def candidate(
        self, choice: Choice, *, below_ns: float = inf, alike_ns: float = inf
    ) -> Candidate:
        """Return what becomes of one choice.

        Where its step takes `below_ns` or more both ways, or more than `alike_ns`, only one way may
        have been simulated to its end: with the update apart from the next forward.

        Raises:
            CapacityError: it does not fit.
            ConfigError: the choice cannot be carried out, or a rate is missing.
        """
        sizing, plan, budget = self.placed(choice)
        timeline, overlap = time_quickest_step(
            plan, sizing, self.training, self.means, below_ns=below_ns, alike_ns=alike_ns
        )
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
        states = _FP32 * (1 + len(self.training.state_names))
        # fp32 parameters may be the masters, beside their gradients.
        per_parameter = states + (2 * width if width < _FP32 else width)
        numel = self.trained_numel
        tiers = {"device": 0 if self.means.unified else budget.device, "host": budget.host}
        tiers["drives"] = sum(budget.nvme.values())
        there = sum(tiers.values())
        if per_parameter * numel > there:
            *others, last = [name for name, limit in tiers.items() if limit] or ["host"]
            together = f"{', '.join(others)} and {last} together" if others else f"the {last}"
            raise CapacityError(
                tier=together if self.means.ranks == 1 else f"{together}, for each rank,",
                asked=per_parameter * numel,
                free=there,
                limit=there,
                change="give more memory or drives: masters, states, parameters and gradients "
                "alone take so much",
            )

    # --- one choice -------------------------------------------------------------------------------

    def sizing(self, subgroup_numel: int) -> Sizing:
        """Return what one rank has to hold, with states in subgroups of up to so many
        parameters.
        """
        # With drives, parameters that are too small for these are cut apart from the others.
        known = subgroup_numel, bool(self.means.budget.nvme)
        if known not in self.sizings:
            self.sizings[known] = self.means.sizing(self.training, subgroup_numel)
        return self.sizings[known]

    def placed(self, choice: Choice) -> tuple[Sizing, Plan, ResolvedBudget]:
        """Return the plan, and the budget that it was made with.

        Raises:
            CapacityError: it does not fit.
        """
        sizing, outlined, budget = self.outlined(choice)
        return sizing, outlined.plan(), budget

    def outlined(self, choice: Choice) -> tuple[Sizing, Outlined, ResolvedBudget]:
        """Return the same of a plan without its ops, which is all that it takes to know if it fits.

        Raises:
            CapacityError: it does not fit.
        """
        sizing = self.sizing(choice.subgroup_numel)
        wish = Wish(
            strategy=choice.strategy,
            tiers=(choice.parameters,),
            accumulation_steps=self.training.accumulation_steps,
            small_bytes=self.training.small_bytes,
            rates=self.means.rates.both_at_once(),
        )
        budget = self.left(sizing)
        outlined = outline(sizing, wish, budget, io_bytes=self.means.io_bytes)
        _check(outlined.demand, sizing, budget)
        return sizing, outlined, budget

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
        return sizing.width * self._making_numel + self.gathered(sizing)

    @cached_property
    def _making_numel(self) -> int:
        return self.training.gradients_in_the_making()

    def gathered(self, sizing: Sizing) -> int:
        """Return the bytes of modules gathered from all ranks: the one that computes, and the
        next.
        """
        return GATHERED * sizing.deepest if self.means.ranks > 1 else 0


def _check(demand: Demand, sizing: Sizing, budget: ResolvedBudget) -> None:
    """Refuse what the host or the drives cannot hold."""
    change = "raise the budget's host, or let more rest on drives"
    held = sizing.held_on_host(demand)
    if held > budget.host:
        raise _short(Tier.HOST, held, budget.host, change)
    drives = sum(max(limit - _HEADER_BYTES, 0) for limit in budget.nvme.values())
    if demand.nvme > drives:
        raise _short(Tier.NVME, demand.nvme, drives, "raise the budget's nvme, or its host")


def _short(tier: Tier, asked: int, free: int, change: str) -> CapacityError:
    return CapacityError(tier=tier.name, asked=asked, free=free, limit=free, change=change)
