"""Subgroups: optimizer states that are moved and updated as one piece, segments of parameters.

Cutting is pure; a SubgroupState names the memory that a subgroup's states are in and counts each
segment's steps. Moves no bytes itself. Planning imports it, so it needs no NumPy: records for the
kernels are made in records.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from infinity_engine import _native
from infinity_engine.errors import ConfigError
from infinity_engine.optim.formats import FloatFormat, Formats, Master, Values

__all__ = [
    "NORM_BLOCK",
    "Segment",
    "Subgroup",
    "SubgroupState",
    "cut_into_subgroups",
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
