"""`TensorIO`: tensors to and from a volume's extents, with their checksums.

Knows no commits; names are only for errors.

Large tensors travel from and to their own memory, and their checksums are computed while the drives
are busy. Small ones share operations through staging memory, and their checksums are computed in
the pass that copies them (decision 0004). Whatever fails, no memory is let go while a drive may use
it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain

from deepnvme.errors import ChecksumError, ClosedError, ForkedError, NVMeError, VolumeFullError
from deepnvme.memory.arrays import Scattered, Storable
from deepnvme.memory.buffers import Memory, memory_of
from deepnvme.memory.checksum import CHECKSUM_BYTES, checksums_of
from deepnvme.memory.copying import gather, scatter
from deepnvme.queue.pipeline import (
    MOST_BYTES,
    RUN_BYTES,
    Piece,
    Pipeline,
    Staged,
    Stretch,
    once_there_is_room,
    together,
)
from deepnvme.queue.queue import Batch
from deepnvme.sizes import SMALL_BYTES, whole_pages
from deepnvme.store.manifest import Record
from deepnvme.volume.extents import Extent, slices
from deepnvme.volume.volume import Volume

__all__ = ["Damage", "TensorIO", "check_sums", "fetch", "store"]

# Of a large tensor: one piece is summed while the drives are busy with others.
_PIECE_BYTES = 8 << 20
# Large pieces on their way to new memory travel through staging memory of so many runs for each
# drive, where the volume has few enough drives that one thread keeps up with copying.
_STAGED_BYTES = 4 << 20
_LARGE_RUNS = 4
_STAGED_DRIVES = 2
# Pieces whose write has begun before the first of them is summed.
_UNSUMMED = MOST_BYTES // _PIECE_BYTES - 1


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
        queues = set(volume.queues)
        self.staged = Staged(queues)
        # For large ones alone, so that neither waits for the other.
        self._staged_large = Staged(
            queues, runs=_LARGE_RUNS * min(_STAGED_DRIVES, len(volume.queues))
        )

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the one that made it."""
        return os.getpid() != self._owner

    def refuse_if_forked(self) -> None:
        """Refuse a forked child.

        Raises:
            ForkedError: this process is one.
        """
        if self.is_forked:
            raise ForkedError(
                f"this store belongs to process {self._owner}; a forked child opens one of its own"
            )

    # --- writing ----------------------------------------------------------------------------------

    def write(self, tensors: Iterable[Storable]) -> list[Record]:
        """Write all of them, or none and raise. Returns when the drives have them.

        Takes a tensor from `tensors` when those before it are on their way.
        """
        self.refuse_if_forked()
        records: dict[int, Record] = {}
        taken: list[Extent] = []
        try:
            with Pipeline(drives=len(self._volume.queues)) as pipeline:
                for group in _cut(enumerate(tensors)):
                    if 0 < group[0][1].nbytes <= SMALL_BYTES:
                        records.update(self._write_together(group, taken, pipeline))
                    for index, tensor in group:
                        # Large and empty ones, and small ones that found no unbroken space.
                        if index not in records:
                            records[index] = self._write_alone(tensor, taken, pipeline)
        except BaseException:
            # The pipeline has ended: no drive writes to this space any more.
            self._volume.release(taken)
            raise
        return [records[index] for index in range(len(records))]

    def release(self, record: Record) -> None:
        """Give its space back."""
        self._volume.release(record.extents)

    def close(self) -> None:
        """Let go of the staging memory, which the caller's own queues would keep.

        The caller has waited for all reads and writes.
        """
        self.staged.close()
        self._staged_large.close()

    def _write_alone(self, tensor: Storable, taken: list[Extent], pipeline: Pipeline) -> Record:
        extents = self._volume.allocate(tensor.nbytes)
        taken += extents  # from here on a failure gives the space back
        pipeline.wait_for_room()
        memory = tensor.gathered().memory  # late: a copy takes memory only while it is written
        if self._summing and not isinstance(tensor, Scattered):
            return Record(
                tensor.code, tensor.shape, extents, self._store_summed(extents, memory, pipeline)
            )
        # A copy is one step of the pipeline: all its memory is held until its last byte is written.
        store(self._volume, extents, memory, pipeline.start(memory.nbytes))
        return Record(
            tensor.code, tensor.shape, extents, checksums_of(memory) if self._summing else None
        )

    def _store_summed(
        self, extents: Sequence[Extent], memory: Memory, pipeline: Pipeline
    ) -> tuple[int, ...]:
        """Write in pieces, and compute the checksums of each while it is on its way."""
        sums: dict[int, tuple[int, ...]] = {}
        unsummed: deque[tuple[int, Memory]] = deque()

        def sum_oldest() -> None:
            start, piece = unsummed.popleft()
            sums[start] = checksums_of(piece)

        for start, length in _in_turns(extents, _PIECE_BYTES):
            piece = memory.part(start, length)
            store(self._volume, slices(extents, start, length), piece, pipeline.start(length))
            unsummed.append((start, piece))
            if len(unsummed) > _UNSUMMED:
                sum_oldest()
        while unsummed:
            sum_oldest()
        return tuple(chain.from_iterable(sums[start] for start in sorted(sums)))

    def _write_together(
        self, group: Sequence[tuple[int, Storable]], taken: list[Extent], pipeline: Pipeline
    ) -> dict[int, Record]:
        sizes = [tensor.nbytes for _, tensor in group]
        try:
            extents = self._volume.allocate_run(sizes)
        except VolumeFullError:
            return {}  # there may be room in smaller pieces, for each alone
        untaken = len(taken)
        taken += extents
        # A tensor begins in a page of its own, as its extent does.
        places = [0, *accumulate(extent.end - extent.offset for extent in extents[:-1])]
        stretches = list(_joined(extents, places))
        taken[untaken:] = [stretch for _, stretch in stretches]  # the same, in fewer objects
        staging = self.staged.take(pipeline)
        batch = pipeline.start(staging.nbytes, release=partial(self.staged.give, staging))
        # Referred to until gather() has copied: addresses keep no memory alive.
        described = [tensor.gathered() for _, tensor in group]
        sums = gather(
            staging, places, sizes, [tensor.memory for tensor in described], summing=self._summing
        )
        for start, stretch in stretches:
            store(self._volume, (stretch,), staging.part(start, stretch.nbytes), batch)
        checksums = [(crc,) for crc in sums] if self._summing else [None] * len(group)
        return {
            index: Record(tensor.code, tensor.shape, (extent,), checksum)
            for (index, tensor), extent, checksum in zip(group, extents, checksums, strict=True)
        }

    # --- reading ----------------------------------------------------------------------------------

    def read(
        self,
        wanted: Mapping[str, Record],
        target: Callable[[str], Memory],
        new: Container[str] = (),
    ) -> None:
        """Fill the memory that `target` returns for a name; it is called while the drives are busy.

        For names in `new` that memory is new, and its pages lie scattered, for which drives take up
        to twice as long: large pieces travel there through staging memory, where other calls leave
        some.

        Raises:
            ChecksumError: the drive returned other bytes than were written.
        """
        self.refuse_if_forked()
        small: list[str] = []
        with Pipeline(drives=len(self._volume.queues)) as pipeline:
            for name, record in wanted.items():
                if len(record.places) == 3 and record.places[2] <= SMALL_BYTES:  # one extent
                    small.append(name)
                elif name in new and len(self._volume.queues) <= _STAGED_DRIVES:
                    self._read_staged(name, record, target(name), pipeline)
                else:
                    self._read_alone(name, record, target(name), pipeline)
            # In the order of the drives: one operation reads neighbours.
            small.sort(key=lambda name: wanted[name].places)
            for stretch in together(_piece_of(name, wanted[name]) for name in small):
                self._read_together(stretch, wanted, target, pipeline)

    def _read_alone(self, name: str, record: Record, memory: Memory, pipeline: Pipeline) -> None:
        extents = record.extents
        for start, length in _in_turns(extents, _PIECE_BYTES):
            piece = memory.part(start, length)
            batch = pipeline.start(
                length, land=partial(self._check_piece, name, record, start, piece)
            )
            fetch(self._volume, slices(extents, start, length), piece, batch)

    def _read_staged(self, name: str, record: Record, memory: Memory, pipeline: Pipeline) -> None:
        extents = record.extents
        for start, length in _in_turns(extents, min(_PIECE_BYTES, self._staged_large.run_bytes)):
            piece = memory.part(start, length)
            staging = (
                self._staged_large.take_unless_others_have_it(pipeline)
                if length >= _STAGED_BYTES
                else None
            )
            if staging is None:
                batch = pipeline.start(
                    length, land=partial(self._check_piece, name, record, start, piece)
                )
                fetch(self._volume, slices(extents, start, length), piece, batch)
                continue
            batch = pipeline.start(
                staging.nbytes,
                land=partial(self._land_piece, name, record, start, staging, piece),
                release=partial(Staged.give, staging),
            )
            fetch(self._volume, slices(extents, start, length), staging.part(0, length), batch)

    def _land_piece(
        self, name: str, record: Record, start: int, staging: Memory, piece: Memory
    ) -> None:
        places = range(0, piece.nbytes, CHECKSUM_BYTES)
        sizes = [min(CHECKSUM_BYTES, piece.nbytes - place) for place in places]
        parts = [piece.part(place, nbytes) for place, nbytes in zip(places, sizes, strict=True)]
        summing = self._summing and record.checksums is not None
        check_sums(name, record, start, scatter(staging, places, sizes, parts, summing=summing))

    def _check_piece(self, name: str, record: Record, start: int, piece: Memory) -> None:
        if self._summing and record.checksums is not None:
            check_sums(name, record, start, checksums_of(piece))

    def _read_together(
        self,
        stretch: Stretch[str],
        wanted: Mapping[str, Record],
        target: Callable[[str], Memory],
        pipeline: Pipeline,
    ) -> None:
        staging = self.staged.take(pipeline)
        memories: list[Memory] = []
        batch = pipeline.start(
            staging.nbytes,
            land=partial(self._land, stretch, wanted, staging, memories),
            release=partial(self.staged.give, staging),
        )
        whole = Extent(stretch.file, stretch.start, stretch.nbytes)
        fetch(self._volume, (whole,), staging.part(0, whole.nbytes), batch)
        # Only now, while the drive reads: making memory takes time.
        memories += [target(piece.what) for piece in stretch.pieces]

    def _land(
        self,
        stretch: Stretch[str],
        wanted: Mapping[str, Record],
        staging: Memory,
        memories: Sequence[Memory],
    ) -> None:
        places = [piece.offset - stretch.start for piece in stretch.pieces]
        sizes = [piece.nbytes for piece in stretch.pieces]
        sums = scatter(staging, places, sizes, memories, summing=self._summing)
        for piece, got in zip(stretch.pieces, sums, strict=False):  # no sums unless summing
            check_sums(piece.what, wanted[piece.what], 0, (got,))

    def are_sound(self, wanted: Mapping[str, Record]) -> bool:
        """Read all of these together; False where one is damaged, or checksums are not compared."""
        if not self._summing:
            return False
        try:
            self.read(wanted, lambda name: memory_of(bytearray(wanted[name].nbytes), writable=True))
        except ClosedError:
            raise  # the store was closed meanwhile, which is no damage
        except NVMeError:
            return False
        return True

    def damage(self, name: str, record: Record) -> Iterator[Damage]:
        """Read a tensor and yield its damaged pieces."""
        self.refuse_if_forked()
        # Two: one is summed while a drive fills the other.
        buffers = [
            memory_of(bytearray(min(_PIECE_BYTES, record.nbytes)), writable=True) for _ in range(2)
        ]
        under_way: deque[tuple[int, Memory, Batch]] = deque()
        try:
            for index, (start, length) in enumerate(_pieces(record.nbytes, _PIECE_BYTES)):
                piece = buffers[index % 2].part(0, length)
                under_way.append((start, piece, Batch()))
                fetch(self._volume, slices(record.extents, start, length), piece, under_way[-1][2])
                if len(under_way) > 1:
                    yield from self._damage_of(name, record, *under_way.popleft())
            while under_way:
                yield from self._damage_of(name, record, *under_way.popleft())
        finally:  # the caller may stop early, while a drive still fills a buffer
            for _, _, batch in under_way:
                batch.drain()

    @staticmethod
    def _damage_of(
        name: str, record: Record, start: int, piece: Memory, batch: Batch
    ) -> Iterator[Damage]:
        try:
            batch.wait()
        except ClosedError:
            raise
        except NVMeError as error:
            yield Damage(name, start, piece.nbytes, str(error))
            return
        finally:
            # Also after an error: the next piece but one uses the same buffer.
            batch.drain()
        for at, nbytes in _differing(record, start, checksums_of(piece)):
            yield Damage(name, at, nbytes, "these are not the bytes that were put")


# These two submit one extent at a time: a queue may have room for no more.


def fetch(volume: Volume, extents: Iterable[Extent], memory: Memory, batch: Batch) -> None:
    """Begin to fill memory from the extents, one after the other."""
    for extent, part in _parts(extents, memory):
        batch.futures += once_there_is_room(partial(volume.pread, (extent,), part))


def store(volume: Volume, extents: Iterable[Extent], memory: Memory, batch: Batch) -> None:
    """Begin to write memory to the extents, one after the other."""
    for extent, part in _parts(extents, memory):
        batch.futures += once_there_is_room(partial(volume.pwrite, (extent,), part))


def _parts(extents: Iterable[Extent], memory: Memory) -> Iterator[tuple[Extent, Memory]]:
    """Yield each extent with its part of the memory."""
    start = 0
    for extent in extents:
        yield extent, memory.part(start, extent.nbytes)
        start += extent.nbytes


_Numbered = tuple[int, Storable]


def _cut(tensors: Iterable[_Numbered]) -> Iterator[list[_Numbered]]:
    """Yield small tensors in runs that fit into staging memory, and the others one by one."""
    run: list[_Numbered] = []
    room = RUN_BYTES
    for tensor in tensors:
        nbytes = tensor[1].nbytes
        if not 0 < nbytes <= SMALL_BYTES:
            yield [tensor]
            continue
        room -= whole_pages(nbytes)
        if room < 0:
            yield run
            run, room = [], RUN_BYTES - whole_pages(nbytes)
        run.append(tensor)
    if run:
        yield run


def _joined(extents: Sequence[Extent], places: Sequence[int]) -> Iterator[tuple[int, Extent]]:
    """Yield the unbroken stretches of space, each after its start in the staging memory."""
    first, start = extents[0], places[0]
    end = first.offset
    for extent, place in zip(extents, places, strict=True):
        if extent.offset != end or extent.member != first.member:
            yield start, Extent(first.member, first.offset, end - first.offset)
            first, start = extent, place
        end = extent.end
    yield start, Extent(first.member, first.offset, end - first.offset)


def _piece_of(name: str, record: Record) -> Piece[str]:
    """Return the one extent of a small tensor."""
    member, offset, nbytes = record.places
    return Piece(member, offset, nbytes, name)


def _pieces(nbytes: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield start and length of the pieces in which a tensor travels."""
    for start in range(0, nbytes, most):
        yield start, min(most, nbytes - start)


def _in_turns(extents: Sequence[Extent], most: int) -> list[tuple[int, int]]:
    """Return the same pieces in an order that keeps all drives busy until the end."""
    totals: dict[int, int] = {}
    for extent in extents:
        totals[extent.member] = totals.get(extent.member, 0) + extent.nbytes
    passed = dict.fromkeys(totals, 0)
    # By the start of a piece: the share of its drive's bytes of this tensor that lies before it.
    share: dict[int, float] = {}
    begin = 0
    for extent in extents:
        # A piece counts to the extent in which it begins.
        first = -(-begin // most) * most
        for start in range(first, begin + extent.nbytes, most):
            share[start] = (passed[extent.member] + start - begin) / totals[extent.member]
        passed[extent.member] += extent.nbytes
        begin += extent.nbytes
    return sorted(_pieces(begin, most), key=lambda piece: share[piece[0]])


def _differing(record: Record, start: int, sums: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield offset and length of the bytes from `start` that differ from these checksums."""
    if record.checksums is None:
        return
    # Pieces begin where the bytes of a checksum do.
    for index, got in enumerate(sums, start // CHECKSUM_BYTES):
        if got != record.checksums[index]:
            at = index * CHECKSUM_BYTES
            yield at, min(CHECKSUM_BYTES, record.nbytes - at)


def check_sums(name: str, record: Record, start: int, sums: Sequence[int]) -> None:
    """Compare the checksums of the bytes from `start` on with those that were put.

    Raises:
        ChecksumError: they differ.
    """
    for at, nbytes in _differing(record, start, sums):
        raise ChecksumError(name, at, nbytes)
