"""`Advice`: what follows from a plan that fits, in figures.

Pure. Called by the command line, after the planner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from infinity_engine.advice.course import RunForecast, TrainingRun, forecast
from infinity_engine.advice.doubt import RateSource, StepRange, step_range, update_range
from infinity_engine.advice.purchases import Purchase, Worth, purchases, worths
from infinity_engine.placement.training import Means
from infinity_engine.sim.planner import Decision

__all__ = ["Advice", "advise"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """How sure a step is, what to buy next, what a little more is worth, and what a run takes."""

    source: RateSource
    step_range: StepRange | None
    """None where the rate of computing is not known."""
    update_range: StepRange | None
    """Of the update alone, where that rate is not known and the others are published ones."""
    purchases: tuple[Purchase, ...]
    worths: tuple[Worth, ...]
    run: RunForecast | None

    def to_mapping(self) -> dict[str, object]:
        """Return it as lists and mappings, ready for JSON."""
        return {
            "rates_are": self.source.value,
            "step_range_s": None if self.step_range is None else list(self.step_range),
            "update_range_s": None if self.update_range is None else list(self.update_range),
            "purchases": [
                {
                    "what": purchase.what,
                    "step_s": purchase.step_s,
                    "written_bytes_per_day": purchase.written_per_day,
                    "saved": purchase.saved,
                }
                for purchase in self.purchases
            ],
            "worth": [{"unit": worth.unit, "seconds": worth.seconds} for worth in self.worths],
            "run": None if self.run is None else self.run.to_mapping(),
        }


def advise(
    decision: Decision,
    source: RateSource,
    run: TrainingRun | None = None,
    *,
    better_gpus: Mapping[str, Means] = MappingProxyType({}),
) -> Advice:
    """Return the advice; `source` says where the rates come from. `better_gpus` are the means with
    other GPUs in the machine, by their names.

    Where the rate of computing is not known, nothing is said of a run: its steps lack most of their
    time.
    """
    computes = decision.means.compute_rate(decision.training) is not None
    return Advice(
        source=source,
        step_range=step_range(decision.best, decision.training, decision.means, source)
        if computes
        else None,
        update_range=update_range(decision.best, decision.training, decision.means)
        if source is RateSource.PUBLISHED and not computes
        else None,
        purchases=purchases(decision, better_gpus),
        worths=worths(decision),
        run=forecast(decision, run) if run is not None and computes else None,
    )
