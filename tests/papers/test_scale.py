"""Scale on paper: what must hold whatever the machine, the numbers of one point, and the page that
shows the tables.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity_engine.errors import ConfigError
from infinity_engine.plan import Tier
from infinity_engine.sim.hardware import DESKTOP_4090, GH200, H200_NODE, MachineModel
from papers.charts import svg
from papers.machines import DGX2
from papers.scale import (
    MODELS,
    NODES,
    Bottleneck,
    Partitioning,
    Point,
    Scaling,
    charts,
    points,
    tables,
)

DOCS = Path(__file__).resolve().parents[2] / "docs"
SHOWN = pytest.mark.parametrize("machine", [DGX2, H200_NODE], ids=lambda machine: machine.name)
SCALINGS = pytest.mark.parametrize("scaling", Scaling)


# 1 T on 4 nodes, with parameters on the host and states on drives.
POINT = Point(
    machine=DGX2,
    shape=MODELS["1 T"],
    nodes=4,
    partitioning=Partitioning.BANDWIDTH_CENTRIC,
    micro_batch=2,
    rounds=1,
    parameters=Tier.HOST,
    states=Tier.NVME,
    checkpoints=Tier.DEVICE,
)
POINTS = st.builds(
    Point,
    machine=st.sampled_from((DGX2, H200_NODE)),
    shape=st.sampled_from(list(MODELS.values())),
    nodes=st.sampled_from(NODES),
    partitioning=st.sampled_from(Partitioning),
    micro_batch=st.floats(0.1, 16),
    rounds=st.integers(1, 100),
    parameters=st.sampled_from(Tier),
    states=st.sampled_from(Tier),
    checkpoints=st.sampled_from(Tier),
)


def found(
    machine: MachineModel, scaling: Scaling, partitioning: Partitioning
) -> dict[tuple[str, int], Point | None]:
    return {(name, nodes): one for name, nodes, one in points(machine, scaling, partitioning)}


# --- one point, by hand ---------------------------------------------------------------------------


def test_passes_take_what_work_and_bytes_over_rates_are() -> None:
    params = MODELS["1 T"].params
    passes = POINT.passes()

    assert passes[Bottleneck.COMPUTE] == pytest.approx(8 * params * 2 * 1024 / 70e12)
    assert passes[Bottleneck.WIRE] == pytest.approx(8 * params * 3 / 4 / 100e9)
    assert passes[Bottleneck.LINK] == pytest.approx(8 * params / 64 / 3e9)
    assert passes[Bottleneck.DRIVES] == 0


def test_an_update_reads_and_writes_states_where_they_rest() -> None:
    params = MODELS["1 T"].params

    assert POINT.update()[Bottleneck.DRIVES] == pytest.approx(32 * params / 64 / 1.6e9)
    assert replace(POINT, states=Tier.DEVICE).update() == {
        Bottleneck.DEVICE: pytest.approx(params / 64 / (900e9 / 28))
    }


def test_a_broadcast_is_fetched_over_one_link() -> None:
    spread, alone = (
        replace(POINT, partitioning=partitioning).passes()[Bottleneck.LINK]
        for partitioning in Partitioning
    )

    assert alone / spread == pytest.approx(64 * 3 / 12)


def test_rounds_repeat_passes_and_not_the_update() -> None:
    once, twice = POINT, replace(POINT, rounds=2)

    assert twice.passes()[Bottleneck.LINK] == 2 * once.passes()[Bottleneck.LINK]
    assert twice.update() == once.update()


def test_what_binds_is_the_longest_part_of_the_longer_phase() -> None:
    assert POINT.binding is Bottleneck.DRIVES
    assert replace(POINT, states=Tier.DEVICE).binding is Bottleneck.COMPUTE
    assert replace(POINT, partitioning=Partitioning.BROADCAST).binding is Bottleneck.LINK


@given(POINTS)
def test_a_step_is_no_shorter_than_what_binds_it_and_computing_is_part_of_it(one: Point) -> None:
    assert 0 < one.efficiency <= 1
    assert one.seconds >= max(one.passes().get(one.binding, 0), one.update().get(one.binding, 0))


# --- all points -----------------------------------------------------------------------------------


@SHOWN
@SCALINGS
def test_spreading_a_fetch_over_all_links_is_never_slower(
    machine: MachineModel, scaling: Scaling
) -> None:
    spread, alone = (found(machine, scaling, partitioning) for partitioning in Partitioning)

    assert all(
        one is None or (other is not None and one.seconds <= other.seconds)
        for one, other in ((spread[key], alone[key]) for key in spread)
    )


@SHOWN
@SCALINGS
def test_what_fits_on_some_nodes_fits_on_more(machine: MachineModel, scaling: Scaling) -> None:
    by_model = found(machine, scaling, Partitioning.BANDWIDTH_CENTRIC)

    for name in MODELS:
        fits = [by_model[name, nodes] is not None for nodes in NODES]
        assert fits == sorted(fits)


@SHOWN
def test_each_point_holds_what_it_places(machine: MachineModel) -> None:
    for one in found(machine, Scaling.WEAK, Partitioning.BANDWIDTH_CENTRIC).values():
        if one is None:
            continue
        room = {
            Tier.DEVICE: one.nodes * machine.gpus * machine.gpu.memory_bytes,
            Tier.HOST: one.nodes * machine.host.memory_bytes,
            Tier.NVME: one.nodes * machine.drive_capacity_bytes,
        }
        held = dict.fromkeys(Tier, 0.0)
        held[one.parameters] += 4 * one.shape.params
        held[one.states] += 16 * one.shape.params
        held[one.checkpoints] += (
            one.nodes * machine.gpus * one.shape.checkpoint_bytes(one.micro_batch, 1024)
        )
        assert all(held[tier] <= room[tier] for tier in Tier)


def test_a_machine_without_a_network_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"gh200\.network_bytes_per_s"):
        tables(GH200)


def test_a_machine_whose_computing_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="achieved_flops_per_s"):
        tables(DESKTOP_4090)


# --- the page -------------------------------------------------------------------------------------


@SHOWN
def test_the_page_has_the_tables_that_the_command_prints(machine: MachineModel) -> None:
    assert tables(machine) in (DOCS / "scale.md").read_text()


@SHOWN
@SCALINGS
def test_the_page_has_the_plots_that_the_command_writes(
    machine: MachineModel, scaling: Scaling
) -> None:
    name = f"scale-{machine.name}-{scaling.value}.svg"
    text = (DOCS / "images" / name).read_text()

    assert text == svg(charts(machine)[list(Scaling).index(scaling)]) + "\n"
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert f"images/{name}" in (DOCS / "scale.md").read_text()
