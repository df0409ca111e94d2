"""The words that plans are written in: tiers, extents, placements, budgets, rates, strategies.

Pure data, no torch, no I/O. Everything above speaks in these; they know nothing of who speaks.
"""

from infinity_engine.plan.budget import Budget, Capacity, Percent, ResolvedBudget
from infinity_engine.plan.extent import Extent
from infinity_engine.plan.placement import Placement
from infinity_engine.plan.rates import DriveRates, Rates
from infinity_engine.plan.strategy import (
    Auto,
    DeviceOnly,
    HostOnly,
    Interleaved,
    NvmeStreamed,
    StaticSplit,
    Strategy,
    parse_strategy,
)
from infinity_engine.plan.tier import Tier

__all__ = [
    "Auto",
    "Budget",
    "Capacity",
    "DeviceOnly",
    "DriveRates",
    "Extent",
    "HostOnly",
    "Interleaved",
    "NvmeStreamed",
    "Percent",
    "Placement",
    "Rates",
    "ResolvedBudget",
    "StaticSplit",
    "Strategy",
    "Tier",
    "parse_strategy",
]
