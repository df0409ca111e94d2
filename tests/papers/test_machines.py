"""The papers' machines: every number has a source; what links, wires and drives give one GPU."""

from __future__ import annotations

import pytest

from infinity_engine.errors import ConfigError
from infinity_engine.sim import update_bound
from infinity_engine.sim.hardware import DESKTOP_4090, MachineModel
from papers.machines import DGX2, JLSE_H100, V100_NODE, drive_bytes_per_s, wire_bytes_per_s
from support.machine_numbers import names_of_numbers

ALL = pytest.mark.parametrize("known", [DGX2, JLSE_H100, V100_NODE], ids=lambda known: known.name)


@ALL
def test_each_number_has_a_source_and_each_source_a_number(known: MachineModel) -> None:
    assert set(known.sources) == names_of_numbers(known)
    assert all(known.sources.values())


@ALL
def test_each_rate_says_whether_it_is_of_a_gpu_a_rank_or_a_node(known: MachineModel) -> None:
    rates = [source for name, source in known.sources.items() if name.endswith("_per_s")]

    assert [
        source
        for source in rates
        if not any(of in source for of in ("one GPU", "one rank", "the node's"))
    ] == []


@ALL
def test_its_rates_bound_an_update(known: MachineModel) -> None:
    assert update_bound(known.rates()).speedup >= 1


def test_links_are_shared_only_where_the_node_carries_less_than_they_do() -> None:
    assert DGX2.link.share(1) == (12e9, 12e9)
    assert DGX2.link.share(4) == (12e9, 12e9)
    assert DGX2.link.share(16) == (3e9, 3e9)
    assert JLSE_H100.link.share(4) == (55e9, 55e9)


def test_a_rank_reads_drives_over_its_own_link_at_most() -> None:
    assert drive_bytes_per_s(DGX2, 1) == (12e9, 12e9)
    assert drive_bytes_per_s(DGX2, 16) == pytest.approx((1.6e9, 1.6e9))


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_wire_that_is_not_known_is_refused(nodes: int) -> None:
    with pytest.raises(ConfigError, match="a rate, to use more than 1"):
        wire_bytes_per_s(DESKTOP_4090, nodes)


def test_drives_without_rates_are_refused() -> None:
    with pytest.raises(ConfigError, match="drives with their rates"):
        drive_bytes_per_s(JLSE_H100, 1)
