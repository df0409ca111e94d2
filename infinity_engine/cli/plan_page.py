"""The page of `infinity plan --html`: the answer, memory over the step, and what each link does.

One file that stands by itself: no script, no style or picture of elsewhere. Only draws what the
report says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from infinity_engine.cli.plan_answer import (
    computes,
    refused,
    setting_in_words,
    step_in_words,
    what_follows,
)
from infinity_engine.plan import Lane, Tier
from infinity_engine.reporting.page import COLOURS, binned, document, strip_rectangles, table
from infinity_engine.units import format_bytes

if TYPE_CHECKING:
    from infinity_engine.advice.activations import ActivationAdvice
    from infinity_engine.advice.advising import Advice
    from infinity_engine.advice.tiles import TileAdvice
    from infinity_engine.placement.training import Training
    from infinity_engine.sim.remedies import Refusal
    from infinity_engine.sim.report import Holding, PlanReport

__all__ = ["page", "refusal_page"]

_WIDTH, _LEFT, _RIGHT = 1000, 110, 370  # pixels: of a picture, and of the labels at its sides
_CHART, _ROW = 220, 26  # pixels: the height of a chart, and of a lane's strip


def page(
    report: PlanReport,
    training: Training,
    advice: Advice,
    ways: ActivationAdvice | None = None,
    tiles: TileAdvice | None = None,
) -> str:
    """Return the page."""
    parts = [
        f"{report.ranks} x {report.micro_batches} x {training.batch} sequences of "
        f"{training.sequence} tokens",
        "activations checkpointed" if training.checkpointing else "all activations kept",
        f"{report.tokens_per_s:,.1f} tokens/s" if computes(report) else "tokens per second unknown",
    ]
    body = [
        f"<h1>{escape(report.model)}: {escape(step_in_words(report, advice))}</h1>",
        f"<p>{report.parameters:,} parameters; {escape('; '.join(parts))}.</p>",
        "<h2>Phases</h2>",
        table(("phase", "seconds", "bound by"), _phases(report)),
        "<h2>Memory over the step</h2>",
        *(_memory(report, tier) for tier in Tier if report.held(tier) and report.limits[tier]),
        "<h2>What is busy when</h2>",
        _links(report),
        "<h2>Settings</h2>",
        table(
            ("setting", "value"),
            [(name, setting_in_words(value)) for name, value in report.settings.items()],
        ),
        *_what_follows(report, advice, ways, tiles),
        *(f"<p>{escape(note)}.</p>" for note in report.notes),
    ]
    return document(f"Plan for {report.model}", body)


def _what_follows(
    report: PlanReport,
    advice: Advice,
    ways: ActivationAdvice | None,
    tiles: TileAdvice | None,
) -> Iterator[str]:
    for title, rows in what_follows(report, advice, ways, tiles):
        yield f"<h2>{escape(title)}</h2>"
        yield table(("", ""), [(label, str(value)) for label, value in rows])


def refusal_page(refusal: Refusal) -> str:
    """Return the page of what does not fit: what is there, and what would do."""
    # The first title is the heading of the page.
    body = [f"<h1>{escape(title)}</h1>" for title, _ in [next(iter(refused(refusal)))]]
    for title, rows in refused(refusal):
        if not body[-1].startswith("<h1>"):
            body.append(f"<h2>{escape(title)}</h2>")
        body.append(table(("", ""), [(label, str(value)) for label, value in rows]))
    return document(f"{refusal.model} does not fit", body)


def _phases(report: PlanReport) -> Iterator[Sequence[str]]:
    for phase in report.phases:
        if report.knows(phase):
            yield phase.name, f"{phase.seconds:,.3g}", phase.bound_by
        else:
            yield phase.name, "unknown", ""
    if report.micro_batches > 1 and computes(report):
        yield f"{report.micro_batches - 1} micro-batches more", f"{report.repeated_s:,.3g}", ""


# --- memory ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Band:
    """Bytes over time: at each point in time so many, on straight lines between them."""

    name: str
    values: tuple[float, ...]


def _memory(report: PlanReport, tier: Tier) -> str:
    """Return a chart of what a tier holds, one band upon another, below its limit."""
    # What is held changes only where a phase begins or ends.
    times = sorted(
        {
            0.0,
            *(end / 1e9 for _, *ends in report.timeline.cuts for end in ends),
        }
    )
    bands = [_band(holding, times, report) for holding in report.holdings if holding.tier is tier]
    limit = report.limits[tier]
    # Room for the limit, and for bands above it.
    top = max(limit, *(sum(band.values[at] for band in bands) for at in range(len(times))))
    # Not 0, where no phase has a time.
    end = times[-1] or 1.0

    def x(at: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * at / end

    def y(nbytes: float) -> float:
        return 20 + (_CHART - 50) * (1 - nbytes / top)

    drawn = []
    # Where the next band begins: bands stand one upon another.
    below = [0.0] * len(times)
    for number, band in enumerate(bands):
        above = [low + value for low, value in zip(below, band.values, strict=True)]
        points = [
            *((x(at), y(value)) for at, value in zip(times, above, strict=True)),
            # Back along the lower edge, so that the points close a polygon.
            *((x(at), y(value)) for at, value in reversed([*zip(times, below, strict=True)])),
        ]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        colour = COLOURS[number % len(COLOURS)]
        drawn.append(f'<polygon points="{path}" fill="{colour}" fill-opacity="0.8"/>')
        place = _WIDTH - _RIGHT + 14, 30 + 17 * number
        drawn.append(
            f'<rect x="{place[0]}" y="{place[1] - 10}" width="11" height="11" fill="{colour}"/>'
        )
        drawn.append(
            _text(place[0] + 17, place[1], f"{band.name}: {format_bytes(round(max(band.values)))}")
        )
        below = above
    right = _WIDTH - _RIGHT
    drawn.append(
        f'<line x1="{_LEFT}" x2="{right}" y1="{y(limit):.1f}" y2="{y(limit):.1f}" stroke="#c00"/>'
    )
    drawn.append(_text(_LEFT - 6, y(limit) + 4, format_bytes(limit), anchor="end"))
    drawn.append(_text(_LEFT - 6, y(0) + 4, "0", anchor="end"))
    drawn += _marks(report, x, y(0))
    # The legend may be longer than the chart is high.
    height = max(_CHART, 40 + 17 * len(bands))
    return f"<h3>{tier.value}</h3>" + _svg(
        height, drawn, f"memory of the {tier.value} over the step"
    )


def _band(holding: Holding, times: Sequence[float], report: PlanReport) -> _Band:
    """Return a holding over the step.

    Gradients come in the backward and go in the update; activations are there in between.
    """
    begins_ns = {name: begin_ns for name, begin_ns, _ in report.timeline.cuts}
    forward_ns, start = begins_ns.get("forward"), begins_ns["backward"] / 1e9
    whole, nothing = float(holding.nbytes), 0.0
    values = []
    for at in times:
        if holding.what == "activations":
            # All activations are there as the backward begins.
            values.append(whole if at == start else nothing)
        elif (
            holding.what in {"gradients", "gradients that stay", "sums of gradients"}
            and forward_ns is not None
        ):
            # With several micro-batches, sums stay through all forwards.
            computing = (
                forward_ns / 1e9 <= at <= start and report.micro_batches == 1 and forward_ns > 0
            )
            values.append(nothing if computing else whole)
        else:
            values.append(whole)
    return _Band(holding.what, tuple(values))


def _marks(report: PlanReport, x: object, bottom: float) -> Iterator[str]:
    assert callable(x), "it places times"
    for name, start_ns, end_ns in report.timeline.cuts:
        if end_ns > start_ns:
            start, end = x(start_ns / 1e9), x(end_ns / 1e9)
            ends = f'x1="{start:.1f}" x2="{start:.1f}" y1="20" y2="{bottom:.1f}"'
            yield f'<line {ends} stroke="#fff" stroke-width="1"/>'
            # A narrower phase has no room for its label.
            if end - start > 60:
                label = f"{name}: {(end_ns - start_ns) / 1e9:,.3g} s"
                yield _text((start + end) / 2, bottom + 18, label, anchor="middle")


# --- links ----------------------------------------------------------------------------------------


def _links(report: PlanReport) -> str:
    """Return a strip for each lane: the darker, the larger the part of time in which it works."""
    timeline = report.timeline
    end_ns = max(end for _, _, end in timeline.cuts) or 1
    width = _WIDTH - _LEFT - _RIGHT
    drawn, of_lanes = [], timeline.moved
    # A lane with no work in this step has no strip.
    spans = timeline.spans
    lanes = [lane for lane in Lane if any(span.lane is lane for span in spans)]
    for number, lane in enumerate(lanes):
        top = 10 + _ROW * number
        drawn.append(_text(_LEFT - 6, top + 15, lane.label, anchor="end"))
        used = binned([(span.start_ns, span.end_ns) for span in spans if span.lane is lane], end_ns)
        drawn += strip_rectangles(
            used,
            f'fill="{COLOURS[number]}"',
            left=_LEFT,
            top=top,
            width=width,
            height=_ROW - 6,
        )
        busy = sum(used) / len(used)
        moved = of_lanes.get(lane)
        told = f"{busy:.0%}" + (f", {format_bytes(moved)}" if moved else "")
        drawn.append(_text(_WIDTH - _RIGHT + 14, top + 15, told))

    def x(at: float) -> float:
        return _LEFT + width * at * 1e9 / end_ns

    bottom = 12 + _ROW * len(lanes)
    drawn += _marks(report, x, bottom)
    return _svg(bottom + 30, drawn, "what is busy over the step")


def _svg(height: float, parts: Sequence[str], label: str) -> str:
    box = f'viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" height="{height:.0f}"'
    body = "\n".join(parts)
    return (
        f'<svg {box} role="img" aria-label="{escape(label)}" font-family="sans-serif" '
        f'font-size="12">\n{body}\n</svg>'
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
