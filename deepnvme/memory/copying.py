"""Small pieces of memory to and from their places in staging memory: all of a run in one call,
without the GIL.

Summed on the way, in the same pass, where that is wanted. Called by stores and safetensors files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepnvme import _native
from deepnvme.memory.buffers import Memory

__all__ = ["Runs", "gather", "gather_runs", "scatter", "scatter_runs"]


@dataclass(frozen=True, slots=True)
class Runs:
    """`count` runs of `nbytes` bytes, which begin `stride` bytes apart, from `offset` on."""

    offset: int
    nbytes: int
    stride: int
    count: int

    @property
    def end(self) -> int:
        """The offset behind the last run."""
        return self.offset + (self.count - 1) * self.stride + self.nbytes

    @property
    def total_nbytes(self) -> int:
        """The bytes of all runs."""
        return self.count * self.nbytes


def gather(
    staging: Memory,
    places: Sequence[int],
    sizes: Sequence[int],
    pieces: Sequence[Memory],
    *,
    summing: bool,
) -> Sequence[int]:
    """Copy each piece to its place; where `summing`, return the crc32c of each, else nothing.

    Raises:
        ValueError: a piece has not the size of its place, or a place is not within the staging
            memory.
    """
    return _copied(_places(staging, places, sizes), _addresses(pieces, sizes), sizes, summing)


def scatter(
    staging: Memory,
    places: Sequence[int],
    sizes: Sequence[int],
    pieces: Sequence[Memory],
    *,
    summing: bool,
) -> Sequence[int]:
    """Copy to each piece the bytes at its place; returns and raises as `gather` does."""
    return _copied(_addresses(pieces, sizes), _places(staging, places, sizes), sizes, summing)


def gather_runs(staging: Memory, runs: Sequence[Runs], pieces: Sequence[Memory]) -> None:
    """Copy each piece to its runs in staging memory; one as long as a run fills all of them.

    Raises:
        ValueError: a piece has not the size of its runs, or a run is not within the staging memory.
    """
    # How far apart two runs begin in a piece.
    strides = [
        0 if piece.nbytes == run.nbytes else run.nbytes
        for run, piece in zip(runs, pieces, strict=True)
    ]
    sizes = [max(run.nbytes, run.count * stride) for run, stride in zip(runs, strides, strict=True)]
    _native.copy_strided(
        _run_places(staging, runs),
        [run.stride for run in runs],
        _addresses(pieces, sizes),
        strides,
        [run.nbytes for run in runs],
        [run.count for run in runs],
    )


def scatter_runs(staging: Memory, runs: Sequence[Runs], pieces: Sequence[Memory]) -> None:
    """Copy runs in staging memory to their pieces, which have as many bytes.

    Raises as `gather_runs` does.
    """
    _native.copy_strided(
        _addresses(pieces, [run.total_nbytes for run in runs]),
        [run.nbytes for run in runs],
        _run_places(staging, runs),
        [run.stride for run in runs],
        [run.nbytes for run in runs],
        [run.count for run in runs],
    )


def _run_places(staging: Memory, runs: Sequence[Runs]) -> list[int]:
    return _places(staging, [run.offset for run in runs], [run.end - run.offset for run in runs])


def _places(staging: Memory, places: Sequence[int], sizes: Sequence[int]) -> list[int]:
    # Native code checks no address: a wrong place would overwrite other memory.
    for place, nbytes in zip(places, sizes, strict=True):
        if not 0 <= place <= place + nbytes <= staging.nbytes:
            raise ValueError(
                f"bytes {place} to {place + nbytes} are not within {staging.nbytes} bytes of memory"
            )
    return [staging.address + place for place in places]


def _addresses(pieces: Sequence[Memory], sizes: Sequence[int]) -> list[int]:
    for piece, nbytes in zip(pieces, sizes, strict=True):
        if piece.nbytes != nbytes:
            raise ValueError(
                f"a piece of {piece.nbytes} bytes of memory cannot be copied to or from {nbytes} "
                "bytes"
            )
    return [piece.address for piece in pieces]


def _copied(
    destinations: Sequence[int], sources: Sequence[int], sizes: Sequence[int], summing: bool
) -> Sequence[int]:
    if summing:
        return _native.crc32c_copy_each(destinations, sources, sizes)
    _native.copy_each(destinations, sources, sizes)
    return ()
