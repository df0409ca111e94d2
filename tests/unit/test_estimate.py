"""Estimates of a step need about as much memory as plans of the same parts take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from infinity_engine.errors import CapacityError
from infinity_engine.placement.training import Means
from infinity_engine.plan import Interleaved, Rates, ResolvedBudget, Tier
from infinity_engine.sim.candidate import Choice
from infinity_engine.sim.estimate import Pace, StepEstimate
from infinity_engine.sim.planner import Planner
from infinity_engine.sim.room import Parts
from support.plannings import model_of, training_of

RATES = Rates(
    h2d_bytes_per_s=25e9,
    d2h_bytes_per_s=25e9,
    host_update_params_per_s=1.5e9,
    device_update_params_per_s=30e9,
)
# The last 20 millions are resident, and a fifth of the others visits.
LARGEST_FIRST = (100_000_000, 100_000_000, 20_000_000)
PARTS = Parts(resident=1 / 11, visiting=2 / 11)
STRATEGY = Interleaved(share=0.2, resident=1 / 11 + 1e-6)


def least_device(planner: Planner, choice: Choice) -> int:
    """Return the least bytes of the device with which the choice fits, to a thousandth."""
    little, enough = 0, planner.means.budget.device
    while enough - little > enough // 1000:
        device = (little + enough) // 2
        try:
            planner.with_budget(replace(planner.means.budget, device=device)).outlined(choice)
        except CapacityError:
            little = device
        else:
            enough = device
    return enough


@pytest.mark.parametrize("accumulation", [1, 4])
def test_an_estimate_needs_as_much_of_the_device_as_its_plan(accumulation: int) -> None:
    training = training_of(model_of(*LARGEST_FIRST), accumulation=accumulation)
    means = Means(budget=ResolvedBudget(device=4 << 30, host=16 << 30, nvme={}), rates=RATES)
    planner = Planner(training, means)
    choice = Choice(strategy=STRATEGY, parameters=Tier.HOST, subgroup_numel=1 << 20)
    sizing = planner.sizing(choice.subgroup_numel)
    estimate = StepEstimate(
        sizing,
        training,
        means,
        planner.left(sizing),
        Pace.of(training, means),
        tier=Tier.HOST,
        drives=False,
    )

    # A backward makes a gradient of the largest parameter, which the estimate leaves to others.
    needed = estimate.least(Tier.DEVICE, PARTS) + planner.making(sizing)

    assert needed == pytest.approx(least_device(planner, choice), rel=0.01)
