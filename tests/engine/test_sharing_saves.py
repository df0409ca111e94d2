"""Saves on a file system with reflinks: what rests on drives is in the checkpoint without a copy."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepnvme.formats.safetensors import encoded_header
from deepnvme.volume.member import MemberFile
from infinity_engine.checkpoint import CheckpointDirectory, CheckpointReader
from infinity_engine.checkpoint.sharing import SharedFile
from infinity_engine.engine.checkpoints.saving import SaveState, _Save
from infinity_engine.errors import DamageError
from support.engine_bits import bits_of, differing
from support.nvme_disks import DiskUnavailableError, loop_reflinks
from support.saved_engines import PLACES, engine_at, steps

pytestmark = pytest.mark.usefixtures("deterministic", "beside")


def copied(self: MemberFile, start: int, nbytes: int, descriptor: int, offset: int) -> None:
    """Do as a file system with reflinks does, at the price of a copy."""
    os.pwrite(descriptor, os.pread(self._lock, nbytes, start), offset)


@pytest.fixture(params=["a copy instead", "xfs", "btrfs"])
def disk(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A directory whose file system can share blocks, or, on any machine, behaves as if it could."""
    if request.param == "a copy instead":
        monkeypatch.setattr(MemberFile, "share", copied)
        yield tmp_path
        return
    try:
        with loop_reflinks(tmp_path, request.param) as folder:
            yield folder
    except DiskUnavailableError as reason:
        pytest.skip(str(reason))


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let saves go on beside training even with the least budget, with which they borrow memory."""
    monkeypatch.setattr(_Save, "has_lent_memory", False)
    monkeypatch.setattr("infinity_engine.engine.checkpoints.saving.LEAST_BYTES", 1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_shared_save_loads_with_the_bits_of_its_step(disk: Path, precision: str) -> None:
    with engine_at(PLACES["drives"], disk, precision=precision) as (engine, run):
        steps(engine, run, 0, 2)
        before = bits_of(engine)
        tag = engine.save(disk / "saved", wait=False)
        steps(engine, run, 2, 2)
        engine.save(disk / "saved", wait=True)
        assert engine.last_save().shared_nbytes > 0
        changed = bits_of(engine)
        assert differing(changed, before)
        engine.load(disk / "saved", tag)
        assert not differing(bits_of(engine), before)
        engine.load(disk / "saved")
        assert not differing(bits_of(engine), changed)
    found = CheckpointDirectory(disk / "saved").resolve(tag)
    with CheckpointReader(found) as reader:
        reader.check_slices()
        assert list(reader.verify()) == []
        assert reader.strange_files() == []


def test_updates_go_on_before_a_shared_save_is_read(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    finish = SharedFile.finish

    def slow_finish(*arguments: Any) -> Any:
        assert go_on.wait(60)
        return finish(*arguments)

    with engine_at(PLACES["drives"], disk) as (engine, run):
        steps(engine, run, 0, 1)
        before = bits_of(engine)
        monkeypatch.setattr(SharedFile, "finish", slow_finish)
        engine.save(disk / "saved", "shared", wait=False)
        assert engine.last_save().shared_nbytes
        steps(engine, run, 1, 2)  # no update waits
        assert engine.last_save().state is SaveState.WRITING
        go_on.set()
        steps(engine, run, 3, 1)
        engine.save(disk / "saved")
        engine.load(disk / "saved", "shared")
        assert not differing(bits_of(engine), before)


def test_bytes_that_the_drive_changed_fail_a_shared_save(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = SharedFile.finish

    def damaged(self: SharedFile, *arguments: Any) -> Any:
        os.pwrite(self._descriptor, b"\xff" * 64, self._parts[-1].offset)
        return finish(self, *arguments)

    place = PLACES["drives"]
    checked = replace(place, case=replace(place.case, checksum="crc32c"))
    with engine_at(checked, disk) as (engine, run):
        steps(engine, run, 0, 1)
        monkeypatch.setattr(SharedFile, "finish", damaged)
        with pytest.raises(DamageError, match="states for a checkpoint"):
            engine.save(disk / "saved")
        assert engine.last_save().state is SaveState.FAILED
        monkeypatch.undo()


def test_a_file_system_that_cannot_share_gets_copies(tmp_path: Path) -> None:
    with engine_at(PLACES["drives"], tmp_path) as (engine, run):
        steps(engine, run, 0, 1)
        engine.save(tmp_path / "saved")
        report = engine.last_save()
        assert (report.state, report.shared_nbytes) == (SaveState.COMMITTED, 0)


def test_a_drive_without_room_for_what_updates_write_gets_copies(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 4096})
    with engine_at(PLACES["drives"], disk) as (engine, run):
        steps(engine, run, 0, 1)
        monkeypatch.setattr(
            "infinity_engine.engine.checkpoints.saving.shutil.disk_usage", lambda _: usage
        )
        engine.save(disk / "saved")
        assert engine.last_save().shared_nbytes == 0


def test_a_drive_that_does_not_say_its_free_bytes_gets_copies(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: Path) -> object:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with engine_at(PLACES["drives"], disk) as (engine, run):
        steps(engine, run, 0, 1)
        monkeypatch.setattr("infinity_engine.engine.checkpoints.saving.shutil.disk_usage", refused)
        engine.save(disk / "saved")
        report = engine.last_save()
        assert (report.state, report.shared_nbytes) == (SaveState.COMMITTED, 0)


def test_a_failure_between_two_shared_files_leaves_none(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[SharedFile] = []
    init: Callable[..., None] = SharedFile.__init__

    def second_fails(self: SharedFile, *arguments: Any) -> None:
        if made:
            raise OSError(28, "No space left on device")
        init(self, *arguments)
        made.append(self)

    monkeypatch.setattr(SharedFile, "__init__", second_fails)
    monkeypatch.setattr("infinity_engine.engine.checkpoints.saving.FILE_BYTES", 4096)
    with engine_at(PLACES["drives"], disk) as (engine, run):
        steps(engine, run, 0, 1)
        tag = engine.save(disk / "saved")
        report = engine.last_save()
        assert (report.state, report.shared_nbytes) == (SaveState.COMMITTED, 0)
        with CheckpointReader(disk / "saved" / tag) as reader:
            assert reader.strange_files() == []


def test_a_header_that_is_written_in_parts_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a file system may do where it has little room."""
    write = os.pwrite

    def in_parts(descriptor: int, data: Any, offset: int) -> int:
        return write(descriptor, bytes(data)[:100], offset)

    monkeypatch.setattr("infinity_engine.checkpoint.sharing.os.pwrite", in_parts)
    header = encoded_header({"weight": ("F32", (0,))}, {}, tmp_path)
    file = SharedFile(tmp_path / "shared", header, [])
    file.close()

    assert (tmp_path / "shared").read_bytes() == header
