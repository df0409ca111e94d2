"""`at_end_of`: ends what the garbage collector found unused, on a thread of its own.

The collector runs on any thread, between any two lines of it, with whatever locks that thread
holds. So what it calls must neither wait for a drive nor take a lock. This takes no lock there and
starts no `threading.Thread`, which would take one of `threading`. Called by what has something to
end: queues, volumes, file objects, handles of `compat`; by queues that close, which leftovers may
still need; and by calls that make more of them, or lock what a leftover may have locked.
"""

from __future__ import annotations

import _thread
import gc
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

from deepnvme.queue.pending import report_escaped

__all__ = ["Leftover", "at_end_of", "watching"]

_Owner = TypeVar("_Owner")

_MOST_WAITING = 16  # with files and memory; where more do, calls that make more end them first
_THREADS_OF_QUEUES = frozenset({"deepnvme-futures", "deepnvme-staging"})


def at_end_of(
    owner: object, end: Callable[[], object], *, queue: object = None
) -> weakref.finalize[..., Any]:
    """Return a finalizer that calls `end` at the exit of the program, or has another thread call it
    soon after the garbage collector found `owner`.

    `end` is as in `Leftover`, and must not refer to `owner`. The owner's `__del__` closes it while
    the finalizer is alive: so it is closed at once where its last reference goes.
    """
    return weakref.finalize(owner, _end_or_hand_over, watching(owner), end, queue, os.getpid())


def watching(owner: _Owner) -> weakref.ref[_Owner]:
    """Return a weak reference that is empty before the finalizers of what is collected run.

    It has a callback, as only those are cleared before any callback is called: from Python 3.15 on,
    the collector clears the others after the finalizers.
    """
    return weakref.ref(owner, _nothing)


def _nothing(*_: object) -> None: ...


def _end_or_hand_over(
    owner: weakref.ref[object], end: Callable[[], object], queue: object, process: int
) -> None:
    if owner() is not None:
        end()
    elif os.getpid() == process:  # a forked child ends nothing of its parent's
        Leftover(end, queue).hand_over()


class Leftover:
    """Something that another thread ends soon, and the exit of the program at the latest.

    `end` waits for whatever it has to; Ctrl-C leaves it to be called again. What else it raises is
    shown as if it had ended a thread. `queue` is the one that it needs open, if that is not its own
    to close.
    """

    _found: ClassVar[deque[Leftover]] = deque()  # by the collection under way
    _collector: ClassVar[int] = 0  # the thread that it runs on
    _waiting: ClassVar[deque[Leftover]] = deque()
    _at_work: ClassVar[_thread.LockType] = _thread.allocate_lock()

    def __init__(self, end: Callable[[], object], queue: object = None) -> None:
        self._end = end
        self._queue = queue
        # Reentrant: a signal handler may close the queue while this thread ends a leftover of it.
        self._ending = threading.RLock()
        self._under_way = False
        self._ended = False
        self._owner = os.getpid()
        # At the exit the newest finalizer runs first: this one before that of the queue it needs.
        self._finalizer = weakref.finalize(self, self._finish)

    def hand_over(self) -> None:
        """Let another thread end it: now, or after the collection that this thread is in.

        Waits for nothing, and may interrupt itself.
        """
        if self._collector == _thread.get_ident():
            self._found.append(self)
        else:
            self._waiting.append(self)
            self._have_ended()

    @classmethod
    def at_collection(
        cls,
        phase: str,
        _details: object,
        *,
        ident: Callable[[], int] = _thread.get_ident,  # here also where the program ends
    ) -> None:
        """Hand over what a collection has found once it stops: until then, the finalizers of the
        same garbage may use it, such as that of a wrapper around a file object.
        """
        if phase == "start":
            cls._collector = ident()
            return
        cls._collector = 0
        while cls._found:
            cls._waiting.append(cls._found[0])  # before it is forgotten, for end_those_of()
            cls._found.popleft()
        if cls._waiting:
            cls._have_ended()

    @classmethod
    def _have_ended(cls) -> None:
        """Start the thread, unless it is at work."""
        if cls._at_work.acquire(blocking=False):
            try:
                _thread.start_new_thread(_start_thread, ())
            except BaseException as refusal:
                cls._at_work.release()
                # No thread is left, or the program ends: the next call starts one, or the exit ends
                # it.
                if not isinstance(refusal, RuntimeError):
                    raise

    @classmethod
    def end_all(cls) -> None:
        """End what was handed over until there is none."""
        while True:
            try:
                while cls._waiting:
                    # Listed until it has ended, for end_those_of().
                    cls._waiting[0]._finish()
                    cls._waiting.popleft()
            finally:
                # Before the last look: what is handed over from here on starts a thread.
                cls._at_work.release()
            if not cls._waiting or not cls._at_work.acquire(blocking=False):
                return

    @classmethod
    def give_up(cls) -> None:
        """Let the next call of `hand_over` start a thread, as this one could not."""
        cls._at_work.release()

    @classmethod
    def end_those_of(cls, queue: object) -> None:
        """End what was handed over and needs that queue, here or on the other thread."""
        for leftover in [*cls._found, *cls._waiting]:
            if leftover._queue is queue:
                leftover._finish()

    @classmethod
    def end_if_many(cls) -> None:
        """End what was handed over where it piles up behind the other thread; as `end_waiting`."""
        cls.end_waiting(more_than=_MOST_WAITING)

    @classmethod
    def end_waiting(cls, *, more_than: int = 0) -> None:
        """End what was handed over, where it is more than that: here or on the other thread.

        For callers that hold no lock. Does nothing in a callback: the other thread may be ending
        what waits for the thread that calls it.
        """
        waiting = [leftover for leftover in list(cls._waiting) if not leftover._ended]
        if len(waiting) > more_than and not _in_callback():
            for leftover in waiting:
                leftover._finish()

    @classmethod
    def begin_anew(cls) -> None:
        """Forget what another process has to end, with its thread."""
        cls._found = deque()
        cls._collector = 0
        cls._waiting = deque()
        cls._at_work = _thread.allocate_lock()

    def _finish(self) -> None:
        # A thread of the parent may be ending it, which a forked child would wait for without end.
        if os.getpid() != self._owner:
            return
        with self._ending:
            if self._ended or self._under_way:  # then by this thread, below on its stack
                return
            failure = None
            self._under_way = True
            try:
                self._end()
            except Exception as escaped:
                failure = escaped
            finally:
                self._under_way = False
            # Before the program's own hook sees what failed, which may raise.
            self._ended = True
            self._end = _nothing  # it stays listed for a while, without memory
            self._finalizer.detach()
            if failure is not None:
                with suppress(Exception):
                    report_escaped(failure)


def _in_callback() -> bool:
    """Return whether this is a thread of a queue, which calls callbacks."""
    return threading.current_thread().name in _THREADS_OF_QUEUES


def _start_thread() -> None:
    """Start a thread that Python knows of. On one that it does not, which may wait for locks."""
    try:
        threading.Thread(target=Leftover.end_all, name="deepnvme-leftovers", daemon=True).start()
    except RuntimeError:  # no thread is left: this one is
        Leftover.end_all()
    except BaseException:
        Leftover.give_up()
        raise


gc.callbacks.append(Leftover.at_collection)
os.register_at_fork(after_in_child=Leftover.begin_anew)
