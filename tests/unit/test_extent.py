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
EXTENTS = st.builds(Extent, st.integers(0, 2**50), st.integers(0, 2**50))


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


@PATIENT
@given(SHORT, SHORT)
def test_an_extent_contains_another_whose_bytes_it_all_has(one: Extent, other: Extent) -> None:
    if other.nbytes:
        assert one.contains(other) == (bytes_of(other) <= bytes_of(one))


def test_an_empty_extent_is_contained_where_it_lies_within_or_on_the_edge() -> None:
    whole = Extent(4, 4)

    assert [whole.contains(Extent(offset, 0)) for offset in (3, 4, 6, 8, 9)] == [
        False,
        True,
        True,
        True,
        False,
    ]


@PATIENT
@given(EXTENTS, st.data())
def test_the_two_parts_of_a_split_make_up_the_whole(extent: Extent, data: st.DataObject) -> None:
    nbytes = data.draw(st.integers(0, extent.nbytes))

    first, rest = extent.split_at(nbytes)

    assert first.nbytes == nbytes
    assert (first.offset, first.end, rest.end) == (extent.offset, rest.offset, extent.end)
    assert extent.contains(first)
    assert extent.contains(rest)
    assert not first.overlaps(rest)


@pytest.mark.parametrize("nbytes", [-1, 9])
def test_an_extent_is_not_split_outside_itself(nbytes: int) -> None:
    with pytest.raises(ConfigError, match=f"a length within the extent's 8 bytes, got {nbytes}"):
        Extent(100, 8).split_at(nbytes)


@PATIENT
@given(SHORT, st.integers(1, 8))
def test_an_extent_is_aligned_where_both_its_edges_are(extent: Extent, alignment: int) -> None:
    aligned = Extent(extent.offset * alignment, extent.nbytes * alignment)

    assert aligned.is_aligned(alignment)
    assert extent.is_aligned(alignment) == (
        extent.offset % alignment == 0 and extent.nbytes % alignment == 0
    )


@pytest.mark.parametrize("alignment", [0, -512])
def test_an_alignment_that_is_not_positive_is_refused(alignment: int) -> None:
    with pytest.raises(ConfigError, match="alignment: expected a positive number"):
        Extent(0, 512).is_aligned(alignment)
