"""`Pool`: memory made for I/O, handed out in exact pieces.

Huge pages, page-aligned, registered with the rings of the queues that are given the pool. A piece
goes back when the last array or tensor made of it is gone. A forked child must not touch pool
memory: it is not there (MADV_DONTFORK).
"""

from __future__ import annotations

import errno
import math
import warnings
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from deepnvme import _native
from deepnvme.choices import byte_count, chosen, whole_number
from deepnvme.errors import NVMeError

if TYPE_CHECKING:
    import torch
    from numpy.typing import DTypeLike, NDArray

__all__ = ["Cuda", "Pool"]


_MOST_NODES = 1024  # that Linux knows


class Cuda(Enum):
    """Whether a pool is page-locked for CUDA, so that copies to and from a GPU need no staging."""

    IN_USE = "in use"  # if this process uses CUDA already; a refusal is one warning
    REQUIRED = "required"  # initialise CUDA for it; a refusal is an error
    NEVER = "never"  # copies to and from a GPU are staged by the driver


class Pool:
    """`nbytes` of memory for I/O, mapped and touched at once, of which buffers are cut.

    Give it to `IOQueue(pool=...)`: reads and writes of its buffers then go without any copy and
    without page lookups. `numa_node` says which node's memory it is, best that of the drive (or
    GPU) it serves; without it the memory is near the thread that makes the pool.
    """

    def __init__(
        self, nbytes: int | str, *, cuda: Cuda = Cuda.IN_USE, numa_node: int | None = None
    ) -> None:
        if numa_node is not None and numa_node < 0:
            raise ValueError(f"numa_node must be 0 or more, got {numa_node}")
        if numa_node is not None and numa_node >= _MOST_NODES:
            raise ValueError(
                f"memory cannot be placed on NUMA node {numa_node}: Linux has nodes up to "
                f"{_MOST_NODES - 1}"
            )
        cuda = chosen(Cuda, cuda, "cuda")
        asked = byte_count("the bytes of a pool", nbytes, 1)
        try:
            self._native = _native.Pool(asked, numa_node)
        except MemoryError:
            raise MemoryError(
                f"the system has no memory for a pool of {asked} B: make a smaller one, or free "
                "memory"
            ) from None
        if cuda is Cuda.NEVER:
            return
        try:
            self._native.pin_with_cuda(demanded=cuda is Cuda.REQUIRED)
        except RuntimeError as refusal:
            if cuda is Cuda.REQUIRED:
                raise NVMeError(errno.ENODEV, str(refusal), op="page-lock", asked=asked) from None
            # The memory is there, and all but copies to and from a GPU is as fast.
            warnings.warn(
                f"pool memory is not page-locked: {refusal}. I/O is as fast, and copies to and "
                "from a GPU are slower",
                RuntimeWarning,
                stacklevel=2,
            )

    @property
    def pinned(self) -> bool:
        """Whether the memory is page-locked for CUDA."""
        return self._native.pinned

    @property
    def capacity(self) -> int:
        """Bytes in all."""
        return self._native.capacity

    @property
    def free_bytes(self) -> int:
        """Bytes not handed out."""
        return self._native.free_bytes

    @property
    def largest_free(self) -> int:
        """Bytes of the largest piece that could be handed out."""
        return self._native.largest_free

    @property
    def peak_bytes(self) -> int:
        """Most bytes ever handed out at once, rounding to pages included."""
        return self._native.peak_bytes

    def buffer(self, nbytes: int | str) -> memoryview:
        """Return `nbytes` of pool memory as a writable memoryview.

        Raises:
            PoolExhaustedError: no free piece is that large.
        """
        # The view refers to the block, which gives its bytes back when no view is left.
        return memoryview(self._native.take(byte_count("the bytes of a buffer", nbytes, 1)))

    def buffer_at(self, offset: int, nbytes: int) -> memoryview:
        """Return the `nbytes` at `offset`, a multiple of 4096: for a caller that plans the places.

        Raises:
            PoolExhaustedError: some of them are in another buffer.
        """
        return memoryview(self._native.take_at(offset, nbytes))

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = "uint8") -> NDArray[Any]:
        """Return an uninitialised numpy array in pool memory."""
        import numpy as np

        kind, sizes = np.dtype(dtype), _sizes(shape)
        count = math.prod(sizes)
        if count == 0:
            return np.empty(sizes, kind)
        # The array keeps the buffer: the piece goes back when the last array of it is gone.
        return np.frombuffer(self.buffer(count * kind.itemsize), dtype=kind).reshape(sizes)

    def empty_tensor(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised torch tensor in pool memory. Imports torch."""
        import torch

        if not isinstance(dtype, torch.dtype) or str(dtype).startswith("torch.q"):  # type: ignore[redundant-expr]
            raise TypeError(
                f"expected a dtype of torch with values that are plain bytes, got {dtype!r}"
            )
        sizes = _sizes(shape)
        count = math.prod(sizes)
        if count == 0:
            return torch.empty(sizes, dtype=dtype)
        return torch.frombuffer(self.buffer(count * dtype.itemsize), dtype=dtype).reshape(sizes)

    def __reduce__(self) -> str:
        """Refuse to be pickled or copied."""
        raise TypeError(
            "a pool is neither pickled nor copied: its memory is this process's. Make one where it "
            "is used"
        )

    def __repr__(self) -> str:
        """Show how much is free."""
        return f"Pool({self.free_bytes} of {self.capacity} B free)"


def _sizes(shape: int | Sequence[int]) -> tuple[int, ...]:
    given = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    return tuple(whole_number("a size of a shape", size) for size in given)
