"""How far a planned step, or its update, may be off, by where its rates come from.

Pure. Measured rates leave the error of the model; published ones are each replaced by what machines
were seen to reach, for the same plan. Called by advising.py.
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
from infinity_engine.sim.timeline import StepTimeline, least_step_ns, time_step

__all__ = ["RateSource", "StepRange", "least_retimed_ns", "retimed", "step_range", "update_range"]


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
# Of a step: where lanes that never wait take so much of it, what they take changes with the rates
# as the step does, to an eighth, and is found ten times as fast.
_HARDLY_WAITS = 0.95


def step_range(
    candidate: Candidate, training: Training, means: Means, source: RateSource
) -> StepRange:
    """Return the seconds between which a step by this plan is expected."""
    if source is not RateSource.PUBLISHED:
        part = _OF_MEASURED if source is RateSource.MEASURED else _OF_GIVEN
        return StepRange((1 - part) * candidate.step_s, (1 + part) * candidate.step_s)
    ends = [_changed(means, at) for at in (0, 1)]
    least_ns = least_retimed_ns(candidate, training, means)
    if least_ns > 0 and least_ns >= _HARDLY_WAITS * candidate.timeline.ns:
        slow_s, fast_s = (
            candidate.step_s * least_retimed_ns(candidate, training, end) / least_ns for end in ends
        )
    else:
        slow_s, fast_s = (retimed(candidate, training, end).ns / 1e9 for end in ends)
    return StepRange(min(fast_s, candidate.step_s), max(slow_s, candidate.step_s))


def update_range(candidate: Candidate, training: Training, means: Means) -> StepRange:
    """Return the seconds between which the update is expected, where the rates are published."""
    slow, fast = (retimed(candidate, training, _changed(means, at)) for at in (0, 1))
    planned_s = candidate.timeline.update_ns / 1e9
    return StepRange(min(fast.update_ns / 1e9, planned_s), max(slow.update_ns / 1e9, planned_s))


def retimed(candidate: Candidate, training: Training, means: Means) -> StepTimeline:
    """Return the step of the same plan at other rates."""
    return time_step(candidate.plan, candidate.sizing, _as_planned(candidate, training), means)


def least_retimed_ns(candidate: Candidate, training: Training, means: Means) -> int:
    """Return nanoseconds that the step of the same plan takes at least, at other rates."""
    return least_step_ns(candidate.plan, candidate.sizing, _as_planned(candidate, training), means)


def _as_planned(candidate: Candidate, training: Training) -> Training:
    return replace(training, overlap=candidate.overlap)


def _changed(means: Means, at: int) -> Means:
    changed = with_links(with_updates(means, _UPDATES[at]), _LINKS[at])
    changed = with_wire(with_drives(changed, _DRIVES[at]), _WIRE[at])
    return with_compute(changed, _COMPUTE[at])
