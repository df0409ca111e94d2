"""Which memory an object exposes: torch tensors, numpy arrays, anything with the buffer protocol,
DLPack.

Copies nothing: memory that cannot be used as it lies is refused, with what to do. torch is looked
at only if the program has imported it.
"""

from __future__ import annotations

import math
import sys
from array import array
from typing import Any, NamedTuple

from deepnvme import _native

__all__ = ["Memory", "hold_each", "memory_of", "not_contiguous", "refuse_unless_plain", "torch_of"]


class Memory(NamedTuple):
    """One contiguous piece of host memory, valid as long as `holder` lives."""

    address: int
    nbytes: int
    holder: object

    def part(self, start: int, nbytes: int) -> Memory:
        """Return `nbytes` of it from `start`."""
        if not 0 <= start <= start + nbytes <= self.nbytes:
            raise ValueError(
                f"bytes {start} to {start + nbytes} are not within {self.nbytes} bytes of memory"
            )
        return _new_tuple(Memory, (self.address + start, nbytes, self.holder))


def torch_of(thing: Any) -> Any:
    """Return torch where `thing` is a tensor of it, else None. Imports nothing."""
    torch = sys.modules.get("torch")
    kind = getattr(torch, "Tensor", None)  # another thread may be importing it just now
    return torch if kind is not None and isinstance(thing, kind) else None


def memory_of(thing: Any, *, writable: bool) -> Memory:
    """Return the memory that `thing` exposes, to be written to if `writable`; a Memory as it is.

    Raises:
        TypeError: it exposes none, or memory that is not the host's.
        ValueError: it is not contiguous.
        BufferError: it is read-only and `writable` was asked.
    """
    if isinstance(thing, Memory):
        return thing
    # A memoryview is what a pool gives.
    view = thing if type(thing) is memoryview else _usual_view(thing)
    if view is not None:
        return _of_view(view, thing, writable=writable)
    torch = torch_of(thing)
    if torch is not None:
        return _of_tensor(thing, torch)
    if hasattr(thing, "__cuda_array_interface__"):
        raise TypeError(_DEVICE.format(kind=type(thing).__name__))
    try:
        exposed = _native.BufferView(thing, writable=writable)
    except TypeError:
        if hasattr(thing, "__array_interface__"):
            return _of_array_interface(thing, writable=writable)
        if hasattr(thing, "__dlpack__"):
            return _of_dlpack(thing, writable=writable)
        raise TypeError(
            "expected a tensor, an array or an object with the buffer protocol or DLPack, got "
            f"{type(thing).__name__}"
        ) from None
    except (BufferError, ValueError) as refusal:
        raise _refusal(thing, refusal, writable=writable) from None
    if _holds_objects(thing):
        raise TypeError(_OBJECTS.format(kind=type(thing).__name__))
    return Memory(exposed.address, exposed.nbytes, exposed)


def hold_each(
    things: list[Any] | tuple[Any, ...], numbers: array[int], *, writable: bool
) -> list[object]:
    """Return what holds the memory of all things; put the address and the bytes of each into the
    first two of its three `numbers`.

    Raises what `memory_of` raises.
    """
    memories = [memory_of(thing, writable=writable) for thing in things]
    numbers[0::3] = array("Q", [memory.address for memory in memories])
    numbers[1::3] = array("Q", [memory.nbytes for memory in memories])
    return [memory.holder for memory in memories]


_new_tuple = tuple.__new__  # without the call in Python that a NamedTuple's own costs
_PLAIN_KINDS = "biufc"  # of numpy dtypes: what the buffer protocol has a format for
_DEVICE = (
    "{kind} is not in host memory, which is needed here: copy it to the host first (.cpu(), "
    "cupy.asnumpy)"
)
_OBJECTS = (
    "{kind} holds Python objects: its bytes are their addresses, which mean nothing in a file; "
    "pickle them"
)


def not_contiguous(kind: str, *, how: str) -> ValueError:
    """Compose the error of memory in several pieces; `how` the caller can make it one."""
    return ValueError(
        f"{kind} is not contiguous: its bytes are not one piece of memory. Make it so first ({how})"
    )


def refuse_unless_plain(tensor: Any, torch: Any) -> None:
    """Refuse a torch tensor, on any device, whose bytes in memory are not its values in order.

    Raises:
        TypeError: it is not dense.
        ValueError: it is not contiguous, or a view that torch computes when it is looked at.
    """
    if tensor.layout != torch.strided:
        raise TypeError(f"expected a dense tensor, got layout {tensor.layout}")
    if not tensor.is_contiguous():
        raise not_contiguous(f"a tensor of strides {tensor.stride()}", how=".contiguous()")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            "the tensor is a lazy conjugate or negative: its bytes are not its values; "
            "resolve_conj() first"
        )


def _usual_view(thing: Any) -> memoryview | None:
    """Return Python's own view of bytes, a bytearray or an array of plain numbers, else None."""
    if type(thing) is bytes or type(thing) is bytearray:
        return memoryview(thing)
    numpy = sys.modules.get("numpy")
    kind = getattr(numpy, "ndarray", None)  # another thread may be importing it just now
    if kind is not None and type(thing) is kind and thing.dtype.kind in _PLAIN_KINDS:
        return memoryview(thing)
    return None


def _of_view(view: memoryview, thing: Any, *, writable: bool) -> Memory:
    """Return the memory of `view`, which is Python's own view of `thing`."""
    # A third of what a BufferView costs, which small operations feel. What `held` returns keeps the
    # memory in place, also when the caller releases `view` meanwhile.
    found = _native.held(view, writable)
    if found is not None:
        return _new_tuple(Memory, found)
    if "O" in view.format:
        raise TypeError(_OBJECTS.format(kind="memoryview"))
    raise _refusal(thing, BufferError("its memory cannot be used as it lies"), writable=writable)


def _of_tensor(tensor: Any, torch: Any) -> Memory:
    if tensor.device.type != "cpu":
        raise TypeError(_DEVICE.format(kind=f"a tensor on {tensor.device}"))
    refuse_unless_plain(tensor, torch)
    # The storage, not the tensor: `tensor.data = other` lets the tensor go on without the memory
    # being read into.
    return Memory(
        tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor.untyped_storage()
    )


def _of_array_interface(array: Any, *, writable: bool) -> Memory:
    """Handle arrays of types that the buffer protocol cannot name, such as ml_dtypes' bfloat16."""
    interface = array.__array_interface__
    address, read_only = interface["data"]
    # None: in C order, without gaps.
    if interface.get("strides") is not None:
        raise not_contiguous("an array with strides", how="numpy.ascontiguousarray")
    if read_only and writable:
        raise BufferError(
            f"{type(array).__name__} is read-only; reading into it needs a writable one"
        )
    import numpy as np

    kind = np.dtype(interface["typestr"])
    if kind.hasobject:
        raise TypeError(_OBJECTS.format(kind=type(array).__name__))
    return Memory(address, math.prod(interface["shape"]) * kind.itemsize, array)


def _of_dlpack(thing: Any, *, writable: bool) -> Memory:
    device, _ = thing.__dlpack_device__()
    # 1 is the host's memory (kDLCPU).
    if int(device) != 1:
        raise TypeError(_DEVICE.format(kind=type(thing).__name__))
    import numpy as np

    array = np.from_dlpack(thing)
    # Before 2.2 numpy called every such array read-only, and DLPack handed out no read-only memory.
    flag_is_true = tuple(map(int, np.__version__.split(".")[:2])) >= (2, 2)
    return memory_of(array, writable=writable and flag_is_true)


def _holds_objects(thing: Any) -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(thing, numpy.ndarray):
        return bool(thing.dtype.hasobject)
    with memoryview(thing) as view:
        return "O" in view.format


def _refusal(thing: Any, refusal: Exception, *, writable: bool) -> Exception:
    """Say which of the two it is: read-only or not contiguous."""
    kind = type(thing).__name__
    with memoryview(thing) as view:
        if not view.c_contiguous:
            return not_contiguous(kind, how="numpy.ascontiguousarray")
        if writable and view.readonly:
            return BufferError(
                f"{kind} is read-only; reading into it needs a writable one (bytearray, "
                "numpy.empty)"
            )
    return refusal
