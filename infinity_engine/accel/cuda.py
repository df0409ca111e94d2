"""A GPU through torch: its streams, events and caching allocator.

Copies are asynchronous where the host's side is page-locked; one warning says where it is not.
Imports no CUDA until an accelerator is made. Tested by tests/gpu/test_accel_cuda.py on a machine
with a GPU.
"""

from __future__ import annotations

import errno
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress

import torch

from infinity_engine.accel.base import Buffer, DeviceBytes, Event, Stream, StreamKind
from infinity_engine.accel.operation import (
    Copy,
    Failure,
    Operation,
    OperationOwner,
    Submission,
    Work,
)
from infinity_engine.accel.ordered import OrderedAccelerator
from infinity_engine.errors import CapacityError, ConfigError, TransferError

__all__ = ["CudaAccelerator", "CudaOperation"]

_NAP_S = 5e-5


class CudaOperation(Operation):
    """An operation that was launched, or that failed to launch."""

    def __init__(self, owner: OperationOwner, submission: Submission) -> None:
        super().__init__(owner, submission)
        self.nbytes = submission.action.nbytes if isinstance(submission.action, Copy) else None
        self.event: torch.cuda.Event | None = None

    def launched(self, event: torch.cuda.Event) -> None:
        """Note the event that comes after it."""
        self.event = event

    def error_of(self, cause: RuntimeError) -> Exception:
        """Return what went wrong; for a copy, as a TransferError."""
        # torch's error names neither the copy's size nor its stream.
        if self.nbytes is None:
            return cause
        path = f"{self.name} on {self.stream.name} of cuda"
        # Raised and caught, so that `from` sets the cause as in any error that a user reads.
        try:
            raise TransferError(
                errno=errno.EIO, path=path, offset=0, asked=self.nbytes, done=0
            ) from cause
        except TransferError as error:
            return error


class CudaAccelerator(OrderedAccelerator[CudaOperation]):
    """The GPU `index`, by default torch's current one."""

    name = "cuda"
    unified = False
    works_beside_host = True

    def __init__(self, index: int | None = None) -> None:
        super().__init__(CudaOperation)
        if not torch.cuda.is_available():
            raise ConfigError(
                field="accelerator",
                value="cuda",
                expected=(
                    "a machine where torch sees a GPU; `infinity doctor` says why it sees none"
                ),
            )
        self.torch_device = torch.device(
            "cuda", torch.cuda.current_device() if index is None else index
        )
        self._streams: dict[Stream, torch.cuda.Stream] = {}
        # [Note: why no record_stream for buffers] torch's allocator gives a freed block at once to
        # the next allocation on the same stream, and knows nothing of other streams that still use
        # it. Buffers are allocated on a stream of their own that runs nothing, so they share blocks
        # with no other tensors, and `free` comes when every event of their use has passed. So a
        # block that is given away is in use nowhere, and the allocator has nothing to watch.
        # Tensors that other code allocated in its own streams, as autograd does gradients, are
        # another matter: `outlives` is for them.
        self._allocating = _new_stream(self.torch_device)
        self._pinned = True
        self._before: int | None = None  # bytes of torch's tensors when the limit was set
        self._fraction = 1.0  # the fraction allowed before the limit

    @property
    def pinned(self) -> bool:
        """Whether the host's side of every copy was page-locked; for others, the host waits."""
        return self._pinned

    def stream(self, kind: StreamKind) -> Stream:
        """Return a new stream; for COMPUTE, torch's current one."""
        stream = super().stream(kind)
        computes = kind is StreamKind.COMPUTE
        device = self.torch_device
        self._streams[stream] = (
            # The modules' own stream: updates come after their kernels with no event in between.
            torch.cuda.current_stream(device) if computes else _new_stream(device)
        )
        return stream

    def check_current(self) -> None:
        """Refuse modules in another stream than torch's current one was for COMPUTE."""
        current = torch.cuda.current_stream(self.torch_device)
        known = self._computing
        # Copies would begin before its kernels have ended: a fault that only values would tell.
        if known and current not in known:
            raise RuntimeError(
                f"The model is called in another CUDA stream ({current}) than the one in which "
                "the engine was made. Copies to and from the host would not wait for its kernels. "
                "Call both in one stream"
            )

    def wait_for(self, stream: Stream, event: Event) -> None:
        """Let whatever is launched in `stream` from here on wait for `event`."""
        super().wait_for(stream, event)
        # Now, not with the next operation: modules launch their kernels in the stream themselves.
        operation = self._own(event)
        if operation.event is not None and operation.stream is not stream:
            self._streams[stream].wait_event(operation.event)

    def allocate(self, nbytes: int, *, idle_bytes: int = 0) -> Buffer:
        """Return a buffer with undefined content."""
        if nbytes < 1:
            raise ValueError(f"expected a buffer of 1 B or more, got {nbytes} B")
        try:
            # Decides which stream's free blocks the allocator may reuse; see the note in __init__.
            with torch.cuda.stream(self._allocating):
                # Not torch.empty(nbytes): where torch is to be deterministic, it fills that memory
                # by a kernel in this stream, for which no other waits.
                empty = torch.empty(0, dtype=torch.uint8, device=self.torch_device)
                storage = torch.UntypedStorage(nbytes, device=self.torch_device)  # type: ignore[no-untyped-call]  # torch is
                return Buffer(empty.set_(storage))
        except torch.cuda.OutOfMemoryError as error:
            free, total = self.memory()
            raise CapacityError(
                tier="DEVICE",
                asked=nbytes,
                free=free,
                limit=total,
                change=(
                    "lower the budget's device, so that modules and other processes on this GPU "
                    "have more"
                ),
            ) from error

    def free(self, buffer: Buffer) -> None:
        """Give a buffer back to torch's allocator."""
        # Dropping the tensor is all: its block goes back to the allocator's list for our stream.
        buffer.release()

    def outlives(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Make torch keep the memory until `stream` has done all that it was given so far."""
        tensor.record_stream(self._streams[self._lane(stream).stream])

    def memory(self) -> DeviceBytes:
        """Return what the driver says. Blocks that torch's allocator keeps count as taken."""
        return DeviceBytes(*torch.cuda.mem_get_info(self.torch_device))

    def cap(self, nbytes: int | None) -> None:
        """Set the fraction of the device that torch may reserve, blocks that it keeps included."""
        device = self.torch_device
        if nbytes is None:
            if self._before is not None:
                torch.cuda.set_per_process_memory_fraction(self._fraction, device)
                self._before = None
            return
        torch.cuda.empty_cache()  # blocks that the allocator keeps would be room beyond the limit
        self._before = torch.cuda.memory_allocated(device)
        # Not in every torch.
        allowed = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _device: 1.0)
        self._fraction = allowed(device)
        # torch wants a fraction of the whole device, with what it has reserved already.
        share = (torch.cuda.memory_reserved(device) + nbytes) / self.memory().total
        # Never above the fraction that the program set before: its own limit stays in force.
        torch.cuda.set_per_process_memory_fraction(min(self._fraction, share), device)

    def taken_by_torch(self) -> int | None:
        """Return the bytes of torch's tensors, without blocks that it keeps for later tensors."""
        return (
            None
            if self._before is None
            else max(torch.cuda.memory_allocated(self.torch_device) - self._before, 0)
        )

    def _start(self, operation: CudaOperation, behind: Sequence[CudaOperation]) -> None:
        failure = operation.inherited()
        if failure is None:
            try:
                self._launch(operation, behind)
            # CUDA reports a failed launch, and those of earlier kernels, as a RuntimeError.
            except RuntimeError as error:
                failure = Failure(operation.error_of(error))
            except Exception as error:
                failure = Failure(error)
        self._finish(operation, failure)

    def _launch(self, operation: CudaOperation, behind: Sequence[CudaOperation]) -> None:
        stream, action = self._streams[operation.stream], operation.action
        with torch.cuda.stream(stream):
            for other in behind:
                # Within a stream the device keeps the order itself, without an event.
                if other.event is not None and other.stream is not operation.stream:
                    stream.wait_event(other.event)
            if isinstance(action, Copy):
                self._look_at_host(action, operation.stream.kind)
                action.target.copy_(action.source, non_blocking=True)
            elif isinstance(action, Work):
                action.call()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch is
            event.record(stream)
        operation.launched(event)

    def _look_at_host(self, copy: Copy, kind: StreamKind) -> None:
        host = copy.source if kind is StreamKind.H2D else copy.target
        # Asking the driver takes time, so it stops with the first copy that is not pinned.
        if self._pinned and not host.is_pinned():
            self._pinned = False
            warnings.warn(
                "The host memory of a copy is not page-locked, so the host waits for this copy "
                "and all like it. Use memory of a pinned pool. This warning appears once",
                RuntimeWarning,
                stacklevel=2,
            )

    def _has_ended(self, operation: CudaOperation) -> bool:
        # An operation that failed to launch has no event, and will never run: it has ended.
        if operation.event is None or operation.failure is not None:
            return True
        try:
            return bool(operation.event.query())  # type: ignore[no-untyped-call]  # torch is
        except RuntimeError as error:
            self._finish(operation, Failure(operation.error_of(error)))
            return True

    def _wait(self, operation: CudaOperation) -> None:
        # One that failed before is not asked again: the first error is the one that events carry.
        if operation.event is not None and operation.failure is None:
            try:
                _sleep_until(operation.event)
            except RuntimeError as error:
                self._finish(operation, Failure(operation.error_of(error)))
        self._raise_failure(operation)

    def _drain(self) -> None:
        # The newest operation of a stream ends after all others in it.
        for lane in self._lanes.values():
            for newest in lane.newest:
                if not self._has_ended(newest) and newest.event is not None:
                    try:
                        _sleep_until(newest.event)
                    except RuntimeError as error:
                        self._finish(newest, Failure(newest.error_of(error)))
        # What modules launched there is none of our operations, and an error of it is not ours.
        for launched in self._computing:
            with suppress(RuntimeError):
                launched.synchronize()

    @property
    def _computing(self) -> list[torch.cuda.Stream]:
        """Torch's streams in which modules launch their kernels."""
        return [
            launched
            for stream, launched in self._streams.items()
            if stream.kind is StreamKind.COMPUTE
        ]

    def _in_device(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cuda"


def _sleep_until(event: torch.cuda.Event) -> None:
    """Block until an event has passed.

    torch's own wait spins, and takes a core from the host's updates. With events for which it
    sleeps (`blocking`), the driver let a launching thread wait after 56 copies, on an H200, and
    after 1,021 without events: decision 0057.
    """
    while not event.query():  # type: ignore[no-untyped-call]  # torch is
        time.sleep(_NAP_S)


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch is
