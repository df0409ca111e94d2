"""Parts of stored tensors: what `store.get_slice(name)[key]` reads and writes, and what it keeps safe."""

from __future__ import annotations

import errno
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepnvme import Access, Checksum, NVMeError, Returns, TensorStore
from deepnvme.errors import ChecksumError, StoreError
from deepnvme.memory import arrays
from deepnvme.memory.copying import Runs
from deepnvme.memory.filling import Repeated, element_of
from deepnvme.queue.pipeline import RUN_BYTES
from deepnvme.store import holdings, named_tensors, slice_io
from deepnvme.store.selection import select
from deepnvme.store.slice_io import whole_windows, windows
from support.interrupts import interruptions
from support.nvme_io import PAGE, TIMEOUT_S

MIB = 1 << 20
KINDS = ("swap", "swap with checksums", "commits", "commits without checksums")


def made(kind: str, folder: Path) -> TensorStore:
    is_summed = kind in ("swap with checksums", "commits")
    checksum = Checksum.CRC32C if is_summed else Checksum.NONE
    if kind.startswith("swap"):
        return TensorStore.swap(folder, "96MiB", checksum=checksum, returns=Returns.NUMPY)
    where = folder / "store"
    return TensorStore.create(where, "96MiB", checksum=checksum, returns=Returns.NUMPY)


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TensorStore]:
    with made(request.param, tmp_path) as store:
        yield store
        if request.param.startswith("commits"):
            store.commit()


def numbered(*shape: int) -> np.ndarray[Any, Any]:
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape)


def offsets_of(runs: Runs) -> list[int]:
    return [runs.offset + number * runs.stride for number in range(runs.count)]


# --- what a key selects ------------------------------------------------------------------------

indices = st.one_of(
    st.integers(-6, 6),
    st.builds(
        slice,
        *[st.one_of(st.none(), st.integers(-7, 7))] * 2,
        st.one_of(st.none(), st.integers(1, 4)),
    ),
    st.just(Ellipsis),
)


@given(st.lists(st.integers(0, 5), max_size=4), st.lists(indices, max_size=5))
@settings(max_examples=500)
def test_a_key_selects_the_bytes_that_numpy_selects(shape: list[int], key: list[Any]) -> None:
    array = numbered(*shape)
    try:
        expected = array[tuple(key)]
    except IndexError:
        with pytest.raises(IndexError):
            select(shape, 4, tuple(key))
        return
    part = select(shape, 4, tuple(key))
    data = array.tobytes()

    assert part.shape == expected.shape
    found = [data[at : at + run.nbytes] for run in part.runs() for at in offsets_of(run)]
    assert b"".join(found) == expected.tobytes()


@pytest.mark.parametrize(
    ("key", "error", "said"),
    [
        (slice(4, 0, -1), ValueError, "positive step"),
        (slice(0, 4, 0), ValueError, "step cannot be zero"),
        (7, IndexError, "outside"),
        ((0, 0, 0), IndexError, "2 indices at most"),
        ([0, 1], TypeError, "integers, slices"),
        ((Ellipsis, Ellipsis), IndexError, "one Ellipsis"),
    ],
)
def test_a_key_that_names_no_part_is_refused(key: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        select((4, 5), 4, key)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3 * MIB),
            st.integers(1, 3 * MIB),
            st.integers(0, MIB),
            st.integers(1, 9),
        ),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([PAGE, MIB]),
)
def test_windows_have_every_run_once_and_no_byte_twice(
    gaps: list[tuple[int, int, int, int]], unit: int
) -> None:
    groups, runs, end = [], {}, 0
    for gap, length, apart, count in gaps:
        groups.append(Runs(end + gap, length, length + apart, count))
        runs.update(dict.fromkeys(offsets_of(groups[-1]), length))
        end = groups[-1].end
    nbytes = end + 17
    found = list(windows(groups, nbytes, unit))

    pieces = sorted(
        (first + number * run.nbytes, window.start + at, run.nbytes)
        for window in found
        for first, run in zip(window.sources, window.runs, strict=True)
        for number, at in enumerate(offsets_of(run))
    )
    source = 0
    covered = dict.fromkeys(runs, 0)
    for piece_source, offset, size in pieces:
        assert piece_source == source
        source += size
        start = max(run for run in covered if run <= offset)
        assert offset == start + covered[start]
        covered[start] += size
    assert covered == runs
    ends = [0, *(window.start + window.nbytes for window in found)]
    assert all(window.start >= before for window, before in zip(found, ends, strict=False))
    assert all(window.nbytes <= RUN_BYTES and window.start % unit == 0 for window in found)
    assert all(e % unit == 0 or e == nbytes for e in ends)
    whole = list(whole_windows(groups, nbytes))
    assert sum(window.nbytes for window in whole) == nbytes


# --- reading and writing -----------------------------------------------------------------------


@given(data=st.data())
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_parts_are_those_of_an_array_that_changes_likewise(
    store: TensorStore, data: st.DataObject
) -> None:
    shape = data.draw(st.sampled_from([(700, 1000), (3, 5, 70_001), (2_600_000,), (4, 4)]))
    array = numbered(*shape)
    store.put("t", array)
    stored = store.get_slice("t")
    for value in range(4):
        key = tuple(
            slice(
                data.draw(st.integers(0, size)),
                data.draw(st.integers(0, size)),
                data.draw(st.sampled_from([None, 2, max(1, size // 9)])),
            )
            for size in shape[: data.draw(st.integers(1, min(2, len(shape))))]
        )
        assert (stored[key] == array[key]).all()
        array[key] = value
        is_filled = data.draw(st.booleans())
        stored[key] = value if is_filled else np.full(array[key].shape, value, np.int32)
        assert (store.get("t") == array).all()
    assert store.verify() == ()


def test_a_stored_tensor_says_what_it_is(store: TensorStore) -> None:
    store.put("t", numbered(3, 4))
    stored = store.get_slice("t")

    assert (stored.shape, stored.dtype, stored.nbytes, len(stored)) == ((3, 4), "I32", 48, 3)
    assert repr(stored) == "StoredTensor('t', I32, shape (3, 4))"
    with pytest.raises(KeyError, match="gone"):
        store.get_slice("gone")


def test_a_part_is_read_into_memory_that_is_given(store: TensorStore) -> None:
    store.put("t", numbered(100, 50))
    out = np.empty((10, 50), np.int32)

    assert store.get_slice("t").get(slice(20, 30), out) is out
    assert (out == numbered(100, 50)[20:30]).all()
    with pytest.raises(ValueError, match="`out` for it"):
        store.get_slice("t").get(slice(20, 31), out)


@pytest.mark.parametrize(
    "wrong", [np.zeros((2, 4), np.int64), np.zeros((3, 4), np.int32), np.zeros(8, np.int32)]
)
def test_a_part_of_another_type_or_shape_is_refused(
    store: TensorStore, wrong: np.ndarray[Any, Any]
) -> None:
    store.put("t", numbered(5, 4))

    with pytest.raises(ValueError, match="the part of 't'"):
        store.get_slice("t")[1:3] = wrong
    assert (store.get("t") == numbered(5, 4)).all()


def test_a_strided_part_is_written_with_copy_alone(store: TensorStore) -> None:
    store.put("t", numbered(4, 6))
    strided = numbered(6, 2).T

    with pytest.raises(ValueError, match="contiguous"):
        store.get_slice("t").put(slice(0, 2), strided)
    store.get_slice("t").put(slice(0, 2), strided, copy=True)
    assert (store.get("t")[:2] == strided).all()


def test_a_bf16_tensor_has_parts(tmp_path: Path) -> None:
    with TensorStore.swap(tmp_path, "8MiB", returns=Returns.TORCH) as store:
        tensor = torch.arange(60_000).reshape(300, 200).to(torch.bfloat16)
        store.put("t", tensor)

        assert torch.equal(store.get_slice("t")[7, 50:], tensor[7, 50:])


VALUES = {
    "BOOL": (torch.bool, True),
    "U8": (torch.uint8, 255),
    "I64": (torch.int64, -(1 << 63)),
    "F16": (torch.float16, 0.1),
    "BF16": (torch.bfloat16, 0.1),
    "F32": (torch.float32, np.float32(0.1)),
    "F64": (torch.float64, 2),
    "C64": (torch.complex64, 1 - 2j),
    "C128": (torch.complex128, 0.5),
}


@pytest.mark.parametrize("code", VALUES)
def test_a_number_fills_a_part_as_torch_rounds_it(code: str, tmp_path: Path) -> None:
    dtype, number = VALUES[code]
    expected = torch.zeros(6, 40, dtype=dtype)
    expected[1:6:2, 3:] = number.item() if isinstance(number, np.generic) else number
    with TensorStore.swap(tmp_path, "8MiB", returns=Returns.TORCH) as store:
        store.put("t", torch.zeros(6, 40, dtype=dtype))
        stored = store.get_slice("t")
        assert stored.dtype == code
        stored[1:6:2, 3:] = number

        assert torch.equal(store.get("t"), expected)


@pytest.mark.parametrize(
    "number", [0.0, 1 / 3, -1e-40, 3.38e38, 65504, 1.00390625, math.inf, math.nan]
)
def test_bf16_numbers_are_those_of_torch(number: float) -> None:
    expected = torch.tensor([number], dtype=torch.bfloat16)

    assert element_of("BF16", number) == bytes(expected.view(torch.uint8).tolist())


@pytest.mark.parametrize(
    ("dtype", "number", "error"),
    [
        (torch.int32, 0.5, ValueError),
        (torch.int8, 128, ValueError),
        (torch.bool, 2, ValueError),
        (torch.float16, 1e6, ValueError),
        (torch.float32, 1j, ValueError),
        (torch.bfloat16, 1e39, ValueError),
        (torch.bfloat16, 3.4e38, ValueError),  # rounded, it would be infinite
        (torch.float8_e4m3fn, 0.0, TypeError),
    ],
)
def test_a_number_that_the_dtype_has_not_is_refused(
    dtype: torch.dtype, number: Any, error: type[Exception], tmp_path: Path
) -> None:
    with TensorStore.swap(tmp_path, "8MiB", returns=Returns.TORCH) as store:
        store.put("t", torch.ones(10).to(dtype))

        with pytest.raises(error, match="tensor 't': "):
            store.get_slice("t")[2:5] = number
        assert torch.equal(store.get("t").to(torch.float32), torch.ones(10))


def test_every_so_many_elements_of_many_are_one_copy(tmp_path: Path) -> None:
    with TensorStore.swap(tmp_path, "64MiB", returns=Returns.NUMPY) as store:
        array = numbered(3 * MIB)
        store.put("t", array)
        stored = store.get_slice("t")
        (runs,) = select(array.shape, 4, slice(1, None, 3)).runs()

        assert (runs.nbytes, runs.stride, runs.count) == (4, 12, MIB)
        assert (stored[1::3] == array[1::3]).all()
        stored[1::3] = array[:MIB]
        array[1::3] = array[:MIB].copy()
        assert (store.get("t") == array).all()


def test_filling_a_large_part_takes_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []

    def noted(element: bytes, nbytes: int) -> Repeated:
        held.append(nbytes)
        return Repeated(element, nbytes)

    monkeypatch.setattr(named_tensors, "Repeated", noted)
    with TensorStore.swap(tmp_path, "64MiB", returns=Returns.NUMPY) as store:
        store.put("t", numbered(8 * MIB))
        store.get_slice("t")[1:] = 7

        assert held == [RUN_BYTES]
        assert (store.get("t")[1:] == 7).all()


# --- what is safe ------------------------------------------------------------------------------


def test_a_part_that_was_not_committed_is_not_in_the_commit(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with TensorStore.create(folder, "32MiB", returns=Returns.NUMPY) as store:
        store.put("t", numbered(1000, 1000))
        store.commit()
        for row in range(3):  # the first copies, the others change that copy
            store.get_slice("t")[row] = np.zeros(1000, np.int32)
        with pytest.warns(RuntimeWarning, match="not committed"):
            store.close()
    with TensorStore.open(folder, returns=Returns.NUMPY) as store:
        assert (store.get("t") == numbered(1000, 1000)).all()
        store.get_slice("t")[5] = np.zeros(1000, np.int32)
        store.commit()
        assert store.verify() == ()
    with TensorStore.open(folder, access=Access.READ, returns=Returns.NUMPY) as store:
        assert (store.get("t")[5] == 0).all()


def test_the_second_part_after_a_commit_needs_no_room(tmp_path: Path) -> None:
    with TensorStore.create(tmp_path / "store", "32MiB", returns=Returns.NUMPY) as store:
        store.put("t", numbered(1000, 1000))
        store.commit()
        stored = store.get_slice("t")
        before = store.volume.free_bytes
        stored[0] = np.zeros(1000, np.int32)
        after_one = store.volume.free_bytes
        stored[1] = np.zeros(1000, np.int32)

        assert before - after_one >= 4_000_000
        assert store.volume.free_bytes == after_one
        store.commit()


def test_a_reader_that_holds_the_tensor_gets_it_as_it_was(tmp_path: Path) -> None:
    with made("swap with checksums", tmp_path) as store:
        store.put("t", numbered(1000, 1000))
        with store._tensors.opened() as holdings:
            held = holdings.hold(("t",))
        store.get_slice("t")[0] = np.zeros(1000, np.int32)
        out = np.empty((1000, 1000), np.int32)
        store._tensors.read(held, lambda *_: out)

        assert (out == numbered(1000, 1000)).all()
        assert (store.get("t")[0] == 0).all()


def test_what_was_prefetched_is_read_again_once_a_part_has_changed(store: TensorStore) -> None:
    store.put("t", numbered(100, 100))
    store.prefetch(["t"])
    store.get_async("t").result(TIMEOUT_S)
    store.prefetch(["t"])
    store.get_slice("t")[3] = np.zeros(100, np.int32)

    assert (store.get("t")[3] == 0).all()


def test_damage_beside_a_part_is_found_and_not_hidden_by_a_new_checksum(tmp_path: Path) -> None:
    with made("swap with checksums", tmp_path) as store:
        store.put("t", numbered(1000, 1000))
        (extent,) = store.record("t").extents
        for future in store.volume.pwrite([extent], np.zeros(extent.nbytes, np.uint8)):
            future.result(TIMEOUT_S)

        with pytest.raises(ChecksumError):
            store.get_slice("t")[0]
        with pytest.raises(ChecksumError):
            store.get_slice("t")[0] = np.zeros(1000, np.int32)
        with pytest.raises(ChecksumError):
            store.get("t")
        assert {damage.name for damage in store.verify()} == {"t"}


def test_a_part_that_could_not_be_written_leaves_a_tensor_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise NVMeError(errno.EIO, "the drive failed")

    with made("swap with checksums", tmp_path) as store:
        store.put("t", numbered(1000, 1000))
        monkeypatch.setattr(slice_io, "store", failing)
        with pytest.raises(NVMeError, match="the drive failed"):
            store.get_slice("t")[0] = np.zeros(1000, np.int32)

        assert (store.get("t")[1:] == numbered(1000, 1000)[1:]).all()


def test_no_interrupt_frees_the_space_of_a_tensor_whose_part_was_put(tmp_path: Path) -> None:
    with made("swap with checksums", tmp_path) as store:

        def prepared() -> Callable[[], object]:
            store.put("t", numbered(100, 100))
            with store._tensors.opened() as held:
                held.hold(("t",))  # never let go: a part is written to a copy
            part = np.zeros(100, np.int32)
            return lambda: store.get_slice("t").put(0, part)

        for _ in interruptions(prepared, named_tensors, holdings):
            store.put("other", np.full((100, 100), 7, np.int32))
            found = store.get("t")
            assert (found[1:] == numbered(100, 100)[1:]).all()
            assert (found[0] == numbered(100)).all() or (found[0] == 0).all()


def test_a_store_opened_for_reading_refuses_to_change_a_part(tmp_path: Path) -> None:
    with TensorStore.create(tmp_path / "store", "8MiB", returns=Returns.NUMPY) as store:
        store.put("t", numbered(10))
        store.commit()
    with (
        TensorStore.open(tmp_path / "store", access=Access.READ) as store,
        pytest.raises(StoreError, match="opened for reading"),
    ):
        store.get_slice("t")[0:1] = numbered(1)


def test_parts_written_by_several_threads_are_all_there(store: TensorStore) -> None:
    store.put("t", numbered(64, 5000))
    stored = store.get_slice("t")

    def write(first: int) -> None:
        for row in range(first, 64, 4):
            stored[row] = np.full(5000, -row, np.int32)

    threads = [threading.Thread(target=write, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)

    assert (store.get("t") == -np.arange(64)[:, None]).all()


def test_memory_that_cannot_be_had_leaves_the_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise MemoryError("no room for a copy")

    with made("swap with checksums", tmp_path) as store:
        store.put("t", numbered(1000, 1000))
        before = store.record("t")
        monkeypatch.setattr(arrays.Description, "gathered", failing)
        with pytest.raises(MemoryError):
            store.get_slice("t")[0] = np.zeros(1000, np.int32)

        assert store.record("t") == before
