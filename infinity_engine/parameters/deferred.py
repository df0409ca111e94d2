"""`DeferredUpdate`: an update that goes on beside the next forward, which waits where it needs it.

Knows which subgroups hold which parts of each parameter; the walk carries out ops. Made by a step,
followed by the object that brings parameters to modules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from infinity_engine.optim import Subgroup
from infinity_engine.schedule import Walk

__all__ = ["DeferredUpdate", "Follower", "Part", "parts_of"]


class Part(NamedTuple):
    """The elements of a parameter that one subgroup holds."""

    subgroup: int
    first_element: int
    numel: int


def parts_of(subgroups: Sequence[Subgroup]) -> dict[int, tuple[Part, ...]]:
    """Return the parts of each parameter, in order."""
    found: dict[int, tuple[Part, ...]] = {}
    for subgroup in subgroups:
        for segment in subgroup.segments:
            part = Part(subgroup.index, segment.first_element, segment.numel)
            found[segment.parameter] = (*found.get(segment.parameter, ()), part)
    return found


class DeferredUpdate:
    """What is left of one step's update, of all subgroups but those `made`.

    `parts` has those of each parameter; `end` does all that is left.
    """

    def __init__(
        self,
        walk: Walk,
        parts: Mapping[int, Sequence[Part]],
        end: Callable[[], None],
        made: Collection[int] = (),
    ) -> None:
        self._walk = walk
        self._parts = parts
        self._end = end
        # Adopted early updates: nothing is left of these.
        self._made = frozenset(made)

    @property
    def failed(self) -> bool:
        """Whether an op of it has failed."""
        return self._walk.failed

    def leave_untold(self) -> None:
        """Let the engine's next call raise the failure, if no module does before."""
        self._walk.leave_untold()

    def has_made(self, parameter: int) -> bool:
        """Tell whether a parameter has its new values where the update leaves them.

        Does not wait.
        """
        return not self.missing(parameter)

    def parts(self, parameter: int) -> Sequence[Part]:
        """Return the parts of a parameter."""
        return self._parts.get(parameter, ())

    def missing(self, parameter: int) -> list[Part]:
        """Return the parts of a parameter that do not have their new values there.

        Does not wait.
        """
        return [
            part
            for part in self.parts(parameter)
            if part.subgroup not in self._made and not self._walk.has_arrived(part.subgroup)
        ]

    def reach(self, parameters: Iterable[int]) -> None:
        """Go on until these parameters are updated: new values are in buffers or where they belong.

        Raises:
            RuntimeError: as `make`.
        """
        self._walk.reach(self._subgroups(parameters))

    def make(self, parameters: Iterable[int]) -> None:
        """Go on until these parameters have their new values where the update leaves them.

        Raises:
            RuntimeError: an op failed. `Engine.step` goes on from there.
        """
        self._walk.arrive(self._subgroups(parameters))

    def go_on(self) -> bool:
        """Do what needs no wait: one update on the host, or what its thread takes; tell if any.

        Raises:
            RuntimeError: as `make`.
        """
        return self._walk.poll()

    def end(self) -> None:
        """Do all that is left of it, so that its memory is free; the follower learns that.

        Raises:
            RuntimeError: as `make`.
        """
        self._walk.finish()  # raises where an op has failed already
        self._end()

    def _subgroups(self, parameters: Iterable[int]) -> list[int]:
        # Each once, in the order of the parameters: several parts may be of one subgroup.
        every = dict.fromkeys(part.subgroup for number in parameters for part in self.parts(number))
        return [index for index in every if index not in self._made]


class Follower(Protocol):
    """An object that brings parameters to modules."""

    def follow_update(self, update: DeferredUpdate | None) -> None:
        """Bring nothing that this update has not made yet; None: all of it is made."""
