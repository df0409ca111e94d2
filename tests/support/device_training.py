"""Small trainings on whatever device the engine is given, so that devices and strategies can be compared by bits."""

from __future__ import annotations

from typing import Any

import torch

import infinity_engine
from infinity_engine.accel import Accelerator
from infinity_engine.engine.engine import Engine
from infinity_engine.plan import HostOnly, Interleaved, StaticSplit, Strategy
from infinity_engine.plan.strategy import DeviceOnly
from support.engine_bits import Bits, bits_of
from support.nvme_training import RATES
from support.small_models import MODELS

__all__ = ["STRATEGIES", "Wide", "trained", "wide_engine"]

STRATEGIES: tuple[Strategy, ...] = (
    HostOnly(),
    DeviceOnly(),
    StaticSplit(ratio=0.4),
    Interleaved(share=0.5),
    Interleaved(stride=3, resident=0.2),
)


def trained(
    model: str,
    on: Accelerator | None,
    strategy: Strategy,
    *,
    precision: str = "fp32",
    accumulation: int = 1,
    clip: float | None = None,
    parameters: str = "auto",
    nvme: dict[str, str] | None = None,
    steps: int = 4,
) -> tuple[Bits, list[float]]:
    """Train with the engine, wherever it computes; return all that it trains, and the losses."""
    torch.manual_seed(0)
    task = MODELS[model]()
    where = torch.device("cpu") if on is None else on.torch_device
    losses = []
    with infinity_engine.initialize(
        task,
        torch.optim.AdamW(task.parameters(), lr=3e-3),
        accelerator="cpu",
        device=on,
        strategy=strategy,
        rates=RATES,
        precision=precision,
        accumulation_steps=accumulation,
        max_grad_norm=clip,
        subgroup_numel=4096,
        update_threads=2,
        parameters=parameters,
        storage={"small_bytes": 0},
        budget={"host": "256MiB", "device": "16MiB", **({} if nvme is None else {"nvme": nvme})},
    ) as engine:
        for micro_batch in range(steps * accumulation):
            loss = engine(task.batch(micro_batch).to(where))
            engine.backward(loss)
            engine.step()
            assert loss.device == where
            losses.append(loss.item())
        bits = bits_of(engine)
    assert {tensor.device.type for tensor in (*task.parameters(), *task.buffers())} == {"cpu"}
    return bits, losses


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
        **{"strategy": "host_only", "rates": RATES, "budget": {"host": "64MiB", "device": "4MiB"}, **settings},
    )
