"""Where a piece of data lives: a tier, and the extent it takes there.

Pure data; made by plans, read by all.
"""

from __future__ import annotations

from dataclasses import dataclass

from infinity_engine.plan.extent import Extent
from infinity_engine.plan.tier import Tier

__all__ = ["Placement"]


@dataclass(frozen=True, slots=True)
class Placement:
    """The extent of one tier that holds a piece of data."""

    tier: Tier
    extent: Extent
