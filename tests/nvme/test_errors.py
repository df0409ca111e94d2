"""Every failure says which operation, on which file, where, how much and why, also in another
process.
"""

from __future__ import annotations

import errno
import pickle
from pathlib import Path

import pytest

from deepnvme import (
    BackendUnavailableError,
    BatchError,
    ClosedError,
    FaultPlan,
    ForkedError,
    IOQueue,
    NVMeError,
    Pool,
    PoolExhaustedError,
    QueueFull,
    Requests,
    ShortReadError,
    Sync,
)
from support.nvme_io import CHUNK, PAGE, TIMEOUT_S, contents, pattern


def failed(future: object) -> NVMeError:
    """Return the error that the operation ended with."""
    error = future.exception(TIMEOUT_S)  # type: ignore[attr-defined]
    assert isinstance(error, NVMeError)
    return error


# --- what an error says ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "op", "asked", "offset"),
    [("pread", "read", 3, 7), ("readinto", "read", 3, 7), ("pwrite", "write", 3, 7)],
)
def test_an_error_names_the_operation_the_file_the_place_and_the_reason(
    tmp_path: Path, backend: str, call: str, op: str, asked: int, offset: int
) -> None:
    with (
        IOQueue(backend, faults=FaultPlan().fail(every=1, errno=errno.EIO)) as queue,
        queue.open(tmp_path / "file", "w") as file,
    ):
        error = failed(getattr(file, call)(bytearray(asked), offset))
    assert type(error) is NVMeError
    assert (error.op, error.path, error.filename) == (
        op,
        str(tmp_path / "file"),
        str(tmp_path / "file"),
    )
    assert (error.offset, error.asked, error.done) == (offset, asked, 0)
    assert (error.errno, error.backend) == (errno.EIO, backend)
    for part in (
        op,
        str(tmp_path / "file"),
        f"{asked} B",
        f"offset {offset}",
        "Input/output error",
        backend,
    ):
        assert part in str(error)


@pytest.mark.parametrize(("what", "op"), [(Sync.DATA, "sync_data"), (Sync.ALL, "sync_all")])
def test_a_failed_sync_is_an_error_with_its_file(
    tmp_path: Path, backend: str, what: Sync, op: str
) -> None:
    with (
        IOQueue(
            backend, faults=FaultPlan().fail(every=1, errno=errno.ENOSPC, requests=Requests.SYNCS)
        ) as queue,
        queue.open(tmp_path / "file", "w") as file,
    ):
        error = failed(file.sync(what))
    assert (error.op, error.path, error.errno) == (op, str(tmp_path / "file"), errno.ENOSPC)
    assert "the file system is full" in str(error)


@pytest.mark.parametrize("nth", [1, 2, 4])
def test_done_is_the_length_of_the_prefix_that_is_certain(
    tmp_path: Path, backend: str, nth: int
) -> None:
    data = pattern(4 * CHUNK, seed=1)
    with (
        IOQueue(
            backend,
            chunk_bytes=CHUNK,
            inflight_bytes=4 * CHUNK,
            faults=FaultPlan().fail(nth=nth, requests=Requests.WRITES),
        ) as queue,
        queue.open(tmp_path / "file", "w") as file,
    ):
        error = failed(file.pwrite(data))
        assert error.done == (nth - 1) * CHUNK
        assert contents(queue, tmp_path / "file")[: error.done] == data[: error.done]


def test_after_a_failed_chunk_no_further_one_is_issued(tmp_path: Path) -> None:
    with (
        IOQueue(
            "memory", chunk_bytes=CHUNK, inflight_bytes=CHUNK, faults=FaultPlan().fail(nth=2)
        ) as queue,
        queue.open(tmp_path / "file", "w") as file,
    ):
        assert failed(file.pwrite(bytes(8 * CHUNK))).done == CHUNK
        (drive,) = queue.stats().drives.values()
        assert drive.chunks == 2
        assert file.size == CHUNK


def test_writing_to_a_file_opened_for_reading_is_an_error_that_says_so(
    tmp_path: Path, queue: IOQueue
) -> None:
    with queue.open(tmp_path / "file", "w") as file:
        file.pwrite(b"kept" * PAGE).result(TIMEOUT_S)
    with queue.open(tmp_path / "file", "r") as file:
        if queue.backend == "memory":
            pytest.skip("files in memory know no rights")
        for data in (b"lost", b"lost" * PAGE):
            error = failed(file.pwrite(data))
            assert (error.errno, error.done) == (errno.EBADF, 0)
            assert "opened for reading only" in str(error)
    assert contents(queue, tmp_path / "file") == b"kept" * PAGE


@pytest.mark.parametrize("call", ["truncate", "preallocate"])
def test_changing_the_length_of_a_file_opened_for_reading_says_so(
    tmp_path: Path, call: str
) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    with IOQueue() as queue, queue.open(tmp_path / "file") as file:
        with pytest.raises(OSError, match=f"{call}: .*open it with mode 'r\\+'") as caught:
            getattr(file, call)(10)
        assert caught.value.errno == errno.EBADF
    assert (tmp_path / "file").read_bytes() == b"abc"


def test_a_short_read_is_an_end_of_file_error_and_an_os_error(
    tmp_path: Path, queue: IOQueue
) -> None:
    with queue.open(tmp_path / "file", "w") as file:
        file.pwrite(b"abc").result(TIMEOUT_S)
        error = failed(file.pread(bytearray(10), 1))
    assert isinstance(error, ShortReadError)
    assert isinstance(error, EOFError)
    assert (error.op, error.offset, error.asked, error.done) == ("read", 1, 10, 2)
    assert (error.path, error.backend) == (str(tmp_path / "file"), queue.backend)
    assert "all of it has to be there (a single readinto() accepts fewer)" in str(error)


# --- batches --------------------------------------------------------------------------------------


def test_a_batch_collects_every_error(tmp_path: Path, backend: str) -> None:
    with (
        IOQueue(backend, faults=FaultPlan().fail(every=2, errno=errno.EIO)) as queue,
        queue.open(tmp_path / "file", "w") as file,
    ):
        batch = queue.batch()
        for number in range(6):
            batch.pwrite(file, b"x" * PAGE, number * PAGE)
        with pytest.raises(BatchError, match="3 operations of the batch failed") as caught:
            batch.wait()
    assert sorted(error.offset for error in caught.value.errors) == [PAGE, 3 * PAGE, 5 * PAGE]
    assert caught.value.errno == errno.EIO
    assert caught.value.path == str(tmp_path / "file")


def test_a_batch_whose_body_fails_waits_for_what_was_submitted_and_raises_the_bodys_error(
    tmp_path: Path, queue: IOQueue
) -> None:
    batch = queue.batch()

    def body() -> None:
        with batch:
            batch.pwrite(file, pattern(9 * CHUNK, seed=1))
            raise RuntimeError("the body's own")

    with queue.open(tmp_path / "file", "w") as file:
        with pytest.raises(RuntimeError, match="the body's own"):
            body()
        assert all(future.done() for future in batch.futures)
        assert file.size == 9 * CHUNK


# --- closed things --------------------------------------------------------------------------------


def test_a_closed_file_takes_no_more(tmp_path: Path, queue: IOQueue) -> None:
    file = queue.open(tmp_path / "file", "w")
    file.close()
    file.close()
    assert file.closed
    for call in (
        lambda: file.pread(bytearray(1)),
        lambda: file.pwrite(b"x"),
        file.sync,
        lambda: file.size,
        lambda: file.truncate(0),
        lambda: file.preallocate(0),
    ):
        with pytest.raises(ClosedError, match="is closed"):
            call()


def test_a_closed_queue_takes_no_more(tmp_path: Path, queue: IOQueue, pool: Pool) -> None:
    file = queue.open(tmp_path / "file", "w")
    queue.close()
    queue.close()
    assert queue.closed
    for call in (
        lambda: file.pwrite(b"x"),
        file.sync,
        lambda: queue.open(tmp_path / "file"),
        lambda: queue.use_pool(pool),
    ):
        with pytest.raises(ClosedError, match="make another queue"):
            call()


def test_a_closed_queue_still_tells_what_it_did(tmp_path: Path, queue: IOQueue) -> None:
    with queue.open(tmp_path / "file", "w") as file:
        file.pwrite(b"abc").result(TIMEOUT_S)
    queue.close()
    (drive,) = queue.stats().drives.values()
    assert (drive.operations, drive.written_bytes) == (1, 3)
    assert queue.stats().pending == 0


# --- to and from another process ------------------------------------------------------------------

MADE = NVMeError(
    errno.EIO, "why", op="read", path="/a/file", offset=1, asked=9, done=4, backend="uring"
)
ERRORS = (
    MADE,
    ShortReadError(
        errno.ENODATA, "short", op="read", path="/a/file", offset=1, asked=9, done=4, backend="aio"
    ),
    BatchError([MADE, NVMeError(errno.ENOSPC, "full")]),
    QueueFull(7),
    ClosedError("closed"),
    ForkedError("forked"),
    PoolExhaustedError("exhausted"),
    BackendUnavailableError(errno.EPERM, "refused"),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_survives_pickling_whole(error: NVMeError, protocol: int) -> None:
    back = pickle.loads(pickle.dumps(error, protocol))
    assert type(back) is type(error)
    assert str(back) == str(error)
    for field in (
        "errno",
        "strerror",
        "filename",
        "args",
        "op",
        "path",
        "offset",
        "asked",
        "done",
        "backend",
    ):
        assert getattr(back, field) == getattr(error, field), field
    assert [str(one) for one in getattr(back, "errors", ())] == [
        str(one) for one in getattr(error, "errors", ())
    ]


def test_every_error_is_an_os_error_of_ours_and_of_the_kind_that_is_usually_caught() -> None:
    for error, kind in zip(
        ERRORS[3:7], (OSError, ValueError, RuntimeError, MemoryError), strict=True
    ):
        assert isinstance(error, NVMeError)
        assert isinstance(error, kind)


# --- the pool -------------------------------------------------------------------------------------


def test_an_exhausted_pool_says_what_was_asked_what_is_free_and_in_what_pieces() -> None:
    pool = Pool(4 * PAGE)
    kept = [pool.buffer(PAGE) for _ in range(4)]
    del kept[2], kept[0]
    with pytest.raises(PoolExhaustedError) as caught:
        pool.buffer(2 * PAGE)
    for number in (2 * PAGE, 4 * PAGE, PAGE):
        assert str(number) in str(caught.value)
    assert caught.value.errno == errno.ENOMEM
