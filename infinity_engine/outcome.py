"""What a call of `Engine.step` can do. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Outcome", "StepResult"]


class Outcome(Enum):
    """What a call of `step` did."""

    UPDATED = "updated"  # every parameter that had a gradient
    # nothing: gradients wait for more micro-batches, or for step(update=True)
    ACCUMULATED = "accumulated"
    SKIPPED = "skipped"  # nothing: gradients were not finite, and the loss scale is lower now


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a call of `step` did, and the gradients' norm before clipping where that was
    computed.
    """

    outcome: Outcome
    gradient_norm: float | None = None
    loss_scale: float = 1.0
