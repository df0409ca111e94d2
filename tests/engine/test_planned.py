"""The planner and the engine: the same bytes and the same ops, and `auto` with rates is the
planner's choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity_engine
from deepnvme.sizes import PAGE
from infinity_engine.accel import Accelerator
from infinity_engine.config import EngineConfig, Precision
from infinity_engine.engine.engine import Engine
from infinity_engine.optim import FloatFormat, Formats, rules_of
from infinity_engine.parameters.describing import shape_of, sizing_of
from infinity_engine.parameters.parameters import collect_frozen, collect_parameters
from infinity_engine.placement.models import Activations
from infinity_engine.placement.training import Means, Training
from infinity_engine.plan import (
    Budget,
    DeviceOnly,
    Interleaved,
    NvmeStreamed,
    Rates,
    ResolvedBudget,
    Tier,
)
from infinity_engine.sim.candidate import Candidate, Choice
from infinity_engine.sim.planner import decide
from infinity_engine.sim.report import report_of
from support.engine_bits import bits_of
from support.mixed_models import Mixed
from support.nvme_training import RATES, emulated
from support.small_models import MODELS, Task

SUBGROUP = 4096
STATES = ("exp_avg", "exp_avg_sq")


def training_of(
    task: torch.nn.Module, optimizer: torch.optim.Optimizer, precision: str
) -> Training:
    trained = collect_parameters(task, optimizer, Precision(precision))
    return Training(
        model=shape_of(task, trained, collect_frozen(task, trained, Precision(precision))),
        batch=1,
        sequence=1,
        accumulation_steps=1,
        checkpointing=False,
        formats=Formats(parameter=None if precision == "fp32" else FloatFormat.BF16),
        state_names=STATES,
        small_bytes=256,
    )


def made(model: str) -> tuple[Task, torch.optim.AdamW]:
    torch.manual_seed(0)
    task = MODELS[model]()
    return task, torch.optim.AdamW(task.parameters(), lr=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("drives", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_a_live_model_is_described_to_the_byte(
    model: str, precision: str, unified: bool, drives: bool
) -> None:
    task, optimizer = made(model)
    budget = Budget(nvme={"/mnt/a": "1GiB"} if drives else {})
    config = EngineConfig.from_mapping(
        {
            "precision": precision,
            "subgroup_numel": SUBGROUP,
            "budget": budget,
            "storage": {"small_bytes": 256},
        }
    )
    trained = collect_parameters(task, optimizer, config.precision)
    frozen = collect_frozen(task, trained, config.precision)
    actual = sizing_of(task, trained, frozen, rules_of(optimizer), config, unified=unified)

    nvme = {"/mnt/a": 1 << 30} if drives else {}
    there = Means(
        budget=ResolvedBudget(device=1, host=1, nvme=nvme), rates=Rates(), unified=unified
    )
    planned = there.sizing(training_of(task, optimizer, precision), SUBGROUP)

    assert sum(planned.parameters) == sum(actual.parameters)
    assert planned.deepest == actual.deepest
    assert sum(each.numel for each in planned.subgroups) == sum(
        each.numel for each in actual.subgroups
    )
    if [each.numel for each in trained] == [
        each.numel for each in training_of(task, optimizer, "fp32").ordered()
    ]:
        assert planned == actual


@pytest.mark.parametrize("device", [8 << 20, 220 << 10, 160 << 10])
def test_a_mixed_model_is_planned_to_the_byte(device: int) -> None:
    torch.manual_seed(0)
    task = Mixed()
    optimizer = torch.optim.AdamW(task.parameters(), lr=1e-3)
    trained = collect_parameters(task, optimizer, Precision.MODEL)
    config = EngineConfig.from_mapping({"subgroup_numel": SUBGROUP})
    frozen = collect_frozen(task, trained, config.precision)
    sizing = sizing_of(task, trained, frozen, rules_of(optimizer), config, unified=False)
    training = training_of(task, optimizer, "model")
    training = replace(
        training, model=replace(training.model, deepest_numel=-(-sizing.deepest // sizing.width))
    )
    budget = ResolvedBudget(device=device, host=64 << 20, nvme={})
    decision = decide(
        training, Means(budget=budget, rates=RATES, for_all=False), subgroup_numel=SUBGROUP
    )
    settings = dict(report_of(decision).settings)

    with engine_of(task, optimizer, emulated(1), budget, **settings) as engine:
        engine.backward(engine(task.batch(0).to(engine.device)))
        engine.step()
        measured = {each.tier: each.peak_reserved for each in engine.usage()}
        plan = engine.plan

    best = decision.best
    assert plan == best.plan.steps
    assert measured[Tier.DEVICE] == best.plan.demand.device + best.plan.demand.staying
    assert measured[Tier.HOST] == best.plan.demand.host + best.plan.demand.window


@contextmanager
def engine_of(
    task: Task,
    optimizer: torch.optim.Optimizer,
    device: Accelerator | None,
    budget: ResolvedBudget,
    **settings: Any,
) -> Iterator[Engine]:
    with infinity_engine.initialize(
        task,
        optimizer,
        accelerator="cpu",
        device=device,
        update_threads=2,
        storage={"small_bytes": 256},
        budget={"device": budget.device, "host": budget.host, "nvme": dict(budget.nvme)},
        **settings,
    ) as engine:
        yield engine


CASES = {
    "device": (8 << 20, 64 << 20, 0),
    "both": (700 << 10, 64 << 20, 0),
    "drives": (700 << 10, 17_400_000, 64 << 20),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_the_engine_makes_the_planned_plan_and_holds_the_planned_bytes(
    case: str, precision: str, tmp_path: Path
) -> None:
    device, host, nvme = CASES[case]
    task, optimizer = made("gpt")
    budget = ResolvedBudget(device=device, host=host, nvme={str(tmp_path): nvme} if nvme else {})
    there = Means(budget=budget, rates=RATES, for_all=False, io_bytes=16 << 20 if nvme else 0)
    decision = decide(training_of(task, optimizer, precision), there, subgroup_numel=SUBGROUP)
    best: Candidate = decision.best
    settings = dict(report_of(decision).settings)

    with engine_of(task, optimizer, emulated(1), budget, precision=precision, **settings) as engine:
        engine.backward(engine(task.batch(0)))
        engine.step()
        measured = {each.tier: each for each in engine.usage()}
        plan = engine._parts.plan

    assert plan == best.plan.steps
    demand = best.plan.demand
    assert measured[Tier.DEVICE].peak_reserved == demand.device + demand.staying
    pinned = demand.host + demand.window
    assert pinned <= measured[Tier.HOST].peak_reserved <= pinned + there.io_bytes
    if nvme:
        assert measured[Tier.NVME].peak_reserved == pytest.approx(demand.nvme, abs=3 * 4096)


# Bytes of the device, how much autograd keeps of a token, and where parameters stay. Gradients that
# stay take more than activations in some, and less in others.
LEAVING = {
    "fetched beside activations": (318_800, 3000, Tier.HOST),
    "fetched beside gradients": (318_800, 1000, Tier.HOST),
    "from drives": (254_008, 500, Tier.NVME),
    "all on the device": (438_079, 0, Tier.DEVICE),
    "one memory": (0, 5000, Tier.DEVICE),
    "one memory, from drives": (0, 5000, Tier.NVME),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("case", LEAVING)
def test_settings_of_a_plan_leave_activations_what_the_plan_does(
    case: str, micro_batches: int, precision: str, tmp_path: Path
) -> None:
    device, elements, parameters = LEAVING[case]
    drives = {str(tmp_path): 64 << 20} if parameters is Tier.NVME else {}
    host = (900 << 10) + (16 << 20 if drives else 0)
    budget = ResolvedBudget(device=device, host=host, nvme=drives)
    task, optimizer = made("gpt")
    training = training_of(task, optimizer, precision)
    activations = Activations(blocks=2, hidden=16, elements=elements, fp32=0, logits=0)
    training = replace(
        training,
        model=replace(training.model, activations=activations),
        batch=8,
        accumulation_steps=micro_batches,
    )
    io_bytes = 16 << 20 if drives else 0
    there = Means(budget=budget, rates=RATES, unified=not device, io_bytes=io_bytes)
    decision = decide(training, there, parameters=parameters, subgroup_numel=SUBGROUP)

    with engine_of(
        task,
        optimizer,
        emulated(1) if device else None,
        budget,
        precision=precision,
        accumulation_steps=micro_batches,
        **report_of(decision).settings,
    ) as engine:
        reserved = {each.tier: each.peak_reserved for each in engine.usage()}
        plan = engine._parts.plan

    assert plan == decision.best.plan.steps
    demand = decision.best.plan.demand
    if device:
        assert reserved[Tier.DEVICE] == demand.device + demand.staying
    else:
        held = demand.host + demand.device + demand.staying
        sums_bytes = PAGE if drives else 0
        assert held <= reserved[Tier.HOST] <= held + io_bytes + sums_bytes


def test_settings_of_a_plan_that_interleaves_from_drives_have_its_rates(tmp_path: Path) -> None:
    device, host, nvme = CASES["drives"]
    task, optimizer = made("gpt")
    budget = ResolvedBudget(device=device, host=host, nvme={str(tmp_path): nvme})
    decision = decide(
        training_of(task, optimizer, "bf16"),
        Means(budget=budget, rates=RATES, for_all=False, io_bytes=16 << 20),
        strategy=NvmeStreamed(update=Interleaved(share=0.5)),
        subgroup_numel=SUBGROUP,
    )
    settings = report_of(decision).settings

    with engine_of(task, optimizer, emulated(1), budget, precision="bf16", **settings) as engine:
        assert engine.plan == decision.best.plan.steps


@pytest.mark.parametrize("case", CASES)
def test_auto_with_rates_is_the_planners_choice_and_changes_no_bit(
    case: str, tmp_path: Path
) -> None:
    device, host, nvme = CASES[case]
    budget = ResolvedBudget(device=device, host=host, nvme={str(tmp_path): nvme} if nvme else {})
    bits = []
    plans = []
    for settings in ({"strategy": "host_only"}, {"strategy": "auto", "rates": RATES}):
        task, optimizer = made("gpt")
        roomy = (
            replace(budget, host=256 << 20, nvme={})
            if settings["strategy"] == "host_only"
            else budget
        )
        with engine_of(
            task,
            optimizer,
            emulated(2),
            roomy,
            precision="bf16",
            subgroup_numel=SUBGROUP,
            **settings,
        ) as engine:
            for seed in range(3):
                engine.backward(engine(task.batch(seed)))
                engine.step()
            bits.append(bits_of(engine))
            plans.append(engine._parts.plan)

    there = Means(budget=budget, rates=RATES, for_all=False, io_bytes=16 << 20 if nvme else 0)
    chosen = decide(training_of(task, optimizer, "bf16"), there, subgroup_numel=SUBGROUP).best
    assert plans[1] == chosen.plan.steps
    assert [name for name in bits[0] if not torch.equal(bits[0][name], bits[1][name])] == []


def test_auto_without_rates_or_with_too_few_goes_by_what_fits() -> None:
    plans = []
    for rates in (None, Rates(h2d_bytes_per_s=1e9)):
        task, optimizer = made("gpt")
        budget = ResolvedBudget(device=700 << 10, host=64 << 20)
        with engine_of(
            task, optimizer, emulated(2), budget, rates=rates, subgroup_numel=SUBGROUP
        ) as engine:
            plans.append(engine._parts.plan)

    assert plans[0] == plans[1]
    assert not plans[0].staging_bytes


def test_auto_with_rates_leaves_activations_the_memory_that_they_were_given(
    tmp_path: Path,
) -> None:
    task: Any = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(8)))
    optimizer = torch.optim.AdamW(task.parameters(), lr=1e-3)
    # Without activations, all of it fits into memory.
    budget = ResolvedBudget(device=0, host=44 << 20, nvme={str(tmp_path): 64 << 20})
    activations = 24 << 20

    with engine_of(
        task,
        optimizer,
        None,
        budget,
        rates=RATES,
        subgroup_numel=1 << 16,
        activation_bytes=activations,
    ) as engine:
        engine.backward(engine(torch.ones(1, 512)).sum())
        engine.step()
        measured = {each.tier: each.peak_reserved for each in engine.usage()}

    assert measured[Tier.NVME] > 0
    assert measured[Tier.HOST] <= budget.host - activations


def test_a_choice_of_the_planner_without_room_gives_way_to_what_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    too_much = Choice(strategy=DeviceOnly(), parameters=Tier.DEVICE, subgroup_numel=SUBGROUP)
    monkeypatch.setattr("infinity_engine.planning.choosing._choice", lambda *_: too_much)
    plans = []
    for rates in (None, RATES):
        task, optimizer = made("gpt")
        budget = ResolvedBudget(device=200 << 10, host=64 << 20)
        with engine_of(
            task, optimizer, emulated(1), budget, rates=rates, subgroup_numel=SUBGROUP
        ) as engine:
            plans.append(engine._parts.plan)

    assert plans[0] == plans[1]
