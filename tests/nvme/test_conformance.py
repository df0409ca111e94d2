"""What every backend does the same: bytes go where they were sent and come back, whatever the size,
offset and memory.

The oracle is the kernel's ordinary read of the file (the queue's own for files in memory) and a
bytearray as model.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepnvme import (
    Direct,
    FaultPlan,
    File,
    IOFuture,
    IOQueue,
    NVMeError,
    Pool,
    Requests,
    ShortReadError,
    Sync,
    UserMemory,
)
from support.nvme_io import (
    CHUNK,
    PAGE,
    TIMEOUT_S,
    Home,
    assert_same,
    contents,
    filled,
    memory,
    pattern,
)

MIB = 1 << 20
SIZES = (0, 1, 511, 512, 4095, 4096, 4097, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 3)
OFFSETS = (0, 1, 511, 4096, 12345)


# --- round trips ----------------------------------------------------------------------------------


@pytest.mark.parametrize("home", Home, ids=lambda home: home.name.lower())
@pytest.mark.parametrize("nbytes", SIZES)
def test_what_was_written_is_read_back_at_any_size_offset_and_alignment(
    tmp_path: Path, backend: str, pool: Pool, home: Home, nbytes: int
) -> None:
    with IOQueue(backend, chunk_bytes=CHUNK, pool=pool) as queue:
        assert_round_trip(queue, tmp_path / "file", pool, home, nbytes)


# By default in three chunks, at one offset that is aligned and one that is not: the smallest chunks
# above meet all sizes and offsets.
@pytest.mark.parametrize("home", Home, ids=lambda home: home.name.lower())
@pytest.mark.parametrize(
    ("nbytes", "offsets"),
    [
        (2 * MIB + 3, (4096, 12345)),
        *(
            pytest.param(nbytes, OFFSETS, marks=pytest.mark.slow)
            for nbytes in (5 * MIB + 3, MIB - 1, MIB, MIB + 1)
        ),
    ],
    ids=str,
)
def test_what_was_written_in_chunks_of_the_usual_size_is_read_back(
    tmp_path: Path, backend: str, pool: Pool, home: Home, nbytes: int, offsets: Sequence[int]
) -> None:
    with IOQueue(backend, pool=pool) as queue:
        assert_round_trip(queue, tmp_path / "file", pool, home, nbytes, offsets)


def assert_round_trip(
    queue: IOQueue,
    path: Path,
    pool: Pool,
    home: Home,
    nbytes: int,
    offsets: Sequence[int] = OFFSETS,
) -> None:
    """Write and read so many bytes at each offset, among others which must stay."""
    background = pattern(nbytes + 20000, seed=1)
    with queue.open(path, "w") as file:
        for number, offset in enumerate(offsets):
            data = pattern(nbytes, seed=2 + number)
            file.pwrite(background).result(TIMEOUT_S)
            assert file.pwrite(filled(home, data, pool), offset).result(TIMEOUT_S) == nbytes
            assert_same(
                contents(queue, path), background[:offset] + data + background[offset + nbytes :]
            )
            back = memory(home, nbytes, pool)
            back[:] = 0xEE
            assert file.pread(back, offset).result(TIMEOUT_S) == nbytes
            assert_same(back, data)


@pytest.mark.parametrize("direct", [Direct.NEVER, Direct.AUTO])
@pytest.mark.parametrize("user_memory", UserMemory)
def test_every_way_through_the_page_cache_or_past_it_moves_the_same_bytes(
    tmp_path: Path, disk_backend: str, direct: Direct, user_memory: UserMemory
) -> None:
    data = pattern(5 * CHUNK + 77, seed=1)
    with (
        IOQueue(
            disk_backend, chunk_bytes=CHUNK, inflight_bytes=2 * CHUNK, user_memory=user_memory
        ) as queue,
        queue.open(tmp_path / "file", "w", direct=direct) as file,
    ):
        for offset in (0, 100):
            file.pwrite(data, offset).result(TIMEOUT_S)
            back = bytearray(len(data))
            file.pread(back, offset).result(TIMEOUT_S)
            assert_same(back, data)
    assert_same((tmp_path / "file").read_bytes()[100:], data)


def test_a_write_beyond_the_end_leaves_zeros_between(tmp_path: Path, queue: IOQueue) -> None:
    with queue.open(tmp_path / "file", "w") as file:
        file.pwrite(b"start").result(TIMEOUT_S)
        file.pwrite(b"far", 2 * CHUNK + 5).result(TIMEOUT_S)
        assert file.size == 2 * CHUNK + 8
    assert_same(contents(queue, tmp_path / "file"), b"start" + bytes(2 * CHUNK) + b"far")


def test_neighbours_in_one_page_written_at_the_same_time_all_survive(
    tmp_path: Path, queue: IOQueue
) -> None:
    random_source = random.Random(7)
    data = pattern(40 * PAGE, seed=7)
    cuts = sorted({0, len(data), *(random_source.randrange(len(data)) for _ in range(150))})
    pieces = list(itertools.pairwise(cuts))
    random_source.shuffle(pieces)
    with queue.open(tmp_path / "file", "w", size=len(data)) as file:
        for future in [file.pwrite(data[start:end], start) for start, end in pieces]:
            future.result(TIMEOUT_S)
    assert_same(contents(queue, tmp_path / "file"), data)


def test_an_extending_write_whose_ends_and_middle_travel_apart_arrives_whole(
    tmp_path: Path, queue: IOQueue
) -> None:
    for attempt in range(8):
        path = tmp_path / f"file{attempt}"
        data = pattern(3 * CHUNK + 4097, seed=attempt)
        with queue.open(path, "w") as file:
            parts = [(0, 5), (5, 2 * CHUNK + 1), (2 * CHUNK + 1, len(data))]
            for future in [file.pwrite(data[start:end], 12345 + start) for start, end in parts]:
                future.result(TIMEOUT_S)
        assert_same(contents(queue, path), bytes(12345) + data)


def test_an_operation_of_no_bytes_succeeds_and_changes_nothing(
    tmp_path: Path, queue: IOQueue
) -> None:
    with queue.open(tmp_path / "file", "w") as file:
        file.pwrite(b"abc").result(TIMEOUT_S)
        for offset in (0, 3, 1000):
            assert file.pwrite(b"", offset).result(TIMEOUT_S) == 0
            assert file.pread(bytearray(), offset).result(TIMEOUT_S) == 0
            assert file.readinto(bytearray(), offset).result(TIMEOUT_S) == 0
    assert contents(queue, tmp_path / "file") == b"abc"


# --- against a model ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One call, on the file of that number."""

    call: str
    file: int
    offset: int
    nbytes: int
    home: Home


EDGES = (0, 1, 511, 512, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK)
NUMBERS = st.sampled_from(EDGES) | st.integers(0, 3 * CHUNK)
STEPS = st.builds(
    Step,
    call=st.sampled_from(["pwrite", "pwrite", "pread", "readinto", "truncate", "sync"]),
    file=st.integers(0, 2),
    offset=NUMBERS,
    nbytes=NUMBERS,
    home=st.sampled_from(Home),
)


def take_step(step: Step, number: int, file: File, model: bytearray, pool: Pool) -> None:
    """Do it to the file and to the model, and compare what came back."""
    if step.call == "sync":
        assert file.sync(Sync.ALL if step.nbytes % 2 else Sync.DATA).result(TIMEOUT_S) == 0
        return
    if step.call == "truncate":
        file.truncate(step.offset)
        model[:] = model[: step.offset].ljust(step.offset, b"\0")
        return
    if step.call == "pwrite":
        data = pattern(step.nbytes, number)
        assert (
            file.pwrite(filled(step.home, data, pool), step.offset).result(TIMEOUT_S) == step.nbytes
        )
        if data:
            model[:] = model.ljust(step.offset, b"\0")
            model[step.offset : step.offset + step.nbytes] = data
        return
    buffer = memory(step.home, step.nbytes, pool)
    expected = model[step.offset : step.offset + step.nbytes]
    read = file.pread if step.call == "pread" else file.readinto
    future = read(buffer, step.offset)
    if step.call == "pread" and len(expected) < step.nbytes:
        error = future.exception(TIMEOUT_S)
        assert isinstance(error, ShortReadError)
        assert error.done == len(expected)
    else:
        assert future.result(TIMEOUT_S) == len(expected)
    assert_same(buffer[: len(expected)], expected)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps=st.lists(STEPS, min_size=1, max_size=14), user_memory=st.sampled_from(UserMemory))
def test_files_hold_what_a_bytearray_would_after_any_sequence_of_calls(
    tmp_path: Path, backend: str, pool: Pool, steps: list[Step], user_memory: UserMemory
) -> None:
    paths = [tmp_path / f"file{number}" for number in range(3)]
    models = [bytearray() for _ in paths]
    with IOQueue(
        backend, chunk_bytes=CHUNK, inflight_bytes=2 * CHUNK, pool=pool, user_memory=user_memory
    ) as queue:
        files = [queue.open(path, "w") for path in paths]
        for number, step in enumerate(steps):
            take_step(step, number, files[step.file], models[step.file], pool)
            assert files[step.file].size == len(models[step.file])
            assert_same(contents(queue, paths[step.file]), models[step.file])
        for path, model in zip(paths, models, strict=True):
            assert_same(contents(queue, path), model)


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32), nbytes=st.integers(1, 6 * CHUNK), pieces=st.integers(1, 40))
def test_pieces_written_and_read_in_any_order_all_at_once_make_the_whole(
    tmp_path: Path, backend: str, seed: int, nbytes: int, pieces: int
) -> None:
    random_source = random.Random(seed)
    data = pattern(nbytes, seed)
    cuts = sorted({0, nbytes, *(random_source.randrange(nbytes) for _ in range(pieces))})
    ranges = list(itertools.pairwise(cuts))
    random_source.shuffle(ranges)
    with (
        IOQueue(backend, chunk_bytes=CHUNK, inflight_bytes=4 * CHUNK) as queue,
        queue.open(tmp_path / "file", "w") as file,
    ):
        for future in [file.pwrite(data[start:end], start) for start, end in ranges]:
            future.result(TIMEOUT_S)
        back = bytearray(nbytes)
        with memoryview(back) as view:
            for future in [file.pread(view[start:end], start) for start, end in ranges]:
                future.result(TIMEOUT_S)
    assert_same(back, data)


# --- the end of the file --------------------------------------------------------------------------

Read = Callable[[File, bytearray, int], "IOFuture[int]"]


@pytest.mark.parametrize(
    ("length", "offset", "asked"), [(5, 0, 9), (5, 5, 1), (5, 7, 3), (CHUNK, PAGE, 2 * CHUNK)]
)
def test_a_pread_past_the_end_is_a_short_read_error_that_says_how_much_came(
    tmp_path: Path, queue: IOQueue, length: int, offset: int, asked: int
) -> None:
    data = pattern(length, seed=3)
    buffer = bytearray(asked)
    with queue.open(tmp_path / "file", "w") as file:
        file.pwrite(data).result(TIMEOUT_S)
        error = file.pread(buffer, offset).exception(TIMEOUT_S)
    came = max(0, length - offset)
    assert isinstance(error, ShortReadError)
    assert (error.done, error.asked, error.offset) == (came, asked, offset)
    assert_same(buffer[:came], data[offset:])


@pytest.mark.parametrize(
    ("length", "offset", "asked"), [(5, 0, 9), (5, 5, 1), (5, 7, 3), (CHUNK, PAGE, 2 * CHUNK)]
)
def test_readinto_ends_at_the_end_of_the_file(
    tmp_path: Path, queue: IOQueue, length: int, offset: int, asked: int
) -> None:
    data = pattern(length, seed=3)
    buffer = bytearray(asked)
    came = max(0, length - offset)
    with queue.open(tmp_path / "file", "w") as file:
        file.pwrite(data).result(TIMEOUT_S)
        assert file.readinto(buffer, offset).result(TIMEOUT_S) == came
    assert_same(buffer[:came], data[offset:])


@pytest.mark.parametrize("offset", [0, CHUNK, 2 * CHUNK])
def test_a_file_that_another_process_cut_is_an_error_not_a_short_success(
    tmp_path: Path, disk_queue: IOQueue, offset: int
) -> None:
    path = tmp_path / "file"
    with disk_queue.open(path, "w") as file:
        file.pwrite(pattern(3 * CHUNK, seed=1)).result(TIMEOUT_S)
        os.truncate(path, CHUNK + 10)
        error = file.readinto(bytearray(3 * CHUNK), offset).exception(TIMEOUT_S)
    assert isinstance(error, ShortReadError)
    assert error.done == max(0, CHUNK + 10 - offset)
    assert "another process cut it" in str(error)
    assert "accepts fewer" not in str(error)


def test_a_file_that_we_cut_ourselves_is_as_long_as_we_made_it(
    tmp_path: Path, queue: IOQueue
) -> None:
    with queue.open(tmp_path / "file", "w") as file:
        file.pwrite(pattern(3 * CHUNK, seed=1)).result(TIMEOUT_S)
        file.truncate(CHUNK + 10)
        assert file.readinto(bytearray(3 * CHUNK)).result(TIMEOUT_S) == CHUNK + 10


# --- opening and sizing ---------------------------------------------------------------------------


def test_mode_w_leaves_nothing_of_an_older_and_longer_file(tmp_path: Path, queue: IOQueue) -> None:
    for length in (3 * CHUNK + 5, 10):
        with queue.open(tmp_path / "file", "w") as file:
            file.pwrite(pattern(length, seed=length)).result(TIMEOUT_S)
    assert contents(queue, tmp_path / "file") == pattern(10, seed=10)


def test_mode_r_plus_keeps_what_is_not_overwritten(tmp_path: Path, queue: IOQueue) -> None:
    with queue.open(tmp_path / "file", "w") as file:
        file.pwrite(b"0123456789").result(TIMEOUT_S)
    with queue.open(tmp_path / "file", "r+") as file:
        file.pwrite(b"ab", 3).result(TIMEOUT_S)
    assert contents(queue, tmp_path / "file") == b"012ab56789"


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_file_that_is_not_there_is_file_not_found_with_its_path(
    tmp_path: Path, queue: IOQueue, mode: str
) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        queue.open(tmp_path / "missing", mode)  # type: ignore[arg-type]
    assert caught.value.filename == str(tmp_path / "missing")


def test_mode_x_refuses_a_file_that_is_there(tmp_path: Path, queue: IOQueue) -> None:
    queue.open(tmp_path / "file", "x").close()
    with pytest.raises(FileExistsError):
        queue.open(tmp_path / "file", "x")


def test_a_directory_is_not_a_file(tmp_path: Path, disk_queue: IOQueue) -> None:
    with pytest.raises(IsADirectoryError):
        disk_queue.open(tmp_path, "r")


def test_a_path_with_a_null_byte_is_refused_rather_than_cut_there(
    tmp_path: Path, queue: IOQueue
) -> None:
    with pytest.raises(ValueError, match="null"):
        queue.open(f"{tmp_path}/file\0.bin", "w")
    assert not list(tmp_path.iterdir())


def test_an_unknown_mode_is_refused_with_those_there_are(tmp_path: Path, queue: IOQueue) -> None:
    with pytest.raises(ValueError, match=r"r, r\+, w, x"):
        queue.open(tmp_path / "file", "a")  # type: ignore[arg-type]


@pytest.mark.parametrize("nbytes", [0, 1, 3 * CHUNK + 1])
def test_a_size_is_reserved_when_the_file_is_opened(
    tmp_path: Path, queue: IOQueue, nbytes: int
) -> None:
    with queue.open(tmp_path / "file", "w", size=nbytes) as file:
        assert file.size == nbytes
    assert_same(contents(queue, tmp_path / "file"), bytes(nbytes))


def test_a_path_may_be_relative_and_of_either_type(
    tmp_path: Path, disk_queue: IOQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("text", Path("object")):
        with disk_queue.open(path, "w") as file:
            file.pwrite(b"here").result(TIMEOUT_S)
            assert file.path == str(tmp_path / path)
        assert (tmp_path / path).read_bytes() == b"here"


def test_a_file_tells_its_alignment_and_whether_it_is_direct(
    tmp_path: Path, disk_queue: IOQueue
) -> None:
    with (
        disk_queue.open(tmp_path / "file", "w") as file,
        disk_queue.open(tmp_path / "file", "r", direct=Direct.NEVER) as plain,
    ):
        assert file.alignment % PAGE == 0
        assert file.memory_alignment & (file.memory_alignment - 1) == 0
        assert not plain.direct


def test_negative_sizes_and_offsets_are_refused(tmp_path: Path, queue: IOQueue) -> None:
    with queue.open(tmp_path / "file", "w") as file:
        for call in (
            lambda: file.pwrite(b"x", -1),
            lambda: file.pread(bytearray(1), -1),
            lambda: file.truncate(-1),
            lambda: file.preallocate(-1),
        ):
            with pytest.raises(ValueError, match="negative"):
                call()


def test_an_offset_is_an_integer_of_any_kind_or_a_size_in_text_and_nothing_else(
    tmp_path: Path, queue: IOQueue
) -> None:
    buffer = bytearray(2)
    with queue.open(tmp_path / "file", "w") as file:
        file.pwrite(b"abcd", np.int64(0)).result(TIMEOUT_S)
        file.pread(buffer, np.uint8(2)).result(TIMEOUT_S)
        file.pread(buffer, "2B").result(TIMEOUT_S)
        for offset in (1.0, "1", None):
            with pytest.raises(
                (TypeError, ValueError), match=r"^offset(:| must be a whole number)"
            ):
                file.pread(buffer, offset)  # type: ignore[arg-type]
    assert buffer == b"cd"
    buffer.append(0)  # nothing refused holds on to it


@pytest.mark.parametrize("offset", [2**63 - 1, 2**63, 2**64 - PAGE, 2**64 - 1, 2**64, 2**80])
def test_an_offset_that_no_file_has_is_refused_and_reaches_no_other_place(
    tmp_path: Path, queue: IOQueue, offset: int
) -> None:
    with queue.open(tmp_path / "file", "w") as file:
        file.pwrite(b"untouched").result(TIMEOUT_S)
        with pytest.raises(ValueError, match="offset"):
            file.pwrite(bytes(2 * PAGE), offset)
        with pytest.raises(ValueError, match="offset"):
            file.pread(bytearray(2), offset)
    assert contents(queue, tmp_path / "file") == b"untouched"


# --- sync -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", Sync)
def test_a_sync_ends_after_every_write_submitted_before_it(
    tmp_path: Path, backend: str, what: Sync
) -> None:
    slow_writes = FaultPlan().delay(delay_us=50_000, every=1, requests=Requests.WRITES)
    ended: list[str] = []

    def note(name: str) -> Callable[[object], None]:
        return lambda _: ended.append(name)

    with IOQueue(backend, faults=slow_writes) as queue, queue.open(tmp_path / "file", "w") as file:
        writes = [file.pwrite(pattern(PAGE, seed), seed * PAGE) for seed in range(3)]
        for write in writes:
            write.add_done_callback(note("write"))
        sync = file.sync(what)
        sync.add_done_callback(note("sync"))
        assert sync.result(TIMEOUT_S) == 0
        assert all(write.done() for write in writes)
    assert ended == ["write", "write", "write", "sync"]


def test_two_syncs_behind_one_write_both_end(tmp_path: Path, queue: IOQueue) -> None:
    with queue.open(tmp_path / "file", "w") as file:
        futures = [
            file.pwrite(pattern(9 * CHUNK, 1)),
            file.sync(),
            file.sync(Sync.ALL),
            file.pwrite(b"x"),
            file.sync(),
        ]
        assert [future.result(TIMEOUT_S) for future in futures] == [9 * CHUNK, 0, 0, 1, 0]


# --- statistics and the budget --------------------------------------------------------------------


def test_statistics_count_operations_chunks_and_bytes(tmp_path: Path, backend: str) -> None:
    with (
        IOQueue(backend, chunk_bytes=CHUNK, inflight_bytes=4 * CHUNK) as queue,
        queue.open(tmp_path / "file", "w") as file,
    ):
        file.pwrite(memory(Home.PAGES, 3 * CHUNK, Pool(1))).result(TIMEOUT_S)
        file.pread(memory(Home.PAGES, 2 * CHUNK, Pool(1))).result(TIMEOUT_S)
        file.sync().result(TIMEOUT_S)
        assert isinstance(file.pread(bytearray(1), 9 * CHUNK).exception(TIMEOUT_S), ShortReadError)
        direct = file.direct
    stats = queue.stats()
    (drive,) = stats.drives.values()
    assert stats.backend == backend
    assert drive.backend.startswith("fault") is False
    assert (drive.operations, drive.failed, drive.chunks) == (4, 1, 7)
    assert (drive.written_bytes, drive.read_bytes) == (3 * CHUNK, 2 * CHUNK)
    assert (drive.bounced_bytes, drive.buffered_bytes) == (0, 1 if direct else 5 * CHUNK + 1)
    assert (drive.retries, drive.direct_refused, drive.inflight_bytes) == (0, 0, 0)
    assert 0 < drive.p50_us <= drive.p99_us


def test_statistics_tell_what_was_copied(tmp_path: Path, disk_queue: IOQueue, pool: Pool) -> None:
    with disk_queue.open(tmp_path / "file", "w") as file:
        if not file.direct:
            pytest.skip("this file system takes no direct I/O: nothing is bounced")
        file.pwrite(filled(Home.ODD, pattern(2 * CHUNK, 1), pool), 100).result(TIMEOUT_S)
        (drive,) = disk_queue.stats().drives.values()
    assert drive.bounced_bytes == 2 * CHUNK - PAGE
    assert drive.buffered_bytes == PAGE


@pytest.mark.parametrize("home", Home, ids=lambda home: home.name.lower())
def test_no_more_bytes_are_in_flight_than_the_budget_allows(
    tmp_path: Path, backend: str, pool: Pool, home: Home
) -> None:
    budget = 3 * CHUNK + 100
    with (
        IOQueue(backend, chunk_bytes=CHUNK, inflight_bytes=budget, pool=pool) as queue,
        queue.open(tmp_path / "file", "w") as file,
    ):
        futures = [
            file.pwrite(filled(home, pattern(CHUNK + 777, n), pool), n * 2 * CHUNK)
            for n in range(20)
        ]
        for future in futures:
            future.result(TIMEOUT_S)
    (drive,) = queue.stats().drives.values()
    assert 0 < drive.peak_inflight_bytes <= budget


@pytest.mark.parametrize(
    "wrong",
    [
        {"chunk_bytes": 1000},
        {"chunk_bytes": 0},
        {"chunk_bytes": 2 << 30, "inflight_bytes": 2 << 30},
        {"inflight_bytes": 1000},
        {"max_pending": 0},
    ],
)
def test_sizes_that_make_no_sense_are_told_when_the_queue_is_made(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must"):
        IOQueue("memory", **wrong)  # type: ignore[arg-type]


def test_a_budget_of_more_than_any_arena_holds_is_as_good_as_any(
    tmp_path: Path, disk_backend: str, pool: Pool
) -> None:
    data = pattern(20 * CHUNK, seed=1)
    with (
        IOQueue(disk_backend, chunk_bytes=CHUNK, inflight_bytes=2 << 30) as queue,
        queue.open(tmp_path / "file", "w") as file,
    ):
        assert file.pwrite(filled(Home.ODD, data, pool)).result(TIMEOUT_S) == len(data)
    assert_same((tmp_path / "file").read_bytes(), data)


# --- batches --------------------------------------------------------------------------------------


def test_a_batch_ends_with_all_its_bytes_moved(tmp_path: Path, queue: IOQueue) -> None:
    left, right = bytearray(CHUNK + 1), bytearray(7)
    with queue.open(tmp_path / "file", "w") as file:
        with queue.batch() as batch:
            batch.pwrite(file, pattern(CHUNK + 1, 1), 0)
            batch.pwrite(file, pattern(7, 2), CHUNK + 1)
        batch.pread(file, left, 0)
        batch.pread(file, right, CHUNK + 1)
        assert batch.wait() == CHUNK + 8
    assert_same(left + right, pattern(CHUNK + 1, 1) + pattern(7, 2))


@contextmanager
def opened_with(backend: str, path: Path, faults: FaultPlan) -> Iterator[tuple[IOQueue, File]]:
    with IOQueue(backend, faults=faults) as queue, queue.open(path, "w") as file:
        yield queue, file


def test_a_batch_with_one_failure_raises_it_after_all_the_others_ended(
    tmp_path: Path, backend: str
) -> None:
    with opened_with(backend, tmp_path / "file", FaultPlan().fail(nth=2)) as (queue, file):
        batch = queue.batch()
        for number in range(4):
            batch.pwrite(file, bytes([number]) * PAGE, number * PAGE)
        futures = list(batch.futures)
        with pytest.raises(NVMeError) as caught:
            batch.wait()
        assert (caught.value.offset, caught.value.asked, caught.value.done) == (PAGE, PAGE, 0)
        assert all(future.done() for future in futures)
        assert np.frombuffer(contents(queue, tmp_path / "file"), np.uint8)[-1] == 3


def test_ids_of_drives_are_device_numbers(tmp_path: Path, disk_queue: IOQueue) -> None:
    with disk_queue.open(tmp_path / "file", "w"):
        assert list(disk_queue.stats().drives) == [tmp_path.stat().st_dev]
