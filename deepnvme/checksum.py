"""crc32c, the checksum of everything that is stored, over memory as it lies; `copying` sums in the pass that copies.

Runs without the GIL on large memory, with the CPU's own instructions where it has them.
"""

from __future__ import annotations

from deepnvme import _native
from deepnvme.buffers import Memory

__all__ = ["CHECKSUM_BYTES", "checksums_of", "crc32c"]

CHECKSUM_BYTES = 1 << 20
"""How many bytes of a tensor one checksum covers; the last one covers fewer."""


def crc32c(data: object, crc: int = 0) -> int:
    """Return the crc32c of `data`, anything with the buffer protocol, going on from that of what came before."""
    return _native.crc32c(data, crc)


def checksums_of(memory: Memory, nbytes: int = CHECKSUM_BYTES) -> tuple[int, ...]:
    """Return the checksums of a tensor's bytes, one for each `nbytes` of them."""
    return tuple(_native.crc32c_pieces(memory.address, memory.nbytes, nbytes))
