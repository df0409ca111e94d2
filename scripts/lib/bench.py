"""The bench harness: compared systems run interleaved in rounds, figures held against the targets
that issues set.

A script in scripts/bench registers systems and figures on a `Bench` and calls `main`, which does
the rest: environment, options, rounds, tables, JSON. `render` turns that JSON into a page of
docs/benchmarks. Never decides by hand whether a target holds, and never drops a figure: one that
could not be measured is there with its reason. Imports nothing but the standard library until
`main` has entered the project's environment.
"""

from __future__ import annotations

import argparse
import json
import math
import operator
import os
import platform
import re
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import env
from env import THIS_PYTHON

__all__ = [
    "ONCE_IN_TURN",
    "ROUNDS",
    "THIS_PYTHON",
    "UNTIL",
    "Bench",
    "Cost",
    "Document",
    "Figure",
    "Spread",
    "UnavailableError",
    "cost_of",
    "document",
    "holds",
    "main",
    "need",
    "render",
    "spread",
    "write_page",
]

Measure = Callable[[], "float | Mapping[str, float]"]
Document = dict[str, Any]
"""One run of a bench as JSON: bench, date, machine, versions, rounds, figures; method where it is
not ROUNDS.
"""

ROUNDS = """\
Every system was warmed up once and then measured once per round, each round starting with another
system, so that what disturbs the machine disturbs all of them alike. A figure is computed within
each round and its median is the value;
min .. max and MAD (median distance from the median) are its spread over the rounds."""
"""The method of a bench that says nothing else."""

ONCE_IN_TURN = """\
Every way trained once, one after another, in one process: two steps to warm up, and the median of
those after them,
each waited for to its end."""
"""The method of benches that train larger models than could be made anew in every round."""

UNTIL = "INFINITY_BENCH_UNTIL"
"""The variable with the time, in seconds since the epoch, at which a run is going to be stopped."""

_TARGET = re.compile(r"(>=|<=|==|>|<) *([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)")
_COMPARE = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}


class UnavailableError(Exception):
    """A system cannot be measured on this machine; the message says why, and what to install if
    that would help.
    """


# --- figures --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """One line that an issue asks for: the median over rounds of a number computed within each
    round.
    """

    name: str
    value: float | None
    unit: str
    target: str
    rounds: tuple[float, ...]
    """The figure's number in each round; empty where it could not be computed."""
    reason: str | None = None
    """Why there is no value."""

    @property
    def holds(self) -> bool:
        """Whether the value meets the target."""
        return holds(self.value, self.target)


def holds(value: float | None, target: str) -> bool:
    """Tell whether `value` meets a target such as ">= 0.97"; a value that is missing meets none.

    Raises:
        ValueError: `target` is not a comparison with a number.
    """
    parts = _TARGET.fullmatch(target)
    if parts is None:
        raise ValueError(
            f"a target is one of {', '.join(_COMPARE)} and a number, such as '>= 0.97'; got "
            f"{target!r}"
        )
    return value is not None and bool(_COMPARE[parts[1]](value, float(parts[2])))


@dataclass(frozen=True)
class Spread:
    """The median of some numbers, their extremes, and the median distance from the median (MAD)."""

    median: float
    low: float
    high: float
    mad: float


def spread(numbers: Iterable[float]) -> Spread:
    """Return the median and spread of at least one number."""
    listed = sorted(numbers)
    median = statistics.median(listed)
    return Spread(
        median, listed[0], listed[-1], statistics.median(abs(number - median) for number in listed)
    )


def need(seconds: float) -> None:
    """Raise where fewer seconds are left of those that the run was given by the variable UNTIL.

    Raises:
        UnavailableError: too few are left.
    """
    left = float(os.environ.get(UNTIL, "inf")) - time.time()
    if left < seconds:
        raise UnavailableError(f"it takes {seconds:.0f} s, and {max(left, 0.0):.0f} s were left")


@dataclass(frozen=True)
class Cost:
    """What some work took: seconds that passed, and CPU seconds of this process and the children it
    waited for.
    """

    wall_s: float
    cpu_s: float


def cost_of(work: Callable[[], object]) -> Cost:
    """Run `work` and return what it took."""
    wall, cpu = time.perf_counter(), _cpu_seconds()
    work()
    return Cost(time.perf_counter() - wall, _cpu_seconds() - cpu)


def _cpu_seconds() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


# --- a bench --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Wanted:
    """A figure as registered: how to compute it from the measurements it uses."""

    name: str
    unit: str
    target: str
    uses: tuple[str, ...]
    value: Callable[..., float]


@dataclass
class Bench:
    """The systems that one bench compares and the figures it computes; what it measured, once
    `run`.

    `flags` are those of its own that it was started with. Without `warm_up`, the first measurement
    is a round already: for systems that run in a new process each time.
    """

    name: str
    quick: bool
    flags: frozenset[str] = frozenset()
    method: str = ROUNDS
    warm_up: bool = True
    units: dict[str, str] = field(default_factory=dict)
    rounds: list[dict[str, float]] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)
    _systems: dict[str, Measure] = field(default_factory=dict)
    _wanted: list[_Wanted] = field(default_factory=list)

    def system(self, name: str, measure: Measure, *, unit: str) -> None:
        """Register a compared system.

        `measure` runs it once and returns a number, or several by name, which become "system:
        name". It raises UnavailableError where the system cannot run; only its first measurement
        finds that.
        """
        self._systems[name] = measure
        self.units[name] = unit

    def figure(
        self,
        name: str,
        *,
        unit: str,
        target: str,
        uses: Sequence[str],
        value: Callable[..., float] | None = None,
    ) -> None:
        """Register a figure: `value` is called once per round with the numbers that `uses` names,
        in that order.

        Without `value`, the figure is the one number that it uses.
        """
        holds(None, target)  # refuses a malformed target now rather than after the measurements
        self._wanted.append(
            _Wanted(name, unit, target, tuple(uses), value or (lambda number: number))
        )

    def run(self, rounds: int, between: Callable[[int], object] = lambda _: None) -> list[Figure]:
        """Measure all systems `rounds` times and return the figures; with `warm_up`, once more
        before.

        Each round starts with another system, so that none profits from its place; `between` is
        called with the number of each round before it.
        """
        if not self.warm_up:
            between(0)
        first_measured = self._first_pass()
        order = [name for name in self._systems if name not in self.unavailable]
        if order and not self.warm_up:
            self.rounds.append(first_measured)
        for number in range(len(self.rounds), rounds if order else 0):
            between(number)
            first = number % len(order)
            measured: dict[str, float] = {}
            for name in order[first:] + order[:first]:
                measured.update(self._measure(name))
            self.rounds.append(measured)
        return self.figures()

    def figures(self) -> list[Figure]:
        """Return the figures of the rounds so far."""
        return [self._compute(wanted) for wanted in self._wanted]

    def _first_pass(self) -> dict[str, float]:
        """Measure every system once, see which can run, and check what the figures use."""
        known: dict[str, float] = {}
        for name in self._systems:
            try:
                known.update(self._measure(name))
            except UnavailableError as error:
                self.unavailable[name] = str(error)
        for wanted in self._wanted:
            for name in wanted.uses:
                if name not in known and name.split(": ")[0] not in self.unavailable:
                    raise ValueError(
                        f"figure {wanted.name!r} uses {name!r}; measured are {sorted(known)}"
                    )
        return known

    def _measure(self, name: str) -> dict[str, float]:
        measured = self._systems[name]()
        parts = measured if isinstance(measured, Mapping) else {"": measured}
        if not all(map(math.isfinite, parts.values())):
            raise ValueError(
                f"{name} measured {measured}; a system that cannot be measured raises "
                "UnavailableError"
            )
        return {
            f"{name}: {what}" if what else name: float(number) for what, number in parts.items()
        }

    def _compute(self, wanted: _Wanted) -> Figure:
        try:
            for system in (name.split(": ")[0] for name in wanted.uses):
                if system in self.unavailable:
                    raise UnavailableError(f"{system}: {self.unavailable[system]}")
            values = [_value(wanted, measured) for measured in self.rounds]
        except UnavailableError as reason:
            return Figure(wanted.name, None, wanted.unit, wanted.target, (), str(reason))
        return Figure(
            wanted.name, statistics.median(values), wanted.unit, wanted.target, tuple(values)
        )


def _value(wanted: _Wanted, measured: Mapping[str, float]) -> float:
    """Compute a figure within one round."""
    missing = [name for name in wanted.uses if name not in measured]
    if missing:
        raise UnavailableError(f"a round measured no {missing[0]}")
    used = [measured[name] for name in wanted.uses]
    try:
        value = wanted.value(*used)
    except ArithmeticError as error:
        raise UnavailableError(f"{error}, computed from {used}") from None
    if not math.isfinite(value):
        raise UnavailableError(f"the result is {value}, computed from {used}")
    return value


@env.plain_ending()
def main(
    script: str,
    define: Callable[[Bench], None],
    *,
    rounds: int,
    quick_rounds: int,
    flags: Mapping[str, str] = MappingProxyType({}),
    method: str = ROUNDS,
    warm_up: bool = True,
) -> int:
    """Run the bench that `define` registers, as the program `script`; return its exit status.

    A target that does not hold is a result, not a failure: the status is 0 when everything ran. A
    bench that is killed leaves its rounds in FILE.part, where `--json FILE` was given; it says that
    it is unfinished.
    `flags` are options of this bench alone, with what they are for; `method` says on its page how
    it measures; `warm_up` as in Bench.
    """
    options = _parse(script, flags)
    # what somebody tuned on this machine is no part of what is compared
    os.environ["DEEPNVME_PROFILE"] = ""
    env.enter(script)
    given = frozenset(flag for flag in flags if getattr(options, flag))
    bench = Bench(Path(script).name, options.quick, given, method, warm_up)
    define(bench)
    rounds = quick_rounds if options.quick else rounds
    if options.json is None:
        _run_shown(bench, rounds, lambda: None)
        return 0
    until_the_end = options.json.with_name(f"{options.json.name}.part")
    until_the_end.unlink(missing_ok=True)  # of a run that was killed
    # Found out once, after the first round: between rounds it would disturb what is measured.
    machine, versions = cache(_machine), cache(_versions)

    def write(file: Path, **more: bool) -> None:
        now = datetime.now(timezone.utc)
        result = document(bench, bench.figures(), date=now, machine=machine(), versions=versions())
        unfinished = file.with_name(f"{file.name}.new")
        unfinished.write_text(json.dumps({**result, **more}, indent=1, allow_nan=False) + "\n")
        unfinished.replace(file)

    _run_shown(
        bench, rounds, lambda: write(until_the_end, unfinished=True) if bench.rounds else None
    )
    write(options.json)
    until_the_end.unlink(missing_ok=True)
    return 0


def document(
    bench: Bench,
    figures: Sequence[Figure],
    *,
    date: datetime,
    machine: Mapping[str, Any],
    versions: Mapping[str, str],
) -> Document:
    """Return one run as a JSON document: what each round measured, and the figures with their
    number in each round.

    A run with flags says so in its name, and so does a quick one.
    """
    kinds = [*sorted(bench.flags), *(["quick"] if bench.quick else [])]
    return {
        "bench": " ".join([bench.name, *(f"({kind})" for kind in kinds)]),
        "date": date.isoformat(timespec="seconds"),
        "machine": dict(machine),
        "versions": dict(versions),
        **({} if bench.method == ROUNDS else {"method": bench.method}),
        "rounds": list(bench.rounds),
        "figures": [
            {
                "name": figure.name,
                "value": figure.value,
                "unit": figure.unit,
                "target": figure.target,
                "holds": figure.holds,
                "rounds": list(figure.rounds),
                **({} if figure.reason is None else {"reason": figure.reason}),
            }
            for figure in figures
        ],
    }


def _parse(script: str, flags: Mapping[str, str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"scripts/bench/{Path(script).name}", description=_docstring_of(script)
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds and smaller sizes: shows that it runs"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw numbers there")
    for flag, purpose in flags.items():
        parser.add_argument(f"--{flag}", action="store_true", help=purpose)
    options = parser.parse_args()
    if options.json is not None and not options.json.resolve().parent.is_dir():
        parser.error(f"--json: {options.json.resolve().parent} is not a directory; make it first")
    return options


def _docstring_of(script: str) -> str | None:
    import ast

    return ast.get_docstring(ast.parse(Path(script).read_text()))


# --- the terminal ---------------------------------------------------------------------------------


def _run_shown(bench: Bench, rounds: int, between: Callable[[], object]) -> None:
    """Run the bench with progress shown, then print what was measured and the figures.

    `between` is called before each round.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    with console.status(f"{bench.name}: warm-up") as status:

        def begin(number: int) -> None:
            status.update(f"{bench.name}: round {number + 1} of {rounds}")
            between()

        figures = bench.run(rounds, begin)
    measured = Table(f"measured, {rounds} rounds", box=SIMPLE_HEAD)
    for title in ("median", "min", "max", "MAD"):
        measured.add_column(title, justify="right")
    measured.add_column("unit")
    for name in _measured_in(bench.rounds):
        numbers = spread(one[name] for one in bench.rounds if name in one)
        cells = (_number(each) for each in (numbers.median, numbers.low, numbers.high, numbers.mad))
        measured.add_row(name, *cells, bench.units[name.split(": ")[0]])
    console.print(measured)
    for name, reason in bench.unavailable.items():
        console.print(f"  not measured: {name}: {reason}\n", markup=False)
    told = Table("figure", "value", "min .. max", "MAD", "unit", "target", "holds", box=SIMPLE_HEAD)
    for figure in figures:
        told.add_row(*map(Text, _row(vars(figure) | {"holds": figure.holds})))
    console.print(told)


def _row(figure: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of one figure: name, value, extremes, MAD, unit, target, whether it holds or
    why not.
    """
    verdict = (
        "yes"
        if figure["holds"]
        else "NO"
        if figure["value"] is not None
        else f"NO: {figure['reason']}"
    )
    if figure["value"] is None:
        return figure["name"], "-", "-", "-", figure["unit"], figure["target"], verdict
    numbers = spread(figure["rounds"])
    extremes = f"{_number(numbers.low)} .. {_number(numbers.high)}"
    told = (_number(figure["value"]), extremes, _number(numbers.mad))
    return figure["name"], *told, figure["unit"], figure["target"], verdict


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1e3 else f"{value:,.0f}"


# --- the page -------------------------------------------------------------------------------------


def write_page(result: Document, folder: Path) -> Path:
    """Write the page of one run as what_hardware_date.md, its raw numbers beside it; return where
    the page is.
    """
    name = "_".join(
        _slug(text) for text in (result["bench"], result["machine"]["name"], result["date"][:10])
    )
    page = folder / f"{name}.md"
    page.write_text(render(result))
    page.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    return page


def render(result: Document) -> str:
    """Return one run as a page of docs/benchmarks: the figures first, then machine, versions and
    every raw number.
    """
    figures = result["figures"]
    missed = [figure for figure in figures if not figure["holds"]]
    sections = [
        f"# {result['bench']}: {result['machine']['name']}, {result['date'][:10]}",
        f"{len(figures) - len(missed)} of {len(figures)} targets hold."
        + (
            " A quick run: it shows that the bench works, its numbers claim nothing."
            if _is_quick(result)
            else ""
        )
        + (" The bench did not end: rounds are missing." if result.get("unfinished") else ""),
        _table(
            ("figure", "value", "min .. max", "MAD", "unit", "target", "holds"),
            [_row(one) for one in figures],
        ),
    ]
    if missed:
        sections += [
            "Not met:",
            "\n".join(
                f"- {one['name']}: "
                f"{one['reason'] if one['value'] is None else _number(one['value'])}, "
                f"target {one['target']}"
                for one in missed
            ),
        ]
    sections += [
        "## Machine and versions",
        _table(
            ("", ""),
            [
                (key, str(value))
                for key, value in {**result["machine"], **result["versions"]}.items()
            ],
        ),
        "## Method",
        result.get("method", ROUNDS),
        "## Every round",
        _table(*_every_round(result)),
    ]
    return "\n\n".join(sections) + "\n"


def _every_round(result: Document) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Return titles and rows of the table of raw numbers: what was measured, then each figure,
    round by round.
    """
    rounds = result["rounds"]
    numbers = {name: [measured.get(name) for measured in rounds] for name in _measured_in(rounds)}
    numbers |= {
        f"figure: {figure['name']}": figure["rounds"]
        for figure in result["figures"]
        if figure["rounds"]
    }
    titles = ("", *map(str, range(1, len(rounds) + 1)))
    return titles, [
        (name, *("" if number is None else _number(number) for number in listed))
        for name, listed in numbers.items()
    ]


def _measured_in(rounds: Iterable[Mapping[str, float]]) -> list[str]:
    """Return all that was measured in some round: a plan, for one, need not have the same phases in
    each.
    """
    return list(dict.fromkeys(name for measured in rounds for name in measured))


def _is_quick(result: Document) -> bool:
    return str(result["bench"]).endswith(" (quick)")


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


# --- where and with what --------------------------------------------------------------------------


def _versions() -> dict[str, str]:
    """Return what the numbers depend on: interpreter, kernel, libraries, and this checkout's
    commit.
    """
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for package in ("torch", "numpy", "infinity-engine"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return {**found, "commit": _commit()}


def _commit() -> str:
    """Return the checkout's commit.

    The pages that benches write are no change to what they measure.
    """
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        changes = _git("status", "--porcelain", "--", ".", ":(exclude)docs/benchmarks")
        return f"{commit} (with changes)" if changes else commit
    except (OSError, subprocess.CalledProcessError):
        return "unknown (not a git checkout with a commit)"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(env.ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _machine() -> dict[str, Any]:
    """Return the hardware that the numbers belong to, without the host's name."""
    from infinity_engine.machine.cpu import probe_cpu
    from infinity_engine.machine.gpus import probe_gpus
    from infinity_engine.machine.memory import probe_memory
    from infinity_engine.units import format_bytes

    cpu, memory, gpus = probe_cpu(), probe_memory(), probe_gpus().devices
    return {
        "name": f"{gpus[0].name if gpus else cpu.model}, {cpu.usable_cores} cores",
        "cpu": cpu.model,
        "cores": cpu.usable_cores,
        "cpu quota": "none" if cpu.quota_cores is None else f"{cpu.quota_cores:g} cores",
        "simd": cpu.simd.level or "unknown",
        "memory": format_bytes(memory.usable_bytes),
        "gpus": ", ".join(gpu.name for gpu in gpus) or "none",
    }
