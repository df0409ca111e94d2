"""`BufferLayout`: where in a host buffer the things of a subgroup lie, if some rests on drives.

States come first, as they lie at their place on the drives. Values and gradients of each segment
begin on a page of their own, so that each goes to its own place without being copied.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from deepnvme.sizes import PAGE
from infinity_engine.optim import Subgroup
from infinity_engine.units import align_up

__all__ = [
    "GRADIENT_SLOTS",
    "NOTHING_RESTS",
    "NO_LAYOUT",
    "SCRATCH",
    "SUM",
    "BufferLayout",
    "Resting",
    "buffer_slot",
    "early_slot",
    "gradient_slot",
]

GRADIENT_SLOTS = 3
"""How many gradients are on their way to the drives at once: one made, two being written."""
SCRATCH = "parameters on their way"
"""The host buffer through which values come to the drives before the first step."""
SUM = "sum of gradients"
"""The one in which several gradients are added up for their norm."""


def buffer_slot(number: int) -> str:
    """Return what a host buffer of the plan is called in the pool's layout."""
    return f"buffer {number} for states"


def early_slot(number: int) -> str:
    """Return what a host buffer for updates in a backward is called there."""
    return f"buffer {number} for early updates"


def gradient_slot(number: int) -> str:
    """Return what a host buffer for gradients on their way to the drives is called there."""
    return f"buffer {number} for gradients"


@dataclass(frozen=True, kw_only=True, slots=True)
class Resting:
    """What rests on the drives, of all that an engine holds."""

    states: Set[int] = frozenset()
    """Subgroups."""
    values: frozenset[int] = frozenset()
    """Parameters: all from some size on, or none."""
    gradients: int = 0
    """For how many micro-batches these subgroups' gradients have places; 0: they stay in memory."""
    small_bytes: int = 0
    """Of fewer bytes are gradients that stay in memory all the same."""
    early: int = 0
    """How many host buffers there are for updates in a backward; 0: there are no such updates."""

    @property
    def any(self) -> bool:
        """Whether there is anything."""
        return bool(self.states or self.values)

    def of(self, layouts: Collection[BufferLayout]) -> Resting:
        """Return this without places for gradients and early buffers that no layout uses."""
        return replace(
            self,
            gradients=self.gradients
            if self.gradients and any(layout.gradients for layout in layouts)
            else 0,
            early=self.early
            if self.early and any(layout.may_be_early for layout in layouts)
            else 0,
        )


NOTHING_RESTS = Resting()


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferLayout:
    """Offsets in the buffer; `values` and `gradients` are by the number of the segment.

    A segment's gradients are one for each micro-batch, one behind another, and where there are
    several, the sum. `copies` is where the update writes what goes to the device; `in_place`: the
    values are the masters.
    """

    states_bytes: int
    copies: int
    values: Mapping[int, int]
    gradients: Mapping[int, tuple[int, ...]]
    segments: int
    in_place: bool
    nbytes: int
    load_bytes: int
    store_bytes: int
    may_be_early: bool = field(init=False)
    """Whether all of the subgroup rests on drives, so that a backward can update it elsewhere.

    Values that are masters cannot be: later layers of the same backward may need the old ones.
    """

    def __post_init__(self) -> None:
        # No key of either is missing: each segment has a value and a gradient on the drives.
        is_whole = self.values.keys() == self.gradients.keys() == set(range(self.segments))
        may_be_early = bool(self.states_bytes) and not self.in_place and is_whole
        object.__setattr__(self, "may_be_early", may_be_early)

    @classmethod
    def of(
        cls,
        subgroup: Subgroup,
        resting: Resting,
        *,
        streams: int,
        gradient_width: int,
        in_place: bool,
        copies: bool,
    ) -> BufferLayout:
        """Return it for a subgroup with so many fp32 streams of states.

        `in_place`: the values are the masters, and are loaded as well. `copies`: the update writes
        all of them once more.
        """
        width = subgroup.formats.width
        # 4: states and masters are fp32.
        states = 4 * streams * subgroup.numel if subgroup.index in resting.states else 0
        # From a page on: drives take whole pages from and to here.
        copies_at = at = align_up(states, PAGE)
        at += align_up(width * subgroup.numel, PAGE) if copies and states else 0
        # Copies are neither loaded nor stored: they go to the device from the buffer.
        load = store = states
        values = {}
        gradients = {}
        for number, segment in enumerate(subgroup.segments):
            nbytes = width * segment.numel
            if segment.parameter in resting.values:
                values[number] = at
                at += align_up(nbytes, PAGE)
                store += nbytes
                # Values that are no masters are written by the update, never read by it.
                load += nbytes if in_place else 0
            # Gradients of what is updated from memory stay in memory too.
            if resting.gradients and states and nbytes >= resting.small_bytes:
                gradient_bytes = align_up(gradient_width * segment.numel, PAGE)
                gradients[number] = tuple(
                    at + gradient_bytes * micro_batch for micro_batch in range(resting.gradients)
                )
                at += gradient_bytes * resting.gradients
                load += gradient_width * segment.numel * resting.gradients
                # Several need the place of their fp32 sum, which is made here and does not come
                # from a drive.
                if resting.gradients > 1:
                    gradients[number] += (at,)
                    at += align_up(4 * segment.numel, PAGE)
        return cls(
            states_bytes=states,
            copies=copies_at,
            values=MappingProxyType(values),
            gradients=MappingProxyType(gradients),
            segments=len(subgroup.segments),
            in_place=in_place,
            nbytes=at,
            load_bytes=load,
            store_bytes=store,
        )


NO_LAYOUT = BufferLayout(
    states_bytes=0,
    copies=0,
    values=MappingProxyType({}),
    gradients=MappingProxyType({}),
    segments=0,
    in_place=False,
    nbytes=0,
    load_bytes=0,
    store_bytes=0,
)
"""That of a subgroup which passes no buffer."""
