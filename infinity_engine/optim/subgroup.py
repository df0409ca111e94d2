"""Subgroups: optimizer states that are moved and updated as one piece, segments of parameters.

Cutting is pure; a SubgroupState names the memory that a subgroup's states are in and counts each
segment's steps. `update_records` turns both, with gradients and rules, into records that the
kernels on CPU and GPU read. Moves no bytes itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from infinity_engine import _native
from infinity_engine.errors import ConfigError
from infinity_engine.optim.formats import FloatFormat, Formats, Master, Moments, Values
from infinity_engine.optim.rules import Rule, RuleFlag

__all__ = [
    "NORM_BLOCK",
    "Segment",
    "Subgroup",
    "SubgroupState",
    "Update",
    "cut_into_subgroups",
    "rounding_key",
    "segment_dtype",
    "update_records",
]

# Parameters are cut at multiples of so many elements, so that no block of the gradient norm is cut.
NORM_BLOCK = _native.NORM_BLOCK

_FP32 = Formats()


@dataclass(frozen=True, slots=True)
class Segment:
    """The piece of one parameter that one subgroup holds."""

    parameter: int  # Its number among the trained parameters.
    first_element: int  # Where the piece begins in the parameter.
    numel: int
    offset: int  # Where the piece begins in the subgroup.


@dataclass(frozen=True, slots=True)
class Subgroup:
    """Segments one behind another, of parameters that are all stored alike."""

    index: int
    segments: tuple[Segment, ...]
    formats: Formats = _FP32
    numel: int = field(init=False, repr=False, compare=False)  # Elements of all segments.

    def __post_init__(self) -> None:
        # Counted once: it is asked for at every op.
        object.__setattr__(self, "numel", sum(segment.numel for segment in self.segments))


def cut_into_subgroups(
    numels: Sequence[int], subgroup_numel: int, formats: Formats = _FP32
) -> tuple[Subgroup, ...]:
    """Lay parameters of these sizes one behind another; cut them into subgroups of at most so many.

    A parameter is cut at multiples of NORM_BLOCK only, so a subgroup may hold up to NORM_BLOCK - 1
    elements less.

    Raises:
        ConfigError: `subgroup_numel` is less than NORM_BLOCK.
    """
    if subgroup_numel < NORM_BLOCK:
        raise ConfigError(
            field="subgroup_numel", value=subgroup_numel, expected=f"at least {NORM_BLOCK}"
        )
    cut: list[list[Segment]] = [[]]
    room = subgroup_numel
    for parameter, numel in enumerate(numels):
        first = 0
        while first < numel:
            rest = numel - first
            # At a block of the norm, except where all that is left of the parameter fits.
            taken = rest if rest <= room else room - room % NORM_BLOCK
            if taken == 0:
                cut.append([])
                room = subgroup_numel
                continue
            cut[-1].append(Segment(parameter, first, taken, subgroup_numel - room))
            first += taken
            room -= taken
    # Without any elements there is one empty list.
    return tuple(
        Subgroup(index, tuple(segments), formats) for index, segments in enumerate(cut) if segments
    )


@dataclass(kw_only=True, slots=True)
class SubgroupState:
    """The memory of a subgroup's states, and how many steps each of its segments has made."""

    subgroup: Subgroup
    # The fp32 masters, or the 16-bit remainders of split ones. One for each segment where they are
    # apart, as fp32 parameters can be their own masters.
    master: Values | tuple[Values, ...]
    # In the rule's order; as many as the rule of the subgroup's segments that needs most.
    states: tuple[Values, ...]
    steps: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.steps = self.steps or [0] * len(self.subgroup.segments)
        split = self.formats.master is Master.SPLIT
        wanted = FloatFormat.BF16 if split else FloatFormat.FP32
        if isinstance(self.master, Values):
            self._check("master", self.master, self.subgroup.numel, wanted)
        else:
            self._check_apart(self.master, wanted)
        for number, stream in enumerate(self.states):
            self._check(f"states[{number}]", stream, self.subgroup.numel, self.formats.state_format)

    @property
    def formats(self) -> Formats:
        """How they are stored."""
        return self.subgroup.formats

    def _check_apart(self, masters: tuple[Values, ...], wanted: FloatFormat) -> None:
        segments = self.subgroup.segments
        if len(masters) != len(segments):
            raise ConfigError(
                field="SubgroupState.master",
                value=f"{len(masters)} streams",
                expected=f"one stream for the subgroup, or {len(segments)}: one for each of its "
                "segments",
            )
        width = wanted.nbytes
        for number, (segment, stream) in enumerate(zip(segments, masters, strict=True)):
            # Compared here first: `_check` would be given a new text for every segment.
            if stream.numel != segment.numel or stream.format.nbytes != width:
                self._check(f"master[{number}]", stream, segment.numel, wanted)

    def _check(self, name: str, stream: Values, numel: int, wanted: FloatFormat) -> None:
        if stream.numel != numel or stream.format.nbytes != wanted.nbytes:
            raise ConfigError(
                field=f"SubgroupState.{name}",
                value=f"{stream.numel} values of {stream.format.nbytes} bytes",
                expected=f"{numel} values of {wanted.nbytes} bytes, as the subgroup and its "
                "formats say",
            )


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
    records["gradient_format"] = [stream.format.value for stream in read]
    if state.formats.parameter is not None:
        records["parameter"] = [stream.address for stream in copies]
        records["parameter_format"] = state.formats.parameter.value
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
        for constant in fields(constants):
            records[constant.name][row] = getattr(constants, constant.name)
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
    records["state_format"] = state.formats.state_format.value
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
    wanted = state.formats.parameter
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
