"""Compiled modules: they train as they do uncompiled where parameters stay, and are refused where
they are fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import infinity_engine
from infinity_engine.accel import Accelerator, Emulation, emulated_accelerator
from infinity_engine.errors import ConfigError
from infinity_engine.plan import Rates

# Dynamo looks at the .grad of the inputs that it wraps, leaves or not.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)

BACKEND = "aot_eager"  # traces and partitions as the others do, and needs no compiler
RATES = Rates(h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9, device_update_params_per_s=1e9)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.as_tensor(self.down(torch.relu(self.up(self.norm(x)))))


def compiled_module(module: nn.Module) -> nn.Module:
    compiled = torch.compile(module, backend=BACKEND)
    assert isinstance(compiled, nn.Module)
    return compiled


def whole(model: nn.Sequential) -> nn.Module:
    return compiled_module(model)


def replaced(model: nn.Sequential) -> nn.Module:
    return nn.Sequential(*map(compiled_module, model))


def in_place(model: nn.Sequential) -> nn.Module:
    for block in model:
        block.compile(backend=BACKEND)
    return model


WAYS: list[Callable[[nn.Sequential], nn.Module]] = [whole, replaced, in_place]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def losses(model: nn.Module, precision: str) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    budget = {"host": "64MiB"}
    with infinity_engine.initialize(
        model, optimizer, accelerator="cpu", precision=precision, budget=budget
    ) as engine:
        for seed in range(4):
            x = torch.randn(3, 16, generator=torch.Generator().manual_seed(seed))
            loss = engine(x.to(next(model.parameters()).dtype)).float().pow(2).mean()
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
    return found


@pytest.mark.parametrize("compiled", WAYS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_modules_train_as_they_do_uncompiled(
    compiled: Callable[[nn.Sequential], nn.Module], precision: str
) -> None:
    assert losses(compiled(blocks()), precision) == losses(blocks(), precision)


@pytest.mark.parametrize("compiled", WAYS)
def test_compiled_modules_are_refused_where_parameters_are_fetched(
    compiled: Callable[[nn.Sequential], nn.Module],
) -> None:
    model = compiled(blocks())
    optimizer = torch.optim.AdamW(model.parameters())
    before = [parameter.data_ptr() for parameter in model.parameters()]
    device: Accelerator = emulated_accelerator(Emulation(rates=RATES, capacity_bytes=1 << 20))

    with device, pytest.raises(ConfigError, match=r"not compiled.*parameters=\"device\""):
        infinity_engine.initialize(
            model,
            optimizer,
            device=device,
            parameters="host",
            budget={"host": "64MiB", "device": "1MiB"},
        )

    assert [parameter.data_ptr() for parameter in model.parameters()] == before


def test_what_is_compiled_after_initialize_is_refused_and_training_goes_on_without_it() -> None:
    found: dict[bool, list[float]] = {}
    for compiles in (False, True):
        model = blocks()
        device = emulated_accelerator(Emulation(rates=RATES, capacity_bytes=1 << 20))
        budget = {"host": "64MiB", "device": "1MiB"}
        x = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
        losses = found.setdefault(compiles, [])
        with (
            device,
            infinity_engine.initialize(
                model, "adamw", device=device, parameters="host", budget=budget
            ) as engine,
        ):
            for step in range(3):
                if compiles and step == 1:
                    first = model[0]
                    model[0] = compiled_module(first)
                    with pytest.raises(
                        ConfigError, match=r"module 0: expected a module that is not compiled"
                    ):
                        engine(x)
                    model[0] = first
                loss = engine(x).square().mean()
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())

    assert found[True] == found[False]
