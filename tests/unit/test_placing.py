"""Placing: what is known before any plan is made spares plans, and changes none."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction

import pytest

from infinity_engine.errors import CapacityError
from infinity_engine.optim import Formats
from infinity_engine.optim.policies import HOST_ONLY, interleaved, static_split
from infinity_engine.optim.policy import OffloadPolicy
from infinity_engine.placement.placing import Plan, Wish, place
from infinity_engine.placement.sizing import Sizing
from infinity_engine.plan import NvmeStreamed, ResolvedBudget, Tier
from support.plannings import random_case


def placed(sizing: Sizing, wish: Wish, budget: ResolvedBudget) -> Plan | CapacityError:
    try:
        return place(sizing, wish, budget, io_bytes=16 << 20)
    except CapacityError as refused:
        return refused


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("states", [(), ("exp_avg", "exp_avg_sq")], ids=["no states", "two states"])
@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST, Tier.NVME])
def test_a_policy_that_says_where_it_updates_gets_the_plan_of_one_that_does_not(
    tier: Tier, states: tuple[str, ...], early: bool
) -> None:
    fitting = 0
    for seed in range(40):
        chance = random.Random(seed)
        training, means = random_case(seed)
        if not states:  # nor masters of their own
            training = replace(training, state_names=(), formats=Formats())
        if not means.budget.nvme or (means.unified and tier is Tier.HOST):
            continue
        says: OffloadPolicy = chance.choice(
            [HOST_ONLY, static_split(0.1), interleaved(Fraction(1, 3), resident=0.05)]
        )
        wish = Wish(
            strategy=NvmeStreamed(),
            tiers=(tier,),
            accumulation_steps=training.accumulation_steps,
            small_bytes=training.small_bytes,
            rates=means.rates.both_at_once(),
            early_updates=early,
            policy=says,
        )
        sizing = means.sizing(training, training.model.numel // 16 // 4096 * 4096)
        budget = means.of_one_rank()
        budget = replace(budget, host=chance.choice([budget.host, budget.host // 8, 32 << 20]))
        for _ in range(6):
            one = placed(sizing, wish, budget)
            other = placed(sizing, replace(wish, policy=replace(says, homes=None)), budget)
            if isinstance(one, Plan):
                assert one == other
                fitting += 1
                break
            assert str(one) == str(other)
            short_of_host = one.tier == "HOST"  # then with no room to spare, where a mistake shows
            budget = (
                replace(budget, host=one.asked)
                if short_of_host
                else replace(budget, device=one.asked)
            )

    assert fitting > 10
