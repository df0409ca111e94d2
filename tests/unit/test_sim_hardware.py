"""Descriptions of machines: every number has a source, and ranks of a node share what the node has
once.
"""

from __future__ import annotations

import pytest

from infinity_engine.errors import ConfigError
from infinity_engine.sim import update_bound
from infinity_engine.sim.hardware import (
    GH200,
    H200_NODE,
    MACHINES,
    HostLink,
    MachineModel,
    machine,
)
from support.machine_numbers import names_of_numbers

ALL = pytest.mark.parametrize("known", MACHINES.values(), ids=list(MACHINES))


@ALL
def test_each_number_has_a_source_and_each_source_a_number(known: MachineModel) -> None:
    assert set(known.sources) == names_of_numbers(known)
    assert all(known.sources.values())


@ALL
def test_each_rate_says_whose_it_is(known: MachineModel) -> None:
    rates = [source for name, source in known.sources.items() if name.endswith("_per_s")]

    assert [
        it
        for it in rates
        if not any(whose in it for whose in ("one GPU", "one rank", "the node's"))
    ] == []


@ALL
def test_ranks_of_a_node_have_its_cpu_memory_and_drives_between_them(known: MachineModel) -> None:
    one, all_ranks = known.rates(1), known.rates()

    for name in ("host_update_params_per_s", "dram_bytes_per_s"):
        assert getattr(all_ranks, name) == pytest.approx(getattr(one, name) / known.gpus)
    assert all_ranks.device_update_params_per_s == one.device_update_params_per_s


@ALL
def test_its_rates_bound_an_update(known: MachineModel) -> None:
    assert update_bound(known.rates()).speedup >= 1


def test_links_that_are_busy_both_ways_are_shared_too() -> None:
    link = HostLink(
        h2d_bytes_per_s=30, d2h_bytes_per_s=20, duplex_h2d_bytes_per_s=25, node_bytes_per_s=40
    )

    assert link.duplex_share(1) == (25, None)
    assert link.duplex_share(2) == (20, None)
    assert GH200.rates().duplex_h2d_bytes_per_s == 450e9


def test_a_link_can_be_slower_down_than_up() -> None:
    assert HostLink(h2d_bytes_per_s=30, d2h_bytes_per_s=20, node_bytes_per_s=50).share(2) == (
        25,
        20,
    )


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="1 to 8"):
        H200_NODE.rates(9)


def test_an_unknown_machine_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="nearest: gh200"):
        machine("gh_200")
