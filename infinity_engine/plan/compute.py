"""How fast modules compute: measured of transformer blocks of certain shapes, and for others.

Pure data and one rule. Calibration fills it in; the simulator prices forwards and backwards by
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import NamedTuple

from infinity_engine.errors import ConfigError
from infinity_engine.plan.mappings import FrozenMapping

__all__ = ["BlockRates", "BlockShape", "ComputeRate", "block_flops"]

_AT_ONCE = 1e-9  # of a distance: nearer is the same shape


class BlockShape(NamedTuple):
    """A transformer block of so many elements per token, and the tokens that it gets at once."""

    width: int
    tokens: int

    def __str__(self) -> str:
        """Return it as it is written down, such as "1024x256"."""
        return f"{self.width}x{self.tokens}"


class ComputeRate(NamedTuple):
    """Operations per second of a forward, of a backward, which has twice as many, and of a forward
    that a backward runs again, which ends early: all of its operations count, in less time.
    """

    forward: float
    backward: float
    again: float

    @classmethod
    def of_both(cls, flops_per_s: float) -> ComputeRate:
        """Return the rate of a machine that computes as fast both ways."""
        return cls(flops_per_s, flops_per_s, flops_per_s)


def block_flops(shape: BlockShape) -> int:
    """Return a forward's operations of a block with attention and two layers of 4 times the width.

    As models are described: products of 12 weights for each squared element of the width, and
    attention between all tokens, of which causal masks save none.
    """
    # 24: 12 squared widths of weights, a multiplication and an addition for each.
    return 24 * shape.width**2 * shape.tokens + 4 * shape.tokens**2 * shape.width


@dataclass(frozen=True, slots=True)
class BlockRates:
    """What was measured, by shape."""

    measured: Mapping[BlockShape, ComputeRate]

    def __post_init__(self) -> None:
        if not self.measured:
            raise ConfigError(
                field="BlockRates.measured",
                value=self.measured,
                expected="a shape that was measured",
            )
        object.__setattr__(self, "measured", FrozenMapping(self.measured))

    def at(self, width: int, tokens: int) -> ComputeRate:
        """Return the rates of a shape: the nearer one that was measured, the more it counts.

        Nearness is that of the logarithms, and a shape counts by the inverse of its distance's
        square.
        """
        weights = {}
        for shape in self.measured:
            distance = log(shape.width / width) ** 2 + log(shape.tokens / tokens) ** 2
            # Before the division: a shape that was measured has a distance of 0.
            if distance < _AT_ONCE:
                return self.measured[shape]
            weights[shape] = 1 / distance
        total = sum(weights.values())
        # Seconds per operation are averaged: these add up, rates do not.
        seconds = [
            sum(weight / self.measured[shape][way] for shape, weight in weights.items()) / total
            for way in range(len(ComputeRate._fields))
        ]
        return ComputeRate(*(1 / taken_s for taken_s in seconds))
