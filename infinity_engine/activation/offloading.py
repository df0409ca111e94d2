"""`ActivationOffload`: decides which saved memory leaves for the host or drives, and what returns.

A forward saves more than the limit: what is needed last leaves, while modules go on. A backward
needs one after the other: what comes next is fetched ahead. See decision 0045.

`SavedMemories` knows what is saved, and `ActivationMoves` carries it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from infinity_engine.accel.virtual import clock_of
from infinity_engine.activation.drive_room import DriveRoom
from infinity_engine.activation.memories import (
    SavedMemories,
    SavedMemory,
    SavedPiece,
    SavedView,
)
from infinity_engine.activation.moving import ActivationLimits, ActivationMoves
from infinity_engine.activation.saved import BlockUse, KeptActivations, addresses_of
from infinity_engine.lanes.lanes import Lanes
from infinity_engine.lanes.meter import Cargo
from infinity_engine.memory import BorrowedMemory
from infinity_engine.residence import Mover
from infinity_engine.schedule import NEVER
from infinity_engine.schedule.prefetch import LOOK_AHEAD

__all__ = ["ActivationOffload"]

_SLACK = 8  # part of the room that is made at once, as each time looks at all that is here


class ActivationOffload:
    """Moves saved tensors to drives, where `room` is for them, or else to the host."""

    offloads = True

    def __init__(
        self,
        lanes: Lanes,
        mover: Mover,
        borrowed: BorrowedMemory,
        limits: ActivationLimits,
        *,
        room: DriveRoom | None,
    ) -> None:
        self._meter = lanes.meter
        self._clock_ns = clock_of(lanes.accelerator)
        self._most_resident = limits.resident - limits.in_flight  # in a forward
        self._kept = KeptActivations()
        self._movable = _Movable(lanes.accelerator.torch_device, limits.small)
        self._memories = SavedMemories(borrowed)
        self._moves = ActivationMoves(lanes, mover, self._memories, borrowed, limits, room=room)
        # What a first step expects: everything up to this number has its place in the trace.
        self._expected = -1
        self._lock = limits.shared.lock
        self._closed = False
        self._process = os.getpid()

    # --- what autograd asks -----------------------------------------------------------------------

    def begin_forward(self, own: Iterable[torch.Tensor]) -> None:
        """Take the model's parameters and buffers as what stays anyway."""
        with self._lock:
            self._moves.settle()
            self._moves.give_back()
            self._memories.forget_pieces()
        self._movable.keep(own)

    def pack(self, tensor: torch.Tensor) -> object:
        """Return what is saved in place of a tensor; it may leave from here on.

        Raises:
            CapacityError: the host or the drives have no room for what has to leave.
            TransferError: what has to leave could not be written.
        """
        if self._closed or not self._movable.allows(tensor):
            return self._kept.pack(tensor)
        with self._lock:
            self._moves.settle()
            memory = self._memories.find(tensor)
            if memory is None and not self._memories.may_leave(tensor):
                return self._memories.keep_piece(tensor, self._kept.pack(tensor))
            self._moves.raise_failure()
            self._moves.note_saving(True)
            begins = not self._moves.is_used
            if memory is None:
                memory = self._memories.add(tensor)
                self._moves.admit(memory)
                saved = self._memories.view(memory, tensor)
            else:
                saved = self._memories.another_view(memory, tensor)
            if begins:
                self._moves.claim_part()
            self._moves.make_room_for_saved(self._most_resident // _SLACK)
            return saved

    def make_room(self) -> None:
        """Wait until no more is on its way out than there is room for."""
        with self._lock:
            self._moves.make_room()

    def begin_backward(self) -> None:
        """Fetch what is needed first, as far as there is room.

        Not with the first need: a device has been given what computes before it by then, and
        copies wait for that.
        """
        if self._closed:
            return
        with self._lock:
            self._moves.settle()
            self._moves.note_saving(False)
            self._prefetch()

    def unpack(self, saved: object) -> torch.Tensor:
        """Return a saved tensor, fetched if it has left; fetch what comes next.

        Raises:
            RuntimeError: it was changed in place since it was saved, or the engine was closed.
            CapacityError: there is no room for it; it can be asked for again.
            TransferError: it could not be read back; likewise.
        """
        if isinstance(saved, SavedPiece):
            saved = saved.held
        if not isinstance(saved, SavedView):
            return self._kept.unpack(saved)
        self._check_open()
        with self._lock:
            self._moves.settle()
            self._moves.raise_failure()
            self._moves.note_saving(False)
            saved.check()
            memory = saved.memory
            self._meter.count_need(
                Cargo.ACTIVATIONS, memory.record.nbytes, found=memory.is_original
            )
            self._expect(memory)
            resident = self._moves.resident
            resident.record_use(memory.use)
            resident.hold((memory.number,))
            try:
                self._bring(memory)
                self._prefetch()
            finally:
                resident.let_go((memory.number,))
            self._check_open()  # a dropped engine may have been closed meanwhile
            return saved.tensor(self._moves.lease(memory))

    def _check_open(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"This graph belongs to process {self._process}, and this one was forked from it: "
                f"it has no memory that was saved. Call backward() in {self._process}"
            )
        if self._closed:
            raise RuntimeError(
                "The engine was closed before this backward, and with it went what the forward "
                "has saved. Call backward() before close(), or run the model again"
            )

    def end_step(self) -> None:
        """Predict the next step by this one. Numbers begin anew where nothing is saved."""
        with self._lock:
            self._moves.settle()
            self._moves.give_back()
            self._moves.end_step()
            self._expected = -1
            # What is being evicted keeps its number until that has ended.
            if not self._memories.by_number and not self._moves.evicting:
                self._memories.number_anew()

    def uses(self) -> tuple[BlockUse, ...]:
        """Return nothing: it knows no blocks."""
        return ()

    def described(self) -> str:
        """Return nothing: there was nothing to decide."""
        return ""

    def close(self) -> None:
        """Forget all that is saved, once it moves no more."""
        self._closed = True
        self._moves.close()

    def saved_bytes(self) -> int:
        """Return the bytes that graphs hold of what it moves, wherever they are now."""
        with self._lock:
            self._moves.settle()
            return sum(memory.record.nbytes for memory in self._memories.by_number.values())

    # --- how fast it is ---------------------------------------------------------------------------

    @property
    def most_in_flight(self) -> int:
        """The bytes that may be on their way at one time."""
        return self._moves.most_in_flight

    def time_moves(self, nbytes: int) -> tuple[float, float]:
        """Move so many bytes out and back, and return the seconds of each.

        Raises:
            CapacityError: there is no room for them.
            TransferError: the I/O failed.
        """
        with self._lock:
            self._moves.settle()
            tensor = torch.zeros(nbytes, dtype=torch.uint8, device=self._movable.device)
            memory = self._memories.add(tensor)
            saved = self._memories.view(memory, tensor)
            self._moves.admit(memory)
            try:
                start = self._clock_ns()
                self._moves.evict(memory)
                self._moves.finish_eviction(memory)
                out = self._clock_ns()
                self._bring(memory)
                back = self._clock_ns()
            finally:
                del saved
                self._moves.settle()
            return (out - start) / 1e9, (back - out) / 1e9

    # --- what it decides --------------------------------------------------------------------------

    def _bring(self, memory: SavedMemory) -> None:
        """Have memory here."""
        if self._moves.is_evicting(memory.number):
            self._moves.keep(memory)
        resident = self._moves.resident
        if resident.note_needs((memory.number,)):
            self._moves.evict_all(resident.evictions(memory.record.nbytes))
            self._moves.fetch(memory)
        self._moves.finish_fetch(memory)

    def _expect(self, memory: SavedMemory) -> None:
        """Predict that what was saved before is needed next, where no step has shown otherwise."""
        resident = self._moves.resident
        if memory.number > self._expected and resident.next_use(memory.number) == NEVER:
            self._expected = memory.number
            resident.expect(self._memories.uses_down_from(memory.number))

    def _prefetch(self) -> None:
        """Begin to fetch what is needed next, as far as there is room."""
        resident = self._moves.resident
        upcoming = resident.upcoming(LOOK_AHEAD)
        if all(use.parameters[0] in resident for _, use in upcoming):
            return
        chosen = resident.choose(upcoming)
        self._moves.evict_all(chosen.evicted)
        for number in chosen.fetched:
            # The trace may have uses of what was not saved in this step.
            if number in self._memories.by_number:
                memory = self._memories.by_number[number]
                if self._moves.is_evicting(number):
                    self._moves.keep(memory)
                else:
                    self._moves.fetch(memory)


class _Movable:
    """Which saved tensors may leave `device`: those in memory that is not the model's, not too
    small.
    """

    def __init__(self, device: torch.device, small: int) -> None:
        self.device = device
        self._small = small
        self._own: frozenset[int] = frozenset()  # addresses of memory that is the model's

    def keep(self, own: Iterable[torch.Tensor]) -> None:
        """Let nothing leave that lies in the memory of these."""
        self._own = addresses_of(own)

    def allows(self, tensor: torch.Tensor) -> bool:
        """Tell whether a saved tensor may leave."""
        if (
            type(tensor) is not torch.Tensor  # what a subclass has besides would be lost
            or tensor.layout != torch.strided
            or tensor.is_nested
            or tensor.device != self.device
            # A conjugated or negated view shows other values than its memory has.
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.is_inference()  # it has no version
        ):
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= self._small and storage.data_ptr() not in self._own
