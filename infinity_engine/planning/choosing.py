"""What `strategy="auto"` means where rates are known: the planner's choice, for the engine's own
sizes and budget.

Without rates, or with too few, nothing is chosen here, and what fits decides. Several ranks tell
one another what each would choose, and come to the same. Starts nothing and moves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from infinity_engine.config import EngineConfig, Overlap
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.optim.policy import OffloadPolicy
from infinity_engine.parameters.describing import shape_of, wish_of
from infinity_engine.parameters.parameters import ModelParameter, TrainedParameter
from infinity_engine.placement.models import ModelShape
from infinity_engine.placement.placing import Plan, Wish, place
from infinity_engine.placement.sizing import Sizing
from infinity_engine.placement.training import Means, Training
from infinity_engine.plan import Auto, Rates, ResolvedBudget, Strategy, Tier, parse_strategy
from infinity_engine.ranks.ranks import Ranks
from infinity_engine.ranks.sharding import Sharding
from infinity_engine.sim.candidate import Choice
from infinity_engine.sim.planner import Planner
from infinity_engine.sim.timeline import time_step
from infinity_engine.update.replanning import Question

__all__ = ["choose", "choose_together", "what_fits"]

# that are simulated; the engine may have more, for which the same choice is as good
_MOST_SUBGROUPS = 256


def choose(
    model: torch.nn.Module,
    trained: Sequence[TrainedParameter],
    frozen: Sequence[ModelParameter],
    sizing: Sizing,
    *,
    config: EngineConfig,
    policy: OffloadPolicy | None,
    budget: ResolvedBudget,
    io_bytes: int,
) -> tuple[Plan, Question | None]:
    """Return the plan that the settings ask for; the planner chooses a strategy and a tier where
    these were left open and rates are known.

    And what the planner was asked then, None where what fits has decided.

    Raises:
        CapacityError: nothing fits.
        ConfigError: see `place`.
    """
    wish = wish_of(config, policy)
    if _is_open(wish) and config.rates is not None:
        training = _training(shape_of(model, trained, frozen), sizing, wish, config)
        means = _means(sizing, config.rates, budget, io_bytes)
        choice = _choice(training, means, wish, config)
        if choice is not None:
            chosen = _with(wish, choice.strategy, choice.parameters, config.rates)
            # The engine may have more subgroups than the planner was asked about: they take more.
            with suppress(CapacityError, ConfigError):
                plan = place(sizing, chosen, budget, io_bytes=io_bytes)
                return plan, Question(training=training, means=means, wish=chosen)
    return place(sizing, wish, budget, io_bytes=io_bytes), None


def choose_together(
    model: torch.nn.Module,
    sizing: Sizing,
    sharding: Sharding,
    *,
    config: EngineConfig,
    policy: OffloadPolicy | None,
    budget: ResolvedBudget,
    io_bytes: int,
) -> Plan | None:
    """Return this rank's plan of what all ranks have chosen; None, on all of them, where what fits
    decides.

    Each rank has the planner choose, at its own rates, with the part of `budget` that every rank
    has at least. Of what they choose is taken what fits on all, and of that what is fastest where
    it is slowest. All ranks come to this.
    """
    wish = sharding.wish(wish_of(config, policy))
    if not _is_open(wish):
        return None
    ranks, rates = sharding.ranks, config.rates
    room = sharding.without_ahead(budget, unified=sizing.unified)
    least = _least(ranks, room)
    asked = None
    if rates is not None:
        shape = shape_of(model, sharding.cut.wholes, sharding.cut.frozen_wholes)
        asked = _Asked(
            training=_training(shape, sizing, wish, config),
            means=_means(sizing, rates, least, io_bytes, ranks=ranks.shards.size),
            wish=wish,
            rates=rates,
        )
    choice = None if asked is None else _choice(asked.training, asked.means, wish, config)
    wanted = None
    if choice is not None:
        wanted = {"strategy": choice.strategy.to_plain(), "parameters": choice.parameters.name}
    choices_by_rank = ranks.tell("which plan each would choose", wanted)
    if asked is None or None in choices_by_rank:
        return None
    choices = [
        choice
        for rank, choice in enumerate(choices_by_rank)
        if choice not in choices_by_rank[:rank]
    ]
    plans = [asked.placed(choice, sizing, room, io_bytes) for choice in choices]
    times = ranks.tell(
        "what these plans take",
        [None if plan is None else asked.ns(plan, sizing) for plan in plans],
    )
    slowest = {
        number: max(by_rank)
        for number, by_rank in enumerate(zip(*times, strict=True))
        if None not in by_rank
    }
    return plans[min(slowest, key=lambda number: slowest[number])] if slowest else None


def what_fits(
    sizing: Sizing, wish: Wish, sharding: Sharding, room: ResolvedBudget, *, io_bytes: int
) -> Plan:
    """Return the plan of what fits on one of several ranks, with fewer buffers for drives rather
    than no room ahead.

    Raises:
        CapacityError: nothing fits.
        ConfigError: see `place`.
    """
    plan = place(sizing, wish, room, io_bytes=io_bytes)
    if not plan.layouts:
        return plan
    try:
        roomy = place(
            sizing, wish, sharding.without_ahead(room, unified=sizing.unified), io_bytes=io_bytes
        )
    except CapacityError:
        return plan
    return roomy if roomy.steps.homes() == plan.steps.homes() else plan


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """What the planner of one of several ranks is asked."""

    training: Training
    means: Means
    wish: Wish
    rates: Rates

    def placed(
        self, choice: Mapping[str, Any], sizing: Sizing, room: ResolvedBudget, io_bytes: int
    ) -> Plan | None:
        """Return this rank's plan of a choice that some rank has made, None where it has no room
        for it.
        """
        strategy = parse_strategy(choice["strategy"])
        wish = _with(self.wish, strategy, Tier[choice["parameters"]], self.rates)
        try:
            return place(sizing, wish, room, io_bytes=io_bytes)
        except (CapacityError, ConfigError):
            return None

    def ns(self, plan: Plan, sizing: Sizing) -> int | None:
        """Return what a step takes here by a plan, None where a rate is missing."""
        try:
            return time_step(plan, sizing, self.training, self.means).ns
        except ConfigError:
            return None


# --- what ranks ask one another -------------------------------------------------------------------


def _is_open(wish: Wish) -> bool:
    return isinstance(wish.strategy, Auto) and wish.policy is None and not wish.early_updates


def _training(model: ModelShape, sizing: Sizing, wish: Wish, config: EngineConfig) -> Training:
    # of several ranks, that of shards, which are fetched
    deepest_numel = -(-sizing.deepest // sizing.width)
    return Training(
        model=replace(model, deepest_numel=deepest_numel),
        batch=1,
        sequence=1,
        accumulation_steps=wish.accumulation_steps,
        checkpointing=False,
        formats=sizing.formats,
        state_names=sizing.state_names,
        small_bytes=wish.small_bytes,
        overlap=config.overlap is not Overlap.OFF,
    )


def _means(
    sizing: Sizing, rates: Rates, budget: ResolvedBudget, io_bytes: int, *, ranks: int = 1
) -> Means:
    """Return them for so many ranks, each of which has this budget."""
    drives = {name: ranks * limit for name, limit in budget.nvme.items()}
    return Means(
        budget=replace(budget, host=ranks * budget.host, nvme=drives),
        rates=rates,
        ranks=ranks,
        unified=sizing.unified,
        io_bytes=io_bytes if budget.nvme else 0,
        for_all=False,
        activation_bytes=sizing.activations,
    )


def _choice(training: Training, means: Means, wish: Wish, config: EngineConfig) -> Choice | None:
    """Return what the planner says is best; None where a rate is missing, or nothing fits: placing
    says that better.
    """
    planner = Planner(training, means, parameters=wish.tiers[0] if len(wish.tiers) == 1 else None)
    numel = max(config.subgroup_numel, planner.trained_numel // _MOST_SUBGROUPS)
    try:
        return replace(planner, subgroup_numel=numel).decide().best.choice
    except (CapacityError, ConfigError):
        return None


def _with(wish: Wish, strategy: Strategy, parameters: Tier, rates: Rates) -> Wish:
    return replace(wish, strategy=strategy, tiers=(parameters,), rates=rates.both_at_once())


def _least(ranks: Ranks, room: ResolvedBudget) -> ResolvedBudget:
    """Return the room with no more of each tier than every rank has."""
    own_drives = sum(room.nvme.values())
    rooms = ranks.tell("what there is for plans", [room.device, room.host, own_drives])
    device, host, drives = (min(by_rank) for by_rank in zip(*rooms, strict=True))
    nvme = (
        {name: limit * drives // own_drives for name, limit in room.nvme.items()} if drives else {}
    )
    return replace(room, device=device, host=host, nvme=nvme)
