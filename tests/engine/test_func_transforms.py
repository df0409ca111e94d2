"""torch.func differentiates models whose parameters an engine fetches."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import infinity_engine


def test_func_grad_of_a_fetched_model_is_that_of_the_plain_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    x = torch.randn(3, 64)

    def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.as_tensor(torch.func.functional_call(model, values, (x,)).pow(2).mean())

    expected = torch.func.grad(loss)(
        {name: value.detach().clone() for name, value in model.named_parameters()}
    )
    with infinity_engine.initialize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        accelerator="cpu",
        strategy="nvme_streamed",
        parameters="nvme",
        storage={"small_bytes": 0},
        budget={"host": "24MiB", "nvme": {str(tmp_path): "16MiB"}},
    ) as engine:
        with engine.gathered(model.parameters()):
            values = {name: value.detach().clone() for name, value in model.named_parameters()}
        found = torch.func.grad(loss)(values)
        engine.backward(engine(x).pow(2).mean())  # training goes on
        engine.step()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
