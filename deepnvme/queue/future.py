"""`IOFuture`: one I/O under way. A concurrent.futures.Future that can also be awaited.

Whoever calls `result()` sleeps in native code until the drive is done with that operation, and then
completes all that have ended: one wake-up instead of two. Whoever awaits, adds callbacks or uses
`concurrent.futures.wait` is told by the queue's own thread, on which callbacks run (but those of
`cancel()`, which run in its caller); they must not wait.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from deepnvme import _native

if TYPE_CHECKING:
    import asyncio

    from deepnvme.memory.buffers import Memory

__all__ = ["SLICE_S", "IOFuture", "Waiter", "awaited"]

_T = TypeVar("_T")
SLICE_S = 0.1
"""How long one call may wait in native code.

Python runs signal handlers between calls: so long may Ctrl-C take.
"""
_SLEEP_S = 1.0
"""The same for an operation's end.

Signals end that wait; but one that just precedes it, or is another thread's.
"""
# Of concurrent.futures.Future._state.
_PENDING, _FINISHED = "PENDING", "FINISHED"
_UNDER_WAY = (_PENDING, "RUNNING")


class Waiter(Protocol):
    """Whoever an operation was submitted through."""

    def wait_for(self, ticket: _native.Ticket, timeout_s: float) -> bool:
        """Wait until the operation has ended; False when the time is up."""
        ...


class _MadeWhenSeen(Generic[_T]):
    """An attribute of a future that is made when it is first looked at; the future knows then that
    it was seen.
    """

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, future: IOFuture[Any] | None, owner: type) -> _T:
        if future is None:
            raise AttributeError(f"only a future has {self._name}")
        future._seen = True  # before it is there: see _end_unheard
        made: _T = future.__dict__.setdefault(self._name, self._make())
        return made


class IOFuture(concurrent.futures.Future[_T]):
    """The result of one operation: a byte count, or the error that ended it.

    `cancel()` succeeds only while the drive has not begun; what has begun runs to its end, because
    its memory belongs to the device until then. Cancelling an `await` leaves the operation running
    and its memory held.
    """

    # As Future's own, but that nothing is made which a future that only its result is taken of does
    # not need: code and memory that a thread touches when it wakes after long sleep cost it more
    # than all else (decision 0003).
    _state = _PENDING
    _result: _T | None = None
    _exception: BaseException | None = None
    _condition: threading.Condition = _MadeWhenSeen(threading.Condition)  # type: ignore[assignment]
    _waiters: list[Any] = _MadeWhenSeen[list[Any]](list)  # type: ignore[assignment]
    _done_callbacks: list[Any] = _MadeWhenSeen[list[Any]](list)  # type: ignore[assignment]
    _seen = False

    def __init__(
        self, ticket: _native.Ticket, waiter: Waiter, memory: Memory | None = None
    ) -> None:
        self._ticket = ticket
        self._waiter = waiter
        self._memory = memory

    def __reduce__(self) -> str:
        """Refuse to be pickled or copied."""
        raise TypeError(
            "a future is neither pickled nor copied: pass its result on, or itself within this "
            "process"
        )

    def cancel(self) -> bool:
        """Take the operation back if it has not begun; return whether that was so."""
        if self.cancelled():
            return True
        if self.done() or not self._ticket.cancel():
            return False
        cancelled = super().cancel()
        self._ticket.release_waiters()
        return cancelled

    def done(self) -> bool:
        """Return whether the operation has ended or was cancelled."""
        return self._state not in _UNDER_WAY

    def result(self, timeout: float | None = None) -> _T:
        """Wait for the end, at most `timeout` seconds; return the result or raise the operation's
        error.
        """
        left = self._wait(timeout)
        if self._state == _FINISHED and self._exception is None:
            return self._result  # type: ignore[return-value]  # it has one then
        return super().result(left)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end, at most `timeout` seconds; return the operation's error, None where it
        succeeded.
        """
        return super().exception(self._wait(timeout))

    def __await__(self) -> Generator[Any, None, _T]:
        """Wait on the running event loop."""
        return awaited(self)

    def _wait(self, timeout: float | None) -> float | None:
        """Wait for the operation; return what is left of the time.

        The future may be completed a little later.
        """
        deadline = (
            None if timeout is None else time.monotonic() + min(timeout, threading.TIMEOUT_MAX)
        )
        while self._state in _UNDER_WAY:  # else cancelled meanwhile, or completed by another thread
            left = _SLEEP_S if deadline is None else deadline - time.monotonic()
            if self._waiter.wait_for(self._ticket, max(0.0, min(left, _SLEEP_S))):
                break
            if left <= 0:
                return 0.0
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def _end_unheard(self, result: _T | None, error: BaseException | None) -> bool:
        """End unless somebody is to be told: that is for the queue's own thread.

        Again: only tells who sleeps here.
        """
        # before the future ends: whoever it wakes may resize or hand on the memory at once
        self._memory = None
        # nor is it locked: whoever sees it from here on sees its end, or is seen below
        if not self._seen:
            self._result, self._exception = result, error
            self._state = _FINISHED
            if not self._seen:
                return True
        with self._condition:
            if self._done_callbacks or self._waiters:
                return False
            if self._state in _UNDER_WAY:
                self._result, self._exception = result, error
                self._state = _FINISHED
            self._condition.notify_all()
            return True

    def _end(self, result: _T | None, error: BaseException | None) -> None:
        """End, and tell everybody; after `_end_unheard` declined or was interrupted, too."""
        self._memory = None
        if self._state in _UNDER_WAY:
            if error is None:
                self.set_result(result)  # type: ignore[arg-type]  # it has one then
            else:
                self.set_exception(error)
        elif self._seen:
            with self._condition:
                for waiter in self._waiters:
                    (waiter.add_result if self._exception is None else waiter.add_exception)(self)
                self._condition.notify_all()
            self._invoke_callbacks()  # type: ignore[attr-defined]  # as set_result does

    def _end_cancelled(self) -> None:
        """Tell everybody that the operation was taken back before it began."""
        self._memory = None
        super().cancel()
        self.set_running_or_notify_cancel()

    def _end_in_child(self, error: BaseException) -> None:
        """In a forked child: fail, and call nobody.

        The thread that held the lock at that moment may not exist here.
        """
        self._memory = None
        self._seen = True
        self._condition = threading.Condition()
        self._done_callbacks = []
        self._waiters = []
        if not self.done():
            self.set_exception(error)


def awaited(future: concurrent.futures.Future[_T]) -> Generator[Any, None, _T]:
    """Wait for a future on the running event loop.

    Cancelling the wait leaves the operation running.
    """
    import asyncio  # costs a third of importing this package, and whoever awaits has it

    waiting = asyncio.wrap_future(future)
    waiting.add_done_callback(_look_at)
    return asyncio.shield(waiting).__await__()


def _look_at(ended: asyncio.Future[Any]) -> None:
    """Keep asyncio from reporting the error of an operation whose await was cancelled: `self` still
    has it.
    """
    if not ended.cancelled():
        ended.exception()
