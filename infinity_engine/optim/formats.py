"""The storage of an update's values: dtypes of gradients, parameters, masters and moments.

Pure descriptions: `Values` keeps the memory alive that it describes, and changes none. Imports no
torch: any object with a tensor's methods is a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import Any

from infinity_engine.errors import ConfigError

__all__ = ["FloatFormat", "Formats", "Master", "Moments", "Values"]


class FloatFormat(Enum):
    """A floating-point format; the value is the kernels' `number` for it."""

    FP32 = 1
    BF16 = 2
    FP16 = 3

    # Attributes, as they are asked for at each segment of an update: `value` takes two calls.
    def __init__(self, number: int) -> None:
        self.number = number
        self.nbytes = 4 if number == 1 else 2  # of one value


class Master(Enum):
    """How the fp32 master of a parameter is kept."""

    WHOLE = "whole"  # as fp32, the 16-bit parameter is a copy
    # as the bf16 parameter and a 16-bit remainder, exactly; ties round away from zero
    SPLIT = "split"


class Moments(Enum):
    """How an optimizer's states are kept; all arithmetic on them is fp32."""

    FP32 = "fp32"
    BF16 = "bf16"  # rounded to nearest even when stored
    # rounded up or down by chance, right on average; the same bits on every CPU and GPU
    BF16_STOCHASTIC = "bf16_stochastic"


@dataclass(frozen=True, kw_only=True, slots=True)
class Formats:
    """The dtypes of one subgroup's masters, parameters and states. Checkpoints record them.

    Other formats give other bits.
    """

    # The format of the parameter that the update writes; None where modules compute with the fp32
    # master itself.
    parameter: FloatFormat | None = None
    master: Master = Master.WHOLE
    moments: Moments = Moments.FP32
    seed: int = 0  # Of stochastic rounding.

    def __post_init__(self) -> None:
        if self.parameter is FloatFormat.FP32:
            raise ConfigError(
                field="Formats.parameter",
                value=self.parameter.name,
                expected="BF16, FP16, or None: an fp32 parameter is the master itself",
            )
        if self.master is Master.SPLIT and self.parameter is not FloatFormat.BF16:
            raise ConfigError(
                field="Formats.parameter",
                value=self.parameter,
                expected="BF16: a split master is a bf16 parameter and a 16-bit remainder",
            )

    @property
    def values(self) -> FloatFormat:
        """The format that the model computes with."""
        return self.parameter or FloatFormat.FP32

    @property
    def has_copies(self) -> bool:
        """Whether the model computes with copies of the masters, not with the masters."""
        return self.parameter is not None

    @property
    def width(self) -> int:
        """Bytes of one element as the model computes with it."""
        return (self.parameter or FloatFormat.FP32).nbytes

    @property
    def state_format(self) -> FloatFormat:
        """The format of every state."""
        return FloatFormat.FP32 if self.moments is Moments.FP32 else FloatFormat.BF16


# By name, so that torch need not be imported.
_DTYPES = MappingProxyType(
    {
        "float32": FloatFormat.FP32,
        "torch.float32": FloatFormat.FP32,
        "torch.bfloat16": FloatFormat.BF16,
        "float16": FloatFormat.FP16,
        "torch.float16": FloatFormat.FP16,
    }
)


# Cached by the dtype itself: a dtype that was seen before costs no text.
@cache
def _format_of(dtype: Any) -> FloatFormat | None:
    """Return the format of a dtype of numpy or torch; None where no format has it."""
    return _DTYPES.get(str(dtype))


@dataclass(frozen=True, slots=True)
class Values:
    """Values one behind another in memory: address, number and format."""

    address: int
    numel: int
    format: FloatFormat
    # The object that owns the memory, kept alive as long as this.
    owner: object = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, values: Any, *, format: FloatFormat | None = None) -> Values:
        """Return the values of a contiguous numpy array or torch tensor.

        `format` reads 16-bit integers as floats, for numpy, which has no bf16.

        Raises:
            ConfigError: its dtype is none of the formats, or it is not contiguous.
        """
        # numpy's arrays have no data_ptr.
        is_tensor = hasattr(values, "data_ptr")
        found = _format_of(values.dtype) if format is None else format
        if found is None or (format is not None and values.dtype.itemsize != found.nbytes):
            expected = "float32, bfloat16 or float16, or `format` given for integers of its size"
            raise ConfigError(field="dtype", value=str(values.dtype), expected=expected)
        if not (values.is_contiguous() if is_tensor else values.flags.c_contiguous):
            raise ConfigError(
                field="layout", value=tuple(values.shape), expected="a contiguous array or tensor"
            )
        address = values.data_ptr() if is_tensor else values.ctypes.data
        # With its owner: the address is good only as long as the array or tensor lives.
        return cls(address, values.numel() if is_tensor else values.size, found, values)

    def part(self, start: int, numel: int) -> Values:
        """Return `numel` of the values from `start` on.

        Raises:
            ConfigError: there are not so many.
        """
        if start < 0 or numel < 0 or start + numel > self.numel:
            raise ConfigError(
                field="part",
                value=(start, numel),
                expected=f"start and number within the {self.numel} values",
            )
        # The part keeps the whole's owner alive.
        return Values(self.address + start * self.format.nbytes, numel, self.format, self.owner)
