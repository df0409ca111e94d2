"""DeepNVMe's names and call shapes over `IOQueue`: a program written for DeepSpeed's `aio_handle`
changes one import.

Failures raise, where DeepNVMe reports success or ends the program. Queue and pool do the work.
docs/migrate-from-deepnvme.md says what is the same and what is not. Imports torch when a locked
tensor is asked for.
"""

from __future__ import annotations

import ctypes
import errno
import operator
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, overload

from deepnvme.errors import BatchError, ForkedError, NVMeError
from deepnvme.memory.buffers import Memory, memory_of, torch_of
from deepnvme.memory.device_arrays import device_array_of
from deepnvme.memory.pool import Pool
from deepnvme.queue.future import IOFuture
from deepnvme.queue.leftovers import at_end_of
from deepnvme.queue.queue import Direct, File, IOQueue

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

__all__ = [
    "AsyncIOBuilder",
    "PinMemoryBuilder",
    "aio_handle",
    "aio_read",
    "aio_write",
    "deepspeed_memcpy",
    "pin_handle",
]

_Path: TypeAlias = "str | bytes | os.PathLike[str] | os.PathLike[bytes]"

# DeepNVMe's defaults. Where a handle has both, deepnvme chooses.
_BLOCK_BYTES = 1 << 20
_QUEUE_DEPTH = 128
_CHUNK_UNIT_BYTES = 64 << 10  # a queue's chunks are multiples of it
_MOST_INFLIGHT_BYTES = 64 << 20  # more makes no drive faster, and bouncing takes as much memory
_SECTOR_BYTES = 512
_LARGEST_LOCKED_BYTES = 1 << 30  # what a pool gives in one piece
_CHECKED_BYTES = 8 << 20  # validated at a time


class AsyncIOBuilder:
    """Stands where DeepSpeed's builder stands: `AsyncIOBuilder().load().aio_handle()`.

    There is nothing to build.
    """

    NAME = "async_io"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return True: where this can be imported, some backend works."""
        return True

    def load(self, verbose: bool = False) -> ModuleType:
        """Return this module."""
        return sys.modules[__name__]


class PinMemoryBuilder:
    """Stands where DeepSpeed's builder stands: `PinMemoryBuilder().load().pin_handle()`."""

    NAME = "pin_memory"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return True."""
        return True

    def load(self, verbose: bool = False) -> ModuleType:
        """Return this module."""
        return sys.modules[__name__]


@dataclass(frozen=True)
class _HandleOperation:
    """A transfer under way, and how it is validated once it has ended."""

    future: IOFuture[int]
    validate: Callable[[], BaseException | None] | None

    def failure(self) -> BaseException | None:
        """Wait for the end; return what went wrong."""
        error = self.future.exception()
        return error if error or not self.validate else self.validate()


class aio_handle:  # noqa: N801 - the name that programs use
    """Reads and writes whole buffers by file name.

    `wait()` waits for all that is pending, and raises what failed.

    `queue` is the IOQueue that does the work, for all that this class lacks. `block_size` decides
    its chunk and `queue_depth` its bytes in flight; the other parameters have no effect and are
    kept for the `get_` methods. With a `file_offset`, a write changes those bytes and no others;
    without, the file becomes what the buffer holds.
    """

    def __init__(
        self,
        block_size: int = _BLOCK_BYTES,
        queue_depth: int = _QUEUE_DEPTH,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        self._block_size = _positive("block_size", block_size)
        self._queue_depth = _positive("queue_depth", queue_depth)
        self._single_submit = bool(single_submit)
        self._overlap_events = bool(overlap_events)
        self._intra_op_parallelism = _positive("intra_op_parallelism", intra_op_parallelism)
        chunk_bytes, inflight_bytes = _settings(self._block_size, self._queue_depth)
        self.queue = IOQueue(chunk_bytes=chunk_bytes, inflight_bytes=inflight_bytes)
        self._pending: list[_HandleOperation] = []
        self._waiting = threading.Lock()
        # It has the list and not the handle: `wait` changes the list in place, so that both see the
        # same.
        abandon = partial(_abandon, self.queue, self._pending, os.getpid())
        self._finalizer = at_end_of(self, abandon)

    def get_block_size(self) -> int:
        """Return `block_size` as given."""
        return self._block_size

    def get_queue_depth(self) -> int:
        """Return `queue_depth` as given."""
        return self._queue_depth

    def get_single_submit(self) -> bool:
        """Return `single_submit` as given."""
        return self._single_submit

    def get_overlap_events(self) -> bool:
        """Return `overlap_events` as given."""
        return self._overlap_events

    def get_intra_op_parallelism(self) -> int:
        """Return `intra_op_parallelism` as given."""
        return self._intra_op_parallelism

    def get_alignment(self) -> int:
        """Return the bytes to which DeepNVMe needs buffers padded; here any length is right."""
        return self._intra_op_parallelism * _SECTOR_BYTES

    def async_pread(self, buffer: Any, filename: _Path, file_offset: int = 0) -> int:
        """Start filling `buffer` from the file. Returns 0; `wait()` tells how it ended."""
        return self.pread(buffer, filename, False, True, file_offset)

    def sync_pread(self, buffer: Any, filename: _Path, file_offset: int = 0) -> int:
        """Fill `buffer` from the file.

        Waits for all that is pending, and returns how many operations that were.
        """
        return self.pread(buffer, filename, False, False, file_offset)

    def pread(
        self, buffer: Any, filename: _Path, validate: bool, async_: bool, file_offset: int = 0
    ) -> int:
        """As `async_pread` or `sync_pread`; `validate` compares buffer and file afterwards."""
        self._pending.append(self._read(buffer, filename, validate, file_offset))
        return 0 if async_ else self.wait()

    @overload
    def async_pwrite(self, buffer: Any, filename: _Path, file_offset: int | None = None) -> int: ...

    @overload
    def async_pwrite(self, buffer: Any, filename: int, file_offset: int = 0) -> int: ...

    @overload
    def async_pwrite(self, buffer: Any, *, fd: int, file_offset: int = 0) -> int: ...

    def async_pwrite(
        self,
        buffer: Any,
        filename: _Path | int | None = None,
        file_offset: int | None = None,
        *,
        fd: int | None = None,
    ) -> int:
        """Start writing `buffer` to the file, named or open as a descriptor.

        Returns 0; `wait()` tells how it ended.
        """
        descriptor = filename if isinstance(filename, int) else fd
        if descriptor is not None:
            # Opened anew: the descriptor may be closed at once, and need not be for direct I/O.
            self._pending.append(
                self._write(buffer, f"/proc/self/fd/{descriptor}", False, file_offset or 0)
            )
            return 0
        if filename is None or isinstance(filename, int):
            raise TypeError("async_pwrite needs a filename or an fd")
        return self.pwrite(buffer, filename, False, True, file_offset)

    def sync_pwrite(self, buffer: Any, filename: _Path, file_offset: int | None = None) -> int:
        """Write `buffer` to the file.

        Waits for all that is pending, and returns how many operations that were.
        """
        return self.pwrite(buffer, filename, False, False, file_offset)

    def pwrite(
        self,
        buffer: Any,
        filename: _Path,
        validate: bool,
        async_: bool,
        file_offset: int | None = None,
    ) -> int:
        """As `async_pwrite` or `sync_pwrite`; `validate` reads the file back and compares."""
        self._pending.append(self._write(buffer, filename, validate, file_offset))
        return 0 if async_ else self.wait()

    def read(
        self, buffer: Any, filename: _Path, validate: bool, file_offset: int | None = None
    ) -> int:
        """Fill `buffer` from the file, all of it unless there is a `file_offset`.

        Waits for this alone; returns 0.
        """
        return _end(self._read(buffer, filename, validate, file_offset))

    def write(
        self, buffer: Any, filename: _Path, validate: bool, file_offset: int | None = None
    ) -> int:
        """Write `buffer` to the file. Waits for this alone; returns 0."""
        return _end(self._write(buffer, filename, validate, file_offset))

    def wait(self) -> int:
        """Wait until everything pending has ended; return how many operations that were.

        Raises:
            NVMeError: one of them failed.
            BatchError: several did; `errors` has them all.
        """
        with self._waiting:
            # A copy: what other threads submit meanwhile stays for the next wait.
            operations = self._pending[:]
            # All are waited for before an error is raised: their memory is free then.
            failures = [failure for operation in operations if (failure := operation.failure())]
            del self._pending[: len(operations)]
        errors = [failure for failure in failures if isinstance(failure, NVMeError)]
        if len(errors) > 1 and len(errors) == len(failures):
            raise BatchError(errors)
        if failures:
            raise failures[0]
        return len(operations)

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Return a new tensor of the example's type in memory of a `Pool`, known to this handle."""
        return _LockedTensors.make(num_elem, example_tensor, self.queue)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Give a locked tensor's memory back, which leaves it empty; False for other tensors.

        Where views or operations still use the memory, it goes back when the last of them is gone.
        """
        return _LockedTensors.free(tensor)

    def is_pinned(self, buffer: Any) -> bool:
        """Tell whether `buffer` is in a locked tensor of this process, or page-locked by torch."""
        return _LockedTensors.hold(buffer)

    def close(self) -> None:
        """Wait as `wait()` does, then free the rings and threads.

        Dropping the handle does the same, but only warns.
        """
        try:
            self.wait()
        finally:
            # First: it would warn of a handle that was dropped without wait().
            self._finalizer.detach()
            self.queue.close()

    def __del__(self) -> None:
        """End what is under way, unless the garbage collector has found it: another thread does it
        then.
        """
        finalizer = getattr(self, "_finalizer", None)  # none where __init__ raised
        if finalizer is not None:
            finalizer()  # does nothing where it was called already

    def _read(
        self, buffer: Any, filename: _Path, validate: bool, file_offset: int | None
    ) -> _HandleOperation:
        path = os.fsdecode(filename)
        # Closed before the operation ends, which keeps the descriptor as long as it needs it.
        with self.queue.open(path) as file:
            if file_offset is None and file.size > _nbytes(buffer):
                raise ValueError(
                    f"{path} has {file.size} B, more than the {_nbytes(buffer)} B of the buffer; "
                    "to read a part of it, give a file_offset"
                )
            future = file.pread(buffer, file_offset or 0)
        return _HandleOperation(
            future, self._validation(buffer, path, file_offset or 0) if validate else None
        )

    def _write(
        self, buffer: Any, filename: _Path, validate: bool, file_offset: int | None
    ) -> _HandleOperation:
        path = os.fsdecode(filename)
        nbytes = _nbytes(buffer)
        # Before there is a file: these may refuse the buffer.
        if device_array_of(buffer, writable=False) is None:
            memory_of(buffer, writable=False)
        with self._open_for_writing(path) as file:
            future = file.pwrite(buffer, file_offset or 0)
            # The write may be under way: it ends where the cut begins.
            if file_offset is None and file.size > nbytes:
                file.truncate(nbytes)
        return _HandleOperation(
            future, self._validation(buffer, path, file_offset or 0) if validate else None
        )

    def _open_for_writing(self, path: str) -> File:
        """Open a file without emptying it: writing over what is allocated is faster."""
        with suppress(FileNotFoundError):
            return self.queue.open(path, "r+")
        try:
            return self.queue.open(path, "x", permissions=0o600)
        except FileExistsError:  # another process made it meanwhile
            return self.queue.open(path, "r+")

    def _validation(
        self, buffer: Any, path: str, offset: int
    ) -> Callable[[], BaseException | None]:
        """Return the comparison of buffer and file, for when the transfer has ended.

        The file is opened now, as its name may be another file's by then. Through the page cache,
        as it is direct I/O that is checked.
        """
        return partial(_difference, self.queue.open(path, direct=Direct.NEVER), buffer, offset)


class pin_handle:  # noqa: N801 - the name that programs use
    """Locked tensors without a handle for I/O.

    Tensors made by a handle's own method are registered with it as well.
    """

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """As `aio_handle.new_cpu_locked_tensor`, registered with no handle."""
        return _LockedTensors.make(num_elem, example_tensor, None)

    def free_cpu_locked_tensor(self, locked_tensor: torch.Tensor) -> bool:
        """As `aio_handle.free_cpu_locked_tensor`."""
        return _LockedTensors.free(locked_tensor)

    def is_pinned(self, buffer: Any) -> bool:
        """As `aio_handle.is_pinned`."""
        return _LockedTensors.hold(buffer)


def aio_read(  # noqa: PLR0917 - the call shape of DeepNVMe
    buffer: Any,
    filename: _Path,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Fill `buffer` from the file, which must be as large, with a handle for this alone.

    Returns 0.
    """
    handle = aio_handle(block_size, queue_depth, single_submit, overlap_events)
    try:
        return handle.read(buffer, filename, validate)
    finally:
        handle.close()


def aio_write(  # noqa: PLR0917 - the call shape of DeepNVMe
    buffer: Any,
    filename: _Path,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Make the file what `buffer` holds, with a handle for this alone. Returns 0."""
    handle = aio_handle(block_size, queue_depth, single_submit, overlap_events)
    try:
        return handle.write(buffer, filename, validate)
    finally:
        handle.close()


def deepspeed_memcpy(dest: Any, src: Any) -> int:
    """Copy the bytes of one buffer in host memory over those of another of the same size.

    Returns 0.
    """
    target, source = memory_of(dest, writable=True), memory_of(src, writable=False)
    if target.nbytes != source.nbytes:
        raise ValueError(
            f"expected buffers of one size, got {target.nbytes} B to copy to and {source.nbytes} B "
            "to copy"
        )
    ctypes.memmove(target.address, source.address, source.nbytes)
    return 0


@dataclass(frozen=True, eq=False)
class _LockedTensor:
    """What is known of a locked tensor. Its memory is in use as long as `view` lives."""

    view: weakref.ref[memoryview]
    address: int
    nbytes: int
    pool: Pool
    queue: weakref.ref[IOQueue] | None  # which the pool is registered with

    def holds(self, memory: Memory) -> bool:
        """Tell whether `memory` is a part of this."""
        end = memory.address + memory.nbytes
        return (
            self.view() is not None
            and self.address <= memory.address
            and end <= self.address + self.nbytes
        )


class _LockedTensors:
    """The locked tensors of this process: every handle knows those of the others too."""

    _known: ClassVar[set[_LockedTensor]] = set()

    @classmethod
    def make(cls, num_elem: int, example: torch.Tensor, queue: IOQueue | None) -> torch.Tensor:
        try:
            import torch
        except ImportError:
            raise ImportError(
                "locked tensors need torch, which is not installed; "
                "deepnvme.Pool(nbytes).empty(shape, dtype) gives numpy arrays of the same memory"
            ) from None
        if not isinstance(example, torch.Tensor):
            raise TypeError(
                f"expected an example tensor, of which the new one has the dtype; got "
                f"{type(example).__name__}"
            )
        if num_elem == 0:
            return torch.empty(0, dtype=example.dtype)
        nbytes = _positive("num_elem", num_elem) * example.element_size()
        if nbytes > _LARGEST_LOCKED_BYTES:
            raise ValueError(
                f"a locked tensor holds at most {_LARGEST_LOCKED_BYTES} B, asked: {nbytes} B; make "
                "several"
            )
        # Before more memory is asked for: pools of tensors that are gone go back now.
        cls._forget_unused()
        pool = Pool(nbytes)
        if queue is not None:
            queue.use_pool(pool)
        view = pool.buffer(nbytes)
        # holds `view` until nothing uses the memory any more
        tensor = torch.frombuffer(view, dtype=example.dtype)
        registered = None if queue is None else weakref.ref(queue)
        cls._known.add(
            _LockedTensor(weakref.ref(view), tensor.data_ptr(), nbytes, pool, registered)
        )
        return tensor

    @classmethod
    def free(cls, tensor: torch.Tensor) -> bool:
        import torch

        start = Memory(tensor.data_ptr(), 1, None)
        if not any(
            # A copy of the set, as below: another thread may make or free a tensor meanwhile.
            start.address == known.address and known.holds(start)
            for known in cls._known.copy()
        ):
            return False
        # Only this tensor gives up the memory: views of it and operations keep it.
        tensor.data = torch.empty(0, dtype=tensor.dtype)
        cls._forget_unused()
        return True

    @classmethod
    def hold(cls, buffer: Any) -> bool:
        torch = torch_of(buffer)
        if torch is not None and buffer.is_pinned():
            return True
        try:
            memory = memory_of(buffer, writable=False)
        except (TypeError, ValueError):
            return False
        return any(known.holds(memory) for known in cls._known.copy())

    @classmethod
    def _forget_unused(cls) -> None:
        """Free the pools whose tensors are gone.

        Not when a tensor goes: that may be on a thread which the queue needs.
        """
        for known in cls._known.copy():
            if known.view() is not None:
                continue
            queue = None if known.queue is None else known.queue()
            if queue is not None:
                with suppress(ForkedError):
                    queue.forget_pool(known.pool)
            cls._known.discard(known)


def _positive(name: str, value: int) -> int:
    if operator.index(value) < 1:
        raise ValueError(f"{name} must be 1 or more, got {value}")
    return operator.index(value)


def _settings(block_size: int, queue_depth: int) -> tuple[int | None, int | None]:
    """Return the chunk and the bytes in flight nearest to the arguments; None: deepnvme chooses."""
    if (block_size, queue_depth) == (_BLOCK_BYTES, _QUEUE_DEPTH):
        return None, None
    chunk_bytes = min(-(-block_size // _CHUNK_UNIT_BYTES) * _CHUNK_UNIT_BYTES, _MOST_INFLIGHT_BYTES)
    return chunk_bytes, min(chunk_bytes * queue_depth, _MOST_INFLIGHT_BYTES)


def _end(operation: _HandleOperation) -> int:
    if failure := operation.failure():
        raise failure
    return 0


def _abandon(queue: IOQueue, pending: list[_HandleOperation], owner: int) -> None:
    """End the operations of a handle that is gone; errors become a warning."""
    if os.getpid() != owner:
        return
    # Waits for all of them: their memory may go with the handle.
    queue.close()
    futures = [operation.future for operation in pending if operation.future.done()]
    errors = [error for future in futures if (error := future.exception())]
    if errors:
        warnings.warn(
            f"an aio_handle was dropped without wait() and {len(errors)} of its operations failed; "
            f"the first: {errors[0]}",
            RuntimeWarning,
            stacklevel=2,
        )


def _nbytes(buffer: Any) -> int:
    """Return the size of a buffer in host or device memory."""
    nbytes = getattr(buffer, "nbytes", None)
    return memoryview(buffer).nbytes if nbytes is None else int(nbytes)


def _difference(file: File, buffer: Any, offset: int) -> BaseException | None:
    """Compare a buffer with the file from `offset`; return what differs, or why that is unknown."""
    import numpy as np

    try:
        expected = _bytes_of(buffer)
        space = np.empty(_CHECKED_BYTES, np.uint8)
        for start in range(0, expected.size, space.size):
            wanted = expected[start : start + space.size]
            found = space[: file.readinto(space[: wanted.size], offset + start).result()]
            differs = np.flatnonzero(found != wanted[: found.size])
            same = int(differs[0]) if differs.size else found.size
            if same < wanted.size:
                at = start + same
                return NVMeError(
                    errno.EIO,
                    f"the file differs from the buffer {at} B into it, at offset {offset + at}",
                    op="validate",
                    path=file.path,
                    offset=offset,
                    asked=expected.size,
                    done=at,
                )
    except (OSError, TypeError, ValueError) as error:
        return error
    return None


def _bytes_of(buffer: Any) -> NDArray[np.uint8]:
    import numpy as np

    torch = torch_of(buffer)
    if torch is not None:
        bytes_: NDArray[np.uint8] = buffer.detach().cpu().reshape(-1).view(torch.uint8).numpy()
        return bytes_
    return (
        buffer.reshape(-1).view(np.uint8)
        if isinstance(buffer, np.ndarray)
        else np.frombuffer(buffer, np.uint8)
    )
