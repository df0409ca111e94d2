"""Places buffers with known lifetimes: sizes and steps in, places in one run of bytes out.

Pure and deterministic, whatever the order of the requests; takes no memory. Buffers of the engine's
plans live at one of three times, so the planner stacks them; this is for any lifetimes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from deepnvme.sizes import PAGE
from infinity_engine.errors import ConfigError
from infinity_engine.memory.layout import Layout
from infinity_engine.plan import Extent
from infinity_engine.units import align_up

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["PackedLayout", "Request", "layout"]

_MOST_ROUNDS = 12
# How many buffers are looked at while others are placed, in all rounds: a second or two of them.
# The first round is whole. Placing one costs, by itself, what looking at so many does. Most
# searches end long before.
_MOST_LOOKS = 200_000_000
_PLACING = 2000
_SHORT = 64  # a buffer is short-lived if it lives for at most one 64th of the steps


@dataclass(frozen=True, slots=True)
class Request:
    """A buffer of `nbytes` that is live from step `first` to step `last`, both included."""

    name: str
    nbytes: int
    first: int
    last: int

    def __post_init__(self) -> None:
        for what, value in (("nbytes", self.nbytes), ("first", self.first)):
            if value < 0:
                raise ConfigError(
                    field=f"Request({self.name!r}).{what}", value=value, expected="0 or more"
                )
        if self.last < self.first:
            expected = f"a step that is not before the first one, {self.first}"
            raise ConfigError(
                field=f"Request({self.name!r}).last", value=self.last, expected=expected
            )


@dataclass(frozen=True, slots=True)
class PackedLayout(Layout):
    """Places, and the most bytes that are live at once."""

    peak_bytes: int

    @property
    def overhead(self) -> float:
        """Bytes taken for each byte of the peak, the least that would do: 1.0 is perfect."""
        return self.nbytes / self.peak_bytes if self.peak_bytes else 1.0


def layout(requests: Iterable[Request], *, alignment: int = PAGE) -> PackedLayout:
    """Return a place for each request, on a multiple of `alignment`, such that few bytes are taken.

    Buffers that are live in the same step share no byte, nor the multiple of `alignment` that one
    of them ends in. A buffer of no bytes is at 0.

    Raises:
        ConfigError: two requests have the same name, or `alignment` is not positive.
    """
    if alignment <= 0:
        raise ConfigError(
            field="layout alignment", value=alignment, expected="a positive number of bytes"
        )
    # Sorted by all that a request has, so that their order in the argument does not matter.
    ordered = sorted(
        requests, key=lambda request: (request.first, request.last, request.nbytes, request.name)
    )
    for name, following in pairwise(sorted(request.name for request in ordered)):
        if name == following:
            raise ConfigError(field="layout requests", value=name, expected="each name once")
    # Without bytes they overlap nothing, and would only slow the search.
    places = {request.name: Extent(0, 0) for request in ordered if not request.nbytes}
    filled = [request for request in ordered if request.nbytes]
    # What lives in all steps stands at the bottom, out of the way; the search is for the others.
    end = max((request.last for request in filled), default=0)
    always = [
        request for request in filled if (request.first, request.last) == (filled[0].first, end)
    ]
    bottom = 0
    for request in always:
        places[request.name] = Extent(bottom, request.nbytes)
        bottom += align_up(request.nbytes, alignment)
    # In units of the alignment, the search cannot place a buffer off it.
    others = _Buffers(
        [request for request in filled if (request.first, request.last) != (filled[0].first, end)],
        alignment,
    )
    # Also the bottom itself, for layouts in which everything lives in all steps.
    tops = [bottom]
    for request, offset in zip(others.requests, _search(others).tolist(), strict=True):
        places[request.name] = Extent(bottom + offset * alignment, request.nbytes)
        tops.append(align_up(places[request.name].end, alignment))
    return PackedLayout(
        places=places,
        nbytes=max(tops),
        peak_bytes=sum(request.nbytes for request in always)
        # Bytes asked for, not rounded to the alignment: `overhead` shows what rounding costs too.
        + others.peak([request.nbytes for request in others.requests]),
    )


class _Fit(Enum):
    """Which of the gaps between earlier buffers a buffer takes."""

    FIRST = auto()  # the lowest gap that holds it
    BEST = auto()  # the smallest gap that holds it, the lowest of equal ones


class _Buffers:
    """Requests as arrays, long-lived first, each part by first step: rivals stand side by side.

    Sizes and offsets are in units of the alignment, times in those steps in which a buffer begins
    or has ended.
    """

    def __init__(self, requests: Sequence[Request], alignment: int) -> None:
        # `last + 1`: a buffer is live in its last step, and free from the next one on.
        edges = [request.first for request in requests] + [request.last + 1 for request in requests]
        # Only steps in which something changes are times, so that gaps between them cost nothing.
        steps, times = np.unique(np.array(edges, np.int64), return_inverse=True)
        lives = times[len(requests) :] - times[: len(requests)]
        # Short ones are found by a window in time; a long one's window would be almost everything.
        is_short = lives <= len(steps) // _SHORT
        # Stable, so that each part keeps the order by first step, which the windows rely on.
        order = np.argsort(is_short, kind="stable")
        self.requests = [requests[index] for index in order.tolist()]
        self.sizes = np.array(
            [-(-request.nbytes // alignment) for request in self.requests], np.int64
        )
        self.begins = times[: len(requests)][order]
        self.ends = self.begins + lives[order]
        # Who overlaps one in time is among the long ones before `long_end` or the short in
        # `short_begin:short_end`.
        count = int(np.count_nonzero(~is_short))
        short_begins = self.begins[count:]
        # A short buffer that overlaps began at most this long before.
        longest = int(lives[is_short].max(initial=0))
        self._long_end = np.searchsorted(self.begins[:count], self.ends).tolist()
        self._short_begin = (count + np.searchsorted(short_begins, self.begins - longest)).tolist()
        self._short_end = (count + np.searchsorted(short_begins, self.ends)).tolist()

    def looks(self) -> int:
        """Return the cost of one packing, in buffers looked at."""
        # For each buffer: long ones that begin before it ends, and short ones in its window.
        windows = zip(self._long_end, self._short_begin, self._short_end, strict=True)
        return sum(_PLACING + long + end - begin for long, begin, end in windows)

    def peak(self, sizes: Sequence[int] | NDArray[np.int64]) -> int:
        """Return the largest sum of those of `sizes` that are live at one time."""
        # Changes at each time, summed up: one pass, where comparing all pairs would be quadratic.
        change = np.zeros(int(self.ends.max(initial=0)) + 1, np.int64)
        np.add.at(change, self.begins, sizes)
        np.subtract.at(change, self.ends, sizes)
        return int(np.cumsum(change).max())

    def pack(self, order: NDArray[np.int64], fit: _Fit) -> NDArray[np.int64]:
        """Return the offsets when, in `order`, each buffer takes a gap left by those before it."""
        sizes, begins, ends = self.sizes.tolist(), self.begins.tolist(), self.ends.tolist()
        offsets = np.zeros(len(order), np.int64)
        tops = np.zeros(len(order), np.int64)
        # the end in time; 0, and so out of the way, until placed
        placed_until = np.zeros(len(order), np.int64)
        for index in order.tolist():
            short = self._short_begin[index]
            rivals = (
                np.flatnonzero(placed_until[short : self._short_end[index]] > begins[index]) + short
            )
            if long_end := self._long_end[index]:
                # Long ones come first in the arrays: the indices stay in order.
                rivals = np.concatenate(
                    (np.flatnonzero(placed_until[:long_end] > begins[index]), rivals)
                )
            offset = _place(offsets[rivals], tops[rivals], sizes[index], fit) if len(rivals) else 0
            offsets[index] = offset
            tops[index] = offset + sizes[index]
            placed_until[index] = ends[index]
        return offsets


def _place(offsets: NDArray[np.int64], tops: NDArray[np.int64], size: int, fit: _Fit) -> int:
    """Return where `size` fits between, below or above the runs from `offsets` to `tops`."""
    # Rivals need not live at the same time and may overlap: floors are running maxima.
    upwards = offsets.argsort()
    floors = np.zeros(len(offsets) + 1, np.int64)  # under each run, and over all of them
    np.maximum.accumulate(tops[upwards], out=floors[1:])
    gaps = offsets[upwards] - floors[:-1]
    large_enough = np.flatnonzero(gaps >= size)
    if not len(large_enough):
        # No gap is large enough: above everything.
        return int(floors[-1])
    chosen = large_enough[gaps[large_enough].argmin()] if fit is _Fit.BEST else large_enough[0]
    return int(floors[chosen])


class _Attempt:
    """An order to pack in; buffers that often stuck out over the bound come first."""

    def __init__(self, fit: _Fit, *keys: NDArray[np.int64]) -> None:
        self.fit = fit
        # lexsort takes the most important key last; the inverse permutation is each buffer's rank.
        self._rank = np.argsort(np.lexsort(keys[::-1]))
        self._blame = np.zeros(len(self._rank), np.int64)

    # Ranks of the attempt's own keys decide among buffers with the same blame.
    @property
    def order(self) -> NDArray[np.int64]:
        """The buffers, first to last."""
        return np.lexsort((self._rank, -self._blame))

    def blame(self, stuck_out: NDArray[np.bool_]) -> None:
        """Move these forward in the next order."""
        self._blame += stuck_out


def _search(buffers: _Buffers) -> NDArray[np.int64]:
    """Return the best offsets of some rounds of several orders; end when none can be better.

    Size first packs lifetimes that nest or that have little to do with one another; order in time
    packs windows that move along. Which order will do is not known before. Where neither does,
    mostly a few buffers were placed late and stick out.
    """
    sizes, begins, ends = buffers.sizes, buffers.begins, buffers.ends
    lives = ends - begins
    attempts = (
        _Attempt(_Fit.FIRST, -sizes, -lives),
        _Attempt(_Fit.BEST, begins, -lives, -sizes),
        _Attempt(_Fit.FIRST, begins, -sizes),
        _Attempt(_Fit.BEST, -ends, -sizes),
    )
    # No packing is lower than the most that is live at one time.
    bound = buffers.peak(sizes)
    best, best_top = np.zeros(0, np.int64), None
    # A bound of work, not of time: the same requests give the same layout on any machine.
    most_rounds = _MOST_LOOKS // (len(attempts) * max(buffers.looks(), 1))
    for _ in range(min(max(most_rounds, 1), _MOST_ROUNDS)):
        for attempt in attempts:
            offsets = buffers.pack(attempt.order, attempt.fit)
            tops = offsets + sizes
            top = int(tops.max(initial=0))
            if best_top is None or top < best_top:
                best, best_top = offsets, top
            if top == bound:
                return best
            # Those that stick out were placed too late: the next round places them earlier.
            attempt.blame(tops > bound)
    return best
