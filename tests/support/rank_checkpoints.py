"""Saving and loading on several ranks: each function runs on every rank and returns what the test
looks at.
"""

from __future__ import annotations

import errno
import os
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from infinity_engine.building.previous import PreviousStates
from infinity_engine.checkpoint import CheckpointDirectory, CheckpointReader
from infinity_engine.checkpoint.sharing import share_runs
from infinity_engine.checkpoint.streams import SavedStream
from infinity_engine.engine.checkpoints import frozen as frozen_parameters
from infinity_engine.engine.checkpoints import saving
from infinity_engine.engine.checkpoints.checkpointing import CheckpointMemory
from infinity_engine.engine.checkpoints.saving import FrozenParameters, SaveState
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import CapacityError, CollectiveError, InfinityError, TransferError
from infinity_engine.memory import Ledger
from infinity_engine.plan import Tier
from infinity_engine.update.captured import RunInMemory
from support.determinism import deterministic_compute
from support.kills import Kill, committed_step, note_commits
from support.nvme_training import digest_of
from support.rank_training import Run, batch_of, engine_of, made, states_of, where
from support.small_models import Task

__all__ = [
    "exports",
    "fails_beside_on_one_rank",
    "fails_beside_on_rank_0",
    "fails_on_one_rank",
    "fails_to_load_on_one_rank",
    "fails_to_load_states_on_one_rank",
    "fails_to_read_frozen_values_on_rank_0",
    "fails_to_share_on_one_rank",
    "goes_on",
    "has_another_base",
    "lacks_memory_on_one_rank",
    "lends_memory_on_one_rank",
    "passes_on",
    "preempts",
    "resumes",
    "saves",
    "steps_after_a_broken_save",
    "stops_after_a_failed_commit",
]


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


def saves(
    run: Run,
    path: Path,
    drive: Path | None = None,
    wait: bool = True,
    frozen: FrozenParameters = FrozenParameters.SAVE,
) -> dict[str, Any]:
    """Train two steps, save, train two more; return the states at both times and the losses of the
    last two.
    """
    task, optimizer = made(run)
    with deterministic_compute(), ExitStack() as around:
        engine = engine_of(with_drive(run, drive), task, optimizer, around)
        steps(engine, task, 0, 2)
        saved = states_of(engine, task)
        tag = engine.save(path, wait=wait, frozen=frozen)
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


def passes_on(run: Run, path: Path, to: Path, drive: Path | None = None) -> int:
    """Load and save without a step between; return how many steps were made."""
    task, optimizer = made(run)
    with deterministic_compute(), ExitStack() as around:
        engine = engine_of(with_drive(run, drive), task, optimizer, around)
        steps(engine, task, 5, 1)  # another run, until the load
        engine.load(path)
        engine.save(to, wait=False)
        return engine.steps


def resumes(
    run: Run,
    path: Path,
    drive: Path | None,
    count: int,
    beside: bool,
    kill: Kill | None = None,
    victim: int = 0,
) -> str:
    """Go on from the newest checkpoint to so many steps, saving after each; return a digest.

    The rank `victim` is killed on the way. What was committed before is not trained again.
    """
    note_commits(path)
    task, optimizer = made(run)
    with deterministic_compute(), ExitStack() as around:
        engine = engine_of(with_drive(run, drive), task, optimizer, around)
        if kill is not None and where()[0] == victim:
            kill.arm()
        if CheckpointDirectory(path).latest() is not None:
            engine.load(path)
        assert engine.steps >= committed_step(path)
        while engine.steps < count:
            steps(engine, task, engine.steps, 1)
            engine.save(path, keep=2, wait=not beside)
        return digest_of(states_of(engine, task))


def exports(run: Run, path: Path, drive: Path | None = None) -> dict[str, Any]:
    """Train two steps and export; return what each rank had then, and the files."""
    task, optimizer = made(run)
    with deterministic_compute(), ExitStack() as around:
        engine = engine_of(with_drive(run, drive), task, optimizer, around)
        steps(engine, task, 0, 2)
        files = engine.export(path / "fp32", dtype=torch.float32)
        engine.export(path / "model", shard_bytes=20_000)
        return {"files": [file.name for file in files], "states": states_of(engine, task)}


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


class Restored:
    """A state that the last rank cannot restore the first time."""

    def __init__(self) -> None:
        self.fails = where()[0] == where()[1] - 1

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state_dict: Any) -> None:
        fails, self.fails = self.fails, False
        if fails:
            raise ValueError("another epoch")


def fails_to_load_on_one_rank(run: Run, path: Path, what: str) -> list[str]:
    """Let the last rank fail to load the run's own state, or a frozen weight, once.

    Return the errors of this rank: of the load, and of a step after it. A second load works.
    """
    read = CheckpointReader.read

    def broken(self: CheckpointReader, stream: SavedStream, *arguments: Any) -> None:
        if stream.name == "value":
            raise TransferError(errno=5, path="drive", offset=0, asked=1, done=0)
        read(self, stream, *arguments)

    task, optimizer = made(run)
    with ExitStack() as around:
        engine = engine_of(run, task, optimizer, around)
        steps(engine, task, 0, 1)
        extra = {"restored": Restored()} if what == "own state" else {}
        engine.save(path, extra=extra)
        is_broken = what == "frozen weight" and where()[0] == where()[1] - 1
        with patch.object(CheckpointReader, "read", broken if is_broken else read):
            told = [_error_of(lambda: engine.load(path, extra=extra))]
        told.append(_error_of(lambda: steps(engine, task, 1, 1)))
        engine.load(path, extra=extra)
        steps(engine, task, 1, 1)
    return told


def fails_to_load_states_on_one_rank(run: Run) -> list[str]:
    """Let the last rank fail once while it overwrites the optimizer's states.

    Return the errors of this rank: of the load, and of a step after it. A second load works.
    """
    fill = PreviousStates.fill
    task, optimizer = made(run)
    with ExitStack() as around:
        engine = engine_of(run, task, optimizer, around)
        steps(engine, task, 0, 1)
        states = engine.optimizer_state_dict()
        is_broken = where()[0] == where()[1] - 1
        with patch.object(PreviousStates, "fill", _refused if is_broken else fill):
            told = [_error_of(lambda: engine.load_optimizer_state_dict(states))]
        told.append(_error_of(lambda: steps(engine, task, 1, 1)))
        engine.load_optimizer_state_dict(states)
        steps(engine, task, 1, 1)
    return told


def fails_to_share_on_one_rank(run: Run, path: Path) -> list[str]:
    """Let the last rank fail while it shares blocks; return this rank's error, and the files that
    are left. A second save works.
    """
    share = share_runs
    task, optimizer = made(run)
    with ExitStack() as around:
        engine = engine_of(run, task, optimizer, around)
        steps(engine, task, 0, 1)
        is_broken = where()[0] == where()[1] - 1
        with patch.object(saving, "share_runs", _out_of_memory if is_broken else share):
            told = [_error_of(lambda: engine.save(path, "broken"))]
        engine.save(path, "whole")
    return [*told, *sorted(entry.name for entry in path.iterdir())]


def has_another_base(run: Run, path: Path) -> list[object]:
    """Load onto another frozen weight; return the error, what differs if not strict, and the steps
    after a further one.
    """
    task, optimizer = made(run)
    with torch.no_grad():
        task.get_parameter("frozen.weight")[-1, -1] += 1
    with ExitStack() as around:
        engine = engine_of(run, task, optimizer, around)
        told: list[object] = [_error_of(lambda: engine.load(path))]
        told.append(engine.load(path, strict=False).mismatched)
        steps(engine, task, 2, 1)
        return [*told, engine.steps]


def fails_to_read_frozen_values_on_rank_0(run: Run, path: Path) -> list[str]:
    """Let rank 0 fail to sum a frozen weight; return this rank's error, and what is left.

    A second save works.
    """
    task, optimizer = made(run)
    with ExitStack() as around:
        engine = engine_of(run, task, optimizer, around)
        with patch.object(frozen_parameters, "crc32c", _refused):
            told = [_error_of(lambda: engine.save(path, "broken", frozen="leave_out"))]
        steps(engine, task, 0, 1)
        engine.save(path, "part", frozen="leave_out")
    return [*told, *sorted(entry.name for entry in path.iterdir())]


def lacks_memory_on_one_rank(run: Run, path: Path) -> list[str]:
    """Let the last rank have no room for a save, a load and an export; return the errors
    of these calls.

    After that, a save works.
    """
    task, optimizer = made(run)
    with ExitStack() as around:
        engine = engine_of(run, task, optimizer, around)
        steps(engine, task, 0, 1)
        engine.save(path, "first")
        is_full = where()[0] == where()[1] - 1
        free = Ledger.free
        with patch.object(Ledger, "free", _nothing_free if is_full else free):
            told = [
                _error_of(lambda: engine.save(path, "broken")),
                _error_of(lambda: engine.load(path)),
                _error_of(lambda: engine.export(path / "weights")),
            ]
        engine.save(path, "whole")
    return [*told, *CheckpointDirectory(path).tags()]


def _nothing_free(_ledger: Ledger, tier: Tier) -> int:
    raise CapacityError(tier=tier.name, asked=1, free=0, limit=1, change="raise it")


def lends_memory_on_one_rank(run: Run, path: Path) -> tuple[SaveState, list[float]]:
    """Let the last rank lend the memory for a save beside training; return how it stands after
    that call, and the losses of the steps that follow.
    """
    task, optimizer = made(run)
    init: Callable[..., None] = CheckpointMemory.__init__

    def lent(self: CheckpointMemory, *arguments: Any) -> None:
        init(self, *arguments)
        self.lent = where()[0] == where()[1] - 1

    with ExitStack() as around:
        engine = engine_of(run, task, optimizer, around)
        steps(engine, task, 0, 1)
        with patch.object(CheckpointMemory, "__init__", lent):
            engine.save(path, wait=False)
        return engine.last_save().state, steps(engine, task, 1, 2)


def _error_of(does: Callable[[], object]) -> str:
    try:
        does()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it worked"


def _out_of_memory(*_: Any) -> None:
    raise MemoryError


def fails_beside_on_one_rank(run: Run, path: Path) -> list[str]:
    """Let the last rank fail to write beside training; return what each is told, and what is left.

    After that, a save works.
    """
    task, optimizer = made(run)
    told = []
    with ExitStack() as around:
        engine = engine_of(run, task, optimizer, around)
        steps(engine, task, 0, 1)
        with patch.object(RunInMemory, "hand_out", _refused if where()[0] else _as_it_is):
            engine.save(path, "broken", wait=False)
            try:
                engine.save(path, "next")
            except InfinityError as error:
                told.append(f"{type(error).__name__}: {error}")
        steps(engine, task, 1, 1)
        told.append(engine.save(path, "whole", wait=False))
    return [*told, *sorted(entry.name for entry in path.iterdir())]


def steps_after_a_broken_save(run: Run, path: Path) -> list[object]:
    """Let the last rank fail to write beside training, and go on until the error shows.

    Return the error and its step; the program catches it, drops the batch, and trains on.
    """
    task, optimizer = made(run)
    told: list[object] = []
    with ExitStack() as around:
        engine = engine_of(run, task, optimizer, around)
        steps(engine, task, 0, 1)
        with patch.object(RunInMemory, "hand_out", _refused if where()[0] else _as_it_is):
            engine.save(path, "broken", wait=False)
            while not told:
                try:
                    steps(engine, task, engine.steps, 1)
                except InfinityError as error:
                    told += [type(error).__name__, engine.steps, engine.last_save().state.value]
        engine.zero_grad()
        steps(engine, task, engine.steps, 2)
        engine.save(path, "whole", wait=False)
        steps(engine, task, engine.steps, 1)
    return [*told, *sorted(entry.name for entry in path.iterdir())]


def fails_beside_on_rank_0(run: Run, path: Path) -> str:
    """Let rank 0 fail at once to write beside training, and the others write until they notice."""
    draft = path / ".broken.writing"

    def goes_on_when_it_is_gone(self: RunInMemory, *arguments: Any) -> None:
        while draft.exists():
            time.sleep(0.01)
        _as_it_is(self, *arguments)

    task, optimizer = made(run)
    with ExitStack() as around:
        engine = engine_of(run, task, optimizer, around)
        steps(engine, task, 0, 1)
        does = goes_on_when_it_is_gone if where()[0] else _refused
        with patch.object(RunInMemory, "hand_out", does):
            engine.save(path, "broken", wait=False)
            try:
                engine.save(path, "next")
            except InfinityError as error:
                return f"{type(error).__name__}: {error}"
    return "it was saved"


_as_it_is = RunInMemory.hand_out


def _refused(*_: Any) -> None:
    raise OSError(errno.EDQUOT, "Disk quota exceeded")


def preempts(run: Run, path: Path) -> tuple[int, str]:
    """Let one rank be told to stop; return each one's exit code, and what was saved."""
    task, optimizer = made(run)
    with ExitStack() as around:
        engine = engine_of(run, task, optimizer, around)
        try:
            for step in range(6):
                steps(engine, task, step, 1)
                if step == 3 and where()[0]:
                    os.kill(os.getpid(), signal.SIGTERM)
                engine.autosave(path, every=3, keep=1)
        except SystemExit as ended:
            return int(str(ended.code)), str(CheckpointDirectory(path).latest())
    return 0, "never stopped"


def stops_after_a_failed_commit(run: Run, path: Path) -> tuple[int, str]:
    """Let rank 0 fail to commit, and tell all to stop; return each one's exit code, and the tag."""
    task, optimizer = made(run)
    commit = CheckpointDirectory.commit

    def fails_once(self: CheckpointDirectory, tag: str, *rest: Any) -> Path:
        if tag == "broken":
            _refused()
        return commit(self, tag, *rest)

    with ExitStack() as around:
        engine = engine_of(run, task, optimizer, around)
        steps(engine, task, 0, 1)
        around.enter_context(patch.object(CheckpointDirectory, "commit", fails_once))
        around.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", RuntimeWarning)
        engine.save(path, "broken", wait=False, on_error="warn")
        engine.preempt()
        try:
            engine.autosave(path, every=3)
        except SystemExit as ended:
            return int(str(ended.code)), str(CheckpointDirectory(path).latest())
    return 0, "never stopped"
