"""`Lease`: one buffer that somebody holds, and `Lessor`, the part of a pool that gives leases out and takes them back.

A buffer goes back when its lease is closed, the events attached to it have passed, and no view of it is left. Nobody
waits in `close`: who needs memory and finds none waits for the oldest of those events.
"""

from __future__ import annotations

import threading
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from infinity_engine.errors import CapacityError
from infinity_engine.memory.ledger import Reservation
from infinity_engine.plan import Tier

if TYPE_CHECKING:
    import torch

__all__ = ["Backing", "Event", "Lease", "Lessor", "NoBytes"]


class Event(Protocol):
    """A point in a stream's work."""

    def done(self) -> bool:
        """Tell whether the work before it has ended."""

    def wait(self) -> None:
        """Wait, on the host, until it has; raise what failed."""


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


class Lease:
    """`nbytes` of one tier, held by `holder` until it is closed. Made by a pool; a context manager."""

    __slots__ = ("__weakref__", "_backing", "_events", "_lessor", "holder", "nbytes", "tier")

    def __init__(self, lessor: Lessor, backing: Backing, *, tier: Tier, nbytes: int, holder: str) -> None:
        self.tier = tier
        self.nbytes = nbytes
        self.holder = holder
        self._lessor = lessor
        self._backing: Backing | None = backing
        self._events: list[Event] = []

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
            raise RuntimeError(f"the lease of {self.holder} is closed: its {self.nbytes} B are no longer its own")
        return self._backing

    def tensor(self, dtype: torch.dtype, shape: Sequence[int] | None = None, *, offset: int = 0) -> torch.Tensor:
        """Return a view of its bytes from `offset` on: of `shape`, or flat and of all that are left.

        The memory stays while the view is there, also when the lease is closed; nothing says whose bytes it then has.
        """
        left = self.nbytes - offset
        if shape is None:
            shape = (left // dtype.itemsize,)
        wanted = dtype.itemsize
        for length in shape:
            wanted *= length
        if offset < 0 or wanted > left:
            raise ValueError(
                f"the lease of {self.holder} has {self.nbytes} B: a view of {wanted} B at offset {offset} is not in it"
            )
        return self.backing.tensor(dtype, shape, offset)

    def flat(self) -> torch.Tensor:
        """Return all of its bytes as a flat uint8 tensor."""
        import torch

        return self.tensor(torch.uint8)

    def memory(self) -> memoryview:
        """Return its bytes for I/O. They stay for as long as somebody has this view.

        Raises:
            TypeError: they are on the device, where no I/O can reach them.
        """
        view = getattr(self.backing, "view", None)
        if not isinstance(view, memoryview):
            raise TypeError(f"the lease of {self.holder} is of {self.tier.name} memory: I/O needs HOST")
        return view

    def until(self, event: Event) -> None:
        """Let the memory go back no earlier than `event` has passed."""
        if self._backing is None:
            raise RuntimeError(f"the lease of {self.holder} is closed: attach events before that")
        self._events.append(event)

    def close(self) -> None:
        """Give the buffer up; it goes back when its events have passed. Does not wait. Again: does nothing."""
        backing, self._backing = self._backing, None
        if backing is not None:
            self._lessor._take_back(self, backing, self._events)

    def __enter__(self) -> Lease:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def __del__(self) -> None:
        # Not there when __init__ failed.
        if getattr(self, "_backing", None) is not None:
            self.close()
            warnings.warn(
                f"the lease of {self.holder} ({self.nbytes} B) was dropped without being closed",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def __repr__(self) -> str:
        """Show whose it is."""
        state = "closed" if self.closed else self.tier.name
        return f"Lease({self.holder}: {self.nbytes} B, {state})"


@dataclass(slots=True)
class _Closing:
    """A closed lease's buffer, with what it waits for."""

    backing: Backing
    events: Sequence[Event]

    def passed(self) -> bool:
        return all(event.done() for event in self.events)

    def wait(self) -> None:
        for event in self.events:
            with suppress(Exception):  # what failed belongs to whoever started it; the buffer is free all the same
                event.wait()


class Lessor(ABC):
    """What pools have in common: which leases are open, and which buffers wait for events. Any thread may call."""

    def __init__(self, tier: Tier, reservation: Reservation) -> None:
        self.reservation = reservation
        self._tier = tier
        self._lock = threading.RLock()
        self._open: dict[int, tuple[str, int]] = {}  # by the lease's id: not the lease, which may then be dropped
        self._closing: deque[_Closing] = deque()
        self._waits = 0
        self._closed = False

    def _lease(self, nbytes: int, holder: str, take: Callable[[], Backing | None]) -> Lease:
        """Return a lease of what `take` gives; it gives None while there is no room."""
        waits_for: _Closing | None = None
        while True:
            if waits_for is not None:
                waits_for.wait()  # without the lock: what it waits for may have to close leases
            with self._lock:
                if waits_for is not None:
                    self._drop(waits_for.backing)
                self._check_open(nbytes, holder)
                self._settle()
                backing = take()
                if backing is not None:
                    lease = Lease(self, backing, tier=self._tier, nbytes=nbytes, holder=holder)
                    self._open[id(lease)] = (holder, nbytes)
                    return lease
                if not self._closing:
                    raise self._refusal(nbytes, holder)
                waits_for = self._closing.popleft()
                self._waits += 1

    def _check_open(self, nbytes: int, holder: str) -> None:
        if self._closed:
            raise RuntimeError(f"{self.reservation.holder} is closed: {holder} cannot have {nbytes} B of it")

    def _take_back(self, lease: Lease, backing: Backing, events: Sequence[Event]) -> None:
        with self._lock:
            del self._open[id(lease)]
            closing = _Closing(backing, events)
            if events and not closing.passed():
                self._closing.append(closing)
            else:
                self._drop(backing)

    def _settle(self) -> None:
        """Give back every buffer whose events have passed."""
        for _ in range(len(self._closing)):
            closing = self._closing.popleft()
            if closing.passed():
                self._drop(closing.backing)
            else:
                self._closing.append(closing)

    def settle(self) -> None:
        """Give back the buffers of closed leases whose events have passed."""
        with self._lock:
            self._settle()

    def close(self) -> None:
        """Wait for the events of closed leases and give all memory back. Again: does nothing.

        Raises:
            RuntimeError: leases are open; names their holders. All else is done.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            while self._closing:
                closing = self._closing.popleft()
                closing.wait()
                self._drop(closing.backing)
            leaks = list(self._open.values())
            self._shut_down()
        if leaks:
            named = ", ".join(f"{holder} ({nbytes} B)" for holder, nbytes in leaks[:5])
            more = f" and {len(leaks) - 5} others" if len(leaks) > 5 else ""
            raise RuntimeError(
                f"{self.reservation.holder} was closed with {len(leaks)} leases open: {named}{more}; "
                "close leases before what they are of"
            )

    def _refusal(self, nbytes: int, holder: str) -> CapacityError:
        held: dict[str, int] = {}
        for name, each in self._open.values():
            held[name] = held.get(name, 0) + each
        limit = self.reservation.nbytes
        free = self._free_bytes()
        reason = f"{holder} asked for {nbytes} B"
        if free >= nbytes:
            reason += f", which no free piece of the {free} B has: plan the buffers that live long"
        return CapacityError(
            tier=self._tier.name,
            asked=nbytes,
            free=free,
            limit=limit,
            holders=tuple(held.items()),
            change=f"{reason}; close leases earlier, or reserve more for {self.reservation.holder}",
        )

    @abstractmethod
    def _drop(self, backing: Backing) -> None:
        """Give the memory back."""

    @abstractmethod
    def _free_bytes(self) -> int:
        """Return the bytes that are not given out."""

    @abstractmethod
    def _shut_down(self) -> None:
        """Let go of everything; what open leases and views hold stays until they go."""
