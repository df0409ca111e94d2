"""What a simulated step is made of: ops, memory that modules fetch into, the wire between ranks.

`TimedCarrier` carries out the ops of a plan in time alone, so that the executor's own walk is what
is simulated: a copy or an update is an event with a time, and the thread that walks waits by moving
its clock. Pure. Called by timeline.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from fractions import Fraction
from math import ceil

from infinity_engine.plan import Lane, LaneClocks, OpTime
from infinity_engine.plan.compute import ComputeRate
from infinity_engine.plan.ops import Op
from infinity_engine.units import NS_PER_S

__all__ = ["GATHERED", "ComputeTime", "FetchingRoom", "RankWire", "TimedCarrier", "TimedEvent"]

GATHERED = 2
"""Modules whose parameters are whole at once: one computes, the next one is gathered."""


class TimedEvent:
    """The end of an op, at `end_ns` of the clock of `carrier`."""

    __slots__ = ("_carrier", "end_ns")

    def __init__(self, carrier: TimedCarrier, end_ns: int) -> None:
        self._carrier = carrier
        self.end_ns = end_ns

    def done(self) -> bool:
        """Tell whether the walking thread has come to that time."""
        return self.end_ns <= self._carrier.now_ns

    def wait(self) -> None:
        """Let the walking thread do nothing until then."""
        self._carrier.wait_until(self.end_ns)


class TimedCarrier:
    """Times ops on these clocks; `now_ns` is the time that the walking thread has come to.

    `note` is called with each op and its time.
    """

    def __init__(self, clocks: LaneClocks, note: Callable[[Op, OpTime], None]) -> None:
        self.now_ns = 0
        self._clocks = clocks
        self._note = note

    def wait_until(self, ns: int) -> None:
        """Let the thread do nothing until then."""
        self.now_ns = max(self.now_ns, ns)

    def carry_out(self, op: Op, after: Sequence[TimedEvent]) -> TimedEvent | None:
        """Put an op into its lane; the walking thread makes updates on the host itself."""
        begin_ns = self.now_ns
        for event in after:
            begin_ns = max(begin_ns, event.end_ns)
        duration_ns = self._clocks.duration_ns(op.lane, op.amount)
        time = self._clocks.work(op.lane, duration_ns, after_ns=begin_ns)
        self._note(op, time)
        if op.lane is Lane.HOST:
            self.now_ns = time.end_ns
            return None
        return TimedEvent(self, time.end_ns)


class ComputeTime:
    """Calls return how long so many operations of forwards and of backwards take, in nanoseconds;
    no time where the rate is unknown.
    """

    def __init__(self, rate: ComputeRate | None) -> None:
        self._rate = None if rate is None else (Fraction(rate.forward), Fraction(rate.backward))
        self._known: dict[tuple[int, int], int] = {}  # modules are mostly alike

    def __call__(self, forward: int, backward: int) -> int:
        """Return it."""
        if self._rate is None:
            return 0
        work = forward, backward
        if work not in self._known:
            seconds = sum(flops / rate for flops, rate in zip(work, self._rate, strict=True))
            self._known[work] = ceil(seconds * NS_PER_S)
        return self._known[work]


class RankWire:
    """What ranks send one another, in turn; nothing where there is one, or its rate is unknown."""

    def __init__(self, ranks: int, bytes_per_s: float | None) -> None:
        self.busy_ns = 0
        self._others = ranks - 1
        self._bytes_per_s = bytes_per_s if ranks > 1 else None
        self._free_ns = 0
        self._used_ns: deque[int] = deque(maxlen=GATHERED)  # the ends of the last modules

    def note_use(self, end_ns: int) -> None:
        """Note when a module was done with its parameters."""
        self._used_ns.append(end_ns)

    def gather(self, nbytes: int, after_ns: int) -> int:
        """Gather a module's parameters, one module ahead of the one that computes; return when it
        can compute.
        """
        if self._bytes_per_s is None or not nbytes:
            return after_ns
        freed_ns = self._used_ns[0] if len(self._used_ns) == GATHERED else 0
        return max(self.exchange(nbytes, freed_ns), after_ns)

    def exchange(self, nbytes: int, after_ns: int) -> int:
        """Let each rank send all others so many bytes; return when they have arrived."""
        if self._bytes_per_s is None or not nbytes:
            return after_ns
        duration_ns = ceil(nbytes * self._others / Fraction(self._bytes_per_s) * NS_PER_S)
        self._free_ns = max(self._free_ns, after_ns) + duration_ns
        self.busy_ns += duration_ns
        return self._free_ns


class FetchingRoom:
    """The device memory that modules fetch into: `limit` bytes, beside `staged` ones of the update.

    What was used longest ago makes room, as in the fetcher while modules run in the same order.
    """

    def __init__(self, limit: int, staged: int, on_their_way: int) -> None:
        self._limit = limit
        self._staged = staged
        self._all = max(staged, limit) + on_their_way
        # By module, in the order of their uses: bytes, and the end of the last use.
        self._resident: dict[int, tuple[int, int]] = {}
        self._used = 0  # bytes of these
        # Bytes that are free from a time on: the device may still read them.
        self._leaving: deque[tuple[int, int]] = deque()

    def __contains__(self, module: int) -> bool:
        return module in self._resident

    @property
    def free(self) -> int:
        """The bytes of the limit that are left."""
        return self._limit - self._used

    def end_of_use_ns(self, module: int) -> int:
        """Return when a module's parameters arrive, or were used last."""
        return self._resident[module][1]

    def use(self, module: int, nbytes: int, end_ns: int) -> None:
        """Note that a module's parameters are there, and used until then."""
        before, _ = self._resident.pop(module, (0, 0))
        self._used += nbytes - before
        self._resident[module] = nbytes, end_ns

    def make(self, nbytes: int) -> int:
        """Evict what was used longest ago until so many bytes are free; return when they are."""
        ready_ns = 0
        while self.free < nbytes and self._resident:
            gone, used_ns = self._resident.pop(next(iter(self._resident)))
            self._used -= gone
            ready_ns = max(ready_ns, used_ns)
        return ready_ns

    def evict_before(self, running: int, free_ns: int) -> int:
        """Evict the first module before the running one, from that time on; return its bytes, 0
        where there is none.
        """
        module = min(self._resident, default=running)
        if module >= running:
            return 0
        nbytes, _ = self._resident.pop(module)
        self._used -= nbytes
        self._leaving.append((nbytes, free_ns))
        return nbytes

    def has_room(self, nbytes: int, thread: TimedCarrier) -> bool:
        """Tell whether staging sets leave room for so much; wait for what is leaving."""
        while True:
            while self._leaving and self._leaving[0][1] <= thread.now_ns:
                self._leaving.popleft()
            left = self._all - self._staged - self._used - sum(gone for gone, _ in self._leaving)
            if nbytes <= left or not self._leaving:
                return nbytes <= left
            thread.wait_until(self._leaving[0][1])

    def end_update(self) -> None:
        """Note that the update has ended: it has no staging sets any more."""
        self._staged = 0
