"""With `strategy="auto"`, a plan made of wrong rates gives way to one of those that are measured;
no bit changes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

import infinity_engine
from infinity_engine.accel import Emulation, VirtualAccelerator, emulated_accelerator
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import CapacityError
from infinity_engine.optim import FloatFormat, Formats
from infinity_engine.placement.placing import Wish, place
from infinity_engine.placement.training import Means, Training
from infinity_engine.plan import Auto, HostOnly, Interleaved, Rates, ResolvedBudget, Strategy, Tier
from infinity_engine.plan.step import Home, StepPlan
from infinity_engine.update.replanning import Question, Replanner
from support.engine_bits import bits_of
from support.plannings import model_of

# What is said: as published for one GPU of the paper's node, a thousandth of it.
SAID = Rates(
    h2d_bytes_per_s=55e6,
    d2h_bytes_per_s=55e6,
    host_update_params_per_s=10e6,
    device_update_params_per_s=25e6,
)
FAST_LINKS = replace(
    SAID, h2d_bytes_per_s=220e6, d2h_bytes_per_s=220e6, host_update_params_per_s=6e6
)
WIDTH = 64
LAYERS = 32
# By where parameters are, layers in a subgroup, bytes of the device, and what is said: too few bytes
# for all states, but enough for staging sets, and for the gradients of more that visit, which pays.
ROOM = {"device": (1, 920_000, SAID), "host": (2, 680_000, FAST_LINKS)}
STEPS = 12


@contextmanager
def engine(
    actual: Callable[[Rates], Rates], *, strategy: object = "auto", **settings: Any
) -> Iterator[tuple[Engine, VirtualAccelerator]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = {"parameters": "device", **settings}
    layers, room, said = ROOM[settings["parameters"]]
    numel = layers * WIDTH * WIDTH
    budget = {"host": "16MiB", "device": room}
    given = {"budget": budget, "precision": "bf16", "subgroup_numel": numel, **settings}
    emulation = Emulation(rates=actual(said), capacity_bytes=1 << 21, host_takes_time=True)
    with (
        emulated_accelerator(emulation) as device,
        infinity_engine.initialize(
            model, optimizer, device=device, strategy=strategy, rates=said, **given
        ) as made,
    ):
        assert isinstance(device, VirtualAccelerator)
        yield made, device


def train(made: Engine, device: VirtualAccelerator, steps: int = STEPS) -> list[float]:
    """Train some steps, on other data in each; return the seconds of each."""
    seconds = []
    for step in range(steps):
        torch.manual_seed(step)
        start_ns = device.now_ns
        made.backward(made(torch.randn(2, WIDTH, dtype=torch.bfloat16)).float().pow(2).mean())
        made.step()
        seconds.append((device.now_ns - start_ns) / 1e9)
    return seconds


def visiting(plan: StepPlan) -> int:
    return plan.params_at(Home.VISITING)


def residents(plan: StepPlan) -> set[int]:
    return {index for index, home in plan.homes().items() if home is Home.RESIDENT}


def as_said(said: Rates) -> Rates:
    return said


def slow_host(said: Rates) -> Rates:
    assert said.host_update_params_per_s is not None
    return replace(said, host_update_params_per_s=said.host_update_params_per_s / 4)


def slow_links(said: Rates) -> Rates:
    return replace(said, h2d_bytes_per_s=11e6, d2h_bytes_per_s=11e6)


@pytest.mark.parametrize(
    ("settings", "sooner"),
    [
        ({"parameters": "device", "overlap": "off"}, 0.95),
        ({"parameters": "device", "overlap": "auto"}, 0.95),
        ({"parameters": "host"}, 0.95),
    ],
)
def test_a_host_that_is_slower_than_said_has_more_visit_and_steps_end_sooner(
    settings: dict[str, Any], sooner: float
) -> None:
    with engine(slow_host, **settings) as (made, device):
        first = made.plan
        seconds = train(made, device)

        assert visiting(made.plan) > visiting(first)
        assert residents(made.plan) == residents(first)
        assert seconds[-1] < sooner * seconds[4]


def test_the_report_of_the_first_step_with_another_plan_says_why() -> None:
    with engine(slow_host, overlap="off") as (made, device):
        told = []
        for _ in range(STEPS):
            train(made, device, 1)
            told.append(made.report().planned_again)

        [why] = [each for each in told if each]
        assert why.startswith("updates on the host at 0.0025 G/s, not 0.01 G/s")
        assert "less time" in why
        assert "planned again" not in str(made.report())


@pytest.mark.parametrize(
    ("parameters", "settings"),
    [
        ("device", {}),
        ("device", {"max_grad_norm": 1.0}),
        ("device", {"overlap": "off"}),
        ("host", {}),
        ("host", {"max_grad_norm": 1.0}),
    ],
)
def test_planning_again_changes_no_bit(parameters: str, settings: dict[str, Any]) -> None:
    bits = []
    for strategy, replanning in (("auto", "auto"), ("auto", "off"), ("host_only", "auto")):
        with engine(
            slow_host, strategy=strategy, replanning=replanning, parameters=parameters, **settings
        ) as (
            made,
            device,
        ):
            first = made.plan
            train(made, device)
            assert (made.plan != first) == (strategy == replanning)
            bits.append(bits_of(made))

    for other in bits[1:]:
        assert [name for name in other if not torch.equal(bits[0][name], other[name])] == []


def test_what_a_step_holds_stays_within_what_was_reserved_and_only_gradients_of_more_visitors_take_more() -> (
    None
):
    with engine(slow_host) as (made, device):
        before = {each.tier: each.reserved for each in made.usage()}
        first = made.plan
        train(made, device)

        more = 2 * (visiting(made.plan) - visiting(first))
        assert more > 0
        before[Tier.DEVICE] += more
        assert {each.tier: each.reserved for each in made.usage()} == before
        assert all(
            each.peak_held <= each.reserved for each in made.usage() if each.tier is not Tier.NVME
        )


def test_a_budget_without_room_for_more_gradients_keeps_the_plan() -> None:
    with engine(slow_host, budget={"host": "16MiB", "device": 740_000}) as (made, device):
        first = made.plan
        train(made, device)

        assert made.plan is first


def test_a_plan_that_cannot_be_gone_by_after_all_leaves_all_that_was_reserved_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[StepPlan] = []

    def refuse(plan: StepPlan) -> None:
        asked.append(plan)
        raise CapacityError(
            tier="HOST", asked=2, free=1, limit=1, change="free memory is in pieces"
        )

    with engine(slow_host) as (made, device):
        before, first = [each.reserved for each in made.usage()], made.plan
        monkeypatch.setattr(made._parts.states, "adopt_plan", refuse)
        train(made, device)

        assert visiting(asked[0]) > visiting(first)
        assert made.plan is first
        assert [each.reserved for each in made.usage()] == before


def test_rates_that_are_as_said_leave_the_plan() -> None:
    with engine(as_said) as (made, device):
        first = made.plan
        train(made, device, 20)

        assert made.plan is first


def test_links_that_are_slower_than_said_have_fewer_visit_as_far_as_memory_was_taken_for_that() -> (
    None
):
    with engine(slow_links) as (made, device):
        first = made.plan
        seconds = train(made, device, 20)

        assert visiting(made.plan) <= visiting(first)
        assert seconds[-1] <= seconds[4] * 1.001


@pytest.mark.parametrize(
    "settings", [{"replanning": "off"}, {"telemetry": {"recording": "off"}}], ids=str
)
def test_it_can_be_switched_off(settings: dict[str, Any]) -> None:
    with engine(slow_host, **settings) as (made, device):
        first = made.plan
        train(made, device)

        assert made.plan is first


def test_a_strategy_that_is_asked_for_is_kept_to() -> None:
    with engine(slow_host, strategy={"name": "interleaved", "share": 0.1}) as (made, device):
        first = made.plan
        train(made, device)

        assert made.plan is first


def test_every_update_is_counted_across_a_change_of_plan() -> None:
    with engine(slow_host) as (made, device):
        train(made, device)
        state = made.state_of(made.model[3].weight)  # type: ignore[index]

        assert state["step"] == STEPS
        assert all(
            each.isfinite().all() for each in state.values() if isinstance(each, torch.Tensor)
        )


# --- noise ----------------------------------------------------------------------------------------


def training_in(parameter: FloatFormat | None) -> Training:
    """Return the training of a model of 64 subgroups."""
    return Training(
        model=model_of(*([2**20] * 64)),
        batch=1,
        sequence=1,
        accumulation_steps=1,
        checkpointing=False,
        formats=Formats(parameter=parameter),
        state_names=("exp_avg", "exp_avg_sq"),
        small_bytes=65536,
    )


def replanner_of(strategy: Strategy, rates: Rates) -> tuple[Replanner, StepPlan]:
    """Return one whose plan has this strategy."""
    training = training_in(FloatFormat.BF16)
    means = Means(budget=ResolvedBudget(device=500 << 20, host=2 << 30), rates=rates, for_all=False)
    sizing = means.sizing(training, 2**20)
    wish = Wish(
        strategy=strategy,
        tiers=(Tier.DEVICE,),
        accumulation_steps=1,
        small_bytes=65536,
        rates=rates,
    )
    plan = place(sizing, wish, means.budget, io_bytes=0)
    question = Question(training=training, means=means, wish=wish)
    assert Replanner.can_watch(question, sizing, plan)
    return Replanner(question, sizing, plan, trained=64), plan.steps


@pytest.mark.parametrize("seed", range(6))
def test_noise_does_not_have_it_change_its_mind_forth_and_back(seed: int) -> None:
    rates = Rates(
        h2d_bytes_per_s=55e9,
        d2h_bytes_per_s=55e9,
        host_update_params_per_s=2e9,
        device_update_params_per_s=25e9,
    )
    watcher, steps = replanner_of(Interleaved(share=0.3, resident=0.0), rates)
    chance = random.Random(seed)
    totals: dict[str, int] = {}
    changes = 0
    for _ in range(500):
        for op, amount, rate in (
            ("UpdateOnHost", "params", 1e9),
            ("UpdateOnDevice", "params", 25e9),
            ("h2d busy", "bytes", 55e9),
            ("d2h busy", "bytes", 55e9),
        ):
            totals[f"{op} {amount}"] = totals.get(f"{op} {amount}", 0) + 10**8
            taken = 1e17 / (rate * chance.uniform(0.75, 1.3))
            totals[f"{op} ns"] = totals.get(f"{op} ns", 0) + round(taken)
        replan = watcher.note_step(totals)
        if replan is not None:
            watcher.adopt(replan)
            changes += 1
            assert visiting(replan.plan.steps) > visiting(steps)
    assert changes == 1


def test_masters_that_are_the_parameters_at_home_and_choices_by_what_fits_are_not_watched() -> None:
    rates = replace(SAID, host_update_params_per_s=2e6)
    for strategy in (Auto(), HostOnly()):
        training = training_in(None)
        means = Means(
            budget=ResolvedBudget(device=64 << 20, host=2 << 30), rates=rates, for_all=False
        )
        sizing = means.sizing(training, 2**20)
        wish = Wish(
            strategy=strategy,
            tiers=(Tier.HOST,),
            accumulation_steps=1,
            small_bytes=65536,
            rates=rates,
        )
        plan = place(sizing, wish, means.budget, io_bytes=0)
        assert not Replanner.can_watch(
            Question(training=training, means=means, wish=wish), sizing, plan
        )


# --- without room ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "room"), [("host", 160_000), ("device", 400_000), ("device", 430_000)]
)
def test_interleaved_without_room_for_a_staging_set_beside_gradients_has_none_visit(
    parameters: str, room: int
) -> None:
    budget = {"host": "16MiB", "device": room}
    with engine(
        as_said, strategy="interleaved", parameters=parameters, budget=budget, subgroup_numel=8192
    ) as (
        made,
        _,
    ):
        assert visiting(made.plan) == 0
