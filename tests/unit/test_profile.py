"""The settings of a drive: what wins, where the profile is, what becomes of a bad one, how a drive
is known again.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepnvme import IOQueue
from deepnvme.machine.profile import (
    PROFILE_VARIABLE,
    PROFILE_VERSION,
    Profile,
    ProfileError,
    ProfileWarning,
    Settings,
    UserMemory,
    drive_key,
    effective_settings,
    load_profile,
    profile_path,
    read_profile,
    write_profile,
)
from deepnvme.queue.queue import DriveStats
from support.kernel_files import fake_roots, mount_line

KIB, MIB = 1 << 10, 1 << 20
SMALL = Settings(64 * KIB, 128 * KIB, UserMemory.BOUNCE)
GOOD_ENTRY = {"chunk_bytes": 65536, "inflight_bytes": 131072, "user_memory": "bounce"}

SETTINGS = st.builds(
    lambda chunk, chunks, memory: Settings(chunk * 64 * KIB, chunk * chunks * 64 * KIB, memory),
    st.integers(1, 64),
    st.integers(1, 64),
    st.sampled_from(UserMemory),
)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where the profile file of this test is to be."""
    path = tmp_path / "settings" / "profile.json"
    path.parent.mkdir()
    monkeypatch.setenv("DEEPNVME_PROFILE", str(path))
    return path


def written(file: Path, **changed: Any) -> Path:
    """Write a profile with one drive, with some of its fields changed."""
    file.write_text(
        json.dumps({"version": PROFILE_VERSION, "drives": {"serial 1": GOOD_ENTRY}, **changed})
    )
    return file


# --- what wins ------------------------------------------------------------------------------------


@given(measured=SETTINGS)
def test_who_asks_for_nothing_gets_what_was_measured(measured: Settings) -> None:
    assert effective_settings(measured) == measured


def test_where_nothing_was_measured_the_defaults_hold() -> None:
    assert effective_settings(None) == Settings()


@given(measured=st.none() | SETTINGS, asked=SETTINGS)
def test_what_is_asked_for_wins(measured: Settings | None, asked: Settings) -> None:
    settled = effective_settings(
        measured,
        chunk_bytes=asked.chunk_bytes,
        inflight_bytes=asked.inflight_bytes,
        user_memory=asked.user_memory,
    )

    assert settled == asked


@given(measured=SETTINGS)
def test_chunk_and_bytes_in_flight_are_taken_together(measured: Settings) -> None:
    usual = Settings()

    assert effective_settings(measured, chunk_bytes=64 * KIB) == Settings(
        64 * KIB, usual.inflight_bytes, measured.user_memory
    )
    assert effective_settings(measured, inflight_bytes=64 * MIB) == Settings(
        usual.chunk_bytes, 64 * MIB, measured.user_memory
    )
    assert (
        effective_settings(measured, user_memory=UserMemory.BOUNCE).chunk_bytes
        == measured.chunk_bytes
    )


@pytest.mark.parametrize("wrong", [Settings(1000, MIB), Settings(0, MIB), Settings(MIB, 64 * KIB)])
def test_settings_that_make_no_sense_are_refused(wrong: Settings) -> None:
    with pytest.raises(ValueError, match=r"chunk_bytes must be|must hold one chunk"):
        wrong.native()


# --- where the file is ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HOME": "/home/ada"}, "/home/ada/.config/deepnvme/profile.json"),
        ({"HOME": "/home/ada", "XDG_CONFIG_HOME": "/etc/ada"}, "/etc/ada/deepnvme/profile.json"),
        (
            {"HOME": "/home/ada", "XDG_CONFIG_HOME": "not/absolute"},
            "/home/ada/.config/deepnvme/profile.json",
        ),
        ({"HOME": "/home/ada", "XDG_CONFIG_HOME": ""}, "/home/ada/.config/deepnvme/profile.json"),
        ({"HOME": "/home/ada", "DEEPNVME_PROFILE": "/srv/drives.json"}, "/srv/drives.json"),
        ({"HOME": "/home/ada", "DEEPNVME_PROFILE": ""}, None),
    ],
)
def test_the_file_is_where_the_environment_says(
    environment: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOME", "XDG_CONFIG_HOME", "DEEPNVME_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert profile_path() == (None if expected is None else Path(expected))


def test_a_user_without_a_home_has_no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CONFIG_HOME", "DEEPNVME_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))

    assert profile_path() is None
    assert not load_profile().drives


def test_no_file_in_the_usual_place_is_no_reason_to_warn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DEEPNVME_PROFILE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    assert not load_profile().drives


def test_a_file_that_the_environment_names_and_that_is_missing_is_told(file: Path) -> None:
    with pytest.warns(ProfileWarning, match="no such file, and DEEPNVME_PROFILE names it"):
        load_profile()


# --- written and read -----------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)  # each example waits for the drive
@given(drives=st.dictionaries(st.text(max_size=20), SETTINGS, max_size=5))
def test_what_is_written_is_read_again(
    drives: dict[str, Settings], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("profile") / "new" / "profile.json"
    for key, wanted in drives.items():
        write_profile(file, key, wanted, {"date": "2026-11-21"})

    assert read_profile(file).drives == drives


def test_a_drive_measured_again_replaces_only_itself(file: Path) -> None:
    write_profile(file, "serial 1", Settings(), {"note": "of the first"})
    write_profile(file, "serial 2", Settings(), {})
    write_profile(file, "serial 2", SMALL, {})

    assert read_profile(file).drives == {"serial 1": Settings(), "serial 2": SMALL}
    assert json.loads(file.read_text())["drives"]["serial 1"]["measured"] == {
        "note": "of the first"
    }


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = written(file).read_bytes()

    def full(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        write_profile(file, "serial 2", Settings(), {})

    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


def test_a_file_that_is_a_link_stays_one(file: Path) -> None:
    real = file.with_name("real.json")
    file.symlink_to(real)

    write_profile(file, "serial 1", SMALL, {})

    assert file.is_symlink()
    assert read_profile(real).drives == {"serial 1": SMALL}


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"version": 2}', '{"version": 1}'])
def test_a_file_that_is_no_profile_is_never_written_over(text: str, file: Path) -> None:
    file.write_text(text)

    with pytest.raises(ProfileError):
        write_profile(file, "serial 1", Settings(), {})

    assert file.read_text() == text


# --- a bad file -----------------------------------------------------------------------------------

BAD = {
    "empty": "",
    "cut off": '{"version": 1, "drives"',
    "binary": "\udcff\udcfe\x00",
    "deep": "[" * 100_000,
    "a list": "[]",
    "a number": "1",
    "without version": '{"drives": {}}',
    "of version 0": '{"version": 0, "drives": {}}',
    "of version 'one'": '{"version": "one", "drives": {}}',
    "newer": '{"version": 2, "disks": []}',
    "without drives": '{"version": 1}',
    "drives a list": '{"version": 1, "drives": []}',
}
BAD_ENTRIES: dict[str, Any] = {
    "no object": [65536, 131072, "bounce"],
    "empty": {},
    "without memory": {"chunk_bytes": 65536, "inflight_bytes": 131072},
    "unknown memory": {**GOOD_ENTRY, "user_memory": "teleport"},
    "memory a number": {**GOOD_ENTRY, "user_memory": 1},
    "chunk text": {**GOOD_ENTRY, "chunk_bytes": "1MiB"},
    "chunk a fraction": {**GOOD_ENTRY, "chunk_bytes": 65536.5},
    "chunk negative": {**GOOD_ENTRY, "chunk_bytes": -65536},
    "chunk huge": {**GOOD_ENTRY, "chunk_bytes": 1 << 70},
    "chunk odd": {**GOOD_ENTRY, "chunk_bytes": 1000},
    "chunk beyond what is in flight": {**GOOD_ENTRY, "chunk_bytes": 262144},
    "null": {**GOOD_ENTRY, "inflight_bytes": None},
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_one_line_of_warning_and_no_error(
    kind: str, file: Path, tmp_path: Path
) -> None:
    file.write_bytes(os.fsencode(BAD[kind]))

    assert_one_line_is_told_and_io_works(file, tmp_path)


@pytest.mark.parametrize("kind", BAD_ENTRIES)
def test_bad_settings_are_one_line_of_warning_and_no_error(
    kind: str, file: Path, tmp_path: Path
) -> None:
    written(file, drives={"serial 1": GOOD_ENTRY, "serial 2": BAD_ENTRIES[kind]})

    told = assert_one_line_is_told_and_io_works(file, tmp_path)

    assert "'serial 2'" in told


def test_a_file_that_cannot_be_read_is_one_line_of_warning_and_no_error(
    file: Path, tmp_path: Path
) -> None:
    file.mkdir()

    assert "cannot be read" in assert_one_line_is_told_and_io_works(file, tmp_path)


@pytest.mark.parametrize("place", ["pipe", "/dev/full"])
def test_a_device_or_pipe_is_not_read(place: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    # In a process of its own, which can be ended where it reads without end.
    done = subprocess.run(
        [sys.executable, "-c", "import deepnvme; deepnvme.IOQueue().close()"],
        env={**os.environ, PROFILE_VARIABLE: str(tmp_path / place)},
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30)),
    )

    assert done.returncode == 0
    assert f"{tmp_path / place} is ignored: it cannot be read, as it is no regular file" in (
        done.stderr
    )


def assert_one_line_is_told_and_io_works(file: Path, tmp_path: Path) -> str:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with IOQueue("threads") as queue, queue.open(tmp_path / "data", "w") as data:
            assert data.pwrite(b"x" * 5000).result() == 5000
    [warning] = told
    message = str(warning.message)
    assert warning.category is ProfileWarning
    assert warning.filename == __file__
    assert message.startswith(f"{file} is ignored: ")
    assert "\n" not in message
    return message


def test_a_newer_file_says_what_to_do(file: Path) -> None:
    written(file, version=PROFILE_VERSION + 1)

    with pytest.raises(
        ProfileError, match=r"of version 2, and this deepnvme reads up to 1; update deepnvme"
    ):
        read_profile(file)


def test_fields_of_no_meaning_are_left_alone(file: Path) -> None:
    written(file, drives={"serial 1": {**GOOD_ENTRY, "comment": "fast"}}, author="ada")

    assert read_profile(file).drives == {"serial 1": SMALL}


# --- which drive ----------------------------------------------------------------------------------

NVME = "devices/pci/nvme/nvme0/nvme0n1"


def roots_with(
    top: Path, place: Path, files: dict[str, str], *, device: str = "259:1", name: str = NVME
) -> Any:
    """Return a /proc and a /sys in which `place` is mounted from a block device that has these
    files.
    """
    lines = mount_line("/", "overlay") + mount_line(place, "ext4", device=device, source="/dev/x")
    roots = fake_roots(
        top,
        proc={"self/mountinfo": lines},
        sys={f"{name}/{file}": text for file, text in files.items()},
    )
    link = roots.sys / "dev/block" / device
    link.parent.mkdir(parents=True)
    link.symlink_to(roots.sys / name)
    return roots


@pytest.mark.parametrize(
    ("files", "key"),
    [
        ({"wwid": "eui.0025385\n", "device/serial": "S1\n"}, "wwid eui.0025385"),
        ({"device/wwid": "naa.5002538\n", "serial": ""}, "device/wwid naa.5002538"),
        (
            {"device/wwid": "t10.ATA     Imaginary SSD       S2\n"},
            "device/wwid t10.ATA Imaginary SSD S2",
        ),
        ({"serial": "vol0123\n"}, "serial vol0123"),
        ({"device/serial": "  S3 \n"}, "device/serial S3"),
        ({"dm/uuid": "LVM-abc\n"}, "dm/uuid LVM-abc"),
    ],
)
def test_a_drive_is_known_by_what_it_calls_itself(
    files: dict[str, str], key: str, tmp_path: Path
) -> None:
    roots = roots_with(tmp_path / "kernel", tmp_path, files)

    assert drive_key(tmp_path, roots) == key


def test_a_partition_is_known_as_its_drive(tmp_path: Path) -> None:
    files = {"partition": "1\n", "wwid": "of the partition\n", "../wwid": "eui.1\n"}
    (tmp_path / "kernel/sys" / NVME / "nvme0n1p1").mkdir(parents=True)

    roots = roots_with(tmp_path / "kernel", tmp_path, files, name=f"{NVME}/nvme0n1p1")

    assert drive_key(tmp_path, roots) == "wwid eui.1"


def test_a_drive_without_a_name_is_known_by_its_file_system_and_mount_point(tmp_path: Path) -> None:
    roots = roots_with(tmp_path / "kernel", tmp_path, {"size": "2048\n"})

    assert (
        drive_key(tmp_path, roots)
        == f"file system {os.statvfs(tmp_path).f_fsid:016x} at {tmp_path}"
    )


def test_a_file_and_one_to_be_made_are_on_the_drive_of_their_directory(tmp_path: Path) -> None:
    (tmp_path / "there").touch()

    assert (
        drive_key(tmp_path / "there") == drive_key(tmp_path / "to be made") == drive_key(tmp_path)
    )


def test_a_path_that_leads_nowhere_has_no_settings(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)

    profile = Profile({drive_key(tmp_path): SMALL})

    assert profile.for_path(tmp_path / "to be made") == SMALL
    assert profile.for_path(tmp_path / "no" / "such" / "directory") is None
    assert profile.for_path(loop) is None


# --- a queue picks it up --------------------------------------------------------------------------


def done_with(folder: Path, backend: str = "threads", **asked: Any) -> DriveStats:
    """Write 1 MiB of page-aligned memory through a queue and return what its drive did."""
    room = np.zeros(MIB + 4096, np.uint8)
    start = -room.ctypes.data % 4096
    with IOQueue(backend, **asked) as queue:
        with queue.open(folder / "data", "w") as file:
            file.pwrite(room[start : start + MIB]).result()
        [drive] = queue.stats().drives.values()
    return drive


def test_a_queue_uses_what_was_measured_of_the_drive(file: Path, tmp_path: Path) -> None:
    write_profile(file, drive_key(tmp_path), SMALL, {})

    drive = done_with(tmp_path)

    assert drive.chunks == MIB // SMALL.chunk_bytes
    assert drive.peak_inflight_bytes <= SMALL.inflight_bytes
    assert drive.bounced_bytes == MIB


def test_a_queue_uses_the_defaults_on_other_drives(file: Path, tmp_path: Path) -> None:
    write_profile(file, "serial of another drive", SMALL, {})

    drive = done_with(tmp_path)

    assert drive.chunks == MIB // Settings().chunk_bytes
    assert drive.bounced_bytes == 0


def test_what_a_queue_is_told_wins_over_the_profile(file: Path, tmp_path: Path) -> None:
    write_profile(file, drive_key(tmp_path), SMALL, {})

    drive = done_with(tmp_path, chunk_bytes=MIB // 2, user_memory=UserMemory.ZERO_COPY)

    assert drive.chunks == 2
    assert drive.bounced_bytes == 0


def test_a_drive_may_have_more_in_flight_than_the_queue_by_default(
    file: Path, tmp_path: Path
) -> None:
    many = Settings(64 * KIB, 64 * MIB)
    write_profile(file, drive_key(tmp_path), many, {})

    assert done_with(tmp_path).chunks == MIB // many.chunk_bytes


def test_files_in_memory_are_on_no_drive(file: Path, tmp_path: Path) -> None:
    write_profile(file, drive_key(tmp_path), SMALL, {})

    assert done_with(tmp_path, "memory").chunks == MIB // Settings().chunk_bytes


def test_a_queue_that_is_told_everything_reads_no_profile(file: Path, tmp_path: Path) -> None:
    file.write_text("not a profile")

    drive = done_with(
        tmp_path, chunk_bytes=64 * KIB, inflight_bytes=MIB, user_memory=UserMemory.ZERO_COPY
    )

    assert drive.chunks == 16


def test_settings_for_a_queue_that_make_no_sense_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="must hold one chunk"):
        IOQueue("threads", chunk_bytes=MIB, inflight_bytes=64 * KIB)
