"""Small trainings of `infinity_engine.training`, and what is left of them."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

from infinity_engine.training.listening import TrainedStep, TrainingListener
from infinity_engine.training.settings import TrainingSettings

__all__ = ["MEMORY", "Heard", "digest", "on_drives", "settings_of", "train_it"]

MEMORY: dict[str, Any] = {
    "accelerator": "cpu",
    "calibration": "off",
    "budget": {"host": "64MiB"},
    "max_grad_norm": 1.0,
}


def on_drives(folder: Path) -> dict[str, Any]:
    """Return settings of an engine with which everything rests on a drive."""
    folder.mkdir(exist_ok=True)
    return {
        **MEMORY,
        "budget": {"host": "64MiB", "nvme": {str(folder): "256MiB"}},
        "strategy": "nvme_streamed",
        "parameters": "nvme",
        "storage": {"small_bytes": 0, "endurance": "1TB"},
    }


def settings_of(model: Path, run: Path, *data: Path, **options: Any) -> TrainingSettings:
    """Return a training of 6 steps, of two micro-batches each."""
    given: dict[str, Any] = {
        "sequence": 32,
        "batch": 2,
        "accumulation_steps": 2,
        "steps": 6,
        "lr": 1e-2,
        "export_dtype": "float32",
        "save_every": 1000,
    }
    return TrainingSettings(model=model, data=data, run=run, **{**given, **options})


class Heard(TrainingListener):
    """Keeps what it hears; ends the process, or sends it a signal, after some step."""

    def __init__(self, *, signal_at: int | None = None, number: int = signal.SIGKILL) -> None:
        self.steps: list[TrainedStep] = []
        self.notes: list[str] = []
        self._signal_at, self._number = signal_at, number

    def on_note(self, text: str) -> None:
        self.notes.append(text)

    def on_step(self, step: TrainedStep) -> None:
        self.steps.append(step)
        if step.number == self._signal_at:
            os.kill(os.getpid(), self._number)


def train_it(
    settings: TrainingSettings, engine: dict[str, Any] | None = None, **options: Any
) -> Heard:
    """Train; return what was heard."""
    from infinity_engine.training.training import train

    heard = options.pop("listener", Heard())
    train(settings, MEMORY if engine is None else engine, listener=heard, **options)
    assert isinstance(heard, Heard)
    return heard


def digest(folder: Path) -> str:
    """Return a text that differs where the weights in a folder do."""
    summed = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        summed.update(path.read_bytes())
    return summed.hexdigest()
