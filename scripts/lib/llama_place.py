"""Where benches train a Llama: a directory of the checkout's drive, gone with the bench.

Writes the model once, and knows which Python has which system. Trains nothing itself.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from llama_apart import Job, train_llama_apart
from saved_llama import save_llama
from training_place import environ_of_training, tuned

import bench
import env

__all__ = ["Place"]


class Place:
    """The model, and where the programs run."""

    def __init__(self, until_end: ExitStack, **model: Any) -> None:
        self.threads = len(os.sched_getaffinity(0))
        self._shape = model
        self._folder = Path(
            until_end.enter_context(
                tempfile.TemporaryDirectory(prefix="bench-llama-", dir=env.BUILD)
            )
        )

    def model(self) -> Path:
        """Return the folder with the model, which is written once."""
        folder = self._folder / "model"
        if not folder.exists():
            save_llama(folder, **self._shape)
        return folder

    def emptied_drive(self) -> Path:
        """Return a directory without what an earlier program left there."""
        drive = self._folder / "drive"
        shutil.rmtree(drive, ignore_errors=True)
        drive.mkdir()
        return drive

    def run(self, job: Job, log: str, rival: tuple[str, Sequence[str]] | None) -> dict[str, Any]:
        """Train, in the environment of its own that a rival has by name and packages.

        Raises:
            UnavailableError: that cannot be done here.
        """
        python, environ = Path(sys.executable), environ_of_training(job.threads)
        try:
            if rival is not None:
                python = env.rival_venv(*rival)
                environ = tuned(env.rival_environ(python), job.threads)
            env.LOGS.mkdir(parents=True, exist_ok=True)
            return train_llama_apart(python, environ, job, log=env.LOGS / f"{log}.log")
        except (env.EnvironmentMissingError, RuntimeError) as problem:
            raise bench.UnavailableError(str(problem).splitlines()[0]) from None
