"""Subgroups: optimizer states that are moved and updated as one piece, made of segments of parameters.

Cutting is pure; a SubgroupState names the memory that a subgroup's states are in and counts each segment's steps.
`update_records` turns both, with gradients and rules, into what the kernels of any home read. Moves no bytes itself.
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
from infinity_engine.optim.formats import FloatFormat, Formats, Master, Moments, Stream
from infinity_engine.optim.rules import Constants, Rule, RuleFlag

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

NORM_BLOCK = _native.NORM_BLOCK
"""Parameters are cut at multiples of so many elements, so that no block of the gradient norm is cut."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The piece of one parameter that one subgroup holds."""

    parameter: int
    """Which one, in the order of trained parameters."""
    first_element: int
    """Where the piece begins in the parameter."""
    numel: int
    offset: int
    """Where the piece begins in the subgroup."""


@dataclass(frozen=True, slots=True)
class Subgroup:
    """Segments one behind another."""

    index: int
    segments: tuple[Segment, ...]
    numel: int = field(init=False, repr=False, compare=False)
    """Elements of all segments."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", sum(segment.numel for segment in self.segments))


def cut_into_subgroups(numels: Sequence[int], subgroup_numel: int) -> tuple[Subgroup, ...]:
    """Lay the parameters, given by their sizes, one behind another and cut them into subgroups of at most that many.

    A parameter is cut at multiples of NORM_BLOCK only, so a subgroup may hold up to NORM_BLOCK - 1 elements less.

    Raises:
        ConfigError: `subgroup_numel` is less than NORM_BLOCK.
    """
    if subgroup_numel < NORM_BLOCK:
        raise ConfigError(field="subgroup_numel", value=subgroup_numel, expected=f"at least {NORM_BLOCK}")
    cut: list[list[Segment]] = [[]]
    room = subgroup_numel
    for parameter, numel in enumerate(numels):
        first = 0
        while first < numel:
            rest = numel - first
            taken = rest if rest <= room else room - room % NORM_BLOCK
            if taken == 0:
                cut.append([])
                room = subgroup_numel
                continue
            cut[-1].append(Segment(parameter, first, taken, subgroup_numel - room))
            first += taken
            room -= taken
    return tuple(Subgroup(index, tuple(segments)) for index, segments in enumerate(cut) if segments)


@dataclass(kw_only=True, slots=True)
class SubgroupState:
    """Where a subgroup's states are, and how many steps each of its segments has made."""

    subgroup: Subgroup
    formats: Formats
    master: Stream | tuple[Stream, ...]
    """The fp32 masters, or the 16-bit remainders of split ones. One for each segment where they lie apart: a parameter
    in fp32 can be its own master."""
    states: tuple[Stream, ...]
    """In the rule's order; as many as the rule of the subgroup's segments that needs most."""
    steps: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.steps = self.steps or [0] * len(self.subgroup.segments)
        split = self.formats.master is Master.SPLIT
        wanted = FloatFormat.BF16 if split else FloatFormat.FP32
        if isinstance(self.master, Stream):
            self._check("master", self.master, self.subgroup.numel, wanted)
        else:
            self._check_apart(self.master, wanted)
        for number, stream in enumerate(self.states):
            self._check(f"states[{number}]", stream, self.subgroup.numel, self.formats.state_format)

    def master_of(self, number: int) -> Stream:
        """Return the master of one segment."""
        if not isinstance(self.master, Stream):
            return self.master[number]
        segment = self.subgroup.segments[number]
        return self.master.part(segment.offset, segment.numel)

    def _check_apart(self, masters: tuple[Stream, ...], wanted: FloatFormat) -> None:
        segments = self.subgroup.segments
        if len(masters) != len(segments):
            raise ConfigError(
                field="SubgroupState.master",
                value=f"{len(masters)} streams",
                expected=f"one stream for the subgroup, or {len(segments)}: one for each of its segments",
            )
        for number, (segment, stream) in enumerate(zip(segments, masters, strict=True)):
            self._check(f"master[{number}]", stream, segment.numel, wanted)

    def _check(self, name: str, stream: Stream, numel: int, wanted: FloatFormat) -> None:
        if stream.numel != numel or stream.format.nbytes != wanted.nbytes:
            raise ConfigError(
                field=f"SubgroupState.{name}",
                value=f"{stream.numel} values of {stream.format.nbytes} bytes",
                expected=f"{numel} values of {wanted.nbytes} bytes, as the subgroup and its formats say",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What one step does to one subgroup: records for the kernels, and the step counts when it is done."""

    records: npt.NDArray[Any]
    steps: list[int]
    keeps: tuple[Stream, ...]
    """The memory that the records name, kept alive."""


def update_records(
    state: SubgroupState,
    *,
    rules: Sequence[Rule],
    gradients: Sequence[Stream | None],
    parameters: Sequence[Stream | None],
    gradient_factor: float = 1.0,
) -> Update:
    """Say what the kernels shall do to a subgroup in this step; `state.steps` is set to `steps` when they have.

    `rules`, `gradients` and `parameters` have one entry for each segment: the rule of its parameter group, its piece
    of the gradient or None (the segment is skipped, its step count stays), its piece of the 16-bit parameter or None
    where there is none. Unscale and clip make up the factor.

    Raises:
        ConfigError: something is missing, or does not fit the subgroup and its formats.
    """
    segments = state.subgroup.segments
    steps = list(state.steps)
    written: list[int] = []
    masters = (state.master,) if isinstance(state.master, Stream) else state.master
    keeps: list[Stream] = [*masters, *state.states]
    records = np.zeros(len(segments), segment_dtype())
    for number, segment in enumerate(segments):
        gradient, parameter = gradients[number], parameters[number]
        if gradient is None:
            continue
        steps[number] += 1
        constants = rules[number].constants(steps[number], gradient_factor)
        _check_segment(state, segment, rules[number], gradient, parameter)
        keeps += [stream for stream in (gradient, parameter) if stream is not None]
        record = records[number : number + 1]
        _write_constants(record, constants)
        record["master"] = state.master_of(number).address
        _write_streams(record, state, segment, gradient, parameter)
        if state.formats.moments is Moments.BF16_STOCHASTIC:
            record["flags"] |= np.uint32(RuleFlag.STOCHASTIC_MOMENTS)
            record["key"] = rounding_key(state.formats.seed, segment.parameter, steps[number])
        written.append(number)
    return Update(records=records[written], steps=steps, keeps=tuple(keeps))


def _write_constants(record: npt.NDArray[Any], constants: Constants) -> None:
    for each in fields(constants):
        record[each.name] = getattr(constants, each.name)


def _write_streams(
    record: npt.NDArray[Any], state: SubgroupState, segment: Segment, gradient: Stream, parameter: Stream | None
) -> None:
    record["numel"], record["first_element"] = segment.numel, segment.first_element
    record["gradient"], record["gradient_format"] = gradient.address, gradient.format.value
    if state.formats.master is Master.SPLIT:
        record["remainder"], record["master"] = record["master"], 0
        record["flags"] |= np.uint32(RuleFlag.SPLIT_MASTER)
    if parameter is not None:
        record["parameter"], record["parameter_format"] = parameter.address, parameter.format.value
    record["state_format"] = state.formats.state_format.value
    for number, stream in enumerate(state.states):
        record["states"][0, number] = stream.part(segment.offset, segment.numel).address


def _check_segment(
    state: SubgroupState, segment: Segment, rule: Rule, gradient: Stream, parameter: Stream | None
) -> None:
    name = f"parameter {segment.parameter} from element {segment.first_element} on"
    if len(state.states) < len(rule.states):
        raise ConfigError(field=name, value=f"{len(state.states)} states", expected=f"states {', '.join(rule.states)}")
    if gradient.numel != segment.numel:
        raise ConfigError(field=f"gradient of {name}", value=gradient.numel, expected=f"{segment.numel} elements")
    wanted = state.formats.parameter
    if (parameter is None) != (wanted is None) or (
        parameter is not None and (parameter.numel != segment.numel or parameter.format is not wanted)
    ):
        found = None if parameter is None else f"{parameter.numel} of {parameter.format.name}"
        expected = "None" if wanted is None else f"{segment.numel} of {wanted.name}"
        raise ConfigError(field=f"values of {name}", value=found, expected=expected)


@cache
def segment_dtype() -> np.dtype[Any]:
    """Return the layout of the native Segment, as numpy describes records."""
    names, formats, offsets = zip(*_native.segment_fields(), strict=True)
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": _native.SEGMENT_NBYTES})


def rounding_key(seed: int, parameter: int, step: int) -> int:
    """Return the 64-bit key of stochastic rounding for one parameter in one step (SplitMix64 over the three)."""
    key = 0
    for part in (seed, parameter, step):
        key = (key + part + 0x9E3779B97F4A7C15) % 2**64
        key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        key = (key ^ (key >> 27)) * 0x94D049BB133111EB % 2**64
        key ^= key >> 31
    return key
