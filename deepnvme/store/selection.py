"""A part of a tensor as runs of bytes: what `tensor[key]` selects, without the tensor.

Pure arithmetic over a shape, a key and the bytes of an element. Called by the store's slices.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

__all__ = ["Selection", "select"]


@dataclass(frozen=True)
class Selection:
    """The shape of what is selected, and where its bytes lie in the tensor: runs of one length."""

    shape: tuple[int, ...]
    run_nbytes: int
    starts: tuple[range, ...]  # byte offsets by dimension; a run begins at the sum of one of each

    @property
    def nbytes(self) -> int:
        """Bytes of all that is selected."""
        return self.run_nbytes * math.prod(len(offsets) for offsets in self.starts)

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield the offset and the bytes of each run, in the order of the selected elements."""
        if self.nbytes == 0:
            return
        for offsets in product(*self.starts):
            yield sum(offsets), self.run_nbytes


def select(shape: Sequence[int], itemsize: int, key: Any) -> Selection:
    """Return what `tensor[key]` selects of a tensor of that shape, with its bytes in C order.

    A key is an integer, a slice, an Ellipsis, or a tuple of these, as numpy and torch take them.

    Raises:
        IndexError: an integer is outside its dimension, or there are more indices than dimensions.
        TypeError: something in the key is none of these.
        ValueError: a slice has a step that is not 1.
    """
    picked = [
        _picked(index, size) for index, size in zip(_whole(key, len(shape)), shape, strict=True)
    ]
    strides = [math.prod(shape[dimension + 1 :]) * itemsize for dimension in range(len(shape))]
    # From the last dimension on: as long as dimensions are whole, their bytes are one run.
    inner = len(shape)
    # An empty dimension counts as whole: then nothing is selected at all.
    while inner > 0 and len(picked[inner - 1][0]) == shape[inner - 1]:
        inner -= 1
    run_nbytes = math.prod(shape[inner:]) * itemsize
    outer = picked[:inner]
    start = 0
    if outer:  # the last dimension that is not whole still is one run
        indices, _ = outer[-1]
        run_nbytes *= len(indices)
        start = indices.start * strides[inner - 1] if len(indices) else 0
        outer = outer[:-1]
    offsets = [
        range(indices.start * stride, indices.stop * stride, stride) if stride else range(0)
        for (indices, _), stride in zip(outer, strides, strict=False)
    ]
    return Selection(
        tuple(len(indices) for indices, is_kept in picked if is_kept),
        run_nbytes,
        (*offsets, range(start, start + 1)),
    )


def _whole(key: Any, dimensions: int) -> list[Any]:
    """Return one index for each dimension."""
    given = list(key) if isinstance(key, tuple) else [key]
    dots = [place for place, index in enumerate(given) if index is Ellipsis]
    if len(dots) > 1:
        raise IndexError("a key has one Ellipsis at most")
    missing = dimensions - (len(given) - len(dots))
    if missing < 0:
        raise IndexError(f"expected {dimensions} indices at most, got {len(given) - len(dots)}")
    place = dots[0] if dots else len(given)
    return [*given[:place], *([slice(None)] * missing), *given[place + len(dots) :]]


def _picked(index: Any, size: int) -> tuple[range, bool]:
    """Return which indices of one dimension are selected, and whether the dimension stays."""
    if isinstance(index, slice):
        start, stop, step = index.indices(size)
        if step != 1:
            raise ValueError(
                f"a slice of a stored tensor has the step 1, got {index}. "
                "Get the rows without a step, then take every so many of the result"
            )
        return range(start, max(start, stop)), True
    try:
        number = operator.index(index)
    except TypeError:
        raise TypeError(
            f"a part of a stored tensor is named by integers, slices and an Ellipsis, got {index!r}"
        ) from None
    if not -size <= number < size:
        raise IndexError(f"index {number} is outside a dimension of {size}")
    number %= size
    return range(number, number + 1), False
