"""crc32c, the checksum of everything that is stored: over memory as it lies, or in the pass that copies it.

Runs without the GIL on large memory, with the CPU's own instructions where it has them.
"""

from __future__ import annotations

from deepnvme import _native
from deepnvme.buffers import Memory

__all__ = ["CHECKSUM_BYTES", "checksums_of", "copy_checksummed", "crc32c"]

CHECKSUM_BYTES = 1 << 20
"""How many bytes of a tensor one checksum covers; the last one covers fewer."""


def crc32c(data: object, crc: int = 0) -> int:
    """Return the crc32c of `data`, anything with the buffer protocol, going on from that of what came before."""
    return _native.crc32c(data, crc)


def checksums_of(memory: Memory) -> tuple[int, ...]:
    """Return the checksums of a tensor's bytes."""
    return tuple(_native.crc32c_pieces(memory.address, memory.nbytes, CHECKSUM_BYTES))


def copy_checksummed(destination: Memory, source: Memory) -> tuple[int, ...]:
    """Copy a tensor's bytes to memory of the same size that does not overlap; return their checksums."""
    if destination.nbytes != source.nbytes:
        raise ValueError(f"{source.nbytes} B cannot be copied to {destination.nbytes} B of memory")
    return tuple(_native.crc32c_copy_pieces(destination.address, source.address, source.nbytes, CHECKSUM_BYTES))
