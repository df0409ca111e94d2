"""Parts of an HTML page that stands by itself: no script, and no style or picture from elsewhere.

Draws what it is given and knows nothing of plans or runs. All text is escaped here. Charts stretch
with the page, so their words are HTML beside the picture, readable on a phone too. Used by the page
of a plan and by the report of a run. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise

__all__ = [
    "COLOURS",
    "ChartLine",
    "StripRow",
    "binned",
    "details",
    "document",
    "line_chart",
    "strip_rectangles",
    "strips",
    "table",
    "thinned",
]

COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#7b4fa3", "#b8860b", "#2a9d8f", "#d1495b", "#777777")
_ON_DARK = ("#6fb3e6", "#f08a72", "#7fc98a", "#b995dd", "#e0b64a", "#5fcfc0", "#ee8797", "#aaaaaa")
_WIDTH, _HEIGHT = 1000, 200  # of a chart's own coordinates, which the page stretches
_STRIP = 20  # pixels: the height of one row of strips
_MOST_POINTS = 500  # of a line: more cannot be told apart
_BINS = 260  # equal parts of the time in a strip


def _colours(values: Sequence[str]) -> str:
    return "".join(f"--c{number}:{colour};" for number, colour in enumerate(values))


_CLASSES = "".join(
    f".s{number}{{stroke:var(--c{number})}}.f{number}{{fill:var(--c{number});"
    f"background:var(--c{number})}}"
    for number in range(len(COLOURS))
)
_STYLE = (
    f":root{{color-scheme:light dark;--text:#222;--dim:#5f6368;--page:#fff;--line:#dadce0;"
    f"--limit:#c00;{_colours(COLOURS)}}}"
    "@media(prefers-color-scheme:dark){:root{--text:#e8eaed;--dim:#a5abb2;--page:#17191c;"
    f"--line:#3c4043;--limit:#ff7b72;{_colours(_ON_DARK)}}}}}"
    "body{font:15px/1.45 system-ui,sans-serif;max-width:1060px;margin:2em auto;padding:0 1em;"
    "color:var(--text);background:var(--page);overflow-wrap:anywhere}"
    ".wide{overflow-x:auto}table{border-collapse:collapse}caption{text-align:left;"
    "color:var(--dim)}td,th{padding:.15em 1em .15em 0;text-align:left;vertical-align:top;"
    "overflow-wrap:normal}td{overflow-wrap:anywhere;min-width:4em}"
    "td:first-child{min-width:6em}"
    "h1{font-size:1.6em;line-height:1.2}h2{margin-top:1.6em}svg{max-width:100%;height:auto}"
    "svg text{fill:currentColor}figure{margin:.6em 0 1.4em}figcaption{font-weight:600}"
    ".plot{display:grid;grid-template-columns:6.5em 1fr;gap:.5em}"
    ".plot svg{width:100%;height:190px;border-left:1px solid var(--line);"
    "border-bottom:1px solid var(--line)}"
    ".axis{display:flex;flex-direction:column;justify-content:space-between;text-align:right;"
    "color:var(--dim);font-size:13px}.ends{display:flex;justify-content:space-between;"
    "margin-left:7em;color:var(--dim);font-size:13px}"
    "polyline{fill:none;stroke-width:2}.limit{stroke:var(--limit);stroke-width:1.5;"
    "stroke-dasharray:6 4;fill:none}"
    ".legend{list-style:none;margin:.2em 0 0 7em;padding:0;display:flex;flex-wrap:wrap;"
    "gap:.1em 1.2em}.legend i{display:inline-block;width:.8em;height:.8em;margin-right:.4em}"
    ".strip{display:grid;grid-template-columns:10em 1fr 9em;gap:.1em .6em;align-items:center;"
    f"margin:.15em 0}}.strip svg{{width:100%;height:{_STRIP}px;background:var(--line)}}"
    ".dim{color:var(--dim)}.warn{border-left:4px solid var(--limit);padding-left:.8em}"
    "summary{cursor:pointer}"
    "@media(max-width:640px){body{margin:1em auto}h1{font-size:1.3em}"
    ".plot{grid-template-columns:4.8em 1fr}.ends,.legend{margin-left:5.3em}"
    ".strip{grid-template-columns:1fr auto}.strip svg{grid-column:1/-1;grid-row:2}"
    "td,th{padding-right:.7em}}" + _CLASSES
)


def document(title: str, body: Sequence[str]) -> str:
    """Return the whole page; `body` is HTML."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    )
    lines = "\n".join(body)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{lines}\n</body></html>\n'
    )


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str = "") -> str:
    """Return a table of text; it scrolls by itself where it is wider than the page."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    named = f"<caption>{escape(caption)}</caption>" if caption else ""
    body = "".join(line(row, "td") for row in rows)
    return f'<div class="wide"><table>{named}{line(titles, "th")}{body}</table></div>'


def details(summary: str, body: str) -> str:
    """Return HTML that is shown when the reader opens it."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


# --- lines ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ChartLine:
    """Values over steps, in order; `text` stands in the legend."""

    text: str
    points: Sequence[tuple[float, float]]


def thinned(
    points: Sequence[tuple[float, float]], keep: Callable[[Sequence[float]], float]
) -> list[tuple[float, float]]:
    """Return so many points that a chart can show: of neighbours, what `keep` makes of them."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    edges = [len(points) * number // _MOST_POINTS for number in range(_MOST_POINTS + 1)]
    return [
        (points[last - 1][0], keep([value for _, value in points[first:last]]))
        for first, last in pairwise(edges)
    ]


def line_chart(
    title: str,
    series: Sequence[ChartLine],
    *,
    written: Callable[[float], str],
    limit: float | None = None,
    from_zero: bool = False,
    x_name: str = "step",
) -> str:
    """Return a chart of lines with a legend; `written` says a value in words.

    `limit` is a dashed line above or among them.
    """
    points = [point for line in series for point in line.points]
    if not points:
        return ""
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    values = [value for _, value in points] + ([] if limit is None else [limit])
    low, high = (0.0 if from_zero else min(values)), max(values)
    # A flat line needs some height, or it would be divided by 0.
    spread, length = (high - low) or abs(high) or 1.0, (last - first) or 1.0

    def x(at: float) -> float:
        return _WIDTH * (at - first) / length

    def y(value: float) -> float:
        # Room above and below, so that no line lies on the edge.
        return 6 + (_HEIGHT - 12) * (1 - (value - low) / spread)

    drawn = [_line(line.points, number, x, y) for number, line in enumerate(series)]
    if limit is not None:
        drawn.append(
            f'<line class="limit" x1="0" x2="{_WIDTH}" y1="{y(limit):.1f}" y2="{y(limit):.1f}" '
            'vector-effect="non-scaling-stroke"/>'
        )
    legend = "".join(
        f'<li><i class="f{number % len(COLOURS)}"></i>{escape(line.text)}</li>'
        for number, line in enumerate(series)
    )
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><div class="plot"><div class="axis">'
        f"<span>{escape(written(high))}</span><span>{escape(written(low))}</span></div>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)}">{"".join(drawn)}</svg></div>'
        f'<div class="ends"><span>{escape(x_name)} {first:g}</span><span>{last:g}</span></div>'
        f'<ul class="legend">{legend}</ul></figure>'
    )


def _line(
    points: Sequence[tuple[float, float]],
    number: int,
    x: Callable[[float], float],
    y: Callable[[float], float],
) -> str:
    path = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points)
    # One point has no length: a line across the chart shows it.
    if len(points) == 1:
        path = f"0,{y(points[0][1]):.1f} {_WIDTH},{y(points[0][1]):.1f}"
    colour = number % len(COLOURS)
    return f'<polyline class="s{colour}" points="{path}" vector-effect="non-scaling-stroke"/>'


# --- strips ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class StripRow:
    """What one resource did over a time: for each of equal parts, how much of it that worked."""

    name: str
    used: Sequence[float]
    text: str


def binned(intervals: Iterable[tuple[int, int]], end_ns: int) -> list[float]:
    """Return the part of each of so many equal times that lies in these intervals."""
    # In integers, so that the edges of neighbours are the same.
    edges = [end_ns * number // _BINS for number in range(_BINS + 1)]
    used = [0] * _BINS
    for start_ns, stop_ns in intervals:
        # What ends with the step ends in the last part.
        first = min(start_ns * _BINS // end_ns, _BINS - 1)
        last = min(stop_ns * _BINS // end_ns, _BINS - 1)
        for number in range(first, last + 1):
            used[number] += max(min(stop_ns, edges[number + 1]) - max(start_ns, edges[number]), 0)
    return [
        min(ns / max(end - start, 1), 1.0)
        for ns, (start, end) in zip(used, pairwise(edges), strict=True)
    ]


def strip_rectangles(
    used: Sequence[float], paint: str, *, left: float, top: float, width: float, height: float
) -> Iterator[str]:
    """Yield SVG: the darker, the larger the part of time that was used; `paint` is an attribute."""
    at = 0
    # Neighbours of one shade are one rectangle: no seam shows, and the page is small.
    for shade, run in groupby(round(part, 2) for part in used):
        parts = len(list(run))
        if shade:
            yield (
                f'<rect x="{left + width * at / len(used):.1f}" y="{top:g}" '
                f'width="{width * parts / len(used):.2f}" height="{height:g}" {paint} '
                f'fill-opacity="{shade:.2f}"/>'
            )
        at += parts


def strips(rows: Sequence[StripRow], *, end: str) -> str:
    """Return a strip for each resource, one below the other, over a time that lasts until `end`."""
    drawn = []
    for number, row in enumerate(rows):
        paint = f'class="f{number % len(COLOURS)}"'
        inner = "".join(
            strip_rectangles(row.used, paint, left=0, top=0, width=_WIDTH, height=_STRIP)
        )
        drawn.append(
            f'<div class="strip"><span>{escape(row.name)}</span>'
            f'<svg viewBox="0 0 {_WIDTH} {_STRIP}" preserveAspectRatio="none" role="img" '
            f'aria-label="{escape(f"{row.name}: {row.text}")}">{inner}</svg>'
            f'<span class="dim">{escape(row.text)}</span></div>'
        )
    return "".join(drawn) + f'<p class="dim">From 0 to {escape(end)}.</p>'
