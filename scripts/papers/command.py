"""`scripts/papers/reproduce`: the papers' experiments computed from the rates that they print, and
scale on paper.

Prints what the modules beside it return, as tables, as one JSON object or as a page; computes
nothing by itself. Exit status: 0; 1 where a file cannot be written; 2 where there is no such
figure, table or machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deepnvme.cli.report import Output, installed_version
from infinity_engine.errors import ConfigError

if TYPE_CHECKING:
    from papers.charts import Chart
    from papers.comparison import Cell, Comparison
    from papers.scale import Point

__all__ = ["SCHEMA", "main"]

SCHEMA = 1  # of the JSON object: raised when a field changes its meaning or goes

_PIPE_CLOSED = 141  # what a shell reports for a command that SIGPIPE ended
_PROGRAM = "scripts/papers/reproduce"
_TITLES = MappingProxyType({"zero-infinity": "ZeRO-Infinity", "dos": "Deep Optimizer States"})
_STYLES = MappingProxyType(
    {
        "matches": "green",
        "deviates": "bold yellow",
        "inconsistent in the paper": "magenta",
        "not printed": "dim",
    }
)
_HEAD = ("", "paper", "computed", "")
_SCALE_MACHINES = ("dgx2", "h200_node")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (by default this process's) and return its exit status."""
    try:
        status = _run(_parse(arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    return status


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Compute the experiments of the papers from their machines' rates, or what "
        "scale takes.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--paper", choices=list(_TITLES), help="the paper whose experiments are computed"
    )
    what.add_argument(
        "--scale",
        action="store_true",
        help="1 to 1,024 nodes, 10 B to 100 T parameters: what binds",
    )
    what.add_argument(
        "--plans",
        action="store_true",
        help="plan published trainings: the planned step over the measured one",
    )
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--figure", metavar="N", help="one figure of the paper, such as 7 or 2a")
    part.add_argument("--table", metavar="N", help="one table of the paper")
    part.add_argument(
        "--all", action="store_true", help="all that can be computed of the paper (the default)"
    )
    parser.add_argument(
        "--machine", metavar="NAME", help="the machine of --scale (default: dgx2 and h200_node)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page with tables and plots"
    )
    parser.add_argument(
        "--svg", type=Path, metavar="DIR", help="write each plot to a file of its own"
    )
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> int:
    """Compute, write and print; return 0, 1 where a file cannot be written, 2 where what is asked
    for is not there.
    """
    try:
        if options.plans:
            return _plans(options)
        return _scale(options) if options.scale else _paper(options)
    except ConfigError as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"{_PROGRAM}: cannot write: {error}", file=sys.stderr)
        return 1


# --- plans ---------------------------------------------------------------------------------------


def _plans(options: argparse.Namespace) -> int:
    from papers.planned import RUNS, planned, rows

    for name in ("figure", "table", "machine", "html", "svg"):
        if getattr(options, name) is not None:
            raise ConfigError(
                field=f"--{name}", value=getattr(options, name), expected="no --plans"
            )
    found = [planned(run) for run in RUNS]
    if options.json:
        plans = [one.to_mapping() for one in found]
        report = {"schema": SCHEMA, "version": installed_version(), "plans": plans}
        print(json.dumps(report, indent=2))
        return 0
    console = Output()
    head, *lines = rows(found)
    table = Table(*head, box=None, header_style="dim", padding=(0, 2, 0, 0))
    for line in lines:
        table.add_row(*map(Text, line))
    console.print(table)
    return 0


# --- papers ---------------------------------------------------------------------------------------


def _paper(options: argparse.Namespace) -> int:
    if options.machine is not None:
        raise ConfigError(
            field="--machine",
            value=options.machine,
            expected="--scale beside it: a paper has its own",
        )
    chosen = _chosen(options.paper, options.figure, options.table)
    title = f"{_TITLES[options.paper]}, computed from its machines' rates"
    summary = _summary(chosen)
    if options.html is not None:
        from papers.page import Section, page

        sections = [
            Section(
                title=_heading(comparison),
                rows=[(*_HEAD, "why"), *((*_row(cell), cell.why) for cell in comparison.cells)],
                remarks=comparison.remarks,
                charts=comparison.charts,
            )
            for comparison in chosen
        ]
        options.html.write_text(page(title, sections), encoding="utf-8")
    if options.svg is not None:
        from papers.charts import svg

        charts = [
            (comparison.names[0], chart) for comparison in chosen for chart in comparison.charts
        ]
        for number, (name, chart) in enumerate(charts):
            _write(options.svg, f"{options.paper}-{number:02}-{name}", svg(chart))
    if options.json:
        report = {
            "schema": SCHEMA,
            "version": installed_version(),
            "paper": options.paper,
            "summary": summary,
            "comparisons": [comparison.to_mapping() for comparison in chosen],
        }
        print(json.dumps(report, indent=2))
    else:
        console = Output()
        for comparison in chosen:
            _show(console, comparison, with_points=options.figure is not None)
        console.print(
            Text("; ".join(f"{status}: {count}" for status, count in summary.items()), style="bold")
        )
    return 0


def _chosen(paper: str, figure: str | None, table: str | None) -> tuple[Comparison, ...]:
    from papers import deep_optimizer_states, zero_infinity

    known = {"zero-infinity": zero_infinity.experiments, "dos": deep_optimizer_states.experiments}[
        paper
    ]()
    if figure is None and table is None:
        return known
    kind, number = ("figure", figure) if figure is not None else ("table", table)
    # "--figure 5" is 5a, 5b and 5c.
    name = re.compile(rf"{kind} {re.escape(number or '')}[a-z]?")
    chosen = tuple(one for one in known if any(map(name.fullmatch, one.names)))
    if not chosen:
        names = [
            it.removeprefix(f"{kind} ") for one in known for it in one.names if it.startswith(kind)
        ]
        raise ConfigError.unknown_name(field=f"--{kind}", name=number, known=names)
    return chosen


def _summary(comparisons: Iterable[Comparison]) -> dict[str, int]:
    from papers.comparison import Status

    counts = [comparison.count() for comparison in comparisons]
    return {status.value: sum(count[status] for count in counts) for status in Status}


def _show(console: Console, comparison: Comparison, *, with_points: bool) -> None:
    console.print(Text(_heading(comparison), style="bold"))
    table = Table(box=None, show_header=True, header_style="dim", padding=(0, 2, 0, 0))
    notes: dict[str, int] = {}
    for title in _HEAD:
        table.add_column(title, overflow="fold")
    for cell in comparison.cells:
        number = notes.setdefault(cell.why, len(notes) + 1) if cell.why else None
        *words, verdict = _row(cell)
        marked = verdict if number is None else f"{verdict} [{number}]"
        table.add_row(*map(Text, words), Text(marked, style=_STYLES[cell.status.value]))
    console.print(table)
    for why, number in notes.items():
        console.print(Text(f"[{number}] {why}", style="dim"))
    for remark in comparison.remarks:
        console.print(Text(f"- {remark}", style="dim"))
    for chart in comparison.charts if with_points else ():
        _show_points(console, chart)
    console.print()


def _show_points(console: Console, chart: Chart) -> None:
    """Print what a plot draws: a row for each x."""
    from papers.charts import shown

    console.print(Text(f"{chart.title} ({chart.y})", style="bold"))
    table = Table(box=None, show_header=True, header_style="dim", padding=(0, 2, 0, 0))
    for title in (chart.x, *(series.name for series in chart.series)):
        table.add_column(title, justify="right", overflow="fold")
    values = [dict(series.points) for series in chart.series]
    for x in sorted({x for points in values for x in points}):
        table.add_row(shown(x), *(shown(points[x]) if x in points else "" for points in values))
    console.print(table)


def _heading(comparison: Comparison) -> str:
    return f"{', '.join(comparison.names).capitalize()}: {comparison.title}"


def _row(cell: Cell) -> tuple[str, str, str, str]:
    return cell.what, cell.published_text, cell.ours_text, cell.verdict


# --- scale ----------------------------------------------------------------------------------------


def _scale(options: argparse.Namespace) -> int:
    from infinity_engine.sim.hardware import H200_NODE
    from papers import scale
    from papers.machines import DGX2

    for name in ("figure", "table", "all"):
        if getattr(options, name):
            raise ConfigError(
                field=f"--{name}", value=getattr(options, name), expected="--paper beside it"
            )
    # others have no network
    if options.machine is not None and options.machine not in _SCALE_MACHINES:
        raise ConfigError.unknown_name(
            field="--machine", name=options.machine, known=_SCALE_MACHINES
        )
    machines = [known for known in (DGX2, H200_NODE) if options.machine in {None, known.name}]
    texts = {one.title: scale.tables(one) for one in machines}
    charts = {one.name: scale.charts(one) for one in machines}
    if options.html is not None:
        from papers.page import Section, page

        sections = [
            Section(title=one.title, text=texts[one.title], charts=charts[one.name])
            for one in machines
        ]
        options.html.write_text(page("Scale on paper", sections), encoding="utf-8")
    if options.svg is not None:
        from papers.charts import svg

        for name, drawn in charts.items():
            for scaling, chart in zip(scale.Scaling, drawn, strict=True):
                _write(options.svg, f"scale-{name}-{scaling.value}", svg(chart))
    if options.json:
        found = [
            {"machine": one.name, "model": model, "nodes": nodes, "scaling": scaling.value}
            | {"partitioning": partitioning.value}
            | _point(point)
            for one in machines
            for scaling in scale.Scaling
            for partitioning in scale.Partitioning
            for model, nodes, point in scale.points(one, scaling, partitioning)
        ]
        print(
            json.dumps(
                {"schema": SCHEMA, "version": installed_version(), "points": found}, indent=2
            )
        )
    else:
        print("\n\n\n".join(texts.values()))
    return 0


def _point(point: Point | None) -> dict[str, object]:
    if point is None:
        return {"fits": False}
    phases: Sequence[tuple[str, object]] = (
        ("passes_s", {bottleneck.value: seconds for bottleneck, seconds in point.passes().items()}),
        ("update_s", {bottleneck.value: seconds for bottleneck, seconds in point.update().items()}),
    )
    return {
        "fits": True,
        "micro_batch": point.micro_batch,
        "rounds": point.rounds,
        "parameters": point.parameters.value,
        "states": point.states.value,
        "checkpoints": point.checkpoints.value,
        "step_s": point.seconds,
        "efficiency": point.efficiency,
        "binding": point.binding.value,
        **dict(phases),
    }


def _write(directory: Path, name: str, text: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name.replace(' ', '-')}.svg").write_text(text + "\n", encoding="utf-8")
