"""`ModuleTrace`: the order in which a step asks for parameters. Recorded in one step, it says what comes in the next.

Pure: knows uses by name and parameters by number. What it says is a guess: whoever asks for something else than it has
next gets that all the same, and only what is fetched ahead is less good until the new order is known.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from infinity_engine.errors import TraceMismatch

__all__ = ["ModuleTrace", "TraceFollower", "Use"]

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Use:
    """One moment of a step: who needs parameters there, and which, by their numbers."""

    name: str
    parameters: tuple[int, ...]


class ModuleTrace:
    """The uses of one step, in order; a position counts them from 0 on."""

    def __init__(self, uses: Sequence[Use] = ()) -> None:
        self.uses = tuple(uses)
        self._of_use = _positions((use, at) for at, use in enumerate(self.uses))
        self._of_parameter = _positions((number, at) for at, use in enumerate(self.uses) for number in use.parameters)

    def find(self, use: Use, start: int) -> int | None:
        """Return the position of a use: the first from `start` on, or else the first of all; None where it is new."""
        positions = self._of_use.get(use)
        if positions is None:
            return None
        later = bisect_left(positions, start)
        return positions[later] if later < len(positions) else positions[0]

    def next_use(self, parameter: int, start: int) -> int | None:
        """Return the first position from `start` on where a parameter is needed; None where there is none."""
        positions = self._of_parameter.get(parameter, ())
        later = bisect_left(positions, start)
        return positions[later] if later < len(positions) else None


class TraceFollower:
    """Follows the trace of the step before through this one, and records this one."""

    def __init__(self) -> None:
        self.trace = ModuleTrace()
        self.mismatch: TraceMismatch | None = None
        """The first use of this step that the trace did not have next; None as long as it does, and while it is new."""
        self._at = 0
        self._seen: list[Use] = []

    @property
    def at(self) -> int:
        """The position that comes next."""
        return self._at

    def saw(self, use: Use) -> None:
        """Note a use, and go on behind its place in the trace; where it has none, stay."""
        self._seen.append(use)
        uses = self.trace.uses
        if self._at < len(uses) and uses[self._at] == use:
            self._at += 1
            return
        if uses and self.mismatch is None:
            expected = uses[self._at].name if self._at < len(uses) else "the end of the step"
            self.mismatch = TraceMismatch(expected=expected, seen=use.name)
        found = self.trace.find(use, self._at)
        if found is not None:
            self._at = found + 1

    def upcoming(self, count: int) -> Iterator[tuple[int, Use]]:
        """Yield the next uses with their positions, `count` at most."""
        return islice(enumerate(islice(self.trace.uses, self._at, None), self._at), count)

    def next_use(self, parameter: int) -> int | None:
        """Return where a parameter is needed next, as far as the trace goes."""
        return self.trace.next_use(parameter, self._at)

    def end_step(self) -> TraceMismatch | None:
        """Begin with the next step; what was seen is the trace from now on where it was another order.

        Returns the first mismatch of the step that has ended.
        """
        mismatch, self.mismatch = self.mismatch, None
        if tuple(self._seen) != self.trace.uses:
            self.trace = ModuleTrace(self._seen)
        self._seen = []
        self._at = 0
        return mismatch


def _positions(found: Iterable[tuple[_Key, int]]) -> Mapping[_Key, list[int]]:
    positions: dict[_Key, list[int]] = {}
    for key, at in found:
        positions.setdefault(key, []).append(at)
    return positions
