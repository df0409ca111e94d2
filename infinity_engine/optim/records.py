"""Records that tell the kernels on CPU and GPU how to update a subgroup.

`update_records` makes them of a SubgroupState, with gradients, parameters and rules. Moves no bytes
itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from infinity_engine import _native
from infinity_engine.errors import ConfigError
from infinity_engine.optim.formats import Master, Moments, Values
from infinity_engine.optim.rules import Constants, Rule, RuleFlag
from infinity_engine.optim.subgroup import Segment, SubgroupState

__all__ = ["Update", "rounding_key", "segment_dtype", "update_records"]

_CONSTANTS = tuple(constant.name for constant in fields(Constants))


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One subgroup's update in one step: the kernels' records, and the step counts after it."""

    records: npt.NDArray[Any]
    steps: list[int]
    keeps: tuple[Values, ...]  # The memory that the records name, kept alive.


def update_records(
    state: SubgroupState,
    *,
    rules: Sequence[Rule],
    gradients: Sequence[Values | None],
    parameters: Sequence[Values | None],
    gradient_factor: float = 1.0,
) -> Update:
    """Return the records that tell the kernels how to update a subgroup.

    The caller sets `state.steps` to their `steps` once the update is made.

    `rules`, `gradients` and `parameters` have one entry for each segment: the rule of its parameter
    group, its piece of the gradient or None (the segment is skipped, its step count stays), its
    piece of the 16-bit parameter or None where there is none. Unscale and clip make up the factor.

    Raises:
        ConfigError: something is missing, or does not fit the subgroup and its formats.
    """
    # A parameter without a gradient in this step is left out, as torch.optim leaves it out.
    written = [number for number, gradient in enumerate(gradients) if gradient is not None]
    segments = [state.subgroup.segments[number] for number in written]
    steps = list(state.steps)
    read: list[Values] = []
    copies: list[Values] = []
    for number, segment in zip(written, segments, strict=True):
        gradient, parameter = gradients[number], parameters[number]
        assert gradient is not None, "segments without one are skipped"
        _check_segment(state, segment, rules[number], gradient, parameter)
        # In the copy: the state's own counts change when the update has been made.
        steps[number] += 1
        read.append(gradient)
        if parameter is not None:
            copies.append(parameter)
    made = [steps[number] for number in written]
    records = _with_constants([rules[number] for number in written], made, gradient_factor)
    _write_masters(records, state, written)
    _write_states(records, state, segments)
    records["gradient"] = [stream.address for stream in read]
    records["gradient_format"] = [stream.format.number for stream in read]
    if state.formats.parameter is not None:
        records["parameter"] = [stream.address for stream in copies]
        records["parameter_format"] = state.formats.parameter.number
    # The key has the parameter and its step, not the subgroup: cuts do not change bits.
    if state.formats.moments is Moments.BF16_STOCHASTIC:
        seed, keyed = state.formats.seed, zip(segments, made, strict=True)
        records["flags"] |= np.uint32(RuleFlag.STOCHASTIC_MOMENTS)
        records["key"] = [rounding_key(seed, segment.parameter, step) for segment, step in keyed]
    # Everything that the records name by address stays alive with the Update.
    masters = (state.master,) if isinstance(state.master, Values) else state.master
    return Update(records=records, steps=steps, keeps=(*masters, *state.states, *read, *copies))


def _with_constants(
    rules: Sequence[Rule], steps: Sequence[int], gradient_factor: float
) -> npt.NDArray[Any]:
    """Return a record for each segment with its rule's constants; most segments share them."""
    # The row of each pair of rule and step.
    shared: dict[tuple[int, int], int] = {}
    # By the rules' identity: there are few of them, and comparing their options would cost more.
    rows = [shared.setdefault(key, len(shared)) for key in zip(map(id, rules), steps, strict=True)]
    records = np.zeros(len(shared), segment_dtype())
    for row, (rule, step) in dict(zip(rows, zip(rules, steps, strict=True), strict=True)).items():
        constants = rule.constants(step, gradient_factor)
        for name in _CONSTANTS:
            records[name][row] = getattr(constants, name)
    return records[rows]


def _write_masters(records: npt.NDArray[Any], state: SubgroupState, written: Sequence[int]) -> None:
    if isinstance(state.master, Values):
        width = state.master.format.nbytes
        offsets = [state.subgroup.segments[number].offset for number in written]
        addresses = [state.master.address + width * offset for offset in offsets]
    else:
        addresses = [state.master[number].address for number in written]
    if state.formats.master is Master.SPLIT:
        records["remainder"] = addresses
        records["flags"] |= np.uint32(RuleFlag.SPLIT_MASTER)
    else:
        records["master"] = addresses


def _write_states(
    records: npt.NDArray[Any], state: SubgroupState, segments: Sequence[Segment]
) -> None:
    records["numel"] = [segment.numel for segment in segments]
    records["first_element"] = [segment.first_element for segment in segments]
    records["state_format"] = state.formats.state_format.number
    offsets = np.array([segment.offset for segment in segments], np.uint64)
    for place, stream in enumerate(state.states):
        # uint64 throughout: with int64 beside it, numpy would go on in float64.
        records["states"][:, place] = stream.address + offsets * np.uint64(stream.format.nbytes)


def _check_segment(
    state: SubgroupState, segment: Segment, rule: Rule, gradient: Values, parameter: Values | None
) -> None:
    name = f"parameter {segment.parameter} from element {segment.first_element} on"
    if len(state.states) < len(rule.states):
        raise ConfigError(
            field=name,
            value=f"{len(state.states)} states",
            expected=f"states {', '.join(rule.states)}",
        )
    if gradient.numel != segment.numel:
        raise ConfigError(
            field=f"gradient of {name}", value=gradient.numel, expected=f"{segment.numel} elements"
        )
    wanted = state.subgroup.formats.parameter
    if (parameter is None) != (wanted is None) or (
        parameter is not None
        and (parameter.numel != segment.numel or parameter.format is not wanted)
    ):
        found = None if parameter is None else f"{parameter.numel} of {parameter.format.name}"
        expected = "None" if wanted is None else f"{segment.numel} of {wanted.name}"
        raise ConfigError(field=f"values of {name}", value=found, expected=expected)


@cache
def segment_dtype() -> np.dtype[Any]:
    """Return the layout of the native Segment, as numpy describes records."""
    # Asked of the native module: its compiler lays the record out.
    names, formats, offsets = zip(*_native.segment_fields(), strict=True)
    return np.dtype(
        {"names": names, "formats": formats, "offsets": offsets, "itemsize": _native.SEGMENT_NBYTES}
    )


def rounding_key(seed: int, parameter: int, step: int) -> int:
    """Return the 64-bit key of stochastic rounding for one parameter in one step."""
    key = 0
    # One round of SplitMix64 for each of the three, with its constants.
    for part in (seed, parameter, step):
        key = (key + part + 0x9E3779B97F4A7C15) % 2**64
        key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        key = (key ^ (key >> 27)) * 0x94D049BB133111EB % 2**64
        key ^= key >> 31
    return key
