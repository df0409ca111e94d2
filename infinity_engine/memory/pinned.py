"""`PinnedPool`: the host memory of one reservation, cut into leases. One buffer serves NVMe and GPU without a copy.

Owns the places and the leases; `deepnvme.Pool` owns the memory, which is mapped, touched and registered once and never
grows. Close it before the CUDA context goes.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from deepnvme import Cuda, IOQueue, Pool, PoolExhaustedError
from infinity_engine.errors import ConfigError
from infinity_engine.memory.lease import Backing, Lease, Lessor, NoBytes
from infinity_engine.memory.ledger import Reservation
from infinity_engine.plan import Extent, Tier
from infinity_engine.units import align_down, align_up

if TYPE_CHECKING:
    import torch

    from infinity_engine.memory.layout import Layout

__all__ = ["Freed", "PinnedPool", "PoolStats"]

_PAGE = 4096


class Freed(Enum):
    """What becomes of the bytes of a buffer that goes back."""

    KEPT = "kept"  # nothing: they stay until somebody writes others
    NAN = "nan"  # they are NaN in every float type, so that whoever uses them after that is seen


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolStats:
    """The state of a pool: what is given out counts in whole pages where it says so, otherwise in bytes asked for."""

    capacity: int
    held: int
    held_pages_bytes: int
    peak_held: int
    peak_pages_bytes: int
    free: int  # of the region that is not planned
    largest_free: int  # of the same
    open_leases: int
    closing_leases: int
    waits: int

    @property
    def fragmentation(self) -> float:
        """How much of the free bytes is not in the largest piece: 0 where they are one piece."""
        return 1 - self.largest_free / self.free if self.free else 0.0


class PinnedPool(Lessor):
    """Takes the whole of `reservation`, in pages, at once. The places that `layout` names are for planned buffers.

    Without CUDA, or without the right to lock memory, it works unpinned; `pinned` says which.
    """

    def __init__(
        self,
        reservation: Reservation,
        *,
        layout: Layout | None = None,
        cuda: Cuda = Cuda.IN_USE,
        numa_node: int | None = None,
        freed: Freed = Freed.KEPT,
    ) -> None:
        super().__init__(Tier.HOST, reservation)
        capacity = align_down(reservation.nbytes, _PAGE)
        planned = align_up(layout.nbytes, _PAGE) if layout is not None else 0
        if capacity < max(planned, _PAGE):
            raise ConfigError(
                field=f"bytes reserved for {reservation.holder}",
                value=reservation.nbytes,
                expected=f"at least {max(planned, _PAGE)} B, which the plan's buffers take",
            )
        self.capacity = capacity
        self._layout = layout
        self._freed = freed
        reservation.hold(capacity)
        try:
            self._planned = Pool(planned, cuda=cuda, numa_node=numa_node) if planned else None
            self._others = Pool(capacity - planned, cuda=cuda, numa_node=numa_node) if capacity > planned else None
        except BaseException:
            reservation.release(capacity)
            raise
        self._queues: list[IOQueue] = []
        self._views: dict[int, tuple[weakref.ref[memoryview], int, int]] = {}
        self._held = self._held_pages = self._peak_held = self._peak_pages = 0

    @property
    def pinned(self) -> bool:
        """Whether the memory is page-locked for CUDA."""
        return all(pool.pinned for pool in self._pools())

    def serve(self, queue: IOQueue) -> None:
        """Register the memory with the queue's rings, for I/O without copies and page lookups."""
        for pool in self._pools():
            queue.use_pool(pool)
        self._queues.append(queue)

    def lease(self, nbytes: int, *, holder: str) -> Lease:
        """Return a buffer of `nbytes` that no plan knows of, page-aligned.

        Raises:
            CapacityError: there is no such piece, and none will become free.
        """
        if nbytes < 0:
            raise ConfigError(field=f"bytes leased for {holder}", value=nbytes, expected="0 or more bytes")
        return self._lease(nbytes, holder, lambda: self._take(nbytes))

    def lease_planned(self, slot: str, *, holder: str | None = None) -> Lease:
        """Return the buffer that the layout calls `slot`, waiting for the events of whoever had its place.

        Raises:
            CapacityError: somebody still holds some of its place: what runs is not what was planned.
            ConfigError: the layout has no such slot.
        """
        places = {} if self._layout is None else self._layout.places
        if slot not in places:
            raise ConfigError.unknown_name(field="slot of the layout", name=slot, known=places)
        return self._lease(places[slot].nbytes, holder or slot, lambda: self._take_at(places[slot]))

    def stats(self) -> PoolStats:
        """Return how much is held, and in which pieces the rest is."""
        with self._lock:
            return PoolStats(
                capacity=self.capacity,
                held=self._held,
                held_pages_bytes=self._held_pages,
                peak_held=self._peak_held,
                peak_pages_bytes=self._peak_pages,
                free=self._free_bytes(),
                largest_free=self._others.largest_free if self._others else 0,
                open_leases=len(self._open),
                closing_leases=len(self._closing),
                waits=self._waits,
            )

    def _pools(self) -> list[Pool]:
        return [pool for pool in (self._planned, self._others) if pool is not None]

    def _take(self, nbytes: int) -> Backing | None:
        if not nbytes:
            return NoBytes()
        try:
            return self._piece(self._others.buffer(nbytes), nbytes) if self._others else None
        except PoolExhaustedError:
            return None

    def _take_at(self, place: Extent) -> Backing | None:
        if not place.nbytes:
            return NoBytes()
        assert self._planned is not None, "a layout with places has bytes"
        try:
            return self._piece(self._planned.buffer_at(place.offset, place.nbytes), place.nbytes)
        except PoolExhaustedError:
            return None

    def _piece(self, view: memoryview, nbytes: int) -> Backing:
        pages = align_up(nbytes, _PAGE)
        self._held += nbytes
        self._held_pages += pages
        self._peak_held = max(self._peak_held, self._held)
        self._peak_pages = max(self._peak_pages, self._held_pages)
        # The memory is free when the last torch view of it goes, whenever that is.
        reference = weakref.ref(view, self._gone)
        self._views[id(reference)] = (reference, nbytes, pages)
        return _Piece(view)

    def _gone(self, reference: weakref.ref[memoryview]) -> None:
        with self._lock:
            _, nbytes, pages = self._views.pop(id(reference))
            self._held -= nbytes
            self._held_pages -= pages

    def _drop(self, backing: Backing) -> None:
        if isinstance(backing, _Piece):
            if self._freed is Freed.NAN:
                backing.fill(0xFF)
            backing.let_go()

    def _free_bytes(self) -> int:
        return self._others.free_bytes if self._others else 0

    def _shut_down(self) -> None:
        for queue in self._queues:
            if not queue.closed:
                for pool in self._pools():
                    queue.forget_pool(pool)
        self._queues.clear()
        self._planned = self._others = None
        self.reservation.release(self.capacity)


class _Piece:
    """Bytes of a pool, for as long as somebody has `view` or a tensor made of it."""

    __slots__ = ("_view", "nbytes")

    def __init__(self, view: memoryview) -> None:
        self._view: memoryview | None = view
        self.nbytes = view.nbytes

    @property
    def view(self) -> memoryview:
        if self._view is None:
            raise RuntimeError("this memory went back to its pool")
        return self._view

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> torch.Tensor:
        import torch

        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self.view, dtype=dtype, count=count, offset=offset).reshape(shape)

    def fill(self, byte: int) -> None:
        """Set every byte; whoever has a view sees it."""
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(self.view)), byte, self.nbytes)

    def let_go(self) -> None:
        self._view = None
