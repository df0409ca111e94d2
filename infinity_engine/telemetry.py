"""Spans on tracks, counters, gauges, and the timeline of the newest steps.

Owns its records and nothing else: no global state, no output, no opinion on what is worth
measuring. Memory is bounded; the oldest records are dropped, and counted. Measuring code is passed
a Telemetry, or a NullTelemetry where nothing is to be recorded: the call sites are the same. Safe
to call from any thread.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType

__all__ = [
    "Counter",
    "Gauge",
    "NullTelemetry",
    "SpanRecord",
    "StepRecord",
    "Telemetry",
    "Timeline",
    "trace_events",
]


# Viewers of traces take process and thread 0 for the kernel's idle task.
_PID = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanRecord:
    """One span that has ended, on the clock of its Telemetry.

    `track` is the thread's name, or the one that the caller gave, and then `thread` is None.
    `error` is the type of the exception that ended the span, None where there was none.
    """

    name: str
    track: str
    thread: int | None
    start_ns: int
    end_ns: int
    error: str | None
    fields: Mapping[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One step: the spans that began in it, counters' growth, gauges' peaks, and its notes.

    `end_ns` is None while the step runs.
    """

    index: int
    start_ns: int
    end_ns: int | None
    spans: tuple[SpanRecord, ...]
    counters: Mapping[str, int]
    peaks: Mapping[str, int]
    notes: Mapping[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """The newest steps, oldest first, spans that began between steps, and how many were dropped."""

    steps: tuple[StepRecord, ...]
    between_steps: tuple[SpanRecord, ...]
    dropped_steps: int
    dropped_spans: int


class Counter:
    """A number that only grows: bytes moved, nanoseconds stalled. Made by Telemetry.counter."""

    __slots__ = ("_lock", "_total")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = 0

    @property
    def total(self) -> int:
        """The sum of all that was added."""
        # Without the lock: reading an int is one step, and a total only grows.
        return self._total

    def add(self, amount: int) -> None:
        """Add `amount`, which is not negative."""
        if amount < 0:
            raise ValueError(f"a counter only grows: cannot add {amount}, expected 0 or more")
        with self._lock:
            self._total += amount


class Gauge:
    """A number that rises and falls and is never negative, such as bytes held.

    Made by Telemetry.gauge; each step has its peak.
    """

    __slots__ = ("_lock", "_step_peak", "_value")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._value = 0
        self._step_peak = 0

    def set(self, value: int) -> None:
        """Set it to `value`, which is not negative."""
        if value < 0:
            raise ValueError(f"a gauge is 0 or more, and cannot be set to {value}")
        with self._lock:
            self._value = value
            self._step_peak = max(self._step_peak, value)

    def _begin_step(self) -> None:
        with self._lock:
            # Not 0: what is held as a step begins counts in its peak.
            self._step_peak = self._value


@dataclass(kw_only=True, slots=True)
class _Step:
    """A step that is being recorded: spans may still come after its end."""

    index: int
    start_ns: int
    # Bounded: the deque drops the oldest span; _keep() counts it.
    spans: deque[SpanRecord]
    # Counters never start again from 0: a step's growth is a difference.
    totals_before: dict[str, int]
    end_ns: int | None = None
    growth: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    notes: dict[str, object] = field(default_factory=dict)

    def covers(self, moment_ns: int) -> bool:
        # The end is excluded: the instant is the next step's, or between steps.
        return self.start_ns <= moment_ns and (self.end_ns is None or moment_ns < self.end_ns)


class Telemetry:
    """Records the spans, counters and gauges of one engine.

    Args:
        keep_steps: how many steps the timeline holds.
        keep_spans: how many spans it holds of each step, and of the time between steps.
        clock_ns: a clock in nanoseconds that never goes back.
    """

    def __init__(
        self, *, keep_steps: int, keep_spans: int, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._clock_ns = clock_ns
        self._keep_spans = keep_spans
        self._lock = threading.Lock()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        # maxlen drops the oldest step on append; begin_step() counts it before.
        self._steps: deque[_Step] = deque(maxlen=keep_steps)
        self._open: _Step | None = None
        self._between_steps: deque[SpanRecord] = deque(maxlen=keep_spans)
        # Spans that begin before this belong to steps that are gone.
        self._dropped_until_ns: int | None = None
        self._dropped_steps = 0
        self._dropped_spans = 0

    def timed(
        self, name: str, /, *, track: str | None = None, **fields: object
    ) -> AbstractContextManager[None]:
        """Return a context manager that records its body as a span of the step in which it began.

        A body that raises is recorded too. `track` is the line of the timeline that the span is
        drawn on, by default the thread's; `fields` are kept with it. Its ns are added to the
        counter `<name> ns`, which stays exact where spans are dropped. A span within another of the
        same name is counted twice.
        """
        return _Span(self, name, track, fields, self.counter(f"{name} ns"))

    def now_ns(self) -> int:
        """Return the time on its clock, to which times from elsewhere can be related."""
        return self._clock_ns()

    def record(
        self, name: str, /, *, track: str, start_ns: int, end_ns: int, **fields: object
    ) -> None:
        """Record a span with times known afterwards: of an I/O thread, or of events on a GPU.

        Its times are on the clock of now_ns; `track` is the line of the timeline that it is drawn
        on. It belongs to the step in which it began, and counts as dropped where that step is no
        longer kept.
        """
        if end_ns < start_ns:
            raise ValueError(
                f"span {name} cannot end before it starts: expected {start_ns} ns or more, got "
                f"{end_ns} ns"
            )
        span = SpanRecord(
            name=name,
            track=track,
            thread=None,
            start_ns=start_ns,
            end_ns=end_ns,
            error=None,
            fields=fields,
        )
        with self._lock:
            step = next((step for step in reversed(self._steps) if step.covers(start_ns)), None)
            if step is not None:
                self._keep(span, step.spans)
            # Its step is not kept any more; elsewhere it would appear as between steps.
            elif self._dropped_until_ns is not None and start_ns < self._dropped_until_ns:
                self._dropped_spans += 1
            else:
                self._keep(span, self._between_steps)

    def counter(self, name: str) -> Counter:
        """Return the counter `name`, the same one at every call."""
        # First without the lock: reading a dict is safe, and this is called for every copy.
        if name not in self._counters:
            with self._lock:
                # setdefault: another thread may have made it between the look above and the lock.
                self._counters.setdefault(name, Counter())
        return self._counters[name]

    def gauge(self, name: str) -> Gauge:
        """Return the gauge `name`, the same one at every call."""
        if name not in self._gauges:
            with self._lock:
                self._gauges.setdefault(name, Gauge())
        return self._gauges[name]

    def counters(self) -> dict[str, int]:
        """Return the total of every counter."""
        with self._lock:
            return self._totals()

    def note(self, **values: object) -> None:
        """Keep values that the running step has once, such as its outcome; the newest counts."""
        with self._lock:
            self._running("noted").notes.update(values)

    @property
    def in_step(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._open is not None

    def begin_step(self, index: int) -> None:
        """Begin step `index`: new spans, growth and peaks belong to it until end_step."""
        with self._lock:
            if self._open is not None:
                raise RuntimeError(
                    f"step {index} cannot begin, because step {self._open.index} has not ended. "
                    "Call end_step first"
                )
            # The append below drops the oldest step.
            if len(self._steps) == self._steps.maxlen:
                self._dropped_steps += 1
                self._dropped_until_ns = self._steps[0].end_ns if self._steps else None
            for gauge in self._gauges.values():
                gauge._begin_step()
            self._open = _Step(
                index=index,
                start_ns=self._clock_ns(),
                spans=deque(maxlen=self._keep_spans),
                totals_before=self._totals(),
            )
            self._steps.append(self._open)

    def end_step(self) -> None:
        """End the step that begin_step began."""
        with self._lock:
            step = self._running("ended")
            step.end_ns = self._clock_ns()
            # Fixed now: counters go on, and the next step's growth is not this one's.
            step.growth = self._growth(step)
            step.peaks = self._step_peaks()
            self._open = None

    def timeline(self) -> Timeline:
        """Return what is recorded at this moment, the running step included."""
        with self._lock:
            return Timeline(
                steps=tuple(self._record(step) for step in self._steps),
                between_steps=tuple(self._between_steps),
                dropped_steps=self._dropped_steps,
                dropped_spans=self._dropped_spans,
            )

    def _running(self, what: str) -> _Step:
        if self._open is None:
            raise RuntimeError(
                f"no step can be {what}, because none has begun. Call begin_step first"
            )
        return self._open

    def _keep(self, span: SpanRecord, spans: deque[SpanRecord]) -> None:
        # The append drops the oldest span.
        if len(spans) == spans.maxlen:
            self._dropped_spans += 1
        spans.append(span)

    def _totals(self) -> dict[str, int]:
        return {name: counter.total for name, counter in self._counters.items()}

    def _growth(self, step: _Step) -> dict[str, int]:
        return {
            # A counter that was made during the step had 0 before it.
            name: total - step.totals_before.get(name, 0)
            for name, total in self._totals().items()
        }

    def _step_peaks(self) -> dict[str, int]:
        return {name: gauge._step_peak for name, gauge in self._gauges.items()}

    def _record(self, step: _Step) -> StepRecord:
        return StepRecord(
            index=step.index,
            start_ns=step.start_ns,
            end_ns=step.end_ns,
            spans=tuple(step.spans),
            # The running step's figures are of this moment, those of others of their end.
            counters=dict(step.growth) if step is not self._open else self._growth(step),
            peaks=dict(step.peaks) if step is not self._open else self._step_peaks(),
            notes=dict(step.notes),
        )


class _Span:
    """A span that is recorded when its body has ended."""

    __slots__ = ("_counter", "_fields", "_name", "_spans", "_start_ns", "_telemetry", "_track")

    def __init__(
        self,
        telemetry: Telemetry,
        name: str,
        track: str | None,
        fields: dict[str, object],
        counter: Counter,
    ) -> None:
        self._telemetry = telemetry
        self._name = name
        self._track = track
        self._fields = fields
        self._counter = counter

    def __enter__(self) -> None:
        # Read once, without the lock: the step may end meanwhile, and the span stays its own.
        step = self._telemetry._open
        # Chosen at the start: a span belongs to the step in which it began.
        self._spans = self._telemetry._between_steps if step is None else step.spans
        self._start_ns = self._telemetry._clock_ns()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        # First, so that making the record is not in the span.
        end_ns = self._telemetry._clock_ns()
        track, thread = self._track, None
        if track is None:
            current = threading.current_thread()
            track, thread = current.name, current.ident
        record = SpanRecord(
            name=self._name,
            track=track,
            thread=thread,
            start_ns=self._start_ns,
            end_ns=end_ns,
            error=None if kind is None else kind.__name__,
            fields=self._fields,
        )
        with self._telemetry._lock:
            # The deque chosen at the start: it may be of a step that has ended by now.
            self._telemetry._keep(record, self._spans)
        self._counter.add(end_ns - self._start_ns)


class NullTelemetry(Telemetry):
    """A Telemetry that records nothing and costs next to nothing."""

    def __init__(self) -> None:
        super().__init__(keep_steps=0, keep_spans=0)
        self._nothing = contextlib.nullcontext()  # one for all: a nullcontext has no state
        self._unread = _UnreadCounter()
        self._unread_gauge = _UnreadGauge()

    def timed(
        self, name: str, /, *, track: str | None = None, **fields: object
    ) -> AbstractContextManager[None]:
        """Return a context manager that does nothing."""
        return self._nothing

    def counter(self, name: str) -> Counter:
        """Return a counter that stays at zero."""
        return self._unread

    def record(
        self, name: str, /, *, track: str, start_ns: int, end_ns: int, **fields: object
    ) -> None:
        """Do nothing."""

    def gauge(self, name: str) -> Gauge:
        """Return a gauge that stays at zero."""
        return self._unread_gauge

    def note(self, **values: object) -> None:
        """Do nothing."""

    def begin_step(self, index: int) -> None:
        """Do nothing."""

    def end_step(self) -> None:
        """Do nothing."""


class _UnreadCounter(Counter):
    __slots__ = ()

    def add(self, amount: int) -> None:
        pass


class _UnreadGauge(Gauge):
    __slots__ = ()

    def set(self, value: int) -> None:
        pass


def trace_events(timeline: Timeline) -> dict[str, object]:
    """Return `timeline` in the trace event format that Perfetto and chrome://tracing open.

    The result is ready for json.dump.

    Each track has its line, and the steps one of their own, with their notes; a counter shows its
    growth in each step, a gauge its peak. Viewers draw only spans that nest on one line. So where
    spans of a track overlap without nesting, as those of concurrent requests do, the track has as
    many lines as that takes.
    """
    lines = _Lines()
    events: list[dict[str, object]] = []
    for step in timeline.steps:
        if step.end_ns is not None:
            tid = lines.place(("steps",), step.start_ns, step.end_ns)
            events.append(
                _complete(
                    f"step {step.index}",
                    tid,
                    step.start_ns,
                    step.end_ns,
                    {"index": step.index, **step.notes},
                )
            )
        events += [
            _value(name, step.start_ns, "in step", growth) for name, growth in step.counters.items()
        ]
        events += [
            _value(name, step.start_ns, "peak in step", peak) for name, peak in step.peaks.items()
        ]
    spans = [*timeline.between_steps, *(span for step in timeline.steps for span in step.spans)]
    # They are kept as they ended, inner first; viewers want spans of one start outer first.
    spans.reverse()
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        tid = lines.place((span.track, span.thread), span.start_ns, span.end_ns)
        error = {} if span.error is None else {"error": span.error}
        events.append(
            _complete(span.name, tid, span.start_ns, span.end_ns, {**span.fields, **error})
        )
    names = [_metadata("process_name", 0, "infinity_engine")]
    names += [_metadata("thread_name", tid, name) for tid, name in enumerate(lines.names, start=1)]
    return {
        "traceEvents": names + events,
        "displayTimeUnit": "ms",
        "otherData": {
            "dropped_steps": timeline.dropped_steps,
            "dropped_spans": timeline.dropped_spans,
        },
    }


class _Lines:
    """The lines of a trace, from 1 on: two spans of one follow one another, or nest."""

    def __init__(self) -> None:
        self.names: list[str] = []
        # For each track its lines: a number, and the ends of the spans that are open there.
        self._of: dict[tuple[object, ...], list[tuple[int, list[int]]]] = {}

    def place(self, track: tuple[object, ...], start_ns: int, end_ns: int) -> int:
        """Return the line for a span; a track's spans come by their starts, outer ones first."""
        lines = self._of.setdefault(track, [])
        for number, ends_ns in lines:
            # Spans that ended before this one begins are closed.
            while ends_ns and ends_ns[-1] <= start_ns:
                ends_ns.pop()
            # It fits within the innermost open span: they nest.
            if not ends_ns or end_ns <= ends_ns[-1]:
                ends_ns.append(end_ns)
                return number
        # No line has room: a further one of the same name.
        self.names.append(str(track[0]))
        lines.append((len(self.names), [end_ns]))
        return len(self.names)


def _complete(
    name: str, tid: int, start_ns: int, end_ns: int, args: Mapping[str, object]
) -> dict[str, object]:
    return {
        "ph": "X",
        "pid": _PID,
        "tid": tid,
        "name": name,
        "ts": start_ns / 1000,  # viewers expect microseconds
        "dur": (end_ns - start_ns) / 1000,
        "args": {key: _json_value(value) for key, value in args.items()},
    }


def _value(name: str, at_ns: int, series: str, value: int) -> dict[str, object]:
    return {"ph": "C", "pid": _PID, "name": name, "ts": at_ns / 1000, "args": {series: value}}


def _metadata(kind: str, tid: int, name: str) -> dict[str, object]:
    return {"ph": "M", "pid": _PID, "tid": tid, "name": kind, "args": {"name": name}}


def _json_value(value: object) -> object:
    """Return `value` where JSON has it, its text where not: NaN, paths, enums."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, str | int) else str(value)
