"""`GradientOffload`: gradients on their way to the drives, through host buffers that are free again
when they are written.

Whoever sends one when no buffer is free waits for the oldest. What could not be written is told
when all is settled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from infinity_engine.accel import Event
from infinity_engine.errors import CapacityError, TransferError
from infinity_engine.kept_errors import again, kept
from infinity_engine.lanes.lanes import Lanes
from infinity_engine.lanes.meter import Cargo, Wait
from infinity_engine.memory import Lease
from infinity_engine.placement.buffers import GRADIENT_SLOTS, SUM, gradient_slot
from infinity_engine.plan.ops import Lane
from infinity_engine.storage import Hop, IOEvent, Place, SwapFile

__all__ = ["GradientOffload", "NoOffload"]


@dataclass(frozen=True, slots=True)
class _Sent:
    """A gradient that is in its buffer once `made` has passed."""

    lease: Lease
    made: Event | None
    place: Place
    what: str


class GradientOffload:
    """The way of gradients to `swap`, where there is a place for those of so many micro-batches."""

    def __init__(self, swap: SwapFile, lanes: Lanes, micro_batches: int) -> None:
        self.micro_batches = micro_batches
        self._swap = swap
        self._lanes = lanes
        self._slots = max(micro_batches, GRADIENT_SLOTS)
        self._turn = 0
        self._waiting: deque[_Sent] = deque()  # their bytes may not be in their buffers yet
        self._writing: list[IOEvent] = []
        self._failed: TransferError | None = None

    def allocate(self, nbytes: int) -> Place:
        """Return room for a gradient, to be released."""
        return self._swap.allocate(nbytes, holder="gradients")

    def release(self, place: Place) -> None:
        """Give room back. Nobody writes there any more."""
        self._swap.release(place)

    def lease(self) -> Lease:
        """Return a buffer for any gradient, waiting for one where need be."""
        slot, self._turn = gradient_slot(self._turn % self._slots), self._turn + 1
        self._start_ready()
        while True:
            try:
                with self._lanes.meter.waits(Wait.GRADIENTS):
                    return self._lanes.host.lease_planned(slot, holder="gradients on their way")
            except CapacityError:
                if not self._waiting:
                    raise
                self._start()

    def lease_sum(self) -> Lease:
        """Return the buffer in which those of several micro-batches are added up in fp32."""
        return self._lanes.host.lease_planned(SUM)

    def send(self, lease: Lease, made: Event | None, place: Place, *, what: str) -> None:
        """Write a gradient, which is in the buffer when `made` has passed; the buffer is this way's
        from here on.
        """
        self._waiting.append(_Sent(lease, made, place, what))
        self._start_ready()

    def write_now(self, memory: memoryview, place: Place, *, what: str) -> None:
        """Write a gradient from memory that is the caller's; what fails is told when all is
        settled.
        """
        with self._lanes.meter.waits(Wait.GRADIENTS):
            self._forget_written([IOEvent([self._swap.write(place, memory, what=what)])])
        self._lanes.meter.copies(
            Lane.NVME_WRITE, Cargo.GRADIENTS, place.nbytes, None, name="gradient"
        )

    def read(self, place: Place, into: memoryview, *, what: str) -> Hop:
        """Begin to read a gradient that was sent; all that was is settled."""
        return self._swap.read(place, into, what=what)

    def start(self) -> None:
        """Begin to write all that was sent: whoever needs the memory of the buffers can wait for
        them then.
        """
        while self._waiting:
            self._start()

    def finish_writes(self) -> None:
        """Wait until all that was sent is written.

        Raises:
            TransferError: some could not be; names the first. All others are. Is raised until they
                are dropped.
        """
        self.start()
        with self._lanes.meter.waits(Wait.GRADIENTS):
            self._forget_written(self._writing)
        self._writing = []
        if self._failed is not None:
            raise again(self._failed)

    def drop(self) -> None:
        """Wait likewise: nobody wants what was sent, and what of it is lost."""
        with suppress(TransferError):
            self.finish_writes()
        self._failed = None

    def _start_ready(self) -> None:
        while self._waiting and (self._waiting[0].made is None or self._waiting[0].made.done()):
            self._start()

    def _start(self) -> None:
        """Begin to write what was sent first, when it is there."""
        sent = self._waiting.popleft()
        if sent.made is not None:
            with self._lanes.meter.waits(Wait.GRADIENTS):
                sent.made.wait()
        memory = sent.lease.memory()[: sent.place.nbytes]
        event = IOEvent([self._swap.write(sent.place, memory, what=sent.what)])
        sent.lease.until(event)
        sent.lease.close()
        written = [event for event in self._writing if event.done()]
        self._writing = [*(event for event in self._writing if event not in written), event]
        self._forget_written(written)
        self._lanes.meter.copies(
            Lane.NVME_WRITE, Cargo.GRADIENTS, sent.place.nbytes, None, name="gradient"
        )

    def _forget_written(self, events: Sequence[IOEvent]) -> None:
        """Wait for these, and keep what stopped the first that failed, but nothing that holds
        buffers.
        """
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
