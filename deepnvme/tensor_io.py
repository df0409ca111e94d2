"""`TensorIO`: tensors to and from a volume's extents, with their checksums. Knows no names and no commits.

Large tensors travel from and to their own memory and are summed while the drives are busy; small ones share operations
through staging memory and are summed in the pass that copies them (decision 0004). Whatever fails, no memory is let go
while a drive may use it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from deepnvme.arrays import Storable
from deepnvme.buffers import Memory, memory_of
from deepnvme.checksum import CHECKSUM_BYTES, checksums_of, copy_checksummed
from deepnvme.errors import ChecksumError, ClosedError, ForkedError, NVMeError, VolumeFullError
from deepnvme.extents import Extent, slices, whole_pages
from deepnvme.manifest import Record
from deepnvme.pipeline import RUN_BYTES, SMALL_BYTES, Piece, Pipeline, Staged, Stretch, once_there_is_room, together
from deepnvme.queue import Batch
from deepnvme.volume import Volume

__all__ = ["Damage", "TensorIO"]

_PIECE_BYTES = 16 << 20  # of a large tensor: one is summed while the drives are busy with the next


@dataclass(frozen=True)
class Damage:
    """Bytes of a tensor that are not those that were put, or that the drive does not return."""

    name: str
    offset: int
    nbytes: int
    reason: str


_Wanted = tuple[str, Record]


class TensorIO:
    """Writes and reads tensors on one volume. Any thread may call."""

    def __init__(self, volume: Volume, *, summing: bool) -> None:
        self._volume = volume
        self._summing = summing
        self._owner = os.getpid()
        self._staged = Staged(set(volume.queues))

    @property
    def is_forked(self) -> bool:
        """Whether this process is a child of the one that made it: it does not even have the staging memory."""
        return os.getpid() != self._owner

    def refuse_if_forked(self) -> None:
        """Refuse a forked child.

        Raises:
            ForkedError: this process is one.
        """
        if self.is_forked:
            raise ForkedError(f"this store belongs to process {self._owner}; a forked child opens one of its own")

    # --- writing -------------------------------------------------------------------------------------------------

    def write(self, tensors: Sequence[Storable]) -> list[Record]:
        """Write all of them, or none and raise. Returns when the drives have them."""
        self.refuse_if_forked()
        records: dict[int, Record] = {}
        taken: list[Extent] = []
        try:
            with Pipeline() as pipeline:
                for group in _cut([each for each in enumerate(tensors) if 0 < each[1].nbytes <= SMALL_BYTES]):
                    records.update(self._write_together(group, taken, pipeline))
                for index, tensor in enumerate(tensors):
                    if index not in records:
                        records[index] = self._write_alone(tensor, taken, pipeline)
        except BaseException:
            self._volume.release(taken)
            raise
        return [records[index] for index in range(len(tensors))]

    def release(self, record: Record) -> None:
        """Give its space back."""
        self._volume.release(record.extents)

    def close(self) -> None:
        """Let go of the staging memory, which queues that go on would keep. Whoever reads or writes has ended."""
        self._staged.close()

    def _write_alone(self, tensor: Storable, taken: list[Extent], pipeline: Pipeline) -> Record:
        extents = self._volume.allocate(tensor.nbytes)
        taken += extents  # from here on a failure gives the space back
        batch = pipeline.start(tensor.nbytes)
        memory = tensor.gathered().memory  # now: a copy takes memory no longer than its writing
        self._store(extents, memory, batch)
        sums = checksums_of(memory) if self._summing else None  # while the drives are busy
        return Record(tensor.code, tensor.shape, extents, sums)

    def _write_together(
        self, group: Sequence[tuple[int, Storable]], taken: list[Extent], pipeline: Pipeline
    ) -> dict[int, Record]:
        try:
            extents = self._volume.allocate_run([tensor.nbytes for _, tensor in group])
        except VolumeFullError:
            return {}  # there may be room in smaller pieces, for each alone
        taken += extents
        staging = self._staged.take(pipeline)
        batch = pipeline.start(staging.nbytes, release=partial(self._staged.give, staging))
        records = {}
        at = 0
        for (index, tensor), extent in zip(group, extents, strict=True):
            sums = self._copy(staging.part(at, extent.nbytes), tensor.gathered().memory)
            records[index] = Record(tensor.code, tensor.shape, (extent,), sums)
            at += extent.end - extent.offset
        for start, stretch in _joined(extents):
            self._store((stretch,), staging.part(start, stretch.nbytes), batch)
        return records

    def _copy(self, destination: Memory, source: Memory) -> tuple[int, ...] | None:
        """Copy a small tensor; return its checksums where they are wanted."""
        if self._summing:
            return copy_checksummed(destination, source)
        ctypes.memmove(destination.address, source.address, source.nbytes)
        return None

    # --- reading -------------------------------------------------------------------------------------------------

    def read(self, wanted: Mapping[str, Record], target: Callable[[str], Memory]) -> None:
        """Fill the memory that `target` returns for each name, which it is asked for while the drives are busy.

        Raises:
            ChecksumError: the drive returned other bytes than were written.
        """
        self.refuse_if_forked()
        small: list[Piece[_Wanted]] = []
        with Pipeline() as pipeline:
            for name, record in wanted.items():
                if len(record.extents) == 1 and record.extents[0].nbytes <= SMALL_BYTES:
                    [extent] = record.extents
                    small.append(Piece(extent.member, extent.offset, extent.nbytes, (name, record)))
                else:
                    self._read_alone(name, record, target(name), pipeline)
            for stretch in together(small):
                self._read_together(stretch, target, pipeline)

    def _read_alone(self, name: str, record: Record, memory: Memory, pipeline: Pipeline) -> None:
        for start, length in _pieces(memory.nbytes):
            piece = memory.part(start, length)
            batch = pipeline.start(length, land=partial(self._check_piece, name, record, start, piece))
            self._fetch(slices(record.extents, start, length), piece, batch)

    def _check_piece(self, name: str, record: Record, start: int, piece: Memory) -> None:
        if self._summing and record.checksums is not None:
            _check(name, record, start, checksums_of(piece))

    def _read_together(self, stretch: Stretch[_Wanted], target: Callable[[str], Memory], pipeline: Pipeline) -> None:
        staging = self._staged.take(pipeline)
        memories: list[Memory] = []
        batch = pipeline.start(
            staging.nbytes,
            land=partial(self._land, stretch, staging, memories),
            release=partial(self._staged.give, staging),
        )
        whole = Extent(stretch.file, stretch.start, stretch.nbytes)
        self._fetch((whole,), staging.part(0, whole.nbytes), batch)
        memories += [target(piece.what[0]) for piece in stretch.pieces]

    def _land(self, stretch: Stretch[_Wanted], staging: Memory, memories: Sequence[Memory]) -> None:
        for piece, memory in zip(stretch.pieces, memories, strict=True):
            sums = self._copy(memory, staging.part(piece.offset - stretch.start, piece.nbytes))
            if sums is not None:
                _check(*piece.what, 0, sums)

    def damage(self, name: str, record: Record) -> Iterator[Damage]:
        """Read a tensor and yield what of it is wrong."""
        self.refuse_if_forked()
        buffer = memory_of(bytearray(min(_PIECE_BYTES, record.nbytes)), writable=True)
        for start, length in _pieces(record.nbytes):
            batch = Batch()
            try:
                self._fetch(slices(record.extents, start, length), buffer.part(0, length), batch)
                batch.wait()
            except ClosedError:
                raise  # the store was closed meanwhile: that is no damage
            except NVMeError as error:
                yield Damage(name, start, length, str(error))
                continue
            finally:
                batch.drain()
            for at, nbytes in _differing(record, start, checksums_of(buffer.part(0, length))):
                yield Damage(name, at, nbytes, "these are not the bytes that were put")

    # --- one extent at a time: a queue may have room for no more ---------------------------------------------------

    def _fetch(self, extents: Iterable[Extent], memory: Memory, batch: Batch) -> None:
        for extent, part in _parts(extents, memory):
            batch.futures += once_there_is_room(partial(self._volume.pread, (extent,), part))

    def _store(self, extents: Iterable[Extent], memory: Memory, batch: Batch) -> None:
        for extent, part in _parts(extents, memory):
            batch.futures += once_there_is_room(partial(self._volume.pwrite, (extent,), part))


def _parts(extents: Iterable[Extent], memory: Memory) -> Iterator[tuple[Extent, Memory]]:
    """Yield each extent with its part of the memory."""
    start = 0
    for extent in extents:
        yield extent, memory.part(start, extent.nbytes)
        start += extent.nbytes


def _cut(tensors: Sequence[tuple[int, Storable]]) -> Iterator[list[tuple[int, Storable]]]:
    """Yield them in runs that fit into staging memory."""
    run: list[tuple[int, Storable]] = []
    used = 0
    for each in tensors:
        space = whole_pages(each[1].nbytes)
        if run and used + space > RUN_BYTES:
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
