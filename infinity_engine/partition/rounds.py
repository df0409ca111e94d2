"""A collective as rounds, each one of torch's, and `Pending`: one collective under way here.

Knows in which order the steps follow; starts and ends them when it is called. Calls nothing of
torch.distributed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from infinity_engine.accel import Event
from infinity_engine.errors import CollectiveError
from infinity_engine.partition.header import Header

__all__ = [
    "AllGather",
    "Exchange",
    "HostWork",
    "Issuer",
    "NoWire",
    "Pending",
    "Round",
    "Rounds",
    "Wire",
    "Work",
    "ignore",
    "nothing",
]


@dataclass(frozen=True, slots=True, eq=False)
class AllGather:
    """Every rank gets the bytes of all, in the ranks' order; as many from each."""

    mine: torch.Tensor
    into: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """Every rank gets from each the bytes for it: `sent` of `mine` each, `received` from each."""

    mine: torch.Tensor
    into: torch.Tensor
    sent: Sequence[int]
    received: Sequence[int]


class NoWire:
    """Nothing is sent: there is one rank, and packing is all that there is to do."""


Wire = AllGather | Exchange | NoWire


def nothing() -> None:
    """Pack or unpack nothing."""


def _no_rounds(_announced: Sequence[int]) -> Sequence[Round]:
    return ()


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """One collective of torch, between what fills its buffers and what empties them.

    All are flat uint8 tensors.
    """

    wire: Wire
    pack: Callable[[], object] = nothing
    unpack: Callable[[], object] = nothing


# Makes the rounds, from the number that each rank has announced, such as how many bytes it shares.
Rounds = Callable[[Sequence[int]], Sequence[Round]]


class HostWork(Protocol):
    """Work under way that the host waits for."""

    def done(self) -> bool:
        """Tell whether it has ended."""

    def wait(self) -> None:
        """Block until it has, and raise what it failed with."""

    def block(self, most_s: float) -> None:
        """Block until it has ended, but no longer than that; raises nothing."""


Work = HostWork | Event  # Something under way: events are of a device.


class Issuer(NamedTuple):
    """What starts a round; `in_stream`: rounds follow one another in a GPU's stream, without the
    host.
    """

    issue: Callable[[Round], Work]
    in_stream: bool


class Pending:
    """One collective under way: first the headers, then one round after another."""

    def __init__(
        self,
        header: Header,
        rounds: Rounds,
        issuer: Issuer,
        *,
        ended: Callable[[BaseException | None], object],
        position: int,
    ) -> None:
        self._header = header
        self.position = position  # among those of all sequences that keep the order of all ranks
        self.ended = False
        self._doubted = False
        self.error: CollectiveError | None = None
        self.since = time.monotonic()
        self.announced: Sequence[int] = ()
        self._make_rounds = rounds
        self._rounds: list[Round] = []
        self._issuer = issuer
        self._tell = ended
        self._work: Work | None = None

    @property
    def op(self) -> str:
        """What it is, in messages."""
        return self._header.op

    @property
    def number(self) -> int:
        """Which one it is of its sequence."""
        return self._header.number

    @property
    def work(self) -> Work | None:
        """The work that was started last, and that is not known to have ended."""
        return self._work

    @property
    def issued(self) -> bool:
        """Whether all of its rounds were started, so that the next collective may start its own."""
        return not (self._rounds or self.waits_for_headers)

    def doubt(self) -> bool:
        """Note that another rank has failed while this is under way; tell whether it was noted."""
        was_doubted, self._doubted = self._doubted, True
        return was_doubted

    def agreed(self, nbytes: Sequence[int]) -> None:
        """Note that all ranks do this, and what each announced, such as bytes that it shares."""
        self.announced = tuple(nbytes)
        # Dropped once used: what it refers to, such as buffers, may go with the rounds.
        self._rounds, self._make_rounds = list(self._make_rounds(nbytes)), _no_rounds
        self.since = time.monotonic()

    @property
    def waits_for_headers(self) -> bool:
        """Whether the ranks have not agreed yet."""
        return self._make_rounds is not _no_rounds

    def go_on(self, *, may_issue: bool) -> bool:
        """Start and end rounds, as far as they can; tell whether the last has ended."""
        while True:
            # In a stream the next round may be started behind one that is under way.
            if self._work is not None and not (self._issuer.in_stream and self._rounds):
                if not self._work.done():
                    return False
                # Raises what it failed with, and unpacks.
                self._work.wait()
                self._work = None
            if not self._rounds:
                return True
            if not may_issue:
                return False
            self._work = self._issuer.issue(self._rounds.pop(0))
            self.since = time.monotonic()

    def end(self, error: CollectiveError | None) -> None:
        """Note how it ended, and drop the references to all that it used."""
        self.ended, self.error = True, error
        # Called once and last: it may start the next collective, which must find this one ended.
        tell, self._tell = self._tell, ignore
        self._rounds, self._make_rounds, self._work = [], _no_rounds, None
        tell(error)


def ignore(_error: BaseException | None) -> None:
    """Do nothing about the end of a collective."""
