"""How several ranks come to one choice of the planner: from what each says, which is given by
threads here.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="models are torch's")

import torch

from infinity_engine.config import EngineConfig
from infinity_engine.optim import rules_of
from infinity_engine.parameters.describing import sizing_of, wish_of
from infinity_engine.parameters.parameters import collect_parameters
from infinity_engine.placement.placing import Plan
from infinity_engine.plan import Rates, ResolvedBudget
from infinity_engine.plan.step import Home
from infinity_engine.planning.choosing import choose_together, what_fits

MIB = 1 << 20
# What is on the device is updated 100 times as fast on the first, 100 times as slowly on the
# second.
FAST_DEVICE = Rates(
    h2d_bytes_per_s=5e9,
    d2h_bytes_per_s=5e9,
    host_update_params_per_s=1e8,
    device_update_params_per_s=1e10,
)
FAST_HOST = replace(FAST_DEVICE, host_update_params_per_s=1e10, device_update_params_per_s=1e8)
VERY_FAST_HOST = replace(FAST_HOST, host_update_params_per_s=1e12, device_update_params_per_s=1e6)


class Meeting:
    """Where ranks say something at the same time."""

    def __init__(self, size: int) -> None:
        self.said: list[Any] = [None] * size
        self.topics: list[set[str]] = []
        self.barrier = threading.Barrier(size, timeout=60)

    def tell(self, rank: int, what: str, mine: object) -> list[Any]:
        self.said[rank] = what, mine
        self.barrier.wait()
        every = list(self.said)
        self.barrier.wait()
        if not rank:
            self.topics.append({topic for topic, _ in every})
        return [each for _, each in every]


def plans(
    rates: Sequence[Rates | None],
    budgets: Sequence[ResolvedBudget] | None = None,
    settings: Mapping[str, Any] = {},
) -> list[Plan | None]:
    """Return what ranks choose that have these rates and budgets for as large shards of one
    model.
    """
    meeting = Meeting(len(rates))
    given = budgets or [ResolvedBudget(device=8 * MIB, host=64 * MIB, nvme={})] * len(rates)

    def plan(rank: int) -> Plan | None:
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(16)))
        config = EngineConfig.from_mapping(
            dict(rates=rates[rank], subgroup_numel=1 << 15, precision="bf16", **settings)
        )
        optimizer = torch.optim.AdamW(model.parameters())
        trained = collect_parameters(model, optimizer, config.precision)
        sizing = sizing_of(model, trained, [], rules_of(optimizer), config, unified=False)
        ranks = SimpleNamespace(
            shards=SimpleNamespace(size=1), tell=lambda what, mine: meeting.tell(rank, what, mine)
        )  # whole parameters stand for shards of larger ones
        sharding = SimpleNamespace(
            ranks=ranks,
            cut=SimpleNamespace(wholes=trained, frozen_wholes=()),
            wish=lambda wish: wish,
            without_ahead=lambda left, unified: left,
        )
        return choose_together(
            model,
            sizing,
            sharding,  # type: ignore[arg-type]  # as much of it as is needed here
            config=config,
            policy=None,
            budget=given[rank],
            io_bytes=0,
        )

    with ThreadPoolExecutor(len(rates)) as threads:
        found = list(threads.map(plan, range(len(rates))))
    assert all(len(each) == 1 for each in meeting.topics)
    return found


def on_device(plan: Plan | None) -> int | None:
    return None if plan is None else plan.steps.params_at(Home.RESIDENT)


def test_equal_ranks_carry_out_one_choice() -> None:
    first, second = plans([FAST_DEVICE, FAST_DEVICE])

    assert on_device(first)
    assert first == second


@pytest.mark.parametrize("slow", [0, 1])
def test_of_what_ranks_would_choose_is_taken_what_is_fastest_where_it_is_slowest(slow: int) -> None:
    """A device that takes a second for a million is worse than any host: what the other would
    choose is not taken.
    """
    rates = [FAST_DEVICE, FAST_DEVICE]
    rates[slow] = VERY_FAST_HOST

    assert [on_device(each) for each in plans(rates)] == [0, 0]


def test_what_one_rank_would_gain_more_by_is_not_taken_where_another_loses_by_it() -> None:
    slow_device = replace(FAST_DEVICE, host_update_params_per_s=2e8, device_update_params_per_s=1e7)
    mixed = [on_device(each) for each in plans([FAST_DEVICE, slow_device])]

    assert mixed == [on_device(each) for each in plans([slow_device, slow_device])]
    assert mixed != [on_device(each) for each in plans([FAST_DEVICE, FAST_DEVICE])]


def homes(plan: Plan | None) -> Mapping[int, Home]:
    assert plan is not None
    return plan.steps.homes()


def test_ranks_plan_with_what_every_rank_has_at_least() -> None:
    roomy, poor = (
        ResolvedBudget(device=nbytes, host=64 * MIB, nvme={}) for nbytes in (8 * MIB, 4 * MIB)
    )

    mixed = plans([FAST_DEVICE, FAST_DEVICE], [roomy, poor])

    both_poor = plans([FAST_DEVICE, FAST_DEVICE], [poor, poor])
    # The roomy rank has more staging sets, and updates the same subgroups in the same places.
    assert [homes(plan) for plan in mixed] == [homes(plan) for plan in both_poor]
    assert on_device(mixed[0]) != on_device(plans([FAST_DEVICE], [roomy])[0])


@pytest.mark.parametrize(
    ("rates", "settings"),
    [
        ([FAST_DEVICE, None], {}),
        ([FAST_DEVICE, Rates(h2d_bytes_per_s=1e9)], {}),
        ([FAST_DEVICE, FAST_DEVICE], {"strategy": "host_only"}),
    ],
    ids=["no rates", "too few", "a strategy is given"],
)
def test_what_fits_decides_on_all_where_one_rank_cannot_choose_or_none_is_to(
    rates: Sequence[Rates | None], settings: Mapping[str, Any]
) -> None:
    assert plans(rates, settings=settings) == [None, None]


@pytest.mark.parametrize(("ahead", "buffers"), [(0, 7), (700_000, 5), (4 * MIB, 7)])
def test_buffers_for_the_drives_leave_room_to_gather_ahead_where_fewer_do(
    ahead: int, buffers: int
) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(16)))
    config = EngineConfig.from_mapping(
        {"strategy": "nvme_streamed", "parameters": "nvme", "subgroup_numel": 1 << 15}
    )
    optimizer = torch.optim.AdamW(model.parameters())
    trained = collect_parameters(model, optimizer, config.precision)
    sizing = sizing_of(model, trained, [], rules_of(optimizer), config, unified=True)
    room = ResolvedBudget(device=4 * MIB, host=4 * MIB, nvme={"/mnt/a": 64 * MIB})
    sharding: Any = SimpleNamespace(
        without_ahead=lambda left, unified: replace(left, host=left.host - ahead)
    )

    plan = what_fits(sizing, wish_of(config, None), sharding, room, io_bytes=0)

    assert len(plan.steps.buffer_bytes) == buffers


def test_what_has_room_on_no_rank_is_left_to_what_fits() -> None:
    assert plans([FAST_DEVICE] * 2, [ResolvedBudget(device=MIB, host=MIB, nvme={})] * 2) == [
        None,
        None,
    ]
