"""The GPU's update kernels against the scalar CPU kernels, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

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
    Segment,
    Subgroup,
    SubgroupState,
    Values,
    update_records,
)
from support.optim import Model, bits_of, narrow, threads

cupy = pytest.importorskip("cupy")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cupy.cuda.is_available(), reason="cupy sees no CUDA device"),
]

RULES: tuple[Rule, ...] = (
    Adam(weight_decay=0.1, maximize=True),
    AdamW(amsgrad=True),
    Lion(weight_decay=0.1),
    Adagrad(lr_decay=0.1),
    SGD(),
    SGD(momentum=0.9, nesterov=True, weight_decay=0.1),
)
FORMATS = (
    Formats(),
    Formats(parameter=FloatFormat.FP16),
    Formats(parameter=FloatFormat.BF16, moments=Moments.BF16),
    Formats(
        parameter=FloatFormat.BF16, master=Master.SPLIT, moments=Moments.BF16_STOCHASTIC, seed=3
    ),
)


@pytest.fixture(scope="module")
def cuda() -> Any:
    from infinity_engine.optim.cuda import CudaKernels

    return CudaKernels()


@pytest.fixture(scope="module")
def scalar() -> HostKernels:
    return HostKernels(threads(1), home="scalar")


def every_class_of_float(numel: int, seed: int) -> Any:
    """Return floats of which a third has any bits, infinities and NaN among them."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(numel).astype(np.float32)
    values[::3] = random.integers(0, 2**32, size=len(values[::3]), dtype=np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        values[1::7] *= np.float32(1e-40)
    return values


def on_device(array: Any, format_: FloatFormat | None = None) -> Values:
    """Copy an array to the device and return its stream there."""
    copied = cupy.asarray(array)
    return Values(copied.data.ptr, copied.size, format_ or Values.of(array).format, copied)


@pytest.mark.parametrize(
    "formats", FORMATS, ids=lambda formats: f"{formats.master.value}, {formats.moments.value}"
)
@pytest.mark.parametrize("format_", list(FloatFormat))
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_the_gpu_gives_the_scalar_bits(
    cuda: Any, scalar: HostKernels, rule: Rule, format_: FloatFormat, formats: Formats
) -> None:
    numel = 100_003
    host = Model(rule, every_class_of_float(numel, 1), formats)
    with np.errstate(all="ignore"):
        gradient = narrow(every_class_of_float(numel, 2), format_)
    kept = host.master if host.remainder is None else host.remainder
    state = SubgroupState(
        subgroup=Subgroup(0, (Segment(0, 0, numel, 0),), formats),
        master=on_device(kept.copy(), None if host.remainder is None else FloatFormat.BF16),
        states=tuple(on_device(each.copy(), formats.state_format) for each in host.states),
    )
    parameter = (
        None if host.parameter is None else on_device(host.parameter.copy(), formats.parameter)
    )

    for _ in range(3):
        host.step(scalar, gradient, format_, factor=0.37)
        update = update_records(
            state,
            rules=[rule],
            gradients=[on_device(gradient, format_)],
            parameters=[parameter],
            gradient_factor=0.37,
        )
        cuda.update(update)
        cupy.cuda.get_current_stream().synchronize()
        state.steps = update.steps

    assert isinstance(state.master, Values)
    streams = [*state.states, *([] if parameter is None else [parameter]), state.master]
    for found, expected in zip(streams, host.everything(), strict=True):
        assert (bits_of(cupy.asnumpy(found.owner)) == expected).all()


@pytest.mark.parametrize("numel", [1, 31, 4096, 4097, 1_000_003])
@pytest.mark.parametrize("format_", list(FloatFormat))
def test_block_sums_have_the_scalar_bits(
    cuda: Any, scalar: HostKernels, numel: int, format_: FloatFormat
) -> None:
    with np.errstate(all="ignore"):
        gradient = narrow(every_class_of_float(numel, 3), format_)

    found = cupy.asnumpy(cuda.block_sums(on_device(gradient, format_)))

    assert (bits_of(found) == bits_of(scalar.block_sums(Values.of(gradient, format=format_)))).all()


def test_accumulated_gradients_have_the_scalar_bits(cuda: Any, scalar: HostKernels) -> None:
    first, second = (
        every_class_of_float(50_001, 4),
        narrow(every_class_of_float(50_001, 5), FloatFormat.BF16),
    )
    into = np.empty(50_001, np.float32)
    scalar.begin_sum(Values.of(first), Values.of(into))
    expected = scalar.add_to_sum(Values.of(second, format=FloatFormat.BF16), Values.of(into))
    device = on_device(np.zeros(50_001, np.float32))

    cuda.begin_sum(on_device(first), device)
    found = cupy.asnumpy(cuda.add_to_sum(on_device(second, FloatFormat.BF16), device))

    assert (bits_of(cupy.asnumpy(device.owner)) == bits_of(into)).all()
    assert (bits_of(found) == bits_of(expected)).all()
