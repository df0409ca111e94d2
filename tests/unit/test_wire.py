from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the package gathers tensors of torch")

from infinity_engine.partition import Partitioner
from infinity_engine.partition.wire import WIRE_ALIGNMENT, WireLayout

BLOCK = 4096

members = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 9), st.integers(0, 5 * BLOCK)), st.sampled_from([1, 2, 4, 8])
    ),
    min_size=1,
    max_size=6,
)
ranks = st.integers(1, 5)
widths = st.integers(1, 400).map(lambda lines: lines * WIRE_ALIGNMENT)


def laid_out(given_: list[tuple[int, int]], count: int) -> WireLayout:
    partitioner = Partitioner(count)
    return WireLayout([partitioner.cut(numel) for numel, _ in given_], [size for _, size in given_])


@given(members, ranks, widths)
def test_the_windows_of_all_segments_have_each_element_once(
    given_: list[tuple[int, int]], count: int, most: int
) -> None:
    layout = laid_out(given_, count)
    seen = sorted(
        (piece.member, piece.first_element, piece.numel)
        for window in layout.windows(most)
        for rank in range(count)
        for piece in layout.pieces_in(window, rank)
    )

    at = [0] * len(given_)
    for member, first, numel in seen:
        assert (first, numel > 0) == (at[member], True)
        at[member] += numel
    assert at == [numel for numel, _ in given_]


@given(members, ranks, widths)
def test_pieces_lie_apart_within_their_window_and_where_their_elements_can(
    given_: list[tuple[int, int]], count: int, most: int
) -> None:
    layout = laid_out(given_, count)
    for window in layout.windows(most):
        assert window.end - window.start <= most
        for rank in range(count):
            end = 0
            for piece in layout.pieces_in(window, rank):
                size = given_[piece.member][1]
                assert piece.offset >= end
                assert piece.offset % WIRE_ALIGNMENT == 0
                end = piece.offset + piece.numel * size
            assert end <= layout.nbytes_in(window, rank) <= window.end - window.start


@given(members, ranks)
def test_padding_is_a_block_and_a_line_for_each_member_at_most(
    given_: list[tuple[int, int]], count: int
) -> None:
    given_ = [(numel, 2) for numel, _ in given_]
    layout = laid_out(given_, count)

    assert layout.width - min(layout.nbytes) <= 2 * BLOCK + len(given_) * WIRE_ALIGNMENT


def test_one_parameter_of_whole_blocks_for_each_rank_lies_as_in_memory() -> None:
    assert laid_out([(6 * BLOCK, 2)], 3).is_one_run
    assert not laid_out([(6 * BLOCK - 1, 2)], 3).is_one_run
    assert not laid_out([(7 * BLOCK, 2)], 3).is_one_run
    assert not laid_out([(6 * BLOCK, 2), (3, 2)], 3).is_one_run
    assert not laid_out([(0, 2)], 3).is_one_run
