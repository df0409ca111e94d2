"""Which dtype each parameter computes in, by the setting and by what the model has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from infinity_engine.config import Precision
from infinity_engine.errors import ConfigError
from infinity_engine.parameters.parameters import collect_frozen, collect_parameters
from infinity_engine.parameters.precision import dtypes_of

CASTS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "bf16_autocast": torch.bfloat16,
}
EVERY = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.bool,
)


def holding(*dtypes: torch.dtype) -> nn.Module:
    """Return a module with a frozen parameter of each of these."""
    module = nn.Module()
    for number, dtype in enumerate(dtypes):
        module.register_parameter(
            f"p{number}", nn.Parameter(torch.ones(3).to(dtype), requires_grad=False)
        )
    return module


def computed(model: nn.Module, precision: str) -> list[torch.dtype]:
    dtypes = dtypes_of(model, Precision(precision))
    return [dtypes[id(parameter)] for parameter in model.parameters()]


def test_with_model_each_parameter_computes_in_its_own_dtype() -> None:
    assert computed(holding(*EVERY), "model") == list(EVERY)


@pytest.mark.parametrize("precision", CASTS)
def test_a_model_that_is_all_fp32_is_cast(precision: str) -> None:
    assert computed(holding(torch.float32, torch.float32), precision) == [CASTS[precision]] * 2


@pytest.mark.parametrize(("precision", "kept"), [("bf16", True), ("fp16", True), ("fp32", False)])
def test_fp32_beside_16_bits_stays_unless_fp32_is_asked_for(precision: str, kept: bool) -> None:
    to = CASTS[precision]
    first = torch.float32 if kept else to
    assert computed(holding(torch.float32, torch.bfloat16, torch.float16), precision) == [
        first,
        to,
        to,
    ]


@pytest.mark.parametrize("precision", CASTS)
def test_codes_that_mean_nothing_without_their_module_are_never_cast(precision: str) -> None:
    codes = (torch.float8_e5m2, torch.int8, torch.uint8, torch.bool)
    assert computed(holding(*codes), precision) == list(codes)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_batch_norm_stays_in_the_dtype_of_its_statistics(precision: str) -> None:
    model = nn.Sequential(
        nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False)
    )
    to = CASTS[precision]
    assert computed(model, precision) == [to, torch.float32, torch.float32, to, to]


@pytest.mark.parametrize("precision", ["model", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.complex64])
def test_a_trained_parameter_of_another_dtype_is_refused_by_name(
    dtype: torch.dtype, precision: str
) -> None:
    model = nn.Module()
    model.register_parameter("odd", nn.Parameter(torch.ones(3).to(dtype)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if (dtype, precision) == (torch.float64, "bf16"):
        assert collect_parameters(model, optimizer, Precision.BF16)[0].dtype == torch.bfloat16
        return
    with pytest.raises(
        ConfigError,
        match=f"dtype of parameter odd: expected torch.float32, .*cast .*freeze .*got '{dtype}'",
    ):
        collect_parameters(model, optimizer, Precision(precision))


def test_frozen_parameters_of_any_dtype_are_taken_as_they_are() -> None:
    model = holding(*EVERY)
    model.register_parameter("trained", nn.Parameter(torch.ones(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained = collect_parameters(model, optimizer, Precision.MODEL)
    frozen = collect_frozen(model, trained, Precision.MODEL)
    assert [each.name for each in trained] == ["trained"]
    assert tuple(each.dtype for each in frozen) == EVERY
