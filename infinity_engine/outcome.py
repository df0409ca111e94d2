"""The result of a call of `Engine.step`. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Outcome", "StepResult"]


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
