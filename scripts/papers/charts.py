"""Charts as data, and as SVG that stands in a page by itself: lines with dots over linear or
logarithmic axes.

Pure text; no library, no script, no font of its own. Made by the papers' experiments and by
scale.py, written by the command line.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from infinity_engine.errors import ConfigError

__all__ = ["Chart", "Series", "shown", "svg"]

_WIDTH, _HEIGHT = 700, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 236, 34, 48
_GRID = "#e4e4e4"
_COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#7b4fa3", "#b8860b", "#444444", "#2a9d8f", "#d1495b")


@dataclass(frozen=True, slots=True)
class Series:
    """A name and its points; `dashed` for what was published."""

    name: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Series over common axes; a logarithmic axis takes numbers above 0 alone."""

    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False

    def __post_init__(self) -> None:
        points = [point for series in self.series for point in series.points]
        if not points:
            raise ConfigError(
                field=f"Chart {self.title!r}", value=self.series, expected="a series with a point"
            )
        for name, is_log, values in (
            ("x", self.log_x, [x for x, _ in points]),
            ("y", self.log_y, [y for _, y in points]),
        ):
            if is_log and min(values) <= 0:
                expected = "numbers above 0 on a logarithmic axis"
                raise ConfigError(
                    field=f"Chart {self.title!r} {name}", value=min(values), expected=expected
                )

    def to_mapping(self) -> dict[str, object]:
        """Return it ready for JSON."""
        series = [
            {"name": each.name, "points": [list(point) for point in each.points]}
            for each in self.series
        ]
        return {"title": self.title, "x": self.x, "y": self.y, "series": series}


class _Axis:
    """Where numbers lie between two pixels."""

    def __init__(self, values: list[float], start: float, end: float, *, is_log: bool) -> None:
        self._log = is_log
        low, high = min(values), max(values)
        if is_log:
            low, high = log10(low), log10(high)
            if high - low < 1e-9:
                low, high = low - 0.5, high + 0.5
            every = max(1, ceil((high - low) / 8))
            powers = [10.0**power for power in range(ceil(low), floor(high) + 1, every)]
            self.ticks = powers if len(powers) > 1 else [10.0**low, 10.0**high]
        else:
            step = _step(max(high, 0) - min(low, 0))
            low, high = step * floor(min(low, 0) / step), step * max(ceil(high / step), 1)
            self.ticks = [low + step * count for count in range(round((high - low) / step) + 1)]
        self._low, self._high, self._start, self._end = low, high, start, end

    def __call__(self, value: float) -> float:
        place = log10(value) if self._log else value
        return self._start + (self._end - self._start) * (place - self._low) / (
            self._high - self._low
        )


def svg(chart: Chart) -> str:
    """Return the chart as an `<svg>` element."""
    points = [point for series in chart.series for point in series.points]
    x = _Axis([at for at, _ in points], _LEFT, _WIDTH - _RIGHT, is_log=chart.log_x)
    y = _Axis([at for _, at in points], _HEIGHT - _BOTTOM, _TOP, is_log=chart.log_y)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 18, chart.title, weight="bold"),
        *(_line((x(at), _TOP), (x(at), _HEIGHT - _BOTTOM), _GRID) for at in x.ticks),
        *(_line((_LEFT, y(at)), (_WIDTH - _RIGHT, y(at)), _GRID) for at in y.ticks),
        *(_text(x(at), _HEIGHT - _BOTTOM + 16, shown(at), anchor="middle") for at in x.ticks),
        *(_text(_LEFT - 6, y(at) + 4, shown(at), anchor="end") for at in y.ticks),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 10, chart.x, anchor="middle"),
        '<g transform="rotate(-90 14 '
        f'{_HEIGHT / 2:.0f})">{_text(14, _HEIGHT / 2, chart.y, anchor="middle")}</g>',
    ]
    for number, series in enumerate(chart.series):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in series.points)
        dashes = ' stroke-dasharray="5 4"' if series.dashed else ""
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'
        )
        parts += [
            f'<circle cx="{x(at):.1f}" cy="{y(value):.1f}" r="3" fill="{colour}"/>'
            for at, value in series.points
        ]
        legend_x, legend_y = _WIDTH - _RIGHT + 12, _TOP + 10 + 18 * number
        parts.append(_line((legend_x, legend_y - 4), (legend_x + 20, legend_y - 4), colour, dashes))
        parts.append(_text(legend_x + 26, legend_y, series.name))
    return "\n".join([*parts, "</svg>"])


def _step(extent: float) -> float:
    """Return a round distance of ticks, so that there are at most six."""
    rough = (extent if extent > sys.float_info.min else 1.0) / 5
    scale = 10.0 ** floor(log10(rough))
    return next(scale * unit for unit in (1, 2, 2.5, 5, 10) if scale * unit >= rough * (1 - 1e-9))


def shown(value: float) -> str:
    """Return a number as axes show it, with four digits."""
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    return f"{value:,.4g}"


def _line(start: tuple[float, float], end: tuple[float, float], colour: str, more: str = "") -> str:
    ends = f'x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{1 if colour == _GRID else 2}"{more}/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-weight="{weight}">{escape(text)}</text>'
