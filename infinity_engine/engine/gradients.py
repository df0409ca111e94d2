"""`GradientKeeper`: holds each parameter's gradient from the moment it is made until the step uses it up.

The first gradient of a window stays in the dtype it came in; from the second on they are added in fp32, in the order of
their arrival. Where they lie follows from where their subgroups are updated: what the host updates of another memory
starts its way down at once, the rest stays on the device. Updates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from infinity_engine.accel import Event
from infinity_engine.engine.lanes import Lanes
from infinity_engine.engine.meter import Cargo, Wait
from infinity_engine.memory import Lease
from infinity_engine.optim import FloatFormat, GradientNorm, GradientSums
from infinity_engine.optim import Stream as Values
from infinity_engine.plan.ops import Lane

__all__ = ["GradientKeeper", "Piece"]

_Sums = npt.NDArray[np.float64]
_ADDING = "addition of gradients"


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a parameter that one subgroup holds, and whether its gradient is needed in the host's own memory."""

    first_element: int
    numel: int
    on_host: bool


class GradientKeeper:
    """The gradients of one engine; `pieces` has those of each parameter, in order."""

    def __init__(self, numels: Sequence[int], pieces: Sequence[Sequence[Piece]], lanes: Lanes) -> None:
        self._numels = tuple(numels)
        self._lanes = lanes
        self._slots = tuple(_Slots(numel, each, lanes) for numel, each in zip(numels, pieces, strict=True))

    @property
    def any(self) -> bool:
        """Whether a gradient has come."""
        return any(slots.count for slots in self._slots)

    def has(self, parameter: int) -> bool:
        """Whether one of that parameter has come."""
        return self._slots[parameter].count > 0

    def take(self, parameter: int, gradient: torch.Tensor) -> None:
        """Take a gradient, which belongs to the keeper from here on."""
        self._slots[parameter].take(gradient.detach().contiguous().view(-1))

    def values(self, parameter: int, piece: int) -> Values | None:
        """Return a piece of a gradient where its update runs, None where none has come."""
        slots = self._slots[parameter]
        return slots.values(piece) if slots.count else None

    def settle(self) -> None:
        """Finish what is under way: all that came is added up and where it is needed."""
        for slots in self._slots:
            slots.settle()

    def norm(self) -> GradientNorm:
        """Return the norm of all that came, as it lies in memory."""
        sums = GradientSums(self._numels)
        events = [event for number, slots in enumerate(self._slots) for event in slots.put_sums(number, sums)]
        if events:
            with self._lanes.meter.waits(Wait.GRADIENTS):
                for event in events:
                    event.wait()
        return sums.total()

    def clear(self) -> None:
        """Drop all gradients."""
        for slots in self._slots:
            slots.clear()


class _Slots:
    """Where the gradient of one parameter is: whole on the device, in pieces on the host, or some of both."""

    def __init__(self, numel: int, pieces: Sequence[Piece], lanes: Lanes) -> None:
        self.count = 0
        self._pieces = pieces
        stays = any(not piece.on_host for piece in pieces)
        self._on_device = _DeviceSlot(numel, lanes) if stays else None
        self._on_host = {number: _HostSlot(piece, lanes) for number, piece in enumerate(pieces) if piece.on_host}

    def take(self, gradient: torch.Tensor) -> None:
        self.count += 1
        for slot in self._on_host.values():
            slot.take(gradient)
        if self._on_device is not None:
            self._on_device.take(gradient)

    def values(self, number: int) -> Values:
        piece = self._pieces[number]
        if number in self._on_host:
            return self._on_host[number].values()
        assert self._on_device is not None, "what is not on the host stays on the device"
        return self._on_device.values().part(piece.first_element, piece.numel)

    def settle(self) -> None:
        for slot in self._on_host.values():
            slot.settle()

    def put_sums(self, parameter: int, sums: GradientSums) -> list[Event]:
        """Put the block sums of every piece; those on the device are there when the events have passed."""
        if not self.count:
            return []
        events = []
        for number, piece in enumerate(self._pieces):
            put = partial(sums.put, parameter, piece.first_element)
            if number in self._on_host:
                put(self._on_host[number].sums())
            else:
                assert self._on_device is not None, "what is not on the host stays on the device"
                events.append(self._on_device.put_sums(piece, put))
        return events

    def clear(self) -> None:
        self.count = 0
        for slot in self._on_host.values():
            slot.clear()
        if self._on_device is not None:
            self._on_device.clear()


class _DeviceSlot:
    """A whole gradient where modules compute."""

    def __init__(self, numel: int, lanes: Lanes) -> None:
        self._numel = numel
        self._lanes = lanes
        self._tensor: torch.Tensor | None = None
        self._is_sum = False

    def take(self, gradient: torch.Tensor) -> None:
        if self._tensor is None:
            self._tensor = gradient
            return
        kernels = self._lanes.kernels
        if not self._is_sum:
            first, self._tensor = self._tensor, torch.empty(self._numel, device=gradient.device)
            begin = partial(_add, kernels.begin_sum, first, self._tensor)
            self._lanes.on_device(begin, self._numel, name=_ADDING)
            self._is_sum = True
        add = partial(_add, kernels.add_to_sum, gradient, self._tensor)
        self._lanes.on_device(add, self._numel, name=_ADDING)

    def values(self) -> Values:
        assert self._tensor is not None, "a gradient has come"
        return Values.of(self._tensor)

    def put_sums(self, piece: Piece, put: Callable[[_Sums], None]) -> Event:
        values = self.values().part(piece.first_element, piece.numel)
        kernels = self._lanes.kernels
        return self._lanes.on_device(lambda: put(kernels.block_sums(values)), piece.numel, name="norm of gradients")

    def clear(self) -> None:
        self._tensor = None
        self._is_sum = False


class _HostSlot:
    """A piece of a gradient in pinned memory, or on its way there."""

    def __init__(self, piece: Piece, lanes: Lanes) -> None:
        self._piece = piece
        self._lanes = lanes
        self._newest: tuple[Lease, Event, FloatFormat] | None = None
        self._sum: Lease | None = None
        self._block_sums: _Sums | None = None

    def take(self, gradient: torch.Tensor) -> None:
        if self._newest is not None:
            self._fold()
        piece = gradient[self._piece.first_element :][: self._piece.numel].view(torch.uint8)
        lease = self._lanes.host.lease(piece.numel(), holder="gradients")
        self._newest = (lease, self._download(piece, lease), Values.of(gradient).format)

    def _download(self, piece: torch.Tensor, lease: Lease) -> Event:
        lanes = self._lanes
        copy = partial(lanes.copy, Lane.D2H, Cargo.GRADIENTS, lease, name="gradient")
        made = lanes.accelerator.record(lanes.compute)
        if lanes.accelerator.torch_device.type != "cpu":
            return copy(piece, after=[made])
        # Emulated: what autograd made is in no device memory yet.
        with lanes.meter.waits(Wait.GRADIENTS):  # until there is room
            source = lanes.device.lease(piece.numel(), holder="gradients on their way")
        with source:
            source.flat().copy_(piece)
            return copy(source, after=[made])

    def _fold(self) -> None:
        """Add the newest gradient to the sum, which begins with the first."""
        assert self._newest is not None, "there is one"
        lease = self._newest[0]
        self._wait()
        newest = self._newest_values()
        if self._sum is None:
            self._sum = self._lanes.host.lease(4 * self._piece.numel, holder="sums of gradients")
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
        with self._lanes.meter.waits(Wait.GRADIENTS):
            self._newest[1].wait()

    def _newest_values(self) -> Values:
        assert self._newest is not None, "there is one"
        lease, _, format_ = self._newest
        return Values(lease.flat().data_ptr(), self._piece.numel, format_, lease)

    def _sum_values(self, lease: Lease) -> Values:
        return Values(lease.flat().data_ptr(), self._piece.numel, FloatFormat.FP32, lease)


def _add(kernel: Callable[[Values, Values], _Sums], gradient: torch.Tensor, into: torch.Tensor) -> None:
    kernel(Values.of(gradient), Values.of(into))
