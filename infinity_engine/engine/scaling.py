"""`LossScale`: what the loss is multiplied by, so that fp16 gradients do not vanish. Grows while all goes well.

A skipped step halves it; 2,000 good steps in a row double it, as torch.amp.GradScaler does. Powers of two only, so that
scaling and unscaling round nothing.
"""

from __future__ import annotations

__all__ = ["LossScale"]

_GROWTH_STEPS = 2000
_FIRST = 2.0**16
_LEAST = 1.0


class LossScale:
    """The scale of one engine: 1 for ever where gradients need none."""

    def __init__(self, *, dynamic: bool) -> None:
        self.value = _FIRST if dynamic else 1.0
        self._dynamic = dynamic
        self._good = 0

    def step_made(self) -> None:
        """Note a step whose gradients were all finite."""
        self._good += 1
        if self._dynamic and self._good == _GROWTH_STEPS:
            self.value *= 2
            self._good = 0

    def step_skipped(self) -> None:
        """Note a step that was skipped.

        Raises:
            FloatingPointError: the scale is at its least already: the gradients themselves are not finite.
        """
        self._good = 0
        if self.value <= _LEAST:
            raise FloatingPointError(
                "gradients are not finite at a loss scale of 1: it is not fp16's range that they leave. Look for NaN "
                "or infinity in inputs, loss or parameters"
            )
        self.value /= 2
