"""A `TensorStore` whose drives fail in turn at every request, and one with a bit flipped anywhere
on them.

A put or a commit that fails leaves the old content or brings the new, whole; no damage is read as
if it were content.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepnvme import FaultPlan, IOQueue, NVMeError, Requests
from deepnvme.errors import ChecksumError, PoisonedError, StoreError, VolumeError
from deepnvme.memory.arrays import Returns
from deepnvme.memory.checksum import CHECKSUM_BYTES
from deepnvme.queue.pipeline import Staged
from deepnvme.store import tensor_io
from deepnvme.store.store import Checksum, TensorStore, UncommittedWarning
from deepnvme.volume.extents import Extent
from deepnvme.volume.volume import Member
from support.nvme_disks import DiskUnavailableError, tmpfs
from support.nvme_io import PAGE, pattern

MIB = 1 << 20
CHUNK_BYTES = 256 << 10  # so that a large tensor is some requests, and all can be struck in turn
BACKEND = "threads"

OLD = {
    "small": pattern(1000, seed=1),
    "page": pattern(PAGE, seed=2),
    "medium": pattern(300_000, seed=3),
    "large": pattern(2 * MIB + 77, seed=4),
    "kept": pattern(5000, seed=5),
    "none": b"",
}
NEW = {
    "small": pattern(1500, seed=11),
    "page": pattern(PAGE, seed=12),
    "medium": pattern(260_001, seed=13),
    "large": pattern(2 * MIB + 78, seed=14),
    "added": pattern(PAGE + 1, seed=15),
}


@pytest.fixture(autouse=True)
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no profile of this machine decide what is tested."""
    monkeypatch.setenv("DEEPNVME_PROFILE", "")


@pytest.fixture(autouse=True)
def little_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every store stage through 8 MiB, enough for these: making the usual 32 MiB took most of
    the time.
    """
    monkeypatch.setattr(tensor_io, "Staged", partial(Staged, run_bytes=2 * MIB))


@pytest.fixture
def queue() -> Iterator[IOQueue]:
    with IOQueue(BACKEND, chunk_bytes=CHUNK_BYTES) as queue:
        yield queue


@pytest.fixture(params=[1, 2], ids=["one drive", "two drives"])
def committed(request: pytest.FixtureRequest, tmp_path: Path, queue: IOQueue) -> list[Path]:
    """Return the places of a store whose generation 2 is OLD, and which has room for little more
    than OLD and NEW.
    """
    places = [tmp_path / "store" / str(index) for index in range(request.param)]
    places[0].parent.mkdir()
    with TensorStore.create(
        [Member(each, rate=1.0) for each in places], 6 * MIB, queue=queue
    ) as store:
        store.put_many(OLD)
        store.commit()
    return places


def opened(places: list[Path], queue: IOQueue, **options: Any) -> TensorStore:
    return TensorStore.open(places, queue=queue, returns=Returns.NUMPY, **options)


@contextmanager
def closing(store: TensorStore) -> Iterator[TensorStore]:
    """Close the store, whatever was committed of it."""
    yield store
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncommittedWarning)
        store.close()


def contents(store: TensorStore) -> dict[str, bytes]:
    return {name: store.get(name).tobytes() for name in store}


def error_of(call: Callable[[], object]) -> NVMeError | None:
    try:
        call()
    except NVMeError as error:
        return error
    return None


# --- every request in turn ------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What a put and a commit on faulty drives ended in, the store having been judged."""

    struck: bool
    put: NVMeError | None
    commit: NVMeError | None


def run_on(places: list[Path], sound: IOQueue, faults: FaultPlan) -> Run:
    """Put and commit NEW in a copy of the store on drives that fail so; judge it open and opened
    again.
    """
    origin = places[0].parent
    copy = origin.with_name("copy")
    shutil.copytree(origin, copy)
    places = [copy / place.name for place in places]
    with (
        IOQueue(BACKEND, chunk_bytes=CHUNK_BYTES, faults=faults) as queue,
        closing(opened(places, queue)) as store,
    ):
        free = store.volume.free_bytes
        put = error_of(lambda: store.put_many(NEW))
        if put is not None:
            assert store.volume.free_bytes == free
        commit = error_of(store.commit)
        struck = any(
            drive.failed or drive.short_transfers for drive in queue.stats().drives.values()
        )
        now = OLD if put else {**OLD, **NEW}
        assert set(store) == set(now)
        if struck:  # else the reads are struck, sooner or later
            assert contents(store) == now
    last = OLD if commit else now
    with opened(places, sound) as store:
        assert contents(store) == last
        assert store.generation == (2 if commit else 3)
        assert store.verify() == ()
    shutil.rmtree(copy)
    return Run(struck, put, commit)


def test_whichever_request_fails_the_old_or_the_new_is_there_whole(
    committed: list[Path], queue: IOQueue
) -> None:
    runs = []
    for nth in count(1):
        run = run_on(committed, queue, FaultPlan().fail(nth=nth))
        if not run.struck:
            break
        runs.append(run)
        assert (run.put is None) != (run.commit is None)  # one request, one failure
    poisoned = [run for run in runs if isinstance(run.commit, PoisonedError)]
    assert len([run for run in runs if run.put]) >= 8
    assert len(poisoned) == len(committed) + 1  # the sync of each member, and that of the manifest
    assert len([run for run in runs if run.commit]) > len(poisoned)
    assert {(run.put or run.commit).errno for run in runs if run.put or run.commit} == {errno.EIO}  # type: ignore[union-attr]


@pytest.mark.parametrize("length", [0, 512], ids=["half", "one sector"])
def test_whichever_request_is_cut_short_nothing_is_lost(
    committed: list[Path], queue: IOQueue, length: int
) -> None:
    runs = []
    for nth in range(1, 18):
        runs.append(run_on(committed, queue, FaultPlan().shorten(nth=nth, length=length)))
        assert (runs[-1].put, runs[-1].commit) == (None, None)
    assert len([run for run in runs if run.struck]) >= 8
    assert not runs[-1].struck  # there are no more requests


@pytest.mark.parametrize("seed", range(8))
def test_many_failures_leave_the_old_or_the_new(
    committed: list[Path], queue: IOQueue, seed: int
) -> None:
    faults = FaultPlan(seed).shorten(probability=0.2).reorder(probability=0.2, hold=3)
    for requests in (Requests.WRITES, Requests.SYNCS):
        faults.fail(probability=0.03, requests=requests)
    run_on(committed, queue, faults)


def test_whichever_read_fails_it_is_told_and_read_again_the_bytes_are_right(
    committed: list[Path], queue: IOQueue
) -> None:
    def read(store: TensorStore) -> dict[str, bytes]:
        return {name: array.tobytes() for name, array in store.get_many(OLD).items()}

    for nth in count(1):
        faults = FaultPlan().fail(nth=nth, requests=Requests.READS)
        with (
            IOQueue(BACKEND, chunk_bytes=CHUNK_BYTES, faults=faults) as failing,
            opened(committed, failing) as store,
        ):
            error = error_of(lambda: read(store))
            if error is None:
                break
            assert error.errno == errno.EIO
            assert read(store) == OLD
    assert nth > 12


def test_verify_names_the_tensor_that_cannot_be_read(committed: list[Path]) -> None:
    for nth in count(1):
        # Of what is read together at first, and then of the tensors one by one.
        faults = (
            FaultPlan()
            .fail(nth=1, requests=Requests.READS)
            .fail(nth=1 + nth, requests=Requests.READS)
        )
        with (
            IOQueue(BACKEND, chunk_bytes=CHUNK_BYTES, faults=faults) as failing,
            opened(committed, failing) as store,
        ):
            found = store.verify()
            if not found:
                break
            (damage,) = found
            assert (damage.offset, damage.nbytes) == (0, len(OLD[damage.name]))
            assert "Input/output error" in damage.reason
            assert store.verify() == ()
    assert nth > 12


def test_verify_looks_at_each_again_where_a_read_of_many_fails(committed: list[Path]) -> None:
    once = FaultPlan().fail(nth=1, requests=Requests.READS)
    with (
        IOQueue(BACKEND, chunk_bytes=CHUNK_BYTES, faults=once) as failing,
        opened(committed, failing) as store,
    ):
        assert store.verify() == ()


def test_a_drive_that_is_lost_is_named_and_what_lies_on_the_others_goes_on(
    tmp_path: Path, queue: IOQueue
) -> None:
    lost = (
        FaultPlan()
        .fail(probability=1.0, requests=Requests.READS)
        .fail(probability=1.0, requests=Requests.WRITES)
    )
    places = [tmp_path / "sound", tmp_path / "lost"]
    with TensorStore.create(
        [Member(place, rate=1.0) for place in places], 16 * MIB, queue=queue
    ) as store:
        store.put("striped", pattern(4 * MIB, seed=1))
        store.put_many({f"small {index}": pattern(100_000, seed=index) for index in range(10)})
        store.commit()
        on_lost = {
            name for name in store if any(extent.member for extent in store.record(name).extents)
        }
    assert "striped" in on_lost
    assert len(on_lost) < 11
    with IOQueue(BACKEND, faults=lost) as failing:
        members = [Member(places[0], queue=queue), Member(places[1], queue=failing)]
        with TensorStore.open(members, returns=Returns.NUMPY) as store:
            before = set(store)
            for name in before:
                error = error_of(lambda name=name: store.get(name))  # type: ignore[misc]
                assert (error.path if error else None) == (
                    str(places[1] / "data") if name in on_lost else None
                )
            error = error_of(lambda: store.put("striped", pattern(4 * MIB, seed=2)))
            assert error is not None
            assert error.path == str(places[1] / "data")
            assert {each.name for each in store.verify()} == on_lost
            assert set(store) == before


def test_a_drive_that_is_full_fails_the_commit_and_no_more(tmp_path: Path, queue: IOQueue) -> None:
    with ExitStack() as stack:
        try:
            disk = stack.enter_context(tmpfs(tmp_path, 8 * MIB))
        except DiskUnavailableError as refusal:
            pytest.skip(str(refusal))
        with TensorStore.create(
            [disk / "store"], 4 * MIB, queue=queue, returns=Returns.NUMPY
        ) as store:
            store.put_many(OLD)
            store.commit()
            filler = disk / "filler"
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(bytes(PAGE)):
                    pass
            store.put("small", NEW["small"])
            with pytest.raises(OSError, match=r"manifest\.new") as caught:
                store.commit()
            assert caught.value.errno == errno.ENOSPC
            assert not isinstance(caught.value, PoisonedError)
            filler.unlink()
            assert store.commit() == 3
        with opened([disk / "store"], queue) as store:
            assert contents(store) == {**OLD, "small": NEW["small"]}


# --- a bit flipped --------------------------------------------------------------------------------


@contextmanager
def flipped(path: Path, offset: int, bit: int) -> Iterator[None]:
    """Let one bit of the file be another meanwhile."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        (before,) = os.pread(descriptor, 1, offset)
        os.pwrite(descriptor, bytes([before ^ 1 << bit]), offset)
        yield
        os.pwrite(descriptor, bytes([before]), offset)
    finally:
        os.close(descriptor)


def places_of(store: TensorStore, name: str, offset: int) -> tuple[Path, int]:
    """Return the file and the offset in it of one byte of a tensor."""
    for extent in store.record(name).extents:
        if offset < extent.nbytes:
            return store.volume.directories[extent.member] / "data", extent.offset + offset
        offset -= extent.nbytes
    raise ValueError(f"{name} is shorter")


# A member's first page does not depend on how many there are.
@pytest.mark.parametrize(
    ("committed", "every"),
    [(1, 1), (2, 7), pytest.param(2, 1, marks=pytest.mark.slow)],
    indirect=["committed"],
    ids=["one drive", "two drives", "two drives, every byte"],
)
def test_a_bit_anywhere_in_a_first_page_is_noticed(
    committed: list[Path], queue: IOQueue, every: int
) -> None:
    for place in committed:
        for offset in range(0, PAGE, every):
            with flipped(place / "data", offset, offset % 8), pytest.raises(VolumeError) as caught:
                opened(committed, queue)
            assert caught.value.path == str(place)
    opened(committed, queue).close()


@pytest.mark.parametrize(
    "bits",
    [
        pytest.param((None,), id="one of each byte"),
        pytest.param(range(8), id="every", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("slot", ["manifest.0", "manifest.1"])
def test_a_bit_anywhere_in_a_manifest_is_noticed(
    committed: list[Path], queue: IOQueue, slot: str, bits: tuple[int | None, ...]
) -> None:
    with opened(committed, queue) as store:
        store.put_state("state", {"größe": torch.ones(3), "step": 7})
        store.commit()
        store.commit()
    manifest = committed[0] / slot
    for offset in range(manifest.stat().st_size):
        for bit in bits:
            chosen = offset % 8 if bit is None else bit
            with flipped(manifest, offset, chosen), pytest.raises(StoreError, match=slot):
                opened(committed, queue)
    with opened(committed, queue) as store:
        assert store.generation == 4


def offsets_in(nbytes: int, source: random.Random) -> list[int]:
    """Return the edges of a tensor and of its pieces, and some bytes between."""
    edges = {
        0,
        1,
        PAGE - 1,
        PAGE,
        CHECKSUM_BYTES - 1,
        CHECKSUM_BYTES,
        nbytes // 2,
        nbytes - 2,
        nbytes - 1,
    }
    return sorted(
        {each for each in edges if 0 <= each < nbytes}
        | {source.randrange(nbytes) for _ in range(4)}
    )


def test_a_bit_of_a_tensor_is_noticed_and_named(committed: list[Path], queue: IOQueue) -> None:
    source = random.Random(9)
    with opened(committed, queue) as store:
        for name, data in OLD.items():
            for offset in offsets_in(len(data), source) if data else ():
                path, place = places_of(store, name, offset)
                piece = offset // CHECKSUM_BYTES * CHECKSUM_BYTES
                with flipped(path, place, source.randrange(8)):
                    with pytest.raises(
                        ChecksumError, match=f"tensor '{name}': bytes {piece} to "
                    ) as caught:
                        store.get(name)
                    assert (caught.value.name, caught.value.offset) == (name, piece)
                    assert piece + caught.value.nbytes == min(piece + CHECKSUM_BYTES, len(data))
                    with pytest.raises(ChecksumError, match=name):
                        store.get_many(OLD)
                    others = [other for other in OLD if other != name]
                    assert {
                        other: got.tobytes() for other, got in store.get_many(others).items()
                    } == {other: OLD[other] for other in others}
                    (damage,) = store.verify()
                    assert (damage.name, damage.offset, damage.nbytes) == (
                        name,
                        piece,
                        caught.value.nbytes,
                    )
        assert contents(store) == OLD
        assert store.verify() == ()


WAYS: dict[str, Callable[[TensorStore], object]] = {
    "get": lambda store: store.get("state/w"),
    "out": lambda store: store.get("state/w", np.empty(5000, np.float32)),
    "get_many": lambda store: store.get_many(["state/w", "small"]),
    "prefetch": lambda store: [store.prefetch(["state/w"]), store.get("state/w")],  # type: ignore[func-returns-value]
    "stream": lambda store: list(store.stream()),
    "get_async": lambda store: store.get_async("state/w").result(),
    "get_state": lambda store: store.get_state("state"),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_damage_is_noticed_whichever_way_a_tensor_is_got(
    committed: list[Path], queue: IOQueue, way: Callable[[TensorStore], object]
) -> None:
    with opened(committed, queue) as store:
        store.put_state("state", {"w": np.arange(5000, dtype=np.float32), "b": torch.ones(1)})
        store.commit()
        way(store)
        with (
            flipped(*places_of(store, "state/w", 10_000), 3),
            pytest.raises(ChecksumError) as caught,
        ):
            way(store)
        assert (caught.value.name, caught.value.offset) == ("state/w", 0)
        way(store)


def test_without_checksums_damage_is_returned_and_verify_still_finds_it(
    committed: list[Path], queue: IOQueue
) -> None:
    with opened(committed, queue, checksum=Checksum.NONE) as store:
        path, place = places_of(store, "medium", 1234)
        with flipped(path, place, 0):
            got = store.get("medium").tobytes()
            (damage,) = store.verify()
    assert [
        offset
        for offset, (seen, put) in enumerate(zip(got, OLD["medium"], strict=True))
        if seen != put
    ] == [1234]
    assert (damage.name, damage.offset) == ("medium", 0)


def test_what_is_in_no_tensor_may_be_anything(committed: list[Path], queue: IOQueue) -> None:
    with opened(committed, queue) as store:
        store.put_many(NEW)
        store.commit()
    for generation, expected in ((2, OLD), (3, {**OLD, **NEW})):
        with opened(committed, queue, generation=generation) as store:
            assert contents(store) == expected
    held: set[Extent] = set()
    for generation in (2, 3):
        with opened(committed, queue, generation=generation) as store:
            held |= {extent for name in store for extent in store.record(name).extents}
    overwritten = 0
    for member, place in enumerate(committed):
        data = bytearray(random.Random(member).randbytes((place / "data").stat().st_size))
        kept = [(0, PAGE), *((each.offset, each.nbytes) for each in held if each.member == member)]
        whole = (place / "data").read_bytes()
        for start, nbytes in kept:
            data[start : start + nbytes] = whole[start : start + nbytes]
        overwritten += sum(left != right for left, right in zip(data, whole, strict=True))
        (place / "data").write_bytes(data)
    assert overwritten > MIB
    (committed[0] / "manifest.new").write_bytes(b"half a manif")
    (committed[0] / "notes.txt").write_text("somebody's")
    for generation, expected in ((2, OLD), (3, {**OLD, **NEW})):
        with opened(committed, queue, generation=generation) as store:
            assert contents(store) == expected
            assert store.verify() == ()
    with opened(committed, queue) as store:
        assert store.commit() == 4
