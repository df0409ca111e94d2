"""One submitted operation: what it does, what it waits for, and the failure that it ends in.

Bookkeeping, the same on every accelerator. Runs nothing and knows no time: the accelerators
subclass it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from infinity_engine.accel.base import Cost, Event, Stream
from infinity_engine.kept_errors import kept

__all__ = ["Action", "Copy", "Failure", "Mark", "Operation", "OperationOwner", "Submission", "Work"]


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """Copies the bytes of one flat tensor to another."""

    target: torch.Tensor
    source: torch.Tensor

    @property
    def nbytes(self) -> int:
        """How many bytes go."""
        return self.target.numel()


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Device work."""

    call: Callable[[], object]
    cost: Cost


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """Does nothing: the operation is an event that was recorded."""


Action = Copy | Work | Mark  # What an operation does.


class Failure:
    """An error of an operation, shared by those that inherit it, and when the host saw it."""

    __slots__ = ("_reported_at", "error")

    def __init__(self, error: BaseException) -> None:
        # Without the frames of its traceback: their locals hold the operation's tensors.
        self.error = kept(error)
        self._reported_at = math.inf  # how many operations were submitted by then

    @property
    def is_reported(self) -> bool:
        """Whether the error was raised on the host."""
        return self._reported_at < math.inf

    def mark_reported(self, submitted: int) -> None:
        """Note that the host sees the error, when `submitted` operations were submitted."""
        # Only the first report counts: after it, the host submits in knowledge of the error.
        self._reported_at = min(self._reported_at, submitted)

    def was_reported_before(self, number: int) -> bool:
        """Tell whether the error was raised on the host before it submitted operation `number`."""
        return self._reported_at <= number


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Submission:
    """What the caller asked for: to go after `previous` of its stream and all of `after`."""

    number: int
    stream: Stream
    action: Action
    previous: Sequence[Operation]
    after: Sequence[Operation]


class OperationOwner(Protocol):
    """The part of an accelerator that its operations' events need."""

    def _has_ended(self, operation: Any) -> bool: ...

    def _wait(self, operation: Any) -> None: ...


class Operation(Event):
    """One operation. Numbers count an accelerator's submissions, an order that all streams keep."""

    def __init__(self, owner: OperationOwner, submission: Submission) -> None:
        self.owner = owner
        self.number = submission.number
        self.stream = submission.stream
        self.name = f"{type(submission.action).__name__.lower()} {self.number}"
        self.failure: Failure | None = None
        self._action: Action | None = submission.action
        self._previous = submission.previous
        self._after = submission.after

    def done(self) -> bool:
        """Tell whether it has ended."""
        return self.owner._has_ended(self)

    def wait(self) -> None:
        """Block the host until it has ended, and raise what it failed with."""
        self.owner._wait(self)

    @property
    def action(self) -> Action:
        """What it does, until it has ended."""
        if self._action is None:
            raise RuntimeError(f"{self.name} has ended and keeps no record of its action")
        return self._action

    def inherited(self) -> Failure | None:
        """Return the failure of the operations that it depends on, once all of those have ended.

        An operation submitted to a stream after the host has seen the stream's failure does not
        inherit it: a new beginning.
        """
        for previous in self._previous:
            if previous.failure is not None and not previous.failure.was_reported_before(
                self.number
            ):
                return previous.failure
        for other in self._after:
            if other.failure is not None:
                # Named in `after` although the host knew: reported once more, and operations behind
                # this one in its stream fail until then.
                known = other.failure.was_reported_before(self.number)
                return Failure(other.failure.error) if known else other.failure
        return None

    def finish(self, failure: Failure | None) -> None:
        """Note how it ended and drop the references to all that it used."""
        self.failure = failure
        # An event often outlives its operation: it must not keep the tensors alive.
        self._action = None
        self._previous = ()
        self._after = ()
