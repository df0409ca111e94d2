"""Where bytes lie in a volume: `Extent` names a piece of one member, `SpaceMap` knows which of its
bytes are free.

Computes in whole pages; reads and writes nothing, and takes no locks. `Volume` chooses the member
and lets one thread call at a time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deepnvme.sizes import PAGE, whole_pages

__all__ = ["Extent", "SpaceMap", "slices"]


@dataclass(frozen=True, slots=True)
class Extent:
    """`nbytes` bytes of one member, from `offset` of its file, and the rest of their last page."""

    member: int
    offset: int
    nbytes: int

    def __post_init__(self) -> None:
        if self.member < 0 or self.offset < 0 or self.offset % PAGE or self.nbytes < 1:
            raise ValueError(
                f"an extent has a member from 0, an offset that is a multiple of {PAGE}, and at "
                f"least one byte; got {self}"
            )

    @property
    def end(self) -> int:
        """Where the next page after it begins."""
        return self.offset + whole_pages(self.nbytes)


def slices(extents: Iterable[Extent], start: int, nbytes: int) -> tuple[Extent, ...]:
    """Return the extents of `nbytes` bytes of those in `extents`, from byte `start` on.

    Raises:
        ValueError: there are not so many, or they begin inside a page.
    """
    found, passed, end = [], 0, start + nbytes
    for extent in extents:
        first, last = max(start - passed, 0), min(end - passed, extent.nbytes)
        if first < last:
            # The constructor refuses an offset inside a page.
            found.append(Extent(extent.member, extent.offset + first, last - first))
        passed += extent.nbytes
    if not 0 <= start <= end <= passed:
        raise ValueError(
            f"bytes {start} to {end} are not within the {passed} bytes of these extents"
        )
    return tuple(found)


class SpaceMap:
    """The free bytes between `start` and `end` of one file; at first all are free.

    Taking and giving cost two searches in sorted lists, however many pieces there are. Ctrl-C may
    interrupt a call anywhere: then it has done nothing, or the next call completes it. Space that
    was taken stays taken, although the caller did not get its place.
    """

    def __init__(self, start: int, end: int) -> None:
        if start < 0 or end < start or start % PAGE or end % PAGE:
            raise ValueError(f"space begins and ends on multiples of {PAGE}; got {start} to {end}")
        self.start, self.end = start, end
        self._free_bytes = 0
        self._lengths: dict[int, int] = {}  # of each free piece, by its offset
        self._offsets: list[int] = []  # of the same pieces, ascending
        self._by_length: list[tuple[int, int]] = []  # (length, offset), ascending
        # The change of the pieces that is being made: see _replace().
        self._under_way: tuple[Sequence[int], Sequence[tuple[int, int]]] | None = None
        if start < end:
            self._replace((), ((start, end - start),))

    @property
    def free_bytes(self) -> int:
        """Bytes of the pages that are free."""
        self._finish()
        return self._free_bytes

    @property
    def largest(self) -> int:
        """Bytes of the largest free piece."""
        self._finish()
        return self._by_length[-1][0] if self._by_length else 0

    def take(self, nbytes: int) -> int | None:
        """Take room in the smallest piece that is large enough; return its offset, or None."""
        self._finish()
        space = _space_of(nbytes)
        # Of pieces of one length, the first.
        place = bisect_left(self._by_length, (space, 0))
        if place == len(self._by_length):
            return None
        offset = self._by_length[place][1]
        self._cut(offset, offset, space)
        return offset

    def take_most(self, nbytes: int) -> tuple[int, int] | None:
        """Take room for as many of `nbytes` as the largest piece holds; return offset and bytes, or
        None where nothing is free.
        """
        # Where nothing is free, take() returns None for any number of bytes.
        nbytes = min(nbytes, self.largest) if self.largest else nbytes
        offset = self.take(nbytes)
        return None if offset is None else (offset, nbytes)

    def give(self, offset: int, nbytes: int) -> None:
        """Make the room of `nbytes` at `offset` free again.

        Raises:
            ValueError: it is not within this space, or some of it is free already.
        """
        self._finish()
        end = self._end_of(offset, nbytes)
        place = bisect_right(self._offsets, offset)
        before = self._offsets[place - 1] if place else None
        after = self._offsets[place] if place < len(self._offsets) else None
        begins, ends, joined = offset, end, []
        if before is not None and before + self._lengths[before] >= offset:
            if before + self._lengths[before] > offset:
                raise ValueError(f"bytes {offset} to {end} are not all in use: given back twice?")
            begins = before
            joined.append(before)
        if after is not None and after <= end:
            if after < end:
                raise ValueError(f"bytes {offset} to {end} are not all in use: given back twice?")
            ends = after + self._lengths[after]
            joined.append(after)
        self._replace(joined, ((begins, ends - begins),))

    def reserve(self, offset: int, nbytes: int) -> None:
        """Take the room of `nbytes` at `offset`, which the caller's records say is in use.

        Raises:
            ValueError: it is not within this space, or some of it is in use.
        """
        self._finish()
        end = self._end_of(offset, nbytes)
        place = bisect_right(self._offsets, offset)
        piece = self._offsets[place - 1] if place else None
        if piece is None or piece + self._lengths[piece] < end:
            raise ValueError(f"bytes {offset} to {end} are not all free: reserved twice?")
        self._cut(piece, offset, end - offset)

    def trim(self, most: int | None = None) -> int:
        """End the space where its last piece in use ends; return the bytes cut off.

        It keeps at least one page, and loses at most `most` bytes, a multiple of whole pages.
        """
        self._finish()
        last = self._offsets[-1] if self._offsets else self.end
        end = max(last, self.start + PAGE, 0 if most is None else self.end - most)
        # The second: something in use lies behind the last free piece.
        if end >= self.end or last + self._lengths[last] < self.end:
            return 0
        self._replace((last,), ((last, end - last),) if last < end else ())
        cut_off, self.end = self.end - end, end
        return cut_off

    def extend(self, end: int) -> None:
        """Move the end of the space to `end`; the new bytes are free.

        Raises:
            ValueError: `end` is not later, or not at a page.
        """
        if end % PAGE or end <= self.end:
            raise ValueError(
                f"space that ends at {self.end} is extended to a later page; got {end}"
            )
        start, self.end = self.end, end
        self.give(start, end - start)

    def _end_of(self, offset: int, nbytes: int) -> int:
        end = offset + _space_of(nbytes)
        if offset % PAGE or not self.start <= offset < end <= self.end:
            raise ValueError(
                f"bytes {offset} to {end} are not pages between {self.start} and {self.end}"
            )
        return end

    def _cut(self, piece: int, offset: int, space: int) -> None:
        """Take `space` at `offset` out of the piece."""
        end = piece + self._lengths[piece]
        beside = ((piece, offset - piece), (offset + space, end - offset - space))
        self._replace((piece,), [(start, length) for start, length in beside if length])

    def _replace(self, gone: Sequence[int], new: Sequence[tuple[int, int]]) -> None:
        """Replace the free pieces at `gone` by these, of offset and length."""
        # From here on the change is certain: where Ctrl-C interrupts it, the next call goes on.
        self._under_way = gone, new
        for offset in gone:
            self._remove(offset)
        for offset, length in new:
            self._add(offset, length)
        self._under_way = None

    def _finish(self) -> None:
        """Complete a change that Ctrl-C interrupted, of which any part may be done."""
        if self._under_way is None:
            return
        gone, new = self._under_way
        # The lengths first, and all else from them: it is not known how far that was changed.
        for offset in gone:
            self._lengths.pop(offset, None)
        self._lengths.update(new)
        self._offsets = sorted(self._lengths)
        self._by_length = sorted((length, offset) for offset, length in self._lengths.items())
        self._free_bytes = sum(self._lengths.values())
        self._under_way = None

    def _add(self, offset: int, length: int) -> None:
        self._lengths[offset] = length
        insort(self._offsets, offset)
        insort(self._by_length, (length, offset))
        self._free_bytes += length

    def _remove(self, offset: int) -> None:
        length = self._lengths.pop(offset)
        del self._offsets[bisect_left(self._offsets, offset)]
        del self._by_length[bisect_left(self._by_length, (length, offset))]
        self._free_bytes -= length


def _space_of(nbytes: int) -> int:
    if nbytes < 1:
        raise ValueError(f"space is taken and given for at least one byte; got {nbytes}")
    return whole_pages(nbytes)
