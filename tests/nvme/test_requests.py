"""Small requests, whose turn it is, and taking back: pieces, unaligned reads, lanes, deadlines."""

from __future__ import annotations

import asyncio
import errno
import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepnvme import (
    DeadlineError,
    FaultPlan,
    File,
    IOFuture,
    IOQueue,
    NVMeError,
    Priority,
    ShortReadError,
)
from deepnvme.queue.queue import _pieces_of
from support.nvme_held import held, until
from support.nvme_io import CHUNK, PAGE, TIMEOUT_S, assert_same, contents, pattern

# --- several pieces as one operation --------------------------------------------------------------


def test_many_pieces_are_written_and_read_as_one_operation(tmp_path: Path, queue: IOQueue) -> None:
    sizes = [1, 0, PAGE, 3 * CHUNK + 5, 700]
    places = [9, 0, 2 * PAGE, 4 * PAGE + 1, 100 * PAGE]
    data = [pattern(nbytes, seed) for seed, nbytes in enumerate(sizes)]
    with queue.open(tmp_path / "file", "w") as file:
        assert file.pwrite_many(data, places).result(TIMEOUT_S) == sum(sizes)
        buffers = [bytearray(nbytes) for nbytes in sizes]
        assert file.pread_many(buffers, places).result(TIMEOUT_S) == sum(sizes)
        assert buffers == data
        assert [drive.operations for drive in queue.stats().drives.values()] == [2]
    whole = contents(queue, tmp_path / "file")
    for piece, place in zip(data, places, strict=True):
        assert_same(whole[place : place + len(piece)], piece)


def test_one_buffer_is_cut_into_equal_pieces(tmp_path: Path, queue: IOQueue) -> None:
    records = np.arange(8 * 512, dtype=np.uint64).reshape(8, 512)
    with queue.open(tmp_path / "file", "w") as file:
        file.pwrite(records).result(TIMEOUT_S)
        chosen = np.empty((3, 512), np.uint64)
        assert file.pread_many(chosen, [PAGE * row for row in (6, 0, 3)]).result(TIMEOUT_S)
    assert (chosen == records[[6, 0, 3]]).all()


def test_error_of_many_pieces_says_where_in_the_file_it_was(tmp_path: Path, queue: IOQueue) -> None:
    with queue.open(tmp_path / "file", "w") as file:
        file.pwrite(bytes(3 * PAGE)).result(TIMEOUT_S)
        with pytest.raises(ShortReadError) as caught:
            file.pread_many(bytearray(3 * PAGE), [PAGE, 3 * PAGE - 100, 0]).result(TIMEOUT_S)
    assert (caught.value.offset, caught.value.done) == (3 * PAGE, PAGE + 100)


@pytest.mark.parametrize("offsets", [[0], [0, 1, 2], []])
def test_buffers_that_do_not_fit_the_offsets_are_refused(
    tmp_path: Path, queue: IOQueue, offsets: list[int]
) -> None:
    with queue.open(tmp_path / "file", "w") as file:
        with pytest.raises(ValueError, match="offset"):
            file.pread_many([bytearray(4), bytearray(4)], offsets)
        if len(offsets) != 1:
            with pytest.raises(ValueError, match="equal parts"):
                file.pread_many(bytearray(4), offsets)


@pytest.mark.parametrize(
    ("place", "said"), [(-1, "negative"), (1 << 63, "where the largest file ends")]
)
def test_a_piece_that_is_in_no_file_is_refused(
    tmp_path: Path, queue: IOQueue, place: int, said: str
) -> None:
    with queue.open(tmp_path / "file", "w") as file:
        for buffers in (bytearray(8), [bytearray(4), bytearray(4)]):
            with pytest.raises(ValueError, match=said):
                file.pread_many(buffers, [0, place])


def test_views_among_the_pieces_may_be_released_meanwhile(tmp_path: Path, queue: IOQueue) -> None:
    data = pattern(3 * PAGE, 1)
    with queue.open(tmp_path / "file", "w") as file:
        file.pwrite(data).result(TIMEOUT_S)
        memory = bytearray(3 * PAGE)
        views = [memoryview(memory)[start : start + PAGE] for start in range(0, 3 * PAGE, PAGE)]
        future = file.pread_many(views, [0, PAGE, 2 * PAGE])
        for view in views:
            view.release()
        assert future.result(TIMEOUT_S) == 3 * PAGE
    assert memory == data


def test_memory_of_pieces_is_held_unseen_by_the_garbage_collector() -> None:
    memory = bytearray(500 * PAGE)
    views = [memoryview(memory)[at * PAGE : (at + 1) * PAGE] for at in range(500)]
    before = len(gc.get_objects())
    held = _pieces_of(views, range(0, len(memory), PAGE), writable=True)
    assert len(gc.get_objects()) < before + 100
    for view in views:
        view.release()
    with pytest.raises(BufferError):
        memory.append(0)
    del held
    memory.append(0)


def test_views_and_arrays_may_be_pieces_of_one_operation(tmp_path: Path, queue: IOQueue) -> None:
    data = pattern(2 * PAGE, 1)
    with queue.open(tmp_path / "file", "w") as file:
        file.pwrite(data).result(TIMEOUT_S)
        memory, row = bytearray(PAGE), np.empty(PAGE, np.uint8)
        pieces = (memoryview(memory), row)
        assert file.pread_many(pieces, [PAGE, 0]).result(TIMEOUT_S) == 2 * PAGE
    assert memory + row.tobytes() == data[PAGE:] + data[:PAGE]


@pytest.mark.parametrize(
    ("unusable", "error", "why"),
    [
        (memoryview(bytes(4)), BufferError, "read-only"),
        (memoryview(bytearray(8))[::2], ValueError, "not contiguous"),
        (np.empty(1, object).data, TypeError, "Python objects"),
        (np.empty((4, 4))[:, 0], ValueError, "not contiguous"),
    ],
)
def test_an_unusable_piece_among_views_is_refused_with_the_reason(
    tmp_path: Path, queue: IOQueue, unusable: object, error: type[Exception], why: str
) -> None:
    usable = memoryview(bytearray(4))
    with queue.open(tmp_path / "file", "w") as file, pytest.raises(error, match=why):
        file.pread_many([usable, unusable], [0, 8])


def test_a_released_view_among_the_pieces_is_refused(tmp_path: Path, queue: IOQueue) -> None:
    usable, released = memoryview(bytearray(4)), memoryview(bytearray(4))
    released.release()
    with queue.open(tmp_path / "file", "w") as file, pytest.raises(ValueError, match="released"):
        file.pread_many([usable, released], [0, 8])


# --- unaligned reads ------------------------------------------------------------------------------


@pytest.mark.parametrize(("offset", "nbytes"), [(1, 1), (77, PAGE), (PAGE - 1, 100_000)])
def test_an_unaligned_read_is_one_direct_request(
    tmp_path: Path, disk_backend: str, offset: int, nbytes: int
) -> None:
    data = pattern(60 * PAGE, seed=1)
    (tmp_path / "file").write_bytes(data)
    with IOQueue(disk_backend) as queue, queue.open(tmp_path / "file") as file:
        if not file.direct:
            pytest.skip("the file system has no direct I/O")
        buffer = bytearray(nbytes)
        assert file.pread(buffer, offset).result(TIMEOUT_S) == nbytes
        (drive,) = queue.stats().drives.values()
        assert (drive.chunks, drive.buffered_bytes) == (1, 0)
        assert drive.own_bytes <= 16 << 20
    assert_same(buffer, data[offset : offset + nbytes])


@pytest.mark.parametrize("past", [1, 100, PAGE, 3 * PAGE])
def test_an_unaligned_read_past_the_end_ends_there(
    tmp_path: Path, disk_backend: str, past: int
) -> None:
    data = pattern(2 * PAGE + 5, seed=2)
    (tmp_path / "file").write_bytes(data)
    with IOQueue(disk_backend) as queue, queue.open(tmp_path / "file") as file:
        buffer = bytearray(PAGE + past)
        start = len(data) - PAGE
        assert file.readinto(buffer, start).result(TIMEOUT_S) == PAGE
        assert_same(buffer[:PAGE], data[start:])
        with pytest.raises(ShortReadError) as caught:
            file.pread(buffer, start).result(TIMEOUT_S)
        assert caught.value.done == PAGE
        assert file.readinto(buffer, len(data) + past).result(TIMEOUT_S) == 0


# --- whose turn it is -----------------------------------------------------------------------------


def names_as_they_end(futures: dict[str, IOFuture[int]]) -> list[str]:
    """Return the names of operations in the order of their ends."""
    order: list[str] = []
    for name, future in futures.items():
        future.add_done_callback(lambda _, name=name: order.append(name))  # type: ignore[misc]
    # Nothing waits for a future: a waiting thread takes what has ended, and hands back what has a
    # callback, while the queue's own thread may be at the callback of what ended next.
    until(lambda: len(order) == len(futures))
    for future in futures.values():
        future.result(TIMEOUT_S)
    return order


def test_a_small_operation_passes_a_large_one_that_came_before(tmp_path: Path) -> None:
    with held("memory", tmp_path / "file") as (_, file, _first):
        large = file.pwrite(bytes(40 * CHUNK))
        small = file.pwrite(b"x", 41 * CHUNK)
        assert names_as_they_end({"large": large, "small": small}) == ["small", "large"]


def test_operations_of_like_size_keep_their_order(tmp_path: Path) -> None:
    with held("memory", tmp_path / "file") as (_, file, _first):
        futures = {str(number): file.pwrite(bytes(4 * CHUNK)) for number in range(4)}
        assert names_as_they_end(futures) == ["0", "1", "2", "3"]


def test_an_urgent_operation_passes_all_that_wait(tmp_path: Path) -> None:
    with held("memory", tmp_path / "file") as (_, file, _first):
        normal = file.pwrite(b"n", CHUNK)
        urgent = file.pwrite(bytes(3 * CHUNK), priority=Priority.URGENT)
        assert names_as_they_end({"normal": normal, "urgent": urgent}) == ["urgent", "normal"]


def test_a_sync_waits_for_an_earlier_write_of_another_lane(tmp_path: Path) -> None:
    with held("memory", tmp_path / "file") as (_, file, _first):
        large = file.pwrite(bytes(40 * CHUNK))
        sync = file.sync()
        assert names_as_they_end({"large": large, "sync": sync}) == ["large", "sync"]


# --- taking back ----------------------------------------------------------------------------------


def test_an_operation_past_its_deadline_never_begins(tmp_path: Path) -> None:
    with held("memory", tmp_path / "file") as (queue, file, first):
        late = file.pwrite(b"late", CHUNK, deadline_s=0)
        with pytest.raises(DeadlineError) as caught:
            late.result(TIMEOUT_S)
        assert (caught.value.errno, caught.value.done) == (errno.ETIMEDOUT, 0)
        assert isinstance(caught.value, TimeoutError)
        first.result(TIMEOUT_S)
        assert contents(queue, tmp_path / "file")[CHUNK : CHUNK + 4] == bytes(4)


def test_a_deadline_counts_from_the_call_also_while_that_waits_for_room(tmp_path: Path) -> None:
    with held("memory", tmp_path / "file", max_pending=1) as (_, file, first):
        late = file.pwrite(b"late", CHUNK, deadline_s=0.25)  # there is room in 0.7 s
        assert first.done()
        with pytest.raises(DeadlineError):
            late.result(TIMEOUT_S)


def test_a_deadline_far_away_changes_nothing(tmp_path: Path, queue: IOQueue) -> None:
    with queue.open(tmp_path / "file", "w") as file:
        assert file.pwrite(bytes(3 * CHUNK), deadline_s=1e300).result(TIMEOUT_S) == 3 * CHUNK
        with pytest.raises(ValueError, match="deadline_s"):
            file.pwrite(b"x", deadline_s=-1)


def test_a_stopped_operation_says_how_much_it_moved(tmp_path: Path, backend: str) -> None:
    slow = FaultPlan().delay(delay_us=20_000, every=1)
    with (
        IOQueue(backend, chunk_bytes=CHUNK, inflight_bytes=CHUNK, faults=slow) as queue,
        queue.open(tmp_path / "file", "w") as file,
    ):
        data = pattern(200 * CHUNK, seed=3)
        future = file.pwrite(data)
        future.stop()
        with pytest.raises(NVMeError, match="stopped") as caught:
            future.result(TIMEOUT_S)
        done = caught.value.done
        assert caught.value.errno == errno.ECANCELED
        assert done < len(data)
        assert_same(contents(queue, tmp_path / "file")[:done], data[:done])


def test_an_operation_is_stopped_also_while_it_waits_for_room(tmp_path: Path) -> None:
    slow = FaultPlan().delay(delay_us=20_000, every=1)
    with (
        IOQueue(
            "memory", chunk_bytes=CHUNK, inflight_bytes=CHUNK, max_pending=1, faults=slow
        ) as queue,
        queue.open(tmp_path / "file", "w") as file,
    ):
        first = file.pwrite(bytes(20 * CHUNK))
        batch = queue.batch()

        def writes() -> None:
            batch.pwrite(file, bytes(16 * CHUNK), 20 * CHUNK)  # not sent before the next one
            batch.pwrite(file, bytes(17 * CHUNK), 36 * CHUNK)

        waiting = threading.Thread(target=writes)
        waiting.start()
        until(lambda: bool(batch.futures))
        waiting.join(0.1)  # now it waits for room
        future = batch.futures[0]
        future.stop()
        waiting.join(TIMEOUT_S)
        with pytest.raises(NVMeError, match="stopped"):
            future.result(TIMEOUT_S)
        assert first.result(TIMEOUT_S) == 20 * CHUNK


def test_a_time_that_is_not_a_number_is_refused(tmp_path: Path) -> None:
    with held("memory", tmp_path / "file") as (_, _, first):
        with pytest.raises(ValueError, match="timeout is NaN"):
            first.result(float("nan"))
        first.result(TIMEOUT_S)


# --- event loops ----------------------------------------------------------------------------------


def test_coroutines_open_change_and_close_without_stopping_the_loop(
    tmp_path: Path, backend: str
) -> None:
    async def main() -> int:
        async with (
            IOQueue(backend) as queue,
            await queue.open_async(tmp_path / "file", "w", size="8KiB") as file,
        ):
            await file.pwrite(b"abc")
            await file.truncate_async(2 * PAGE)
            await file.preallocate_async("16KiB")
            await file.sync()
            size = file.size
        assert (file.closed, queue.closed) == (True, True)
        return size

    assert asyncio.run(main()) == 4 * PAGE


def test_a_coroutine_is_told_that_there_is_no_such_file(tmp_path: Path, queue: IOQueue) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        asyncio.run(queue.open_async(tmp_path / "missing"))


def test_leaving_a_queue_in_a_coroutine_waits_for_its_operations(
    tmp_path: Path, backend: str
) -> None:
    async def main() -> IOFuture[int]:
        async with IOQueue(backend, faults=FaultPlan().delay(delay_us=50_000, every=1)) as queue:
            return queue.open(tmp_path / "file", "w").pwrite(b"abc")

    assert asyncio.run(main()).result(0) == 3


def test_asyncio_wait_takes_futures(tmp_path: Path, queue: IOQueue) -> None:
    async def main() -> set[int]:
        with queue.open(tmp_path / "file", "w") as file:
            futures = {file.pwrite(bytes(number)) for number in (1, 2, 3)}
            done, pending = await asyncio.wait(futures, timeout=TIMEOUT_S)
            assert not pending
            return {future.result() for future in done}

    assert asyncio.run(main()) == {1, 2, 3}


def test_awaiting_asks_only_the_loop_to_complete_the_future(tmp_path: Path, queue: IOQueue) -> None:
    async def main() -> set[str]:
        with queue.open(tmp_path / "file", "w") as file:
            future = file.pwrite(b"abc")
            await future
            return vars(future).keys() & {"_condition", "_seen"}

    # these two are made where the queue's own thread is to complete the future, besides
    assert not asyncio.run(main())


def test_a_loop_that_refused_its_reader_is_asked_again(
    tmp_path: Path, queue: IOQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    async def main(file: File) -> None:
        add_reader = asyncio.get_running_loop().add_reader

        def add(*arguments: Any) -> None:
            asked.append(arguments)
            if len(asked) == 1:
                raise OSError(errno.ENOSPC, "no more watches")
            add_reader(*arguments)

        monkeypatch.setattr(asyncio.get_running_loop(), "add_reader", add)
        with pytest.raises(OSError, match="no more watches"):
            await file.pwrite(b"abc")
        await file.pwrite(b"defg", 3)

    with queue.open(tmp_path / "file", "w") as file:
        asyncio.run(main(file))
    assert len(asked) == 2


def test_operations_of_one_turn_of_a_loop_reach_the_kernel_together(
    tmp_path: Path, disk_backend: str
) -> None:
    if disk_backend == "aio":
        pytest.skip("aio serves no event loop: the drive's own thread leads")
    data = pattern(64 * PAGE, seed=4)
    (tmp_path / "file").write_bytes(data)
    buffers = [bytearray(PAGE) for _ in range(64)]

    async def main(queue: IOQueue) -> int:
        with queue.open(tmp_path / "file") as file:
            await file.pread(bytearray(1))  # the queue knows the loop from here on
            before = submissions(queue)
            reads = [file.pread(buffer, at * PAGE) for at, buffer in enumerate(buffers)]
            for read in reads:
                assert await read == PAGE
            return submissions(queue) - before

    with IOQueue(disk_backend, max_requests=64) as queue:
        assert asyncio.run(main(queue)) <= 16
    assert b"".join(buffers) == data


def test_a_woken_coroutine_submits_in_the_same_turn_of_its_loop(
    tmp_path: Path, disk_backend: str
) -> None:
    if disk_backend == "aio":
        pytest.skip("aio serves no event loop: the drive's own thread leads")
    (tmp_path / "file").write_bytes(bytes(PAGE))

    async def is_issued_at_once(queue: IOQueue, file: File) -> bool:
        await file.pread(bytearray(PAGE))
        before = submissions(queue)
        next_turn = asyncio.get_running_loop().create_future()
        next_turn.get_loop().call_soon(lambda: next_turn.set_result(submissions(queue)))
        read = file.pread(bytearray(PAGE))
        issued = await next_turn - before
        await read
        return bool(issued)

    async def main() -> bool:
        with IOQueue(disk_backend) as queue, queue.open(tmp_path / "file") as file:
            # Not each time: another thread may be faster than the loop in completing a read.
            return any([await is_issued_at_once(queue, file) for _ in range(50)])

    assert asyncio.run(main())


def submissions(queue: IOQueue) -> int:
    """Return how often the queue handed requests to the kernel."""
    return sum(drive.submissions for drive in queue.stats().drives.values())


def test_an_operation_of_a_loop_that_never_turns_again_is_done(
    tmp_path: Path, queue: IOQueue
) -> None:
    async def main() -> IOFuture[int]:
        await file.pwrite(b"abc")
        return file.pwrite(b"defg")

    with queue.open(tmp_path / "file", "w") as file:
        assert asyncio.run(main()).result(TIMEOUT_S) == 4


def test_an_operation_is_done_while_its_loop_is_busy(tmp_path: Path, queue: IOQueue) -> None:
    async def main() -> int:
        await file.pwrite(b"abc")
        future = file.pwrite(b"defg")
        while not future.done():
            threading.Event().wait(0.001)
        return future.result(0)

    with queue.open(tmp_path / "file", "w") as file:
        assert asyncio.run(main()) == 4


def test_a_callback_added_on_a_loop_runs_on_it(tmp_path: Path, queue: IOQueue) -> None:
    async def main() -> int:
        told = asyncio.get_running_loop().create_future()
        with queue.open(tmp_path / "file", "w") as file:
            future = file.pwrite(b"abc")
            future.add_done_callback(lambda _: told.set_result(threading.get_ident()))
            return await asyncio.wait_for(told, TIMEOUT_S)

    assert asyncio.run(main()) == threading.get_ident()


def test_two_loops_in_two_threads_await_through_one_queue(tmp_path: Path, queue: IOQueue) -> None:
    queue.open(tmp_path / "file", "w", size=64 * PAGE).close()
    failures: list[BaseException] = []

    async def write(start: int) -> None:
        with queue.open(tmp_path / "file", "r+") as file:
            for turn in range(40):
                places = [(start + number) * PAGE for number in range(8)]
                data = [pattern(PAGE, turn * 8 + number) for number in range(8)]
                await asyncio.gather(*map(file.pwrite, data, places))
                buffers = [bytearray(PAGE) for _ in range(8)]
                await asyncio.gather(*map(file.pread, buffers, places))
                assert buffers == data

    def run(start: int) -> None:
        try:
            asyncio.run(asyncio.wait_for(write(start), TIMEOUT_S))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(start,)) for start in (0, 16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
    assert not failures
