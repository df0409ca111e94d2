"""What a whole run takes: days, what it writes to drives, energy and money.

Pure arithmetic over a planned step. Called by advising.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from infinity_engine.placement.training import Training
from infinity_engine.sim.planner import Decision
from infinity_engine.sim.report import written_bytes

__all__ = ["Prices", "RunForecast", "TrainingRun", "forecast"]

_MORE = 8  # micro-batches in a step, to show what more of them change
_J_PER_KWH = 3.6e6
_S_PER_HOUR = 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """What a run costs while it works; None where it is not given.

    `watts` is what the machine draws, as far as it is known.
    """

    watts: float | None = None
    per_kwh: float | None = None
    per_hour: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRun:
    """So many tokens, or so many steps of the training as it is."""

    tokens: int | None = None
    steps: int | None = None
    prices: Prices = Prices()

    def steps_of(self, tokens_of_step: int) -> int:
        """Return how many steps the run has, where each takes so many tokens."""
        if self.steps is not None:
            return self.steps
        return ceil((self.tokens or 0) / tokens_of_step)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunForecast:
    """What a run takes. `written` are the bytes that all drives together are written."""

    tokens: int
    steps: int
    seconds: float
    written: int
    kwh: float | None
    cost: float | None
    """Of energy and of hours, as far as prices were given; None where none was."""
    accumulation: int
    accumulated: RunForecast | None
    """The same tokens with so many micro-batches a step; None where that does not fit, or is what
    was asked.
    """

    def to_mapping(self) -> dict[str, object]:
        """Return it as lists and mappings, ready for JSON."""
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "seconds": self.seconds,
            "written_bytes": self.written,
            "kwh": self.kwh,
            "cost": self.cost,
            "accumulation": self.accumulation,
            "accumulated": None if self.accumulated is None else self.accumulated.to_mapping(),
        }


def forecast(decision: Decision, run: TrainingRun) -> RunForecast:
    """Return what the run takes, and what it would take with more micro-batches in a step."""
    training, means = decision.training, decision.means
    best = decision.best
    steps = run.steps_of(_tokens(training, means.ranks))
    tokens = steps * _tokens(training, means.ranks)
    accumulated = None
    if training.accumulation_steps < _MORE:
        more = replace(training, accumulation_steps=_MORE)
        found = decision.planner.with_training(more).look()
        if found is not None:
            fewer = ceil(tokens / _tokens(more, means.ranks))
            accumulated = _of(
                run,
                fewer,
                tokens=fewer * _tokens(more, means.ranks),
                step_s=found.step_s,
                written=written_bytes(found.timeline, more, means),
                accumulation=_MORE,
            )
    planned = _of(
        run,
        steps,
        tokens=tokens,
        step_s=best.step_s,
        written=written_bytes(best.timeline, training, means),
        accumulation=training.accumulation_steps,
    )
    return replace(planned, accumulated=accumulated)


def _tokens(training: Training, ranks: int) -> int:
    """Return the tokens of a step of all ranks."""
    return training.tokens * training.accumulation_steps * ranks


def _of(
    run: TrainingRun, steps: int, *, tokens: int, step_s: float, written: int, accumulation: int
) -> RunForecast:
    seconds, prices = steps * step_s, run.prices
    kwh = None if prices.watts is None else prices.watts * seconds / _J_PER_KWH
    parts = []
    if prices.per_kwh is not None and kwh is not None:
        parts.append(prices.per_kwh * kwh)
    if prices.per_hour is not None:
        parts.append(prices.per_hour * seconds / _S_PER_HOUR)
    return RunForecast(
        tokens=tokens,
        steps=steps,
        seconds=seconds,
        written=steps * written,
        kwh=kwh,
        cost=sum(parts) if parts else None,
        accumulation=accumulation,
        accumulated=None,
    )
