"""Tensors and arrays as a code for the dtype, a shape and memory, and new ones made from code and
shape.

The codes are those of safetensors (and C128), so that one table serves the store and safetensors
files. Starts no I/O. torch is looked at only if the program has imported it, and imported only to
make a tensor.
"""

from __future__ import annotations

import importlib
import math
import mmap
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from deepnvme import _native
from deepnvme.memory.buffers import Memory, memory_of, torch_of
from deepnvme.sizes import PAGE, SMALL_BYTES

if TYPE_CHECKING:
    import numpy as np

    from deepnvme.memory.pool import Pool

__all__ = [
    "ITEMSIZES",
    "MAX_DIMENSIONS",
    "Description",
    "Returns",
    "Scattered",
    "Storable",
    "code_of",
    "default_returns",
    "describe",
    "described",
    "empty",
    "kind_of",
    "nbytes_at_sight",
    "nbytes_of",
    "numpy_dtype",
    "storable",
    "view_of",
]

MAX_DIMENSIONS = 64
"""The most dimensions of a shape; numpy has no more."""

# By code: its name in torch, numpy and ml_dtypes, and the bytes of an element.
_DTYPES = MappingProxyType(
    {
        "BOOL": ("bool", 1),
        "U8": ("uint8", 1),
        "I8": ("int8", 1),
        "U16": ("uint16", 2),
        "I16": ("int16", 2),
        "U32": ("uint32", 4),
        "I32": ("int32", 4),
        "U64": ("uint64", 8),
        "I64": ("int64", 8),
        "F8_E4M3": ("float8_e4m3fn", 1),
        "F8_E5M2": ("float8_e5m2", 1),
        "F8_E8M0": ("float8_e8m0fnu", 1),
        "F16": ("float16", 2),
        "BF16": ("bfloat16", 2),
        "F32": ("float32", 4),
        "F64": ("float64", 8),
        "C64": ("complex64", 8),
        "C128": ("complex128", 16),
    }
)
_CODES = MappingProxyType({name: code for code, (name, _) in _DTYPES.items()})
ITEMSIZES: Mapping[str, int] = MappingProxyType(
    {code: itemsize for code, (_, itemsize) in _DTYPES.items()}
)
"""Bytes of one element, by code."""


_PLAIN_BUFFERS = frozenset({bytes, bytearray, memoryview})
# Codes of the struct module's formats.
_BUFFER_CODES = MappingProxyType(
    {"?": "BOOL", "B": "U8", "c": "U8", "b": "I8", "H": "U16", "h": "I16", "I": "U32", "i": "I32"}
    | {"L": "U64", "l": "I64", "Q": "U64", "q": "I64", "e": "F16", "f": "F32", "d": "F64"}
)


class Returns(Enum):
    """What new memory is wrapped in."""

    TORCH = "torch"  # a torch.Tensor on the CPU
    NUMPY = "numpy"  # a numpy.ndarray
    BYTES = "bytes"  # a writable memoryview of the bytes, for programs that have neither


class Description(NamedTuple):
    """What is stored of a tensor or array: the code of its dtype, its shape, its memory."""

    code: str
    shape: tuple[int, ...]
    memory: Memory

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return self.memory.nbytes

    def gathered(self) -> Description:
        """Return itself: its bytes are one piece of memory."""
        return self

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Expose the memory as bytes, so that a program can read into a description."""
        address = self.memory.address
        return {
            "version": 3,
            "typestr": "|u1",
            "shape": (self.memory.nbytes,),
            "data": (address, False),
        }


@dataclass(frozen=True)
class Scattered:
    """A tensor or array that must be copied before it is written: on a device, strided, or lazy."""

    code: str
    shape: tuple[int, ...]
    thing: Any

    @property
    def nbytes(self) -> int:
        """How many bytes the copy has."""
        return nbytes_of(self.code, self.shape)

    def gathered(self) -> Description:
        """Return a copy, in host memory of its own."""
        if hasattr(self.thing, "detach"):
            return describe(self.thing.detach().cpu().resolve_conj().resolve_neg().contiguous())
        return describe(self.thing.copy(order="C"))


Storable: TypeAlias = "Description | Scattered"
"""What can be stored, whether or not it has to be copied first."""

_Found = TypeVar("_Found")


def default_returns() -> Returns:
    """Return TORCH where torch is installed, imported or not; else NUMPY, else BYTES."""
    if _is_installed("torch"):
        return Returns.TORCH
    return Returns.NUMPY if _is_installed("numpy") else Returns.BYTES


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # an import hook refuses it, or a stub stands in for it
        return False


@lru_cache(1024)  # many tensors, few kinds
def nbytes_of(code: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor.

    Raises:
        ValueError: an unknown code, too many dimensions, or more bytes than can be addressed.
    """
    if code not in ITEMSIZES:
        raise ValueError(f"expected one of the dtypes {', '.join(ITEMSIZES)}; got {code!r:.40}")
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(
            f"expected a shape of {MAX_DIMENSIONS} dimensions at most, got {len(shape)}"
        )
    if any(not 0 <= size < 1 << 63 for size in shape):
        raise ValueError(f"expected sizes from 0 to 2**63 - 1, got the shape {shape}")
    # Without the zeros: an empty tensor may have other sizes that no program could use.
    if math.prod(size for size in shape if size) * ITEMSIZES[code] >= 1 << 63:
        raise ValueError(f"expected a tensor of less than 2**63 bytes, got {code} of shape {shape}")
    return math.prod(shape) * ITEMSIZES[code]


def code_of(thing: Any) -> str:
    """Return the code of the dtype of a tensor, array or buffer, wherever its memory is.

    Raises:
        TypeError: it has none: the message says what to do.
    """
    return kind_of(thing)[0]


def kind_of(thing: Any) -> tuple[str, tuple[int, ...]]:
    """Return code and shape of a tensor, array or buffer, wherever its memory is.

    Raises as `code_of` does.
    """
    if isinstance(thing, Description):
        return thing.code, thing.shape
    torch = torch_of(thing)
    if torch is not None:
        return _tensor_code(thing, torch), tuple(thing.shape)
    found = _kind_of_buffer(thing)
    if found is not None:
        return found
    array = _as_array(thing)
    return _array_code(array.dtype), array.shape


def _kind_of_buffer(thing: Any) -> tuple[str, tuple[int, ...]] | None:
    """Return code and shape of a plain buffer, without numpy; None of anything else."""
    if type(thing) not in _PLAIN_BUFFERS:
        return None
    # Released at once: a bytearray cannot grow while a view of it lives.
    with memoryview(thing) as view:
        code = _BUFFER_CODES.get(view.format)
        return None if code is None else (code, view.shape or ())


def nbytes_at_sight(thing: Any) -> int:
    """Return the bytes of a tensor or array; 0 where it does not say them itself."""
    try:
        nbytes = getattr(thing, "nbytes", 0)
    except RuntimeError:  # torch, of a sparse tensor
        return 0
    return nbytes if isinstance(nbytes, int) else 0


def describe(thing: Any) -> Description:
    """Return what is stored of a tensor on the CPU, a numpy array or any buffer: bytes are U8 of
    one dimension.

    A description is returned as it is: a program with neither torch nor a numpy dtype can pass on
    what it read. The memory is for reading, and stays valid as long as the description lives.

    Raises:
        TypeError: its dtype has no code, or its memory is not the host's.
        ValueError: it is not contiguous, or has too many dimensions.
    """
    if isinstance(thing, Description):
        return thing
    torch = torch_of(thing)
    if torch is not None:
        found = Description(
            _tensor_code(thing, torch), tuple(thing.shape), memory_of(thing, writable=False)
        )
    elif plain := _kind_of_buffer(thing):
        found = Description(*plain, memory_of(thing, writable=False))
    else:
        interface = hasattr(thing, "__array_interface__")
        # last: what is looked at may be made anew each time, in other memory
        array = _as_array(thing)
        memory = memory_of(array if interface else thing, writable=False)
        found = Description(_array_code(array.dtype), array.shape, memory)
    nbytes_of(found.code, found.shape)  # refuses what a reader would refuse
    return found


def described(name: str, thing: Any, description: Callable[[Any], _Found]) -> _Found:
    """Return `description(thing)`; an error that it raises gets the tensor's name."""
    try:
        return description(thing)
    except (TypeError, ValueError) as refusal:
        raise type(refusal)(f"tensor {name!r}: {refusal}") from None


def storable(thing: Any) -> Storable:
    """Return what `describe` does; a Scattered of a tensor or array whose bytes must be copied
    first.

    Raises:
        TypeError: its dtype has no code, or it has no bytes: a tensor on "meta", or a sparse one.
    """
    torch = torch_of(thing)
    if torch is not None:
        if thing.layout != torch.strided or thing.device.type == "meta":
            raise TypeError(
                f"expected a dense tensor with values, got layout {thing.layout} on {thing.device}"
            )
        as_it_lies = (
            thing.device.type == "cpu"
            and thing.is_contiguous()
            and not thing.is_conj()
            and not thing.is_neg()
        )
        return (
            describe(thing)
            if as_it_lies
            else Scattered(_tensor_code(thing, torch), tuple(thing.shape), thing)
        )
    # Not imported for this: what numpy made is there only if the program has imported it.
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(thing, numpy.ndarray) and not thing.flags.c_contiguous:
        return Scattered(*kind_of(thing), thing)
    return describe(thing)


def empty(code: str, shape: tuple[int, ...], returns: Returns, *, pool: Pool | None = None) -> Any:
    """Return a new tensor or array, uninitialised, in memory for I/O: of `pool`, or page-aligned.

    What is smaller than a page is not aligned: it never goes to a drive as it is.

    Raises:
        TypeError: what was asked to be returned has no such dtype; the message says what to do.
        PoolExhaustedError: the pool has no free piece of that size.
    """
    nbytes = nbytes_of(code, shape)
    if returns is Returns.TORCH:
        return _empty_tensor(code, shape, pool)
    if returns is Returns.BYTES:
        return _pages(nbytes) if pool is None or nbytes == 0 else pool.buffer(nbytes)
    import numpy as np

    dtype = numpy_dtype(code)
    if pool is not None:
        return pool.empty(shape, dtype)
    if nbytes == 0:
        return np.empty(shape, dtype)
    return view_of(_pages(nbytes), code, shape, returns)


def _empty_tensor(code: str, shape: tuple[int, ...], pool: Pool | None) -> Any:
    import torch

    kind = _torch_dtype(code, torch)
    if nbytes_of(code, shape) == 0:
        return torch.empty(shape, dtype=kind)
    if pool is not None:
        return pool.empty_tensor(shape, kind)
    return view_of(_pages(nbytes_of(code, shape)), code, shape, Returns.TORCH)


def view_of(memory: memoryview, code: str, shape: tuple[int, ...], returns: Returns) -> Any:
    """Return memory, of at least one byte, as a tensor, an array or bytes.

    Raises:
        TypeError: what was asked to be returned has no such dtype; the message says what to do.
    """
    if returns is Returns.BYTES:
        return memory
    if returns is Returns.TORCH:
        import torch

        # The tensor keeps the memoryview, and that its pages.
        return torch.frombuffer(memory, dtype=_torch_dtype(code, torch)).reshape(shape)
    import numpy as np

    return np.frombuffer(memory, numpy_dtype(code)).reshape(shape)


def numpy_dtype(code: str) -> np.dtype[Any]:
    """Return numpy's dtype of that code, or ml_dtypes', where that is installed.

    Raises:
        TypeError: there is none.
    """
    import numpy as np

    name, _ = _DTYPES[code]
    try:
        return np.dtype(name)
    except TypeError:
        pass
    try:
        kind: np.dtype[Any] = np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
    except (ImportError, AttributeError):
        raise TypeError(
            f"numpy has no {name} ({code}): ask for torch tensors (Returns.TORCH), or install "
            "ml_dtypes"
        ) from None
    return kind


def _torch_dtype(code: str, torch: Any) -> Any:
    name, _ = _DTYPES[code]
    if not hasattr(torch, name):
        raise TypeError(f"torch {torch.__version__} has no {name} ({code}): a newer one has")
    return getattr(torch, name)


def _pages(nbytes: int) -> memoryview:
    """Return new bytes that begin with a page, if they fill one.

    Small ones are cut out of the heap: a mapping for each would use up those that a process may
    have, 65,530 as Linux comes. Large ones are mapped, in pages of the system's choice, where
    np.empty asks for huge ones: a virtual machine that gives free memory back to its host pays for
    each of these anew. Measured on one: 0.2 to 0.4 GiB/s to touch them, 1.3 with ordinary pages.
    """
    if nbytes < PAGE:
        return memoryview(bytearray(nbytes))
    if nbytes <= SMALL_BYTES:
        # The slice that is returned keeps all of it: up to a page more than was asked for.
        around = memoryview(bytearray(nbytes + PAGE - 1))
        start = -memory_of(around, writable=True).address % PAGE
        return around[start : start + nbytes]
    pages = memoryview(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    # The kernel makes them now, all in one call, and not in the thread that drives the ring.
    _native.populate(memory_of(pages, writable=True).address, nbytes)
    return pages


def _tensor_code(tensor: Any, torch: Any) -> str:
    # Subclasses can mean more than their bytes say: quantised weights, shards of a distributed
    # tensor.
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise TypeError(
            f"expected a plain torch.Tensor or Parameter, got {type(tensor).__name__}, which may "
            "mean more than its "
            "bytes say: give the tensors it consists of (a DTensor's to_local(), a quantised "
            "weight's parts)"
        )
    return _torch_code(tensor.dtype)


@lru_cache(256)  # names are slow to make
def _torch_code(dtype: Any) -> str:
    code = _CODES.get(str(dtype).removeprefix("torch."))
    if code is None:
        raise TypeError(
            f"{dtype} has no code: convert it to one of {', '.join(_CODES)}, or view its bytes so"
        )
    return code


def _as_array(thing: Any) -> np.ndarray[Any, Any]:
    import numpy as np

    if isinstance(thing, np.ndarray):
        if type(thing) not in (np.ndarray, np.memmap):
            raise TypeError(
                f"expected a plain numpy.ndarray, got {type(thing).__name__}, which may mean more "
                "than its bytes say: give the arrays it consists of"
            )
        return thing
    if hasattr(thing, "__array_interface__"):
        return np.asarray(thing)
    try:
        # By a memoryview first: asarray() of an object without a buffer makes an array of Python
        # objects.
        return np.asarray(memoryview(thing))
    except TypeError:
        if hasattr(thing, "__dlpack__"):
            return np.from_dlpack(thing)
        raise TypeError(
            f"expected a tensor, an array or a buffer, got {type(thing).__name__}"
        ) from None


@lru_cache(256)
def _array_code(dtype: np.dtype[Any]) -> str:
    if dtype.hasobject:
        raise TypeError(
            f"dtype {dtype} holds Python objects: its bytes mean nothing in a file; pickle them"
        )
    if dtype.names is not None:
        raise TypeError(
            f"dtype {dtype} is structured: give each of its fields as an array of its own"
        )
    if not dtype.isnative:
        raise TypeError(
            f"dtype {dtype.str} is big-endian: convert it first "
            "(array.astype(array.dtype.newbyteorder()))"
        )
    code = _CODES.get(dtype.name)
    if code is None or dtype.itemsize != ITEMSIZES[code]:
        raise TypeError(
            f"dtype {dtype} has no code: convert it to one of {', '.join(_CODES)}, or view its "
            "bytes so"
        )
    return code
