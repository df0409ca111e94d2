"""The global gradient norm and the overflow check, from sums of squares of fixed blocks.

The result has the same bits whichever threads, ranks and devices computed the blocks
(docs/decisions/0006-optimizer-kernels.md). Holds one double for every 4096 elements; pure
arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from infinity_engine import _native
from infinity_engine.errors import ConfigError

__all__ = ["GradientNorm", "GradientSums", "gradient_factor"]


@dataclass(frozen=True, slots=True)
class GradientNorm:
    """The sum of squares of all gradients as they lay in memory, scaled if they were."""

    sum_of_squares: float

    @property
    def is_finite(self) -> bool:
        """Whether all gradients are finite: squares of finite fp32 cannot overflow a double."""
        return math.isfinite(self.sum_of_squares)

    def norm(self, unscale: float = 1.0) -> float:
        """Return the norm of the gradients multiplied by `unscale`."""
        # In double: the scale goes into the norm, not into the gradients.
        return math.sqrt(self.sum_of_squares) * unscale


class GradientSums:
    """Collects the block sums of every parameter's gradient and adds them up in one fixed order."""

    def __init__(self, numels: Sequence[int]) -> None:
        """Expect the gradients of parameters of these sizes; one that never comes counts 0."""
        self._numels = tuple(numels)
        self._blocks = [np.zeros(-(-numel // _native.NORM_BLOCK)) for numel in numels]

    def put(self, parameter: int, first_element: int, sums: npt.NDArray[np.float64]) -> None:
        """Note the block sums of a gradient's piece that begins with a block, at `first_element`.

        Raises:
            ConfigError: the piece does not begin with a block, or ends behind the parameter.
        """
        first, inside = divmod(first_element, _native.NORM_BLOCK)
        blocks = self._blocks[parameter]
        if inside or first + len(sums) > len(blocks):
            expected = (
                f"pieces that begin at a multiple of {_native.NORM_BLOCK} and end within the "
                f"{self._numels[parameter]} elements"
            )
            raise ConfigError(
                field=f"gradient {parameter}", value=(first_element, len(sums)), expected=expected
            )
        blocks[first : first + len(sums)] = sums

    @property
    def blocks(self) -> tuple[npt.NDArray[np.float64], ...]:
        """The sums so far, of each parameter: one for each block."""
        return tuple(self._blocks)

    def total(self) -> GradientNorm:
        """Return the norm of the gradients so far."""
        # One tree over the blocks of each parameter, one over the parameters: no cut over ranks or
        # subgroups changes the order of additions.
        return GradientNorm(
            _native.tree_sum([_native.tree_sum(blocks.tolist()) for blocks in self._blocks])
        )


def gradient_factor(
    norm: GradientNorm, *, unscale: float = 1.0, max_norm: float | None = None
) -> float:
    """Return the factor of gradients in the update: `unscale`, and the clipping to `max_norm`.

    The clipping is that of torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6), at most 1.
    """
    if max_norm is None:
        return unscale
    # torch's own constant, so that both clip alike.
    return unscale * min(1.0, max_norm / (norm.norm(unscale) + 1e-6))
