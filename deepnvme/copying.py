"""Small pieces of memory to and from their places in staging memory: all of a run in one call, without the GIL.

Summed on the way, in the same pass, where that is wanted. Called by tensor_io and safetensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepnvme import _native
from deepnvme.buffers import Memory

__all__ = ["gather", "scatter"]


def gather(staging: Memory, places: Sequence[int], pieces: Sequence[Memory], *, summing: bool) -> Sequence[int]:
    """Copy each piece to its place in the staging memory; where `summing`, return the crc32c of each, else nothing."""
    sizes = [piece.nbytes for piece in pieces]
    addresses = [piece.address for piece in pieces]
    return _copied(_addresses(staging, places, sizes), addresses, sizes, summing)


def scatter(staging: Memory, places: Sequence[int], pieces: Sequence[Memory], *, summing: bool) -> Sequence[int]:
    """Copy to each piece what is at its place in the staging memory; returns what `gather` does."""
    sizes = [piece.nbytes for piece in pieces]
    addresses = [piece.address for piece in pieces]
    return _copied(addresses, _addresses(staging, places, sizes), sizes, summing)


def _addresses(staging: Memory, places: Sequence[int], sizes: Sequence[int]) -> list[int]:
    for place, nbytes in zip(places, sizes, strict=True):
        if not 0 <= place <= place + nbytes <= staging.nbytes:
            raise ValueError(f"bytes {place} to {place + nbytes} are not within {staging.nbytes} bytes of memory")
    return [staging.address + place for place in places]


def _copied(destinations: Sequence[int], sources: Sequence[int], sizes: Sequence[int], summing: bool) -> Sequence[int]:
    if summing:
        return _native.crc32c_copy_each(destinations, sources, sizes)
    _native.copy_each(destinations, sources, sizes)
    return ()
