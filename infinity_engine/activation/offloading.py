"""`ActivationOffload`: moves what autograd has saved to the host or to drives, and back in time.

A forward saves more than the limit: what is needed last leaves, while modules go on. A backward
needs one after the other: what comes next is fetched ahead. Each saved memory is a record in a
`ResidentSet`; how bytes move is the Mover's. See decision 0045.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from deepnvme.sizes import PAGE
from infinity_engine.accel import Event
from infinity_engine.activation.saved import KeptActivations, changed_since
from infinity_engine.errors import CapacityError, InfinityError
from infinity_engine.kept_errors import again, kept
from infinity_engine.lanes.lanes import Lanes
from infinity_engine.lanes.meter import Cargo, Wait
from infinity_engine.memory import BorrowedMemory, Lease
from infinity_engine.plan import Tier
from infinity_engine.plan.ops import Lane
from infinity_engine.residence import Mover, Residency, ResidentSet, ShardRecord
from infinity_engine.schedule import NEVER, Use
from infinity_engine.storage import SwapFile, Transfer
from infinity_engine.units import align_up

__all__ = ["ActivationLimits", "ActivationOffload", "DriveRoom"]

_LOOK_AHEAD = 32  # uses
_SMALLEST_PART = 4  # a view of less than a fourth of its memory stays: the rest is not autograd's
_MOST_MOVES = 64  # at one time: each saved tensor looks at all of them
_SLACK = 8  # part of the room that is made at once, as each time looks at all that is here
_GROWTH = 64 << 20  # bytes that the drives are asked for at once


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationLimits:
    """Bytes of saved memory that stay where modules compute, those of them that may be in flight,
    and how many a memory needs at least to be moved.
    """

    resident: int
    in_flight: int
    small: int


@dataclass(eq=False, slots=True)
class _Content:
    """One memory that autograd has saved, and how many saved tensors lie in it."""

    number: int
    use: Use
    record: ShardRecord
    address: int  # of the memory that was saved
    # A tensor in it, and its version when it was saved; None once the memory is a copy of ours.
    original: tuple[torch.Tensor, int] | None
    transfer: Transfer | None = None
    saved: int = 0
    changed: RuntimeError | None = None

    def drop_original(self) -> None:
        """Let the original go: the record has a copy of it elsewhere."""
        self.check()
        self.original = None

    def check(self) -> None:
        """Remember an in-place change of what was saved."""
        if self.original is not None and self.original[0]._version != self.original[1]:
            tensor, version = self.original
            self.changed = changed_since(tensor.shape, version, tensor._version)

    def add_view(self) -> None:
        """Count one more saved tensor in this memory."""
        self.saved += 1

    def drop_view(self) -> None:
        """Count one less."""
        self.saved -= 1

    def follow(self, transfer: Transfer) -> None:
        """Note the move that has begun."""
        self.transfer = transfer

    def end_move(self) -> Transfer:
        """Note that its move has ended; return that."""
        assert self.transfer is not None, "it is in a move"
        transfer, self.transfer = self.transfer, None
        return transfer


class _SavedView:
    """What autograd holds in place of a tensor: a view of a content."""

    __slots__ = ("_gone", "content", "dtype", "offset", "size", "stride")

    def __init__(self, content: _Content, tensor: torch.Tensor, gone: deque[_Content]) -> None:
        self.content = content
        self.dtype = tensor.dtype
        self.size = tuple(tensor.shape)
        self.stride = tensor.stride()
        self.offset = int(tensor.storage_offset())
        self._gone = gone
        content.add_view()

    # Runs wherever a graph goes, also within a call of the offload: it only appends.
    def __del__(self) -> None:
        self._gone.append(self.content)


class DriveRoom:
    """Room of a swap file that grows within the budget of its drives."""

    def __init__(self, swap: SwapFile, limits: Mapping[str, int]) -> None:
        self._swap = swap
        self._limits = limits

    def make(self, nbytes: int, *, what: str) -> None:
        """Have so many bytes free for `what`.

        Raises:
            CapacityError: the budget or the drive has less.
        """
        missing = align_up(nbytes, PAGE) - self._swap.free_bytes
        if missing > 0:
            try:
                self._grow(max(missing, _GROWTH))
            except CapacityError:
                self._grow_at_least(missing, what)

    def _grow_at_least(self, nbytes: int, what: str) -> None:
        try:
            self._grow(nbytes)
        except CapacityError as error:
            raise replace(
                error,
                change=f"{error.change}, or raise activations.resident_bytes: {what} has to leave "
                "memory for a drive",
            ) from None

    def _grow(self, nbytes: int) -> None:
        every = max(sum(self._limits.values()), 1)
        self._swap.grow(
            {
                directory: align_up(-(-nbytes * limit // every), PAGE)
                for directory, limit in self._limits.items()
            }
        )


class ActivationOffload:
    """Moves saved tensors to `home`, HOST or NVME; `room` is where they lie on drives."""

    offloads = True

    def __init__(
        self,
        lanes: Lanes,
        mover: Mover,
        memory: BorrowedMemory,
        limits: ActivationLimits,
        *,
        home: Tier,
        here: Tier,
        room: DriveRoom | None,
    ) -> None:
        self._lanes = lanes
        self._mover = mover
        self._memory = memory
        self._limits = limits
        self._home = home
        self._here = here
        self._room = room
        self._kept = KeptActivations()
        self._own: frozenset[int] = frozenset()  # addresses of memory that is the model's
        self._sizes = _Sizes()
        self._resident: ResidentSet[_Content] = ResidentSet(
            self._sizes, limits.resident - limits.in_flight
        )
        self._contents: dict[int, _Content] = {}  # by number
        self._by_address: dict[int, _Content] = {}  # by address, those whose memory is the original
        self._evicting: dict[int, _Content] = {}  # by number, the oldest first
        self._evicting_bytes = 0
        self._next = 0
        self._gone: deque[_Content] = deque()  # once for each saved view that has gone
        self._failed: InfinityError | None = None
        # What a first step expects: everything up to this number has its place in the trace.
        self._expected = -1
        # Autograd's threads of several devices, or the caller's own.
        self._lock = threading.RLock()
        self._closed = False

    # --- what autograd asks -----------------------------------------------------------------------

    def begin_forward(self, own: Iterable[torch.Tensor]) -> None:
        """Take the model's parameters and buffers as what stays anyway."""
        with self._lock:
            self._settle()
        self._own = frozenset(
            tensor.untyped_storage().data_ptr()
            for tensor in own
            if tensor.layout == torch.strided and tensor.device.type != "meta"
        )

    def pack(self, tensor: torch.Tensor) -> object:
        """Return what is saved in place of a tensor; it may leave from here on.

        Raises:
            CapacityError: the host or the drives have no room for what has to leave.
            TransferError: what has to leave could not be written.
        """
        if self._closed or not self._is_movable(tensor):
            return self._kept.pack(tensor)
        with self._lock:
            self._settle()
            self._raise_failure()
            storage = tensor.untyped_storage()
            content = self._by_address.get(storage.data_ptr())
            if (
                content is None
                or content.original is None
                or content.original[1] != tensor._version
            ):
                content = self._add(tensor, storage)
            saved = _SavedView(content, tensor, self._gone)
            if self._resident.free < 0:
                for number in self._resident.evictions(self._resident.limit // _SLACK):
                    self._evict(self._contents[number])
            return saved

    def unpack(self, saved: object) -> torch.Tensor:
        """Return a saved tensor, fetched if it has left; fetch what comes next.

        Raises:
            RuntimeError: it was changed in place since it was saved, or the engine was closed.
            TransferError: it could not be read back; it can be asked for again.
        """
        if not isinstance(saved, _SavedView):
            return self._kept.unpack(saved)
        if self._closed:
            raise RuntimeError(
                "The engine was closed before this backward, and with it went what the forward "
                "has saved. Call backward() before close(), or run the model again"
            )
        with self._lock:
            self._settle()
            self._raise_failure()
            content = saved.content
            content.check()
            if content.changed is not None:
                raise content.changed
            self._lanes.meter.needs(
                Cargo.ACTIVATIONS, content.record.nbytes, found=content.original is not None
            )
            self._expect(content)
            self._resident.record_use(content.use)
            self._resident.hold((content.number,))
            try:
                self._bring(content)
                self._prefetch()
            finally:
                self._resident.let_go((content.number,))
            return self._view(saved)

    def end_step(self) -> None:
        """Predict the next step by this one. Numbers begin anew where nothing is saved."""
        with self._lock:
            self._settle()
            self._resident.end_step()
            self._expected = -1
            # What is being evicted keeps its number until that has ended.
            if not self._contents and not self._evicting:
                self._next = 0

    def close(self) -> None:
        """Forget all that is saved, once it moves no more."""
        self._closed = True
        self._mover.drain()
        for content in [*self._contents.values(), *self._evicting.values()]:
            self._mover.forget(content.record)
        self._contents.clear()
        self._evicting.clear()
        self._by_address.clear()
        self._memory.close()

    # --- what is saved ----------------------------------------------------------------------------

    def _is_movable(self, tensor: torch.Tensor) -> bool:
        """Tell whether a saved tensor may leave."""
        if (
            type(tensor) is not torch.Tensor  # what a subclass has besides would be lost
            or tensor.layout != torch.strided
            or tensor.device != self._lanes.accelerator.torch_device
            # A conjugated or negated view shows other values than its memory has.
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return False
        storage = tensor.untyped_storage()
        extent = tensor.element_size() * (
            1
            + sum(
                (size - 1) * stride
                for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            )
            if tensor.numel()
            else 0
        )
        return (
            storage.nbytes() >= self._limits.small
            and extent * _SMALLEST_PART >= storage.nbytes()
            and storage.data_ptr() not in self._own
        )

    def _add(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> _Content:
        """Return a content for the memory of a tensor that was not saved yet."""
        number, self._next = self._next, self._next + 1
        name = f"activation {number}"
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        lease = self._memory.borrow(flat, holder=name)
        content = _Content(
            number,
            Use(name, (number,)),
            ShardRecord(name, lease),
            storage.data_ptr(),
            # Detached: the tensor itself would hold its graph, and the graph holds what is saved.
            (tensor.detach(), tensor._version),
        )
        self._sizes[number] = lease.nbytes
        self._contents[number] = self._by_address[content.address] = content
        self._resident.admit(number, content)
        return content

    def _view(self, saved: _SavedView) -> torch.Tensor:
        lease = saved.content.record.where(self._here)
        assert isinstance(lease, Lease), "what was provided is here"
        flat = lease.flat()
        # The memory of a view may have bytes beyond the last whole element.
        typed = flat[: flat.numel() - flat.numel() % saved.dtype.itemsize].view(saved.dtype)
        return typed.as_strided(
            saved.size, saved.stride, int(typed.storage_offset()) + saved.offset
        )

    def _settle(self) -> None:
        """Forget what no graph holds any more, and note which evictions have ended."""
        while self._gone:
            content = self._gone.popleft()
            content.drop_view()
            if not content.saved and content.number in self._contents:
                self._forget(content)
        self._mover.poll()
        for content in list(self._evicting.values()):
            if content.transfer is not None and content.transfer.done():
                try:
                    self._end_eviction(content)
                # Not here: an update that was made must not look as if it had failed.
                except InfinityError as error:
                    self._failed = self._failed or kept(error)
        self._memory.release_ended()

    def _raise_failure(self) -> None:
        """Raise why something could not be evicted, once."""
        error, self._failed = self._failed, None
        if error is not None:
            raise again(error)

    def _forget(self, content: _Content) -> None:
        del self._contents[content.number]
        self._forget_address(content)
        # What is being evicted is forgotten when that has ended.
        if content.number in self._evicting:
            return
        if content.number in self._resident:
            if content.transfer is not None:
                content.transfer.wait()  # it was fetched ahead, and the graph went without it
                content.end_move().take_error()
            self._resident.remove(content.number)
        del self._sizes[content.number]
        self._mover.forget(content.record)

    def _forget_address(self, content: _Content) -> None:
        """Share the content with no tensor that is saved from here on."""
        if self._by_address.get(content.address) is content:
            del self._by_address[content.address]

    # --- evicting ---------------------------------------------------------------------------------

    def _evict(self, content: _Content) -> None:
        """Begin to evict a content, behind those that are on their way."""
        nbytes = content.record.nbytes
        if content.transfer is not None:
            self._wait_for(content)  # it was fetched ahead, and something else is needed sooner
            if content.transfer.error is not None:
                content.end_move().take_error()
                self._resident.remove(content.number)
                return
        self._wait_for_evictions(max(self._limits.in_flight - nbytes, 0))
        transfer = self._begin_eviction(content)
        if isinstance(transfer.error, CapacityError):
            transfer.take_error()
            # The pool that it passes is in pieces: whole again when nothing is on its way.
            self._wait_for_evictions(0)
            transfer = self._begin_eviction(content)
        # From here on its bytes are those of now. A change that no version tells, such as by numpy,
        # makes the memory another one for what is saved later.
        self._forget_address(content)
        content.follow(transfer)
        self._resident.remove(content.number)
        self._evicting[content.number] = content
        self._evicting_bytes += nbytes
        if transfer.done():
            self._end_eviction(content)

    def _begin_eviction(self, content: _Content) -> Transfer:
        record = content.record
        if self._room is not None and not record.is_current(Tier.NVME):
            # Those that are still on their way to the host have no place on the drives yet.
            before = sum(
                align_up(other.record.nbytes, PAGE)
                for other in self._evicting.values()
                if other.record.residency not in {Residency.STORING, Residency.NVME}
            )
            self._room.make(before + record.nbytes, what=record.name)
        transfer = self._mover.move(record, self._home, after=self._computed())
        self._count(Lane.NVME_WRITE if self._home is Tier.NVME else Lane.D2H, content, transfer)
        return transfer

    def _wait_for_evictions(self, most: int) -> None:
        """Wait until at most so many bytes are on their way, in not too many moves."""
        while self._evicting and (
            self._evicting_bytes > most or len(self._evicting) >= _MOST_MOVES
        ):
            oldest = next(iter(self._evicting.values()))
            assert oldest.transfer is not None, "what is evicted is in a move"
            with self._lanes.meter.waits(Wait.ACTIVATIONS):
                oldest.transfer.wait()
            self._end_eviction(oldest)

    def _end_eviction(self, content: _Content) -> None:
        """Note the end of a move.

        Raises:
            CapacityError: there was no room. The content is still in memory.
            TransferError: the I/O failed. The content is still in memory.
        """
        del self._evicting[content.number]
        self._evicting_bytes -= content.record.nbytes
        error = content.end_move().take_error()
        if not content.saved:
            del self._sizes[content.number]
            self._mover.forget(content.record)
            return
        if error is None:
            content.drop_original()
            return
        if content.record.home() is self._here:
            self._resident.admit(content.number, content)
        raise again(error)

    # --- bringing ---------------------------------------------------------------------------------

    def _bring(self, content: _Content) -> None:
        """Have a content here."""
        if content.number in self._evicting:
            self._wait_for(content)
            self._end_eviction(content)
        if self._resident.note_needs((content.number,)):
            for number in self._resident.evictions(content.record.nbytes):
                self._evict(self._contents[number])
            self._fetch(content)
        if content.transfer is None:
            return
        self._wait_for(content)
        transfer = content.end_move()
        if transfer.error is not None:
            self._resident.remove(content.number)
        transfer.result()

    def _wait_for(self, content: _Content) -> None:
        assert content.transfer is not None, "it is in a move"
        if not content.transfer.poll():
            with self._lanes.meter.waits(Wait.ACTIVATIONS):
                content.transfer.wait()

    def _fetch(self, content: _Content) -> None:
        """Begin to fetch a content."""
        lease = self._memory.borrow(
            _new_bytes(content.record.nbytes, self._lanes.accelerator.torch_device),
            holder=content.record.name,
        )
        transfer = self._mover.move(content.record, self._here, into=lease, after=self._computed())
        content.follow(transfer)
        self._resident.admit(content.number, content)
        self._count(Lane.NVME_READ if self._home is Tier.NVME else Lane.H2D, content, transfer)

    def _expect(self, content: _Content) -> None:
        """Predict that what was saved before is needed next, where no step has shown otherwise."""
        if content.number > self._expected and self._resident.next_use(content.number) == NEVER:
            self._expected = content.number
            self._resident.expect(
                [
                    self._contents[number].use
                    for number in sorted(self._contents, reverse=True)
                    if number <= content.number
                ]
            )

    def _prefetch(self) -> None:
        """Begin to fetch what is needed next, as far as there is room."""
        upcoming = self._resident.upcoming(_LOOK_AHEAD)
        if all(use.parameters[0] in self._resident for _, use in upcoming):
            return
        chosen = self._resident.choose(upcoming)
        for number in chosen.evicted:
            self._evict(self._contents[number])
        for number in chosen.fetched:
            # The trace may have uses of what was not saved in this step.
            if number in self._evicting:
                self._resident.fetch_again(number)
            elif number in self._contents:
                self._fetch(self._contents[number])

    # --- the device -------------------------------------------------------------------------------

    def _computed(self) -> Sequence[Event]:
        """Return what a copy waits for: kernels that make what is read, or used what is written."""
        if self._here is Tier.HOST:
            return ()
        return (self._lanes.accelerator.record(self._lanes.compute),)

    def _count(self, lane: Lane, content: _Content, transfer: Transfer) -> None:
        self._lanes.meter.copies(
            lane,
            Cargo.ACTIVATIONS,
            content.record.nbytes,
            transfer.event,
            name="activation",
            number=content.number,
        )


class _Sizes(dict[int, int]):
    """The bytes of each content; 0 of one that there is not, which a trace may predict."""

    def __missing__(self, number: int) -> int:
        return 0


def _new_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return uninitialized memory; on the CPU it begins on a page, so that drives write to it."""
    if device.type != "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    memory = torch.empty(nbytes + PAGE, dtype=torch.uint8)
    begin = -memory.data_ptr() % PAGE
    return memory[begin : begin + nbytes]
