"""Requests that wait for a thread of a store, and their futures. A free thread carries out many of
them together.

Owns the order in which requests are carried out. Knows no tensors: a request has the function that
carries it out together with others. Called by `StoreThreads`, from any thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures._base import FINISHED, PENDING, RUNNING
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from deepnvme.errors import ForkedError
from deepnvme.queue.future import OneStepLock, wake_loops
from deepnvme.queue.pending import report_escaped

if TYPE_CHECKING:
    import asyncio

__all__ = ["Lane", "Request", "StoreFuture", "Together", "each_alone"]

_T = TypeVar("_T")
_UNDER_WAY = frozenset({PENDING, RUNNING})
_MOST_TOGETHER = 1024
_MOST_BYTES = 64 << 20  # so that the first of many large tensors need not wait for the last


class StoreFuture(Future[_T]):
    """The result of an operation of a store; can be awaited.

    Its callbacks run on a thread of the store. They must not wait for another operation that was
    begun without blocking, nor for a lock that is held around one, as `commit` does. Each waiting
    thread sleeps at a lock of its own, so Ctrl-C cannot leave a shared one locked.
    """

    def __init__(self) -> None:
        # What Future's own constructor sets, with another lock.
        self._condition = OneStepLock()
        self._state = PENDING
        self._result: Any = None
        self._exception: BaseException | None = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Any] = []
        self._sleepers: list[threading.Lock] = []
        self._awaiting: list[asyncio.Future[None]] = []
        self._owner = os.getpid()

    def cancel(self) -> bool:
        """Take the operation back if no thread has begun it; return whether that was so."""
        try:
            return super().cancel()
        finally:  # also where a callback raises
            if self.cancelled():
                wake_loops((self,))

    def result(self, timeout: float | None = None) -> _T:
        """Wait for the end, at most `timeout` seconds; return the result or raise the operation's
        error.

        Raises:
            ForkedError: it goes on in the process that this one was forked from.
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
        """Wait on the running event loop. Cancelling the wait leaves the operation running."""
        import asyncio  # costs a third of importing this package; a program that awaits has it

        while self._state in _UNDER_WAY:
            self._refuse_in_child()
            waiting = asyncio.get_running_loop().create_future()
            self._awaiting.append(waiting)
            try:
                if self._state in _UNDER_WAY:  # else the end came before this entry was listed
                    yield from waiting
            finally:
                self._awaiting.remove(waiting)
        if self.cancelled():  # result() raises that of concurrent.futures
            raise asyncio.CancelledError
        return self.result()

    def _sleep(self, timeout: float | None) -> float | None:
        """Wait for the end, or until the time is up; return what is left of it."""
        if self._state not in _UNDER_WAY:
            return timeout
        self._refuse_in_child()
        deadline = None if timeout is None else time.monotonic() + timeout
        sleeper = threading.Lock()
        sleeper.acquire()
        self._sleepers.append(sleeper)
        try:
            if self._state in _UNDER_WAY:  # else the end came before this sleeper was listed
                sleeper.acquire(
                    timeout=-1 if timeout is None else max(0.0, min(timeout, threading.TIMEOUT_MAX))
                )
        finally:
            self._sleepers.remove(sleeper)
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def _refuse_in_child(self) -> None:
        if os.getpid() != self._owner:
            raise ForkedError(
                f"this operation goes on in process {self._owner}; a forked child opens a store of "
                "its own"
            )

    def _invoke_callbacks(self) -> None:  # Future calls it at every end, cancellation included
        for sleeper in tuple(self._sleepers):
            sleeper.release()
        super()._invoke_callbacks()  # type: ignore[misc]  # not in the stubs


Together: TypeAlias = "Callable[[Sequence[Request]], Sequence[Any]]"
"""Carries out several requests and returns the result of each, or raises."""


def each_alone(group: Sequence[Request]) -> Sequence[Any]:
    """Carry out the requests one after the other."""
    return [request.work() for request in group]


@dataclass(slots=True, eq=False)
class Request:
    """One call that was begun: its future, and what to do.

    `work` carries it out alone, `together` with other requests of the same `together` and of other
    names. `tensor` is what is put, or what is read into, `nbytes` its bytes, 0 where these are not
    known. `copy`: whether it may be copied first.
    """

    future: StoreFuture[Any]
    work: Callable[[], Any]
    together: Together = each_alone
    name: str = ""
    tensor: Any = None
    nbytes: int = 0
    copy: bool = False


def _ignore(group: Sequence[Request]) -> None:
    """Do nothing."""


class Lane:
    """Requests in the order of the calls, on up to `most_threads` threads of an executor.

    `ended` is called with each group once all its futures have ended, cancelled ones included.
    """

    def __init__(
        self,
        executor: ThreadPoolExecutor,
        most_threads: int,
        ended: Callable[[Sequence[Request]], None] = _ignore,
    ) -> None:
        self._executor = executor
        self._most_threads = most_threads
        self._ended = ended
        self._lock = threading.Lock()
        self._waiting: deque[Request] = deque()
        self._threads = 0  # threads of the executor that work on this lane

    def add(self, request: Request) -> None:
        """Let a thread carry out the request, after those that were added before.

        Raises:
            RuntimeError: the interpreter ends, and starts no thread any more.
        """
        with self._lock:
            # The thread looks only when this lock is free, and then finds the request. Counted and
            # added after: where no thread can be started, nothing has changed.
            if self._threads < self._most_threads:
                self._executor.submit(self._run)
                self._threads += 1
            self._waiting.append(request)

    def _run(self) -> None:
        """Carry out requests until none waits."""
        while True:
            with self._lock:
                group = self._next_group()
                if not group:
                    # With the lock: a request that comes from here on gets a thread of its own.
                    self._threads -= 1
                    return
            # From here on, the requests that are left cannot be cancelled.
            left = [request for request in group if request.future.set_running_or_notify_cancel()]
            _carry_out(left)
            self._ended(group)
            # A reference kept while the thread sleeps would keep tensors alive.
            del group, left

    def _next_group(self) -> list[Request]:
        """Take the oldest request, and those behind it that can be carried out with it."""
        if not self._waiting:
            return []
        first = self._waiting.popleft()
        group = [first]
        if first.together is each_alone:
            return group
        names = {first.name}
        nbytes = first.nbytes
        while self._waiting and len(group) < _MOST_TOGETHER:
            request = self._waiting[0]
            nbytes += request.nbytes
            # Of two requests for one name, the later one must find what the earlier one did.
            # Compared by value: each access to a method makes another object.
            if request.together != first.together or request.name in names or nbytes > _MOST_BYTES:
                break
            names.add(request.name)
            group.append(self._waiting.popleft())
        return group


def _carry_out(group: Sequence[Request]) -> None:
    results: Sequence[Any] = ()
    try:
        if len(group) > 1:
            results = group[0].together(group)
    except BaseException:  # one failed all: below each is carried out alone, with its own end
        results = ()
    together = [request.future for request in group[: len(results)]]
    # Last one first: a caller who waits for the first one then wakes once, and finds all of them.
    for future, result in zip(reversed(together), reversed(results), strict=True):
        _end(future, result)
    wake_loops(together)  # each loop once
    for request in group[len(results) :]:
        _carry_out_alone(request)


def _carry_out_alone(request: Request) -> None:
    try:
        result = request.work()
    except BaseException as error:  # any: a caller would wait for the future for ever
        _end(request.future, error=error)
    else:
        _end(request.future, result)
    wake_loops((request.future,))


def _end(future: StoreFuture[Any], result: Any = None, error: BaseException | None = None) -> None:
    try:
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
    except BaseException as escaped:  # a callback's
        report_escaped(escaped)
