"""The parts of a store that move no bytes: who needs which space, what is read ahead, what its
threads wait for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepnvme.errors import ClosedError, StoreError
from deepnvme.sizes import PAGE
from deepnvme.store import holdings as holdings_module
from deepnvme.store.holdings import Holdings
from deepnvme.store.lane import StoreFuture
from deepnvme.store.manifest import Manifest, Record
from deepnvme.store.read_ahead import ReadAhead, streamed
from deepnvme.store.store_threads import StoreThreads
from deepnvme.store.tree import flatten, leaves
from deepnvme.volume.extents import Extent
from support.interrupts import interruptions
from support.nvme_io import TIMEOUT_S


def record(page: int) -> Record:
    return Record("U8", (10,), (Extent(0, page * PAGE, 10),), None)


# --- holdings -------------------------------------------------------------------------------------


class Space:
    """Remembers which records' space was given back."""

    def __init__(self) -> None:
        self.free: list[Record] = []
        self.holdings = Holdings(Path("/mnt/store"), self.free.append)


def test_space_is_given_back_when_neither_name_nor_reader_nor_commit_needs_it() -> None:
    space = Space()
    holdings = space.holdings
    holdings.name({"a": record(1)})
    held = holdings.hold(["a"])
    content = holdings.begin_commit()
    holdings.committed(1, content)
    holdings.unname("a")
    for generation in (2, 3):
        holdings.committed(generation, holdings.begin_commit())
    assert space.free == []
    holdings.let_go(held)
    assert space.free == [record(1)]


def test_all_have_their_names_or_none_has_wherever_naming_is_interrupted() -> None:
    before, after = (
        {"a": record(1), "b": record(2)},
        {"a": record(3), "b": record(4), "c": record(5)},
    )
    space = Space()

    def prepared() -> Callable[[], object]:
        nonlocal space
        space = Space()
        space.holdings.name(before)
        return lambda: space.holdings.name(after)

    for _ in interruptions(prepared, holdings_module):
        holdings = space.holdings
        named = {name: holdings.record(name) for name in holdings.names}
        assert named in (before, after)
        holdings.let_go(holdings.hold(holdings.names))
        holdings.not_committed(holdings.begin_commit())
        assert not {*space.free} & {*named.values()}


def test_no_tensor_is_missing_wherever_replacing_a_state_is_interrupted() -> None:
    space = Space()

    def prepared() -> Callable[[], object]:
        nonlocal space
        space = Space()
        name_state(space.holdings, "old", 1)
        return lambda: name_state(space.holdings, "new", 3)

    for _ in interruptions(prepared, holdings_module):
        structure, _, held = space.holdings.hold_state("s")
        assert {*held} == {f"s/{leaf}" for leaf in leaves(structure)}
        assert not {*space.free} & {*held.values()}


def name_state(holdings: Holdings, leaf: str, page: int) -> None:
    """Name a state dict of two leaves, one of this name."""
    structure, found = flatten({"both": np.zeros(1), leaf: np.zeros(1)})
    records = {f"s/{name}": record(page + number) for number, name in enumerate(found)}
    holdings.name_state("s", structure, records)


def test_a_commit_that_failed_holds_nothing_and_one_in_doubt_everything() -> None:
    space = Space()
    holdings = space.holdings
    holdings.name({"a": record(1), "b": record(2)})
    holdings.not_committed(holdings.begin_commit())
    assert holdings.changed
    holdings.unname("a")
    assert space.free == [record(1)]
    holdings.begin_commit()
    holdings.unname("b")
    assert space.free == [record(1)]


def test_a_state_takes_the_place_of_another_with_all_its_names() -> None:
    space = Space()
    holdings = space.holdings
    holdings.name({"s/other": record(1)})
    holdings.name_state(
        "s",
        {"dict": [["w", {"array": "w"}], ["x", {"array": "x"}]]},
        {"s/w": record(2), "s/x": record(3)},
    )
    changed = holdings.name_state("s", {"dict": [["w", {"array": "w"}]]}, {"s/w": record(4)})
    assert set(changed) == {"s/w", "s/x"}
    assert set(holdings.names) == {"s/other", "s/w"}
    assert sorted(each.extents[0].offset for each in space.free) == [2 * PAGE, 3 * PAGE]


def test_nothing_is_given_back_once_the_store_is_closed() -> None:
    space = Space()
    space.holdings.name({"a": record(1)})
    held = space.holdings.hold(["a"])
    space.holdings.unname("a")
    space.holdings.closed = True
    space.holdings.let_go(held)
    assert space.free == []


def test_commits_that_claim_the_same_space_are_refused() -> None:
    def reserve(extents: object) -> None:
        if extents == record(2).extents:
            raise ValueError("bytes 8192 to 12288 are not all free")

    manifests = {each: Manifest("v", each, {"a": record(each)}, {}) for each in (1, 2)}
    with pytest.raises(StoreError, match=r"generations \[1, 2\] claim the same space: bytes 8192"):
        Space().holdings.adopt(manifests, 2, reserve)


# --- ahead ----------------------------------------------------------------------------------------


class Reads:
    """Begins reads that end when they are told to."""

    def __init__(self) -> None:
        self.begun: dict[str, StoreFuture[Any]] = {}

    def __call__(self, name: str) -> StoreFuture[Any]:
        return self.begun.setdefault(name, StoreFuture())


def test_reads_begin_in_the_order_of_the_names_as_far_as_there_is_room() -> None:
    ahead, reads = ReadAhead(), Reads()
    ahead.want({"a": 2, "b": 3, "c": 1}, 5)
    ahead.begin(reads)
    assert list(reads.begun) == ["a", "b"]
    assert ahead.take("b") is reads.begun["b"]
    ahead.begin(reads)
    assert list(reads.begun) == ["a", "b", "c"]
    assert (ahead.take("b"), ahead.take("of none")) == (None, None)


def test_what_is_taken_before_it_has_begun_is_not_begun() -> None:
    ahead, reads = ReadAhead(), Reads()
    ahead.want({"a": 9, "b": 1, "c": 1}, 1)
    ahead.begin(reads)
    assert ahead.take("b") is None
    ahead.take("a")
    ahead.begin(reads)
    assert list(reads.begun) == ["a", "c"]


@pytest.mark.parametrize("names", [None, ["b", "a", "of none"]])
def test_what_is_forgotten_is_cancelled_and_leaves_its_room(names: list[str] | None) -> None:
    ahead, reads = ReadAhead(), Reads()
    ahead.want({"a": 1, "b": 1}, 1)
    ahead.begin(reads)
    ahead.forget(names)
    ahead.want({"c": 1}, 1)
    ahead.begin(reads)
    assert list(reads.begun) == ["a", "c"]
    assert reads.begun["a"].cancelled()
    assert ahead.futures == (reads.begun["c"],)


@pytest.mark.parametrize(
    "refusal", [ClosedError("closing"), RuntimeError("can't start new thread")], ids=repr
)
def test_reads_that_cannot_begin_are_left_to_who_wants_them(refusal: Exception) -> None:
    def refuse(_: str) -> StoreFuture[Any]:
        raise refusal

    ahead = ReadAhead()
    ahead.want({"a": 1, "b": 1}, 2)
    ahead.begin(refuse)
    assert (ahead.futures, ahead.take("a"), ahead.take("b")) == ((), None, None)


def test_a_stream_that_is_left_cancels_what_nobody_will_see() -> None:
    reads = Reads()
    stream = streamed("abcd", reads, depth=2)
    assert next(stream) == ("a", reads.begun["a"])
    assert list(reads.begun) == ["a", "b", "c"]
    stream.close()  # type: ignore[attr-defined]
    assert [future.cancelled() for future in reads.begun.values()] == [False, True, True]


# --- threads --------------------------------------------------------------------------------------


def test_a_commit_waits_for_what_is_queued_and_for_what_other_threads_write() -> None:
    threads, go = StoreThreads(), threading.Event()
    queued = threads.write(go.wait)
    with threads.writing():
        assert queued in threads.writes()
        assert len(threads.writes()) == 2
    assert threads.writes() == {queued}
    go.set()
    queued.result(TIMEOUT_S)
    threads.take_no_more()
    threads.join()
    assert threads.writes() == set()


def test_a_write_that_ends_while_a_put_looks_through_the_queued_ones_disturbs_nothing() -> None:
    threads, held, looked_at = StoreThreads(), threading.Event(), threading.Event()
    first = threads.write(held.wait, ["first"])

    class Noticed(frozenset[str]):
        def __and__(self, others: Any) -> frozenset[str]:
            held.set()
            first.result(TIMEOUT_S)
            looked_at.wait(0.05)  # the thread that writes may take it from the queued ones now
            return frozenset()

    with threads._lock:
        threads._queued[first] = Noticed(["first"])
    threads.write(lambda: None, ["second"])
    threads.wait_for_queued(["second"])
    threads.join()
    assert threads.writes() == set()


def test_on_the_thread_that_writes_what_is_queued_behind_is_not_waited_for() -> None:
    threads, go = StoreThreads(), threading.Event()
    seen: Future[set[Any]] = Future()
    threads.write(go.wait).add_done_callback(lambda _: seen.set_result(threads.writes()))
    behind = threads.write(lambda: None)
    go.set()
    assert seen.result(TIMEOUT_S) == set()
    behind.result(TIMEOUT_S)
    threads.join()


def test_threads_know_their_own_from_those_of_other_stores() -> None:
    ours, others = StoreThreads(), StoreThreads()
    assert ours.read(lambda: (ours.is_current, others.is_current)).result(TIMEOUT_S) == (
        True,
        False,
    )
    assert ours.write(lambda: (ours.is_current, others.is_current)).result(TIMEOUT_S) == (
        True,
        False,
    )
    assert not ours.is_current
    for threads in (ours, others):
        threads.join()


def test_a_write_that_could_not_begin_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    threads = StoreThreads()
    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        threads.write(lambda: None)
    assert threads.writes() == set()


def test_nothing_begins_once_the_store_is_closed() -> None:
    threads = StoreThreads()
    threads.take_no_more()
    for begin in (threads.read, threads.write):
        with pytest.raises(ClosedError):
            begin(lambda: None)
    threads.join()
