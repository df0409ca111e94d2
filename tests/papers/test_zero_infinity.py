"""ZeRO-Infinity computed: its tables to their digits, what fits, and what its formulas say of its
runs.
"""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity_engine.plan import Tier
from papers.comparison import Cell, Comparison, Status
from papers.transformer import Shape
from papers.zero_infinity import Run, efficiency, experiments


@cache
def computed() -> tuple[Comparison, ...]:
    return experiments()


def found(name: str) -> Comparison:
    return next(one for one in computed() if name in one.names)


def inconsistent(name: str) -> list[str]:
    return [cell.what for cell in found(name).cells if cell.status is Status.INCONSISTENT]


def cell(name: str, what: str) -> Cell:
    return next(cell for cell in found(name).cells if cell.what == what)


def test_every_figure_and_table_is_there_once() -> None:
    names = [name for comparison in computed() for name in comparison.names]

    assert len(set(names)) == len(names)
    assert set(names) >= {
        *("figure 2a", "figure 2b", "figure 3", "figure 5a", "figure 5b", "figure 5c", "figure 6a"),
        *("figure 6b", "figure 6c", "figure 6d", "figure 6e", "table 1", "table 2", "table 3"),
    }


def test_nothing_deviates_without_a_contradiction_in_the_paper() -> None:
    assert [
        cell.what for one in computed() for cell in one.cells if cell.status is Status.DEVIATES
    ] == []


def test_the_memory_table_is_exact_but_for_two_known_contradictions() -> None:
    assert inconsistent("figure 2a") == [
        "0.10 T: activations, a node",
        "0.10 T: working memory of an operator",
        *(f"{size} T: activations, a node" for size in ("0.50", "1.01", "10.05", "101.47")),
    ]


@pytest.mark.parametrize(
    "name",
    ["figure 2b", "figure 5a", "figure 5b", "figure 5c", "figure 6a", "figure 6c", "figure 6e"],
)
def test_a_figure_has_no_contradiction(name: str) -> None:
    assert inconsistent(name) == []


def test_the_contradictions_are_those_that_are_known() -> None:
    assert inconsistent("figure 3") == ["optimizer states, batch 2: rate for 90%"]
    assert inconsistent("figure 6b") == ["in 16 tiles"]
    assert inconsistent("table 1") == ["32 nodes, 128 x 25K: part of the fullest tier"]
    assert inconsistent("table 3") == ["10x: slow memory together", "100x: slow memory together"]


def test_the_ladder_of_figure_6a_is_climbed_as_published() -> None:
    rungs = {
        cell.what.split(":")[0]: cell.ours
        for cell in found("figure 6a").cells
        if "rung" in cell.what
    }

    assert rungs == {
        "data parallel": 1.4,
        "ZeRO-2": 10,
        "ZeRO-Offload": 13,
        "3D parallelism": 20,
        "ZeRO-3": 20,
        "ZeRO-Inf-CPU": 70,
        "ZeRO-Inf-NVMe": 1000,
    }


def test_a_gpu_gets_faster_with_more_nodes_as_it_has_fewer_states() -> None:
    assert cell("figure 5b", "a GPU of 512 against one of 64").ours > 1


def test_prefetching_gives_less_at_larger_batches() -> None:
    gains = [one.ours for one in found("figure 6d").cells[:-1]]

    assert gains == sorted(gains, reverse=True)


@given(st.floats(1, 1e6), st.floats(1e6, 1e13))
def test_efficiency_is_a_part_that_grows_with_intensity_and_bandwidth(
    intensity: float, rate: float
) -> None:
    part = efficiency(intensity, rate)

    assert 0 < part < 1
    assert part <= efficiency(2 * intensity, rate)
    assert part <= efficiency(intensity, 2 * rate)


@given(
    st.builds(Shape, st.integers(1, 300), st.integers(1, 100).map(lambda k: 1024 * k)),
    st.integers(1, 64),
    st.floats(0.25, 64),
    st.sampled_from(Tier),
    st.sampled_from(Tier),
)
def test_a_run_takes_no_less_than_each_part_and_no_more_than_all(
    shape: Shape, nodes: int, batch: float, parameters: Tier, states: Tier
) -> None:
    run = Run(shape=shape, nodes=nodes, batch=batch, parameters=parameters, states=states)
    fast, slow = run.step_seconds()

    assert max(run.seconds().values()) <= fast * (1 + 1e-9)
    assert fast <= slow * (1 + 1e-9)
