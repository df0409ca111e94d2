"""The question of `infinity plan`: a model, a training and a run, out of the arguments.

A model is a preset, a config.json, or a Hugging Face id, of the local cache or of a preset: this
reads files of sizes, never weights, and never the network. Needs no torch, and imports the planner
only when it is asked. Called by plan.py, compare.py and simulate.py.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from difflib import get_close_matches
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypedDict

from infinity_engine.errors import ConfigError
from infinity_engine.training.settings import OPTIMIZERS, SGD_MOMENTUM
from infinity_engine.units import parse_bytes

if TYPE_CHECKING:
    from infinity_engine.advice.course import TrainingRun
    from infinity_engine.placement.models import ModelShape
    from infinity_engine.placement.training import Training
    from infinity_engine.plan import Strategy, Tier

__all__ = [
    "PRECISION_OF_DTYPE",
    "TOKENS",
    "AskedSettings",
    "add_settings",
    "add_training",
    "engine_settings",
    "flag",
    "given_in",
    "in_words",
    "model_of",
    "precision_of",
    "run_of",
    "settings_of",
    "size_of",
    "strategy_of",
    "training_of",
    "without_collecting",
]

PRECISION_OF_DTYPE = MappingProxyType({"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"})
TOKENS = 2048
_PRECISIONS = ("bf16", "fp16", "fp32", "bf16_autocast", "fp16_autocast", "model")
_THOUSANDS = MappingProxyType({"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12})
_MOST_COUNT = 10**18
_MOST_OF_STEP = 10**9  # sequences, tokens or micro-batches: more digits than a float has fail
_MOST_PRICE = 1e12
_PARTS_OF_ID = 2  # such as meta-llama/Llama-3.1-8B


def add_training(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that describe a training."""
    what = parser.add_argument_group("training")
    what.add_argument(
        "--model",
        metavar="NAME|PATH",
        help="a preset such as llama-3-8b, a model's config.json, or a Hugging Face id that is in "
        "the local cache or that of a preset",
    )
    what.add_argument(
        "--lora",
        type=int,
        metavar="RANK",
        help="train adapters of this rank beside all linear modules of the blocks, in fp32; all "
        "else is frozen",
    )
    what.add_argument(
        "--freeze",
        metavar="REGEX",
        help="do not train the parameters with this in their names",
    )
    what.add_argument(
        "--base",
        choices=("int8", "nf4"),
        help="keep the weights of frozen linear layers in 8 or 4 bits (QLoRA); give --lora or "
        "--freeze beside it",
    )
    what.add_argument(
        "--loss",
        choices=("whole", "chunked"),
        default="whole",
        help="chunked: the loss makes no whole logits (default: whole)",
    )
    what.add_argument(
        "--batch", type=int, default=1, metavar="N", help="sequences in a micro-batch (default: 1)"
    )
    what.add_argument(
        "--sequence",
        type=int,
        metavar="TOKENS",
        help=f"tokens in a sequence (default: {TOKENS}, or the model's maximum)",
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
        choices=OPTIMIZERS,
        default="adamw",
        help="the optimizer (default: adamw); sgd is the one with momentum",
    )
    what.add_argument(
        "--checkpointing",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="recompute the activations of blocks in the backward (default: yes)",
    )
    what.add_argument(
        "--tile-sequence",
        type=int,
        metavar="POSITIONS",
        help="run feed-forward blocks on so many positions at a time, as tile_sequence() does "
        "(default: on all at once)",
    )
    what.add_argument(
        "--offload-inputs",
        action="store_true",
        help="let the inputs of recomputed blocks wait on drives, or else on the host",
    )


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that leave less to the planner."""
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


def given_in(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return those of the options that were given, or have a default."""
    values = {name: getattr(options, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def flag(name: str) -> str:
    """Return an option as it is typed."""
    return f"--{name.replace('_', '-')}"


class AskedSettings(TypedDict):
    """What the planner is not free to choose."""

    strategy: Strategy | None
    parameters: Tier | None
    subgroup_numel: int | None


def settings_of(options: argparse.Namespace) -> AskedSettings:
    """Return the settings that the arguments ask for."""
    from infinity_engine.plan import Tier, parse_strategy

    return {
        "strategy": parse_strategy(strategy_of(options.strategy), field="--strategy"),
        "parameters": None if options.parameters == "auto" else Tier(options.parameters),
        "subgroup_numel": options.subgroup,
    }


def precision_of(given: str, model: ModelShape) -> str:
    """Return what parameters compute in, where that is left to the model."""
    if given != "model":
        return given
    precision = PRECISION_OF_DTYPE.get(model.dtype or "", "")
    if not precision:
        expected = (
            f"bf16, fp16 or fp32: {model.name} states {model.dtype or 'no dtype'}, and --precision "
            "model needs bfloat16, float16 or float32"
        )
        raise ConfigError(field="--precision", value=given, expected=expected)
    return precision


def training_of(options: argparse.Namespace, model: ModelShape, precision: str) -> Training:
    """Return the training that the arguments ask for."""
    from infinity_engine.config import StorageConfig
    from infinity_engine.optim import FloatFormat, Formats
    from infinity_engine.placement.training import Training

    # fp32 parameters are the masters themselves, and have no format of their own.
    formats = {"bf16": FloatFormat.BF16, "fp16": FloatFormat.FP16, "fp32": None}
    given = given_in(options, "batch", "sequence", "accumulation", "tile_sequence")
    for name, count in given.items():
        if count > _MOST_OF_STEP:
            expected = f"at most {_MOST_OF_STEP:,}"
            raise ConfigError(field=flag(name), value=count, expected=expected)
    if options.offload_inputs and not options.checkpointing:
        expected = "--checkpointing with it: the inputs of blocks are all that is kept then"
        raise ConfigError(field="--offload-inputs", value="yes", expected=expected)
    return Training(
        model=model,
        batch=options.batch,
        # No longer than the positions that the model has.
        sequence=given.get("sequence", min(TOKENS, model.positions or TOKENS)),
        accumulation_steps=options.accumulation,
        checkpointing=options.checkpointing,
        inputs_moved=options.offload_inputs,
        chunked_loss=options.loss == "chunked",
        tile_positions=options.tile_sequence,
        # Autocast changes what operations compute in, not what parameters are kept in.
        formats=Formats(parameter=formats[precision.removesuffix("_autocast")]),
        state_names=_states(options.optimizer),
        small_bytes=StorageConfig().small_bytes,
        overlap={"auto": None, "on": True, "off": False}[options.overlap],
    )


def engine_settings(precision: str, training: Training, *, drives: bool) -> dict[str, object]:
    """Return the engine's settings of a training in this precision, but for defaults; `drives`:
    moved inputs of its blocks wait there, not on the host.
    """
    activations: dict[str, object] = {}
    if training.inputs_moved:
        activations["at"] = "nvme" if drives else "host"
        if not drives:
            activations["host_bytes"] = training.input_bytes()  # as the plan takes them off it
    if training.checkpointing:
        activations["recompute"] = "blocks"
    widths = {parameter.element_bytes for parameter in training.model.parameters}
    several = training.accumulation_steps > 1
    return {
        # Any other one would cast adapters, which are planned in fp32.
        "precision": precision if widths <= {None, training.width} else "model",
        **({"accumulation_steps": training.accumulation_steps} if several else {}),
        **({"activations": activations} if activations else {}),
    }


def _states(optimizer: str) -> tuple[str, ...]:
    from infinity_engine.optim import SGD, Adagrad, Adam, AdamW, Lion

    rules = {
        "adamw": AdamW(),
        "adam": Adam(),
        "lion": Lion(),
        "adagrad": Adagrad(),
        # Any learning rate: only the names of the states are asked for.
        "sgd": SGD(lr=1.0, momentum=SGD_MOMENTUM),
    }
    return rules[optimizer].states


def strategy_of(given: str) -> object:
    """Return a strategy as text or as the mapping that its JSON says."""
    if not given.lstrip().startswith("{"):
        return given
    try:
        return json.loads(given)
    # RecursionError: JSON may nest deeper than Python reads.
    except (ValueError, RecursionError) as error:
        expected = f'a name, or JSON such as {{"name": "static_split", "ratio": 0.5}} ({error})'
        raise ConfigError(field="--strategy", value=given, expected=expected) from error


def size_of(given: str, field: str) -> int:
    """Return a size in bytes, more than 0."""
    number = given.strip()
    # Without a unit it would mean bytes, which cannot be meant.
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", number) and float(number):
        unit = "TB" if field == "--tbw" else "GiB"
        expected = f'a size with its unit: did you mean "{number}{unit}"?'
        raise ConfigError(field=field, value=given, expected=expected)
    nbytes = parse_bytes(given, field=field)
    if not nbytes:
        raise ConfigError(field=field, value=given, expected="more than 0 bytes")
    return nbytes


def run_of(options: argparse.Namespace, gpu_watts: float | None = None) -> TrainingRun | None:
    """Return the run that is asked about; None where none is.

    `gpu_watts` counts where the machine's own are not given.

    Raises:
        ConfigError: it has both tokens and steps, or a price has nothing that it is the price of.
    """
    from infinity_engine.advice.course import Prices, TrainingRun

    prices = given_in(options, "watts", "price_kwh", "price_hour")
    for name, price in prices.items():
        if not 0 < price < _MOST_PRICE:
            raise ConfigError(field=flag(name), value=price, expected="a number above 0")
    lengths = given_in(options, "tokens", "steps")
    if len(lengths) > 1:
        expected = "--tokens or --steps, not both: each says how long the run is"
        raise ConfigError(field="--steps", value=options.steps, expected=expected)
    if not lengths:
        for name, price in prices.items():
            expected = "--tokens or --steps beside it: how long the run is"
            raise ConfigError(field=flag(name), value=price, expected=expected)
        return None
    watts = prices.get("watts", gpu_watts)
    if "price_kwh" in prices and not watts:
        expected = "--watts beside it: what the machine draws while it trains"
        raise ConfigError(field="--price-kwh", value=options.price_kwh, expected=expected)
    return TrainingRun(
        **{name: _count(length, flag(name)) for name, length in lengths.items()},
        prices=Prices(
            watts=watts, per_kwh=prices.get("price_kwh"), per_hour=prices.get("price_hour")
        ),
    )


def _count(given: str, field: str) -> int:
    """Return a whole number, 1 or more, written as 5000, 10M or 1.5B."""
    found = re.fullmatch(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)([kKMBT]?)", given.strip())
    number = Fraction(found[1]) * _THOUSANDS[found[2]] if found else Fraction(0)
    if not 1 <= number <= _MOST_COUNT or number.denominator != 1:
        expected = "a number such as 5000, 10M or 1.5B (K, M, B and T are powers of 1,000)"
        raise ConfigError(field=field, value=given, expected=expected)
    return int(number)


def in_words(error: ConfigError, *, here: str = "--here") -> str:
    """Return an error with the names of options, where it has those of fields; `here` has the
    directories of this machine.
    """
    # Fields of settings, as this command calls them.
    names = {
        "batch": "--batch",
        "sequence": "--sequence",
        "accumulation_steps": "--accumulation",
        "tile_positions": "--tile-sequence",
        "model": "--model",
    }
    names |= {"machine": "--machine", "subgroup_numel": "--subgroup", "ranks": "--gpus"}
    names |= {"Budget.nvme": here, "directories": here, "strategy": "--strategy"}
    if error.field.startswith("Rates."):  # the option of the file names what it has wrong
        expected = (
            f"a file with {error.field}, which this plan uses: `infinity calibrate DIR` measures "
            "it on a machine with the device, where DIR is a directory on a drive to use"
        )
        return str(ConfigError(field="--rates", value=None, expected=expected))
    if error.field == "budget.nvme":
        expected = 'a size such as "2TB": this plan keeps data on drives'
        return str(ConfigError(field="--nvme", value=error.value, expected=expected))
    field = names.get(error.field, error.field)
    if field.startswith("config"):  # what the file of the option has wrong
        field = f"--model: {field}"
    return str(ConfigError(field=field, value=error.value, expected=error.expected))


# --- the model ------------------------------------------------------------------------------------


def model_of(options: argparse.Namespace) -> ModelShape:
    """Return the model that is named, or described by a file, with what is frozen of it."""
    from infinity_engine.placement.adapters import freeze, with_compact_base, with_lora

    changes: dict[str, Callable[[ModelShape, Any], ModelShape]] = {
        "lora": with_lora,
        "freeze": freeze,
        "base": with_compact_base,
    }
    model = _whole(options.model)
    for name, value in given_in(options, *changes).items():
        model = changes[name](model, value)
    return model


def _whole(given: str | None) -> ModelShape:
    from infinity_engine.sim.presets import PRESETS, preset

    if given is None:
        expected = (
            f"a preset ({', '.join(PRESETS)}) or its Hugging Face id, a path to a config.json, or "
            "an id that is in the local cache"
        )
        raise ConfigError(field="--model", value=None, expected=expected)
    path = Path(given)
    if given.lower() in PRESETS:
        return preset(given)
    # Of os.path, which finds nothing where a Path raises: a name too long, a folder closed to us.
    if os.path.exists(path) or path.suffix == ".json":  # noqa: PTH110
        return _described(path)
    if len(path.parts) == _PARTS_OF_ID and not path.is_absolute():
        return _of_id(given)
    if len(path.parts) > 1:
        return _described(path)
    return preset(given)


def _of_id(given: str) -> ModelShape:
    """Return the model of a Hugging Face id: that of the local cache, else that of the preset."""
    from infinity_engine.sim.presets import PRESET_OF_ID, preset, preset_of_id

    folder = _cached(given)
    if folder is not None:
        return _described(folder)
    name = preset_of_id(given)
    if not name:
        known = {name.lower(): name for name in PRESET_OF_ID}
        near = get_close_matches(given.lower(), known, n=1)
        nearest = f" (nearest: {known[near[0]]})" if near else ""
        expected = (
            f"a model with its config.json in {_cache()}, or the id of a preset{nearest}, as this "
            "command asks no network: download it there, or give the path of its config.json"
        )
        raise ConfigError(field="--model", value=given, expected=expected)
    model = preset(name)
    note = f"{given} is not in the local cache: it is planned as the preset {name}"
    return replace(model, notes=(*model.notes, note))


def _described(path: Path) -> ModelShape:
    """Return the model of a config.json: of a family that is not known, by Transformers, where that
    is installed.
    """
    from infinity_engine.sim.configs import (
        FAMILIES,
        check_one_stack,
        model_of_config,
        open_config,
    )

    config, name = open_config(path)
    check_one_stack(config)
    if (
        isinstance(config, dict)
        and isinstance(kind := config.get("model_type"), str)
        and kind not in FAMILIES
        and _can_make_models()
    ):
        from infinity_engine.integrations.model_shapes import shape_of_config

        model = shape_of_config(config, name=name)
        if model is not None:
            return model
    return model_of_config(config, name=name)


def _can_make_models() -> bool:
    return all(map(find_spec, ("torch", "transformers")))


def _cached(name: str) -> Path | None:
    """Return the folder of a model in the local cache of Hugging Face's libraries; None where it
    is not there, or cannot be read.
    """
    repository = _cache() / f"models--{name.replace('/', '--')}"
    snapshots = repository / "snapshots"
    with suppress(OSError):
        try:
            commit = (repository / "refs" / "main").read_text(encoding="utf-8").strip()
            folders = [snapshots / commit]
        except OSError:  # it was downloaded by its commit alone
            folders = sorted(snapshots.glob("*"))
        return next((folder for folder in folders if (folder / "config.json").is_file()), None)
    return None


def _cache() -> Path:
    """Return where the cache is, by the rules of huggingface_hub."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{caches}/huggingface"
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    cache = given or f"{home}/hub"
    # Of os.path: where there is no home, a Path raises.
    return Path(os.path.expandvars(os.path.expanduser(cache)))  # noqa: PTH111


@contextmanager
def without_collecting() -> Iterator[None]:
    """Look for no cycles while the body plans: it makes none, and looking takes a tenth of it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
