"""Puts and gets of a store that wait for a thread are carried out together, each with its own end."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from deepnvme import Returns, StoreFuture, TensorStore, UncommittedWarning
from deepnvme.errors import ChecksumError
from deepnvme.queue.future import OneStepLock
from deepnvme.store.lane import Lane, Request, Together, each_alone
from deepnvme.store.tensor_io import TensorIO
from support.nvme_io import TIMEOUT_S

MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TensorStore]:
    with TensorStore.create([tmp_path / "store"], 32 * MIB, returns=Returns.NUMPY) as store:
        yield store
        store.commit()


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many tensors each write to the drives had."""
    counts: list[int] = []
    write = TensorIO.write

    def counted(self: TensorIO, tensors: Any) -> Any:
        given = list(tensors)
        counts.append(len(given))
        return write(self, given)

    monkeypatch.setattr(TensorIO, "write", counted)
    return counts


def held_writer(store: TensorStore) -> threading.Event:
    """Keep the thread that writes busy until the event is set."""
    go = threading.Event()
    store._threads.write(lambda: go.wait(TIMEOUT_S))
    return go


def filled(value: int) -> np.ndarray[Any, Any]:
    return np.full(1000, value, np.int32)


# --- puts --------------------------------------------------------------------------------------


def test_puts_that_wait_for_the_writer_are_written_together(
    store: TensorStore, written: list[int]
) -> None:
    go = held_writer(store)
    futures = [store.put_async(f"t{index}", filled(index)) for index in range(50)]
    go.set()
    for future in futures:
        future.result(TIMEOUT_S)

    assert written == [50]
    assert [int(store.get(f"t{index}")[0]) for index in range(50)] == list(range(50))


def test_a_put_that_is_refused_fails_alone(store: TensorStore) -> None:
    go = held_writer(store)
    good = store.put_async("good", filled(1))
    bad = store.put_async("bad", filled(2)[::2])
    also_good = store.put_async("also good", filled(3))
    go.set()

    with pytest.raises(ValueError, match="contiguous"):
        bad.result(TIMEOUT_S)
    good.result(TIMEOUT_S)
    also_good.result(TIMEOUT_S)
    assert sorted(store) == ["also good", "good"]


def test_of_two_puts_of_a_name_the_later_one_wins(store: TensorStore, written: list[int]) -> None:
    go = held_writer(store)
    futures = [store.put_async("same", filled(value)) for value in range(4)]
    go.set()
    for future in futures:
        future.result(TIMEOUT_S)

    assert written == [1, 1, 1, 1]
    assert store.get("same")[0] == 3


def test_a_cancelled_put_is_not_written(store: TensorStore, written: list[int]) -> None:
    go = held_writer(store)
    kept, cancelled = store.put_async("kept", filled(1)), store.put_async("gone", filled(2))
    assert cancelled.cancel()
    go.set()
    kept.result(TIMEOUT_S)

    with pytest.raises(CancelledError):
        cancelled.result(TIMEOUT_S)
    assert written == [1]
    assert list(store) == ["kept"]


def test_a_commit_between_puts_stays_between_them(store: TensorStore, written: list[int]) -> None:
    go = held_writer(store)
    store.put_async("before", filled(1))
    commit = store.commit_async()
    after = store.put_async("after", filled(2))
    go.set()
    generation = commit.result(TIMEOUT_S)
    after.result(TIMEOUT_S)
    written_apart = list(written)

    assert written_apart == [1, 1]
    assert generation == store.generation


def test_a_delete_between_puts_of_a_name_leaves_the_later_put(store: TensorStore) -> None:
    go = held_writer(store)
    store.put_async("t", filled(1))
    store.delete_async("t")
    last = store.put_async("t", filled(2))
    go.set()
    last.result(TIMEOUT_S)

    assert store.get("t")[0] == 2


# --- gets --------------------------------------------------------------------------------------


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many tensors each read from the drives had."""
    counts: list[int] = []
    original = TensorIO.read

    def counted(self: TensorIO, wanted: Any, *arguments: Any) -> None:
        counts.append(len(wanted))
        original(self, wanted, *arguments)

    monkeypatch.setattr(TensorIO, "read", counted)
    return counts


def held_readers(store: TensorStore) -> threading.Event:
    """Keep all threads that read busy until the event is set."""
    go = threading.Event()
    for _ in range(4):
        store._threads.read(lambda: go.wait(TIMEOUT_S))
    return go


def test_gets_that_wait_for_a_thread_are_read_together(store: TensorStore, read: list[int]) -> None:
    store.put_many({f"t{index}": filled(index) for index in range(40)})
    go = held_readers(store)
    futures = [store.get_async(f"t{index}") for index in range(40)]
    go.set()

    assert [int(future.result(TIMEOUT_S)[0]) for future in futures] == list(range(40))
    assert sum(read) == 40
    assert len(read) <= 4


def test_a_get_of_what_is_not_there_fails_alone(store: TensorStore) -> None:
    store.put_many({"a": filled(1), "b": filled(2)})
    go = held_readers(store)
    futures = [store.get_async(name) for name in ("a", "gone", "b")]
    go.set()

    with pytest.raises(KeyError, match="gone"):
        futures[1].result(TIMEOUT_S)
    assert [futures[index].result(TIMEOUT_S)[0] for index in (0, 2)] == [1, 2]


def test_a_damaged_tensor_fails_alone(store: TensorStore, tmp_path: Path) -> None:
    store.put_many({"a": filled(1), "b": filled(2)})
    (extent,) = store.record("b").extents
    with store.volume.paths[0].open("r+b") as file:
        file.seek(extent.offset)
        file.write(b"damaged")
    go = held_readers(store)
    futures = [store.get_async(name) for name in ("a", "b")]
    go.set()

    assert futures[0].result(TIMEOUT_S)[0] == 1
    with pytest.raises(ChecksumError):
        futures[1].result(TIMEOUT_S)


def test_each_get_is_read_into_its_own_memory(store: TensorStore) -> None:
    store.put_many({"a": filled(1), "b": filled(2)})
    go = held_readers(store)
    out = np.empty(1000, np.int32)
    into, again, new = store.get_async("a", out), store.get_async("a"), store.get_async("b")
    go.set()

    assert into.result(TIMEOUT_S) is out
    assert (out == 1).all()
    assert again.result(TIMEOUT_S) is not out
    assert new.result(TIMEOUT_S)[0] == 2


# --- lanes -------------------------------------------------------------------------------------


def requests(*sizes: int, together: Together = each_alone) -> list[Request]:
    return [
        Request(StoreFuture(), lambda: None, together, f"t{index}", nbytes=nbytes)
        for index, nbytes in enumerate(sizes)
    ]


def groups_of(*sizes: int) -> list[int]:
    """Return how many requests of these sizes a lane takes each time, where all have to wait."""
    groups: list[int] = []

    def together(group: Sequence[Request]) -> Sequence[None]:
        groups.append(len(group))
        return (None,) * len(group)

    go = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        lane = Lane(executor, 1)
        lane.add(Request(StoreFuture(), lambda: go.wait(TIMEOUT_S)))
        for request in requests(*sizes, together=together):
            lane.add(request)
        go.set()
    return groups


def test_a_group_ends_before_it_has_more_than_64_mib() -> None:
    assert groups_of(*([16 * MIB] * 10)) == [4, 4, 2]


def test_a_request_larger_than_a_group_is_carried_out_alone() -> None:
    assert groups_of(1, 1, 100 * MIB, 1, 1) == [2, 2]


def test_a_lane_whose_thread_cannot_start_keeps_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor = ThreadPoolExecutor(1)
    lane = Lane(executor, 1)
    (lost,) = requests(1)
    with monkeypatch.context() as patch:
        patch.setattr(executor, "submit", lambda *_: (_ for _ in ()).throw(RuntimeError("no")))
        with pytest.raises(RuntimeError, match="no"):
            lane.add(lost)
    ended = Request(StoreFuture(), lambda: "ended")
    lane.add(ended)

    assert ended.future.result(TIMEOUT_S) == "ended"
    assert not lost.future.done()
    executor.shutdown()


# --- futures -----------------------------------------------------------------------------------


def test_a_future_of_a_store_has_all_that_those_of_concurrent_futures_have() -> None:
    assert {*vars(Future())} <= {*vars(StoreFuture())}


def test_the_lock_of_a_future_is_a_condition() -> None:
    lock, said = OneStepLock(), list[str]()

    def answer() -> None:
        with lock:
            said.append("answer")
            lock.notify_all()

    with lock, lock:  # a thread may take it twice, and gives it up altogether while it waits
        answering = threading.Thread(target=answer)
        answering.start()
        assert lock.wait_for(lambda: said, TIMEOUT_S)
    answering.join(TIMEOUT_S)

    with lock:
        assert not lock.wait(0.01)
    with pytest.raises(RuntimeError, match="un-acquired"):
        lock.notify()
    assert lock.acquire(blocking=False)
    lock.release()


def test_the_lock_of_a_future_runs_no_code_of_ours_that_a_signal_could_interrupt() -> None:
    lock, ran = OneStepLock(), set[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            ran.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        with lock:
            lock.wait(0)
    finally:
        sys.setprofile(before)
    assert ran == {threading.__file__}


# --- in a coroutine ----------------------------------------------------------------------------


def test_a_store_closes_at_the_end_of_its_asynchronous_block(tmp_path: Path) -> None:
    async def keep() -> TensorStore:
        async with TensorStore.create(tmp_path / "store", "1MiB", returns=Returns.NUMPY) as store:
            await store.put_many_async({"a": filled(1)[::2]}, copy=True)
            await store.commit_async()
        return store

    assert asyncio.run(keep()).closed
    with TensorStore.open(tmp_path / "store", returns=Returns.NUMPY) as store:
        assert (store.get("a") == filled(1)[::2]).all()


def test_an_asynchronous_block_tells_of_changes_that_are_lost(tmp_path: Path) -> None:
    async def lose() -> None:
        async with TensorStore.create(tmp_path / "store", "1MiB") as store:
            await store.put_async("a", filled(1))

    with pytest.warns(UncommittedWarning, match="was closed with changes") as warned:
        asyncio.run(lose())
    assert warned[0].filename == __file__


def test_parts_are_put_in_the_order_of_the_calls_and_got(store: TensorStore) -> None:
    async def change() -> Any:
        await store.put_async("a", filled(0))
        part = store.get_slice("a")
        puts = [part.put_async(slice(0, 500), filled(value)[:500]) for value in (1, 2)]
        await asyncio.gather(*puts, part.put_async(slice(500, 600), filled(3)[:200:2], copy=True))
        return await asyncio.gather(part.get_async(499), part.get_async(slice(500, 502)))

    low, high = asyncio.run(change())
    assert (int(low), high.tolist()) == (2, [3, 3])


def test_a_commit_waits_for_parts_that_were_begun(tmp_path: Path) -> None:
    with TensorStore.create(tmp_path / "store", "1MiB", returns=Returns.NUMPY) as store:
        store.put("a", filled(0))
        go = held_writer(store)
        store.get_slice("a").put_async(slice(0, 9), filled(5)[:9])
        go.set()
        store.commit()
    with TensorStore.open(tmp_path / "store", returns=Returns.NUMPY) as store:
        assert store.get("a")[:10].tolist() == [5] * 9 + [0]


def test_a_stores_thread_goes_on_after_a_callback_that_raises(store: TensorStore) -> None:
    def leave(_: object) -> None:
        raise SystemExit

    for count in (1, 2):
        go = held_writer(store)
        puts = [store.put_async(f"{index}", filled(index)) for index in range(count)]
        puts[0].add_done_callback(leave)
        go.set()
        for put in puts:
            put.result(TIMEOUT_S)
    store.put_async("after", filled(1)).result(TIMEOUT_S)

    assert sorted(store) == ["0", "1", "after"]


# --- event loops -------------------------------------------------------------------------------


def test_puts_carried_out_together_wake_an_event_loop_once(
    store: TensorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    wakes: list[object] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe

        def counted(*call: Any) -> Any:
            wakes.append(call)
            return wake(*call)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        go = held_writer(store)
        puts = [store.put_async(f"t{index}", filled(index)) for index in range(50)]
        waiting = asyncio.gather(*puts)
        await asyncio.sleep(0)  # all are awaited from here on
        go.set()
        await asyncio.wait_for(waiting, TIMEOUT_S)

    asyncio.run(main())
    assert len(wakes) == 1


def test_an_operation_that_can_no_longer_be_cancelled_does_not_stop_the_event_loop(
    store: TensorStore,
) -> None:
    async def main() -> bool:
        go, begun = threading.Event(), threading.Event()

        def work() -> bool:
            begun.set()
            return go.wait(TIMEOUT_S)

        running = store._threads.write(work)
        assert begun.wait(TIMEOUT_S)
        waiting = asyncio.ensure_future(running)
        await asyncio.sleep(0)
        assert not running.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        go.set()  # which only this loop does
        return await waiting

    assert asyncio.run(main())


def test_a_callback_that_raises_out_of_cancel_leaves_no_task_asleep(store: TensorStore) -> None:
    def leave(_: object) -> None:
        raise SystemExit

    async def main() -> None:
        go = held_writer(store)
        put = store.put_async("a", filled(1))
        put.add_done_callback(leave)
        waiting = asyncio.ensure_future(put)
        await asyncio.sleep(0)
        with pytest.raises(SystemExit):
            put.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(waiting, TIMEOUT_S)
        go.set()

    asyncio.run(main())


def test_a_cancelled_operation_cancels_the_task_that_awaits_it(store: TensorStore) -> None:
    async def main() -> None:
        go = held_writer(store)
        put = store.put_async("a", filled(1))
        waiting = asyncio.ensure_future(put)
        await asyncio.sleep(0)
        assert put.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(waiting, TIMEOUT_S)
        go.set()

    asyncio.run(main())
