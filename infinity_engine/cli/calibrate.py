"""`infinity calibrate`: measures what this machine and some drives can do, and keeps it.

Progress goes to standard error. Exit status: 0 measured, 1 not, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deepnvme.cli.arguments import seconds_argument
from deepnvme.cli.report import Output
from infinity_engine.errors import InfinityError
from infinity_engine.machine.packages import is_torch_new_enough, probe_packages, require_torch
from infinity_engine.plan import Calibration, Figure, Unit
from infinity_engine.units import format_bytes, format_known

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME = "calibrate"
HELP = (
    "Measure what this machine and its drives can do, in about a minute, and keep it for every "
    "plan."
)
_FAILED, _INTERRUPTED = 1, 130
_STANDARD_OUTPUT = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `infinity calibrate`."""
    parser.add_argument(
        "directories",
        nargs="*",
        metavar="DIR",
        help="measure its drive too; the file made there is removed",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write all figures there as JSON; - for standard output, without the tables",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a few seconds, in less memory: rough figures, which are not kept",
    )
    parser.add_argument(
        "--seconds", type=seconds_argument, help="to take about that long (default: 60; quick: 4)"
    )
    parser.add_argument(
        "--even-if-busy",
        action="store_true",
        help="keep figures though other processes used the machine meanwhile",
    )
    parser.add_argument(
        "--accelerator",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="the device (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    """Measure, keep, print."""
    try:
        with _warnings_as_lines():
            measured, kept_in = _measured(options)
        if options.json and options.json != _STANDARD_OUTPUT:
            Path(options.json).write_text(_json(measured), encoding="utf-8")
    except (OSError, InfinityError) as error:
        _say(_what_happened(error))
        return _FAILED
    except KeyboardInterrupt:
        _say("interrupted")
        return _INTERRUPTED
    # Alone on standard output, so that other programs can read it.
    if options.json == _STANDARD_OUTPUT:
        print(_json(measured), end="")
    else:
        _show(measured, kept_in)
    return 0


def _measured(options: argparse.Namespace) -> tuple[Calibration, Path | None]:
    """Return what was measured, and where it is kept."""
    if options.json and options.json != _STANDARD_OUTPUT:
        _check_writable(Path(options.json))
    from infinity_engine.calibration import (  # needs the native modules
        FULL,
        QUICK,
        CalibrationCache,
        KeptFigures,
        calibrated,
    )

    effort = QUICK if options.quick else FULL
    effort = replace(effort, seconds=options.seconds or effort.seconds)
    # Rough figures are kept nowhere: every later plan would use them.
    cache = CalibrationCache(None) if options.quick else CalibrationCache.of_user()

    def waiting() -> None:
        _say("another process measures this machine: waiting for it")

    with contextlib.ExitStack() as resources:
        accelerator = None
        # Without torch, drives and the host are measured all the same.
        if is_torch_new_enough(probe_packages().torch or "0.0"):
            from infinity_engine.accel import open_accelerator

            accelerator = resources.enter_context(open_accelerator(options.accelerator))
            if accelerator.works_beside_host:
                effort = effort.beside_a_gpu()
        elif options.accelerator != "auto":
            require_torch(f"--accelerator {options.accelerator}")
        # The lock of the user's cache: the one below keeps nothing and locks nothing.
        resources.enter_context(cache.alone(waiting))
        measured = calibrated(
            options.directories,
            accelerator=accelerator,
            effort=effort,
            kept=KeptFigures.REPLACED,
            # Kept below, and only if the machine was quiet.
            cache=CalibrationCache(None),
            report=lambda part: _say(f"measuring {part}"),
        )
        if measured.is_disturbed:
            kept = "" if options.even_if_busy or options.quick else ": they are not kept"
            or_keep = ", or keep them all the same with --even-if-busy" if kept else ""
            _say(
                f"warning: other processes used {measured.most_others_share:.0%} of this machine's "
                f"processors meanwhile. The figures are those of a busy machine{kept}. Measure "
                f"again when it is quiet{or_keep}"
            )
        if not measured.is_disturbed or options.even_if_busy:
            cache.keep_machine(measured)
            for drive in measured.drives.values():
                cache.keep_drive(measured.machine, drive)
    # Asked again: keeping only warns where the folder cannot be written.
    return measured, cache.folder if cache.holds(measured) else None


def _check_writable(file: Path) -> None:
    """Refuse at once what would be refused after all the measuring."""
    if file.is_dir():
        raise IsADirectoryError(f"{file} cannot be written: it is a folder")
    if not file.absolute().parent.is_dir():
        raise FileNotFoundError(f"{file} cannot be written: there is no such folder")
    # A new file needs the folder's permission, an old one its own.
    if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise PermissionError(f"{file} cannot be written: permission denied")


def _json(measured: Calibration) -> str:
    return json.dumps(measured.to_mapping(), indent=2) + "\n"


def _say(line: str) -> None:
    print(f"infinity: {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Say what the body warned of, each in one line, when it ends."""
    # Recorded, as Python's own form names a file and a line of ours.
    with warnings.catch_warnings(record=True) as caught:
        try:
            yield
        finally:
            for warning in caught:
                _say(f"warning: {warning.message}")


def _what_happened(error: Exception) -> str:
    # The text of an OSError has the number as well, which says less.
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


# --- tables ---

# Bytes, parameters and operations per second are shown in billions.
_SHOWN = MappingProxyType({Unit.PART: (0.01, "%"), Unit.SECONDS: (1e-6, "")})


class _Rows(NamedTuple):
    """One table: title with unit, columns, and the figures of each row: of the first columns."""

    title: str
    columns: Sequence[str]
    rows: Mapping[str, Sequence[Figure]]


def _show(measured: Calibration, kept_in: Path | None) -> None:
    console = Output()
    machine = measured.machine
    console.print(Text(f"{machine['cpu']}, {machine['cores']} cores; device: {machine['device']}"))
    console.print(Text("Medians, with the least and the most of the rounds."))
    for rows in _tables(measured):
        console.print()
        console.print(Text(rows.title, style="bold"))
        reasons = _print_rows(console, rows)
        for reason, names in reasons.items():
            console.print(Text(f"not measured{names}: {reason}"))
    console.print()
    memory = format_bytes(measured.memory_bytes)
    console.print(
        Text(
            f"Updates and sweeps went through {memory}: caches that hold much of it make them too "
            "fast."
        )
    )
    console.print(Text(format_known(kept_in, "Kept in {}.", "Not kept.")))


def _tables(measured: Calibration) -> Iterator[_Rows]:
    links, drives = measured.links, measured.drives
    yield _Rows(
        "Between host and device, GB/s",
        ("alone", "both ways at once", "left beside updates"),
        {
            "to the device": (links.h2d, links.duplex_h2d, links.h2d_beside_updates),
            "to the host": (links.d2h, links.duplex_d2h, links.d2h_beside_updates),
        },
    )
    for name, drive in drives.items():
        yield _Rows(
            f"Drive of {name}, GB/s",
            ("alone", "left beside updates", "left beside modules", "left to modules beside it"),
            {
                "reads": (drive.read,),
                "writes": (drive.write,),
                "both at once": (
                    drive.mixed,
                    drive.mixed_beside_updates,
                    drive.mixed_beside_blocks,
                    drive.blocks,
                ),
            },
        )
    yield _Rows(
        "Host memory, GB/s",
        ("sweep",),
        {_threads(count): (figure,) for count, figure in measured.dram.items()},
    )
    yield _Rows(
        "Updates on the host, billions of parameters per second",
        (
            "alone",
            "left with checksums",
            "left beside copies",
            *(f"left beside I/O in {name}" for name in drives),
        ),
        {
            f"{name}, {_threads(count)}": (
                figures.alone,
                figures.summing,
                figures.beside_copies,
                *(drive.host_updates[name][count] for drive in drives.values()),
            )
            for name, updates in measured.host_updates.items()
            for count, figures in updates.items()
        },
    )
    yield _Rows(
        "Updates on the device, billions of parameters per second",
        ("alone",),
        {name: (figure,) for name, figure in measured.device_updates.items()},
    )
    yield _Rows(
        "One operation, however small it is, microseconds",
        ("alone",),
        {
            "update on the host": (measured.host_start,),
            "update on the device": (measured.device_start,),
            "copy between host and device": (links.start,),
            "lease of the engine between modules": (measured.lease,),
            **{f"read in {name}": (drive.start,) for name, drive in drives.items()},
        },
    )
    products = {dtype: (figure,) for dtype, figure in measured.matmul.items()}
    yield _Rows("Matrix products on the device, Gflop/s", ("alone",), products)
    for dtype, blocks in measured.blocks.items():
        # A dtype that was not measured has no table.
        if blocks:
            yield _Rows(
                f"Transformer blocks in {dtype}, Gflop/s",
                ("forward", "backward", "run again"),
                {
                    f"width {shape.width}, {shape.tokens} tokens": (
                        way.forward,
                        way.backward,
                        way.again,
                    )
                    for shape, way in blocks.items()
                },
            )
    yield _Rows(
        "Between ranks, GB/s",
        ("alone",),
        {"all-gather": (measured.all_gather,), "reduce-scatter": (measured.reduce_scatter,)},
    )


def _print_rows(console: Console, rows: _Rows) -> dict[str, str]:
    """Print the columns with figures; return reasons for the others, with names but for all."""
    missing: dict[str, list[str]] = {}
    shown = []
    for number, name in enumerate(rows.columns):
        column = [figures[number] for figures in rows.rows.values() if number < len(figures)]
        if not all(figure.reason for figure in column):
            shown.append(number)
        # Each reason once, in the order of the rows.
        for reason in dict.fromkeys(figure.reason for figure in column if figure.reason):
            missing.setdefault(reason, []).append(name)
    if shown:
        table = Table(box=None, padding=(0, 0, 0, 2), pad_edge=False)
        table.add_column("")
        for number in shown:
            table.add_column(rows.columns[number], justify="right")
        for label, figures in rows.rows.items():
            due = [figures[number] for number in shown if number < len(figures)]
            table.add_row(label, *map(_cell, due))
        console.print(table)
    return {reason: f" {', '.join(names)}" if shown else "" for reason, names in missing.items()}


def _threads(count: int) -> str:
    return f"{count} thread{'' if count == 1 else 's'}"


def _cell(figure: Figure) -> str:
    """Return rates in billions, parts in percent, seconds in millionths."""
    one, sign = _SHOWN.get(figure.unit, (1e9, ""))
    known = (value for value in (figure.median, figure.least, figure.most) if value is not None)
    shown = [f"{value / one:.3g}" for value in known]
    if not shown:
        return "-"
    median, least, most = shown
    return f"{median}{sign} ({least} to {most})"
