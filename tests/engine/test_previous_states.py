"""An engine goes on with the states of an optimizer that has stepped before, as plain PyTorch
would.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity_engine
from infinity_engine.errors import ConfigError

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda some: torch.optim.AdamW(some, lr=1e-2),
    "Adam with amsgrad": lambda some: torch.optim.Adam(some, lr=1e-2, amsgrad=True),
    "Adagrad": lambda some: torch.optim.Adagrad(some, lr=1e-2, initial_accumulator_value=0.1),
    "SGD with momentum": lambda some: torch.optim.SGD(some, lr=1e-2, momentum=0.9, dampening=0.1),
    "SGD": lambda some: torch.optim.SGD(some, lr=1e-2),
}
TIERS: dict[str, dict[str, Any]] = {
    "memory": {},
    "drives": {"strategy": "nvme_streamed", "parameters": "nvme"},
}
pytestmark = pytest.mark.usefixtures("deterministic")


def made(maker: str) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 2), nn.Linear(2, 2))
    return model, MAKERS[maker](model.parameters())


def loss_of(
    model: Callable[[torch.Tensor], torch.Tensor], layers: nn.Sequential, step: int
) -> torch.Tensor:
    batch = torch.randn(4, 40, generator=torch.Generator().manual_seed(step))
    layers[3].requires_grad_(True)
    return torch.as_tensor(model(batch).pow(2).mean())


def step_plainly(model: nn.Sequential, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        loss_of(model, model, step).backward()  # type: ignore[no-untyped-call]  # torch is
        if step < 2:
            model[3].zero_grad()  # has made fewer steps than the others
        optimizer.step()
        optimizer.zero_grad()


def initialized(
    model: nn.Sequential, optimizer: torch.optim.Optimizer, tier: str, folder: Path
) -> Any:
    budget: dict[str, Any] = {"host": "64MiB"}
    if tier == "drives":
        budget["nvme"] = {str(folder): "64MiB"}
    settings = {"calibration": "off", "subgroup_numel": 4096, **TIERS[tier]}
    return infinity_engine.initialize(model, optimizer, settings, accelerator="cpu", budget=budget)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("maker", MAKERS)
def test_training_continues_from_the_states_of_the_optimizer(
    maker: str, tier: str, tmp_path: Path
) -> None:
    expected, plain = made(maker)
    step_plainly(expected, plain, range(5))

    model, optimizer = made(maker)
    step_plainly(model, optimizer, range(3))
    with initialized(model, optimizer, tier, tmp_path) as engine:
        for step in range(3, 5):
            engine.backward(loss_of(engine, model, step))
            engine.step()

    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter, expected.get_parameter(name), rtol=0, atol=2e-7, msg=name
        )


@pytest.mark.parametrize("tier", TIERS)
def test_states_move_from_the_optimizer_bit_for_bit(tier: str, tmp_path: Path) -> None:
    model, optimizer = made("AdamW")
    step_plainly(model, optimizer, range(3))
    before = {
        name: dict(optimizer.state[parameter]) for name, parameter in model.named_parameters()
    }

    with initialized(model, optimizer, tier, tmp_path) as engine:
        assert not optimizer.state
        for name, parameter in model.named_parameters():
            now = engine.state_of(parameter)
            assert now["step"] == before[name]["step"] == (1 if name.startswith("3") else 3)
            assert torch.equal(now["exp_avg"], before[name]["exp_avg"])
            assert torch.equal(now["exp_avg_sq"], before[name]["exp_avg_sq"])


def test_a_refusal_leaves_the_optimizer_its_states() -> None:
    model, optimizer = made("AdamW")
    step_plainly(model, optimizer, range(1))

    with pytest.raises(infinity_engine.CapacityError):
        infinity_engine.initialize(model, optimizer, accelerator="cpu", budget={"host": "64KiB"})

    assert len(optimizer.state) == 4


def test_parameters_without_states_begin_with_new_ones(tmp_path: Path) -> None:
    model, optimizer = made("AdamW")
    step_plainly(model, optimizer, range(3))
    del optimizer.state[next(model.parameters())]

    with initialized(model, optimizer, "memory", tmp_path) as engine:
        assert [engine.state_of(model[number].weight)["step"] for number in (0, 2)] == [0, 3]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda state: state.update(foreign=torch.zeros(300, 40)),
            r"states of 0\.weight: expected exp_avg, exp_avg_sq",
        ),
        (lambda state: state.pop("exp_avg"), r"states of 0\.weight: expected exp_avg, exp_avg_sq"),
        (
            lambda state: state.update(exp_avg=torch.zeros(3)),
            r"exp_avg of 0\.weight: expected .*\(300, 40\)",
        ),
    ],
)
def test_states_of_another_kind_are_refused_by_name(
    change: Callable[[dict[str, Any]], object], told: str, tmp_path: Path
) -> None:
    model, optimizer = made("AdamW")
    step_plainly(model, optimizer, range(1))
    change(optimizer.state[next(model.parameters())])

    with pytest.raises(ConfigError, match=told):
        initialized(model, optimizer, "memory", tmp_path)


def test_a_state_dict_that_lost_its_states_to_an_engine_is_refused(tmp_path: Path) -> None:
    model, optimizer = made("AdamW")
    with initialized(model, optimizer, "memory", tmp_path) as engine:
        engine.backward(loss_of(engine, model, 0))
        engine.step()
        with pytest.warns(RuntimeWarning, match="no states"):
            saved = optimizer.state_dict()

        with pytest.raises(RuntimeError, match=r"an engine had the states.*1 update"):
            optimizer.load_state_dict(saved)
        optimizer.load_state_dict({"state": {}, "param_groups": saved["param_groups"]})


def test_states_put_into_the_optimizer_past_its_methods_are_refused(tmp_path: Path) -> None:
    model, optimizer = made("AdamW")
    with initialized(model, optimizer, "memory", tmp_path) as engine:
        optimizer.state[next(model.parameters())]["exp_avg"] = torch.ones(300, 40)
        engine.backward(loss_of(engine, model, 0))

        with pytest.raises(RuntimeError, match=r"The optimizer was given states.*0\.weight"):
            engine.step()
        optimizer.state.clear()
        engine.step()
