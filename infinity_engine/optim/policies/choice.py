"""Which policy carries out a strategy, and the policies with a name of their own. Pure.

Called by planner and engine.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

from infinity_engine.errors import ConfigError
from infinity_engine.optim.policies.interleaved import INTERLEAVED, TWO_ENDED, interleaved
from infinity_engine.optim.policies.published import ALGORITHM1, EQ1
from infinity_engine.optim.policies.static import DEVICE_ONLY, HOST_ONLY, static_split
from infinity_engine.optim.policy import OffloadPolicy, PolicyRegistry
from infinity_engine.plan.strategy import (
    DeviceOnly,
    HostOnly,
    Interleaved,
    NvmeStreamed,
    StaticSplit,
    Strategy,
)

__all__ = ["BUILT_IN", "policy_for"]

BUILT_IN = PolicyRegistry((DEVICE_ONLY, HOST_ONLY, INTERLEAVED, TWO_ENDED, EQ1, ALGORITHM1))


@lru_cache(maxsize=64)
def policy_for(strategy: Strategy) -> OffloadPolicy:
    """Return the policy that carries out a strategy.

    Raises:
        ConfigError: the strategy leaves that to the planner.
    """
    if isinstance(strategy, DeviceOnly):
        return DEVICE_ONLY
    if isinstance(strategy, HostOnly):
        return HOST_ONLY
    if isinstance(strategy, StaticSplit):
        return static_split(strategy.ratio)
    if isinstance(strategy, Interleaved):
        share = None if strategy.share is None else Fraction(strategy.share)
        # One in `stride` visits: a share of its own, given as a number.
        if strategy.stride is not None:
            share = Fraction(1, strategy.stride)
        return interleaved(share, resident=strategy.resident)
    if isinstance(strategy, NvmeStreamed):
        # States on drives pass host buffers; where they are updated is a strategy of its own.
        return policy_for(strategy.update)
    expected = "a strategy that says where updates run: this one leaves it to the planner"
    raise ConfigError(field="strategy", value=strategy.name, expected=expected)
