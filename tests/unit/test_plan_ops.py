"""Ops and the time that they take: amounts, lanes, and clocks that are exact to the nanosecond."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity_engine.errors import ConfigError
from infinity_engine.plan import (
    DownloadStates,
    Lane,
    LaneClocks,
    Op,
    Rates,
    UpdateOnDevice,
    UpdateOnHost,
    UploadParameters,
    UploadStates,
)

# A parameter takes 2 ns on the host and 1 ns on the device; a byte 1 ns up and 3 1/3 ns down.
RATES = Rates(
    host_update_params_per_s=5e8,
    device_update_params_per_s=1e9,
    h2d_bytes_per_s=1e9,
    d2h_bytes_per_s=3e8,
)
ALL: tuple[tuple[Op, Lane], ...] = (
    (UpdateOnHost(subgroup=0, params=10), Lane.HOST),
    (UpdateOnDevice(subgroup=0, params=10), Lane.DEVICE),
    (UploadStates(subgroup=0, staging=0, nbytes=10), Lane.H2D),
    (UploadParameters(subgroup=0, nbytes=10), Lane.H2D),
    (DownloadStates(subgroup=0, staging=0, nbytes=10), Lane.D2H),
)


@pytest.mark.parametrize(("op", "lane"), ALL)
def test_an_op_knows_its_lane_and_its_amount(op: Op, lane: Lane) -> None:
    assert (op.lane, op.amount) == (lane, 10)


@pytest.mark.parametrize("op", [op for op, _ in ALL])
def test_an_op_cannot_be_changed(op: Op) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        op.subgroup = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("kind", "amount"),
    [
        (UpdateOnHost, {"params": 0}),
        (UpdateOnDevice, {"params": -1}),
        (UploadParameters, {"nbytes": 0}),
    ],
)
def test_an_op_that_does_nothing_is_refused(kind: Any, amount: dict[str, int]) -> None:
    [name] = amount

    with pytest.raises(ConfigError, match=rf"{kind.__name__}\.{name}: expected 1 or more"):
        kind(subgroup=0, **amount)


@pytest.mark.parametrize(
    ("op", "ns"),
    [
        (UpdateOnHost(subgroup=0, params=10), 20),
        (UpdateOnDevice(subgroup=0, params=10), 10),
        (UploadStates(subgroup=0, staging=0, nbytes=10), 10),
        (DownloadStates(subgroup=0, staging=0, nbytes=10), 34),
    ],
)
def test_an_op_takes_its_amount_over_the_rate_of_its_lane_rounded_up(op: Op, ns: int) -> None:
    assert LaneClocks(RATES).run(op) == (0, ns)


def test_the_ops_of_a_lane_follow_one_another_and_lanes_do_not_wait() -> None:
    clocks = LaneClocks(RATES)
    ops = [
        UpdateOnHost(subgroup=0, params=5),
        UpdateOnHost(subgroup=1, params=5),
        UpdateOnDevice(subgroup=2, params=5),
    ]

    assert [clocks.run(op) for op in ops] == [(0, 10), (10, 20), (0, 5)]


def test_an_op_starts_when_the_last_of_those_before_it_has_ended() -> None:
    clocks = LaneClocks(RATES)
    clocks.run(UpdateOnHost(subgroup=0, params=5))
    clocks.run(UpdateOnDevice(subgroup=1, params=5))

    assert clocks.run(UploadParameters(subgroup=0, nbytes=7, after=(0, 1))) == (10, 17)


def test_the_clocks_say_when_a_lane_is_free_and_when_all_is_done() -> None:
    clocks = LaneClocks(RATES)
    clocks.run(UpdateOnHost(subgroup=0, params=5))

    assert (clocks.free_ns(Lane.HOST), clocks.free_ns(Lane.H2D), clocks.end_ns) == (10, 0, 10)


def test_a_rate_is_asked_for_when_its_lane_is_used_and_not_before() -> None:
    clocks = LaneClocks(Rates(h2d_bytes_per_s=1e9))
    clocks.run(UploadParameters(subgroup=0, nbytes=7))

    with pytest.raises(ConfigError, match=r"Rates\.host_update_params_per_s: expected a rate"):
        clocks.run(UpdateOnHost(subgroup=0, params=5))


@given(st.integers(1, 10**18), st.floats(1e-3, 1e15))
def test_durations_are_exact_where_floats_are_not(params: int, rate: float) -> None:
    ns = LaneClocks(Rates(host_update_params_per_s=rate)).duration_ns(Lane.HOST, params)
    numerator, denominator = rate.as_integer_ratio()

    assert (ns - 1) * numerator < params * 10**9 * denominator <= ns * numerator
