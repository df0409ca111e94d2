"""Engines with what rests on drives, in processes that are not the usual ones: they train to the
same bits.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infinity_engine.plan import HostOnly
from support.nvme_programs import output_of, run_program
from support.nvme_training import STREAMED, digest_of, trained

TESTS = Path(__file__).resolve().parents[1]
NOBODY = 65534
TRAIN = """
import json, os, resource, sys
from pathlib import Path

from deepnvme import IOQueue
from support.determinism import deterministic_compute
from support.nvme_training import STREAMED, bits_of, digest_of, opened, train

drive, user = Path(sys.argv[1]), int(sys.argv[2])

def told():
    with IOQueue() as queue:
        with opened(STREAMED, None, drive, queue=queue) as (engine, task):
            train(engine, task, STREAMED)
            bits = bits_of(engine)
            (used,) = queue.stats().drives.values()
    return {"bits": digest_of(bits), "registered_bytes": used.registered_bytes}

with deterministic_compute():
    if user:
        told()  # imports what another user may not be able to read
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    print(json.dumps(told()))
"""
pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Yield a directory that every user may write to."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        yield folder


def told_by_training(folder: Path, *, user: int = 0, drive: Path | None = None) -> dict[str, Any]:
    """Train in a process of its own, as this user, with this drive or the folder for one."""
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    run = run_program(
        TRAIN,
        drive or folder,
        user,
        folder=folder,
        environment={"PYTHONPATH": paths},
    )
    told: dict[str, Any] = json.loads(output_of(run))
    return told


def bits_in_memory() -> str:
    return digest_of(
        trained(
            replace(STREAMED, host="256MiB", parameters="auto", strategy=HostOnly()), None, None
        ).bits
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_user_who_may_lock_no_memory_trains_from_drives_to_the_same_bits(
    open_folder: Path,
) -> None:
    told = told_by_training(open_folder, user=NOBODY)

    assert told["registered_bytes"] == 0
    assert told["bits"] == bits_in_memory()
    assert [each.name for each in open_folder.iterdir()] == ["program.py"]


def test_two_jobs_train_at_once_on_one_directory_which_is_empty_after_them(tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()

    def job(name: str) -> dict[str, Any]:
        (tmp_path / name).mkdir()
        return told_by_training(tmp_path / name, drive=drive)

    with ThreadPoolExecutor(2) as jobs:
        told = list(jobs.map(job, ("first", "second")))

    assert [each["bits"] for each in told] == [bits_in_memory()] * 2
    assert list(drive.iterdir()) == []
