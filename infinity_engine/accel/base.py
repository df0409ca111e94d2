"""The interface of every accelerator: streams, events that end operations, and flat device memory.

Bytes, not tensors: a buffer is a run of device bytes, a copy moves bytes between host and device.
Decides nothing about what moves when. Called by memory/, residence/ and the code that runs updates,
from one host thread for each accelerator.

Three rules hold on all of them. Operations of one stream follow one another; those of different
streams are ordered only by `after`, by `wait_for`, and by what the host waited for before it
submitted. Source and target of a copy belong to the copy until its event has passed. An error
belongs to the event of the operation that failed; see `Event`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import NamedTuple, TypeVar

import torch

__all__ = [
    "Accelerator",
    "Buffer",
    "Cost",
    "DeviceBytes",
    "Event",
    "Stream",
    "StreamKind",
    "TimeCost",
    "UpdateCost",
]

_Self = TypeVar("_Self", bound="Accelerator")


class StreamKind(Enum):
    """What a stream is for."""

    COMPUTE = "compute"  # Device work. On cuda, the stream that modules compute in.
    H2D = "h2d"  # Copies from host to device.
    D2H = "d2h"  # Copies from device to host.
    # Device work that waits for other ranks, so that it holds up no other work.
    COLLECTIVE = "collective"


class Stream:
    """A queue of operations that follow one another, for the accelerator that made it."""

    __slots__ = ("kind", "name")

    def __init__(self, kind: StreamKind, name: str) -> None:
        self.kind = kind
        self.name = name

    def __repr__(self) -> str:
        return f"Stream({self.name})"


class Event(ABC):
    """The end of an operation, or of all that a stream was given before `record`.

    An operation that failed has ended: `done` says so and `wait` raises its error, each time. What
    depends on it does not run and carries the same error: operations that name it in `after` or
    were put behind it with `wait_for`, and those that follow it in its stream until some `wait` or
    `synchronize` has raised the error on the host. So nothing works on the results of a failure
    that was not reported, and a stream can be used again afterwards.
    """

    __slots__ = ()

    @abstractmethod
    def done(self) -> bool:
        """Tell, without blocking, whether the operation has ended; no clock advances."""

    @abstractmethod
    def wait(self) -> None:
        """Block the host until the operation has ended, and raise what it failed with."""


class Buffer:
    """`nbytes` flat bytes of device memory.

    Made by `Accelerator.allocate`, given back with `Accelerator.free`.
    """

    __slots__ = ("_memory", "nbytes")

    def __init__(self, memory: torch.Tensor) -> None:
        # Fixed here: the size is still asked for, in messages, after the memory has gone.
        self.nbytes = memory.numel()
        self._memory: torch.Tensor | None = memory

    def tensor(
        self, dtype: torch.dtype, shape: int | Sequence[int], offset: int = 0
    ) -> torch.Tensor:
        """Return the bytes from `offset` on as a tensor, which shares them."""
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = math.prod(sizes) * dtype.itemsize
        if min(sizes, default=0) < 0 or offset < 0 or offset + nbytes > self.nbytes:
            raise ValueError(
                f"expected a tensor within the buffer's {self.nbytes} B, got {nbytes} B at offset "
                f"{offset} (shape {sizes} of {dtype})"
            )
        if offset % dtype.itemsize:
            raise ValueError(
                f"expected an offset that is a multiple of {dtype.itemsize} B for {dtype}, got "
                f"{offset}"
            )
        return self._held()[offset : offset + nbytes].view(dtype).view(sizes)

    def shared(self) -> tuple[torch.Tensor, object]:
        """Return all bytes as a tensor with a storage of its own, and an object to watch them by.

        The object lives until the last view of the tensor is gone.

        The buffer keeps neither.
        """
        memory = self._held()
        if memory.device.type == "cpu":
            # A view would share the buffer's storage, so nothing would tell when the last one is
            # gone.
            # Through numpy the tensor gets a storage of its own, which ends with its last view.
            array = memory.numpy()
            return torch.from_numpy(array), array
        # The same on a GPU: the importing tensor keeps the owner until its last view is gone.
        owner = _DeviceArray(memory)
        return torch.as_tensor(owner, device=memory.device), owner

    def release(self) -> torch.Tensor:
        """Return the memory and keep none of it; for the accelerator that made the buffer."""
        memory = self._held()
        # A buffer that is used or freed a second time raises from here on; see _held().
        self._memory = None
        return memory

    def __repr__(self) -> str:
        return f"Buffer({self.nbytes} B{', freed' if self._memory is None else ''})"

    def _held(self) -> torch.Tensor:
        if self._memory is None:
            raise ValueError(
                f"this buffer of {self.nbytes} B was freed: use a buffer only before free()"
            )
        return self._memory


class _DeviceArray:
    """Bytes of a GPU as other libraries import them; the importer keeps this alive."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (memory.numel(),),
            # Single bytes: the byte order of wider types does not come into it.
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),  # the second value: not read-only
            "version": 3,
        }


@dataclass(frozen=True, slots=True)
class UpdateCost:
    """Device work that updates `params` parameters."""

    params: int

    def __post_init__(self) -> None:
        if self.params < 0:
            raise ValueError(f"expected 0 parameters or more, got {self.params}")


@dataclass(frozen=True, slots=True)
class TimeCost:
    """Device work that takes `ns` nanoseconds, whatever it does."""

    ns: int

    def __post_init__(self) -> None:
        if self.ns < 0:
            raise ValueError(f"expected 0 ns or more, got {self.ns}")


# What device work costs. An emulated device computes its time from this; others run as fast as they
# can.
Cost = UpdateCost | TimeCost


class DeviceBytes(NamedTuple):
    """How much device memory there is, and how much of it is free."""

    free: int
    total: int


class Accelerator(ABC):
    """A device: its streams, its memory, and the copies between its memory and the host's."""

    name: str  # cuda, cpu or emulated.
    # Whether DEVICE and HOST are one memory. Then there is nothing to copy, and `copy` raises.
    unified: bool
    torch_device: torch.device  # Where torch sees its buffers.
    # Whether it goes on with what it was given, in real time, while the host's thread is at work.
    works_beside_host: bool = False

    @abstractmethod
    def stream(self, kind: StreamKind) -> Stream:
        """Return a new stream; on cuda, the current one of torch for COMPUTE."""

    def check_current(self) -> None:  # noqa: B027  # only a GPU has other streams for modules
        """Refuse modules that would launch their kernels where no event of a COMPUTE stream is.

        Raises:
            RuntimeError: torch's current stream is another one than when `stream` was called.
        """

    @abstractmethod
    def record(self, stream: Stream) -> Event:
        """Return the end of everything that was submitted to `stream` so far."""

    @abstractmethod
    def wait_for(self, stream: Stream, event: Event) -> None:
        """Let whatever is submitted to `stream` from here on wait for `event`.

        So does what modules launch in torch's current stream, if that is this one. The host does
        not wait.
        """

    @abstractmethod
    def copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        *,
        stream: Stream,
        after: Sequence[Event] = (),
    ) -> Event:
        """Copy bytes between host and device, once all of `after` have passed; return at once.

        Both are flat uint8 tensors of one length, one of them in host and one in device memory, as
        the kind of `stream` says: H2D or D2H. Neither may be changed, freed or, for the target,
        read before the event has passed.
        """

    @abstractmethod
    def run(
        self, work: Callable[[], object], *, stream: Stream, cost: Cost, after: Sequence[Event] = ()
    ) -> Event:
        """Run `work` on the device once all of `after` have passed; COMPUTE or COLLECTIVE streams.

        `work` reaches its bytes through tensors that it holds, may be called on another thread, and
        calls nothing of the accelerator. On cuda it is called at once, with the stream current, and
        launches the stream's work.
        """

    @abstractmethod
    def allocate(self, nbytes: int, *, idle_bytes: int = 0) -> Buffer:
        """Return a buffer with undefined content, aligned to 64 bytes at least.

        Beside it, at most `idle_bytes` of what was given back may be kept for later buffers.

        Raises:
            CapacityError: the device has not so many free bytes.
        """

    @abstractmethod
    def free(self, buffer: Buffer) -> None:
        """Give a buffer back.

        Every event of an operation that uses it must have passed; views of it are dead.
        """

    def disown(self, buffer: Buffer) -> None:
        # The memory itself goes with the last view: a buffer is all that this class knows of it.
        """Leave a buffer's memory to its views for good: the device does not count it any more."""
        buffer.release()

    def computed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return flat bytes that modules computed, where copies can read them.

        The caller passes what this returns to `outlives` once its copies are submitted.
        """
        return tensor

    # Called with what `computed` returned; where no allocator reuses it, nothing is to be kept.
    def outlives(self, tensor: torch.Tensor, stream: Stream) -> None:  # noqa: B027
        """Keep the memory of a tensor of other code until `stream` has done all it was given.

        So the code that submitted a copy of the tensor need not keep it.
        """

    def forget_idle(self) -> None:  # noqa: B027  # most keep nothing
        """Keep nothing of what was given back."""

    def host_updated(self, params: int) -> None:  # noqa: B027  # most have no clock of their own
        """Note that the host has updated so many parameters: a virtual clock takes time for it."""

    @abstractmethod
    def memory(self) -> DeviceBytes:
        """Return how much device memory there is now."""

    def cap(self, nbytes: int | None) -> None:  # noqa: B027  # most cannot
        """Limit the device memory that torch takes beyond what it has now, to `nbytes`.

        All that is allocated here is included.

        None: the limit from before. An allocation beyond it raises torch.OutOfMemoryError in the
        caller. Does nothing where the device allows no such limit.
        """

    def taken_by_torch(self) -> int | None:
        """Return the bytes that torch has taken since there is a limit; None without a limit."""
        return None

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until all has ended; raise the first error that was not yet raised."""

    @abstractmethod
    def stop(self) -> None:
        """Wait for all that was submitted and stop the device, whatever failed.

        A second call does nothing.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop the device, and raise the first error that was not yet raised.

        A second call does nothing.
        """

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.stop()  # The body's own error is the one to see.
