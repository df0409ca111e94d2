"""`TensorIO`: tensors to and from a volume's extents, with their checksums. Knows no names and no commits.

Large tensors travel from and to their own memory and are summed while the drives are busy; small ones share operations
through staging memory and are summed in the pass that copies them (decision 0004). Whatever fails, no memory is let go
while a drive may use it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from deepnvme.arrays import Description
from deepnvme.buffers import Memory, memory_of
from deepnvme.checksum import CHECKSUM_BYTES, checksums_of, copy_checksummed
from deepnvme.errors import ChecksumError, NVMeError
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
        self._making = threading.Lock()
        self._free: SimpleQueue[Memory] | None = None  # staging memory

    # --- writing -------------------------------------------------------------------------------------------------

    def write(self, tensors: Sequence[Description]) -> list[Record]:
        """Write all of them, or none and raise. Returns when the drives have them."""
        records: dict[int, Record] = {}
        try:
            small = [index for index, each in enumerate(tensors) if 0 < each.memory.nbytes <= _SMALL_BYTES]
            if len(small) > 1:
                self._write_together([(index, tensors[index]) for index in small], records)
            for index, each in enumerate(tensors):
                if index not in records:
                    records[index] = self._write_alone(each)
        except BaseException:
            self.release(records.values())
            raise
        return [records[index] for index in range(len(tensors))]

    def release(self, records: Iterable[Record]) -> None:
        """Give their space back."""
        for record in records:
            self._volume.release(record.extents)

    def _write_alone(self, tensor: Description) -> Record:
        extents = self._volume.allocate(tensor.memory.nbytes)
        try:
            with Batch() as batch:
                batch.futures += self._volume.pwrite(extents, tensor.memory)
                sums = checksums_of(tensor.memory) if self._summing else None
        except BaseException:
            self._volume.release(extents)
            raise
        return Record(tensor.code, tensor.shape, extents, sums)

    def _write_together(self, tensors: Sequence[tuple[int, Description]], records: dict[int, Record]) -> None:
        with self._runs() as runs:
            for group in _cut(tensors):
                extents = self._volume.allocate_run([each.memory.nbytes for _, each in group])
                try:
                    run = runs.begin()
                    at = 0
                    for (index, each), extent in zip(group, extents, strict=True):
                        sums = copy_checksummed(run.staging.part(at, extent.nbytes), each.memory)
                        records[index] = Record(each.code, each.shape, (extent,), sums if self._summing else None)
                        at += whole_pages(extent.nbytes)
                except BaseException:
                    self._volume.release(extents[sum(index in records for index, _ in group) :])
                    raise
                for start, extent in _joined(extents):
                    run.batch.futures += self._volume.pwrite((extent,), run.staging.part(start, extent.nbytes))

    # --- reading -------------------------------------------------------------------------------------------------

    def read(self, wanted: Mapping[str, tuple[Record, Memory]]) -> None:
        """Fill each memory with its tensor.

        Raises:
            ChecksumError: the drive returned other bytes than were written.
        """
        small = {
            name: (record, memory)
            for name, (record, memory) in wanted.items()
            if 0 < memory.nbytes <= _SMALL_BYTES and len(record.extents) == 1
        }
        if len(small) > 1:
            self._read_together(small)
        for name, (record, memory) in wanted.items():
            if len(small) <= 1 or name not in small:
                self._read_alone(name, record, memory)

    def _read_alone(self, name: str, record: Record, memory: Memory) -> None:
        pieces = [(start, length, Batch()) for start, length in _pieces(memory.nbytes)]
        try:
            for start, length, batch in pieces:
                self._fetch(record, start, memory.part(start, length), batch)
            for start, length, batch in pieces:
                batch.wait()
                if self._summing and record.checksums is not None:
                    self._check(name, record, start, checksums_of(memory.part(start, length)))
        finally:
            for *_, batch in pieces:
                batch.drain()

    def _read_together(self, small: Mapping[str, tuple[Record, Memory]]) -> None:
        with self._runs(self._land) as runs:
            for group, extent in _neighbours(small):
                run = runs.begin()
                run.tensors = [
                    (record.extents[0].offset - extent.offset, name, record, memory) for name, record, memory in group
                ]
                run.batch.futures += self._volume.pread((extent,), run.staging.part(0, extent.nbytes))

    def _land(self, run: _Run) -> None:
        for at, name, record, memory in run.tensors:
            sums = copy_checksummed(memory, run.staging.part(at, memory.nbytes))
            if self._summing:
                self._check(name, record, 0, sums)

    def _fetch(self, record: Record, start: int, memory: Memory, batch: Batch) -> None:
        batch.futures += self._volume.pread(slices(record.extents, start, memory.nbytes), memory)

    def _check(self, name: str, record: Record, start: int, sums: Sequence[int]) -> None:
        for at, nbytes in _differing(record, start, sums):
            raise ChecksumError(name, at, nbytes)

    def damage(self, name: str, record: Record) -> Iterator[Damage]:
        """Read a tensor and yield what of it is wrong."""
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

    # --- staging -------------------------------------------------------------------------------------------------

    @contextmanager
    def _runs(self, land: Callable[[_Run], None] = lambda _: None) -> Iterator[_Runs]:
        runs = _Runs(self._staging(), land)
        try:
            yield runs
            runs.finish()
        finally:
            runs.abandon()

    def _staging(self) -> SimpleQueue[Memory]:
        with self._making:
            if self._free is None:
                pool = Pool(_STAGED_RUNS * _RUN_BYTES)
                for queue in set(self._volume.queues):
                    queue.use_pool(pool)
                self._free = SimpleQueue()
                for _ in range(_STAGED_RUNS):
                    self._free.put(memory_of(pool.buffer(_RUN_BYTES), writable=True))
            return self._free


@dataclass
class _Run:
    """Small tensors under way through one piece of staging memory."""

    staging: Memory
    batch: Batch
    tensors: Sequence[tuple[int, str, Record, Memory]] = ()  # where in the staging memory, and whose


class _Runs:
    """The runs of one call, oldest first. Staging memory goes back when no drive uses it any more."""

    def __init__(self, free: SimpleQueue[Memory], land: Callable[[_Run], None]) -> None:
        self._free = free
        self._land = land
        self._pending: deque[_Run] = deque()

    def begin(self) -> _Run:
        """Start a run in free staging memory, ending our own oldest for it where there is none."""
        while True:
            try:
                staging = self._free.get(block=not self._pending)
                break
            except Empty:
                self._finish_oldest()
        run = _Run(staging, Batch())
        self._pending.append(run)
        return run

    def finish(self) -> None:
        """Wait for all and land them."""
        while self._pending:
            self._finish_oldest()

    def abandon(self) -> None:
        """Wait for those left by an error."""
        while self._pending:
            self._give_back(self._pending[0])

    def _finish_oldest(self) -> None:
        run = self._pending[0]
        run.batch.wait()
        self._land(run)
        self._give_back(run)

    def _give_back(self, run: _Run) -> None:
        run.batch.drain()
        self._free.put(run.staging)
        self._pending.remove(run)


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
    small: Mapping[str, tuple[Record, Memory]],
) -> Iterator[tuple[list[tuple[str, Record, Memory]], Extent]]:
    """Yield tensors that lie close together, and the stretch of whole pages that holds them."""
    in_order = sorted(
        ((name, record, memory) for name, (record, memory) in small.items()),
        key=lambda each: (each[1].extents[0].member, each[1].extents[0].offset),
    )
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
