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

from deepnvme.memory.copying import Runs

__all__ = ["Selection", "select"]


@dataclass(frozen=True)
class Selection:
    """The shape of what is selected, and where its bytes lie in the tensor: runs of one length.

    `starts` has a range of byte offsets for each dimension that is not part of a run, and at least
    one range: a run begins at the sum of one offset of each.
    """

    shape: tuple[int, ...]
    run_nbytes: int
    starts: tuple[range, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all that is selected."""
        return self.run_nbytes * math.prod(len(offsets) for offsets in self.starts)

    def runs(self) -> Iterator[Runs]:
        """Yield all runs, in the order of the selected elements."""
        if self.nbytes == 0:
            return
        *outer, last = self.starts
        for offsets in product(*outer):
            yield Runs(sum(offsets) + last.start, self.run_nbytes, last.step, len(last))


def select(shape: Sequence[int], itemsize: int, key: Any) -> Selection:
    """Return what `tensor[key]` selects of a tensor of that shape, with its bytes in C order.

    A key is an integer, a slice, an Ellipsis, or a tuple of these, as in numpy and torch.

    Raises:
        IndexError: an integer is outside its dimension, or there are more indices than dimensions.
        TypeError: something in the key is none of these.
        ValueError: a slice has a step of 0 or less.
    """
    picked = [
        _picked(index, size) for index, size in zip(_whole(key, len(shape)), shape, strict=True)
    ]
    strides = [math.prod(shape[dimension + 1 :]) * itemsize for dimension in range(len(shape))]
    # The last dimensions, as far as they are selected whole, are one run.
    inner = len(shape)
    # An empty dimension counts as whole: then nothing is selected at all.
    while inner > 0 and len(picked[inner - 1][0]) == shape[inner - 1]:
        inner -= 1
    run_nbytes = math.prod(shape[inner:]) * itemsize
    outer = picked[:inner]
    start = 0
    if outer and (outer[-1][0].step == 1 or len(outer[-1][0]) < 2):
        # Also the dimension before them, where its indices follow one another.
        indices, _ = outer[-1]
        run_nbytes *= len(indices)
        start = indices.start * strides[inner - 1] if len(indices) else 0
        outer = outer[:-1]
    offsets = [
        range(indices.start * stride, indices.stop * stride, indices.step * stride)
        if stride
        else range(0)
        for (indices, _), stride in zip(outer, strides, strict=False)
    ]
    last = offsets.pop() if offsets else range(1)
    return Selection(
        tuple(len(indices) for indices, is_kept in picked if is_kept),
        run_nbytes,
        (*offsets, range(last.start + start, last.stop + start, last.step)),
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
        if step < 0:
            raise ValueError(
                f"a slice of a stored tensor must have a positive step, got {index}. "
                "Read or write the part forwards, and reverse it in memory"
            )
        return range(start, max(start, stop), step), True
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
