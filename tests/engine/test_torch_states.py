"""Optimizer states go from plain PyTorch into an engine and back, in torch's own layout."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity_engine
from infinity_engine.building.previous import PreviousStates
from infinity_engine.checkpoint import CheckpointReader
from infinity_engine.engine import engine as engine_module
from infinity_engine.engine.engine import Engine
from infinity_engine.engine.optimizers import LionOptimizer
from infinity_engine.errors import CapacityError, ConfigError, ManifestMismatch, TransferError
from support.saved_engines import PLACES, engine_at, steps

pytestmark = pytest.mark.usefixtures("deterministic")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
    "Adam, amsgrad off": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
}


def made(name: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    model[0].bias.requires_grad_(False)
    first, *others = model.parameters()
    optimizer = OPTIMIZERS[name]([{"params": [first], "lr": 3e-3}, {"params": others}])
    return model, optimizer


def engine_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Engine:
    budget = {"host": "64MiB"}
    return infinity_engine.initialize(model, optimizer, budget=budget, accelerator="cpu")


def plain_steps(model: Any, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
    for seed in range(first, first + count):
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model, seed))
        optimizer.step()


def engine_steps(engine: Engine, first: int, count: int) -> None:
    for seed in range(first, first + count):
        engine.backward(loss_of(engine, seed))
        engine.step()


def loss_of(model: Any, seed: int) -> torch.Tensor:
    inputs = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))
    loss: torch.Tensor = model(inputs).pow(2).mean()
    return loss


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_of_an_engine_are_those_of_plain_torch(name: str) -> None:
    model, optimizer = made(name)
    plain_steps(model, optimizer, 0, 3)
    expected = optimizer.state_dict()
    if name == "Adagrad":  # it makes states of frozen parameters
        del expected["state"][1]
    model, optimizer = made(name)
    with engine_of(model, optimizer) as engine:
        engine_steps(engine, 0, 3)
        found = engine.optimizer_state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        there = {key: value for key, value in state.items() if value is not None}
        assert found["state"][number].keys() == there.keys()
        for key, value in there.items():
            torch.testing.assert_close(found["state"][number][key], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_plain_run_goes_on_in_an_engine_and_an_engine_in_a_plain_run(name: str) -> None:
    model, optimizer = made(name)
    plain_steps(model, optimizer, 0, 6)
    expected = model.state_dict()
    model, optimizer = made(name)
    plain_steps(model, optimizer, 0, 2)
    weights, states = model.state_dict(), optimizer.state_dict()
    model, optimizer = made(name)
    model.load_state_dict(weights)
    with engine_of(model, optimizer) as engine:
        engine.load_optimizer_state_dict(states)
        assert engine.steps == (2 if "SGD" not in name else engine.steps)
        engine_steps(engine, 2, 2)
        weights, states = engine.state_dict(), engine.optimizer_state_dict()
    model, optimizer = made(name)
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    plain_steps(model, optimizer, 4, 2)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("place", PLACES)
def test_states_go_from_one_engine_to_another_with_the_same_bits(
    tmp_path: Path, place: str
) -> None:
    with engine_at(PLACES["host"], tmp_path) as (engine, run):
        steps(engine, run, 0, 2)
        states = engine.optimizer_state_dict()
    with engine_at(PLACES[place], tmp_path) as (engine, run):
        steps(engine, run, 5, 1)
        weights = engine.state_dict()
        engine.load_optimizer_state_dict(states)
        found = engine.optimizer_state_dict()
        assert all(torch.equal(weights[name], value) for name, value in engine.state_dict().items())
        assert found["state"].keys() == states["state"].keys()
        for number, state in states["state"].items():
            for key, value in state.items():
                assert torch.equal(found["state"][number][key], value)
        steps(engine, run, 2, 1)


def test_states_of_another_optimizer_are_refused_and_nothing_changes() -> None:
    model, optimizer = made("AdamW")
    with engine_of(model, optimizer) as engine:
        engine_steps(engine, 0, 1)
        before = engine.optimizer_state_dict()
        one_group = {"state": {}, "param_groups": [{"params": [0, 1, 2, 3], "lr": 1.0}]}
        with pytest.raises(ConfigError, match=r"groups of state_dict.*\[1, 3\].*got \[4\]"):
            engine.load_optimizer_state_dict(one_group)
        other = {**before, "state": {0: {"sum": torch.zeros(16, 8), "step": torch.tensor(1.0)}}}
        other["param_groups"] = [{**group, "lr": 7.0} for group in before["param_groups"]]
        with pytest.raises(ConfigError, match=r"states of 0\.weight"):
            engine.load_optimizer_state_dict(other)
        assert str(engine.optimizer_state_dict()) == str(before)
        engine_steps(engine, 1, 1)


def failing_at(nth: int, does: Callable[..., Any]) -> Callable[..., Any]:
    """Return what does the same until its `nth` call, which fails as a drive does."""
    calls = count()

    def call(*arguments: Any) -> Any:
        if next(calls) == nth:
            raise TransferError(errno=5, path="drive", offset=0, asked=1, done=0)
        return does(*arguments)

    return call


@pytest.mark.parametrize("place", ["host", "drives"])
def test_states_that_are_half_overwritten_must_be_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    with engine_at(PLACES[place], tmp_path) as (engine, run):
        steps(engine, run, 0, 2)
        states = engine.optimizer_state_dict()
        steps(engine, run, 2, 1)
        with monkeypatch.context() as patch:
            # Two moments a segment: this is the second segment.
            patch.setattr(PreviousStates, "fill", failing_at(2, PreviousStates.fill))
            with pytest.raises(TransferError):
                engine.load_optimizer_state_dict(states)
        again = pytest.raises(RuntimeError, match=r"Call load_optimizer_state_dict\(\) or load\(\)")
        with again:
            steps(engine, run, 2, 1)
        with again:
            engine.save(tmp_path / "mixed")
        engine.load_optimizer_state_dict(states)
        found = engine.optimizer_state_dict()
        for number, state in states["state"].items():
            for key, value in state.items():
                assert torch.equal(found["state"][number][key], value)
        steps(engine, run, 2, 1)


def test_a_load_makes_good_only_what_it_overwrites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made("AdamW")
    with engine_of(model, optimizer) as engine:
        engine_steps(engine, 0, 2)
        states = engine.optimizer_state_dict()
        engine.save(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointReader, "read", failing_at(4, CheckpointReader.read))
            with pytest.raises(TransferError):
                engine.load(tmp_path)
        engine.load_optimizer_state_dict(states)
        with pytest.raises(RuntimeError, match=r"Call load\(\) again"):
            engine_steps(engine, 2, 1)
        engine.load(tmp_path, weights_only=True)
        engine_steps(engine, 2, 1)


def test_weights_alone_do_not_make_half_loaded_states_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made("AdamW")
    with engine_of(model, optimizer) as engine:
        engine_steps(engine, 0, 2)
        engine.save(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointReader, "read", failing_at(4, CheckpointReader.read))
            with pytest.raises(TransferError):
                engine.load(tmp_path)
        engine.load(tmp_path, weights_only=True)
        with pytest.raises(RuntimeError, match=r"Call load_optimizer_state_dict\(\) or load\(\)"):
            engine_steps(engine, 2, 1)
        engine.load(tmp_path)
        engine_steps(engine, 2, 1)


def test_states_that_do_not_fit_are_refused_with_their_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = made("AdamW")
    with engine_of(model, optimizer) as engine:
        monkeypatch.setattr(engine_module, "free_for_copies", lambda: 1000)
        # Two moments of 16 x 8, 16 x 4 and 4 elements, and one master.
        with pytest.raises(CapacityError, match=r"2080 B .*1000 B free.*engine\.save\(path\)"):
            engine.optimizer_state_dict()


def test_only_what_is_trained_is_in_the_trainable_state_dict() -> None:
    model, optimizer = made("AdamW")
    with engine_of(model, optimizer) as engine:
        engine_steps(engine, 0, 1)
        whole, found = engine.state_dict(), engine.trainable_state_dict()
        assert list(found) == ["0.weight", "2.weight", "2.bias"]
        assert all(torch.equal(value, whole[name]) for name, value in found.items())


# --- options that need other states ---------------------------------------------------------------


CHANGES: dict[str, tuple[str, Callable[[torch.optim.Optimizer], object]]] = {
    "momentum": ("SGD", lambda optimizer: optimizer.param_groups[1].update(momentum=0.9)),
    "a group that is gone": ("AdamW", lambda optimizer: optimizer.param_groups.pop()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_options_that_need_other_states_are_refused_and_can_be_set_back(change: str) -> None:
    name, changed = CHANGES[change]
    model, optimizer = made(name)
    with engine_of(model, optimizer) as engine:
        engine_steps(engine, 0, 1)
        before = [dict(group) for group in optimizer.param_groups]
        engine.backward(loss_of(engine, 1))
        changed(optimizer)

        with pytest.raises(ConfigError, match="Nothing has changed"):
            engine.step()

        optimizer.param_groups[:] = before
        engine.step()
        found = engine.state_dict()
    model, optimizer = made(name)
    with engine_of(model, optimizer) as engine:
        engine_steps(engine, 0, 2)
        for key, value in engine.state_dict().items():
            assert torch.equal(found[key], value)


def test_states_that_the_engine_has_no_place_for_are_refused() -> None:
    model, optimizer = made("SGD with momentum")
    plain_steps(model, optimizer, 0, 2)
    states = optimizer.state_dict()
    model, optimizer = made("SGD")
    with engine_of(model, optimizer) as engine:
        with pytest.raises(ConfigError, match="momentum_buffer"):
            engine.load_optimizer_state_dict(states)
        assert optimizer.param_groups[0]["momentum"] == 0
        engine_steps(engine, 0, 1)


def test_a_checkpoint_with_options_for_other_states_leaves_the_options(tmp_path: Path) -> None:
    model, optimizer = made("SGD with momentum")
    with engine_of(model, optimizer) as engine:
        engine_steps(engine, 0, 1)
        engine.save(tmp_path)
    model, optimizer = made("SGD")
    with engine_of(model, optimizer) as engine:
        with pytest.raises(ManifestMismatch):
            engine.load(tmp_path)
        engine.load(tmp_path, strict=False)
        assert optimizer.param_groups[0]["momentum"] == 0
        engine_steps(engine, 1, 1)


def test_a_state_dict_that_an_engine_left_without_states_is_refused() -> None:
    model, optimizer = made("AdamW")
    with engine_of(model, optimizer) as engine:
        engine_steps(engine, 0, 2)
        with pytest.warns(RuntimeWarning, match="no states"):
            without = optimizer.state_dict()
        with pytest.raises(ConfigError, match="of 2 updates"):
            engine.load_optimizer_state_dict(without)
        assert engine.steps == 2


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_go_on_from_counts_or_from_where_they_are(name: str) -> None:
    model, optimizer = made(name)
    with engine_of(model, optimizer) as engine:
        engine_steps(engine, 0, 3)
        engine.load_optimizer_state_dict(engine.optimizer_state_dict())
        assert engine.steps == 3


def test_lions_plain_states_leave_the_count_of_steps() -> None:
    model, _ = made("AdamW")
    lion = LionOptimizer(model.parameters(), lr=1e-3)
    plain_steps(model, lion, 0, 2)
    states = lion.state_dict()
    model, _ = made("AdamW")
    with engine_of(model, LionOptimizer(model.parameters(), lr=1e-3)) as engine:
        engine_steps(engine, 0, 3)
        engine.load_optimizer_state_dict(states)
        assert engine.steps == 3


def test_states_for_fewer_groups_are_refused_before_anything_changes() -> None:
    model, optimizer = made("AdamW")
    with engine_of(model, optimizer) as engine:
        engine_steps(engine, 0, 1)
        states = engine.optimizer_state_dict()
        gone = optimizer.param_groups.pop()
        states["param_groups"].pop()
        with pytest.raises(ConfigError, match="Nothing has changed"):
            engine.load_optimizer_state_dict(states)
        optimizer.param_groups.append(gone)
        engine_steps(engine, 1, 1)
