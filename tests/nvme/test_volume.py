"""Volumes: who gets how many bytes, what is read back, who may use the directories, and what a
damaged one says.
"""

from __future__ import annotations

import _thread
import errno
import fcntl
import gc
import itertools
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from deepnvme import (
    BatchError,
    ClosedError,
    FaultPlan,
    IOQueue,
    NVMeError,
    QueueFull,
    Requests,
    TensorStore,
    WhenFull,
)
from deepnvme.errors import VolumeError, VolumeFullError, VolumeLockedError
from deepnvme.memory.buffers import memory_of
from deepnvme.memory.checksum import crc32c
from deepnvme.sizes import whole_pages
from deepnvme.volume.extents import Extent, slices
from deepnvme.volume.member import Access, Header, MemberFile, lock_holder
from deepnvme.volume.volume import Member, Volume
from support.kernel_files import fake_roots
from support.nvme_io import CHUNK, ON_DISK, PAGE, TIMEOUT_S, assert_same, backend_or_skip, pattern
from support.nvme_programs import output_of, run_program
from support.unnamed_files import unnamed_files

MIB = 1 << 20
# the backend that no machine refuses, where the backend is not what is tested
EVERYWHERE = "threads"


@pytest.fixture(autouse=True)
def backend_of_own_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPNVME_BACKEND", EVERYWHERE)


@pytest.fixture(scope="module")
def plain_queue() -> Iterator[IOQueue]:
    with IOQueue(EVERYWHERE) as queue:
        yield queue


@pytest.fixture
def volume(tmp_path: Path, plain_queue: IOQueue) -> Iterator[Volume]:
    """Yield a volume of two equal members."""
    with Volume.create(members(tmp_path, 1.0, 1.0), 32 * MIB, queue=plain_queue) as volume:
        yield volume


def members(folder: Path, *rates: float) -> list[Member]:
    """Return members in directories of their own, "0" and so on."""
    return [Member(folder / str(index), rate=rate) for index, rate in enumerate(rates)]


def finish(futures: Sequence[Any]) -> int:
    return sum(future.result(TIMEOUT_S) for future in futures)


def per_member(volume: Volume, extents: Sequence[Extent]) -> list[int]:
    """Return the bytes of the extents in each member."""
    return [
        sum(extent.nbytes for extent in extents if extent.member == index)
        for index in range(len(volume.directories))
    ]


def pages_of(extents: Sequence[Extent]) -> list[tuple[int, int]]:
    return [
        (extent.member, page)
        for extent in extents
        for page in range(extent.offset, extent.end, PAGE)
    ]


# --- striping -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rates", [(1.0,), (1.0, 1.0), (3.0, 1.0), (1.0, 1e-6), (2.0, 5.0, 3.0)])
def test_large_pieces_are_split_in_the_ratio_of_the_rates(
    tmp_path: Path, plain_queue: IOQueue, rates: tuple[float, ...]
) -> None:
    nbytes = 9 * MIB + 11111  # nearer to the end of a page than to its beginning
    specs = [
        Member(tmp_path / str(index), rate=rate, capacity=10 * MIB)
        for index, rate in enumerate(rates)
    ]
    with Volume.create(specs, queue=plain_queue) as volume:
        extents = volume.allocate(nbytes)
        shares = per_member(volume, extents)
    assert sum(shares) == nbytes
    for share, rate in zip(shares, rates, strict=True):
        assert abs(share - nbytes * rate / sum(rates)) <= PAGE
    assert all(extent.nbytes % PAGE == 0 for extent in extents[:-1])
    assert [extent.member for extent in extents] == sorted({extent.member for extent in extents})


def test_small_pieces_go_whole_to_the_member_that_is_furthest_behind(
    tmp_path: Path, plain_queue: IOQueue
) -> None:
    with Volume.create(members(tmp_path, 3.0, 1.0), 40 * MIB, queue=plain_queue) as volume:
        taken = [volume.allocate(64 << 10) for _ in range(400)]
        used = [member.used_bytes for member in volume.stats()]
    assert {len(extents) for extents in taken} == {1}
    assert abs(used[0] - 3 * used[1]) <= 4 * (64 << 10)
    first = [extents[0].member for extents in taken[:8]]
    assert sorted(first) == [0] * 6 + [1] * 2


def test_a_megabyte_per_member_is_where_splitting_begins(volume: Volume) -> None:
    assert len(volume.allocate(2 * MIB - 1)) == 1
    assert len(volume.allocate(2 * MIB)) == 2


def test_pages_are_shared_with_another_file_only_where_the_file_system_can(
    volume: Volume, tmp_path: Path
) -> None:
    extents = volume.allocate(3 * MIB + 5)
    content = pattern(3 * MIB + 5, 7)
    for future in volume.pwrite(extents, content):
        future.result()
    with (tmp_path / "other").open("w+b") as other:
        shared = False
        with suppress(OSError):
            volume.share(extents, other.fileno(), PAGE)
            shared = True
        other.seek(PAGE)
        assert other.read(len(content)) == (content if shared else b"")


def test_capacity_is_split_as_the_bytes_will_be(tmp_path: Path, plain_queue: IOQueue) -> None:
    with Volume.create(members(tmp_path, 3.0, 1.0), 16 * MIB, queue=plain_queue) as volume:
        assert [member.capacity for member in volume.stats()] == [12 * MIB, 4 * MIB]
        assert len(volume.allocate(16 * MIB)) == 2
        assert volume.free_bytes == 0


def test_rates_are_measured_where_none_are_given_and_bytes_split_accordingly(
    tmp_path: Path,
) -> None:
    limit = 50e6
    with (
        IOQueue(EVERYWHERE) as fast,
        IOQueue(EVERYWHERE, faults=FaultPlan().throttle(bytes_per_s=limit)) as slow,
        Volume.create(
            [Member(tmp_path / "fast", queue=fast), Member(tmp_path / "slow", queue=slow)], 64 * MIB
        ) as volume,
    ):
        before = [written(queue) for queue in (fast, slow)]
        data = pattern(16 * MIB, seed=1)
        for _ in range(3):
            assert finish(volume.pwrite(volume.allocate(len(data)), data)) == len(data)
        passed = [written(queue) - start for queue, start in zip((fast, slow), before, strict=True)]
        measured = volume.rates[0] / volume.rates[1]
    assert volume.rates[1] <= 1.05 * limit
    assert passed[0] / passed[1] == pytest.approx(measured, rel=0.05)
    assert [member.written_bytes for member in volume.stats()] == passed


def written(queue: IOQueue) -> int:
    return sum(drive.written_bytes for drive in queue.stats().drives.values())


def test_measuring_leaves_no_more_than_the_capacity_behind(
    tmp_path: Path, plain_queue: IOQueue
) -> None:
    with Volume.create([tmp_path / "0", tmp_path / "1"], 8 * MIB, queue=plain_queue) as volume:
        sizes = [(directory / "data").stat() for directory in volume.directories]
        assert [size.st_size for size in sizes] == [
            member.capacity + PAGE for member in volume.stats()
        ]
        assert [size.st_blocks * 512 >= size.st_size for size in sizes] == [True, True]
        assert 0 <= volume.free_bytes - 8 * MIB <= 2 * PAGE


def test_one_member_is_not_measured(tmp_path: Path, plain_queue: IOQueue) -> None:
    before = written(plain_queue)
    with Volume.create([tmp_path / "only"], 8 * MIB, queue=plain_queue) as volume:
        assert volume.rates == (1.0,)
    assert written(plain_queue) == before


# --- space ----------------------------------------------------------------------------------------


def test_a_member_that_is_full_leaves_its_part_to_the_others(
    tmp_path: Path, plain_queue: IOQueue
) -> None:
    specs = [
        Member(tmp_path / "0", rate=1.0, capacity=2 * MIB),
        Member(tmp_path / "1", rate=1.0, capacity=20 * MIB),
    ]
    with Volume.create(specs, queue=plain_queue) as volume:
        taken = [volume.allocate(4 * MIB) for _ in range(3)]
        assert [per_member(volume, extents) for extents in taken] == [
            [2 * MIB, 2 * MIB],
            [0, 4 * MIB],
            [0, 4 * MIB],
        ]


def test_space_in_pieces_is_used_to_the_last_page_and_read_back_in_order(
    tmp_path: Path, plain_queue: IOQueue
) -> None:
    with Volume.create(members(tmp_path, 1.0, 1.0), 4 * MIB, queue=plain_queue) as volume:
        pieces = [volume.allocate(64 << 10) for _ in range(64)]
        for piece in [*pieces[::4], *pieces[1::4]]:  # every second one of each member
            volume.release(piece)
        extents = volume.allocate(2 * MIB - 5)
        assert len(extents) == 32
        assert all(extent.nbytes % PAGE == 0 for extent in extents[:-1])
        data = pattern(2 * MIB - 5, seed=1)
        finish(volume.pwrite(extents, data))
        back = bytearray(len(data))
        finish(volume.pread(extents, back))
        assert_same(back, data)
        assert volume.free_bytes == 0


def test_a_full_volume_says_what_was_asked_what_is_free_and_takes_nothing(volume: Volume) -> None:
    volume.allocate(8 * MIB)
    with pytest.raises(VolumeFullError) as caught:
        volume.allocate(24 * MIB + 1)
    error = caught.value
    assert (error.errno, error.asked, error.free, error.largest) == (
        errno.ENOSPC,
        24 * MIB + 1,
        24 * MIB,
        12 * MIB,
    )
    for part in (
        *map(str, volume.directories),
        str(24 * MIB + 1),
        f"{24 * MIB} B are free",
        f"{12 * MIB} B of them",
    ):
        assert part in str(error)
    assert volume.free_bytes == 24 * MIB
    assert sum(extent.nbytes for extent in volume.allocate(24 * MIB)) == 24 * MIB


def test_a_full_volumes_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(VolumeFullError(["/a", "/b"], asked=3, free=2, largest=1)))
    assert (error.asked, error.free, error.largest) == (3, 2, 1)
    assert "/a, /b" in str(error)


def test_nothing_needs_no_room(volume: Volume) -> None:
    assert volume.allocate(0) == ()
    assert volume.pwrite((), b"") == []


def test_released_room_is_free_again(volume: Volume) -> None:
    extents = [volume.allocate(5 * MIB + 1), volume.allocate(100)]
    for each in extents:
        volume.release(each)
    assert volume.free_bytes == 32 * MIB
    assert [member.largest_free for member in volume.stats()] == [16 * MIB, 16 * MIB]


def test_room_released_twice_is_refused_with_its_directory(volume: Volume) -> None:
    extents = volume.allocate(100)
    volume.release(extents)
    with pytest.raises(
        ValueError, match=f"{volume.directories[extents[0].member]}: .*given back twice"
    ):
        volume.release(extents)


def test_room_that_is_reserved_is_not_handed_out(volume: Volume) -> None:
    volume.reserve([Extent(0, PAGE, 16 * MIB), Extent(1, 3 * PAGE, 100)])
    extents = volume.allocate(16 * MIB - 3 * PAGE)
    assert not set(pages_of(extents)) & set(
        pages_of([Extent(0, PAGE, 16 * MIB), Extent(1, 3 * PAGE, 100)])
    )
    with pytest.raises(ValueError, match=f"{volume.directories[1]}: .*not all free"):
        volume.reserve([Extent(1, 3 * PAGE, 1)])


@pytest.mark.parametrize(
    "extent", [Extent(2, PAGE, 1), Extent(0, 0, 1), Extent(1, 16 * MIB, 2 * PAGE)]
)
def test_extents_that_are_not_of_this_volume_are_refused_everywhere(
    volume: Volume, extent: Extent
) -> None:
    """The first page among them: it is the header."""
    calls: list[Callable[[], object]] = [
        lambda: volume.release([extent]),
        lambda: volume.reserve([extent]),
        lambda: volume.pread([extent], bytearray(extent.nbytes)),
        lambda: volume.pwrite([extent], bytes(extent.nbytes)),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"another volume|not within bytes"):
            call()


# --- runs -----------------------------------------------------------------------------------------

SIZES = [1, PAGE, PAGE + 1, 65536, 100_000]


def test_a_run_is_one_piece_and_each_part_has_its_own_pages(volume: Volume) -> None:
    extents = volume.allocate_run(SIZES)
    assert [extent.nbytes for extent in extents] == SIZES
    assert {extent.member for extent in extents} == {extents[0].member}
    assert [extent.offset for extent in extents[1:]] == [extent.end for extent in extents[:-1]]
    assert volume.free_bytes == 32 * MIB - sum(map(whole_pages, SIZES))


def test_runs_go_to_the_member_that_is_furthest_behind(volume: Volume) -> None:
    assert [volume.allocate_run([MIB, MIB])[0].member for _ in range(4)] in (
        [0, 1, 0, 1],
        [1, 0, 1, 0],
    )


def test_the_bytes_of_a_run_are_moved_by_one_operation(volume: Volume) -> None:
    extents = volume.allocate_run(SIZES)
    whole = Extent(extents[0].member, extents[0].offset, extents[-1].end - extents[0].offset)
    data = pattern(whole.nbytes, seed=2)
    [write] = volume.pwrite([whole], data)
    write.result(TIMEOUT_S)
    for extent in extents:
        back = bytearray(extent.nbytes)
        finish(volume.pread([extent], back))
        start = extent.offset - whole.offset
        assert_same(back, data[start : start + extent.nbytes])


def test_a_run_that_no_piece_holds_is_several_runs(tmp_path: Path, plain_queue: IOQueue) -> None:
    with Volume.create([tmp_path / "0"], 64 * PAGE, queue=plain_queue) as volume:
        pieces = [volume.allocate(8 * PAGE) for _ in range(8)]
        for piece in pieces[::2]:
            volume.release(piece)
        extents = volume.allocate_run([3 * PAGE] * 8)
        breaks = [before.end != after.offset for before, after in itertools.pairwise(extents)]
        assert breaks == [False, True] * 3 + [False]
        assert len(set(pages_of(extents))) == 24


def test_a_run_with_a_part_that_no_piece_holds_is_refused_and_takes_nothing(
    tmp_path: Path, plain_queue: IOQueue
) -> None:
    with Volume.create([tmp_path / "0"], 8 * PAGE, queue=plain_queue) as volume:
        pieces = [volume.allocate(2 * PAGE) for _ in range(4)]
        volume.release(pieces[0])
        volume.release(pieces[2])
        with pytest.raises(VolumeFullError) as caught:
            volume.allocate_run([PAGE, 3 * PAGE])
        assert (caught.value.asked, caught.value.largest) == (4 * PAGE, 2 * PAGE)
        assert volume.free_bytes == 4 * PAGE


def test_a_run_of_nothing_is_empty_and_one_with_an_empty_part_is_refused(volume: Volume) -> None:
    assert volume.allocate_run([]) == []
    with pytest.raises(ValueError, match="at least 1 byte each, got 0"):
        volume.allocate_run([5, 0])


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, 3 * CHUNK + 17, 5 * MIB + 3])
def test_what_is_written_is_read_back_also_after_opening_again(
    tmp_path: Path, disk_queue: IOQueue, nbytes: int
) -> None:
    data, other = pattern(nbytes, seed=1), pattern(777, seed=2)
    with Volume.create(members(tmp_path, 2.0, 1.0), 16 * MIB, queue=disk_queue) as volume:
        extents, others = volume.allocate(nbytes), volume.allocate(777)
        finish([*volume.pwrite(extents, data), *volume.pwrite(others, other)])
        volume.sync()
        name = volume.uuid
    with Volume.open([tmp_path / "1", tmp_path / "0"], queue=disk_queue) as volume:
        assert (volume.uuid, volume.rates) == (name, (2.0, 1.0))
        assert volume.directories == (tmp_path / "0", tmp_path / "1")
        for expected, place in ((data, extents), (other, others)):
            volume.reserve(place)
            back = bytearray(len(expected))
            assert finish(volume.pread(place, back)) == len(expected)
            assert_same(back, expected)
        assert (
            0
            <= volume.free_bytes - 16 * MIB + len(set(pages_of([*extents, *others]))) * PAGE
            <= 2 * PAGE
        )


def test_a_piece_of_what_was_written_is_read_by_itself(volume: Volume) -> None:
    data = pattern(6 * MIB + 5, seed=1)
    extents = volume.allocate(len(data))
    finish(volume.pwrite(extents, memory_of(data, writable=False)))
    start, nbytes = 2 * MIB, 4 * MIB + 5
    room = bytearray(len(data))
    part = memory_of(room, writable=True).part(start, nbytes)
    finish(volume.pread(slices(extents, start, nbytes), part))
    assert_same(room[start:], data[start:])
    assert not any(room[:start])


@pytest.mark.parametrize("nbytes", [99, 101])
def test_memory_of_another_size_than_the_extents_is_refused(volume: Volume, nbytes: int) -> None:
    extents = volume.allocate(100)
    with pytest.raises(ValueError, match=f"have 100 B and the memory has {nbytes} B"):
        volume.pread(extents, bytearray(nbytes))


def test_an_operation_that_cannot_be_submitted_whole_leaves_nothing_under_way(
    tmp_path: Path,
) -> None:
    with (
        IOQueue(
            EVERYWHERE,
            max_pending=1,
            when_full=WhenFull.RAISE,
            faults=FaultPlan().delay(delay_us=50_000, every=1),
        ) as queue,
        Volume.create(members(tmp_path, 1.0, 1.0), 8 * MIB, queue=queue) as volume,
    ):
        extents = volume.allocate(4 * MIB)
        with pytest.raises(QueueFull):
            volume.pwrite(extents, bytes(4 * MIB))
        assert queue.stats().pending == 0


def test_the_statistics_count_what_was_submitted(volume: Volume) -> None:
    extents = volume.allocate(4 * MIB)
    finish(volume.pwrite(extents, bytes(4 * MIB)))
    finish(volume.pread(extents, bytearray(4 * MIB)))
    for member, directory in zip(volume.stats(), volume.directories, strict=True):
        assert (member.directory, member.share, member.capacity) == (str(directory), 0.5, 16 * MIB)
        assert (member.read_bytes, member.written_bytes) == (2 * MIB, 2 * MIB)
        assert (member.used_bytes, member.free_bytes) == (2 * MIB, 14 * MIB)


# --- failing drives -------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ON_DISK)
def test_an_operation_that_a_member_fails_names_its_file(tmp_path: Path, backend: str) -> None:
    backend_or_skip(backend)
    with (
        IOQueue(backend, faults=FaultPlan().fail(every=1)) as lost,
        IOQueue(backend) as sound,
        Volume.create(
            [
                Member(tmp_path / "0", queue=sound, rate=1.0),
                Member(tmp_path / "1", queue=lost, rate=1.0),
            ],
            8 * MIB,
        ) as volume,
    ):
        first, second = volume.pwrite(volume.allocate(4 * MIB), bytes(4 * MIB))
        assert first.result(TIMEOUT_S) == 2 * MIB
        error = second.exception(TIMEOUT_S)
    assert isinstance(error, NVMeError)
    assert (error.errno, error.path) == (errno.EIO, str(tmp_path / "1" / "data"))
    assert str(tmp_path / "1") in str(error)


@pytest.mark.parametrize("failing", [(1,), (0, 2)])
def test_a_failed_sync_names_every_member_that_failed(
    tmp_path: Path, failing: tuple[int, ...]
) -> None:
    with (
        IOQueue(EVERYWHERE, faults=FaultPlan().fail(every=1, requests=Requests.SYNCS)) as lost,
        IOQueue(EVERYWHERE) as sound,
        Volume.create(
            [
                Member(tmp_path / str(n), queue=lost if n in failing else sound, rate=1.0)
                for n in range(3)
            ],
            8 * MIB,
        ) as volume,
        pytest.raises(NVMeError) as caught,
    ):
        volume.sync()
    errors = caught.value.errors if isinstance(caught.value, BatchError) else (caught.value,)
    assert [error.path for error in errors] == [str(tmp_path / str(n) / "data") for n in failing]
    for number in range(3):
        assert (str(tmp_path / str(number)) in str(caught.value)) == (number in failing)


# --- making ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_directories_and_files_are_private_whatever_the_umask(
    tmp_path: Path, plain_queue: IOQueue, umask: int
) -> None:
    (tmp_path / "0").mkdir(mode=0o755)
    before = os.umask(umask)
    try:
        Volume.create(members(tmp_path, 1.0, 1.0), MIB, queue=plain_queue).close()
    finally:
        os.umask(before)
    for directory in (tmp_path / "0", tmp_path / "1"):
        assert directory.stat().st_mode & 0o777 == 0o700
        assert (directory / "data").stat().st_mode & 0o777 == 0o600


def test_a_directory_that_holds_something_is_left_alone_and_so_is_the_rest(
    tmp_path: Path, plain_queue: IOQueue
) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "letters").write_text("dear")
    with pytest.raises(VolumeError, match="holds something") as caught:
        Volume.create(members(tmp_path, 1.0, 1.0), MIB, queue=plain_queue)
    assert (caught.value.errno, caught.value.path) == (errno.ENOTEMPTY, str(tmp_path / "1"))
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*")] == [
        Path("1"),
        Path("1/letters"),
    ]


def test_a_volume_is_not_made_over_another(tmp_path: Path, plain_queue: IOQueue) -> None:
    Volume.create([tmp_path / "0"], MIB, queue=plain_queue).close()
    with pytest.raises(VolumeError, match="holds something"):
        Volume.create([tmp_path / "0"], MIB, queue=plain_queue)
    Volume.open([tmp_path / "0"], queue=plain_queue).close()


def test_one_directory_given_twice_is_refused_and_removed_again(
    tmp_path: Path, plain_queue: IOQueue
) -> None:
    with pytest.raises(VolumeError, match="holds something"):
        Volume.create([tmp_path / "0", tmp_path / "0"], MIB, queue=plain_queue)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("make", [Volume.create, Volume.temporary])
def test_a_drive_that_is_not_mounted_is_told(
    tmp_path: Path, plain_queue: IOQueue, make: Any
) -> None:
    where = tmp_path / "mnt" if make == Volume.temporary else tmp_path / "mnt" / "0"
    with pytest.raises(VolumeError, match="is the drive mounted") as caught:
        make([where], MIB, queue=plain_queue)
    assert caught.value.path == str(where)


def test_a_file_is_no_directory(tmp_path: Path, plain_queue: IOQueue) -> None:
    (tmp_path / "0").write_text("")
    with pytest.raises(VolumeError, match="no directory") as caught:
        Volume.create([tmp_path / "0"], MIB, queue=plain_queue)
    assert caught.value.path == str(tmp_path / "0")


@pytest.mark.parametrize(
    ("specs", "capacity", "said"),
    [
        ([], MIB, "at least one member"),
        (["a"], None, "give the volume a capacity"),
        (["a"], 0, "at least one byte, .*; got 0"),
        ([Member("a", capacity=MIB)], MIB, "or every Member its own"),
        ([Member("a", capacity=MIB), "b"], None, "1 of 2 members"),
        ([Member("a", capacity=-1)], None, "at least one byte, .*; got -1"),
        ([Member("a", rate=1.0), "b"], MIB, "a positive rate, or none"),
        ([Member("a", rate=0.0), Member("b", rate=1.0)], MIB, "a positive rate, or none"),
        ([Member("a", rate=float("nan"))], MIB, "a positive rate, or none"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, specs: Any, capacity: int | None, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=said):
        Volume.create(specs, capacity)
    assert not list(tmp_path.iterdir())


def test_a_single_path_stands_for_a_list_of_one(tmp_path: Path, plain_queue: IOQueue) -> None:
    with Volume.create(str(tmp_path), MIB, queue=plain_queue) as volume:
        assert volume.directories == (tmp_path,)


def test_more_members_than_the_header_has_room_for_are_refused_and_removed_again(
    tmp_path: Path, plain_queue: IOQueue
) -> None:
    with pytest.raises(ValueError, match="use fewer directories"):
        Volume.create(members(tmp_path, *[1 / 3] * 300), 2 * MIB, queue=plain_queue)
    assert not list(tmp_path.iterdir())


# --- opening --------------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path: Path, plain_queue: IOQueue) -> list[Path]:
    """Return the directories of a closed volume of three."""
    with Volume.create(members(tmp_path, 1.0, 2.0, 3.0), 3 * MIB, queue=plain_queue) as volume:
        return list(volume.directories)


def refused(directories: Sequence[Path], queue: IOQueue) -> VolumeError:
    """Return why the volume cannot be opened, having seen that nothing stays locked."""
    with pytest.raises(VolumeError) as caught:
        Volume.open(directories, queue=queue)
    for directory in directories:
        assert lock_holder_of(directory) is None
    return caught.value


def lock_holder_of(directory: Path) -> int | None:
    data = directory / "data"
    return lock_holder(data.stat()) if data.exists() else None


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_member_is_told_by_its_number(
    made: list[Path], plain_queue: IOQueue, missing: int
) -> None:
    rest = [directory for index, directory in enumerate(made) if index != missing]
    error = refused(rest, plain_queue)
    assert (error.errno, error.path) == (errno.ENOENT, str(rest[0]))
    assert f"member {missing} of 3" in str(error)


def test_a_directory_that_is_gone_is_told(
    made: list[Path], plain_queue: IOQueue, tmp_path: Path
) -> None:
    made[1].rename(tmp_path / "elsewhere")
    error = refused(made, plain_queue)
    assert (error.errno, error.path) == (errno.ENOENT, str(made[1]))
    assert "is the drive mounted" in str(error)


def test_a_directory_without_a_volume_is_told(
    made: list[Path], plain_queue: IOQueue, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    error = refused([*made, tmp_path / "empty"], plain_queue)
    assert error.path == str(tmp_path / "empty")
    assert "it holds no volume: name the directory" in str(error)


def test_a_member_of_another_volume_is_told(
    made: list[Path], plain_queue: IOQueue, tmp_path: Path
) -> None:
    Volume.create([tmp_path / "other"], MIB, queue=plain_queue).close()
    error = refused([*made[:2], tmp_path / "other"], plain_queue)
    assert "open one volume's directories" in str(error)
    assert {str(tmp_path / "other"), *map(str, made)} & {error.path}


def test_a_copy_of_a_member_is_told(made: list[Path], plain_queue: IOQueue, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "data").write_bytes((made[1] / "data").read_bytes())
    error = refused([*made, tmp_path / "copy"], plain_queue)
    assert (error.path, "it is a copy of" in str(error)) == (str(tmp_path / "copy"), True)


@pytest.mark.parametrize("missing", [1, MIB])
def test_a_member_that_was_cut_off_is_told(
    made: list[Path], plain_queue: IOQueue, missing: int
) -> None:
    os.truncate(made[2] / "data", (made[2] / "data").stat().st_size - missing)
    error = refused(made, plain_queue)
    assert (error.errno, error.path) == (errno.EBADMSG, str(made[2]))
    assert "cut off" in str(error)


@pytest.mark.parametrize("content", [b"", bytes(PAGE), bytes(2 * MIB)])
def test_a_member_whose_making_never_finished_is_told(
    made: list[Path], plain_queue: IOQueue, content: bytes
) -> None:
    (made[0] / "data").write_bytes(content)
    error = refused(made, plain_queue)
    assert (error.errno, error.path) == (errno.EBADMSG, str(made[0]))
    assert "never finished" in str(error)


def test_any_bit_that_is_flipped_in_the_header_is_noticed() -> None:
    page = Header("0123456789abcdef" * 2, 1, MIB, (1.5, 2.5)).encode()
    believed = []
    for place in range(len(page)):
        for bit in range(8):
            damaged = bytearray(page)
            damaged[place] ^= 1 << bit
            try:
                believed.append((place, bit, Header.parse(bytes(damaged))))
            except ValueError:
                continue
    assert not believed


def test_a_damaged_header_is_told_with_its_directory(
    made: list[Path], plain_queue: IOQueue
) -> None:
    with (made[1] / "data").open("r+b") as file:
        file.seek(60)
        byte = file.read(1)[0]
        file.seek(60)
        file.write(bytes([byte ^ 4]))
    error = refused(made, plain_queue)
    assert (error.errno, error.path) == (errno.EBADMSG, str(made[1]))
    assert "it is damaged" in str(error)


def framed(text: bytes, version: int = 1) -> bytes:
    page = b"deepnvme-volume %d %d %08x\n" % (version, len(text), crc32c(text)) + text
    return page.ljust(PAGE, b"\0")


SOUND = {"volume": "ab" * 16, "member": 0, "capacity": PAGE, "rates": [1.0]}


def test_a_header_is_what_the_format_says() -> None:
    assert Header.parse(framed(json.dumps(SOUND).encode())) == Header("ab" * 16, 0, PAGE, (1.0,))


NONSENSE: tuple[dict[str, Any], ...] = (
    {"volume": 3},
    {"volume": "../" + "a" * 29},
    {"member": 1},
    {"member": -1},
    {"member": "0"},
    {"capacity": 0},
    {"capacity": 100},
    {"rates": []},
    {"rates": [0.0]},
    {"rates": [float("nan")]},
    {"rates": ["1"]},
    {"rates": 7},
)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b"\xff\xfe",
        *(json.dumps({**SOUND, **wrong}).encode() for wrong in NONSENSE),
    ],
)
def test_a_header_that_makes_no_sense_is_refused_though_its_checksum_fits(text: bytes) -> None:
    with pytest.raises(ValueError, match="was not written by deepnvme"):
        Header.parse(framed(text))


def test_a_header_of_a_newer_format_is_told() -> None:
    with pytest.raises(
        ValueError, match="version 2 of the format, this deepnvme reads 1: use a newer one"
    ):
        Header.parse(framed(b"{}", version=2))


def test_rates_and_capacities_cannot_be_changed_by_opening(made: list[Path]) -> None:
    with pytest.raises(ValueError, match="settled when the volume was made"):
        Volume.open([Member(made[0], rate=2.0), *made[1:]])


# --- locks ----------------------------------------------------------------------------------------

HOLDING = """
import sys
from deepnvme.volume.volume import Member, Volume
make, folder = sys.argv[1:]
if make == "open":
    volume = Volume.open([folder])
else:
    volume = Volume.temporary([folder], 1 << 20)
print(volume.directories[0], flush=True)
sys.stdin.read()
volume.close()
"""


@contextmanager
def holder(make: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Yield a process that uses a volume until its input ends, and the volume's directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDING, make, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_a_volume_in_use_is_refused_with_directory_and_process_and_free_when_that_is_killed(
    tmp_path: Path, plain_queue: IOQueue
) -> None:
    Volume.create([tmp_path / "0"], MIB, queue=plain_queue).close()
    with holder("open", tmp_path / "0") as (process, _):
        with pytest.raises(
            VolumeLockedError, match=f"process {process.pid} has this volume open for writing"
        ) as caught:
            Volume.open([tmp_path / "0"], queue=plain_queue)
        assert (caught.value.path, caught.value.pid) == (str(tmp_path / "0"), process.pid)
        process.kill()
        process.wait(TIMEOUT_S)
        Volume.open([tmp_path / "0"], queue=plain_queue).close()


def test_a_volume_in_use_by_this_process_is_refused(volume: Volume, plain_queue: IOQueue) -> None:
    with pytest.raises(VolumeLockedError, match="this process has this volume open") as caught:
        Volume.open(volume.directories, queue=plain_queue)
    assert caught.value.pid == os.getpid()


LOCKS = """\
1: POSIX  ADVISORY  WRITE 11 {file} 0 EOF
2: FLOCK  ADVISORY  WRITE 12 00:00:{inode} 0 EOF
2: -> FLOCK  ADVISORY  WRITE 13 {file} 0 EOF
3: FLOCK  ADVISORY  WRITE {pid} {file} 0 EOF
"""


@pytest.mark.parametrize(("pid", "seen"), [("14", 14), ("0", None), ("-1", None)])
def test_the_holder_of_a_lock_is_who_the_kernel_names(
    tmp_path: Path, pid: str, seen: int | None
) -> None:
    status = os.stat(tmp_path)
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    roots = fake_roots(
        tmp_path, proc={"locks": LOCKS.format(pid=pid, file=file, inode=status.st_ino)}
    )
    assert lock_holder(status, roots) == seen


def test_a_holder_that_the_kernel_does_not_name_is_another_process() -> None:
    assert "another process has this volume open" in str(VolumeLockedError("/mnt", None))


FORKING = """
import os, signal, sys
from deepnvme import ForkedError, IOQueue
from deepnvme.volume.volume import Volume

folder, how = sys.argv[1:]
volume = Volume.create([folder + "/0"], 1 << 20) if how == "created" else Volume.temporary([folder], 1 << 20)
[where] = volume.directories
extents = volume.allocate(5)
[future] = volume.pwrite(extents, b"hello")
future.result(60)
told, tell = os.pipe()
go, going = os.pipe()
pid = os.fork()
if pid == 0:
    try:
        volume.pread(extents, bytearray(5))
    except ForkedError:
        os.write(tell, b"refused")
    volume.close()
    os.write(tell, b" closed")
    os.read(go, 1)
    sys.exit(0)
assert os.read(told, 7) == b"refused"
assert os.read(told, 7) == b" closed"
back = bytearray(5)
volume.pread(extents, back)[0].result(60)
assert back == b"hello"
if how == "created":
    os.close(volume._parts[0].member._lock)  # as the kernel does at the end of a process
    Volume.open([where]).close()
else:
    child = os.dup(volume._parts[0].member._lock)  # as the child has one
    volume.close()
    assert os.fstat(child).st_size == 0  # its space is free all the same
os.write(going, b"!")
assert os.waitpid(pid, 0)[1] == 0
print("done", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("how", ["created", "temporary"])
def test_a_forked_child_neither_uses_nor_closes_nor_holds_its_parents_volume(
    tmp_path: Path, how: str
) -> None:
    done = run_program(
        FORKING,
        tmp_path,
        how,
        folder=tmp_path,
        python=["-W", "ignore::DeprecationWarning"],  # newer Pythons warn of any fork with threads
        environment={"DEEPNVME_BACKEND": EVERYWHERE},
    )
    assert output_of(done).split() == ["done"]


# --- closing --------------------------------------------------------------------------------------


def test_closing_waits_for_what_is_under_way_and_unlocks(tmp_path: Path) -> None:
    with IOQueue(EVERYWHERE, faults=FaultPlan().delay(delay_us=50_000, every=1)) as queue:
        volume = Volume.create([tmp_path / "0"], MIB, queue=queue)
        futures = volume.pwrite(volume.allocate(CHUNK), bytes(CHUNK))
        volume.close()
        assert [future.done() for future in futures] == [True]
        assert lock_holder_of(tmp_path / "0") is None
        assert not queue.closed
        volume.close()


def test_closing_unlocks_though_somebody_still_has_a_copy_of_the_descriptor(
    tmp_path: Path, plain_queue: IOQueue
) -> None:
    volume = Volume.create([tmp_path / "0"], MIB, queue=plain_queue)
    # as a child has that was forked and starts a program only now
    copy = os.dup(volume._parts[0].member._lock)
    try:
        volume.close()
        Volume.open([tmp_path / "0"], queue=plain_queue).close()
    finally:
        os.close(copy)


def test_a_closed_volume_refuses_everything_by_name(tmp_path: Path, plain_queue: IOQueue) -> None:
    volume = Volume.create([tmp_path / "0"], MIB, queue=plain_queue)
    extents = volume.allocate(5)
    volume.close()
    calls: list[Callable[[], object]] = [
        lambda: volume.pwrite(extents, b"12345"),
        lambda: volume.pread(extents, bytearray(5)),
        lambda: volume.allocate(5),
        lambda: volume.allocate_run([5]),
        lambda: volume.release(extents),
        lambda: volume.reserve(extents),
        volume.sync,
    ]
    for call in calls:
        with pytest.raises(ClosedError, match=f"{tmp_path / '0'}.* closed"):
            call()
    assert volume.closed
    assert "closed" in repr(volume)


def test_a_volume_without_a_queue_makes_its_own_and_closes_it(tmp_path: Path) -> None:
    with Volume.create([tmp_path / "0"], MIB) as volume:
        finish(volume.pwrite(volume.allocate(5), b"hello"))
        file = volume._parts[0].member.file
    assert file._queue.closed


def test_a_volume_that_nobody_holds_is_closed(tmp_path: Path, plain_queue: IOQueue) -> None:
    Volume.create([tmp_path / "0"], MIB, queue=plain_queue)
    gc.collect()
    Volume.open([tmp_path / "0"], queue=plain_queue).close()


def test_a_volume_that_was_collected_is_opened_again_at_once(tmp_path: Path) -> None:
    def refuse(*_: object) -> int:
        raise RuntimeError("no thread is left")

    volume = Volume.create([tmp_path / "0"], MIB)
    cycle: list[object] = [volume]
    cycle.append(cycle)
    del volume, cycle
    # Else another thread may have closed it before it is opened, or not.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", refuse)
        gc.collect()

    Volume.open([tmp_path / "0"]).close()


def test_a_discarded_volume_leaves_nothing(tmp_path: Path, plain_queue: IOQueue) -> None:
    volume = Volume.create(members(tmp_path, 1.0, 1.0), MIB, queue=plain_queue)
    volume.discard()
    assert volume.closed
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("given", [None, 3, [None], [3], [Member(None)]])  # type: ignore[arg-type]
def test_what_names_no_directory_is_refused_in_words(given: Any) -> None:
    for made in (Volume.create, Volume.open, Volume.temporary, TensorStore.create):
        with pytest.raises(TypeError, match="expected a directory, or a list of directories, one"):
            made(given)


def test_directories_may_be_bytes(tmp_path: Path, plain_queue: IOQueue) -> None:
    path = os.fsencode(tmp_path / "0")
    for given in (path, [path], Member(path)):  # type: ignore[arg-type]
        with Volume.create(given, MIB, queue=plain_queue) as volume:
            volume.discard()
        assert not list(tmp_path.iterdir())


def test_a_volume_tells_queue_and_capacity_of_each_member(
    tmp_path: Path, plain_queue: IOQueue
) -> None:
    with IOQueue(EVERYWHERE) as other:
        specs = [
            Member(tmp_path / "0", rate=1.0, capacity=MIB),
            Member(tmp_path / "1", other, 1.0, 2 * MIB - 1),
        ]
        with Volume.create(specs, queue=plain_queue) as volume:
            assert volume.queues == (plain_queue, other)
            assert volume.capacities == (MIB, 2 * MIB)


# --- temporary volumes ----------------------------------------------------------------------------


def test_temporary_volume_works_without_a_name_in_its_directory(
    tmp_path: Path, plain_queue: IOQueue
) -> None:
    (tmp_path / "mine").write_text("kept")
    with Volume.temporary([tmp_path], 4 * MIB, queue=plain_queue) as volume:
        data, back = pattern(3 * MIB, seed=1), bytearray(3 * MIB)
        extents = volume.allocate(len(data))
        finish(volume.pwrite(extents, data))
        finish(volume.pread(extents, back))
        assert_same(back, data)
        assert volume.directories == (tmp_path,)
        assert volume.paths == (tmp_path / "(unnamed)",)
        assert os.listdir(tmp_path) == ["mine"]
    assert unnamed_files(tmp_path) == []
    assert os.listdir(tmp_path) == ["mine"]


def test_temporary_files_use_direct_io_where_named_files_do(
    tmp_path: Path, plain_queue: IOQueue
) -> None:
    with (
        plain_queue.open(tmp_path / "named", "w") as named,
        Volume.temporary([tmp_path], MIB, queue=plain_queue) as volume,
    ):
        unnamed = volume._parts[0].member.file
        assert (unnamed.direct, unnamed.alignment) == (named.direct, named.alignment)


def test_two_temporary_volumes_share_a_directory(tmp_path: Path, plain_queue: IOQueue) -> None:
    with (
        Volume.temporary([tmp_path, tmp_path], MIB, queue=plain_queue),
        Volume.temporary([tmp_path], MIB, queue=plain_queue),
    ):
        assert len(unnamed_files(tmp_path)) == 3
    assert unnamed_files(tmp_path) == []


def test_killed_process_leaves_nothing_of_a_temporary_volume(tmp_path: Path) -> None:
    with holder("temporary", tmp_path) as (process, _):
        process.kill()
        process.wait(TIMEOUT_S)
    assert os.listdir(tmp_path) == []


def test_making_a_temporary_volume_removes_nothing(tmp_path: Path, plain_queue: IOQueue) -> None:
    foreign = tmp_path / "deepnvme-swap-0123456789abcdef" / "data"
    foreign.parent.mkdir()
    foreign.write_text("kept")
    Volume.temporary([tmp_path], MIB, queue=plain_queue).close()
    assert foreign.read_text() == "kept"


@pytest.mark.parametrize("refusal", [errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL])
def test_where_no_file_can_be_unnamed_its_name_is_dropped(
    tmp_path: Path, plain_queue: IOQueue, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    refuse_unnamed_files(monkeypatch, refusal)
    with Volume.temporary([tmp_path], MIB, queue=plain_queue) as volume:
        extents, back = volume.allocate(5), bytearray(5)
        finish(volume.pwrite(extents, b"hello"))
        finish(volume.pread(extents, back))
        assert back == b"hello"
        assert len(unnamed_files(tmp_path)) == 1
        assert os.listdir(tmp_path) == []
    assert unnamed_files(tmp_path) == []


def test_temporary_volume_that_fails_to_open_leaves_no_name(
    tmp_path: Path, plain_queue: IOQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_unnamed_files(monkeypatch, errno.EOPNOTSUPP)
    monkeypatch.setattr(plain_queue, "open", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Volume.temporary([tmp_path], MIB, queue=plain_queue)
    assert os.listdir(tmp_path) == []


def test_errors_name_the_directory_of_an_unnamed_file(tmp_path: Path) -> None:
    broken = FaultPlan().fail(nth=1, requests=Requests.READS)
    with (
        IOQueue(EVERYWHERE, faults=broken) as queue,
        Volume.temporary([tmp_path], MIB, queue=queue) as volume,
    ):
        [reading] = volume.pread(volume.allocate(PAGE), bytearray(PAGE))
        error = reading.exception(TIMEOUT_S)
    assert isinstance(error, NVMeError)
    assert error.path == str(tmp_path / "(unnamed)")


def refuse_unnamed_files(monkeypatch: pytest.MonkeyPatch, refusal: int) -> None:
    """Let the kernel answer as for a file system that cannot make a file without a name."""
    make = os.open

    def opened(path: Any, flags: int, *arguments: Any, **keywords: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(refusal, os.strerror(refusal), str(path))
        return make(path, flags, *arguments, **keywords)

    monkeypatch.setattr(os, "open", opened)


# --- interrupted and grown ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["create", "temporary"])
def test_a_close_that_was_interrupted_is_done_by_the_next_one(
    tmp_path: Path, plain_queue: IOQueue, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]
    if kind == "temporary":
        for folder in folders:
            folder.mkdir()
    volume = getattr(Volume, kind)(
        [Member(folder, rate=1.0) for folder in folders], 4 * MIB, queue=plain_queue
    )
    descriptors = [part.member._lock for part in volume._parts]

    def interrupted(_: MemberFile) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MemberFile, "drain", interrupted)
        with pytest.raises(KeyboardInterrupt):
            volume.close()
    assert volume.closed
    assert all(os.fstat(descriptor).st_size for descriptor in descriptors)

    volume.close()

    assert [part.member._lock for part in volume._parts] == [-1, -1]
    assert [unnamed_files(folder) for folder in folders] == [[], []]
    assert [os.listdir(folder) for folder in folders] == [["data"] if kind == "create" else []] * 2


def test_an_interrupted_close_loses_no_operation_from_sight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = FaultPlan().delay(delay_us=100_000, every=1, requests=Requests.WRITES)
    with IOQueue(EVERYWHERE, faults=late) as queue:
        volume = Volume.create([tmp_path / "0"], 4 * MIB, queue=queue)
        [future] = volume.pwrite(volume.allocate(MIB), bytes(MIB))
        with monkeypatch.context() as patch:
            patch.setattr(type(future), "exception", raise_interrupt)
            with pytest.raises(KeyboardInterrupt):
                volume.close()
        assert lock_holder_of(tmp_path / "0") == os.getpid()
        volume.close()
        assert future.done()


INTERRUPTED = """
import os, signal, sys, threading
import deepnvme

call, folder = sys.argv[1:]
late = deepnvme.FaultPlan().delay(delay_us=1_000_000, every=1, requests=deepnvme.Requests.WRITES)
queue = deepnvme.IOQueue("threads", faults=late)
volume = deepnvme.Volume.create([folder], 1 << 20, queue=queue)
pool = deepnvme.Pool(1 << 20)
block = pool.buffer(8192)
block[:] = b"x" * 8192
writes = volume.pwrite(volume.allocate(8192), block)
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    {"result": writes[0].result, "sync": volume.sync, "close": volume.close}[call]()
    print("not interrupted")
except KeyboardInterrupt:
    print("pending:", any(not write.done() for write in writes))
del block
print("memory held:", pool.free_bytes < pool.capacity)
volume.close()
print("written:", [write.result(0) for write in writes])
"""


@pytest.mark.parametrize("call", ["result", "sync", "close"])
def test_ctrl_c_ends_a_wait_and_the_next_close_finishes_what_is_under_way(
    call: str, tmp_path: Path
) -> None:
    done = run_program(INTERRUPTED, call, tmp_path / "0", folder=tmp_path)

    assert (output_of(done).splitlines(), done.stderr) == (
        ["pending: True", "memory held: True", "written: [8192]"],
        "",
    )
    assert (tmp_path / "0" / "data").read_bytes()[PAGE : PAGE + 8192] == b"x" * 8192


def raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["create", "temporary"])
def test_trimmed_volume_gives_back_what_lies_behind_its_bytes(
    tmp_path: Path, plain_queue: IOQueue, kind: str
) -> None:
    place = tmp_path / "0" if kind == "create" else tmp_path
    data, back = pattern(MIB, seed=1), bytearray(MIB)
    with getattr(Volume, kind)([place], 4 * MIB, queue=plain_queue) as volume:
        extents = volume.allocate(MIB)
        finish(volume.pwrite(extents, data))
        assert volume.trim() == (3 * MIB,)
        assert volume.trim() == (0,)
        assert (volume.capacities, volume.free_bytes) == ((MIB,), 0)
        assert volume._parts[0].member.length == PAGE + MIB
        volume.grow(2 * MIB)
        assert volume.trim([MIB]) == (MIB,)
        finish(volume.pread(extents, back))
        assert_same(back, data)
        volume.release(extents)
        volume.trim()
        assert volume.capacities == (PAGE,)
    if kind == "create":
        with Volume.open([place], queue=plain_queue) as volume:
            assert volume.capacities == (PAGE,)


def test_a_trim_with_a_wrong_number_of_limits_changes_nothing(
    tmp_path: Path, plain_queue: IOQueue
) -> None:
    with Volume.temporary([tmp_path], 4 * MIB, queue=plain_queue) as volume:
        with pytest.raises(ValueError, match="for each of 1 members, got 2"):
            volume.trim([MIB, MIB])
        assert volume.capacities == (4 * MIB,)


def test_a_volume_grows_and_keeps_what_it_has(tmp_path: Path, plain_queue: IOQueue) -> None:
    data = pattern(3 * MIB, seed=1)
    with Volume.create(members(tmp_path, 1.0, 3.0), 4 * MIB, queue=plain_queue) as volume:
        extents = volume.allocate(len(data))
        finish(volume.pwrite(extents, data))
        volume.grow(8 * MIB)
        assert volume.capacities == (3 * MIB, 9 * MIB)
        assert volume.free_bytes == 9 * MIB
        more = volume.allocate(9 * MIB)
        finish(volume.pwrite(more, bytes(9 * MIB)))
    with Volume.open([tmp_path / "0", tmp_path / "1"], queue=plain_queue) as volume:
        assert volume.capacities == (3 * MIB, 9 * MIB)
        back = bytearray(len(data))
        finish(volume.pread(extents, back))
    assert back == data


def test_growing_beyond_the_drive_changes_nothing(volume: Volume) -> None:
    sizes = [(directory / "data").stat().st_size for directory in volume.directories]
    with pytest.raises(VolumeError, match="cannot be reserved"):
        volume.grow(1 << 60)
    assert [(directory / "data").stat().st_size for directory in volume.directories] == sizes
    assert volume.capacities == (16 * MIB, 16 * MIB)
    assert volume.free_bytes == 32 * MIB


def test_a_volume_grows_by_other_sizes_than_its_rates_say(
    tmp_path: Path, plain_queue: IOQueue
) -> None:
    data = pattern(3 * MIB, seed=1)
    with Volume.create(members(tmp_path, 1.0, 3.0), 4 * MIB, queue=plain_queue) as volume:
        extents = volume.allocate(len(data))
        finish(volume.pwrite(extents, data))
        volume.grow_members([8 * MIB, 0])
        assert volume.capacities == (9 * MIB, 3 * MIB)
    with Volume.open([tmp_path / "0", tmp_path / "1"], queue=plain_queue) as volume:
        assert volume.capacities == (9 * MIB, 3 * MIB)
        back = bytearray(len(data))
        finish(volume.pread(extents, back))
    assert back == data


@pytest.mark.parametrize("sizes", [[], [MIB], [0, 0], [MIB, -1]])
def test_sizes_that_are_not_those_of_the_members_are_refused(
    sizes: list[int], volume: Volume
) -> None:
    with pytest.raises(ValueError, match="one number for each of 2 members"):
        volume.grow_members(sizes)


def test_growing_by_nothing_is_refused(volume: Volume) -> None:
    with pytest.raises(ValueError, match="must be 1 or more, got 0"):
        volume.grow(0)


def test_what_is_rewritten_when_a_volume_grows_is_one_sector(
    tmp_path: Path, plain_queue: IOQueue
) -> None:
    """Or a power failure could leave half of the old header and half of the new one."""
    many = members(tmp_path, *[1 / 3] * 24)
    with Volume.create(many, 2 * MIB, queue=plain_queue) as volume:
        with pytest.raises(VolumeError, match="so many members cannot grow"):
            volume.grow(MIB)
        assert volume.free_bytes == sum(volume.capacities)


def test_growing_leaves_the_directory_as_its_owner_made_it(volume: Volume) -> None:
    for directory in volume.directories:
        directory.chmod(0o750)
    volume.grow(MIB)
    assert {directory.stat().st_mode & 0o777 for directory in volume.directories} == {0o750}


@contextmanager
def no_file_longer_than(nbytes: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_where_one_drive_has_no_room_none_grows(tmp_path: Path, plain_queue: IOQueue) -> None:
    with Volume.create(members(tmp_path, 1.0, 3.0), 4 * MIB, queue=plain_queue) as volume:
        before = [(directory / "data").read_bytes() for directory in volume.directories]
        with (
            no_file_longer_than(8 * MIB),
            pytest.raises(VolumeError, match="cannot be reserved") as caught,
        ):
            volume.grow(16 * MIB)
        assert caught.value.path == str(tmp_path / "1")
        assert [(directory / "data").read_bytes() for directory in volume.directories] == before
        assert volume.capacities == (MIB, 3 * MIB)
        volume.grow(16 * MIB)
        assert volume.capacities == (5 * MIB, 15 * MIB)


def test_growing_reserves_what_is_new_and_touches_nothing_else(
    tmp_path: Path, plain_queue: IOQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the C library's stand-in for a reservation could write over what another thread writes at
    that moment.
    """
    reserved: list[tuple[int, int]] = []
    real = os.posix_fallocate

    def remembered(descriptor: int, offset: int, length: int) -> None:
        reserved.append((offset, length))
        real(descriptor, offset, length)

    with Volume.create([tmp_path / "0"], MIB, queue=plain_queue) as volume:
        monkeypatch.setattr(os, "posix_fallocate", remembered)
        volume.grow(2 * MIB)
        assert reserved == [(PAGE + MIB, 2 * MIB)]


def test_a_file_whose_header_may_say_more_is_never_made_shorter(
    tmp_path: Path, plain_queue: IOQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs = iter([None, OSError(errno.EIO, "broken")])
    real = os.fsync

    def failing(descriptor: int) -> None:
        real(descriptor)
        if failure := next(syncs, None):
            raise failure

    data = tmp_path / "0" / "data"
    with Volume.create([tmp_path / "0"], MIB, queue=plain_queue) as volume:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", failing)
            with pytest.raises(VolumeError):
                volume.grow(8 * MIB)
        assert volume.capacities == (MIB,)
        with no_file_longer_than(64 * MIB), pytest.raises(VolumeError, match="cannot be reserved"):
            volume.grow(128 * MIB)
        assert data.stat().st_size == PAGE + 9 * MIB
        volume.grow(MIB)
        assert data.stat().st_size == PAGE + 9 * MIB
    with Volume.open([tmp_path / "0"], queue=plain_queue) as volume:
        assert volume.capacities == (2 * MIB,)


# --- for reading ----------------------------------------------------------------------------------


def test_a_volume_that_is_open_for_reading_refuses_what_writes(
    made: list[Path], plain_queue: IOQueue
) -> None:
    with Volume.open(made, access=Access.READ, queue=plain_queue) as volume:
        extent = Extent(0, PAGE, PAGE)
        changes: list[Callable[[], object]] = [
            lambda: volume.allocate(1),
            lambda: volume.allocate_run([1]),
            lambda: volume.pwrite([extent], bytes(PAGE)),
            lambda: volume.grow(1),
            volume.discard,
        ]
        for change in changes:
            with pytest.raises(VolumeError, match="opened for reading"):
                change()
        finish(volume.pread([extent], bytearray(PAGE)))
    assert all((directory / "data").exists() for directory in made)


@pytest.mark.parametrize("access", Access)
def test_a_volume_that_is_replaced_before_it_was_locked_is_not_mixed_with_the_other(
    tmp_path: Path, plain_queue: IOQueue, monkeypatch: pytest.MonkeyPatch, access: Access
) -> None:
    place = tmp_path / "0"
    Volume.create([place], MIB, queue=plain_queue).close()
    others: list[str] = []
    flock = fcntl.flock

    def replaced_first(descriptor: int, how: int) -> None:
        if not others:
            others.append("to come")
            shutil.rmtree(place)
            with Volume.create([place], MIB, queue=plain_queue) as other:
                others.append(other.uuid)
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", replaced_first)
    with Volume.open([place], access=access, queue=plain_queue) as volume:
        assert volume.uuid == others[1]
        assert lock_holder_of(place) == os.getpid()


# --- what is not ours -----------------------------------------------------------------------------


@pytest.mark.parametrize("access", Access)
def test_a_file_of_something_else_is_not_called_a_volume_to_be_removed(
    tmp_path: Path, plain_queue: IOQueue, access: Access
) -> None:
    (tmp_path / "data").write_text("id,label\n" * 1000)
    with pytest.raises(
        VolumeError, match=r"its data is another program's file.* name another directory"
    ) as caught:
        Volume.open([tmp_path], access=access, queue=plain_queue)
    assert "remove it" not in str(caught.value)


@pytest.mark.parametrize("access", Access)
@pytest.mark.parametrize("kind", ["directory", "link", "pipe"])
def test_a_name_that_is_no_file_is_no_volume(
    tmp_path: Path, plain_queue: IOQueue, kind: str, access: Access
) -> None:
    data = tmp_path / "data"
    make: dict[str, Callable[[], object]] = {
        "directory": data.mkdir,
        "link": lambda: data.symlink_to("elsewhere"),
        "pipe": lambda: os.mkfifo(data),
    }
    make[kind]()
    with pytest.raises(
        VolumeError, match="is not a regular file, so it is no volume's: name another directory"
    ):
        Volume.open([tmp_path], access=access, queue=plain_queue)


@pytest.mark.parametrize("most", [-PAGE, 5000])
def test_a_trim_of_no_whole_pages_changes_nothing(
    tmp_path: Path, plain_queue: IOQueue, most: int
) -> None:
    with Volume.create([tmp_path], 4 * MIB, queue=plain_queue) as volume:
        with pytest.raises(ValueError, match="whole pages"):
            volume.trim([most])
        assert volume.capacities == (4 * MIB,)
    with Volume.open([tmp_path], queue=plain_queue) as volume:
        assert volume.capacities == (4 * MIB,)
