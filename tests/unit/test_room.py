"""The small program that memory makes: its corners have room, and what a tier is short of is among
them.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from infinity_engine.placement.training import Means
from infinity_engine.plan import Rates, ResolvedBudget, Tier
from infinity_engine.sim.room import NO_ROOM, MemoryEdges, Parts
from infinity_engine.units import GB
from support.plannings import model_of, random_case, training_of

# 0.32 billion parameters: 3.84 GB of states, 0.64 GB of gradients
SMALL = training_of(model_of(*([40_000_000] * 8)))
RATES = Rates(
    h2d_bytes_per_s=25e9,
    d2h_bytes_per_s=25e9,
    host_update_params_per_s=1.5e9,
    device_update_params_per_s=30e9,
)


def room_of(
    device: float, host: float, *, tier: Tier = Tier.DEVICE, rates: Rates = RATES
) -> MemoryEdges:
    means = Means(
        budget=ResolvedBudget(device=round(device * GB), host=round(host * GB)), rates=rates
    )
    sizing = means.sizing(SMALL, 5_000_000)
    found = MemoryEdges.of(sizing, means, means.budget, tier=tier, drives=False)
    assert found is not NO_ROOM
    return found


def test_with_plenty_the_corners_are_all_here_or_there() -> None:
    corners = {
        (round(each.resident, 6), round(each.visiting, 6))
        for each in room_of(100, 100).corners().values()
    }

    assert {(0, 0), (1, 0), (0, 1)} <= corners


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("drives", [False, True])
def test_corners_are_parts_of_all_for_which_there_is_room(seed: int, drives: bool) -> None:
    training, means = random_case(seed)
    sizing = means.sizing(training, training.model.numel // 64)
    for tier in Tier if drives else (Tier.DEVICE, Tier.HOST):
        room = MemoryEdges.of(sizing, means, means.budget, tier=tier, drives=drives)
        corners = room.corners()
        corners.pop("most", None)  # stages nothing
        corners.pop("nothing", None)  # is there whether or not it fits
        for parts in corners.values():
            assert room is not NO_ROOM
            assert room.holds(parts)
            assert -1e-9 <= parts.resident <= 1 + 1e-9
            assert -1e-9 <= parts.visiting <= 1 - parts.resident + 1e-9


def test_a_host_too_small_for_its_own_updates_leaves_corners_where_more_visits() -> None:
    corners = room_of(2.2, 4.5).corners()
    corners.pop("nothing")
    corners.pop("most")

    assert corners
    for each in corners.values():
        # 16 bytes of each parameter that is updated there, 12 of a visitor
        host = 1 - each.resident - each.visiting
        assert 0.32 * (16 * host + 12 * each.visiting) <= 4.5 * (1 + 1e-9)


def test_parameters_that_do_not_fit_leave_no_room() -> None:
    means = Means(budget=ResolvedBudget(device=GB // 2, host=100 * GB), rates=RATES)
    sizing = means.sizing(SMALL, 5_000_000)

    assert MemoryEdges.of(sizing, means, means.budget, tier=Tier.DEVICE, drives=False) is NO_ROOM
    assert MemoryEdges.of(sizing, means, means.budget, tier=Tier.HOST, drives=False) is not NO_ROOM


def test_without_rates_of_links_nothing_visits() -> None:
    room = room_of(100, 100, rates=replace(RATES, h2d_bytes_per_s=None))

    assert not room.may_visit
    assert not any(each.visiting for each in room.corners().values())


def test_parts_go_towards_others_and_no_further() -> None:
    corner, middle = Parts(0.5, 0.0), Parts(0.25, 0.125)

    assert corner.towards(middle, 0.125) == Parts(0.375, 0.0625)
    assert corner.towards(middle, 2.0) == middle
    assert corner.towards(corner, 0.1) == corner


def test_a_way_ends_where_room_does() -> None:
    room, here = room_of(2.2, 100), Parts(0.125, 0.125)

    assert room.nearby(here, 0, 0.125) == Parts(0.125, 0.25)
    assert room.nearby(here, -0.25, 0) == Parts(0.0, 0.125)
    assert room.nearby(here, -0.25, 0.125) == Parts(0.0, 0.25)  # and not half the way
    last = room.nearby(here, 0.875, 0)
    assert room.holds(last)
    assert not room.holds(last.moved(1e-6, 0))


def test_where_a_way_has_ended_one_part_makes_room_for_the_other() -> None:
    room = room_of(2.2, 100)
    last = room.nearby(Parts(0.125, 0.125), 0.875, 0)

    for resident, visiting in ((0, 0.0625), (0.0625, 0)):
        there = room.nearby(last, resident, visiting)
        assert room.holds(there)
        assert not room.holds(there.moved(1e-6, 1e-6))
        grown, given = there.resident - last.resident, there.visiting - last.visiting
        assert (grown > 0 > given, grown < 0 < given) == (resident > 0, visiting > 0)
        assert 0 < max(grown, given) <= 0.0625 * (1 + 1e-9)


def test_no_part_makes_more_room_than_it_takes() -> None:
    room = room_of(2.2, 100)
    last = room.nearby(Parts(), 1.0, 0)

    assert room.nearby(last, 0, 1.0).resident == 0


def test_there_is_room_for_more_where_fewer_sets_are_staged() -> None:
    room = room_of(2.2, 100)
    several = [edge for edge in room.edges if edge.resident > 1 > edge.visiting > 0]

    one_set = 1 / 64
    assert [edge.hard for edge in several] == [True, False, False]
    assert [more.most - less.most for more, less in itertools.pairwise(several)] == pytest.approx(
        [one_set] * 2, rel=1e-3
    )
