"""The CPU kernels: one result in every home, with any number of threads, for every class of float
and form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity_engine import _native
from infinity_engine.errors import ConfigError
from infinity_engine.optim import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    FloatFormat,
    Formats,
    HostKernels,
    Lion,
    Master,
    Moments,
    Rule,
    Values,
)
from support.optim import Model, bits_of, narrow, threads

SPECIAL = (
    0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F800000, 0x7F800000,
    0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x3F808000, 0x3F818000,
)  # fmt: skip
RULES: tuple[Rule, ...] = (
    Adam(),
    Adam(weight_decay=0.1, amsgrad=True, maximize=True),
    AdamW(lr=0.01, betas=(0.3, 0.9)),
    Lion(weight_decay=0.01),
    Adagrad(lr_decay=0.1, weight_decay=0.1),
    SGD(),
    SGD(momentum=0.9, dampening=0.5, weight_decay=0.1),
    SGD(momentum=0.9, nesterov=True, maximize=True),
)
FORMATS = (
    Formats(),
    Formats(parameter=FloatFormat.BF16),
    Formats(parameter=FloatFormat.FP16),
    Formats(parameter=FloatFormat.BF16, master=Master.SPLIT),
    Formats(moments=Moments.BF16),
    Formats(
        parameter=FloatFormat.BF16, master=Master.SPLIT, moments=Moments.BF16_STOCHASTIC, seed=5
    ),
)

words = st.one_of(
    st.sampled_from(SPECIAL),
    st.integers(0, 2**32 - 1),
    st.floats(-4, 4, width=32).map(lambda x: int(np.float32(x).view(np.uint32))),
)


@st.composite
def arrays(draw: st.DrawFn) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Two arrays of one length: a few drawn words, repeated in a drawn order so that they meet in
    all lanes.
    """
    length = draw(st.integers(1, 300))
    pool = np.array(draw(st.lists(words, min_size=4, max_size=40)), np.uint32)
    order = np.random.default_rng(draw(st.integers(0, 2**32)))
    picked = [pool[order.integers(len(pool), size=length)].view(np.float32) for _ in range(2)]
    return picked[0], picked[1]


def bits_after(
    rule: Rule,
    formats: Formats,
    master: npt.NDArray[np.float32],
    gradients: Sequence[npt.NDArray[Any]],
    format_: FloatFormat,
    kernels: HostKernels,
    pieces: Sequence[int] = (),
) -> list[list[int]]:
    """Return all that is stored after one step per gradient."""
    model = Model(rule, master.copy(), formats, pieces)
    for gradient in gradients:
        model.step(kernels, gradient, format_, factor=0.37)
    return [each.tolist() for each in model.everything()]


@pytest.fixture(scope="module")
def scalar() -> HostKernels:
    """The specification, on one thread."""
    return HostKernels(threads(1), home="scalar")


@pytest.mark.parametrize("home", ["lanes16", "avx2", "avx512"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@settings(max_examples=40)
@given(data=arrays(), formats=st.sampled_from(FORMATS), format_=st.sampled_from(list(FloatFormat)))
def test_every_home_gives_the_scalar_bits(
    home: str,
    rule: Rule,
    scalar: HostKernels,
    data: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]],
    formats: Formats,
    format_: FloatFormat,
) -> None:
    if home not in _native.homes():
        pytest.skip(f"this CPU cannot run {home}; lanes16 runs the code of 16 lanes everywhere")
    master, gradient = data
    gradients = [narrow(gradient, format_), narrow(gradient[::-1].copy(), format_)]

    found = bits_after(
        rule, formats, master, gradients, format_, HostKernels(threads(2), home=home)
    )

    assert found == bits_after(rule, formats, master, gradients, format_, scalar)


@pytest.mark.parametrize("count", range(1, 9))
def test_the_number_of_threads_changes_no_bit(count: int, scalar: HostKernels) -> None:
    values = np.random.default_rng(1).standard_normal((2, 100_003)).astype(np.float32)
    gradients = [narrow(values[1], FloatFormat.BF16)] * 2
    formats = Formats(parameter=FloatFormat.BF16, moments=Moments.BF16_STOCHASTIC)

    found = bits_after(
        AdamW(), formats, values[0], gradients, FloatFormat.BF16, HostKernels(threads(count))
    )

    assert found == bits_after(AdamW(), formats, values[0], gradients, FloatFormat.BF16, scalar)


@pytest.mark.parametrize("formats", FORMATS)
def test_where_a_parameter_is_cut_changes_no_bit(formats: Formats, scalar: HostKernels) -> None:
    values = np.random.default_rng(2).standard_normal((2, 10_000)).astype(np.float32)

    cut = bits_after(
        Adam(), formats, values[0], [values[1]] * 2, FloatFormat.FP32, scalar, pieces=(4096, 8192)
    )

    assert cut == bits_after(Adam(), formats, values[0], [values[1]] * 2, FloatFormat.FP32, scalar)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_split_master_gives_the_bits_of_a_whole_one(rule: Rule, scalar: HostKernels) -> None:
    values = np.random.default_rng(3).standard_normal((2, 5000)).astype(np.float32)
    whole = Model(rule, values[0].copy(), Formats(parameter=FloatFormat.BF16))
    split = Model(rule, values[0].copy(), Formats(parameter=FloatFormat.BF16, master=Master.SPLIT))

    for _ in range(5):
        for model in (whole, split):
            model.step(scalar, values[1], FloatFormat.FP32)

    assert (bits_of(split.whole_master()) == bits_of(whole.master)).all()


def test_a_factor_of_one_and_a_plain_gradient_leave_a_subnormal_update_exact(
    scalar: HostKernels,
) -> None:
    tiny = np.array([1e-40, -3e-45], np.float32)
    model = Model(SGD(lr=1.0), np.zeros(2, np.float32))

    model.step(scalar, tiny, FloatFormat.FP32)

    assert (bits_of(model.master) == bits_of(-tiny)).all()


def test_stochastic_moments_are_right_on_average_where_nearest_ones_stand_still() -> None:
    kernels = HostKernels(threads(1))
    gradient = np.full(4096, 1.0, np.float32)
    rule = SGD(momentum=1.0, dampening=1 - 2**-10)  # the momentum grows by 2**-10 of the gradient
    means = {}
    for moments in (Moments.BF16, Moments.BF16_STOCHASTIC):
        model = Model(rule, np.zeros(4096, np.float32), Formats(moments=moments))
        for _ in range(101):
            model.step(kernels, gradient, FloatFormat.FP32)
        means[moments] = float((model.states[0].astype(np.uint32) << 16).view(np.float32).mean())

    assert means[Moments.BF16] == 1.0
    assert means[Moments.BF16_STOCHASTIC] == pytest.approx(1 + 100 * 2**-10, abs=2e-3)


def test_another_seed_gives_other_bits() -> None:
    kernels = HostKernels(threads(1))
    values = np.random.default_rng(4).standard_normal((2, 500)).astype(np.float32)

    forms = [Formats(moments=Moments.BF16_STOCHASTIC, seed=seed) for seed in (1, 1, 2)]
    found = [
        bits_after(Adam(), form, values[0], [values[1]], FloatFormat.FP32, kernels)
        for form in forms
    ]

    assert found[0] == found[1] != found[2]


def test_an_unknown_home_is_refused() -> None:
    with pytest.raises(ConfigError, match="avx1024"):
        HostKernels(threads(1), home="avx1024")


def test_the_wish_for_a_simd_level_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINITY_SIMD", "scalar")

    assert HostKernels(threads(1)).home == "scalar"


def test_sums_of_gradients_are_fp32_in_order_of_arrival() -> None:
    kernels = HostKernels(threads(2))
    first = np.random.default_rng(5).standard_normal((2, 9000)).astype(np.float32)
    into = np.empty(9000, np.float32)

    kernels.begin_sum(Values.of(first[0]), Values.of(into))
    sums = kernels.add_to_sum(
        Values.of(narrow(first[1], FloatFormat.BF16), format=FloatFormat.BF16), Values.of(into)
    )

    widened = (narrow(first[1], FloatFormat.BF16).astype(np.uint32) << 16).view(np.float32)
    assert (into == first[0] + widened).all()
    assert (sums == kernels.block_sums(Values.of(into))).all()


def test_a_sum_of_another_size_is_refused() -> None:
    kernels = HostKernels(threads(1))

    with pytest.raises(ConfigError, match="5 values of FP32"):
        kernels.begin_sum(Values.of(np.zeros(5, np.float32)), Values.of(np.zeros(4, np.float32)))
