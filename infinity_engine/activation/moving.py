"""`ActivationMoves`: carries saved memory away and back, and keeps its `ResidentSet` in step.

Decides nothing: `ActivationOffload` says what leaves and what comes. How bytes move is the Mover's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from deepnvme.sizes import PAGE
from infinity_engine.accel import Event
from infinity_engine.activation.drive_room import DriveRoom
from infinity_engine.activation.lifetimes import Lifetimes
from infinity_engine.activation.memories import SavedMemories, SavedMemory
from infinity_engine.activation.read_back import ReadBackMemory
from infinity_engine.errors import CapacityError, InfinityError
from infinity_engine.kept_errors import again, kept
from infinity_engine.lanes.lanes import Lanes
from infinity_engine.lanes.meter import Cargo, Wait
from infinity_engine.memory import BorrowedMemory, Lease
from infinity_engine.plan import Tier
from infinity_engine.plan.ops import Lane
from infinity_engine.residence import Mover, Residency, Source
from infinity_engine.schedule import ResidentSet
from infinity_engine.storage import Transfer
from infinity_engine.units import align_up

__all__ = ["ActivationLimits", "ActivationMoves", "SharedRoom"]

_MOST_MOVES = 64  # at one time: each saved tensor looks at all of them


@dataclass(slots=True)
class SharedRoom:
    """The room of several moves together: equal parts for those that have something saved, and in
    a backward what is `left` to blocks, as far as these do not hold it.
    """

    lifetimes: Lifetimes
    left: int = 0
    moves: list[ActivationMoves] = field(default_factory=list)
    # One for all: each may evict what another has. Autograd's threads, or the caller's own, come.
    lock: threading.RLock = field(default_factory=threading.RLock)

    def leave(self, nbytes: int) -> None:
        """Leave so many bytes to blocks from now on."""
        self.left = max(nbytes, 0)

    def spare(self) -> int:
        """Return how many bytes more each may take now, of what blocks hold at other times."""
        return max(self.left - self.lifetimes.kept_soon, 0) // len(self.moves)


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationLimits:
    """Bytes of saved memory that stay where modules compute, those of them that may be in flight,
    and how many a memory needs at least to be moved; those of `shared` have them together.
    """

    resident: int
    in_flight: int
    small: int
    shared: SharedRoom


class ActivationMoves:
    """Moves saved memory between where modules compute, as `borrowed`, and home.

    Home are the drives if there is `room` on them, else the host. Memory that leaves stops being
    resident when its move begins; it stays among the evictions until the move has ended. What is
    needed until then stays, and is resident again.
    """

    def __init__(
        self,
        lanes: Lanes,
        mover: Mover,
        memories: SavedMemories,
        borrowed: BorrowedMemory,
        limits: ActivationLimits,
        *,
        room: DriveRoom | None,
    ) -> None:
        self._lanes = lanes
        self._mover = mover
        self._memories = memories
        self._borrowed = borrowed
        self._limits = limits
        self._room = room
        self._sizes = _Sizes()
        self._evicting: dict[int, SavedMemory] = {}  # by number, the oldest first
        self._is_saving = True
        self.resident: ResidentSet[SavedMemory] = ResidentSet(
            self._sizes, limits.resident, beside=self._not_for_members
        )
        self._failure = _FailedEvictions()
        self._read_back = ReadBackMemory(lanes.accelerator.torch_device)
        limits.shared.moves.append(self)

    @property
    def _home(self) -> Tier:
        return Tier.HOST if self._room is None else Tier.NVME

    def _not_for_members(self) -> int:
        of_others = self._limits.resident - self._limits.resident // self._parts()
        # A forward evicts early what will not fit, so that it need not wait. A backward evicts
        # little, and what it fetches ahead is resident.
        if self._is_saving:
            leaving = self._evicting_bytes + self._bytes_to_evict
            return of_others + min(self.most_in_flight, leaving)
        return of_others + self._evicting_bytes - self._limits.shared.spare()

    @property
    def most_in_flight(self) -> int:
        """The bytes that may be on their way at one time."""
        return self._limits.in_flight // self._parts()

    @property
    def _others(self) -> list[ActivationMoves]:
        return [moves for moves in self._limits.shared.moves if moves is not self]

    def _parts(self) -> int:
        # Asked several times for each tensor, and most often there are no others.
        if len(self._limits.shared.moves) == 1:
            return 1
        return 1 + sum(other.is_used for other in self._others)

    @property
    def _evicting_bytes(self) -> int:
        """The bytes that are on their way out, and do not stay."""
        evicting = self._evicting.values()
        return sum(memory.record.nbytes for memory in evicting if not memory.stays)

    @property
    def _bytes_to_evict(self) -> int:
        """The bytes that do not fit yet, if as much is saved as in the largest step before."""
        if not self._sizes.most_before:
            return self.most_in_flight
        evicted = self._sizes.total - self.resident.used
        return max(self._sizes.most_before - self._limits.resident // self._parts() - evicted, 0)

    @property
    def is_used(self) -> bool:
        """Whether something is saved, or on its way out."""
        return bool(self._sizes)

    def note_saving(self, saving: bool) -> None:
        """Note whether tensors are saved now, or needed again."""
        if self._is_saving and not saving:
            self._sizes.note_most()
        elif saving and not self._is_saving:
            self.give_back()
        self._is_saving = saving

    def end_step(self) -> None:
        """Expect the next step to save as much as the largest one so far."""
        self._sizes.end_step()
        self.resident.end_step()

    # --- what is here -----------------------------------------------------------------------------

    def admit(self, memory: SavedMemory) -> None:
        """Count memory that was just saved."""
        self._sizes.add(memory.number, memory.record.nbytes)
        self.resident.admit(memory.number, memory)

    def claim_part(self) -> None:
        """Let leave what others have beyond their part of the limits, from now on."""
        for other in self._others:
            other.settle()
            other.give_back()
            other.evict_all(other.resident.evictions(0))
            other.make_room()

    def settle(self) -> None:
        """Forget what no graph holds any more, and note which evictions have ended."""
        for memory in self._memories.drop_unused():
            self.forget(memory)
        self.note_ended()
        # Where nothing is saved here, others have the room.
        if self._is_saving or not self.is_used:
            self.give_back()

    def give_back(self) -> None:
        """Give back the memory that was read back into and that nothing uses."""
        self._read_back.give_back()

    def lease(self, memory: SavedMemory) -> Lease:
        """Return where it lies here, once it is."""
        lease = memory.record.where(self._borrowed.tier)
        assert isinstance(lease, Lease), "what was provided is here"
        return lease

    def forget(self, memory: SavedMemory) -> None:
        """Give memory back that no graph holds any more."""
        # What is being evicted is forgotten when that has ended.
        if self.is_evicting(memory.number):
            self._leave_after_all(memory)
            return
        if memory.number in self.resident:
            memory.transfer.wait()  # it may be fetched ahead, and the graph went without it
            memory.end_move().take_error()
            self.resident.remove(memory.number)
        self._release(memory)

    def _release(self, memory: SavedMemory) -> None:
        self._sizes.drop(memory.number)
        self._mover.forget(memory.record)

    def close(self) -> None:
        """Forget all that is saved, once it moves no more."""
        self._mover.drain()
        for memory in [*self._memories.by_number.values(), *self._evicting.values()]:
            memory.drop_original()  # a graph may still hold it
            self._mover.forget(memory.record)
            if memory.number in self.resident:
                self.resident.remove(memory.number)
        self._memories.clear()
        self._evicting.clear()
        self._borrowed.close()
        self._read_back.close()

    # --- what leaves ------------------------------------------------------------------------------

    @property
    def evicting(self) -> bool:
        """Whether something is on its way out."""
        return bool(self._evicting)

    def is_evicting(self, number: int) -> bool:
        """Tell whether this memory is on its way out."""
        return number in self._evicting

    def evict_all(self, numbers: Iterable[int]) -> None:
        """Begin to evict these memories."""
        # One at a time: `numbers` may be a generator that ends when enough has left.
        for number in numbers:
            self.evict(self._memories.by_number[number])

    def evict(self, memory: SavedMemory) -> None:
        """Begin to evict memory, behind what is on its way."""
        nbytes = memory.record.nbytes
        if self.is_evicting(memory.number):
            self._leave_after_all(memory)
            return
        self._wait_for(memory)  # it may be fetched ahead, and something else is needed sooner
        if memory.transfer.error is not None:
            memory.end_move().take_error()
            self.resident.remove(memory.number)
            return
        self._wait_for_evictions(max(self.most_in_flight + self._limits.shared.spare() - nbytes, 0))
        transfer = self._begin_eviction(memory)
        if isinstance(transfer.error, CapacityError):
            transfer.take_error()
            # The pool that it passes is in pieces: whole again when nothing is on its way.
            self._wait_for_evictions(0)
            transfer = self._begin_eviction(memory)
        # From here on its bytes are those of now. A change that no version tells, such as by numpy,
        # makes the memory another one for what is saved later.
        self._memories.forget_place(memory)
        memory.begin_move(transfer)
        self.resident.remove(memory.number)
        self._evicting[memory.number] = memory
        if transfer.done():
            self._end_eviction(memory)

    def make_room_for_saved(self, slack: int) -> None:
        """Evict what does not fit, and so many bytes more; wait where only that makes room."""
        if self._bytes_to_evict:
            self._evict_excess(slack)
        self._wait_for_excess()
        # More is saved than in the steps before.
        self._evict_excess(slack)
        self._wait_for_excess()

    def _evict_excess(self, slack: int) -> None:
        if self.resident.free >= 0:
            return
        left = slack - self.resident.free
        # What is on its way may still count, so that evictions alone do not make the room.
        for number in self.resident.evictions(slack):
            left -= self._sizes[number]
            self.evict(self._memories.by_number[number])
            if left <= 0:
                return

    def _wait_for_excess(self) -> None:
        if self.resident.free < 0:
            self._wait_for_evictions(max(self._evicting_bytes + self.resident.free, 0))

    def make_room(self) -> None:
        """Wait until no more is on its way out than there is room for."""
        self._wait_for_evictions(self.most_in_flight + self._limits.shared.spare())

    def _begin_eviction(self, memory: SavedMemory) -> Transfer:
        record = memory.record
        if self._room is not None and not record.is_current(Tier.NVME):
            # Those that are still on their way to the host have no place on the drives yet.
            before = sum(
                align_up(other.record.nbytes, PAGE)
                for other in self._evicting.values()
                if other.record.residency not in {Residency.STORING, Residency.NVME}
            )
            self._room.make(before + record.nbytes, what=record.name)
        # Its memory here is given back when the move has ended, unless it is needed by then.
        transfer = self._mover.move(record, self._home, source=Source.KEPT, after=self._computed())
        self._count(Lane.NVME_WRITE if self._home is Tier.NVME else Lane.D2H, memory, transfer)
        return transfer

    def _wait_for_evictions(self, most: int) -> None:
        """Wait until at most so many bytes are on their way, in not too many moves."""
        while self._evicting and (
            self._evicting_bytes > most or len(self._evicting) >= _MOST_MOVES
        ):
            oldest = next(iter(self._evicting.values()))
            with self._lanes.meter.timed_wait(Wait.ACTIVATIONS):
                oldest.transfer.wait()
            self._end_eviction(oldest)

    def _end_eviction(self, memory: SavedMemory) -> None:
        """Note the end of a move.

        The first failed move raises; moves that were under way at that time raise no more. The
        caller may still have their graph while it runs the step's batches again.

        Raises:
            CapacityError: there was no room. The memory is still here.
            TransferError: the I/O failed. The memory is still here.
        """
        del self._evicting[memory.number]
        was_raised = self._failure.was_raised_for(memory.number)
        stays = memory.stays
        memory.stay(False)
        error = memory.end_move().take_error()
        if not memory.views:
            self._release(memory)
            return
        if error is None:
            self._end_there(memory, stays=stays)
            return
        if memory.record.home() is not self._borrowed.tier:  # a first hop went well
            self._mover.move(
                memory.record, self._borrowed.tier
            )  # it is still here, so nothing moves
        if not stays:
            self.resident.admit(memory.number, memory)
        if not was_raised:
            self._failure.note(self._evicting)
            raise again(error)

    def _end_there(self, memory: SavedMemory, *, stays: bool) -> None:
        """Give its memory here back, which has a copy at home now; or let it stay as it is."""
        if stays:
            self._mover.move(
                memory.record, self._borrowed.tier
            )  # both copies are current: nothing moves
            return
        memory.drop_original()
        for tier in (Tier.DEVICE, Tier.HOST):
            if tier is not self._home:
                self._mover.release(memory.record, tier)

    def note_ended(self) -> None:
        """Note which evictions have ended; `raise_failure` says which one failed."""
        self._mover.poll()
        for memory in list(self._evicting.values()):
            if memory.transfer.done():
                try:
                    self._end_eviction(memory)
                # Not here: an update that was made must not look as if it had failed.
                except InfinityError as error:
                    self._failure.keep(error)
        self._borrowed.release_ended()

    def raise_failure(self) -> None:
        """Raise why something could not be evicted, once."""
        self._failure.raise_kept()

    # --- what comes back --------------------------------------------------------------------------

    def fetch(self, memory: SavedMemory) -> None:
        """Begin to fetch memory that has left."""
        nbytes = memory.record.nbytes
        room = self._read_back.take(nbytes, keep=max(self.resident.free - nbytes, 0))
        lease = self._borrowed.borrow(room, holder=memory.record.name)
        transfer = self._mover.move(
            memory.record, self._borrowed.tier, into=lease, after=self._computed()
        )
        memory.begin_move(transfer)
        self.resident.admit(memory.number, memory)
        self._count(Lane.NVME_READ if self._home is Tier.NVME else Lane.H2D, memory, transfer)

    def keep(self, memory: SavedMemory) -> None:
        """Let memory that is on its way out be here as well: it is needed before it has left."""
        if not memory.stays:
            memory.stay(True)
            self.resident.admit(memory.number, memory)

    def _leave_after_all(self, memory: SavedMemory) -> None:
        """Let memory that is on its way out leave, also where it was to stay."""
        if memory.stays:
            memory.stay(False)
            self.resident.remove(memory.number)

    def finish_eviction(self, memory: SavedMemory) -> None:
        """Wait until memory that is on its way out has left: it can be fetched then."""
        if self.is_evicting(memory.number):
            self._wait_for(memory)
            self._end_eviction(memory)

    def finish_fetch(self, memory: SavedMemory) -> None:
        """Wait until memory that is on its way back is here.

        Raises:
            TransferError: it could not be read. It can be fetched again.
        """
        if memory.stays:
            return
        self._wait_for(memory)
        transfer = memory.end_move()
        if transfer.error is not None:
            self.resident.remove(memory.number)
        transfer.result()

    def _wait_for(self, memory: SavedMemory) -> None:
        if not memory.transfer.poll():
            with self._lanes.meter.timed_wait(Wait.ACTIVATIONS):
                memory.transfer.wait()

    # --- the device -------------------------------------------------------------------------------

    def _computed(self) -> Sequence[Event]:
        """Return what a copy waits for: kernels that make what is read, or used what is written."""
        if self._borrowed.tier is Tier.HOST:
            return ()
        return (self._lanes.accelerator.record(self._lanes.compute),)

    def _count(self, lane: Lane, memory: SavedMemory, transfer: Transfer) -> None:
        self._lanes.meter.count_copy(
            lane,
            Cargo.ACTIVATIONS,
            memory.record.nbytes,
            transfer.event,
            name="activation",
            number=memory.number,
        )


class _FailedEvictions:
    """Why memory could not be evicted: raised once for all that was on its way out by then."""

    def __init__(self) -> None:
        self._error: InfinityError | None = None  # not raised yet
        # The numbers of what was on its way out when another memory failed.
        self._under_way: set[int] = set()

    def note(self, under_way: Iterable[int]) -> None:
        """Note that one is raised now, also for these, if they fail too."""
        self._under_way.update(under_way)

    def was_raised_for(self, number: int) -> bool:
        """Tell whether the failure of this memory was raised with that of another; once."""
        was_raised = number in self._under_way
        self._under_way.discard(number)
        return was_raised

    def keep(self, error: InfinityError) -> None:
        """Keep the first error until it can be raised."""
        self._error = self._error or kept(error)

    def raise_kept(self) -> None:
        """Raise what was kept, once."""
        error, self._error = self._error, None
        if error is not None:
            raise again(error)


class _Sizes(dict[int, int]):
    """The bytes of each memory that is saved, wherever it is; 0 of one that there is not, which a
    trace may predict.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.most_before = 0
        """The most bytes that a backward of a step before has found saved."""
        self._most = 0  # the same of this step

    def __missing__(self, number: int) -> int:
        return 0

    def add(self, number: int, nbytes: int) -> None:
        """Count memory that was just saved."""
        self[number] = nbytes
        self.total += nbytes

    def drop(self, number: int) -> None:
        """Count memory no more."""
        self.total -= self.pop(number)

    def note_most(self) -> None:
        """Note what a backward finds saved."""
        self._most = max(self._most, self.total)

    def end_step(self) -> None:
        """Count this step among those before."""
        self.most_before, self._most = max(self.most_before, self._most), 0
