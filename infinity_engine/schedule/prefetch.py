"""What to bring to the device before it is needed, and what to give up for it: pure decisions.

The order of uses is known, so what goes is what is needed last. Called each time that something was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from infinity_engine.schedule.trace import Use

__all__ = ["Fetches", "choose_fetches", "farthest_first"]

_NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Fetches:
    """Parameters by number: those that make room, and those that come, each in the order in which to do it."""

    evicted: tuple[int, ...]
    fetched: tuple[int, ...]


def farthest_first(numbers: Iterable[int], next_use: Callable[[int], int | None]) -> list[int]:
    """Return the parameters with those first that are not needed any more, then what is needed last."""
    return sorted(numbers, key=lambda number: -_position(number, next_use))


def choose_fetches(
    upcoming: Iterable[tuple[int, Use]],
    *,
    nbytes: Mapping[int, int],
    cached: Collection[int],
    held: Collection[int],
    free: int,
    next_use: Callable[[int], int | None],
) -> Fetches:
    """Return what to fetch of what is coming, as far as `free` bytes and what is needed later have room for it.

    `cached` are on the device, and those of them that are `held` stay there.
    """
    room = _Room(cached, nbytes, free, next_use)
    fetched: dict[int, None] = {}
    wanted = set(held)
    for position, use in upcoming:
        wanted.update(use.parameters)
        for number in use.parameters:
            if number in cached or number in fetched:
                continue
            if not room.make(nbytes[number], wanted, position):
                return Fetches(tuple(room.evicted), tuple(fetched))
            fetched[number] = None
    return Fetches(tuple(room.evicted), tuple(fetched))


class _Room:
    """The free bytes, and what can be given up for more of them."""

    def __init__(
        self, cached: Collection[int], nbytes: Mapping[int, int], free: int, next_use: Callable[[int], int | None]
    ) -> None:
        self.evicted: list[int] = []
        self._cached = cached
        self._nbytes = nbytes
        self._free = free
        self._next_use = next_use
        self._left: list[int] | None = None  # what is needed last is at the end

    def make(self, nbytes: int, wanted: Collection[int], position: int) -> bool:
        """Take so many bytes for what is needed at `position`; False where only earlier needs could give them up."""
        leaving: list[int] = []
        free = self._free
        while free < nbytes:
            number = self._farthest(wanted, position)
            if number is None:
                return False
            leaving.append(number)
            free += self._nbytes[number]
        self.evicted += leaving
        self._free = free - nbytes
        return True

    def _farthest(self, wanted: Collection[int], position: int) -> int | None:
        if self._left is None:
            self._left = farthest_first(self._cached, self._next_use)[::-1]
        while self._left and self._left[-1] in wanted:
            self._left.pop()
        if not self._left or _position(self._left[-1], self._next_use) <= position:
            return None
        return self._left.pop()


def _position(number: int, next_use: Callable[[int], int | None]) -> int:
    found = next_use(number)
    return _NEVER if found is None else found
