"""Which tiles a chunked loss makes: within the workspace, with every logit in one of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity_engine.errors import ConfigError
from infinity_engine.losses import LossShape, LossTiles, choose_tiles

SHAPES = st.builds(
    lambda tokens, vocabulary, hidden, widths, cap, states, weight: LossShape(
        tokens=tokens,
        vocabulary=vocabulary,
        hidden=hidden,
        width=widths[0],
        wide=widths[1],
        has_cap=cap,
        hidden_gradient=states,
        weight_gradient=weight,
    ),
    st.integers(0, 5000),
    st.integers(1, 300_000),
    st.integers(1, 9000),
    st.sampled_from([(2, 4), (4, 4), (8, 8)]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
LLAMA = LossShape(tokens=2048, vocabulary=32_000, hidden=4096, width=2, wide=4)


@given(SHAPES, st.floats(1.0, 1e5))
def test_the_largest_tile_fits_the_workspace(shape: LossShape, times: float) -> None:
    workspace = int(shape.least * times)

    tiles = choose_tiles(shape, workspace)

    most = (
        min(tiles.tokens.size, max(shape.tokens, 1)),
        min(tiles.vocabulary.size, shape.vocabulary),
    )
    assert shape.workspace(*most) <= workspace


@given(SHAPES, st.floats(1.0, 1e5))
def test_every_token_and_entry_is_in_one_tile(shape: LossShape, times: float) -> None:
    tiles = choose_tiles(shape, int(shape.least * times))

    for cut, length in ((tiles.tokens, shape.tokens), (tiles.vocabulary, shape.vocabulary)):
        found = [place for tile in cut for place in range(tile.start, tile.stop)]
        assert found == list(range(length))


@given(SHAPES)
def test_a_workspace_for_all_logits_has_one_tile(shape: LossShape) -> None:
    enough = shape.workspace(max(shape.tokens, 1), shape.vocabulary)

    tiles = choose_tiles(shape, enough)

    assert len(tiles.vocabulary) == 1
    assert len(tiles.tokens) <= 1


@given(SHAPES)
def test_less_than_one_logit_is_refused_with_what_would_do(shape: LossShape) -> None:
    with pytest.raises(ConfigError, match=f"at least {shape.least} B"):
        choose_tiles(shape, shape.least - 1)


def tiles_of(shape: LossShape, workspace: int) -> tuple[int, int]:
    tiles: LossTiles = choose_tiles(shape, workspace)
    return len(tiles.tokens), len(tiles.vocabulary)


def test_tiles_have_the_whole_vocabulary_where_enough_tokens_fit() -> None:
    frozen = replace(LLAMA, weight_gradient=False)

    assert tiles_of(frozen, 64 << 20) == (7, 1)
    assert choose_tiles(frozen, 64 << 20).computes_twice is False


def test_sums_of_a_narrow_weights_gradient_cut_the_vocabulary() -> None:
    tiles = choose_tiles(LLAMA, 64 << 20)

    assert tiles.computes_twice
    # 32,000 x 4,096 sums in fp32 are 500 MiB.
    assert tiles.vocabulary.size * LLAMA.hidden * 4 < 64 << 20


def test_sums_of_a_wide_weights_gradient_take_nothing_beside_it() -> None:
    assert tiles_of(replace(LLAMA, width=4), 64 << 20) == (5, 1)
