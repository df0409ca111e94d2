"""`infinity plan`: whether a training fits, where its bytes are, a step's time, and drives' wear.

Reads the arguments, asks the planner, prints its answer as tables, as one JSON object, or as a page
with plots. Needs no torch and touches no drive. Exit status: 0 it fits, 1 it does not, 2 the
question is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from infinity_engine.cli.plan_answer import Section, answer, refused, show, with_options
from infinity_engine.cli.plan_machine import add_arguments as add_machine
from infinity_engine.cli.plan_machine import better_gpus_of, machine_of
from infinity_engine.cli.plan_question import (
    add_settings,
    add_training,
    engine_settings,
    in_words,
    model_of,
    precision_of,
    run_of,
    settings_of,
    training_of,
    without_collecting,
)
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.units import GiB

if TYPE_CHECKING:
    from infinity_engine.advice.advising import Advice
    from infinity_engine.advice.course import TrainingRun
    from infinity_engine.placement.training import Training
    from infinity_engine.sim.remedies import Refusal

__all__ = ["HELP", "NAME", "SCHEMA", "PlanAnswer", "add_arguments", "answer_to", "run"]

NAME = "plan"
HELP = (
    "Tell whether a model can be trained on a machine, where its bytes will be, and how long a "
    "step takes."
)
SCHEMA = 1  # of the JSON object: raised when a field changes its meaning or goes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `infinity plan`."""
    add_training(parser)
    parser.add_argument(
        "--models", action="store_true", help="list presets, machines, GPUs and drives, and end"
    )
    add_machine(parser)
    add_settings(parser)
    parser.add_argument(
        "--tiling",
        choices=("off", "auto"),
        default="off",
        help="whether layers that the device has no room for are cut into tiles, as the setting "
        "tiling says (default: off)",
    )
    run = parser.add_argument_group("a whole run")
    run.add_argument(
        "--tokens",
        metavar="N",
        help="also tell what training on so many tokens takes, such as 10M: days, writes, energy",
    )
    run.add_argument("--steps", metavar="N", help="the same of so many steps")
    run.add_argument(
        "--watts", type=float, metavar="N", help="what the machine draws while it trains"
    )
    run.add_argument("--price-kwh", type=float, metavar="N", help="what a kWh costs")
    run.add_argument(
        "--price-hour", type=float, metavar="N", help="what an hour of the machine costs"
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="print every figure: what each tier holds, how busy and how full each link is, other "
        "plans that fit",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots, too")


def run(options: argparse.Namespace) -> int:
    """Plan and print; return 0 where it fits, 1 where it does not, 2 for a wrong question."""
    try:
        with without_collecting():
            return _list(options) if options.models else _plan(options)
    except ConfigError as error:
        print(f"infinity plan: error: {in_words(error)}", file=sys.stderr)
        return 2


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanAnswer:
    """What the command says of one question; `page` makes a page with plots of it.

    `mapping` makes what `--json` prints: the whole plan is in it, which takes a while to write.
    """

    status: int
    sections: Iterable[Section]
    mapping: Callable[[], Mapping[str, object]]
    page: Callable[[], str]


def answer_to(options: argparse.Namespace) -> PlanAnswer:
    """Return the answer to the question that the arguments ask; prints and writes nothing.

    Raises:
        ConfigError: the question is wrong.
    """
    from infinity_engine.placement.tiles import tiled_by_room
    from infinity_engine.sim.planner import decide

    model = model_of(options)
    precision = precision_of(options.precision, model)
    training = training_of(options, model, precision)
    machine = machine_of(options, precision, training)
    means, sources, watts = machine.means, machine.notes, machine.watts
    run = run_of(options, watts)
    settings = settings_of(options)
    whole, tiled, is_cut = training, None, options.tiling == "auto"
    if is_cut:
        room = means.room_for_layers(training)
        tiled = tiled_by_room(model, width=training.width, room=room)
        training = training if tiled is None else replace(training, model=tiled.model)
    try:
        whole_model = model if is_cut else None
        decision = decide(training, means, **settings, whole_model=whole_model)
    except CapacityError as error:
        from infinity_engine.sim.remedies import explain_refusal
        from infinity_engine.sim.report import notes_of_ranks

        explained = explain_refusal(whole, means, **settings, tiling=is_cut)
        refusal = with_options(explained, machine)
        refusal = replace(refusal, notes=(*sources, *refusal.notes, *notes_of_ranks(means)))
        return PlanAnswer(
            status=1,
            sections=refused(refusal),
            mapping=partial(dict, schema=SCHEMA, **refusal.to_mapping(), reason=str(error)),
            page=partial(_page_of, refusal),
        )
    # A refusal needs none of these, and importing them takes a tenth of its time.
    from infinity_engine.advice.activations import activation_advice
    from infinity_engine.advice.advising import advise
    from infinity_engine.advice.tiles import tile_advice
    from infinity_engine.cli.plan_page import page
    from infinity_engine.sim.report import report_of

    report = report_of(decision, rated_bytes=machine.rated_bytes)
    better = better_gpus_of(options, precision, training)
    advice = advise(decision, machine.source, run, better_gpus=better)
    ways = activation_advice(decision, report)

    def step_s_of(asked: Training) -> float | None:
        try:
            return report_of(
                decide(asked, means, **settings), rated_bytes=machine.rated_bytes
            ).step_s
        except CapacityError:
            return None

    tiles = None if tiled is None else tile_advice(whole, tiled, step_s_of)
    more = engine_settings(precision, training, drives=machine.moved_to_drives)
    if is_cut:
        more["tiling"] = "auto"
    # Where the rates come from stands first: all else follows from them.
    notes = (*sources, *report.notes)
    if more["precision"] != precision:
        width = "32" if precision == "fp32" else "16"
        notes += (
            f'precision="model" leaves each parameter as it is loaded, without autocast: load the '
            f"base in {width} bits, and adapters in fp32",
        )
    notes += tuple(_notes_of_run(run, advice, is_given=options.watts is not None, watts=watts))
    if is_cut and tiled is None:
        notes += ('tiling="auto" cuts no layer: the device has room for each, with its gradient',)
    report = replace(report, settings={**report.settings, **more}, notes=notes)
    return PlanAnswer(
        status=0,
        sections=answer(report, training, advice, ways, tiles, full=options.full),
        mapping=lambda: {
            "schema": SCHEMA,
            "fits": True,
            **report.to_mapping(),
            "advice": advice.to_mapping(),
            "activations": None if ways is None else ways.to_mapping(),
            "tiling": None if tiles is None else tiles.to_mapping(),
        },
        page=partial(page, report, training, advice, ways, tiles),
    )


def _notes_of_run(
    run: TrainingRun | None, advice: Advice, *, is_given: bool, watts: float | None
) -> Iterator[str]:
    """Yield what is not known of a whole run; `is_given`: the caller says what it draws."""
    if run is not None and advice.run is None:
        yield "what a run takes is unknown without a rate of computing: give --tflops, or --rates"
    elif run is not None and not is_given and watts is not None:
        yield "energy is what the GPUs alone draw at most: give --watts for the whole machine"


def _page_of(refusal: Refusal) -> str:
    from infinity_engine.cli.plan_page import refusal_page

    return refusal_page(refusal)


def _plan(options: argparse.Namespace) -> int:
    found = answer_to(options)
    if options.html is not None:
        _write(options.html, found.page())
    if options.json:
        print(json.dumps(found.mapping(), indent=2))
    else:
        show(found.sections)
    return found.status


def _list(options: argparse.Namespace) -> int:
    from infinity_engine.machine.catalogue import DRIVE_SHEETS, GPU_SHEETS
    from infinity_engine.sim.hardware import MACHINES
    from infinity_engine.sim.presets import PRESETS, preset

    if options.json:
        listed = {
            "schema": SCHEMA,
            "models": [{"name": name, "parameters": preset(name).numel} for name in PRESETS],
            "machines": [
                {"name": name, "title": machine.title} for name, machine in MACHINES.items()
            ],
            "gpus": [{**asdict(gpu), "compared": gpu.compared} for gpu in GPU_SHEETS],
            "drives": [{**asdict(drive), "compared": drive.compared} for drive in DRIVE_SHEETS],
        }
        print(json.dumps(listed, indent=2))
        return 0
    models = [(name, f"{preset(name).numel / 1e9:,.2f} billion parameters") for name in PRESETS]
    machines = [(name, machine.title) for name, machine in MACHINES.items()]
    gpus = [
        (gpu.name, f"{gpu.memory_bytes / GiB:g} GiB; {gpu.source}{_from_memory(gpu.compared)}")
        for gpu in GPU_SHEETS
    ]
    drives = [
        (drive.name, f"{drive.source}{_from_memory(drive.compared)}") for drive in DRIVE_SHEETS
    ]
    sections = [("Models", models), ("Machines", machines), ("GPUs", gpus), ("Drives", drives)]
    show(sections)
    return 0


def _from_memory(compared: str) -> str:
    """Return which figures of a part were compared with no page, as an end of its line."""
    if not compared:
        return "; from memory, not compared yet"
    _, some, missing = compared.partition("; no page at hand has ")
    return f"; from memory: {missing}" if some else ""


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        expected = f"a file that can be written ({error.strerror})"
        raise ConfigError(field="--html", value=str(path), expected=expected) from error
