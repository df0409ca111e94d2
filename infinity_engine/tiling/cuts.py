"""How a length is cut into tiles: pure arithmetic, which decides tiles and their memory.

Knows neither modules nor tensors. Called by whatever computes tile by tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from infinity_engine.errors import ConfigError

__all__ = ["TileCut", "cut_evenly", "cut_into"]


@dataclass(frozen=True, slots=True)
class TileCut:
    """`length` elements in tiles of `size` each; the last tile may be shorter.

    No elements are one tile without any, so that layers of such a size have a tile.
    """

    length: int
    size: int

    def __post_init__(self) -> None:
        if self.length < 0:
            raise ConfigError(field="TileCut.length", value=self.length, expected="0 or more")
        if self.size < 1:
            raise ConfigError(field="TileCut.size", value=self.size, expected="1 or more")

    def __len__(self) -> int:
        return max(1, (self.length + self.size - 1) // self.size)

    def __iter__(self) -> Iterator[slice]:
        """Yield the tiles in order; together they have each element once."""
        for start in range(0, max(self.length, 1), self.size):
            yield slice(start, min(start + self.size, self.length))

    @property
    def lengths(self) -> list[int]:
        """The length of each tile."""
        return [tile.stop - tile.start for tile in self]


def cut_evenly(length: int, at_most: int, *, multiple: int = 1) -> TileCut:
    """Cut `length` into as few tiles of at most `at_most` as will do, all of about one size.

    Sizes are multiples of `multiple` where that needs no more tiles.

    Raises:
        ConfigError: `at_most` is below 1.
    """
    if at_most < 1:
        raise ConfigError(field="at_most", value=at_most, expected="1 or more")
    tiles = max(1, -(-length // at_most))
    size = max(1, -(-length // tiles))
    rounded = -(-size // multiple) * multiple
    return TileCut(length, rounded if rounded <= at_most else size)


def cut_into(length: int, tiles: int) -> TileCut:
    """Cut `length` into at most `tiles` tiles of one size.

    Raises:
        ConfigError: there would be more tiles than elements, or none.
    """
    if not 1 <= tiles <= max(length, 1):
        expected = f"1 to {max(length, 1)}, as there are {length} elements"
        raise ConfigError(field="tiles", value=tiles, expected=expected)
    return TileCut(length, max(1, -(-length // tiles)))
