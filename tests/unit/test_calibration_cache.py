"""What was measured is kept for the machine and the directory that it was measured of, and for no
other.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from infinity_engine.calibration.cache import CalibrationCache, CalibrationWarning, cache_folder
from infinity_engine.plan.calibration import CALIBRATION_VERSION
from support.calibrations import calibration, drive

MACHINE = dict(calibration().machine)
DRIVE = dict(drive().drive)


@pytest.fixture
def cache(tmp_path: Path) -> CalibrationCache:
    return CalibrationCache(tmp_path / "cache")


# --- where it is ---


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        (
            {"HOME": "/home/ada", "XDG_CACHE_HOME": "/var/ada"},
            "/var/ada/infinity_engine/calibration",
        ),
        (
            {"HOME": "/home/ada", "XDG_CACHE_HOME": "not/absolute"},
            "/home/ada/.cache/infinity_engine/calibration",
        ),
        (
            {"HOME": "/home/ada", "XDG_CACHE_HOME": ""},
            "/home/ada/.cache/infinity_engine/calibration",
        ),
        ({"HOME": "/home/ada"}, "/home/ada/.cache/infinity_engine/calibration"),
    ],
)
def test_the_folder_is_that_of_the_desktop_standard(
    environment: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert cache_folder() == Path(folder)


def test_without_a_home_nothing_is_kept_and_nothing_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    cache = CalibrationCache.of_user()

    cache.keep_machine(calibration())
    with cache.alone():
        assert cache.machine(MACHINE) is None


# --- what is found ---


def test_what_was_kept_is_found_again_the_machine_and_each_directory_on_its_own(
    cache: CalibrationCache,
) -> None:
    cache.keep_machine(calibration())
    cache.keep_drive(MACHINE, drive())

    assert cache.machine(MACHINE) == calibration().with_drives({})
    assert cache.drive(MACHINE, DRIVE) == drive()


@pytest.mark.parametrize("changed", [{**MACHINE, "cores": "8"}, {**MACHINE, "kernel": "7.0"}, {}])
def test_what_was_measured_of_another_machine_is_not_found(
    changed: dict[str, str], cache: CalibrationCache
) -> None:
    cache.keep_machine(calibration())
    cache.keep_drive(MACHINE, drive())

    assert cache.machine(changed) is None
    assert cache.drive(changed, DRIVE) is None


def test_what_was_measured_of_another_drive_is_not_found(cache: CalibrationCache) -> None:
    cache.keep_drive(MACHINE, drive())

    assert cache.drive(MACHINE, {"drive": "serial 2"}) is None


def test_several_machines_with_one_home_keep_theirs_beside_one_another(
    cache: CalibrationCache,
) -> None:
    other = dataclasses.replace(calibration(), machine={**MACHINE, "cores": "8"}, date="later")

    cache.keep_machine(calibration())
    cache.keep_machine(other)

    assert cache.machine(MACHINE) == calibration().with_drives({})
    assert cache.machine({**MACHINE, "cores": "8"}) == other.with_drives({})


def test_what_is_measured_again_takes_the_place_of_what_was_kept(cache: CalibrationCache) -> None:
    cache.keep_machine(calibration())
    cache.keep_machine(dataclasses.replace(calibration(), date="later"))

    found = cache.machine(MACHINE)
    assert found is not None
    assert found.date == "later"
    assert cache.folder is not None
    assert len(list(cache.folder.iterdir())) == 1


def test_only_what_is_kept_as_it_was_measured_is_held(cache: CalibrationCache) -> None:
    cache.keep_machine(calibration())
    cache.keep_drive(MACHINE, drive())

    assert cache.holds(calibration().with_drives({"/mnt/a": drive()}))
    assert not cache.holds(dataclasses.replace(calibration(), date="later").with_drives({}))
    assert not cache.holds(
        calibration().with_drives({"/mnt/a": dataclasses.replace(drive(), drive={"drive": "2"})})
    )
    assert not CalibrationCache(None).holds(calibration())


# --- what is wrong with a file ---


def truncated(path: Path) -> None:
    path.write_text(path.read_text()[:-100])


def empty(path: Path) -> None:
    path.write_text("")


def not_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")


def a_list(path: Path) -> None:
    path.write_text("[1]")


def deep(path: Path) -> None:
    path.write_text("[" * 100_000)


def of_another_version(path: Path) -> None:
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "version": CALIBRATION_VERSION + 1})
    )


def of_another_machine(path: Path) -> None:
    document = json.loads(path.read_text())
    part = document.get("calibration", document)
    part["machine"]["cpu"] = "another"
    path.write_text(json.dumps(document))


def without_figures(path: Path) -> None:
    path.write_text(json.dumps({"version": 1, "machine": MACHINE}))


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "spoil",
    [
        truncated,
        empty,
        not_text,
        a_list,
        deep,
        of_another_version,
        of_another_machine,
        without_figures,
        a_folder,
    ],
)
def test_a_file_that_cannot_be_used_is_told_and_counts_as_not_there(
    spoil: Callable[[Path], None], cache: CalibrationCache
) -> None:
    cache.keep_machine(calibration())
    cache.keep_drive(MACHINE, drive())
    assert cache.folder is not None
    for path in cache.folder.iterdir():
        spoil(path)

    with pytest.warns(
        CalibrationWarning, match=r"machine-\w+\.json is not used: .*It is measured again"
    ):
        assert cache.machine(MACHINE) is None
    with pytest.warns(
        CalibrationWarning, match=r"drive-\w+\.json is not used: .*It is measured again"
    ):
        assert cache.drive(MACHINE, DRIVE) is None


def test_a_folder_that_cannot_be_made_is_told_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = CalibrationCache(tmp_path / "file" / "cache")

    with pytest.warns(CalibrationWarning, match=r"cannot be kept in .*set XDG_CACHE_HOME"):
        cache.keep_machine(calibration())
    with cache.alone():  # no lock either, and no complaint
        pass


# --- several processes ---


def write_often(folder: Path, number: int) -> int:
    """Keep calibrations with different dates, and read; every one that is found has to be whole."""
    cache = CalibrationCache(folder)
    found = 0
    for step in range(30):
        cache.keep_machine(dataclasses.replace(calibration(), date=f"{number}.{step}"))
        read = cache.machine(MACHINE)
        found += read is not None and dataclasses.replace(read, date="") == dataclasses.replace(
            calibration().with_drives({}), date=""
        )
    return found


def test_what_several_processes_write_at_once_is_whole_at_any_time(tmp_path: Path) -> None:
    with ProcessPoolExecutor(3, get_context("spawn")) as processes:
        found = list(processes.map(write_often, [tmp_path] * 3, range(3)))

    assert found == [30, 30, 30]
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def stay_alone(folder: Path, log: Path) -> None:
    with CalibrationCache(folder).alone():
        for line in ("in", "out"):
            with log.open("a") as file:
                file.write(f"{os.getpid()} {line}\n")
            time.sleep(0.05)


def test_one_process_at_a_time_is_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with ProcessPoolExecutor(3, get_context("spawn")) as processes:
        list(processes.map(stay_alone, [tmp_path / "cache"] * 6, [log] * 6))

    lines = [line.split() for line in log.read_text().splitlines()]
    for (one, came), (other, left) in zip(lines[::2], lines[1::2], strict=True):
        assert (one, came, left) == (other, "in", "out")


def test_whoever_has_to_wait_is_told_so(cache: CalibrationCache) -> None:
    waits = threading.Event()
    entered = threading.Event()

    def second() -> None:
        with cache.alone(waits.set):
            entered.set()

    with ThreadPoolExecutor(1) as executor:
        with cache.alone(lambda: pytest.fail("nobody is there yet")):
            future = executor.submit(second)
            assert waits.wait(30)
            assert not entered.is_set()
        future.result(30)


def test_a_body_that_fails_leaves_no_lock(cache: CalibrationCache) -> None:
    with pytest.raises(OSError, match="the drive is gone"), cache.alone():
        raise OSError("the drive is gone")
    with cache.alone(lambda: pytest.fail("it is free")):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.warns(CalibrationWarning, match="cannot be kept"):
        CalibrationCache(tmp_path).keep_machine(calibration())
