"""One submitted operation: what it does, what it waits for, and the failure that it ends in or
inherits.

Pure bookkeeping, the same on every accelerator. Runs nothing and knows no time: the accelerators
subclass it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from infinity_engine.accel.base import Cost, Event, Stream
from infinity_engine.kept_errors import kept

__all__ = ["Action", "Copy", "Failure", "Mark", "Operation", "OperationOwner", "Submission", "Work"]


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """Bytes go from one flat tensor to another."""

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
    """Nothing: an event that was recorded."""


Action = Copy | Work | Mark
"""What an operation does."""


class Failure:
    """An error of an operation, shared by those that inherit it, and since when the host knows."""

    __slots__ = ("_told_at", "error")

    def __init__(self, error: BaseException) -> None:
        self.error = kept(error)
        self._told_at: int | None = None

    @property
    def told(self) -> bool:
        """Whether the error was raised to the host."""
        return self._told_at is not None

    def tell(self, submitted: int) -> None:
        """Note that the host knows, when `submitted` operations have been submitted."""
        if self._told_at is None:
            self._told_at = submitted

    def told_before(self, number: int) -> bool:
        """Tell whether the host knew when it submitted operation `number`."""
        return self._told_at is not None and self._told_at <= number


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Submission:
    """What was asked for: `previous` is what comes before it in its stream, `after` all else that
    it waits for.
    """

    number: int
    stream: Stream
    action: Action
    previous: Operation | None
    after: Sequence[Operation]


class OperationOwner(Protocol):
    """The accelerator of an operation, as its event needs it."""

    def _has_ended(self, operation: Any) -> bool: ...

    def _wait(self, operation: Any) -> None: ...


class Operation(Event):
    """One operation of one accelerator.

    Numbers count its submissions from 0 on: an order that all streams keep.
    """

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
            raise RuntimeError(f"{self.name} has ended: what it did is forgotten")
        return self._action

    def inherited(self) -> Failure | None:
        """Return the failure of what it depends on, once all of that has ended.

        In its stream it follows a failure that the host knew of when it submitted this: that is a
        new beginning.
        """
        previous = self._previous
        if (
            previous is not None
            and previous.failure is not None
            and not previous.failure.told_before(self.number)
        ):
            return previous.failure
        for other in self._after:
            if other.failure is not None:
                # Named although the host knew: to be told once more, and what follows in the stream
                # fails until then.
                known = other.failure.told_before(self.number)
                return Failure(other.failure.error) if known else other.failure
        return None

    def settle(self, failure: Failure | None) -> None:
        """Note how it ended and let go of all that it used."""
        self.failure = failure
        self._action = None
        self._previous = None
        self._after = ()
