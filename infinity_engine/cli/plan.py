"""`infinity plan`: whether a training fits, where its bytes are, a step's time, and drives' wear.

Reads the arguments, asks the planner, prints its answer as tables, as one JSON object, or as a page
with plots. Needs no torch and touches no drive. Exit status: 0 it fits, 1 it does not, 2 the
question is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from infinity_engine.cli.plan_answer import answer, refused, show, with_options
from infinity_engine.cli.plan_question import (
    means_of,
    model_of,
    precision_of,
    size_of,
    strategy_of,
    training_of,
)
from infinity_engine.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    pass

__all__ = ["HELP", "NAME", "SCHEMA", "add_arguments", "run"]

NAME = "plan"
HELP = (
    "Tell whether a model can be trained on a machine, where its bytes will be, and how long a "
    "step takes."
)
SCHEMA = 1  # of the JSON object: raised when a field changes its meaning or goes

_TOKENS = 2048
_OPTIMIZERS = ("adamw", "adam", "lion", "adagrad", "sgd")
_PRECISIONS = ("bf16", "fp16", "fp32", "bf16_autocast", "fp16_autocast", "model")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `infinity plan`."""
    what = parser.add_argument_group("training")
    what.add_argument(
        "--model", metavar="NAME|PATH", help="a preset such as llama-3-8b, or a model's config.json"
    )
    what.add_argument(
        "--models", action="store_true", help="list the presets and the known machines, and exit"
    )
    what.add_argument(
        "--batch", type=int, default=1, metavar="N", help="sequences in a micro-batch (default: 1)"
    )
    what.add_argument(
        "--sequence",
        type=int,
        metavar="TOKENS",
        help=f"tokens in a sequence (default: {_TOKENS}, or the model's maximum)",
    )
    what.add_argument(
        "--accumulation",
        type=int,
        default=1,
        metavar="N",
        help="micro-batches of a step (default: 1)",
    )
    what.add_argument(
        "--precision",
        choices=_PRECISIONS,
        default="bf16",
        help="what parameters compute in; model: the dtype that the config.json states (default: "
        "bf16)",
    )
    what.add_argument(
        "--optimizer",
        choices=_OPTIMIZERS,
        default="adamw",
        help="the optimizer (default: adamw); sgd is the one with momentum",
    )
    what.add_argument(
        "--checkpointing",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="recompute the activations of blocks in the backward (default: yes)",
    )
    means = parser.add_argument_group("machine")
    means.add_argument(
        "--machine",
        metavar="NAME",
        help="a known machine: its figures hold where no others are given",
    )
    means.add_argument(
        "--gpus", type=int, metavar="N", help="GPUs, one for each rank; 0: the CPU alone"
    )
    means.add_argument("--gpu-mem", metavar="SIZE", help='memory of each GPU, such as "24GiB"')
    means.add_argument("--ram", metavar="SIZE", help="the host's memory that is free")
    means.add_argument(
        "--nvme", metavar="SIZE", help="free space on all drives together (default: no drives)"
    )
    means.add_argument(
        "--tbw",
        metavar="SIZE",
        help='rated endurance of all drives together (TBW), such as "1200TB"',
    )
    means.add_argument(
        "--rates", type=Path, metavar="FILE", help="a calibration, or rates, in JSON"
    )
    means.add_argument(
        "--tflops",
        type=float,
        metavar="N",
        help="compute rate of each rank, in 10^12 operations a second",
    )
    how = parser.add_argument_group("limits on the plan")
    how.add_argument(
        "--strategy", default="auto", help="a strategy by name or in JSON (default: the best)"
    )
    how.add_argument(
        "--parameters",
        choices=("auto", "device", "host", "nvme"),
        default="auto",
        help="where parameters stay (default: the best)",
    )
    how.add_argument(
        "--overlap",
        choices=("auto", "on", "off"),
        default="auto",
        help="whether the end of an update goes on beside the next forward (default: if that makes "
        "the step shorter)",
    )
    how.add_argument("--subgroup", type=int, metavar="N", help="parameters in a subgroup")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots, too")


def run(options: argparse.Namespace) -> int:
    """Plan and print; return 0 where it fits, 1 where it does not, 2 for a wrong question."""
    try:
        return _list() if options.models else _plan(options)
    except ConfigError as error:
        print(f"infinity plan: error: {_in_words(error)}", file=sys.stderr)
        return 2


def _plan(options: argparse.Namespace) -> int:
    from infinity_engine.cli.plan_page import page, refusal_page
    from infinity_engine.plan import Tier, parse_strategy
    from infinity_engine.sim.planner import decide
    from infinity_engine.sim.remedies import explain_refusal
    from infinity_engine.sim.report import report_of

    model = model_of(options.model)
    precision = precision_of(options.precision, model)
    training = training_of(options, model, precision)
    means, sources = means_of(options, precision)
    rated_bytes = None if options.tbw is None else size_of(options.tbw, "--tbw")
    if rated_bytes is not None and not means.budget.nvme:
        expected = "a size in --nvme, too: without drives, nothing wears out"
        raise ConfigError(field="--tbw", value=options.tbw, expected=expected)
    strategy = parse_strategy(strategy_of(options.strategy), field="--strategy")
    # None: the planner chooses.
    tier = None if options.parameters == "auto" else Tier(options.parameters)
    numel: int | None = options.subgroup
    try:
        decision = decide(training, means, strategy=strategy, parameters=tier, subgroup_numel=numel)
    except CapacityError as error:
        refusal = explain_refusal(
            training, means, strategy=strategy, parameters=tier, subgroup_numel=numel
        )
        refusal = with_options(refusal)
        if options.json:
            print(
                json.dumps(
                    {"schema": SCHEMA, **refusal.to_mapping(), "reason": str(error)}, indent=2
                )
            )
        else:
            show(refused(refusal))
        if options.html is not None:
            _write(options.html, refusal_page(refusal))
        return 1
    report = report_of(decision, rated_bytes=rated_bytes)
    # Where the rates come from stands first: all else follows from them.
    report = replace(report, notes=(*sources, *report.notes))
    if options.html is not None:
        _write(options.html, page(report, training))
    if options.json:
        print(json.dumps({"schema": SCHEMA, "fits": True, **report.to_mapping()}, indent=2))
    else:
        show(answer(report, training))
    return 0


def _list() -> int:
    from infinity_engine.sim.hardware import MACHINES
    from infinity_engine.sim.presets import PRESETS, preset

    models = [(name, f"{preset(name).numel / 1e9:,.2f} billion parameters") for name in PRESETS]
    machines = [(name, machine.title) for name, machine in MACHINES.items()]
    show([("Models", models), ("Machines", machines)])
    return 0


def _in_words(error: ConfigError) -> str:
    # Fields of settings, as this command calls them.
    names = {
        "batch": "--batch",
        "sequence": "--sequence",
        "accumulation_steps": "--accumulation",
        "model": "--model",
    }
    names |= {"machine": "--machine", "subgroup_numel": "--subgroup"}
    if error.field.startswith("Rates."):  # the option of the file names what it has wrong
        expected = (
            f"a file with {error.field}, which this plan uses: `infinity calibrate DIR` measures "
            "it on a machine with the device, where DIR is a directory on a drive to use"
        )
        return str(ConfigError(field="--rates", value=None, expected=expected))
    if error.field == "budget.nvme":
        expected = 'a size such as "2TB": this plan keeps data on drives'
        return str(ConfigError(field="--nvme", value=error.value, expected=expected))
    return str(
        ConfigError(
            field=names.get(error.field, error.field), value=error.value, expected=error.expected
        )
    )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        expected = f"a file that can be written ({error.strerror})"
        raise ConfigError(field="--html", value=str(path), expected=expected) from error
