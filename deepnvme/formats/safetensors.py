"""Files in the safetensors format, read and written by direct I/O.

Believes nothing that a header says before it is checked; a file that is written appears whole or
not at all. Bytes travel between the drive and the tensors' own memory; small tensors share
operations. Programs call the three functions; code that moves bytes, such as `deepnvme cp`, calls
the two classes.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import mmap
import os
import stat
import struct
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from deepnvme.choices import chosen
from deepnvme.closing import Closing
from deepnvme.errors import NVMeError
from deepnvme.memory.arrays import (
    ITEMSIZES,
    Description,
    Returns,
    default_returns,
    describe,
    described,
    empty,
    kind_of,
    nbytes_of,
    view_of,
)
from deepnvme.memory.buffers import Memory, memory_of
from deepnvme.memory.checksum import BlockChecksums
from deepnvme.memory.copying import scatter
from deepnvme.memory.pool import Pool
from deepnvme.queue.future import IOFuture
from deepnvme.queue.pipeline import (
    RUN_BYTES,
    STAGED_RUNS,
    Piece,
    Pipeline,
    Staged,
    Stretch,
    once_there_is_room,
    together,
)
from deepnvme.queue.queue import Batch, File, IOQueue, Sync
from deepnvme.sizes import PAGE, SMALL_BYTES, whole_pages
from deepnvme.store.manifest import check_name
from deepnvme.store.store import Durability
from deepnvme.volume.framing import shown, strict_json
from deepnvme.volume.syncing import sync_directory

__all__ = [
    "METADATA",
    "STAGING_BYTES",
    "Order",
    "SafetensorsEntry",
    "SafetensorsError",
    "SafetensorsFile",
    "SafetensorsHeader",
    "SafetensorsWriter",
    "encoded_header",
    "entries_of",
    "header_of",
    "read_safetensors",
    "safetensors_header",
    "write_safetensors",
]

METADATA = "__metadata__"
"""What the format calls the metadata, so that no tensor can be called so."""

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_LENGTH = struct.Struct("<Q")
_OURS_ALONE = frozenset({"C128"})  # codes that the format does not have

_NEW_MODE = 0o666  # less the umask
_FIRST_READ_BYTES = 64 << 10  # most headers fit into it

STAGING_BYTES = STAGED_RUNS * RUN_BYTES
"""The memory through which small tensors travel to a file, unless the caller asks for another."""


class SafetensorsError(NVMeError, ValueError):
    """A file is not what the format demands, or cannot be written in it; the message says why."""

    def __init__(self, message: str, *, path: str, errno: int = errno.EBADMSG) -> None:
        super().__init__(errno, message, path=path)


@dataclass(frozen=True)
class SafetensorsEntry:
    """One tensor of a file: what it is, and where in the file its bytes begin."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return nbytes_of(self.dtype, self.shape)


@dataclass(frozen=True)
class SafetensorsHeader:
    """A file's header: tensors in the order of their bytes, metadata; and the file's length."""

    path: str
    tensors: Mapping[str, SafetensorsEntry]
    metadata: Mapping[str, str]
    nbytes: int


def safetensors_header(path: str | os.PathLike[str]) -> SafetensorsHeader:
    """Return names, dtypes, shapes and metadata of a file; reads none of the tensors.

    Raises:
        SafetensorsError: it is not a valid file of this format; the message says what is wrong with
            it.
    """
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            if stat.S_ISDIR(status.st_mode):
                raise _refusal("it is a directory, not a regular file: name a file", path)
            raise _refusal("it is not a regular file", path)
        return header_of(partial(os.pread, descriptor), status.st_size, os.fspath(path))
    finally:
        os.close(descriptor)


def read_safetensors(
    path: str | os.PathLike[str],
    names: Iterable[str] | None = None,
    *,
    out: Mapping[str, Any] | None = None,
    returns: Returns | None = None,
    queue: IOQueue | None = None,
) -> dict[str, Any]:
    """Return the tensors of those names; all of them without `names`.

    Where `out` has a tensor of that name, it is read into that one.

    Raises:
        SafetensorsError: the file is not valid.
        KeyError: it has no tensor of that name.
        ValueError: the tensor in `out` is of another dtype or shape.
    """
    kind = default_returns() if returns is None else chosen(Returns, returns, "returns")
    with SafetensorsFile(path, queue=queue) as file:
        wanted = entries_of(file.header, names)
        others = (out or {}).keys() - wanted.keys()
        if others:
            raise ValueError(
                f"`out` has {min(others)!r}, which is not asked for: name it too, or leave it out "
                "of `out`"
            )
        made = {name: _target(name, entry, out or {}, kind) for name, entry in wanted.items()}
        file.fill({name: memory for name, (_, memory) in made.items()})
    return {name: tensor for name, (tensor, _) in made.items()}


def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
    *,
    durability: Durability = Durability.COMMIT,
    queue: IOQueue | None = None,
) -> None:
    """Write tensors, arrays or bytes to a file, in place of what has that name.

    It appears when it is whole.

    `durability`: with COMMIT it survives power loss once this has returned; with DATA the name is
    then of a whole file, this one or the one before; with NONE neither is promised.

    Raises:
        SafetensorsError: the format has no such dtype, name or metadata.
        NVMeError: the drive failed; what had that name is still there.
    """
    given = {name: described(name, tensor, describe) for name, tensor in tensors.items()}
    layout = {name: (tensor.code, tensor.shape) for name, tensor in given.items()}
    with SafetensorsWriter(path, layout, metadata, durability=durability, queue=queue) as writer:
        writer.write({name: given[name] for name in writer.names})


# --- reading --------------------------------------------------------------------------------------


class SafetensorsFile(Closing):
    """An open file with a checked header. A context manager; one thread at a time.

    Raises:
        SafetensorsError: it is not a valid file of this format.
    """

    def __init__(self, path: str | os.PathLike[str], *, queue: IOQueue | None = None) -> None:
        with ExitStack() as ends:
            self._queue = queue or ends.enter_context(IOQueue())
            self._file = ends.enter_context(self._queue.open(path))
            # Read from the file that is open now: its name may be another file's by the time that
            # its tensors are read.
            self.header = header_of(self._bytes, self._file.size, os.fspath(path))
            self._ends = ends.pop_all()

    def _bytes(self, nbytes: int, offset: int) -> bytes:
        room = empty("U8", (nbytes,), Returns.BYTES)
        done = once_there_is_room(partial(self._file.readinto, room, offset)).result()
        return bytes(room[:done])

    def pieces(self, nbytes: int) -> Iterator[int]:
        """Read the file in pieces, keeping the drive busy; yield the length of each."""
        read: list[int] = []
        staged = Staged((self._queue,), run_bytes=nbytes)
        with ExitStack() as ends:
            # Entered before the pipeline, so left after it: no read is under way then.
            ends.callback(staged.close)
            pipeline = ends.enter_context(Pipeline())
            for offset in range(0, self.header.nbytes, nbytes):
                memory = staged.take(pipeline)
                length = min(nbytes, self.header.nbytes - offset)
                batch = pipeline.start(
                    length, land=partial(read.append, length), release=partial(staged.give, memory)
                )
                self._read(memory.part(0, length), offset, batch)
                # Pieces land when later ones need their room: none, one or several at a time.
                while read:
                    yield read.pop()
            while not pipeline.empty:
                pipeline.finish_oldest()
                yield read.pop()

    def read(self, names: Iterable[str]) -> dict[str, Description]:
        """Return tensors as they are: codes, shapes, and new memory with their bytes."""
        wanted = entries_of(self.header, names)
        memories = {name: memory_of(_room(entry), writable=True) for name, entry in wanted.items()}
        self.fill(memories)
        return {
            name: Description(entry.dtype, entry.shape, memories[name])
            for name, entry in wanted.items()
        }

    def fill(self, wanted: Mapping[str, Memory]) -> None:
        """Fill each memory with the bytes of the tensor of that name."""
        entries = entries_of(self.header, wanted)
        small: list[Piece[Memory]] = []
        with ExitStack() as ends:
            pipeline = ends.enter_context(Pipeline())
            for name, memory in wanted.items():
                offset = entries[name].offset
                if memory.nbytes > SMALL_BYTES:
                    self._read(memory, offset, pipeline.start(memory.nbytes))
                elif memory.nbytes:
                    small.append(Piece(0, offset, memory.nbytes, memory))
            small.sort(key=lambda piece: piece.offset)
            self._fill_together(list(together(small)), pipeline, ends)

    def _fill_together(
        self, stretches: list[Stretch[Memory]], pipeline: Pipeline, ends: ExitStack
    ) -> None:
        """Read what lies close together at once, and copy it to where it belongs."""
        if not stretches:
            return
        room = max(stretch.nbytes for stretch in stretches)
        staged = Staged((self._queue,), runs=min(STAGED_RUNS, len(stretches)), run_bytes=room)
        # After an error this comes before the pipeline is left: it waits until the drive has
        # nothing in flight, and the pipeline's steps keep the memory.
        ends.callback(staged.close)
        for stretch in stretches:
            staging = staged.take(pipeline)
            batch = pipeline.start(
                room, land=partial(_land, stretch, staging), release=partial(staged.give, staging)
            )
            length = min(stretch.nbytes, self.header.nbytes - stretch.start)
            self._read(staging.part(0, length), stretch.start, batch)
        while not pipeline.empty:  # before the staging memory goes
            pipeline.finish_oldest()

    def _read(self, memory: Memory, offset: int, batch: Batch) -> None:
        batch.futures.append(once_there_is_room(partial(self._file.pread, memory, offset)))

    def close(self) -> None:
        """Close the file, and the queue if it is its own. Again: does nothing."""
        self._ends.close()


def _land(stretch: Stretch[Memory], staging: Memory) -> None:
    places = [piece.offset - stretch.start for piece in stretch.pieces]
    sizes = [piece.nbytes for piece in stretch.pieces]
    scatter(staging, places, sizes, [piece.what for piece in stretch.pieces], summing=False)


def _target(
    name: str, entry: SafetensorsEntry, out: Mapping[str, Any], returns: Returns
) -> tuple[Any, Memory]:
    """Return the tensor to read into, and its memory."""
    if name in out:
        kind = kind_of(out[name])
        if kind != (entry.dtype, entry.shape):
            raise ValueError(
                f"{name!r} is {entry.dtype} of shape {entry.shape}; it cannot be read into "
                f"{kind[0]} of shape {kind[1]}. Give `out` one of the tensor's dtype and shape, or "
                "none"
            )
        return out[name], memory_of(out[name], writable=True)
    # A view at the file's place in a page would not be aligned to its elements there.
    if entry.nbytes <= SMALL_BYTES or entry.offset % ITEMSIZES[entry.dtype]:
        tensor = empty(entry.dtype, entry.shape, returns)
        return tensor, memory_of(tensor, writable=True)
    room = _room(entry)
    return view_of(room, entry.dtype, entry.shape, returns), memory_of(room, writable=True)


def _room(entry: SafetensorsEntry) -> memoryview:
    """Return new bytes at the same place in a page as in the file, so that whole pages meet."""
    before = entry.offset % PAGE
    nbytes = before + entry.nbytes
    if nbytes <= SMALL_BYTES:
        return empty("U8", (nbytes,), Returns.BYTES)[before:]  # type: ignore[no-any-return]
    # As np.empty does: huge pages, made while the drive is at work.
    pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)[before:]


# --- the header -----------------------------------------------------------------------------------


def header_of(read: Callable[[int, int], bytes], nbytes: int, path: str) -> SafetensorsHeader:
    """Return the header of a file of `nbytes`; `read(count, offset)` returns bytes of the file.

    Raises:
        SafetensorsError: it is not a valid file of this format.
    """
    # The length and, in most files, the whole header with it: one read less.
    start = read(min(nbytes, _FIRST_READ_BYTES), 0)
    try:
        length = _header_length(start[: _LENGTH.size], nbytes)
        text = start[_LENGTH.size : _LENGTH.size + length]
        if len(text) < length:
            text += read(length - len(text), _LENGTH.size + len(text))
        return _header(text, length, nbytes, path)
    except RecursionError:
        raise _refusal("its header is nested too deeply", path) from None
    except ValueError as flaw:
        raise _refusal(str(flaw), path) from None


def entries_of(
    header: SafetensorsHeader, names: Iterable[str] | None
) -> dict[str, SafetensorsEntry]:
    """Return the entries of the tensors of those names; all of them where `names` is None.

    Raises:
        KeyError: the file has no tensor of that name.
        TypeError: the names are one text.
    """
    if isinstance(names, str):
        raise TypeError(f"expected names, such as [{names!r}]; got the text {names!r}")
    wanted = list(header.tensors if names is None else names)
    if missing := [name for name in wanted if name not in header.tensors]:
        raise KeyError(
            f"no tensor {missing[0]!r} among the {len(header.tensors)} of {header.path}: "
            "safetensors_header() has their names"
        )
    return {name: header.tensors[name] for name in wanted}


def _header_length(start: bytes, nbytes: int) -> int:
    if len(start) < _LENGTH.size:
        raise ValueError(
            f"expected {_LENGTH.size} B at least, got {len(start)}: it was cut off, or is another "
            "kind of file"
        )
    length: int = _LENGTH.unpack(start)[0]
    if length > _MAX_HEADER_BYTES:
        raise ValueError(
            f"its header would have {length} B, the format allows {_MAX_HEADER_BYTES}: it is "
            "damaged, or another kind of file"
        )
    if length > nbytes - _LENGTH.size:
        raise ValueError(
            f"its header would have {length} B, {nbytes - _LENGTH.size} follow: it was cut off, or "
            "is another kind of file"
        )
    return length


def _header(text: bytes, length: int, nbytes: int, path: str) -> SafetensorsHeader:
    if len(text) != length or not text.startswith(b"{"):
        raise ValueError(
            f'expected a header of {length} B that begins with "{{", got {text[:32]!r}'
        )
    content = strict_json(text)
    metadata = content.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise ValueError(f"expected {METADATA} as an object of texts, got {shown(metadata)}")
    for value in (*metadata, *metadata.values()):
        check_name(value)
    start = _LENGTH.size + length
    tensors = {}
    for name, value in content.items():
        try:
            tensors[check_name(name)] = _entry(value, start)
        except ValueError as flaw:
            raise ValueError(f"tensor {shown(name)}: {flaw}") from None
    # By length as well: an empty tensor begins where the next one does, and comes before it.
    in_order = sorted(tensors.items(), key=lambda named: (named[1].offset, named[1].nbytes))
    _check_whole(in_order, start, nbytes)
    return SafetensorsHeader(
        path, MappingProxyType(dict(in_order)), MappingProxyType(metadata), nbytes
    )


def _entry(value: Any, start: int) -> SafetensorsEntry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(
            f"expected an object with dtype, shape and data_offsets, got {shown(value)}"
        )
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEMSIZES or dtype in _OURS_ALONE:
        codes = ", ".join(code for code in ITEMSIZES if code not in _OURS_ALONE)
        raise ValueError(f"expected one of the dtypes {codes}; got {shown(dtype)}")
    if not _are_sizes(shape):
        raise ValueError(f"expected its shape as a list of sizes, got {shown(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"expected its data_offsets as a list of two, got {shown(offsets)}")
    begin, end = offsets
    taken = nbytes_of(dtype, tuple(shape))
    if end - begin != taken:
        raise ValueError(
            f"its bytes {begin} to {end} are {end - begin}; {dtype} of shape {shown(shape)} takes "
            f"{taken}"
        )
    return SafetensorsEntry(dtype, tuple(shape), start + begin)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(size) is int and 0 <= size < 1 << 63 for size in value
    )


def _check_whole(in_order: list[tuple[str, SafetensorsEntry]], start: int, nbytes: int) -> None:
    """Refuse bytes that belong to no tensor, or to two."""
    if in_order and in_order[0][1].offset != start:
        raise ValueError(
            f"tensor {shown(in_order[0][0])} should begin at byte 0, not "
            f"{in_order[0][1].offset - start}"
        )
    for (name, entry), (following, other) in pairwise(in_order):
        if other.offset != entry.offset + entry.nbytes:
            raise ValueError(
                f"tensor {shown(following)} should begin where {shown(name)} ends, at byte "
                f"{entry.offset + entry.nbytes - start}, not {other.offset - start}"
            )
    end = in_order[-1][1].offset + in_order[-1][1].nbytes if in_order else start
    if end != nbytes:
        raise ValueError(
            f"its tensors end at byte {end}, the file at {nbytes}: it was cut off or added to"
        )


def _refusal(flaw: str, path: str | os.PathLike[str]) -> SafetensorsError:
    return SafetensorsError(f"not a valid safetensors file: {flaw}", path=os.fspath(path))


# --- writing --------------------------------------------------------------------------------------


class Order(Enum):
    """The order in which a file's tensors lie."""

    # the writer's: each begins at a multiple of its element, most large ones at a page
    ALIGNED = "aligned"
    GIVEN = "given"  # the caller's, for contents that can be read in one order only


class SafetensorsWriter:
    """Writes one file: gets the names and shapes of all tensors first, then their bytes in the
    order of `names`, in one or several calls.

    `sums` gets the checksums of the bytes as they are written. Small tensors travel through
    `staging_bytes` of memory.

    A context manager: at the end of its block the file takes the place of what has its name; where
    the block raises, what has that name stays. All is written in whole pages at whole pages, from
    the tensors' own memory where they are large.

    Raises:
        SafetensorsError: the format has no such dtype, name or metadata.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        layout: Mapping[str, tuple[str, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
        *,
        order: Order = Order.ALIGNED,
        sums: BlockChecksums | None = None,
        staging_bytes: int = STAGING_BYTES,
        durability: Durability = Durability.COMMIT,
        queue: IOQueue | None = None,
    ) -> None:
        self.path = Path(os.path.realpath(path))  # where the name is a link it stays one

        self._durability = chosen(Durability, durability, "durability")
        self._layout = dict(layout if order is Order.GIVEN else sorted(layout.items(), key=_rank))
        self.names = tuple(self._layout)
        """The order in which the tensors lie in the file."""
        start = encoded_header(self._layout, metadata or {}, self.path)
        self._written = 0
        total = len(start) + sum(nbytes_of(*kind) for kind in self._layout.values())
        self.nbytes = total
        # In the same directory: only within one file system does a rename replace a file.
        self._draft = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex[:16]}.tmp")
        mode = _mode_of(self.path)
        self._check_place()
        with ExitStack() as ends:
            through = queue or ends.enter_context(IOQueue())
            # Before the draft is made, so that none stays; after the rename it is missing.
            ends.callback(self._draft.unlink, missing_ok=True)
            self._file = ends.enter_context(
                self._made(through, _NEW_MODE if mode is None else mode)
            )
            if mode is not None:
                self._draft.chmod(mode)  # as it was, whatever the umask
            self._pages = ends.enter_context(
                _PageWriter(self._file, through, total, sums, staging_bytes)
            )
            self._pages.append(memory_of(start, writable=False))
            self._ends = ends.pop_all()

    def _check_place(self) -> None:
        """Refuse what would fail only when all is written, or name the draft and not the file."""
        if self.path.is_dir():
            raise IsADirectoryError(
                errno.EISDIR, "it is a directory: name a file to write", str(self.path)
            )
        if not self.path.parent.is_dir():
            raise FileNotFoundError(
                errno.ENOENT,
                "its directory does not exist: make that first (is the drive mounted?)",
                str(self.path),
            )

    def _made(self, queue: IOQueue, permissions: int) -> File:
        try:
            return queue.open(self._draft, "x", size=self.nbytes, permissions=permissions)
        except OSError as error:
            if isinstance(error, NVMeError) or error.filename != str(self._draft):
                raise
            # The caller knows no draft.
            text, where = error.strerror, str(self.path)
            if error.errno == errno.ENOSPC:
                space = os.statvfs(self.path.parent)
                text = (
                    f"{self.nbytes} B cannot be reserved here, {space.f_bavail * space.f_frsize} B "
                    f"are free ({text}). Free some space, or name a file on another drive"
                )
            raise OSError(error.errno, text, where) from None

    def write(self, tensors: Mapping[str, Description]) -> None:
        """Write the next tensors. Their memory is free when this returns."""
        due = self.names[self._written : self._written + len(tensors)]
        if tuple(tensors) != due:
            raise ValueError(
                f"expected the tensors {shown(due)} next, got {shown(tuple(tensors))}: write them "
                "in the order of `names`"
            )
        # All before any is written: a call that is refused has changed nothing.
        for name, tensor in tensors.items():
            layout = tensor.code, tensor.shape
            if layout != self._layout[name]:
                raise ValueError(
                    f"{name!r} was announced as {self._layout[name]}, and {layout} was given: "
                    "announce what is written"
                )
        for tensor in tensors.values():
            self._pages.append(tensor.memory)
        self._pages.wait()
        self._written += len(tensors)

    def write_in_parts(self, name: str, parts: Iterable[Memory]) -> None:
        """Write the next tensor, `name`, from parts; each is free when the next is asked for."""
        [due] = self.names[self._written : self._written + 1] or ("nothing more",)
        if name != due:
            raise ValueError(
                f"expected the tensor {shown(due)} next, got {shown(name)}: write them in the "
                "order of `names`"
            )
        left = nbytes_of(*self._layout[name])
        for part in parts:
            left -= part.nbytes
            # Too much: these bytes would lie where the next tensor belongs.
            if left < 0:
                break
            self.append(part)
        if left:
            raise ValueError(
                f"{name!r} was announced as {self._layout[name]}; its parts have {abs(left)} B too "
                f"{'few' if left > 0 else 'many'}"
            )
        self.end_tensor()

    def append(self, part: Memory) -> None:
        """Write the next bytes of the current tensor. Their memory is free when this returns."""
        self.begin(part)
        self.settle()

    def begin(self, part: Memory) -> None:
        """Begin to write the next bytes. Their memory must not change before `settle`, or the end
        of the block.
        """
        self._pages.append(part)

    def settle(self) -> None:
        """Wait until the memory of all that was begun is free."""
        self._pages.wait()

    def end_tensor(self) -> None:
        """Note that all bytes of a tensor were appended: the caller has counted them."""
        self._written += 1

    def __enter__(self) -> SafetensorsWriter:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let the file take its place, unless the block raised."""
        # Whatever _finish() raises, the file is closed and the draft removed.
        with self._ends:
            if kind is None:
                self._finish()

    def _finish(self) -> None:
        if self._written < len(self.names):
            raise ValueError(
                f"{len(self.names) - self._written} of the tensors that were announced were not "
                "written, so no file was made: write all of `names` in the block"
            )
        self._pages.finish()
        # Before the rename: no crash may leave the name on a file without its bytes.
        if self._durability is not Durability.NONE:
            what = Sync.ALL if self._durability is Durability.COMMIT else Sync.DATA
            once_there_is_room(partial(self._file.sync, what)).result()
        self._draft.replace(self.path)
        # After the rename, which is a change of the directory.
        if self._durability is Durability.COMMIT:
            sync_directory(self.path.parent)


def _mode_of(path: Path) -> int | None:
    """Return the permissions of the file that is there, None where there is none."""
    try:
        return stat.S_IMODE(path.stat().st_mode) & 0o777
    except FileNotFoundError:
        return None


class _PageWriter:
    """Appends memory to a new file in whole pages: large memory as it lies, the rest staged.

    So no two operations share a page, and all but the file's last one go past the page cache.
    """

    def __init__(
        self,
        file: File,
        queue: IOQueue,
        total: int,
        sums: BlockChecksums | None,
        staging_bytes: int,
    ) -> None:
        self._file = file
        self._queue = queue
        self._sums = sums
        # Whole pages, so that what is flushed when a slot is full ends at a page.
        room = max(PAGE, min(staging_bytes // STAGED_RUNS // PAGE * PAGE, whole_pages(total)))
        self._pool = Pool(STAGED_RUNS * room)
        queue.use_pool(self._pool)
        self._slots: deque[tuple[Memory, IOFuture[int] | None]] = deque(
            (memory_of(self._pool.buffer(room), writable=True), None) for _ in range(STAGED_RUNS)
        )
        self._batch = Batch()
        self._staging, _ = self._slots.popleft()
        self._at = 0  # where in the file the staging memory belongs
        self._used = 0

    def append(self, memory: Memory) -> None:
        """Write it after what was appended before. It must not change before `wait`."""
        done = 0
        while done < memory.nbytes:
            left = memory.nbytes - done
            to_page = -self._used % PAGE
            # Small pieces are copied whole; of large ones, what fills the page that was begun.
            if left - to_page <= SMALL_BYTES:
                done += self._stage(memory.part(done, min(left, self._staging.nbytes - self._used)))
            elif self._used:
                done += self._stage(memory.part(done, to_page))
                self._flush()
            else:
                whole = left // PAGE * PAGE
                self._batch.futures.append(self._write(memory.part(done, whole)))
                self._at += whole
                done += whole
        if self._sums is not None:
            self._sums.append(memory)  # while the drive writes it

    def wait(self) -> None:
        """Wait until the drive has what was appended, except for what is in staging memory."""
        self._batch.wait()

    def finish(self) -> None:
        """Write the rest, and wait for all."""
        self._flush()
        self._batch.wait()

    def _write(self, memory: Memory) -> IOFuture[int]:
        return once_there_is_room(partial(self._file.pwrite, memory, self._at))

    def _stage(self, memory: Memory) -> int:
        ctypes.memmove(self._staging.address + self._used, memory.address, memory.nbytes)
        self._used += memory.nbytes
        if self._used == self._staging.nbytes:
            self._flush()
        return memory.nbytes

    def _flush(self) -> None:
        if not self._used:
            return
        writing = self._write(self._staging.part(0, self._used))
        self._batch.futures.append(writing)
        # Behind the others: by the time it is needed again, its write has most likely ended.
        self._slots.append((self._staging, writing))
        self._at += self._used
        self._used = 0
        self._staging, before = self._slots.popleft()
        # The drive may still read the memory that is filled next.
        if before is not None:
            before.result()

    def __enter__(self) -> _PageWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Also where the block raised: the drive reads from this memory until then.
        self._batch.drain()
        self._queue.forget_pool(self._pool)


def _rank(named: tuple[str, tuple[str, tuple[int, ...]]]) -> tuple[bool, int, str]:
    """Return the order of tensors: whole pages first, then larger elements, then by name.

    As nothing may lie between tensors, this is what lets each begin at a multiple of its element,
    and most large ones at a page.
    """
    name, (code, shape) = named
    return bool(math.prod(shape) * ITEMSIZES[code] % PAGE), -ITEMSIZES[code], str(name)


def encoded_header(
    layout: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str], path: Path
) -> bytes:
    """Return length and header, filled with spaces to whole pages, so that the tensors begin with
    one.
    """
    content: dict[str, Any] = {}
    try:
        if metadata:
            content[METADATA] = {_text(name): _text(value) for name, value in metadata.items()}
        at = 0
        for name, (code, shape) in layout.items():
            if check_name(name) == METADATA:
                raise ValueError(
                    f"no tensor can have the name {METADATA}, which is that of the metadata"
                )
            if code in _OURS_ALONE:
                raise ValueError(
                    f"tensor {shown(name)}: the format has no {code}; give its real and imaginary "
                    "parts as two tensors"
                )
            end = at + nbytes_of(code, shape)
            content[name] = {"dtype": code, "shape": shape, "data_offsets": (at, end)}
            at = end
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
        length = whole_pages(_LENGTH.size + len(text)) - _LENGTH.size
        if length > _MAX_HEADER_BYTES:
            raise ValueError(
                f"the header would have {length} B, the format allows {_MAX_HEADER_BYTES}"
            )
    except (TypeError, ValueError) as flaw:
        raise SafetensorsError(
            f"cannot be written as safetensors: {flaw}", path=os.fspath(path), errno=errno.EINVAL
        ) from None
    return _LENGTH.pack(length) + text.ljust(length)


def _text(value: object) -> str:
    """Return a name or value of the metadata; refuse what is no text."""
    if not isinstance(value, str):
        raise TypeError(f"expected the metadata as texts by name, got {shown(value)}")
    return check_name(value)
