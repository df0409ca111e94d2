"""`infinity compare`: one training on several machines, a line for each.

Machines are known ones, this one, or parts with plus signs between them. Asks the planner for each,
and prints what it answers. Exit status: 0 it fits on one of them, 1 on none, 2 the question is
wrong.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from infinity_engine.cli.plan_answer import computes, seconds_in_words, show, written_per_day
from infinity_engine.cli.plan_machine import add_arguments as add_machine
from infinity_engine.cli.plan_machine import machine_of
from infinity_engine.cli.plan_question import (
    add_training,
    in_words,
    model_of,
    precision_of,
    training_of,
    without_collecting,
)
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.units import TB

__all__ = ["HELP", "NAME", "SCHEMA", "ComparedMachine", "add_arguments", "run"]

NAME = "compare"
HELP = "Tell how long a step of one training takes on several machines."
SCHEMA = 1  # of the JSON object: raised when a field changes its meaning or goes

_HERE = "here"
_SIZE = re.compile(r"[0-9.]+\s*[KMGTP]i?B", re.IGNORECASE)
_SEVERAL = re.compile(r"([1-9][0-9]{0,30})\s*x\s+(.+)")
_SIZE_ALONE = re.compile(r"[1-9][0-9]{0,2}")  # a bare number below 1000 is a size without a unit
_MOST_DRIVES = 64  # of one part


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedMachine:
    """What a machine does with the training; where it does not fit, numbers are None."""

    machine: str
    fits: bool
    step_s: float | None = None
    step_range_s: tuple[float, float] | None = None
    tokens_per_s: float | None = None
    written_bytes_per_day: float | None = None
    bound_by: str | None = None
    notes: tuple[str, ...] = ()
    """What is assumed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `infinity compare`."""
    parser.add_argument(
        "machines",
        nargs="+",
        metavar="MACHINE",
        help='a known machine, "here" for this one ("here + DIR" with a drive), or its parts: "2 x '
        '4090 + 128GiB + samsung 990 pro"; the first size is the RAM, a second one that of the '
        "drives",
    )
    add_training(parser)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    parser.set_defaults(overlap="auto")


def run(options: argparse.Namespace) -> int:
    """Compare and print."""
    try:
        with without_collecting():
            # Parts are looked up for all machines first: a plan takes seconds, a wrong name none.
            asked = [(machine, list(_arguments(machine))) for machine in options.machines]
            found = [_compared(options, machine, arguments) for machine, arguments in asked]
    except ConfigError as error:
        print(f"infinity compare: error: {in_words(error, here='MACHINE')}", file=sys.stderr)
        return 2
    if options.json:
        told = [asdict(machine) for machine in found]
        print(json.dumps({"schema": SCHEMA, "machines": told}, indent=2))
    else:
        _show(found)
    return 0 if any(machine.fits for machine in found) else 1


def _compared(
    options: argparse.Namespace, machine: str, arguments: Sequence[str]
) -> ComparedMachine:
    from infinity_engine.advice.doubt import step_range
    from infinity_engine.sim.planner import decide
    from infinity_engine.sim.report import notes_of_ranks, report_of

    parser = argparse.ArgumentParser(add_help=False)
    add_machine(parser)
    asked = parser.parse_args(arguments, copy.copy(options))
    model = model_of(asked)
    precision = precision_of(asked.precision, model)
    training = training_of(asked, model, precision)
    found = machine_of(asked, precision, training)
    try:
        decision = decide(training, found.means)
    except CapacityError:
        notes = (*found.notes, *model.notes, *notes_of_ranks(found.means))
        return ComparedMachine(machine=machine, fits=False, notes=notes)
    report = report_of(decision)
    is_known = computes(report)
    return ComparedMachine(
        machine=machine,
        fits=True,
        step_s=report.step_s,
        step_range_s=step_range(decision.best, training, found.means, found.source)
        if is_known
        else None,
        tokens_per_s=report.tokens_per_s,
        written_bytes_per_day=written_per_day(report) if is_known else None,
        bound_by=report.bound_by,
        notes=(*found.notes, *report.notes),
    )


def _arguments(machine: str) -> Iterator[str]:
    from infinity_engine.machine.catalogue import find_gpu
    from infinity_engine.sim.hardware import MACHINES

    parts = [part.strip() for part in machine.split("+")]
    if parts[0] == _HERE:
        yield from ("--here", *parts[1:])
        return
    if machine in MACHINES:
        yield from ("--machine", machine)
        return
    sizes = iter(("--ram", "--nvme"))
    gpus = 0
    kinds: set[str] = set()
    for part in parts:
        if _SIZE.fullmatch(part):
            option = next(sizes, "")
            if not option:
                raise _wrong(machine)
            yield from (option, part.replace(" ", ""))
            continue
        several = _SEVERAL.fullmatch(part)
        count, name = (int(several[1]), several[2]) if several else (1, part)
        option = _kind(name, machine)
        if option == "--gpu":
            gpus += count
            kinds.add(find_gpu(name)[0].name)
            if len(kinds) > 1:
                expected = f"GPUs of one kind in a machine, not {' and '.join(sorted(kinds))}"
                raise ConfigError(field="MACHINE", value=machine, expected=expected)
        elif count > _MOST_DRIVES:
            expected = f"at most {_MOST_DRIVES} drives of a kind in a machine"
            raise ConfigError(field="MACHINE", value=machine, expected=expected)
        yield from [option, name] * (count if option == "--drive" else 1)
    if next(sizes, None) == "--ram":
        expected = 'its RAM among the parts, such as "4090 + 64GiB"'
        raise ConfigError(field="MACHINE", value=machine, expected=expected)
    # no GPU among the parts: the CPU alone
    yield from ("--gpus", str(gpus))


def _kind(name: str, machine: str) -> str:
    from infinity_engine.machine.catalogue import find_drive, find_gpu, names_near

    with suppress(ConfigError):
        find_gpu(name)
        return "--gpu"
    with suppress(ConfigError):
        find_drive(name)
        return "--drive"
    near = names_near(name)
    if _SIZE_ALONE.fullmatch(name):
        near = [f"{name}GiB", *near]
    nearest = f" (nearest: {', '.join(near)})" if near else ""
    raise _wrong(machine, f"; {name!r} is none of them{nearest}")


def _wrong(machine: str, more: str = "") -> ConfigError:
    expected = (
        'a known machine, "here", or parts such as "4090 + 64GiB + samsung 990 pro", sizes with '
        f"their units (infinity plan --models lists parts){more}"
    )
    return ConfigError(field="MACHINE", value=machine, expected=expected)


def _show(found: Sequence[ComparedMachine]) -> None:
    from rich.table import Table

    from deepnvme.cli.report import Output

    table = Table(box=None, pad_edge=False)
    for title in ("machine", "a step", "between", "tokens/s", "written a day", "bound by"):
        table.add_column(title, overflow="fold")
    for machine in found:
        table.add_row(*_cells(machine))
    Output().print(table)
    show([("Notes", _notes(found))])


def _notes(found: Sequence[ComparedMachine]) -> Iterator[tuple[str, str]]:
    """Yield each note once, with the machines that it is about, or none where that is all."""
    for note in dict.fromkeys(note for machine in found for note in machine.notes):
        named = [machine.machine for machine in found if note in machine.notes]
        yield "" if len(named) == len(found) else "; ".join(named), note


def _cells(machine: ComparedMachine) -> tuple[str, ...]:
    if machine.step_s is None:
        return (machine.machine, "does not fit", "", "", "", "")
    step, bound_by = seconds_in_words(machine.step_s), machine.bound_by or ""
    if machine.step_range_s is None or machine.tokens_per_s is None:
        # without a rate of computing, a step is its update and transfers alone
        return (machine.machine, f"{step} and computing", "unknown", "unknown", "unknown", bound_by)
    least, most = map(seconds_in_words, machine.step_range_s)
    written = machine.written_bytes_per_day
    return (
        machine.machine,
        step,
        f"{least} to {most}",
        f"{machine.tokens_per_s:,.0f}",
        f"{written / TB:,.1f} TB" if written else "nothing",
        bound_by,
    )
