"""`Lifetimes`: what each call of a block holds until its graph goes, where, and from when to when.

Graphs end anywhere, also within a lock of telemetry. So an end is only noted there with its time,
and counted by `settle`, which the engine's calls make.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import NamedTuple

from infinity_engine.lanes.meter import Meter

__all__ = ["CallLife", "HeldAs", "Lifetimes"]


class HeldAs(Enum):
    """What is held of a block's activations; the value names it in reports."""

    KEPT = "kept"  # where modules compute: what it saved, or the inputs to run it again
    AGAIN = "made again"  # where modules compute, from its second run on
    HOST = "on the host"
    DRIVES = "on drives"


class _HeldBytes(NamedTuple):
    """Bytes that one call holds in one place, and since when."""

    held: HeldAs
    nbytes: int
    start_ns: int


class CallLife:
    """What one call of a block holds; it ends with the last saved tensor that knows it."""

    __slots__ = ("_call", "_lifetimes", "_saved")

    def __init__(self, block: str, lifetimes: Lifetimes) -> None:
        self._call = _Call(block)
        self._lifetimes = lifetimes
        self._saved = 0

    # Runs wherever a graph goes, so it only appends.
    def __del__(self) -> None:
        self._lifetimes.note_end(self._call)

    @property
    def kept(self) -> int:
        """The bytes that it keeps where modules compute, but for what is made again."""
        return self._call.kept

    def hold(self, held: HeldAs, nbytes: int, *, saved: int) -> None:
        """Note that its block has saved so much and ended, and what is held from here on."""
        self._saved = saved
        self._lifetimes.begin(self._call, held, nbytes)

    def make_again(self) -> None:
        """Note that its block runs again; what a run before this has made is gone."""
        self._lifetimes.make_again(self._call, self._saved)


class _Call:
    """The parts of one call, which outlive it."""

    __slots__ = ("block", "parts")

    def __init__(self, block: str) -> None:
        self.block = block
        self.parts: list[_HeldBytes] = []

    @property
    def kept(self) -> int:
        return sum(part.nbytes for part in self.parts if part.held is HeldAs.KEPT)


class Lifetimes:
    """Counts what calls hold, and records each part as a span when it has ended."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._ended: deque[tuple[_Call, int]] = deque()
        self._kept = 0
        self._coming = 0

    @property
    def kept(self) -> int:
        """The bytes that calls keep where modules compute, but for what is made again."""
        self.settle()
        return self._kept

    @property
    def kept_soon(self) -> int:
        """The same, with what the block that runs is going to keep."""
        return self.kept + self._coming

    def expect(self, nbytes: int) -> None:
        """Note what the block that is about to run is going to keep there; 0: none runs."""
        self._coming = nbytes

    def now_ns(self) -> int:
        """Return the time on the clock of its spans."""
        return self._meter.now_ns()

    def begin(self, call: _Call, held: HeldAs, nbytes: int) -> None:
        """Count what a call holds from now on."""
        call.parts.append(_HeldBytes(held, nbytes, self.now_ns()))
        self._coming = 0
        if held is HeldAs.KEPT:
            self._kept += nbytes

    def make_again(self, call: _Call, nbytes: int) -> None:
        """Count what a call makes again from now on."""
        now_ns = self.now_ns()
        for part in [part for part in call.parts if part.held is HeldAs.AGAIN]:
            call.parts.remove(part)
            self._record(call, part, now_ns)
        call.parts.append(_HeldBytes(HeldAs.AGAIN, nbytes, now_ns))

    def note_end(self, call: _Call) -> None:
        """Note when the graph of a call has gone."""
        self._ended.append((call, self.now_ns()))

    def settle(self) -> None:
        """Count no more the calls whose graphs have gone."""
        while self._ended:
            call, end_ns = self._ended.popleft()
            self._kept -= call.kept
            for part in call.parts:
                self._record(call, part, end_ns)

    def _record(self, call: _Call, part: _HeldBytes, end_ns: int) -> None:
        if part.nbytes:
            self._meter.record_hold(
                call.block,
                part.held.value,
                part.nbytes,
                start_ns=part.start_ns,
                end_ns=max(end_ns, part.start_ns),
            )
