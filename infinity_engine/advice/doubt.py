"""How far a planned step, or its update, may be off, by where its rates come from.

Pure. Measured rates leave the error of the model; published ones are each replaced by what machines
were seen to reach, and the same plan is timed again. Called by advising.py.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from infinity_engine.advice.means import (
    with_compute,
    with_drives,
    with_links,
    with_updates,
    with_wire,
)
from infinity_engine.placement.training import Means, Training
from infinity_engine.sim.candidate import Candidate
from infinity_engine.sim.timeline import StepTimeline, time_step

__all__ = ["RateSource", "StepRange", "retimed", "step_range", "update_range"]


class RateSource(Enum):
    """Where the rates of a plan come from."""

    MEASURED = "measured"  # by a calibration of the machine
    GIVEN = "given"  # by the caller, as numbers
    PUBLISHED = "published"  # by vendors and papers


class StepRange(NamedTuple):
    """The seconds between which a step, or its update, is expected."""

    least_s: float
    most_s: float


class _DoubtPart(NamedTuple):
    """The slowest and the fastest that hardware was seen to work, as parts of a published rate."""

    slowest: float
    fastest: float


# Chosen: on the pages of plan-vs-measured in docs/benchmarks, medians of three trainings are up to
# 9.9% off a plan with a calibration, and single ones up to 24%; docs/planner.md has one of 12.6%.
_OF_MEASURED = 0.16
_OF_GIVEN = 0.25  # assumed: these numbers were measured too, but not as this engine works
# 8 billion parameters a second were measured where the peak of the memory allows 19 (Deep Optimizer
# States, docs/papers.md).
_UPDATES = _DoubtPart(0.4, 1.0)
# Their rates were achieved; chipsets and pageable memory cost more.
_LINKS = _DoubtPart(0.8, 1.1)
# Held for hours, where the drive's state decides: 0.64 GB/s were measured of a drive where 1.4 are
# assumed of its class (Crucial T500, in the catalogue).
_DRIVES = _DoubtPart(0.45, 1.5)
_WIRE = _DoubtPart(0.5, 1.0)  # assumed: the rate is that of links that carry nothing else
_COMPUTE = _DoubtPart(0.6, 1.5)  # 25% to 60% of the peak, where 40% is assumed


def step_range(
    candidate: Candidate, training: Training, means: Means, source: RateSource
) -> StepRange:
    """Return the seconds between which a step by this plan is expected."""
    if source is not RateSource.PUBLISHED:
        part = _OF_MEASURED if source is RateSource.MEASURED else _OF_GIVEN
        return StepRange((1 - part) * candidate.step_s, (1 + part) * candidate.step_s)
    slow, fast = _slow_and_fast(candidate, training, means)
    return StepRange(min(fast.ns / 1e9, candidate.step_s), max(slow.ns / 1e9, candidate.step_s))


def update_range(candidate: Candidate, training: Training, means: Means) -> StepRange:
    """Return the seconds between which the update is expected, where the rates are published."""
    slow, fast = _slow_and_fast(candidate, training, means)
    planned_s = candidate.timeline.update_ns / 1e9
    return StepRange(min(fast.update_ns / 1e9, planned_s), max(slow.update_ns / 1e9, planned_s))


def retimed(candidate: Candidate, training: Training, means: Means) -> StepTimeline:
    """Return the step of the same plan at other rates."""
    overlap = replace(training, overlap=candidate.overlap)
    return time_step(candidate.plan, candidate.sizing, overlap, means)


def _slow_and_fast(
    candidate: Candidate, training: Training, means: Means
) -> tuple[StepTimeline, StepTimeline]:
    slow, fast = (retimed(candidate, training, _changed(means, at)) for at in (0, 1))
    return slow, fast


def _changed(means: Means, at: int) -> Means:
    changed = with_links(with_updates(means, _UPDATES[at]), _LINKS[at])
    changed = with_wire(with_drives(changed, _DRIVES[at]), _WIRE[at])
    return with_compute(changed, _COMPUTE[at])
