"""Estimates of a step need about as much memory as plans of the same parts take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from infinity_engine.errors import CapacityError
from infinity_engine.placement.training import Means
from infinity_engine.plan import (
    DeviceOnly,
    DriveRates,
    HostOnly,
    Interleaved,
    NvmeStreamed,
    Rates,
    ResolvedBudget,
    Tier,
)
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


def least(tier: Tier, planner: Planner, choice: Choice) -> int:
    """Return the least bytes of the tier with which the choice fits, to a thousandth."""
    little, enough = 0, int(getattr(planner.means.budget, tier.value))
    while enough - little > enough // 1000:
        middle = (little + enough) // 2
        there = planner.means.budget
        budgets = {
            Tier.DEVICE: replace(there, device=middle),
            Tier.HOST: replace(there, host=middle),
        }
        try:
            planner.with_budget(budgets[tier]).outlined(choice)
        except CapacityError:
            little = middle
        else:
            enough = middle
    return enough


def estimate_of(planner: Planner, choice: Choice, *, drives: bool = False) -> StepEstimate:
    sizing, training, means = (
        planner.sizing(choice.subgroup_numel),
        planner.training,
        planner.means,
    )
    return StepEstimate(
        sizing,
        training,
        means,
        planner.left(sizing),
        Pace.of(training, means),
        tier=choice.parameters,
        drives=drives,
    )


@pytest.mark.parametrize("accumulation", [1, 4])
def test_an_estimate_needs_as_much_of_the_device_as_its_plan(accumulation: int) -> None:
    training = training_of(model_of(*LARGEST_FIRST), accumulation=accumulation)
    means = Means(budget=ResolvedBudget(device=4 << 30, host=16 << 30, nvme={}), rates=RATES)
    planner = Planner(training, means)
    choice = Choice(strategy=STRATEGY, parameters=Tier.HOST, subgroup_numel=1 << 20)

    # A backward makes a gradient of the largest parameter, which the estimate leaves to others.
    making = planner.making(planner.sizing(choice.subgroup_numel))
    needed = estimate_of(planner, choice).least(Tier.DEVICE, PARTS) + making

    assert needed == pytest.approx(least(Tier.DEVICE, planner, choice), rel=0.01)


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_an_estimate_needs_as_much_of_one_memory_as_its_plan(bits: int, accumulation: int) -> None:
    training = training_of(model_of(*LARGEST_FIRST), bits=bits, accumulation=accumulation)
    budget = ResolvedBudget(device=4 << 30, host=16 << 30, nvme={})
    planner = Planner(training, Means(budget=budget, rates=RATES, unified=True))
    choice = Choice(strategy=HostOnly(), parameters=Tier.DEVICE, subgroup_numel=1 << 20)

    making = planner.making(planner.sizing(choice.subgroup_numel))
    needed = estimate_of(planner, choice).least(Tier.HOST, Parts()) + making

    assert needed == pytest.approx(least(Tier.HOST, planner, choice), rel=0.01)


def estimates_and_times(
    parts: Parts, choice: Choice, *, wire: float, drives: bool = False
) -> tuple[float, int]:
    """Return the estimate of a step of four ranks, and what it takes."""
    training = training_of(model_of(*[20_000_000] * 40))
    training = replace(training, overlap=None)
    budget = ResolvedBudget(
        device=8 << 30, host=(6 if drives else 64) << 30, nvme={"a": 64 << 30} if drives else {}
    )
    drive = DriveRates(read_bytes_per_s=2e9, write_bytes_per_s=2e9)
    rates = replace(RATES, nvme={"a": drive} if drives else {})
    means = Means(budget=budget, rates=rates, ranks=4, wire_bytes_per_s=wire, flops_per_s=50e12)
    planner = Planner(training, means)
    estimate = estimate_of(planner, choice, drives=drives)
    return estimate.ns(parts), planner.candidate(choice).timeline.ns


@pytest.mark.parametrize("wire", [2e9, 200e9])
def test_an_estimate_of_residents_adds_what_the_device_computes(wire: float) -> None:
    choice = Choice(strategy=DeviceOnly(), parameters=Tier.HOST, subgroup_numel=1 << 22)

    estimate_ns, ns = estimates_and_times(Parts(resident=1.0), choice, wire=wire)

    assert estimate_ns == pytest.approx(ns, rel=0.08)


@pytest.mark.parametrize("wire", [2e9, 200e9])
def test_an_estimate_of_drives_adds_what_a_forward_reads(wire: float) -> None:
    choice = Choice(strategy=NvmeStreamed(), parameters=Tier.NVME, subgroup_numel=1 << 22)

    estimate_ns, ns = estimates_and_times(Parts(), choice, wire=wire, drives=True)

    assert estimate_ns == pytest.approx(ns, rel=0.08)


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
@pytest.mark.parametrize(
    ("wire", "overlap"), [(1e9, None), (1e9, False), (10e9, False), (100e9, False)]
)
def test_an_estimate_has_in_it_what_ranks_exchange(
    tier: Tier, wire: float, overlap: bool | None
) -> None:
    training = replace(training_of(model_of(*[20_000_000] * 40)), overlap=overlap)
    budget = ResolvedBudget(device=16 << 30, host=64 << 30, nvme={})
    means = Means(budget=budget, rates=RATES, ranks=4, wire_bytes_per_s=wire, flops_per_s=50e12)
    planner = Planner(training, means)
    choice = Choice(strategy=HostOnly(), parameters=tier, subgroup_numel=1 << 22)

    estimate_ns = estimate_of(planner, choice).ns(Parts())

    assert estimate_ns == pytest.approx(planner.candidate(choice).timeline.ns, rel=0.06)
