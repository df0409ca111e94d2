"""Device memory that staging copies from and to: one class for torch's tensors, one for all that
cupy can see.

Owns no memory and starts no I/O. torch is looked at only if the program has imported it; cupy is
imported for arrays that are not torch's. Called by the queue, which asks what it was given, and by
its staging, which copies.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

from deepnvme.memory.buffers import memory_of, not_contiguous, refuse_unless_plain, torch_of

__all__ = ["CopyEvent", "DeviceArray", "device_array_of"]


class CopyEvent(Protocol):
    """A copy under way."""

    def synchronize(self) -> object:
        """Wait for its end, without the GIL; raise what went wrong with it."""
        ...


class DeviceArray(Protocol):
    """One contiguous piece of device memory, which this keeps alive.

    Made by the thread that submits: copies wait, on the device, for what that thread's current
    stream had to do then. So a write sees what was computed before, and a read does not overwrite
    what a kernel still looks at. The other methods are called by the staging thread.
    """

    @property
    def nbytes(self) -> int:
        """How large it is."""
        ...

    def begin(self) -> None:
        """Get ready for copies; called once, before them."""
        ...

    def to_host(self, start: int, target: memoryview) -> CopyEvent:
        """Start copying the bytes from `start` on to host memory."""
        ...

    def to_device(self, start: int, source: memoryview) -> CopyEvent:
        """Start copying host memory over the bytes from `start` on."""
        ...


def device_array_of(thing: Any, *, writable: bool) -> DeviceArray | None:
    """Return the device memory of `thing`, to be written to if `writable`; None: it has none.

    Raises:
        TypeError: it is not dense, or of a library that needs cupy's help and cupy is not there.
        ValueError: it is not contiguous.
        BufferError: it is read-only and `writable` was asked.
    """
    torch = torch_of(thing)
    if torch is not None:
        return _TorchArray(thing, torch) if thing.is_cuda else None
    interface = getattr(thing, "__cuda_array_interface__", None)
    if interface is None:
        return None
    kind = type(thing).__name__
    address, read_only = interface["data"]
    if read_only and writable:
        raise BufferError(f"{kind} is read-only; reading into it needs a writable one")
    try:
        cupy = importlib.import_module("cupy")
    except ImportError:
        raise TypeError(
            f"{kind} is not in host memory, and moving it from where it is needs cupy, which is "
            "not installed: "
            "install it, give a torch tensor (torch.as_tensor), or copy it to the host first"
        ) from None
    # It copies what it cannot share. Read into the copy, the bytes would never reach `thing`.
    array = cupy.asarray(thing)
    if array.nbytes and array.data.ptr != address:
        raise TypeError(
            f"cupy sees {kind} only as a copy, which is not what is to be moved: give a cupy array"
        )
    return _CupyArray(array, cupy)


class _TorchArray:
    """A torch tensor's storage, as bytes."""

    def __init__(self, tensor: Any, torch: Any) -> None:
        refuse_unless_plain(tensor, torch)
        self.nbytes: int = tensor.numel() * tensor.element_size()
        self._torch = torch
        self._device = tensor.device
        # not the tensor: `tensor.data = other` leaves this where it is
        self._storage = tensor.untyped_storage()
        self._offset = tensor.storage_offset() * tensor.element_size()
        # Here, and not in begin(): the stream of the thread that submits is the one to wait for.
        self._submitted = torch.cuda.current_stream(tensor.device).record_event()

    def begin(self) -> None:
        torch = self._torch
        self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_event(self._submitted)
        # Bytes, whatever the dtype: copies of parts need not begin at an element.
        view = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._bytes = view.set_(self._storage, self._offset, (self.nbytes,))

    def to_host(self, start: int, target: memoryview) -> CopyEvent:
        return self._copy(self._host(target), self._bytes[start : start + len(target)])

    def to_device(self, start: int, source: memoryview) -> CopyEvent:
        return self._copy(self._bytes[start : start + len(source)], self._host(source))

    def _host(self, view: memoryview) -> Any:
        return self._torch.frombuffer(view, dtype=self._torch.uint8)

    def _copy(self, target: Any, source: Any) -> CopyEvent:
        cuda = self._torch.cuda
        with cuda.stream(self._stream):
            # It returns at once where the host memory is page-locked, which the pool of pieces is
            # if CUDA was in use when it was made.
            target.copy_(source, non_blocking=True)
            # The thread that waits for it sleeps, where it else would spin on a core.
            event: CopyEvent = self._stream.record_event(cuda.Event(blocking=True))
            return event


class _CupyArray:
    """The memory of a cupy array."""

    def __init__(self, array: Any, cupy: Any) -> None:
        if not array.flags.c_contiguous:
            raise not_contiguous(
                f"an array of strides {array.strides}", how="cupy.ascontiguousarray"
            )
        self.nbytes: int = array.nbytes
        self._cupy = cupy
        self._device = array.device
        self._memory = array.data
        with self._device:
            self._submitted = cupy.cuda.get_current_stream().record(
                cupy.cuda.Event(disable_timing=True)
            )

    def begin(self) -> None:
        with self._device:
            # Else copies would wait for all that the program does on the default stream.
            self._stream = self._cupy.cuda.Stream(non_blocking=True)
            self._stream.wait_event(self._submitted)

    def to_host(self, start: int, target: memoryview) -> CopyEvent:
        host = memory_of(target, writable=True).address
        return self._copy(
            host, self._memory.ptr + start, len(target), self._cupy.cuda.runtime.memcpyDeviceToHost
        )

    def to_device(self, start: int, source: memoryview) -> CopyEvent:
        host = memory_of(source, writable=False).address
        return self._copy(
            self._memory.ptr + start, host, len(source), self._cupy.cuda.runtime.memcpyHostToDevice
        )

    def _copy(self, target: int, source: int, nbytes: int, kind: int) -> CopyEvent:
        cuda = self._cupy.cuda
        with self._device:
            cuda.runtime.memcpyAsync(target, source, nbytes, kind, self._stream.ptr)
            event: CopyEvent = self._stream.record(cuda.Event(block=True, disable_timing=True))
            return event
