"""`DeferredUpdate`: an update that goes on beside the next forward, which waits for what it needs of it.

Knows which subgroups hold which parameter; the walk carries out ops. Made by a step, followed by whoever lets modules
have their parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from infinity_engine.optim import Subgroup
from infinity_engine.schedule import Walk

__all__ = ["DeferredUpdate", "Follower", "subgroups_of"]


def subgroups_of(subgroups: Sequence[Subgroup]) -> dict[int, tuple[int, ...]]:
    """Return the subgroups that hold each parameter."""
    found: dict[int, tuple[int, ...]] = {}
    for each in subgroups:
        for parameter in dict.fromkeys(segment.parameter for segment in each.segments):
            found[parameter] = (*found.get(parameter, ()), each.index)
    return found


class DeferredUpdate:
    """What is left of one step's update; `subgroups` has those of each parameter, `end` does all that is left."""

    def __init__(self, walk: Walk, subgroups: Mapping[int, Sequence[int]], end: Callable[[], None]) -> None:
        self._walk = walk
        self._subgroups = subgroups
        self._end = end

    def has_made(self, parameter: int) -> bool:
        """Tell whether a parameter has its new values where the update leaves them. Does not wait."""
        return all(self._walk.has_arrived(index) for index in self._subgroups.get(parameter, ()))

    def make(self, parameters: Iterable[int]) -> None:
        """Go on until these parameters have their new values.

        Raises:
            RuntimeError: an op failed. `Engine.step` goes on from there.
        """
        self._walk.arrive([index for number in parameters for index in self._subgroups.get(number, ())])

    def go_on(self) -> None:
        """Do what can be done without waiting, with at most one update on the host.

        Raises:
            RuntimeError: as `make`.
        """
        self._walk.poll()

    def end(self) -> None:
        """Do all that is left of it, so that its memory is free; who follows it is told that there is none any more.

        Raises:
            RuntimeError: as `make`.
        """
        self._walk.finish()  # raises where an op has failed already
        self._end()


class Follower(Protocol):
    """Whoever lets modules have their parameters."""

    def follow(self, update: DeferredUpdate | None) -> None:
        """Let nobody have from here on what this update has not made yet; None: all of it is made."""
