"""`infinity train`: fine-tune a local model on text or JSON lines; the plan is shown first.

Reads the arguments, asks the planner, and prints what a training tells. Exit status: 0 it has
finished, 1 it does not fit or has failed, 2 the question is wrong, 75 it was told to stop and can
be resumed, 130 it was interrupted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity_engine.cli.plan_answer import show
from infinity_engine.cli.plan_question import TOKENS, given_in, size_of, strategy_of
from infinity_engine.config import EngineConfig
from infinity_engine.errors import ConfigError, InfinityError
from infinity_engine.machine.packages import require_torch
from infinity_engine.migration import is_deepspeed, read_json
from infinity_engine.training.listening import TrainedStep, TrainingListener
from infinity_engine.training.records import RunDirectory
from infinity_engine.training.settings import (
    EXPORT_DTYPES,
    FROZEN,
    OPTIMIZERS,
    Decay,
    Framing,
    TrainingSettings,
    check_engine,
)
from infinity_engine.units import format_bytes, format_rate

if TYPE_CHECKING:
    from infinity_engine.progress import Progress

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME = "train"
HELP = "Fine-tune a local model of Transformers on text or JSON lines, within budgets."
_INTERRUPTED = 130  # what a shell reports for a command that Ctrl-C ended
_LINE_EVERY_S = 10.0  # where the output is no terminal
_MAX_GRAD_NORM = 1.0
_LORA_LR = 2e-4  # adapters are trained at rates that would destroy whole weights


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `infinity train`."""
    parser.add_argument(
        "model", type=Path, metavar="MODEL_DIR", help="a local directory of Transformers"
    )
    parser.add_argument(
        "data",
        type=Path,
        nargs="+",
        metavar="DATA",
        help='files: text, or JSON lines (.jsonl) with "text", or with "prompt" and "completion"',
    )
    parser.add_argument(
        "--run",
        type=Path,
        default=Path("run"),
        metavar="DIR",
        dest="run_directory",
        help="where records, checkpoints, weights and the report go (default: run)",
    )
    parser.add_argument("--dry-run", action="store_true", help="show the plan, and end")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run that is in --run, if there is one; else begin it",
    )
    _add_training(parser)
    _add_engine(parser)


def _default(name: str) -> Any:
    """Return the default of a setting of the training."""
    return TrainingSettings.__dataclass_fields__[name].default


def _add_training(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("training")
    what.add_argument(
        "--sequence",
        type=int,
        metavar="TOKENS",
        help=f"tokens in a sequence (default: {TOKENS}, or the model's maximum)",
    )
    what.add_argument(
        "--framing",
        choices=[framing.value for framing in Framing],
        default=_default("framing").value,
        help="pack: documents follow one another without gaps; pad: each begins a sequence; auto: "
        "pad where there are prompts, else pack (default: %(default)s)",
    )
    what.add_argument(
        "--batch",
        type=int,
        default=_default("batch"),
        metavar="N",
        help="sequences in a micro-batch (default: %(default)s)",
    )
    what.add_argument(
        "--accumulation-steps",
        type=int,
        metavar="N",
        help="micro-batches of a step (default: that of --config, else 1)",
    )
    what.add_argument(
        "--epochs",
        type=float,
        default=_default("epochs"),
        metavar="N",
        help="rounds of the data (default: %(default)g)",
    )
    what.add_argument("--steps", type=int, metavar="N", help="steps, in place of --epochs")
    what.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default=_default("optimizer"),
        help="the optimizer (default: %(default)s)",
    )
    what.add_argument(
        "--lr",
        type=float,
        metavar="N",
        help=f"the learning rate (default: {_default('lr'):g}; --lora: {_LORA_LR:g})",
    )
    what.add_argument(
        "--warmup",
        type=float,
        default=_default("warmup"),
        metavar="N",
        help="steps in which the rate rises, or a part of all steps below 1 (default: %(default)g)",
    )
    what.add_argument(
        "--decay",
        choices=[decay.value for decay in Decay],
        default=_default("decay").value,
        help="how the rate goes down after that (default: %(default)s)",
    )
    what.add_argument(
        "--weight-decay",
        type=float,
        default=_default("weight_decay"),
        metavar="N",
        help="of matrices (default: %(default)g)",
    )
    what.add_argument(
        "--max-grad-norm",
        type=float,
        metavar="N",
        help="the norm that gradients are clipped to; 0: they are not clipped (default: that of "
        "--config, else 1)",
    )
    what.add_argument(
        "--seed",
        type=int,
        default=_default("seed"),
        metavar="N",
        help="of the data's order, adapters and dropout (default: %(default)s)",
    )
    what.add_argument(
        "--lora", type=int, metavar="R", help="train adapters of this rank alone (needs peft)"
    )
    what.add_argument(
        "--checkpointing",
        action=argparse.BooleanOptionalAction,
        default=_default("checkpointing"),
        help="recompute the activations of blocks in the backward (default: yes)",
    )
    what.add_argument(
        "--loss",
        choices=("whole", "chunked"),
        default="whole",
        help="chunked: without whole logits (default: whole)",
    )
    what.add_argument(
        "--save-every",
        default=_default("save_every"),
        metavar="N",
        help='steps, or a time such as "30min", between checkpoints (default: %(default)s)',
    )
    what.add_argument(
        "--keep",
        type=int,
        default=_default("keep"),
        metavar="N",
        help="checkpoints that are kept (default: %(default)s)",
    )
    what.add_argument(
        "--frozen",
        choices=FROZEN,
        default=_default("frozen"),
        help="leave_out: checkpoints without the base of --lora, which --resume reads from "
        "MODEL_DIR (default: %(default)s)",
    )
    what.add_argument(
        "--export-dtype",
        choices=EXPORT_DTYPES,
        help="of the weights at the end (default: what modules compute in)",
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("the engine, by the names of its settings (quickstart.md)")
    how.add_argument("--device", metavar="SIZE", help='budget of the GPU, such as "20GiB"')
    how.add_argument("--host", metavar="SIZE", help='budget of host memory, such as "16GiB"')
    how.add_argument(
        "--nvme",
        action="append",
        default=[],
        metavar="DIR[=SIZE]",
        help="a directory on a drive and its budget; again for one more",
    )
    how.add_argument("--tbw", metavar="SIZE", help='rated endurance of each drive, such as "600TB"')
    how.add_argument("--strategy", help="a strategy by name or in JSON (default: the planner's)")
    how.add_argument(
        "--parameters",
        choices=("auto", "device", "host", "nvme"),
        help="where parameters stay (default: the planner's choice)",
    )
    how.add_argument(
        "--precision",
        choices=("model", "bf16", "fp16", "fp32", "bf16_autocast", "fp16_autocast"),
        help="what parameters compute in (default: model, the dtype that they have)",
    )
    how.add_argument("--accelerator", choices=("auto", "cuda", "cpu"), help="(default: auto)")
    how.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="further settings of the engine, in JSON; options take the place of those in it",
    )


def run(options: argparse.Namespace) -> int:
    """Plan, train, and print where weights and report are."""
    try:
        return _run(options)
    except ConfigError as error:
        print(f"infinity train: error: {_in_words(error, options)}", file=sys.stderr)
        return 2
    except (BrokenPipeError, KeyboardInterrupt) as end:
        said = (
            "its output has no reader (or another pipe was closed)"
            if isinstance(end, BrokenPipeError)
            else "interrupted"
        )
        resume = f"go on with --resume --run {options.run_directory}"
        print(f"\ninfinity train: {said}; {resume}", file=sys.stderr)
        if isinstance(end, BrokenPipeError):
            raise  # which main() knows
        return _INTERRUPTED
    except (InfinityError, FloatingPointError, OSError, RuntimeError) as error:
        print(f"infinity train: error: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    require_torch("infinity train")
    if os.environ.get("WORLD_SIZE", "1") not in {"", "1"}:
        expected = "1: this command trains in one process. docs/ranks.md says how to use several"
        raise ConfigError(field="WORLD_SIZE", value=os.environ["WORLD_SIZE"], expected=expected)
    from infinity_engine.engine.checkpoints.autosave import Due

    engine = _engine(options)
    settings = _settings(options, engine.pop("accumulation_steps", None))
    # Both refuse before anything is read or planned.
    check_engine(engine, settings.accumulation_steps)
    Due(settings.save_every, 0)
    planned = _planned(settings, engine)
    if planned.fits is False:
        return 1
    if options.dry_run:
        return 0
    from infinity_engine.integrations.language_models import quiet
    from infinity_engine.training.training import train

    quiet()
    weights = train(
        settings,
        {**engine, **_of_plan(planned.settings, engine)},
        listener=_Printer(),
        prediction=planned.prediction,
    )
    print(f"weights  {weights}")
    print(f"report   {RunDirectory(settings.run).report}")
    return 0


def _of_plan(planned: Mapping[str, object], engine: Mapping[str, Any]) -> Mapping[str, object]:
    """Return the settings of a plan, without rates where the caller has set where these come
    from: the planner asks this machine's calibration alone.
    """
    has_own = "rates" in engine or engine.get("calibration", "auto") != "auto"
    return {name: value for name, value in planned.items() if name != "rates" or not has_own}


def _planned(settings: TrainingSettings, engine: dict[str, Any]) -> Any:
    import torch

    from infinity_engine.cli.runs.plan_first import plan_first

    wanted = engine.get("accelerator", "auto")
    uses_gpu = wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available())
    planned = plan_first(settings, engine, uses_gpu=uses_gpu)
    show(planned.sections)
    return planned


# --- arguments ------------------------------------------------------------------------------------


def _settings(options: argparse.Namespace, in_file: int | None) -> TrainingSettings:
    """Return what to train; `in_file`: the micro-batches of a step that --config says."""
    if not (options.model / "config.json").is_file():
        expected = "a local directory of Transformers, with a config.json"
        raise ConfigError(field="MODEL_DIR", value=str(options.model), expected=expected)
    chosen = {
        name: getattr(options, name)
        for name in (
            *("model", "batch", "epochs", "steps", "optimizer", "warmup"),
            *("weight_decay", "seed", "lora", "checkpointing", "keep", "resume"),
            *("frozen", "export_dtype"),
        )
    }
    every = options.save_every
    given = given_in(options, "lr", "lora", "sequence", "accumulation_steps")
    together = given.get("accumulation_steps", in_file)
    return TrainingSettings(
        **chosen,
        accumulation_steps=_default("accumulation_steps") if together is None else together,
        lr=given.get("lr", _LORA_LR if "lora" in given else _default("lr")),
        chunk_loss=options.loss == "chunked",
        data=tuple(options.data),
        run=options.run_directory,
        sequence=given["sequence"] if "sequence" in given else _most_tokens(options.model),
        framing=Framing(options.framing),
        decay=Decay(options.decay),
        save_every=int(every) if every.isdecimal() else every,
    )


def _most_tokens(model: Path) -> int:
    """Return the tokens that the model has positions for."""
    config = read_json(model / "config.json", is_finite=False)  # some have an Infinity
    known = [config.get(name) for name in ("max_position_embeddings", "n_positions")]
    return min([TOKENS, *(most for most in known if isinstance(most, int) and most > 0)])


def _engine(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the engine: those of the file, and the options in their place."""
    typed = given_in(options, "config", "tbw", "strategy", "max_grad_norm")
    try:
        given: dict[str, Any] = dict(read_json(options.config)) if "config" in typed else {}
    except ConfigError as error:
        raise replace(error, field="--config") from error
    if is_deepspeed(given):
        expected = (
            "a file with settings of the engine. This one has DeepSpeed's: `infinity migrate "
            f"{options.config}` prints what takes their place"
        )
        raise ConfigError(field="--config", value=str(options.config), expected=expected)
    try:
        EngineConfig.from_mapping(given)  # before its sections are read
    except ConfigError as error:
        raise replace(error, field=f"--config: {error.field}") from error
    budget = dict(given.get("budget") or {})
    for name, size in given_in(options, "device", "host").items():
        budget[name] = size_of(size, f"--{name}")
    drives = dict(budget.get("nvme") or {})
    for entry in options.nvme:
        directory, _, size = entry.partition("=")
        drives[directory] = size_of(size, "--nvme") if size else None
    if options.nvme:
        budget["nvme"] = drives
    if budget:
        given["budget"] = budget
    if "tbw" in typed:
        endurance = size_of(options.tbw, "--tbw")
        given["storage"] = {**(given.get("storage") or {}), "endurance": endurance}
    if "strategy" in typed:
        given["strategy"] = strategy_of(options.strategy)
    given |= given_in(options, "parameters", "precision", "accelerator")
    if "max_grad_norm" in typed:
        given["max_grad_norm"] = options.max_grad_norm or None
    given.setdefault("max_grad_norm", _MAX_GRAD_NORM)
    return given


def _in_words(error: ConfigError, options: argparse.Namespace) -> str:
    """Return an error with the names of options, where it has those of settings that they gave."""
    named = {"model": "MODEL_DIR", "data": "DATA", "run": "--run", "every": "--save-every"}
    if error.field in TrainingSettings.__dataclass_fields__ or error.field in named:
        option = named.get(error.field, "--" + error.field.replace("_", "-"))
    else:
        option = next(
            (
                option + error.field.removeprefix(setting)
                for setting, (option, given) in _given(options).items()
                if given and error.field.startswith(setting)
            ),
            error.field,
        )
    return str(ConfigError(field=option, value=error.value, expected=error.expected))


def _given(options: argparse.Namespace) -> dict[str, tuple[str, object]]:
    """Return options by the setting of the engine that they give, and whether they were given."""
    return {
        "max_grad_norm": ("--max-grad-norm", options.max_grad_norm is not None),
        "strategy": ("--strategy", options.strategy is not None),
        "Budget.nvme": ("--nvme", options.nvme),
        "budget.nvme": ("--nvme", options.nvme),
    }


# --- what is printed ------------------------------------------------------------------------------


class _Printer(TrainingListener):
    """Prints a training: on one line of a terminal that changes, or in lines now and then."""

    def __init__(self) -> None:
        self._in_place = sys.stdout.isatty()
        self._printed_s = 0.0
        self._is_open = False  # a line that changes stands there

    def on_note(self, text: str) -> None:
        """Print it on a line of its own."""
        self._line(text, stays=True)

    def on_progress(self, progress: Progress) -> None:
        """Print how far loading has come, on a terminal."""
        if self._in_place:
            self._line(str(progress), stays=False)

    def on_step(self, step: TrainedStep) -> None:
        """Print a step, or leave it out where the last line was printed just now."""
        is_edge = step.number in {1, step.steps}
        now = time.monotonic()
        if self._in_place or is_edge or now - self._printed_s >= _LINE_EVERY_S:
            self._printed_s = now
            self._line(_in_one_line(step), stays=not self._in_place or step.number == step.steps)

    def _line(self, text: str, *, stays: bool) -> None:
        if self._in_place:
            # A longer line would break, and the next one could not take its place.
            width = shutil.get_terminal_size().columns
            print("\r\x1b[2K" + (text if stays else text[: width - 1]), end="")
        else:
            print(text, end="")
        if stays:
            print()
        sys.stdout.flush()


def _in_one_line(step: TrainedStep) -> str:
    report = step.report
    parts = [
        f"step {step.number:,}/{step.steps:,}",
        f"loss {step.loss:.4f}",
        f"{step.tokens_per_s:,.0f} tokens/s",
        f"{step.seconds:.2f} s",
    ]
    parts += [
        f"{peak.name if len(peak.name) < 20 else '...' + peak.name[-16:]} "
        f"{format_bytes(peak.nbytes)} of {format_bytes(peak.limit)}"
        for peak in report.peaks
        if peak.nbytes
    ]
    parts += [
        f"{lane.value} {format_rate(use.bytes_per_s)}"
        for lane, use in report.links.items()
        if use.bytes_per_s is not None
    ]
    if report.outcome.value != "updated":
        parts.append(report.outcome.value)
    return "  ".join(parts)
