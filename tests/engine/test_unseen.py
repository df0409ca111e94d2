"""Parameters used where the engine cannot see it: refused, and nothing is updated from NaN of the
engine's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity_engine
from infinity_engine.engine.engine import Engine


@contextmanager
def on_drives(model: nn.Module, folder: Path, **settings: Any) -> Iterator[Engine]:
    """Open an engine that fetches all parameters from a drive."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    more: dict[str, Any] = {
        "accelerator": "cpu",
        "strategy": "nvme_streamed",
        "parameters": "nvme",
        "subgroup_numel": 1 << 14,
        "storage": {"small_bytes": 0},
        "budget": {"host": "24MiB", "nvme": {str(folder): "64MiB"}},
        **settings,
    }
    with infinity_engine.initialize(model, optimizer, **more) as engine:
        yield engine


def plain(precision: str = "model") -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    return layers.to(torch.bfloat16) if precision == "bf16" else layers


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_penalty_over_parameters_is_refused_and_updates_nothing(
    tmp_path: Path, precision: str
) -> None:
    model = plain(precision)
    batch = torch.randn(2, 64, dtype=next(model.parameters()).dtype)
    with on_drives(model, tmp_path) as engine:
        before = engine.state_dict()
        penalty = sum(parameter.float().pow(2).sum() for parameter in model.parameters())
        loss = engine(batch).float().pow(2).mean() + 1e-4 * penalty
        with pytest.raises(
            RuntimeError, match=r"The loss is nan in step 0\. .*engine\.gathered\(parameter\)"
        ):
            engine.backward(loss)
        with pytest.raises(RuntimeError, match="no gradient to update with"):
            engine.step()
        assert all(torch.equal(before[name], value) for name, value in engine.state_dict().items())
        with engine.gathered(model.parameters()):
            penalty = sum(parameter.float().pow(2).sum() for parameter in model.parameters())
            engine.backward(engine(batch).float().pow(2).mean() + 1e-4 * penalty)
        engine.step()
        assert not any(bool(value.isnan().any()) for value in engine.state_dict().values())


class Listed(nn.Module):
    """Uses its layers' weights through a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))
        self.kept = list(self.layers.parameters())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.kept:
            x = torch.tanh(x @ weight)
        return x


def test_weights_used_through_a_list_are_named_in_evaluation(tmp_path: Path) -> None:
    model = Listed()
    with on_drives(model, tmp_path) as engine, torch.no_grad():
        expected = r"returned NaN, and no module has asked for layers\.0\.weight, layers\.1\.weight, layers\.2\.weight"
        with pytest.raises(RuntimeError, match=expected):
            engine.eval()(torch.randn(2, 64))
        for weight in model.kept:
            engine.register_external(model, weight)
        assert not bool(engine(torch.randn(2, 64)).isnan().any())


class Careless(torch.autograd.Function):
    """Keeps the weight on its ctx, where nothing sees it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (x,) = ctx.saved_tensors
        return gradients[0] @ ctx.weight.t(), x.t() @ gradients[0]


class Layer(nn.Module):
    """A layer of such a function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 256) / 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # torch is
        return torch.tanh(torch.as_tensor(Careless.apply(x, self.weight)))  # type: ignore[no-untyped-call]


def test_a_function_that_keeps_a_weight_is_refused_before_any_update(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*[Layer() for _ in range(16)])
    budget = {"host": 22_282_240, "nvme": {str(tmp_path): "64MiB"}}
    with on_drives(layers, tmp_path, budget=budget, subgroup_numel=1 << 16) as engine:
        before = engine.state_dict()
        loss = engine(torch.randn(2, 256)).pow(2).mean()
        with pytest.raises(
            RuntimeError, match=r"The gradient of \d+\.weight is NaN\. .*ctx\.save_for_backward"
        ):
            engine.backward(loss)
        with pytest.raises(RuntimeError, match=r"no step can be made|zero_grad"):
            engine.step()
        engine.zero_grad()
        assert all(torch.equal(before[name], value) for name, value in engine.state_dict().items())


def test_nan_of_the_users_own_passes_where_parameters_are_at_home() -> None:
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with infinity_engine.initialize(
        model, optimizer, accelerator="cpu", budget={"host": "64MiB"}
    ) as engine:
        with pytest.warns(RuntimeWarning, match="The loss is nan"):
            engine.backward(engine(torch.full((2, 64), float("nan"))).sum())
        engine.step()


def test_nan_that_a_seen_model_returns_is_the_users_own(tmp_path: Path) -> None:
    with on_drives(plain(), tmp_path) as engine, torch.no_grad():
        assert bool(engine(torch.full((2, 64), float("nan"))).isnan().all())
