"""SIGKILL at a chosen place of a run: in a step, a save, a commit, a load or while old ones go.

And a note of each checkpoint that was committed before, which outlives the process.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from deepnvme.formats.safetensors import SafetensorsWriter
from infinity_engine.checkpoint import CheckpointDirectory, CheckpointReader, directory
from infinity_engine.update.states import StateKeeper

__all__ = ["Kill", "any_kill", "committed_step", "note_commits", "one_kill_at_each_place"]


@dataclass(frozen=True)
class Kill:
    """The `nth` call, from 0 on, at which a process kills itself; `place` is one of PLACES."""

    place: str
    nth: int

    def arm(self) -> None:
        """Let this process kill itself there."""
        calls = count()

        def die_at_its_turn() -> None:
            if next(calls) == self.nth:
                os.kill(os.getpid(), signal.SIGKILL)

        PLACES[self.place](die_at_its_turn)


def any_kill(chosen: random.Random) -> Kill:
    """Return one at a random place."""
    place = chosen.choice(list(PLACES))
    return Kill(place, chosen.randrange(MOST_CALLS[place]))


def one_kill_at_each_place(chosen: random.Random) -> list[Kill]:
    """Return one for each place, for runs that go on from one another and save after each step.

    Each run reaches its kill, with two checkpoints kept: the first at its third save, and every
    other one before its second.
    """
    return [Kill(place, chosen.randrange(*calls)) for place, calls in SOON.items()]


def note_commits(checkpoints: Path) -> None:
    """Let this process note each checkpoint that it commits in the directory `checkpoints`."""
    commit = CheckpointDirectory.commit

    def commits(directory: CheckpointDirectory, tag: str, *arguments: Any) -> Path:
        path = commit(directory, tag, *arguments)
        with _notes_of(checkpoints).open("a") as file:
            file.write(f"{tag}\n")
        return path

    CheckpointDirectory.commit = commits  # type: ignore[method-assign,assignment]  # in a process of its own


def committed_step(checkpoints: Path) -> int:
    """Return the step of the checkpoint that was noted last, 0 where none was."""
    notes = _notes_of(checkpoints)
    tags = notes.read_text().split() if notes.exists() else []
    return int(tags[-1].removeprefix("step-").split(".")[0]) if tags else 0


def _notes_of(checkpoints: Path) -> Path:
    return checkpoints.with_name(f"{checkpoints.name}.committed")


def _before(owner: Any, name: str) -> Callable[[Callable[[], None]], None]:
    """Return what lets something be called before each call of a function."""

    def patch(die: Callable[[], None]) -> None:
        call = getattr(owner, name)

        def calls(*arguments: Any, **more: Any) -> Any:
            die()
            return call(*arguments, **more)

        setattr(owner, name, calls)

    return patch


def _in_commit(die: Callable[[], None]) -> None:
    """Die between any two changes of the directory."""
    for name in ("sync_file", "sync_directory"):
        _before(directory, name)(die)


def _while_removing(die: Callable[[], None]) -> None:
    """Die before a checkpoint goes, or when one of its files is gone."""
    remove = shutil.rmtree

    def removes(path: str | Path, **more: Any) -> None:
        die()
        for file in list(Path(path).glob("*"))[:1]:
            file.unlink()
        die()
        remove(path, **more)

    shutil.rmtree = removes  # type: ignore[assignment]  # in a process that is to die


PLACES = {
    "step": _before(StateKeeper, "carry_out"),
    "save": _before(SafetensorsWriter, "begin"),
    "commit": _in_commit,
    "load": _before(CheckpointReader, "read"),
    "removal": _while_removing,
}
MOST_CALLS = {"step": 150, "save": 150, "commit": 20, "load": 40, "removal": 6}
"""About as many calls as a run of eight steps makes at each place."""
SOON = {"removal": (2, 4), "load": (0, 8), "save": (0, 8), "commit": (0, 5), "step": (0, 8)}
"""The calls of which a run reaches the first ones soon. A removal needs three checkpoints, and
first calls for what a killed run may have left."""
