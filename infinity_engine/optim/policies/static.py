"""The policies that move no states: each subgroup is updated where they stay. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from infinity_engine.optim.policy import Limits, OffloadPolicy, PlanDraft, split_residents
from infinity_engine.plan.rates import Rates
from infinity_engine.plan.step import Home, StepPlan, SubgroupSpec

__all__ = ["DEVICE_ONLY", "HOST_ONLY", "static_split"]


def static_split(ratio: float, *, name: str = "static_split") -> OffloadPolicy:
    """Return the policy that keeps `ratio` of the states on the device and updates them there.

    Known as TwinFlow.
    """

    def decide(subgroups: Sequence[SubgroupSpec], rates: Rates, limits: Limits) -> StepPlan:
        others, residents = split_residents(subgroups, ratio)
        draft = PlanDraft(subgroups, limits)
        for subgroup in others:
            draft.host(subgroup)
        for subgroup in residents:
            draft.resident(subgroup)
        return draft.plan()

    def homes(subgroups: Sequence[SubgroupSpec]) -> dict[int, Home]:
        others, residents = split_residents(subgroups, ratio)
        found = {subgroup.index: Home.HOST for subgroup in others}
        return found | {subgroup.index: Home.RESIDENT for subgroup in residents}

    return OffloadPolicy(name, decide, homes, is_drafted=True)


# Shares of all and of nothing, under names of their own.
DEVICE_ONLY = static_split(1, name="device_only")
HOST_ONLY = static_split(0, name="host_only")
