"""A store in the hands of somebody who mistypes, mixes kinds of calls, kills and removes: told, and
nothing is lost.
"""

from __future__ import annotations

import errno
import os
import pickle
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepnvme import (
    Access,
    FaultPlan,
    IOQueue,
    Requests,
    Returns,
    TensorStore,
    load,
    read_safetensors,
    save,
    write_safetensors,
)
from deepnvme.compat import aio_handle
from deepnvme.errors import StoreError, VolumeError
from deepnvme.memory.arrays import empty
from deepnvme.sizes import SMALL_BYTES
from deepnvme.store.holdings import Holdings
from deepnvme.store.store import Checksum, Durability, UncommittedWarning
from deepnvme.store.store_threads import StoreThreads
from deepnvme.volume.volume import Member

MIB = 1 << 20
BACKEND = "threads"
TIMEOUT_S = 60


@pytest.fixture
def queue() -> Iterator[IOQueue]:
    with IOQueue(BACKEND) as queue:
        yield queue


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(place: Path, queue: IOQueue) -> Iterator[TensorStore]:
    store = TensorStore.create([place], 24 * MIB, queue=queue, returns=Returns.NUMPY)
    yield store
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncommittedWarning)
        store.close()


# --- choices --------------------------------------------------------------------------------------


def _created(place: Path, **wrong: Any) -> object:
    return TensorStore.create([place], MIB, **wrong)


def _swapped(place: Path, **wrong: Any) -> object:
    return TensorStore.swap([place], MIB, **wrong)


def _written(place: Path, **wrong: Any) -> None:
    write_safetensors(place, {}, **wrong)


def test_a_choice_may_be_given_as_the_text_of_its_value(place: Path, queue: IOQueue) -> None:
    text: Any = {"durability": "data", "checksum": "none", "returns": "numpy"}
    with TensorStore.create([place], MIB, queue=queue, **text) as store:
        assert (store.durability, store.checksum, store.returns) == (
            Durability.DATA,
            Checksum.NONE,
            Returns.NUMPY,
        )
        store.put("x", b"1")
        assert store.record("x").checksums is None
        store.commit()
    reading: Any = "read"
    with (
        TensorStore.open([place], access=reading, queue=queue) as store,
        pytest.raises(StoreError, match="for reading"),
    ):
        store.put("y", b"2")


@pytest.mark.parametrize(
    ("make", "wrong", "told"),
    [
        (_created, {"durability": "comit"}, "durability: expected one of Durability.NONE"),
        (_created, {"durability": "none"}, "make such a store with TensorStore.swap"),
        (_created, {"checksum": "crc32"}, "checksum: expected one of Checksum.CRC32C"),
        (_created, {"checksum": True}, "checksum: expected one of"),
        (_created, {"returns": "jax"}, "returns: expected one of Returns.TORCH"),
        (_swapped, {"checksum": "yes"}, "checksum: expected one of"),
        (partial(save, {}), {"durability": "always"}, "durability: expected one of"),
        (_written, {"durability": "sync"}, "durability: expected one of"),
    ],
)
def test_a_choice_that_there_is_not_is_refused_before_anything_is_made(
    place: Path, make: Callable[..., object], wrong: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        make(place, **wrong)

    assert not place.exists()


@pytest.mark.parametrize(
    "wrong", [{"access": "r"}, {"durability": "none"}, {"checksum": 1}, {"returns": "list"}]
)
def test_a_store_is_not_opened_by_a_choice_that_there_is_not(
    store: TensorStore, place: Path, wrong: Any
) -> None:
    store.close()

    with pytest.raises(ValueError, match=r"expected one of|TensorStore\.swap"):
        TensorStore.open([place], **wrong)


# --- names and arguments --------------------------------------------------------------------------


def test_a_text_is_not_taken_for_names(store: TensorStore) -> None:
    store.put("a", b"1")
    for call in (store.get_many, store.get_many_async, store.prefetch):
        with pytest.raises(TypeError, match=r"expected names, such as \['a'\]"):
            call("a")


def test_tensors_without_names_are_refused(store: TensorStore) -> None:
    unnamed: Any = [b"1"]
    with pytest.raises(TypeError, match="expected tensors by name, as a mapping; got list"):
        store.put_many(unnamed)


def test_memory_for_a_tensor_that_is_not_asked_for_is_refused(
    store: TensorStore, tmp_path: Path
) -> None:
    store.put("a", b"12")
    out = {"A": np.zeros(2, np.uint8)}
    write_safetensors(tmp_path / "x.safetensors", {"a": np.zeros(2, np.uint8)})

    for call in (
        lambda: store.get_many(["a"], out),
        lambda: store.get_many_async(["a"], out),
        lambda: read_safetensors(tmp_path / "x.safetensors", out=out),
    ):
        with pytest.raises(ValueError, match="`out` has 'A', which is not asked for"):
            call()


def test_a_tensor_that_a_file_cannot_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tensor 'w': .*not contiguous"):
        write_safetensors(tmp_path / "x.safetensors", {"w": np.zeros((4, 4), np.float32).T})


def test_a_capacity_is_a_whole_number(place: Path) -> None:
    half: Any = 0.5
    for directory, capacity in ((place, half), (Member(place, capacity=half), None)):
        with pytest.raises(TypeError, match=r"such as 1 << 30; got 0\.5"):
            TensorStore.create([directory], capacity)


def test_a_directory_is_given_once(store: TensorStore, place: Path) -> None:
    store.close()
    with pytest.raises(ValueError, match=r"in different directories; got .*store 2 times"):
        TensorStore.open([place, place.parent / "." / place.name])


def test_a_store_says_how_to_have_it_in_another_process(store: TensorStore) -> None:
    with pytest.raises(TypeError, match="open it by its directories in the other process"):
        pickle.dumps(store)


def test_the_warning_of_a_loss_names_the_line_that_closes(place: Path, queue: IOQueue) -> None:
    with (
        pytest.warns(UncommittedWarning) as caught,
        TensorStore.create([place], MIB, queue=queue) as store,
    ):
        store.put("x", b"1")

    assert [each.filename for each in caught] == [__file__]


def test_what_deepnvme_refuses_to_write_leaves_no_file(tmp_path: Path) -> None:
    handle: Any = aio_handle(1 << 20, 8, False, False, 1)
    with pytest.raises((ValueError, TypeError)):
        handle.sync_pwrite(torch.zeros(8, 8).t(), str(tmp_path / "x"))

    assert list(tmp_path.iterdir()) == []


def test_a_scalar_of_text_is_refused_with_what_to_do(place: Path) -> None:
    with pytest.raises(
        TypeError, match=r"make it a plain value first: int\(\.\.\.\), float\(\.\.\.\), str"
    ):
        save({"name": np.str_("x")}, place)


# --- one after the other --------------------------------------------------------------------------


def test_a_put_comes_after_what_was_begun_before_it(place: Path) -> None:
    late = FaultPlan().delay(delay_us=100_000, every=1, requests=Requests.WRITES)
    with (
        IOQueue(BACKEND, faults=late) as queue,
        TensorStore.create([place], 8 * MIB, queue=queue) as store,
    ):
        store.put_async("big", np.zeros(MIB, np.uint8))
        store.put_async("x", b"old")
        store.put("x", b"new")
        assert bytes(store.get("x")) == b"new"

        store.put_async("x", b"again")
        store.delete("x")
        assert "x" not in store

        store.put_async("state/w", b"1")
        store.put_state("state", {"w": np.zeros(2, np.uint8)})
        assert store.get_state("state")["w"].tolist() == [0, 0]
        store.put_state_async("state", {"w": np.ones(2, np.uint8)})
        store.delete_state("state")
        assert "state/w" not in store
        store.commit()


def test_a_put_waits_for_no_other_name_and_never_on_a_thread_of_the_store() -> None:
    threads, free = StoreThreads(), threading.Event()
    begun = threads.write(free.wait, ["x", "state/w"])
    inside = threads.read(lambda: threads.wait_for_queued(["x"]))

    threads.wait_for_queued(["y", "xx", "states"])  # returns, while the write waits for us
    inside.result(TIMEOUT_S)
    waiting = threading.Thread(target=threads.wait_for_queued, args=[["state/other"]])
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    assert not begun.done()
    free.set()
    waiting.join(TIMEOUT_S)
    assert not waiting.is_alive()
    assert begun.result(TIMEOUT_S)
    threads.take_no_more()
    threads.join()


def test_what_was_deleted_later_stays_deleted(store: TensorStore) -> None:
    store.put_async("x", b"1")
    store.put_state_async("s", {"w": np.zeros(2, np.uint8)})
    deleted = [store.delete_async("x"), store.delete_state_async("s")]
    assert [each.result(TIMEOUT_S) for each in deleted] == [None, None]
    assert list(store) == []
    assert store.verify_async().result(TIMEOUT_S) == ()


# --- states ---------------------------------------------------------------------------------------


def test_tied_weights_are_stored_once_and_stay_tied(place: Path) -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(300, 300, bias=False), torch.nn.Linear(300, 300, bias=False)
    )
    first, second = model[0], model[1]
    second.weight = first.weight
    array = np.arange(100)
    save({**model.state_dict(), "whole": array, "view": array[:], "part": array[:50]}, place)

    found = load(place)

    assert found["0.weight"] is found["1.weight"]
    assert torch.equal(found["0.weight"], model.state_dict()["0.weight"])
    assert found["whole"] is found["view"]
    assert found["part"].tolist() == list(range(50))
    with TensorStore.open([place], access=Access.READ) as store:
        assert len(store) == 3


@pytest.mark.parametrize(
    "see", [lambda x: x.view(torch.int32), lambda x: x.t(), lambda x: x[:8], lambda x: x.clone()]
)
def test_tensors_that_are_not_the_same_stay_apart(
    place: Path, see: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    first = torch.randn(16, 16)
    save({"first": first, "second": see(first)}, place)

    found = load(place)

    assert found["first"] is not found["second"]
    assert torch.equal(found["second"], see(first))


def test_a_part_of_a_state_is_not_deleted_alone(store: TensorStore) -> None:
    store.put_state("state", {"w": np.zeros(2, np.uint8)})
    store.put("state/other", b"1")

    store.delete("state/other")
    with pytest.raises(ValueError, match=r"a part of the state dict 'state'.*delete_state\(\)"):
        store.delete("state/w")

    assert store.get_state("state")["w"].tolist() == [0, 0]


def test_a_state_that_lacks_a_tensor_is_damaged(
    store: TensorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_state("state", {"w": np.zeros(2, np.uint8)})
    monkeypatch.setattr(Holdings, "missing", lambda _: ["state/w"])

    (damage,) = store.verify()

    assert (damage.name, damage.reason) == ("state/w", "it belongs to a state dict, and is missing")


def test_what_a_state_lacks_is_found() -> None:
    holdings = Holdings(Path("/x"), lambda _: None)
    holdings._trees.update({"s": {"dict": [["w", {"array": "w"}]]}, "t": 7, "u": {"none": 1}})

    assert holdings.missing() == ["s/w", "u"]


# --- many small ones ------------------------------------------------------------------------------


def test_small_tensors_take_no_mapping_each() -> None:
    before = len(Path("/proc/self/maps").read_text().splitlines())
    kept = [
        empty("U8", (nbytes,), Returns.NUMPY)
        for nbytes in (4096, 5000, SMALL_BYTES // 4)
        for _ in range(300)
    ]

    assert len(Path("/proc/self/maps").read_text().splitlines()) < before + 100
    assert all(each.ctypes.data % 4096 == 0 for each in kept)


def test_small_tensors_are_streamed_and_verified_together(
    store: TensorStore, queue: IOQueue
) -> None:
    store.put_many(
        {f"n{number:03}": np.full(5000, number % 251, np.uint8) for number in range(500)}
    )
    for read in (lambda: dict(store.stream()), store.verify):
        (before,) = (drive.operations for drive in queue.stats().drives.values())
        read()
        (after,) = (drive.operations for drive in queue.stats().drives.values())
        assert after - before < 20

    assert [(name, int(each[4999])) for name, each in store.stream(["n003", "n250", "n003"])] == [
        ("n003", 3),
        ("n250", 250),
        ("n003", 3),
    ]


def test_a_name_that_is_missing_ends_a_stream_behind_those_before_it(store: TensorStore) -> None:
    store.put_many({"a": b"1", "b": b"2"})
    stream = store.stream(["a", "c", "b"])

    assert next(stream)[0] == "a"
    with pytest.raises(KeyError, match="no tensor 'c'"):
        next(stream)


@pytest.mark.parametrize("large", [False, True])
def test_each_damaged_byte_among_many_is_found(place: Path, queue: IOQueue, *, large: bool) -> None:
    sizes = [20 * MIB] if large else [5000] * 50
    with TensorStore.create([place], 24 * MIB, queue=queue) as store:
        store.put_many(
            {f"n{number}": np.full(nbytes, 7, np.uint8) for number, nbytes in enumerate(sizes)}
        )
        store.commit()
        places = {name: store.record(name).places for name in store}
    at = 17 * MIB + 3 if large else 12
    name = "n0" if large else "n31"
    with (place / "data").open("r+b") as file:
        file.seek(places[name][1] + at)
        file.write(b"\0")

    with TensorStore.open([place], access=Access.READ, queue=queue) as store:
        told = []
        damage = store.verify(lambda name, _: told.append(name))

    assert [(each.name, each.offset) for each in damage] == [(name, at // MIB * MIB)]
    assert sorted(told) == sorted(places)


# --- what was there -------------------------------------------------------------------------------


def test_a_manifest_that_is_missing_is_not_stepped_over(place: Path) -> None:
    for step in range(4):
        save({"step": step}, place)
    (place / "manifest.1").unlink()

    with pytest.raises(
        StoreError, match=r"manifest\.1: it is missing, and may have been the newer one.*opened: 4"
    ) as told:
        load(place)

    assert told.value.errno == errno.EBADMSG
    assert load(place, generation=4) == {"step": 2}


def test_a_store_of_one_commit_has_one_manifest(place: Path) -> None:
    TensorStore.create([place], MIB).close()
    with TensorStore.open([place], access=Access.READ) as store:
        assert (store.generation, [each.name for each in place.glob("manifest*")]) == (
            1,
            ["manifest.1"],
        )


@pytest.mark.parametrize("file", ["data", "manifest.0"])
def test_a_store_of_a_newer_format_is_neither_called_damaged_nor_to_be_removed(
    place: Path, file: str
) -> None:
    save({"a": 1}, place)
    path = place / file
    kind = b"deepnvme-volume" if file == "data" else b"deepnvme-store"
    path.write_bytes(path.read_bytes().replace(kind + b" 1 ", kind + b" 2 ", 1))

    with pytest.raises(
        (VolumeError, StoreError), match=r"has version 2 .* this deepnvme reads 1: use a newer one"
    ) as told:
        load(place)

    assert not re.search("damaged|anew", str(told.value))


def test_a_store_whose_making_was_killed_says_what_to_do(place: Path) -> None:
    TensorStore.create([place], MIB).close()
    (place / "manifest.1").unlink()

    with pytest.raises(StoreError, match="Remove what is in its directories and make it anew"):
        save({"a": 1}, place)


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_manifest_that_is_no_file_is_refused_unread(place: Path, kind: str) -> None:
    save({"a": 1}, place)
    secret = place.parent / "secret"
    secret.write_text("hunter2\n")
    for slot in ("manifest.0", "manifest.1"):
        (place / slot).unlink(missing_ok=True)
        {"link": lambda at: at.symlink_to(secret), "pipe": os.mkfifo, "directory": Path.mkdir}[
            kind
        ](place / slot)

    with pytest.raises(StoreError, match="not a file that deepnvme made") as refused:
        load(place)

    assert "hunter2" not in str(refused.value)


def test_capacity_beyond_any_file_is_refused_with_its_value(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a capacity is at least one byte, and at most"):
        TensorStore.swap([tmp_path], 10**400)
