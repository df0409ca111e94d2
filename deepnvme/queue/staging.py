"""Arrays in a GPU's memory as buffers of file operations: their bytes pass through page-locked
pieces of a pool.

While one piece is between host and drive, another is between host and device. Owns the pieces and
the threads that see to them, made when a queue gets its first device array; torch or cupy does the
copying (`deepnvme.memory.device_arrays`), the queue's drives do the rest. Imports neither library.
Called by `deepnvme.queue.queue`.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from deepnvme import _native
from deepnvme.errors import ClosedError, ForkedError, NVMeError, QueueFull, ShortReadError, io_error
from deepnvme.memory.buffers import Memory, memory_of
from deepnvme.memory.device_arrays import CopyEvent, DeviceArray
from deepnvme.memory.pool import Pool
from deepnvme.queue.future import IOFuture, wake_loops
from deepnvme.queue.pending import Pending, report_escaped, short_read_error
from deepnvme.sizes import PAGE

if TYPE_CHECKING:
    import asyncio

__all__ = ["DEVICE_STAGING_BYTES", "Staging"]

DEVICE_STAGING_BYTES = 32 << 20  # two pieces, each of which keeps a drive busy (decision 0003)


@dataclass(eq=False)
class _Operation:
    """What was asked, and how far it is. `array` is None for a sync."""

    verb: _native.Verb
    file: _native.OpenFile
    array: DeviceArray | None
    offset: int
    at_end: _native.AtEndOfFile
    future: IOFuture[int]
    asked: int
    issued: int = 0
    in_flight: int = 0  # pieces
    # of each ended piece: its start, its bytes
    moved: list[tuple[int, int]] = field(default_factory=list)
    failure: BaseException | None = None

    @property
    def op(self) -> str:
        return self.verb.name.lower()

    def done(self) -> int:
        """How long the prefix is that was moved without a gap."""
        done = 0
        # Pieces end in any order.
        for start, nbytes in sorted(self.moved):
            if start != done:
                break
            done += nbytes
        return done


@dataclass(eq=False)
class _Piece:
    """A part of an operation and its place in host memory."""

    operation: _Operation
    start: int
    nbytes: int
    block: memoryview
    lead: int  # bytes of `block` before the first that is used
    address: int
    view: memoryview | None = None  # what the device copies from or to


class _PieceMemory:
    """The memory of pieces, page-locked and registered with the drives; made for the first one."""

    def __init__(self, native: _native.Queue, nbytes: int) -> None:
        self.pool: Pool | None = None
        self._native = native
        self._nbytes = nbytes

    def prepare(self) -> None:
        """Make it, which only programs with device arrays pay for."""
        if self.pool is None:
            pool = Pool(self._nbytes)
            self._native.use_pool(pool._native)
            # Last: an error before it leaves nothing half made, and the next operation tries again.
            self.pool = pool

    def give_back(self) -> None:
        """Hold no memory any more: all pieces have ended."""
        # The native queue holds it too, until it closes: the rings have its pages registered.
        self.pool = None

    def has_room(self, operation: _Operation) -> bool:
        """Tell whether there is memory for the operation's next piece."""
        assert self.pool is not None
        return self.pool.largest_free >= sum(self._extent(operation))

    def piece(self, operation: _Operation) -> _Piece:
        """Return the operation's next piece, with memory."""
        assert self.pool is not None
        lead, nbytes = self._extent(operation)
        block = self.pool.buffer(lead + nbytes)
        address = memory_of(block, writable=True).address + lead
        return _Piece(operation, operation.issued, nbytes, block, lead, address)

    def _extent(self, operation: _Operation) -> tuple[int, int]:
        """Return how far into a page the next piece begins, and the piece's bytes."""
        # A piece begins on a page of its file, so that all but an operation's ends goes directly.
        lead = (operation.offset + operation.issued) % PAGE
        # Half of the pool: while the drive has one piece, the device has another.
        return lead, min(operation.asked - operation.issued, self._nbytes // 2 - lead)


# the bytes of a piece that are copied, and when that is over
_Copy: TypeAlias = tuple[_Piece, int, CopyEvent]


class _Limit(NamedTuple):
    """How many operations may be pending, and how long one more waits."""

    most: int
    patience_s: float | None


class Staging:
    """The operations on device arrays of one queue: in order, as many pieces under way as the pool
    has room for.

    At most `max_pending` operations are pending, besides their pieces in the queue itself. Where
    these are all, submitting waits `patience_s` for room; None: for ever. The thread that completes
    the futures of `drives` never waits.
    """

    def __init__(
        self,
        native: _native.Queue,
        drives: Pending,
        *,
        max_pending: int,
        patience_s: float | None,
        staging_bytes: int = DEVICE_STAGING_BYTES,
    ) -> None:
        self._memory = _PieceMemory(native, staging_bytes)
        self._drives = drives
        self._limit = _Limit(max_pending, patience_s)
        self._owner = os.getpid()
        self._threads: list[threading.Thread] = []  # none until the first array comes
        # One for each direction: copies to the device must not wait for what is yet to be computed
        # and written.
        self._copies: dict[_native.Verb, SimpleQueue[_Copy | None]] = {
            _native.Verb.READ: SimpleQueue(),
            _native.Verb.WRITE: SimpleQueue(),
        }
        # Guards the next four, which other threads than the staging thread touch too.
        self._changed = threading.Condition()
        self._pending: dict[_Operation, None] = {}
        self._waiting: deque[_Operation] = deque()  # not begun
        # What the staging thread is to do next: a drive or device has done its part of it.
        self._news: deque[Callable[[], None]] = deque()
        self._closing = False
        self._current: _Operation | None = None  # begun, and more pieces of it are to be issued

    def submit(
        self,
        verb: _native.Verb,
        file: _native.OpenFile,
        array: DeviceArray | None,
        offset: int,
        at_end: _native.AtEndOfFile = _native.AtEndOfFile.FAILS,
    ) -> IOFuture[int]:
        """Submit an operation when there is room for it; without an array, a sync.

        A sync begins after all that was submitted here before.

        Raises:
            QueueFull: no room came in time.
        """
        with self._changed:
            self._refuse_if_unusable()
            # In a callback, the thread that makes room is the caller's own.
            if not self.needs_this_thread():
                self._wait_for_room()
            self._prepare()
            asked = 0 if array is None else array.nbytes
            about = verb, file.path, offset, asked, at_end
            # No drive knows of it: it can be cancelled until the staging thread begins.
            future: IOFuture[int] = IOFuture(self, about)
            operation = _Operation(verb, file, array, offset, at_end, future, asked)
            # Kept here: the caller may drop the future, and the array must live until it is moved.
            self._pending[operation] = None
            self._waiting.append(operation)
            self._changed.notify_all()
            return future

    @property
    def pending(self) -> int:
        """Operations that have not ended."""
        return len(self._pending)

    @property
    def is_full(self) -> bool:
        """Whether submitting would wait for room."""
        return len(self._pending) >= self._limit.most

    def wait_for(self, future: IOFuture[Any], timeout_s: float) -> bool:
        """Let a future wait for its own end: the staging thread sets it."""
        return True

    def look(self, future: IOFuture[Any]) -> None:
        """Do nothing: the staging thread ends every future at once."""

    def stop(self, future: IOFuture[Any]) -> None:
        """Do nothing: what has begun here runs to its end."""

    def hear(self, future: IOFuture[Any]) -> None:
        """Do nothing: the staging thread ends every future at once."""

    def hear_on(self, loop: asyncio.AbstractEventLoop, future: IOFuture[Any]) -> None:
        """Do nothing: the staging thread tells the loop."""

    def needs_this_thread(self) -> bool:
        """Whether `close()` would wait for the calling thread itself: it is in a callback."""
        return self._drives.is_completer() or threading.current_thread() in self._threads

    def close(self) -> None:
        """Take nothing more, wait for everything pending, give the memory back.

        The queue must still be open.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        # Without the lock: the threads need it to end.
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        # Last: a drive or a device may be at work on it until the threads have ended.
        self._memory.give_back()

    def end_in_child(self) -> None:
        """End in a forked child what the parent submitted: it would be waited for here for ever."""
        self._changed = threading.Condition()  # the thread that held the parent's is not here
        for operation in list(self._pending):
            message = f"{operation.op} of {operation.file.path} was submitted by the parent process"
            operation.future._end_in_child(ForkedError(message))
        self._pending.clear()

    def _refuse_if_unusable(self) -> None:
        if os.getpid() != self._owner:
            raise ForkedError(
                f"this queue belongs to process {self._owner}; a forked child makes its own"
            )
        if self._closing:
            raise ClosedError(_native.QUEUE_IS_CLOSED)

    def _wait_for_room(self) -> None:
        has_room = self._changed.wait_for(
            lambda: not self.is_full or self._closing, self._limit.patience_s
        )
        if not has_room:
            raise QueueFull(self._limit.most)
        self._refuse_if_unusable()

    def _prepare(self) -> None:
        """Make memory and threads, which only programs with device arrays pay for."""
        self._memory.prepare()
        if not self._threads:
            waits = [partial(self._wait_for_copies, copies) for copies in self._copies.values()]
            runs: list[Callable[[], None]] = [self._run, *waits]
            self._threads = [
                threading.Thread(target=run, name="deepnvme-staging", daemon=True) for run in runs
            ]
            for thread in self._threads:
                thread.start()

    # --- the staging thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._step():
                pass
        finally:
            # Also after an error: the threads that wait for copies would never end.
            for copies in self._copies.values():
                copies.put(None)

    def _step(self) -> bool:
        """Do one thing; False when there will be nothing more to do.

        Nothing here waits for a drive or a device. Futures end in the last line of a step:
        callbacks may do anything.
        """
        with self._changed:
            # Before new pieces: news free memory and end operations.
            act = self._news.popleft() if self._news else None
            following = None if act else self._with_room()
            if not act and not following:
                if self._closing and not self._pending:
                    return False
                # Woken for any reason, it looks at everything anew in the next step.
                self._changed.wait()
                return True
        if act:
            act()
        elif following:
            self._issue(following)
        return True

    def _hand_over(self, act: Callable[[], None]) -> None:
        """Let the staging thread call `act`."""
        with self._changed:
            self._news.append(act)
            self._changed.notify_all()

    def _wait_for_copies(self, copies: SimpleQueue[_Copy | None]) -> None:
        """Run on a thread of its own for each direction."""
        while self._wait_for_copy(copies.get()):
            pass

    def _wait_for_copy(self, copy: _Copy | None) -> bool:
        if copy is None:
            return False
        piece, nbytes, event = copy
        failure = None
        try:
            # With no lock held: the device may take long, and the staging thread goes on meanwhile.
            event.synchronize()
        except Exception as error:
            failure = error
        self._hand_over(partial(self._after_copy, piece, nbytes, failure))
        return True

    def _with_room(self) -> _Operation | None:
        """Return the next operation, if there is room for its next piece or it needs none."""
        operation = self._current or (self._waiting[0] if self._waiting else None)
        if operation is None or operation.future.cancelled():
            return operation  # one that was cancelled needs no room: _issue() forgets it
        if operation.array is None:  # a sync begins when all before it has ended
            has_begun = len(self._pending) > len(self._waiting)
            return None if has_begun else operation
        return operation if self._memory.has_room(operation) else None

    def _issue(self, operation: _Operation) -> None:
        if self._current is None:
            # Only the staging thread takes from the front; submit() appends.
            self._waiting.popleft()
            if not operation.future.set_running_or_notify_cancel():
                self._forget(operation)
                return
            self._current = operation
            if operation.array is not None and not self._attempt(operation, operation.array.begin):
                # Nothing of it was issued, and _attempt() has noted why: it ends here.
                self._end_if_over(operation)
                return
        piece = self._next_piece(operation)
        start = (
            # A write goes through the device's copy first, a read through the drive first. An empty
            # one has nothing to copy.
            self._copy if operation.verb is _native.Verb.WRITE and piece.nbytes else self._submit
        )
        if not self._attempt(operation, partial(start, piece, piece.nbytes)):
            self._end_piece(piece, 0)

    def _next_piece(self, operation: _Operation) -> _Piece:
        if not operation.asked:
            piece = _Piece(operation, 0, 0, memoryview(b""), 0, 0)
        else:
            piece = self._memory.piece(operation)
        # Before it is submitted: a refusal ends the piece at once.
        operation.issued += piece.nbytes
        operation.in_flight += 1
        if operation.issued == operation.asked:
            self._current = None
        return piece

    def _submit(self, piece: _Piece, nbytes: int) -> None:
        """Give the piece to its drive."""
        operation = piece.operation
        offset = operation.offset + piece.start
        memory = Memory(piece.address, nbytes, piece.block)
        # For pread() as well: whether a short piece is an error, _error_of() decides for the whole
        # operation.
        stops = _native.AtEndOfFile.STOPS
        future = self._drives.submit(
            operation.verb,
            operation.file,
            memory,
            offset,
            stops,
            path=operation.file.path,
            patience_s=None,
        )
        future.add_done_callback(
            lambda ended: self._hand_over(partial(self._after_drive, piece, ended))
        )

    def _copy(self, piece: _Piece, nbytes: int) -> None:
        """Let the device copy the piece, in the direction of its operation."""
        array = piece.operation.array
        assert array is not None
        copy = array.to_host if piece.operation.verb is _native.Verb.WRITE else array.to_device
        # Kept by the piece until its event: the device copies after this call has returned.
        piece.view = piece.block[piece.lead : piece.lead + nbytes]
        self._copies[piece.operation.verb].put((piece, nbytes, copy(piece.start, piece.view)))

    def _after_drive(self, piece: _Piece, future: Future[int]) -> None:
        operation = piece.operation
        error = future.exception()
        moved = error.done if isinstance(error, NVMeError) else 0 if error else future.result()
        if error or moved < piece.nbytes:
            # A short piece without an error: the file has ended, and what follows lies behind its
            # end.
            self._stop(operation, error)
        # What a failed read moved still goes to the device: `done` of its error counts it.
        if operation.verb is not _native.Verb.READ or not moved:
            self._end_piece(piece, moved)
        elif not self._attempt(operation, partial(self._copy, piece, moved)):
            self._end_piece(piece, 0)

    def _after_copy(self, piece: _Piece, nbytes: int, failure: Exception | None) -> None:
        operation = piece.operation
        if failure is not None:
            self._stop(operation, failure)
            self._end_piece(piece, 0)
        elif operation.verb is _native.Verb.READ:
            self._end_piece(piece, nbytes)
        # A copy of a write that failed meanwhile is not written: the file keeps what it has there.
        elif operation.failure or not self._attempt(
            operation, partial(self._submit, piece, nbytes)
        ):
            self._end_piece(piece, 0)

    def _attempt(self, operation: _Operation, act: Callable[[], None]) -> bool:
        """Call `act`; where it raises, let the operation go no further and return False."""
        try:
            act()
        except Exception as error:  # whatever a library raises belongs to the operation's future
            self._stop(operation, error)
            return False
        return True

    def _stop(self, operation: _Operation, failure: BaseException | None) -> None:
        """Issue no more of it: the file has ended or something failed."""
        operation.failure = operation.failure or failure
        if self._current is operation:
            self._current = None

    def _end_piece(self, piece: _Piece, moved: int) -> None:
        # Released by name: a traceback that still holds the views must not keep their memory from
        # the next piece.
        if piece.view is not None:
            piece.view.release()
        piece.block.release()
        piece.operation.moved.append((piece.start, moved))
        piece.operation.in_flight -= 1
        self._end_if_over(piece.operation)

    def _end_if_over(self, operation: _Operation) -> None:
        if operation.in_flight or operation is self._current:
            return
        error = _error_of(operation, self._drives.backend)
        done = operation.done()
        # Before the future ends: a thread that it wakes finds room, and the array free.
        self._forget(operation)
        try:
            if error is None:
                operation.future.set_result(done)
            else:
                operation.future.set_exception(error)
        except BaseException as escaped:  # a callback's
            report_escaped(escaped)
        finally:
            wake_loops((operation.future,))

    def _forget(self, operation: _Operation) -> None:
        """Let go of the array and make room for another, before the future ends."""
        operation.array = None
        with self._changed:
            self._pending.pop(operation, None)
            self._changed.notify_all()
        self._drives.wake_for_room()


def _error_of(operation: _Operation, backend: str) -> NVMeError | None:
    """Return the error of the whole operation, worded as for one that needs no staging."""
    failure, done = operation.failure, operation.done()
    ended_early = operation.at_end is _native.AtEndOfFile.FAILS and done < operation.asked
    if failure is None and not ended_early:
        return None
    fields: dict[str, Any] = {
        "path": operation.file.path,
        "offset": operation.offset,
        "asked": operation.asked,
        "done": done,
        "backend": backend,
    }
    if failure is None or isinstance(failure, ShortReadError):
        return short_read_error(operation.at_end, **fields)
    # Composed anew: the error of a piece has the piece's place and bytes.
    if isinstance(failure, NVMeError):
        return io_error(failure.errno or errno.EIO, op=operation.op, **fields)
    error = NVMeError(
        errno.EIO,
        f"{operation.op} of {operation.asked} B at offset {operation.offset} stopped after {done} "
        f"B: copying between host and device failed: {type(failure).__name__}: {failure}",
        op=operation.op,
        **fields,
    )
    error.__cause__ = failure.with_traceback(None)  # its frames hold the array
    return error
