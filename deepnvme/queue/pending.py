"""`Pending`: the operations of one queue that have not ended, what each keeps alive, and how they
end.

Submits them. Completes futures, from the queue's own thread (`run`) or from a thread that waits for
one of them (`wait_for`). Futures and the queue's own thread refer to this and not to the queue, so
that a queue without references can be collected.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import weakref
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

from deepnvme import _native
from deepnvme.errors import (
    ClosedError,
    ForkedError,
    NVMeError,
    QueueFull,
    ShortReadError,
    io_error,
)
from deepnvme.memory.buffers import Memory
from deepnvme.queue.future import SLICE_S, Awaited, IOFuture, Places, wake, wake_loops

if TYPE_CHECKING:
    import asyncio
    from array import array
    from collections.abc import Callable, Iterable

__all__ = ["NO_DEADLINE_S", "Pending", "report_escaped", "short_read_error"]

_SUCCEEDED, _END_OF_FILE, _CANCELLED = (
    int(_native.Ending.SUCCEEDED),
    int(_native.Ending.END_OF_FILE),
    int(_native.Ending.CANCELLED),
)


_FAILS = _native.AtEndOfFile.FAILS
_FUTURE = 7  # its place among the arguments of a gathered operation
NO_DEADLINE_S = 1e9  # native code takes this and more for no deadline
# A batch submits what it has gathered when it holds this many operations, or one larger than this:
# the drive then works while the caller goes on gathering.
_MOST_GATHERED = 64
_LARGEST_GATHERED = 64 << 10  # bytes; the largest that native code issues in the caller's thread


class _Listener:
    """What completes operations on one event loop: `bell` wakes the loop.

    It holds no loop, so that a loop that nothing else holds can be collected: the loop's own reader
    refers to both, and goes with the loop.
    """

    def __init__(self) -> None:
        self.bell = _native.Doorbell()
        self.answers_soon = False  # the loop will call `Pending._answer` in this turn or the next


_NO_LOOP: tuple[weakref.ref[asyncio.AbstractEventLoop] | None, _Listener | None] = (None, None)


class Pending:
    """The operations under way, by number."""

    _living: ClassVar[weakref.WeakSet[Pending]] = weakref.WeakSet()

    def __init__(self, native: _native.Queue, backend: str, max_pending: int) -> None:
        self._native = native
        self.backend = backend
        self._max_pending = max_pending
        self._completer: threading.Thread | None = None
        # Each holds the memory of its operation. The file is held by the native operation.
        # No lock: any thread adds, pops and looks up, each in one step under the GIL.
        self._futures: dict[int, IOFuture[Any]] = {}
        self._want_room: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._of_a_parent = False
        self._unsent: deque[tuple[Any, ...]] = deque()  # arguments of native submit_many
        self._listeners: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Listener]
        self._listeners = weakref.WeakKeyDictionary()
        self._latest = _NO_LOOP  # the loop that was used last, which is found faster here
        Pending._living.add(self)

    def start(self) -> None:
        """Complete futures on a thread of its own from now on, until the native queue closes."""
        # A daemon, as the interpreter waits for other threads before it runs finalizers, and a
        # finalizer may be what ends this one.
        completer = threading.Thread(target=self.run, name="deepnvme-futures", daemon=True)
        completer.start()
        self._completer = completer

    def is_completer(self) -> bool:
        """Tell whether the calling thread is the one that `start` has started."""
        return threading.current_thread() is self._completer

    def join(self) -> None:
        """Wait for the end of that thread."""
        if self._completer is not None:
            self._completer.join()

    def submit(
        self,
        verb: _native.Verb,
        file: _native.OpenFile,
        memory: tuple[int, int, object] | None,
        offset: int,
        at_end: _native.AtEndOfFile,
        *,
        path: str,
        patience_s: float | None,
        priority: int = 0,
        deadline_s: float = NO_DEADLINE_S,
    ) -> IOFuture[Any]:
        """Submit an operation, and keep what it needs until it has ended.

        Where the queue is full it waits `patience_s` for room; None: for ever.

        Raises:
            QueueFull: no room came in time.
        """
        if self._unsent:
            self.send()
        loop = listener = None
        # Only once a coroutine has awaited here: CPython 3.11 asks for the process's number each
        # time that it looks for the running loop.
        if self._latest is not _NO_LOOP:
            loop, listener = self._loop_here()
        future = self._native.submit(
            self._futures,
            IOFuture,
            self,
            verb,
            file,
            path,
            memory,
            offset,
            at_end,
            patience_s,
            priority,
            deadline_s,
            loop,
            None if listener is None else listener.bell,
        )
        if future is None:
            raise QueueFull(self._max_pending)
        # Small operations that one turn of the loop submits reach the kernel together.
        if listener is not None and not listener.answers_soon:
            self._answer_soon(loop, listener)  # type: ignore[arg-type]  # it is the listener's
        return future

    def gather(
        self,
        verb: _native.Verb,
        file: _native.OpenFile,
        path: str,
        memory: tuple[int, int, object],
        offset: int,
    ) -> IOFuture[int]:
        """Keep an operation, to be submitted with others in one native call.

        That is when enough are gathered, and before anything else is asked of this queue or of one
        of these futures.
        """
        address, nbytes, _ = memory
        future: IOFuture[int] = IOFuture(self, (verb, path, offset, nbytes, _FAILS), memory)
        number = _native.next_number()
        # Before it is gathered: another thread may send it, and it may end, before this call
        # returns.
        self._futures[number] = future
        self._unsent.append(
            (number, verb, file, address, nbytes, offset, _FAILS, future, 0, NO_DEADLINE_S)
        )
        if nbytes > _LARGEST_GATHERED or len(self._unsent) >= _MOST_GATHERED:
            self.send()
        return future

    def send(self) -> None:
        """Submit what was gathered; wait for room where there is none.

        A signal may interrupt it anywhere, and several threads may call it at a time: an operation
        goes to native code once.
        """
        while group := list(self._unsent):
            try:
                has_all = self._native.submit_many(group, SLICE_S)
            # The callers have their futures already, so these get the error: this call may be about
            # another operation.
            except (ClosedError, ForkedError) as error:
                self._fail_unsent(group, error)
                return
            # Not by `has_all` alone: where there was room for a part, that part must not be sent
            # again.
            for operation in group:
                if operation[_FUTURE]._is_taken:
                    self._forget_unsent(operation)
            if has_all:  # or another thread is submitting the rest
                return

    def _fail_unsent(self, group: list[tuple[Any, ...]], error: BaseException) -> None:
        """End the operations that were gathered and are refused.

        A signal may interrupt it anywhere: what has not ended by then is still gathered, and the
        next call ends it.
        """
        for operation in group:
            future = self._futures.get(operation[0])
            if future is not None and not future._is_taken:
                future._end(None, error)
                wake_loops((future,))
                future._release_waiters()  # threads that sleep in native code
                self._futures.pop(operation[0], None)
            self._forget_unsent(operation)

    def _forget_unsent(self, operation: tuple[Any, ...]) -> None:
        with suppress(ValueError):  # another thread was faster
            self._unsent.remove(operation)

    def submit_pieces(
        self,
        verb: _native.Verb,
        file: _native.OpenFile,
        path: str,
        numbers: array[int],
        holder: Memory,
        *,
        patience_s: float | None,
        priority: int,
        deadline_s: float,
    ) -> IOFuture[int]:
        """Submit one operation on several pieces of memory, as `submit` does.

        `numbers` are those of `Places`; `holder` is all memory together.
        """
        if self._unsent:
            self.send()
        about = verb, path, Places(numbers), holder.nbytes, _FAILS
        future: IOFuture[int] = IOFuture(self, about, holder)
        if not self._native.submit_pieces(
            self._futures, future, verb, file, numbers, patience_s, priority, deadline_s
        ):
            raise QueueFull(self._max_pending)
        return future

    def wait_for(self, future: IOFuture[Any], timeout_s: float) -> bool:
        """Wait until its operation has ended, and complete what has; False when the time is up."""
        if self._unsent:
            self.send()
        return self._native.wait_for(
            future, timeout_s, self._futures, self._want_room, self._complete_others
        )

    def look(self, future: IOFuture[Any]) -> None:
        """Complete what has ended, if its operation has; wait for nothing."""
        if not self._of_a_parent:
            self.wait_for(future, 0.0)

    def stop(self, future: IOFuture[Any]) -> None:
        """Let no further part of its operation begin."""
        if self._unsent:
            self.send()
        self._native.stop(future)

    def hear(self, future: IOFuture[Any]) -> None:
        """Let the queue's own thread complete it as soon as its operation ends."""
        if self._unsent:
            self.send()
        self._native.hear(future, None)

    def hear_on(self, loop: asyncio.AbstractEventLoop, future: IOFuture[Any]) -> None:
        """Let that loop complete it once its operation ends. Called on the loop."""
        if self._unsent:
            self.send()
        # A loop calls this on its own thread only, so one loop gets one listener.
        listener = self._listeners.get(loop)
        if listener is None:
            listener = _Listener()
            # A loop without add_reader is woken by the queue's own thread.
            with suppress(NotImplementedError):
                loop.add_reader(listener.bell.descriptor, self._serve, loop, listener)
            # Last: where that raises, the next operation that is awaited tries again.
            self._listeners[loop] = listener
            self._latest = weakref.ref(loop), listener
        self._native.hear(future, listener.bell)

    def leave_loops(self) -> None:
        """Let event loops forget this queue, which is closed."""
        self._latest = _NO_LOOP
        while self._listeners:
            with suppress(KeyError, RuntimeError):  # collected meanwhile; closed
                loop, listener = self._listeners.popitem()
                # A loop's readers are changed on its own thread.
                loop.call_soon_threadsafe(_stop_listening, loop, listener.bell)

    def _loop_here(self) -> tuple[asyncio.AbstractEventLoop | None, _Listener | None]:
        """Return this thread's event loop and its listener, if operations were awaited on it."""
        known, listener = self._latest
        if known is None:
            return None, None
        # The one with the underscore returns None where no loop runs, and the public one raises.
        loop = sys.modules["asyncio"]._get_running_loop()
        if loop is None or known() is loop:
            return loop, listener if loop else None
        listener = self._listeners.get(loop)
        if listener is not None:
            self._latest = weakref.ref(loop), listener
        return loop if listener else None, listener

    def _answer_soon(self, loop: asyncio.AbstractEventLoop, listener: _Listener) -> None:
        """Answer behind what the loop is to call already."""
        if not listener.answers_soon:
            listener.answers_soon = True
            loop.call_soon(self._answer, loop, listener)

    def _answer(self, loop: asyncio.AbstractEventLoop, listener: _Listener) -> None:
        """Serve the loop, as `_answer_soon` asked."""
        # First: what is submitted from here on needs another answer.
        listener.answers_soon = False
        self._serve(loop, listener)

    def _serve(self, loop: asyncio.AbstractEventLoop, listener: _Listener) -> None:
        """Issue what was submitted on an event loop, and complete what has ended. On that loop.

        The loop's reader calls it too. An `_answer` that is queued then stays so: it serves what is
        submitted meanwhile.
        """
        if self._native.serve_loop(
            listener.bell, self._futures, self._want_room, self._complete_others
        ):
            # The coroutines that were woken run in the loop's next turn. What they submit reaches
            # the kernel in that turn, and not in the one after it.
            self._answer_soon(loop, listener)

    def run(self) -> None:
        """Complete futures until the queue is closed and drained. On the queue's own thread."""
        while ended := self._native.wait_ended():  # none: closed, and all was returned
            for index in self._complete_others(ended):
                try:
                    self._complete(*ended[index])
                except BaseException as escaped:
                    report_escaped(escaped)

    async def room(self, staging_is_full: Callable[[], bool]) -> None:
        """Wait on the running loop until an operation can be submitted at once.

        Where staging makes room, it calls `wake_for_room`.
        """
        import asyncio  # costs a third of importing this package; a program that awaits has it

        loop = asyncio.get_running_loop()
        if self._of_a_parent:
            raise ForkedError(
                "this queue belongs to the parent process; a forked child makes its own"
            )

        def is_full() -> bool:
            return self._native.pending >= self._max_pending or staging_is_full()

        while is_full():
            # Listed before the second look: an end in between finds it.
            waiting = loop.create_future()
            self._want_room.append((loop, waiting))
            # Else the last operation ended before it could find this entry.
            if is_full():
                await waiting

    def end_in_child(self) -> None:
        """End in a forked child what the parent submitted: it would be waited for here for ever."""
        # First: ending the futures looks at their operations, and a thread that does not exist here
        # may hold the lock of the native queue.
        self._of_a_parent = True
        self._unsent.clear()
        for future in self._futures.values():
            verb, path, *_ = future._about
            message = f"{verb.name.lower()} of {path} was submitted by the parent process"
            future._end_in_child(ForkedError(message))
        self._futures.clear()

    def _complete_others(
        self, ended: list[tuple[int, int, int, int]], awaited: Iterable[Awaited] = ()
    ) -> list[int]:
        """Complete futures without callbacks; return the places of the others in the list.

        Native code has completed what is usual. It gives this the rest, and of what it completed
        those that coroutines await. A signal may interrupt it anywhere. It is then called again:
        each step can be repeated.
        """
        futures = self._futures
        over, declined, woken = [], [], [*awaited]
        for place, (number, ending, done, error) in enumerate(ended):
            future = futures.get(number)
            # It was completed before a signal interrupted the last call, which had got the same
            # list.
            if future is None:
                continue
            error_of = None if ending == _SUCCEEDED else self._error_of(future, ending, done, error)
            # What was cancelled has callbacks to call and states to pass: for the queue's own
            # thread.
            if ending == _CANCELLED or not future._end_unheard(done, error_of):
                declined.append(place)
                continue
            over.append(number)
            if future._awaiting:
                woken.append(future)
        if woken:
            wake_loops(woken)
        # Removed only now: had a signal come before, the same operations would be completed again.
        for number in over:
            futures.pop(number, None)
        if self._want_room:
            self.wake_for_room()
        return declined

    def _complete(self, number: int, ending: int, done: int, error: int) -> None:
        future = self._futures.pop(number, None)
        # Before the future ends: its callbacks may take long, or raise.
        self.wake_for_room()
        if future is None:
            return
        try:
            if ending == _CANCELLED:
                future._end_cancelled()
            else:
                future._end(done, self._error_of(future, ending, done, error))
        finally:  # also when a callback raised
            wake_loops((future,))

    def wake_for_room(self) -> None:
        """Wake the coroutines that wait for room.

        Takes no lock and may be interrupted anywhere: waking twice is harmless.
        """
        for waiter in tuple(self._want_room):
            loop, waiting = waiter
            with suppress(RuntimeError):  # that loop is closed: no coroutine waits on it
                loop.call_soon_threadsafe(wake, waiting)
            with suppress(ValueError):  # another thread was faster
                self._want_room.remove(waiter)

    def _error_of(
        self, future: IOFuture[Any], ending: int, done: int, error: int
    ) -> NVMeError | None:
        if ending in (_SUCCEEDED, _CANCELLED):
            return None
        verb, path, place, asked, at_end = future._about
        offset = place if isinstance(place, int) else place.offset_of(done)
        if ending == _END_OF_FILE:
            return short_read_error(
                at_end, path=path, offset=offset, asked=asked, done=done, backend=self.backend
            )
        return io_error(
            error,
            op=verb.name.lower(),
            path=path,
            offset=offset,
            asked=asked,
            done=done,
            backend=self.backend,
        )


def report_escaped(escaped: BaseException) -> None:
    """Treat what a callback raised and concurrent.futures lets pass as if it had ended a thread.

    The thread that called the callback goes on: it has more to do.
    """
    if not isinstance(escaped, SystemExit):  # which ends a thread in silence
        details = type(escaped), escaped, escaped.__traceback__, threading.current_thread()
        threading.excepthook(threading.ExceptHookArgs(details))


def short_read_error(
    at_end: _native.AtEndOfFile, *, path: str, offset: int, asked: int, done: int, backend: str
) -> ShortReadError:
    """Compose the error of a read that found the end of the file where it should not."""
    why = "all of it has to be there (a single readinto() accepts fewer)"
    if at_end is _native.AtEndOfFile.STOPS:  # the end was welcome, but not there
        why = (
            "the file was longer when it was opened or last written here: another process cut it "
            "meanwhile"
        )
    message = (
        f"read of {asked} B at offset {offset} found the end of the file after {done} B; {why}"
    )
    return ShortReadError(
        errno.ENODATA,
        message,
        op="read",
        path=path,
        offset=offset,
        asked=asked,
        done=done,
        backend=backend,
    )


def _stop_listening(loop: asyncio.AbstractEventLoop, bell: _native.Doorbell) -> None:
    loop.remove_reader(bell.descriptor)


def _after_fork_in_child() -> None:
    for pending in list(Pending._living):
        pending.end_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
