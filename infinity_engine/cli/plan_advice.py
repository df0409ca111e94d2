"""The advice of `infinity plan` as rows: how sure the step is, what to buy next, what a run takes.

Prints what the advice says and works out nothing. Called by plan_answer.py.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepnvme.cli.report import Rows
    from infinity_engine.advice.advising import Advice
    from infinity_engine.advice.course import RunForecast
    from infinity_engine.sim.report import PlanReport

__all__ = ["purchase_rows", "range_in_words", "run_rows", "seconds_in_words"]

_MOST = 3  # purchases that are shown
_WORTH_SHOWING = 0.02  # of a step
_TB = 1e12
_S_PER_DAY = 86_400
_SOURCES = MappingProxyType(
    {"measured": "measured rates", "given": "given rates", "published": "published rates"}
)


def range_in_words(report: PlanReport, advice: Advice) -> str:
    """Return between which seconds a step is expected, and by which rates; nothing where a step
    is not known.
    """
    if report.tokens_per_s is None:
        return ""
    least, most = map(seconds_in_words, advice.step_range)
    return f" ({least} to {most} with {_SOURCES[advice.source.value]})"


def purchase_rows(report: PlanReport, advice: Advice) -> Rows:
    """Yield the purchases that save something, those that do not, and what a little more is
    worth.
    """
    now = seconds_in_words(report.step_s)
    step = "without computing" if report.tokens_per_s is None else "a step"
    written = 0.0 if report.wear is None else report.wear.written_per_day
    gains = [purchase for purchase in advice.purchases if purchase.saved >= _WORTH_SHOWING]
    for purchase in gains[:_MOST]:
        change = f"{now} -> {seconds_in_words(purchase.step_s)} {step}"
        if written:
            day = f"{written / _TB:,.1f} -> {purchase.written_per_day / _TB:,.1f}"
            change += f", {day} TB written a day"
        yield purchase.what, change
    idle = [purchase.what for purchase in advice.purchases if purchase.saved < _WORTH_SHOWING]
    if idle:
        yield "no gain", "; ".join(idle)
    if advice.worths:
        yield (
            "worth",
            "; ".join(f"1 {it.unit} more: {seconds_in_words(it.seconds)}" for it in advice.worths),
        )


def run_rows(run: RunForecast, *, rated_bytes: int | None) -> Rows:
    """Yield what a run takes, and what it would take with more micro-batches in a step."""
    yield f"{run.tokens:,} tokens", f"{run.steps:,} steps, {_takes(run, rated_bytes)}"
    more = run.accumulated
    if more is not None:
        yield (
            f"--accumulation {more.accumulation}",
            f"{more.steps:,} steps, {_takes(more, rated_bytes)}",
        )


def _takes(run: RunForecast, rated_bytes: int | None) -> str:
    parts = [_time_in_words(run.seconds)]
    if run.written:
        share = "" if rated_bytes is None else f" ({run.written / rated_bytes:.1%} of the TBW)"
        parts.append(f"{run.written / _TB:,.1f} TB written{share}")
    if run.kwh is not None:
        parts.append(f"{run.kwh:,.1f} kWh")
    if run.cost is not None:
        parts.append(f"cost {run.cost:,.2f}")
    return ", ".join(parts)


def _time_in_words(seconds: float) -> str:
    days = seconds / _S_PER_DAY
    return f"{days:,.1f} days" if days >= 1 else f"{seconds / 3600:,.1f} hours"


def seconds_in_words(seconds: float) -> str:
    """Return seconds, or milliseconds where that is less than one."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
