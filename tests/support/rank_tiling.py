"""What a rank runs to train a model with tiled layers and a chunked loss."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from infinity_engine.losses import chunked_cross_entropy
from infinity_engine.tiling import WeightTile, tile
from support.determinism import deterministic_compute
from support.rank_training import Run, batch_of, engine_of
from support.small_models import Task

__all__ = ["Vocabulary", "train_in_tiles", "train_with_device"]

ENTRIES, WIDTH = 96, 16


class Vocabulary(Task):
    """An embedding that is the output layer as well, and a chunked loss on it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ENTRIES, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, ENTRIES, bias=False)
        self.head.weight = self.embed.weight

    def batch(self, seed: int) -> torch.Tensor:
        return torch.randint(ENTRIES, (2, 9), generator=torch.Generator().manual_seed(seed))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.body(self.embed(batch[:, :-1])))
        return chunked_cross_entropy(hidden, self.head, batch[:, 1:], workspace="8KiB")


def train_in_tiles(settings: Mapping[str, Any], *, limit: int) -> dict[str, Any]:
    """Train with weights above `limit` in tiles; return losses, weights and replaced modules."""
    torch.manual_seed(0)
    task, losses = Vocabulary(), []
    names = tile(task, limit).names
    run = Run(settings={"storage": {"small_bytes": 0}, **settings})
    with deterministic_compute(), ExitStack() as around:
        engine = engine_of(run, task, torch.optim.AdamW(task.parameters(), lr=1e-2), around)
        for step in range(3):
            loss = engine(batch_of(task, step))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return {"losses": losses, "states": engine.state_dict(), "names": names}


class _Wide(Task):
    """A layer of 1 MiB between two small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 64)
        self.large = nn.Linear(64, 4096, bias=False)

    def batch(self, seed: int) -> torch.Tensor:
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.large(torch.tanh(self.first(batch))).square().mean())


def train_with_device(sizes: list[int], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Train on devices of so many bytes, rank by rank; return losses, weights and tiles."""
    torch.manual_seed(0)
    task, losses = _Wide(), []
    more = {"parameters": "host", "budget": {"host": "64MiB"}, **settings}
    run = Run(emulated=True, device_bytes=sizes, settings=more)
    with deterministic_compute(), ExitStack() as around:
        engine = engine_of(run, task, torch.optim.AdamW(task.parameters(), lr=1e-2), around)
        for step in range(3):
            loss = engine(batch_of(task, step))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        tiles = sum(isinstance(module, WeightTile) for module in task.modules())
        return {"losses": losses, "states": engine.state_dict(), "tiles": tiles}
