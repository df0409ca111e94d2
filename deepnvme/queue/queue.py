"""`IOQueue` and `File`: where I/O is submitted.

Each call returns its own IOFuture, which ends in a count or an error.

Starts one thread that waits for ended operations without the GIL and completes their futures
(`deepnvme.queue.pending`); the rest happens in native code (decision 0003).
"""

from __future__ import annotations

import errno
import operator
import os
import threading
import warnings
import weakref
from array import array
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, ClassVar, Literal, NamedTuple

from deepnvme import _native
from deepnvme.choices import byte_count, chosen, whole_number
from deepnvme.closing import Closing
from deepnvme.errors import BatchError, ClosedError, NVMeError, file_error
from deepnvme.machine.backends import (
    BackendFallbackWarning,
    fallbacks,
    refuse_where_threads_must,
    start_on,
)
from deepnvme.machine.profile import Profile, Settings, UserMemory, effective_settings, load_profile
from deepnvme.memory.arrays import Returns, empty
from deepnvme.memory.buffers import Memory, hold_each, memory_of
from deepnvme.memory.device_arrays import device_array_of
from deepnvme.memory.pool import Pool
from deepnvme.queue.faults import FaultPlan
from deepnvme.queue.future import FINISHED, SLICE_S, IOFuture
from deepnvme.queue.leftovers import Leftover, at_end_of
from deepnvme.queue.pending import NO_DEADLINE_S, Pending
from deepnvme.queue.staging import Staging

__all__ = [
    "Batch",
    "Direct",
    "DriveStats",
    "File",
    "IOQueue",
    "Priority",
    "QueueStats",
    "Sync",
    "WhenFull",
]

_Mode = Literal["r", "r+", "w", "x", "rb", "r+b", "rb+", "wb", "xb"]
_MODES = MappingProxyType(
    {
        "r": _native.OpenMode.READ,
        "r+": _native.OpenMode.UPDATE,
        "w": _native.OpenMode.CREATE,
        "x": _native.OpenMode.EXCLUSIVE,
    }
)


# Found once: three look-ups for each operation cost as much as a call.
_READ, _WRITE = _native.Verb.READ, _native.Verb.WRITE
_FAILS, _STOPS = _native.AtEndOfFile.FAILS, _native.AtEndOfFile.STOPS
_MOST_REQUESTS = 4096
_MOST_PENDING = (1 << 32) - 1  # native code counts them in 32 bits
_LARGEST_CHUNK = 1 << 30  # as native code has it: its arenas are no larger
_LARGEST_FILE = (1 << 63) - 1  # bytes, as the kernel counts them
# No memory is so large that an operation from a smaller offset ends beyond the largest file.
_SURELY_FITS = 1 << 62


class WhenFull(Enum):
    """What submitting does while as many operations as the queue holds are pending."""

    BLOCK = "block"  # waits for room, without the GIL
    RAISE = "raise"  # raises QueueFull at once


class Direct(Enum):
    """Whether a file's whole pages bypass the page cache."""

    AUTO = _native.DirectIO.AUTOMATIC  # where the file system takes it
    NEVER = _native.DirectIO.NEVER  # all of it goes through the page cache, nothing is read ahead
    REQUIRED = _native.DirectIO.REQUIRED  # opening fails where it does not


class Sync(Enum):
    """How much a sync makes durable."""

    DATA = _native.Verb.SYNC_DATA  # the bytes, and the length where it changed
    ALL = _native.Verb.SYNC_ALL  # times and permissions too


class Priority(Enum):
    """Which of the operations that wait for a drive begins first."""

    NORMAL = 0  # in order, among operations of its size; small ones hardly wait for large ones
    URGENT = 1  # before all normal ones


_NORMAL = Priority.NORMAL  # looking up a member costs more than all other checks of an operation


@dataclass(frozen=True)
class DriveStats:
    """What one drive did since the queue was made: docs/nvme.md has what each field counts."""

    backend: str
    operations: int
    failed: int
    chunks: int
    submissions: int
    read_bytes: int
    written_bytes: int
    bounced_bytes: int
    buffered_bytes: int
    retries: int
    short_transfers: int
    direct_refused: int
    inflight_bytes: int
    peak_inflight_bytes: int
    registered_bytes: int
    own_bytes: int
    registration_error: int
    p50_us: float
    p99_us: float


@dataclass(frozen=True)
class QueueStats:
    """What a queue did: the backend it runs on, and each drive by its device number."""

    backend: str
    pending: int
    drives: dict[int, DriveStats]


class _DriveSettings(NamedTuple):
    """How a queue uses each drive: what its caller gave, over what was measured of the drive."""

    over: Callable[[Settings | None], Settings]
    measured: Profile

    def of(self, path: str | os.PathLike[str]) -> Settings:
        """Return the settings of the drive that holds `path`, or would hold it."""
        return self.over(self.measured.for_path(path))


class IOQueue(Closing):
    """Asynchronous I/O on files: a ring and a thread per drive, bounded bytes in flight.

    `backend` names one of liburing, uring, aio, threads, or "auto" for the first that works;
    `require` refuses the others (see `deepnvme.machine.backends`). `chunk_bytes`, `inflight_bytes`
    and `user_memory` hold for every drive; without them each drive has what `deepnvme tune`
    measured of it, or the defaults (see `deepnvme.machine.profile`). Use it as a context manager,
    or `close()` it, which waits for what was submitted.
    """

    _living: ClassVar[weakref.WeakSet[IOQueue]] = weakref.WeakSet()

    def __init__(
        self,
        backend: str = "auto",
        *,
        require: str | Collection[str] | None = None,
        chunk_bytes: int | str | None = None,
        inflight_bytes: int | str | None = None,
        max_pending: int = 1024,
        max_requests: int | None = None,
        when_full: WhenFull = WhenFull.BLOCK,
        user_memory: UserMemory | None = None,
        pool: Pool | None = None,
        faults: FaultPlan | None = None,
    ) -> None:
        Leftover.end_if_many()
        if chunk_bytes is not None:
            chunk_bytes = byte_count("chunk_bytes", chunk_bytes, most=_LARGEST_CHUNK)
        if inflight_bytes is not None:
            inflight_bytes = byte_count("inflight_bytes", inflight_bytes, most=_LARGEST_FILE)
        self.max_pending = max_pending = whole_number("max_pending", max_pending, 1, _MOST_PENDING)
        if max_requests is not None:
            max_requests = whole_number("max_requests", max_requests, 1, _MOST_REQUESTS)
        block = chosen(WhenFull, when_full, "when_full") is WhenFull.BLOCK
        self._patience_s = None if block else 0.0
        if user_memory is not None:
            user_memory = chosen(UserMemory, user_memory, "user_memory")
        if not isinstance(faults, FaultPlan | None):
            raise TypeError(f"faults: expected a FaultPlan, got {type(faults).__name__}")
        if not isinstance(pool, Pool | None):
            raise TypeError(f"pool: expected a Pool, got {type(pool).__name__}")
        self._require = require
        self._closed = False
        # Backends: one warning for each, not one for each file.
        self._warned_of: set[str] = set()
        given = partial(
            effective_settings,
            chunk_bytes=chunk_bytes,
            inflight_bytes=inflight_bytes,
            user_memory=user_memory,
        )
        # The native queue makes its first ring now: what does not work here fails before a file is
        # open.
        self.backend, self._native = start_on(
            backend,
            require,
            partial(
                _native.Queue,
                fallbacks=fallbacks(backend, require),
                drive=given(None).native(),
                max_pending=max_pending,
                max_requests=max_requests or 0,
                faults=None if faults is None else faults.native,
            ),
        )
        # Where the caller gives all settings, the file of measured ones is not read.
        all_given = None not in (chunk_bytes, inflight_bytes, user_memory)
        measured = Profile() if all_given or self.backend == "memory" else load_profile()
        self._settings = _DriveSettings(given, measured)
        self._pending = Pending(self._native, self.backend, max_pending)
        # The thread has `Pending` and not the queue, which could never be collected otherwise.
        self._pending.start()
        self._staging = Staging(
            self._native, self._pending, max_pending=max_pending, patience_s=self._patience_s
        )
        drain = partial(_drain, self._native, self._pending, self._staging)
        self._shut_down = partial(_shut_down, drain, self._staging, [], os.getpid())
        # Runs when the queue is collected, and at the interpreter's exit. It holds no queue.
        self._finalizer = at_end_of(self, self._shut_down)
        IOQueue._living.add(self)
        # After the finalizer, which ends the thread and the ring if this raises.
        if pool is not None:
            self.use_pool(pool)

    def open(
        self,
        path: str | bytes | os.PathLike[str],
        mode: _Mode = "r",
        *,
        size: int | str | None = None,
        direct: Direct = Direct.AUTO,
        permissions: int = 0o666,
    ) -> File:
        """Open a file for I/O through this queue.

        Modes: "r" reads; "r+" reads and writes an existing file; "w" makes it or empties it; "x"
        makes a new one. `size` reserves that many bytes on the drive now, as `File.preallocate`
        does: a full disk fails here, and not in a later write.

        Raises:
            BackendUnavailableError: only a backend that `require` does not name serves that file
                system.
        """
        plain = str(mode).replace("b", "", 1)  # all files are binary
        if plain not in _MODES:
            raise ValueError(f"mode must be one of {', '.join(_MODES)}; got {mode!r}")
        if size is not None:
            size = byte_count("size", size)
            _check_range("size", size)
        direct = chosen(Direct, direct, "direct")
        permissions = whole_number("permissions", permissions)
        path = _path_of(path)
        drive = self.settings_for(path).native()
        # Errors show this name, which a chdir does not make wrong. Links stay in it.
        absolute = str(Path(path).absolute())
        # Before it is opened, which may make or empty the file.
        refuse_where_threads_must(self.backend, self._require, absolute)
        file = File(
            self, self._native.open(absolute, _MODES[plain], direct.value, permissions, drive)
        )
        self._warn_of_fallback(file)
        if size is not None:
            try:
                file.preallocate(size)
            except BaseException:
                file.close()
                if plain == "x":  # of "w" it is not known whether the file was there before
                    Path(absolute).unlink(missing_ok=True)
                raise
        return file

    async def open_async(
        self,
        path: str | bytes | os.PathLike[str],
        mode: _Mode = "r",
        *,
        size: int | str | None = None,
        direct: Direct = Direct.AUTO,
        permissions: int = 0o666,
    ) -> File:
        """As `open`, in a thread: the event loop goes on meanwhile."""
        import asyncio  # costs a third of importing this package, and a coroutine has it

        return await asyncio.to_thread(
            self.open, path, mode, size=size, direct=direct, permissions=permissions
        )

    def settings_for(self, path: str | os.PathLike[str]) -> Settings:
        """Return how this queue uses the drive that holds `path`, or would hold it."""
        return self._settings.of(path)

    def _warn_of_fallback(self, file: File) -> None:
        # A queue with faults wraps its backend, which is called fault(NAME) then. On FUSE, threads
        # are the rule and no fallback (decision 0003).
        used = self._native.backend_of(file._open()).removeprefix("fault(").removesuffix(")")
        if used == self.backend or used in self._warned_of or file._open().on_fuse:
            return
        self._warned_of.add(used)
        warnings.warn(
            f"deepnvme uses {used} for the drive of {file.path}: the limit on locked memory leaves "
            f"no room for another {self.backend}. Raise it (ulimit -l unlimited)",
            BackendFallbackWarning,
            stacklevel=3,
        )

    def batch(self) -> Batch:
        """Return a context that submits its operations together and waits for them at its end."""
        return Batch()

    def use_pool(self, pool: Pool) -> None:
        """Register the pool's memory with this queue's rings.

        Refused registration costs CPU, not correctness.
        """
        self._native.use_pool(pool._native)
        self._until_pools_are_settled()

    def forget_pool(self, pool: Pool) -> None:
        """Take the pool's registration back."""
        # Waited for: the pages stay locked in memory until the rings have forgotten them.
        self._native.forget_pool(pool._native)
        self._until_pools_are_settled()

    def _until_pools_are_settled(self) -> None:
        # In slices, for Ctrl-C: a drive settles when what it has in flight has ended.
        while not self._native.pools_settled(SLICE_S):
            pass

    async def room(self) -> None:
        """Wait, without blocking the event loop, until an operation can be submitted at once.

        For coroutines of one loop: whatever else submits to this queue may take the room first.
        """
        await self._pending.room(lambda: self._staging.is_full)

    def stats(self) -> QueueStats:
        """Return what the queue did so far, and how many operations are pending."""
        drives = {device: DriveStats(**stats) for device, stats in self._native.stats().items()}
        # Pieces of device arrays count twice: as operations of a drive, and by the operation they
        # are of.
        return QueueStats(self.backend, self._native.pending + self._staging.pending, drives)

    @property
    def when_full(self) -> WhenFull:
        """What submitting does where `max_pending` operations are pending."""
        return WhenFull.BLOCK if self._patience_s is None else WhenFull.RAISE

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return self._closed

    def close(self) -> None:
        """Wait for everything submitted, then free the rings.

        Again: does nothing, or goes on where it was interrupted.

        Ctrl-C ends the wait alone: what was submitted goes on, and its memory is held until it has
        ended.
        """
        # Files that the garbage collector has found still have bytes to write through this queue.
        Leftover.end_those_of(self)
        self._closed = True
        if self._finalizer.alive and self._shut_down():
            # Last: after an interrupted wait, or where a callback closes and cannot wait, it still
            # runs, at the latest at the interpreter's exit.
            self._finalizer.detach()
        IOQueue._living.discard(self)

    def __del__(self) -> None:
        """Close, unless the garbage collector has found it: another thread does it then."""
        finalizer = getattr(self, "_finalizer", None)  # none where __init__ raised
        if finalizer is not None and finalizer.alive:
            self.close()

    async def close_async(self) -> None:
        """As `close`, in a thread: the event loop goes on meanwhile."""
        import asyncio  # as in open_async

        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> IOQueue:
        """Return itself."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close without stopping the event loop."""
        await self.close_async()

    def __reduce__(self) -> str:
        """Refuse to be pickled or copied."""
        raise TypeError(
            "a queue is neither pickled nor copied: its threads are this process's. Make one where "
            "it is used"
        )

    def __repr__(self) -> str:
        """Show the backend and what is pending."""
        state = "closed" if self.closed else f"{self._native.pending} pending"
        return f"IOQueue({self.backend}, {state})"

    def _move(
        self,
        verb: _native.Verb,
        file: File,
        buffer: Any,
        offset: int | str,
        at_end: _native.AtEndOfFile = _FAILS,
        *,
        priority: Priority = Priority.NORMAL,
        deadline_s: float | None = None,
    ) -> IOFuture[int]:
        """Submit a read or write of the memory of `buffer`, wherever that is."""
        native = file._native or file._open()
        writable = verb is _READ
        # Calls and objects in Python are most of what a small operation costs here.
        usual = priority is _NORMAL and deadline_s is None
        urgency, seconds = terms = _USUAL_TERMS if usual else _terms(priority, deadline_s)
        try:
            # Host memory first, as it is the usual case. A device array has no buffer protocol: a
            # TypeError. A memoryview, which a pool gives, needs one native call.
            memory = _native.held(buffer, writable) or memory_of(buffer, writable=writable)
        except TypeError:
            array = device_array_of(buffer, writable=writable)
            if array is None:
                raise
        else:
            # Not in the `try`: a TypeError of this call says nothing about where the memory is.
            if not (type(offset) is int and 0 <= offset < _SURELY_FITS) or self._closed:
                offset = self._checked(offset, memory[1])
            return self._pending.submit(
                verb,
                native,
                memory,
                offset,
                at_end,
                path=file.path,
                patience_s=self._patience_s,
                priority=urgency,
                deadline_s=seconds,
            )
        if terms != _USUAL_TERMS:
            raise TypeError(
                "priority and deadline_s are for memory of the host, not for arrays on a GPU. "
                "Leave them out, or copy the array to the host first"
            )
        offset = self._checked(offset, array.nbytes)
        return self._staging.submit(verb, native, array, offset, at_end)

    def _checked(self, offset: int | str, nbytes: int) -> int:
        """Check an operation's offset, and that the queue is open; return it as a number."""
        offset = byte_count("offset", offset)
        _check_range("offset", offset, nbytes)
        if self._closed:
            raise ClosedError(_native.QUEUE_IS_CLOSED)
        return offset

    def _sync(self, verb: _native.Verb, file: File) -> IOFuture[int]:
        """Submit a sync, behind all writes that were asked for before."""
        native = file._open()
        self._pending.send()  # the writes of a batch come before it
        if self._staging.pending:  # writes that the drive has not heard of yet
            return self._staging.submit(verb, native, None, 0)
        return self._pending.submit(
            verb,
            native,
            None,
            self._checked(0, 0),
            _FAILS,
            path=file.path,
            patience_s=self._patience_s,
            priority=0,
            deadline_s=NO_DEADLINE_S,
        )

    def _gather(
        self, verb: _native.Verb, file: File, buffer: Any, offset: int | str
    ) -> IOFuture[int]:
        """Submit a read or write together with others of a batch, where that is possible."""
        native = file._open()
        # Gathered, it could not raise: it would be sent when this call has returned.
        if self._patience_s is not None:  # WhenFull.RAISE
            return self._move(verb, file, buffer, offset)
        try:
            writable = verb is _READ
            memory = _native.held(buffer, writable) or memory_of(buffer, writable=writable)
        except TypeError:
            return self._move(verb, file, buffer, offset)  # an array on a GPU, or the error again
        if not (type(offset) is int and 0 <= offset < _SURELY_FITS) or self._closed:
            offset = self._checked(offset, memory[1])
        return self._pending.gather(verb, native, file.path, memory, offset)

    def _move_many(
        self,
        verb: _native.Verb,
        file: File,
        buffers: Any,
        offsets: Iterable[int],
        *,
        priority: Priority,
        deadline_s: float | None,
    ) -> IOFuture[int]:
        """Submit one operation on several pieces of memory."""
        native = file._open()
        numbers, holder = _pieces_of(buffers, offsets, writable=verb is _READ)
        if self._closed:
            raise ClosedError(_native.QUEUE_IS_CLOSED)
        urgency, seconds = _terms(priority, deadline_s)
        return self._pending.submit_pieces(
            verb,
            native,
            file.path,
            numbers,
            holder,
            patience_s=self._patience_s,
            priority=urgency,
            deadline_s=seconds,
        )


class File(Closing):
    """An open file. `IOQueue.open` returns one.

    Any offset and any length works; whole pages of aligned memory are what is fast.

    Memory given to an operation must not be changed, and for reads not looked at, until its future
    has ended.
    """

    def __init__(self, queue: IOQueue, native: _native.OpenFile) -> None:
        self._queue = queue
        self._native: _native.OpenFile | None = native
        # Kept here: errors and the repr name the file after close(), which lets the native one go.
        self.path = native.path

    def show_as(self, name: str) -> None:
        """Let errors call a file without a name by this one; before any I/O on it."""
        self._open().show_as(name)
        self.path = name

    @property
    def alignment(self) -> int:
        """Offsets and lengths in multiples of this bypass the page cache if `direct`."""
        return self._open().offset_alignment

    @property
    def memory_alignment(self) -> int:
        """Memory addresses that are multiples of this need no copy."""
        return self._open().memory_alignment

    @property
    def direct(self) -> bool:
        """Whether the file system took direct I/O."""
        return self._open().direct

    @property
    def size(self) -> int:
        """The file's length now."""
        return self._open().length()

    def pread(
        self,
        buffer: Any,
        offset: int | str = 0,
        *,
        priority: Priority = Priority.NORMAL,
        deadline_s: float | None = None,
    ) -> IOFuture[int]:
        """Fill `buffer` from `offset`. Ends in its size in bytes; a file that is too short is a
        ShortReadError.

        The parts that have not begun `deadline_s` seconds from now are not read; the operation then
        ends in a DeadlineError.
        """
        return self._queue._move(
            _READ,
            self,
            buffer,
            offset,
            _FAILS,
            priority=priority,
            deadline_s=deadline_s,
        )

    def readinto(
        self,
        buffer: Any,
        offset: int | str = 0,
        *,
        priority: Priority = Priority.NORMAL,
        deadline_s: float | None = None,
    ) -> IOFuture[int]:
        """Read into `buffer` from `offset` up to the end of the file.

        Ends in the bytes read, which may be fewer.
        """
        return self._queue._move(
            _READ,
            self,
            buffer,
            offset,
            _STOPS,
            priority=priority,
            deadline_s=deadline_s,
        )

    def read(self, nbytes: int | str, offset: int | str = 0) -> memoryview:
        """Read `nbytes` from `offset` into new memory, wait, and return it.

        Fewer bytes come back where the file ends before. `readinto` does the same without waiting.
        """
        asked, offset = byte_count("nbytes", nbytes), byte_count("offset", offset)
        _check_range("offset", offset, asked)
        # No more memory than the file can fill.
        room = empty("U8", (min(asked, max(0, self.size - offset)),), Returns.BYTES)
        done: memoryview = room[: self.readinto(room, offset).result()]
        return done

    def pwrite(
        self,
        buffer: Any,
        offset: int | str = 0,
        *,
        priority: Priority = Priority.NORMAL,
        deadline_s: float | None = None,
    ) -> IOFuture[int]:
        """Write all of `buffer` at `offset`. Ends in its size in bytes."""
        return self._queue._move(
            _WRITE,
            self,
            buffer,
            offset,
            _FAILS,
            priority=priority,
            deadline_s=deadline_s,
        )

    def pread_many(
        self,
        buffers: Any,
        offsets: Iterable[int],
        *,
        priority: Priority = Priority.NORMAL,
        deadline_s: float | None = None,
    ) -> IOFuture[int]:
        """Fill several buffers, each from its offset, as one operation: for many small pieces.

        `buffers` is a list of buffers, or one that is cut into equal parts, such as an array of
        records. Ends in the bytes of all. An error's `offset` is where in the file it happened, its
        `done` counts through the buffers in their order.
        """
        return self._queue._move_many(
            _READ,
            self,
            buffers,
            offsets,
            priority=priority,
            deadline_s=deadline_s,
        )

    def pwrite_many(
        self,
        buffers: Any,
        offsets: Iterable[int],
        *,
        priority: Priority = Priority.NORMAL,
        deadline_s: float | None = None,
    ) -> IOFuture[int]:
        """Write several buffers, each at its offset, as one operation: see `pread_many`."""
        return self._queue._move_many(
            _WRITE,
            self,
            buffers,
            offsets,
            priority=priority,
            deadline_s=deadline_s,
        )

    def sync(self, what: Sync = Sync.DATA) -> IOFuture[int]:
        """Make every write to this file durable that was submitted before and succeeds. Ends in 0.

        A write that failed raises from its own future, and this does not repeat the error.
        """
        verb = chosen(Sync, what, "sync").value
        return self._queue._sync(verb, self)

    def preallocate(self, nbytes: int | str) -> None:
        """Reserve the first `nbytes` of the file: a full drive fails here, not in a later write.

        The bytes that are there stay. Where the file system cannot reserve, zeros are written
        behind the end of the file, and holes before it stay holes. A write that lengthens
        the file meanwhile may have up to 64 KiB of zeros behind it then.
        """
        nbytes = byte_count("nbytes", nbytes)
        _check_range("nbytes", nbytes)
        # Without a name for what is opened: an error's frames would keep it open after close().
        try:
            self._open().preallocate(nbytes)
        except OSError as error:
            raise self._read_only_error(error, "preallocate") from None

    def truncate(self, nbytes: int | str) -> None:
        """Cut or extend the file to `nbytes`."""
        nbytes = byte_count("nbytes", nbytes)
        _check_range("nbytes", nbytes)
        try:
            self._open().truncate(nbytes)
        except OSError as error:
            raise self._read_only_error(error, "truncate") from None

    async def preallocate_async(self, nbytes: int | str) -> None:
        """As `preallocate`, in a thread: the event loop goes on meanwhile."""
        import asyncio  # as in IOQueue.open_async

        await asyncio.to_thread(self.preallocate, nbytes)

    async def truncate_async(self, nbytes: int | str) -> None:
        """As `truncate`, in a thread: the event loop goes on meanwhile."""
        import asyncio  # as in IOQueue.open_async

        await asyncio.to_thread(self.truncate, nbytes)

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return self._native is None

    def close(self) -> None:
        """Take no more operations. Those under way keep the file open until they have ended."""
        # Operations hold the native file themselves. The kernel closes it when the last one drops
        # it.
        self._native = None

    async def __aenter__(self) -> File:
        """Return itself."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close, which waits for nothing."""
        self.close()

    def __reduce__(self) -> str:
        """Refuse to be pickled or copied."""
        raise TypeError(
            "an open file is neither pickled nor copied: open its path through a queue of the "
            "other process"
        )

    def __repr__(self) -> str:
        """Show the path."""
        return f"File({self.path!r}{', closed' if self.closed else ''})"

    def _read_only_error(self, error: OSError, call: str) -> OSError:
        """Return `error`; where the file was opened for reading only, an error that says so."""
        # For a descriptor without the right to write, truncate() says EINVAL.
        if self._open().writable or error.errno not in (errno.EBADF, errno.EINVAL):
            return error
        return file_error(errno.EBADF, call, self.path)

    def _open(self) -> _native.OpenFile:
        if self._native is None:
            raise ClosedError(f"{self.path} is closed: open it again to use it")
        return self._native


class Batch:
    """Operations submitted together and waited for together; every error is collected.

    `IOQueue.batch` returns one, for a `with` block.
    """

    def __init__(self) -> None:
        self.futures: list[IOFuture[int]] = []

    def pread(self, file: File, buffer: Any, offset: int | str = 0) -> None:
        """As `File.pread`."""
        self.futures.append(file._queue._gather(_READ, file, buffer, offset))

    def pwrite(self, file: File, buffer: Any, offset: int | str = 0) -> None:
        """As `File.pwrite`."""
        self.futures.append(file._queue._gather(_WRITE, file, buffer, offset))

    def wait(self) -> int:
        """Wait for all; return the bytes moved in all.

        Raises:
            NVMeError: the one operation that failed, or a BatchError of all that did.
            CancelledError: none failed, and one was cancelled.
        """
        # From the last one: when that has ended most have, which saves wake-ups.
        for future in reversed(self.futures):
            if future._state != FINISHED:
                _end_of(future)
        # Not before all have ended: if a signal interrupts the wait, drain() still finds them.
        futures, self.futures = self.futures, []
        ends = [future._exception for future in futures]
        errors = [end for end in ends if isinstance(end, NVMeError)]
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise BatchError(errors)
        # all have ended; of one that was cancelled, result() raises
        return sum(future.result() for future in futures)

    def drain(self) -> None:
        """Wait for all, however they end, and forget them: memory is free again."""
        # Not cleared one by one: an interrupted drain begins anew, and ended futures cost nothing.
        for future in self.futures:
            _end_of(future)
        self.futures.clear()

    def __enter__(self) -> Batch:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for all, also when the body raised: a drive may use the memory until then.

        Ctrl-C ends the wait alone: what was submitted goes on, and its memory is held until it has
        ended.
        """
        if kind is None:
            self.wait()
        elif issubclass(kind, KeyboardInterrupt):
            for future in self.futures:
                future.done()  # submits what was only gathered: left behind, it would come late
        else:
            self.drain()


def _end_of(future: IOFuture[int]) -> BaseException | None:
    """Wait for the end of an operation, however it ends."""
    try:
        return future.exception()
    except CancelledError as cancelled:
        return cancelled


_USUAL_TERMS = (0, NO_DEADLINE_S)


def _terms(priority: Priority, deadline_s: Any) -> tuple[int, float]:
    """Return the priority and the deadline as native code takes them."""
    if priority is _NORMAL and deadline_s is None:
        return _USUAL_TERMS
    if isinstance(deadline_s, str):
        raise TypeError(f"deadline_s must be a number of seconds, got {deadline_s!r}")
    seconds = NO_DEADLINE_S if deadline_s is None else min(float(deadline_s), NO_DEADLINE_S)
    if not seconds >= 0:
        raise ValueError(f"deadline_s must not be negative, got {deadline_s}")
    return chosen(Priority, priority, "priority").value, seconds


def _pieces_of(
    buffers: Any, offsets: Iterable[int], *, writable: bool
) -> tuple[array[int], Memory]:
    """Return the address, the bytes and the offset of each piece in turn, and what holds them all.

    The pieces are the buffers, or equal parts of the only one.
    """
    places = list(map(operator.index, offsets))
    count = len(places)
    # Filled by slices: no Python object for each piece, of which there may be thousands.
    numbers = array("Q", bytes(3 * 8 * count))
    if isinstance(buffers, list | tuple):
        if len(buffers) != count:
            raise ValueError(f"expected one buffer for each of {count} offsets, got {len(buffers)}")
        # One native call where all are memoryviews, which a pool gives: no Python object for each.
        held = _native.held_each(buffers, places, numbers, writable)
        if held is not None:
            views, total = held
            return numbers, Memory(0, total, views)
        holder: object = hold_each(buffers, numbers, writable=writable)
    else:
        address, nbytes, holder = memory_of(buffers, writable=writable)
        if count == 0 or nbytes % count:
            raise ValueError(
                f"a buffer of {nbytes} B cannot be cut into {count} equal parts, one for each "
                "offset"
            )
        part = nbytes // count
        numbers[0::3] = array("Q", [address + number * part for number in range(count)])
        numbers[1::3] = array("Q", [part]) * count
    sizes = numbers[1::3]
    for place, nbytes in zip(places, sizes, strict=True):
        if not 0 <= place <= _LARGEST_FILE - nbytes:
            _check_range("offset", place, nbytes)
    numbers[2::3] = array("Q", places)
    return numbers, Memory(0, sum(sizes), holder)


class _NoTextError(OSError, ValueError):
    """A path that is no text: a wrong argument, and a file that cannot be reached."""


def _path_of(path: Any) -> str:
    """Return a path as text, from what `os` takes for one."""
    text = os.fsdecode(path)
    if "\0" in text:
        raise ValueError(f"a path cannot have null bytes; got {text!r}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _NoTextError(
            errno.EILSEQ,
            f"a path must be text in UTF-8, got {path!r}: rename the file, or reach it by a link "
            "of another name",
        ) from None
    return text


def _check_range(what: str, start: int, nbytes: int = 0) -> None:
    if start < 0:
        raise ValueError(f"{what} must not be negative, got {start}")
    if start + nbytes > _LARGEST_FILE:
        raise ValueError(
            f"{what} {start} and {nbytes} B from there end beyond byte {_LARGEST_FILE}, where the "
            "largest file ends"
        )


def _shut_down(
    drain: Callable[[], None], staging: Staging, closers: list[threading.Thread], owner: int
) -> bool:
    """Drain and join; at interpreter exit too. Return whether that is done.

    A callback would wait for itself: there, a thread is started that drains, kept in `closers`. In
    a forked child there is nothing to drain.
    """
    if os.getpid() != owner:
        return True
    if staging.needs_this_thread():
        if not closers:
            # No daemon, as the thread that starts it is: the program could end while operations
            # wait for the drive.
            closer = threading.Thread(target=drain, name="deepnvme-close", daemon=False)
            closer.start()
            closers.append(closer)
        return False
    drain()
    # The interpreter waits for no thread that starts while it exits, and the process is ended where
    # one is in native code.
    for closer in closers:
        closer.join()
    return True


def _drain(native: _native.Queue, pending: Pending, staging: Staging) -> None:
    # What a batch gathered counts as submitted, so it is drained as well.
    pending.send()
    # Before the drives, which its pieces still need.
    staging.close()
    while not native.close(SLICE_S):  # in slices: Ctrl-C may end the wait
        pass
    pending.join()
    # After the last future has ended: until then a loop may complete some.
    pending.leave_loops()


def _after_fork_in_child() -> None:
    for queue in list(IOQueue._living):
        queue._staging.end_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
