"""Engines of small models with their bytes at several places, for what is saved and loaded."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import infinity_engine
from infinity_engine.engine.engine import Engine
from infinity_engine.plan import HostOnly, Interleaved
from support.nvme_training import STREAMED, Case, emulated, opened, train

__all__ = ["PLACES", "Place", "engine_at", "one_step", "small", "steps"]


@dataclass(frozen=True)
class Place:
    """Where a run has its bytes."""

    case: Case
    emulated: bool = False
    drives: bool = False


PLACES = {
    "host": Place(Case(strategy=HostOnly())),
    "another subgroup size": Place(Case(strategy=HostOnly(), subgroup_numel=8192)),
    "interleaved device": Place(Case(strategy=Interleaved(share=0.5, resident=0.3)), emulated=True),
    "device, parameters on host": Place(
        Case(strategy=HostOnly(), parameters="host"), emulated=True
    ),
    "drives": Place(replace(STREAMED, clip=None), drives=True),
    "drives, early updates": Place(
        replace(STREAMED, clip=None, early=True, host=17_500_000), drives=True
    ),
    "drives and device": Place(
        replace(STREAMED, clip=None, device="2MiB"), emulated=True, drives=True
    ),
}


@contextmanager
def engine_at(
    place: Place,
    folder: Path,
    *,
    precision: str = "bf16",
    model: str = "gpt",
) -> Iterator[tuple[Engine, Any]]:
    """Open an engine of a run, at one of the places."""
    early = place.case.early and precision != "fp32"
    case = replace(place.case, precision=precision, model=model, early=early, steps=2)
    device = emulated(1) if place.emulated else None
    drive = folder / "drive" if place.drives else None
    if drive is not None:
        drive.mkdir(exist_ok=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            with opened(case, device, drive) as (engine, task):
                yield engine, (task, case)
    finally:
        if device is not None:
            device.close()


def steps(engine: Engine, run: Any, first: int, count: int) -> list[float]:
    """Make so many steps, from step `first` on; return the losses."""
    task, case = run
    return train(engine, task, replace(case, steps=count), first=first)


def small(**more: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, Engine]:
    """Return a model of two layers, its optimizer and an engine for both."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings: dict[str, Any] = {
        "budget": {"host": "64MiB"},
        "strategy": "host_only",
        "accelerator": "cpu",
        **more,
    }
    return model, optimizer, infinity_engine.initialize(model, optimizer, **settings)


def one_step(engine: Engine) -> float:
    """Make a step with random inputs; return the loss."""
    loss = engine(torch.randn(3, 8)).pow(2).mean()
    engine.backward(loss)
    engine.step()
    return float(loss.item())
