"""A run that is killed at any instant and started again ends with the bits of an uninterrupted
one.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from infinity_engine.checkpoint import CheckpointDirectory
from support.determinism import deterministic_compute
from support.engine_bits import bits_of
from support.nvme_training import STREAMED, Case, digest_of, opened, train
from support.ranks import PRELOADED

STEPS = 8


def run(checkpoints: Path, drives: bool, digest: Path | None) -> None:
    """Train to the end, from the newest checkpoint on, and save after each step; write a digest of
    the last bits.
    """
    from dataclasses import replace

    case = replace(STREAMED, clip=None, steps=1) if drives else Case(precision="bf16", steps=1)
    with deterministic_compute(), ExitStack() as around:
        drive = (
            Path(around.enter_context(TemporaryDirectory(dir=checkpoints.parent)))
            if drives
            else None
        )
        engine, task = around.enter_context(opened(case, None, drive))
        if CheckpointDirectory(checkpoints).latest() is not None:
            engine.load(checkpoints)
        while engine.steps < STEPS:
            train(engine, task, case, first=engine.steps)
            engine.save(checkpoints, keep=2)
        if digest is not None:
            digest.write_text(digest_of(bits_of(engine)))


def started(*arguments: Any) -> Any:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=run, args=arguments)
    process.start()
    return process


def long_run(few: int, many: int) -> list[object]:
    """Return the parameters of a test that is short by default."""
    return [few, pytest.param(many, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]


@pytest.mark.parametrize("rounds", long_run(4, 100))
@pytest.mark.parametrize("drives", [False, True], ids=["host", "drives"])
def test_a_killed_run_ends_with_the_bits_of_an_uninterrupted_one(
    tmp_path: Path, drives: bool, rounds: int
) -> None:
    whole = started(tmp_path / "whole", drives, tmp_path / "expected")
    whole.join()
    assert whole.exitcode == 0
    chosen = random.Random(rounds + drives)
    path = tmp_path / "killed"
    killed = 0
    for _ in range(rounds):
        process = started(path, drives, None)
        time.sleep(chosen.random() * 1.5)
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        killed += process.exitcode == -signal.SIGKILL
        latest = CheckpointDirectory(path).latest()
        if latest == f"step-{STEPS:08d}":  # it has come to its end: begin anew
            path = tmp_path / f"killed-{killed}-{chosen.random()}"
    last = started(path, drives, tmp_path / "found")
    last.join()
    assert last.exitcode == 0
    assert (tmp_path / "found").read_text() == (tmp_path / "expected").read_text()
    assert killed
