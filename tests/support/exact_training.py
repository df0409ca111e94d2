"""A model whose gradients have the same bits on every device, trained to compare devices.

Its loss is linear in the parameters, and each coefficient is a small whole number times a power of
two: each gradient is the coefficient, exact in every format, and no order of a sum matters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import infinity_engine
from infinity_engine.accel import Accelerator
from infinity_engine.engine.engine import Engine
from infinity_engine.engine.optimizers import LionOptimizer
from support.engine_bits import Bits, bits_of
from support.nvme_training import RATES, Case, train
from support.small_models import Task

__all__ = ["OPTIMIZERS", "SUBGROUP", "Exact", "exact_task", "opened_exact", "trained_exact"]

OPTIMIZERS = ("adamw", "lion", "sgd")
SUBGROUP = 1 << 18
_SHAPES = ((), (1,), (7,), (33, 65), (0, 3), (1201, 1249), (2,), (129, 257), (4099,))


class Exact(Task):
    """Parameters of odd sizes, one of them of several subgroups."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(shape) / 8) for shape in _SHAPES
        )
        for number, weight in enumerate(self.weights):
            # eight bits are all that bf16 has
            drawn = torch.randint(-127, 128, weight.shape, dtype=torch.int8)
            self.register_buffer(f"coefficients_{number}", drawn, persistent=False)

    def batch(self, seed: int) -> torch.Tensor:
        """Return a power of two with a sign, another one for each step."""
        return torch.tensor([(-1.0) ** (seed // 3) * 2.0 ** (seed % 4 - 12)])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        factor = batch.float()
        losses = [
            (weight.float() * (self.get_buffer(f"coefficients_{number}").float() * factor)).sum()
            for number, weight in enumerate(self.weights)
        ]
        return torch.stack(losses).sum()


def exact_task(optimizer: str) -> tuple[Exact, torch.optim.Optimizer]:
    """Return the model and its optimizer, always the same."""
    torch.manual_seed(0)
    task = Exact()
    parameters = list(task.parameters())
    groups: list[dict[str, Any]] = [
        {"params": parameters[:4]},
        {"params": parameters[4:], "lr": 3e-4},
    ]
    made: torch.optim.Optimizer
    if optimizer == "lion":
        made = LionOptimizer(groups, lr=1e-3, weight_decay=0.1)
    elif optimizer == "sgd":
        made = torch.optim.SGD(groups, lr=1e-2, momentum=0.9, weight_decay=0.1)
    else:
        made = torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1)
    return task, made


@contextmanager
def opened_exact(
    case: Case, on: Accelerator | None, drive: Path | None, optimizer: str = "adamw", **more: Any
) -> Iterator[tuple[Engine, Task]]:
    """Open an engine for the case, but for its model, with states that may rest in `drive`."""
    task, made = exact_task(optimizer)
    budget: dict[str, object] = {"host": case.host, "device": case.device}
    if drive is not None:
        budget["nvme"] = {str(drive): "128MiB"}
    with infinity_engine.initialize(
        task,
        made,
        accelerator="cpu",
        device=on,
        strategy=case.strategy,
        rates=RATES,
        precision=case.precision,
        accumulation_steps=case.accumulation,
        max_grad_norm=case.clip,
        subgroup_numel=SUBGROUP,
        update_threads=2,
        parameters=case.parameters,
        storage={"small_bytes": case.small_bytes},
        budget=budget,
        **more,
    ) as engine:
        yield engine, task


def trained_exact(
    case: Case, on: Accelerator | None, drive: Path | None = None, optimizer: str = "adamw"
) -> Bits:
    """Train the steps of the case; return all bits."""
    with opened_exact(case, on, drive, optimizer) as (engine, task):
        train(engine, task, case)
        return bits_of(engine)
