"""Which dtype each parameter computes in, from the setting `precision` and the model (decision
0019).

Changes nothing. Buffers keep their dtype whatever the setting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from infinity_engine.config import Precision
from infinity_engine.errors import ConfigError
from infinity_engine.optim import FloatFormat, Formats

__all__ = ["asked_dtype", "dtypes_of", "formats_of"]

_ASKED = MappingProxyType(
    {
        Precision.FP32: torch.float32,
        Precision.BF16: torch.bfloat16,
        Precision.BF16_AUTOCAST: torch.bfloat16,
        Precision.FP16: torch.float16,
        Precision.FP16_AUTOCAST: torch.float16,
    }
)
_FORMATS = MappingProxyType(
    {
        torch.float32: Formats(),
        torch.bfloat16: Formats(parameter=FloatFormat.BF16),
        torch.float16: Formats(parameter=FloatFormat.FP16),
    }
)
_16_BIT = frozenset({torch.bfloat16, torch.float16})
_CAST = frozenset({*_FORMATS, torch.float64})
"""Dtypes that can be cast to another one. fp8 cannot: it needs scales, which its module keeps."""


def asked_dtype(precision: Precision) -> torch.dtype | None:
    """Return the dtype that a setting asks for. None: each parameter keeps its own."""
    return _ASKED.get(precision)


def dtypes_of(model: torch.nn.Module, precision: Precision) -> Mapping[int, torch.dtype]:
    """Return the dtype that each parameter of a model computes in, by the parameter's id."""
    parameters = list(model.parameters())
    asked = asked_dtype(precision)
    if asked is None:
        return {id(parameter): parameter.dtype for parameter in parameters}
    kept = {
        id(getattr(module, name))
        for module in model.modules()
        for name in getattr(type(module), "infinity_in_fp32", ())
    }
    if asked in _16_BIT:
        # A model that has 16-bit parameters already was mixed on purpose: its fp32 ones stay.
        is_mixed = any(parameter.dtype in _16_BIT for parameter in parameters)
        on_purpose = parameters if is_mixed else _beside_statistics(model)
        kept |= {id(parameter) for parameter in on_purpose if parameter.dtype == torch.float32}
    return {
        id(parameter): asked
        if parameter.dtype in _CAST and id(parameter) not in kept
        else parameter.dtype
        for parameter in parameters
    }


def _beside_statistics(model: torch.nn.Module) -> Iterable[torch.nn.Parameter]:
    """Yield the weights of batch norms with fp32 statistics: torch wants one dtype for both."""
    for module in model.modules():
        if (
            isinstance(module, _BatchNorm)
            and getattr(module.running_mean, "dtype", None) == torch.float32
        ):
            yield from module.parameters(recurse=False)


def formats_of(name: str, dtype: torch.dtype) -> Formats:
    """Return how the engine stores a trained parameter that computes in this dtype.

    Raises:
        ConfigError: the engine trains no parameters of it.
    """
    if dtype not in _FORMATS:
        expected = (
            "torch.float32, torch.bfloat16 or torch.float16: cast the parameter before you make "
            'the optimizer, freeze it with requires_grad_(False), or set precision="fp32", which '
            "casts fp64 to fp32"
        )
        raise ConfigError(field=f"dtype of parameter {name}", value=str(dtype), expected=expected)
    return _FORMATS[dtype]
