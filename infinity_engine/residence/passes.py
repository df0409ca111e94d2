"""What stays resident while a model is only run, pass after pass: a pure decision.

Each pass uses all members in one order, so the member used last is always the one needed last. To
prefetch the next ones in its place would read every member in every pass, however much memory
there is. So some members stay, and the others pass through a window.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from infinity_engine.schedule import Use

__all__ = ["kept_between_passes"]

_IN_FLIGHT = 3  # of the largest use: one that computes, and others that are read meanwhile


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
