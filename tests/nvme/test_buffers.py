"""Which memory a program may hand over, what is refused and why, and that it stays alive and in
place meanwhile.
"""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deepnvme import FaultPlan, File, IOQueue, Pool, Requests
from support.nvme_io import CHUNK, PAGE, TIMEOUT_S, pattern

DATA = pattern(48, seed=1)
HOLD_US = 400_000  # how long a held request takes


@pytest.fixture
def file(tmp_path: Path) -> Iterator[File]:
    """Yield an open file that holds DATA; what a buffer is does not depend on the backend."""
    (tmp_path / "file").write_bytes(DATA)
    with IOQueue("threads") as queue, queue.open(tmp_path / "file", "r+") as file:
        yield file


@pytest.fixture
def slow_file() -> Iterator[File]:
    """Yield a file that holds DATA and whose reads take a while."""
    slow = FaultPlan().delay(delay_us=HOLD_US, every=1, requests=Requests.READS)
    with IOQueue("memory", faults=slow) as queue, queue.open("file", "w") as file:
        file.pwrite(DATA).result(TIMEOUT_S)
        yield file


# --- accepted -------------------------------------------------------------------------------------

WRITABLE: dict[str, Callable[[], Any]] = {
    "bytearray": lambda: bytearray(48),
    "memoryview": lambda: memoryview(bytearray(48)),
    "slice of a memoryview": lambda: memoryview(bytearray(100))[7:55],
    "memoryview of another format": lambda: memoryview(bytearray(48)).cast("d"),
    "two-dimensional memoryview": lambda: memoryview(bytearray(48)).cast("B", (4, 12)),
    "array.array": lambda: array.array("i", [0] * 12),
    "ctypes array": ctypes.c_uint16 * 24,
    "mmap": lambda: mmap.mmap(-1, 48),
    "pool memory": lambda: Pool(PAGE).buffer(48),
    **{
        f"numpy {kind}": partial(np.zeros, 48 // np.dtype(kind).itemsize, kind)
        for kind in (
            "?",
            "i1",
            "u2",
            "i4",
            "i8",
            "f2",
            "f4",
            "f8",
            "c8",
            "c16",
            "S3",
            "U2",
            "V2",
            ">i4",
            "M8[s]",
            "m8",
        )
    },
    "numpy structured": lambda: np.zeros(4, [("key", "i4"), ("value", "f8")]),
    "numpy of three dimensions": lambda: np.zeros((2, 3, 2), np.float32),
    "contiguous slice of numpy": lambda: np.zeros((10, 12), np.uint8)[3:7],
    "numpy subclass": lambda: np.zeros(48, np.uint8).view(np.recarray),
}


def bytes_of(thing: Any) -> bytes:
    return (
        np.asarray(thing).tobytes()
        if hasattr(thing, "__array__")
        else bytes(memoryview(thing).cast("B"))
    )


@pytest.mark.parametrize("make", WRITABLE.values(), ids=WRITABLE)
def test_a_read_fills_it_and_a_write_takes_it(file: File, make: Callable[[], Any]) -> None:
    buffer = make()
    assert file.pread(buffer).result(TIMEOUT_S) == 48
    assert bytes_of(buffer) == DATA
    assert file.pwrite(buffer, 1000).result(TIMEOUT_S) == 48
    assert Path(file.path).read_bytes()[1000:] == DATA


def test_a_zero_dimensional_array_is_one_element(file: File) -> None:
    number = np.array(0.0)
    assert file.pread(number).result(TIMEOUT_S) == 8
    assert number.tobytes() == DATA[:8]


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
def test_an_array_without_elements_moves_nothing(file: File, shape: tuple[int, ...]) -> None:
    assert file.pread(np.zeros(shape)).result(TIMEOUT_S) == 0
    assert file.pwrite(np.zeros(shape)).result(TIMEOUT_S) == 0


@pytest.mark.parametrize(
    "readable",
    [DATA, memoryview(DATA), np.frombuffer(DATA, "f8")],
    ids=lambda thing: type(thing).__name__,
)
def test_a_write_takes_what_is_read_only(file: File, readable: Any) -> None:
    assert file.pwrite(readable, 5).result(TIMEOUT_S) == 48
    assert Path(file.path).read_bytes()[5:53] == DATA


# --- by __array_interface__ and DLPack ------------------------------------------------------------


class OnlyArrayInterface:
    """What an array of bfloat16 is to the buffer protocol: memory whose element type has no name
    there.
    """

    def __init__(self, backing: np.ndarray[Any, Any], **changes: object) -> None:
        self.backing = backing
        self.__array_interface__ = {**backing.__array_interface__, **changes}


@pytest.mark.parametrize("typestr", ["<V2", "<f4", "<M8[s]"])
def test_memory_is_found_by_array_interface_whatever_its_elements_are(
    file: File, typestr: str
) -> None:
    backing = np.zeros((4, 12), np.uint8)
    width = np.dtype(typestr).itemsize
    thing = OnlyArrayInterface(backing, typestr=typestr, shape=(48 // width,))
    assert file.pread(thing).result(TIMEOUT_S) == 48
    assert backing.tobytes() == DATA


def test_a_strided_array_interface_is_refused(file: File) -> None:
    thing = OnlyArrayInterface(np.zeros((8, 8))[:, 1])
    with pytest.raises(ValueError, match="not contiguous"):
        file.pread(thing)


def test_a_read_only_array_interface_is_refused_for_reading_into(file: File) -> None:
    backing = np.zeros(6)
    thing = OnlyArrayInterface(backing, data=(backing.ctypes.data, True))
    with pytest.raises(BufferError, match="read-only"):
        file.pread(thing)
    assert file.pwrite(thing).result(TIMEOUT_S) == 48


class OnlyDLPack:
    """An array of another library, in host memory."""

    def __init__(self, backing: np.ndarray[Any, Any], device: int = 1) -> None:
        self.backing = backing
        self.device = device

    def __dlpack__(self, **wishes: Any) -> object:
        return self.backing.__dlpack__(**wishes)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)


def test_memory_is_found_by_dlpack(file: File) -> None:
    backing = np.zeros(12, np.float32)
    assert file.pread(OnlyDLPack(backing)).result(TIMEOUT_S) == 48
    assert backing.tobytes() == DATA
    assert file.pwrite(OnlyDLPack(backing), 100).result(TIMEOUT_S) == 48
    assert Path(file.path).read_bytes()[100:] == DATA


def test_a_strided_dlpack_array_is_refused(file: File) -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        file.pwrite(OnlyDLPack(np.zeros((8, 8))[:, 1]))


@pytest.mark.parametrize(
    "thing",
    [
        OnlyDLPack(np.zeros(1), device=2),
        SimpleNamespace(
            __cuda_array_interface__={"data": (4096, False), "shape": (1,), "typestr": "|u1"}
        ),
    ],
    ids=["dlpack", "cuda array interface"],
)
def test_memory_that_is_not_the_hosts_is_refused_with_what_to_do(file: File, thing: Any) -> None:
    with pytest.raises(TypeError, match="copy it to the host first"):
        file.pwrite(thing)


# --- refused --------------------------------------------------------------------------------------

SCATTERED: dict[str, Any] = {
    "every other element": np.zeros(96, np.uint8)[::2],
    "a column": np.zeros((8, 8))[:, 1],
    "Fortran order": np.zeros((4, 12), np.uint8, order="F"),
    "backwards": np.zeros(48, np.uint8)[::-1],
    "broadcast": np.broadcast_to(np.zeros(1), (6,)),
    "memoryview with a step": memoryview(bytearray(96))[::2],
}


@pytest.mark.parametrize("buffer", SCATTERED.values(), ids=SCATTERED)
def test_memory_in_several_pieces_is_refused_with_what_to_do(file: File, buffer: Any) -> None:
    for call in (file.pread, file.readinto, file.pwrite):
        with pytest.raises(ValueError, match=r"not contiguous.*ascontiguousarray"):
            call(buffer)
    assert Path(file.path).read_bytes() == DATA


READ_ONLY: dict[str, Any] = {
    "bytes": bytes(48),
    "memoryview": memoryview(bytes(48)),
    "numpy": np.frombuffer(bytes(48), np.uint8),
}


@pytest.mark.parametrize("buffer", READ_ONLY.values(), ids=READ_ONLY)
def test_read_only_memory_is_refused_for_reading_into(file: File, buffer: Any) -> None:
    for call in (file.pread, file.readinto):
        with pytest.raises(BufferError, match="read-only"):
            call(buffer)
    assert bytes_of(buffer) == bytes(48)


@pytest.mark.parametrize(
    "thing", ["text", 7, None, [1, 2, 3], object()], ids=lambda thing: type(thing).__name__
)
def test_what_has_no_memory_is_refused_by_its_type(file: File, thing: Any) -> None:
    for call in (file.pread, file.pwrite):
        with pytest.raises(TypeError, match=f"got {type(thing).__name__}"):
            call(thing)


@pytest.mark.parametrize(
    "kind", [object, [("name", object), ("size", "i4")]], ids=["object", "structured"]
)
def test_arrays_of_python_objects_are_refused(file: File, kind: Any) -> None:
    """Their bytes are addresses: useless in a file, deadly when read back."""
    objects = np.zeros(3, kind)
    # One with gaps as well: closing them would not help.
    for thing in (objects, objects[::2].data, OnlyArrayInterface(objects, typestr="|O")):
        for call in (file.pread, file.pwrite):
            with pytest.raises(TypeError, match="Python objects"):
                call(thing)


# --- meanwhile ------------------------------------------------------------------------------------


def test_a_bytearray_cannot_be_resized_during_its_operation_and_can_be_at_once_after(
    slow_file: File,
) -> None:
    buffer = bytearray(48)
    future = slow_file.pread(buffer)
    with pytest.raises(BufferError):
        buffer.extend(b"more")
    future.result(TIMEOUT_S)
    buffer.extend(b"more")
    assert buffer == DATA + b"more"


def test_memory_is_let_go_before_its_future_ends_not_after(file: File) -> None:
    """Whoever wakes up on the result may resize, free or hand on the memory at once."""
    failed = []

    def resize(buffer: bytearray) -> None:
        try:
            buffer.append(0)
        except BufferError as error:
            failed.append(error)

    for _ in range(300):
        buffer = bytearray(48)
        future = file.pread(buffer)
        future.add_done_callback(lambda _, buffer=buffer: resize(buffer))  # type: ignore[misc]
        future.result(TIMEOUT_S)
    assert not failed


def test_pool_memory_is_free_again_when_its_future_has_ended(slow_file: File) -> None:
    pool = Pool(PAGE)
    future = slow_file.pread(pool.buffer(48))
    assert pool.free_bytes == 0
    future.result(TIMEOUT_S)
    assert pool.free_bytes == PAGE


def test_memory_that_nobody_else_holds_lives_until_its_operation_has_ended(slow_file: File) -> None:
    owner = np.zeros(48, np.uint8)
    watch = weakref.ref(owner)
    future = slow_file.pread(owner)
    del owner
    assert watch() is not None
    future.result(TIMEOUT_S)
    assert watch() is None


# --- torch ----------------------------------------------------------------------------------------


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.mark.parametrize(
    "name",
    [
        "uint8",
        "int16",
        "int64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "bool",
        "float8_e4m3fn",
    ],
)
def test_tensors_of_every_type_go_both_ways(file: File, torch: Any, name: str) -> None:
    kind = getattr(torch, name)
    tensor = torch.zeros(48 // kind.itemsize, dtype=kind)
    assert file.pread(tensor).result(TIMEOUT_S) == 48
    assert bytes(tensor.view(torch.uint8).numpy()) == DATA
    assert file.pwrite(tensor, 200).result(TIMEOUT_S) == 48
    assert Path(file.path).read_bytes()[200:] == DATA


def test_tensors_of_no_dimensions_no_elements_or_an_offset_go_too(file: File, torch: Any) -> None:
    number = torch.tensor(0.0, dtype=torch.bfloat16)
    assert file.pread(number).result(TIMEOUT_S) == 2
    assert file.pread(torch.empty(3, 0)).result(TIMEOUT_S) == 0
    whole = torch.zeros(100, dtype=torch.uint8)
    assert file.pread(whole[10:58]).result(TIMEOUT_S) == 48
    assert bytes(whole[10:58].numpy()) == DATA
    assert int(whole[:10].sum()) == int(whole[58:].sum()) == 0


def test_parameters_and_tensors_that_need_gradients_go_too(file: File, torch: Any) -> None:
    parameter = torch.nn.Parameter(torch.zeros(6, dtype=torch.float64))
    assert file.pread(parameter).result(TIMEOUT_S) == 48
    assert parameter.detach().numpy().tobytes() == DATA


def test_scattered_tensors_are_refused_and_left_alone(file: File, torch: Any) -> None:
    whole = torch.zeros(8, 8)
    for tensor in (whole[:, 1], whole.t(), torch.zeros(1).expand(6), whole[::2]):
        for call in (file.pread, file.pwrite):
            with pytest.raises(ValueError, match=r"not contiguous.*\.contiguous\(\)"):
                call(tensor)
    assert int(whole.count_nonzero()) == 0


def test_tensors_whose_bytes_are_not_their_values_are_refused(file: File, torch: Any) -> None:
    complex_numbers = torch.zeros(3, dtype=torch.complex64)
    for tensor in (
        complex_numbers.conj(),
        complex_numbers.conj().imag.contiguous().view_as(torch.zeros(3)),
    ):
        if tensor.is_conj() or tensor.is_neg():
            with pytest.raises(ValueError, match="resolve_conj"):
                file.pwrite(tensor)
    with pytest.raises(TypeError, match="dense"):
        file.pwrite(torch.eye(4).to_sparse())


def test_a_tensor_without_memory_is_refused(file: File, torch: Any) -> None:
    with pytest.raises(TypeError, match="meta"):
        file.pwrite(torch.zeros(3, device="meta"))


def watched_tensor(torch: Any) -> tuple[Any, weakref.ref[Any]]:
    """Return a tensor, and a reference that dies when its storage is freed."""
    owner = np.zeros(48, np.uint8)
    return torch.from_numpy(owner), weakref.ref(owner)


def test_a_dropped_tensors_storage_lives_until_its_operation_has_ended(
    slow_file: File, torch: Any
) -> None:
    tensor, storage = watched_tensor(torch)
    future = slow_file.pread(tensor)
    del tensor
    assert storage() is not None
    future.result(TIMEOUT_S)
    gc.collect()
    assert storage() is None


def test_a_tensor_given_other_data_meanwhile_does_not_free_the_memory_being_read(
    slow_file: File, torch: Any
) -> None:
    """What offloading engines do to parameters all the time: `parameter.data = torch.empty(0)`."""
    tensor, storage = watched_tensor(torch)
    future = slow_file.pread(tensor)
    tensor.data = torch.empty(0, dtype=torch.uint8)
    assert storage() is not None
    future.result(TIMEOUT_S)
    gc.collect()
    assert storage() is None


def test_a_pool_gives_tensors_that_need_no_copy(tmp_path: Path, torch: Any) -> None:
    pool = Pool(4 * CHUNK)
    with IOQueue("threads", pool=pool) as queue, queue.open(tmp_path / "file", "w") as file:
        tensor = pool.empty_tensor((2, CHUNK // 4), torch.bfloat16)
        tensor.fill_(1.5)
        file.pwrite(tensor).result(TIMEOUT_S)
        back = pool.empty_tensor(CHUNK // 2, torch.bfloat16)
        file.pread(back).result(TIMEOUT_S)
        assert bool((back == 1.5).all())
        assert all(drive.bounced_bytes == 0 for drive in queue.stats().drives.values())
