"""The swap file: counted against the budget, never two owners of one, and gone when its owner
is.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from deepnvme import IOQueue
from deepnvme.volume.member import MemberFile
from infinity_engine.activation.drive_room import DriveRoom
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.memory import Ledger
from infinity_engine.plan import ResolvedBudget, Tier
from infinity_engine.storage import Place, SwapFile
from support.unnamed_files import unnamed_files

PAGE = 4096
OTHER = """
import sys
from infinity_engine.memory import Ledger
from infinity_engine.plan import ResolvedBudget
from infinity_engine.storage import SwapFile
where = sys.argv[1]
swap = SwapFile({where: 1 << 20}, Ledger(ResolvedBudget(device=0, host=64 << 20, nvme={where: 1 << 20})))
print("made", flush=True)
sys.stdin.readline()
swap.close()
"""


def ledger(*directories: Path, limit: int = 1 << 20) -> Ledger:
    return Ledger(
        ResolvedBudget(
            device=0, host=64 << 20, nvme={str(directory): limit for directory in directories}
        )
    )


def two_drives(place: Path) -> tuple[Ledger, str, str]:
    """Make two directories there, of 100 pages each."""
    drives = [place / name for name in "ab"]
    for drive in drives:
        drive.mkdir()
    first, second = map(str, drives)
    return ledger(*drives, limit=100 * PAGE), first, second


def other_process(directory: Path) -> subprocess.Popen[str]:
    """Start a process that has a swap file there until it is told to end, or killed."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(directory)], stdin=pipe, stdout=pipe, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "made\n"
    return process


def test_bytes_come_back_as_they_were_written(tmp_path: Path) -> None:
    with SwapFile({str(tmp_path): 1 << 20}, ledger(tmp_path)) as swap:
        place = swap.allocate(10_000, holder="w")
        swap.write(place, memoryview(b"x" * 10_000)).wait()
        found = bytearray(10_000)

        assert swap.read(place, memoryview(found)).wait() == 10_000
        assert found == b"x" * 10_000


def test_a_part_of_a_place_is_read_alone(tmp_path: Path) -> None:
    with SwapFile({str(tmp_path): 1 << 20}, ledger(tmp_path)) as swap:
        place = swap.allocate(3 * PAGE, holder="w")
        swap.write(place, memoryview(b"a" * PAGE + b"b" * PAGE + b"c" * PAGE)).wait()
        found = bytearray(PAGE)

        swap.read(place.part(PAGE, PAGE), memoryview(found)).wait()

        assert found == b"b" * PAGE


def test_every_byte_of_the_files_counts_against_the_budget(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for directory in (first, second):
        directory.mkdir()
    books = ledger(first, second)

    with SwapFile(
        {str(first): 1 << 20, str(second): 100_000}, books, rates={str(first): 2, str(second): 1}
    ):
        usage = {each.directory: each for each in books.usage() if each.tier is Tier.NVME}
        on_disk = {
            directory: sum(file.stat().st_size for file in unnamed_files(Path(directory)))
            for directory in (str(first), str(second))
        }
        assert {name: each.held for name, each in usage.items()} == on_disk
        assert all(each.held <= each.reserved <= each.limit for each in usage.values())

    assert all(
        books.free(Tier.NVME, directory=str(directory)) == 1 << 20 for directory in (first, second)
    )


def test_what_the_queue_may_take_for_itself_counts_as_host(tmp_path: Path) -> None:
    books = ledger(tmp_path)

    with SwapFile({str(tmp_path): 1 << 20}, books) as swap:
        odd = bytearray((1 << 19) + 1)
        place = swap.allocate(1 << 19, holder="w")
        swap.write(place, memoryview(odd)[1:]).wait()

        own = sum(drive.own_bytes for drive in swap.queue.stats().drives.values())
        host = next(each for each in books.usage() if each.tier is Tier.HOST)
        assert 0 < own <= host.held == swap.queue.settings_for(tmp_path).inflight_bytes

    assert books.free(Tier.HOST) == 64 << 20


def test_more_than_the_budget_is_refused_and_nothing_is_left_behind(tmp_path: Path) -> None:
    books = ledger(tmp_path, limit=100_000)

    with pytest.raises(CapacityError, match="NVME"):
        SwapFile({str(tmp_path): 100_001}, books)

    assert list(tmp_path.iterdir()) == []
    assert books.free(Tier.NVME, directory=str(tmp_path)) == 100_000


def test_a_drive_that_is_not_there_gives_the_promise_back(tmp_path: Path) -> None:
    missing = tmp_path / "not mounted"
    books = ledger(missing)

    with pytest.raises(OSError, match="not mounted"):
        SwapFile({str(missing): 1 << 20}, books)

    assert books.free(Tier.NVME, directory=str(missing)) == 1 << 20


@pytest.mark.parametrize("sizes", [{}, {"/mnt": 4096}])
def test_a_swap_file_without_room_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least"):
        SwapFile(sizes, ledger(Path("/mnt")))


def test_a_full_swap_file_says_how_much_is_free(tmp_path: Path) -> None:
    with SwapFile({str(tmp_path): 10 * PAGE}, ledger(tmp_path)) as swap:
        swap.allocate(8 * PAGE, holder="a")

        with pytest.raises(CapacityError) as refused:
            swap.allocate(PAGE + 1, holder="b")

        assert (refused.value.tier, refused.value.free, refused.value.limit) == (
            "NVME",
            PAGE,
            9 * PAGE,
        )
        assert refused.value.directory == str(tmp_path)


def test_a_full_swap_file_says_who_has_it(tmp_path: Path) -> None:
    with SwapFile({str(tmp_path): 10 * PAGE}, ledger(tmp_path)) as swap:
        swap.allocate(0, holder="empty")
        swap.allocate(5 * PAGE, holder="a")
        gone = swap.allocate(2 * PAGE, holder="gone")
        swap.allocate(PAGE, holder="b")
        swap.allocate(PAGE - 1, holder="b")
        swap.release(gone)

        with pytest.raises(CapacityError) as refused:
            swap.allocate(3 * PAGE, holder="c")

        assert refused.value.holders == (("a", 5 * PAGE), ("b", 2 * PAGE - 1))


def test_a_swap_file_grows_by_what_is_asked_of_each_directory_and_keeps_what_it_has(
    tmp_path: Path,
) -> None:
    drives = [tmp_path / name for name in "ab"]
    for drive in drives:
        drive.mkdir()
    first, second = map(str, drives)
    books = ledger(*drives)
    with SwapFile({first: 3 * PAGE, second: 3 * PAGE}, books, rates={first: 1, second: 1}) as swap:
        place = swap.allocate(4 * PAGE, holder="w")
        swap.write(place, memoryview(b"x" * 4 * PAGE)).wait()

        swap.grow({second: 5 * PAGE + 1})

        assert (swap.capacity, swap.free_bytes) == (9 * PAGE, 5 * PAGE)
        held = held_of(books)
        assert held == {first: 3 * PAGE, second: 8 * PAGE}
        files = {
            str(drive): sum(file.stat().st_size for file in unnamed_files(drive))
            for drive in drives
        }
        assert files == held
        more = swap.allocate(5 * PAGE, holder="more")
        swap.write(more, memoryview(b"y" * 5 * PAGE)).wait()
        found = bytearray(4 * PAGE)
        swap.read(place, memoryview(found)).wait()
        assert found == b"x" * 4 * PAGE

    assert books.free(Tier.NVME, directory=second) == 1 << 20


def test_trimmed_swap_file_frees_the_budget_behind_its_bytes(tmp_path: Path) -> None:
    books = ledger(tmp_path)
    with SwapFile({str(tmp_path): 100 * PAGE}, books) as swap:
        swap.allocate(4 * PAGE, holder="w")
        swap.grow({str(tmp_path): 10 * PAGE})

        swap.trim()

        [file] = unnamed_files(tmp_path)
        assert file.stat().st_size == 5 * PAGE
        assert books.free(Tier.NVME, directory=str(tmp_path)) == (1 << 20) - 5 * PAGE
    assert books.free(Tier.NVME, directory=str(tmp_path)) == 1 << 20


def held_of(books: Ledger) -> dict[str, int]:
    return {str(each.directory): each.held for each in books.usage() if each.tier is Tier.NVME}


def test_spare_bytes_are_for_spare_places_and_go_back_where_a_drive_is_full(
    tmp_path: Path,
) -> None:
    drives = [tmp_path / name for name in "ab"]
    for drive in drives:
        drive.mkdir()
    first, second = map(str, drives)
    books = ledger(*drives)
    sizes = {first: 3 * PAGE, second: 5 * PAGE}
    with SwapFile(sizes, books, rates={first: 1, second: 2}) as swap:
        place = swap.allocate(5 * PAGE, holder="w")
        swap.write(place, memoryview(b"x" * 5 * PAGE)).wait()
        assert swap.spare_place(place, holder="aside") is None

        for _ in range(2):
            swap.have_spare(6 * PAGE, leave=0)  # by the drives' rates
            assert held_of(books) == {first: 5 * PAGE, second: 9 * PAGE}
            assert swap.free_bytes == PAGE
        aside = swap.spare_place(place, holder="aside")
        assert aside is not None
        assert (aside.nbytes, swap.free_bytes) == (5 * PAGE, PAGE)
        assert swap.spare_place(place, holder="another") is None

        swap.have_spare(6 * PAGE, leave=1 << 60)  # so much is not free: what is in use stays
        assert sum(held_of(books).values()) >= sum(sizes.values()) + 4 * PAGE
        assert swap.free_bytes <= PAGE
        swap.release_spare(aside)
        swap.have_spare(0, leave=0)  # there is room
        assert sum(held_of(books).values()) >= sum(sizes.values()) + 4 * PAGE
        swap.have_spare(6 * PAGE, leave=1 << 60)
        assert held_of(books) == sizes
        found = bytearray(5 * PAGE)
        swap.read(place, memoryview(found)).wait()
        assert found == b"x" * 5 * PAGE


def test_there_are_as_many_spare_bytes_as_the_budget_has(tmp_path: Path) -> None:
    books = ledger(tmp_path)
    with SwapFile({str(tmp_path): 3 * PAGE}, books) as swap:
        swap.have_spare(1 << 30, leave=0)
        assert (held_of(books), swap.free_bytes) == ({str(tmp_path): 1 << 20}, 2 * PAGE)


def test_a_drive_that_refuses_spare_bytes_leaves_a_swap_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    books = ledger(tmp_path)
    with SwapFile({str(tmp_path): 3 * PAGE}, books) as swap:
        monkeypatch.setattr(os, "posix_fallocate", full)
        swap.have_spare(PAGE, leave=0)
        assert (swap.capacity, held_of(books)) == (2 * PAGE, {str(tmp_path): 3 * PAGE})


def test_what_a_swap_file_grows_by_is_not_spare(tmp_path: Path) -> None:
    with SwapFile({str(tmp_path): 3 * PAGE}, ledger(tmp_path)) as swap:
        swap.have_spare(0, leave=0)
        swap.grow({str(tmp_path): 4 * PAGE})
        assert swap.free_bytes == 6 * PAGE
        swap.have_spare(PAGE, leave=0)
        swap.grow({str(tmp_path): 4 * PAGE})  # the first page of it was spare
        assert (swap.capacity, swap.free_bytes) == (10 * PAGE, 10 * PAGE)
        assert swap.spare_place(swap.allocate(PAGE, holder="w"), holder="aside") is None
        swap.have_spare(0, leave=1 << 60)
        assert swap.capacity == 10 * PAGE


def test_spare_bytes_that_no_place_uses_count_for_a_swap_file_that_grows(tmp_path: Path) -> None:
    drives = [tmp_path / name for name in "ab"]
    for drive in drives:
        drive.mkdir()
    books = ledger(*drives)
    first, second = map(str, drives)
    with SwapFile({first: 3 * PAGE, second: 5 * PAGE}, books, rates={first: 1, second: 1}) as swap:
        home = swap.allocate(PAGE, holder="w")
        swap.have_spare(1 << 30, leave=0)  # all that the budget has
        held, free = held_of(books), swap.free_bytes
        aside = swap.spare_place(home, holder="aside")
        assert aside is not None
        with pytest.raises(CapacityError):
            swap.grow({first: 1 << 20})
        assert swap.free_bytes == free
        swap.grow({first: 16 * PAGE, second: 8 * PAGE})
        assert (held_of(books), swap.free_bytes) == (held, free + 24 * PAGE)
        # All that nothing uses can be had: the places aside get no more than what is left.
        swap.allocate(swap.free_bytes, holder="activations")
        assert swap.free_bytes == 0
        assert swap.spare_place(home, holder="aside") is not None


def test_spare_bytes_leave_a_swap_file_that_grows_in_steps_as_much_as_it_has(
    tmp_path: Path,
) -> None:
    with SwapFile({str(tmp_path): 101 * PAGE}, ledger(tmp_path)) as swap:  # of 256 pages
        DriveRoom(swap)
        swap.have_spare(1 << 30, leave=0)
        assert swap.capacity == 155 * PAGE


def test_a_swap_file_grows_by_the_speed_of_drives_that_have_room(tmp_path: Path) -> None:
    books, first, second = two_drives(tmp_path)
    with SwapFile({first: 4 * PAGE, second: 4 * PAGE}, books, rates={first: 1, second: 3}) as swap:
        swap.grow_by(40 * PAGE)
        assert held_of(books) == {first: 14 * PAGE, second: 34 * PAGE}
        swap.grow_by(100 * PAGE)
        assert held_of(books) == {first: 48 * PAGE, second: 100 * PAGE}
        with pytest.raises(CapacityError, match="raise the budget's nvme") as refused:
            swap.grow_by(53 * PAGE)
        assert (refused.value.asked, refused.value.free) == (53 * PAGE, 52 * PAGE)
        swap.grow_by(52 * PAGE)
        assert held_of(books) == {first: 100 * PAGE, second: 100 * PAGE}


def test_a_drive_at_its_limit_leaves_its_part_of_the_spare_bytes_to_others(tmp_path: Path) -> None:
    books, first, second = two_drives(tmp_path)
    sizes = {first: 98 * PAGE, second: 3 * PAGE}
    with SwapFile(sizes, books, rates={first: 3, second: 1}) as swap:
        swap.have_spare(6 * PAGE, leave=0)
        assert held_of(books) == {first: 100 * PAGE, second: 7 * PAGE}


def test_bytes_that_are_not_spare_stay_where_places_aside_lie_in_them(tmp_path: Path) -> None:
    with SwapFile({str(tmp_path): 11 * PAGE}, ledger(tmp_path)) as swap:
        home = swap.allocate(4 * PAGE, holder="w")
        swap.have_spare(4 * PAGE, leave=0)
        # This lies before the bytes that the drive gave for it.
        assert swap.spare_place(home, holder="aside") is not None
        swap.have_spare(0, leave=1 << 60)  # the drive is full, and gets nothing
        assert swap.free_bytes == 6 * PAGE
        swap.allocate(6 * PAGE, holder="gradients")


def test_ranks_that_share_a_drive_leave_a_save_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=14 * PAGE))
    with SwapFile({str(tmp_path): 3 * PAGE}, ledger(tmp_path)) as swap:
        swap.have_spare(10 * PAGE, leave=5 * PAGE, ranks=2)
        assert swap.capacity == 6 * PAGE


def test_a_drive_that_fails_leaves_the_spare_bytes_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    books = ledger(tmp_path)
    with SwapFile({str(tmp_path): 3 * PAGE}, books) as swap:
        for place, name in ((shutil, "disk_usage"), (os, "posix_fallocate")):
            with monkeypatch.context() as patch:
                patch.setattr(place, name, fails)
                swap.have_spare(PAGE, leave=0)
            assert (swap.capacity, held_of(books)) == (2 * PAGE, {str(tmp_path): 3 * PAGE})
            assert swap.free_bytes == 2 * PAGE


def test_growing_beyond_the_budget_changes_nothing(tmp_path: Path) -> None:
    books = ledger(tmp_path)
    with SwapFile({str(tmp_path): 3 * PAGE}, books) as swap:
        with pytest.raises(CapacityError, match="raise the budget's nvme"):
            swap.grow({str(tmp_path): 1 << 20})

        assert swap.capacity == 2 * PAGE
        assert books.free(Tier.NVME, directory=str(tmp_path)) == (1 << 20) - 3 * PAGE


def test_growing_beyond_the_drive_says_so_and_changes_nothing(tmp_path: Path) -> None:
    books = ledger(tmp_path, limit=1 << 60)
    with SwapFile({str(tmp_path): 3 * PAGE}, books) as swap:
        with pytest.raises(CapacityError, match="free space on the drive") as refused:
            swap.grow({str(tmp_path): 1 << 59})

        assert (refused.value.asked, refused.value.directory) == (1 << 59, str(tmp_path))
        assert swap.capacity == 2 * PAGE
        assert books.free(Tier.NVME, directory=str(tmp_path)) == (1 << 60) - 3 * PAGE


def test_growing_in_a_directory_that_it_is_not_in_is_refused(tmp_path: Path) -> None:
    with (
        SwapFile({str(tmp_path): 3 * PAGE}, ledger(tmp_path)) as swap,
        pytest.raises(ConfigError, match="directory of the swap file"),
    ):
        swap.grow({"/elsewhere": PAGE})


def test_rates_without_one_of_the_directories_are_refused(tmp_path: Path) -> None:
    books = ledger(tmp_path)

    with pytest.raises(ConfigError, match="a rate for each of"):
        SwapFile({str(tmp_path): 1 << 20}, books, rates={"/elsewhere": 1.0})

    assert books.free(Tier.HOST) == 64 << 20


def test_a_close_that_was_interrupted_is_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    books = ledger(tmp_path)
    swap = SwapFile({str(tmp_path): 1 << 20}, books)

    def interrupted(_: MemberFile) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(MemberFile, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            swap.close()
    left = len(unnamed_files(tmp_path))
    promised = books.free(Tier.NVME, directory=str(tmp_path))
    swap.close()

    assert (left, promised) == (1, 0)  # what is there still counts
    assert unnamed_files(tmp_path) == []
    assert books.free(Tier.NVME, directory=str(tmp_path)) == 1 << 20


def test_a_swap_files_own_queue_is_closed_with_it_and_a_given_one_is_not(tmp_path: Path) -> None:
    own = SwapFile({str(tmp_path): 1 << 20}, ledger(tmp_path))
    with IOQueue() as queue:
        other = SwapFile({str(tmp_path): 1 << 20}, ledger(tmp_path), queue=queue)

        own.close()
        other.close()

        assert (own.queue.closed, queue.closed) == (True, False)


def test_closing_removes_the_files_and_closing_again_does_nothing(tmp_path: Path) -> None:
    swap = SwapFile({str(tmp_path): 1 << 20}, ledger(tmp_path))

    swap.close()
    swap.close()

    assert unnamed_files(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_two_engines_on_one_directory_have_their_own_bytes(tmp_path: Path) -> None:
    with (
        SwapFile({str(tmp_path): 1 << 20}, ledger(tmp_path)) as one,
        SwapFile({str(tmp_path): 1 << 20}, ledger(tmp_path)) as other,
    ):
        places = [swap.allocate(PAGE, holder="w") for swap in (one, other)]
        one.write(places[0], memoryview(b"1" * PAGE)).wait()
        other.write(places[1], memoryview(b"2" * PAGE)).wait()
        found = bytearray(PAGE)

        one.read(places[0], memoryview(found)).wait()

        assert found == b"1" * PAGE


def test_killed_process_leaves_nothing_on_the_drive(tmp_path: Path) -> None:
    process = other_process(tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)

    assert list(tmp_path.iterdir()) == []


class Places(RuleBasedStateMachine):
    """Random places in a small swap file of two unequal members, each filled with its own bytes."""

    places = Bundle("places")

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.directory = tempfile.TemporaryDirectory()
        drives = [Path(self.directory.name) / name for name in "ab"]
        for drive in drives:
            drive.mkdir()
        books = ledger(*drives, limit=6 << 20)
        sizes = {str(drives[0]): 6 << 20, str(drives[1]): 3 << 20}
        self.swap = SwapFile(sizes, books, rates={str(drives[0]): 2.0, str(drives[1]): 1.0})
        self.content: dict[Place, bytes] = {}

    @rule(target=places, nbytes=st.integers(1, 3 << 20), fill=st.integers(0, 255))
    def take(self, nbytes: int, fill: int) -> Place | None:
        try:
            place = self.swap.allocate(nbytes, holder="w")
        except CapacityError as full:
            if not full.free == self.swap.free_bytes < nbytes + PAGE:
                raise AssertionError(f"{self.swap.free_bytes} B are free: {full}") from full
            return None
        assert place.nbytes == nbytes
        self.content[place] = bytes([fill]) * nbytes
        assert self.swap.write(place, memoryview(self.content[place])).wait() == nbytes
        return place

    @rule(place=consumes(places))
    def give(self, place: Place | None) -> None:
        if place is not None:
            self.swap.release(place)
            del self.content[place]

    @rule(place=places)
    def read(self, place: Place | None) -> None:
        if place in self.content:
            found = bytearray(place.nbytes)
            self.swap.read(place, memoryview(found)).wait()
            assert found == self.content[place]

    @invariant()
    def no_two_places_overlap_and_none_is_lost(self) -> None:
        taken = sorted((e.member, e.offset, e.end) for place in self.content for e in place.extents)
        assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(taken))
        assert self.swap.free_bytes == self.swap.capacity - sum(
            end - start for _, start, end in taken
        )

    def teardown(self) -> None:
        self.swap.close()
        self.directory.cleanup()


Places.TestCase.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
TestPlaces = Places.TestCase


def test_the_bytes_that_were_moved_are_known_by_directory_also_when_it_is_closed(
    tmp_path: Path,
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for each in (here, there):
        each.mkdir()
    with SwapFile({str(here): 1 << 20, str(there): 1 << 20}, ledger(here, there)) as swap:
        place = swap.allocate(3 * PAGE, holder="weights")
        swap.write(place, memoryview(bytes(3 * PAGE))).wait()
        swap.read(place, memoryview(bytearray(3 * PAGE))).wait()

    traffic = swap.traffic()
    assert traffic.keys() == {str(here), str(there)}
    assert sorted(traffic.values()) == [(0, 0), (3 * PAGE, 3 * PAGE)]
