"""A drive that is full, fails or refuses in the middle of a save: nothing that was saved is lost."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity_engine
from deepnvme import FaultPlan, IOQueue, Requests
from deepnvme.volume.syncing import sync_directory
from infinity_engine.checkpoint import CheckpointDirectory, directory
from infinity_engine.engine.checkpoints import saving
from infinity_engine.engine.checkpoints.saving import SaveState
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import TransferError
from support.nvme_disks import DiskUnavailableError, loop_ext4
from support.saved_engines import one_step, small

pytestmark = pytest.mark.usefixtures("deterministic")

WAYS = [pytest.param(True, id="waited for"), pytest.param(False, id="beside training")]


def saved_whole(engine: Engine, path: Path, tag: str) -> bool:
    """Load a checkpoint, and save it again; tell whether nothing else is left."""
    engine.load(path, tag)
    engine.save(path, "after", wait=False)
    engine.save(path, "later", keep=1)
    return sorted(entry.name for entry in path.iterdir()) == ["later", "latest"]


def fails_to_save(engine: Engine, path: Path, tag: str, *, wait: bool) -> TransferError:
    """Save, and go on until the error is there."""
    with pytest.raises(TransferError) as error:
        _save_and_go_on(engine, path, tag, wait=wait)
    engine.zero_grad()
    assert engine.last_save().state is SaveState.FAILED
    return error.value


def _save_and_go_on(engine: Engine, path: Path, tag: str, *, wait: bool) -> None:
    engine.save(path, tag, wait=wait)
    while engine.last_save().state is SaveState.WRITING:
        one_step(engine)
    one_step(engine)  # which shows the error


@pytest.mark.parametrize("wait", WAYS)
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_write_that_fails_fails_the_save_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: bool, nth: int
) -> None:
    _, _, engine = small()
    with engine:
        one_step(engine)
        tag = engine.save(tmp_path)
        plan = FaultPlan().fail(nth=nth, requests=Requests.WRITES)
        with monkeypatch.context() as patch:
            patch.setattr(saving, "IOQueue", partial(IOQueue, faults=plan))
            error = fails_to_save(engine, tmp_path, "broken", wait=wait)
        assert error.errno == errno.EIO
        assert str(tmp_path) in str(error)
        one_step(engine)
        assert saved_whole(engine, tmp_path, tag)


def test_a_checkpoint_that_cannot_be_read_back_removes_no_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, engine = small()
    with engine:
        one_step(engine)
        tag = engine.save(tmp_path)
        plan = FaultPlan().fail(nth=1, requests=Requests.READS)
        with monkeypatch.context() as patch:
            patch.setattr(saving, "IOQueue", partial(IOQueue, faults=plan))
            with pytest.raises(TransferError, match="Input/output error"):
                engine.save(tmp_path, "new", keep=1)
        assert CheckpointDirectory(tmp_path).tags() == [tag]
        assert saved_whole(engine, tmp_path, tag)


@contextmanager
def immutable(path: Path) -> Iterator[None]:
    """Let nobody, not even root, change a directory's names."""
    done = subprocess.run(["chattr", "+i", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"chattr +i: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", str(path)], check=True)


@pytest.mark.parametrize("wait", WAYS)
def test_permission_that_is_lost_in_a_save_leaves_nothing_after_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    _, _, engine = small()
    with engine:
        one_step(engine)
        tag = engine.save(tmp_path)
        commit = CheckpointDirectory.commit

        def refused(self: CheckpointDirectory, *arguments: Any) -> Path:
            with immutable(self.path):
                return commit(self, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(CheckpointDirectory, "commit", refused)
            error = fails_to_save(engine, tmp_path, "broken", wait=wait)
        assert error.errno == errno.EPERM
        with immutable(tmp_path), pytest.raises(TransferError, match="Operation not permitted"):
            engine.save(tmp_path, "refused-at-once")
        one_step(engine)
        assert saved_whole(engine, tmp_path, tag)


def test_a_save_that_may_not_survive_a_power_loss_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails_once_it_is_renamed(folder: Path) -> None:
        if (tmp_path / "newer").exists():
            raise OSError(errno.EIO, "Input/output error", str(folder))
        sync_directory(folder)

    _, _, engine = small()
    with engine:
        one_step(engine)
        engine.save(tmp_path, "older")
        with monkeypatch.context() as patch:
            patch.setattr(directory, "sync_directory", fails_once_it_is_renamed)
            with pytest.warns(RuntimeWarning, match="newer failed: .*Input/output error"):
                engine.save(tmp_path, "newer", keep=1, on_error="warn")
        assert engine.last_save().state is SaveState.FAILED
        assert "older" in CheckpointDirectory(tmp_path).tags()
        # It does not stand for the last save.
        engine.preempt()
        with pytest.raises(SystemExit):
            engine.autosave(tmp_path, every=100)
    assert CheckpointDirectory(tmp_path).latest() == "step-00000001"


def saves_and_stops(engine: Engine, path: Path, tag: str, *, wait: bool) -> None:
    engine.save(path, tag, keep=1, wait=wait)
    engine.preempt()
    with pytest.raises(SystemExit):
        engine.autosave(path, every=100, keep=1)


@pytest.mark.parametrize("wait", WAYS)
def test_a_save_counts_though_an_older_checkpoint_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    rename = Path.rename

    def refuses_to_remove(self: Path, target: Path) -> Path:
        if target.suffix == ".removing":
            raise PermissionError(errno.EPERM, "Operation not permitted", str(self))
        return rename(self, target)

    _, _, engine = small()
    with engine:
        one_step(engine)
        engine.save(tmp_path, "older")
        one_step(engine)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", refuses_to_remove)
            with pytest.warns(RuntimeWarning, match="newer was saved.*could not be removed"):
                saves_and_stops(engine, tmp_path, "newer", wait=wait)
        assert engine.last_save().state is SaveState.COMMITTED
    assert CheckpointDirectory(tmp_path).tags() == ["older", "newer"]
    assert CheckpointDirectory(tmp_path).latest() == "newer"


@pytest.mark.parametrize("wait", WAYS)
def test_a_full_drive_fails_the_save_and_training_goes_on(tmp_path: Path, wait: bool) -> None:
    try:
        with loop_ext4(tmp_path, 20 << 20) as mount:
            model = torch.nn.Sequential(torch.nn.Linear(8, 512), torch.nn.Linear(512, 1024))
            with infinity_engine.initialize(
                model,
                torch.optim.AdamW(model.parameters()),
                budget={"host": "64MiB"},
                accelerator="cpu",
            ) as engine:
                one_step(engine)
                tag = engine.save(mount)
                filler = mount / "filler"
                filler.write_bytes(bytes(8 << 20))
                for number in range(2):
                    error = fails_to_save(engine, mount, f"more-{number}", wait=wait)
                    assert error.errno == errno.ENOSPC
                assert CheckpointDirectory(mount).tags() == [tag]
                assert not [entry for entry in mount.iterdir() if entry.name.startswith(".")]
                filler.unlink()
                engine.load(mount, tag)
                engine.save(mount, "later")
    except DiskUnavailableError as reason:
        pytest.skip(str(reason))
