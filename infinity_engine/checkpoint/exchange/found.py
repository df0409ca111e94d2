"""`ForeignCheckpoint`: what another library has saved, as tensors and streams of this package.

The readers of each format make one (deepspeed, dcp, torch_states). Bytes are read only when a
slice is asked for, so memory does not grow with the checkpoint. Imports no torch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from deepnvme.memory.arrays import ITEMSIZES
from infinity_engine.checkpoint.exchange.torch_files import SavedArray
from infinity_engine.checkpoint.manifest import SavedTensor
from infinity_engine.checkpoint.rounding import FLOATS, converted
from infinity_engine.checkpoint.streams import SavedStream
from infinity_engine.errors import IncompleteCheckpoint, UnsupportedCheckpoint

__all__ = [
    "HYPERPARAMETERS",
    "Block",
    "ForeignCheckpoint",
    "ForeignReader",
    "StreamOfBlocks",
    "number_in",
    "pieces_of",
    "step_count",
]

HYPERPARAMETERS = (
    "lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "amsgrad",
    "maximize", "lr_decay", "initial_lr",
)  # fmt: skip
"""The options of an optimizer's groups that go along."""

# Of one block. A tensor with strange strides may need a run for each element.
_MOST_RUNS = 1 << 20
# The most bytes that are converted at once.
_READ_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a tensor: the elements of `array`. Its first one is at `offsets` of the tensor.

    One offset alone is for an array of one dimension: it counts the tensor's elements in a row.
    """

    array: SavedArray
    offsets: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignCheckpoint:
    """What was found. A stream without `blocks` is all zeros."""

    path: str
    format: str
    """What wrote it, for people."""
    step: int
    tensors: tuple[SavedTensor, ...]
    blocks: Mapping[tuple[str, str], Sequence[Block]]
    groups: Sequence[Mapping[str, Any]] = ()
    """The options of each of the optimizer's groups."""
    loss_scale: Mapping[str, float | int] = field(
        default_factory=lambda: {"value": 1.0, "good_steps": 0}
    )
    left_behind: tuple[str, ...] = ()
    """The parts that cannot go along, by name."""

    def check(self) -> None:
        """Check that every stream is there, each of its elements once.

        Raises:
            IncompleteCheckpoint: elements of a stream are missing.
            UnsupportedCheckpoint: they are there twice, or lie in a way that is not read.
        """
        for tensor in self.tensors:
            for name in tensor.streams:
                self.stream(tensor, name)

    def stream(self, tensor: SavedTensor, name: str) -> StreamOfBlocks:
        """Return what reads one stream."""
        return StreamOfBlocks(
            tensor.stream(name), tensor.shape, self.blocks.get((tensor.name, name), ()), self.path
        )


class ForeignReader:
    """Reads slices of a foreign checkpoint's streams, best those of one stream after another."""

    def __init__(self, checkpoint: ForeignCheckpoint) -> None:
        tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
        # A stream may have a million runs: only those of the stream that is being read are kept.
        self._open = lru_cache(maxsize=1)(
            lambda name, stream: checkpoint.stream(tensors[name], stream)
        )

    def read(self, stream: SavedStream, first: int, into: npt.NDArray[np.uint8]) -> None:
        """Fill `into` with the bytes of the elements of a stream from `first` on.

        Raises:
            DamagedCheckpoint: a file ends too early.
        """
        self._open(stream.parameter, stream.name).read(first, into)


class StreamOfBlocks:
    """One stream that lies in blocks of other files; all zeros without any."""

    def __init__(
        self, stream: SavedStream, shape: tuple[int, ...], blocks: Sequence[Block], path: str
    ) -> None:
        self._stream = stream
        self._path = path
        self._runs = [run for block in blocks for run in _runs(stream, shape, block, path)]
        self._runs.sort(key=lambda run: run.first)
        self._starts = [run.first for run in self._runs]
        if blocks:
            self._check_covered()

    def read(self, first: int, into: npt.NDArray[np.uint8]) -> None:
        """Fill `into` with the bytes of the elements from `first` on, in the stream's dtype."""
        itemsize = ITEMSIZES[self._stream.dtype]
        end = first + into.nbytes // itemsize
        if not self._runs:
            # Such as moments that an optimizer has not made yet: they begin as zeros.
            into[:] = 0
            return
        # The run that has the element `first`. `_check_covered` found no gap between runs.
        at, number = first, bisect_right(self._starts, first) - 1
        while at < end:
            run = self._runs[number]
            upto = min(end, run.end)
            run.read(
                at, into[(at - first) * itemsize : (upto - first) * itemsize], self._stream.dtype
            )
            at, number = upto, number + 1

    def _check_covered(self) -> None:
        at = 0
        for run in self._runs:
            if run.first > at:
                self._refuse_gap(at, run.first)
            if run.first < at:
                raise UnsupportedCheckpoint(
                    path=self._path,
                    entry=self._stream.parameter,
                    flaw=f"element {run.first} of {self._stream.name} is there twice",
                    change="save it again, each element once",
                )
            at = run.end
        if at != self._stream.numel:
            self._refuse_gap(at, self._stream.numel)

    def _refuse_gap(self, first: int, end: int) -> None:
        named = f"elements {first} to {end} of {self._stream.name} of {self._stream.parameter}"
        raise IncompleteCheckpoint(path=self._path, missing=(named,))


@dataclass(frozen=True, slots=True)
class _FileRun:
    """Elements of a stream that follow one another in a file too, from `offset` on."""

    first: int
    numel: int
    array: SavedArray
    offset: int

    @property
    def end(self) -> int:
        return self.first + self.numel

    def read(self, first: int, into: npt.NDArray[np.uint8], want: str) -> None:
        have, wide = self.array.dtype, ITEMSIZES[want]
        offset = self.offset + (first - self.first) * ITEMSIZES[have]
        # Without a conversion, bytes go from the file to where they belong.
        if have == want:
            self.array.file.read_into(offset, into.data)
            return
        step = max(1, _READ_BYTES // ITEMSIZES[have])
        count = into.nbytes // wide
        for at in range(0, count, step):
            raw = np.empty(min(step, count - at) * ITEMSIZES[have], np.uint8)
            self.array.file.read_into(offset + at * ITEMSIZES[have], raw.data)
            values = converted(raw, have, want)
            into[at * wide : at * wide + values.nbytes] = values


def _runs(
    stream: SavedStream, shape: tuple[int, ...], block: Block, path: str
) -> Iterator[_FileRun]:
    """Yield the runs of a block: what lies together both in the tensor and in the file."""
    array = block.array
    sizes, itemsize = array.shape, ITEMSIZES[array.dtype]
    if len(block.offsets) == 1:  # of the tensor as one row
        shape = (math.prod(shape),)
    if array.dtype != stream.dtype and not {array.dtype, stream.dtype} <= FLOATS:
        raise _unsupported(path, stream, f"it is {array.dtype}, expected {stream.dtype}")
    if len(sizes) != len(shape) or any(
        offset + size > whole
        for offset, size, whole in zip(block.offsets, sizes, shape, strict=True)
    ):
        raise _unsupported(
            path, stream, f"a part of shape {sizes} at {block.offsets} does not fit into {shape}"
        )
    if not array.numel:
        return
    together, outer = 1, len(shape)
    while outer and (sizes[outer - 1] == 1 or array.strides[outer - 1] == together * itemsize):
        # Inner dimensions without gaps, in the file and in the tensor, make one run.
        outer -= 1
        together *= sizes[outer]
        # The tensor has more of this dimension than the block: the elements before it are
        # elsewhere.
        if sizes[outer] != shape[outer]:
            break
    count = math.prod(sizes[:outer])
    if count > _MOST_RUNS:
        raise _unsupported(
            path, stream, f"its elements lie in {count} pieces: save it again after .contiguous()"
        )
    # How many elements of the stream one step in each dimension passes.
    within = [math.prod(shape[number + 1 :]) for number in range(len(shape))]
    start = sum(offset * step for offset, step in zip(block.offsets, within, strict=True))
    for position in np.ndindex(*sizes[:outer]):
        first = start + sum(
            index * step for index, step in zip(position, within[:outer], strict=True)
        )
        offset = sum(
            index * stride for index, stride in zip(position, array.strides[:outer], strict=True)
        )
        yield _FileRun(first, together, array, array.offset + offset)


def _unsupported(path: str, stream: SavedStream, flaw: str) -> UnsupportedCheckpoint:
    entry = f"{stream.name} of {stream.parameter}"
    return UnsupportedCheckpoint(
        path=path, entry=entry, flaw=flaw, change="see docs/checkpoints.md for what is read"
    )


def pieces_of(
    arrays: Iterable[SavedArray], first: int, numel: int, *, at: int = 0
) -> Iterator[tuple[SavedArray, int]]:
    """Yield the pieces of flat arrays in a row that have the elements `first` and following.

    With each comes where it begins in what they make, counted from `at` on.
    """
    end = first + numel
    begin = 0
    for array in arrays:
        low, high = max(first, begin), min(end, begin + array.numel)
        if low < high:
            itemsize = ITEMSIZES[array.dtype]
            yield (
                SavedArray(
                    array.file,
                    array.dtype,
                    (high - low,),
                    (itemsize,),
                    array.offset + (low - begin) * itemsize,
                ),
                at + low - first,
            )
        begin += array.numel


def number_in(value: object) -> float | int | None:
    """Return a number that may be in a tensor of one element; None for anything else."""
    if isinstance(value, SavedArray) and value.numel == 1:
        kinds = {
            "F64": "<f8",
            "F32": "<f4",
            "F16": "<f2",
            "I64": "<i8",
            "I32": "<i4",
            "U8": "u1",
            "I16": "<i2",
        }
        if value.dtype in kinds:
            number: float | int = np.frombuffer(value.values(), kinds[value.dtype])[0].item()
            return number
    return value if type(value) in (int, float) else None  # type: ignore[return-value]  # no narrowing


def step_count(value: object) -> int | None:
    """Return how many updates something counts; None where it is no such count."""
    number = number_in(value)
    # From 2**53 on, fp64 skips whole numbers. NaN fails both comparisons.
    if number is None or not 0 <= number < 1 << 53 or number != int(number):
        return None
    return int(number)
