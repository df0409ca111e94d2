"""What a program that only runs a model needs next, and what stays resident from pass to pass.

Pure decisions. Each pass uses all members in one order, so the member used last is always the one
needed last. To prefetch the next ones in its place would read every member in every pass, however
much memory there is. So some members stay, and the others pass through a window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from infinity_engine.errors import TraceMismatch
from infinity_engine.schedule.trace import TraceCursor, Use

__all__ = ["PassCursor", "kept_between_passes"]

_MOST_USES = 1 << 20  # of a pass: of a longer one, only the last uses are predicted to repeat

_IN_FLIGHT = 3  # uses of the largest size with room: one computes, the others are read meanwhile


def kept_between_passes(uses: Iterable[Use], nbytes: Mapping[int, int], limit: int) -> set[int]:
    """Return the members that stay, of `nbytes` each, where all together may take `limit` bytes.

    They are spread evenly over the pass, so that there is something to read at any time.
    """
    listed = list(uses)
    members = list(dict.fromkeys(number for use in listed for number in use.parameters))
    every = sum(nbytes[number] for number in members)
    if every <= limit:
        return set(members)
    largest = max(sum(nbytes[number] for number in set(use.parameters)) for use in listed)
    room = limit - _IN_FLIGHT * largest
    kept: set[int] = set()
    passed = held = 0
    for number in members:
        passed += nbytes[number]
        # As much as this part of the pass has of the room; whole members alone can stay.
        if (held + nbytes[number]) * every <= room * passed:
            kept.add(number)
            held += nbytes[number]
    return kept


class PassCursor(TraceCursor):
    """A cursor that predicts that a pass without a graph comes again, where no step goes on.

    A program that only runs a model, such as generate(), ends no step, and calls the model again
    and again.
    """

    def __init__(self) -> None:
        super().__init__()
        # Uses since the outermost call of a module began; none before its owner says that one has.
        self._pass: deque[Use] = deque(maxlen=0)
        self._repeats = False  # the trace is a pass that was predicted to come again

    def record_use(self, use: Use) -> bool:
        """Record a use and go on behind its position in the trace. Tell whether it was the next."""
        self._pass.append(use)
        return super().record_use(use)

    def begin_pass(self) -> None:
        """Note that the outermost call of a module begins."""
        self._pass = deque(maxlen=_MOST_USES)

    def end_pass(self) -> tuple[Use, ...]:
        """Return the uses of the call that has ended, if they are predicted to come once more.

        Where the trace of a step has not ended, that step goes on.
        """
        uses = tuple(self._pass)
        in_step = not self.mismatch and not self._repeats and self.at < len(self.trace.uses)
        if in_step or not uses:
            return ()
        # Twice: while the last modules run, it is the first ones that are needed next.
        self.expect((*uses, *uses))
        self._repeats = True
        return uses

    def end_step(self) -> TraceMismatch | None:
        """Begin the next step; return the first mismatch of the one that has ended."""
        self._repeats = False
        return super().end_step()
