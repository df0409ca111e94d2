"""The result of a call of `Engine.step`, and the rule of the loss scale. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["GROWTH_STEPS", "Outcome", "StepResult"]

GROWTH_STEPS = 2000
"""Steps in a row with finite gradients that double the loss scale; torch.amp.GradScaler has the
same."""


class Outcome(Enum):
    """The effect of a call of `step`."""

    UPDATED = "updated"  # every parameter that had a gradient was updated
    # nothing: gradients wait for more micro-batches, or for step(update=True)
    ACCUMULATED = "accumulated"
    SKIPPED = "skipped"  # nothing: gradients were not finite, and the loss scale is lower now


@dataclass(frozen=True, slots=True)
class StepResult:
    """The effect of a call of `step`; the norm is that before clipping, None where not computed."""

    outcome: Outcome
    gradient_norm: float | None = None
    loss_scale: float = 1.0
