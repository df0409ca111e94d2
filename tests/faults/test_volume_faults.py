"""Volumes on drives that are full, or that go away while they are used."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import struct
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from deepnvme import FaultPlan, IOQueue, NVMeError, Requests
from deepnvme.errors import VolumeError
from deepnvme.volume.member import MemberFile
from deepnvme.volume.volume import Member, Volume
from support.nvme_disks import DiskUnavailableError, loop_ext4, tmpfs
from support.nvme_io import TIMEOUT_S, assert_same, pattern

MIB = 1 << 20
BACKEND = "threads"
SHUT_DOWN = 0x8004587D  # FS_IOC_SHUTDOWN
WITHOUT_LOG = 2


@pytest.fixture(autouse=True)
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no profile of this machine decide what is tested."""
    monkeypatch.setenv("DEEPNVME_PROFILE", "")


@pytest.fixture
def queue() -> Iterator[IOQueue]:
    with IOQueue(BACKEND) as queue:
        yield queue


@pytest.fixture(scope="module", params=["tmpfs", "ext4"])
def small_disk(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Yield a file system with room for less than 10 MiB."""
    folder = tmp_path_factory.mktemp("small")
    with ExitStack() as stack:
        try:
            make = {
                "tmpfs": lambda: tmpfs(folder, 10 * MIB),
                "ext4": lambda: loop_ext4(folder, 10 * MIB),
            }
            yield stack.enter_context(make[request.param]())
        except DiskUnavailableError as refusal:
            pytest.skip(str(refusal))


@pytest.mark.parametrize("make", [Volume.create, Volume.temporary])
@pytest.mark.parametrize("rates", [(1.0, 1.0), (None, None)], ids=["given", "measured"])
def test_a_drive_without_room_is_told_when_the_volume_is_made_and_nothing_is_left(
    tmp_path: Path, small_disk: Path, queue: IOQueue, make: Any, rates: tuple[float | None, ...]
) -> None:
    places = (
        (tmp_path, small_disk)
        if make == Volume.temporary
        else (tmp_path / "large", small_disk / "small")
    )
    before, free = sorted(os.listdir(small_disk)), shutil.disk_usage(small_disk).free
    specs = [
        Member(place, rate=rate, capacity=20 * MIB)
        for place, rate in zip(places, rates, strict=True)
    ]
    with pytest.raises(VolumeError, match="cannot be reserved here") as caught:
        make(specs, queue=queue)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.path.startswith(str(small_disk))
    assert "the file system is full" in str(caught.value)
    told = re.search(r"(\d+) B are free", str(caught.value))
    assert told is not None
    assert free - MIB / 4 < int(told[1]) <= free  # a new directory takes pages of its own
    assert not list(tmp_path.iterdir())
    assert sorted(os.listdir(small_disk)) == before


def test_a_full_drive_fails_no_write_into_what_was_reserved(
    small_disk: Path, queue: IOQueue
) -> None:
    data, back = pattern(4 * MIB, seed=1), bytearray(4 * MIB)
    with Volume.temporary([small_disk], 4 * MIB, queue=queue) as volume:
        filler = small_disk / "filler"
        with suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(MIB))
        try:
            extents = volume.allocate(len(data))
            for future in volume.pwrite(extents, data):
                future.result(TIMEOUT_S)
            volume.sync()
            for future in volume.pread(extents, back):
                future.result(TIMEOUT_S)
        finally:
            filler.unlink()
    assert_same(back, data)


@pytest.mark.parametrize("nth", range(1, 6))
def test_a_drive_that_fails_while_it_is_measured_leaves_nothing(tmp_path: Path, nth: int) -> None:
    with (
        IOQueue(BACKEND) as sound,
        IOQueue(BACKEND, faults=FaultPlan().fail(nth=nth)) as failing,
        pytest.raises(NVMeError, match="Input/output error") as caught,
    ):
        Volume.create(
            [Member(tmp_path / "0", queue=sound), Member(tmp_path / "1", queue=failing)], 8 * MIB
        )
    assert caught.value.path == str(tmp_path / "1" / "data")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", ["open", "reserve_space", "write_header"])
@pytest.mark.parametrize("make", [Volume.create, Volume.temporary])
def test_a_volume_that_is_interrupted_while_it_is_made_leaves_nothing(
    tmp_path: Path, queue: IOQueue, monkeypatch: pytest.MonkeyPatch, make: Any, step: str
) -> None:
    calls = []

    def interrupted(*_: object) -> None:
        calls.append(step)
        raise KeyboardInterrupt

    places = [tmp_path, tmp_path] if make == Volume.temporary else [tmp_path / "0", tmp_path / "1"]
    monkeypatch.setattr(MemberFile, step, interrupted)
    with pytest.raises(KeyboardInterrupt):
        make([Member(place, rate=1.0) for place in places], MIB, queue=queue)
    assert calls == [step]
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_locks_is_named_and_left_empty(
    tmp_path: Path, queue: IOQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_locks(monkeypatch)
    with pytest.raises(VolumeError, match="No locks available") as caught:
        Volume.create([tmp_path / "0"], MIB, queue=queue)
    assert caught.value.path == str(tmp_path / "0")
    assert not list(tmp_path.iterdir())


def test_temporary_volume_works_on_a_file_system_without_locks(
    tmp_path: Path, queue: IOQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_locks(monkeypatch)
    with Volume.temporary([tmp_path], MIB, queue=queue) as volume:
        [writing] = volume.pwrite(volume.allocate(5), b"hello")
        assert writing.result(60) == 5


def refuse_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_descriptor: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_an_operation_on_a_member_lost_later_names_it_and_the_other_goes_on(tmp_path: Path) -> None:
    lost = FaultPlan().fail(probability=1.0, requests=Requests.READS)
    with (
        IOQueue(BACKEND) as sound,
        IOQueue(BACKEND, faults=lost) as failing,
        Volume.create(
            [
                Member(tmp_path / "0", queue=sound, rate=1.0),
                Member(tmp_path / "1", queue=failing, rate=1.0),
            ],
            8 * MIB,
        ) as volume,
    ):
        data, back = pattern(4 * MIB, seed=1), bytearray(4 * MIB)
        extents = volume.allocate(len(data))
        for future in volume.pwrite(extents, data):
            future.result(TIMEOUT_S)
        first, second = volume.pread(extents, back)
        assert first.result(TIMEOUT_S) == 2 * MIB
        error = second.exception(TIMEOUT_S)
    assert isinstance(error, NVMeError)
    assert (error.op, error.path, error.done) == ("read", str(tmp_path / "1" / "data"), 0)
    assert_same(back[: 2 * MIB], data[: 2 * MIB])


def test_a_file_system_that_goes_away_is_named_by_writes_and_by_sync(
    tmp_path: Path, queue: IOQueue
) -> None:
    with ExitStack() as stack:
        try:
            disk = stack.enter_context(loop_ext4(tmp_path, 32 * MIB))
        except DiskUnavailableError as refusal:
            pytest.skip(str(refusal))
        specs = [Member(tmp_path / "sound", rate=1.0), Member(disk / "lost", rate=1.0)]
        with Volume.create(specs, 16 * MIB, queue=queue) as volume:
            extents = volume.allocate(4 * MIB)
            shut_down(disk)
            first, second = volume.pwrite(extents, bytes(4 * MIB))
            assert first.result(TIMEOUT_S) == 2 * MIB
            error = second.exception(TIMEOUT_S)
            assert isinstance(error, NVMeError)
            assert (error.errno, error.path) == (errno.EIO, str(disk / "lost" / "data"))
            with pytest.raises(NVMeError) as caught:
                volume.sync()
            assert caught.value.path == str(disk / "lost" / "data")


def shut_down(disk: Path) -> None:
    """Let the file system fail everything from now on, as when its drive is pulled."""
    descriptor = os.open(disk, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, SHUT_DOWN, struct.pack("I", WITHOUT_LOG))
    except OSError as refusal:
        pytest.skip(f"this kernel does not shut file systems down: {refusal}")
    finally:
        os.close(descriptor)
