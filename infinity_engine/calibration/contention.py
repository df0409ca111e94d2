"""What work of the host and other work lose to one another: alone and together, in turn.

The samples of a comparison follow one another, so that whatever else the machine does disturbs all
of them alike.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from infinity_engine.calibration.effort import MeasuringTime
from infinity_engine.calibration.host import HostPoint, HostUpdates
from infinity_engine.plan import Figure, Unit

__all__ = [
    "Contention",
    "Pair",
    "Stops",
    "meanwhile",
    "measure_contention",
    "part_kept",
    "until",
]

_SAMPLES = 4  # of a comparison: updates alone, with the other, and alone again; the other alone
_Result = TypeVar("_Result")
Stops = Callable[[], bool]
"""Tells work that goes on whether to stop."""


@dataclass(frozen=True)
class Pair(Generic[_Result]):
    """What the other work did beside updates by all threads, and what it did alone."""

    beside: _Result
    alone: _Result


@dataclass(frozen=True)
class Contention(Generic[_Result]):
    """The part of their rate that updates keep, for each point; and what the other work did."""

    updates: dict[HostPoint, Figure]
    others: list[Pair[_Result]]


def measure_contention(
    updates: HostUpdates,
    points: Sequence[HostPoint],
    work: Callable[[Stops], _Result],
    part: MeasuringTime,
) -> Contention[_Result]:
    """Measure the points beside `work`, which goes on until it is stopped."""
    others: list[Pair[_Result]] = []

    def part_left(point: HostPoint, sample_s: float) -> float:
        part, done = part_kept(partial(updates.rate, point), work, sample_s)
        # What the other work loses is measured beside updates by all threads only.
        if point.threads == max(updates.counts):
            others.append(Pair(done, work(until(sample_s))))
        return part

    found = part.in_turn(points, part_left, samples=_SAMPLES)
    return Contention(
        {point: Figure.of(parts, Unit.PART) for point, parts in found.items()}, others
    )


def part_kept(
    rate: Callable[[float], float], work: Callable[[Stops], _Result], sample_s: float
) -> tuple[float, _Result]:
    """Return the part of its rate that something keeps beside `work`, and what that did meanwhile.

    `rate` does it for so many seconds and returns its rate.
    """
    # Before and after: what changes slowly on the machine is half in each.
    before = rate(sample_s)
    with meanwhile(work) as going_on:
        beside = rate(sample_s)
    after = rate(sample_s)
    # Beside against the mean of both: 1 where nothing is lost. Raises what the work failed with.
    return 2 * beside / (before + after), going_on.result()


def until(seconds: float) -> Stops:
    """Return what stops work when so much time has passed."""
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= end


@contextmanager
def meanwhile(work: Callable[[Stops], _Result]) -> Iterator[Future[_Result]]:
    """Let `work` go on in a thread while the body runs.

    What it returned or raised is in the future that is yielded, once the body has ended.
    """
    stop = threading.Event()
    # The executor's end waits for the work, so that it never runs into the next sample.
    with ThreadPoolExecutor(1, thread_name_prefix="calibration") as executor:
        future = executor.submit(work, stop.is_set)
        try:
            yield future
        finally:
            # Also when the body fails: the executor would wait for ever.
            stop.set()
