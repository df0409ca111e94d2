"""Optimizers by specification: what is asked for is made, is the user's to schedule, and trains as
torch's own does.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import infinity_engine
from infinity_engine import optim
from infinity_engine.engine.engine import Engine
from infinity_engine.engine.optimizers import LionOptimizer
from infinity_engine.errors import ConfigError

BUDGET = {"host": "64MiB"}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 2))


def batch(seed: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def train(engine: Engine, steps: int = 8) -> list[torch.Tensor]:
    for seed in range(steps):
        engine.backward(engine(batch(seed)).pow(2).mean())
        engine.step()
    return [parameter.detach().clone() for parameter in engine.model.parameters()]


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        ("adamw", torch.optim.AdamW),
        ({"name": "adam", "lr": 0.5, "amsgrad": True}, torch.optim.Adam),
        ({"name": "sgd", "momentum": 0.9, "nesterov": True}, torch.optim.SGD),
        (optim.Adagrad(lr=0.1, eps=1e-7), torch.optim.Adagrad),
        (optim.Lion(lr=1e-3), LionOptimizer),
    ],
)
def test_an_optimizer_is_made_of_what_is_asked_for(
    asked: object, made: type[torch.optim.Optimizer]
) -> None:
    with infinity_engine.initialize(model(), asked, accelerator="cpu", budget=BUDGET) as engine:  # type: ignore[arg-type]
        assert type(engine.optimizer) is made
        options = asked if isinstance(asked, dict) else {}
        [group] = engine.optimizer.param_groups
        assert {name: group[name] for name in options if name != "name"} == {
            name: value for name, value in options.items() if name != "name"
        }
        train(engine, 2)


def test_one_that_is_asked_for_trains_as_one_that_is_given() -> None:
    net = model()
    given = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    with infinity_engine.initialize(net, given, accelerator="cpu", budget=BUDGET) as engine:
        expected = train(engine)

    asked = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1}
    with infinity_engine.initialize(model(), asked, accelerator="cpu", budget=BUDGET) as engine:
        assert all(
            torch.equal(ours, theirs) for ours, theirs in zip(train(engine), expected, strict=True)
        )


@pytest.mark.parametrize("maximize", [False, True])
def test_lion_steps_in_the_engine_as_it_does_by_itself(maximize: bool) -> None:
    net = model()
    alone = LionOptimizer(net.parameters(), lr=1e-3, weight_decay=0.1, maximize=maximize)
    for seed in range(8):
        alone.zero_grad()
        net(batch(seed)).pow(2).mean().backward()
        alone.step()

    lion = optim.Lion(lr=1e-3, weight_decay=0.1, maximize=maximize)
    with infinity_engine.initialize(model(), lion, accelerator="cpu", budget=BUDGET) as engine:
        trained = train(engine)

    for ours, theirs in zip(trained, net.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-7)


def test_schedulers_work_on_an_optimizer_that_was_made() -> None:
    with infinity_engine.initialize(model(), "lion", accelerator="cpu", budget=BUDGET) as engine:
        scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, step_size=1, gamma=0.5)
        train(engine, 1)
        scheduler.step()

        assert engine.optimizer.param_groups[0]["lr"] == 5e-5


def test_frozen_parameters_are_not_asked_for() -> None:
    net = model()
    first = next(net.children()).requires_grad_(False)
    with infinity_engine.initialize(net, "sgd", accelerator="cpu", budget=BUDGET) as engine:
        before = [parameter.clone() for parameter in first.parameters()]
        train(engine, 2)

        assert all(
            torch.equal(one, other) for one, other in zip(first.parameters(), before, strict=True)
        )
        assert len(engine.optimizer.param_groups[0]["params"]) == 2


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("adanw", r"optimizer: expected one of .*nearest: adamw"),
        ({"lr": 1.0}, "optimizer: expected one of adam"),
        (
            {"name": "adamw", "learning_rate": 1.0},
            r"optimizer\.learning_rate: expected one of .*lr",
        ),
        ({"name": "adamw", "lr": -1.0}, r"AdamW\.lr: expected at least 0"),
        (optim.AdamW, "a torch optimizer, a rule of infinity_engine.optim"),
        (None, "the rules are adam, adamw, adagrad, sgd, lion"),
    ],
)
def test_what_cannot_be_made_is_refused(asked: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        infinity_engine.initialize(model(), asked, accelerator="cpu")  # type: ignore[arg-type]


def test_a_model_without_anything_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        infinity_engine.initialize(model().requires_grad_(False), "sgd", accelerator="cpu")
