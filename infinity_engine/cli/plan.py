"""`infinity plan`: whether a training fits, where each byte will be, how long a step takes and why,
what wears out.

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

from infinity_engine.cli.plan_answer import answer, refused, show, with_options
from infinity_engine.cli.plan_question import (
    means_of,
    model_of,
    precision_of,
    run_of,
    size_of,
    strategy_of,
    training_of,
)
from infinity_engine.errors import CapacityError, ConfigError

__all__ = ["HELP", "NAME", "SCHEMA", "add_arguments", "run"]

NAME = "plan"
HELP = (
    "Tell whether a model can be trained with certain means, where its bytes will be, and how long "
    "a step takes."
)
SCHEMA = 1  # of the JSON object: raised when a field changes its meaning or goes

_TOKENS = 2048
_OPTIMIZERS = ("adamw", "adam", "lion", "adagrad", "sgd")
_PRECISIONS = ("bf16", "fp16", "fp32", "bf16_autocast", "fp16_autocast", "model")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `infinity plan`."""
    what = parser.add_argument_group("what is trained")
    what.add_argument(
        "--model", metavar="NAME|PATH", help="a preset such as llama-3-8b, or a model's config.json"
    )
    what.add_argument(
        "--models", action="store_true", help="list the presets and the machines, and end"
    )
    what.add_argument(
        "--batch", type=int, default=1, metavar="N", help="sequences in a micro-batch (default: 1)"
    )
    what.add_argument(
        "--sequence",
        type=int,
        metavar="TOKENS",
        help=f"tokens of one (default: {_TOKENS}, or its most)",
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
        "--optimizer", choices=_OPTIMIZERS, default="adamw", help="sgd is the one with momentum"
    )
    what.add_argument(
        "--checkpointing",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="make the activations of blocks anew in the backward (default: yes)",
    )
    means = parser.add_argument_group("what there is for it")
    means.add_argument(
        "--machine",
        metavar="NAME",
        help="a known machine, whose figures hold where no other are given",
    )
    means.add_argument(
        "--gpus", type=int, metavar="N", help="GPUs, one for each rank; 0: the CPU alone"
    )
    means.add_argument("--gpu-mem", metavar="SIZE", help='memory of each GPU, such as "24GiB"')
    means.add_argument("--ram", metavar="SIZE", help="the host's memory that is free")
    means.add_argument(
        "--nvme", metavar="SIZE", help="what is free on all drives together; none without it"
    )
    means.add_argument(
        "--tbw",
        metavar="SIZE",
        help='what the drives may be written in their life, such as "1200TB"',
    )
    means.add_argument(
        "--rates", type=Path, metavar="FILE", help="a calibration, or rates, in JSON"
    )
    means.add_argument(
        "--tflops",
        type=float,
        metavar="N",
        help="what each rank computes, in 10^12 operations a second",
    )
    how = parser.add_argument_group("how, where that is to be so")
    how.add_argument(
        "--strategy", default="auto", help="a strategy by name or in JSON (default: the best)"
    )
    how.add_argument(
        "--parameters",
        choices=("auto", "device", "host", "nvme"),
        default="auto",
        help="where they stay",
    )
    how.add_argument(
        "--overlap",
        choices=("auto", "on", "off"),
        default="auto",
        help="whether the end of an update goes on beside the next forward (default: where a step "
        "is shorter so)",
    )
    how.add_argument("--subgroup", type=int, metavar="N", help="parameters in a subgroup")
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
    """Plan and print; return 0 where it fits, 1 where it does not, 2 where the question is
    wrong.
    """
    try:
        return _list() if options.models else _plan(options)
    except ConfigError as error:
        print(f"infinity plan: error: {_in_words(error)}", file=sys.stderr)
        return 2


def _plan(options: argparse.Namespace) -> int:
    from infinity_engine.advice.advising import advise
    from infinity_engine.cli.plan_page import page, refusal_page
    from infinity_engine.plan import Tier, parse_strategy
    from infinity_engine.sim.planner import decide
    from infinity_engine.sim.remedies import explain_refusal
    from infinity_engine.sim.report import report_of

    model = model_of(options.model)
    precision = precision_of(options.precision, model)
    training = training_of(options, model, precision)
    means, sources, rates_are = means_of(options, precision)
    run = run_of(options)
    rated_bytes = None if options.tbw is None else size_of(options.tbw, "--tbw")
    if rated_bytes is not None and not means.budget.nvme:
        expected = "--nvme beside it: no drive is used, so none wears out"
        raise ConfigError(field="--tbw", value=options.tbw, expected=expected)
    strategy = parse_strategy(strategy_of(options.strategy), field="--strategy")
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
    report = replace(report, notes=(*sources, *report.notes))
    advice = advise(decision, rates_are, run)
    if options.html is not None:
        _write(options.html, page(report, training))
    if options.json:
        told = {**report.to_mapping(), "advice": advice.to_mapping()}
        print(json.dumps({"schema": SCHEMA, "fits": True, **told}, indent=2))
    else:
        show(answer(report, training, advice, full=options.full))
    return 0


def _list() -> int:
    from infinity_engine.sim.hardware import MACHINES
    from infinity_engine.sim.presets import PRESETS, preset

    models = [(name, f"{preset(name).numel / 1e9:,.2f} billion parameters") for name in PRESETS]
    machines = [(name, machine.title) for name, machine in MACHINES.items()]
    show([("Models", models), ("Machines", machines)])
    return 0


def _in_words(error: ConfigError) -> str:
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
            "it on a machine with "
            "the device, DIR being on a drive to be used"
        )
        return str(ConfigError(field="--rates", value=None, expected=expected))
    if error.field == "budget.nvme":
        expected = 'a size such as "2TB", for what is to rest on drives'
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
