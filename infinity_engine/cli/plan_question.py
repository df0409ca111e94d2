"""The question of `infinity plan`: a training and the means for it, out of the arguments.

Needs no torch, and imports the planner only when it is asked. Called by plan.py.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from infinity_engine.errors import ConfigError
from infinity_engine.units import parse_bytes

if TYPE_CHECKING:
    from infinity_engine.placement.models import ModelShape
    from infinity_engine.placement.training import Means, Training
    from infinity_engine.plan import BlockRates, Capacity, Rates
    from infinity_engine.sim.hardware import MachineModel

__all__ = ["free", "means_of", "model_of", "precision_of", "size_of", "strategy_of", "training_of"]

_ASSUMED = "desktop_4090"
_OF_PEAK = 0.4  # of its peak a GPU computes, where no achieved rate is published
_QUEUE_BYTES = 16 << 20  # of the host for each drive, as deepnvme's queues take them
_OF_DTYPES = MappingProxyType({"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"})


_LEAST_TFLOPS, _MOST_TFLOPS = 1e-6, 1e9
_TOKENS = 2048
_MOST_GPUS = 64


def precision_of(given: str, model: ModelShape) -> str:
    """Return what parameters compute in, where that is left to the model."""
    if given != "model":
        return given
    precision = _OF_DTYPES.get(model.dtype or "")
    if precision is None:
        stated = "states no dtype" if model.dtype is None else f"states {model.dtype}"
        expected = (
            f"bf16, fp16 or fp32: {model.name} {stated}, and --precision model needs bfloat16, "
            "float16 or float32"
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
    sequence = options.sequence
    return Training(
        model=model,
        batch=options.batch,
        # No longer than the positions that the model has.
        sequence=min(_TOKENS, model.positions or _TOKENS) if sequence is None else sequence,
        accumulation_steps=options.accumulation,
        checkpointing=options.checkpointing,
        # Autocast changes what operations compute in, not what parameters are kept in.
        formats=Formats(parameter=formats[precision.removesuffix("_autocast")]),
        state_names=_states(options.optimizer),
        small_bytes=StorageConfig().small_bytes,
        overlap={"auto": None, "on": True, "off": False}[options.overlap],
    )


def model_of(given: str | None) -> ModelShape:
    """Return the model that is named, or described by a file."""
    from infinity_engine.sim.configs import read_config
    from infinity_engine.sim.presets import PRESETS, preset

    if given is None:
        expected = f"a preset ({', '.join(PRESETS)}) or a path to a config.json"
        raise ConfigError(field="--model", value=None, expected=expected)
    path = Path(given)
    # A preset's name wins over a file of that name.
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
        # Any learning rate: only the names of the states are asked for.
        "sgd": SGD(lr=1.0, momentum=0.9),
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
    # Without a unit it would mean bytes, which cannot be meant.
    if given.strip().isdecimal() and int(given):
        expected = f'a size with its unit: did you mean "{given.strip()}GiB"?'
        raise ConfigError(field=field, value=given, expected=expected)
    nbytes = parse_bytes(given, field=field)
    if not nbytes:
        raise ConfigError(field=field, value=given, expected="more than 0 bytes")
    return nbytes


def means_of(options: argparse.Namespace, precision: str) -> tuple[Means, tuple[str, ...]]:
    """Return the means, and where their rates come from."""
    from infinity_engine.placement.training import Means
    from infinity_engine.plan import ResolvedBudget
    from infinity_engine.sim.hardware import machine

    known = None if options.machine is None else machine(options.machine)
    gpus = options.gpus if options.gpus is not None else 1 if known is None else known.gpus
    most = _MOST_GPUS if known is None else known.gpus
    if not 0 <= gpus <= most:
        expected = f"a number of GPUs, 0 to {most}: a plan is for one machine"
        raise ConfigError(field="--gpus", value=gpus, expected=expected)
    if gpus == 0 and options.gpu_mem is not None:
        raise ConfigError(
            field="--gpu-mem", value=options.gpu_mem, expected="no size, as --gpus is 0"
        )
    device = 0 if gpus == 0 else _given(options.gpu_mem, known, "--gpu-mem")
    host = _given(options.ram, known, "--ram")
    # Drives are used only where they are given, by size or with the machine.
    drives = _given(options.nvme, known, "--nvme") if options.nvme or known else 0
    left = free(device, host, drives)
    # Without GPUs, one rank trains on the CPU.
    ranks = max(gpus, 1)
    assumed = machine(_ASSUMED) if known is None else known
    rates, compute, sources = _rates(
        options, assumed, precision, ranks=ranks, drives=bool(drives), named=known is not None
    )
    if options.tflops is not None:
        if not _LEAST_TFLOPS <= options.tflops <= _MOST_TFLOPS:
            expected = f"a positive number, from {_LEAST_TFLOPS:g} to {_MOST_TFLOPS:g}"
            raise ConfigError(field="--tflops", value=options.tflops, expected=expected)
        # What is given takes the place of measured blocks, too.
        compute = compute._replace(flops_per_s=options.tflops * 1e12, blocks=None)
    return Means(
        budget=ResolvedBudget(device=left.device, host=left.host, nvme=left.nvme),
        rates=rates,
        ranks=ranks,
        flops_per_s=compute.flops_per_s,
        blocks=compute.blocks,
        alone=compute.alone,
        # Rates of a file are of one process, and say nothing of a wire.
        wire_bytes_per_s=None if options.rates else assumed.wire_bytes_per_s(ranks),
        # Without GPUs, device and host are one memory.
        unified=gpus == 0,
        io_bytes=_QUEUE_BYTES if drives else 0,
    ), sources


def free(device: int, host: int, drives: int) -> Capacity:
    """Return what an engine would take of so much."""
    from infinity_engine.machine.capacity import capacity_of

    return capacity_of(device=device, host=host, nvme={"NVMe": drives} if drives else {})


def _given(given: str | None, known: MachineModel | None, field: str) -> int:
    if given is not None:
        return size_of(given, field)
    if known is None:
        expected = (
            'a size such as "64GiB", for what is free there, or a known machine with --machine'
        )
        raise ConfigError(field=field, value=None, expected=expected)
    sizes = {
        "--gpu-mem": known.gpu.memory_bytes,
        "--ram": known.host.memory_bytes,
        "--nvme": known.drive_capacity_bytes,
    }
    return sizes[field]


class _Compute(NamedTuple):
    """How fast modules compute, in operations or blocks, and what all else does alone."""

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
    from infinity_engine.sim.hardware import sharing_memory

    if options.rates is not None:
        return _rates_of_file(options, precision, ranks=ranks, drives=drives)
    alone = replace(
        # Each rank has its part of the host and of the drives.
        assumed.rates(min(ranks, assumed.gpus)),
        host_update_params_per_s=assumed.host.update_params_per_s / ranks,
        dram_bytes_per_s=assumed.host.dram_bytes_per_s / ranks,
        nvme={} if assumed.drives is None else {"NVMe": assumed.drives.divided(ranks)},
    )
    rates = sharing_memory(alone, links=options.gpus != 0, drives=drives)
    gpu = assumed.gpu
    flops_per_s = (
        None if options.gpus == 0 else gpu.achieved_flops_per_s or _OF_PEAK * gpu.peak_flops_per_s
    )
    origin = "as published of" if named else "assumed to be those of"
    note = (
        f"rates are {origin} a {assumed.title}: measure yours with `infinity calibrate` and give "
        "--rates"
    )
    return rates, _Compute(flops_per_s, alone=alone), (note,)


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
    # One of the cache's own files has the figures of a machine, or of a drive, alone.
    if isinstance(given, dict) and "links" not in given and {"calibration", "drive"} & given.keys():
        expected = (
            "a file that `infinity calibrate --json FILE` wrote: this file is from its cache, "
            "which has only a part of the figures"
        )
        raise ConfigError(field="--rates", value=str(path), expected=expected)
    # No calibration: plain rates by their names.
    if not (isinstance(given, dict) and "links" in given):
        return (
            Rates.from_mapping(given, field="--rates"),
            _Compute(),
            (f"rates are those of {path}",),
        )
    calibration = Calibration.from_mapping(given, field="--rates")
    two_memories = options.gpus != 0
    # The first with what I/O and copies take away, the second without.
    rates, alone = (
        calibration.rates(
            optimizer=options.optimizer,
            beside_io=beside and drives,
            beside_copies=beside and two_memories,
        ).divided(ranks)
        for beside in (True, False)
    )
    # Only these two are measured: fp16 is taken to compute as bf16.
    dtype = "fp32" if precision == "fp32" else "bf16"
    note = f"rates were measured {calibration.date}, of one process; those of {path}"
    return (
        rates,
        _Compute(calibration.flops_per_s(dtype), calibration.block_rates(dtype), alone),
        (note,),
    )
