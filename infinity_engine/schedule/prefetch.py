"""Which parameters to prefetch to the device, and which to evict for them: pure decisions.

The order of uses is known, so the parameter needed last is evicted. Called after each use.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import NamedTuple

from infinity_engine.schedule.trace import Use

__all__ = ["LOOK_AHEAD", "Fetches", "choose_fetches"]

LOOK_AHEAD = 32
"""Uses among which the engine looks for what to fetch; the planner simulates the same."""


class Fetches(NamedTuple):
    """Parameters by number: those to evict and those to fetch, each in the order in which to do it.

    `provided` is how many of the uses have all that they need then.
    """

    evicted: tuple[int, ...]
    fetched: tuple[int, ...]
    provided: int


def choose_fetches(
    upcoming: Iterable[tuple[int, Use]],
    *,
    nbytes: Mapping[int, int],
    cached: Container[int],
    idle: Iterable[int],
    free: int,
    next_use: Callable[[int], int],
    is_unmade: Callable[[int], bool] | None = None,
) -> Fetches:
    """Return what to fetch of the upcoming uses, as far as there is room for it.

    Room is `free`, and what is needed later. `cached` parameters are on the device, and those of
    them that are `idle` may leave it, the farthest next use first. Unmade parameters do not have
    all of their values yet: they are fetched, and their uses do not count as provided. Ends at the
    first parameter without room, as later ones would take the room that it gets next.
    """
    candidates = iter(idle)  # asked only as far as room is missing
    evicted: dict[int, None] = {}
    fetched: dict[int, None] = {}
    whole = True
    provided = 0
    for position, use in upcoming:
        for number in use.parameters:
            if number in fetched or (number in cached and number not in evicted):
                continue
            needed = nbytes[number]
            if free < needed:
                leaving: list[int] = []
                while free < needed:
                    candidate = next(candidates, None)
                    if candidate is None or next_use(candidate) <= position:
                        return Fetches(tuple(evicted), tuple(fetched), provided)
                    leaving.append(candidate)
                    free += nbytes[candidate]
                # Only now: without room for all of it, none of these leaves.
                evicted.update(dict.fromkeys(leaving))
            free -= needed
            fetched[number] = None
            whole = whole and not (is_unmade is not None and is_unmade(number))
        provided += whole
    return Fetches(tuple(evicted), tuple(fetched), provided)
