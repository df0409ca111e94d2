"""The gradient norm: one value whoever computed which block, overflow seen, clipping as torch does
it.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity_engine import _native
from infinity_engine.errors import ConfigError
from infinity_engine.optim import (
    NORM_BLOCK,
    GradientNorm,
    GradientSums,
    HostKernels,
    Values,
    gradient_factor,
)
from support.optim import threads

NUMELS = (5 * NORM_BLOCK + 17, 3, NORM_BLOCK, 1000)


def gradients(seed: int) -> list[np.ndarray[tuple[int], np.dtype[np.float32]]]:
    """Return one gradient per parameter."""
    random = np.random.default_rng(seed)
    return [random.standard_normal(numel).astype(np.float32) for numel in NUMELS]


@settings(max_examples=20)
@given(
    cuts=st.lists(st.integers(1, 5), max_size=3, unique=True).map(sorted),
    count=st.sampled_from([1, 2, 8]),
    home=st.sampled_from(_native.homes()),
)
def test_the_norm_has_the_same_bits_whoever_sums_which_piece(
    cuts: list[int], count: int, home: str
) -> None:
    kernels = HostKernels(threads(count), home=home)
    whole, pieces = GradientSums(NUMELS), GradientSums(NUMELS)
    bounds = [0, *(cut * NORM_BLOCK for cut in cuts), NUMELS[0]]
    for parameter, gradient in enumerate(gradients(1)):
        whole.put(
            parameter, 0, HostKernels(threads(1), home="scalar").block_sums(Values.of(gradient))
        )
        starts = bounds if parameter == 0 else [0, len(gradient)]
        for first, end in reversed(list(pairwise(starts))):
            pieces.put(parameter, first, kernels.block_sums(Values.of(gradient[first:end])))

    assert pieces.total() == whole.total()


def test_the_norm_is_the_norm() -> None:
    kernels = HostKernels(threads(2))
    sums = GradientSums(NUMELS)
    for parameter, gradient in enumerate(gradients(2)):
        sums.put(parameter, 0, kernels.block_sums(Values.of(gradient)))

    exact = math.sqrt(math.fsum(float(x) ** 2 for gradient in gradients(2) for x in gradient))
    assert sums.total().norm() == pytest.approx(exact, rel=1e-14)
    assert sums.total().norm(0.5) == sums.total().norm() / 2


def test_a_parameter_without_a_gradient_counts_nothing() -> None:
    sums = GradientSums([10, 10])
    sums.put(1, 0, np.array([9.0]))

    assert sums.total().norm() == 3.0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_element_that_is_not_finite_shows(bad: float) -> None:
    kernels = HostKernels(threads(1))
    sums = GradientSums([10_000])
    gradient = np.full(10_000, np.finfo(np.float32).max)
    sums.put(0, 0, kernels.block_sums(Values.of(gradient)))
    assert sums.total().is_finite

    gradient[4321] = bad
    sums.put(0, 0, kernels.block_sums(Values.of(gradient)))

    assert not sums.total().is_finite


def test_pieces_that_are_no_whole_blocks_are_refused() -> None:
    sums = GradientSums([5000])

    with pytest.raises(ConfigError, match="pieces that begin at a multiple"):
        sums.put(0, 100, np.zeros(1))
    with pytest.raises(ConfigError, match="pieces that begin at a multiple"):
        sums.put(0, NORM_BLOCK, np.zeros(2))


def test_the_factor_unscales_and_clips() -> None:
    norm = GradientNorm(100.0)

    assert gradient_factor(norm, unscale=0.5) == 0.5
    assert gradient_factor(norm, unscale=0.5, max_norm=1.0) == 0.5 * (1.0 / (5.0 + 1e-6))
    assert gradient_factor(norm, max_norm=100.0) == 1.0
