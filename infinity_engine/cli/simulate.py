"""`infinity simulate`: what becomes of a plan where the machine is another one than it was made
for.

Plans as `infinity plan` does, times the same plan with the rates or drives that are left, and
plans again. Exit status: 0 the plan can still be carried out, 1 it cannot, 2 the question is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infinity_engine.cli.plan_answer import seconds_in_words
from infinity_engine.cli.plan_machine import add_arguments as add_machine
from infinity_engine.cli.plan_machine import machine_of
from infinity_engine.cli.plan_question import (
    add_settings,
    add_training,
    flag,
    given_in,
    in_words,
    model_of,
    precision_of,
    settings_of,
    training_of,
    without_collecting,
)
from infinity_engine.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from infinity_engine.placement.training import Means
    from infinity_engine.sim.timeline import StepTimeline

__all__ = ["HELP", "NAME", "SCHEMA", "WhatIf", "add_arguments", "run"]

NAME = "simulate"
HELP = "Tell what a plan takes where the rates or drives of its machine change."
SCHEMA = 1  # of the JSON object: raised when a field changes its meaning or goes

_LEAST, _MOST = 0.001, 1000.0  # times as fast


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """A step as it was planned, by the same plan after the change, and planned again.

    None where that cannot be carried out: drives that are left may hold too little.
    """

    planned: StepTimeline
    same: StepTimeline | None
    again: StepTimeline | None
    computes: bool
    """Whether the rate of computing is known; else a step is its update and transfers alone."""
    notes: tuple[str, ...]

    def to_mapping(self) -> dict[str, object]:
        """Return it as lists and mappings, ready for JSON."""
        steps = {"planned": self.planned, "same_plan": self.same, "planned_again": self.again}
        told: dict[str, object] = {
            name: None
            if step is None
            else {
                "step_s": step.ns / 1e9,
                "phases": {phase.name: phase.ns / 1e9 for phase in step.phases},
                "further_micro_batches_s": step.repeated_ns / 1e9,
            }
            for name, step in steps.items()
        }
        return {**told, "computing_is_known": self.computes, "notes": list(self.notes)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `infinity simulate`."""
    change = parser.add_argument_group("what changes: so many times as fast as planned")
    change.add_argument("--drives-at", type=float, metavar="N", help="the drives, such as 0.3")
    change.add_argument(
        "--links-at", type=float, metavar="N", help="the links between host and device"
    )
    change.add_argument("--updates-at", type=float, metavar="N", help="updates on the host")
    change.add_argument("--compute-at", type=float, metavar="N", help="modules that compute")
    change.add_argument(
        "--drives-left",
        type=float,
        metavar="PART",
        help="the part of the drives that still works, in room and in rate: 0.5 where one of two "
        "fails",
    )
    add_training(parser)
    add_machine(parser)
    add_settings(parser)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )


def run(options: argparse.Namespace) -> int:
    """Simulate and print."""
    try:
        with without_collecting():
            found = _simulated(options)
    except CapacityError as error:
        # What follows names settings of the engine; the other command names options.
        short, _, _ = str(error).partition(". To make it fit")
        more = "`infinity plan`, asked the same, says what would do"
        print(f"infinity simulate: there is no plan: {short}. {more}", file=sys.stderr)
        return 1
    except ConfigError as error:
        print(f"infinity simulate: error: {in_words(error)}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({"schema": SCHEMA, **found.to_mapping()}, indent=2))
    else:
        _show(found)
    return 1 if found.same is None else 0


def _simulated(options: argparse.Namespace) -> WhatIf:
    from infinity_engine.advice.doubt import retimed
    from infinity_engine.placement.training import beside_inputs
    from infinity_engine.sim.planner import decide
    from infinity_engine.sim.report import report_of

    model = model_of(options)
    precision = precision_of(options.precision, model)
    training = training_of(options, model, precision)
    machine = machine_of(options, precision, training)
    means = machine.means
    computes = means.compute_rate(training) is not None
    if options.compute_at is not None and not computes:
        expected = "--tflops, or --rates of a calibration beside it: how fast modules compute"
        raise ConfigError(field="--compute-at", value=options.compute_at, expected=expected)
    changed = beside_inputs(training, _changed(options, means.before_inputs()))
    settings = settings_of(options)
    decision = decide(training, means, **settings)
    best = decision.best
    try:
        again = decide(training, changed, **settings).best.timeline
    except CapacityError:
        again = None
    # Only drives get smaller here. Memory stays as it was planned, unless moved inputs have to go
    # there.
    still_fits = changed.budget.host == means.budget.host and best.plan.demand.nvme <= sum(
        changed.of_one_rank().nvme.values()
    )
    same = retimed(best, training, changed) if still_fits else None
    return WhatIf(
        planned=best.timeline,
        same=same,
        again=again,
        computes=computes,
        notes=(*machine.notes, *report_of(decision).notes),
    )


def _changed(options: argparse.Namespace, means: Means) -> Means:
    from infinity_engine.advice.means import (
        with_compute,
        with_drives,
        with_links,
        with_more_drives,
        with_updates,
    )

    changes = {
        "drives_at": with_drives,
        "links_at": with_links,
        "updates_at": with_updates,
        "compute_at": with_compute,
        "drives_left": with_more_drives,
    }
    given = given_in(options, *changes)
    if not given:
        expected = f"what changes: one of {', '.join(map(flag, changes))}"
        raise ConfigError(field="--drives-at", value=None, expected=expected)
    for name, times in given.items():
        option = flag(name)
        most = 1.0 if option == "--drives-left" else _MOST
        if not _LEAST <= times <= most:
            expected = f"a number from {_LEAST:g} to {most:g}"
            raise ConfigError(field=option, value=times, expected=expected)
        if option.startswith("--drives") and not means.budget.nvme:
            expected = "--nvme or --drive beside it: the plan has no drives"
            raise ConfigError(field=option, value=times, expected=expected)
        if option == "--links-at" and means.unified:
            expected = "a machine with a GPU: the CPU alone has no link to a device"
            raise ConfigError(field=option, value=times, expected=expected)
        means = changes[name](means, times)
    return means


def _show(found: WhatIf) -> None:
    from infinity_engine.cli.plan_answer import show

    show([("What if", _rows(found)), ("Notes", [("", note) for note in found.notes])])


def _rows(found: WhatIf) -> Iterator[tuple[str, str]]:
    in_words = _in_words if found.computes else _without_computing
    yield "as planned", in_words(found.planned)
    same = "cannot be carried out: the drives that are left hold too little"
    yield "the same plan", same if found.same is None else in_words(found.same)
    yield "planned again", "nothing fits" if found.again is None else in_words(found.again)


def _in_words(step: StepTimeline) -> str:
    parts = [f"{phase.name} {seconds_in_words(phase.ns / 1e9)}" for phase in step.phases]
    if step.repeated_ns:
        parts.append(f"further micro-batches {seconds_in_words(step.repeated_ns / 1e9)}")
    return f"{seconds_in_words(step.ns / 1e9)} a step: {', '.join(parts)}"


def _without_computing(step: StepTimeline) -> str:
    update = seconds_in_words(step.update_ns / 1e9)
    return f"update {update} + forward and backward: unknown"
