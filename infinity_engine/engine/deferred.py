"""`DeferredUpdate`: an update that goes on beside the next forward, which waits for what it needs of it.

Knows which subgroups hold which parameter; the walk carries out ops. Made by a step, followed by the fetcher.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from infinity_engine.optim import Subgroup
from infinity_engine.schedule import Walk

__all__ = ["DeferredUpdate", "subgroups_of"]


def subgroups_of(subgroups: Sequence[Subgroup]) -> dict[int, tuple[int, ...]]:
    """Return the subgroups that hold each parameter."""
    found: dict[int, tuple[int, ...]] = {}
    for each in subgroups:
        for parameter in dict.fromkeys(segment.parameter for segment in each.segments):
            found[parameter] = (*found.get(parameter, ()), each.index)
    return found


class DeferredUpdate:
    """What is left of one step's update; `subgroups` has those of each parameter."""

    def __init__(self, walk: Walk, subgroups: Mapping[int, Sequence[int]]) -> None:
        self._walk = walk
        self._subgroups = subgroups

    def has_made(self, parameter: int) -> bool:
        """Tell whether a parameter has its new values at home. Does not wait."""
        return all(self._walk.has_ended(index) for index in self._subgroups.get(parameter, ()))

    def make(self, parameters: Iterable[int]) -> None:
        """Go on until these parameters have their new values at home.

        Raises:
            RuntimeError: an op failed. `Engine.step` goes on from there.
        """
        self._walk.finish([index for number in parameters for index in self._subgroups.get(number, ())])

    def go_on(self) -> None:
        """Do what can be done without waiting, with at most one update on the host.

        Raises:
            RuntimeError: as `make`.
        """
        self._walk.poll()
