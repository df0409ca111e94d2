"""`DeviceMemory`: one reservation's device memory, as leases of what the accelerator allocates.

Counts and keeps the limit; the accelerator allocates. When a lease is closed, its memory is the
device's again and views of it are dead, unless it was leased with `Views.KEEP`. Where DEVICE is the
host's own memory, all views keep it. Memory that views keep counts as held as long as there is a
view.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from infinity_engine.errors import CapacityError
from infinity_engine.memory.borrowed import TensorMemory
from infinity_engine.memory.lease import Backing, Lease, Lessor, NoBytes, Waitable, typed_view
from infinity_engine.memory.ledger import Reservation
from infinity_engine.plan import Tier

if TYPE_CHECKING:
    import torch

    from infinity_engine.memory.lease import _LeasedBuffer

__all__ = ["Allocator", "Cache", "DeviceMemory", "SharedBacking", "Views"]


class Views(Enum):
    """What happens to views of a lease once it is closed and its events have passed."""

    DIE = "die"  # They are dead: the device has the memory again.
    KEEP = "keep"  # They keep the memory, which goes back after the last view.


class SharedBacking(Backing, Protocol):
    """Memory that can be shared with views of it."""

    def shared(self) -> tuple[torch.Tensor, object]:
        """Return all bytes as a flat tensor, and an object that lives until its last view is gone.

        Keep neither.
        """


_Buffer = TypeVar("_Buffer", bound=SharedBacking)


class Allocator(Protocol[_Buffer]):
    """The part of an accelerator that DeviceMemory needs."""

    def allocate(self, nbytes: int, *, idle_bytes: int = 0) -> _Buffer:
        """Return a buffer of the device's memory; raise CapacityError where there is none.

        Beside it, at most `idle_bytes` of what was given back may be kept for later buffers.
        """

    def free(self, buffer: _Buffer) -> None:
        """Take it back."""

    def disown(self, buffer: _Buffer) -> None:
        """Leave its memory to its views for good."""

    def forget_idle(self) -> None:
        """Keep nothing of what was given back."""


class Cache(Protocol):
    """Holds leases with views that keep them; evicts them where another holder needs memory."""

    def evict_one(self) -> bool:
        """Close a lease that is not in use; tell whether there was one."""

    def last_use(self) -> Waitable:
        """Return the end of all work given to the device so far that may use its views."""


class DeviceMemory(Lessor, Generic[_Buffer]):
    """Device memory of `accelerator`, at most what `reservation` promises at any time."""

    def __init__(self, accelerator: Allocator[_Buffer], reservation: Reservation) -> None:
        super().__init__(Tier.DEVICE, reservation)
        self._is_apart = reservation.tier is Tier.DEVICE  # from the host's memory
        self._accelerator = accelerator
        # Set by attach(): the cache is made of leases of this memory.
        self._cache: Cache | None = None
        # the last view is gone: [Note: when kept memory is free]
        self._gone: deque[_LeasedBuffer] = deque()
        self._is_left_to_views = False

    def attach(self, cache: Cache) -> None:
        """From here on, let `cache` evict where there is no room, and say when views were used."""
        self._cache = cache

    def lease(self, nbytes: int, *, holder: str, views: Views = Views.DIE) -> Lease:
        """Return a buffer of `nbytes` on the device.

        Raises:
            CapacityError: the reservation has too little left, no closed lease will give it back,
                and the cache has nothing to evict.
        """
        while True:
            try:
                return self._new_lease(nbytes, holder, views)
            except CapacityError:
                # One at a time: what was evicted may be enough.
                if self._cache is None or not self._cache.evict_one():
                    raise

    def try_lease(self, nbytes: int, *, holder: str, views: Views = Views.DIE) -> Lease | None:
        """Return a buffer as `lease` does, but None where the cache would have to evict."""
        try:
            return self._new_lease(nbytes, holder, views)
        except CapacityError:
            return None

    def adopt(self, flat: torch.Tensor, *, holder: str) -> Lease:
        """Return a lease of a flat uint8 tensor of the host: it counts here until it is closed.

        Its memory is its user's, before and after.

        Raises:
            CapacityError: the reservation has too little left.
        """
        with self._lock:
            self.reservation.hold(flat.numel())
            return self._lease_of(TensorMemory(flat), flat.numel(), holder)

    def _new_lease(self, nbytes: int, holder: str, views: Views) -> Lease:
        return self._lease(
            nbytes,
            holder,
            allocate=lambda: self._allocate(nbytes, views),
            # Every buffer that comes back is room: a device allocates anywhere.
            in_the_way=lambda _: True,
            refusal=lambda: self._refusal(nbytes, holder),
        )

    def close(self) -> None:
        """Wait for the events of closed leases and give all memory back. See `Lessor.close`.

        Memory that views keep is left to them for good.
        """
        # `finally`, as an open lease makes the close raise, and all else has to be given back.
        try:
            super().close()
        finally:
            with self._lock:
                # Copied before _catch_up(): what ends in the loop below is taken out of it.
                kept = self._views.copy()
                # From here on _view_gone counts at once: no later call would look at `_gone`.
                self._is_left_to_views = True
                self._catch_up()  # views that are gone already
                while self._closing:
                    kept.discard(self._closing[0])
                    self._closing[0].wait()
                    self._release(self._closing.popleft())
                for given in kept:
                    # Other memory is the host's own, which its views keep by themselves.
                    if isinstance(given.backing, _KeptBuffer):
                        # as in `_free`
                        self._accelerator.disown(given.backing.buffer)  # type: ignore[arg-type]
            self._cache = None
            self._accelerator.forget_idle()

    def kept_bytes(self) -> int:
        """Return the bytes that views keep of closed leases, once all events have passed."""
        # A copy, as a view may go meanwhile.
        return sum(given.nbytes for given in self._views.copy()) if self._views else 0

    def _allocate(self, nbytes: int, views: Views) -> Backing | None:
        if not nbytes:
            return NoBytes()
        if nbytes > self._free_bytes():
            return None
        # Counted before it is allocated: no other thread can be promised the same bytes meanwhile.
        left = self.reservation.hold(nbytes)
        try:
            # What the reservation has left may be idle there: together they keep the limit.
            buffer = self._accelerator.allocate(nbytes, idle_bytes=left)
        except BaseException as failure:
            self.reservation.release(nbytes)
            # Free bytes that lie in pieces, or that others took: what is closing may make room.
            if isinstance(failure, CapacityError) and self._closing:
                return None
            raise
        # In one memory every view keeps its bytes by itself; see _memory().
        if views is Views.DIE or not self._is_apart:
            return buffer
        return _KeptBuffer(buffer)

    def _memory(self, backing: Backing) -> object | None:
        if isinstance(backing, _KeptBuffer):
            return backing.owner()
        if isinstance(backing, NoBytes | TensorMemory) or self._is_apart:
            return None
        import torch

        # Views of a host tensor share its storage, which lives as long as the last of them.
        return backing.tensor(torch.uint8, (backing.nbytes,)).untyped_storage()

    def _free(self, backing: Backing) -> None:
        if isinstance(backing, _KeptBuffer):
            # Views are left: the last of them ends the owner, and _view_gone follows.
            if backing.owner() is not None:
                backing.release()
                return
            backing = backing.buffer
        if isinstance(backing, TensorMemory):
            backing.release()
        elif not isinstance(backing, NoBytes):
            # only `_allocate` makes backings of this pool
            self._accelerator.free(backing)  # type: ignore[arg-type]

    def _release(self, given: _LeasedBuffer) -> None:
        super()._release(given)
        # _view_gone ran within the call above: no view is left, so no event is needed.
        if self._gone and self._gone[-1] is given:  # it had no views
            super()._release(self._gone.pop())

    def _view_gone(self, given: _LeasedBuffer) -> None:
        # [Note: what the collector may do]
        if isinstance(given.backing, _KeptBuffer) and not self._is_left_to_views:
            self._views.discard(given)
            self._gone.append(given)
        else:
            super()._view_gone(given)

    # [Note: when kept memory is free] The last view goes when the host drops it, and by then the
    # device may not have begun the work that uses it. So the memory of views that outlived their
    # lease waits for an event of the time after that.
    def _catch_up(self) -> None:
        super()._catch_up()
        while self._gone:
            given = self._gone.popleft()
            given.wait_for(() if self._cache is None else (self._cache.last_use(),))
            self._closing.append(given)

    def _uncount(self, nbytes: int) -> None:
        self.reservation.release_soon(nbytes)

    def _free_bytes(self) -> int:
        return self.reservation.nbytes - self.reservation.held

    def _shut_down(self) -> None:
        """Nothing is left to release."""


class _KeptBuffer:
    """A buffer that its views keep: holds the tensor that they are views of."""

    def __init__(self, buffer: SharedBacking) -> None:
        self.buffer = buffer
        self.nbytes = buffer.nbytes
        tensor, owner = buffer.shared()
        self._tensor: torch.Tensor | None = tensor
        # Weak: a reference here would keep the owner beyond the last view.
        self._owner = weakref.ref(owner)

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> torch.Tensor:
        """Return a view from byte `offset` on."""
        assert self._tensor is not None, "a lease that is closed has no backing"
        return typed_view(self._tensor, dtype, shape, offset)

    def owner(self) -> object | None:
        """Return the object that lives until the last view is gone; None after that."""
        return self._owner()

    def release(self) -> None:
        """Leave the memory to its views."""
        self._tensor = None
