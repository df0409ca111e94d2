"""`WireLayout`: where shards of several parameters lie in the flat buffers of a collective.

Pure arithmetic over bytes. Each rank has a segment, in which its shards follow one another; what
does not fit into a buffer goes in several rounds, each of which takes the same window of every
rank's segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from infinity_engine.partition.shard import ShardSpec
from infinity_engine.units import align_up

__all__ = ["WIRE_ALIGNMENT", "Piece", "Window", "WireLayout"]

# Pieces and windows begin at multiples of this in their segment: no element is cut.
WIRE_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive elements of one parameter in a segment, or in a window of it."""

    member: int  # The parameter's place among those of the layout.
    first_element: int
    numel: int
    offset: int  # The byte where they begin.


@dataclass(frozen=True, slots=True)
class Window:
    """The bytes of every segment that one round takes."""

    start: int
    end: int


class WireLayout:
    """The segments of every rank for parameters cut as `specs` say; elements have `itemsizes`."""

    def __init__(self, specs: Sequence[ShardSpec], itemsizes: Sequence[int]) -> None:
        self._itemsizes = tuple(itemsizes)
        ranks = {spec.ranks for spec in specs}
        assert len(ranks) == 1, "all are cut over the same ranks"
        self.ranks = ranks.pop()
        # The pieces of each rank.
        self.segments = tuple(self._segment(specs, rank) for rank in range(self.ranks))
        # The bytes of each rank's segment, up to the next multiple of the alignment.
        self.nbytes = tuple(self._end(segment) for segment in self.segments)

    @property
    def width(self) -> int:
        """The bytes of the longest segment, in which all others have room."""
        return max(self.nbytes)

    @property
    def is_one_run(self) -> bool:
        """Whether the segments, one behind another, are the one parameter as it lies in memory."""
        if any(len(segment) != 1 for segment in self.segments):
            return False
        pieces = [segment[0] for segment in self.segments]
        return all(
            piece.member == 0
            and piece.numel * self._itemsizes[0] == self.width
            and piece.first_element == rank * piece.numel
            for rank, piece in enumerate(pieces)
        )

    def windows(self, most: int) -> Iterator[Window]:
        """Yield windows of at most `most` bytes, an aligned number, that cover every segment."""
        for start in range(0, self.width, most):
            yield Window(start, min(start + most, self.width))

    def nbytes_in(self, window: Window, rank: int) -> int:
        """Return how many bytes of a rank's segment lie in a window."""
        return max(min(window.end, self.nbytes[rank]) - window.start, 0)

    def pieces_in(self, window: Window, rank: int) -> Iterator[Piece]:
        """Yield the pieces, or their parts, of a rank's segment in a window, offset from it."""
        for piece in self.segments[rank]:
            size = self._itemsizes[piece.member]
            # Windows and pieces begin at multiples of the alignment, so this cuts no element.
            start = max(piece.offset, window.start)
            end = min(piece.offset + piece.numel * size, window.end)
            if start < end:
                yield replace(
                    piece,
                    first_element=piece.first_element + (start - piece.offset) // size,
                    numel=(end - start) // size,
                    offset=start - window.start,
                )

    def _segment(self, specs: Sequence[ShardSpec], rank: int) -> tuple[Piece, ...]:
        pieces, at = [], 0
        for member, spec in enumerate(specs):
            shard = spec.shards[rank]
            if shard.numel:
                pieces.append(Piece(member, shard.first_element, shard.numel, at))
                at = align_up(at + shard.numel * self._itemsizes[member], WIRE_ALIGNMENT)
        return tuple(pieces)

    def _end(self, segment: Sequence[Piece]) -> int:
        if not segment:
            return 0
        last = segment[-1]
        return align_up(last.offset + last.numel * self._itemsizes[last.member], WIRE_ALIGNMENT)
