"""What a rank runs to train with ways that the ranks have chosen together."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from support.determinism import deterministic_compute
from support.rank_training import Run, engine_of, saved, where
from support.small_models import Task

__all__ = ["ROWS", "SAVED", "WIDTH", "train_with_ways"]

ROWS = 64  # of rank 0; the others have fewer
WIDTH = 64
SAVED = ROWS * (3 * 4 * WIDTH + WIDTH) * 4  # of a block on rank 0, about
LARGER = 3  # steps at the end, with batches that are three times as large on rank 0


class _Stack(Task):
    """Wide blocks, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 4 * WIDTH),
                nn.GELU(),
                nn.Linear(4 * WIDTH, WIDTH),
            )
            for _ in range(6)
        )

    def batch(self, seed: int) -> torch.Tensor:
        return torch.randn(3 * ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = batch
        for block in self.blocks:
            x = x + block(x)
        return torch.as_tensor(x.square().mean())


def train_with_ways(runs: Mapping[str, Mapping[str, Any]], *, steps: int) -> dict[str, Any]:
    """Train with each of these settings; return losses, weights, each step's ways, and the words
    of the report.
    """
    return {name: _trained(settings, steps) for name, settings in runs.items()}


def _trained(settings: Mapping[str, Any], steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    task, losses, ways = _Stack(), [], []
    optimizer = torch.optim.AdamW(task.parameters(), lr=1e-2)
    run = Run(settings={"storage": {"small_bytes": 0}, "calibration": "off", **settings})
    rank, _ = where()
    with deterministic_compute(), ExitStack() as around:
        engine = engine_of(run, task, optimizer, around)
        for step in range(steps):
            rows = ROWS // (1 + 2 * rank)
            if rank == 0 and step >= steps - LARGER:
                rows *= 3
            loss = engine(task.batch(step)[:rows])
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            ways.append([(use.name, use.way) for use in engine.report().blocks])
        return {
            "losses": losses,
            "weights": {name: saved(each) for name, each in engine.state_dict().items()},
            "ways": ways,
            "described": engine.report().ways,
            "within": all(usage.peak_held <= usage.limit for usage in engine.usage()),
        }
