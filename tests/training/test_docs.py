"""The page on `infinity train` keeps its word: its options are there, and its listeners work."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from infinity_engine.cli.runs import train
from infinity_engine.training.listening import TrainedStep, TrainingListener
from infinity_engine.training.settings import Framing, TrainingSettings

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/train.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def test_the_options_on_the_page_are_those_of_the_command() -> None:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    known = {option for action in parser._actions for option in action.option_strings}

    named = set(re.findall(r"(--[a-z][a-z-]+)", PAGE))

    assert named <= known
    assert set(re.findall(r"^\| `(\w+)` \| .*\|.*\|$", PAGE, re.M)) >= {
        framing.value for framing in Framing if framing is not Framing.AUTO
    }


class Written:
    """Stands for a writer of TensorBoard and for a run of W&B: keeps what it gets."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def add_scalar(self, name: str, value: float, _: int) -> None:
        self.values[name] = value

    def log(self, values: dict[str, float]) -> None:
        self.values.update(values)


class Report:
    """Stands for a step's report."""

    phases = {"forward": 1.5}  # noqa: RUF012


STEP: Any = {"number": 3, "steps": 9, "loss": 2.5, "lr": 0.1, "tokens": 40, "seconds": 2.0}


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (0, {"loss": 2.5, "tokens per second": 20.0}),
        (1, {"loss": 2.5, "rate": 0.1, "tokens per second": 20.0, "seconds of forward": 1.5}),
    ],
)
def test_the_listeners_of_the_page_write_each_step(
    program: int, expected: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Written()
    tensorboard, wandb = ModuleType("torch.utils.tensorboard"), ModuleType("wandb")
    monkeypatch.setitem(tensorboard.__dict__, "SummaryWriter", lambda _: written)
    monkeypatch.setitem(wandb.__dict__, "init", lambda **_: written)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    made: dict[str, Any] = {}
    exec(PROGRAMS[program], made)
    [listener] = [
        value
        for value in made.values()
        if isinstance(value, type) and value is not TrainingListener
    ]

    step = TrainedStep(**STEP, report=Report())  # type: ignore[arg-type]
    listener("name").on_step(step)

    assert written.values == expected
    assert len([line for line in PROGRAMS[program].splitlines() if line]) <= 12


def test_the_training_of_the_page_is_one_that_can_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("transformers", reason="trainings need it")
    asked: list[Any] = []
    target = "infinity_engine.training.training.train"
    monkeypatch.setattr(target, lambda *given, **_: asked.extend(given))

    exec(PROGRAMS[2], {"ToTensorBoard": lambda _: None})

    assert isinstance(asked[0], TrainingSettings)
