"""`DriveRoom`: room for saved memory in a swap file that grows within the budget of its drives."""

from __future__ import annotations

from dataclasses import replace

from deepnvme.sizes import PAGE
from infinity_engine.errors import CapacityError
from infinity_engine.storage import SwapFile
from infinity_engine.units import align_up

__all__ = ["DriveRoom"]

_GROWTH = 64 << 20  # bytes that the drives are asked for at once


class DriveRoom:
    """Grows `swap`."""

    def __init__(self, swap: SwapFile) -> None:
        self._swap = swap
        swap.keep_room_to_grow()

    def make(self, nbytes: int, *, what: str) -> None:
        """Grow the swap file until `nbytes` are free, for `what`.

        Raises:
            CapacityError: the budget or the drive has less.
        """
        missing = align_up(nbytes, PAGE) - self._swap.free_bytes
        if missing > 0:
            try:
                self._swap.grow_by(max(missing, _GROWTH))
            except CapacityError:
                self._grow_at_least(missing, what)

    def _grow_at_least(self, nbytes: int, what: str) -> None:
        try:
            self._swap.grow_by(nbytes)
        except CapacityError as error:
            raise replace(
                error,
                change=f"{error.change}, or raise activations.resident_bytes: {what} has to leave "
                "memory for a drive",
            ) from None
