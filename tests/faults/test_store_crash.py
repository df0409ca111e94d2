"""A `TensorStore` after a crash is its last commit or the one that was under way, whole: after
SIGKILL and power loss.

Power loss in two forms, both on a file system in a file and as root only. Shutting the file system
down loses what the kernel had not written yet. A copy of the file, taken while its writer is
stopped and the device is quiet, is what a drive would hold whose power fails then, everything that
it has taken being kept. What neither shows: a drive that loses or reorders what it had taken and
not yet flushed.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import random
import shutil
import signal
import struct
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from deepnvme import IOQueue
from deepnvme.errors import StoreError
from deepnvme.store.store import Durability, UncommittedWarning
from support.nvme_disks import DiskUnavailableError, loop_ext4
from support.store_history import Nursery, contents, make, opened, state_after, take_step

MIB = 1 << 20
SHUT_DOWN = 0x8004587D  # FS_IOC_SHUTDOWN
LOG_FLUSHED, LOG_LOST = 1, 2


@pytest.fixture(autouse=True)
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no profile of this machine decide what is tested."""
    monkeypatch.setenv("DEEPNVME_PROFILE", "")


@pytest.fixture
def queue() -> Iterator[IOQueue]:
    with IOQueue("threads") as queue:
        yield queue


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def long_run(few: int, many: int) -> list[object]:
    """Return the parameters of a test that is short by default."""
    return [few, pytest.param(many, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]


def judge(places: Sequence[Path], queue: IOQueue, done: int, begun: int) -> int:
    """Open the store; return its generation, its content having been seen to be that
    generation's.
    """
    with opened(places, queue) as store:
        assert done <= store.generation <= max(done, begun)
        assert contents(store) == state_after(store.generation - 1)
        assert store.verify() == ()
        return store.generation


# --- SIGKILL --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kills", long_run(50, 200))
def test_a_store_whose_writer_is_killed_is_at_its_last_commit_or_the_one_under_way(
    tmp_path: Path, queue: IOQueue, kills: int
) -> None:
    source = random.Random(kills)
    places = [tmp_path / "0", tmp_path / "1"]
    make(places, queue)
    last, within = 1, 0
    with Nursery(places) as writers:
        for _ in range(kills):
            writers.start()
            for _ in range(source.randint(1, 4)):
                writers.hear("begun")
            time.sleep(source.uniform(0, 0.01))
            writers.kill()
            within += writers.begun > writers.done
            last = judge(places, queue, max(last, writers.done), writers.begun)
    assert last > kills // 2
    assert within > 0


@pytest.mark.parametrize("points", long_run(40, 100_000))
def test_a_writer_that_dies_before_any_call_of_a_commit_leaves_one_of_the_two(
    tmp_path: Path, queue: IOQueue, points: int
) -> None:
    places = [tmp_path / "only"]
    make(places, queue)
    with Nursery(places) as writers:
        writers.start(die_at_call=1_000_000)
        writers.hear("calls")
        calls = writers.calls
        writers.kill()
        last = judge(places, queue, writers.done, writers.begun)
        ends = []
        for call in itertools.count(1, max(1, calls // points)):
            writers.start(die_at_call=call)
            writers.hear("dead")
            # its first commit has fewer calls than this: how many depends on what it waits for
            if writers.done:
                judge(places, queue, writers.done, writers.begun)
                break
            ends.append(judge(places, queue, last, writers.begun) - last)
            last += ends[-1]
    assert set(ends) == {0, 1}


# --- power loss -----------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path, stack: ExitStack) -> Path:
    """Return an ext4 of its own."""
    try:
        return stack.enter_context(loop_ext4(tmp_path, 64 * MIB))
    except DiskUnavailableError as refusal:
        pytest.skip(str(refusal))


def shut_down(disk: Path, how: int) -> None:
    """Let the file system lose what it has not written, and fail everything from now on."""
    descriptor = os.open(disk, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, SHUT_DOWN, struct.pack("I", how))
    except OSError as refusal:
        pytest.skip(f"this kernel does not shut file systems down: {refusal}")
    finally:
        os.close(descriptor)


def run(*command: object) -> str:
    environment = {**os.environ, "PATH": os.environ.get("PATH", os.defpath) + ":/sbin:/usr/sbin"}
    done = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=environment,
    )
    return done.stdout.strip()


def mount_again(disk: Path) -> None:
    device = device_of(disk)
    run("umount", disk)
    run("mount", "-t", "ext4", device, disk)


def device_of(disk: Path) -> str:
    (device,) = [
        line.split()[0]
        for line in Path("/proc/mounts").read_text().splitlines()
        if line.split()[1] == str(disk)
    ]
    return device


@pytest.mark.parametrize("how", [LOG_LOST, LOG_FLUSHED], ids=["log lost", "log flushed"])
def test_what_was_committed_is_there_after_power_loss_and_what_was_not_is_not(
    disk: Path, queue: IOQueue, how: int
) -> None:
    places = [disk / "0", disk / "1"]
    make(places, queue)
    generation = 1
    for turn in range(5):
        with opened(places, queue) as store:
            for _ in range(turn % 3 + 1):
                take_step(store, store.generation)
                generation = store.commit()
            take_step(store, store.generation)
            shut_down(disk, how)
            with pytest.raises(OSError, match="Input/output error"):
                store.commit()
        mount_again(disk)
        assert judge(places, queue, generation, generation) == generation


@pytest.mark.parametrize("rounds", long_run(6, 100))
def test_after_power_loss_at_any_moment_a_store_is_at_its_last_commit_or_the_one_under_way(
    disk: Path, rounds: int
) -> None:
    source = random.Random(rounds)
    places = [disk / "store"]
    with IOQueue("threads") as queue:
        make(places, queue)
    last = 1
    for _ in range(rounds):
        with IOQueue("threads") as queue:
            store = opened(places, queue)
            take_step(store, store.generation)
            last = store.commit()  # however slow the machine, there is one in each round
            loss = threading.Timer(source.uniform(0.01, 0.2), shut_down, (disk, LOG_LOST))
            loss.start()
            error = None
            while error is None:
                try:
                    take_step(store, store.generation)
                    last = store.commit()
                except OSError as loss_seen:
                    error = loss_seen
            loss.join()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UncommittedWarning)
                store.close()
        mount_again(disk)
        with IOQueue("threads") as queue:
            last = judge(places, queue, last, last + 1)
    assert last > rounds


@pytest.mark.parametrize("rounds", long_run(6, 20))
def test_after_power_loss_a_store_of_less_durability_is_at_one_of_its_last_two_commits_or_says_what_is_damaged(
    disk: Path, rounds: int
) -> None:
    places = [disk / "store"]
    with IOQueue("threads") as queue:
        make(places, queue)
    last = 1
    for turn in range(rounds):
        # in two sessions: the second may use the space that the first let go
        for commits in (3 + 5 * turn, 2):
            with (
                IOQueue("threads") as queue,
                opened(places, queue, durability=Durability.DATA) as store,
            ):
                for _ in range(commits):
                    take_step(store, store.generation)
                    last = store.commit()
                if commits == 2:
                    shut_down(disk, LOG_LOST)
        mount_again(disk)
        with IOQueue("threads") as queue:
            try:
                last = judge(places, queue, last - 1, last)
            except StoreError as refusal:
                assert f"manifest.{last % 2}: not a valid manifest" in str(refusal)  # noqa: PT017 - rare
                with opened(places, queue, generation=last - 1) as store:
                    assert contents(store) == state_after(last - 2)
                    last = store.generation


@pytest.mark.parametrize("rounds", long_run(6, 60))
def test_an_image_of_the_drive_at_any_moment_holds_the_last_commit_or_the_one_under_way(
    tmp_path: Path, disk: Path, queue: IOQueue, rounds: int
) -> None:
    source = random.Random(rounds)
    places = [disk / "store"]
    make(places, queue)
    within = 0
    with Nursery(places) as writers:
        writers.start()
        for number in range(20 * rounds):
            if number >= rounds and within:
                break  # which image is taken while a commit is under way is a matter of luck
            for _ in range(source.randint(1, 3)):
                writers.hear("begun")
            time.sleep(source.uniform(0, 0.02))
            image = tmp_path / "image of a crash"
            os.kill(writers.pid, signal.SIGSTOP)
            writers.hear_all()
            done = writers.done
            copy_while_quiet(disk, tmp_path / "image", image)
            writers.hear_all()
            begun = writers.begun
            os.kill(writers.pid, signal.SIGCONT)
            with mounted_image(image, tmp_path / f"crash {number}") as crashed:
                judge([crashed / "store"], queue, done, begun)
            within += begun > done
        writers.kill()
    assert within > 0


@pytest.mark.parametrize("step", range(1, 9))
def test_after_power_loss_while_it_grows_a_store_holds_what_it_held_and_can_be_used(
    disk: Path, queue: IOQueue, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    steps = itertools.count(1)

    def unless_power_is_lost(call: Callable[..., object]) -> Callable[..., object]:
        def called(*arguments: object) -> object:
            if next(steps) == step:
                shut_down(disk, LOG_LOST)
            return call(*arguments)

        return called

    places = [disk / "0", disk / "1"]
    make(places, queue)
    with opened(places, queue) as store:
        take_step(store, 1)
        store.commit()
        before = store.volume.capacities
        with monkeypatch.context() as patch:
            for name in ("posix_fallocate", "fsync", "pwrite"):  # twice for each of two drives
                patch.setattr(os, name, unless_power_is_lost(getattr(os, name)))
            with pytest.raises(OSError, match="Input/output error"):
                store.volume.grow(8 * MIB)
    mount_again(disk)
    assert judge(places, queue, 2, 2) == 2
    with opened(places, queue) as store:
        assert all(now >= then for now, then in zip(store.volume.capacities, before, strict=True))
        store.volume.grow(8 * MIB)
        take_step(store, 2)
        store.commit()
    assert judge(places, queue, 3, 3) == 3


def copy_while_quiet(disk: Path, image: Path, copy: Path) -> None:
    """Copy the file that the file system is in, at a time when nothing is written to it."""
    counts = Path("/sys/block") / Path(device_of(disk)).name / "stat"
    for _ in range(100):
        before = counts.read_text()
        if before.split()[8] == "0":  # in flight
            shutil.copyfile(image, copy)
            if counts.read_text() == before:
                return
        time.sleep(0.02)
    pytest.fail("the device was never quiet")


@contextmanager
def mounted_image(image: Path, place: Path) -> Iterator[Path]:
    place.mkdir()
    run("mount", "-t", "ext4", "-o", "loop", image, place)
    try:
        yield place
    finally:
        run("umount", place)
