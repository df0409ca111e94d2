"""`GradientPiece`: a piece of a parameter's gradient, and the tier that keeps it until its use."""

from __future__ import annotations

from dataclasses import dataclass

from infinity_engine.plan import Tier

__all__ = ["GradientPiece"]


@dataclass(frozen=True, slots=True)
class GradientPiece:
    """The part of a parameter that one subgroup holds, and where its gradient is kept."""

    first_element: int
    numel: int
    kept: Tier
