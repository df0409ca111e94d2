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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from deepnvme.cli.report import Output, Rows
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.units import GiB, format_bytes, parse_bytes

if TYPE_CHECKING:
    from infinity_engine.placement.models import ModelShape
    from infinity_engine.placement.training import Means, Training
    from infinity_engine.plan import BlockRates, Capacity, DriveRates, Rates
    from infinity_engine.sim.hardware import MachineModel
    from infinity_engine.sim.remedies import Refusal, Remedy
    from infinity_engine.sim.report import PlanReport

__all__ = ["HELP", "NAME", "SCHEMA", "add_arguments", "run"]

NAME = "plan"
HELP = (
    "Tell whether a model can be trained with certain means, where its bytes will be, and how long "
    "a step takes."
)
SCHEMA = 1  # of the JSON object: raised when a field changes its meaning or goes

_ASSUMED = "desktop_4090"
_OF_PEAK = 0.4  # of its peak a GPU computes, where no achieved rate is published
_QUEUE_BYTES = 16 << 20  # of the host for each drive, as deepnvme's queues take them
_LEAST_TFLOPS, _MOST_TFLOPS = 1e-6, 1e9
_TOKENS = 2048
_OPTIMIZERS = ("adamw", "adam", "lion", "adagrad", "sgd")
_PRECISIONS = ("bf16", "fp16", "fp32", "bf16_autocast", "fp16_autocast", "model")
_OF_DTYPES = MappingProxyType({"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"})


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
    from infinity_engine.plan import Tier, parse_strategy
    from infinity_engine.sim.planner import decide
    from infinity_engine.sim.remedies import explain_refusal
    from infinity_engine.sim.report import report_of

    model = _model(options.model)
    precision = _precision(options.precision, model)
    training = _training(options, model, precision)
    means, sources = _means(options, precision)
    rated_bytes = None if options.tbw is None else _size(options.tbw, "--tbw")
    strategy = parse_strategy(_strategy(options.strategy), field="--strategy")
    tier = None if options.parameters == "auto" else Tier(options.parameters)
    numel: int | None = options.subgroup
    try:
        decision = decide(training, means, strategy=strategy, parameters=tier, subgroup_numel=numel)
    except CapacityError as error:
        refusal = explain_refusal(
            training, means, strategy=strategy, parameters=tier, subgroup_numel=numel
        )
        refusal = _with_options(refusal)
        if options.json:
            print(
                json.dumps(
                    {"schema": SCHEMA, **refusal.to_mapping(), "reason": str(error)}, indent=2
                )
            )
        else:
            _show(_refused(refusal))
        if options.html is not None:
            print(
                f"infinity plan: {options.html} is not written, as there is no plan",
                file=sys.stderr,
            )
        return 1
    report = report_of(decision, rated_bytes=rated_bytes)
    report = replace(report, notes=(*sources, *report.notes))
    if options.html is not None:
        _write(options.html, report, training)
    if options.json:
        print(json.dumps({"schema": SCHEMA, "fits": True, **report.to_mapping()}, indent=2))
    else:
        _show(_answer(report, training))
    return 0


def _list() -> int:
    from infinity_engine.sim.hardware import MACHINES
    from infinity_engine.sim.presets import PRESETS, preset

    models = [(name, f"{preset(name).numel / 1e9:,.2f} billion parameters") for name in PRESETS]
    machines = [(name, machine.title) for name, machine in MACHINES.items()]
    _show([("Models", models), ("Machines", machines)])
    return 0


# --- the question ---------------------------------------------------------------------------------


def _in_words(error: ConfigError) -> str:
    names = {
        "batch": "--batch",
        "sequence": "--sequence",
        "accumulation_steps": "--accumulation",
        "model": "--model",
    }
    names |= {"machine": "--machine", "subgroup_numel": "--subgroup"}
    if error.field.startswith("Rates."):  # of a plan: what a file has wrong is told by its option
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


def _precision(given: str, model: ModelShape) -> str:
    """Return what parameters compute in, where that is left to the model."""
    if given != "model":
        return given
    precision = _OF_DTYPES.get(model.dtype or "")
    if precision is None:
        stated = "states no dtype" if model.dtype is None else f"states {model.dtype}"
        expected = (
            f"bf16, fp16 or fp32, as {model.name} {stated}; model is for one of bfloat16, float16 "
            "or float32"
        )
        raise ConfigError(field="--precision", value=given, expected=expected)
    return precision


def _training(options: argparse.Namespace, model: ModelShape, precision: str) -> Training:
    from infinity_engine.config import StorageConfig
    from infinity_engine.optim import FloatFormat, Formats
    from infinity_engine.placement.training import Training

    formats = {"bf16": FloatFormat.BF16, "fp16": FloatFormat.FP16, "fp32": None}
    sequence = options.sequence
    return Training(
        model=model,
        batch=options.batch,
        sequence=min(_TOKENS, model.positions or _TOKENS) if sequence is None else sequence,
        accumulation_steps=options.accumulation,
        checkpointing=options.checkpointing,
        formats=Formats(parameter=formats[precision.removesuffix("_autocast")]),
        state_names=_states(options.optimizer),
        small_bytes=StorageConfig().small_bytes,
        overlap={"auto": None, "on": True, "off": False}[options.overlap],
    )


def _model(given: str | None) -> ModelShape:
    from infinity_engine.sim.configs import read_config
    from infinity_engine.sim.presets import PRESETS, preset

    if given is None:
        expected = f"a preset ({', '.join(PRESETS)}) or a path to a config.json"
        raise ConfigError(field="--model", value=None, expected=expected)
    path = Path(given)
    if given.lower() not in PRESETS and (
        path.exists() or path.suffix == ".json" or len(path.parts) > 1
    ):
        return read_config(path)
    return preset(given)


def _states(optimizer: str) -> tuple[str, ...]:
    from infinity_engine.optim import SGD, Adagrad, Adam, AdamW, Lion

    rules = {
        "adamw": AdamW(),
        "adam": Adam(),
        "lion": Lion(),
        "adagrad": Adagrad(),
        "sgd": SGD(lr=1.0, momentum=0.9),
    }
    return rules[optimizer].states


def _strategy(given: str) -> object:
    if not given.lstrip().startswith("{"):
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError) as error:
        expected = f'a name, or JSON such as {{"name": "static_split", "ratio": 0.5}} ({error})'
        raise ConfigError(field="--strategy", value=given, expected=expected) from error


def _size(given: str, field: str) -> int:
    nbytes = parse_bytes(given, field=field)
    if not nbytes:
        raise ConfigError(field=field, value=given, expected="more than 0 bytes")
    return nbytes


def _means(options: argparse.Namespace, precision: str) -> tuple[Means, tuple[str, ...]]:
    """Return the means, and where their rates come from."""
    from infinity_engine.placement.training import Means
    from infinity_engine.plan import ResolvedBudget
    from infinity_engine.sim.hardware import machine

    known = None if options.machine is None else machine(options.machine)
    gpus = options.gpus if options.gpus is not None else 1 if known is None else known.gpus
    if gpus < 0:
        raise ConfigError(field="--gpus", value=gpus, expected="a number of GPUs, 0 or more")
    if gpus == 0 and options.gpu_mem is not None:
        raise ConfigError(
            field="--gpu-mem", value=options.gpu_mem, expected="none of it where --gpus is 0"
        )
    device = 0 if gpus == 0 else _given(options.gpu_mem, known, "--gpu-mem")
    host = _given(options.ram, known, "--ram")
    drives = _given(options.nvme, known, "--nvme") if options.nvme or known else 0
    free = _free(device, host, drives)
    ranks = max(gpus, 1)
    assumed = machine(_ASSUMED) if known is None else known
    rates, compute, sources = _rates(
        options, assumed, precision, ranks=ranks, drives=bool(drives), named=known is not None
    )
    if options.tflops is not None:
        if not _LEAST_TFLOPS <= options.tflops <= _MOST_TFLOPS:
            expected = f"a positive number, from {_LEAST_TFLOPS:g} to {_MOST_TFLOPS:g}"
            raise ConfigError(field="--tflops", value=options.tflops, expected=expected)
        compute = compute._replace(flops_per_s=options.tflops * 1e12, blocks=None)
    return Means(
        budget=ResolvedBudget(device=free.device, host=free.host, nvme=free.nvme),
        rates=rates,
        ranks=ranks,
        flops_per_s=compute.flops_per_s,
        blocks=compute.blocks,
        alone=compute.alone,
        unified=gpus == 0,
        io_bytes=_QUEUE_BYTES if drives else 0,
    ), sources


def _free(device: int, host: int, drives: int) -> Capacity:
    """Return what an engine would take of so much."""
    from infinity_engine.machine.capacity import capacity_of

    return capacity_of(device=device, host=host, nvme={"NVMe": drives} if drives else {})


def _given(given: str | None, known: MachineModel | None, field: str) -> int:
    if given is not None:
        return _size(given, field)
    if known is None:
        expected = (
            'a size such as "64GiB", or a known machine with --machine (it is what is free for '
            f"{field[2:]})"
        )
        raise ConfigError(field=field, value=None, expected=expected)
    sizes = {
        "--gpu-mem": known.gpu.memory_bytes,
        "--ram": known.host.memory_bytes,
        "--nvme": known.drive_capacity_bytes,
    }
    return sizes[field]


class _Compute(NamedTuple):
    """How fast modules compute, operations per second or transformer blocks; and what all else does
    alone.
    """

    flops_per_s: float | None = None
    blocks: BlockRates | None = None
    alone: Rates | None = None


def _rates(
    options: argparse.Namespace,
    assumed: MachineModel,
    precision: str,
    *,
    ranks: int,
    drives: bool,
    named: bool,
) -> tuple[Rates, _Compute, tuple[str, ...]]:
    if options.rates is not None:
        return _rates_of_file(options, precision, ranks=ranks, drives=drives)
    rates = replace(
        assumed.rates(min(ranks, assumed.gpus)),
        host_update_params_per_s=assumed.host.update_params_per_s / ranks,
        dram_bytes_per_s=assumed.host.dram_bytes_per_s / ranks,
        nvme=_shared(assumed, ranks),
    )
    gpu = assumed.gpu
    flops_per_s = (
        None if options.gpus == 0 else gpu.achieved_flops_per_s or _OF_PEAK * gpu.peak_flops_per_s
    )
    whose = "as published of" if named else "assumed to be those of"
    note = (
        f"rates are {whose} a {assumed.title}: measure yours with `infinity calibrate` and give "
        "--rates"
    )
    return rates, _Compute(flops_per_s), (note,)


def _shared(assumed: MachineModel, ranks: int) -> Mapping[str, DriveRates]:
    from infinity_engine.plan import DriveRates

    drives = assumed.drives
    if drives is None or drives.read_bytes_per_s is None or drives.write_bytes_per_s is None:
        return {}
    return {
        "NVMe": DriveRates(
            read_bytes_per_s=drives.read_bytes_per_s / ranks,
            write_bytes_per_s=drives.write_bytes_per_s / ranks,
        )
    }


def _rates_of_file(
    options: argparse.Namespace, precision: str, *, ranks: int, drives: bool
) -> tuple[Rates, _Compute, tuple[str, ...]]:
    from infinity_engine.plan import Rates
    from infinity_engine.plan.calibration import Calibration

    path: Path = options.rates
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            field="--rates", value=str(path), expected=f"a file ({error.strerror})"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            field="--rates", value=str(path), expected=f"a file in JSON ({error})"
        ) from error
    if isinstance(given, dict) and "links" not in given and {"calibration", "drive"} & given.keys():
        expected = (
            "a file that `infinity calibrate --json FILE` wrote: this is a part of what it keeps "
            "for itself"
        )
        raise ConfigError(field="--rates", value=str(path), expected=expected)
    if not (isinstance(given, dict) and "links" in given):
        return (
            Rates.from_mapping(given, field="--rates"),
            _Compute(),
            (f"rates are those of {path}",),
        )
    calibration = Calibration.from_mapping(given, field="--rates")
    two_memories = options.gpus != 0
    rates, alone = (
        calibration.rates(
            optimizer=options.optimizer,
            beside_io=beside and drives,
            beside_copies=beside and two_memories,
        ).divided(ranks)
        for beside in (True, False)
    )
    dtype = "fp32" if precision == "fp32" else "bf16"
    note = f"rates were measured {calibration.date}, of one process; those of {path}"
    return (
        rates,
        _Compute(calibration.flops_per_s(dtype), calibration.block_rates(dtype), alone),
        (note,),
    )


# --- the answer -----------------------------------------------------------------------------------

_Section = tuple[str, Rows]


def _show(sections: Iterable[_Section]) -> None:
    from rich.table import Table
    from rich.text import Text

    console = Output()
    for title, rows in sections:
        table = Table.grid(padding=(0, 2))
        table.add_column(min_width=22)
        table.add_column(overflow="fold")
        for label, value in rows:
            table.add_row(Text(label, style="dim"), Text(value))
        console.print(Text(title, style="bold"))
        console.print(table)
        console.print()


def _answer(report: PlanReport, training: Training) -> Iterator[_Section]:
    from infinity_engine.plan import Tier
    from infinity_engine.sim.report import resource

    yield f"{report.model} fits: {_seconds(report.step_s)} a step", _summary(report, training)
    yield "Settings", [(name, _setting(value)) for name, value in report.settings.items()]
    for tier in Tier:
        held, limit = report.held(tier), report.limits[tier]
        if held and limit:
            whose = " of each rank" if report.ranks > 1 else ""
            title = f"{tier.value}{whose}: {format_bytes(held)} of {format_bytes(limit)}"
            yield (
                title,
                [
                    (
                        each.what,
                        format_bytes(each.nbytes) + (" (PyTorch's own)" if each.of_pytorch else ""),
                    )
                    for each in report.holdings
                    if each.tier is tier
                ],
            )
    yield "Time", _times(report)
    yield (
        "Bytes over each link in a step",
        [(resource(lane), format_bytes(it)) for lane, it in report.moved.items()],
    )
    if report.wear is not None:
        yield "Wear", _wear(report)
    if report.alternatives:
        yield (
            "What else fits",
            [
                (
                    f"{_seconds(each.step_s)}",
                    f"{_setting(each.strategy)}, parameters on {each.parameters.value}",
                )
                for each in report.alternatives[:5]
            ],
        )
    if report.notes:
        yield "Notes", [("", note) for note in report.notes]


def _summary(report: PlanReport, training: Training) -> Rows:
    kept = "checkpointed" if training.checkpointing else "all kept"
    yield "parameters", f"{report.parameters:,}"
    yield (
        "step",
        f"{report.ranks} x {report.micro_batches} x {training.batch} sequences of "
        f"{training.sequence} tokens",
    )
    yield "activations", kept
    yield "throughput", f"{report.tokens_per_s:,.1f} tokens/s"


def _setting(value: object) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(
            f"{key}={_setting(it)}" for key, it in value.items() if key != "name" and it is not None
        )
        return (
            f"{value.get('name', '')}({inner})"
            if "name" in value
            else "those of this plan, in --json"
        )
    return f"{value:g}" if isinstance(value, float) else str(value)


def _times(report: PlanReport) -> Rows:
    from infinity_engine.sim.report import resource

    for phase in report.phases:
        used = ", ".join(
            f"{name} {part:.0%}"
            for name, part in sorted(phase.utilisation.items(), key=lambda it: -it[1])
        )
        yield phase.name, f"{_seconds(phase.seconds)}, bound by {phase.binding} ({used})"
    if report.update_utilisation and all(phase.name != "update" for phase in report.phases):
        ranked = sorted(report.update_utilisation.items(), key=lambda it: -it[1])
        used = ", ".join(f"{resource(lane)} {part:.0%}" for lane, part in ranked)
        yield "of which the update", f"{_seconds(report.update_s)} ({used})"
    if report.micro_batches > 1:
        yield "", f"forward and backward again for {report.micro_batches - 1} more micro-batches"
    if report.least_update_s is not None:
        yield "least update", f"{_seconds(report.least_update_s)}: no order of work ends earlier"
    yield (
        "updates",
        ", ".join(f"{count} {home.value}" for home, count in report.subgroups.items() if count),
    )
    if report.staging_sets:
        yield "staging sets", str(report.staging_sets)
    if report.host_buffers:
        yield "host buffers", str(report.host_buffers)
    if report.fetched_ahead:
        yield "fetched ahead", f"up to {format_bytes(report.fetched_ahead)} of parameters"
    yield "host per parameter", f"{report.host_bytes_per_parameter:.2f} B"


def _wear(report: PlanReport) -> Rows:
    wear = report.wear
    assert wear is not None, "something is written"
    yield "written", f"{wear.written_per_day / 1e12:,.1f} TB in a day of steps"
    if wear.years is not None and wear.rated_bytes is not None:
        days = wear.years * 365.25
        life = f"{wear.years:,.1f} years" if wear.years >= 2 else f"{days:,.0f} days"
        yield "drives' life", f"{life} of steps, at {wear.rated_bytes / 1e12:,.0f} TB rated"


def _refused(refusal: Refusal) -> Iterator[_Section]:
    rows = []
    for tier, has, needs in (
        ("device", refusal.there.device, refusal.least.device),
        ("host", refusal.there.host, refusal.least.host),
        ("nvme", refusal.there.nvme, refusal.least.nvme),
    ):
        if tier == "device" and not has and not needs:
            continue
        short = (
            f", and at the least {format_bytes(needs)} needed, whatever the others have"
            if needs > has
            else ""
        )
        rows.append((tier, f"{format_bytes(has)} there{short}"))
    yield f"{refusal.model} does not fit", rows
    if refusal.remedies:
        yield (
            "Any of these would do",
            [(f"{number}.", it.change) for number, it in enumerate(refusal.remedies, 1)],
        )


def _with_options(refusal: Refusal) -> Refusal:
    """Return it with the options that give what each remedy adds, as a part of what is given is
    left for others.
    """

    def words(remedy: Remedy) -> str:
        more, there = remedy.more, refusal.there
        added = {
            "--gpu-mem": (
                more.device,
                _to_give(there.device + more.device, lambda free: free.device),
            ),
            "--ram": (more.host, _to_give(there.host + more.host, lambda free: free.host)),
            "--nvme": (
                more.nvme,
                _to_give(there.nvme + more.nvme, lambda free: sum(free.nvme.values())),
            ),
        }
        options = " ".join(f"{name} {size}" for name, (much, size) in added.items() if much)
        return f"{remedy.change} ({options})" if options else remedy.change

    return replace(
        refusal, remedies=tuple(replace(each, change=words(each)) for each in refusal.remedies)
    )


def _to_give(needed: int, left: Callable[[Capacity], int]) -> str:
    """Return the size, in whole GiB, of which so many bytes are left when others have their
    part.
    """
    gib = -(-needed // GiB)
    while (lacking := needed - left(_free(gib * GiB, gib * GiB, gib * GiB))) > 0:
        gib += -(-lacking // GiB)
    return f"{gib}GiB"


def _seconds(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _write(path: Path, report: PlanReport, training: Training) -> None:
    from infinity_engine.cli.plan_page import page

    try:
        path.write_text(page(report, training), encoding="utf-8")
    except OSError as error:
        expected = f"a file that can be written ({error.strerror})"
        raise ConfigError(field="--html", value=str(path), expected=expected) from error
