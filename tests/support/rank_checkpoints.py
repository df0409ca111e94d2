"""Saving and loading on several ranks: each function runs on every rank and returns what the test
looks at.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from infinity_engine.engine.engine import Engine
from infinity_engine.errors import CollectiveError
from support.determinism import deterministic_compute
from support.rank_training import Run, batch_of, engine_of, made, states_of, where
from support.small_models import Task

__all__ = ["fails_on_one_rank", "goes_on", "saves"]


def steps(engine: Engine, task: Task, first: int, count: int) -> list[float]:
    """Make some steps; return the losses."""
    losses = []
    for step in range(first, first + count):
        loss = engine(batch_of(task, step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def with_drive(run: Run, drive: Path | None) -> Run:
    """Let the run have a directory for what rests on drives."""
    if drive is None:
        return run
    budget = {**run.settings["budget"], "nvme": {str(drive): "64MiB"}}
    return replace(run, settings={**run.settings, "budget": budget})


def saves(run: Run, path: Path, drive: Path | None = None) -> dict[str, Any]:
    """Train two steps, save, train two more; return the states at both times and the losses of the
    last two.
    """
    task, optimizer = made(run)
    with deterministic_compute(), ExitStack() as around:
        engine = engine_of(with_drive(run, drive), task, optimizer, around)
        steps(engine, task, 0, 2)
        tag = engine.save(path)
        saved = states_of(engine, task)
        draws = torch.rand(3)
        losses = steps(engine, task, 2, 2)
        return {
            "tag": tag,
            "saved": saved,
            "draws": draws,
            "losses": losses,
            "ended": states_of(engine, task),
        }


def goes_on(run: Run, path: Path, drive: Path | None = None) -> dict[str, Any]:
    """Load, train two steps; return the states after each and the losses."""
    task, optimizer = made(run)
    with deterministic_compute(), ExitStack() as around:
        engine = engine_of(with_drive(run, drive), task, optimizer, around)
        steps(engine, task, 5, 1)  # another run, until the load
        loaded = engine.load(path)
        saved = states_of(engine, task)
        draws = torch.rand(3)
        losses = steps(engine, task, 2, 2)
        ended = states_of(engine, task)
        return {
            "step": loaded.step,
            "saved": saved,
            "draws": draws,
            "losses": losses,
            "ended": ended,
        }


def fails_on_one_rank(run: Run, path: Path) -> str:
    """Let the last rank fail to save; return what each is told, after a step and a save that
    works.
    """

    class Odd:
        def state_dict(self) -> Any:
            return {"callback": print} if where()[0] == where()[1] - 1 else {}

        def load_state_dict(self, state_dict: Any) -> None:
            raise AssertionError("nothing was saved")

    task, optimizer = made(run)
    with ExitStack() as around:
        engine = engine_of(run, task, optimizer, around)
        steps(engine, task, 0, 1)
        try:
            engine.save(path, extra={"odd": Odd()})
        except (CollectiveError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
    return "it was saved"
