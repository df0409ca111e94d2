"""What the engine's choice per block would make of a plan that fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from infinity_engine.advice.activations import _costs, _rates, _room, activation_advice
from infinity_engine.placement.activations import BlockWay
from infinity_engine.placement.models import UNKNOWN_ACTIVATIONS
from infinity_engine.placement.training import Means, Training, beside_inputs
from infinity_engine.plan import (
    BlockRates,
    BlockShape,
    ComputeRate,
    DriveRates,
    Rates,
    ResolvedBudget,
    Tier,
)
from infinity_engine.sim.planner import Decision, decide
from infinity_engine.sim.presets import preset
from infinity_engine.sim.report import PlanReport, report_of
from infinity_engine.units import GB, GiB
from support.plannings import equal_questions_searched_once, training_of

RATES = Rates(
    h2d_bytes_per_s=25e9,
    d2h_bytes_per_s=25e9,
    host_update_params_per_s=2e9,
    device_update_params_per_s=3e10,
    nvme={"a": DriveRates(read_bytes_per_s=7e9, write_bytes_per_s=2e9)},
)
MODEL = preset("qwen2.5-1.5b")


@pytest.fixture(scope="module", autouse=True)
def equal_questions_are_searched_once() -> Iterator[None]:
    with equal_questions_searched_once():
        yield


def means(device: float, flops_per_s: float | None = 80e12) -> Means:
    budget = ResolvedBudget(device=int(device * GiB), host=64 * GiB, nvme={"a": 500 * GB})
    return Means(budget=budget, rates=RATES, flops_per_s=flops_per_s)


def training(**changes: Any) -> Training:
    asked: dict[str, Any] = {"batch": 1, "sequence": 4096, "checkpointing": True, **changes}
    return replace(training_of(MODEL), **asked)


def advice(of: Training, with_means: Means) -> object:
    decision = decide(of, with_means)
    return activation_advice(decision, report_of(decision))


def test_room_that_a_plan_leaves_saves_recomputing() -> None:
    decision = decide(training(), means(70))
    found = activation_advice(decision, report_of(decision))

    assert found is not None
    assert found.seconds < found.planned_s
    assert found.choice.counts().get(BlockWay.RECOMPUTE, 0) < 28
    assert sum(found.choice.counts().values()) == 28


def test_the_choice_stays_within_what_the_plan_leaves() -> None:
    asked = training()
    decision = decide(asked, means(20))
    report = report_of(decision)
    found = activation_advice(decision, report)

    assert found is not None
    assert found.choice.predicted.device <= 20 * GiB - asked.logits_bytes()
    assert found.seconds <= found.planned_s + 1e-9


def test_a_second_run_costs_what_blocks_take_that_run_again() -> None:
    shape = BlockShape(MODEL.width, 4096)
    blocks = BlockRates({shape: ComputeRate(60e12, backward=50e12, again=80e12)})
    costs = _costs(training(), replace(means(70), blocks=blocks))

    assert costs[0].recompute_s == pytest.approx(costs[0].forward_s * 60 / 80)


@pytest.mark.parametrize("drives", [500 * GB, 0])
def test_inputs_that_a_plan_moves_leave_their_room_to_the_choice(drives: int) -> None:
    moved = training(batch=16, chunked_loss=True, inputs_moved=True)
    there = means(70)
    budget = replace(there.budget, nvme={"a": drives} if drives else {})
    decision = decide(moved, beside_inputs(moved, replace(there, budget=budget)))
    report = report_of(decision)

    room = _room(moved, decision.means, report, _costs(moved, decision.means)[0])

    assert room.drives == drives - report.held(Tier.NVME)
    assert room.host == 64 * GiB - report.held(Tier.HOST)


@pytest.mark.parametrize("drives", [500 * GB, 0])
def test_more_of_drives_is_offered_only_where_there_are_drives(drives: int) -> None:
    there = means(16)
    budget = replace(there.budget, nvme={"a": drives} if drives else {})
    decision = decide(training(), replace(there, budget=budget))
    found = activation_advice(decision, report_of(decision))

    assert found is not None
    assert (Tier.NVME in found.gains) == bool(drives)


@pytest.mark.parametrize("drives", [500 * GB, 0])
def test_as_planned_is_with_what_moved_inputs_take(drives: int) -> None:
    moved = training(batch=16, chunked_loss=True, inputs_moved=True)
    slow = replace(RATES, h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9)
    budget = replace(means(70).budget, nvme={"a": drives} if drives else {})
    there = replace(means(70), budget=budget, rates=slow)
    decision = decide(moved, beside_inputs(moved, there))
    found = activation_advice(decision, report_of(decision))

    assert found is not None
    assert found.planned_s >= 2 * moved.input_bytes() / 1e9
    assert found.seconds <= found.planned_s


def test_micro_batches_multiply_the_seconds() -> None:
    one = activation_advice(*_decided(training()))
    four = activation_advice(*_decided(training(accumulation_steps=4)))

    assert one is not None
    assert four is not None
    assert four.planned_s == pytest.approx(4 * one.planned_s)


def _decided(of: Training) -> tuple[Decision, PlanReport]:
    decision = decide(of, means(70))
    return decision, report_of(decision)


def test_nothing_is_said_where_computing_or_activations_are_not_known() -> None:
    assert advice(training(), means(70, None)) is None
    unknown = replace(MODEL, activations=UNKNOWN_ACTIVATIONS)
    assert advice(replace(training(), model=unknown), means(70)) is None


def test_the_advice_is_json() -> None:
    found = activation_advice(*_decided(training()))

    assert found is not None
    plain: dict[str, Any] = dict(found.to_mapping())
    assert plain["block_saved_bytes"] == found.saved
    assert sum(plain["blocks"].values()) == 28


def test_drives_that_an_overlapped_update_keeps_busy_leave_activations_little() -> None:
    budget = ResolvedBudget(device=16 * GiB, host=12 * GiB, nvme={"a": 500 * GB})
    short = Means(budget=budget, rates=RATES, flops_per_s=80e12)
    decision = decide(training(), short)
    report = report_of(decision)

    assert [phase.name for phase in report.phases] == ["update and forward", "backward"]
    busy = report.phases[0].utilisation["writes to the drives"]
    assert busy > 0.5
    assert _rates(short, report).to_drives == pytest.approx(2e9 * max(1 - busy, 0.05), rel=0.05)
