"""What a simulated step is made of: ops, memory that modules fetch into, the wire between ranks.

`TimedCarrier` carries out the ops of a plan in time alone, so that the executor's own walk is what
is simulated: a copy or an update is an event with a time, and the thread that walks waits by moving
its clock. Pure. Called by timeline.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from math import ceil

from infinity_engine.plan import Lane, LaneClocks, OpTime
from infinity_engine.plan.compute import ComputeRate
from infinity_engine.plan.ops import Op
from infinity_engine.schedule import ResidentSet, Use
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
        if self.end_ns > self._carrier.now_ns:
            self._carrier.wait_until(self.end_ns)


class TimedCarrier:
    """Times ops on these clocks; `now_ns` is the time that the walking thread has come to.

    Each op comes to the end of `done`, with its time.
    """

    def __init__(self, clocks: LaneClocks, done: list[tuple[Op, OpTime]]) -> None:
        self.now_ns = 0
        self._clocks = clocks
        self._done = done

    def wait_until(self, ns: int) -> None:
        """Let the thread do nothing until then."""
        self.now_ns = max(self.now_ns, ns)

    def carry_out(self, op: Op, after: Sequence[TimedEvent]) -> TimedEvent | None:
        """Put an op into its lane; the walking thread makes updates on the host itself."""
        begin_ns = self.now_ns
        for event in after:
            begin_ns = event.end_ns if event.end_ns > begin_ns else begin_ns
        time = self._clocks.carry(op, begin_ns)
        self._done.append((op, time))
        if op.lane is Lane.HOST:
            self.now_ns = time.end_ns
            return None
        return TimedEvent(self, time.end_ns)


class ComputeTime:
    """Calls return how long so many operations of forwards, of backwards and of forwards that run
    again take, in nanoseconds, at a `part` of the rate; no time where that is unknown.
    """

    def __init__(self, rate: ComputeRate | None, part: float = 1.0) -> None:
        self._rate = (
            None
            if rate is None
            else [Fraction(flops_per_s) * Fraction(part) for flops_per_s in rate]
        )
        self._known: dict[tuple[int, int, int], int] = {}  # modules are mostly alike

    def __call__(self, forward: int, backward: int = 0, again: int = 0) -> int:
        """Return it."""
        if self._rate is None:
            return 0
        work = forward, backward, again
        if work not in self._known:
            seconds = sum(flops / rate for flops, rate in zip(work, self._rate, strict=True))
            self._known[work] = ceil(seconds * NS_PER_S)
        return self._known[work]


class RankWire:
    """What ranks send one another, in turn; nothing where there is one, or its rate is unknown.

    Modules of at most `small_bytes` in all stay whole beside the others.
    """

    def __init__(self, ranks: int, bytes_per_s: float | None, small_bytes: int = 0) -> None:
        self.busy_ns = 0
        # To all others; 0 where there are none, or it is not known.
        self._s_per_byte = (ranks - 1) / Fraction(bytes_per_s) if bytes_per_s else Fraction(0)
        self._known: dict[int, int] = {}  # nanoseconds by bytes: modules are mostly alike
        self.is_timed = self._s_per_byte > 0
        """Whether anything that ranks send takes time."""
        self._free_ns = 0
        self._small_bytes = small_bytes / ranks  # of each rank
        self._used_ns: deque[int] = deque(maxlen=GATHERED)  # the ends of the last modules

    def note_use(self, nbytes: int, end_ns: int) -> None:
        """Note when a module was done with its parameters, of which each rank has so many bytes."""
        if nbytes > self._small_bytes:
            self._used_ns.append(end_ns)

    def gather(self, nbytes: int, after_ns: int) -> int:
        """Gather a module's parameters, which are there then, one module ahead of the one that
        computes; return when it can compute.
        """
        freed_ns = self._used_ns[0] if len(self._used_ns) == GATHERED else 0
        return self.exchange(nbytes, max(freed_ns, after_ns))

    def exchange(self, nbytes: int, after_ns: int) -> int:
        """Let each rank send all others so many bytes; return when they have arrived."""
        if not self.is_timed or not nbytes:
            return after_ns
        duration_ns = self.duration_ns(nbytes)
        self._free_ns = max(self._free_ns, after_ns) + duration_ns
        self.busy_ns += duration_ns
        return self._free_ns

    def duration_ns(self, nbytes: int) -> int:
        """Return how long each rank sends all others so many bytes."""
        if nbytes not in self._known:
            self._known[nbytes] = ceil(nbytes * self._s_per_byte * NS_PER_S)
        return self._known[nbytes]

    def idle_ns(self) -> int:
        """Return how long the wire has waited before what was sent so far."""
        return self._free_ns - self.busy_ns


class FetchingRoom:
    """The device memory that modules fetch into, and when the device has used what is there.

    Modules are members of `resident` by number, each with the `nbytes` of its parameters, in the
    order of a forward. Beside `limit`, which is the set's, the memory has `on_their_way` bytes.
    Until `end_update`, `staged` bytes of all are the update's.
    """

    def __init__(
        self, nbytes: Mapping[int, int], limit: int, *, staged: int, on_their_way: int
    ) -> None:
        self.resident = ResidentSet[None](nbytes, limit)
        self.used_ns: dict[int, int] = {}  # when a member is there, or was used last
        self._nbytes = nbytes
        self._uses = {module: Use("", (module,)) for module in nbytes}
        self._staged = staged
        self._beyond = max(staged - limit, 0) + on_their_way  # bytes that the limit does not count
        # Bytes that are free from a time on: the device may still read them.
        self._leaving: deque[tuple[int, int]] = deque()
        self._leaving_bytes = 0

    def begin_pass(self, *, backward: bool = False) -> None:
        """Expect each module once, in the order of a forward, or of a backward."""
        uses = self._uses.values()
        self.resident.expect(list(reversed(uses) if backward else uses))

    def need(self, module: int) -> bool:
        """Record that a module runs now; tell whether its parameters are there, or on their way."""
        self.resident.record_use(self._uses[module])
        return module in self.resident

    def admit(self, module: int, end_ns: int) -> None:
        """Note that a module's parameters are there from then on."""
        self.resident.admit(module, None)
        self.used_ns[module] = end_ns

    def make(self, module: int) -> int:
        """Let others leave until there is room for a module; return when its memory is free.

        Staging sets take nothing here: the update has ended, or, in one memory, has none.
        """
        needed, free_ns = self._nbytes[module], 0
        if not self._leaving and needed <= self.resident.free:  # most plans have room for all
            return 0
        used_ns = nbytes = 0
        for other in self.resident.evictions(needed):
            nbytes += self._nbytes[other]
            used_ns = max(used_ns, self._remove(other))
        # The memory of all is free when the device has used the last: the engine notes one event.
        if nbytes:
            self._leave(nbytes, used_ns)
        room = self.resident.free + self._beyond - needed
        while self._leaving and room < self._leaving_bytes:
            free_ns = max(free_ns, self._left())
        return free_ns

    def evict(self, modules: Iterable[int], free_ns: int) -> bool:
        """Let these leave, with memory that is free from then on; tell whether there are any."""
        before = len(self._leaving)
        for module in modules:
            self._remove(module)
            self._leave(self._nbytes[module], free_ns)
        return len(self._leaving) > before

    def has_room(self, module: int, thread: TimedCarrier) -> bool:
        """Tell whether staging sets leave room for a module; wait for what is leaving."""
        room = self.resident.free + self._beyond - self._staged - self._nbytes[module]
        while self._leaving and (
            self._leaving[0][1] <= thread.now_ns or room < self._leaving_bytes
        ):
            thread.wait_until(self._left())
        return room >= self._leaving_bytes

    def end_update(self) -> None:
        """Note that the update has ended: it has no staging sets any more."""
        self._staged = 0

    def _leave(self, nbytes: int, free_ns: int) -> None:
        self._leaving.append((nbytes, free_ns))
        self._leaving_bytes += nbytes

    def _left(self) -> int:
        """Return when the next bytes that are leaving are free, and count them no more."""
        nbytes, free_ns = self._leaving.popleft()
        self._leaving_bytes -= nbytes
        return free_ns

    def _remove(self, module: int) -> int:
        self.resident.remove(module)
        return self.used_ns.pop(module)
