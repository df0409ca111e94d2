"""`CheckpointReader`: reads slices of streams and checks every byte before the caller gets it.

Opens nothing that the manifest does not name, and believes no header: the slices of the files have
to cover each stream exactly once. Memory: a few MiB for the blocks that a slice begins and ends in.
One thread at a time.
"""

from __future__ import annotations

import ctypes
import os
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from deepnvme import IOFuture, IOQueue, Pool
from deepnvme.closing import Closing
from deepnvme.errors import NVMeError
from deepnvme.formats.safetensors import (
    SafetensorsEntry,
    SafetensorsError,
    SafetensorsHeader,
    header_of,
    safetensors_header,
)
from deepnvme.memory.arrays import ITEMSIZES
from deepnvme.memory.buffers import Memory, memory_of
from deepnvme.memory.checksum import checksums_of
from deepnvme.queue.pipeline import once_there_is_room
from deepnvme.queue.queue import File
from deepnvme.volume.framing import shown
from infinity_engine.checkpoint.directory import open_regular, read_manifest
from infinity_engine.checkpoint.manifest import BLOCK_BYTES, MANIFEST, SavedFile
from infinity_engine.checkpoint.streams import SHARD, SavedStream, Slice, is_fill, parse_tensor
from infinity_engine.errors import (
    ChecksumError,
    DamagedCheckpoint,
    IncompleteCheckpoint,
    ManifestMismatch,
)
from infinity_engine.storage import transfer_error

__all__ = ["STAGING_BYTES", "CheckpointReader", "Damage"]

STAGING_BYTES = 32 << 20
"""The memory that blocks are read to, where the caller asks for no other. At least one block."""

_READ_BLOCKS = 4  # of one operation that reads to where the bytes belong
_IN_FLIGHT = 4  # operations
_EDGES = 6  # a parameter has up to five streams
_SHOWN_TENSORS = 20


@dataclass(frozen=True, slots=True)
class Damage:
    """A block of a file that is not as it was written, and the tensors that have bytes in it.

    No tensor has where the header is. Of a file that cannot be read at all, `flaw` says why.
    """

    file: str
    offset: int
    tensors: tuple[str, ...]
    flaw: str = ""


@dataclass(frozen=True, slots=True)
class _Held:
    """A slice, and where its bytes begin in a file."""

    part: Slice
    file: str
    offset: int


class CheckpointReader(Closing):
    """An open checkpoint: `manifest` says what it is. A context manager.

    Raises:
        IncompleteCheckpoint: files that its manifest names are not there.
        DamagedCheckpoint: its manifest is not what the format demands.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        queue: IOQueue | None = None,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        missing = tuple(
            file.name for file in self.manifest.files if not os.path.lexists(self.path / file.name)
        )
        if missing:
            raise IncompleteCheckpoint(path=str(self.path), missing=missing)
        # Should something below fail, leaving this block closes what is open. After pop_all,
        # `close` does.
        with ExitStack() as ends:
            through = queue or ends.enter_context(IOQueue())
            # Four runs of blocks, so several reads are in flight; one block where memory is for no
            # more.
            run_blocks = max(1, staging_bytes // (_IN_FLIGHT * BLOCK_BYTES))
            count = min(_IN_FLIGHT, max(1, staging_bytes // BLOCK_BYTES))
            pool = Pool(count * run_blocks * BLOCK_BYTES)
            through.use_pool(pool)
            # Ends go backwards: files close, then the queue forgets the pool, then its own queue
            # closes.
            ends.callback(through.forget_pool, pool)
            rooms = [pool.buffer(run_blocks * BLOCK_BYTES) for _ in range(count)]
            staging = deque(memory_of(room, writable=True) for room in rooms)
            edges = _Edges()
            self._files = {
                saved.name: ends.enter_context(
                    _CheckedFile(self.path, saved, through, staging, edges)
                )
                for saved in self.manifest.files
            }
            self._ends = ends.pop_all()

    # --- reading ----------------------------------------------------------------------------------

    def read(self, stream: SavedStream, first: int, into: Any) -> None:
        """Fill `into`, an array or other buffer, with the elements of a stream from `first` on.

        Raises:
            ManifestMismatch: the checkpoint has no such stream, or one of another dtype or length.
            ChecksumError: bytes are not as they were written; what `into` holds then is undefined.
            TransferError: the drive failed.
        """
        memory, itemsize = memory_of(into, writable=True), ITEMSIZES[stream.dtype]
        at, end = first, first + memory.nbytes // itemsize
        held = self._held(stream)
        # The slices cover the stream without gaps, so this one has the element `at`.
        number = bisect_right([part.part.first for part in held], at) - 1
        while at < end:
            found = held[number]
            upto = min(end, found.part.first + found.part.numel)
            target = memory.part((at - first) * itemsize, (upto - at) * itemsize)
            offset = found.offset + (at - found.part.first) * itemsize
            try:
                self._files[found.file].read(offset, target)
            except ChecksumError as error:
                # A file knows blocks. Only this call knows which stream was read.
                raise replace(error, tensor=_named(stream)) from None
            at, number = upto, number + 1

    def slices(self, stream: SavedStream) -> tuple[Slice, ...]:
        """Return the slices that a stream is kept in, in their order.

        Raises:
            ManifestMismatch: the checkpoint has no such stream, or one of another dtype or length.
        """
        return tuple(held.part for held in self._held(stream))

    def tensors_of(self, file: str) -> SafetensorsHeader:
        """Return the header of one of its files."""
        return self._files[file].header

    def read_file(self, file: str, offset: int, into: Any) -> None:
        """Fill `into` with the bytes of a file from `offset` on, checked."""
        self._files[file].read(offset, memory_of(into, writable=True))

    def check_slices(self) -> None:
        """Check that the slices in the files cover each stream exactly once.

        Raises:
            DamagedCheckpoint: a slice belongs to no stream, or two overlap.
            IncompleteCheckpoint: elements are missing.
        """
        _ = self._slices  # building the index checks it

    def verify(self, progress: Callable[[int], object] = lambda nbytes: None) -> Iterator[Damage]:
        """Read every byte; yield each damaged block, and each file that cannot be read at all.

        `progress` is called with the bytes of each block.
        """
        for name, file in self._files.items():
            # A generator that has raised is over: the other files are still read.
            try:
                yield from file.verify(progress)
            except DamagedCheckpoint as damage:
                yield Damage(name, 0, (), damage.flaw)

    def strange_files(self) -> list[str]:
        """Return the names of what is in its directory and not in its manifest."""
        known = {MANIFEST, *self._files}
        return sorted(entry.name for entry in self.path.iterdir() if entry.name not in known)

    # --- the index --------------------------------------------------------------------------------

    @cached_property
    def _slices(self) -> Mapping[SavedStream, tuple[_Held, ...]]:
        """Where each stream lies: its slices cover it once, whatever the files say."""
        streams = {
            (tensor.name, name): tensor.stream(name)
            for tensor in self.manifest.tensors
            for name in tensor.streams
        }
        found: dict[SavedStream, list[_Held]] = {stream: [] for stream in streams.values()}
        for name, file in self._files.items():
            # The other files hold tensors of state dicts.
            if not name.startswith(SHARD):
                continue
            for tensor, entry in file.header.tensors.items():
                if is_fill(tensor):
                    continue
                parameter, kind, first = parse_tensor(tensor) or ("", "", 0)
                stream = streams.get((parameter, kind))
                if stream is None:
                    raise self._flaw(
                        name, f"its tensor {shown(tensor)} belongs to no stream of the manifest"
                    )
                if entry.dtype != stream.dtype or len(entry.shape) != 1:
                    flaw = f"its tensor {shown(tensor)} is {entry.dtype} of shape {entry.shape}"
                    raise self._flaw(name, f"{flaw}, expected {stream.dtype} of one dimension")
                found[stream].append(
                    _Held(Slice(stream, first, entry.shape[0]), name, entry.offset)
                )
        return MappingProxyType(
            {stream: self._covering(stream, held) for stream, held in found.items()}
        )

    def _covering(self, stream: SavedStream, held: list[_Held]) -> tuple[_Held, ...]:
        held = sorted(
            # A slice without elements covers nothing, wherever it says that it begins.
            (entry for entry in held if entry.part.numel),
            key=lambda found: found.part.first,
        )
        at = 0
        for found in held:
            if found.part.first != at:
                problem = "is missing" if found.part.first > at else "is there twice"
                raise self._flaw(
                    found.file, f"element {min(at, found.part.first)} of {_named(stream)} {problem}"
                )
            at += found.part.numel
        if at != stream.numel:
            raise IncompleteCheckpoint(
                path=str(self.path),
                missing=(f"elements {at} to {stream.numel} of {_named(stream)}",),
            )
        return tuple(held)

    def _held(self, stream: SavedStream) -> tuple[_Held, ...]:
        # The key has dtype and length too. A lookup by names alone says what there is instead.
        if stream not in self._slices:
            saved = {(known.parameter, known.name): known for known in self._slices}
            found = saved.get((stream.parameter, stream.name))
            raise ManifestMismatch(
                path=str(self.path),
                entry=_named(stream),
                expected=f"{stream.numel} elements of {stream.dtype}",
                found="no such stream"
                if found is None
                else f"{found.numel} elements of {found.dtype}",
            )
        return self._slices[stream]

    def _flaw(self, entry: str, flaw: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(path=str(self.path), entry=entry, flaw=flaw)

    def close(self) -> None:
        """Close its files, and the queue if it is its own."""
        self._ends.close()


class _Edges:
    """The blocks that slices began and ended in, checked: the last few, of all files.

    The streams of a small parameter are in blocks of their own, in which those of the next one
    follow. With fewer of them kept, each would be read again for each parameter.
    """

    def __init__(self) -> None:
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def get(self, file: str, block: int) -> bytes | None:
        """Return a block, if it is kept."""
        found = self._blocks.get((file, block))
        if found is not None:
            self._blocks.move_to_end((file, block))
        return found

    def keep(self, file: str, block: int, values: bytes) -> None:
        """Keep a block, and forget the one that was not asked for for longest."""
        self._blocks[file, block] = values
        if len(self._blocks) > _EDGES:
            self._blocks.popitem(last=False)

    def forget(self, file: str, block: int) -> None:
        """Forget a block that is not needed again, so that there is room for others."""
        self._blocks.pop((file, block), None)


class _CheckedFile:
    """One file of a checkpoint, of which no byte is handed out unchecked.

    `staging` and `edges` are shared with the others.
    """

    def __init__(
        self,
        directory: Path,
        saved: SavedFile,
        queue: IOQueue,
        staging: deque[Memory],
        edges: _Edges,
    ) -> None:
        self._directory = directory
        self._saved = saved
        self._queue = queue
        self._staging = staging
        self._path = directory / saved.name
        self._edges = edges
        self._file: File | None = None
        self._header: SafetensorsHeader | None = None

    @property
    def header(self) -> SafetensorsHeader:
        """What the file says of its tensors."""
        if self._header is None:
            try:
                self._header = header_of(self._bytes, self._saved.nbytes, str(self._path))
            except SafetensorsError as flaw:
                raise self._flaw(str(flaw.strerror)) from None
            except ChecksumError as damage:  # the block has tensors beside the header
                found = self._tensors_in(0, self._tensors_unchecked())
                named = ", ".join(("its header", *found[:_SHOWN_TENSORS]))
                raise replace(damage, tensor=named) from None
        return self._header

    def read(self, offset: int, into: Memory) -> None:
        """Fill `into` from `offset` on: whole blocks directly, the rest through staging memory."""
        end = offset + into.nbytes
        if end > self._saved.nbytes:
            raise self._flaw(f"bytes {offset} to {end} were asked for, it has {self._saved.nbytes}")
        first, last = -(-offset // BLOCK_BYTES), end // BLOCK_BYTES  # the whole blocks
        # Within one block, with no boundary of blocks between.
        if first > last:
            return self._copy(offset, into)
        head, tail = first * BLOCK_BYTES - offset, end - last * BLOCK_BYTES
        if head:
            self._copy(offset, into.part(0, head))
            # It was read to its end: what follows is in other blocks.
            self._edges.forget(self._saved.name, first - 1)
        whole = into.part(head, (last - first) * BLOCK_BYTES)
        self._read_blocks(first, last, whole, and_edge=tail > 0)
        if tail:
            self._copy(last * BLOCK_BYTES, into.part(into.nbytes - tail, tail))
        return None

    def verify(self, progress: Callable[[int], object]) -> Iterator[Damage]:
        """Read every block; yield the damaged ones."""
        # Before the first read: the header passes the same staging memory.
        tensors = self._tensors_if_known()
        blocks = len(self._saved.checksums)
        reading: deque[tuple[IOFuture[int], int, Memory]] = deque()
        rooms = deque(self._staging)
        run = rooms[0].nbytes // BLOCK_BYTES
        try:
            for block in range(0, blocks, run):
                # All memory is in use: the oldest read ends, and its memory serves the next one.
                if not rooms:
                    rooms.append(reading[0][2])
                    yield from self._damages(*reading.popleft(), tensors)
                    progress(rooms[0].nbytes)
                end = min((block + run) * BLOCK_BYTES, self._saved.nbytes)
                room = rooms.popleft().part(0, end - block * BLOCK_BYTES)
                reading.append((self._begin(block, room), block, room))
            while reading:
                progress(reading[0][2].nbytes)
                yield from self._damages(*reading.popleft(), tensors)
        finally:
            # The caller may drop this generator half-way: no read may go on into memory that is
            # given back.
            for future, _, _ in reading:
                future.exception()

    def _tensors_if_known(self) -> Mapping[str, SafetensorsEntry]:
        """Return the header's tensors, to name what is damaged: the header itself may be."""
        try:
            return self.header.tensors
        except DamagedCheckpoint:
            return {}
        except ChecksumError:
            return self._tensors_unchecked()

    def _tensors_unchecked(self) -> Mapping[str, SafetensorsEntry]:
        """Return what the header says, whether or not it is damaged."""
        try:
            return safetensors_header(self._path).tensors
        except (OSError, ValueError):
            return {}

    def _tensors_in(self, block: int, tensors: Mapping[str, SafetensorsEntry]) -> tuple[str, ...]:
        """Return the names of the tensors that have bytes in a block."""
        start, end = block * BLOCK_BYTES, block * BLOCK_BYTES + self._block_bytes(block)
        return tuple(
            name
            for name, entry in tensors.items()
            if entry.offset < end and entry.offset + entry.nbytes > start
        )

    def _damages(
        self,
        future: IOFuture[int],
        block: int,
        room: Memory,
        tensors: Mapping[str, SafetensorsEntry],
    ) -> Iterator[Damage]:
        """Wait for the blocks from `block` on; yield the damaged ones among them."""
        for number, found in enumerate(self._sums(future, room), block):
            if found != self._saved.checksums[number]:
                touched = self._tensors_in(number, tensors)
                yield Damage(self._saved.name, number * BLOCK_BYTES, touched)

    def _bytes(self, count: int, offset: int) -> bytes:
        count = max(0, min(count, self._saved.nbytes - offset))
        room = bytearray(count)
        if count:
            self.read(offset, memory_of(room, writable=True))
        return bytes(room)

    def _copy(self, offset: int, into: Memory) -> None:
        """Copy bytes within one block."""
        block, start = divmod(offset, BLOCK_BYTES)
        view = memoryview(self._block(block))[start : start + into.nbytes]
        ctypes.memmove(into.address, memory_of(view, writable=False).address, into.nbytes)

    def _block(self, block: int) -> bytes:
        """Return a checked block. It is kept: the next slice often begins in it."""
        kept = self._edges.get(self._saved.name, block)
        if kept is not None:
            return kept
        room = self._staging[0].part(0, self._block_bytes(block))
        self._wait(self._begin(block, room), block, room)
        return self._kept(block, room)

    def _kept(self, block: int, room: Memory) -> bytes:
        # Copied: the staging memory serves the next read of any file.
        values = bytes(_view(room))
        self._edges.keep(self._saved.name, block, values)
        return values

    def _read_blocks(self, first: int, last: int, into: Memory, *, and_edge: bool) -> None:
        """Read whole blocks to where they belong, several reads at a time, and check them there.

        `and_edge` reads the block `last` beside them, and keeps it.
        """
        edge = self._staging[0].part(0, self._block_bytes(last) if and_edge else 0)
        rooms = [(last, edge)] if and_edge else []
        for block in range(first, last, _READ_BLOCKS):
            count = min(_READ_BLOCKS, last - block)
            rooms.append((block, into.part((block - first) * BLOCK_BYTES, count * BLOCK_BYTES)))
        reading: deque[tuple[IOFuture[int], int, Memory]] = deque()
        try:
            for block, room in rooms:
                reading.append((self._begin(block, room), block, room))
                if len(reading) == _IN_FLIGHT:
                    self._wait(*reading.popleft())
            while reading:
                self._wait(*reading.popleft())
        finally:
            for future, _, _ in reading:  # the owner of the memory may let go of it after this
                future.exception()
        if and_edge:
            self._kept(last, edge)

    def _begin(self, block: int, room: Memory) -> IOFuture[int]:
        return once_there_is_room(partial(self._opened().pread, room, block * BLOCK_BYTES))

    def _wait(self, future: IOFuture[int], block: int, room: Memory) -> None:
        for number, found in enumerate(self._sums(future, room), block):
            expected = self._saved.checksums[number]
            if found != expected:
                raise ChecksumError(
                    path=str(self._directory),
                    entry=self._saved.name,
                    offset=number * BLOCK_BYTES,
                    expected=expected,
                    found=found,
                )

    def _sums(self, future: IOFuture[int], room: Memory) -> tuple[int, ...]:
        """Wait for a read; return the checksums of its blocks."""
        try:
            future.result()
        except NVMeError as error:
            raise transfer_error(error, f"checkpoint {self._directory}") from None
        finally:
            # Ctrl-C may have ended the wait, and not the read.
            future.exception()
        return checksums_of(room, BLOCK_BYTES)

    def _block_bytes(self, block: int) -> int:
        return min(BLOCK_BYTES, self._saved.nbytes - block * BLOCK_BYTES)

    def _opened(self) -> File:
        """Open the file, which has to be a regular one of the length that the manifest says."""
        if self._file is None:
            try:
                # Refuses links, pipes and devices. The queue opens the file by its path again.
                with open_regular(self._path) as descriptor:
                    nbytes = os.fstat(descriptor).st_size
                if nbytes != self._saved.nbytes:
                    raise self._flaw(f"it has {nbytes} B, its manifest says {self._saved.nbytes} B")
                self._file = self._queue.open(self._path)
            except NVMeError as error:
                raise transfer_error(error, f"checkpoint {self._directory}") from None
            except OSError as problem:
                raise self._flaw(str(problem)) from None
        return self._file

    def _flaw(self, flaw: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(path=str(self._directory), entry=self._saved.name, flaw=flaw)

    def __enter__(self) -> _CheckedFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()


def _view(memory: Memory) -> memoryview:
    # Neither a copy nor an owner: valid as long as the caller holds `memory`.
    return memoryview((ctypes.c_char * memory.nbytes).from_address(memory.address))


def _named(stream: SavedStream) -> str:
    return f"{stream.name} of {stream.parameter}"
