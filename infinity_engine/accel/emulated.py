"""A device that lives in host memory, with set rates and a record of its operations: for tests.

Its memory is NaN wherever nothing was written: fresh and freed bytes are 0xFF, which is NaN in
every float type. The two links do not slow one another, and each carries its copies one at a time
in the order of their submission, whatever stream they are in. Modules compute on the host itself:
it waits for events where a GPU's stream would. The virtual clock of virtual.py carries the
operations out. Starts nothing itself.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch

from infinity_engine.accel.base import Buffer, DeviceBytes, Event, Stream, StreamKind, TimeCost
from infinity_engine.accel.operation import Action, Copy, Operation, Work
from infinity_engine.accel.ordered import OrderedAccelerator
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.plan import Rates
from infinity_engine.units import NS_PER_S

__all__ = [
    "NAN_BYTE",
    "EmulatedAccelerator",
    "EmulatedMemory",
    "Emulation",
    "OperationRecord",
    "ceil_ns",
    "op_start_ns",
]

NAN_BYTE = 0xFF
_Op = TypeVar("_Op", bound=Operation)


@dataclass(frozen=True, kw_only=True, slots=True)
class Emulation:
    """The properties of an emulated device."""

    # Those of h2d, d2h and updates on the device are used, with what each operation costs however
    # small it is; those of updates on the host where `host_takes_time`.
    rates: Rates
    capacity_bytes: int
    # Whether the virtual clock advances while the host updates, at its rate.
    host_takes_time: bool = False
    seed: int = 0  # Draws one of the legal orders.
    # Called with the stream's kind before each copy and work, which fails with the error that this
    # returns.
    fault: Callable[[StreamKind], Exception | None] | None = None
    # Called likewise; each copy and work takes so much longer than at its rate.
    delay_ns: Callable[[StreamKind], int] | None = None
    timeline_kept: int = 10_000  # How many of the newest operations timeline() returns.


@dataclass(frozen=True, slots=True)
class OperationRecord:
    """When a copy or work was carried out."""

    name: str
    stream: str
    start_ns: int
    end_ns: int


class EmulatedMemory:
    """The device's bytes, as blocks of host memory with known addresses."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._taken_bytes = 0
        self._starts: list[int] = []
        self._blocks: list[torch.Tensor] = []  # in the order of _starts
        self._beside: set[int] = set()  # the starts of those that take nothing of the capacity

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return a block of NaN."""
        if nbytes < 1:
            raise ValueError(f"expected a buffer of 1 B or more, got {nbytes} B")
        free = self.bytes.free
        if nbytes > free:
            raise CapacityError(
                tier="DEVICE",
                asked=nbytes,
                free=free,
                limit=self._capacity_bytes,
                change="give the emulated device more bytes, or free buffers first",
            )
        block = self._add(nbytes)
        self._taken_bytes += nbytes
        return block

    def allocate_beside(self, nbytes: int) -> torch.Tensor:
        """Return a block of NaN that takes nothing of the capacity."""
        block = self._add(nbytes)
        self._beside.add(block.data_ptr())
        return block

    def _add(self, nbytes: int) -> torch.Tensor:
        block = self._new_block(nbytes).fill_(NAN_BYTE)
        # Both lists stay sorted by address: a tensor's block is found from its address alone.
        at = bisect.bisect(self._starts, block.data_ptr())
        self._starts.insert(at, block.data_ptr())
        self._blocks.insert(at, block)
        return block

    def free(self, block: torch.Tensor) -> None:
        """Take a block back and fill it with NaN, which views of it then show."""
        # Filled last: views that are left show NaN from here on.
        self.disown(block)
        block.fill_(NAN_BYTE)

    def disown(self, block: torch.Tensor) -> None:
        """Stop counting a block; its bytes stay as they are."""
        at = self._index(block.data_ptr())
        # The address of a block is its key, so memory of another accelerator cannot be freed here.
        if at is None or self._starts[at] != block.data_ptr():
            raise ValueError(
                f"expected a buffer of this accelerator (emulated), got {block.numel()} B of "
                "another one"
            )
        del self._starts[at], self._blocks[at]
        if block.data_ptr() in self._beside:
            self._beside.remove(block.data_ptr())
        else:
            self._taken_bytes -= block.numel()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Tell whether the tensor's bytes are in a block that is not freed."""
        return self._index(tensor.data_ptr()) is not None

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a flat tensor's bytes as a view of the block: it keeps nothing of the caller's."""
        at = self._index(tensor.data_ptr())
        if at is None:
            raise ValueError(
                f"expected a tensor in a buffer of this device, got one of {tensor.numel()} B "
                "elsewhere. Its buffer may have been freed"
            )
        start = tensor.data_ptr() - self._starts[at]
        return self._blocks[at][start : start + tensor.numel()]

    @property
    def bytes(self) -> DeviceBytes:
        """How many bytes there are."""
        return DeviceBytes(
            free=self._capacity_bytes - self._taken_bytes, total=self._capacity_bytes
        )

    def _new_block(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def _index(self, address: int) -> int | None:
        at = bisect.bisect(self._starts, address) - 1
        return at if at >= 0 and address < self._starts[at] + self._blocks[at].numel() else None


class EmulatedAccelerator(OrderedAccelerator[_Op]):
    """The parts that no clock decides: the memory, the rates as durations, the timeline."""

    name = "emulated"
    clock: ClassVar[str]  # the kind of clock that its times are on
    unified = False

    def __init__(self, kind: type[_Op], emulation: Emulation) -> None:
        super().__init__(kind)
        self.torch_device = torch.device("cpu")
        self.emulation = emulation
        rates = emulation.rates
        self._ratios = {
            StreamKind.H2D: _ratio(rates.h2d_bytes_per_s, name="h2d_bytes_per_s"),
            StreamKind.D2H: _ratio(rates.d2h_bytes_per_s, name="d2h_bytes_per_s"),
        }
        self._update_ratio = _ratio(
            rates.device_update_params_per_s, name="device_update_params_per_s"
        )
        self._copy_start_ns = op_start_ns(rates.copy_start_s)
        self._update_start_ns = op_start_ns(rates.device_start_s)
        self._fault = emulation.fault or (lambda _kind: None)
        self._delay_ns = emulation.delay_ns or (lambda _kind: 0)
        self._memory = EmulatedMemory(emulation.capacity_bytes)
        self._outliving: deque[tuple[Event, torch.Tensor]] = deque()  # oldest first
        self._timeline: deque[OperationRecord] = deque(maxlen=emulation.timeline_kept)

    def allocate(self, nbytes: int, *, idle_bytes: int = 0) -> Buffer:
        """Return a buffer of NaN."""
        return Buffer(self._memory.allocate(nbytes))

    def free(self, buffer: Buffer) -> None:
        """Give a buffer back; views of it show NaN from here on."""
        self._memory.free(buffer.release())

    def disown(self, buffer: Buffer) -> None:
        """Leave a buffer's memory to its views for good: the device has room for other blocks."""
        self._memory.disown(buffer.release())

    def computed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy, which takes nothing of the capacity: modules compute on the host."""
        while self._outliving and self._outliving[0][0].done():
            self._memory.free(self._outliving.popleft()[1])
        return self._memory.allocate_beside(tensor.numel()).copy_(tensor)

    def outlives(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep a copy that `computed` made until `stream` has done all it was given so far."""
        self._outliving.append((self.record(stream), tensor))

    def memory(self) -> DeviceBytes:
        """Return how much device memory there is now."""
        return self._memory.bytes

    def timeline(self) -> tuple[OperationRecord, ...]:
        """Return when the newest copies and works were carried out, in ns of the device's clock."""
        return tuple(self._timeline)

    def _duration_ns(self, stream: Stream, action: Action) -> int:
        delay_ns = self._delay_ns(stream.kind)
        # A copy costs its start and its bytes over the link's rate; a delay comes on top, once per
        # operation.
        if isinstance(action, Copy):
            nbytes = action.nbytes
            return delay_ns + self._copy_start_ns + ceil_ns(nbytes, self._ratios[stream.kind])
        if isinstance(action, Work):
            cost = action.cost
            if isinstance(cost, TimeCost):
                return delay_ns + cost.ns
            return delay_ns + self._update_start_ns + ceil_ns(cost.params, self._update_ratio)
        # A mark takes no time: an event that was recorded passes when all before it has.
        return 0

    def _note(self, operation: _Op, start_ns: int, end_ns: int) -> None:
        self._timeline.append(
            OperationRecord(operation.name, operation.stream.name, start_ns, end_ns)
        )

    def _raise_fault(self, operation: _Op) -> None:
        """Raise the error that the emulation's `fault` asks for."""
        fault = self._fault(operation.stream.kind)
        if fault is not None:
            raise fault

    def _in_device(self, tensor: torch.Tensor) -> bool:
        if tensor.device.type != "cpu":
            raise ValueError(
                "expected tensors in host memory, where the emulated device lives, got "
                f"{tensor.device}"
            )
        return self._memory.holds(tensor)


def _ratio(rate: float | None, *, name: str) -> tuple[int, int]:
    if rate is None:
        raise ConfigError(
            field=f"Emulation.rates.{name}",
            value=rate,
            expected="a rate: an emulated device needs it",
        )
    # A fraction of integers, exactly the float's value: no rounding adds up over a long run.
    return rate.as_integer_ratio()


def op_start_ns(seconds: float | None) -> int:
    """Return what an operation costs, however small it is; None: nothing."""
    return round((seconds or 0) * NS_PER_S)


def ceil_ns(amount: int, rate: tuple[int, int]) -> int:
    """Return the ns that `amount` takes at a rate per second, rounded up once, at the end."""
    numerator, denominator = rate
    # Floor division of the negated value is division rounded up, in integers of any size.
    return -(-amount * NS_PER_S * denominator // numerator)
