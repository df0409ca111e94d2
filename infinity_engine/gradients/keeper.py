"""`GradientKeeper`: holds each parameter's gradient from the moment it is made until the step uses
it up.

The first gradient of a window stays in the dtype it came in; from the second on they are added in
fp32, in the order of their arrival. Where they lie follows from where their subgroups are updated:
what the host updates of another memory starts its way down at once, what rests on the drives goes
there, the rest stays on the device, until it is used. On the drives there is one for each
micro-batch, and whoever reads them adds them up in that order. Updates nothing.

[Note: who counts gradients that stay] Autograd has allocated them, so they are no leases; what
there is of them is held of a reservation. A gradient that is added to a sum is not, as autograd's
own until then: the device's streams let go of it in their order, whenever the host drops it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from deepnvme.sizes import PAGE
from infinity_engine.accel import Event
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.gradients.outgoing import Outgoing
from infinity_engine.lanes.lanes import Lanes
from infinity_engine.lanes.meter import Cargo, Wait
from infinity_engine.memory import Lease, PinnedPool, Reservation
from infinity_engine.optim import FloatFormat, GradientNorm, GradientSums, HostKernels, Values
from infinity_engine.placement.pieces import GradientPiece
from infinity_engine.plan import Tier
from infinity_engine.plan.ops import Lane
from infinity_engine.storage import Hop, IOEvent, Place
from infinity_engine.units import align_up

__all__ = ["GradientKeeper", "Taker", "added_up"]

Taker = Callable[[int, int, torch.Tensor, FloatFormat, int], bool]
"""Tells whether it has taken a piece of a gradient: (parameter, piece, bytes, format, how many came
before it).
"""
_Sums = npt.NDArray[np.float64]
_Coming = tuple[Event, Callable[[], None]]
"""What the device was given to sum, and what puts the sums once the event has passed."""
_ADDING = "addition of gradients"
_GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)


class GradientKeeper:
    """The gradients of one engine; `pieces` has those of each parameter, in order, `names` what
    each is called.

    `staying` is promised for what stays on the device, and `sums` for sums on the host that no plan
    has. Both grow where there is more than was planned, as far as the budget goes, until that is
    dropped. `outgoing` is there where some gradients go to the drives; `sums_early` says that the
    norm will be asked for.
    """

    def __init__(
        self,
        names: Sequence[str],
        numels: Sequence[int],
        pieces: Sequence[Sequence[GradientPiece]],
        lanes: Lanes,
        outgoing: Outgoing | None = None,
        *,
        staying: Reservation,
        sums: Reservation,
        sums_early: bool = False,
    ) -> None:
        self._names = tuple(names)
        self._numels = tuple(numels)
        self._lanes = lanes
        self.room = staying.nbytes  # for what stays on the device, as planned
        self._staying = staying
        self._sum_memory = _SumMemory(lanes.host, sums)
        self._outgoing = outgoing
        self._sums_early = sums_early
        self._slots: tuple[_Slots, ...] = ()
        self._lost: str | None = None  # whose gradient was refused
        self.keep_in(pieces)

    def keep_in(self, pieces: Sequence[Sequence[GradientPiece]]) -> None:
        """Keep the gradients to come in these pieces of each parameter, while there are none."""
        assert not self.any, "gradients that came are where they were kept"
        self._slots = tuple(
            _Slots(
                name,
                numel,
                kept,
                self._lanes,
                self._outgoing,
                staying=self._staying,
                sum_memory=self._sum_memory,
                sums_early=self._sums_early,
            )
            for name, numel, kept in zip(self._names, self._numels, pieces, strict=True)
        )

    def make_room(self, nbytes: int) -> None:
        """Have room for so many bytes of gradients that stay on the device, while there are none.

        Raises:
            CapacityError: the budget has not so much left; nothing has changed.
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
        """Whether one of that parameter has come."""
        return self._slots[parameter].count > 0

    def take(self, parameter: int, gradient: torch.Tensor) -> None:
        """Take a gradient, which belongs to the keeper from here on."""
        try:
            self._slots[parameter].take(gradient.detach().reshape(-1))
        except Exception:
            self._lost = self._names[parameter]
            if gradient.dtype not in _GRADIENTS:
                raise ConfigError(
                    field=f"gradient of {self._lost}",
                    value=str(gradient.dtype),
                    expected=f"one of {', '.join(map(str, _GRADIENTS))}, as initialize gives "
                    "parameters: cast none "
                    "after it, as model.to(dtype) does, but set its precision",
                ) from None
            raise

    def check_room_for_more(self, planned: int) -> None:
        """Refuse the gradients of more micro-batches than `planned` where the host has no room to
        add them up.

        Raises:
            CapacityError: that is so. Nothing has changed.
        """
        try:
            self._sum_memory.check_room(sum(slots.missing_sum_bytes for slots in self._slots))
        except CapacityError as error:
            raise _refused(
                error,
                f"accumulation_steps plans for {planned} in a step. This backward() would be one "
                "more, whose gradients "
                "are added up in host memory. Nothing was lost: call step(), which uses what has "
                "come, then compute "
                "this loss again. If a step has more backwards, raise accumulation_steps to their "
                "number, or add up "
                "the losses of one batch",
            ) from None

    def lose(self, parameter: int) -> None:
        """Let no step be made of what has come, as a gradient of this parameter cannot be used,
        until it is cleared.
        """
        self._lost = self._names[parameter]

    def values(self, parameter: int, piece: int) -> Values | None:
        """Return a piece of a gradient where its update runs, None where none has come or it is
        `read`.
        """
        slots = self._slots[parameter]
        return slots.values(piece) if slots.count else None

    def used(self, parameter: int, piece: int) -> None:
        """Note that nobody needs a piece any more, though it has come: a gradient on the device
        goes with its last one.

        Any thread may call.
        """
        self._slots[parameter].used(piece)

    def read(
        self, parameter: int, piece: int, into: Sequence[memoryview], *, start: int = 0
    ) -> list[Hop]:
        """Begin to read a piece that is kept on the drives: of each micro-batch from `start` on
        that has memory.
        """
        return self._slots[parameter].read(piece, into, start)

    def formats(self, parameter: int, piece: int) -> tuple[FloatFormat, ...]:
        """Return the format of each that `read` reads."""
        return self._slots[parameter].formats(piece)

    def settle(self) -> None:
        """Finish what is under way: all that came is added up and where it is needed.

        Raises:
            RuntimeError: one was refused: no step can be made of what there is, and this is raised
                until it is cleared.
            TransferError: some could not be written to the drives, and is lost: likewise.
        """
        if self._lost is not None:
            raise RuntimeError(
                f"a gradient of {self._lost} was refused, as the error in its backward said, so no "
                "step can be made of "
                "what there is: call zero_grad() and do the step's backward again"
            )
        for slots in self._slots:
            slots.settle()
        if self._outgoing is not None:
            self._outgoing.settle()

    def start_writing(self) -> None:
        """Begin to write what is to go to the drives, so that the memory that it passes can be
        waited for.
        """
        if self._outgoing is not None:
            self._outgoing.start()

    def norm(self) -> GradientNorm:
        """Return the norm of all that came, which is settled, as it lies in memory."""
        return self.sums().total()

    def sums(self) -> GradientSums:
        """Return what that norm is made of."""
        sums = GradientSums(self._numels)
        coming = [
            each
            for number, slots in enumerate(self._slots)
            for each in slots.put_sums(number, sums)
        ]
        if coming:
            with self._lanes.meter.waits(Wait.GRADIENTS):
                for event, put in coming:
                    event.wait()
                    put()
        return sums

    def sum_of(self, parameter: int) -> torch.Tensor | None:
        """Return a flat fp32 copy of all that came of a gradient, which is settled; None where none
        did, or it is used.

        Raises:
            CapacityError: there is no room to read it from the drives.
        """
        slots = self._slots[parameter]
        whole = torch.empty(self._numels[parameter])
        return whole if slots.count and slots.copy_into(whole) else None

    def ask_first(self, taker: Taker) -> None:
        """Let somebody take pieces that would go to the drives; what it takes counts as if it were
        there.
        """
        for parameter, slots in enumerate(self._slots):
            slots.ask_first(parameter, taker)

    def keep(self, parameter: int, piece: int, memory: memoryview) -> None:
        """Write the newest gradient of a piece, which was taken and is in this memory, to the
        drives after all.
        """
        self._slots[parameter].keep(piece, memory)

    def clear(self) -> None:
        """Drop all gradients."""
        self._lost = None
        if self._outgoing is not None:
            self._outgoing.drop()
        for slots in self._slots:
            slots.clear()
        if self._staying.nbytes > self.room:  # what came was more than was planned
            self.make_room(self.room)


class _Slots:
    """Where the gradient of one parameter is: on the device, on the host or the drives, or pieces
    of it on each.
    """

    def __init__(
        self,
        name: str,
        numel: int,
        pieces: Sequence[GradientPiece],
        lanes: Lanes,
        outgoing: Outgoing | None,
        *,
        staying: Reservation,
        sum_memory: _SumMemory,
        sums_early: bool,
    ) -> None:
        self.count = 0
        self._pieces = pieces
        stay = [number for number, piece in enumerate(pieces) if piece.kept is Tier.DEVICE]
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
        self._device_slots = tuple(dict.fromkeys(self._on_device.values()))
        self._on_host: dict[int, _HostSlot | _DriveSlot] = {}
        for number, piece in enumerate(pieces):
            if piece.kept is Tier.HOST:
                self._on_host[number] = _HostSlot(piece, lanes, sum_memory)
            elif piece.kept is Tier.NVME:
                assert outgoing is not None, "there is a way to the drives"
                self._on_host[number] = _DriveSlot(
                    name, piece, lanes, outgoing, sum_memory, sums_early=sums_early
                )

    def take(self, gradient: torch.Tensor) -> None:
        self.count += 1
        for slot in self._on_host.values():
            slot.take(gradient)
        for on_device in self._device_slots:
            on_device.take(gradient)

    @property
    def missing_sum_bytes(self) -> int:
        """The bytes of the sums on the host that one more gradient of this parameter makes
        necessary.
        """
        return sum(slot.missing_sum_bytes for slot in self._on_host.values()) if self.count else 0

    def values(self, number: int) -> Values | None:
        if number in self._on_host:
            return self._on_host[number].values()
        return self._on_device[number].values(self._pieces[number])

    def used(self, number: int) -> None:
        if self.count and number in self._on_device:
            self._on_device[number].used(number)

    def read(self, number: int, into: Sequence[memoryview], start: int) -> list[Hop]:
        return self._drive_slot(number).read(into, start)

    def formats(self, number: int) -> tuple[FloatFormat, ...]:
        return self._drive_slot(number).formats

    def ask_first(self, parameter: int, taker: Taker) -> None:
        for number, slot in self._on_host.items():
            if isinstance(slot, _DriveSlot):
                slot.ask_first(partial(taker, parameter, number))

    def keep(self, number: int, memory: memoryview) -> None:
        self._drive_slot(number).keep(memory)

    def _drive_slot(self, number: int) -> _DriveSlot:
        slot = self._on_host[number]
        assert isinstance(slot, _DriveSlot), "only what is on the drives is read"
        return slot

    def settle(self) -> None:
        for slot in self._on_host.values():
            slot.settle()

    def put_sums(self, parameter: int, sums: GradientSums) -> list[_Coming]:
        """Put the block sums of every piece; return those on the device, which are to be put."""
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
        """Copy every piece that is there; tell whether that was all of it."""
        found = True
        for number, piece in enumerate(self._pieces):
            into = whole[piece.first_element :][: piece.numel]
            if number in self._on_host:
                found &= self._on_host[number].copy_into(Values.of(into))
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
    """A gradient, or a piece of it, where modules compute, until the pieces of these numbers are
    used.
    """

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
        self._lock = threading.Lock()  # of what is used, and of the tensor then
        self._left = set(pieces)
        self._tensor: torch.Tensor | None = None
        self._is_sum = False

    def take(self, gradient: torch.Tensor) -> None:
        mine = (
            gradient if self._is_whole else gradient[self._part.first_element :][: self._part.numel]
        )
        if self._tensor is None:
            nbytes = mine.nbytes
            self._hold(nbytes, first=mine.dtype)  # [Note: who counts gradients that stay]
            try:
                whole = self._is_whole and mine.untyped_storage().nbytes() == nbytes
                # the rest of the memory that it is in goes
                self._tensor = mine if whole else mine.clone()
            except BaseException:
                self._staying.release(nbytes)
                raise
            return
        kernels, numel = self._lanes.device_kernels, self._part.numel
        if not self._is_sum:
            first = self._tensor
            nbytes = FloatFormat.FP32.nbytes * numel
            self._hold(nbytes)
            try:
                total = torch.empty(numel, dtype=torch.float32, device=gradient.device)
                self._lanes.on_device(
                    partial(_add, kernels.begin_sum, first, total), numel, name=_ADDING
                )
            except BaseException:
                self._staying.release(nbytes)
                raise
            self._tensor, self._is_sum = total, True
            self._staying.release(first.nbytes)
        add = partial(_add, kernels.add_to_sum, mine, self._tensor)
        self._lanes.on_device(add, numel, name=_ADDING)

    def _hold(self, nbytes: int, *, first: torch.dtype | None = None) -> None:
        """Count bytes that stay; what is more than planned takes what the budget has left.

        `first` is what a gradient is of that is no sum.
        """
        try:
            self._staying.hold(nbytes)
        except CapacityError:
            self._hold_unplanned(nbytes, first)

    def _hold_unplanned(self, nbytes: int, first: torch.dtype | None) -> None:
        try:
            self._staying.grow(max(self._staying.held + nbytes - self._staying.nbytes, 0))
        except CapacityError as error:
            raise (_too_many(error) if first is None else _unplanned(error, first)) from None
        self._staying.hold(nbytes)

    def used(self, piece: int) -> None:
        """Let the gradient go, if that was the last piece that was not used."""
        with self._lock:
            self._left.discard(piece)
            if not self._left:
                self._let_go()

    def _let_go(self) -> None:
        if self._tensor is not None:
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
        made: list[object] = []
        work = lambda: made.append(kernels.block_sums(values))  # noqa: E731
        event = self._lanes.on_device(work, piece.numel, name="norm of gradients")
        return event, lambda: put(kernels.on_host(made.pop()))

    def copy_into(self, piece: GradientPiece, into: torch.Tensor) -> bool:
        if self._tensor is None:
            return False
        self._lanes.accelerator.record(self._lanes.compute).wait()  # where it may still be added to
        into.copy_(self._tensor[piece.first_element - self._part.first_element :][: piece.numel])
        return True

    def clear(self) -> None:
        with self._lock:
            self._let_go()
            self._left = set(self._pieces)
            self._is_sum = False


class _HostSlot:
    """A piece of a gradient in pinned memory, or on its way there."""

    def __init__(self, piece: GradientPiece, lanes: Lanes, sum_memory: _SumMemory) -> None:
        self._piece = piece
        self._lanes = lanes
        self._sum_memory = sum_memory
        self._newest: tuple[Lease, Event | None, FloatFormat] | None = None
        self._sum: Lease | _Unplanned | None = None
        self._block_sums: _Sums | None = None

    def take(self, gradient: torch.Tensor) -> None:
        if self._newest is not None:
            self._fold()
        format_ = Values.of(gradient).format
        piece = gradient[self._piece.first_element :][: self._piece.numel].view(torch.uint8)
        lease = self._lanes.host.lease(piece.numel(), holder="gradients")
        self._newest = (lease, _download(self._lanes, piece, lease), format_)

    @property
    def missing_sum_bytes(self) -> int:
        return _SumMemory.nbytes(self._piece.numel) if self._sum is None else 0

    def _fold(self) -> None:
        """Add the newest gradient to the sum, which begins with the first."""
        assert self._newest is not None, "there is one"
        lease = self._newest[0]
        self._wait()
        newest = self._newest_values()
        if self._sum is None:
            self._sum = self._sum_memory.lease(self._piece.numel)
            self._block_sums = self._lanes.kernels.begin_sum(newest, self._sum_values(self._sum))
        else:
            self._block_sums = self._lanes.kernels.add_to_sum(newest, self._sum_values(self._sum))
        lease.close()
        self._newest = None

    def settle(self) -> None:
        if self._newest is not None and self._sum is not None:
            self._fold()
        elif self._newest is not None:
            self._wait()

    def values(self) -> Values:
        self.settle()
        return self._newest_values() if self._sum is None else self._sum_values(self._sum)

    def copy_into(self, into: Values) -> bool:
        self._lanes.kernels.begin_sum(self.values(), into)
        return True

    def sums(self) -> _Sums:
        values = self.values()
        if self._block_sums is None:
            self._block_sums = self._lanes.kernels.block_sums(values)
        return self._block_sums

    def clear(self) -> None:
        for lease in (self._sum, self._newest[0] if self._newest is not None else None):
            if lease is not None:
                lease.close()
        self._newest = self._sum = self._block_sums = None

    def _wait(self) -> None:
        assert self._newest is not None, "there is one"
        if self._newest[1] is not None:
            with self._lanes.meter.waits(Wait.GRADIENTS):
                self._newest[1].wait()

    def _newest_values(self) -> Values:
        assert self._newest is not None, "there is one"
        lease, _, format_ = self._newest
        return Values(lease.flat().data_ptr(), self._piece.numel, format_, lease)

    def _sum_values(self, lease: Lease | _Unplanned) -> Values:
        return Values(lease.flat().data_ptr(), self._piece.numel, FloatFormat.FP32, lease)


class _DriveSlot:
    """A piece of a gradient on the drives: one for each micro-batch, in order.

    Where more come than have a place there, they are added up in host memory from then on, as far
    as there is some.
    """

    def __init__(
        self,
        name: str,
        piece: GradientPiece,
        lanes: Lanes,
        outgoing: Outgoing,
        sum_memory: _SumMemory,
        *,
        sums_early: bool,
    ) -> None:
        self.formats: tuple[FloatFormat, ...] = ()
        self._taker: Callable[[torch.Tensor, FloatFormat, int], bool] | None = None
        self._what = f"gradient of {name}"
        self._piece = piece
        self._lanes = lanes
        self._outgoing = outgoing
        self._sum_memory = sum_memory
        self._sums_early = sums_early
        self._places: list[Place] = []
        self._sum: Lease | _Unplanned | None = None
        self._block_sums: _Sums | None = None

    def take(self, gradient: torch.Tensor) -> None:
        piece = gradient[self._piece.first_element :][: self._piece.numel].view(torch.uint8)
        # which have a place
        count = len(self.formats) if self._sum is None else self._outgoing.micro_batches
        format_ = Values.of(gradient).format
        if self._taker is not None and self._taker(piece, format_, count):
            self.formats += (format_,)
            return
        if self._sum is not None or count == self._outgoing.micro_batches:
            self._add(piece, format_)
            return
        self._make_place(count, piece.numel())
        lease = self._outgoing.lease()
        made = _download(self._lanes, piece, lease)
        self._block_sums = None
        if self._sums_early and not count and made is None:
            values = Values(lease.flat().data_ptr(), self._piece.numel, format_, lease)
            self._block_sums = self._lanes.kernels.block_sums(values)
        self._outgoing.send(lease, made, self._places[count], what=self._what)
        self.formats += (format_,)

    @property
    def missing_sum_bytes(self) -> int:
        is_full = self._sum is None and len(self.formats) == self._outgoing.micro_batches
        return _SumMemory.nbytes(self._piece.numel) if is_full else 0

    def ask_first(self, taker: Callable[[torch.Tensor, FloatFormat, int], bool]) -> None:
        """Let somebody else take what comes: (bytes, format, how many came before it)."""
        self._taker = taker

    def _make_place(self, count: int, nbytes: int) -> None:
        """Have a place of so many bytes for the gradient of a micro-batch, those before which have
        theirs.
        """
        if count < len(self._places) and self._places[count].nbytes != nbytes:
            self._outgoing.release(self._places.pop(count))
        if count == len(self._places):
            self._places.append(self._outgoing.allocate(nbytes))

    def keep(self, memory: memoryview) -> None:
        """Write the newest, which is in this memory, after all."""
        count = len(self.formats) - 1
        nbytes = self.formats[count].nbytes * self._piece.numel
        self._make_place(count, nbytes)
        self._outgoing.write_now(memory[:nbytes], self._places[count], what=self._what)

    def read(self, into: Sequence[memoryview], start: int = 0) -> list[Hop]:
        return [
            self._outgoing.read(place, memory[: place.nbytes], what=self._what)
            for place, memory in zip(self._places[start : len(self.formats)], into, strict=False)
        ]

    def values(self) -> Values | None:
        """Return the sum, where there is one in memory."""
        return None if self._sum is None else self._sum_in(self._sum)

    def settle(self) -> None:
        """Nothing of its own: what was sent is settled as a whole."""

    def sums(self) -> _Sums:
        if self._block_sums is None:
            self._block_sums = self._read_back(None)
        return self._block_sums

    def copy_into(self, into: Values) -> bool:
        if self._taker is not None:  # who may have used it up
            return False
        if self._sum is not None:
            self._lanes.kernels.begin_sum(self._sum_in(self._sum), into)
        else:
            self._read_back(into)
        return True

    def _add(self, piece: torch.Tensor, format_: FloatFormat) -> None:
        """Add one for which there is no place to the sum of all in memory."""
        if self._sum is None:
            self._outgoing.settle()
            total = self._sum_memory.lease(self._piece.numel)
            try:
                self._read_back(self._sum_in(total))
            except BaseException:
                total.close()
                raise
            self._sum, self.formats = total, ()
        with self._outgoing.lease() as lease:
            made = _download(self._lanes, piece, lease)
            if made is not None:
                made.wait()
            newest = Values(lease.flat().data_ptr(), self._piece.numel, format_, lease)
            self._block_sums = self._lanes.kernels.add_to_sum(newest, self._sum_in(self._sum))

    def _sum_in(self, lease: Lease | _Unplanned) -> Values:
        return Values(lease.flat().data_ptr(), self._piece.numel, FloatFormat.FP32, lease)

    def _read_back(self, total: Values | None) -> _Sums:
        """Return the block sums of what is added up, which is read for that; keep the sum in
        `total`, where given.
        """
        numel, kernels = self._piece.numel, self._lanes.kernels
        several = len(self.formats) > 1 or total is not None
        with ExitStack() as leases:
            places = self._places[: len(self.formats)]
            wires = [leases.enter_context(self._outgoing.lease()) for place in places]
            with self._lanes.meter.waits(Wait.GRADIENTS):
                IOEvent(self.read([lease.memory() for lease in wires])).wait()
            streams = [
                Values(lease.flat().data_ptr(), numel, format_, lease)
                for lease, format_ in zip(wires, self.formats, strict=True)
            ]
            if not several:
                return kernels.block_sums(streams[0])
            if total is None:
                total = self._sum_in(leases.enter_context(self._outgoing.lease_sum()))
            return added_up(kernels, streams, total)

    def clear(self) -> None:
        self.formats = ()
        if self._sum is not None:
            self._sum.close()
            self._sum = None
        self._block_sums = None


class _SumMemory:
    """Memory for sums of gradients: what the host's pool has for them, else what the budget has
    left.

    A plan has room for the sums of `accumulation_steps` gradients. A parameter may get more of
    them: of several losses, of a graph that is differentiated again, of a block that is
    checkpointed in several places.
    """

    def __init__(self, pool: PinnedPool, unplanned: Reservation) -> None:
        self._pool = pool
        self._unplanned = unplanned

    @staticmethod
    def nbytes(numel: int) -> int:
        """Return the bytes that the sum of so many elements takes, which come in pages."""
        return align_up(FloatFormat.FP32.nbytes * numel, PAGE)

    def check_room(self, nbytes: int) -> None:
        """Refuse what does not fit; take nothing.

        Raises:
            CapacityError: pool and budget do not have that much left.
        """
        missing = nbytes - self._pool.stats().free
        if missing > 0:
            self._unplanned.grow(missing)
            self._unplanned.shrink(missing)

    def lease(self, numel: int) -> Lease | _Unplanned:
        """Return memory for so many elements.

        Raises:
            CapacityError: neither the pool nor the budget has that much left.
        """
        nbytes = FloatFormat.FP32.nbytes * numel
        try:
            return self._pool.lease(nbytes, holder="sums of gradients")
        except CapacityError:
            return _Unplanned(self._unplanned, nbytes)


class _Unplanned:
    """Ordinary host memory beside the pool, which counts in a reservation until it is closed."""

    def __init__(self, reservation: Reservation, nbytes: int) -> None:
        try:
            reservation.grow(nbytes)
        except CapacityError as error:
            raise _too_many(error) from None
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


def added_up(kernels: HostKernels, gradients: Sequence[Values], into: Values) -> _Sums:
    """Add gradients up in fp32, in their order, and return the block sums of that."""
    sums = kernels.begin_sum(gradients[0], into)
    for each in gradients[1:]:
        sums = kernels.add_to_sum(each, into)
    return sums


def _download(lanes: Lanes, piece: torch.Tensor, lease: Lease) -> Event | None:
    """Bring bytes from where modules compute into host memory; None where they are there on
    return.
    """
    if lanes.accelerator.unified:
        lease.flat()[: piece.numel()].copy_(piece)
        return None
    made = lanes.accelerator.record(lanes.compute)
    if lanes.accelerator.torch_device.type != "cpu":
        event = _copy_down(lanes, piece, lease, made)
        assert lanes.download is not None, "copies are between two memories"
        # autograd lets go of it, and its stream knows of no copy
        lanes.accelerator.outlives(piece, lanes.download)
        return event
    # Emulated: what autograd made is in no device memory yet.
    with lanes.meter.waits(Wait.GRADIENTS):  # until there is room
        source = lanes.device.lease(piece.numel(), holder="gradients on their way")
    with source:
        source.flat().copy_(piece)
        event = _copy_down(lanes, source.flat(), lease, made)
        source.until(event)
        return event


def _copy_down(lanes: Lanes, piece: torch.Tensor, lease: Lease, made: Event) -> Event:
    """Copy bytes to where a lease begins."""
    target = lease.flat()[: piece.numel()]
    event = lanes.copy(Lane.D2H, Cargo.GRADIENTS, target, piece, after=[made], name="gradient")
    lease.until(event)
    return event


def _too_many(error: CapacityError) -> CapacityError:
    """Return what is said where there is no room for the sum of several gradients."""
    return _refused(
        error,
        "give a parameter no more gradients in a step than accumulation_steps says, as with "
        "engine.backward(first + second) for the losses of one batch; a parameter in several "
        "segments of "
        "reentrant checkpointing has one from each. Or let all fit in memory. Then zero_grad() and "
        "go on",
    )


def _unplanned(error: CapacityError, dtype: torch.dtype) -> CapacityError:
    """Return what is said where there is no room for the first gradient of a parameter, of this
    type.
    """
    return _refused(
        error,
        f"this first gradient of a parameter is of {dtype}, and the plan has room for one of each "
        "in the type that "
        "initialize gave its model: cast no parameters after it, as model.to(dtype) does, but set "
        "its precision; and "
        "give no other parameter more gradients in a step than accumulation_steps says. Then "
        "zero_grad() and go on",
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
