"""The threads that a store does things on without its caller waiting: a few that read, and one that
writes.

Owns which puts have begun, which a commit waits for, and the order of those begun here. Knows
nothing of tensors. Called by the store, from any thread.
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
    """Threads that are started as they are needed, and the requests that wait for them."""

    def __init__(self) -> None:
        self.ending = False
        self._name = f"deepnvme-store-{id(self):x}"
        # Between check_taking() and the executor: no work comes to one that is shut down.
        self._lock = threading.Lock()
        # One thread writes, so that of two puts of a name the later one wins.
        # Threads of an executor are joined at the interpreter's exit: what was begun is done by
        # then.
        self._executors = (
            ThreadPoolExecutor(1, f"{self._name}-writer"),
            ThreadPoolExecutor(_READERS, f"{self._name}-reader"),
        )
        self._writer = Lane(self._executors[0], 1, self._queued_no_more)
        self._readers = Lane(self._executors[1], _READERS)
        # Those under way, on whichever thread. Weak: a lock that its writer dropped is gone.
        self._writes: weakref.WeakSet[threading.Lock] = weakref.WeakSet()
        # Those begun here, and what they change.
        self._queued: dict[Future[Any], frozenset[str]] = {}

    def read(self, work: Callable[[], _T]) -> StoreFuture[_T]:
        """Begin to do something on one of the threads that read.

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
        """Begin to do something to `names` on the thread that writes, after all that was begun
        there before.

        Raises:
            ClosedError: the store is closed.
        """
        return self.put(Request(StoreFuture(), work), names)

    def put(self, request: Request, names: Iterable[str]) -> StoreFuture[Any]:
        """Begin to carry out a request that changes `names`. Raises as `write` does."""
        changed = _roots(names)
        with self._lock:
            self.check_taking()
            self._queued[request.future] = changed  # first: it may have ended before `add` returns
            try:
                self._writer.add(request)
            except BaseException:
                del self._queued[request.future]
                raise
        return request.future

    def _queued_no_more(self, group: Iterable[Request]) -> None:
        for request in group:
            self._queued.pop(request.future, None)

    def wait_for_queued(self, names: Iterable[str]) -> None:
        """Wait until what was begun here has ended that changes one of these names, or may.

        On its own threads: never.

        They would wait for themselves: what was begun there has an order of its own.
        """
        # Without the lock: what another thread begins at this moment comes after the caller.
        if self.is_current or not self._queued:
            return
        changed = _roots(names)
        with self._lock:
            theirs = [future for future, others in self._queued.items() if others & changed]
        # Outside of the lock: what is waited for may need it to end.
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
            # By name: an executor does not say which threads are its own.
            on_writer = threading.current_thread().name.startswith(f"{self._name}-writer")
            return {*self._writes} if on_writer else {*self._writes, *self._queued}

    @staticmethod
    def wait_for(writes: Iterable[Future[Any] | threading.Lock]) -> None:
        """Wait until these have ended, however."""
        for write in writes:
            if isinstance(write, Future):
                with suppress(CancelledError):
                    write.exception()
            else:
                # Its writer holds it until the write has ended.
                with write:
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
        """Wait until all that was begun has ended. Again: waits on."""
        for executor in self._executors:
            executor.shutdown(wait=True)


def _roots(names: Iterable[str]) -> frozenset[str]:
    """Return the names up to the first slash: of a state dict and its leaves it is the same."""
    return frozenset(str(name).split("/", 1)[0] for name in names)
