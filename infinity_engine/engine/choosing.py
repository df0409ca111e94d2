"""What `strategy="auto"` means where rates are known: the planner's choice, for the engine's own sizes and budget.

Without rates, or with too few, nothing is chosen here, and what fits decides. Starts nothing and moves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from infinity_engine.config import EngineConfig, Overlap
from infinity_engine.engine.parameters import TrainedParameter
from infinity_engine.engine.replanning import Question
from infinity_engine.engine.sizing import shape_of, wish_of
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.optim.policy import OffloadPolicy
from infinity_engine.plan import Auto, ResolvedBudget
from infinity_engine.sim.placing import Wish
from infinity_engine.sim.planner import decide
from infinity_engine.sim.sizing import Sizing
from infinity_engine.sim.timeline import rates_of_update
from infinity_engine.sim.training import Means, Training

__all__ = ["choose"]

_MOST_SUBGROUPS = 256  # that are simulated; the engine may have more, for which the same choice is as good


def choose(
    model: torch.nn.Module,
    trained: Sequence[TrainedParameter],
    sizing: Sizing,
    *,
    config: EngineConfig,
    policy: OffloadPolicy | None,
    budget: ResolvedBudget,
    io_bytes: int,
) -> tuple[Wish, Question | None]:
    """Return what the settings ask for, with a strategy and a tier where these were left open and rates are known.

    And what the planner was asked then, None where it was not.
    """
    wish = wish_of(config, policy)
    left_open = isinstance(config.strategy, Auto) and wish.policy is None and not wish.early_updates
    if not left_open or config.rates is None:
        return wish, None
    training = Training(
        model=shape_of(model, trained),
        batch=1,
        sequence=1,
        accumulation_steps=wish.accumulation_steps,
        checkpointing=False,
        formats=sizing.formats,
        state_names=sizing.state_names,
        small_bytes=wish.small_bytes,
        in_memory=sizing.own,
        overlap=config.overlap is not Overlap.OFF,
    )
    means = Means(
        budget=budget,
        rates=config.rates,
        unified=sizing.unified,
        io_bytes=io_bytes if budget.nvme else 0,
        for_all=False,
    )
    every = sum(each.numel for each in sizing.subgroups)
    try:
        decision = decide(
            training,
            means,
            parameters=wish.tiers[0] if len(wish.tiers) == 1 else None,
            subgroup_numel=max(config.subgroup_numel, every // _MOST_SUBGROUPS),
        )
    except (CapacityError, ConfigError):  # a rate is missing, or nothing fits, which placing it says better
        return wish, None
    best = decision.best.choice
    chosen = replace(wish, strategy=best.strategy, tiers=(best.parameters,), rates=rates_of_update(config.rates))
    return chosen, Question(training=training, means=means, wish=chosen)
