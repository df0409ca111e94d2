from __future__ import annotations

import pickle

from infinity_engine.plan import Tier


def test_the_tiers_are_listed_fastest_first() -> None:
    assert list(Tier) == [Tier.DEVICE, Tier.HOST, Tier.NVME]


def test_a_tier_is_found_by_the_word_it_has_in_json() -> None:
    assert [Tier("device"), Tier("host"), Tier("nvme")] == list(Tier)


def test_a_tier_stays_the_same_object_through_pickling() -> None:
    assert all(pickle.loads(pickle.dumps(tier)) is tier for tier in Tier)
