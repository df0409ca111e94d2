"""`Transfer`: one move under way, as a chain of hops. Ends in a byte count or an error.

Starts a hop when the one before has ended, in the thread that polls or waits and in no other; so
the caller alone determines what starts when. Completion belongs to each hop: nothing waits for
everything and compares counts.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from operator import methodcaller
from typing import TYPE_CHECKING, Protocol

from deepnvme import IOFuture, NVMeError
from infinity_engine.errors import InfinityError, TransferError
from infinity_engine.kept_errors import again, kept

if TYPE_CHECKING:
    from infinity_engine.accel import Event

__all__ = ["CopyHop", "Hop", "Hops", "IOHop", "PlannedHop", "Transfer", "transfer_error"]


_DONE = methodcaller("done")  # of a Hop or a future, without a frame for each that is asked


class Hop(Protocol):
    """Bytes in flight over one link: an I/O or a copy."""

    def done(self) -> bool:
        """Tell whether it has ended."""

    def wait(self) -> int:
        """Wait until it has ended; return the bytes moved, or raise the error that stopped it."""


class IOHop:
    """Reads or writes that belong together: the pieces of one buffer on several drives.

    `check` is called when all of them have ended well; it returns the error in what was read, if
    there is one.
    """

    def __init__(
        self,
        futures: Sequence[IOFuture[int]],
        what: str = "",
        check: Callable[[], TransferError | None] | None = None,
    ) -> None:
        self._futures = futures
        self._what = what
        self._check = check
        self._wrong: TransferError | None = None

    def done(self) -> bool:
        """Tell whether all of them have ended."""
        return all(map(_DONE, self._futures))

    def wait(self) -> int:
        """Wait for all of them, also when one fails; raise the first that did."""
        failed: NVMeError | CancelledError | None = None
        moved = 0
        # Every one, also after a failure: the memory must not be let go while the drive uses it.
        for future in self._futures:
            try:
                moved += future.result()
            except (NVMeError, CancelledError) as error:
                failed = failed or error
                kept(error)  # each future keeps its own
        if failed is not None:
            self._check = None  # it refers to the memory that was to be read into
            raise transfer_error(failed, self._what) from failed.with_traceback(None)
        # Checked once: after this wait the caller may change what was read.
        if self._check is not None:
            self._wrong = self._check()
            self._check = None  # after the check: an interrupted one is repeated
        if self._wrong is not None:
            raise again(self._wrong)
        return moved


class Hops:
    """Several hops as one, perhaps none."""

    def __init__(self, hops: Sequence[Hop]) -> None:
        self._hops = tuple(hops)

    def done(self) -> bool:
        """Tell whether all of them have ended."""
        return all(map(_DONE, self._hops))

    def wait(self) -> int:
        """Wait for all of them, also when one fails; raise the first that did."""
        failed: TransferError | None = None
        moved = 0
        for hop in self._hops:
            try:
                moved += hop.wait()
            except TransferError as error:
                # The others are waited for first: their memory may go once this raises.
                failed = failed or kept(error)
        if failed is not None:
            raise again(failed)
        return moved


class CopyHop:
    """A copy between HOST and DEVICE."""

    def __init__(self, event: Event, nbytes: int, what: str) -> None:
        self.event = event
        self._nbytes = nbytes
        self._what = what

    def done(self) -> bool:
        """Tell whether its event has passed."""
        return self.event.done()

    def wait(self) -> int:
        """Wait for its event."""
        try:
            self.event.wait()
        # Says everything already; other errors get the name and the size of the copy.
        except InfinityError:
            raise
        except Exception as error:
            raise TransferError(
                errno=errno.EIO, path=self._what, offset=0, asked=self._nbytes, done=0
            ) from kept(error)
        return self._nbytes


@dataclass(frozen=True, slots=True)
class PlannedHop:
    """A hop that has not begun: how to start it, and what to note when it has ended or failed.

    `undo` is called when it failed, and when it never began because an earlier hop failed.
    """

    start: Callable[[], Hop | None]  # None: there is nothing to move
    finish: Callable[[], None]
    undo: Callable[[], None]


class Transfer:
    """The hops of one move, in order. One thread drives it, by polling or waiting."""

    def __init__(self, stages: Sequence[PlannedHop]) -> None:
        # Reversed, as the next one is popped from the end.
        self._stages = list(reversed(stages))
        self._stage: PlannedHop | None = None
        self._hop: Hop | None = None
        self._moved = 0
        self._error: BaseException | None = None
        self._reported = False
        # Its first hop starts at once, in the thread that made it.
        self.poll()

    @property
    def event(self) -> Event | None:
        """The event of the copy under way, for streams that wait for it; None before and after.

        When it has passed, the record's `arriving` has the bytes.
        """
        return self._hop.event if isinstance(self._hop, CopyHop) else None

    @property
    def error(self) -> BaseException | None:
        """The error that stopped it; None while there is none."""
        return self._error

    @property
    def unreported(self) -> BaseException | None:
        """The error that stopped it, until `result` has raised it."""
        return None if self._reported else self._error

    def take_error(self) -> BaseException | None:
        """Return the error that stopped it, as reported; None where it did not fail."""
        self._reported = True
        return self._error

    def done(self) -> bool:
        """Tell whether it has ended, well or not. Starts nothing."""
        return self._stage is None and not self._stages

    def poll(self) -> bool:
        """Start what can start without waiting; tell whether the transfer has ended."""
        while self._stage is not None or self._stages:
            if self._stage is None:
                self._begin()
            # A stage without a hop has nothing to move: it ends at once.
            elif self._hop is not None and not self._hop.done():
                return False
            else:
                self._end()
        return True

    def result(self) -> int:
        """Wait until it has ended; return the bytes of all hops.

        Raises:
            TransferError: a hop failed. The data is where it was before that hop.
        """
        self.wait()
        if self._error is not None:
            self._reported = True
            raise again(self._error)
        return self._moved

    def wait(self) -> None:
        """Wait until it has ended, well or not."""
        while self._stage is not None or self._stages:
            if self._stage is None:
                self._begin()
            else:
                self._end()

    def _begin(self) -> None:
        stage = self._stages.pop()
        try:
            self._hop = stage.start()
        # An error is kept for `result`: the thread that polls may be in another call.
        except Exception as error:
            self._stop(stage, transfer_error(error) if isinstance(error, NVMeError) else error)
        except BaseException:
            # An interrupt, raised at once. A later call of result() raises that the move was
            # cancelled.
            self._stop(stage, transfer_error(CancelledError()))
            self._reported = True
            raise
        else:
            self._stage = stage

    def _end(self) -> None:
        """Wait for the hop under way, and note its end."""
        assert self._stage is not None, "only a hop that began can end"
        try:
            moved = self._hop.wait() if self._hop is not None else 0
        except Exception as error:
            self._stop(self._stage, error)
        else:
            # Cleared first: `finish` may look at this transfer.
            stage, self._stage, self._hop = self._stage, None, None
            self._moved += moved
            stage.finish()

    def _stop(self, stage: PlannedHop, error: BaseException) -> None:
        self._stage = self._hop = None
        # The one that failed first, then those that never began, in their order.
        failed = [stage, *reversed(self._stages)]
        self._stages.clear()
        self._error = kept(error)
        for undone in failed:
            undone.undo()


def transfer_error(error: NVMeError | CancelledError, what: str = "") -> TransferError:
    """Return the engine's error for one of deepnvme's; `what` names the data in flight."""
    if isinstance(error, CancelledError):
        return TransferError(errno=errno.ECANCELED, path="", offset=0, asked=0, done=0, what=what)
    return TransferError(
        errno=error.errno or errno.EIO,
        path=error.filename or "",
        offset=error.offset or 0,
        asked=error.asked or 0,
        done=error.done or 0,
        what=what,
    )
