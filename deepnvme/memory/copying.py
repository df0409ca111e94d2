"""Small pieces of memory to and from their places in staging memory: all of a run in one call,
without the GIL.

Summed on the way, in the same pass, where that is wanted. Called by stores and safetensors files.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepnvme import _native
from deepnvme.memory.buffers import Memory

__all__ = ["gather", "scatter"]


def gather(
    staging: Memory,
    places: Sequence[int],
    sizes: Sequence[int],
    pieces: Sequence[Memory],
    *,
    summing: bool,
) -> Sequence[int]:
    """Copy each piece to its place; where `summing`, return the crc32c of each, else nothing.

    Raises:
        ValueError: a piece has not the size of its place, or a place is not within the staging
            memory.
    """
    return _copied(_places(staging, places, sizes), _addresses(pieces, sizes), sizes, summing)


def scatter(
    staging: Memory,
    places: Sequence[int],
    sizes: Sequence[int],
    pieces: Sequence[Memory],
    *,
    summing: bool,
) -> Sequence[int]:
    """Copy to each piece the bytes at its place; returns and raises as `gather` does."""
    return _copied(_addresses(pieces, sizes), _places(staging, places, sizes), sizes, summing)


def _places(staging: Memory, places: Sequence[int], sizes: Sequence[int]) -> list[int]:
    # Native code checks no address: a wrong place would overwrite other memory.
    for place, nbytes in zip(places, sizes, strict=True):
        if not 0 <= place <= place + nbytes <= staging.nbytes:
            raise ValueError(
                f"bytes {place} to {place + nbytes} are not within {staging.nbytes} bytes of memory"
            )
    return [staging.address + place for place in places]


def _addresses(pieces: Sequence[Memory], sizes: Sequence[int]) -> list[int]:
    for piece, nbytes in zip(pieces, sizes, strict=True):
        if piece.nbytes != nbytes:
            raise ValueError(
                f"a piece of {piece.nbytes} bytes of memory cannot be copied to or from {nbytes} "
                "bytes"
            )
    return [piece.address for piece in pieces]


def _copied(
    destinations: Sequence[int], sources: Sequence[int], sizes: Sequence[int], summing: bool
) -> Sequence[int]:
    if summing:
        return _native.crc32c_copy_each(destinations, sources, sizes)
    _native.copy_each(destinations, sources, sizes)
    return ()
