"""Parameters that share memory without being one parameter are refused before anything moves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import infinity_engine
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import ConfigError


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def tied_through_data(model: nn.Sequential) -> None:
    model[2].weight.data = model[0].weight.data


def overlapping(model: nn.Sequential) -> None:
    flat = torch.randn(6000)
    model[0].weight.data, model[2].weight.data = (
        flat[:4096].view(64, 64),
        flat[1000:5096].view(64, 64),
    )


def frozen_beside_trained(model: nn.Sequential) -> None:
    tied_through_data(model)
    model[2].weight.requires_grad_(False)


def buffer_of_a_weight(model: nn.Sequential) -> None:
    model.register_buffer("view", model.get_parameter("0.weight").detach()[3])


def buffer_of_a_column(model: nn.Sequential) -> None:
    model.register_buffer("view", model.get_parameter("0.weight").detach()[:, 3])


def overlapping_columns(model: nn.Sequential) -> None:
    wide = torch.randn(64, 128)
    model[0].weight.data, model[2].weight.data = wide[:, :64], wide[:, 63:127]


def engine_of(model: nn.Module) -> Engine:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    return infinity_engine.initialize(model, optimizer, accelerator="cpu", budget={"host": "64MiB"})


@pytest.mark.parametrize(
    ("share", "names"),
    [
        (tied_through_data, r"parameter (0|2)\.weight: .*shares memory with (0|2)\.weight"),
        (overlapping, r"parameter 2\.weight: .*shares memory with 0\.weight"),
        (frozen_beside_trained, r"parameter (0|2)\.weight: .*shares memory with (0|2)\.weight"),
        (buffer_of_a_weight, r"parameter buffer view: .*shares memory with 0\.weight"),
        (buffer_of_a_column, r"parameter buffer view: .*shares memory with 0\.weight"),
        (overlapping_columns, r"parameter 2\.weight: .*shares memory with 0\.weight"),
    ],
)
def test_parameters_of_one_memory_are_refused_by_name(
    share: Callable[[nn.Sequential], None], names: str
) -> None:
    model = layers()
    share(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match=names) as refusal:
        engine_of(model)
    assert "second.weight = first.weight" in str(refusal.value)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_parts_of_one_tensor_that_do_not_overlap_are_trained() -> None:
    model, flat = layers(), torch.randn(8192)
    model[0].weight.data, model[2].weight.data = flat[:4096].view(64, 64), flat[4096:].view(64, 64)
    with engine_of(model) as engine:
        engine.backward(engine(torch.randn(2, 64)).sum())
        engine.step()


def test_columns_of_one_tensor_that_do_not_overlap_are_trained() -> None:
    model, wide = layers(), torch.randn(64, 128)
    model[0].weight.data, model[2].weight.data = wide[:, :64], wide[:, 64:]
    with engine_of(model) as engine:
        engine.backward(engine(torch.randn(2, 64)).sum())
        engine.step()


def test_frozen_parameters_may_share_memory() -> None:
    model = layers()
    tied_through_data(model)
    model[0].weight.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    with engine_of(model) as engine:
        engine.backward(engine(torch.randn(2, 64)).sum())
        engine.step()


def test_one_parameter_of_two_modules_is_tied() -> None:
    model = layers()
    model[2].weight = model[0].weight
    with engine_of(model) as engine:
        engine.backward(engine(torch.randn(2, 64)).sum())
        engine.step()
        found = engine.state_dict()
    assert torch.equal(found["0.weight"], found["2.weight"])
