"""Deep Optimizer States computed: real plans of the paper's method, beside its figures."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.optim.policy import Limits
from infinity_engine.plan import Home, Lane, Rates, SubgroupSpec
from infinity_engine.sim import simulate
from infinity_engine.sim.hardware import DESKTOP_4090
from papers.comparison import Comparison, Status
from papers.deep_optimizer_states import MODELS, experiments
from papers.machines import JLSE_H100
from papers.offloading import TABLE_1, Job, Method, blocking

PLENTY = Limits(resident_bytes=1 << 40, staging_bytes=1 << 40)
RATES = Rates(
    host_update_params_per_s=1e8,
    device_update_params_per_s=1e9,
    h2d_bytes_per_s=1e9,
    d2h_bytes_per_s=5e8,
)
LARGEST = Job(shape=MODELS["20B"])


@cache
def computed() -> tuple[Comparison, ...]:
    return experiments()


def found(name: str) -> Comparison:
    return next(one for one in computed() if name in one.names)


def whats(name: str, status: Status) -> list[str]:
    return [cell.what for cell in found(name).cells if cell.status is status]


def specs(count: int, numel: int = 10) -> tuple[SubgroupSpec, ...]:
    return tuple(SubgroupSpec(index=at, numel=numel, first_use=at) for at in range(count))


# --- the baseline's plan --------------------------------------------------------------------------


def test_the_cpu_of_the_baseline_waits_for_each_upload() -> None:
    simulation = simulate(blocking(0)(specs(3), RATES, PLENTY), RATES)

    assert simulation.end_ns == 3 * (100 + 20)
    assert [(time.start_ns, time.end_ns) for time in simulation.times[:3]] == [
        (0, 100),
        (100, 120),
        (120, 220),
    ]


def test_the_cpu_of_the_baseline_waits_for_residents() -> None:
    plan = blocking(0.5)(specs(4), RATES, PLENTY)

    assert plan.params_at(Home.RESIDENT) == 20
    assert simulate(plan, RATES).end_ns == 2 * 10 + 2 * (100 + 20)


@given(st.integers(1, 12), st.integers(1, 10**9), st.floats(0, 1))
def test_the_baseline_updates_everything_once_and_one_thing_at_a_time(
    count: int, numel: int, ratio: float
) -> None:
    simulation = simulate(blocking(ratio)(specs(count, numel), RATES, PLENTY), RATES)

    assert sum(simulation.busy_ns.values()) == simulation.end_ns


# --- an iteration ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", Method)
def test_an_update_takes_no_less_than_its_bytes_of_host_memory_do(method: Method) -> None:
    slow = replace(JLSE_H100, host=replace(JLSE_H100.host, dram_bytes_per_s=4e9))
    update = replace(LARGEST, machine=slow).update(method)

    assert update.seconds > update.simulation.end_ns / 1e9
    assert update.seconds == pytest.approx(
        sum(
            {Home.HOST: 32, Home.VISITING: 24}.get(home, 0) * update.simulation.plan.params_at(home)
            for home in Home
        )
        / 1e9
    )


def test_ranks_share_the_host_memory_of_their_node() -> None:
    one, four = (replace(LARGEST, ranks=ranks).rates(Method.INTERLEAVED) for ranks in (1, 4))

    assert one.dram_bytes_per_s == 614.4e9
    assert four.dram_bytes_per_s == 153.6e9


def test_the_cpu_downscales_in_algorithm_1_and_not_in_our_own_policies() -> None:
    host = {method: LARGEST.rates(method).host_update_params_per_s for method in Method}

    assert host[Method.INTERLEAVED] == host[Method.STATIC] == host[Method.BLOCKING] == 2e9
    assert host[Method.ALGORITHM1] == pytest.approx(1 / (1 / 2e9 + 1 / 15.5e9))


def test_gradients_are_flushed_beside_backward_only_where_the_method_does() -> None:
    slow = replace(LARGEST, reading=replace(TABLE_1, flush_bytes_per_s=1e9))

    assert (
        slow.iteration(Method.BLOCKING).backward > LARGEST.iteration(Method.BLOCKING).backward + 7
    )
    assert slow.iteration(Method.ALGORITHM1).seconds == LARGEST.iteration(Method.ALGORITHM1).seconds


@settings(deadline=None, max_examples=20)
@given(
    st.sampled_from(list(MODELS)),
    st.sampled_from(((4, 0.0), (4, 0.2), (4, 0.5), (2, 0.2), (1, 0.0))),
)
def test_our_own_policies_are_never_slower_than_the_paper_s_baseline_nor_interleaved_than_any(
    name: str, ranks: tuple[int, float]
) -> None:
    job = Job(shape=MODELS[name], ranks=ranks[0], resident=ranks[1])
    seconds = {method: job.iteration(method).seconds for method in Method}

    assert seconds[Method.INTERLEAVED] <= seconds[Method.ALGORITHM1] <= seconds[Method.BLOCKING]
    assert seconds[Method.INTERLEAVED] <= seconds[Method.STATIC] <= seconds[Method.BLOCKING]


def test_states_that_a_gpu_has_no_room_for_beside_its_parameters_are_refused() -> None:
    with pytest.raises(CapacityError, match="resident states"):
        replace(LARGEST, ranks=1, resident=0.1).update(Method.ALGORITHM1)


def test_subgroups_are_all_the_parameters_of_a_rank() -> None:
    job = Job(shape=MODELS["7B"])

    assert sum(one.numel for one in job.subgroups()) == job.own_params
    assert max(one.numel for one in job.subgroups()) == job.subgroup


def test_an_iteration_needs_the_rates_that_it_is_made_of() -> None:
    with pytest.raises(ConfigError, match="achieved_flops_per_s"):
        Job(shape=MODELS["7B"], ranks=1, machine=DESKTOP_4090).iteration(Method.BLOCKING)


# --- the figures ----------------------------------------------------------------------------------


def test_every_figure_and_table_is_there_once() -> None:
    names = [name for comparison in computed() for name in comparison.names]

    assert len(set(names)) == len(names)
    assert set(names) >= {
        *(f"figure {number}" for number in (2, *range(7, 18))),
        "table 1",
        "table 2",
        "equation 1",
    }


@pytest.mark.parametrize("number", [2, 10, 11, 12, 13, 14, 17])
def test_a_figure_matches_wherever_it_prints_a_number(number: int) -> None:
    assert whats(f"figure {number}", Status.DEVIATES) == []
    assert whats(f"figure {number}", Status.INCONSISTENT) == []
    assert whats(f"figure {number}", Status.MATCHES) != []


def test_what_does_not_match_is_what_the_page_explains() -> None:
    assert whats("figure 7", Status.DEVIATES) == ["8.3B over 10B, iteration of ZeRO-3"]
    assert whats("figure 7", Status.INCONSISTENT) == [
        "20B with it over 7B without",
        "20B: of that, asynchronous flush alone",
    ]
    assert whats("figure 8", Status.INCONSISTENT) == [
        f"{name}: update, times faster than ZeRO-3" for name in MODELS
    ]
    assert whats("figure 15", Status.DEVIATES) == ["50% visit: CPU busy"]
    assert whats("figure 16", Status.DEVIATES) == ["10B: throughput at 50% over that at 33%, H100"]
    assert whats("figure 16", Status.INCONSISTENT) == [
        f"7B: 4 x V100, stride {stride}" for stride in (3, 4, 5)
    ]
    assert whats("equation 1", Status.INCONSISTENT) == ["4 x H100, all rates one rank's"]


def test_the_sizes_of_the_models_are_gib_of_their_shapes_but_for_the_20b() -> None:
    assert whats("table 2", Status.INCONSISTENT) == [
        "13B: parameters and gradients",
        "20B: parameters and gradients",
        "20B: optimizer states",
    ]


def test_iterations_are_faster_by_what_is_published() -> None:
    faster = [
        cell
        for cell in found("figure 7").cells
        if cell.what.endswith("iteration, times faster than ZeRO-3")
    ]

    assert len(faster) == len(MODELS)
    assert all(cell.deviation is not None and abs(cell.deviation) < 0.02 for cell in faster)


def test_an_update_keeps_every_lane_of_the_baseline_idle_most_of_the_time_but_the_cpu() -> None:
    update = LARGEST.update(Method.BLOCKING)

    assert update.busy(Lane.HOST) == pytest.approx(2 / 3, rel=1e-3)
    assert update.busy(Lane.DEVICE) == 0


def test_figure_8_is_what_the_method_gains_over_cpus_that_do_not_wait_for_uploads() -> None:
    assert whats("figure 8", Status.MATCHES) == [
        "20B: update, times faster than CPUs whose uploads cost nothing"
    ]


def test_the_main_result_is_shown_in_other_readings() -> None:
    assert len(found("readings").cells) >= 6
