from __future__ import annotations

import dataclasses
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity_engine.errors import ConfigError
from infinity_engine.plan import Extent

PATIENT = settings(deadline=None)
SHORT = st.builds(Extent, st.integers(0, 40), st.integers(0, 40))


def bytes_of(extent: Extent) -> set[int]:
    return set(range(extent.offset, extent.end))


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


@PATIENT
@given(SHORT, SHORT)
def test_extents_overlap_where_they_share_a_byte(one: Extent, other: Extent) -> None:
    assert one.overlaps(other) == other.overlaps(one) == bool(bytes_of(one) & bytes_of(other))


def test_neighbours_do_not_overlap() -> None:
    assert not Extent(0, 4).overlaps(Extent(4, 4))


def test_an_empty_extent_overlaps_nothing() -> None:
    assert not Extent(2, 0).overlaps(Extent(0, 4))
