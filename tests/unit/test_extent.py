from __future__ import annotations

import dataclasses
import pickle

import pytest

from infinity_engine.errors import ConfigError
from infinity_engine.plan import Extent


@pytest.mark.parametrize(("offset", "nbytes", "wrong"), [(-1, 4, "offset"), (4, -1, "nbytes")])
def test_an_extent_has_no_negative_part(offset: int, nbytes: int, wrong: str) -> None:
    with pytest.raises(ConfigError, match=rf"^Extent\.{wrong}: expected 0 or more bytes, got -1"):
        Extent(offset, nbytes)


def test_an_extent_ends_behind_its_last_byte() -> None:
    assert Extent(4, 3).end == 7


def test_an_extent_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Extent(0, 1).offset = 1  # type: ignore[misc]


def test_an_extent_is_a_value() -> None:
    assert {Extent(4, 3), Extent(4, 3)} == {Extent(4, 3)}
    assert pickle.loads(pickle.dumps(Extent(4, 3))) == Extent(4, 3)


def test_extents_are_ordered_by_offset_then_length() -> None:
    assert sorted([Extent(8, 1), Extent(0, 9), Extent(0, 2)]) == [
        Extent(0, 2),
        Extent(0, 9),
        Extent(8, 1),
    ]
