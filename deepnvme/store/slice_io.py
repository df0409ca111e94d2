"""`SliceIO`: parts of stored tensors to and from a volume, in windows of whole pages or whole
checksums.

A part seldom begins where a page or the bytes of one checksum do. So a window is read as a whole
and compared with its checksums. Then bytes are copied from it, or changed in it, and it is written
again. Knows no names and no commits. Called by `NamedTensors`, from any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from deepnvme.memory.buffers import Memory
from deepnvme.memory.checksum import CHECKSUM_BYTES, checksums_of
from deepnvme.memory.copying import Runs, gather_runs, scatter_runs
from deepnvme.memory.filling import Repeated
from deepnvme.queue.pipeline import GAP_BYTES, RUN_BYTES, Pipeline, Staged
from deepnvme.queue.queue import Batch
from deepnvme.sizes import PAGE
from deepnvme.store.manifest import Record
from deepnvme.store.tensor_io import check_sums, fetch, store
from deepnvme.volume.extents import Extent, slices
from deepnvme.volume.volume import Volume

__all__ = ["SliceIO", "Window", "whole_windows", "windows"]


@dataclass(frozen=True)
class Window:
    """`nbytes` of a tensor from `start`, and the runs of a part that are among them."""

    start: int
    nbytes: int
    runs: Sequence[Runs]  # their offsets are those in the window
    sources: Sequence[int]  # where the bytes of these begin in the caller's memory

    @property
    def is_covered(self) -> bool:
        """Whether the runs have all of its bytes."""
        return sum(run.total_nbytes for run in self.runs) == self.nbytes


def windows(runs: Iterable[Runs], nbytes: int, unit: int) -> Iterator[Window]:
    """Yield windows of whole `unit`s of a tensor of `nbytes` bytes that together cover all runs.

    The runs are in the order of their offsets. No two windows have a byte in common, as both would
    be changed and written.
    """
    group: list[tuple[Runs, int]] = []
    end = 0
    for run, source in _cut(runs):
        # A large gap ends a window, unless one unit has bytes of both sides: the end is rounded up.
        # Windows also end at multiples of RUN_BYTES, which are whole units: staging memory holds no
        # more.
        is_full = bool(group) and run.offset // RUN_BYTES != group[0][0].offset // RUN_BYTES
        if is_full or (run.offset - end > GAP_BYTES and run.offset // unit >= -(-end // unit)):
            yield from _window(group, nbytes, unit)
            group = []
        group.append((run, source))
        end = run.end
    yield from _window(group, nbytes, unit)


def _cut(runs: Iterable[Runs]) -> Iterator[tuple[Runs, int]]:
    """Yield the runs with their offset in the caller's memory, cut where a window may end."""
    source = 0
    for run in runs:
        done = 0
        while done < run.count:
            at = run.offset + done * run.stride
            room = RUN_BYTES - at % RUN_BYTES
            fitting = (room - run.nbytes) // run.stride + 1
            if run.stride - run.nbytes > GAP_BYTES:
                fitting = min(fitting, 1)
            if fitting > 0:
                count = min(fitting, run.count - done)
                yield replace(run, offset=at, count=count), source
            else:
                count = 1
                yield from _cut_one(at, run.nbytes, source)
            done += count
            source += count * run.nbytes


def _cut_one(offset: int, nbytes: int, source: int) -> Iterator[tuple[Runs, int]]:
    """Yield the parts of one run that lie in different windows."""
    done = 0
    while done < nbytes:
        at = offset + done
        piece = min(nbytes - done, RUN_BYTES - at % RUN_BYTES)
        yield Runs(at, piece, piece, 1), source + done
        done += piece


def _window(group: Sequence[tuple[Runs, int]], nbytes: int, unit: int) -> Iterator[Window]:
    if not group:
        return
    begin = group[0][0].offset // unit * unit
    end = min(-(-group[-1][0].end // unit) * unit, nbytes)
    yield Window(
        begin,
        end - begin,
        [replace(run, offset=run.offset - begin) for run, _ in group],
        [source for _, source in group],
    )


def whole_windows(runs: Iterable[Runs], nbytes: int) -> Iterator[Window]:
    """Yield windows as `windows` does, and empty ones in between: together they are the tensor."""
    changed = {window.start // RUN_BYTES: window for window in windows(runs, nbytes, RUN_BYTES)}
    for start in range(0, nbytes, RUN_BYTES):
        untouched = Window(start, min(RUN_BYTES, nbytes - start), (), ())
        yield changed.get(start // RUN_BYTES, untouched)


class _Change:
    """A write of the caller's memory over a part, in the tensor's own extents or in a copy's."""

    def __init__(
        self, name: str, record: Record, extents: Sequence[Extent], memory: Memory | Repeated
    ) -> None:
        self.name = name
        self.record = record
        self.extents = extents
        self.memory = memory
        self.sums = dict(enumerate(record.checksums or ()))  # by the number of their block


class SliceIO:
    """Reads and writes parts of the tensors on one volume, through staging memory."""

    def __init__(self, volume: Volume, staged: Staged, *, summing: bool) -> None:
        self._volume = volume
        self._staged = staged
        self._summing = summing

    def read(self, name: str, record: Record, runs: Iterable[Runs], memory: Memory) -> None:
        """Fill `memory` with these runs of a tensor's bytes.

        Raises:
            ChecksumError: the drive returned other bytes than were written.
        """
        unit = CHECKSUM_BYTES if self._sums(record) else PAGE
        with Pipeline(drives=len(self._volume.queues)) as pipeline:
            for window in windows(runs, record.nbytes, unit):
                staging = self._staged.take(pipeline)
                land = partial(self._land, name, record, window, staging, memory)
                batch = pipeline.start(
                    staging.nbytes, land=land, release=partial(Staged.give, staging)
                )
                self._fetch(record.extents, window, staging, batch)

    def write_in_place(
        self, name: str, record: Record, runs: Iterable[Runs], memory: Memory | Repeated
    ) -> Record:
        """Write `memory` to these runs of a tensor's bytes. Return its record with new checksums.

        Raises:
            ChecksumError: the drive returned other bytes than were written, beside those to change.
        """
        unit = CHECKSUM_BYTES if self._sums(record) else PAGE
        changed = windows(runs, record.nbytes, unit)
        return self._write(_Change(name, record, record.extents, memory), changed)

    def write_copy(
        self,
        name: str,
        record: Record,
        extents: Sequence[Extent],
        runs: Iterable[Runs],
        memory: Memory | Repeated,
    ) -> Record:
        """Write the tensor to `extents`, with `memory` at these runs. Return the copy's record."""
        whole = whole_windows(runs, record.nbytes)
        return self._write(_Change(name, record, extents, memory), whole)

    def _write(self, change: _Change, changed: Iterable[Window]) -> Record:
        with Pipeline(drives=len(self._volume.queues)) as pipeline:
            for window in changed:
                staging = self._staged.take(pipeline)
                release = partial(Staged.give, staging)
                if window.is_covered:  # there is nothing to read first
                    batch = pipeline.start(staging.nbytes, release=release)
                    self._change(change, window, staging, batch)
                else:
                    land = partial(self._change_what_was_read, change, window, staging)
                    batch = pipeline.start(staging.nbytes, land=land, release=release)
                    self._fetch(change.record.extents, window, staging, batch)
        record, sums = change.record, change.sums
        checksums = tuple(sums[block] for block in sorted(sums)) if self._sums(record) else None
        return Record(record.dtype, record.shape, change.extents, checksums)

    def _change_what_was_read(self, change: _Change, window: Window, staging: Memory) -> None:
        if self._sums(change.record):  # a new checksum would hide damage
            sums = checksums_of(staging.part(0, window.nbytes))
            check_sums(change.name, change.record, window.start, sums)
        # Waited for here: the staging memory is given back next.
        with Batch() as writes:
            self._change(change, window, staging, writes)

    def _change(self, change: _Change, window: Window, staging: Memory, batch: Batch) -> None:
        """Change the window, which is in staging memory, and begin to write it."""
        whole = staging.part(0, window.nbytes)
        gather_runs(staging, window.runs, _pieces(change.memory, window))
        if self._sums(change.record):
            change.sums.update(enumerate(checksums_of(whole), window.start // CHECKSUM_BYTES))
        store(self._volume, slices(change.extents, window.start, window.nbytes), whole, batch)

    def _land(
        self, name: str, record: Record, window: Window, staging: Memory, memory: Memory
    ) -> None:
        if self._sums(record):
            check_sums(name, record, window.start, checksums_of(staging.part(0, window.nbytes)))
        scatter_runs(staging, window.runs, _pieces(memory, window))

    def _fetch(
        self, extents: Sequence[Extent], window: Window, staging: Memory, batch: Batch
    ) -> None:
        part = staging.part(0, window.nbytes)
        fetch(self._volume, slices(extents, window.start, window.nbytes), part, batch)

    def _sums(self, record: Record) -> bool:
        return self._summing and record.checksums is not None


def _pieces(memory: Memory | Repeated, window: Window) -> list[Memory]:
    """Return the pieces of the caller's memory that belong to the window's runs."""
    if isinstance(memory, Repeated):
        return [memory.part(run.nbytes) for run in window.runs]
    return [
        memory.part(source, run.total_nbytes)
        for source, run in zip(window.sources, window.runs, strict=True)
    ]
