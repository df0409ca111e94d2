"""deepnvme.memory.arrays: every dtype has one code, memory for I/O begins with a page, and what has no
code is refused.
"""

from __future__ import annotations

import array
import mmap
import subprocess
import sys
from importlib.util import find_spec
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from deepnvme.errors import PoolExhaustedError
from deepnvme.memory.arrays import (
    ITEMSIZES,
    Returns,
    code_of,
    default_returns,
    describe,
    empty,
    kind_of,
    nbytes_of,
    numpy_dtype,
)
from deepnvme.memory.buffers import memory_of
from deepnvme.memory.pool import Cuda, Pool

HAS_TORCH = find_spec("torch") is not None
HAS_ML_DTYPES = find_spec("ml_dtypes") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed")
needs_ml_dtypes = pytest.mark.skipif(not HAS_ML_DTYPES, reason="ml_dtypes is not installed")
OWN_TO_TORCH = {"F8_E4M3", "F8_E5M2", "F8_E8M0", "BF16"}
EVERY_SHAPE = [(), (0,), (3, 0, 5), (1,), (2, 3), (5000,), (64, 1025)]
PAGE = 4096


def address_of(thing: Any) -> int:
    return memory_of(thing, writable=True).address


def in_a_fresh_python(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- describing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("code", sorted(set(ITEMSIZES) - OWN_TO_TORCH))
def test_a_numpy_array_is_described_by_its_code_shape_and_memory(code: str) -> None:
    values = np.zeros((2, 3), numpy_dtype(code))

    found = describe(values)

    assert (found.code, found.shape) == (code, (2, 3))
    assert (found.memory.address, found.memory.nbytes) == (values.ctypes.data, values.nbytes)


@needs_torch
@pytest.mark.parametrize("code", sorted(ITEMSIZES))
def test_a_tensor_of_each_code_is_made_and_described(code: str) -> None:
    tensor = empty(code, (2, 3), Returns.TORCH)

    found = describe(tensor)

    assert (found.code, found.shape) == (code, (2, 3))
    assert (found.memory.address, found.memory.nbytes) == (tensor.data_ptr(), 6 * ITEMSIZES[code])
    assert type(found.shape) is tuple


@needs_torch
@pytest.mark.parametrize("code", sorted(set(ITEMSIZES) - OWN_TO_TORCH))
def test_torch_and_numpy_mean_the_same_by_a_code(code: str) -> None:
    tensor = empty(code, (3,), Returns.TORCH)

    assert describe(tensor.numpy()).code == code


@pytest.mark.parametrize(
    "thing", [b"abc", bytearray(b"abc"), memoryview(b"abc"), array.array("B", b"abc")]
)
def test_a_buffer_of_bytes_is_u8_of_one_dimension(thing: Any) -> None:
    found = describe(thing)

    assert (found.code, found.shape, found.memory.nbytes) == ("U8", (3,), 3)


def test_a_buffer_of_numbers_has_their_code() -> None:
    assert describe(array.array("d", [1.0, 2.0]))[:2] == ("F64", (2,))
    assert describe(memoryview(b"abcdefgh").cast("h", (2, 2)))[:2] == ("I16", (2, 2))


def test_a_mapped_file_is_bytes_and_can_be_closed_afterwards() -> None:
    mapped = mmap.mmap(-1, PAGE)

    assert describe(mapped)[:2] == ("U8", (PAGE,))

    mapped.close()


def test_empty_bytes_are_described() -> None:
    found = describe(b"")

    assert (found.code, found.shape, found.memory.nbytes) == ("U8", (0,), 0)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_arrays_without_dimensions_or_elements_are_described(shape: tuple[int, ...]) -> None:
    found = describe(np.ones(shape, np.float32))

    assert (found.code, found.shape, found.memory.nbytes) == ("F32", shape, nbytes_of("F32", shape))


@needs_torch
def test_a_parameter_is_described_as_the_tensor_that_it_is() -> None:
    import torch

    assert describe(torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)))[:2] == ("BF16", (2,))


@needs_ml_dtypes
@pytest.mark.parametrize("code", sorted(OWN_TO_TORCH))
def test_ml_dtypes_give_numpy_what_it_lacks(code: str) -> None:
    values = empty(code, (4, 1024), Returns.NUMPY)

    assert describe(values)[:2] == (code, (4, 1024))
    assert address_of(values) % PAGE == 0


# --- what has no code -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "advice"),
    [
        ([("a", "f4"), ("b", "i4")], "each of its fields as an array of its own"),
        ("O", "pickle"),
        (">f4", "big-endian: convert it first"),
        ("M8[s]", "convert it to one of"),
        ("U3", "convert it to one of"),
        ("longdouble", "convert it to one of"),
    ],
)
def test_a_dtype_without_a_code_is_refused_with_what_to_do(dtype: Any, advice: str) -> None:
    with pytest.raises(TypeError, match=advice):
        describe(np.zeros(2, dtype))


def test_converting_as_the_message_says_makes_a_big_endian_array_acceptable() -> None:
    values = np.arange(3, dtype=">f4")

    converted = values.astype(values.dtype.newbyteorder())

    assert describe(converted).code == "F32"
    assert list(converted) == [0, 1, 2]


@pytest.mark.parametrize(
    "array", [np.ma.masked_array([1, 2], [True, False]), np.zeros(2).view(np.recarray)]
)
def test_an_array_that_means_more_than_its_bytes_is_refused(array: Any) -> None:
    with pytest.raises(TypeError, match="may mean more than its bytes say"):
        describe(array)


@needs_torch
def test_a_tensor_that_means_more_than_its_bytes_is_refused() -> None:
    import torch

    class Scaled(torch.Tensor):
        pass

    with pytest.raises(TypeError, match="Scaled, which may mean more"):
        describe(torch.zeros(2).as_subclass(Scaled))


@needs_torch
def test_a_torch_dtype_without_a_code_is_refused() -> None:
    import torch

    with pytest.raises(TypeError, match=r"torch\.float8_e4m3fnuz has no code: convert it"):
        describe(torch.zeros(2, dtype=torch.float8_e4m3fnuz))


@needs_torch
def test_a_tensor_that_is_not_on_the_host_is_refused() -> None:
    import torch

    with pytest.raises(TypeError, match="a tensor on meta is not in host memory"):
        describe(torch.zeros(2, device="meta"))


@pytest.mark.parametrize("thing", [[1, 2], 3, None, "text", object()])
def test_what_exposes_no_memory_is_refused(thing: Any) -> None:
    with pytest.raises(TypeError, match=f"got {type(thing).__name__}"):
        describe(thing)


def test_memory_in_pieces_is_refused() -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        describe(np.zeros((4, 4))[:, 0])


@needs_torch
@pytest.mark.parametrize(
    ("shape", "problem"), [((1,) * 65, "65"), ((0, 1 << 62), "less than 2"), ((0, 1 << 60), None)]
)
def test_a_tensor_that_no_reader_would_believe_is_refused(
    shape: tuple[int, ...], problem: str | None
) -> None:
    import torch

    tensor = torch.empty(shape, dtype=torch.float32)

    if problem is None:
        assert describe(tensor).shape == shape
    else:
        with pytest.raises(ValueError, match=problem):
            describe(tensor)


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", sorted(set(ITEMSIZES) - OWN_TO_TORCH))
def test_sizes_are_those_of_numpy(code: str) -> None:
    assert nbytes_of(code, (3, 5)) == np.zeros((3, 5), numpy_dtype(code)).nbytes


@pytest.mark.parametrize(
    ("code", "shape"),
    [
        ("F33", (1,)),
        ("", ()),
        ("F32", (1,) * 65),
        ("F32", (-1,)),
        ("F32", (1 << 63,)),
        ("F32", (1 << 62,)),
        ("F32", (0, 1 << 62)),
        ("U8", (1 << 32, 1 << 31)),
    ],
)
def test_a_size_that_no_tensor_has_is_refused(code: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^expected"):
        nbytes_of(code, shape)


def test_the_largest_sizes_are_allowed() -> None:
    assert nbytes_of("U8", ((1 << 63) - 1,)) == (1 << 63) - 1
    assert nbytes_of("F32", (0, 1 << 60)) == 0
    assert nbytes_of("F32", (1,) * 64) == 4


# --- new memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("returns", [Returns.NUMPY, pytest.param(Returns.TORCH, marks=needs_torch)])
@pytest.mark.parametrize("shape", EVERY_SHAPE)
def test_new_memory_has_the_shape_is_writable_and_begins_with_a_page(
    returns: Returns, shape: tuple[int, ...]
) -> None:
    made = empty("F32", shape, returns)

    made[...] = 7.0
    assert tuple(made.shape) == shape
    assert (made == 7.0).all()
    assert describe(made).code == "F32"
    if made.nbytes >= PAGE:
        assert address_of(made) % PAGE == 0


@pytest.mark.parametrize("returns", [Returns.NUMPY, pytest.param(Returns.TORCH, marks=needs_torch)])
def test_every_large_tensor_is_aligned_whatever_was_allocated_before(returns: Returns) -> None:
    kept = [empty("U8", (PAGE + 13 * number,), returns) for number in range(50)]

    assert [address_of(made) % PAGE for made in kept] == [0] * 50


@needs_torch
def test_a_new_tensor_keeps_its_memory_alive() -> None:
    tensor = empty("I32", (2000,), Returns.TORCH)
    tensor[:] = 5
    others = [np.full(2000, 9, np.int32) for _ in range(50)]

    assert (tensor == 5).all()
    assert len(others) == 50


@pytest.mark.parametrize("returns", [Returns.NUMPY, pytest.param(Returns.TORCH, marks=needs_torch)])
@pytest.mark.parametrize("shape", EVERY_SHAPE)
def test_new_memory_can_come_from_a_pool_and_goes_back(
    returns: Returns, shape: tuple[int, ...]
) -> None:
    pool = Pool(1 << 21, cuda=Cuda.NEVER)
    made = empty("F32", shape, returns, pool=pool)

    made[...] = 7.0
    assert tuple(made.shape) == shape
    assert pool.capacity - pool.free_bytes >= made.nbytes
    assert address_of(made) % PAGE == 0 or made.nbytes == 0

    del made
    assert pool.free_bytes == pool.capacity


def test_a_pool_without_room_says_so() -> None:
    with pytest.raises(PoolExhaustedError):
        empty("U8", (1 << 30,), Returns.NUMPY, pool=Pool(1 << 21, cuda=Cuda.NEVER))


@pytest.mark.skipif(HAS_ML_DTYPES, reason="ml_dtypes is installed")
def test_numpy_without_bfloat16_says_what_to_do() -> None:
    with pytest.raises(
        TypeError, match=r"no bfloat16 \(BF16\): ask for torch tensors .* or install ml_dtypes"
    ):
        empty("BF16", (2,), Returns.NUMPY)


@needs_torch
def test_a_torch_without_the_dtype_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.delattr(torch, "float8_e8m0fnu")

    with pytest.raises(TypeError, match="no float8_e8m0fnu"):
        empty("F8_E8M0", (2,), Returns.TORCH)


# --- torch ----------------------------------------------------------------------------------------


def test_the_default_follows_what_is_installed() -> None:
    assert default_returns() is (Returns.TORCH if HAS_TORCH else Returns.NUMPY)


@pytest.mark.parametrize(
    "refusal", [None, ImportError("torch is refused here"), ValueError("torch.__spec__ is None")]
)
def test_without_torch_the_default_is_numpy(
    refusal: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = Mock(side_effect=refusal, return_value=None)
    monkeypatch.setattr(
        "deepnvme.memory.arrays.find_spec",
        lambda name: absent(name) if name == "torch" else Mock(),
    )

    assert default_returns() is Returns.NUMPY


def test_without_torch_and_numpy_the_default_is_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepnvme.memory.arrays.find_spec", lambda name: None)

    assert default_returns() is Returns.BYTES


@pytest.mark.parametrize("nbytes", [0, 1, 5000, 1 << 20])
def test_bytes_are_returned_as_a_writable_view(nbytes: int) -> None:
    made = empty("U8", (nbytes,), Returns.BYTES)

    assert (type(made), made.nbytes, made.readonly) == (memoryview, nbytes, False)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (b"four", ("U8", (4,))),
        (bytearray(3), ("U8", (3,))),
        (memoryview(bytes(16)).cast("d", (2, 1)), ("F64", (2, 1))),
        (memoryview(bytes(8)).cast("q"), ("I64", (1,))),
    ],
)
def test_a_plain_buffer_is_described_without_numpy(
    given: object, kind: tuple[str, tuple[int, ...]]
) -> None:
    assert kind_of(given) == kind
    assert describe(given)[:2] == kind


def test_describing_and_making_numpy_arrays_imports_no_torch() -> None:
    program = (
        "import sys, numpy as np\n"
        "from deepnvme.memory.arrays import *\n"
        "describe(b'x'); describe(np.zeros(3)); empty('F32', (3,), Returns.NUMPY); "
        "default_returns()\n"
        "print('torch' in sys.modules)"
    )

    assert in_a_fresh_python(program) == "False"


@needs_torch
def test_a_tensor_is_made_where_the_program_has_not_imported_torch() -> None:
    program = (
        "from deepnvme.memory.arrays import *\nmade = empty('BF16', (3,), "
        "Returns.TORCH)\nprint(made.dtype, tuple(made.shape))"
    )

    assert in_a_fresh_python(program) == "torch.bfloat16 (3,)"


def test_the_code_is_known_without_looking_at_memory() -> None:
    assert code_of(np.zeros((4, 4), np.uint16)[:, 0]) == "U16"
    assert code_of(np.float64(1)) == "F64"
