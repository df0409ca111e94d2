"""Errors kept to be raised later, or more than once, without the buffers of their tracebacks."""

from __future__ import annotations

import copy
import traceback
from typing import TypeVar

from infinity_engine.errors import InfinityError

__all__ = ["again", "kept", "raise_any"]

_Error = TypeVar("_Error", bound=BaseException)


# [Note: errors that are kept] The traceback of an error has the frames that it passed. Their locals
# have buffers, and often the error itself: a cycle, which keeps the buffers until Python's
# collector runs. So a function that keeps an error, in an object or in a local beyond its except
# clause, keeps `kept(error)` and raises `again(error)`.
def kept(error: _Error) -> _Error:
    """Return an error, caught where this is called, without references to anything else.

    [Note: errors that are kept]

    An InfinityError says everything in its message. Of other errors, which may be bugs, the frames
    below the caller stay.
    """
    passed: BaseException | None = error
    while passed is not None:
        at = passed.__traceback__
        # Drops the locals of frames that have returned; those still running keep theirs.
        traceback.clear_frames(at)
        passed.__traceback__ = (
            # tb_next leaves out the caller's own frame, which still runs and keeps its locals.
            None if at is None or isinstance(passed, InfinityError) else at.tb_next
        )
        # What was being handled when it was raised: an error with frames of its own.
        passed.__context__ = None
        # Causes are shown with it, so they stay, without their frames.
        passed = passed.__cause__
    return error


def again(error: _Error) -> _Error:
    """Return a copy of an error that is kept, to be raised: [Note: errors that are kept]."""
    try:
        # A copy, as raising adds to the traceback: the kept error would grow with every raise.
        copied = copy.copy(error)
    except Exception:  # of a class that cannot be copied
        return error
    # copy.copy does not copy the cause.
    if error.__cause__ is not None:
        copied.__cause__ = error.__cause__
    return copied.with_traceback(error.__traceback__)


def raise_any(error: BaseException | None) -> None:
    """Raise a copy of an error that is kept, if there is one: [Note: errors that are kept]."""
    if error is not None:
        raise again(error)
