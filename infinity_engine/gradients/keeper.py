"""`GradientKeeper`: holds gradients from the moment autograd makes them until an update used them.

The first gradient of a step stays in the dtype it came in. From the second on they are summed in
fp32, in the order in which they come. Where a gradient lies follows from where its subgroup is
updated: on the device where the device updates it, in pinned host memory where the host does, on
the drives where the states are there. On the drives each micro-batch has a gradient of its own, and
the update sums them in order. Updates nothing.

[Note: who counts gradients that stay] Autograd has allocated a gradient that stays on the device,
so it is no lease: its bytes are held of a reservation. A gradient that is added to a sum is not
counted. It is autograd's memory until the addition, and the device's allocator reuses it in stream
order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from deepnvme.sizes import PAGE
from infinity_engine.accel import Event
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.gradients.offloading import GradientOffload, NoOffload
from infinity_engine.kept_errors import kept
from infinity_engine.lanes.lanes import Lanes
from infinity_engine.lanes.meter import Cargo, Wait
from infinity_engine.memory import Lease, PinnedPool, Reservation
from infinity_engine.optim import FloatFormat, GradientNorm, GradientSums, HostKernels, Values
from infinity_engine.placement.pieces import GradientPiece
from infinity_engine.plan import Tier
from infinity_engine.plan.ops import Lane
from infinity_engine.storage import Hop, Hops, Place
from infinity_engine.units import align_up

__all__ = ["GradientKeeper", "added_up"]

_Sums = npt.NDArray[np.float64]
_Coming = tuple[Event, Callable[[], None]]
"""The event of a sum on the device, and what stores the sum once the event has passed."""
_ADDING = "addition of gradients"
_GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)


class GradientKeeper:
    """The gradients of one engine; `pieces` says for each parameter where each piece is kept.

    `staying` counts gradients that stay on the device, and `sums` those sums on the host that no
    plan foresees. Both grow as far as the budget allows when more comes than was planned, and
    shrink when it is dropped. `planned` is how many gradients of each parameter a step has. With
    `sums_early`, block sums for the norm are computed while a gradient is still in memory on its
    way to the drives.
    """

    def __init__(
        self,
        names: Sequence[str],
        numels: Sequence[int],
        pieces: Sequence[Sequence[GradientPiece]],
        lanes: Lanes,
        offload: GradientOffload | NoOffload,
        *,
        staying: Reservation,
        sums: Reservation,
        planned: int,
        sums_early: bool = False,
    ) -> None:
        self._names = tuple(names)
        self._numels = tuple(numels)
        self._lanes = lanes
        self.room = staying.nbytes  # the bytes planned for gradients that stay on the device
        self._staying = staying
        self._planned = planned
        self._sum_memory = _SumMemory(lanes.host, sums, planned=planned > 1)
        self._offload = offload
        self._sums_early = sums_early
        # The plan says which pieces there are: another plan makes new slots in keep_in().
        self._slots: tuple[_Slots, ...] = ()
        self._refused_name: str | None = None  # its gradient was refused
        self.refusal: CapacityError | None = None
        """The first error that `deliver` has kept since `clear`."""
        self.keep_in(pieces)

    def keep_in(self, pieces: Sequence[Sequence[GradientPiece]]) -> None:
        """Keep gradients in these pieces from now on. There must be none at present."""
        assert not self.any, "the pieces change only while there are no gradients"
        self._slots = tuple(
            _Slots(
                name,
                numel,
                kept,
                self._lanes,
                self._offload,
                parameter=number,
                staying=self._staying,
                sum_memory=self._sum_memory,
                sums_early=self._sums_early,
            )
            for number, (name, numel, kept) in enumerate(
                zip(self._names, self._numels, pieces, strict=True)
            )
        )

    def make_room(self, nbytes: int) -> None:
        """Reserve `nbytes` for gradients that stay on the device.

        Raises:
            CapacityError: the budget has too little left. Nothing has changed.
        """
        more = nbytes - self._staying.nbytes
        if more > 0:
            self._staying.grow(more)
        else:
            self._staying.shrink(-more)
        self.room = nbytes

    @property
    def any(self) -> bool:
        """Whether a gradient has come."""
        return any(slots.count for slots in self._slots)

    def has(self, parameter: int) -> bool:
        """Tell whether a gradient of this parameter has come."""
        return self._slots[parameter].count > 0

    def accumulate(self, parameter: int, gradient: torch.Tensor) -> None:
        """Add a gradient to the earlier ones of its parameter, and own its memory from here on."""
        try:
            self._slots[parameter].accumulate(_flat(gradient))
        except Exception:
            # Some of its pieces may have been added and others not: useless before clear().
            self._refused_name = self._names[parameter]
            if gradient.dtype not in _GRADIENTS:
                raise ConfigError(
                    field=f"gradient of {self._refused_name}",
                    value=str(gradient.dtype),
                    expected=f"one of {', '.join(map(str, _GRADIENTS))}, the dtypes that "
                    "initialize gives to parameters. Do not cast the model after initialize, as "
                    "model.to(dtype) does: set `precision` in initialize",
                ) from None
            raise

    def deliver(self, parameter: int, gradient: torch.Tensor) -> None:
        """Add a sum of all ranks' gradients; where there is no room for it, keep the `refusal`.

        The reduces go on: other ranks take part in them.
        """
        try:
            self.accumulate(parameter, gradient)
        except CapacityError as error:
            self.refusal = self.refusal or kept(error)

    @property
    def may_refuse(self) -> bool:
        """Whether a further gradient of a parameter takes memory that no plan has room for.

        Between reduces, the same on all ranks.
        """
        return any(slots.count == self._planned for slots in self._slots)

    @property
    def may_have_refused(self) -> bool:
        """Whether such a gradient has come. Between reduces, the same on all ranks."""
        return any(slots.count > self._planned for slots in self._slots)

    def check_room_for_more(self) -> None:
        """Refuse another backward where the host has no room to sum more gradients than planned.

        Raises:
            CapacityError: it has not. Nothing has changed.
        """
        try:
            self._sum_memory.check_room(sum(slots.missing_sum_bytes for slots in self._slots))
        except CapacityError as error:
            raise _refused(
                error,
                f"accumulation_steps plans for {self._planned} in a step. This backward() would be "
                "one more, and its gradients are added up in host memory. Nothing was lost: call "
                "step(), which uses what has come, then compute this loss again. If a step has "
                "more backwards, raise accumulation_steps to their number, or add up the losses of "
                "one batch",
            ) from None

    def note_refused(self, name: str) -> None:
        """Refuse every step until `clear`: a backward refused a gradient of this parameter."""
        self._refused_name = name

    def values(self, parameter: int, piece: int) -> Values | None:
        """Return a piece of a gradient in the memory where its update runs.

        None where no gradient has come, or where it is on the drives: use `read` there.
        """
        slots = self._slots[parameter]
        return slots.values(piece) if slots.count else None

    def release(self, parameter: int, piece: int) -> None:
        """Note that an update has used a piece; the last one frees a gradient on the device.

        Any thread may call this.
        """
        self._slots[parameter].release(piece)

    def read(
        self, parameter: int, piece: int, into: Sequence[memoryview], *, start: int = 0
    ) -> list[Hop]:
        """Begin to read a piece from the drives into `into`, one memory for each micro-batch.

        The first memory gets the gradient of micro-batch `start`.
        """
        return self._slots[parameter].read(piece, into, start)

    def formats(self, parameter: int, piece: int) -> tuple[FloatFormat, ...]:
        """Return the format of each gradient that `read` reads."""
        return self._slots[parameter].formats(piece)

    def finish_transfers(self) -> None:
        """Wait for all copies, additions and writes of gradients.

        Raises:
            RuntimeError: a gradient was refused. Raised until `clear`.
            TransferError: a write to the drives failed and its gradient is lost. Raised until
                `clear`.
        """
        if self._refused_name is not None:
            raise RuntimeError(
                f"A gradient of {self._refused_name} was refused in a backward, as its error said, "
                "so the gradients are incomplete. Call zero_grad(), and repeat the backwards of "
                "this step"
            )
        # Copies to the host first: meanwhile the drives write, and these are waited for last.
        for slots in self._slots:
            slots.finish_transfers()
        self._offload.finish_writes()

    def start_writing(self) -> None:
        """Begin all writes to the drives, so that other code can wait for their buffers."""
        self._offload.start()

    def norm(self) -> GradientNorm:
        """Return the norm of all gradients, after `finish_transfers`."""
        return self.sums().total()

    def sums(self) -> GradientSums:
        """Return the block sums that make up the norm."""
        sums = GradientSums(self._numels)
        # All are begun before the first is waited for, so that the device has no pause.
        coming = [
            pending
            for number, slots in enumerate(self._slots)
            for pending in slots.put_sums(number, sums)
        ]
        if coming:
            with self._lanes.meter.timed_wait(Wait.GRADIENTS):
                for event, put in coming:
                    event.wait()
                    put()
        return sums

    def sum_of(self, parameter: int) -> torch.Tensor | None:
        """Return a flat fp32 copy of a parameter's gradient, after `finish_transfers`.

        None where no gradient has come, or an update has used it.

        Raises:
            CapacityError: there is no room to read it from the drives.
        """
        slots = self._slots[parameter]
        # Ordinary memory of the caller's, not of the pool: it may live as long as the caller likes.
        whole = torch.empty(self._numels[parameter])
        return whole if slots.count and slots.copy_into(whole) else None

    def write_back(self, parameter: int, piece: int, memory: memoryview) -> None:
        """Write the newest gradient of a piece to the drives from the interceptor's memory."""
        self._slots[parameter].write_back(piece, memory)

    def clear(self) -> None:
        """Drop all gradients."""
        self._refused_name = self.refusal = None
        self._offload.drop()
        for slots in self._slots:
            slots.clear()
        if self._staying.nbytes > self.room:  # what came was more than was planned
            self.make_room(self.room)


class _Slots:
    """The gradient of one parameter, whole or in pieces, on the device, the host or the drives."""

    def __init__(
        self,
        name: str,
        numel: int,
        pieces: Sequence[GradientPiece],
        lanes: Lanes,
        offload: GradientOffload | NoOffload,
        *,
        parameter: int,
        staying: Reservation,
        sum_memory: _SumMemory,
        sums_early: bool,
    ) -> None:
        self.count = 0
        self._pieces = pieces
        stay = [number for number, piece in enumerate(pieces) if piece.kept is Tier.DEVICE]
        # Autograd's own tensor serves all pieces, and nothing is copied.
        if stay and len(stay) == len(pieces):
            whole = _DeviceSlot(
                GradientPiece(0, numel, Tier.DEVICE), stay, lanes, staying, is_whole=True
            )
            self._on_device = dict.fromkeys(stay, whole)
        else:
            self._on_device = {
                number: _DeviceSlot(pieces[number], [number], lanes, staying, is_whole=False)
                for number in stay
            }
        # Each slot once: all pieces of a whole gradient share one.
        self._device_slots = tuple(dict.fromkeys(self._on_device.values()))
        self._on_host: dict[int, _HostSlot | _DriveSlot] = {}
        for number, piece in enumerate(pieces):
            if piece.kept is Tier.HOST:
                self._on_host[number] = _HostSlot(piece, lanes, _HostSum(piece, lanes, sum_memory))
            elif piece.kept is Tier.NVME:
                assert isinstance(offload, GradientOffload), "there are drives"
                self._on_host[number] = _DriveSlot(
                    name,
                    piece,
                    lanes,
                    offload,
                    _HostSum(piece, lanes, sum_memory),
                    number=(parameter, number),
                    sums_early=sums_early,
                )

    def accumulate(self, gradient: torch.Tensor) -> None:
        self.count += 1
        for slot in self._on_host.values():
            slot.accumulate(gradient)
        for on_device in self._device_slots:
            on_device.accumulate(gradient)

    @property
    def missing_sum_bytes(self) -> int:
        """The bytes of host sums that one more gradient of this parameter would need."""
        return sum(slot.missing_sum_bytes for slot in self._on_host.values()) if self.count else 0

    def values(self, number: int) -> Values | None:
        if number in self._on_host:
            return self._on_host[number].values()
        return self._on_device[number].values(self._pieces[number])

    # Without a gradient, clear() would not put the piece back among those that are left.
    def release(self, number: int) -> None:
        if self.count and number in self._on_device:
            self._on_device[number].release(number)

    def read(self, number: int, into: Sequence[memoryview], start: int) -> list[Hop]:
        return self._drive_slot(number).read(into, start)

    def formats(self, number: int) -> tuple[FloatFormat, ...]:
        return self._drive_slot(number).formats

    def write_back(self, number: int, memory: memoryview) -> None:
        self._drive_slot(number).write_back(memory)

    def _drive_slot(self, number: int) -> _DriveSlot:
        slot = self._on_host[number]
        assert isinstance(slot, _DriveSlot), "only what is on the drives is read"
        return slot

    def finish_transfers(self) -> None:
        for slot in self._on_host.values():
            slot.finish_transfers()

    def put_sums(self, parameter: int, sums: GradientSums) -> list[_Coming]:
        """Store the block sums of every piece. Return those that the device is still computing."""
        if not self.count:
            return []
        coming = []
        for number, piece in enumerate(self._pieces):
            put = partial(sums.put, parameter, piece.first_element)
            if number in self._on_host:
                put(self._on_host[number].sums())
            else:
                coming.append(self._on_device[number].sums(piece, put))
        return coming

    def copy_into(self, whole: torch.Tensor) -> bool:
        """Copy every piece that exists. Tell whether that was the whole gradient."""
        found = True
        for number, piece in enumerate(self._pieces):
            into = whole[piece.first_element :][: piece.numel]
            if number in self._on_host:
                found &= self._on_host[number].copy_into(Values.of(into))
            # Not `and`, which would copy nothing after the first piece that was used already.
            else:
                found &= self._on_device[number].copy_into(piece, into)
        return found

    def clear(self) -> None:
        if not self.count:
            return
        self.count = 0
        for slot in self._on_host.values():
            slot.clear()
        for on_device in self._device_slots:
            on_device.clear()


class _DeviceSlot:
    """A gradient on the device, or one piece of it, until the pieces with these numbers used it."""

    def __init__(
        self,
        part: GradientPiece,
        pieces: Sequence[int],
        lanes: Lanes,
        staying: Reservation,
        *,
        is_whole: bool,
    ) -> None:
        self._part = part
        self._is_whole = is_whole
        self._pieces = pieces
        self._lanes = lanes
        self._staying = staying
        # Updates on the device end in a thread of the device: it may release the last piece while
        # the main thread clears.
        self._lock = threading.Lock()
        self._left = set(pieces)
        self._tensor: torch.Tensor | None = None
        self._is_sum = False

    def accumulate(self, gradient: torch.Tensor) -> None:
        piece = (
            gradient if self._is_whole else gradient[self._part.first_element :][: self._part.numel]
        )
        if self._tensor is None:
            nbytes = piece.nbytes
            self._hold(nbytes, first=piece.dtype)  # [Note: who counts gradients that stay]
            try:
                whole = self._is_whole and piece.untyped_storage().nbytes() == nbytes
                # A part of a larger storage is copied, so that the rest of the storage is freed.
                self._tensor = piece if whole else piece.clone()
            except BaseException:
                self._staying.release(nbytes)
                raise
            return
        # From the second gradient on, the slot is an fp32 sum, whatever dtypes come.
        kernels, numel = self._lanes.device_kernels, self._part.numel
        if not self._is_sum:
            first = self._tensor
            nbytes = FloatFormat.FP32.nbytes * numel
            # Both count for a moment: the first one is released once it is in the sum.
            self._hold(nbytes)
            try:
                total = torch.empty(numel, dtype=torch.float32, device=gradient.device)
                self._lanes.on_device(
                    partial(_add, kernels.begin_sum, first, total), numel, name=_ADDING
                )
            except BaseException:
                self._staying.release(nbytes)
                raise
            # The kernel may still be reading `first`: the allocator reuses it in stream order.
            self._tensor, self._is_sum = total, True
            # Last: after an error above, the first gradient is still there and counted.
            self._staying.release(first.nbytes)
        add = partial(_add, kernels.add_to_sum, piece, self._tensor)
        self._lanes.on_device(add, numel, name=_ADDING)

    def _hold(self, nbytes: int, *, first: torch.dtype | None = None) -> None:
        """Count bytes that stay on the device; grow the reservation where more come than planned.

        `first` is the dtype of a first gradient, None for a sum: each has an error of its own.
        """
        try:
            self._staying.hold(nbytes)
        except CapacityError:
            self._hold_unplanned(nbytes, first)

    def _hold_unplanned(self, nbytes: int, first: torch.dtype | None) -> None:
        try:
            # Only what is missing: a part of the reservation may be free.
            self._staying.grow(max(self._staying.held + nbytes - self._staying.nbytes, 0))
        except CapacityError as error:
            raise (_too_many(error) if first is None else _unplanned(error, first)) from None
        self._staying.hold(nbytes)

    def release(self, piece: int) -> None:
        """Free the gradient if this was its last piece."""
        with self._lock:
            self._left.discard(piece)
            if not self._left:
                self._let_go()

    def _let_go(self) -> None:
        if self._tensor is not None:
            # Soon: kernels that were given this memory may not have run yet.
            self._staying.release_soon(self._tensor.nbytes)
            self._tensor = None

    def values(self, piece: GradientPiece) -> Values:
        assert self._tensor is not None, "a gradient has come, and was not used"
        whole = Values.of(self._tensor)
        if piece.numel == whole.numel:
            return whole
        return whole.part(piece.first_element - self._part.first_element, piece.numel)

    def sums(self, piece: GradientPiece, put: Callable[[_Sums], None]) -> _Coming:
        values, kernels = self.values(piece), self._lanes.device_kernels
        # Carries the result out of `work`, which may run later, in a thread of the device.
        made: list[object] = []

        def work() -> None:
            made.append(kernels.block_sums(values))

        event = self._lanes.on_device(work, piece.numel, name="norm of gradients")
        return event, lambda: put(kernels.on_host(made.pop()))

    def copy_into(self, piece: GradientPiece, into: torch.Tensor) -> bool:
        if self._tensor is None:
            return False
        # The compute stream may still be adding to it.
        self._lanes.accelerator.record(self._lanes.compute).wait()
        into.copy_(self._tensor[piece.first_element - self._part.first_element :][: piece.numel])
        return True

    def clear(self) -> None:
        with self._lock:
            self._let_go()
            # All pieces again: the next gradient is used by as many updates.
            self._left.update(self._pieces)
            self._is_sum = False


class _HostSlot:
    """A piece of a gradient in pinned host memory, or on its way there."""

    def __init__(self, piece: GradientPiece, lanes: Lanes, total: _HostSum) -> None:
        self._piece = piece
        self._lanes = lanes
        self._sum = total
        self._newest: tuple[Lease, Event | None, Values] | None = None
        self._block_sums: _Sums | None = None

    def accumulate(self, gradient: torch.Tensor) -> None:
        # Folded only now: the copy of the one before has had a whole backward to arrive.
        if self._newest is not None:
            self._fold(self._newest[0])
        format_ = Values.of(gradient).format
        piece = gradient[self._piece.first_element :][: self._piece.numel].view(torch.uint8)
        lease = self._lanes.host.lease(piece.numel(), holder="gradients")
        made = _download(self._lanes, piece, lease)
        self._newest = (lease, made, _values_in(lease, self._piece.numel, format_))

    @property
    def missing_sum_bytes(self) -> int:
        return self._sum.missing_bytes

    def _fold(self, lease: Lease) -> None:
        """Add the newest gradient, which is in `lease`, to the sum."""
        self._block_sums = self._sum.add(self._arrived())
        # The pool has this memory back before accumulate() asks for the next.
        lease.close()
        self._newest = None

    def _arrived(self) -> Values:
        """Return the newest gradient once it is on the host."""
        assert self._newest is not None, "there is one"
        _, made, values = self._newest
        if made is not None:
            with self._lanes.meter.timed_wait(Wait.GRADIENTS):
                made.wait()
        return values

    def finish_transfers(self) -> None:
        if self._newest is not None:
            self.values()

    def values(self) -> Values:
        # One gradient alone is used as it came, in its own dtype; the update converts it.
        if not self._sum.exists:
            return self._arrived()
        if self._newest is not None:
            self._fold(self._newest[0])
        return self._sum.values

    def copy_into(self, into: Values) -> bool:
        # A sum of one term is a copy that converts to fp32.
        self._lanes.kernels.begin_sum(self.values(), into)
        return True

    def sums(self) -> _Sums:
        values = self.values()
        # Kept until the gradient changes: norm and clip_grad_norm_ may both ask.
        if self._block_sums is None:
            self._block_sums = self._lanes.kernels.block_sums(values)
        return self._block_sums

    def clear(self) -> None:
        if self._newest is not None:
            self._newest[0].close()
        self._sum.clear()
        self._newest = self._block_sums = None


class _DriveSlot:
    """A piece of a gradient on the drives, where each micro-batch has one, in order.

    If more come than have a place there, all are summed in host memory from then on, as far as
    there is room. `number` is the parameter's and that of the piece.
    """

    def __init__(
        self,
        name: str,
        piece: GradientPiece,
        lanes: Lanes,
        offload: GradientOffload,
        total: _HostSum,
        *,
        number: tuple[int, int],
        sums_early: bool,
    ) -> None:
        self.formats: tuple[FloatFormat, ...] = ()
        self._number = number
        self._what = f"gradient of {name}"
        self._piece = piece
        self._lanes = lanes
        self._offload = offload
        self._sum = total
        self._sums_early = sums_early
        self._places: list[Place] = []
        self._block_sums: _Sums | None = None

    def accumulate(self, gradient: torch.Tensor) -> None:
        piece = gradient[self._piece.first_element :][: self._piece.numel].view(torch.uint8)
        # Once they are summed in memory, a further one has no place on the drives.
        count = self._offload.micro_batches if self._sum.exists else len(self.formats)
        format_ = Values.of(gradient).format
        if self._offload.interceptor.intercept(self._number, piece, format_, count):
            self.formats += (format_,)
            return
        if count == self._offload.micro_batches:
            self._add(piece, format_)
            return
        self._make_place(count, piece.numel())
        lease = self._offload.lease()
        made = _download(self._lanes, piece, lease)
        self._block_sums = None
        # Only of a single gradient that is in memory: the norm of several is that of their sum.
        if self._sums_early and not count and made is None:
            values = _values_in(lease, self._piece.numel, format_)
            self._block_sums = self._lanes.kernels.block_sums(values)
        # The offload closes the lease, and its memory goes back when the write has ended.
        self._offload.send(lease, made, self._places[count], what=self._what)
        self.formats += (format_,)

    @property
    def missing_sum_bytes(self) -> int:
        is_full = len(self.formats) == self._offload.micro_batches
        return self._sum.missing_bytes if is_full else 0

    def _make_place(self, count: int, nbytes: int) -> None:
        """Allocate the place for a micro-batch's gradient, unless there is one of this size."""
        # The parameter was cast since: its gradients have another width.
        if count == len(self._places):
            self._places.append(self._offload.allocate(nbytes))
        elif self._places[count].nbytes != nbytes:
            self._offload.release(self._places[count])
            self._places[count] = self._offload.allocate(nbytes)

    def write_back(self, memory: memoryview) -> None:
        """Write the newest gradient, which the interceptor had kept in this memory."""
        count = len(self.formats) - 1
        nbytes = self.formats[count].nbytes * self._piece.numel
        self._make_place(count, nbytes)
        self._offload.write_now(memory[:nbytes], self._places[count], what=self._what)

    def read(self, into: Sequence[memoryview], start: int = 0) -> list[Hop]:
        return [
            self._offload.read(place, memory[: place.nbytes], what=self._what)
            # Not strict: the caller may have memory for more micro-batches than came.
            for place, memory in zip(self._places[start : len(self.formats)], into, strict=False)
        ]

    def values(self) -> Values | None:
        """Return the sum where it is in memory."""
        return self._sum.values if self._sum.exists else None

    def finish_transfers(self) -> None:
        """Do nothing: `GradientOffload.finish_writes` waits for all writes at once."""

    def sums(self) -> _Sums:
        if self._block_sums is None:
            self._block_sums = self._read_back(None)
        return self._block_sums

    def copy_into(self, into: Values) -> bool:
        if self._offload.interceptor.enabled:  # an early update may have used it already
            return False
        if self._sum.exists:
            self._lanes.kernels.begin_sum(self._sum.values, into)
        else:
            self._read_back(into)
        return True

    def _add(self, piece: torch.Tensor, format_: FloatFormat) -> None:
        """Add a gradient that has no place on the drives to the sum in memory."""
        if not self._sum.exists:
            # The gradients are read back below: their writes have to end first.
            self._offload.finish_writes()
            self._sum.begin(self._read_back)
            # The formats go with the gradients on the drives: from here on the sum alone counts.
            self.formats = ()
        with self._offload.lease() as lease:
            made = _download(self._lanes, piece, lease)
            if made is not None:
                # The kernels of the host read the bytes next.
                made.wait()
            self._block_sums = self._sum.add(_values_in(lease, self._piece.numel, format_))

    def _read_back(self, total: Values | None) -> _Sums:
        """Read the gradients back and sum them, in `total` where given; return the block sums."""
        numel, kernels = self._piece.numel, self._lanes.kernels
        several = len(self.formats) > 1 or total is not None
        with ExitStack() as leases:
            places = self._places[: len(self.formats)]
            wires = [leases.enter_context(self._offload.lease()) for place in places]
            with self._lanes.meter.timed_wait(Wait.GRADIENTS):
                Hops(self.read([lease.memory() for lease in wires])).wait()
            streams = [
                _values_in(lease, numel, format_)
                for lease, format_ in zip(wires, self.formats, strict=True)
            ]
            if not several:
                return kernels.block_sums(streams[0])
            if total is None:
                lease = leases.enter_context(self._offload.lease_sum())
                total = _values_in(lease, numel, FloatFormat.FP32)
            return added_up(kernels, streams, total)

    def clear(self) -> None:
        # Places stay: the next step writes to the same ones.
        self.formats = ()
        self._sum.clear()
        self._block_sums = None


class _HostSum:
    """The fp32 sum of a piece's gradients in host memory, where there is one."""

    def __init__(self, piece: GradientPiece, lanes: Lanes, memory: _SumMemory) -> None:
        self._numel = piece.numel
        self._kernels = lanes.kernels
        self._memory = memory
        self._lease: Lease | _Unplanned | None = None

    @property
    def exists(self) -> bool:
        return self._lease is not None

    @property
    def missing_bytes(self) -> int:
        """The bytes that it still has to lease, in whole pages."""
        return 0 if self.exists else align_up(FloatFormat.FP32.nbytes * self._numel, PAGE)

    @property
    def values(self) -> Values:
        assert self._lease is not None, "it has begun"
        return _values_in(self._lease, self._numel, FloatFormat.FP32)

    def add(self, gradient: Values) -> _Sums:
        """Add a gradient; begin with it where there is no sum yet. Return the block sums."""
        if self.exists:
            return self._kernels.add_to_sum(gradient, self.values)
        return self.begin(partial(self._kernels.begin_sum, gradient))

    def begin(self, fill: Callable[[Values], _Sums]) -> _Sums:
        """Let `fill` make the sum that it begins with. Return the block sums."""
        lease = self._memory.lease(self._numel)
        try:
            sums = fill(_values_in(lease, self._numel, FloatFormat.FP32))
        except BaseException:
            lease.close()
            raise
        self._lease = lease  # last: what is interrupted before has made no sum
        return sums

    def clear(self) -> None:
        if self._lease is not None:
            self._lease.close()
            self._lease = None


class _SumMemory:
    """Memory for sums of gradients: first the host's pool, then what the budget has left.

    A plan has room for the sums of `accumulation_steps` gradients, none for a single one, where the
    budget's rest comes first. A parameter may get more: from several losses, from a graph that is
    differentiated twice, or from a block that is checkpointed in several places.
    """

    def __init__(self, pool: PinnedPool, unplanned: Reservation, *, planned: bool) -> None:
        self._pool = pool
        self._unplanned = unplanned
        self._planned = planned

    def check_room(self, nbytes: int) -> None:
        """Refuse `nbytes` where they do not fit; allocate nothing.

        Raises:
            CapacityError: pool and budget together have less.
        """
        missing = nbytes - self._pool.stats().free
        if missing > 0:
            # The ledger is asked by growing, which refuses, and by shrinking back.
            self._unplanned.grow(missing)
            self._unplanned.shrink(missing)

    def lease(self, numel: int) -> Lease | _Unplanned:
        """Return memory for so many elements.

        Raises:
            CapacityError: neither the pool nor the budget has that much left.
        """
        nbytes = FloatFormat.FP32.nbytes * numel
        if self._planned:
            with suppress(CapacityError):
                return self._pool.lease(nbytes, holder="sums of gradients")
            return _Unplanned(self._unplanned, nbytes)
        try:
            return _Unplanned(self._unplanned, nbytes)
        except CapacityError:
            # What the pool has free, a gradient that has yet to come may need: the last resort.
            with suppress(CapacityError):
                return self._pool.lease(nbytes, holder="sums of gradients")
            raise


class _Unplanned:
    """Ordinary host memory beside the pool, counted in a reservation until it is closed."""

    def __init__(self, reservation: Reservation, nbytes: int) -> None:
        try:
            reservation.grow(nbytes)
        except CapacityError as error:
            raise _too_many(error) from None
        # Counted before memory is taken, so that the limit is never passed.
        reservation.hold(nbytes)
        self._reservation = reservation
        self._memory: torch.Tensor | None = torch.empty(nbytes, dtype=torch.uint8)

    def flat(self) -> torch.Tensor:
        """Return all bytes."""
        assert self._memory is not None, "a sum is not used after it was dropped"
        return self._memory

    def close(self) -> None:
        """Give the memory back to the budget."""
        if self._memory is not None:
            nbytes, self._memory = self._memory.nbytes, None
            self._reservation.release(nbytes)
            self._reservation.shrink(nbytes)


def _values_in(memory: Lease | _Unplanned, numel: int, format_: FloatFormat) -> Values:
    """Return the values at the front of a memory, which they keep: it has to stay open."""
    return Values(memory.flat().data_ptr(), numel, format_, memory)


def _flat(gradient: torch.Tensor) -> torch.Tensor:
    """Return the elements of a gradient, without its graph, where it has one."""
    values = gradient.detach() if gradient.requires_grad else gradient
    # reshape copies only where the elements do not lie one after another.
    return values if values.dim() == 1 and values.is_contiguous() else values.reshape(-1)


def added_up(kernels: HostKernels, gradients: Sequence[Values], into: Values) -> _Sums:
    """Sum gradients in fp32, in their order; return the block sums of the result."""
    sums = kernels.begin_sum(gradients[0], into)
    for gradient in gradients[1:]:
        sums = kernels.add_to_sum(gradient, into)
    return sums


def _download(lanes: Lanes, piece: torch.Tensor, lease: Lease) -> Event | None:
    """Begin to copy device bytes to host memory; None: the bytes are there on return."""
    if lanes.accelerator.unified:
        lease.flat()[: piece.numel()].copy_(piece)
        return None
    # Autograd's kernels are in the compute stream: the copy waits for this event.
    made = lanes.accelerator.record(lanes.compute)
    source = lanes.accelerator.computed(piece)
    try:
        return _copy_down(lanes, source, lease, made)
    finally:
        # Autograd frees the gradient now, and its stream does not know that the download stream
        # still reads it.
        lanes.accelerator.outlives(source, lanes.download)


def _copy_down(lanes: Lanes, piece: torch.Tensor, lease: Lease, made: Event) -> Event:
    """Begin to copy bytes into the front of a lease, which stays open until the copy has ended."""
    target = lease.flat()[: piece.numel()]
    event = lanes.copy(Lane.D2H, Cargo.GRADIENTS, target, piece, after=[made], name="gradient")
    lease.until(event)
    return event


def _too_many(error: CapacityError) -> CapacityError:
    """Return the error for a sum of several gradients that does not fit."""
    return _refused(
        error,
        "give no parameter more gradients in a step than accumulation_steps says. For several "
        "losses of one batch, call engine.backward(first + second). A parameter in several "
        "segments of reentrant checkpointing gets one gradient from each segment: use "
        "use_reentrant=False, or a budget in which the sums fit in memory. Then call zero_grad() "
        "and go on",
    )


def _unplanned(error: CapacityError, dtype: torch.dtype) -> CapacityError:
    """Return the error for a first gradient of a dtype that the plan has no room for."""
    return _refused(
        error,
        f"the gradient is its parameter's first and of {dtype}, and the plan has room for the "
        "dtype that the parameter had in initialize. Do not cast parameters after that, as "
        "model.to(dtype) does: set its precision instead. Give no other parameter more gradients "
        "in a step than accumulation_steps. Then call zero_grad() and go on",
    )


def _refused(error: CapacityError, change: str) -> CapacityError:
    return CapacityError(
        tier=error.tier,
        asked=error.asked,
        free=error.free,
        limit=error.limit,
        holders=error.holders,
        change=change,
    )


def _add(
    kernel: Callable[[Values, Values], object], gradient: torch.Tensor, into: torch.Tensor
) -> None:
    kernel(Values.of(gradient), Values.of(into))
