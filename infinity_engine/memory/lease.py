"""`Lease`: one buffer with one holder; `Lessor`: the part of a pool that gives leases out.

A buffer goes back when its lease is closed, the events attached to it have passed, and no view of
it is left. `close` never waits: a request that finds no memory waits for the oldest of those
events.
"""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import methodcaller
from typing import TYPE_CHECKING, Protocol

from deepnvme.closing import Closing
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.memory.ledger import Reservation
from infinity_engine.plan import Tier

if TYPE_CHECKING:
    import torch

__all__ = ["Backing", "Lease", "Lessor", "NoBytes", "Waitable", "typed_view"]


_DONE = methodcaller("done")  # of a Waitable, without a frame for each that is asked


class Waitable(Protocol):
    """Work that has an end: a stream's event, or an I/O."""

    def done(self) -> bool:
        """Tell whether the work has ended."""

    def wait(self) -> object:
        """Wait on the host until the work has ended; raise its error."""


class Backing(Protocol):
    """The memory behind a lease."""

    @property
    def nbytes(self) -> int:
        """How many bytes there are."""

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> torch.Tensor:
        """Return a view of them from byte `offset` on."""


class NoBytes:
    """The memory of a lease of no bytes."""

    nbytes = 0
    view = memoryview(b"")

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> torch.Tensor:
        """Return an empty tensor."""
        import torch

        return torch.empty(shape, dtype=dtype)


def typed_view(
    flat: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], offset: int
) -> torch.Tensor:
    """Return a view of flat bytes from byte `offset` on, as elements of `dtype` in `shape`."""
    end = offset + math.prod(shape) * dtype.itemsize
    return flat[offset:end].view(dtype).view(tuple(shape))


class Lease(Closing):
    """`nbytes` of one tier, held by `holder` until it is closed.

    Made by a pool; a context manager.
    """

    __slots__ = ("__weakref__", "_backing", "_events", "_lessor", "holder", "nbytes", "tier")

    def __init__(
        self, lessor: Lessor, backing: Backing, *, tier: Tier, nbytes: int, holder: str
    ) -> None:
        self.tier = tier
        self.nbytes = nbytes
        self.holder = holder
        self._lessor = lessor
        # None: the lease is closed. The only mark of it, so the two cannot disagree.
        self._backing: Backing | None = backing
        # What still uses the memory: it goes back after all of these, in whatever order they pass.
        self._events: list[Waitable] = []

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._backing is None

    @property
    def backing(self) -> Backing:
        """The memory itself.

        Raises:
            RuntimeError: the lease is closed.
        """
        if self._backing is None:
            raise RuntimeError(
                f"the lease of {self.holder} is closed: its {self.nbytes} B may belong to another "
                "lease. Use a lease only before close()"
            )
        return self._backing

    def tensor(
        self, dtype: torch.dtype, shape: Sequence[int] | None = None, *, offset: int = 0
    ) -> torch.Tensor:
        """Return a view of its bytes from `offset` on: of `shape`, or flat and of all that follow.

        A view is valid until the lease is closed. In the host's own memory, the bytes stay and
        count as held as long as a view exists, but they may hold anything by then. Bytes of a
        device go back to it, and the view is dead.
        """
        left = self.nbytes - offset
        if shape is None:
            shape = (max(left, 0) // dtype.itemsize,)
        wanted = dtype.itemsize * math.prod(shape)
        if min(shape, default=0) < 0 or offset < 0 or wanted > left:
            raise ValueError(
                f"the lease of {self.holder} has {self.nbytes} B: a view of {wanted} B at offset "
                f"{offset} is not in it (shape {tuple(shape)} of {dtype})"
            )
        if offset % dtype.itemsize:
            raise ValueError(
                f"the lease of {self.holder}: expected an offset that is a multiple of "
                f"{dtype.itemsize} B for {dtype}, got {offset}"
            )
        return self.backing.tensor(dtype, shape, offset)

    def flat(self) -> torch.Tensor:
        """Return all of its bytes as a flat uint8 tensor."""
        import torch

        return self.backing.tensor(torch.uint8, (self.nbytes,))

    def memory(self) -> memoryview:
        """Return its bytes for I/O. They stay for as long as this view exists.

        Raises:
            TypeError: they are on the device, where no I/O can reach them.
        """
        # Only host memory has one; a device's backing has no address that the kernel can read.
        view = getattr(self.backing, "view", None)
        if not isinstance(view, memoryview):
            raise TypeError(
                f"the lease of {self.holder} is {self.tier.name} memory, which no I/O can reach. "
                "Lease from a pool of HOST"
            )
        return view

    def until(self, event: Waitable) -> None:
        """Keep the memory until `event` has passed."""
        if self._backing is None:
            raise RuntimeError(
                f"the lease of {self.holder} is closed: attach events before close()"
            )
        self._events.append(event)

    def close(self) -> None:
        """Give the buffer up, to go back after its events; never wait. Again: do nothing."""
        if self._backing is not None:
            # The backing is forgotten last: an interrupt here leaves a lease to be closed again.
            self._lessor._close_lease(self._backing, self._events)
            self._backing = None
            self._events = []

    # [Note: what the collector may do] Python's collector runs `Lease.__del__` and the finalizers
    # of views wherever something is allocated, also in the midst of code of a pool or the ledger
    # that holds its lock. So these take no lock: they only append to a deque or remove from a set,
    # each of which is one step. The next caller with the lock does the rest.
    def __del__(self) -> None:
        backing = getattr(self, "_backing", None)  # not there when __init__ failed
        if backing is not None:
            # [Note: what the collector may do]
            self._lessor._dropped.append((backing, self._events))
            warnings.warn(
                f"the lease of {self.holder} ({self.nbytes} B) was dropped without close(). Close "
                "each lease, or use it as a context manager",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def __repr__(self) -> str:
        """Show its holder and its size."""
        state = "closed" if self.closed else self.tier.name
        return f"Lease({self.holder}: {self.nbytes} B, {state})"


@dataclass(slots=True, eq=False)
class _LeasedBuffer:
    """A buffer that was leased, and the events that it waits for once its lease is closed."""

    backing: Backing
    holder: str
    nbytes: int
    events: Sequence[Waitable] = ()

    def wait_for(self, events: Sequence[Waitable]) -> None:
        self.events = events

    def passed(self) -> bool:
        return all(map(_DONE, self.events))

    def wait(self) -> None:
        for event in self.events:
            # The code that started the work reports its failure; the buffer is free either way.
            with suppress(Exception):
                event.wait()
        self.events = ()


class Lessor(ABC):
    """The part that pools share: open leases, and buffers that wait for events. For any thread."""

    def __init__(self, tier: Tier, reservation: Reservation) -> None:
        self.reservation = reservation
        self.tier = tier
        self._lock = threading.RLock()
        # By the id of the backing, not by the lease: the collector may drop that.
        self._open: dict[int, _LeasedBuffer] = {}
        self._closing: deque[_LeasedBuffer] = deque()  # oldest first
        self._views: set[_LeasedBuffer] = set()  # given back, except for views that still exist
        # of leases dropped without close()
        self._dropped: deque[tuple[Backing, Sequence[Waitable]]] = deque()
        self._waits = 0
        self._ending = self._closed = False

    def _lease(
        self,
        nbytes: int,
        holder: str,
        *,
        allocate: Callable[[], Backing | None],
        in_the_way: Callable[[Backing], bool],
        refusal: Callable[[], CapacityError],
    ) -> Lease:
        """Return a lease of the memory that `allocate` returns; None from it means no room.

        Without room, waits for the oldest of those closed leases that are `in_the_way`; raises
        `refusal` where there is none.
        """
        if nbytes < 0:
            raise ConfigError(
                field=f"bytes leased for {holder}", value=nbytes, expected="0 or more bytes"
            )
        while True:
            with self._lock:
                if self._ending:
                    raise RuntimeError(
                        f"{self.reservation.holder} is closed and cannot lease {nbytes} B to "
                        f"{holder}. Lease from a pool before close()"
                    )
                self._catch_up()
                # The others are looked at when there is no room: there may be thousands.
                while self._closing and self._closing[0].passed():
                    self._release(self._closing.popleft())
                backing = allocate()
                # Out of room: now all of them, as a younger one may have ended before the oldest.
                if backing is None and self._release_all_ended():
                    backing = allocate()
                if backing is not None:
                    return self._lease_of(backing, nbytes, holder)
                # Only one that would make room: waiting for others would stall for nothing.
                oldest = next((given for given in self._closing if in_the_way(given.backing)), None)
                if oldest is None:
                    raise refusal()
                self._waits += 1  # how often requests had to wait, for `stats`
            # Without the lock, as what it waits for may have to close leases. It stays where it is
            # meanwhile: the first look gives it back, also when this wait is interrupted.
            oldest.wait()

    def _lease_of(self, backing: Backing, nbytes: int, holder: str) -> Lease:
        """Return the lease of this memory, which it has until it is closed. Under the lock."""
        self._open[id(backing)] = _LeasedBuffer(backing, holder, nbytes)
        return Lease(self, backing, tier=self.tier, nbytes=nbytes, holder=holder)

    def _close_lease(self, backing: Backing, events: Sequence[Waitable]) -> None:
        with self._lock:
            self._end(backing, events)
            self._catch_up()

    def _end(self, backing: Backing, events: Sequence[Waitable]) -> None:
        """Give a buffer back, now or when its events have passed. Again: does nothing."""
        # Closed before: an interrupted close comes a second time.
        given = self._open.get(id(backing))
        if given is None:
            return
        # A lease of no bytes has nothing that an event could protect.
        if events and given.nbytes:
            given.wait_for(events)
        waits = not given.passed()
        del self._open[id(backing)]
        if waits:
            self._closing.append(given)
        else:
            self._release(given)

    def _catch_up(self) -> None:
        """End the leases that were dropped without close()."""
        while self._dropped:
            self._end(*self._dropped.popleft())

    def _release_all_ended(self) -> bool:
        """Give back every buffer that waits for no event any more; tell whether there was one."""
        before = len(self._closing)
        for _ in range(before):
            if self._closing[0].passed():
                self._release(self._closing.popleft())
            else:
                # One look around: those that wait keep their order, oldest first.
                self._closing.rotate(-1)
        return len(self._closing) < before

    def _release(self, given: _LeasedBuffer) -> None:
        """Give the memory back; it counts as held until its last view is gone, perhaps at once."""
        if given.events:
            given.wait_for(())  # events may have views of it
        memory = self._memory(given.backing)
        if memory is not None:
            self._views.add(given)
            # In place before the memory is freed below, as its last view may be gone by then.
            weakref.finalize(memory, self._view_gone, given)
        self._free(given.backing)
        # No view keeps it: it is free by now.
        if memory is None:
            self._uncount(given.nbytes)

    def _view_gone(self, given: _LeasedBuffer) -> None:
        # [Note: what the collector may do]
        self._views.discard(given)
        self._uncount(given.nbytes)

    def release_ended(self) -> None:
        """Give back the buffers of closed leases that wait for no event any more."""
        # Dropped leases first: their buffers may have ended as well.
        with self._lock:
            self._catch_up()
            self._release_all_ended()

    def close(self) -> None:
        """Wait for the events of closed leases and give all memory back. Again: do what is left.

        Views of closed leases keep their memory, which counts as held until the last of them is
        gone.

        Raises:
            RuntimeError: leases are open; names their holders. All else is done, and their memory
                counts as held until they are closed.
        """
        while True:
            # Taken anew in each round: while it waits for an event, other threads may close leases.
            with self._lock:
                self._ending = True  # no request takes what is being given back
                self._catch_up()
                self._release_all_ended()
                if not self._closing:
                    if self._closed:
                        return
                    self._shut_down()
                    self._closed = True
                    break
                oldest = self._closing[0]
            oldest.wait()  # without the lock, as in `_lease`
        left = list(self._open.values())
        if left:
            # Five are enough to find the code; the number says how many there are.
            named = ", ".join(f"{given.holder} ({given.nbytes} B)" for given in left[:5])
            more = f" and {len(left) - 5} others" if len(left) > 5 else ""
            raise RuntimeError(
                f"{self.reservation.holder} was closed with {len(left)} leases open: "
                f"{named}{more}. Their memory stays in use: close leases before their pool"
            )

    def _in_use(self) -> list[tuple[str, _LeasedBuffer]]:
        """Return the buffers that leases and views hold, each with a name."""
        # A copy, as finalizers remove from the set while it is read.
        viewed = [(f"a view of {given.holder}", given) for given in self._views.copy()]
        return [(given.holder, given) for given in list(self._open.values())] + viewed

    def _refusal(self, nbytes: int, holder: str) -> CapacityError:
        limit = self.reservation.nbytes
        free = self._free_bytes()
        holders: dict[str, int] = {}
        for name, given in self._in_use():
            if given.nbytes:
                holders[name] = holders.get(name, 0) + given.nbytes
        reason = f"{holder} asked for {nbytes} B"
        # Enough bytes but no piece: the figure alone would look like a mistake.
        if free >= nbytes:
            reason += (
                ", more than the largest free piece: give buffers that live long a place in the "
                "layout"
            )
        return CapacityError(
            tier=self.tier.name,
            asked=nbytes,
            free=free,
            limit=limit,
            holders=tuple(holders.items()),
            largest=self._largest_free() if free >= nbytes else None,
            change=f"{reason}; close leases earlier, or reserve more for {self.reservation.holder}",
        )

    @abstractmethod
    def _memory(self, backing: Backing) -> object | None:
        """Return what lives until the memory's last view is gone; None: views do not keep it."""

    @abstractmethod
    def _free(self, backing: Backing) -> None:
        """Release the memory; there may be none, of no bytes."""

    @abstractmethod
    def _uncount(self, nbytes: int) -> None:
        """Note that a buffer of so many bytes is no longer held.

        Takes no lock: [Note: what the collector may do].
        """

    @abstractmethod
    def _free_bytes(self) -> int:
        """Return the bytes that are not leased."""

    def _largest_free(self) -> int | None:
        """Return the largest piece of the free bytes, where they may be in pieces."""
        return None

    @abstractmethod
    def _shut_down(self) -> None:
        """Release all but what open leases and views hold, until they end. Again: goes on."""
