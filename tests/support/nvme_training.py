"""Training of small models with what rests on drives, at the least host budget that a plan can do
with.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import infinity_engine
from infinity_engine.accel import Accelerator, Emulation, emulated_accelerator
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import CapacityError
from infinity_engine.plan import DriveRates, HostOnly, NvmeStreamed, Rates, Strategy
from infinity_engine.plan.ops import LoadStates
from support.engine_bits import Bits, bits_of
from support.mixed_models import MIXED
from support.small_models import MODELS, Task

__all__ = [
    "RATES",
    "STREAMED",
    "Case",
    "Trained",
    "digest_of",
    "emulated",
    "made",
    "opened",
    "train",
    "trained",
]

RATES = Rates(
    h2d_bytes_per_s=5e9,
    d2h_bytes_per_s=4e9,
    host_update_params_per_s=2e8,
    device_update_params_per_s=2e9,
    nvme={"/": DriveRates(read_bytes_per_s=2e9, write_bytes_per_s=1e9)},
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a small model is trained."""

    model: str = "gpt"
    strategy: Strategy = field(default_factory=HostOnly)
    parameters: str = "auto"
    precision: str = "fp32"
    accumulation: int = 1
    clip: float | None = None
    steps: int = 4
    host: int | str = "256MiB"
    device: int | str = "32MiB"
    nvme: int | str = "64MiB"
    small_bytes: int = 256
    subgroup_numel: int = 4096
    early: bool = False
    checksum: str | None = "off"  # None: the default


STREAMED = Case(
    precision="bf16",
    clip=0.05,
    strategy=NvmeStreamed(),
    parameters="nvme",
    host=17_100_000,
    steps=3,
)
"""Little enough of the host that states and gradients rest on the drives as well."""


@dataclass(frozen=True)
class Trained:
    """What came of it."""

    bits: Bits
    losses: list[float]
    loads: int
    after: Bits  # the parameters once the engine was closed


def emulated(seed: int) -> Accelerator:
    """Return a device whose copies and works are late by chance."""
    chance = random.Random(seed)
    late = lambda _: int(10 ** chance.uniform(0, 7)) if chance.random() < 0.3 else 0  # noqa: E731
    return emulated_accelerator(
        Emulation(rates=RATES, capacity_bytes=64 << 20, seed=seed, delay_ns=late)
    )


def made(model: str) -> tuple[Task, torch.optim.Optimizer]:
    """Return a model and its optimizer, always the same."""
    torch.manual_seed(0)
    task = {**MODELS, **MIXED}[model]()
    parameters = list(task.parameters())
    half = len(parameters) // 2
    optimizer = torch.optim.AdamW(parameters[:half], lr=3e-3, weight_decay=0.1)
    optimizer.add_param_group({"params": parameters[half:], "lr": 1e-3})
    return task, optimizer


@contextmanager
def opened(
    case: Case, on: Accelerator | None, drive: Path | None, **more: Any
) -> Iterator[tuple[Engine, Task]]:
    """Open an engine for the case, with what rests on drives in the folder `drive`."""
    task, optimizer = made(case.model)
    budget: dict[str, object] = {"host": case.host, "device": case.device}
    if drive is not None:
        budget["nvme"] = {str(drive): case.nvme}
    storage: dict[str, object] = {"small_bytes": case.small_bytes, "early_updates": case.early}
    if case.checksum is not None:
        storage["checksum"] = case.checksum
    with infinity_engine.initialize(
        task,
        optimizer,
        accelerator="cpu",
        device=on,
        strategy=case.strategy,
        rates=RATES,
        precision=case.precision,
        accumulation_steps=case.accumulation,
        max_grad_norm=case.clip,
        subgroup_numel=case.subgroup_numel,
        update_threads=2,
        parameters=case.parameters,
        storage=storage,
        budget=budget,
        **more,
    ) as engine:
        yield engine, task


def digest_of(bits: Bits) -> str:
    """Return what is the same in two processes if and only if all bits are."""
    digest = hashlib.sha256()
    for name, each in sorted(bits.items()):
        digest.update(name.encode())
        digest.update(
            each.contiguous().view(-1).view(torch.uint8).numpy().data if each.numel() else b""
        )
    return digest.hexdigest()


def train(engine: Engine, task: Task, case: Case, *, first: int = 0) -> list[float]:
    """Make the steps of the case, where the engine computes; return the losses."""
    losses = []
    for seed in range(first * case.accumulation, (first + case.steps) * case.accumulation):
        loss = engine(task.batch(seed).to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def trained(case: Case, on: Accelerator | None, drive: Path | None) -> Trained:
    """Train; where there is a drive, at the least host budget with which the plan is made."""
    host: int | str = case.host if drive is None else 1 << 20
    while True:
        try:
            with opened(replace(case, host=host), on, drive) as (engine, task):
                losses = train(engine, task, case)
                bits = bits_of(engine)
                loads = sum(isinstance(op, LoadStates) for op in engine.plan.ops)
            break
        except CapacityError as error:
            if not isinstance(host, int):
                raise
            host = max(error.asked, host + (32 << 10))
    assert {each.device.type for each in (*task.parameters(), *task.buffers())} == {"cpu"}
    if on is not None:
        on.close()
    return Trained(
        bits, losses, loads, {name: each.detach().clone() for name, each in task.named_parameters()}
    )
