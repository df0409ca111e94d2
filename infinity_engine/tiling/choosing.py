"""Which weights are cut, and into tiles of which size: pure functions of bytes (decision 0056)."""

from __future__ import annotations

__all__ = ["largest_tile", "needs_tiles"]

_PART_FOR_LAYERS = 2  # of the room; the rest is for buffers that updates and copies pass
_TILES_AT_ONCE = 4  # a tile, its gradient, the next tile, and the gradient of the one before


def needs_tiles(nbytes: int, room: int, *, trains: bool) -> bool:
    """Tell whether a layer has too large a weight: its working memory is above half of `room`.

    `trains`: the weight has a gradient, which is on the device at the same time.
    """
    return nbytes * (2 if trains else 1) > room // _PART_FOR_LAYERS


def largest_tile(room: int) -> int:
    """Return the bytes that a tile may have."""
    return room // _PART_FOR_LAYERS // _TILES_AT_ONCE
