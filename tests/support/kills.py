"""SIGKILL at a chosen place of a run: in a step, a save, a commit, a load or while old ones go."""

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
from infinity_engine.checkpoint import CheckpointReader, directory
from infinity_engine.update.states import StateKeeper

__all__ = ["Kill", "any_kill"]


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

    def removes(path: Path, **more: Any) -> None:
        die()
        for file in list(path.glob("*"))[:1]:
            file.unlink()
        die()
        remove(path, **more)

    shutil.rmtree = removes  # type: ignore[assignment]  # in a process that is to die


PLACES = {
    "step": _before(StateKeeper, "carry_out"),
    "save": _before(SafetensorsWriter, "append"),
    "commit": _in_commit,
    "load": _before(CheckpointReader, "read"),
    "removal": _while_removing,
}
MOST_CALLS = {"step": 150, "save": 150, "commit": 20, "load": 40, "removal": 6}
"""About as many calls as a run of eight steps makes at each place."""
