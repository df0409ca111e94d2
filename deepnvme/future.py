"""`IOFuture`: one I/O under way. A concurrent.futures.Future that can also be awaited.

Whoever calls `result()` sleeps in native code until the drive is done with that operation, and then completes all that
have ended: one wake-up instead of two. Whoever awaits, adds callbacks or uses `concurrent.futures.wait` is told by the
queue's own thread, on which callbacks run (but those of `cancel()`, which run in its caller); they must not wait.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from deepnvme import _native

if TYPE_CHECKING:
    import asyncio

__all__ = ["SLICE_S", "IOFuture", "Waiter", "awaited"]

_T = TypeVar("_T")
SLICE_S = 0.1
"""How long one call may wait in native code. Python runs signal handlers between calls: so long may Ctrl-C take."""
# Of concurrent.futures.Future._state.
_FINISHED = "FINISHED"
_UNDER_WAY = ("PENDING", "RUNNING")


class Waiter(Protocol):
    """Whoever an operation was submitted through."""

    def wait_for(self, ticket: _native.Ticket, timeout_s: float) -> bool:
        """Wait until the operation has ended; False when the time is up."""
        ...


class IOFuture(concurrent.futures.Future[_T]):
    """The result of one operation: a byte count, or the error that ended it.

    `cancel()` succeeds only while the drive has not begun; what has begun runs to its end, because its memory belongs
    to the device until then. Cancelling an `await` leaves the operation running and its memory held.
    """

    def __init__(self, ticket: _native.Ticket, waiter: Waiter) -> None:
        super().__init__()
        self._ticket = ticket
        self._waiter = waiter

    def cancel(self) -> bool:
        """Take the operation back if it has not begun; return whether that was so."""
        return self.cancelled() or (not self.done() and self._ticket.cancel() and super().cancel())

    def result(self, timeout: float | None = None) -> _T:
        """Wait for the end, at most `timeout` seconds; return the result or raise the operation's error."""
        return super().result(self._wait(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end, at most `timeout` seconds; return the operation's error, None where it succeeded."""
        return super().exception(self._wait(timeout))

    def __await__(self) -> Generator[Any, None, _T]:
        """Wait on the running event loop."""
        return awaited(self)

    def _wait(self, timeout: float | None) -> float | None:
        """Wait for the operation; return what is left of the time. The future may be completed a little later."""
        if self.done():
            return timeout
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.done():  # cancelled meanwhile, or completed by another thread
            left = SLICE_S if deadline is None else deadline - time.monotonic()
            if self._waiter.wait_for(self._ticket, max(0.0, min(left, SLICE_S))):
                break
            if left <= 0:
                return 0.0
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def _end_unheard(self, result: _T | None, error: BaseException | None) -> bool:
        """End unless somebody is to be told: that is for the queue's own thread. Again: only tells who sleeps here."""
        with self._condition:
            if self._state in _UNDER_WAY:
                if self._done_callbacks or self._waiters:
                    return False
                self._result, self._exception = result, error
                self._state = _FINISHED
            self._condition.notify_all()
            return True

    def _end_in_child(self, error: BaseException) -> None:
        """In a forked child: fail, and call nobody. The thread that held the lock at that moment may not exist here."""
        self._condition = threading.Condition()
        self._done_callbacks: list[Any] = []
        self._waiters: list[Any] = []
        if not self.done():
            self.set_exception(error)


def awaited(future: concurrent.futures.Future[_T]) -> Generator[Any, None, _T]:
    """Wait for a future on the running event loop. Cancelling the wait leaves the operation running."""
    import asyncio  # costs a third of importing this package, and whoever awaits has it

    waiting = asyncio.wrap_future(future)
    waiting.add_done_callback(_look_at)
    return asyncio.shield(waiting).__await__()


def _look_at(ended: asyncio.Future[Any]) -> None:
    """Keep asyncio from reporting the error of an operation whose await was cancelled: `self` still has it."""
    if not ended.cancelled():
        ended.exception()
