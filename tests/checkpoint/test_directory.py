"""A checkpoint is there whole or not at all, and old ones go only when newer ones are there."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from infinity_engine.checkpoint import CheckpointDirectory, CheckpointReader
from infinity_engine.checkpoint import directory as directory_module
from infinity_engine.errors import ConfigError, IncompleteCheckpoint, TransferError
from support.nvme_disks import DiskUnavailableError, loop_ext4
from support.saved_streams import parameters_of, save, values_of

PARAMETERS = parameters_of({"weight": (300, 1000), "bias": (1000,)})


def first_values(path: Path) -> float:
    """Read all of a checkpoint; return its first element."""
    with CheckpointReader(path) as reader:
        assert list(reader.verify()) == []
        found = np.empty(300_000, np.float32)
        reader.read(reader.manifest.tensor("weight").stream("master"), 0, found)
    return float(found[0])


def test_the_newest_checkpoint_is_the_latest(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    assert directory.latest() is None
    for step in (1, 2):
        save(tmp_path, f"step-{step}", PARAMETERS, values_of(PARAMETERS, step), step=step)
    assert directory.latest() == "step-2"
    assert directory.tags() == ["step-1", "step-2"]
    assert directory.resolve() == tmp_path / "step-2"
    assert directory.resolve("step-1") == tmp_path / "step-1"


@pytest.mark.parametrize("content", ["", "step-9\n", "../../etc\n", "\x00\xff", "x" * 5000])
def test_a_damaged_pointer_does_not_hide_checkpoints(tmp_path: Path, content: str) -> None:
    save(tmp_path, "step-1", PARAMETERS, values_of(PARAMETERS), step=1)
    (tmp_path / "latest").write_text(content)
    assert CheckpointDirectory(tmp_path).latest() == "step-1"
    (tmp_path / "latest").unlink()
    assert CheckpointDirectory(tmp_path).latest() == "step-1"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_a_pointer_that_is_no_regular_file_does_not_hide_checkpoints(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    save(tmp_path, "step-1", PARAMETERS, values_of(PARAMETERS), step=1)
    (tmp_path / "latest").unlink()
    make(tmp_path / "latest")
    assert CheckpointDirectory(tmp_path).latest() == "step-1"


def test_a_run_that_went_back_keeps_its_newer_checkpoints(tmp_path: Path) -> None:
    values = values_of(PARAMETERS)
    for hour, step in enumerate((200, 300, 150, 160)):  # it went back to one of step 100
        created = f"2026-01-01T{hour:02}:00:00.000000+00:00"
        save(tmp_path, f"step-{step}", PARAMETERS, values, step=step, created=created)
    directory = CheckpointDirectory(tmp_path)
    (tmp_path / "latest").unlink()
    assert directory.latest() == "step-160"
    assert directory.retire(2) == ["step-200", "step-300"]
    assert directory.tags() == ["step-150", "step-160"]


def test_a_step_that_was_saved_before_gets_another_tag(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    assert directory.free_tag("step-1") == "step-1"
    for tag in ("step-1", "step-1.2"):
        assert directory.free_tag("step-1") == tag
        save(tmp_path, tag, PARAMETERS, values_of(PARAMETERS), step=1)
    assert directory.free_tag("step-1") == "step-1.3"


def test_directories_that_a_save_makes_survive_a_power_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(directory_module, "sync_directory", synced.append)
    CheckpointDirectory(tmp_path / "runs" / "mine").begin("one")
    assert synced == [tmp_path / "runs", tmp_path]


def test_a_tag_that_exists_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    save(tmp_path, "mine", PARAMETERS, values_of(PARAMETERS))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="tag"):
        CheckpointDirectory(tmp_path).begin("mine")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "tag", ["", "latest", "../up", "a/b", ".hidden", "-flag", "x" * 129, "a\nb"]
)
def test_a_tag_that_is_no_plain_name_is_refused(tmp_path: Path, tag: str) -> None:
    with pytest.raises(ConfigError, match="tag"):
        CheckpointDirectory(tmp_path / "new").begin(tag)
    assert not (tmp_path / "new").exists()


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(IncompleteCheckpoint, match="any checkpoint"):
        CheckpointDirectory(tmp_path).resolve()
    with pytest.raises(IncompleteCheckpoint, match="step-5"):
        CheckpointDirectory(tmp_path).resolve("step-5")


def test_retiring_keeps_the_newest_by_what_they_say_of_themselves(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    for step in (3, 1, 2, 4):  # as files that were copied in another order
        save(tmp_path, f"s{step}", PARAMETERS, values_of(PARAMETERS, step), step=step)
    assert directory.retire(2) == ["s1", "s2"]
    assert directory.tags() == ["s3", "s4"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "s3", "s4"]


def test_retiring_never_removes_the_latest_or_what_it_cannot_read(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, f"s{step}", PARAMETERS, values_of(PARAMETERS, step), step=step)
    (tmp_path / "latest").write_text("s1\n")
    (tmp_path / "s2" / "manifest").write_bytes(b"damaged")
    assert CheckpointDirectory(tmp_path).retire(0) == ["s3"]
    assert CheckpointDirectory(tmp_path).tags() == ["s2", "s1"]


def test_what_killed_runs_left_goes_with_the_next_save_and_nothing_else(tmp_path: Path) -> None:
    for name in (".old.writing", ".old.removing", ".mine", "notes", ".cache"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").write_text("kept")
    (tmp_path / ".link.writing").symlink_to(tmp_path / "elsewhere")
    save(tmp_path, "tag", PARAMETERS, values_of(PARAMETERS))
    left = {entry.name for entry in tmp_path.iterdir()}
    assert left == {".mine", "notes", ".cache", "elsewhere", ".link.writing", "tag", "latest"}
    assert (tmp_path / "elsewhere" / "kept").read_text() == "kept"


def test_a_draft_that_is_still_being_written_is_left_alone(tmp_path: Path) -> None:
    writing, other = CheckpointDirectory(tmp_path), CheckpointDirectory(tmp_path)
    draft = writing.begin("first")
    (draft / "rank-00000-00000.safetensors").write_bytes(b"bytes")
    other.begin("second")
    assert [entry.name for entry in draft.iterdir()] == ["rank-00000-00000.safetensors"]
    assert other.free_tag("first") == "first.2"
    with pytest.raises(ConfigError, match="no other save is writing"):
        other.begin("first")
    descriptors = len(os.listdir("/proc/self/fd"))
    writing.abandon("first")
    other.abandon("second")
    assert len(os.listdir("/proc/self/fd")) == descriptors - 2
    other.begin("first")
    other.abandon("first")


def together(count: int, act: Callable[[int], object]) -> None:
    """Let so many threads act at once; raise what one of them raised."""
    ready = threading.Barrier(count)

    def acts(number: int) -> object:
        ready.wait(60)
        return act(number)

    with ThreadPoolExecutor(count) as threads:
        for done in [threads.submit(acts, number) for number in range(count)]:
            done.result(60)


@pytest.mark.parametrize("step", range(10))
def test_saves_of_one_step_that_begin_at_once_get_different_tags(tmp_path: Path, step: int) -> None:
    tags: list[str] = []
    saves = [CheckpointDirectory(tmp_path) for _ in range(8)]
    together(8, lambda number: tags.append(saves[number].begin_step(step)))
    assert len({*tags}) == 8
    for tag in tags:
        assert (tmp_path / f".{tag}.writing").is_dir()


def test_saves_that_commit_and_remove_at_once_are_all_whole(tmp_path: Path) -> None:
    values = values_of(PARAMETERS)

    def saves(number: int) -> None:
        for step in range(6):
            save(tmp_path, f"s{number}-{step}", PARAMETERS, values, step=step)
            CheckpointDirectory(tmp_path).retire(3)

    together(6, saves)
    directory = CheckpointDirectory(tmp_path)
    assert len(directory.tags()) <= 4  # the latest stays beside the three that are newest
    named = (tmp_path / "latest").read_text().strip()
    assert directory.latest() == named
    for tag in directory.tags():
        first_values(tmp_path / tag)
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


def test_a_save_that_was_stopped_does_not_stop_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_module, "_TURN_S", 0.05)
    stopped = CheckpointDirectory(tmp_path)
    with stopped._turn():
        CheckpointDirectory(tmp_path).begin("mine")
    assert (tmp_path / ".mine.writing").is_dir()


def test_an_abandoned_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    draft = directory.begin("tag")
    (draft / "rank-00000-00000.safetensors").write_bytes(b"half")
    directory.abandon("tag")
    assert list(tmp_path.iterdir()) == []


SAVER = """
import sys
from pathlib import Path
from infinity_engine.checkpoint import CheckpointDirectory
from support.saved_streams import parameters_of, save, values_of

path, first = Path(sys.argv[1]), int(sys.argv[2])
parameters = parameters_of({"weight": (300, 1000), "bias": (1000,)})
for step in range(first, first + 1000):
    values = values_of(parameters)
    values["weight", "master"][0] = step
    save(path, f"step-{step}", parameters, values, step=step, ranks=2, file_bytes=1 << 20)
    print(step, flush=True)
    CheckpointDirectory(path).retire(2)
"""


def long_run(few: int, many: int) -> list[object]:
    """Return the parameters of a test that is short by default."""
    return [few, pytest.param(many, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]


@pytest.mark.parametrize("rounds", long_run(6, 200))
def test_a_save_that_is_killed_at_any_instant_loses_no_commit(tmp_path: Path, rounds: int) -> None:
    chosen = random.Random(rounds)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    at = 1
    for _ in range(rounds):
        saver = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(tmp_path), str(at)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert saver.stdout is not None
        told = [saver.stdout.readline()]
        time.sleep(chosen.random() * 0.3)
        saver.send_signal(signal.SIGKILL)
        told += saver.stdout.read().split("\n")
        saver.wait()
        saver.stdout.close()
        committed = max(int(line) for line in told if line.strip())
        directory = CheckpointDirectory(tmp_path)
        latest = directory.latest()
        assert latest is not None
        step = int(latest.removeprefix("step-"))
        # the one after it may have been committed and not told
        assert step in (committed, committed + 1)
        assert first_values(directory.resolve()) == step
        for tag in directory.tags():
            assert first_values(tmp_path / tag) == int(tag.removeprefix("step-"))
        at = max(int(tag.removeprefix("step-")) for tag in directory.tags()) + 1


def test_a_full_drive_fails_the_save_and_keeps_what_was_committed(tmp_path: Path) -> None:
    try:
        with loop_ext4(tmp_path, 16 << 20) as mount:
            save(mount, "one", PARAMETERS, values_of(PARAMETERS, 1), step=1)
            large = parameters_of({"weight": (8000, 1000)})
            with pytest.raises(TransferError, match="No space left") as failure:
                save(mount, "two", large, values_of(large), step=2)
            assert failure.value.errno == errno.ENOSPC
            directory = CheckpointDirectory(mount)
            assert directory.latest() == "one"
            first_values(directory.resolve())
            # what was left made way
            save(mount, "three", PARAMETERS, values_of(PARAMETERS, 3), step=3)
            assert directory.tags() == ["one", "three"]
    except DiskUnavailableError as reason:
        pytest.skip(str(reason))


def test_a_directory_called_latest_refuses_a_save_before_it_is_there(tmp_path: Path) -> None:
    save(tmp_path, "a", PARAMETERS, values_of(PARAMETERS, 1))
    (tmp_path / "latest").unlink()
    shutil.copytree(tmp_path / "a", tmp_path / "latest")

    with pytest.raises(ConfigError, match="move this directory away"):
        save(tmp_path, "b", PARAMETERS, values_of(PARAMETERS, 2))
    assert CheckpointDirectory(tmp_path).tags() == ["a"]
