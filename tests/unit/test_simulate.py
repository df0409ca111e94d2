"""The simulator: by hand, and against the emulated device, which runs the same plans to the same
nanosecond.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_step import ready_ns, step_ns

from infinity_engine.errors import ConfigError
from infinity_engine.optim.policies import (
    BUILT_IN,
    algorithm1,
    interleaved,
    static_split,
    two_ended,
)
from infinity_engine.optim.policy import Limits, OffloadPolicy, PlanDraft
from infinity_engine.plan import Lane, Rates, StepPlan, SubgroupSpec
from infinity_engine.sim import simulate
from support.scripts import load_script

if TYPE_CHECKING:
    from infinity_engine.accel import VirtualAccelerator

ROOT = Path(__file__).resolve().parents[2]
PLENTY = Limits(resident_bytes=1 << 40, staging_bytes=1 << 40)
# A parameter takes 10 ns on the host and 1 ns on the device; a byte 1 ns up and 2 ns down.
RATES = Rates(
    host_update_params_per_s=1e8,
    device_update_params_per_s=1e9,
    h2d_bytes_per_s=1e9,
    d2h_bytes_per_s=5e8,
)


BENCH = load_script("bench/interleave")


def specs(*sizes: int) -> tuple[SubgroupSpec, ...]:
    return tuple(
        SubgroupSpec(index=at, numel=numel, first_use=at) for at, numel in enumerate(sizes)
    )


def one_of_each() -> StepPlan:
    """Return a plan with a subgroup at home on the host, one that visits, and one resident."""
    subgroups = specs(10, 20, 30)
    draft = PlanDraft(subgroups, PLENTY)
    draft.visit(subgroups[1])
    draft.host(subgroups[0])
    draft.resident(subgroups[2])
    return draft.plan()


def test_the_utilisation_is_the_part_of_the_update_in_which_a_lane_works() -> None:
    simulation = simulate(one_of_each(), RATES)

    # 10 parameters on the host take 100 ns; 240 bytes up, 50 parameters on the device, 240 bytes
    # down.
    end_ns = simulation.end_ns
    assert simulation.utilisation == {
        Lane.HOST: 100 / end_ns,
        Lane.DEVICE: 50 / end_ns,
        Lane.H2D: (240 + 20) / end_ns,
        Lane.D2H: 480 / end_ns,
    }


# --- by hand --------------------------------------------------------------------------------------


def test_each_op_runs_when_its_lane_and_its_inputs_let_it() -> None:
    times = simulate(one_of_each(), RATES).times

    assert times == (
        (0, 240),  # The states go up.
        (240, 260),  # The device updates them.
        (260, 740),  # They go home.
        (0, 100),  # The host updates another subgroup meanwhile.
        (240, 260),  # Its parameters wait for the link.
        (260, 290),  # The resident comes last.
    )


def test_the_end_is_that_of_the_last_op() -> None:
    assert simulate(one_of_each(), RATES).end_ns == 740


def test_each_lane_is_busy_for_the_sum_of_its_ops() -> None:
    simulation = simulate(one_of_each(), RATES)

    busy = {lane: ns for lane, ns in simulation.busy_ns.items() if ns}
    assert busy == {Lane.HOST: 100, Lane.DEVICE: 50, Lane.H2D: 260, Lane.D2H: 480}


def test_parameters_are_ready_when_the_device_updated_them_or_when_they_are_up() -> None:
    assert ready_ns(simulate(one_of_each(), RATES)) == {0: 260, 1: 260, 2: 290}


def test_a_forward_begins_as_soon_as_its_first_parameters_are_ready() -> None:
    simulation = simulate(one_of_each(), RATES)

    assert step_ns(simulation, 6_000) == 6_260
    assert (
        step_ns(simulation, 60) == 740
    )  # The last states go home when the forward has long ended.


def test_a_forward_waits_for_parameters_that_come_late() -> None:
    subgroups = specs(10, 10)
    draft = PlanDraft(subgroups, PLENTY)
    draft.host(subgroups[1])
    draft.host(subgroups[0])

    assert step_ns(simulate(draft.plan(), RATES), 100) == 220 + 100


def test_what_goes_over_a_free_lane_takes_no_time_and_needs_no_rate() -> None:
    links = {Lane.H2D, Lane.D2H}
    without, plan = replace(RATES, h2d_bytes_per_s=None, d2h_bytes_per_s=None), one_of_each()
    free = simulate(plan, without, free=links)

    assert all(
        time.start_ns == time.end_ns
        for op, time in zip(plan.ops, free.times, strict=True)
        if op.lane in links
    )
    assert free.end_ns < simulate(plan, RATES).end_ns


def test_a_simulation_of_nothing_takes_no_time() -> None:
    simulation = simulate(StepPlan(subgroups=(), ops=()), RATES)

    assert simulation.end_ns == 0
    assert "ends at 0.000 ms" in simulation.describe()


def test_a_simulation_is_shown_with_times_and_lanes() -> None:
    shown = simulate(one_of_each(), RATES).describe().splitlines()

    assert shown[0].split() == [
        "op",
        "lane",
        "what",
        "subgroup",
        "set",
        "amount",
        "after",
        "start",
        "end",
    ]
    assert shown[-1] == (
        "ends at 0.001 ms; busy: host 0.000 ms (14%), device 0.000 ms (7%), h2d 0.000 ms (35%), "
        "d2h 0.000 ms (65%)"
    )


def test_a_rate_that_the_plan_needs_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"Rates\.h2d_bytes_per_s"):
        simulate(one_of_each(), Rates(host_update_params_per_s=1))


# --- against the emulated device ------------------------------------------------------------------

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=12)
RATE = st.floats(1e3, 1e12)
ALL_RATES = st.builds(
    Rates,
    host_update_params_per_s=RATE,
    device_update_params_per_s=RATE,
    h2d_bytes_per_s=RATE,
    d2h_bytes_per_s=RATE,
)
PART = st.sampled_from([0.0, 0.2, 0.5, 1.0])
POLICIES = st.one_of(
    st.sampled_from([policy for name, policy in BUILT_IN.items() if name != "eq1"]),
    st.builds(static_split, PART),
    st.builds(interleaved, st.none() | st.fractions(0, 1, max_denominator=9), resident=PART),
    st.builds(two_ended, resident=PART),
    st.builds(algorithm1, st.integers(2, 4), resident=PART),
)


def emulated_device(rates: Rates, *, seed: int = 0) -> VirtualAccelerator:
    pytest.importorskip("torch", reason="the emulated device moves tensors of torch")
    from infinity_engine.accel import Emulation, VirtualAccelerator

    return VirtualAccelerator(Emulation(rates=rates, capacity_bytes=1 << 20, seed=seed))


def run_on_the_emulated_device(plan: StepPlan, rates: Rates, *, seed: int = 0) -> int:
    """Return when it has ended, once every subgroup was seen to be updated once and its parameters
    to have arrived.
    """
    device = emulated_device(rates, seed=seed)
    with BENCH.Walk(plan, device, rates) as walk:
        walk.run(device.host_work)
    return device.now_ns


@settings(max_examples=60)
@given(SIZES, ALL_RATES, POLICIES, st.integers(1, 4), st.integers(0, 3))
def test_a_plan_ends_on_the_emulated_device_when_the_simulator_says(
    sizes: list[int], rates: Rates, policy: OffloadPolicy, staging_sets: int, seed: int
) -> None:
    limits = Limits(resident_bytes=1 << 40, staging_bytes=1 << 40, staging_sets=staging_sets)
    plan = policy(specs(*sizes), rates, limits)

    assert run_on_the_emulated_device(plan, rates, seed=seed) == simulate(plan, rates).end_ns


def test_a_plan_with_one_of_each_ends_on_the_emulated_device_when_the_simulator_says() -> None:
    assert run_on_the_emulated_device(one_of_each(), RATES) == 740


def test_the_walk_notices_a_subgroup_that_was_not_updated() -> None:
    device = emulated_device(RATES)
    with BENCH.Walk(one_of_each(), device, RATES) as walk:
        walk.run(device.host_work)
        with pytest.raises(RuntimeError, match="was not updated once"):
            walk.run(device.host_work)
