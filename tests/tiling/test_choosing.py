"""Which layers are cut by budget, and into tiles of which size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infinity_engine.placement.tiles import largest_tile, needs_tiles
from infinity_engine.tiling import plan_tiles

MIB = 1 << 20


def test_a_layer_is_cut_where_weight_and_gradient_pass_half_of_the_room() -> None:
    assert not needs_tiles(2 * MIB, 8 * MIB, trains=True)
    assert needs_tiles(2 * MIB + 1, 8 * MIB, trains=True)


def test_a_frozen_layer_is_cut_where_its_weight_passes_half_of_the_room() -> None:
    assert not needs_tiles(4 * MIB, 8 * MIB, trains=False)
    assert needs_tiles(4 * MIB + 1, 8 * MIB, trains=False)


@given(
    rows=st.integers(1, 1 << 16),
    columns=st.integers(1, 1 << 12),
    room=st.integers(1 << 10, 1 << 30),
)
def test_four_tiles_take_at_most_half_of_the_room(rows: int, columns: int, room: int) -> None:
    cut_rows, cut_columns = plan_tiles(rows, columns, 4, largest_tile(room))
    largest = 4 * max(cut_rows.lengths) * max(cut_columns.lengths)
    assert 4 * largest <= room // 2
