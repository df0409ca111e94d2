"""`ModuleTrace`: the order in which a step uses parameters; it predicts the next step's.

Pure: knows uses by name and parameters by number. It is a prediction: a module that needs another
parameter than the next one gets it all the same, and only prefetching is worse until the new order
is known.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from infinity_engine.errors import TraceMismatch

__all__ = ["NEVER", "ModuleTrace", "TraceCursor", "Use"]

NEVER = sys.maxsize  # The position of a use that does not come any more.

# Uses recorded of one step. A caller that never ends a step is evaluating, not training.
_MOST_USES = 1 << 20

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Use:
    """One moment of a step: the module that needs parameters there, and which, by number."""

    name: str
    parameters: tuple[int, ...]


class ModuleTrace:
    """The uses of one step, in order; a position counts them from 0 on."""

    def __init__(self, uses: Sequence[Use] = ()) -> None:
        self.uses = tuple(uses)
        self._of_parameter = _positions(
            (number, at) for at, use in enumerate(self.uses) for number in use.parameters
        )

    @cached_property
    def _of_use(self) -> Mapping[Use, list[int]]:
        """The positions of each use: asked for only where one comes out of order."""
        return _positions((use, at) for at, use in enumerate(self.uses))

    def find(self, use: Use, start: int) -> int | None:
        """Return the first position of a use from `start` on, or of all; None where it is new."""
        positions = self._of_use.get(use)
        if positions is None:
            return None
        later = bisect_left(positions, start)
        return positions[later] if later < len(positions) else positions[0]

    def next_use(self, parameter: int, start: int) -> int:
        """Return the first position from `start` on where a parameter is needed, or NEVER."""
        positions = self._of_parameter.get(parameter, ())
        later = bisect_left(positions, start)
        return positions[later] if later < len(positions) else NEVER


class TraceCursor:
    """A position in the trace of the step before, which moves on; records this step's trace."""

    def __init__(self) -> None:
        self.trace = ModuleTrace()
        # The first use of this step that differs from the trace; None while there is none, or no
        # trace.
        self.mismatch: TraceMismatch | None = None
        self.at = 0  # the position of the next use
        self._seen: list[Use] = []
        self._next: dict[int, int] = {}  # a cache of next_use, valid at this position

    def record_use(self, use: Use) -> bool:
        """Record a use and go on behind its position in the trace. Tell whether it was the next.

        A step of more than _MOST_USES uses is no training step: it is not recorded to its end, and
        gives no trace.
        """
        if len(self._seen) <= _MOST_USES:
            self._seen.append(use)
        uses = self.trace.uses
        expected = uses[self.at] if self.at < len(uses) else None
        # Identity first: the same module mostly asks with the same object, and tuples may be long.
        if use is expected or use == expected:
            self.at += 1
            for number in use.parameters:
                # Only these are needed elsewhere next; the cache stays good for all others.
                self._next.pop(number, None)
            return True
        if uses and self.mismatch is None:
            name = "the end of the step" if expected is None else expected.name
            self.mismatch = TraceMismatch(expected=name, seen=use.name)
        # A use out of order: go on from there, rather than wait for one that was left out.
        found = self.trace.find(use, self.at)
        if found is not None:
            self._go_to(found + 1)
        return False

    def expect(self, uses: Sequence[Use]) -> None:
        """Follow these uses until the end of the step; none of them has come yet."""
        self.trace = ModuleTrace(uses)
        self._go_to(0)

    def upcoming(self, start: int, stop: int) -> Sequence[tuple[int, Use]]:
        """Return the uses from position `start` until `stop`, with their positions."""
        return list(enumerate(self.trace.uses[start:stop], start))

    def next_use(self, parameter: int) -> int:
        """Return where a parameter is needed next, as far as the trace goes, or NEVER."""
        found = self._next.get(parameter)
        if found is None:
            found = self._next[parameter] = self.trace.next_use(parameter, self.at)
        return found

    def end_step(self) -> TraceMismatch | None:
        """Begin the next step. The recorded uses become the trace where their order is another.

        Returns the first mismatch of the step that has ended.
        """
        mismatch, self.mismatch = self.mismatch, None
        # An equal trace is kept, with the positions that it has found already.
        if len(self._seen) <= _MOST_USES and tuple(self._seen) != self.trace.uses:
            self.trace = ModuleTrace(self._seen)
        self._seen = []
        self._go_to(0)
        return mismatch

    def _go_to(self, position: int) -> None:
        self.at = position
        self._next.clear()


def _positions(found: Iterable[tuple[_Key, int]]) -> Mapping[_Key, list[int]]:
    positions: dict[_Key, list[int]] = {}
    for key, at in found:
        positions.setdefault(key, []).append(at)
    return positions
