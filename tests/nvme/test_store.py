"""`TensorStore`: what is put comes back, what is committed stays, and space is used again only when
nobody needs it.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepnvme import (
    Access,
    ClosedError,
    FaultPlan,
    IOFuture,
    IOQueue,
    NVMeError,
    Requests,
    WhenFull,
)
from deepnvme.errors import (
    PoisonedError,
    StoreError,
    VolumeError,
    VolumeFullError,
    VolumeLockedError,
)
from deepnvme.memory.arrays import Description, Returns, Scattered, empty
from deepnvme.queue import pipeline
from deepnvme.sizes import whole_pages
from deepnvme.store import (
    commits,
    holdings,
    lane,
    manifest_files,
    named_tensors,
    store_threads,
    tensor_io,
)
from deepnvme.store import store as store_module
from deepnvme.store.manifest import ManifestError, encode, parse
from deepnvme.store.store import Checksum, Durability, TensorStore, UncommittedWarning
from deepnvme.store.tensor_io import TensorIO
from deepnvme.volume.extents import Extent
from deepnvme.volume.volume import Member, Volume
from support.interrupts import interruptions
from support.nvme_disks import DiskUnavailableError, loop_ext4
from support.nvme_io import PAGE, TIMEOUT_S, backend_or_skip, pattern
from support.nvme_programs import output_of, run_program

KIB, MIB = 1 << 10, 1 << 20
BACKEND = "threads"  # the one that no machine refuses


@pytest.fixture
def queue() -> Iterator[IOQueue]:
    with IOQueue(BACKEND, chunk_bytes=64 * KIB) as queue:
        yield queue


@pytest.fixture
def place(tmp_path: Path) -> list[Path]:
    return [tmp_path / "store"]


@pytest.fixture
def store(place: list[Path], queue: IOQueue) -> Iterator[TensorStore]:
    """Yield a store of 24 MiB that gives numpy arrays."""
    store = TensorStore.create(place, 24 * MIB, queue=queue, returns=Returns.NUMPY)
    yield store
    close_uncommitted(store)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def opened(place: list[Path], queue: IOQueue, **options: Any) -> TensorStore:
    return TensorStore.open(place, queue=queue, returns=Returns.NUMPY, **options)


def close_uncommitted(store: TensorStore) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncommittedWarning)
        store.close()


def filled(nbytes: int, value: int) -> Any:
    return np.full(nbytes, value, np.uint8)


def value_of(array: Any) -> int:
    """Return the one value that fills the array."""
    first, rest = int(array[0]), np.asarray(array)
    assert (rest == first).all(), f"a mix: {np.unique(rest)}"
    return first


def contents(store: TensorStore) -> dict[str, bytes]:
    return {name: np.asarray(store.get(name)).tobytes() for name in store}


def in_thread(work: Callable[[], Any]) -> Any:
    """Start `work` in a thread of its own; return the future of its result."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


# --- kinds ----------------------------------------------------------------------------------------

SIZES = [
    0,
    1,
    511,
    PAGE - 1,
    PAGE,
    PAGE + 1,
    256 * KIB,
    256 * KIB + 1,
    2 * MIB - 1,
    2 * MIB,
    4 * MIB + 12345,
]
TORCH = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.bool,
    torch.int64,
    torch.complex64,
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
def test_bytes_of_every_size_come_back(
    tmp_path: Path, queue: IOQueue, members: int, together: bool
) -> None:
    data = {f"{size} B": pattern(size, seed=size) for size in SIZES}
    places = [Member(tmp_path / str(index), rate=1.0 + index) for index in range(members)]
    with TensorStore.create(places, 32 * MIB, queue=queue, returns=Returns.NUMPY) as store:
        if together:
            store.put_many(data)
            got = store.get_many(data)
        else:
            for name, each in data.items():
                store.put(name, each)
            got = {name: store.get(name) for name in data}
        store.commit()
    assert {name: each.tobytes() for name, each in got.items()} == data
    with opened([tmp_path / str(index) for index in range(members)], queue) as store:
        assert contents(store) == data
        assert store.verify() == ()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7, 11), (300, 1000)], ids=str)
@pytest.mark.parametrize("dtype", TORCH, ids=str)
def test_torch_tensors_come_back_with_dtype_and_shape(
    place: list[Path], queue: IOQueue, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    given = torch.arange(int(np.prod(shape)) or 1).to(dtype)[: int(np.prod(shape))].reshape(shape)
    with TensorStore.swap([place[0].parent], 12 * MIB, queue=queue, returns=Returns.TORCH) as store:
        store.put_many({"one": given, "other": given})
        store.put("alone", given)
        for got in (*store.get_many(["one", "other"]).values(), store["alone"]):
            assert (got.dtype, got.shape) == (given.dtype, given.shape)
            assert torch.equal(
                got.reshape(-1).view(torch.uint8), given.reshape(-1).view(torch.uint8)
            )


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "int32", "uint64", "float16", "float64", "complex128"]
)
def test_numpy_arrays_come_back_with_dtype_and_shape(store: TensorStore, dtype: str) -> None:
    given = {
        "0-d": np.array(1, dtype),
        "2-d": np.arange(12).astype(dtype).reshape(3, 4),
        "none": np.empty((0, 5), dtype),
    }
    store.put_many(given)
    for name, array in given.items():
        got = store.get(name)
        assert (got.dtype, got.shape) == (array.dtype, array.shape)
        assert np.array_equal(got, array)


def test_what_was_put_by_numpy_can_be_got_by_torch_and_the_other_way_round(
    place: list[Path], queue: IOQueue
) -> None:
    with TensorStore.create(place, 4 * MIB, queue=queue, returns=Returns.TORCH) as store:
        store.put("array", np.arange(5, dtype=np.int32))
        store.put("tensor", torch.arange(5, dtype=torch.int32))
        assert torch.equal(store.get("array"), store.get("tensor"))
        store.commit()
    with opened(place, queue) as store:
        assert np.array_equal(store.get("tensor"), np.arange(5, dtype=np.int32))


@pytest.mark.parametrize(
    "given", [b"abc", bytearray(b"abc"), memoryview(b"xabcx")[1:4]], ids=["bytes", "array", "view"]
)
def test_bytes_are_one_dimension_of_u8(store: TensorStore, given: Any) -> None:
    store.put("bytes", given)
    assert (store.record("bytes").dtype, store.record("bytes").shape) == ("U8", (3,))
    assert store.get("bytes").tobytes() == b"abc"


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (np.arange(10)[::2], ValueError),
        (torch.ones(4, 4).t()[:, 1:], ValueError),
        (torch.empty(3, device="meta"), TypeError),
        (np.array([object()]), TypeError),
        ([1, 2], TypeError),
        (None, TypeError),
    ],
    ids=["strided array", "strided tensor", "meta tensor", "objects", "list", "None"],
)
def test_what_cannot_be_stored_is_refused_before_anything_changes(
    store: TensorStore, given: Any, error: type[Exception]
) -> None:
    store.put("old", b"old")
    free = store.volume.free_bytes
    with pytest.raises(error):
        store.put_many({"old": b"new", "bad": given})
    assert contents(store) == {"old": b"old"}
    assert store.volume.free_bytes == free


def test_what_is_refused_when_others_are_on_their_way_leaves_nothing_of_them(
    store: TensorStore,
) -> None:
    store.put("old", b"old")
    free = store.volume.free_bytes
    before = {f"small {index}": np.full(65_536, index, np.uint8) for index in range(200)}
    with pytest.raises(TypeError, match="'bad'"):
        store.put_many(
            {
                "old": b"new",
                **before,
                "large": np.ones(2_000_000, np.uint8),
                "bad": None,
                "last": b"last",
            }
        )
    assert contents(store) == {"old": b"old"}
    assert store.volume.free_bytes == free


def test_names_are_those_of_the_tensors_whatever_becomes_of_the_mapping_meanwhile(
    store: TensorStore,
) -> None:
    tensors: dict[str, Any] = {"first": b"1"}

    class Changing:
        @property
        def __array_interface__(self) -> dict[str, Any]:
            tensors.pop("first", None)
            return np.frombuffer(b"22", np.uint8).__array_interface__

    tensors["second"] = Changing()
    tensors["third"] = b"333"
    store.put_many(tensors)
    assert contents(store) == {"first": b"1", "second": b"22", "third": b"333"}


class Lazy:
    """An array that is read from a store when somebody looks at it."""

    def __init__(self, store: TensorStore, name: str) -> None:
        self.store, self.name = store, name

    @property
    def __array_interface__(self) -> dict[str, Any]:
        self.array = self.store.get(self.name)
        interface: dict[str, Any] = self.array.__array_interface__
        return interface


def test_arrays_that_read_the_store_when_they_are_looked_at_can_be_put_into_it(
    store: TensorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # so that 100 tensors take all staging memory
    monkeypatch.setattr(tensor_io, "RUN_BYTES", 4 * PAGE)
    store.put_many({f"a{number}": filled(PAGE, number) for number in range(100)})
    lazy = {f"b{number}": Lazy(store, f"a{number}") for number in range(100)}
    putting = threading.Thread(target=store.put_many, args=[lazy], daemon=True)
    putting.start()
    putting.join(TIMEOUT_S)
    assert not putting.is_alive()
    assert [value_of(store.get(name)) for name in lazy] == [*range(100)]


def test_a_put_that_was_interrupted_as_it_began_is_waited_for_by_no_commit(
    store: TensorStore,
) -> None:
    class Interrupting:
        """A lock in which Ctrl-C comes once it was let go."""

        def __enter__(self) -> None:
            locks[0].acquire()

        def __exit__(self, *_: object) -> None:
            threads._lock = locks[0]
            locks[0].release()
            raise KeyboardInterrupt

    threads = store._threads
    locks = [threads._lock]
    threads._lock = Interrupting()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        store.put("a", b"1")
    committing = threading.Thread(target=store.commit, daemon=True)
    committing.start()
    committing.join(TIMEOUT_S)
    assert not committing.is_alive()


def test_wherever_a_put_is_interrupted_all_of_it_or_nothing_was_put_and_the_store_goes_on(
    tmp_path: Path, queue: IOQueue
) -> None:
    names = ("small", "small too", "large")

    def values(value: int) -> dict[str, Any]:
        return {name: filled(300 * KIB if name == "large" else PAGE, value) for name in names}

    with TensorStore.swap([tmp_path], 128 * MIB, queue=queue, returns=Returns.NUMPY) as store:

        def prepared() -> Callable[[], object]:
            store.put_many(values(1))
            return partial(store.put_many, values(2))

        for _ in interruptions(prepared, holdings, named_tensors, pipeline, tensor_io):
            assert {value_of(tensor) for tensor in store.get_many(names).values()} in ({1}, {2})


@pytest.mark.parametrize("rates", [(1.0, 1.0), (3.0, 1.0)])
def test_a_large_tensor_is_written_to_and_read_from_all_drives_at_once(
    tmp_path: Path, queue: IOQueue, rates: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_io, "_PIECE_BYTES", MIB)
    drives = [Member(tmp_path / str(number), rate=rate) for number, rate in enumerate(rates)]
    with TensorStore.create(drives, 32 * MIB, queue=queue, returns=Returns.NUMPY) as store:
        data = np.random.default_rng(1).integers(0, 256, 24 * MIB, np.uint8)
        passed: dict[str, np.ndarray[Any, Any]] = {}

        def noted(name: str) -> Callable[[Sequence[Extent], Any], list[IOFuture[int]]]:
            move = getattr(store.volume, name)
            moved = passed[name] = np.zeros(2)

            def move_and_note(extents: Sequence[Extent], buffer: Any) -> list[IOFuture[int]]:
                for extent in extents:
                    moved[extent.member] += extent.nbytes
                    assert abs(moved[0] / rates[0] - moved[1] / rates[1]) <= MIB
                futures: list[IOFuture[int]] = move(extents, buffer)
                return futures

            return move_and_note

        for name in ("pwrite", "pread"):
            monkeypatch.setattr(store.volume, name, noted(name))
        store.put("large", data)
        assert np.array_equal(store.get("large"), data)
        assert [moved.sum() for moved in passed.values()] == [data.nbytes] * 2
        store.commit()


# --- out ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [100, 300_000, 3_000_000])
def test_a_tensor_is_read_into_out_which_is_returned(store: TensorStore, size: int) -> None:
    store.put("name", filled(size, 7))
    for out in (np.empty(size, np.uint8), bytearray(size), torch.empty(size, dtype=torch.uint8)):
        assert store.get("name", out=out) is out
        assert value_of(np.asarray(out)) == 7


def test_some_of_several_can_be_read_into_out(store: TensorStore) -> None:
    store.put_many({"a": filled(10, 1), "b": filled(10, 2)})
    out = np.empty(10, np.uint8)
    got = store.get_many(["a", "b"], out={"b": out})
    assert got["b"] is out
    assert (value_of(got["a"]), value_of(out)) == (1, 2)


@pytest.mark.parametrize(
    "out",
    [
        np.zeros(9, np.uint8),
        np.zeros((2, 5), np.uint8),
        np.zeros(10, np.int8),
        np.zeros(20, np.uint8)[::2],
        bytes(10),
    ],
    ids=["size", "shape", "dtype", "strides", "read-only"],
)
def test_an_out_that_does_not_fit_is_refused_and_not_touched(store: TensorStore, out: Any) -> None:
    store.put_many({"a": filled(10, 1), "b": filled(10, 2)})
    with pytest.raises((ValueError, BufferError)):
        store.get("a", out=out)
    with pytest.raises((ValueError, BufferError)):
        store.get_many(["b", "a"], out={"a": out})
    assert bytes(out) == bytes(len(bytes(out)))


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["", " ", "a/b", "../up", "\n\0\"'", "größe", "名", "x" * 5000], ids=ascii
)
def test_any_text_is_a_name(place: list[Path], queue: IOQueue, name: str) -> None:
    with TensorStore.create(place, MIB, queue=queue) as store:
        store.put(name, b"content")
        store.commit()
    with opened(place, queue) as store:
        assert list(store) == [name]
        assert contents(store) == {name: b"content"}


@pytest.mark.parametrize(
    ("name", "error"),
    [(1, TypeError), (None, TypeError), (b"x", TypeError), ("\ud800", ValueError)],
)
def test_what_is_no_text_is_no_name(store: TensorStore, name: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        store.put(name, b"content")
    with pytest.raises(error):
        store.put_state(name, {"w": torch.ones(1)})
    with pytest.raises(error):
        store.put_async(name, b"content")
    assert len(store) == 0
    assert store.states == ()


def test_a_name_that_cannot_be_told_apart_stops_no_later_put(store: TensorStore) -> None:
    with pytest.raises(TypeError):
        store.put_async(np.ones(4), b"content")  # type: ignore[arg-type]
    store.put_async("t", b"content").result(TIMEOUT_S)
    assert list(store) == ["t"]


def test_a_mapping_may_be_used_again_while_its_tensors_are_put(store: TensorStore) -> None:
    batch: dict[str, Any] = {f"t{number}": b"content" for number in range(8)}
    futures = []
    for _ in range(8):
        futures.append(store.put_many_async(batch))
        batch.clear()
        batch.update({f"t{number}": b"other" for number in range(8)})
    for future in futures:
        future.result(TIMEOUT_S)
    assert sorted(store) == [f"t{number}" for number in range(8)]


def test_one_name_is_not_taken_for_its_letters(store: TensorStore) -> None:
    store.put("w", b"content")
    with pytest.raises(TypeError, match=r"\['w'\]"):
        list(store.stream("w"))


def test_a_name_that_there_is_not_is_a_key_error_that_says_it(store: TensorStore) -> None:
    store.put("there", b"1")
    for call in (
        lambda: store.get("gone"),
        lambda: store["gone"],
        lambda: store.get_many(["there", "gone"]),
        lambda: store.delete("gone"),
        lambda: store.record("gone"),
        lambda: store.prefetch(["gone"]),
        lambda: list(store.stream(["gone"])),
        lambda: store.get_async("gone").result(TIMEOUT_S),
        lambda: store.get_state("gone"),
    ):
        with pytest.raises(KeyError, match="gone"):
            call()


def test_the_last_put_of_a_name_is_what_it_has(store: TensorStore) -> None:
    store.put("name", filled(10, 1))
    store.put("name", np.arange(3, dtype=np.float32))
    assert "name" in store
    assert len(store) == 1
    assert store.get("name").tolist() == [0.0, 1.0, 2.0]
    store.delete("name")
    assert "name" not in store
    assert list(store) == []


# --- ahead and in order ---------------------------------------------------------------------------


def test_a_prefetched_tensor_is_read_once(place: list[Path], stack: ExitStack) -> None:
    queue = stack.enter_context(IOQueue(BACKEND))
    store = stack.enter_context(
        TensorStore.create(place, 8 * MIB, queue=queue, returns=Returns.NUMPY)
    )
    store.put("name", filled(MIB, 3))
    store.commit()
    before = store.volume.stats()[0].read_bytes
    store.prefetch(["name", "name"])
    store.prefetch(["name"])
    assert value_of(store.get("name")) == 3
    assert store.volume.stats()[0].read_bytes - before == MIB
    store.get("name")
    assert store.volume.stats()[0].read_bytes - before == 2 * MIB


def test_what_is_put_after_a_prefetch_is_what_get_returns(store: TensorStore) -> None:
    store.put("name", filled(MIB, 1))
    store.prefetch(["name"])
    store.put("name", filled(MIB, 2))
    assert value_of(store.get("name")) == 2
    store.prefetch(["name"])
    store.delete("name")
    with pytest.raises(KeyError):
        store.get("name")


def test_reads_that_are_queued_before_their_prefetch_do_not_wait_for_it_for_ever(
    place: list[Path],
) -> None:
    late = FaultPlan().delay(delay_us=100_000, every=1, requests=Requests.WRITES)
    names = [f"tensor {index}" for index in range(8)]
    with IOQueue(BACKEND) as queue, TensorStore.create(place, 8 * MIB, queue=queue) as store:
        store.put_many(dict.fromkeys(names, b"content"))
        store.commit()
    with IOQueue(BACKEND, faults=late) as queue, opened(place, queue) as store:
        busy = [store.put_async(f"busy {index}", b"x") for index in range(8)]
        reads = [store.get_async(name) for name in names]
        store.prefetch(names)
        assert [read.result(TIMEOUT_S).tobytes() for read in reads] == [b"content"] * len(names)
        assert [put.result(TIMEOUT_S) for put in busy] == [None] * len(busy)
        store.commit()


@pytest.mark.parametrize("depth", [1, 3, 100])
def test_a_stream_yields_in_the_order_of_the_names(store: TensorStore, depth: int) -> None:
    names = [f"t{index}" for index in range(20)]
    store.put_many({name: filled(1000, index) for index, name in enumerate(names)})
    wanted = [*reversed(names), "t3", "t3"]
    got = [(name, value_of(array)) for name, array in store.stream(wanted, depth=depth)]
    assert got == [(name, int(name[1:])) for name in wanted]
    assert sorted(name for name, _ in store.stream(depth=depth)) == sorted(names)
    assert list(store.stream([], depth=depth)) == []


def test_a_stream_without_depth_is_refused(store: TensorStore) -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        list(store.stream(depth=0))


def test_everything_can_be_awaited(store: TensorStore) -> None:
    async def work() -> dict[str, Any]:
        await store.put_async("a", filled(10, 1))
        await store.put_many_async({"b": filled(10, 2), "c": filled(3 * MIB, 3)})
        assert await store.commit_async() == 2
        assert value_of(await store.get_async("a")) == 1
        out = np.empty(10, np.uint8)
        assert await store.get_async("b", out) is out
        streamed = [name async for name, _ in store.stream_async(["c", "a"], depth=1)]
        assert streamed == ["c", "a"]
        with pytest.raises(KeyError):
            await store.get_async("gone")
        return await store.get_many_async(["a", "b", "c"])

    got = asyncio.run(work())
    assert {name: value_of(array) for name, array in got.items()} == {"a": 1, "b": 2, "c": 3}


def test_closing_waits_for_what_was_begun(place: list[Path]) -> None:
    late = FaultPlan().delay(delay_us=20_000, every=1, requests=Requests.WRITES)
    with IOQueue(BACKEND, faults=late) as queue:
        store = TensorStore.create(place, 8 * MIB, queue=queue, returns=Returns.NUMPY)
        puts = [store.put_async(f"t{index}", filled(100, index)) for index in range(12)]
        with pytest.warns(UncommittedWarning):
            store.close()
        assert [put.result(0) for put in puts] == [None] * 12
        with pytest.raises(ClosedError):
            store.put_async("t", b"x")


# --- state dicts ----------------------------------------------------------------------------------


def some_state(value: float) -> dict[str, Any]:
    weight = torch.full((3, 4), value, dtype=torch.bfloat16)
    return {
        "model": OrderedDict([("w", weight), ("tied", weight), ("b", torch.zeros(0))]),
        "steps": [1, 2.5, None, True, "text", b"bytes", bytes(range(256)) * 40],
        "pair": (np.arange(3), {7: torch.tensor(value)}),
    }


def same_state(one: Any, other: Any) -> bool:
    """Tell whether they are equal, tensors by their bytes."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same_state(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same_state, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return bool(one == other)


def test_a_state_dict_comes_back_as_it_was_also_by_the_next_process(
    place: list[Path], queue: IOQueue
) -> None:
    with TensorStore.create(place, MIB, queue=queue) as store:
        store.put_state("epoch 1", some_state(1.0))
        store.put_state("nothing", {})
        assert same_state(store.get_state("epoch 1"), some_state(1.0))
        store.commit()
    with opened(place, queue) as store:
        assert store.states == ("epoch 1", "nothing")
        got = store.get_state("epoch 1")
        assert store.get_state("nothing") == {}
        assert store.verify() == ()
    assert same_state(got, some_state(1.0))
    assert got["model"]["w"] is got["model"]["tied"]


def test_replacing_a_state_forgets_its_tensors_and_no_others(store: TensorStore) -> None:
    store.put("model/mine", b"mine")
    store.put_state("model/ema", {"w": torch.full((2,), 5.0)})
    store.put_state("model", {"w": torch.ones(2), "old": torch.ones(3)})
    free = store.volume.free_bytes
    store.put_state("model", {"w": torch.zeros(2)})
    assert same_state(store.get_state("model"), {"w": torch.zeros(2)})
    assert same_state(store.get_state("model/ema"), {"w": torch.full((2,), 5.0)})
    assert store.get("model/mine").tobytes() == b"mine"
    assert sorted(store) == ["model/ema/w", "model/mine", "model/w"]
    assert store.volume.free_bytes == free + PAGE


def test_a_state_that_is_refused_changes_nothing(store: TensorStore) -> None:
    store.put_state("state", some_state(1.0))
    before = sorted(store)
    with pytest.raises(TypeError, match="set"):
        store.put_state("state", {"w": torch.ones(2), "bad": {1, 2}})
    with pytest.raises(VolumeFullError):
        store.put_state(
            "state", {"w": torch.ones(2), "large": torch.zeros(30 * MIB, dtype=torch.uint8)}
        )
    assert sorted(store) == before
    assert same_state(store.get_state("state"), some_state(1.0))


def test_a_state_that_others_replace_is_read_whole(store: TensorStore) -> None:
    def version(number: int) -> dict[str, Any]:
        names = [f"w{index}" for index in range(3 + number % 3)]
        return {"number": number, **{name: torch.full((10,), number) for name in names}}

    store.put_state("state", version(0))
    done = threading.Event()

    def write() -> None:
        for number in range(1, 100):
            store.put_state("state", version(number))
        done.set()

    writing = in_thread(write)
    seen = []
    while not done.is_set() and not writing.done():
        got = store.get_state("state")
        assert same_state(got, version(got["number"]))
        seen.append(got["number"])
    writing.result(TIMEOUT_S)
    assert seen == sorted(seen)
    assert same_state(store.get_state("state"), version(99))


# --- commits --------------------------------------------------------------------------------------


def test_a_commit_is_what_the_next_process_finds(place: list[Path], queue: IOQueue) -> None:
    with TensorStore.create(place, 8 * MIB, queue=queue) as store:
        assert store.generation == 1
        store.put_many({"a": b"1", "b": b"1"})
        assert store.commit() == store.generation == 2
        store.put("a", b"2")
        store.delete("b")
        assert store.commit() == 3
        store.put("a", b"3")
        with pytest.warns(UncommittedWarning, match="not committed"):
            store.close()
    with opened(place, queue) as store:
        assert store.generation == 3
        assert contents(store) == {"a": b"2"}


def test_the_commit_before_can_be_opened_and_gone_on_from(
    place: list[Path], queue: IOQueue
) -> None:
    with TensorStore.create(place, 8 * MIB, queue=queue) as store:
        for number in range(2, 6):
            store.put_many({"a": b"%d" % number, f"only {number}": filled(MIB, number)})
            store.delete(f"only {number - 1}") if number > 2 else None
            store.commit()
    for generation in (3, 6):
        with pytest.raises(
            StoreError, match=f"no generation {generation} here; .*can be opened: 4, 5"
        ):
            opened(place, queue, generation=generation)
    with opened(place, queue, generation=4) as store:
        assert set(store) == {"a", "only 4"}
        assert store.get("a").tobytes() == b"4"
        assert value_of(store.get("only 4")) == 4
    with opened(place, queue, generation=5) as store:
        assert set(store) == {"a", "only 5"}
    with opened(place, queue, generation=4) as store:
        store.put("a", b"again")
        assert store.commit() == 6
    with opened(place, queue) as store:
        assert store.get("a").tobytes() == b"again"
        assert value_of(store.get("only 4")) == 4
        assert store.verify() == ()


def test_a_store_that_never_was_committed_says_so(place: list[Path], queue: IOQueue) -> None:
    Volume.create(place, MIB, queue=queue).close()
    (place[0] / "manifest.new").write_bytes(b"deepnvme-store 1 ")
    with pytest.raises(StoreError, match="never was a commit") as caught:
        opened(place, queue)
    assert caught.value.path == str(place[0])
    with pytest.raises(StoreError, match="no generation 1"):
        opened(place, queue, generation=1)


def test_what_is_put_while_a_commit_runs_is_whole_in_it_or_not_at_all(
    place: list[Path], queue: IOQueue
) -> None:
    names = [f"t{index}" for index in range(8)]
    with TensorStore.create(place, 8 * MIB, queue=queue, returns=Returns.NUMPY) as store:
        store.put_many({name: filled(5000, 0) for name in names})
        store.commit()
        enough = threading.Event()

        def write() -> None:
            number = 0
            while not enough.is_set():
                number = number % 200 + 1
                store.put_many({name: filled(5000, number) for name in names})

        writing = in_thread(write)
        last = [store.commit() for _ in range(10)][-1]
        enough.set()
        writing.result(TIMEOUT_S)
        close_uncommitted(store)
    for generation in (last - 1, last):
        with opened(place, queue, generation=generation) as store:
            assert len({value_of(array) for array in store.get_many(names).values()}) == 1
            assert store.verify() == ()


def test_two_threads_may_commit_at_once(store: TensorStore) -> None:
    store.put("a", b"1")
    with ThreadPoolExecutor(4) as pool:
        generations = list(pool.map(lambda _: store.commit(), range(8)))
    assert sorted(generations) == list(range(2, 10))


def test_closing_waits_for_a_commit_in_another_thread(place: list[Path], queue: IOQueue) -> None:
    late = FaultPlan().delay(delay_us=100_000, every=1, requests=Requests.SYNCS)
    TensorStore.create(place, MIB, queue=queue).close()
    with IOQueue(BACKEND, faults=late) as slow:
        store = opened(place, slow)
        store.put("a", b"1")
        committing = in_thread(store.commit)
        while not store._committing.locked() and not committing.done():
            time.sleep(0.001)
        store.close()
        with opened(place, queue) as store:
            assert store.generation == 2
        assert committing.result() == 2


# --- durability -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("durability", "syncs"), [(Durability.DATA, 1), (Durability.COMMIT, 2)])
def test_a_commit_syncs_as_much_as_was_asked(
    place: list[Path], queue: IOQueue, durability: Durability, syncs: int
) -> None:
    TensorStore.create(place, MIB, queue=queue, durability=durability).close()
    for nth in range(1, 4):
        faults = FaultPlan().fail(nth=nth, requests=Requests.SYNCS)
        with (
            IOQueue(BACKEND, faults=faults) as failing,
            opened(place, failing, durability=durability) as store,
        ):
            store.put("a", b"1")
            if nth <= syncs:
                with pytest.raises(PoisonedError):
                    store.commit()
            else:
                store.commit()


def test_only_swap_stores_are_without_durability(place: list[Path], queue: IOQueue) -> None:
    with pytest.raises(ValueError, match="swap"):
        TensorStore.create(place, MIB, durability=Durability.NONE, queue=queue)
    TensorStore.create(place, MIB, queue=queue).close()
    with pytest.raises(ValueError, match="swap"):
        opened(place, queue, durability=Durability.NONE)
    with (
        TensorStore.swap([place[0].parent], MIB, queue=queue) as swap,
        pytest.raises(ValueError, match="no commits"),
    ):
        swap.commit()


def test_a_swap_store_leaves_no_files_and_does_not_warn(tmp_path: Path, queue: IOQueue) -> None:
    with TensorStore.swap(
        [tmp_path, tmp_path], 8 * MIB, queue=queue, returns=Returns.NUMPY
    ) as store:
        store.put_many({"a": filled(3 * MIB, 1), "b": filled(10, 2)})
        assert value_of(store.get("a")) == 1
        assert list(tmp_path.iterdir()) == []  # its files have no names
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyboardInterrupt), TensorStore.swap([tmp_path], MIB, queue=queue):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


UNCOMMITTED = """
import sys
from deepnvme.store.store import TensorStore
store = TensorStore.create([sys.argv[1]], 1 << 20)
store.put("a", b"1")
store.close()
"""


def test_who_closes_without_a_commit_is_told_without_asking_for_warnings(tmp_path: Path) -> None:
    done = run_program(UNCOMMITTED, tmp_path / "store", folder=tmp_path)
    output_of(done)
    assert "UncommittedWarning" in done.stderr
    assert str(tmp_path / "store") in done.stderr


@pytest.mark.filterwarnings("error")
def test_closing_without_changes_does_not_warn(place: list[Path], queue: IOQueue) -> None:
    with TensorStore.create(place, MIB, queue=queue) as store:
        store.put("a", b"1")
        store.commit()
    with opened(place, queue) as store:
        store.get("a")
    store.close()


# --- space ----------------------------------------------------------------------------------------


def test_replaced_space_is_used_again_after_two_commits(store: TensorStore) -> None:
    store.put("a", filled(MIB, 1))
    store.commit()
    free = store.volume.free_bytes
    store.put("a", filled(MIB, 2))
    assert store.volume.free_bytes == free - MIB
    store.commit()
    assert store.volume.free_bytes == free - MIB
    store.commit()
    assert store.volume.free_bytes == free


def test_space_that_no_commit_holds_is_free_at_once(store: TensorStore) -> None:
    free = store.volume.free_bytes
    for value in range(100):
        store.put("a", filled(MIB, value))
    assert store.volume.free_bytes == free - MIB
    store.delete("a")
    assert store.volume.free_bytes == free


@pytest.mark.parametrize("generation", [2, 3])
def test_an_opened_store_knows_what_both_commits_hold(
    place: list[Path], queue: IOQueue, generation: int
) -> None:
    with TensorStore.create(place, 8 * MIB, queue=queue) as store:
        empty = store.volume.free_bytes
        store.put_many({"a": filled(MIB, 1), "kept": filled(MIB, 2)})
        store.commit()
        store.put("a", filled(MIB, 3))
        store.commit()
    with opened(place, queue, generation=generation) as store:
        assert store.volume.free_bytes == empty - 3 * MIB
        assert [store.commit() for _ in range(2)] == [4, 5]
        assert store.volume.free_bytes == empty - 2 * MIB
        assert value_of(store.get("a")) == {2: 1, 3: 3}[generation]


@pytest.mark.parametrize("end", ["replaced", "deleted"])
def test_space_is_not_used_again_under_a_reader(
    place: list[Path], stack: ExitStack, end: str
) -> None:
    late = FaultPlan().delay(delay_us=300_000, every=1, requests=Requests.READS)
    queue = stack.enter_context(IOQueue(BACKEND, faults=late))
    store = stack.enter_context(
        TensorStore.swap([place[0].parent], 4 * MIB, queue=queue, returns=Returns.NUMPY)
    )
    store.put("a", filled(MIB, 1))
    reading = store.get_async("a")
    while not store.volume.stats()[0].read_bytes:
        time.sleep(0.001)
    if end == "replaced":
        store.put("a", filled(MIB, 2))
    else:
        store.delete("a")
    free = store.volume.free_bytes
    for value in range(10):
        store.put("b", filled(MIB, value))
    assert not reading.done()
    assert value_of(reading.result(TIMEOUT_S)) == 1
    store.delete("b")
    assert store.volume.free_bytes == free + MIB


@pytest.mark.parametrize(
    "rest",
    [{"big": 9 * MIB}, {"small": 10, "big": 9 * MIB}, {f"t{i}": 200 * KIB for i in range(41)}],
)
def test_a_full_volume_leaves_everything_as_it_was(
    place: list[Path], queue: IOQueue, rest: Mapping[str, int]
) -> None:
    with TensorStore.create(place, 8 * MIB, queue=queue, returns=Returns.NUMPY) as store:
        store.put_many({"a": b"old", "small": b"old"})
        store.commit()
        free, before = store.volume.free_bytes, contents(store)
        with pytest.raises(VolumeFullError, match="no room"):
            store.put_many(
                {"a": b"new", **{name: filled(nbytes, 9) for name, nbytes in rest.items()}}
            )
        assert contents(store) == before
        assert store.volume.free_bytes == free
        store.put("a", b"new")
        store.commit()
        assert store.get("a").tobytes() == b"new"


def test_small_tensors_find_the_last_scattered_pages(place: list[Path], queue: IOQueue) -> None:
    with TensorStore.swap(
        [place[0].parent], 64 * PAGE, queue=queue, returns=Returns.NUMPY
    ) as store:
        store.put_many({f"t{index}": filled(PAGE, index) for index in range(64)})
        for index in range(0, 64, 2):
            store.delete(f"t{index}")
        store.put_many({f"new {index}": filled(3 * PAGE - 5, 100 + index) for index in range(10)})
        assert store.volume.free_bytes == 2 * PAGE
        got = store.get_many(
            [*(f"new {index}" for index in range(10)), *(f"t{index}" for index in range(1, 64, 2))]
        )
        assert [value_of(array) for array in got.values()] == [*range(100, 110), *range(1, 64, 2)]
        assert store.verify() == ()


# --- threads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1000, 3 * MIB])
def test_a_get_during_puts_of_the_same_name_returns_one_of_them_whole(
    store: TensorStore, size: int
) -> None:
    store.put("a", filled(size, 0))

    def write() -> None:
        for value in range(1, 40):
            store.put("a", filled(size, value))

    writing = in_thread(write)

    def read() -> list[int]:
        seen = []
        while not writing.done():
            seen.append(value_of(store.get("a")))
        return seen

    with ThreadPoolExecutor(3) as pool:
        for seen in [future.result(TIMEOUT_S) for future in [pool.submit(read) for _ in range(3)]]:
            assert seen == sorted(seen)
    writing.result(TIMEOUT_S)
    assert value_of(store.get("a")) == 39
    assert store.volume.free_bytes == 24 * MIB - whole_pages(size)


def test_many_threads_do_everything_at_once(place: list[Path], queue: IOQueue) -> None:
    def work(store: TensorStore, thread: int) -> None:
        mine = [f"{thread}/{index}" for index in range(5)]
        for turn in range(8):
            value = thread * 10 + turn
            store.put_many(
                {name: filled(100 + 90_000 * index, value) for index, name in enumerate(mine)}
            )
            store.prefetch(mine[:2])
            if turn % 4 == thread % 4:
                store.commit()
            assert [value_of(array) for array in store.get_many(mine).values()] == [value] * 5
            assert value_of(store.get(mine[0])) == value
            store.delete(mine[turn % 5])
        assert not store.verify()

    with TensorStore.create(place, 24 * MIB, queue=queue, returns=Returns.NUMPY) as store:
        with ThreadPoolExecutor(6) as pool:
            for future in [pool.submit(work, store, thread) for thread in range(6)]:
                future.result(TIMEOUT_S)
        store.commit()
        store.commit()
        before = contents(store)
        used = sum(whole_pages(len(each)) for each in before.values())
        assert store.volume.free_bytes == 24 * MIB - used
    with opened(place, queue) as store:
        assert contents(store) == before


# --- when a commit fails --------------------------------------------------------------------------


def test_a_failed_fsync_poisons_the_store(place: list[Path], queue: IOQueue) -> None:
    with TensorStore.create(place, MIB, queue=queue) as store:
        store.put("a", b"committed")
        store.commit()
    faults = FaultPlan().fail(nth=1, requests=Requests.SYNCS)
    with IOQueue(BACKEND, faults=faults) as failing, opened(place, failing) as store:
        store.put("a", b"later")
        refused = []
        for call in (
            store.commit,
            store.commit,
            lambda: store.put("b", b"1"),
            lambda: store.put_state("s", {}),
            lambda: store.delete("a"),
            lambda: store.put_async("b", b"1").result(TIMEOUT_S),
        ):
            with pytest.raises(
                PoisonedError, match=r"since commit 2 may be lost.*open the store again"
            ) as caught:
                call()
            refused.append(caught.value)
        assert {error.errno for error in refused} == {errno.EIO}
        assert {error.path for error in refused} == {str(place[0])}
        # or each would carry the tracebacks of those before
        assert len(set(map(id, refused))) == len(refused)
        assert store.get("a").tobytes() == b"later"
        assert store.generation == 2
    with opened(place, queue) as store:
        assert store.generation == 2
        assert contents(store) == {"a": b"committed"}
        store.put("a", b"again")
        assert store.commit() == 3


def test_a_manifest_that_cannot_be_written_is_told_and_the_next_commit_goes_on(
    place: list[Path], queue: IOQueue
) -> None:
    TensorStore.create(place, 8 * MIB, queue=queue).close()
    faults = FaultPlan().fail(nth=2, requests=Requests.WRITES, errno=errno.ENOSPC)
    with IOQueue(BACKEND, faults=faults) as failing, opened(place, failing) as store:
        store.put("a", b"1")
        free = store.volume.free_bytes
        with pytest.raises(NVMeError, match="the file system is full") as caught:
            store.commit()
        assert not isinstance(caught.value, PoisonedError)
        assert caught.value.path == str(place[0] / "manifest.new")
        assert sorted(os.listdir(place[0])) == ["data", "manifest.1"]
        assert store.volume.free_bytes == free
        assert store.commit() == 2
        assert store.commit() == 3
        store.delete("a")
        assert [store.commit() for _ in range(2)] == [4, 5]
        assert store.volume.free_bytes == free + PAGE


@pytest.mark.parametrize("step", ["rename", "directory"])
@pytest.mark.parametrize(
    "failure", [OSError(errno.EIO, "broken"), KeyboardInterrupt()], ids=["error", "interrupt"]
)
def test_a_commit_that_ends_in_doubt_poisons_the_store_and_keeps_the_space_of_both(
    place: list[Path],
    queue: IOQueue,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    failure: BaseException,
) -> None:
    real = Path.replace

    def renamed_and_failed(self: Path, target: Path) -> Path:
        real(self, target)
        raise failure

    def failed(_: int) -> None:
        raise failure

    with TensorStore.create(place, MIB, queue=queue) as store:
        store.put("a", b"1")
        if step == "rename":
            monkeypatch.setattr(Path, "replace", renamed_and_failed)
        else:
            monkeypatch.setattr(os, "fsync", failed)
        with pytest.raises(PoisonedError if isinstance(failure, OSError) else KeyboardInterrupt):
            store.commit()
        monkeypatch.undo()
        with pytest.raises(PoisonedError):
            store.put("a", b"2")
    with opened(place, queue) as store:
        assert store.generation == 2
        assert contents(store) == {"a": b"1"}


def test_a_commit_that_is_interrupted_while_it_syncs_poisons_the_store(
    place: list[Path], queue: IOQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: Volume) -> None:
        raise KeyboardInterrupt

    with TensorStore.create(place, MIB, queue=queue) as store:
        store.put("a", b"1")
        with monkeypatch.context() as patch:
            patch.setattr(Volume, "sync", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.commit()
        with pytest.raises(PoisonedError, match="KeyboardInterrupt"):
            store.commit()


def test_a_commit_whose_wait_is_interrupted_is_made_all_the_same(place: list[Path]) -> None:
    slow = FaultPlan().delay(delay_us=3000, every=1, requests=Requests.SYNCS)
    with (
        IOQueue(BACKEND, faults=slow) as queue,
        TensorStore.create(place, MIB, queue=queue) as store,
    ):
        made = 1

        def prepared() -> Callable[[], object]:
            nonlocal made
            store.put("a", str(made).encode())
            return store.commit

        for _ in interruptions(prepared, store_module, store_threads, lane, commits):
            store.put("b", b"")  # goes on beside what is left of it
            now = store.commit()
            assert made < now <= made + 2
            assert contents(store) == {"a": str(made).encode(), "b": b""}
            made = now
    with TensorStore.open(place) as store:
        assert store.generation == made + 1
        assert contents(store) == {"a": str(made).encode(), "b": b""}


def test_waiting_for_a_stores_future_can_be_interrupted_anywhere_and_begun_again(
    tmp_path: Path,
) -> None:
    slow = FaultPlan().delay(delay_us=3000, every=1)
    with (
        IOQueue(BACKEND, faults=slow) as queue,
        TensorStore.swap([tmp_path], MIB, queue=queue, returns=Returns.NUMPY) as store,
    ):
        store.put("a", b"1")
        begun: list[Future[Any]] = []

        def prepared() -> Callable[[], object]:
            begun[:] = [
                store.get_async("a"),
                store.put_async("b", b"2"),
                store.get_async("nothing"),
            ]
            return lambda: [each.exception(TIMEOUT_S) for each in begun]

        for _ in interruptions(prepared, lane):
            reads, puts, fails = begun
            assert reads.result(TIMEOUT_S).tobytes() == b"1"
            assert puts.result(TIMEOUT_S) is None
            assert isinstance(fails.exception(TIMEOUT_S), KeyError)


def test_several_may_wait_for_a_stores_future_and_each_for_a_time_of_its_own(
    tmp_path: Path,
) -> None:
    slow = FaultPlan().delay(delay_us=200_000, every=1, requests=Requests.READS)
    with (
        IOQueue(BACKEND, faults=slow) as queue,
        TensorStore.swap([tmp_path], MIB, queue=queue, returns=Returns.NUMPY) as store,
    ):
        store.put("a", b"1")
        future = store.get_async("a")
        with ThreadPoolExecutor(3) as threads:
            waiting = [threads.submit(future.result, TIMEOUT_S) for _ in range(3)]
            with pytest.raises(FutureTimeoutError):
                future.result(0.001)
            with pytest.raises(FutureTimeoutError):
                future.exception(0)
            assert [each.result().tobytes() for each in waiting] == [b"1"] * 3
        assert future.exception() is None


def test_a_callback_may_wait_for_whoever_waits_for_its_future(store: TensorStore) -> None:
    store.put("a", filled(PAGE, 1))
    go_on = threading.Event()
    future = store.get_async("a")
    future.add_done_callback(lambda _: go_on.wait(TIMEOUT_S))
    assert value_of(future.result(TIMEOUT_S)) == 1
    go_on.set()


@pytest.mark.parametrize("nth", [1, 2])
def test_a_store_that_cannot_be_made_leaves_nothing(tmp_path: Path, nth: int) -> None:
    faults = FaultPlan().fail(nth=nth, requests=Requests.SYNCS)
    with IOQueue(BACKEND, faults=faults) as failing, pytest.raises(PoisonedError):
        TensorStore.create([tmp_path / "a"], MIB, queue=failing)
    assert list(tmp_path.iterdir()) == []


def test_a_store_whose_directory_cannot_be_synced_leaves_nothing(
    tmp_path: Path, queue: IOQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def failing(descriptor: int) -> None:
        if (tmp_path / "a" / "manifest.1").exists():
            raise OSError(errno.EIO, "broken")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(PoisonedError):
        TensorStore.create([tmp_path / "a"], MIB, queue=queue)
    assert list(tmp_path.iterdir()) == []


# --- damaged manifests ----------------------------------------------------------------------------


@pytest.fixture
def two_commits(place: list[Path], queue: IOQueue) -> list[Path]:
    """Return the place of a store whose generation 2 has a=1 and whose generation 3 has a=2."""
    with TensorStore.create(place, MIB, queue=queue) as store:
        for number in (1, 2):
            store.put("a", b"%d" % number)
            store.commit()
    return place


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a bit": lambda path: path.write_bytes(path.read_bytes().replace(b"generation", b"generatioo")),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize(
    ("damaged", "other", "content"), [("manifest.1", 2, b"1"), ("manifest.0", 3, b"2")]
)
def test_a_damaged_manifest_is_an_error_that_names_it_and_what_can_be_opened(
    two_commits: list[Path],
    queue: IOQueue,
    damage: Callable[[Path], object],
    damaged: str,
    other: int,
    content: bytes,
) -> None:
    damage(two_commits[0] / damaged)
    with pytest.raises(
        StoreError, match=rf"{damaged}: not a valid manifest.*can be opened: {other} \(by open"
    ) as caught:
        opened(two_commits, queue)
    assert caught.value.path == str(two_commits[0])
    with pytest.raises(
        StoreError, match=rf"no generation {5 - other} here .*{damaged}.*opened: {other} \(by"
    ):
        opened(two_commits, queue, generation=5 - other)
    with opened(two_commits, queue, generation=other) as store:
        assert contents(store) == {"a": content}
        store.put("a", b"mended")
        store.commit()
        store.commit()
    with opened(two_commits, queue) as store:
        assert contents(store) == {"a": b"mended"}


def test_two_damaged_manifests_are_both_named(two_commits: list[Path], queue: IOQueue) -> None:
    for slot in ("manifest.0", "manifest.1"):
        (two_commits[0] / slot).write_bytes(b"nonsense")
    with pytest.raises(StoreError, match=r"manifest\.0: .*manifest\.1: .*can be opened: none: "):
        opened(two_commits, queue)


def test_a_manifest_of_another_store_is_refused(
    two_commits: list[Path], tmp_path: Path, queue: IOQueue
) -> None:
    TensorStore.create([tmp_path / "other"], MIB, queue=queue).close()
    (two_commits[0] / "manifest.1").write_bytes((tmp_path / "other" / "manifest.1").read_bytes())
    with pytest.raises(StoreError, match=r"manifest\.1: .* it is of the volume"):
        opened(two_commits, queue)


def test_a_refused_open_lets_the_directory_go(two_commits: list[Path], queue: IOQueue) -> None:
    whole = (two_commits[0] / "manifest.1").read_bytes()
    (two_commits[0] / "manifest.1").write_bytes(b"")
    with pytest.raises(StoreError):
        opened(two_commits, queue)
    (two_commits[0] / "manifest.1").write_bytes(whole)
    opened(two_commits, queue).close()


# --- who may use it, and the end ------------------------------------------------------------------


def test_a_store_is_made_where_nothing_is_and_opened_by_one_at_a_time(
    place: list[Path], queue: IOQueue
) -> None:
    with TensorStore.create(place, MIB, queue=queue):
        with pytest.raises(VolumeLockedError):
            opened(place, queue)
        with pytest.raises(VolumeError):
            TensorStore.create(place, MIB, queue=queue)
    with pytest.raises(VolumeError):
        TensorStore.create(place, MIB, queue=queue)
    opened(place, queue).close()


def test_a_closed_store_refuses_everything(place: list[Path], queue: IOQueue) -> None:
    store = TensorStore.create(place, MIB, queue=queue)
    store.put("a", b"1")
    store.put_state("s", {"w": torch.ones(1)})
    store.commit()
    store.close()
    store.close()
    assert store.closed
    for call in (
        lambda: store.put("a", b"1"),
        lambda: store.put_state("s", {}),
        lambda: store.get("a"),
        lambda: store.get_state("s"),
        lambda: store.delete("a"),
        lambda: store.prefetch(["a"]),
        lambda: store.get_async("a"),
        lambda: list(store.stream(["a"])),
        store.verify,
        store.commit,
    ):
        with pytest.raises(ClosedError):
            call()
    assert "closed" in repr(store)


def test_closing_under_readers_and_writers_gives_each_a_result_or_closed_error(
    place: list[Path], queue: IOQueue
) -> None:
    store = TensorStore.create(place, 24 * MIB, queue=queue, returns=Returns.NUMPY)
    store.put("a", filled(3 * MIB, 1))
    store.commit()

    def work(put: bool) -> None:
        with suppress(ClosedError):
            while True:
                if put:
                    store.put("b", filled(MIB, 2))
                else:
                    assert value_of(store.get("a")) == 1

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(work, put) for put in (True, True, False, False)]
        while "b" not in store and not any(future.done() for future in futures):
            time.sleep(0.001)
        close_uncommitted(store)
        for future in futures:
            future.result(TIMEOUT_S)
    with opened(place, queue) as store:
        assert set(store) == {"a"}
        assert store.verify() == ()


def test_a_closed_store_leaves_nothing_registered_with_the_queue_it_was_given(
    place: list[Path],
) -> None:
    with IOQueue(backend_or_skip("uring")) as queue:
        TensorStore.create(place, MIB, queue=queue).close()
        registered = []
        for _ in range(3):
            with opened(place, queue) as store:
                store.put_many({"a": b"1", "b": b"2"})
                store.commit()
                (drive,) = queue.stats().drives.values()
                if drive.registration_error:
                    pytest.skip("this process may not lock so much memory")
            (drive,) = queue.stats().drives.values()
            registered.append(drive.registered_bytes)
        assert len(set(registered)) == 1


def test_a_store_without_checksums_has_none_and_verifies_what_has(
    place: list[Path], queue: IOQueue
) -> None:
    with TensorStore.create(
        place, 8 * MIB, queue=queue, checksum=Checksum.NONE, returns=Returns.NUMPY
    ) as store:
        store.put_many({"a": b"1", "b": b"2", "large": filled(3 * MIB, 3)})
        assert {store.record(name).checksums for name in store} == {None}
        store.commit()
    with opened(place, queue) as store:
        store.put("c", filled(2 * MIB + 1, 4))
        store.commit()
        checksums = store.record("c").checksums
        assert checksums is not None
        assert len(checksums) == 3
        assert value_of(store.get("large")) == 3
        told: list[tuple[str, int]] = []
        assert store.verify(lambda name, nbytes: told.append((name, nbytes))) == ()
        assert told == [("a", 1), ("b", 1), ("large", 3 * MIB), ("c", 2 * MIB + 1)]


def test_verify_goes_on_while_tensors_are_deleted(store: TensorStore) -> None:
    store.put_many({f"t{index}": filled(10, index) for index in range(50)})

    def forget(name: str, _: int) -> None:
        index = int(name[1:])
        if index % 2 == 0 and f"t{index + 1}" in store:
            store.delete(f"t{index + 1}")

    assert store.verify(forget) == ()
    assert len(store) == 25


# --- the order of what is begun -------------------------------------------------------------------


def test_of_two_puts_of_a_name_that_were_begun_the_later_one_wins(tmp_path: Path) -> None:
    with TensorStore.create([tmp_path / "store"], 64 << 20) as store:
        for turn in range(20):
            first = store.put_async("x", np.full(300_000, 2 * turn, np.int32))
            second = store.put_async("x", np.full(10, 2 * turn + 1, np.int32))
            first.result(60)
            second.result(60)
            assert store.get("x").tolist() == [2 * turn + 1] * 10
        store.commit()


def test_a_commit_holds_the_puts_that_had_begun(tmp_path: Path) -> None:
    with TensorStore.create([tmp_path / "store"], 64 << 20) as store:
        store.put_async("large", np.arange(4 << 20, dtype=np.int32))
        store.commit()
        store.put_async("other", np.arange(1 << 20, dtype=np.int32))
        store.commit_async().result(60)
    with TensorStore.open([tmp_path / "store"]) as store:
        assert set(store) == {"large", "other"}


def test_a_state_dict_can_be_deleted_with_its_tensors(tmp_path: Path) -> None:
    with TensorStore.create([tmp_path / "store"], 1 << 20) as store:
        store.put_state("model", {"w": np.ones(3)})
        store.put("model/own", np.ones(3))
        store.delete_state("model")
        assert (store.states, list(store)) == ((), ["model/own"])
        with pytest.raises(KeyError, match="no state dict 'model'"):
            store.delete_state("model")
        store.commit()


def test_a_store_that_could_not_stage_small_tensors_does_not_hang_the_next_put(
    tmp_path: Path,
) -> None:
    queue = IOQueue()
    store = TensorStore.swap([tmp_path], 1 << 20, queue=queue)
    queue.close()
    for _ in range(2):
        with pytest.raises(ClosedError):
            store.put("x", np.ones(3))


FORKED_STORE = """
import os, sys
import numpy as np
from deepnvme import ForkedError
from deepnvme.store.store import TensorStore

store = TensorStore.swap([sys.argv[1]], 1 << 20)
store.put("x", np.ones(3))
pid = os.fork()
if pid == 0:
    try:
        store.put("x", np.ones(3))
    except ForkedError:
        os._exit(0)
    os._exit(1)
print(os.waitpid(pid, 0)[1], flush=True)
store.close()
"""


def test_a_forked_child_is_refused_the_store_and_does_not_crash(tmp_path: Path) -> None:
    ignoring = ["-W", "ignore::DeprecationWarning"]
    assert output_of(run_program(FORKED_STORE, tmp_path, folder=tmp_path, python=ignoring)) == "0\n"


def test_a_tensor_that_cannot_be_put_is_named(tmp_path: Path) -> None:
    with (
        TensorStore.swap([tmp_path], 1 << 20) as store,
        pytest.raises(ValueError, match=r"tensor 'w': .*contiguous"),
    ):
        store.put("w", np.ones((4, 4))[:, ::2])


# --- readers --------------------------------------------------------------------------------------

READING = """
import sys
from deepnvme import Access, Returns, TensorStore
with TensorStore.open(sys.argv[1:], access=Access.READ, returns=Returns.NUMPY) as store:
    print(store.get("a").tobytes().decode(), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def written(place: list[Path], queue: IOQueue) -> list[Path]:
    """Return the place of a store of three tensors and a state, closed."""
    with TensorStore.create(place, 8 * MIB, queue=queue) as store:
        store.put_many({"a": b"one", "b": filled(MIB, 2), "c": filled(300 * KIB, 3)})
        store.put_state("state", {"step": 1, "w": np.arange(5)})
        store.commit()
    return place


@contextmanager
def reader_elsewhere(place: list[Path]) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that has read from the store and has it open."""
    command = [sys.executable, "-c", READING, *map(str, place)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "one\n"
            yield process
        finally:
            process.kill()


def test_several_processes_read_a_store_at_once(written: list[Path], queue: IOQueue) -> None:
    with (
        reader_elsewhere(written),
        reader_elsewhere(written),
        opened(written, queue, access=Access.READ) as one,
        opened(written, queue, access=Access.READ) as other,
    ):
        assert contents(one) == contents(other)
        assert one.get_state("state")["step"] == 1
        assert one.verify() == ()


def test_a_writer_is_refused_while_another_process_reads(
    written: list[Path], queue: IOQueue
) -> None:
    with reader_elsewhere(written) as reader:
        with pytest.raises(
            VolumeLockedError, match=f"process {reader.pid} has this volume open for reading"
        ) as caught:
            opened(written, queue)
        assert (caught.value.pid, caught.value.use) == (reader.pid, "reading")
    with opened(written, queue) as store:
        store.put("a", b"two")
        store.commit()


def test_a_reader_is_refused_while_another_writes(written: list[Path], queue: IOQueue) -> None:
    with (
        opened(written, queue),
        pytest.raises(VolumeLockedError, match="this process has this volume open for writing"),
    ):
        opened(written, queue, access=Access.READ)
    opened(written, queue, access=Access.READ).close()


def test_a_reader_that_was_killed_leaves_nothing_locked(
    written: list[Path], queue: IOQueue
) -> None:
    with reader_elsewhere(written) as reader:
        reader.kill()
        reader.wait(TIMEOUT_S)
        opened(written, queue).close()


CHANGES: dict[str, Callable[[TensorStore], object]] = {
    "put": lambda store: store.put("a", b"x"),
    "put_many": lambda store: store.put_many({"a": b"x"}),
    "put_state": lambda store: store.put_state("s", {}),
    "put_tree": lambda store: store.put_tree("s", {"dict": []}),
    "put_async": lambda store: store.put_async("a", b"x"),
    "put_many_async": lambda store: store.put_many_async({"a": b"x"}),
    "put_state_async": lambda store: store.put_state_async("s", {}),
    "delete": lambda store: store.delete("a"),
    "delete_state": lambda store: store.delete_state("state"),
    "commit": lambda store: store.commit(),
    "commit_async": lambda store: store.commit_async(),
    "discard": lambda store: store.discard(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_store_that_is_open_for_reading_refuses_every_change(
    written: list[Path], queue: IOQueue, change: str
) -> None:
    before = {path.name: path.read_bytes() for path in written[0].iterdir()}
    with opened(written, queue, access=Access.READ) as store:
        with pytest.raises(
            StoreError, match=r"opened for reading: open it with access=Access\.WRITE"
        ):
            CHANGES[change](store)
        assert bytes(store.get("a")) == b"one"
    assert {path.name: path.read_bytes() for path in written[0].iterdir()} == before


def test_a_reader_holds_nothing_that_could_write(written: list[Path], queue: IOQueue) -> None:
    def flags() -> list[int]:
        found = []
        for link in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):
                if str(link.readlink()).startswith(str(written[0])):
                    told = Path("/proc/self/fdinfo", link.name).read_text()
                    found.append(int(told.split("flags:")[1].split()[0], 8))
        return found

    with opened(written, queue, access=Access.READ) as store:
        store.get("b")
        assert len(flags()) >= 2
        assert {each & os.O_ACCMODE for each in flags()} == {os.O_RDONLY}


def test_a_store_on_a_drive_that_is_mounted_read_only_is_read(
    tmp_path: Path, queue: IOQueue
) -> None:
    with loop_ext4_or_skip(tmp_path) as mounted:
        with TensorStore.create([mounted / "s"], 4 * MIB, queue=queue) as store:
            store.put_many({"a": b"one", "b": filled(MIB, 2)})
            store.commit()
        subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
        with pytest.raises(OSError, match="Read-only"):
            opened([mounted / "s"], queue)
        with opened([mounted / "s"], queue, access=Access.READ) as store:
            assert value_of(store.get("b")) == 2
            assert store.verify() == ()


@contextmanager
def loop_ext4_or_skip(folder: Path) -> Iterator[Path]:
    with ExitStack() as ends:
        try:
            mounted = ends.enter_context(loop_ext4(folder, 64 * MIB))
        except DiskUnavailableError as reason:
            pytest.skip(str(reason))
        yield mounted


def test_a_reader_may_open_the_commit_before(written: list[Path], queue: IOQueue) -> None:
    with opened(written, queue) as store:
        store.put("a", b"two")
        store.commit()
        last = store.generation
    with opened(written, queue, access=Access.READ, generation=last - 1) as store:
        assert bytes(store.get("a")) == b"one"


# --- queues that refuse to wait -------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2])
def test_a_queue_that_raises_when_it_is_full_is_waited_for(tmp_path: Path, most: int) -> None:
    late = FaultPlan().delay(delay_us=2_000, every=1)
    places = [tmp_path / "0", tmp_path / "1"]
    data = {f"large {index}": filled(3 * MIB, index) for index in range(4)} | {
        f"small {index}": filled(5000, index) for index in range(9)
    }
    with IOQueue(BACKEND, max_pending=most, when_full=WhenFull.RAISE, faults=late) as queue:
        specs = [Member(folder, rate=1.0) for folder in places]
        with TensorStore.create(specs, 48 * MIB, queue=queue, returns=Returns.NUMPY) as store:
            store.put_many(data)
            store.commit()
            assert {name: value_of(store.get(name)) for name in data} == {
                name: value_of(data[name]) for name in data
            }
            assert {name: value_of(each) for name, each in store.get_many(data).items()} == {
                name: value_of(data[name]) for name in data
            }
            assert store.verify() == ()


def test_operations_of_others_that_fill_a_queue_harm_no_commit(
    place: list[Path], tmp_path: Path
) -> None:
    late = FaultPlan().delay(delay_us=30_000, every=1, requests=Requests.READS)
    (tmp_path / "other").write_bytes(bytes(MIB))
    with (
        IOQueue(BACKEND, max_pending=2, when_full=WhenFull.RAISE, faults=late) as queue,
        queue.open(tmp_path / "other") as file,
        TensorStore.create(place, 4 * MIB, queue=queue, returns=Returns.NUMPY) as store,
    ):
        store.put("a", filled(MIB, 1))
        others = [file.pread(bytearray(1000), 0) for _ in range(2)]
        store.commit()
        store.put("a", filled(MIB, 2))
        store.commit()
        assert [other.result(TIMEOUT_S) for other in others] == [1000, 1000]
        assert value_of(store.get("a")) == 2


# --- copies ---------------------------------------------------------------------------------------


def scattered() -> dict[str, Any]:
    """Return what is not one piece of memory, each with what it is equal to."""
    grid = torch.arange(12.0).reshape(3, 4)
    return {
        "transposed": grid.T,
        "strided": torch.arange(400_000.0)[::2],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "parameter": torch.nn.Parameter(grid.clone()).detach().requires_grad_().T,
        "fortran": np.asfortranarray(np.arange(12).reshape(3, 4)),
        "every other": np.arange(300_000)[::2],
    }


@pytest.mark.parametrize("name", scattered())
def test_a_state_holds_tensors_that_have_to_be_copied_first(
    place: list[Path], queue: IOQueue, name: str
) -> None:
    given = scattered()[name]
    with TensorStore.swap(
        [place[0].parent], 12 * MIB, queue=queue, checksum=Checksum.CRC32C
    ) as store:
        store.put_state("state", {"it": given})
        got = store.get_state("state")["it"]
    assert (got.shape, got.dtype) == (given.shape, given.dtype)
    assert np.array_equal(
        np.asarray(got), np.asarray(torch.as_tensor(given).detach().resolve_conj().resolve_neg())
    )


@pytest.mark.parametrize("checksum", Checksum)
def test_the_copy_of_a_large_tensor_is_gone_before_the_next_one_is_made(
    tmp_path: Path, checksum: Checksum, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_io, "_PIECE_BYTES", MIB)
    monkeypatch.setattr(pipeline, "MOST_BYTES", 2 * MIB)
    copies: list[weakref.ref[object]] = []
    gathered = Scattered.gathered

    def counted(tensor: Scattered) -> Description:
        assert not any(copy() for copy in copies), "two copies at once"
        made = gathered(tensor)
        copies.append(weakref.ref(made.memory.holder))
        return made

    monkeypatch.setattr(Scattered, "gathered", counted)
    late = FaultPlan().delay(delay_us=20_000, every=1, requests=Requests.WRITES)
    with (
        IOQueue(BACKEND, faults=late) as queue,
        TensorStore.swap([tmp_path], 24 * MIB, queue=queue, checksum=checksum) as store,
    ):
        store.put_state("state", [np.zeros(8 * MIB, np.uint8)[::2] for _ in range(3)])
    assert len(copies) == 3


@pytest.mark.parametrize("name", scattered())
def test_put_copies_nothing_and_says_so(store: TensorStore, name: str) -> None:
    refused = pytest.raises(ValueError, match=r"tensor 'it': .*(contiguous|lazy).*copy=True$")
    with refused:
        store.put("it", scattered()[name])
    with refused:
        store.put_async("it", scattered()[name]).result()
    assert "it" not in store

    with pytest.raises(TypeError, match=r"sparse|dense"):
        store.put_async("it", torch.eye(3).to_sparse()).result()
    with pytest.raises(TypeError, match=r"Python objects.*pickle them$"):  # a copy is no help
        store.put("it", np.array([object()]))


@pytest.mark.parametrize(
    "given", [torch.empty(3, device="meta"), torch.eye(3).to_sparse()], ids=["meta", "sparse"]
)
def test_a_state_with_a_tensor_that_has_no_bytes_is_refused(store: TensorStore, given: Any) -> None:
    with pytest.raises(TypeError, match="'state/it': expected a dense tensor with values"):
        store.put_state("state", {"it": given})
    assert store.states == ()


# --- ahead, within bounds -------------------------------------------------------------------------


def test_no_more_is_read_ahead_than_was_allowed(store: TensorStore) -> None:
    names = [f"t{index}" for index in range(8)]
    store.put_many({name: filled(MIB, index) for index, name in enumerate(names)})
    before = store.volume.stats()[0].read_bytes

    def read_mib() -> int:
        return (store.volume.stats()[0].read_bytes - before) // MIB

    store.prefetch(names, most_bytes=3 * MIB)
    deadline = time.monotonic() + TIMEOUT_S
    while read_mib() < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.05)
    assert read_mib() == 3
    for index, name in enumerate(names):
        assert value_of(store.get(name)) == index
        assert read_mib() <= index + 4
    assert read_mib() == len(names)


def test_a_tensor_larger_than_the_bound_is_read_ahead_alone(store: TensorStore) -> None:
    store.put_many({"large": filled(4 * MIB, 1), "next": filled(MIB, 2)})
    before = store.volume.stats()[0].read_bytes
    store.prefetch(["large", "next"], most_bytes=MIB)
    assert value_of(store.get("large")) == 1
    assert value_of(store.get("next")) == 2
    assert store.volume.stats()[0].read_bytes - before == 5 * MIB


def test_what_is_forgotten_before_it_was_read_ahead_leaves_room(store: TensorStore) -> None:
    store.put_many({name: filled(MIB, index) for index, name in enumerate("abcd")})
    store.prefetch([*"abcd"], most_bytes=MIB)
    store.delete("b")
    store.put("c", filled(MIB, 9))
    store.delete("a")
    assert value_of(store.get("d")) == 3
    assert value_of(store.get("c")) == 9
    with pytest.raises(ValueError, match="must not be negative"):
        store.prefetch(["d"], most_bytes=-1)


def test_states_can_be_put_and_got_without_waiting(store: TensorStore) -> None:
    state = some_state(3.0)

    async def both() -> Any:
        await store.put_state_async("state", state)
        return await store.get_state_async("state")

    assert same_state(asyncio.run(both()), state)


# --- forgotten ------------------------------------------------------------------------------------


def test_a_store_that_is_forgotten_with_changes_tells_of_them(
    place: list[Path], queue: IOQueue
) -> None:
    store = TensorStore.create(place, MIB, queue=queue)
    store.put("a", b"1")
    held = [store]
    del store
    with pytest.warns(UncommittedWarning, match=f"{place[0]} was forgotten without close"):
        held.clear()
    with opened(place, queue) as store:
        assert "a" not in store


@pytest.mark.filterwarnings("error")
def test_a_store_that_is_forgotten_without_changes_does_not_warn(
    place: list[Path], queue: IOQueue
) -> None:
    store = TensorStore.create(place, MIB, queue=queue)
    store.put("a", b"1")
    store.commit()
    del store
    swap = TensorStore.swap([place[0].parent], MIB, queue=queue)
    swap.put("a", b"1")
    del swap
    gc.collect()
    with opened(place, queue) as store:
        assert bytes(store.get("a")) == b"1"


# --- what was read ahead and is not wanted any more -----------------------------------------------


ENDS: dict[str, Callable[[TensorStore], object]] = {
    "forgotten": lambda store: store.forget_prefetched(),
    "forgotten by name": lambda store: store.forget_prefetched(["a", "of no tensor"]),
    "got into out": lambda store: store.get("a", out=bytearray(MIB)),
    "replaced": lambda store: store.put("a", b"other"),
    "deleted": lambda store: store.delete("a"),
    "state replaced": lambda store: store.put_state("a", {}),
    "closed": close_uncommitted,
}


@pytest.mark.parametrize("end", ENDS)
def test_memory_that_was_read_ahead_is_let_go_when_nobody_can_get_it_any_more(
    store: TensorStore, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    name = "a/w" if end == "state replaced" else "a"
    if name == "a":
        store.put(name, filled(MIB, 1))
    else:
        store.put_state("a", {"w": filled(MIB, 1)})
    held: list[weakref.ref[Any]] = []

    def remembered(*arguments: Any) -> Any:
        tensor = empty(*arguments)
        held.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr("deepnvme.store.store.empty", remembered)
    store.prefetch([name])
    until(lambda: bool(held))
    ENDS[end](store)
    until(lambda: [each() for each in held if each() is not None] == [])


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_what_is_forgotten_leaves_room_for_what_is_wanted_next(store: TensorStore) -> None:
    store.put_many({name: filled(MIB, index) for index, name in enumerate("abcd")})
    before = store.volume.stats()[0].read_bytes
    store.prefetch([*"abc"], most_bytes=MIB)
    store.forget_prefetched()
    store.prefetch(["d"], most_bytes=MIB)
    until(lambda: store.volume.stats()[0].read_bytes - before >= MIB)
    assert value_of(store.get("d")) == 3
    assert store.volume.stats()[0].read_bytes - before <= 2 * MIB
    assert value_of(store.get("b")) == 1


def test_closing_does_not_read_what_was_only_wanted(store: TensorStore) -> None:
    store.put_many({f"t{index}": filled(PAGE, index) for index in range(8)})
    before = store.volume.stats()[0].read_bytes
    go = threading.Event()
    busy = [store._threads.read(go.wait) for _ in range(4)]
    store.prefetch([f"t{index}" for index in range(8)])
    closing = in_thread(lambda: close_uncommitted(store))
    until(lambda: store.closed)
    time.sleep(0.01)
    go.set()
    closing.result(TIMEOUT_S)
    assert all(each.result(TIMEOUT_S) for each in busy)
    assert store.volume.stats()[0].read_bytes == before


# --- forks ----------------------------------------------------------------------------------------

FORKED_CALLS = """
import os, signal, sys
from deepnvme import ForkedError
from deepnvme.store.store import TensorStore

place, end = sys.argv[1:]
store = TensorStore.create([place], 1 << 20)
store.put_async("x", b"1").result(60)
store.commit()
store.get_async("x").result(60)  # so there are threads, which a child does not have
calls = [
    lambda: store.get("x"),
    lambda: store.get_async("x"),
    lambda: store.get_many_async(["x"]),
    lambda: store.get_state_async("s"),
    lambda: next(store.stream(["x"])),
    lambda: store.prefetch(["x"]),
    lambda: store.forget_prefetched(),
    lambda: store.put("x", b"2"),
    lambda: store.put_async("x", b"2"),
    lambda: store.put_state("s", {}),
    lambda: store.delete("x"),
    lambda: store.delete_async("x"),
    lambda: store.verify(),
    lambda: store.verify_async(),
    lambda: store.commit(),
    lambda: store.commit_async(),
    lambda: "x" in store,
    lambda: list(store),
    lambda: store.record("x"),
    lambda: store.states,
    lambda: store.volume.stats(),
    lambda: store.volume.free_bytes,
]
locks = store._tensors.lock, store.volume._changing, store._threads._lock
for lock in locks:
    lock.acquire()  # as another thread may have at that moment
pid = os.fork()
if pid == 0:
    signal.alarm(60)
    for number, call in enumerate(calls):
        try:
            call()
        except ForkedError:
            continue
        os.write(2, b"call %d was not refused" % number)
        os._exit(1)
    repr(store.volume)
    getattr(store, end)()
    os._exit(0 if store.closed else 2)
for lock in locks:
    lock.release()
print(os.waitpid(pid, 0)[1], flush=True)
store.put("y", b"2")
store.commit()
store.close()
with TensorStore.open([place]) as store:
    print(sorted(store), store.generation)
"""


@pytest.mark.parametrize("end", ["close", "discard"])
def test_a_forked_child_is_refused_every_call_at_once_and_harms_nothing_by_ending(
    tmp_path: Path, end: str
) -> None:
    ignoring = ["-W", "ignore::DeprecationWarning"]
    done = run_program(FORKED_CALLS, tmp_path / "store", end, folder=tmp_path, python=ignoring)
    assert (output_of(done), done.stderr) == ("0\n['x', 'y'] 3\n", "")


FORKED_IN_A_PUT = """
import os, signal, sys
from deepnvme import FaultPlan, IOQueue, Requests
from deepnvme.store.store import TensorStore

slow = FaultPlan().delay(delay_us=500_000, every=1, requests=Requests.WRITES)
with IOQueue(faults=slow) as queue, TensorStore.create([sys.argv[1]], 8 << 20, queue=queue) as store:
    puts = [store.put_async(str(number), bytes(1 << 20)) for number in range(3)]
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)  # it must not wait for what the parent's threads would do
        sys.exit(0)  # which leaves both blocks
    print(os.waitpid(pid, 0)[1], flush=True)
    for put in puts:
        put.result(60)
    store.commit()
    print(sorted(store))
"""


def test_a_child_forked_in_a_put_ends_as_python_does(tmp_path: Path) -> None:
    ignoring = ["-W", "ignore::DeprecationWarning"]
    done = run_program(FORKED_IN_A_PUT, tmp_path / "store", folder=tmp_path, python=ignoring)
    assert (output_of(done), done.stderr) == ("0\n['0', '1', '2']\n", "")


# --- callbacks ------------------------------------------------------------------------------------


def test_a_callback_of_a_put_may_commit_while_other_puts_are_queued(place: list[Path]) -> None:
    late = FaultPlan().delay(delay_us=50_000, every=1, requests=Requests.WRITES)
    with (
        IOQueue(BACKEND, faults=late) as queue,
        TensorStore.create(place, 8 * MIB, queue=queue) as store,
    ):
        committed: Future[int] = Future()
        first = store.put_async("a", b"1")
        first.add_done_callback(lambda _: committed.set_result(store.commit()))
        second = store.put_async("b", b"2")
        assert committed.result(TIMEOUT_S) == 2
        second.result(TIMEOUT_S)
        store.commit()
        assert set(store) == {"a", "b"}


def test_a_callback_of_one_store_may_close_another_which_waits_as_ever(
    tmp_path: Path, queue: IOQueue
) -> None:
    late = FaultPlan().delay(delay_us=200_000, every=1, requests=Requests.WRITES)
    with (
        TensorStore.swap([tmp_path], MIB, queue=queue) as store,
        IOQueue(BACKEND, faults=late) as slow,
    ):
        other = TensorStore.swap([tmp_path], MIB, queue=slow)
        slow_put = other.put_async("a", b"1")
        done: Future[bool] = Future()

        def close(_: object) -> None:
            other.close()
            done.set_result(slow_put.done())

        go = threading.Event()
        reading = store._threads.read(go.wait)
        reading.add_done_callback(close)
        go.set()
        assert done.result(TIMEOUT_S)


# --- other things that happen meanwhile -----------------------------------------------------------


def test_a_put_that_ends_after_the_store_was_closed_says_so(
    store: TensorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = TensorIO.write

    def close_then(self: TensorIO, tensors: Any) -> Any:
        records = write(self, tensors)
        store.close()
        return records

    monkeypatch.setattr(TensorIO, "write", close_then)
    with pytest.raises(ClosedError):
        store.put("a", b"1")


def test_closing_under_verify_is_no_damage(
    store: TensorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a", filled(MIB, 1))
    pread = Volume.pread

    def close_then(self: Volume, *arguments: Any) -> Any:
        close_uncommitted(store)
        return pread(self, *arguments)

    monkeypatch.setattr(Volume, "pread", close_then)
    with pytest.raises(ClosedError):
        store.verify()


def test_a_manifest_that_the_drive_cannot_read_is_damaged_and_the_other_can_be_opened(
    two_commits: list[Path], queue: IOQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = manifest_files._content_of

    def failing(place: Path) -> bytes:
        if place.name == "manifest.1":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(place))
        return read(place)

    monkeypatch.setattr(manifest_files, "_content_of", failing)
    with pytest.raises(
        StoreError, match=r"manifest\.1: it cannot be read: Input/output error; .* opened: 2"
    ):
        opened(two_commits, queue)
    with opened(two_commits, queue, generation=2) as store:
        assert contents(store) == {"a": b"1"}


def test_a_state_in_place_of_one_that_makes_no_sense_is_refused_and_changes_nothing(
    place: list[Path], queue: IOQueue
) -> None:
    with TensorStore.create(place, MIB, queue=queue) as store:
        store.put_many({"state/w": b"old", "state/x": b"old"})
        store.commit()
        uuid, capacities = store.volume.uuid, store.volume.capacities
    manifest = parse((place[0] / "manifest.0").read_bytes(), volume=uuid, capacities=capacities)
    (place[0] / "manifest.0").write_bytes(
        encode(replace(manifest, trees={"state": {"of": "somebody else"}}))
    )
    with opened(place, queue) as store:
        free = store.volume.free_bytes
        with pytest.raises(ManifestError, match="not the structure of a state dict"):
            store.put_state("state", {"w": np.ones(3)})
        assert contents(store) == {"state/w": b"old", "state/x": b"old"}
        assert store.volume.free_bytes == free


def test_bytes_of_a_tree_are_refused_where_their_tensor_has_another_dtype_or_shape(
    store: TensorStore,
) -> None:
    store.put("state/a", np.zeros((4, 4), np.float32))
    store.put_tree("state", {"dict": [["a", {"blob": "a"}]]})

    with pytest.raises(ManifestError, match=r"'state/a' is bytes.*F32 \[4, 4\]"):
        store.get_state("state")


def test_long_bytes_in_two_places_come_back_as_one_object(store: TensorStore) -> None:
    long = bytes(range(256)) * 40
    store.put_state("state", {"a": long, "b": [long]})
    found = store.get_state("state")

    assert found == {"a": long, "b": [long]}
    assert found["a"] is found["b"][0]


def test_a_tree_that_is_changed_after_it_was_put_does_not_change_the_store(
    store: TensorStore,
) -> None:
    store.put("state/w", b"1")
    structure: dict[str, Any] = {"dict": [["w", {"array": "w"}]]}
    store.put_tree("state", structure)
    structure["nonsense"] = None
    assert list(store.get_state("state")) == ["w"]


FORKED_FUTURE = """
import os, sys, threading
from deepnvme import ForkedError
from deepnvme.store.store import TensorStore

store = TensorStore.create([sys.argv[1]], 1 << 20)
go = threading.Event()
under_way = store._threads.read(go.wait)
child = os.fork()
if not child:
    try:
        under_way.result(60)
    except ForkedError as error:
        os._exit(0 if str(os.getppid()) in str(error) else 2)
    os._exit(1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
go.set()
assert under_way.result(60)
store.close()
sys.exit(status)
"""


def test_what_goes_on_in_the_parent_is_not_waited_for_in_a_child(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FORKED_FUTURE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
