"""`Warmup`: the learning rates of DeepSpeed's WarmupLR, WarmupDecayLR and WarmupCosineLR.

Pure arithmetic. The rates are those that DeepSpeed's update number `update` has, the first being 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from infinity_engine.errors import ConfigError

__all__ = ["Rise", "Warmup", "WarmupDecay"]


class Rise(Enum):
    """How the rate grows until the end of the warm-up."""

    LOG = "log"
    LINEAR = "linear"


class WarmupDecay(Enum):
    """What the rate does after the warm-up."""

    CONSTANT = "constant"  # WarmupLR
    LINEAR = "linear"  # WarmupDecayLR: to 0 at the end of training
    COSINE = "cosine"  # WarmupCosineLR: to `cosine_floor` of the optimizer's own rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Warmup:
    """Rates from `least` to `most` in `warmup_steps` updates, then `decay` until `total_steps`.

    `most` is None where it is the optimizer's own rate. With `WarmupDecay.COSINE`, `least` and
    `cosine_floor` are parts of that rate.
    """

    decay: WarmupDecay
    least: float = 0.0
    most: float | None = None
    warmup_steps: int = 1000
    rise: Rise = Rise.LOG
    total_steps: int = 0
    cosine_floor: float = 0.0001

    def __post_init__(self) -> None:
        if self.decay is not WarmupDecay.CONSTANT and self.total_steps < 1:
            raise ConfigError(
                field="scheduler.params.total_num_steps",
                value=self.total_steps,
                expected="how many updates the training makes, 1 or more",
            )

    def rate(self, update: int, base: float) -> float:
        """Return the rate of an update; `base` is the optimizer's own."""
        # DeepSpeed steps its scheduler after an update: the second update has the rate of 0 steps.
        steps = update - 1
        if self.decay is WarmupDecay.COSINE:
            return base * (0.0 if steps < 0 else self._cosine_part(steps))
        most = base if self.most is None else self.most
        return self.least + (most - self.least) * (0.0 if steps < 0 else self._part(steps))

    @property
    def _rising(self) -> int:
        # At least 2: log(1) = 0 would be the divisor.
        return max(2, self.warmup_steps)

    def _risen(self, steps: int) -> float:
        if self.rise is Rise.LINEAR:
            return steps / self._rising
        return math.log(steps + 1) / math.log(self._rising)

    def _part(self, steps: int) -> float:
        if steps < self._rising:
            return self._risen(steps)
        if self.decay is WarmupDecay.CONSTANT:
            return 1.0
        return max(0.0, (self.total_steps - steps) / max(1, self.total_steps - self._rising))

    def _cosine_part(self, steps: int) -> float:
        if steps < self._rising:
            return self.least + (1.0 - self.least) * self._risen(steps)
        progress = (steps - self._rising + 1) / max(1, self.total_steps - self._rising)
        height = (1.0 + math.cos(math.pi * min(1.0, progress))) / 2.0
        return max(0.0, self.cosine_floor + (1.0 - self.cosine_floor) * height)
