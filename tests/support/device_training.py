"""What tests of devices with memory of their own share: strategies to compare, and a model that
fills the memory.
"""

from __future__ import annotations

from typing import Any

import torch

import infinity_engine
from infinity_engine.accel import Accelerator
from infinity_engine.engine.engine import Engine
from infinity_engine.plan import HostOnly, Interleaved, StaticSplit, Strategy
from infinity_engine.plan.strategy import DeviceOnly
from support.nvme_training import RATES

__all__ = ["STRATEGIES", "Wide", "wide_engine"]

STRATEGIES: tuple[Strategy, ...] = (
    HostOnly(),
    DeviceOnly(),
    StaticSplit(ratio=0.4),
    Interleaved(share=0.5),
    Interleaved(stride=3, resident=0.2),
)


class Wide(torch.nn.Module):
    """Makes far more activations than it has parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.second(self.first(x).relu()).square().mean())


def wide_engine(device: Accelerator, **settings: Any) -> Engine:
    model = Wide()
    return infinity_engine.initialize(
        model,
        torch.optim.AdamW(model.parameters()),
        device=device,
        **{
            "strategy": "host_only",
            "rates": RATES,
            "budget": {"host": "64MiB", "device": "4MiB"},
            **settings,
        },
    )
