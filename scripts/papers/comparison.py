"""A published number beside ours, and what follows: it matches, deviates by so much, or contradicts
its own paper.

Pure data. Nobody sets a status by hand: it is computed from the two numbers, and only a
contradiction inside the paper is stated, with its arithmetic. Made by the papers' experiments,
printed by the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf, isinf

from infinity_engine.errors import ConfigError
from papers.charts import Chart

__all__ = [
    "MEASURED",
    "Cell",
    "Comparison",
    "Published",
    "Status",
    "about",
    "at_least",
    "at_most",
    "between",
    "exactly",
    "printed",
]

MEASURED = 0.15
"""How far a computed number may be from a measured one that it matches."""


class Status(Enum):
    """How our number and the published one go together."""

    MATCHES = "matches"
    DEVIATES = "deviates"
    INCONSISTENT = "inconsistent in the paper"
    NOT_PRINTED = "not printed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """What a paper says, as it says it, and the numbers from `low` to `high` that this can mean."""

    text: str
    low: float
    high: float
    tolerance: float = MEASURED


def printed(text: str) -> Published:
    """Return a number that is the result of a formula: it stands for what is rounded to its
    digits.
    """
    half = 0.5 * 10.0 ** -len(text.partition(".")[2])
    return Published(text=text, low=float(text) - half, high=float(text) + half, tolerance=0.0)


def exactly(value: float, text: str = "") -> Published:
    """Return a number that is one of a few, such as a size that was tried: another one is another
    answer.
    """
    return Published(text=text or f"{value:g}", low=value, high=value, tolerance=0.0)


def about(value: float, text: str = "") -> Published:
    """Return a number that was measured, or read off a plot."""
    return Published(text=text or f"{value:g}", low=value, high=value)


def between(low: float, high: float, text: str = "") -> Published:
    """Return a range that measurements lie in."""
    return Published(text=text or f"{low:g}-{high:g}", low=low, high=high)


def at_least(value: float, text: str = "") -> Published:
    """Return a bound from below."""
    return Published(text=text or f">= {value:g}", low=value, high=inf, tolerance=0.0)


def at_most(value: float, text: str = "") -> Published:
    """Return a bound from above."""
    return Published(text=text or f"<= {value:g}", low=-inf, high=value, tolerance=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One number: what it is, what the paper says (None where it prints nothing), and what we
    compute.

    `upper` makes ours a range, where it is not known whether two things overlap. `contradiction` is
    the arithmetic by which numbers of the paper exclude one another.
    """

    what: str
    published: Published | None
    ours: float
    upper: float | None = None
    unit: str = ""
    digits: int = 2
    note: str = ""
    contradiction: str = ""

    def __post_init__(self) -> None:
        if self.upper is not None and self.upper < self.ours:
            expected = f"{self.ours} or more: the upper end of a range"
            raise ConfigError(
                field=f"Cell {self.what!r} upper", value=self.upper, expected=expected
            )

    @property
    def deviation(self) -> float | None:
        """How far ours is from the nearest that the paper can mean, as a part of that; 0 inside,
        None without one.
        """
        if self.published is None:
            return None
        low, high = self.published.low, self.published.high
        least, most = self.ours, self.ours if self.upper is None else self.upper
        # What is printed may have been rounded from a number of the last digit's half, either way.
        slack = 1e-9 * max(abs(least), abs(most))
        if least > high + slack:
            return (least - high) / abs(high)
        return (most - low) / abs(low) if most < low - slack else 0.0

    @property
    def status(self) -> Status:
        """How the two go together."""
        if self.published is None:
            return Status.NOT_PRINTED
        deviation = self.deviation
        if deviation is not None and abs(deviation) <= self.published.tolerance:
            return Status.MATCHES
        return Status.INCONSISTENT if self.contradiction else Status.DEVIATES

    @property
    def why(self) -> str:
        """What there is to say: the contradiction where that is why the two differ, or the note."""
        return self.contradiction if self.status is Status.INCONSISTENT else self.note

    @property
    def verdict(self) -> str:
        """The status in words, with the deviation where there is one."""
        deviation = self.deviation
        return f"{self.status.value} ({deviation:+.0%})" if deviation else self.status.value

    @property
    def ours_text(self) -> str:
        """Our number or range, with its unit."""
        ends = [self.ours] if self.upper is None else [self.ours, self.upper]
        return " - ".join(f"{end:,.{self.digits}f}" for end in ends) + (
            f" {self.unit}" if self.unit else ""
        )

    @property
    def published_text(self) -> str:
        """What the paper says, with our unit."""
        if self.published is None:
            return "-"
        text = self.published.text
        return f"{text} {self.unit}" if self.unit and text[-1].isdigit() else text

    def to_mapping(self) -> dict[str, object]:
        """Return it ready for JSON; an open end of a bound is None."""
        published = self.published
        return {
            "what": self.what,
            "unit": self.unit,
            "published": None
            if published is None
            else {
                "text": published.text,
                "low": _finite(published.low),
                "high": _finite(published.high),
            },
            "ours": {"low": self.ours, "high": self.ours if self.upper is None else self.upper},
            "deviation": self.deviation,
            "status": self.status.value,
            "why": self.why,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """An experiment of a paper: its figures and tables by name, such as "figure 7", and its
    cells.
    """

    names: tuple[str, ...]
    title: str
    cells: tuple[Cell, ...]
    remarks: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()

    def count(self) -> Mapping[Status, int]:
        """Return how many cells have each status."""
        return {status: sum(cell.status is status for cell in self.cells) for status in Status}

    def to_mapping(self) -> dict[str, object]:
        """Return it ready for JSON."""
        return {
            "names": list(self.names),
            "title": self.title,
            "cells": [cell.to_mapping() for cell in self.cells],
            "remarks": list(self.remarks),
            "charts": [chart.to_mapping() for chart in self.charts],
        }


def _finite(value: float) -> float | None:
    return None if isinf(value) else value
