"""The report of a run: one HTML page of what was trained, what it took, and what was planned.

Pure: from a RecordedRun to text. Believes no figure that is missing or no number, so that an empty,
broken or killed run has a page too. Never imports torch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from types import MappingProxyType

from infinity_engine.plan import Lane
from infinity_engine.reporting.over_time import HeldOverTime, HeldPart
from infinity_engine.reporting.page import (
    ChartLine,
    StripRow,
    binned,
    details,
    document,
    line_chart,
    strips,
    table,
    thinned,
)
from infinity_engine.training.records import RecordedRun, RunStep, entries, figure
from infinity_engine.units import format_bytes, format_decimal_bytes, format_rate

__all__ = ["report_page"]

_MOST = 1 << 62  # bytes or ns: more was not measured
_HELD_ROWS = 200  # of a table of what blocks held
_ROWS = 20  # of a table of steps
_WARM = 2  # steps at the beginning that are slower than the rest: no trace, no cache
_TIERS = MappingProxyType({"DEVICE": "device", "HOST": "host"})
_PHASES = ("forward", "backward", "update")
_HOW = MappingProxyType(
    {
        "finished": "It has finished.",
        "stopped": "It was told to stop, and saved first: --resume goes on where it was.",
        "interrupted": "It was interrupted: --resume goes on from the last checkpoint.",
        "failed": "It has failed: --resume goes on from the last checkpoint.",
    }
)


def report_page(run: RecordedRun) -> str:
    """Return the page."""
    model = str(run.description.get("model") or run.path)
    name = model.rstrip("/").rpartition("/")[2]
    body = [
        f"<h1>{escape(name)}: {escape(_made(run))}</h1>",
        *_state(run),
        *_section("Loss", _loss(run)),
        *_section("Memory against budgets", _memory(run)),
        *_section("A step by resource", _resources(run)),
        *_section("Activations over time", _activations(run)),
        *_section("Bandwidth", _bandwidth(run)),
        *_section("Predicted and measured", _predicted(run)),
        *_section("Wear", _wear(run)),
        *_section("Speed", _speed(run)),
        *_section("The run", _about(run)),
    ]
    return document(f"Report on {name}", body)


def _section(title: str, parts: Iterator[str]) -> list[str]:
    found = [part for part in parts if part]
    return [f"<section><h2>{escape(title)}</h2>", *found, "</section>"] if found else []


# --- the head -------------------------------------------------------------------------------------


def _made(run: RecordedRun) -> str:
    of_all = figure(run.description, "steps")
    if not run.steps:
        return "no step was recorded"
    last = run.steps[-1].number
    return f"{last:,}{_number(of_all, ' of {:,.0f}')} steps"


def _state(run: RecordedRun) -> Iterator[str]:
    ended = run.ended
    if run.goes_on:
        yield "<p>It goes on: this page shows how far it has come.</p>"
    elif ended is not None:
        how = str(ended.fields.get("how"))
        yield f"<p>{escape(_HOW.get(how, f'It has ended: {how}.'))}</p>"
        if ended.fields.get("error"):
            yield f'<p class="warn">{escape(str(ended.fields["error"]))}</p>'
    elif run.events:
        yield (
            '<p class="warn">It was killed: its records end without a last word. --resume goes on '
            "from the last checkpoint.</p>"
        )
    else:
        yield '<p class="warn">Nothing was recorded: it ended before its first step.</p>'
    for text in run.damage:
        yield f'<p class="warn">{escape(text)}.</p>'
    for device in dict.fromkeys(str(step.fields.get("device", "")) for step in run.steps):
        if device.startswith("emulated"):
            yield f'<p class="warn">Times are those of a device that is {escape(device)}.</p>'
        elif "," in device:
            yield f'<p class="warn">Times are those of {escape(device)}.</p>'


# --- sections -------------------------------------------------------------------------------------


def _loss(run: RecordedRun) -> Iterator[str]:
    points = _points(run.steps, "loss")
    if not points:
        return
    line = ChartLine(
        text=f"loss: {points[0][1]:.4g} at first, {points[-1][1]:.4g} at last",
        points=thinned(points, statistics.fmean),
    )
    yield line_chart("Loss of each step", [line], written=lambda value: f"{value:.4g}")
    unknown = sum(step.figure("loss") is None for step in run.steps)
    if unknown:
        yield f'<p class="warn">{unknown} steps have a loss that is no number.</p>'
    yield details("Loss in a table", _steps_table(run))


def _steps_table(run: RecordedRun) -> str:
    chosen = [run.steps[at] for at in _evenly(len(run.steps))]
    rows = [
        (
            f"{step.number:,}",
            _number(step.figure("loss"), "{:.4f}"),
            _number(step.figure("lr"), "{:.3g}"),
            _number(step.figure("gradient_norm"), "{:.4g}"),
            _number(step.figure("turn_s"), "{:.3g}"),
            _number(step.figure("tokens"), "{:,.0f}"),
            str(step.fields.get("outcome", "")),
        )
        for step in chosen
    ]
    titles = ("step", "loss", "rate", "gradient norm", "seconds", "tokens", "outcome")
    return table(titles, rows, caption=f"{len(rows)} of {len(run.steps)} steps")


def _memory(run: RecordedRun) -> Iterator[str]:
    names = dict.fromkeys(name for step in run.steps for name in step.entries("peaks"))
    rows = []
    for name in names:
        points = _points(run.steps, "peaks", name, "bytes")
        limits = _values(run.steps, "peaks", name, "limit")
        if not points or not limits:
            continue
        most, limit = max(value for _, value in points), limits[-1]
        label = _TIERS.get(name, name)
        # A tier that the run has no use for needs no picture.
        if most:
            title = f"{label}: at most {format_bytes(round(most))} of {format_bytes(round(limit))}"
            lines = [ChartLine(text="held at most so far", points=thinned(points, max))]
            held = _points(run.steps, "held", name)
            if held:
                lines.append(ChartLine(text="held after the step", points=thinned(held, max)))
            yield line_chart(title, lines, written=_bytes, limit=limit, from_zero=True)
        rows.append(
            (label, format_bytes(round(most)), format_bytes(round(limit)), _part(most, limit))
        )
    if rows:
        process = max(_values(run.steps, "process_peak_bytes"), default=None)
        if process is not None:
            rows.append(
                ("process, Python and torch included", format_bytes(round(process)), "", "")
            )
        yield table(
            ("where", "held at most", "budget", "part"),
            rows,
            caption="The most that each tier has held; the dashed line is its budget",
        )


def _resources(run: RecordedRun) -> Iterator[str]:
    spans = [span for span in map(_span, _list(run.timeline.get("spans"))) if span is not None]
    whole_ns = figure(run.timeline, "ns")
    if spans and whole_ns is not None and whole_ns >= 1:
        end_ns = int(whole_ns)
        number = _number(figure(run.timeline, "step"), "{:,.0f}")
        yield f"<p>Measured in step {number}, which took {_seconds(end_ns)}.</p>"
        rows = list(_measured_strips(spans, end_ns))
        yield strips(rows, end=_seconds(end_ns))
        yield table(("resource", "busy"), [(row.name, row.text) for row in rows])
    planned = [
        StripRow(name=lane.label, used=used, text=f"{sum(used) / len(used):.0%}")
        for lane in Lane
        for used in [_parts(entries(run.description, "prediction", "strips").get(lane.value))]
        if used
    ]
    shown_s = figure(run.description, "prediction", "shown_s")
    if planned and shown_s is not None:
        yield "<p>As the planner expects it, from the update of one step to the backward:</p>"
        yield strips(planned, end=_seconds(shown_s * 1e9))
    if not spans and not planned:
        return
    if any("nvme" in name for step in run.steps[-1:] for name in step.entries("links")):
        yield (
            '<p class="dim">Drives do not say when they were busy: the table of bandwidths has '
            "their bytes.</p>"
        )


def _measured_name(lane: Lane) -> str:
    # Modules that run on the CPU have no spans of its lane.
    return "CPU updates" if lane is Lane.HOST else lane.label


def _measured_strips(spans: Sequence[tuple[str, str, int, int]], end_ns: int) -> Iterator[StripRow]:
    # Spans of the engine's own thread have no track; their names say what they are.
    groups = [
        *((phase, [span for span in spans if span[1] == phase]) for phase in _PHASES),
        *(
            (_measured_name(lane), [span for span in spans if span[0] == lane.value])
            for lane in Lane
        ),
        ("waiting", [span for span in spans if span[1].startswith("wait for")]),
    ]
    for label, found in groups:
        inside = [
            (max(start, 0), min(end, end_ns))
            for _, _, start, end in found
            if end >= 0 and start <= end_ns and start <= end
        ]
        if inside:
            used = binned(inside, end_ns)
            yield StripRow(name=label, used=used, text=f"{sum(used) / len(used):.0%} of the step")


def _activations(run: RecordedRun) -> Iterator[str]:
    found = HeldOverTime(
        [part for part in map(_held_part, _list(run.timeline.get("activations"))) if part]
    )
    if not found.parts:
        return
    number = _number(figure(run.timeline, "step"), "{:,.0f}")
    yield f"<p>What blocks held in step {number}, from the first block to the last gradient.</p>"
    lines = [
        ChartLine(
            text=f"{held}: at most {format_bytes(max(nbytes for _, nbytes in points))}",
            points=thinned(list(_as_stairs(points)), max),
        )
        for held in found.ways()
        for points in [found.points(held)]
    ]
    yield line_chart(
        "Activations of all blocks", lines, written=_bytes, from_zero=True, x_name="ms"
    )
    rows = [
        (part.block, part.held, format_bytes(part.nbytes), _ms(part.start_ns), _ms(part.end_ns))
        for part in found.parts[:_HELD_ROWS]
    ]
    yield details(
        "Activations by block",
        table(
            ("block", "held", "bytes", "from, in ms", "until, in ms"),
            rows,
            caption=f"{len(rows)} of {len(found.parts)}",
        ),
    )
    yield (
        '<p class="dim">What waits on the host or on drives counts from the end of its block on: '
        "up to activations.resident_bytes of it is still where modules compute.</p>"
    )


def _as_stairs(points: Sequence[tuple[int, int]]) -> Iterator[tuple[float, float]]:
    """Yield points in ms whose line goes up and down at once, not little by little."""
    before = 0
    for at, nbytes in points:
        yield at / 1e6, before
        yield at / 1e6, nbytes
        before = nbytes


def _bandwidth(run: RecordedRun) -> Iterator[str]:
    warm = _warm(run)
    rows = []
    for lane in Lane:
        moved = [
            sum(figure(carried, name) or 0 for name in carried)
            for step in warm
            for carried in [step.entries("links", lane.value, "bytes")]
            if carried
        ]
        if not moved:
            continue
        achieved = _median(_values(warm, "links", lane.value, "bytes_per_s"))
        calibrated = figure(run.description, "prediction", "rates", lane.value)
        over = {str(step.entries("links", lane.value).get("over")) for step in warm} - {"None"}
        rows.append(
            (
                lane.label,
                format_bytes(round(statistics.median(moved))),
                _shown(achieved, format_rate),
                _shown(calibrated, format_rate),
                _quotient(achieved, calibrated, "{:.0%}"),
                ", ".join(sorted(over)),
            )
        )
    if not rows:
        return
    source = run.description.get("prediction")
    rates_are = str(source.get("rates_are")) if isinstance(source, dict) else "unknown"
    yield table(
        ("link", "bytes in a step", "achieved", "calibrated", "achieved of that", "counted"),
        rows,
        caption=f"Medians over steps. The rates to compare with are {rates_are}",
    )
    shares = [
        (name, f"{share:.0%}")
        for name in dict.fromkeys(name for step in warm for name in step.entries("drives"))
        for share in [_median(_values(warm, "drives", name, "calibrated_share"))]
        if share is not None
    ]
    if shares:
        yield table(
            ("drive", "part of the step that its bytes take at its calibrated rates"), shares
        )


def _predicted(run: RecordedRun) -> Iterator[str]:
    warm = _warm(run)
    expected_s = figure(run.description, "prediction", "step_s")
    if not warm:
        return
    rows = [("step", expected_s, _median(_values(warm, "seconds")))]
    named = entries(run.description, "prediction", "phases")
    for phase in _PHASES:
        rows.append((phase, figure(named, phase), _median(_values(warm, "phases", phase))))
    told = [
        (name, _in_seconds(planned), _in_seconds(measured), _quotient(planned, measured, "{:.2f}"))
        for name, planned, measured in rows
    ]
    yield table(
        ("seconds", "predicted", "measured", "predicted over measured"),
        told,
        caption=f"Medians over {len(warm)} steps",
    )
    if expected_s is None:
        yield (
            '<p class="dim">The plan had no times: the rate of computing was not known. '
            "infinity calibrate measures it.</p>"
        )


def _wear(run: RecordedRun) -> Iterator[str]:
    rows = []
    for name, nbytes in run.written.items():
        rated = _values(run.steps, "drives", name, "rated_bytes")
        rows.append(
            (
                name,
                format_decimal_bytes(nbytes),
                format_decimal_bytes(round(rated[-1])) if rated else "not given (--tbw)",
                f"{nbytes / rated[-1]:.4%}" if rated and rated[-1] else "",
            )
        )
    if rows:
        yield table(
            ("drive", "written by this run", "rated endurance (TBW)", "part of it"),
            rows,
            caption="Without checkpoints, and without what other programs have written",
        )


def _speed(run: RecordedRun) -> Iterator[str]:
    points = [
        (float(step.number), tokens / seconds)
        for step in run.steps
        for tokens, seconds in [(step.figure("tokens"), step.figure("turn_s"))]
        if tokens is not None and seconds
    ]
    if points:
        typical = statistics.median(value for _, value in points)
        line = ChartLine(
            text=f"tokens a second: {typical:,.1f} in the middle step",
            points=thinned(points, statistics.fmean),
        )
        yield line_chart(
            "Tokens a second", [line], written=lambda value: f"{value:,.1f}", from_zero=True
        )
    waits = dict.fromkeys(name for step in _warm(run) for name in step.entries("waits"))
    rows = [
        (name, _seconds(1e9 * sum(_values(_warm(run), "waits", name)) / len(_warm(run))))
        for name in waits
    ]
    if rows:
        yield table(("the host's waiting", "in each step"), rows, caption="Means over steps")


def _about(run: RecordedRun) -> Iterator[str]:
    described = run.description
    rows = [("directory", str(run.path))]
    rows += [
        (name, str(described[name])) for name in ("model", "data", "torch") if name in described
    ]
    rows += [("file", str(path)) for path in _list(described.get("files"))]
    if rows:
        yield table(("", ""), rows)
    settings = [
        (str(name), str(value))
        for part in ("deciding", "engine")
        for name, value in entries(described, part).items()
        if value is not None
    ]
    if settings:
        yield details("Settings", table(("setting", "value"), settings))
    happened = [
        (_when(event.fields), event.kind, _what(event.fields)) for event in run.events[-_ROWS:]
    ]
    if happened:
        yield table(("when (UTC)", "what", ""), happened, caption="What has happened")


# --- figures --------------------------------------------------------------------------------------


def _warm(run: RecordedRun) -> Sequence[RunStep]:
    """Return the steps to take medians of: without the first ones, where there are others."""
    return run.steps[_WARM:] or run.steps


def _points(steps: Sequence[RunStep], *names: str) -> list[tuple[float, float]]:
    return [
        (float(step.number), value) for step in steps if (value := step.figure(*names)) is not None
    ]


def _values(steps: Sequence[RunStep], *names: str) -> list[float]:
    return [value for _, value in _points(steps, *names)]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _evenly(count: int) -> list[int]:
    """Return the numbers of so many rows of a table, the first and the last among them."""
    if count <= _ROWS:
        return list(range(count))
    return [number * (count - 1) // (_ROWS - 1) for number in range(_ROWS)]


def _span(given: object) -> tuple[str, str, int, int] | None:
    """Return the track, name, start and end of a span; None where it is something else."""
    match given:
        case [str() as track, str() as name, int() as start, int() as end]:
            return track, name, start, end
    return None


def _held_part(given: object) -> HeldPart | None:
    """Return what a block held; None where it is something else."""
    match given:
        case [str() as block, str() as held, int() as nbytes, int() as start, int() as end]:
            if 0 <= nbytes < _MOST and 0 <= start <= end < _MOST:
                return HeldPart(block=block, held=held, nbytes=nbytes, start_ns=start, end_ns=end)
    return None


def _parts(given: object) -> list[float]:
    """Return a strip's parts; nothing where one is no number between 0 and 1."""
    found = [part for part in _list(given) if isinstance(part, int | float) and 0 <= part <= 1]
    return [float(part) for part in found] if len(found) == len(_list(given)) else []


def _list(given: object) -> list[object]:
    return given if isinstance(given, list) else []


# --- words ----------------------------------------------------------------------------------------


def _shown(value: float | None, write: Callable[[float], str], otherwise: str = "") -> str:
    return otherwise if value is None else write(value)


def _number(value: float | None, form: str) -> str:
    return _shown(value, form.format)


def _in_seconds(value: float | None) -> str:
    return _shown(value, lambda seconds: _seconds(seconds * 1e9), "unknown")


def _quotient(part: float | None, whole: float | None, form: str) -> str:
    return "" if part is None or not whole else form.format(part / whole)


def _bytes(value: float) -> str:
    return format_bytes(round(value))


def _part(value: float, whole: float) -> str:
    return f"{value / whole:.1%}" if whole else ""


def _seconds(ns: float) -> str:
    seconds = ns / 1e9
    return f"{seconds:,.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _ms(ns: int) -> str:
    return f"{ns / 1e6:,.3f}"


def _when(fields: Mapping[str, object]) -> str:
    at = figure(fields, "at")
    try:
        return _shown(at, lambda at: time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at)))
    except (ValueError, OverflowError, OSError):
        return ""


def _what(fields: Mapping[str, object]) -> str:
    return ", ".join(
        f"{name}: {value}"
        for name, value in fields.items()
        if name not in {"event", "at"} and value not in ("", None)
    )
