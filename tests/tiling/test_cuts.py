"""How lengths and weights are cut: every element in one tile, no tile above the limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity_engine.errors import ConfigError
from infinity_engine.tiling import TileCut, cut_evenly, cut_into, plan_tiles

LENGTHS = st.integers(0, 3000)


def elements(cut: TileCut) -> list[int]:
    return [place for tile in cut for place in range(tile.start, tile.stop)]


@given(LENGTHS, st.integers(1, 400))
def test_tiles_have_each_element_once(length: int, size: int) -> None:
    cut = TileCut(length, size)

    assert elements(cut) == list(range(length))
    assert len(list(cut)) == len(cut) == len(cut.lengths)


@given(LENGTHS, st.integers(1, 400), st.integers(1, 64))
def test_an_even_cut_has_as_few_tiles_as_will_do(length: int, most: int, multiple: int) -> None:
    cut = cut_evenly(length, most, multiple=multiple)

    assert cut.size <= most
    assert len(cut) <= max(1, -(-length // most))
    assert elements(cut) == list(range(length))


@given(LENGTHS, st.integers(1, 400))
def test_tiles_of_an_even_cut_differ_only_in_the_last(length: int, most: int) -> None:
    lengths = cut_evenly(length, most).lengths

    assert set(lengths[:-1]) <= {cut_evenly(length, most).size}


@given(st.integers(1, 3000), st.integers(1, 100))
def test_a_cut_into_tiles_has_no_more_of_them(length: int, tiles: int) -> None:
    if tiles > length:
        with pytest.raises(ConfigError, match=f"1 to {length}"):
            cut_into(length, tiles)
        return

    assert len(cut_into(length, tiles)) <= tiles
    assert elements(cut_into(length, tiles)) == list(range(length))


@given(
    st.integers(1, 500), st.integers(1, 500), st.sampled_from([1, 2, 4, 8]), st.integers(8, 9000)
)
def test_no_tile_of_a_weight_is_above_the_limit(
    rows: int, columns: int, width: int, limit: int
) -> None:
    of_rows, of_columns = plan_tiles(rows, columns, width, limit)

    assert of_rows.size * min(of_columns.size, columns) * width <= limit
    assert (of_rows.length, of_columns.length) == (rows, columns)


@given(st.integers(1, 500), st.integers(1, 500), st.integers(4, 9000))
def test_columns_are_cut_only_where_a_row_is_above_the_limit(
    rows: int, columns: int, limit: int
) -> None:
    _, of_columns = plan_tiles(rows, columns, 4, limit)

    assert (len(of_columns) > 1) == (columns * 4 > limit)


@given(st.integers(1, 500), st.integers(1, 500))
def test_a_weight_within_the_limit_is_one_tile(rows: int, columns: int) -> None:
    of_rows, of_columns = plan_tiles(rows, columns, 4, rows * columns * 4)

    assert (len(of_rows), len(of_columns)) == (1, 1)


def test_a_limit_below_one_element_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 4 B"):
        plan_tiles(10, 10, 4, 3)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: TileCut(-1, 1), "length"),
        (lambda: TileCut(1, 0), "size"),
        (lambda: cut_evenly(1, 0), "at_most"),
        (lambda: cut_into(3, 0), "tiles"),
    ],
)
def test_impossible_cuts_are_refused(make: object, field: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError, match=field):
        make()
