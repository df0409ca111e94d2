"""Parameters that a module uses and nobody sees it read: told what to do, and exact once they are
registered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional

import infinity_engine
from infinity_engine.accel import Emulation, emulated_accelerator
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import ConfigError
from infinity_engine.plan import Rates
from support.engine_bits import bits_of, differing

RATES = Rates(
    h2d_bytes_per_s=5e9,
    d2h_bytes_per_s=4e9,
    host_update_params_per_s=2e8,
    device_update_params_per_s=2e9,
)
WIDTH = 32
pytestmark = pytest.mark.usefixtures("deterministic")


class Borrows(nn.Module):
    """Computes with a parameter that it has in a list, out of sight."""

    def __init__(self, parameter: nn.Parameter, *, saves: bool) -> None:
        super().__init__()
        self.hidden = [parameter]
        self.saves = saves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.hidden[0]) if self.saves else x + self.hidden[0].sum(0)


class Model(nn.Module):
    """Has a parameter that only the one who borrows it uses."""

    def __init__(self, *, saves: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.owner = nn.Module()
        self.owner.register_parameter("weight", nn.Parameter(torch.randn(WIDTH, WIDTH)))
        self.borrower = Borrows(self.owner.get_parameter("weight"), saves=saves)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.last(torch.tanh(self.borrower(self.first(x))))).pow(2).mean()


@contextmanager
def opened(*, fetched: bool, saves: bool = True) -> Iterator[tuple[Engine, Model]]:
    torch.manual_seed(0)
    model = Model(saves=saves)
    settings = {
        "strategy": "host_only",
        "update_threads": 1,
        "rates": RATES,
        "parameters": "host" if fetched else "auto",
    }
    with (
        emulated_accelerator(Emulation(rates=RATES, capacity_bytes=4 << 20)) as device,
        infinity_engine.initialize(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            settings,
            budget={"host": "16MiB"},
            device=device,
        ) as engine,
    ):
        yield engine, model


def train(engine: Engine) -> list[float]:
    losses = []
    for step in range(3):
        loss = engine(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore:The loss is nan")
@pytest.mark.parametrize("saves", [True, False])
def test_a_parameter_that_nobody_saw_used_is_named_with_what_to_do(saves: bool) -> None:
    with opened(fetched=True, saves=saves) as (engine, _):
        with pytest.raises(
            RuntimeError,
            match=r"owner\.weight (was used where the engine could not see it|yet\. If plain).* .*register_external",
        ):
            train(engine)
        engine.zero_grad()


@pytest.mark.parametrize("saves", [True, False])
def test_what_is_registered_is_trained_with_the_same_bits(saves: bool) -> None:
    with opened(fetched=False, saves=saves) as (engine, model):
        engine.register_external(model.borrower, model.owner.get_parameter("weight"))
        expected = train(engine), bits_of(engine)
    with opened(fetched=True, saves=saves) as (engine, model):
        engine.register_external(model.borrower, model.owner.get_parameter("weight"))
        engine.register_external(model.borrower, model.owner.get_parameter("weight"))
        found = train(engine), bits_of(engine)

    assert found[0] == expected[0]
    assert differing(found[1], expected[1]) == []


def test_it_can_be_gathered_instead() -> None:
    with opened(fetched=True) as (engine, model):
        for _ in range(2):
            with engine.gathered(model.owner.get_parameter("weight")):
                loss = engine(torch.ones(4, WIDTH))
                engine.backward(loss)
            engine.step()

        assert loss.isfinite()


def test_what_is_not_of_the_model_is_refused() -> None:
    with opened(fetched=True) as (engine, model):
        with pytest.raises(ConfigError, match=r"^module: expected one of the model's"):
            engine.register_external(nn.Linear(1, 1), model.get_parameter("first.weight"))
        with pytest.raises(ConfigError, match=r"^parameter: expected one of the model's"):
            engine.register_external(model.borrower, nn.Parameter(torch.ones(2)))
