"""Which parameters to prefetch to the device, and which to evict for them: pure decisions.

The order of uses is known, so the parameter needed last is evicted. Called after each use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from infinity_engine.schedule.trace import Use

__all__ = ["LOOK_AHEAD", "Fetches", "choose_fetches", "farthest_first"]

LOOK_AHEAD = 32
"""Uses among which the engine looks for what to fetch; the planner simulates the same."""


@dataclass(frozen=True, slots=True)
class Fetches:
    """Parameters by number: those to evict and those to fetch, each in the order in which to do it.

    `provided` is how many of the uses have all that they need then.
    """

    evicted: tuple[int, ...]
    fetched: tuple[int, ...]
    provided: int


def farthest_first(numbers: Iterable[int], next_use: Callable[[int], int]) -> list[int]:
    """Return the parameters, first those that are not needed any more, then those needed last."""
    return sorted(numbers, key=next_use, reverse=True)


def choose_fetches(
    upcoming: Iterable[tuple[int, Use]],
    *,
    nbytes: Mapping[int, int],
    cached: Collection[int],
    held: Collection[int],
    free: int,
    next_use: Callable[[int], int],
    unmade: Collection[int] = (),
) -> Fetches:
    """Return what to fetch of the upcoming uses, as far as there is room for it.

    Room is `free`, and what is needed later.
    `cached` parameters are on the device, and those of them that are `held` stay there. `unmade`
    parameters have not all of their values yet: they are fetched, and their uses do not count as
    provided. Ends at the first parameter without room, as later ones would take the room that it
    gets next.
    """
    room = _Room(cached, nbytes, held, free, next_use)
    fetched: dict[int, None] = {}
    whole = True
    provided = 0
    for position, use in upcoming:
        for number in use.parameters:
            if number in fetched or (number in cached and number not in room.evicted):
                continue
            if not room.make(nbytes[number], position):
                return Fetches(tuple(room.evicted), tuple(fetched), provided)
            fetched[number] = None
            whole = whole and number not in unmade
        provided += whole
    return Fetches(tuple(room.evicted), tuple(fetched), provided)


class _Room:
    """The free bytes, and the parameters that can be evicted for more."""

    def __init__(
        self,
        cached: Collection[int],
        nbytes: Mapping[int, int],
        held: Collection[int],
        free: int,
        next_use: Callable[[int], int],
    ) -> None:
        self.evicted: dict[int, None] = {}
        self._cached = cached
        self._nbytes = nbytes
        self._held = held
        self._free = free
        self._next_use = next_use
        self._left: list[int] | None = None  # candidates, the one needed last at the end

    def make(self, nbytes: int, position: int) -> bool:
        """Take bytes for a use at `position`; False if only what is needed earlier could go."""
        leaving: list[int] = []
        free = self._free
        while free < nbytes:
            if self._left is None:  # sorted only now: mostly there is room without evicting
                idle = (number for number in self._cached if number not in self._held)
                self._left = farthest_first(idle, self._next_use)[::-1]
            if not self._left or self._next_use(self._left[-1]) <= position:
                return False
            leaving.append(self._left.pop())
            free += self._nbytes[leaving[-1]]
        # Only now: without room for all of it, none of these leaves.
        self.evicted.update(dict.fromkeys(leaving))
        self._free = free - nbytes
        return True
