from __future__ import annotations

import dataclasses

import pytest

from infinity_engine.plan import Extent, Placement, Tier


def test_a_placement_is_a_value() -> None:
    assert {Placement(Tier.NVME, Extent(0, 8)), Placement(Tier.NVME, Extent(0, 8))} == {
        Placement(tier=Tier.NVME, extent=Extent(0, 8))
    }


def test_the_same_extent_of_two_tiers_is_two_placements() -> None:
    assert Placement(Tier.NVME, Extent(0, 8)) != Placement(Tier.HOST, Extent(0, 8))


def test_a_placement_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Placement(Tier.NVME, Extent(0, 8)).tier = Tier.HOST  # type: ignore[misc]
