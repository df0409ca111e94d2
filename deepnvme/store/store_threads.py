"""The threads that a store does things on without its caller waiting: a few that read, and one that
writes.

Owns which puts have begun, which a commit waits for, and the order of those begun here. Knows
nothing of tensors. Called by the store, from any thread.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures._base import FINISHED, PENDING, RUNNING
from contextlib import suppress
from typing import Any, TypeVar, cast

from deepnvme.errors import ClosedError
from deepnvme.queue.future import awaited

__all__ = ["StoreFuture", "StoreThreads"]

_T = TypeVar("_T")
_READERS = 4
_UNDER_WAY = frozenset({PENDING, RUNNING})


class StoreFuture(Future[_T]):
    """The result of an operation of a store; can be awaited.

    Its callbacks run on a thread of the store, in which they must not wait for another operation
    that was begun there, nor for a lock that is held around one, as `commit`. Waiting holds no lock
    that Ctrl-C could leave locked: whoever waits sleeps at one of its own.
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


class StoreThreads:
    """Started as they are needed."""

    def __init__(self) -> None:
        self.ending = False
        self._name = f"deepnvme-store-{id(self):x}"
        self._lock = threading.Lock()
        self._readers = ThreadPoolExecutor(_READERS, f"{self._name}-reader")
        # of two puts of a name the later one wins
        self._writer = ThreadPoolExecutor(1, f"{self._name}-writer")
        # those under way, on whichever thread
        self._writes: weakref.WeakSet[threading.Lock] = weakref.WeakSet()
        # those begun here, and what they change
        self._queued: dict[Future[Any], frozenset[str]] = {}

    def read(self, work: Callable[[], _T]) -> StoreFuture[_T]:
        """Begin to do something on one of the threads that read.

        Raises:
            ClosedError: the store is closed.
        """
        future: StoreFuture[_T] = StoreFuture()
        with self._lock:
            self.check_taking()
            self._readers.submit(_run, work, future)
        return future

    def write(self, work: Callable[[], _T], names: Iterable[str] = ()) -> StoreFuture[_T]:
        """Begin to do something to `names` on the thread that writes, after all that was begun
        there before.

        Raises:
            ClosedError: the store is closed.
        """
        future: StoreFuture[_T] = StoreFuture()
        changed = _roots(names)
        with self._lock:
            self.check_taking()
            self._writer.submit(_run, work, future)
            self._queued[future] = changed
        future.add_done_callback(self._forget)
        return future

    def _forget(self, future: Future[Any]) -> None:
        self._queued.pop(future, None)

    def wait_for_queued(self, names: Iterable[str]) -> None:
        """Wait until what was begun here has ended that changes one of these names, or may.

        On its own threads: never.

        They would wait for themselves: what was begun there has an order of its own.
        """
        if self.is_current or not self._queued:
            return
        changed = _roots(names)
        with self._lock:
            theirs = [future for future, others in self._queued.items() if others & changed]
        self.wait_for(theirs)

    def writing(self) -> threading.Lock:
        """Return what is held for the length of a write: commits that begin meanwhile wait for its
        end.

        A lock, which ends with its block whatever Ctrl-C interrupts, where a note that is taken
        back may stay.
        """
        under_way = threading.Lock()
        with self._lock:
            self._writes.add(under_way)
        return under_way

    def writes(self) -> set[Future[Any] | threading.Lock]:
        """Return the writes that have begun, on the thread that writes those under way: what is
        queued comes after.
        """
        with self._lock:
            on_writer = threading.current_thread().name.startswith(f"{self._name}-writer")
            return {*self._writes} if on_writer else {*self._writes, *self._queued}

    @staticmethod
    def wait_for(writes: Iterable[Future[Any] | threading.Lock]) -> None:
        """Wait until these have ended, however."""
        for each in writes:
            if isinstance(each, Future):
                with suppress(CancelledError):
                    each.exception()
            else:
                with each:
                    pass

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on one of these threads."""
        return threading.current_thread().name.startswith(f"{self._name}-")

    def check_taking(self) -> None:
        """Refuse new work.

        Raises:
            ClosedError: the store is closed.
        """
        if self.ending:
            raise ClosedError("the store is closed")

    def take_no_more(self) -> None:
        """Refuse new work from here on."""
        with self._lock:
            self.ending = True

    def join(self) -> None:
        """Wait until all that was begun has ended. Again: waits on."""
        for executor in (self._writer, self._readers):
            executor.shutdown(wait=True)


def _roots(names: Iterable[str]) -> frozenset[str]:
    """Return the names up to the first slash: of a state dict and its leaves it is the same."""
    return frozenset(str(name).split("/", 1)[0] for name in names)


def _run(work: Callable[[], _T], future: StoreFuture[_T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
