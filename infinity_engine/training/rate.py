"""The learning rate of each step, as a part of the one that was asked for. Pure."""

from __future__ import annotations

import math

from infinity_engine.training.settings import Decay

__all__ = ["rate_factor"]


def rate_factor(step: int, *, steps: int, warmup: int, decay: Decay) -> float:
    """Return the factor of step `step` of so many, counted from 0; it rises in `warmup` of them."""
    # The first step is not made at a rate of 0: it would train nothing.
    if step < warmup:
        return (step + 1) / warmup
    if decay is Decay.CONSTANT:
        return 1.0
    part = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return 1.0 - part if decay is Decay.LINEAR else (1.0 + math.cos(math.pi * part)) / 2.0
