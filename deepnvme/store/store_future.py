"""`StoreFuture`: the result of an operation of a store that its caller does not wait for yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from concurrent.futures import Future
from concurrent.futures._base import FINISHED, PENDING, RUNNING
from typing import Any, TypeVar, cast

from deepnvme.queue.future import awaited

__all__ = ["StoreFuture"]

_T = TypeVar("_T")
_UNDER_WAY = frozenset({PENDING, RUNNING})


class StoreFuture(Future[_T]):
    """The result of an operation of a store; can be awaited.

    Its callbacks run on a thread of the store, in which they must not wait for another operation
    that was begun there, nor for a lock that is held around one, as `commit`. Waiting holds no lock
    that Ctrl-C could leave locked: each waiting thread sleeps at a lock of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sleepers: list[threading.Lock] = []

    def result(self, timeout: float | None = None) -> _T:
        """Wait for the end, at most `timeout` seconds; return the result or raise the operation's
        error.
        """
        left = self._sleep(timeout)
        if self._state == FINISHED and self._exception is None:
            return cast(_T, self._result)
        return super().result(left)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end, at most `timeout` seconds; return the operation's error, None where it
        succeeded.
        """
        left = self._sleep(timeout)
        return self._exception if self._state == FINISHED else super().exception(left)

    def __await__(self) -> Generator[Any, None, _T]:
        """Wait on the running event loop."""
        return awaited(self)

    def _sleep(self, timeout: float | None) -> float | None:
        """Wait for the end, or until the time is up; return what is left of it."""
        if self._state not in _UNDER_WAY:
            return timeout
        deadline = None if timeout is None else time.monotonic() + timeout
        sleeper = threading.Lock()
        sleeper.acquire()
        self._sleepers.append(sleeper)
        try:
            if self._state in _UNDER_WAY:  # else it may have been woken before it was listed
                sleeper.acquire(
                    timeout=-1 if timeout is None else max(0.0, min(timeout, threading.TIMEOUT_MAX))
                )
        finally:
            self._sleepers.remove(sleeper)
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def _invoke_callbacks(self) -> None:  # what Future does once it has ended, however
        for sleeper in tuple(self._sleepers):
            sleeper.release()
        super()._invoke_callbacks()  # type: ignore[misc]  # not in the stubs
