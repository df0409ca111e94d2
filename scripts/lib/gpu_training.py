"""What the benches of a GPU train, and on what: the GPU that torch sees, or whatever a test gives
in its place.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

import bench
import infinity_engine
from infinity_engine.accel import Accelerator, open_accelerator
from infinity_engine.calibration import FULL, KeptFigures, calibrated
from infinity_engine.optim.policy import OffloadPolicy
from infinity_engine.plan import Rates, Strategy
from tiny_gpt import VOCABULARY, TinyGPT

__all__ = ["Layers", "Taken", "Way", "gpt", "gpu", "rates_of", "some_text", "steps_of", "waited"]


EFFORT = replace(FULL.beside_a_gpu(), seconds=6.0, rounds=3)


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train: settings of the engine."""

    strategy: Strategy | str
    policy: OffloadPolicy | None = None
    parameters: str = "device"
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Taken:
    """Median seconds of a step's parts, and the most bytes that torch has reserved on the
    device.
    """

    forward_backward: float
    update: float
    step: float
    reserved: int


@contextlib.contextmanager
def gpu() -> Iterator[Accelerator]:
    """Open the GPU."""
    if not torch.cuda.is_available():
        raise bench.UnavailableError("torch sees no GPU here")
    with open_accelerator("cuda") as accelerator:
        yield accelerator


def rates_of(device: Accelerator) -> Rates:
    """Measure what this machine does, updates and copies beside one another."""
    return calibrated((), accelerator=device, effort=EFFORT, kept=KeptFigures.REPLACED).rates(
        beside_copies=True
    )


def waited(device: Accelerator) -> float:
    """Return the time at which the device has done all that it was given."""
    if device.torch_device.type == "cuda":
        torch.cuda.synchronize(device.torch_device)
    device.synchronize()
    return time.perf_counter()


class Layers(nn.Module):
    """Layers whose gradients cost next to nothing to make, so that a step is its update."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.zeros(width, width)) for _ in range(depth)
        )

    def forward(self) -> torch.Tensor:
        """Return a loss that each weight has the same part in."""
        return torch.stack([weight.float().mean() for weight in self.weights]).mean()


class _TrainedGPT(TinyGPT):
    """Returns its loss."""

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        logits = super().forward(inputs).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt(width: int, depth: int, context: int, *, recomputes: bool = True) -> nn.Module:
    """Return a GPT that maps inputs and targets to the loss, with heads as wide as those of large
    models.
    """
    return _TrainedGPT(
        width=width, depth=depth, heads=max(1, width // 128), context=context, recomputes=recomputes
    )


def some_text(
    sequences: int, context: int, device: Accelerator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets on the device."""
    text = torch.randint(VOCABULARY, (sequences, context + 1))
    return text[:, :-1].contiguous().to(device.torch_device), text[:, 1:].contiguous().to(
        device.torch_device
    )


def steps_of(
    model: nn.Module,
    way: Way,
    device: Accelerator,
    rates: Rates,
    *,
    inputs: tuple[torch.Tensor, ...],
    steps: int,
    warming_up: int = 2,
) -> Taken:
    """Train some steps after those to warm up, in bf16 with AdamW, each waited for to its end; the
    report of the last one is printed.
    """
    forwards, updates, wholes = [], [], []
    if device.torch_device.type == "cuda":
        torch.cuda.empty_cache()  # what the way before left is neither budget nor peak of this one
        torch.cuda.reset_peak_memory_stats(device.torch_device)
    with infinity_engine.initialize(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        device=device,
        strategy=way.strategy,
        policy=way.policy,
        parameters=way.parameters,
        rates=rates,
        precision="bf16",
        replanning="off",
        **way.settings,
    ) as engine:
        for step in range(steps + warming_up):
            begun = waited(device)
            engine.backward(engine(*inputs))
            computed = waited(device)
            engine.step()
            ended = waited(device)
            if step >= warming_up:
                forwards.append(computed - begun)
                updates.append(ended - computed)
                wholes.append(ended - begun)
        print(engine.report(), flush=True)
        reserved = device.taken_by_torch() or 0
        if device.torch_device.type == "cuda":
            reserved = torch.cuda.max_memory_reserved(device.torch_device)
    return Taken(
        statistics.median(forwards), statistics.median(updates), statistics.median(wholes), reserved
    )
