from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity_engine.plan import Tier
from infinity_engine.telemetry import (
    NullTelemetry,
    SpanRecord,
    Telemetry,
    Timeline,
    trace_events,
)

PATIENT = settings(deadline=None)


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


class TickingClock(Clock):
    """A clock that moves by 10 ns whenever it is read."""

    def __call__(self) -> int:
        self.now_ns += 10
        return self.now_ns


def recorder(
    clock_ns: Callable[[], int] | None = None, *, keep_steps: int = 10, keep_spans: int = 100
) -> Telemetry:
    return Telemetry(
        keep_steps=keep_steps, keep_spans=keep_spans, clock_ns=clock_ns or TickingClock()
    )


def only_span(telemetry: Telemetry) -> SpanRecord:
    (span,) = telemetry.timeline().between_steps
    return span


@contextmanager
def recorded_step(telemetry: Telemetry, index: int) -> Iterator[None]:
    """Run the body as step `index`."""
    telemetry.begin_step(index)
    yield
    telemetry.end_step()


def names(spans: tuple[SpanRecord, ...]) -> list[str]:
    return [span.name for span in spans]


# --- spans ---


def test_a_span_has_the_times_of_its_clock() -> None:
    clock = Clock()
    telemetry = recorder(clock)

    clock.now_ns = 100
    with telemetry.timed("load"):
        clock.now_ns = 250

    assert (only_span(telemetry).start_ns, only_span(telemetry).end_ns) == (100, 250)


def test_a_span_keeps_its_fields_whatever_they_are_called() -> None:
    telemetry = recorder()

    with telemetry.timed("load", nbytes=4096, name="w1", self="s"):
        pass

    assert only_span(telemetry).fields == {"nbytes": 4096, "name": "w1", "self": "s"}


def test_a_span_lies_on_the_track_of_its_thread() -> None:
    telemetry = recorder()

    with telemetry.timed("load"):
        pass

    here = threading.current_thread()
    assert (only_span(telemetry).track, only_span(telemetry).thread) == (here.name, here.ident)


def test_a_span_lies_on_the_track_that_it_is_given() -> None:
    telemetry = recorder()

    with telemetry.timed("copy", track="h2d stream"):
        pass

    assert (only_span(telemetry).track, only_span(telemetry).thread) == ("h2d stream", None)


def test_a_span_is_recorded_and_marked_when_its_body_raises() -> None:
    telemetry = recorder()

    with pytest.raises(KeyError, match="gone"), telemetry.timed("load"):
        raise KeyError("gone")

    assert (only_span(telemetry).name, only_span(telemetry).error) == ("load", "KeyError")


def test_a_span_is_recorded_and_marked_when_its_body_is_interrupted() -> None:
    telemetry = recorder()

    with pytest.raises(KeyboardInterrupt), telemetry.timed("load"):
        raise KeyboardInterrupt

    assert only_span(telemetry).error == "KeyboardInterrupt"


def test_a_span_whose_body_ends_well_is_not_marked() -> None:
    telemetry = recorder()

    with telemetry.timed("load"):
        pass

    assert only_span(telemetry).error is None


def test_a_span_that_has_not_ended_is_not_recorded() -> None:
    telemetry = recorder()

    with telemetry.timed("load"):
        assert telemetry.timeline().between_steps == ()


TREES: st.SearchStrategy[Any] = st.recursive(
    st.just([]), lambda children: st.lists(children, max_size=4), max_leaves=25
)


@PATIENT
@given(TREES)
def test_spans_within_spans_nest_in_time(tree: list[Any]) -> None:
    telemetry = recorder()
    inside: dict[str, str] = {}

    def walk(node: list[Any], name: str) -> None:
        with telemetry.timed(name):
            for number, child in enumerate(node):
                inside[f"{name}.{number}"] = name
                walk(child, f"{name}.{number}")

    walk(tree, "0")

    spans = {span.name: span for span in telemetry.timeline().between_steps}
    assert spans.keys() == {"0", *inside}
    for inner, outer in inside.items():
        assert (
            spans[outer].start_ns
            < spans[inner].start_ns
            < spans[inner].end_ns
            < spans[outer].end_ns
        )
    siblings = [
        (a, b)
        for a, outer in inside.items()
        for b, other in inside.items()
        if a < b and outer == other
    ]
    assert all(
        spans[a].end_ns < spans[b].start_ns or spans[b].end_ns < spans[a].start_ns
        for a, b in siblings
    )


# --- steps ---


def test_a_step_holds_the_spans_that_began_in_it() -> None:
    telemetry = recorder()

    with telemetry.timed("before"):
        pass
    for index in (7, 8):
        telemetry.begin_step(index)
        with telemetry.timed(f"within {index}"):
            pass
        telemetry.end_step()
    with telemetry.timed("after"):
        pass

    timeline = telemetry.timeline()
    assert [(step.index, names(step.spans)) for step in timeline.steps] == [
        (7, ["within 7"]),
        (8, ["within 8"]),
    ]
    assert names(timeline.between_steps) == ["before", "after"]


def test_a_span_belongs_to_the_step_in_which_it_began() -> None:
    telemetry = recorder()

    telemetry.begin_step(1)
    with telemetry.timed("store"):
        telemetry.end_step()
        telemetry.begin_step(2)

    first, second = telemetry.timeline().steps
    assert (names(first.spans), names(second.spans)) == (["store"], [])


def test_a_step_has_the_times_of_the_clock() -> None:
    clock = Clock()
    telemetry = recorder(clock)

    clock.now_ns = 5
    with recorded_step(telemetry, 0):
        clock.now_ns = 9

    (step,) = telemetry.timeline().steps
    assert (step.start_ns, step.end_ns) == (5, 9)


def test_a_step_that_is_running_is_on_the_timeline_without_an_end() -> None:
    telemetry = recorder()
    telemetry.begin_step(0)
    telemetry.counter("bytes").add(3)

    (step,) = telemetry.timeline().steps

    assert step.end_ns is None
    assert step.counters == {"bytes": 3}


def test_it_tells_whether_a_step_is_running() -> None:
    telemetry = recorder()
    before = telemetry.in_step
    telemetry.begin_step(0)
    within = telemetry.in_step
    telemetry.end_step()

    assert (before, within, telemetry.in_step) == (False, True, False)


def test_a_step_cannot_begin_within_another() -> None:
    telemetry = recorder()
    telemetry.begin_step(3)

    with pytest.raises(RuntimeError, match="step 4 cannot begin, because step 3 has not ended"):
        telemetry.begin_step(4)


def test_a_step_that_never_began_cannot_end() -> None:
    with pytest.raises(RuntimeError, match="none has begun"):
        recorder().end_step()


# --- counters ---


def test_a_counter_adds_up() -> None:
    telemetry = recorder()

    telemetry.counter("bytes").add(3)
    telemetry.counter("bytes").add(4)

    assert telemetry.counters() == {"bytes": 7}


def test_a_counter_that_was_asked_for_stands_at_zero() -> None:
    telemetry = recorder()
    telemetry.counter("stalls")

    assert telemetry.counters() == {"stalls": 0}


def test_a_counter_never_falls() -> None:
    counter = recorder().counter("bytes")

    with pytest.raises(ValueError, match="only grows: cannot add -1"):
        counter.add(-1)
    assert counter.total == 0


def test_the_snapshot_of_the_counters_stays_as_it_was() -> None:
    telemetry = recorder()
    before = telemetry.counters()

    telemetry.counter("bytes").add(1)

    assert before == {}


def test_a_step_says_by_how_much_each_counter_grew_in_it() -> None:
    telemetry = recorder()
    telemetry.counter("bytes").add(100)
    for index, grown in enumerate((5, 0, 7)):
        with recorded_step(telemetry, index):
            telemetry.counter("bytes").add(grown)
        telemetry.counter("bytes").add(1000)
    with recorded_step(telemetry, 3):
        telemetry.counter("new").add(2)

    assert [step.counters for step in telemetry.timeline().steps] == [
        {"bytes": 5},
        {"bytes": 0},
        {"bytes": 7},
        {"bytes": 0, "new": 2},
    ]


# --- gauges ---


def test_a_gauge_never_stands_below_zero() -> None:
    telemetry = recorder()
    telemetry.gauge("held").set(2)

    with pytest.raises(ValueError, match="a gauge is 0 or more, and cannot be set to -1"):
        telemetry.gauge("held").set(-1)
    with recorded_step(telemetry, 0):
        pass
    assert telemetry.timeline().steps[0].peaks == {"held": 2}


@PATIENT
@given(st.lists(st.integers(0, 10)), st.lists(st.integers(0, 10)))
def test_a_step_has_the_highest_that_a_gauge_stood_at_in_it(
    before: list[int], within: list[int]
) -> None:
    telemetry = recorder()
    for value in (0, *before):
        telemetry.gauge("held").set(value)
    with recorded_step(telemetry, 0):
        for value in within:
            telemetry.gauge("held").set(value)

    assert telemetry.timeline().steps[0].peaks == {"held": max([*before[-1:], *within], default=0)}


def test_a_step_says_how_high_each_gauge_stood_in_it_from_its_beginning_on() -> None:
    telemetry = recorder()
    held = telemetry.gauge("held")
    for value in (100, 10):
        held.set(value)
    with recorded_step(telemetry, 0):
        held.set(5)
    for value in (55, 5):
        held.set(value)
    with recorded_step(telemetry, 1):
        for value in (7, 5):
            held.set(value)
        telemetry.gauge("new").set(1)
    held.set(1005)

    assert [step.peaks for step in telemetry.timeline().steps] == [
        {"held": 10},
        {"held": 7, "new": 1},
    ]


def test_a_step_that_is_running_says_its_peaks_so_far() -> None:
    telemetry = recorder()
    telemetry.begin_step(0)
    telemetry.gauge("held").set(3)
    before = telemetry.timeline()

    telemetry.gauge("held").set(4)

    assert before.steps[0].peaks == {"held": 3}


# --- spans recorded afterwards ---


def test_a_recorded_span_has_the_times_track_and_fields_that_it_is_given() -> None:
    telemetry = recorder()

    telemetry.record("read", track="nvme0", start_ns=3, end_ns=8, nbytes=4096, name="w1")

    assert only_span(telemetry) == SpanRecord(
        name="read",
        track="nvme0",
        thread=None,
        start_ns=3,
        end_ns=8,
        error=None,
        fields={"nbytes": 4096, "name": "w1"},
    )


def test_a_recorded_span_cannot_end_before_it_starts() -> None:
    with pytest.raises(
        ValueError, match="span read cannot end before it starts: expected 8 ns or more, got 7 ns"
    ):
        recorder().record("read", track="nvme0", start_ns=8, end_ns=7)


def test_the_clock_can_be_read_to_relate_other_times_to_it() -> None:
    clock = Clock()
    clock.now_ns = 42

    assert recorder(clock).now_ns() == 42


def test_a_recorded_span_belongs_to_the_step_in_which_it_began_whenever_it_is_recorded() -> None:
    clock = Clock()
    telemetry = recorder(clock)
    for index in range(2):
        clock.now_ns = 100 * index
        telemetry.begin_step(index)
        clock.now_ns = 100 * index + 50
        telemetry.end_step()

    for start_ns in (0, 49, 50, 99, 100, 149, 150):
        telemetry.record(str(start_ns), track="t", start_ns=start_ns, end_ns=500)

    timeline = telemetry.timeline()
    assert [names(step.spans) for step in timeline.steps] == [["0", "49"], ["100", "149"]]
    assert names(timeline.between_steps) == ["50", "99", "150"]


def test_a_recorded_span_that_began_in_the_step_that_is_running_belongs_to_it() -> None:
    telemetry = recorder()
    telemetry.begin_step(0)

    telemetry.record("copy", track="h2d", start_ns=telemetry.now_ns(), end_ns=10**9)

    assert [names(step.spans) for step in telemetry.timeline().steps] == [["copy"]]


def test_a_recorded_span_whose_step_is_no_longer_kept_counts_as_dropped() -> None:
    clock = Clock()
    telemetry = recorder(clock, keep_steps=1)
    for index in range(2):
        clock.now_ns = 100 * index
        telemetry.begin_step(index)
        clock.now_ns = 100 * index + 50
        telemetry.end_step()

    telemetry.record("late", track="t", start_ns=49, end_ns=60)
    telemetry.record("between", track="t", start_ns=50, end_ns=60)

    timeline = telemetry.timeline()
    assert timeline.dropped_spans == 1
    assert names(timeline.between_steps) == ["between"]


def test_recorded_spans_are_bounded_as_others_are() -> None:
    telemetry = recorder(keep_spans=2)

    for number in range(5):
        telemetry.record(str(number), track="t", start_ns=number, end_ns=number)

    assert names(telemetry.timeline().between_steps) == ["3", "4"]
    assert telemetry.timeline().dropped_spans == 3


@PATIENT
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=8),
    st.lists(st.integers(0, 400), max_size=20),
    st.integers(1, 3),
    st.integers(1, 5),
)
def test_every_recorded_span_is_kept_where_it_began_or_counted(
    steps: list[tuple[int, int]], starts_ns: list[int], keep_steps: int, keep_spans: int
) -> None:
    clock = Clock()
    telemetry = recorder(clock, keep_steps=keep_steps, keep_spans=keep_spans)
    for index, (idle_ns, busy_ns) in enumerate(steps):
        clock.now_ns += idle_ns
        telemetry.begin_step(index)
        clock.now_ns += busy_ns
        telemetry.end_step()

    for start_ns in starts_ns:
        telemetry.record("span", track="t", start_ns=start_ns, end_ns=start_ns + 1)

    timeline = telemetry.timeline()
    kept = [*timeline.between_steps, *(span for step in timeline.steps for span in step.spans)]
    assert len(kept) + timeline.dropped_spans == len(starts_ns)
    within = [(step.start_ns, step.end_ns or 0) for step in timeline.steps]
    assert all(
        start_ns <= span.start_ns < end_ns
        for (start_ns, end_ns), step in zip(within, timeline.steps, strict=True)
        for span in step.spans
    )
    assert not any(
        start_ns <= span.start_ns < end_ns
        for start_ns, end_ns in within
        for span in timeline.between_steps
    )


# --- bounds ---


def test_only_the_newest_steps_are_kept_and_the_others_counted() -> None:
    telemetry = recorder(keep_steps=2)

    for index in range(5):
        with recorded_step(telemetry, index):
            pass

    timeline = telemetry.timeline()
    assert [step.index for step in timeline.steps] == [3, 4]
    assert timeline.dropped_steps == 3


def test_only_the_newest_spans_of_a_step_are_kept_and_the_others_counted() -> None:
    telemetry = recorder(keep_spans=2)

    with recorded_step(telemetry, 0):
        for number in range(5):
            with telemetry.timed(str(number)):
                pass

    timeline = telemetry.timeline()
    assert names(timeline.steps[0].spans) == ["3", "4"]
    assert timeline.dropped_spans == 3


def test_only_the_newest_spans_between_steps_are_kept_and_the_others_counted() -> None:
    telemetry = recorder(keep_spans=2)

    for number in range(5):
        with telemetry.timed(str(number)):
            pass

    timeline = telemetry.timeline()
    assert names(timeline.between_steps) == ["3", "4"]
    assert timeline.dropped_spans == 3


def test_nothing_counts_as_dropped_while_all_of_it_fits() -> None:
    telemetry = recorder(keep_steps=2, keep_spans=2)

    for index in range(2):
        with recorded_step(telemetry, index), telemetry.timed("a"), telemetry.timed("b"):
            pass

    timeline = telemetry.timeline()
    assert (timeline.dropped_steps, timeline.dropped_spans) == (0, 0)


def test_a_span_may_end_after_its_step_was_dropped() -> None:
    telemetry = recorder(keep_steps=1)
    telemetry.begin_step(0)

    with telemetry.timed("late"):
        telemetry.end_step()
        with recorded_step(telemetry, 1):
            pass

    assert [names(step.spans) for step in telemetry.timeline().steps] == [[]]


# --- timed spans ---


def test_a_timed_span_is_a_span_and_counts_its_nanoseconds() -> None:
    clock = Clock()
    telemetry = recorder(clock)

    with recorded_step(telemetry, 0):
        for _ in range(2):
            with telemetry.timed("update", track="host", subgroup=3):
                clock.now_ns += 40

    (step,) = telemetry.timeline().steps
    assert [(span.name, span.track, span.fields) for span in step.spans] == [
        ("update", "host", {"subgroup": 3})
    ] * 2
    assert step.counters == {"update ns": 80}


def test_the_nanoseconds_of_timed_spans_are_whole_where_spans_are_dropped() -> None:
    telemetry = recorder(keep_spans=1)

    for _ in range(5):
        with telemetry.timed("update"):
            pass

    assert len(telemetry.timeline().between_steps) == 1
    assert telemetry.counters() == {"update ns": 50}


def test_a_timed_span_that_failed_is_counted() -> None:
    telemetry = recorder()

    with pytest.raises(KeyError), telemetry.timed("update"):
        raise KeyError

    assert only_span(telemetry).error == "KeyError"
    assert telemetry.counters() == {"update ns": 10}


# --- notes ---


def test_a_step_keeps_what_was_noted_last() -> None:
    telemetry = recorder()

    with recorded_step(telemetry, 0):
        telemetry.note(outcome="skipped", loss_scale=2.0)
        telemetry.note(outcome="updated")
    with recorded_step(telemetry, 1):
        pass

    assert [step.notes for step in telemetry.timeline().steps] == [
        {"outcome": "updated", "loss_scale": 2.0},
        {},
    ]


def test_notes_of_a_step_that_is_running_are_there() -> None:
    telemetry = recorder()
    telemetry.begin_step(0)
    telemetry.note(outcome="updated")
    before = telemetry.timeline().steps[0]
    telemetry.note(outcome="skipped")

    assert before.notes == {"outcome": "updated"}


def test_nothing_can_be_noted_between_steps() -> None:
    with pytest.raises(RuntimeError, match="no step can be noted"):
        recorder().note(outcome="updated")


# --- threads ---


def test_threads_lose_no_span_and_no_count() -> None:
    telemetry = recorder(Clock(), keep_spans=10_000)
    together = threading.Barrier(4)

    def work(worker: int) -> None:
        together.wait(timeout=60)
        for number in range(500):
            with telemetry.timed(f"{worker}.{number}"):
                telemetry.counter("bytes").add(1)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))

    spans = telemetry.timeline().between_steps
    assert sorted(names(spans)) == sorted(
        f"{worker}.{number}" for worker in range(4) for number in range(500)
    )
    assert len({span.thread for span in spans}) == 4
    assert telemetry.counters()["bytes"] == 2000


# --- records ---


def test_a_timeline_stays_as_it_was() -> None:
    telemetry = recorder()
    telemetry.begin_step(0)
    before = telemetry.timeline()
    kept = copy.deepcopy(before)

    with telemetry.timed("load"):
        telemetry.counter("bytes").add(1)
    telemetry.end_step()

    assert before == kept


def test_a_timeline_can_be_sent_to_another_process() -> None:
    telemetry = recorder()
    with recorded_step(telemetry, 0), telemetry.timed("load", nbytes=1):
        pass

    assert pickle.loads(pickle.dumps(telemetry.timeline())) == telemetry.timeline()


def test_records_cannot_be_changed() -> None:
    telemetry = recorder()
    with recorded_step(telemetry, 0), telemetry.timed("load"):
        pass
    timeline = telemetry.timeline()

    for record in (timeline, timeline.steps[0], timeline.steps[0].spans[0]):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, dataclasses.fields(record)[0].name, None)


# --- recording nothing ---


def test_a_null_telemetry_takes_all_calls_and_keeps_nothing() -> None:
    telemetry: Telemetry = NullTelemetry()

    telemetry.begin_step(0)
    with telemetry.timed("load", track="t", nbytes=1), telemetry.timed("inner"):
        telemetry.counter("bytes").add(5)
        telemetry.gauge("held").set(5)
    telemetry.record("copy", track="t", start_ns=0, end_ns=1)
    telemetry.note(outcome="updated")
    telemetry.end_step()

    assert telemetry.timeline() == Timeline(
        steps=(), between_steps=(), dropped_steps=0, dropped_spans=0
    )
    assert telemetry.counters() == {}
    assert telemetry.counter("bytes").total == 0


def test_a_null_telemetry_lets_exceptions_pass() -> None:
    telemetry = NullTelemetry()

    with pytest.raises(KeyError), telemetry.timed("load"):
        raise KeyError


def test_a_null_telemetry_makes_nothing_new_for_a_span() -> None:
    telemetry = NullTelemetry()

    assert telemetry.timed("a") is telemetry.timed("b", nbytes=1)
    assert telemetry.counter("a") is telemetry.counter("b")
    assert telemetry.gauge("a") is telemetry.gauge("b")


def test_a_null_telemetry_has_the_same_public_methods() -> None:
    public = {name for name in vars(Telemetry) if not name.startswith("_")}

    assert public <= {name for name in dir(NullTelemetry) if not name.startswith("_")}


# --- the trace ---


def exported(telemetry: Telemetry) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(
        json.dumps(trace_events(telemetry.timeline()), allow_nan=False)
    )
    return trace


def events(telemetry: Telemetry, phase: str) -> list[dict[str, Any]]:
    return [event for event in exported(telemetry)["traceEvents"] if event["ph"] == phase]


def test_a_span_becomes_a_complete_event_in_microseconds() -> None:
    clock = Clock()
    telemetry = recorder(clock)
    clock.now_ns = 1500
    with telemetry.timed("load", track="nvme", nbytes=4096):
        clock.now_ns = 4000

    assert events(telemetry, "X") == [
        {
            "ph": "X",
            "pid": 1,
            "tid": 1,
            "name": "load",
            "ts": 1.5,
            "dur": 2.5,
            "args": {"nbytes": 4096},
        }
    ]


def test_a_span_that_failed_says_so_in_its_arguments() -> None:
    telemetry = recorder()
    with pytest.raises(KeyError), telemetry.timed("load"):
        raise KeyError

    assert events(telemetry, "X")[0]["args"] == {"error": "KeyError"}


def test_every_track_has_a_named_line_of_its_own() -> None:
    telemetry = recorder()
    with (
        recorded_step(telemetry, 0),
        telemetry.timed("load", track="nvme"),
        telemetry.timed("copy", track="h2d"),
    ):
        pass
    with telemetry.timed("store", track="nvme"):
        pass

    lines = {
        event["tid"]: event["args"]["name"]
        for event in events(telemetry, "M")
        if event["name"] == "thread_name"
    }
    drawn = {event["name"]: lines[event["tid"]] for event in events(telemetry, "X")}
    assert drawn == {"step 0": "steps", "load": "nvme", "copy": "h2d", "store": "nvme"}
    assert len(lines) == 3


def test_two_threads_of_one_name_have_two_lines() -> None:
    telemetry = recorder()
    both_alive = threading.Barrier(2)

    def work() -> None:
        with telemetry.timed("load"):
            both_alive.wait(timeout=60)

    threads = [threading.Thread(target=work, name="io") for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)

    assert len({event["tid"] for event in events(telemetry, "X")}) == 2
    assert [event["args"]["name"] for event in events(telemetry, "M")[1:]] == ["io", "io"]


def test_the_process_is_named_and_nothing_uses_the_ids_of_the_idle_task() -> None:
    telemetry = recorder()
    with recorded_step(telemetry, 0), telemetry.timed("load"):
        pass

    assert events(telemetry, "M")[0]["args"] == {"name": "infinity_engine"}
    assert all(event["pid"] > 0 for event in exported(telemetry)["traceEvents"])
    assert all(event["tid"] > 0 for event in events(telemetry, "X"))


def test_a_step_becomes_an_event_around_its_spans_with_its_notes() -> None:
    telemetry = recorder(TickingClock())
    with recorded_step(telemetry, 5), telemetry.timed("load"):
        telemetry.note(outcome="updated", gradient_norm=math.inf)

    (step,) = (event for event in events(telemetry, "X") if event["name"] == "step 5")
    (span,) = (event for event in events(telemetry, "X") if event["name"] == "load")
    assert step["ts"] < span["ts"] < span["ts"] + span["dur"] < step["ts"] + step["dur"]
    assert step["args"] == {"index": 5, "outcome": "updated", "gradient_norm": "inf"}


def test_a_step_that_is_running_shows_its_spans_only() -> None:
    telemetry = recorder()
    telemetry.begin_step(0)
    with telemetry.timed("load"):
        pass

    assert [event["name"] for event in events(telemetry, "X")] == ["load"]


def test_a_counter_becomes_an_event_for_each_step() -> None:
    clock = Clock()
    telemetry = recorder(clock)
    for index in range(2):
        clock.now_ns = 1000 * index
        with recorded_step(telemetry, index):
            telemetry.counter("bytes").add(10 + index)

    assert [(event["name"], event["ts"], event["args"]) for event in events(telemetry, "C")] == [
        ("bytes", 0.0, {"in step": 10}),
        ("bytes", 1.0, {"in step": 11}),
    ]


def test_a_gauge_becomes_an_event_with_its_peak_for_each_step() -> None:
    clock = Clock()
    telemetry = recorder(clock)
    for index in range(2):
        clock.now_ns = 1000 * index
        with recorded_step(telemetry, index):
            telemetry.gauge("held").set(10 + 10 * index)

    assert [(event["name"], event["ts"], event["args"]) for event in events(telemetry, "C")] == [
        ("held", 0.0, {"peak in step": 10}),
        ("held", 1.0, {"peak in step": 20}),
    ]


def lines_of(telemetry: Telemetry) -> dict[int, str]:
    return {
        event["tid"]: event["args"]["name"]
        for event in events(telemetry, "M")
        if event["name"] == "thread_name"
    }


def test_recorded_spans_have_the_line_of_their_track() -> None:
    telemetry = recorder(Clock())
    with recorded_step(telemetry, 0), telemetry.timed("load", track="nvme0"):
        telemetry.record("read", track="nvme0", start_ns=10, end_ns=20)
        telemetry.record("copy", track="h2d", start_ns=15, end_ns=30)

    lines = lines_of(telemetry)
    assert {event["name"]: lines[event["tid"]] for event in events(telemetry, "X")} == {
        "step 0": "steps",
        "load": "nvme0",
        "read": "nvme0",
        "copy": "h2d",
    }
    assert sorted(lines.values()) == ["h2d", "nvme0", "steps"]


def test_spans_of_a_track_that_overlap_have_a_line_each() -> None:
    telemetry = recorder()
    for start_ns in (0, 10, 15):
        telemetry.record("read", track="nvme0", start_ns=start_ns, end_ns=start_ns + 15)

    assert [event["tid"] for event in events(telemetry, "X")] == [1, 2, 1]
    assert lines_of(telemetry) == {1: "nvme0", 2: "nvme0"}


@PATIENT
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 30), st.integers(0, 30)), max_size=20)
)
def test_on_every_line_spans_nest_or_follow_one_another(spans: list[tuple[str, int, int]]) -> None:
    telemetry = recorder()
    for track, start_ns, length_ns in spans:
        telemetry.record(
            "span", track=track, start_ns=1000 * start_ns, end_ns=1000 * (start_ns + length_ns)
        )

    lines = lines_of(telemetry)
    drawn = [
        (event["tid"], event["ts"], event["ts"] + event["dur"]) for event in events(telemetry, "X")
    ]
    assert sorted((lines[tid], start, end) for tid, start, end in drawn) == sorted(
        (track, start, start + length) for track, start, length in spans
    )
    for first, (tid, start, end) in enumerate(drawn):
        for other_tid, other_start, other_end in drawn[first + 1 :]:
            assert (
                tid != other_tid
                or other_start >= end
                or (start <= other_start and other_end <= end)
            )


def test_spans_of_one_moment_stand_outer_first() -> None:
    telemetry = recorder(Clock())

    with telemetry.timed("outer"), telemetry.timed("middle"), telemetry.timed("inner"):
        pass

    assert [event["name"] for event in events(telemetry, "X")] == ["outer", "middle", "inner"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (math.nan, "nan"),
        (math.inf, "inf"),
        (1.5, 1.5),
        (True, True),
        (None, None),
        ("w", "w"),
        (2**70, 2**70),
        (PurePosixPath("/mnt/a"), "/mnt/a"),
        (Tier.HOST, "Tier.HOST"),
        ([1], "[1]"),
    ],
)
def test_a_field_that_json_does_not_have_is_shown_as_text(value: object, shown: object) -> None:
    telemetry = recorder()
    with telemetry.timed("load", field=value):
        pass

    assert events(telemetry, "X")[0]["args"]["field"] == shown


def test_the_trace_says_what_was_dropped() -> None:
    telemetry = recorder(keep_steps=1, keep_spans=1)
    for index in range(3):
        with recorded_step(telemetry, index), telemetry.timed("a"), telemetry.timed("b"):
            pass

    assert exported(telemetry)["otherData"] == {"dropped_steps": 2, "dropped_spans": 3}


def test_the_trace_of_nothing_is_a_trace() -> None:
    assert [event["name"] for event in exported(NullTelemetry())["traceEvents"]] == ["process_name"]
