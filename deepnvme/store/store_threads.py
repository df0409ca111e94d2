"""The threads of a store for calls that do not block: a few that read, and one that writes.

Owns which writes have begun, so that a commit can wait for them, and the order of those queued
here. Knows nothing of tensors. Called by the store, from any thread.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from deepnvme.errors import ClosedError
from deepnvme.store.lane import Lane, Request, StoreFuture

__all__ = ["StoreThreads"]

_T = TypeVar("_T")
_READERS = 4


class StoreThreads:
    """Threads that are started when they are needed, and the requests that wait for them."""

    def __init__(self) -> None:
        self.ending = False
        self._name = f"deepnvme-store-{id(self):x}"
        # Held from check_taking() until the executor has the work: it is not shut down in between.
        self._lock = threading.Lock()
        # One thread writes, so that of two puts of a name the later one wins. Python joins the
        # threads of executors at its exit, so what was begun is done.
        self._executors = (
            ThreadPoolExecutor(1, f"{self._name}-writer"),
            ThreadPoolExecutor(_READERS, f"{self._name}-reader"),
        )
        self._writer = Lane(self._executors[0], 1, self._queued_no_more)
        self._readers = Lane(self._executors[1], _READERS)
        # The writes under way, on any thread. Weak: a lock that its writer dropped is gone.
        self._writes: weakref.WeakSet[threading.Lock] = weakref.WeakSet()
        # The writes queued here, and the names that they change.
        self._queued: dict[Future[Any], frozenset[str]] = {}

    def read(self, work: Callable[[], _T]) -> StoreFuture[_T]:
        """Begin to call `work` on one of the threads that read.

        Raises:
            ClosedError: the store is closed.
        """
        return self.get(Request(StoreFuture(), work))

    def get(self, request: Request) -> StoreFuture[Any]:
        """Begin to carry out a request that reads. Raises as `read` does."""
        with self._lock:
            self.check_taking()
            self._readers.add(request)
        return request.future

    def write(self, work: Callable[[], _T], names: Iterable[str] = ()) -> StoreFuture[_T]:
        """Begin to call `work`, which changes `names`, on the thread that writes, after what was
        queued there before.

        Raises:
            ClosedError: the store is closed.
        """
        return self.put(Request(StoreFuture(), work), names)

    def put(self, request: Request, names: Iterable[str]) -> StoreFuture[Any]:
        """Begin to carry out a request that changes `names`. Raises as `write` does."""
        changed = _roots(names)
        with self._lock:
            self.check_taking()
            # First: the request may have ended before `add` returns.
            self._queued[request.future] = changed
            try:
                self._writer.add(request)
            except BaseException:
                del self._queued[request.future]
                raise
        return request.future

    def _queued_no_more(self, group: Iterable[Request]) -> None:
        with self._lock:  # others look through all that are queued
            for request in group:
                self._queued.pop(request.future, None)

    def wait_for_queued(self, names: Iterable[str]) -> None:
        """Wait for the end of the queued writes that may change one of these names.

        Returns at once on these threads, which would wait for themselves, and which have an order
        of their own.
        """
        # Without the lock: what another thread queues at this moment comes after the caller.
        if self.is_current or not self._queued:
            return
        changed = _roots(names)
        with self._lock:
            theirs = [future for future, others in self._queued.items() if others & changed]
        # Without the lock, which those writes may need.
        self.wait_for(theirs)

    def writing(self) -> threading.Lock:
        """Return a lock that the caller holds while it writes: commits that begin meanwhile wait.

        A lock, as a `with` block releases it whatever Ctrl-C interrupts; an entry in a set might
        stay.
        """
        under_way = threading.Lock()
        with self._lock:
            self._writes.add(under_way)
        return under_way

    def writes(self) -> set[Future[Any] | threading.Lock]:
        """Return the writes under way and those queued, for a commit that waits for them.

        On the thread that writes, only those under way: what is queued there comes after.
        """
        with self._lock:
            # By the thread's name: an executor does not say which threads are its own.
            on_writer = threading.current_thread().name.startswith(f"{self._name}-writer")
            return {*self._writes} if on_writer else {*self._writes, *self._queued}

    @staticmethod
    def wait_for(writes: Iterable[Future[Any] | threading.Lock]) -> None:
        """Wait for the end of these writes, whether they succeed, fail or are cancelled."""
        for write in writes:
            if isinstance(write, Future):
                with suppress(CancelledError):
                    write.exception()
            else:
                with write:  # its writer holds it until the write has ended
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
            raise ClosedError("the store is closed: open it again to use it")

    def take_no_more(self) -> None:
        """Refuse new work from here on."""
        with self._lock:
            self.ending = True

    def join(self) -> None:
        """Wait until all requests have ended. May be called again after Ctrl-C."""
        for executor in self._executors:
            executor.shutdown(wait=True)


def _roots(names: Iterable[str]) -> frozenset[str]:
    """Return the names up to the first slash: a state dict and its leaves have that in common."""
    return frozenset([str(name).split("/", 1)[0] for name in names])
