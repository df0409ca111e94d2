"""`Pending`: the operations of one queue that have not ended, what each keeps alive, and how they end.

Completes futures, from the queue's own thread (`run`) or from a thread that waits for one of them (`wait_for`). It is
all that futures and that thread know of a queue, so that a queue nobody holds can be collected.
"""

from __future__ import annotations

import errno
import itertools
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepnvme import _native
from deepnvme.buffers import Memory
from deepnvme.errors import ForkedError, NVMeError, ShortReadError, io_error
from deepnvme.future import IOFuture

if TYPE_CHECKING:
    import asyncio

__all__ = ["Pending"]

_SUCCEEDED, _END_OF_FILE, _CANCELLED = (
    int(_native.Ending.SUCCEEDED),
    int(_native.Ending.END_OF_FILE),
    int(_native.Ending.CANCELLED),
)


@dataclass
class _Work:
    """What has to outlive an operation, and what its error says."""

    future: IOFuture[Any]
    verb: _native.Verb
    path: str
    offset: int
    asked: int
    memory: Memory | None

    @property
    def op(self) -> str:
        return self.verb.name.lower()


class Pending:
    """The operations under way, by number."""

    def __init__(self, native: _native.Queue, backend: str) -> None:
        self._native = native
        self._backend = backend
        self._works: dict[int, _Work] = {}
        self._numbers = itertools.count()
        self._room_lock = threading.Lock()
        self._want_room: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def add(
        self, verb: _native.Verb, path: str, offset: int, asked: int, memory: Memory | None
    ) -> tuple[int, _native.Ticket, IOFuture[Any]]:
        """Keep what an operation needs until it has ended, from before it is submitted."""
        ticket = _native.Ticket()
        future: IOFuture[Any] = IOFuture(ticket, self)
        number = next(self._numbers)
        self._works[number] = _Work(future, verb, path, offset, asked, memory)
        return number, ticket, future

    def drop(self, number: int) -> None:
        """Forget one that was not submitted after all."""
        del self._works[number]

    def wait_for(self, ticket: _native.Ticket, timeout_s: float) -> bool:
        """Wait until that operation has ended, and complete what has; False when the time is up."""
        return self._native.wait_for(ticket, timeout_s, self._complete_unheard)

    def run(self) -> None:
        """Complete futures as operations end, until the queue is closed and drained. The queue's own thread."""
        while ended := self._native.wait_ended():
            for number, ending, done, error in ended:
                self._complete(number, ending, done, error)

    async def room(self, most: int) -> None:
        """Wait on the running loop until fewer than `most` operations are pending."""
        import asyncio  # costs a third of importing this package, and whoever awaits has it

        loop = asyncio.get_running_loop()
        while self._native.pending >= most:
            told = loop.create_future()
            with self._room_lock:
                self._want_room.append((loop, told))
            if self._native.pending >= most:  # or the last one ended before it could tell
                await told

    def forget_parents(self) -> None:
        """In a forked child: what the parent submitted ends there, and would be waited for here for ever."""
        for work in self._works.values():
            work.future._end_in_child(ForkedError(f"{work.op} of {work.path} was submitted by the parent process"))
        self._works.clear()

    def _complete_unheard(self, number: int, ending: int, done: int, error: int) -> bool:
        """Complete where that calls nobody back; False: left to the queue's own thread.

        A signal may interrupt it anywhere and it is called again then, so every step can be repeated.
        """
        if ending != _SUCCEEDED:
            return False
        work = self._works.get(number)
        if work is None:
            return True
        work.memory = None
        if not work.future._end_unheard(done):
            return False
        self._works.pop(number, None)
        self._tell_of_room()
        return True

    def _complete(self, number: int, ending: int, done: int, error: int) -> None:
        work = self._works.get(number)
        if work is None:
            return
        work.memory = None  # before the future ends: whoever it wakes may resize or hand on the memory at once
        future = work.future
        if ending == _CANCELLED:
            super(IOFuture, future).cancel()
            future.set_running_or_notify_cancel()
        elif ending != _SUCCEEDED:
            future.set_exception(self._error(work, ending, done, error))
        elif future.done():  # by a thread that was interrupted before it could say so
            future._end_unheard(done)
        else:
            future.set_result(done)
        self._works.pop(number, None)
        self._tell_of_room()

    def _tell_of_room(self) -> None:
        if not self._want_room:
            return
        with self._room_lock:
            told, self._want_room = self._want_room, []
        for loop, waiting in told:
            try:
                loop.call_soon_threadsafe(_tell, waiting)
            except RuntimeError:  # that loop is closed: nobody waits on it
                continue

    def _error(self, work: _Work, ending: int, done: int, error: int) -> NVMeError:
        if ending != _END_OF_FILE:
            return io_error(
                error,
                op=work.op,
                path=work.path,
                offset=work.offset,
                asked=work.asked,
                done=done,
                backend=self._backend,
            )
        message = (
            f"{work.op} of {work.asked} B at offset {work.offset} found the end of the file after {done} B; "
            "readinto() accepts fewer"
        )
        return ShortReadError(
            errno.ENODATA,
            message,
            op=work.op,
            path=work.path,
            offset=work.offset,
            asked=work.asked,
            done=done,
            backend=self._backend,
        )


def _tell(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
