"""`Pending`: the operations of one queue that have not ended, what each keeps alive, and how they
end.

Submits them. Completes futures, from the queue's own thread (`run`) or from a thread that waits for
one of them (`wait_for`). It is all that futures and that thread know of a queue, so that a queue
nobody holds can be collected.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from deepnvme import _native
from deepnvme.errors import ForkedError, NVMeError, QueueFull, ShortReadError, io_error
from deepnvme.memory.buffers import Memory
from deepnvme.queue.future import SLICE_S, IOFuture

if TYPE_CHECKING:
    import asyncio

__all__ = ["Pending", "short_read_error"]

_SUCCEEDED, _END_OF_FILE, _CANCELLED = (
    int(_native.Ending.SUCCEEDED),
    int(_native.Ending.END_OF_FILE),
    int(_native.Ending.CANCELLED),
)


# What its error says of an operation, and its future, which holds its memory: a tuple, as it is
# made for each.
_Work: TypeAlias = (
    "tuple[IOFuture[Any], _native.Verb, _native.OpenFile, int, int, _native.AtEndOfFile]"
)


class Pending:
    """The operations under way, by number."""

    _living: ClassVar[weakref.WeakSet[Pending]] = weakref.WeakSet()

    def __init__(self, native: _native.Queue, backend: str, max_pending: int) -> None:
        self._native = native
        self._backend = backend
        self._max_pending = max_pending
        self._works: dict[int, _Work] = {}
        self._numbers = itertools.count()
        self._want_room: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._of_a_parent = False
        Pending._living.add(self)

    def submit(
        self,
        verb: _native.Verb,
        file: _native.OpenFile,
        memory: Memory | None,
        offset: int,
        at_end: _native.AtEndOfFile,
        *,
        patience_s: float | None,
    ) -> IOFuture[Any]:
        """Submit an operation, and keep what it needs until it has ended; for room, wait
        `patience_s`, None for ever.

        Raises:
            QueueFull: no room came in time.
        """
        address, asked = (memory.address, memory.nbytes) if memory else (0, 0)
        ticket = _native.Ticket()
        future: IOFuture[Any] = IOFuture(ticket, self, memory)
        number = next(self._numbers)
        wait_s = SLICE_S if patience_s is None else patience_s
        try:
            self._works[number] = (future, verb, file, offset, asked, at_end)
            while not self._native.submit(
                number, verb, file, address, asked, offset, at_end, ticket, wait_s
            ):
                if patience_s is not None:
                    raise QueueFull(self._max_pending)
        except BaseException:
            # what a signal handler raises comes also after it was: the drive may be at work
            if not ticket.taken:
                self._works.pop(number, None)
            raise
        return future

    def wait_for(self, ticket: _native.Ticket, timeout_s: float) -> bool:
        """Wait until that operation has ended, and complete what has; False when the time is up."""
        return self._native.wait_for(ticket, timeout_s, self._complete_unheard)

    def run(self) -> None:
        """Complete futures as operations end, until the queue is closed and drained.

        The queue's own thread.
        """
        while ended := self._native.wait_ended():
            for number, ending, done, error in ended:
                try:
                    self._complete(number, ending, done, error)
                except SystemExit:
                    # a callback's: it ends a thread without a word, and this one has more to do
                    continue
                except BaseException as escaped:
                    # a callback's, and none of those that concurrent.futures stops
                    told = (
                        type(escaped),
                        escaped,
                        escaped.__traceback__,
                        threading.current_thread(),
                    )
                    threading.excepthook(threading.ExceptHookArgs(told))

    async def room(self) -> None:
        """Wait on the running loop until an operation can be submitted at once."""
        import asyncio  # costs a third of importing this package, and whoever awaits has it

        loop = asyncio.get_running_loop()
        if self._of_a_parent:
            raise ForkedError(
                "this queue belongs to the parent process; a forked child makes its own"
            )
        while self._native.pending >= self._max_pending:
            told = loop.create_future()
            self._want_room.append((loop, told))
            # or the last one ended before it could tell
            if self._native.pending >= self._max_pending:
                await told

    def forget_parents(self) -> None:
        """In a forked child: what the parent submitted ends there, and would be waited for here for
        ever.
        """
        self._of_a_parent = True
        for future, verb, file, *_ in self._works.values():
            message = f"{verb.name.lower()} of {file.path} was submitted by the parent process"
            future._end_in_child(ForkedError(message))
        self._works.clear()

    def _complete_unheard(self, number: int, ending: int, done: int, error: int) -> bool:
        """Complete where that calls nobody back; False: left to the queue's own thread.

        A signal may interrupt it anywhere and it is called again then, so every step can be
        repeated.
        """
        work = self._works.get(number)
        if work is not None:
            error_of = None if ending == _SUCCEEDED else self._error_of(work, ending, done, error)
            if ending == _CANCELLED or not work[0]._end_unheard(done, error_of):
                return False
            self._works.pop(number, None)
        if self._want_room:
            self._tell_of_room()
        return True

    def _complete(self, number: int, ending: int, done: int, error: int) -> None:
        work = self._works.pop(number, None)
        self._tell_of_room()
        if work is None:
            return
        if ending == _CANCELLED:
            work[0]._end_cancelled()
        else:
            work[0]._end(done, self._error_of(work, ending, done, error))

    def _tell_of_room(self) -> None:
        """Wake all who wait for room.

        Takes no lock and may be interrupted anywhere: telling twice is harmless.
        """
        for each in tuple(self._want_room):
            loop, waiting = each
            with suppress(RuntimeError):  # that loop is closed: nobody waits on it
                loop.call_soon_threadsafe(_tell, waiting)
            with suppress(ValueError):  # another thread was faster
                self._want_room.remove(each)

    def _error_of(self, work: _Work, ending: int, done: int, error: int) -> NVMeError | None:
        if ending in (_SUCCEEDED, _CANCELLED):
            return None
        _, verb, file, offset, asked, at_end = work
        if ending == _END_OF_FILE:
            return short_read_error(
                at_end, path=file.path, offset=offset, asked=asked, done=done, backend=self._backend
            )
        return io_error(
            error,
            op=verb.name.lower(),
            path=file.path,
            offset=offset,
            asked=asked,
            done=done,
            backend=self._backend,
        )


def short_read_error(
    at_end: _native.AtEndOfFile, *, path: str, offset: int, asked: int, done: int, backend: str
) -> ShortReadError:
    """Compose the error of a read that found the end of the file where it should not."""
    why = "readinto() accepts fewer"
    if at_end is _native.AtEndOfFile.STOPS:  # the end was welcome, but not there
        why = (
            "the file was longer when it was opened or last written here: somebody else cut it "
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


def _tell(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _after_fork_in_child() -> None:
    for pending in list(Pending._living):
        pending.forget_parents()


os.register_at_fork(after_in_child=_after_fork_in_child)
