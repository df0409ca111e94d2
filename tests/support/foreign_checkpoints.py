"""Checkpoints in the layouts of DeepSpeed, made here: what real ones hold, without DeepSpeed.

The layouts are those of DeepSpeed 0.19.8; tests/checkpoint/test_real_imports.py holds them to it.
"""

from __future__ import annotations

import sys
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

__all__ = ["STREAMS", "Saved", "deepspeed_classes", "save_universal", "save_zero"]

STREAMS = ("master", "exp_avg", "exp_avg_sq")
SHAPES = {"embed.weight": (37, 24), "up.weight": (51, 24), "norm.weight": (24,), "up.bias": (51,)}
GROUPS = (("embed.weight", "up.weight"), ("norm.weight", "up.bias"))
TAG = "global_step3"


@dataclass(frozen=True)
class Saved:
    """The values that a checkpoint has, by parameter and stream, and those that nothing trains."""

    streams: Mapping[tuple[str, str], torch.Tensor]
    frozen: torch.Tensor
    scale: torch.Tensor
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: SHAPES)

    @classmethod
    def random(cls, seed: int = 0) -> Saved:
        """Return random values."""
        made = torch.Generator().manual_seed(seed)
        streams = {
            (name, stream): torch.randn(shape, generator=made)
            for name, shape in SHAPES.items()
            for stream in STREAMS
        }
        frozen = torch.randn(24, 51, generator=made).to(torch.bfloat16)
        return cls(streams, frozen, torch.tensor([0.5, 2.0]))


@contextmanager
def deepspeed_classes(*, by_name: bool = False) -> Iterator[Any]:
    """Have the classes that DeepSpeed pickles, under its names, for the time of the body.

    Python pickles the members of enumerations by their values; 3.11.0 to 3.11.3 did `by_name`.
    """
    stage = types.ModuleType("deepspeed.runtime.zero.config")
    scaler = types.ModuleType("deepspeed.runtime.fp16.loss_scaler")

    class ZeroStageEnum(IntEnum):
        optimizer_states = 1
        gradients = 2
        weights = 3

        def __reduce_ex__(self, _protocol: object) -> Any:
            return (getattr, (type(self), self.name)) if by_name else (type(self), (self.value,))

    class DynamicLossScaler:
        pass

    for module, kind in ((stage, ZeroStageEnum), (scaler, DynamicLossScaler)):
        kind.__module__, kind.__qualname__ = module.__name__, kind.__name__
        setattr(module, kind.__name__, kind)
    modules = {
        name: types.ModuleType(name)
        for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero")
    }
    modules |= {"deepspeed.runtime.fp16": types.ModuleType("deepspeed.runtime.fp16")}
    modules |= {stage.__name__: stage, scaler.__name__: scaler}
    sys.modules.update(modules)
    try:
        yield types.SimpleNamespace(stage=ZeroStageEnum, scaler=DynamicLossScaler)
    finally:
        for name in modules:
            del sys.modules[name]


def save_zero(
    path: Path,
    saved: Saved,
    *,
    stage: int,
    ranks: int,
    alignment: Sequence[int] = (0, 0),
    by_name: bool = False,
) -> Path:
    """Write a checkpoint of ZeRO-1, 2 or 3; return the directory that has its `latest`."""
    folder = path / TAG
    folder.mkdir(parents=True)
    (path / "latest").write_text(TAG)
    with deepspeed_classes(by_name=by_name) as classes:
        scaler = classes.scaler()
        scaler.__dict__ |= {
            "cur_scale": 4096.0,
            "dynamic": True,
            "cur_iter": 30,
            "last_overflow_iter": 9,
            "scale_window": 1000,
        }
        for rank in range(ranks):
            common = {
                "zero_stage": classes.stage(stage),
                "loss_scaler": scaler,
                "dynamic_loss_scale": True,
                "overflow": False,
            }
            state = _partitioned(saved, rank, ranks) if stage == 3 else None
            state = state or _grouped(saved, rank, ranks, alignment)
            torch.save(
                {"optimizer_state_dict": common | state, "ds_version": "0.19.8"},
                folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            )
            if stage == 3 or rank == 0:
                prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
                model = _model(saved, rank, ranks, stage)
                torch.save(model, folder / f"{prefix}mp_rank_00_model_states.pt")
    return path


def save_universal(path: Path, saved: Saved, *, flat: bool) -> Path:
    """Write a universal checkpoint: flat tensors as those of ZeRO-3 become, or dicts."""
    folder = path / f"{TAG}_universal"
    (folder / "zero").mkdir(parents=True)
    (path / "latest_universal").write_text(folder.name)
    for (name, stream), values in saved.streams.items():
        (folder / "zero" / name).mkdir(exist_ok=True)
        content = values.reshape(-1) if flat else {"cat_dim": 0, "param": values}
        stem = "fp32" if stream == "master" else stream
        torch.save(content, folder / "zero" / name / f"{stem}.pt")
        if not flat:
            torch.save(torch.tensor(3.0), folder / "zero" / name / "step.pt")
    groups = [_options(number) for number in range(2)]
    inner = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": groups}
    shared = {"optimizer_state_dict": inner, "param_groups": groups}
    torch.save(shared if flat else {"param_groups": groups}, folder / "zero" / "optimizer_state.pt")
    prefix = "zero_pp_rank_0_" if flat else ""
    model = _model(saved, 0, 1, 3 if flat else 2)
    torch.save(model, folder / f"{prefix}mp_rank_00_model_states.pt")
    return path


def _options(number: int) -> dict[str, Any]:
    return {
        "lr": 0.01,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.1 - 0.1 * number,
        "foreach": None,
        "params": [number],
    }


def _part(values: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Return a rank's part of a flat tensor, padded as ZeRO-3 pads it."""
    length = -(-values.numel() // ranks)
    padded = torch.zeros(length * ranks, dtype=values.dtype)
    padded[: values.numel()] = values.reshape(-1)
    return padded[rank * length : (rank + 1) * length].clone()


def _partitioned(saved: Saved, rank: int, ranks: int) -> dict[str, Any]:
    flats = {
        stream: [
            torch.cat([_part(saved.streams[name, stream], rank, ranks) for name in group])
            for group in GROUPS
        ]
        for stream in STREAMS
    }
    inner = {
        number: {
            "step": torch.tensor(3.0),
            "exp_avg": flats["exp_avg"][number],
            "exp_avg_sq": flats["exp_avg_sq"][number],
        }
        for number in range(len(GROUPS))
    }
    return {
        "partition_count": ranks,
        "optimizer_state_dict": {
            "state": inner,
            "param_groups": [_options(number) for number in range(len(GROUPS))],
        },
        "fp32_flat_groups": flats["master"],
    }


def _grouped(saved: Saved, rank: int, ranks: int, alignment: Sequence[int]) -> dict[str, Any]:
    flats: dict[str, list[torch.Tensor]] = {}
    for stream in STREAMS:
        for group in GROUPS:
            rows = []
            for name, padding in zip(group, alignment, strict=True):
                rows += [saved.streams[name, stream].reshape(-1), torch.zeros(padding)]
            whole = torch.cat(rows)
            flats.setdefault(stream, []).append(_part(whole, rank, ranks))
    lean = []
    for number, group in enumerate(GROUPS):
        total = sum(saved.streams[name, "master"].numel() for name in group) + sum(alignment)
        length = -(-total // ranks)
        is_last = rank == ranks - 1
        lean.append(flats["master"][number][: total - rank * length if is_last else length])
    inner = {
        number: {
            "step": torch.tensor(3.0),
            "exp_avg": flats["exp_avg"][number],
            "exp_avg_sq": flats["exp_avg_sq"][number],
        }
        for number in range(len(GROUPS))
    }
    return {
        "base_optimizer_state": {
            "state": inner,
            "param_groups": [_options(number) for number in range(len(GROUPS))],
        },
        "single_partition_of_fp32_groups": lean,
        "partition_count": [ranks] * len(GROUPS),
        "param_alignment_paddings": [list(alignment)] * len(GROUPS),
    }


def _model(saved: Saved, rank: int, ranks: int, stage: int) -> dict[str, Any]:
    module: dict[str, torch.Tensor] = OrderedDict(scale=saved.scale)
    for name in (*saved.shapes, "frozen.weight", "head.weight"):
        source = "embed.weight" if name == "head.weight" else name
        whole = saved.frozen if name == "frozen.weight" else saved.streams[source, "master"]
        module[name] = (torch.empty(0) if stage == 3 else whole).to(torch.bfloat16)
    fragment = _part(saved.frozen, rank, ranks) if stage == 3 else saved.frozen
    return {
        "module": module,
        "buffer_names": ["scale"],
        "param_shapes": [
            OrderedDict((name, torch.Size(saved.shapes[name])) for name in group)
            for group in GROUPS
        ],
        "frozen_param_shapes": OrderedDict({"frozen.weight": saved.frozen.shape}),
        "frozen_param_fragments": OrderedDict({"frozen.weight": fragment}),
        "shared_params": {"head.weight": "embed.weight"},
        "lr_scheduler": {"last_epoch": 3},
        "skipped_steps": 1,
        "global_steps": 4,
        "ds_version": "0.19.8",
        "mine": {"epoch": 2},
    }
