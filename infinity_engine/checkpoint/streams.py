"""The protocol between the engine and checkpoints: named flat streams of each parameter, in slices.

A stream is what a checkpoint keeps of one parameter under one name: `master`, a moment, or `value`
where nothing trains it. This module holds the words; the engine implements `StreamSource`, writer
and reader call it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from deepnvme.memory.arrays import ITEMSIZES

__all__ = [
    "SHARD",
    "SavedStream",
    "Slice",
    "SliceSink",
    "StreamSource",
    "fill_name",
    "is_fill",
    "parse_tensor",
]

SHARD = "rank-"
"""The first characters of the names of files that hold slices of streams."""

_FILL = re.compile(r"fill@[0-9]{1,19}")
# The last # and @ count: a parameter's own name may have some.
_TENSOR = re.compile(
    r"(?P<parameter>.*)#(?P<stream>[a-z0-9_]{1,64})@(?P<first>0|[1-9][0-9]{0,18})", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class SavedStream:
    """One stream of one parameter: `dtype` is a safetensors code, `numel` counts all ranks."""

    parameter: str
    name: str
    dtype: str
    numel: int


@dataclass(frozen=True, slots=True)
class Slice:
    """The elements `first` to `first + numel` of a stream."""

    stream: SavedStream
    first: int
    numel: int

    @property
    def nbytes(self) -> int:
        """How many bytes its elements have."""
        return self.numel * ITEMSIZES[self.stream.dtype]

    @property
    def tensor(self) -> str:
        """The name of the tensor that holds it in a shard file."""
        return f"{self.stream.parameter}#{self.stream.name}@{self.first}"


class SliceSink(Protocol):
    """What slices are handed out to, such as the files of a shard."""

    def take(self, part: Slice, values: memoryview) -> None:
        """Take the next bytes of a slice. They must not change before `settle` returns."""
        ...

    def settle(self) -> None:
        """Return when all that was taken may change."""
        ...


class StreamSource(Protocol):
    """An engine, which has streams in memory or on drives and hands them out slice by slice."""

    def slices(self) -> Sequence[Slice]:
        """Return the slices that this rank has, in the order in which it can hand them out."""
        ...

    def hand_out(self, sink: SliceSink) -> None:
        """Hand out each slice and its bytes, in the order of `slices`.

        A slice may come in several calls, with its next bytes in each. Bytes that are not settled
        at the end stay as they are until the sink is closed.
        """
        ...


def fill_name(number: int) -> str:
    """Return the name of bytes that only fill up a page in a shard, and mean nothing."""
    return f"fill@{number}"


def is_fill(name: str) -> bool:
    """Tell whether a tensor of a shard only fills up a page. No slice has such a name."""
    return _FILL.fullmatch(name) is not None


def parse_tensor(name: str) -> tuple[str, str, int] | None:
    """Return the parameter, stream and first element that a tensor's name says, None if none."""
    found = _TENSOR.fullmatch(name)
    return None if found is None else (found["parameter"], found["stream"], int(found["first"]))
