"""`LossScale`: what the loss is multiplied by, so that fp16 gradients do not underflow to 0.

A step with gradients that overflow is skipped and halves the scale; 2,000 good steps in a row
double it, as in torch.amp.GradScaler. It is always a power of two: scaling and unscaling then round
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from infinity_engine.outcome import GROWTH_STEPS

__all__ = ["LossScale"]

_FIRST = 2.0**16  # as torch.amp.GradScaler: init_scale
_LEAST = 1.0


class LossScale:
    """The scale of one engine: 1, or `dynamic` where some parameters compute in fp16."""

    def __init__(self, *, dynamic: bool) -> None:
        self.value = _FIRST if dynamic else 1.0
        self.dynamic = dynamic
        self._good = 0

    def state_dict(self) -> dict[str, float | int]:
        """Return what a checkpoint keeps of it."""
        return {"value": self.value, "good_steps": self._good}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Restore what `state_dict` returned, if this model needs a scale.

        Raises:
            ValueError: it is no scale that an engine has.
        """
        value, good = float(state["value"]), int(state["good_steps"])
        # math.frexp returns a mantissa of 0.5 for powers of two alone.
        if value < _LEAST or math.frexp(value)[0] != 0.5 or good < 0:
            raise ValueError(
                "expected a loss scale that is a power of two, 1 or more, and a number of good "
                f"steps; got {value} and {good}"
            )
        if self.dynamic:
            # A model without fp16 parameters ignores the scale of one that had some; what it saves
            # counts all of its steps.
            self.value, self._good = value, good % GROWTH_STEPS

    def step_made(self) -> None:
        """Note a step in which all gradients were finite."""
        self._good += 1
        if self.dynamic and self._good == GROWTH_STEPS:
            self.value *= 2
            self._good = 0

    def step_skipped(self) -> None:
        """Note a step that was skipped.

        Raises:
            FloatingPointError: the scale is 1 already, so the gradients themselves are not finite.
        """
        self._good = 0
        if self.value <= _LEAST:
            raise FloatingPointError(
                "The gradients are not finite, and the loss scale is 1 already, so the range of "
                "fp16 is not the reason. No parameter was updated. Look for NaN or infinity in "
                "inputs, loss and parameters, and call zero_grad() before the next backward"
            )
        self.value /= 2
