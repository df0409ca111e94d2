"""`SpareBytes`: how many bytes of each directory of a swap file are for spare places alone.

Numbers only. Where on the drives a spare place lies does not matter: as many bytes as no spare
place uses stay free, and no other place may use them. Its owner serialises calls.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["SpareBytes"]


class SpareBytes:
    """Those of so many `directories`; none at first."""

    def __init__(self, directories: int) -> None:
        self.sizes = (0,) * directories
        """The bytes of each directory."""
        self._in_use = 0

    @property
    def nbytes(self) -> int:
        """The bytes of all directories."""
        return sum(self.sizes)

    @property
    def unused(self) -> int:
        """How many of them no spare place uses."""
        return self.nbytes - self._in_use

    def add(self, sizes: Sequence[int]) -> None:
        """Have so many bytes more of each directory."""
        self.sizes = tuple(map(sum, zip(self.sizes, sizes, strict=True)))

    def remove(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Have up to so many unused bytes less of each directory; return how many."""
        unused, removed = self.unused, []
        for has, asked in zip(self.sizes, sizes, strict=True):
            removed.append(min(has, asked, unused))
            unused -= removed[-1]
        self.add([-nbytes for nbytes in removed])
        return tuple(removed)

    def take(self, nbytes: int) -> bool:
        """Use so many for a spare place; tell whether there are so many."""
        fits = nbytes <= self.unused
        self._in_use += nbytes if fits else 0
        return fits

    def give(self, nbytes: int) -> None:
        """Use so many no more."""
        self._in_use -= nbytes
