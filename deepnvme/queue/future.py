"""`IOFuture`: one I/O under way. A concurrent.futures.Future that can also be awaited.

A thread that calls `result()` leads the drive meanwhile or sleeps in native code, and then
completes all operations that have ended: one wake-up instead of two. A coroutine that awaits is
told on its event loop, through one descriptor for all that ended. Callbacks run on a thread of the
queue, but those of `cancel()` run in its caller, and those added on an event loop run there; they
must not wait.
"""

from __future__ import annotations

import concurrent.futures
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from importlib import import_module
from math import isnan
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

from deepnvme import _native

if TYPE_CHECKING:
    import asyncio
    from array import array

__all__ = [
    "FINISHED",
    "SLICE_S",
    "Awaited",
    "IOFuture",
    "OneStepLock",
    "Places",
    "Waiter",
    "wake",
    "wake_loops",
]

_T = TypeVar("_T")
# What a future's repr and error say of its operation: the verb, the file's path, the offset, the
# bytes, and what the end of the file means. Not the file itself, which would stay open as long as
# the future is held. A tuple, which costs least to make for each operation.
_About: TypeAlias = "tuple[_native.Verb, str, int | Places, int, _native.AtEndOfFile]"
SLICE_S = 0.1
"""How long one call may wait in native code.

Python runs signal handlers between such calls, so Ctrl-C may take this long.
"""
_SLEEP_S = 1.0
"""The same for waits for an operation, in which native code runs the signal handlers itself."""
# Of concurrent.futures.Future._state.
_PENDING, FINISHED = "PENDING", "FINISHED"
_UNDER_WAY = (_PENDING, "RUNNING")


class Waiter(Protocol):
    """The object that an operation was submitted through."""

    def wait_for(self, future: IOFuture[Any], timeout_s: float) -> bool:
        """Wait until its operation has ended; False when the time is up."""
        ...

    def look(self, future: IOFuture[Any]) -> None:
        """Complete it if its operation has ended; wait for nothing."""
        ...

    def stop(self, future: IOFuture[Any]) -> None:
        """Let no further part of its operation begin."""
        ...

    def hear(self, future: IOFuture[Any]) -> None:
        """Complete it as soon as its operation ends, though no thread waits for it."""
        ...

    def hear_on(self, loop: asyncio.AbstractEventLoop, future: IOFuture[Any]) -> None:
        """Complete it on that loop, on which this is called, once its operation ends."""
        ...


class Places:
    """Where in its file each piece of an operation lies.

    `numbers` are the address, the bytes and the offset of one piece after the other.
    """

    def __init__(self, numbers: array[int]) -> None:
        self._numbers = numbers

    def offset_of(self, done: int) -> int:
        """Return where in the file the first byte lies that is not among the first `done`."""
        offset = 0
        for nbytes, offset in zip(self._numbers[1::3], self._numbers[2::3], strict=True):
            if done < nbytes:
                return offset + done
            done -= nbytes
        return offset

    def __str__(self) -> str:
        """Show the first, and how many there are besides."""
        offsets = self._numbers[2::3]
        return f"{offsets[0]} and {len(offsets) - 1} more" if offsets else "none"


class _MadeWhenSeen(Generic[_T]):
    """An attribute that a future makes, and notes as seen, when it is first looked at."""

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, future: IOFuture[Any] | None, owner: type) -> _T:
        if future is None:
            raise AttributeError(f"only a future has {self._name}")
        if not future._seen:
            future._seen = True  # before the attribute is made: see _end_unseen
            # Else the end could stay unnoticed for 100 ms: this thread may sleep at the lock that
            # is made below.
            future._waiter.hear(future)
        # In one step: where two threads make one, both get the first.
        made: _T = future.__dict__.setdefault(self._name, self._make())
        return made


class OneStepLock(threading.Condition):
    """The lock of a future, which `with` takes and lets go in one step for handlers of signals.

    Condition's own methods for `with` are Python: what a handler raises in them leaves the lock
    locked, and the thread that is to end the future hangs. Python 3.14 and later runs handlers
    between the two in any case (python/cpython issue 148874).
    """

    # Looked up when they are used: Condition's own constructor looks all of them up, which costs
    # most of what making a future does. By attrgetter, which is native: in functions of ours
    # handlers could raise as well, and `wait` return without the lock.
    acquire = property(attrgetter("_lock.acquire"))
    release = property(attrgetter("_lock.release"))
    locked = property(attrgetter("_lock.locked"))  # Python 3.14 and later
    _is_owned = property(attrgetter("_lock._is_owned"))
    _release_save = property(attrgetter("_lock._release_save"))
    _acquire_restore = property(attrgetter("_lock._acquire_restore"))
    __enter__ = property(attrgetter("_lock.__enter__"))
    __exit__ = property(attrgetter("_lock.__exit__"))

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiters: deque[threading.Lock] = deque()


class IOFuture(_native.FutureBase, concurrent.futures.Future[_T]):
    """The result of one operation: a byte count, or the error that ended it.

    A concurrent.futures.Future that can be awaited. The calls of `File` return one each.

    `cancel()` succeeds only while the drive has not begun; what has begun runs to its end, because
    its memory belongs to the device until then. Cancelling an `await` leaves the operation running
    and its memory held.
    """

    # The native base class has all of our own attributes, and these of Future's.
    _waiter: Waiter
    _about: _About
    _loop: asyncio.AbstractEventLoop | None  # which completes it, if it was submitted there
    _state: str
    _result: _T | None
    _exception: BaseException | None
    # And these are made when they are first looked at. Most futures are only asked for their result
    # and need none of them; code and memory that a thread touches after a long sleep cost it more
    # than all else (decision 0003).
    _condition: threading.Condition = _MadeWhenSeen(OneStepLock)  # type: ignore[assignment]
    _waiters: list[Any] = _MadeWhenSeen[list[Any]](list)  # type: ignore[assignment]
    _done_callbacks: list[Any] = _MadeWhenSeen[list[Any]](list)  # type: ignore[assignment]

    def __reduce__(self) -> str:
        """Refuse to be pickled or copied."""
        raise TypeError(
            "a future is neither pickled nor copied: pass its result on, or itself within this "
            "process"
        )

    def __repr__(self) -> str:
        """Show the file, the place, the size and the state. Waits for nothing."""
        verb, path, offset, nbytes, _ = self._about
        if self._state in _UNDER_WAY:
            state = "under way"
        elif self._state != FINISHED:
            state = "cancelled"
        elif self._exception is None:
            state = f"ended with {self._result}"
        else:
            state = f"failed: {self._exception}"
        what = verb.name.lower().replace("_", " ")
        place = "" if what.startswith("sync") else f" of {nbytes} B at offset {offset}"
        return f"<IOFuture: {what}{place}, {path}, {state}>"

    def cancel(self) -> bool:
        """Take the operation back if it has not begun; return whether that was so."""
        if self.cancelled():
            return True
        if self.done() or not self._cancel_ticket():
            return False
        # Only now: the ticket decides whether this call or the drive was first.
        try:
            return super().cancel()
        finally:  # also where a callback raises
            # Threads that wait sleep in native code, and the drive may come to the operation late.
            self._release_waiters()
            wake_loops((self,))

    def stop(self) -> None:
        """Let no further part of the operation begin.

        What the drive has runs to its end. The operation then fails with ECANCELED and says how
        much it moved, unless that was all of it. Of an array on a GPU nothing is stopped.
        """
        self._waiter.stop(self)

    def cancelled(self) -> bool:
        """Return whether the operation was cancelled."""
        # Future's own takes its lock. Here that would make one, and ask the drive's own thread to
        # lead from now on, which an event loop that awaits would then pay for at each operation.
        return self._state not in _UNDER_WAY and self._state != FINISHED

    def done(self) -> bool:
        """Return whether the operation has ended or was cancelled."""
        if self._state in _UNDER_WAY:
            # A future that no thread waits for is completed here: the queue's own thread looks
            # after such ones ten times a second only, and what polls would go on that much later.
            self._waiter.look(self)
        return self._state not in _UNDER_WAY

    def result(self, timeout: float | None = None) -> _T:
        """Wait for the end, at most `timeout` seconds; return the result or raise the error."""
        left = self._wait(timeout)
        # Future's own takes the lock, which would be made for that alone.
        if self._state == FINISHED and self._exception is None:
            return self._result  # type: ignore[return-value]  # it has one then
        # It failed, the time is up, or another thread is about to complete it.
        return super().result(left)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end, at most `timeout` seconds; return the error, None after success."""
        left = self._wait(timeout)
        # As in result().
        return self._exception if self._state == FINISHED else super().exception(left)

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[_T]], object]) -> None:
        """Call `fn` with this future at its end.

        On the event loop that runs here now, if one does. Else on a thread of the queue; in this
        call if the future has ended already.
        """
        events = sys.modules.get("asyncio")  # not imported: no loop runs
        loop = events._get_running_loop() if events else None
        super().add_done_callback(fn if loop is None else _OnLoop(loop, fn))

    def remove_done_callback(self, fn: Callable[..., object]) -> int:
        """Forget a callback, as asyncio.wait does; return how often it was there."""
        with self._condition:
            # An _OnLoop equals the function that it wraps.
            # A new list: the thread that ends the future goes through the old one without the lock.
            kept = [callback for callback in self._done_callbacks if callback != fn]
            removed = len(self._done_callbacks) - len(kept)
            self._done_callbacks = kept
        return removed

    def __await__(self) -> Generator[Any, None, _T]:
        """Wait on the running event loop. Cancelling the wait leaves the operation running."""
        if self._state in _UNDER_WAY:
            # A program that awaits has imported asyncio, and an `import` here would cost more than
            # making the future that is waited for.
            events = sys.modules.get("asyncio") or import_module("asyncio")
            loop = events.get_running_loop()
            waiting = loop.create_future()
            # Listed before any other thread is asked to wake this loop: that thread then finds it.
            self._awaiting.append(waiting)
            # If it was submitted on this loop, its bell was named then, and no call is needed.
            if loop is not self._loop:
                self._waiter.hear_on(loop, self)
            # Another thread may have ended the future before it could see this entry.
            if self._state in _UNDER_WAY:
                yield from waiting
        if self._state == FINISHED and self._exception is None:  # as in result()
            return self._result  # type: ignore[return-value]
        # Future's own raises that of concurrent.futures, which asyncio takes for an ordinary error.
        if self.cancelled():
            raise import_module("asyncio").CancelledError
        return self.result()

    def _wait(self, timeout: float | None) -> float | None:
        """Wait for the operation; return what is left of the time.

        The future may be completed a little later.
        """
        # In both loops it may be cancelled meanwhile, or completed by another thread.
        if timeout is None:
            while self._state in _UNDER_WAY and not self._waiter.wait_for(self, _SLEEP_S):
                pass
            return None
        # Locks refuse to wait for longer than TIMEOUT_MAX, and Future waits for the rest.
        most = min(timeout, threading.TIMEOUT_MAX)  # NaN stays NaN
        if isnan(most):
            raise ValueError("timeout is NaN: give seconds, or None to wait until the end")
        deadline = time.monotonic() + most
        while self._state in _UNDER_WAY:
            left = deadline - time.monotonic()
            if self._waiter.wait_for(self, max(0.0, min(left, _SLEEP_S))):
                break
            if left <= 0:
                return 0.0
        return max(0.0, deadline - time.monotonic())

    def _end_unheard(self, result: _T | None, error: BaseException | None) -> bool:
        """End; False where callbacks or waiters are to be called, as only `_end` does.

        Called again for a future that has ended, it only wakes the threads that sleep here.
        """
        # In one step under the GIL: a thread that looks at the future sees its end, or has set
        # `_seen`.
        if self._end_unseen(result, error):
            return True
        with self._condition:
            # Not here: this may be a thread in result(), and callbacks may do anything.
            if self._done_callbacks or self._waiters:
                return False
            if self._state in _UNDER_WAY:
                self._result, self._exception = result, error
                self._state = FINISHED
            # Threads that came by concurrent.futures sleep here, and not in native code.
            self._condition.notify_all()
            return True

    def _end(self, result: _T | None, error: BaseException | None) -> None:
        """End, and call callbacks and waiters; also after `_end_unheard` was interrupted."""
        if not self._end_unheard(result, error):
            with self._condition:
                if self._state in _UNDER_WAY:
                    self._result, self._exception = result, error
                    self._state = FINISHED
                # Two threads may be refused the same batch at the same time.
                if self._is_told:
                    return
                self._is_told = True
                # of concurrent.futures.wait and as_completed
                for waiter in self._waiters:
                    (waiter.add_result if self._exception is None else waiter.add_exception)(self)
                self._condition.notify_all()
            # Without the lock: a callback may ask the future, or submit and wait for room.
            self._invoke_callbacks()  # type: ignore[attr-defined]  # as set_result does

    def _end_cancelled(self) -> None:
        """Call callbacks and waiters of an operation that was cancelled before it began."""
        self._memory = None
        super().cancel()  # calls callbacks, unless the caller's cancel() did
        self.set_running_or_notify_cancel()  # tells concurrent.futures.wait

    def _end_in_child(self, error: BaseException) -> None:
        """Fail in a forked child, without calling callbacks.

        The lock is replaced: the thread that held it at the fork may not exist here.
        """
        self._memory = None
        # So that no attribute below asks native code: its locks may be held by parent threads.
        self._seen = True
        self._condition = OneStepLock()
        self._done_callbacks = []
        self._waiters = []
        if not self.done():
            self.set_exception(error)


class _OnLoop:
    """A callback that runs on an event loop, if that still runs."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fn: Callable[..., object]) -> None:
        self._loop, self._fn = loop, fn

    def __call__(self, future: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._fn, future)

    def __eq__(self, other: object) -> bool:
        # asyncio.wait removes the function that it added, and knows nothing of this wrapper.
        return self._fn == (other._fn if isinstance(other, _OnLoop) else other)

    def __hash__(self) -> int:
        return hash(self._fn)


class Awaited(Protocol):
    """A future that coroutines await."""

    @property
    def _awaiting(self) -> list[asyncio.Future[None]]: ...


def wake_loops(ended: Iterable[Awaited]) -> None:
    """Wake the coroutines that await any of these; waking one twice is harmless.

    At once on the loop that runs here, with one call for each other loop.
    """
    events = sys.modules.get("asyncio")
    here = events._get_running_loop() if events else None
    elsewhere: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for future in ended:
        for waiting in tuple(future._awaiting):  # another loop's thread may add to it
            loop = waiting.get_loop()
            if loop is here:
                if not waiting.done():  # as in wake(), without the call
                    waiting.set_result(None)
            else:
                elsewhere.setdefault(loop, []).append(waiting)
    for loop, waits in elsewhere.items():
        with suppress(RuntimeError):  # that loop is closed: no coroutine waits on it
            loop.call_soon_threadsafe(_wake_all, waits)


def wake(waiting: asyncio.Future[None]) -> None:
    """Let the coroutine go on that waits for this. On its loop."""
    if not waiting.done():  # its task may be cancelled, or woken already
        waiting.set_result(None)


def _wake_all(waits: Iterable[asyncio.Future[None]]) -> None:
    for waiting in waits:
        wake(waiting)
