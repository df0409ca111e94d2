"""What a rank runs to train a model with tiled layers and a chunked loss."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity_engine.engine.engine import Engine
from infinity_engine.losses import chunked_cross_entropy
from infinity_engine.tiling import WeightTile, tile
from support.determinism import deterministic_compute
from support.rank_training import Run, batch_of, engine_of
from support.small_models import Task

__all__ = ["Vocabulary", "load_tiles", "train_in_tiles", "train_with_device"]

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


def load_tiles(path: Path, *, limit: int) -> dict[str, Any]:
    """Load a saved run with weights above `limit` in tiles; return weights and moments."""
    task = Vocabulary()
    tile(task, limit)
    with ExitStack() as around:
        optimizer = torch.optim.AdamW(task.parameters(), lr=1e-2)
        engine = engine_of(Run(settings={"storage": {"small_bytes": 0}}), task, optimizer, around)
        engine.load(path)
        return {"states": engine.state_dict(), "moments": _moments_of(task, engine)}


def _moments_of(task: Vocabulary, engine: Engine) -> torch.Tensor:
    """Return the moments of the embedding's rows."""
    states: list[Any] = [engine.state_of(tile)["exp_avg"] for tile in task.embed.parameters()]
    return torch.cat(states)


def train_in_tiles(
    settings: Mapping[str, Any], *, limit: int, save: Path | None = None
) -> dict[str, Any]:
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
        if save is not None:
            engine.save(save)
        found = {"moments": _moments_of(task, engine), "states": engine.state_dict()}
        return {"losses": losses, "names": names, **found}


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
