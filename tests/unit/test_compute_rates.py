"""Rates of computing: those of measured blocks, and between them; what a block computes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity_engine.errors import ConfigError
from infinity_engine.plan import BlockRates, BlockShape, ComputeRate, block_flops

SMALL, LARGE = BlockShape(512, 256), BlockShape(2048, 256)
RATES = BlockRates(
    {SMALL: ComputeRate(100e9, 80e9, 120e9), LARGE: ComputeRate(200e9, 160e9, 240e9)}
)


def test_a_shape_that_was_measured_has_its_own_rates() -> None:
    assert RATES.at(512, 256) == ComputeRate(100e9, 80e9, 120e9)


def test_halfway_between_two_shapes_an_operation_takes_the_mean_of_both_times() -> None:
    found = RATES.at(1024, 256)

    assert found.forward == pytest.approx(2 / (1 / 100e9 + 1 / 200e9))
    assert found.backward == pytest.approx(2 / (1 / 80e9 + 1 / 160e9))
    assert found.again == pytest.approx(2 / (1 / 120e9 + 1 / 240e9))


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_every_shape_has_rates_between_the_slowest_and_the_fastest(width: int, tokens: int) -> None:
    found = RATES.at(width, tokens)

    assert 100e9 * (1 - 1e-9) <= found.forward <= 200e9 * (1 + 1e-9)
    assert 80e9 * (1 - 1e-9) <= found.backward <= 160e9 * (1 + 1e-9)
    assert 120e9 * (1 - 1e-9) <= found.again <= 240e9 * (1 + 1e-9)


def test_the_nearer_shape_counts_more() -> None:
    assert RATES.at(600, 256).forward < RATES.at(1700, 256).forward


def test_nothing_follows_from_no_measurement() -> None:
    with pytest.raises(
        ConfigError, match=r"BlockRates\.measured: expected a shape that was measured"
    ):
        BlockRates({})


def test_a_block_computes_two_operations_for_each_weight_and_token_and_its_attention() -> None:
    assert block_flops(BlockShape(4, 3)) == 2 * 12 * 4 * 4 * 3 + 4 * 3 * 3 * 4
    assert str(BlockShape(1024, 256)) == "1024x256"
