"""Memory and updates for the tests of the optimizer kernels: arrays in, arrays out, any home, rule
and form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from infinity_engine.optim import (
    FloatFormat,
    Formats,
    HostKernels,
    Master,
    Rule,
    Segment,
    Subgroup,
    SubgroupState,
    UpdateThreads,
    Values,
    update_records,
)

__all__ = ["Model", "bits_of", "narrow", "threads"]


def bits_of(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return floats as the integers of their bits, so that NaN equals itself."""
    return values.view(f"u{values.itemsize}")


def narrow(values: npt.NDArray[np.float32], format_: FloatFormat) -> npt.NDArray[Any]:
    """Return fp32 values cut (not rounded) to a format, as it lies in memory."""
    if format_ is FloatFormat.FP32:
        return values
    if format_ is FloatFormat.BF16:
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    with np.errstate(all="ignore"):
        return values.astype(np.float16)


@dataclass
class Model:
    """One parameter of given master values, its states and its copy, updated by one rule."""

    rule: Rule
    master: npt.NDArray[np.float32]
    formats: Formats = field(default_factory=Formats)
    pieces: Sequence[int] = ()
    """Where the parameter is cut into segments."""

    def __post_init__(self) -> None:
        numel = len(self.master)
        bounds = [0, *self.pieces, numel]
        spans = list(pairwise(bounds))
        segments = tuple(Segment(0, first, end - first, first) for first, end in spans)
        state_dtype = np.float32 if self.formats.state_format is FloatFormat.FP32 else np.uint16
        self.states = [np.zeros(numel, state_dtype) for _ in self.rule.states]
        if self.rule.initial_state:
            assert state_dtype is np.float32
            for state in self.states:
                state.fill(self.rule.initial_state)
        self.parameter = None
        self.remainder = None
        if self.formats.parameter is not None:
            self.parameter = np.zeros(numel, np.uint16)
        if self.formats.master is Master.SPLIT:
            bits = bits_of(self.master)
            self.parameter = ((bits + np.uint32(0x8000)) >> 16).astype(np.uint16)
            self.remainder = (bits & 0xFFFF).astype(np.uint16)
        kept = self.master if self.remainder is None else self.remainder
        self.state = SubgroupState(
            subgroup=Subgroup(0, segments, self.formats),
            master=Values.of(kept, format=None if self.remainder is None else FloatFormat.BF16),
            states=tuple(Values.of(each, format=self.formats.state_format) for each in self.states),
        )

    def step(
        self,
        kernels: HostKernels,
        gradient: npt.NDArray[Any],
        format_: FloatFormat,
        factor: float = 1.0,
    ) -> None:
        """Update every segment with its piece of the gradient."""
        segments = self.state.subgroup.segments
        whole = Values.of(gradient, format=format_)
        copy = (
            None
            if self.parameter is None
            else Values.of(self.parameter, format=self.formats.parameter)
        )
        update = update_records(
            self.state,
            rules=[self.rule] * len(segments),
            gradients=[whole.part(each.first_element, each.numel) for each in segments],
            parameters=[copy and copy.part(each.first_element, each.numel) for each in segments],
            gradient_factor=factor,
        )
        kernels.update(update)
        self.state.steps = update.steps

    def whole_master(self) -> npt.NDArray[np.float32]:
        """Return the fp32 master, joined where it is split."""
        if self.remainder is None or self.parameter is None:
            return self.master
        high, low = (
            self.parameter.astype(np.uint32) << 16,
            self.remainder.astype(np.int16).astype(np.int32),
        )
        return (high + low.astype(np.uint32)).view(np.float32)

    def everything(self) -> list[npt.NDArray[Any]]:
        """Return the bits of all that an update writes."""
        kept = [
            *self.states,
            self.parameter,
            self.master if self.remainder is None else self.remainder,
        ]
        return [bits_of(each) for each in kept if each is not None]


def threads(count: int) -> UpdateThreads:
    """Return that many threads on no particular core."""
    return UpdateThreads.anywhere(count)
