"""What is read outside of modules goes when its room is needed, and never stops the training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import infinity_engine


@pytest.mark.parametrize("read", ["a shape", "values"])
def test_weights_read_between_steps_make_way_for_the_next_forward(
    tmp_path: Path, read: str
) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(128, 128) for _ in range(24)]
    before = [layer.weight.detach().clone() for layer in layers]
    model = nn.Sequential(*layers)
    with infinity_engine.initialize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        accelerator="cpu",
        strategy="nvme_streamed",
        parameters="nvme",
        subgroup_numel=1 << 14,
        budget={"host": "19MiB", "nvme": {str(tmp_path): "64MiB"}},
    ) as engine:
        for _ in range(2):
            for layer, values in zip(layers, before, strict=True):
                weight = layer.weight
                assert (
                    weight.shape == (128, 128)
                    if read == "a shape"
                    else torch.equal(weight.detach(), values)
                )
            engine.backward(engine(torch.randn(2, 128)).pow(2).mean())
            with engine.gathered(layers[3].weight):
                assert torch.equal(layers[3].weight.detach(), before[3])
            engine.step()


def test_weights_read_while_a_graph_is_alive_make_way(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(128, 128) for _ in range(24)]
    model = nn.Sequential(*layers)
    with infinity_engine.initialize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        accelerator="cpu",
        strategy="nvme_streamed",
        parameters="nvme",
        subgroup_numel=1 << 14,
        budget={"host": "19MiB", "nvme": {str(tmp_path): "64MiB"}},
    ) as engine:
        loss = engine(torch.randn(2, 128)).pow(2).mean()
        for layer in layers:
            assert layer.weight.isfinite().all()
        engine.backward(loss)
        for layer in layers:
            assert layer.weight.isfinite().all()
        engine.step()
