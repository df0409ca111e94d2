"""`BlockSums`: the crc32c of each block that was written to one place, to compare with reads.

Arithmetic over memory; knows no files. Blocks are counted from the place's first byte, so reads and
writes of parts are cut where a block begins.
"""

from __future__ import annotations

import copy
from array import array
from typing import NamedTuple

from deepnvme.memory.buffers import Memory
from deepnvme.memory.checksum import checksums_of

__all__ = ["BlockDamage", "BlockSums"]


class BlockDamage(NamedTuple):
    """A block that differs from what was written: `nbytes` from `start` on of the place."""

    start: int
    nbytes: int
    expected: int
    found: int


class BlockSums:
    """The sums of `nbytes`, for each `block_bytes`; four bytes of host memory each."""

    def __init__(self, nbytes: int, block_bytes: int) -> None:
        self._nbytes = nbytes
        self.block_bytes = block_bytes  # that a sum is of; the last one may be of fewer
        # An array of 4-byte numbers: a list of them would take several times as much.
        self._sums = array("I", bytes(4 * -(-nbytes // block_bytes)))

    def copy(self) -> BlockSums:
        """Return the sums as they are now."""
        return copy.deepcopy(self)

    def check_cut(self, start: int, nbytes: int) -> None:
        """Raise ValueError unless these are whole blocks."""
        end = start + nbytes
        # The last block may be shorter, so the place's own end is a cut as well.
        if start % self.block_bytes or (end % self.block_bytes and end != self._nbytes):
            raise ValueError(
                f"bytes {start} to {end} of {self._nbytes} cannot be checked alone: checksums are "
                f"of whole blocks of {self.block_bytes} B. Cut where a block begins"
            )

    def of(self, memory: Memory) -> array[int]:
        """Return the sums of bytes that begin where a block does."""
        return array("I", checksums_of(memory, self.block_bytes))

    def put(self, start: int, sums: array[int]) -> None:
        """Note the sums of what was written from `start` on."""
        first = start // self.block_bytes
        self._sums[first : first + len(sums)] = sums

    def damage(self, start: int, nbytes: int, sums: array[int]) -> BlockDamage | None:
        """Return the first block that differs from what was written.

        `sums` are of the `nbytes` that were read from `start` on.
        """
        first = start // self.block_bytes
        written = self._sums[first : first + len(sums)]
        # Arrays are compared at once; only damage is looked for one by one.
        if sums == written:
            return None
        at = next(
            place
            for place, pair in enumerate(zip(sums, written, strict=True))
            if pair[0] != pair[1]
        )
        begins = at * self.block_bytes
        return BlockDamage(
            start + begins, min(self.block_bytes, nbytes - begins), written[at], sums[at]
        )
