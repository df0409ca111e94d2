"""crc32c, the checksum of everything that is stored, over memory as it lies. `copying` computes it
in the pass that copies.

Runs without the GIL on large memory, with the CPU's own instructions where it has them.
"""

from __future__ import annotations

import ctypes

from deepnvme import _native
from deepnvme.memory.buffers import Memory

__all__ = ["CHECKSUM_BYTES", "BlockChecksums", "checksums_of", "crc32c"]

CHECKSUM_BYTES = 1 << 20
"""How many bytes of a tensor one checksum covers; the last one covers fewer."""


def crc32c(data: object, crc: int = 0) -> int:
    """Return the crc32c of `data`, a buffer, that follows bytes with the checksum `crc`."""
    return _native.crc32c(data, crc)


def checksums_of(memory: Memory, nbytes: int = CHECKSUM_BYTES) -> tuple[int, ...]:
    """Return the checksums of a tensor's bytes, one for each `nbytes` of them."""
    return tuple(_native.crc32c_pieces(memory.address, memory.nbytes, nbytes))


class BlockChecksums:
    """The checksums of a file's blocks of `block_bytes`, computed while the file is appended to."""

    def __init__(self, block_bytes: int = CHECKSUM_BYTES) -> None:
        self._block_bytes = block_bytes
        self._ended: list[int] = []
        self._crc = 0  # of the block that is not full yet
        self._in_block = 0

    def append(self, memory: Memory) -> None:
        """Go on with these bytes."""
        done = 0
        if self._in_block:
            done = min(memory.nbytes, self._block_bytes - self._in_block)
            self._go_on(memory.part(0, done))
        whole = (memory.nbytes - done) // self._block_bytes * self._block_bytes
        if whole:
            self._ended.extend(checksums_of(memory.part(done, whole), self._block_bytes))
        if done + whole < memory.nbytes:
            self._go_on(memory.part(done + whole, memory.nbytes - done - whole))

    def _go_on(self, memory: Memory) -> None:
        """Add bytes that do not go beyond the block."""
        # No copy, and it keeps nothing alive: `memory` does, for the length of this call.
        view = (ctypes.c_char * memory.nbytes).from_address(memory.address)
        self._crc = crc32c(view, self._crc)
        self._in_block += memory.nbytes
        if self._in_block == self._block_bytes:
            self._ended.append(self._crc)
            self._crc = self._in_block = 0

    def checksums(self) -> tuple[int, ...]:
        """Return the checksums of what was appended so far; the last block may be shorter."""
        return (*self._ended, *([self._crc] if self._in_block else []))
