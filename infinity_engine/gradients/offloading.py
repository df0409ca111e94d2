"""`GradientOffload`: writes gradients to the drives, through host buffers that it reuses.

A buffer is free again when its write has ended; a caller that needs one waits for the oldest write.
A write that fails raises only when all writes are finished, so that the backward goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch

from infinity_engine.accel import Event
from infinity_engine.errors import CapacityError, TransferError
from infinity_engine.kept_errors import kept, raise_any
from infinity_engine.lanes.lanes import Lanes
from infinity_engine.lanes.meter import Cargo, Wait
from infinity_engine.memory import Lease
from infinity_engine.optim import FloatFormat
from infinity_engine.placement.buffers import GRADIENT_SLOTS, SUM, gradient_slot
from infinity_engine.plan.ops import Lane
from infinity_engine.storage import Hop, Place, SwapFile

__all__ = ["GradientOffload", "Interceptor", "NoOffload"]


class Interceptor(Protocol):
    """Keeps gradients that would go to the drives, where `enabled`."""

    enabled: bool

    def intercept(
        self, piece: tuple[int, int], gradient: torch.Tensor, format_: FloatFormat, micro_batch: int
    ) -> bool:
        """Keep the bytes of a piece, which then counts as on the drives. Tell whether it did."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A gradient in a buffer, or on its way there: complete once `made` has passed."""

    lease: Lease
    made: Event | None  # None: the buffer is filled
    place: Place
    what: str


class GradientOffload:
    """The gradients of one engine that go to `swap`: a place for `micro_batches` of each.

    Each piece is offered to `interceptor` first.
    """

    def __init__(
        self, swap: SwapFile, lanes: Lanes, micro_batches: int, interceptor: Interceptor
    ) -> None:
        self.micro_batches = micro_batches
        self.interceptor = interceptor
        self._swap = swap
        self._lanes = lanes
        # As many as the pool's layout has places for; reading back takes one a micro-batch.
        self._slots = max(micro_batches, GRADIENT_SLOTS)
        # Buffers are taken in turn: the next one has been in flight longest.
        self._turn = 0
        # The device may still be copying these into their buffers: no write may begin before.
        self._waiting: deque[_Sent] = deque()
        self._writing: list[Hop] = []
        self._failed: TransferError | None = None

    def allocate(self, nbytes: int) -> Place:
        """Allocate a place on the drives for a gradient. The caller releases it."""
        return self._swap.allocate(nbytes, holder="gradients")

    def release(self, place: Place) -> None:
        """Release a place. No write to it may be in flight."""
        self._swap.release(place)

    def lease(self) -> Lease:
        """Return a buffer for one gradient; where none is free, wait for the oldest write."""
        slot, self._turn = gradient_slot(self._turn % self._slots), self._turn + 1
        self._start_ready()
        while True:
            # Waits for the write that still reads this slot's memory.
            try:
                with self._lanes.meter.timed_wait(Wait.GRADIENTS):
                    return self._lanes.host.lease_planned(slot, holder="gradients on their way")
            except CapacityError:
                # Every buffer may hold a gradient that is not even being written: begin the oldest.
                if not self._waiting:
                    raise
                self._start()

    def lease_sum(self) -> Lease:
        """Return the buffer in which the gradients of several micro-batches are summed in fp32."""
        return self._lanes.host.lease_planned(SUM)

    def send(self, lease: Lease, made: Event | None, place: Place, *, what: str) -> None:
        """Write a gradient once `made` has passed, and close its buffer after that."""
        self._waiting.append(_Sent(lease, made, place, what))
        self._start_ready()

    def write_now(self, memory: memoryview, place: Place, *, what: str) -> None:
        """Write a gradient from the caller's memory, and wait for that.

        A failure is raised by `finish_writes`.
        """
        with self._lanes.meter.timed_wait(Wait.GRADIENTS):
            self._forget_written([self._swap.write(place, memory, what=what)])
        self._lanes.meter.count_copy(
            Lane.NVME_WRITE, Cargo.GRADIENTS, place.nbytes, None, name="gradient"
        )

    def read(self, place: Place, into: memoryview, *, what: str) -> Hop:
        """Begin to read a gradient, after `finish_writes`."""
        return self._swap.read(place, into, what=what)

    def start(self) -> None:
        """Begin all writes, so that every buffer gets free without another call."""
        while self._waiting:
            self._start()

    def finish_writes(self) -> None:
        """Wait for all writes.

        Raises:
            TransferError: a write failed; it is the first one's error. All other gradients are on
                the drives. The error is raised again until `drop`.
        """
        self.start()
        with self._lanes.meter.timed_wait(Wait.GRADIENTS):
            self._forget_written(self._writing)
        self._writing = []
        raise_any(self._failed)

    def drop(self) -> None:
        """Wait for all writes and forget their failures: no one needs these gradients any more."""
        with suppress(TransferError):
            self.finish_writes()
        self._failed = None

    def _start_ready(self) -> None:
        # Only from the front: writes begin in the order in which gradients were made.
        while self._waiting and (self._waiting[0].made is None or self._waiting[0].made.done()):
            self._start()

    def _start(self) -> None:
        """Begin the oldest write, after the copy into its buffer."""
        sent = self._waiting.popleft()
        if sent.made is not None:
            with self._lanes.meter.timed_wait(Wait.GRADIENTS):
                sent.made.wait()
        memory = sent.lease.memory()[: sent.place.nbytes]
        event = self._swap.write(sent.place, memory, what=sent.what)
        # Closed now, but the buffer returns to the pool only when the write has ended.
        sent.lease.until(event)
        sent.lease.close()
        # Ended writes are looked at here, so the list does not grow with the backward.
        written = [event for event in self._writing if event.done()]
        # From one question: a write that ends between two would be in neither list.
        self._writing = [*(event for event in self._writing if event not in written), event]
        self._forget_written(written)
        self._lanes.meter.count_copy(
            Lane.NVME_WRITE, Cargo.GRADIENTS, sent.place.nbytes, None, name="gradient"
        )

    def _forget_written(self, events: Sequence[Hop]) -> None:
        """Wait for writes; keep the first error without its traceback, which holds buffers."""
        for event in events:
            try:
                event.wait()
            except TransferError as error:
                self._failed = self._failed or kept(error)


class NoOffload:
    """Stands where all gradients stay in memory."""

    def start(self) -> None:
        """Do nothing."""

    def finish_writes(self) -> None:
        """Do nothing."""

    def drop(self) -> None:
        """Do nothing."""
