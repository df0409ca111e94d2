"""`PinnedPool`: one reservation's host memory as leases; one buffer serves NVMe and GPU, uncopied.

Owns the places and the leases. `deepnvme.Pool` owns the memory, which is mapped, touched and
registered once and never grows. Close the pool before the CUDA context is destroyed.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from deepnvme import IOQueue, Pool, PoolExhaustedError
from deepnvme.sizes import PAGE, whole_pages
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.memory.layout import Layout
from infinity_engine.memory.lease import Backing, Lease, Lessor, NoBytes
from infinity_engine.memory.ledger import Reservation
from infinity_engine.plan import Extent, Tier
from infinity_engine.units import align_down

if TYPE_CHECKING:
    import torch

__all__ = ["Freed", "PinnedPool", "PoolStats"]


class Freed(Enum):
    """What happens to the bytes of a buffer that goes back."""

    KEPT = "kept"  # nothing: they stay until the next holder overwrites them
    NAN = "nan"  # they become NaN in every float type, so that a use after the end shows


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolStats:
    """The state of a pool, in bytes asked for; the fields named `pages_bytes` count whole pages."""

    capacity: int
    held: int
    held_pages_bytes: int
    peak_held: int
    peak_pages_bytes: int
    free: int  # of the part without planned places
    largest_free: int  # of the same part
    open_leases: int
    closing_leases: int
    waits: int

    @property
    def fragmentation(self) -> float:
        """How much of the free bytes is not in the largest piece: 0 where they are one piece."""
        return 1 - self.largest_free / self.free if self.free else 0.0


class PinnedPool(Lessor):
    """Takes all of `reservation`, in pages, at once; planned buffers have the places of `layout`.

    Without CUDA, or without the right to lock memory, it works unpinned; `pinned` says which.
    """

    def __init__(
        self,
        reservation: Reservation,
        *,
        layout: Layout | None = None,
        freed: Freed = Freed.KEPT,
    ) -> None:
        super().__init__(Tier.HOST, reservation)
        layout = layout or Layout({}, 0)
        # The rest of a reservation that is no multiple of a page stays unused.
        capacity = align_down(reservation.nbytes, PAGE)
        planned = whole_pages(layout.nbytes)
        if capacity < max(planned, PAGE):
            for_what = "which the planned buffers take" if planned else "one page"
            raise ConfigError(
                field=f"bytes reserved for {reservation.holder}",
                value=reservation.nbytes,
                expected=f"at least {max(planned, PAGE)} B, {for_what}",
            )
        _check_places(layout)
        self.capacity = capacity
        self._places = layout.places
        self._freed = freed
        self._queues: list[IOQueue] = []
        # In bytes asked for, and in whole pages: their difference is what rounding costs.
        self._held = self._held_pages = self._peak_held = self._peak_pages = 0
        # bytes of buffers that are no longer held, not subtracted yet
        self._gone: deque[int] = deque()
        self._planned: _Region | None = None
        self._others: _Region | None = None
        try:
            # Each part is one run of addresses, so that a buffer of any size has a place in it.
            if planned:
                self._planned = _Region(planned, reservation)
            if capacity > planned:
                self._others = _Region(capacity - planned, reservation)
        # Dropping a region releases what it holds of the reservation: see _Region.
        except BaseException:
            self._planned = None
            raise

    @property
    def pinned(self) -> bool:
        """Whether the memory is page-locked for CUDA; a closed pool has none that is."""
        pools = self._pools()
        return bool(pools) and all(pool.pinned for pool in pools)

    def register_with(self, queue: IOQueue) -> None:
        """Register the memory with the queue's rings, for I/O without copies and page lookups."""
        if self._ending:
            raise RuntimeError(
                f"{self.reservation.holder} is closed: it has no memory to register. Register it "
                "with queues before close()"
            )
        # First, so that closing also unregisters what was registered only in part.
        self._queues.append(queue)
        for pool in self._pools():
            queue.use_pool(pool)

    def lease(self, nbytes: int, *, holder: str) -> Lease:
        """Return a page-aligned buffer of `nbytes` that has no place in the layout.

        Raises:
            CapacityError: there is no such piece, and none will become free.
        """
        return self._lease(
            nbytes,
            holder,
            allocate=lambda: self._allocate(nbytes),
            in_the_way=lambda backing: _place_of(backing) is None,
            refusal=lambda: self._refusal(nbytes, holder),
        )

    def lease_planned(self, slot: str, *, holder: str | None = None) -> Lease:
        """Return the buffer of `slot`, waiting for the events of the lease that had its place.

        Raises:
            CapacityError: another lease still holds some of its place: the step differs from its
                plan.
            ConfigError: the layout has no such slot.
        """
        places = self._places
        if slot not in places:
            raise ConfigError.unknown_name(field="slot of the layout", name=slot, known=places)
        place = places[slot]
        # Slots that live at different times may share this place.
        return self._lease(
            place.nbytes,
            holder or slot,
            allocate=lambda: self._allocate_at(place),
            in_the_way=lambda backing: _shared_bytes(place, backing) > 0,
            refusal=lambda: self._refusal_of_slot(slot, place),
        )

    def stats(self) -> PoolStats:
        """Return how much is held, and in which pieces the rest is."""
        with self._lock:
            self._catch_up()
            # Ended views are counted first, so that the figures agree with one another.
            self._count_gone()
            return PoolStats(
                capacity=self.capacity,
                held=self._held,
                held_pages_bytes=self._held_pages,
                peak_held=self._peak_held,
                peak_pages_bytes=self._peak_pages,
                free=self._free_bytes(),
                largest_free=self._others.pool.largest_free if self._others else 0,
                open_leases=len(self._open),
                closing_leases=len(self._closing),
                waits=self._waits,
            )

    def _pools(self) -> list[Pool]:
        return [region.pool for region in (self._planned, self._others) if region is not None]

    def _allocate(self, nbytes: int) -> Backing | None:
        if not nbytes:
            return NoBytes()
        if self._others is None:
            # All of the pool is planned: the request is refused.
            return None
        try:
            return self._piece(self._others, self._others.pool.buffer(nbytes), None)
        # None: `Lessor._lease` waits for closing leases, or refuses.
        except PoolExhaustedError:
            return None

    def _allocate_at(self, place: Extent) -> Backing | None:
        if not place.nbytes:
            return NoBytes()
        assert self._planned is not None, "a layout with places has bytes"
        try:
            return self._piece(
                self._planned, self._planned.pool.buffer_at(place.offset, place.nbytes), place
            )
        except PoolExhaustedError:
            return None

    def _piece(self, region: _Region, view: memoryview, place: Extent | None) -> Backing:
        # Before the new bytes, or the peak would count buffers that are gone already.
        self._count_gone()
        self._held += view.nbytes
        self._held_pages += whole_pages(view.nbytes)
        self._peak_held = max(self._peak_held, self._held)
        self._peak_pages = max(self._peak_pages, self._held_pages)
        return _PoolBytes(region, view, place)

    # Called with the pool's lock; what it counts was appended without it.
    def _count_gone(self) -> None:
        while self._gone:
            nbytes = self._gone.popleft()
            self._held -= nbytes
            self._held_pages -= whole_pages(nbytes)

    def _memory(self, backing: Backing) -> object | None:
        # what parts of the view keep as well
        return backing.view.obj if isinstance(backing, _PoolBytes) else None

    def _free(self, backing: Backing) -> None:
        if isinstance(backing, _PoolBytes):
            # Before the release: after it the bytes may be another lease's.
            if self._freed is Freed.NAN:
                backing.fill(0xFF)
            backing.release()

    def _uncount(self, nbytes: int) -> None:
        # A deque, as the collector may call this at any place: [Note: what the collector may do].
        self._gone.append(nbytes)

    def _free_bytes(self) -> int:
        return self._others.pool.free_bytes if self._others else 0

    def _largest_free(self) -> int:
        return self._others.pool.largest_free if self._others else 0

    def _refusal_of_slot(self, slot: str, place: Extent) -> CapacityError:
        there = [(name, _shared_bytes(place, given.backing)) for name, given in self._in_use()]
        holders = tuple((name, nbytes) for name, nbytes in there if nbytes)
        return CapacityError(
            tier=self.tier.name,
            asked=place.nbytes,
            free=place.nbytes - sum(nbytes for _, nbytes in holders),
            limit=place.nbytes,
            holders=holders,
            change=(
                f"the step differs from its plan: slot {slot!r} of the layout, bytes "
                f"{place.offset} to {place.end} of {self.reservation.holder}, is still in use. "
                f"Close the leases there before {slot!r} begins, or plan with their real lifetimes"
            ),
        )

    def _shut_down(self) -> None:
        # One queue after another: an interrupted close goes on with those that are left.
        while self._queues:
            queue = self._queues[-1]
            # A closed queue has no rings that know the memory.
            if not queue.closed:
                for pool in self._pools():
                    queue.forget_pool(pool)
            self._queues.pop()
        # Views may keep the regions: then their memory stays, and stays counted.
        self._planned = self._others = None


class _Region:
    """A run of memory, held until its pool is closed and none of its pieces is in use."""

    __slots__ = ("__weakref__", "pool")

    def __init__(self, nbytes: int, reservation: Reservation) -> None:
        # Counted first, so that a refusal takes no memory.
        reservation.hold(nbytes)
        try:
            self.pool = Pool(nbytes)
        except BaseException:
            reservation.release(nbytes)
            raise
        # Not at the pool's close: views of leases may keep the memory longer than the pool exists.
        # release_soon: the finalizer may run while this thread has the ledger's lock.
        weakref.finalize(self, reservation.release_soon, nbytes)


class _PoolBytes:
    """Bytes of a pool, for as long as `view` or a tensor made of it exists."""

    __slots__ = ("_region", "_view", "nbytes", "place")

    def __init__(self, region: _Region, view: memoryview, place: Extent | None) -> None:
        self._region = region  # keeps the region's memory as long as this exists
        self._view: memoryview | None = view
        self.nbytes = view.nbytes
        self.place = place

    @property
    def view(self) -> memoryview:
        if self._view is None:
            raise RuntimeError(
                "this memory has gone back to its pool: use it only while its lease is open"
            )
        return self._view

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> torch.Tensor:
        import torch

        count = math.prod(shape)
        # torch.frombuffer refuses empty tensors.
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self.view, dtype=dtype, count=count, offset=offset).reshape(shape)

    def fill(self, byte: int) -> None:
        """Set every byte; every view shows it."""
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(self.view)), byte, self.nbytes)

    def release(self) -> None:
        # The memory goes back to the native pool when no tensor refers to the view any more.
        self._view = None


def _place_of(backing: Backing) -> Extent | None:
    """Return its place in the layout; None where it has none."""
    return backing.place if isinstance(backing, _PoolBytes) else None


def _shared_bytes(place: Extent, backing: Backing) -> int:
    other = _place_of(backing)
    return (
        0 if other is None else max(min(place.end, other.end) - max(place.offset, other.offset), 0)
    )


def _check_places(layout: Layout) -> None:
    for slot, place in layout.places.items():
        # O_DIRECT reads and writes whole pages: a buffer has to begin on one.
        if place.offset % PAGE:
            expected = f"a multiple of {PAGE} B"
            raise ConfigError(
                field=f"offset of {slot!r} in the layout", value=place.offset, expected=expected
            )
        if place.end > layout.nbytes:
            expected = f"an end within the layout's {layout.nbytes} B"
            raise ConfigError(
                field=f"place of {slot!r} in the layout", value=place, expected=expected
            )
