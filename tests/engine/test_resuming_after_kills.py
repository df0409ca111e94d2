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
from support.kills import (
    Kill,
    any_kill,
    committed_step,
    note_commits,
    one_kill_at_each_place,
)
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

    What was committed before is not trained again. Write a digest of the last bits.
    """
    note_commits(checkpoints)
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
        assert engine.steps >= committed_step(checkpoints)
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


LONG = [pytest.mark.slow, pytest.mark.timeout(3600)]
KINDS = [
    Killed(drives=drives, beside=beside) for beside in (False, True) for drives in (False, True)
]


def name_of(kind: Killed) -> str:
    return f"{'drives' if kind.drives else 'host'}, {'beside' if kind.beside else 'waited for'}"


def assert_goes_on_to_the_bits_of_a_whole_run(kind: Killed, path: Path) -> None:
    digest = path.with_name("found")
    last = started(kind, path, None, digest)
    last.join()
    assert last.exitcode == 0
    assert digest.read_text() == bits_of_a_whole_run(kind.drives)
    assert not [entry for entry in path.iterdir() if entry.name.startswith(".")]


# Of the four kinds, two have both homes and both ways to save.
@pytest.mark.parametrize(
    "kind",
    [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:3]), KINDS[3]],
    ids=name_of,
)
def test_a_run_killed_once_at_each_place_ends_with_the_bits_of_a_whole_one(
    tmp_path: Path, kind: Killed
) -> None:
    for kill in one_kill_at_each_place(random.Random(name_of(kind))):
        process = started(kind, tmp_path / "killed", kill, None)
        process.join()
        assert process.exitcode == -signal.SIGKILL, kill
    assert_goes_on_to_the_bits_of_a_whole_run(kind, tmp_path / "killed")


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=LONG) for kind in KINDS], ids=name_of)
def test_a_run_killed_at_40_instants_ends_with_the_bits_of_a_whole_one(
    tmp_path: Path, kind: Killed
) -> None:
    chosen = random.Random(name_of(kind))

    def start(path: Path, kill: Kill | None) -> bool:
        process = started(kind, path, kill, None)
        if kill is None:
            time.sleep(chosen.random() * 1.5)
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        return bool(process.exitcode)

    path, killed = killed_again_and_again(tmp_path, 40, chosen, start)
    assert killed
    assert_goes_on_to_the_bits_of_a_whole_run(kind, path)


def is_killed(ranks: list[Any]) -> bool:
    """Tell whether one of the ranks was killed. None may find an older step than it should."""
    assert not any(isinstance(rank.error, AssertionError) for rank in ranks), ranks
    return -signal.SIGKILL in [rank.exitcode for rank in ranks]


@pytest.mark.parametrize(
    "kind",
    [*(pytest.param(kind, marks=LONG) for kind in KINDS[:3]), KINDS[3]],
    ids=name_of,
)
def test_ranks_of_which_one_is_killed_at_each_place_end_with_the_bits_of_a_whole_run(
    tmp_path: Path, kind: Killed
) -> None:
    chosen = random.Random(name_of(kind))
    for kill in one_kill_at_each_place(chosen):
        # Rank 0 alone commits, and removes older checkpoints.
        victim = 0 if kill.place in ("commit", "removal") else chosen.randrange(2)
        path, beside = tmp_path / "killed", kind.beside
        ranks = ranks_of(path, kind.drives, beside=beside, kill=kill, victim=victim)
        assert is_killed(ranks), (kill, ranks)
    last = ranks_of(tmp_path / "killed", kind.drives, beside=kind.beside, kill=None, victim=0)
    assert [rank.value for rank in last] == bits_of_whole_ranks(kind.drives)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=LONG) for kind in KINDS], ids=name_of)
def test_ranks_of_which_one_is_killed_20_times_end_with_the_bits_of_a_whole_run(
    tmp_path: Path, kind: Killed
) -> None:
    chosen = random.Random(name_of(kind))

    def start(path: Path, kill: Kill | None) -> bool:
        kill, victim = kill or Kill("step", 3), chosen.randrange(2)
        return is_killed(ranks_of(path, kind.drives, beside=kind.beside, kill=kill, victim=victim))

    path, killed = killed_again_and_again(tmp_path, 20, chosen, start)
    assert killed
    last = ranks_of(path, kind.drives, beside=kind.beside, kill=None, victim=0)
    assert [rank.value for rank in last] == bits_of_whole_ranks(kind.drives)
