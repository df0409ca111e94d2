"""Ranks that do not begin alike, or of which one ends: all are told who and what, and the next
start is clean. Gloo.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from infinity_engine.outcome import Outcome
from support import rank_training as programs
from support.rank_training import Run
from support.ranks import Rank, launch


@cache
def differences() -> list[dict[str, str]]:
    """Return what each of three ranks was told, where the last begins with something else."""
    ranks = launch(3, programs.differ, timeout_s=200)
    for rank in ranks:
        assert rank.error is None, rank.trace
    return [rank.value for rank in ranks]


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (
            "settings",
            "agreement on settings: the ranks differ in precision: fp32 on ranks 0, 1, bf16 on "
            "rank 2",
        ),
        (
            "model",
            "agreement on the model: the ranks differ in position: float32 [12, 24] in group 0, "
            "number 0 on ranks 0, 1",
        ),
        (
            "values",
            "agreement on the model's first values: the ranks differ in embed.weight: values of "
            "checksum",
        ),
    ],
)
def test_ranks_that_begin_with_something_else_are_all_told_what(what: str, told: str) -> None:
    for found in differences():
        assert found[what].startswith(told)


@pytest.mark.parametrize(
    ("what", "differs"),
    [
        ("rate", r"optimizer's group 1: .*lr=0\.001.* on ranks 0, 1"),
        ("clip", r"max_grad_norm: 1\.0 on ranks 0, 1, 2\.0"),
        ("dropped gradients", r"micro-batches of this step: 2 on ranks 0, 1, 1 on rank 2"),
    ],
)
def test_ranks_that_step_with_something_else_are_all_told_what(what: str, differs: str) -> None:
    for rank in launch(3, programs.steps_with, what):
        assert rank.error is None, rank.trace
        assert re.match(
            f"agreement on what the update is made with: the ranks differ in {differs}", rank.value
        )


def test_a_rank_that_the_others_leave_alone_is_told_who_did_not_come() -> None:
    alone, *_ = launch(3, programs.comes_alone)

    assert alone.error is None, alone.trace
    assert re.match(
        r"meeting the other ranks: of 3 ranks, 1, 2 did not come in 2 s\. .*initialize", alone.value
    )


def test_ctrl_c_ends_a_rank_that_waits_for_others_and_they_are_told(tmp_path: Path) -> None:
    first, second = launch(2, programs.is_interrupted, str(tmp_path / "told"))

    assert first.value == "Ctrl-C", first.trace
    assert "rank 0 has left with KeyboardInterrupt" in second.value, second.trace


def test_what_one_rank_refuses_is_told_to_the_others() -> None:
    first, second, _ = differences()

    for found in (first, second):
        assert "rank 2 has left with ConfigError: Budget.nvme" in found["refused"]


def test_a_drive_that_fails_at_the_start_leaves_all_models_as_they_were_and_is_tried_again(
    tmp_path: Path,
) -> None:
    first, last = launch(2, programs.begins_with_a_broken_drive, on_drives(tmp_path))

    assert [first.trace, last.trace] == ["", ""]
    assert "rank 1 has left with TransferError" in first.value["told"]
    assert str(tmp_path) in last.value["told"]
    for rank in (first, last):
        assert rank.value["changed"] == []
        assert rank.value["again"] is Outcome.UPDATED
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_run_different_experts_are_told_apart_and_not_hung() -> None:
    for found in differences():
        assert "the ranks have started different collectives" in found["experts"]
        assert "gather of" in found["experts"]


@pytest.mark.parametrize(
    ("how", "size", "rank", "step"),
    [
        ("killed", 2, 1, 2),
        ("raises", 3, 0, 1),
        *(pytest.param("killed", 3, 2, step, marks=pytest.mark.slow) for step in range(8)),
    ],
)
def test_the_others_are_told_of_a_rank_that_ends_in_a_step(
    how: str, size: int, rank: int, step: int
) -> None:
    ranks = launch(size, programs.ends, rank, step, how, {})

    ended = ranks.pop(rank)
    if how == "killed":
        assert ended.exitcode == -signal.SIGKILL
        told = rf"rank {rank} \(process \d+ of this machine\) has ended without a report"
    else:
        assert ended.value == "its own"
        told = f"rank {rank} has left with ZeroDivisionError: division by zero"
    for each in ranks:
        assert each.error is None, each.trace
        assert re.search(told, each.value)
        assert re.match(r"(gather|reduce) of|what has a gradient", each.value)


def test_after_a_killed_rank_the_next_start_is_clean(tmp_path: Path) -> None:
    drives = on_drives(tmp_path)
    launch(2, programs.ends, 1, 1, "killed", drives)

    again = launch(2, programs.train, Run(steps=1, settings=drives))

    assert [each.trace for each in again] == ["", ""]
    assert trained_alike(again)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("count", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_whenever_a_rank_is_killed_the_others_are_told_and_the_next_start_is_clean(
    count: int, tmp_path: Path
) -> None:
    random = Random(count)
    drives = on_drives(tmp_path)
    for number in range(count):
        size = 2 + number % 2
        killed = random.randrange(size)
        ranks = launch(size, programs.is_killed, killed, random.uniform(0.0, 0.5), drives)

        assert ranks.pop(killed).exitcode == -signal.SIGKILL
        for each in ranks:
            assert each.error is None, each.trace
            assert re.search(
                rf"rank {killed} \(process \d+ of this machine\) has ended without a report",
                each.value,
            )

    again = launch(2, programs.train, Run(steps=1, settings=drives))

    assert [each.trace for each in again] == ["", ""]
    assert list(tmp_path.iterdir()) == []


def on_drives(directory: Path) -> dict[str, Any]:
    """Return settings with which parameters and states rest in a directory."""
    return {
        "strategy": "nvme_streamed",
        "parameters": "nvme",
        "storage": {"small_bytes": 0},
        "budget": {"host": "64MiB", "nvme": {str(directory): "64MiB"}},
    }


def trained_alike(ranks: list[Rank]) -> bool:
    """Tell whether ranks have the same losses' steps and no error."""
    return all(rank.value["states"].keys() == ranks[0].value["states"].keys() for rank in ranks)


MEETING = """
import torch, infinity_engine
from infinity_engine.errors import CollectiveError
try:
    together = {"stage": "optimizer", "timeout_s": 5}
    infinity_engine.initialize(torch.nn.Linear(2, 2), "adamw", accelerator="cpu", calibration="off", ranks=together)
except CollectiveError as error:
    print(error)
"""


def test_ranks_that_wait_name_the_missing_one_and_not_each_other() -> None:
    """Of three processes the last never starts; rank 0, at which the others meet, waits as well."""
    with socket.socket() as port:
        port.bind(("localhost", 0))
        place = {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port.getsockname()[1]),
            "WORLD_SIZE": "3",
        }
    waiting = [
        subprocess.Popen(
            [sys.executable, "-c", MEETING],
            env={
                **os.environ,
                **place,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": "3",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    told = [process.communicate(timeout=120)[0] for process in waiting]

    assert "of 3 ranks, 2 did not come" in told[0]
    # some: rank 0 was faster to leave
    assert re.search("(of 3 ranks, 2|some of 3 ranks) did not come", told[1])
