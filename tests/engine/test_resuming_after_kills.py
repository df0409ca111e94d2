"""A run that is killed at any instant and started again ends with the bits of a whole one."""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from infinity_engine.checkpoint import CheckpointDirectory
from infinity_engine.engine.checkpoints.saving import _Save
from support import rank_checkpoints
from support.determinism import deterministic_compute
from support.engine_bits import bits_of
from support.kills import Kill, any_kill
from support.nvme_training import STREAMED, Case, digest_of, opened, train
from support.rank_training import Run
from support.ranks import PRELOADED, launch

STEPS = 8
ONE_BY_ONE = {"storage": {"small_bytes": 0}, "precision": "bf16", "budget": {"host": "256MiB"}}
ON_DRIVES = {**ONE_BY_ONE, "strategy": "nvme_streamed", "parameters": "nvme"}


@dataclass(frozen=True)
class Killed:
    """A run that is killed: on drives or not, saving beside its steps or between them."""

    drives: bool = False
    beside: bool = False


def run(kind: Killed, checkpoints: Path, kill: Kill | None, digest: Path | None) -> None:
    """Train to the end, from the newest checkpoint on, and save after each step.

    Write a digest of the last bits.
    """
    case = replace(STREAMED, clip=None, steps=1) if kind.drives else Case(precision="bf16", steps=1)
    _Save.has_lent_memory = False  # type: ignore[method-assign,assignment]  # saves go on beside
    with deterministic_compute(), ExitStack() as around:
        drive = None
        if kind.drives:
            drive = Path(around.enter_context(TemporaryDirectory(dir=checkpoints.parent)))
        engine, task = around.enter_context(opened(case, None, drive))
        if kill is not None:
            kill.arm()
        if CheckpointDirectory(checkpoints).latest() is not None:
            engine.load(checkpoints)
        while engine.steps < STEPS:
            train(engine, task, case, first=engine.steps)
            engine.save(checkpoints, keep=2, wait=not kind.beside)
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


def killed_again_and_again(
    path: Path, rounds: int, chosen: random.Random, start: Callable[[Path, Kill | None], bool]
) -> tuple[Path, int]:
    """Start a run so many times; return the last one's directory, and how many were killed."""
    killed, folder = 0, path / "killed"
    for number in range(rounds):
        killed += start(folder, any_kill(chosen) if chosen.random() < 0.7 else None)
        if CheckpointDirectory(folder).latest() == f"step-{STEPS:08d}":  # at its end: begin anew
            folder = path / f"killed-{number}"
    return folder, killed


@cache
def bits_of_a_whole_run(drives: bool) -> str:
    """Return the digest of a run that nothing kills. How it saves changes none of its bits."""
    with TemporaryDirectory() as folder:
        path = Path(folder)
        whole = started(Killed(drives=drives), path / "whole", None, path / "expected")
        whole.join()
        assert whole.exitcode == 0
        return (path / "expected").read_text()


@cache
def bits_of_whole_ranks(drives: bool) -> list[str]:
    """Return the digests of two ranks that nothing kills."""
    with TemporaryDirectory() as folder:
        ranks = ranks_of(Path(folder) / "whole", drives, beside=False, kill=None, victim=0)
        digests = [rank.value for rank in ranks]
        assert None not in digests
        return digests


def ranks_of(
    path: Path, drives: bool, *, beside: bool, kill: Kill | None, victim: int
) -> list[Any]:
    """Let two ranks go on from the checkpoints in `path` to their end; return how each ended."""
    drive = path.parent / "drive" if drives else None
    if drive is not None:
        drive.mkdir(exist_ok=True)
    how = Run(settings=ON_DRIVES if drives else ONE_BY_ONE)
    arguments = (how, path, drive, STEPS, beside, kill, victim)
    return launch(2, rank_checkpoints.resumes, *arguments, timeout_s=200)


@pytest.mark.parametrize("rounds", long_run(4, 40))
@pytest.mark.parametrize(
    "kind",
    [Killed(), Killed(drives=True), Killed(beside=True), Killed(drives=True, beside=True)],
    ids=["host", "drives", "host, beside", "drives, beside"],
)
def test_a_killed_run_ends_with_the_bits_of_an_uninterrupted_one(
    tmp_path: Path, kind: Killed, rounds: int
) -> None:
    expected = bits_of_a_whole_run(kind.drives)
    chosen = random.Random(rounds + kind.drives + 2 * kind.beside)

    def start(path: Path, kill: Kill | None) -> bool:
        process = started(kind, path, kill, None)
        if kill is None:
            time.sleep(chosen.random() * 1.5)
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        return bool(process.exitcode)

    path, killed = killed_again_and_again(tmp_path, rounds, chosen, start)
    last = started(kind, path, None, tmp_path / "found")
    last.join()
    assert last.exitcode == 0
    assert (tmp_path / "found").read_text() == expected
    assert killed
    assert not [entry for entry in path.iterdir() if entry.name.startswith(".")]


@pytest.mark.parametrize("rounds", long_run(2, 20))
@pytest.mark.parametrize("beside", [False, True], ids=["waited for", "beside"])
@pytest.mark.parametrize("drives", [False, True], ids=["host", "drives"])
def test_two_ranks_of_which_one_is_killed_end_with_the_bits_of_a_whole_run(
    tmp_path: Path, drives: bool, beside: bool, rounds: int
) -> None:
    expected = bits_of_whole_ranks(drives)
    chosen = random.Random(rounds + drives + 2 * beside)

    def start(path: Path, kill: Kill | None) -> bool:
        ranks = ranks_of(
            path,
            drives,
            beside=beside,
            kill=kill or Kill("step", 3),
            victim=chosen.randrange(2),
        )
        return -signal.SIGKILL in [rank.exitcode for rank in ranks]

    path, killed = killed_again_and_again(tmp_path, rounds, chosen, start)
    last = ranks_of(path, drives, beside=beside, kill=None, victim=0)
    assert [rank.value for rank in last] == expected
    assert killed
