"""`TensorIO`: tensors to and from a volume's extents, with their checksums. Knows no names and no commits.

Large tensors travel from and to their own memory and are summed while the drives are busy; small ones share operations
through staging memory and are summed in the pass that copies them (decision 0004). Whatever fails, no memory is let go
while a drive may use it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue

from deepnvme.arrays import Description
from deepnvme.buffers import Memory, memory_of
from deepnvme.checksum import CHECKSUM_BYTES, checksums_of, copy_checksummed
from deepnvme.errors import ChecksumError, ForkedError, NVMeError, VolumeFullError
from deepnvme.extents import Extent, slices, whole_pages
from deepnvme.manifest import Record
from deepnvme.pool import Pool
from deepnvme.queue import Batch
from deepnvme.volume import Volume

__all__ = ["Damage", "TensorIO"]

_SMALL_BYTES = 256 << 10  # up to here tensors of one call share operations
_RUN_BYTES = 8 << 20  # the most that one such operation moves
_GAP_BYTES = 128 << 10  # reading over so much is cheaper than another operation
_STAGED_RUNS = 4
_PIECE_BYTES = 16 << 20  # of a large tensor: one is summed while the drives are busy with the next
_PIPELINE_BYTES = 64 << 20  # from so many under way on, no more are begun


@dataclass(frozen=True)
class Damage:
    """Bytes of a tensor that are not those that were put, or that the drive does not return."""

    name: str
    offset: int
    nbytes: int
    reason: str


class TensorIO:
    """Writes and reads tensors on one volume. Any thread may call."""

    def __init__(self, volume: Volume, *, summing: bool) -> None:
        self._volume = volume
        self._summing = summing
        self._owner = os.getpid()
        self._making = threading.Lock()
        self._pool: Pool | None = None
        self._free: SimpleQueue[Memory] = SimpleQueue()  # staging memory

    # --- writing -------------------------------------------------------------------------------------------------

    def write(self, tensors: Sequence[Description]) -> list[Record]:
        """Write all of them, or none and raise. Returns when the drives have them."""
        self._refuse_if_forked()
        records: dict[int, Record] = {}
        try:
            with _Pipeline() as pipeline:
                for group in _cut([each for each in enumerate(tensors) if 0 < each[1].memory.nbytes <= _SMALL_BYTES]):
                    self._write_together(group, records, pipeline)
                for index, tensor in enumerate(tensors):
                    if index not in records:
                        self._write_alone(index, tensor, records, pipeline)
        except BaseException:
            self.release(records.values())
            raise
        return [records[index] for index in range(len(tensors))]

    def release(self, records: Iterable[Record]) -> None:
        """Give their space back."""
        for record in records:
            self._volume.release(record.extents)

    def close(self) -> None:
        """Let go of the staging memory, which queues that go on would keep. Whoever reads or writes has ended."""
        if self._pool is not None:
            with suppress(ForkedError):  # the parent's queues are none of ours
                for queue in set(self._volume.queues):
                    queue.forget_pool(self._pool)

    def _write_alone(self, index: int, tensor: Description, records: dict[int, Record], pipeline: _Pipeline) -> None:
        extents = self._volume.allocate(tensor.memory.nbytes)
        records[index] = Record(tensor.code, tensor.shape, extents, None)  # from here on a failure gives the space back
        batch = pipeline.start(tensor.memory.nbytes)
        batch.futures += self._volume.pwrite(extents, tensor.memory)
        if self._summing:  # while the drives are busy
            records[index] = replace(records[index], checksums=checksums_of(tensor.memory))

    def _write_together(
        self, group: Sequence[tuple[int, Description]], records: dict[int, Record], pipeline: _Pipeline
    ) -> None:
        try:
            extents = self._volume.allocate_run([tensor.memory.nbytes for _, tensor in group])
        except VolumeFullError:
            return  # there may be room in smaller pieces, for each alone
        for (index, tensor), extent in zip(group, extents, strict=True):
            records[index] = Record(tensor.code, tensor.shape, (extent,), None)
        staging = self._staging(pipeline)
        batch = pipeline.start(staging.nbytes, release=partial(self._free.put, staging))
        at = 0
        for (index, tensor), extent in zip(group, extents, strict=True):
            sums = copy_checksummed(staging.part(at, extent.nbytes), tensor.memory)
            if self._summing:
                records[index] = Record(tensor.code, tensor.shape, (extent,), sums)
            at += whole_pages(extent.nbytes)
        for start, stretch in _joined(extents):
            batch.futures += self._volume.pwrite((stretch,), staging.part(start, stretch.nbytes))

    # --- reading -------------------------------------------------------------------------------------------------

    def read(self, wanted: Iterable[tuple[str, Record, Memory]]) -> None:
        """Fill each memory with its tensor. `wanted` is asked for the next while the drives are busy with those before.

        Raises:
            ChecksumError: the drive returned other bytes than were written.
        """
        self._refuse_if_forked()
        small: list[tuple[str, Record, Memory]] = []
        with _Pipeline() as pipeline:
            for name, record, memory in wanted:
                if 0 < memory.nbytes <= _SMALL_BYTES and len(record.extents) == 1:
                    small.append((name, record, memory))
                else:
                    self._read_alone(name, record, memory, pipeline)
            for group, stretch in _neighbours(small):
                self._read_together(group, stretch, pipeline)

    def _read_alone(self, name: str, record: Record, memory: Memory, pipeline: _Pipeline) -> None:
        for start, length in _pieces(memory.nbytes):
            piece = memory.part(start, length)
            batch = pipeline.start(length, land=partial(self._check_piece, name, record, start, piece))
            self._fetch(record, start, piece, batch)

    def _check_piece(self, name: str, record: Record, start: int, piece: Memory) -> None:
        if self._summing and record.checksums is not None:
            _check(name, record, start, checksums_of(piece))

    def _read_together(self, group: Sequence[tuple[str, Record, Memory]], stretch: Extent, pipeline: _Pipeline) -> None:
        staging = self._staging(pipeline)
        batch = pipeline.start(
            staging.nbytes,
            land=partial(self._land, group, stretch.offset, staging),
            release=partial(self._free.put, staging),
        )
        batch.futures += self._volume.pread((stretch,), staging.part(0, stretch.nbytes))

    def _land(self, group: Sequence[tuple[str, Record, Memory]], offset: int, staging: Memory) -> None:
        for name, record, memory in group:
            sums = copy_checksummed(memory, staging.part(record.extents[0].offset - offset, memory.nbytes))
            if self._summing:
                _check(name, record, 0, sums)

    def _fetch(self, record: Record, start: int, memory: Memory, batch: Batch) -> None:
        batch.futures += self._volume.pread(slices(record.extents, start, memory.nbytes), memory)

    def damage(self, name: str, record: Record) -> Iterator[Damage]:
        """Read a tensor and yield what of it is wrong."""
        self._refuse_if_forked()
        buffer = memory_of(bytearray(min(_PIECE_BYTES, record.nbytes)), writable=True)
        for start, length in _pieces(record.nbytes):
            batch = Batch()
            try:
                self._fetch(record, start, buffer.part(0, length), batch)
                batch.wait()
            except NVMeError as error:
                yield Damage(name, start, length, str(error))
                continue
            finally:
                batch.drain()
            for at, nbytes in _differing(record, start, checksums_of(buffer.part(0, length))):
                yield Damage(name, at, nbytes, "these are not the bytes that were put")

    def _refuse_if_forked(self) -> None:
        if os.getpid() != self._owner:  # a child does not even have the staging memory
            raise ForkedError(f"this store belongs to process {self._owner}; a forked child opens one of its own")

    def _staging(self, pipeline: _Pipeline) -> Memory:
        """Return free staging memory; ends our own oldest steps for it before it waits for those of other calls."""
        with self._making:
            if self._pool is None:
                pool = Pool(_STAGED_RUNS * _RUN_BYTES)
                for queue in set(self._volume.queues):
                    queue.use_pool(pool)
                for _ in range(_STAGED_RUNS):
                    self._free.put(memory_of(pool.buffer(_RUN_BYTES), writable=True))
                self._pool = pool
        while True:
            try:
                return self._free.get(block=pipeline.empty)
            except Empty:
                pipeline.finish_oldest()


def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class _Step:
    """Operations under way, what to do when they have ended well, and however they ended."""

    nbytes: int
    batch: Batch
    land: Callable[[], None]
    release: Callable[[], None]


class _Pipeline:
    """The operations of one call, oldest first, a bounded number of bytes at once. At its end none is under way."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque()
        self._nbytes = 0

    @property
    def empty(self) -> bool:
        """Whether nothing is under way."""
        return not self._steps

    def start(
        self, nbytes: int, *, land: Callable[[], None] = _nothing, release: Callable[[], None] = _nothing
    ) -> Batch:
        """Return the batch for operations on so many bytes, once there is room for them beside those under way."""
        step = _Step(nbytes, Batch(), land, release)
        try:
            while self._nbytes >= _PIPELINE_BYTES:
                self.finish_oldest()
        except BaseException:
            release()
            raise
        self._steps.append(step)
        self._nbytes += nbytes
        return step.batch

    def finish_oldest(self) -> None:
        """Wait for the oldest step and land it."""
        step = self._steps[0]
        step.batch.wait()
        step.land()
        self._drop()

    def _drop(self) -> None:
        step = self._steps[0]
        step.batch.drain()  # first: interrupted, it is called again
        self._steps.popleft()
        self._nbytes -= step.nbytes
        step.release()

    def __enter__(self) -> _Pipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        interruption = None
        try:
            while self._steps and kind is None:
                self.finish_oldest()
        finally:
            while self._steps:  # whatever happens: drives may be at work on this memory
                try:
                    self._drop()
                except KeyboardInterrupt as again:
                    interruption = again
        if interruption is not None:
            raise interruption


def _cut(tensors: Sequence[tuple[int, Description]]) -> Iterator[list[tuple[int, Description]]]:
    """Yield them in runs that fit into staging memory."""
    run: list[tuple[int, Description]] = []
    used = 0
    for each in tensors:
        space = whole_pages(each[1].memory.nbytes)
        if run and used + space > _RUN_BYTES:
            yield run
            run, used = [], 0
        run.append(each)
        used += space
    if run:
        yield run


def _joined(extents: Sequence[Extent]) -> Iterator[tuple[int, Extent]]:
    """Yield where in the staging memory each unbroken stretch of space starts, and the stretch, in whole pages."""
    start = at = 0
    first = extents[0]
    end = first.offset
    for extent in extents:
        if (extent.member, extent.offset) != (first.member, end):
            yield start, Extent(first.member, first.offset, end - first.offset)
            start, first = at, extent
        end = extent.offset + whole_pages(extent.nbytes)
        at += whole_pages(extent.nbytes)
    yield start, Extent(first.member, first.offset, end - first.offset)


def _neighbours(
    small: Iterable[tuple[str, Record, Memory]],
) -> Iterator[tuple[list[tuple[str, Record, Memory]], Extent]]:
    """Yield tensors that lie close together, and the stretch of whole pages that holds them."""
    in_order = sorted(small, key=lambda each: (each[1].extents[0].member, each[1].extents[0].offset))
    group: list[tuple[str, Record, Memory]] = []
    member = start = end = 0
    for each in in_order:
        extent = each[1].extents[0]
        until = extent.offset + whole_pages(extent.nbytes)
        close = extent.member == member and extent.offset - end <= _GAP_BYTES and until - start <= _RUN_BYTES
        if group and not close:
            yield group, Extent(member, start, end - start)
            group = []
        if not group:
            member, start = extent.member, extent.offset
        group.append(each)
        end = until
    if group:
        yield group, Extent(member, start, end - start)


def _pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield start and length of the pieces in which a tensor is read."""
    for start in range(0, nbytes, _PIECE_BYTES):
        yield start, min(_PIECE_BYTES, nbytes - start)


def _differing(record: Record, start: int, sums: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield offset and length of what differs, of the bytes from `start` that have these checksums."""
    if record.checksums is None:
        return
    for index, got in enumerate(sums, start // CHECKSUM_BYTES):
        if got != record.checksums[index]:
            at = index * CHECKSUM_BYTES
            yield at, min(CHECKSUM_BYTES, record.nbytes - at)


def _check(name: str, record: Record, start: int, sums: Sequence[int]) -> None:
    for at, nbytes in _differing(record, start, sums):
        raise ChecksumError(name, at, nbytes)
