"""`open`: a file object over direct I/O, for libraries that work with Python's file objects.

torch, numpy, zipfile, tarfile and pyarrow take one. Small reads are served from blocks that are
read ahead while the caller works. Small writes are collected in blocks that are written meanwhile.
Large reads and writes go straight between the caller's memory and the drive.
"""

from __future__ import annotations

import io
import operator
import os
import sys
import threading
import weakref
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, Literal, NamedTuple

from deepnvme.choices import byte_count
from deepnvme.errors import BatchError, ForkedError, NVMeError
from deepnvme.memory.arrays import Returns, empty
from deepnvme.memory.pool import Pool
from deepnvme.queue.future import IOFuture
from deepnvme.queue.leftovers import Leftover, watching
from deepnvme.queue.pipeline import once_there_is_room
from deepnvme.queue.queue import File, IOQueue, Sync
from deepnvme.sizes import PAGE, whole_pages

__all__ = ["FileObject", "open"]

_BLOCKS = 3
_JUMP_BYTES = 64 << 10  # read after a jump: the caller may want little there
_LINE_BYTES = 128  # looked through at first for the end of a line
_MODES = MappingProxyType(
    {"rb": "r", "r+b": "r+", "rb+": "r+", "wb": "w", "xb": "x", "ab": "r+"}  # see _opened()
)


def open(  # named as in gzip and bz2
    path: str | os.PathLike[str],
    mode: Literal["rb", "r+b", "rb+", "wb", "xb", "ab"] = "rb",
    *,
    block_bytes: int | str = "1MiB",
    queue: IOQueue | None = None,
) -> FileObject:
    """Open a file as a binary file object that reads and writes past the page cache.

    `block_bytes` is how much is read ahead or collected at a time, a multiple of 4096; three such
    blocks of memory are taken. "wb", "xb" and "ab" write only, unlike "r+b". "ab" makes the file
    where there is none, and writes behind its end wherever the position is: that end is asked for
    when it is opened, so no other program may append while it is open.
    """
    nbytes = byte_count("block_bytes", block_bytes, PAGE)
    if mode not in _MODES:
        raise ValueError(f"mode must be one of {', '.join(_MODES)}; got {mode!r}")
    if nbytes != whole_pages(nbytes):
        raise ValueError(f"block_bytes must be a multiple of {PAGE}, got {nbytes}")
    Leftover.end_if_many()
    with ExitStack() as undo:
        through = queue or undo.enter_context(IOQueue())
        file = undo.enter_context(_opened(through, path, mode))
        pool = Pool(_BLOCKS * nbytes)
        through.use_pool(pool)
        undo.callback(through.forget_pool, pool)
        buffers = [pool.buffer(nbytes) for _ in range(_BLOCKS)]
        reader, writer = _BlockReader(file, buffers), _BlockWriter(file, buffers)
        still_open = _StillOpen(file, reader, writer, pool, through, is_shared=queue is not None)
        made = FileObject(still_open, mode, nbytes)
        undo.pop_all()  # the object closes them from here on
    return made


def _opened(queue: IOQueue, path: str | os.PathLike[str], mode: str) -> File:
    try:
        return queue.open(path, _MODES[mode])  # type: ignore[arg-type]
    except FileNotFoundError:
        if mode != "ab":
            raise
    try:
        return queue.open(path, "x")
    except FileExistsError:  # another program has made it meanwhile, or it is a link to nowhere
        return queue.open(path, "r+")


class FileObject(io.BufferedIOBase):
    """A binary file object over a `File`. Made by `open`; used by one thread at a time.

    It has no file descriptor: a library that got one would read and write past this object.
    """

    def __init__(self, still_open: _StillOpen, mode: str, block_bytes: int) -> None:
        self.name = still_open.file.path
        self.mode = mode
        self._still_open = still_open
        self._file = still_open.file
        self._block_bytes = block_bytes
        self._reader = still_open.reader
        self._writer = still_open.writer
        self._end = self._file.size if mode == "ab" else None  # where all writes go, then
        self._position = self._end or 0
        # At the end of the program it runs before that of the queue, which is older. It holds the
        # queue, which is thus not collected together with this object.
        self._finalizer = weakref.finalize(self, _let_go, watching(self), still_open)

    def readable(self) -> bool:
        """Return whether it was opened for reading."""
        self._check_open()
        return self.mode[0] == "r"

    def writable(self) -> bool:
        """Return whether it was opened for writing."""
        self._check_open()
        return self.mode != "rb"

    def seekable(self) -> bool:
        """Return True."""
        self._check_open()
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill `buffer` from the position on.

        Return the bytes read, fewer at the end of the file. Where it raises, the position stays.
        """
        self._begin_reading()
        start = self._position
        try:
            return self._fill(_bytes_of(buffer))
        except BaseException:
            self._position = start
            raise

    def _fill(self, left: memoryview) -> int:
        start = self._position
        while left.nbytes:
            # Straight into the caller's memory, unless the first bytes are in a block already.
            if left.nbytes >= self._block_bytes and not self._reader.has(self._position):
                read = once_there_is_room(partial(self._file.readinto, left, self._position))
                self._position += read.result()
                break  # it is full, or the file has ended
            part = self._reader.part_from(self._position)
            done = min(part.nbytes, left.nbytes)
            if done == 0:
                break
            left[:done] = part[:done]
            left = left[done:]
            self._position += done
        return self._position - start

    def readinto1(self, buffer: Any, /) -> int:
        """Do as `readinto` does."""
        return self.readinto(buffer)

    def read(self, size: int | None = -1, /) -> bytes:
        """Return `size` bytes from the position on; without a size, all up to the end."""
        wanted = _bytes_asked(size)
        ready = self._reader.ready(self._position, wanted)
        if ready:
            self._position += wanted
            return ready
        self._begin_reading()
        left = max(0, self._file.size - self._position)
        room = bytearray(min(wanted, left))
        done = self.readinto(room)
        return bytes(room) if done == len(room) else bytes(room[:done])

    def read1(self, size: int = -1, /) -> bytes:
        """Do as `read` does."""
        return self.read(size)

    def peek(self, size: int = 0, /) -> bytes:
        """Return some of the bytes at the position without moving it; none at the end."""
        return self._look(size if size > 0 else PAGE)

    def _look(self, nbytes: int) -> bytes:
        ready = self._reader.ready(self._position, nbytes)
        if ready:
            return ready
        self._begin_reading()
        return bytes(self._reader.part_from(self._position)[: max(nbytes, PAGE)])

    def readline(self, size: int | None = -1, /) -> bytes:
        """Return the bytes up to the end of the line, at most `size`."""
        left = _bytes_asked(size)
        line, look = bytearray(), _LINE_BYTES
        while left:
            part = self._look(min(left, look))[:left]
            found = part.find(b"\n") + 1
            part = part[:found] if found else part
            self._position += len(part)
            line += part
            if found or not part:
                break
            left -= len(part)
            look = min(2 * look, self._block_bytes)
        return bytes(line)

    def write(self, data: Any, /) -> int:
        """Write `data` at the position, with "ab" at the end; it may change once this returned."""
        self._refuse_unless_writable()
        if self._end is not None:
            self._position = self._end
        # What was read ahead would hold the old bytes.
        self._reader.forget()
        memory = _bytes_of(data)
        if memory.nbytes >= self._block_bytes:
            self._writer.flush()
            # Waits: the caller may change `data` as soon as this returns.
            once_there_is_room(partial(self._file.pwrite, memory, self._position)).result()
        else:
            self._writer.collect(memory, self._position)
        self._position += memory.nbytes
        if self._end is not None:
            self._end = self._position
        return memory.nbytes

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move the position: from the start, from where it is, or from the end. Return it."""
        self._check_open()
        if whence == io.SEEK_END:
            # The file's size counts what was collected only then.
            self._writer.flush()
        offset = operator.index(offset)  # numpy's own numbers would wrap around in sums
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}
        if whence not in base:
            raise ValueError(
                "whence must be 0 (from the start), 1 (from the position) or 2 (from the end); got "
                f"{whence}"
            )
        if base[whence] + offset < 0:
            raise ValueError(
                f"cannot move before the file's start, to position {base[whence] + offset}"
            )
        self._position = base[whence] + offset
        return self._position

    def tell(self) -> int:
        """Return the position."""
        self._check_open()
        return self._position

    def truncate(self, size: int | None = None, /) -> int:
        """Cut or extend the file to `size` bytes, the position without it. Return that size."""
        self._refuse_unless_writable()
        self._writer.flush()
        self._reader.forget()
        nbytes = self._position if size is None else operator.index(size)
        self._file.truncate(nbytes)
        if self._end is not None:
            self._end = nbytes
        return nbytes

    def flush(self) -> None:
        """Wait until everything that was written is in the file.

        A power failure may still lose it. A write that failed raises its error once, here or in an
        earlier call, and is not made again; several raise a BatchError.
        """
        if not self.closed:
            self._writer.flush()

    def sync(self, what: Sync = Sync.DATA) -> None:
        """Make everything that was written durable."""
        self._check_open()
        self._writer.flush()
        once_there_is_room(partial(self._file.sync, what)).result()

    def close(self) -> None:
        """Write what was collected, and close the file. A forked child only lets go of it.

        The file is closed also where a write has failed and no call has raised that yet: this one
        does then, once; a BatchError where several have. Again: does nothing, or goes on where
        Ctrl-C has ended it.
        """
        if self.closed:
            return
        self._still_open.end()
        self._finalizer.detach()
        super().close()  # it calls flush(), which raises what has failed; closed all the same

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close. Where the block has raised, that error stays the one that is raised."""
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as failure:
            _add(failure, error, f"closing {self.name} failed as well: {failure}")

    def __del__(self) -> None:
        """Close, as Python's own files do, unless the garbage collector has found it.

        Then its finalizer has run, and `_let_go` has handed over what is left to do.
        """
        finalizer = getattr(self, "_finalizer", None)  # none where __init__ was interrupted
        if finalizer is not None and finalizer.alive:
            self.close()

    def __repr__(self) -> str:
        """Show path, mode and position."""
        state = "closed" if self.closed else f"at {self._position}"
        return f"FileObject({self.name!r}, {self.mode!r}, {state})"

    def _begin_reading(self) -> None:
        if not self.readable():
            raise io.UnsupportedOperation(
                f"{self.name} was opened for writing only, with mode {self.mode!r}. To read it as "
                "well, open it with 'r+b'"
            )
        # Reads go to the file, which has to have what was collected.
        self._writer.flush()

    def _refuse_unless_writable(self) -> None:
        if not self.writable():
            raise io.UnsupportedOperation(
                f"{self.name} was opened for reading only, with mode {self.mode!r}. To write it, "
                "open it with 'r+b', with 'ab', which appends, or with 'wb', which empties it"
            )

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError(f"{self.name} is closed: open it again to use it")
        if self._writer.is_forked:
            raise ForkedError(
                f"the file object of {self.name} belongs to the parent process; a forked child "
                "opens the file again"
            )


@dataclass(eq=False)
class _StillOpen:
    """What a file object that is not closed has open."""

    file: File
    reader: _BlockReader
    writer: _BlockWriter
    pool: Pool  # with the memory of its blocks
    queue: IOQueue
    is_shared: bool  # the queue is the caller's

    def __post_init__(self) -> None:
        # A wrapper that was collected with the file object closes it, and another thread ends it.
        self._ending = threading.RLock()
        self._has_ended = False

    def end(self) -> None:
        """Wait for all that is under way, and close the file. Interrupted, it can go on.

        `writer.raise_failed` has what failed.
        """
        if self.writer.is_forked:  # a thread of the parent may have had the lock
            self._give_back()
            return
        with self._ending:
            if not self._has_ended:
                self.writer.drain()
                self._give_back()
                self._has_ended = True

    def _give_back(self) -> None:
        self.reader.forget()  # before the memory of its blocks goes
        with suppress(ForkedError):  # a forked child has no part in the queue
            self.queue.forget_pool(self.pool)
        self.file.close()
        if not self.is_shared:
            self.queue.close()

    def end_alone(self) -> None:
        """End, for a caller that no one will call again, and raise what has failed."""
        self.end()
        self.writer.raise_failed()


def _add(failure: Exception, to: BaseException, text: str) -> None:
    """Show `failure` together with another error, which is raised."""
    if hasattr(to, "add_note"):
        to.add_note(text)
    elif to.__context__ is None:  # Python 3.10 has no notes
        to.__context__ = failure


def _let_go(of: weakref.ref[FileObject], still_open: _StillOpen) -> None:
    """Write what a file object has collected, at the end of the program; else let another thread
    close its file.
    """
    if of() is not None:
        still_open.writer.flush()
    elif not still_open.writer.is_forked:
        queue = still_open.queue if still_open.is_shared else None
        Leftover(still_open.end_alone, queue).hand_over()


class _ReadBlock(NamedTuple):
    """`nbytes` of the file from `start` on, in one of the object's buffers."""

    start: int
    nbytes: int
    buffer: memoryview
    read: IOFuture[int]

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    def part_from(self, offset: int) -> memoryview:
        """Wait for the bytes, and return those from `offset` on."""
        # Behind the end of the file the view is empty.
        return self.buffer[offset - self.start : max(offset - self.start, self.read.result())]


class _BlockReader:
    """Blocks that were read or are being read, each right behind the one before."""

    def __init__(self, file: File, buffers: list[memoryview]) -> None:
        self._file = file
        self._buffers = buffers  # those that no block has, shared with the writer
        self._blocks: deque[_ReadBlock] = deque()
        self._next = 0  # the offset that a caller asks next if it reads on without a jump
        self._arrived = memoryview(b"")  # the first block, where its bytes were waited for
        self._arrived_at = 0
        self._owner = os.getpid()  # in a forked child the memory of blocks is not there

    def ready(self, offset: int, nbytes: int) -> bytes:
        """Return these bytes if all are here and no call has to be made for them; else none."""
        start = offset - self._arrived_at
        if start < 0 or start + nbytes > len(self._arrived) or os.getpid() != self._owner:
            return b""
        return bytes(self._arrived[start : start + nbytes])

    def has(self, offset: int) -> bool:
        """Return whether the byte is in a block."""
        return any(block.start <= offset < block.end for block in self._blocks)

    def part_from(self, offset: int) -> memoryview:
        """Wait for the bytes from `offset` on; return some of them, none at the end of the file."""
        part = self._part_from(offset)
        # Another program or handle may have made the file longer since the block was read.
        if not part.nbytes and offset < self._file.size:
            self._drop_first()
            part = self._part_from(offset)
        return part

    def _part_from(self, offset: int) -> memoryview:
        # There are several blocks only where reading on brought the caller here.
        reads_on = offset == self._next or (len(self._blocks) > 1 and self.has(offset))
        while self._blocks and not self._blocks[0].start <= offset < self._blocks[0].end:
            self._drop_first()
        if not self._blocks:
            self._begin(offset // PAGE * PAGE, whole=reads_on)
        first = self._blocks[0]
        self._next = first.end
        while reads_on and self._buffers and self._blocks[-1].end < self._file.size:
            self._begin(self._blocks[-1].end, whole=True)
        try:
            part = first.part_from(offset)
        except NVMeError:
            self._drop_first()  # the next call reads it again
            raise
        self._arrived, self._arrived_at = first.buffer[: first.read.result()], first.start
        return part

    def forget(self) -> None:
        """Let go of all blocks, as the file changes."""
        while self._blocks:
            self._drop_first()

    def _begin(self, start: int, *, whole: bool) -> None:
        buffer = self._buffers.pop()
        # Little after a jump: the next read may be elsewhere again.
        nbytes = buffer.nbytes if whole else min(_JUMP_BYTES, buffer.nbytes)
        try:
            read = once_there_is_room(partial(self._file.readinto, buffer[:nbytes], start))
        except BaseException:
            self._buffers.append(_instead_of(buffer))
            raise
        self._blocks.append(_ReadBlock(start, nbytes, buffer, read))

    def _drop_first(self) -> None:
        self._arrived = memoryview(b"")
        # Waits: until then the drive may be at work on the buffer. Interrupted, the block stays.
        self._blocks[0].read.exception()
        self._buffers.append(self._blocks.popleft().buffer)


class _BlockWriter:
    """Collects bytes that are written in small pieces in one block; writes it when full."""

    def __init__(self, file: File, buffers: list[memoryview]) -> None:
        self._file = file
        self._buffers = buffers
        self._block: memoryview | None = None
        self._start = 0
        self._nbytes = 0
        self._under_way: deque[tuple[memoryview, IOFuture[int]]] = deque()
        self._failed: list[Exception] = []  # what flush() is to raise
        self._owner = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the one that made it."""
        return os.getpid() != self._owner

    def collect(self, memory: memoryview, offset: int) -> None:
        """Take a copy of `memory`, which belongs at `offset`."""
        if offset != self._start + self._nbytes:
            self.flush()
        while memory.nbytes:
            if self._block is None:
                self._block, self._start, self._nbytes = self._free_buffer(), offset, 0
            # A block ends where a block of the file ends, so that all but the first are whole
            # pages.
            room = self._block.nbytes - self._start % self._block.nbytes - self._nbytes
            done = min(memory.nbytes, room)
            self._block[self._nbytes : self._nbytes + done] = memory[:done]
            self._nbytes += done
            offset += done
            memory = memory[done:]
            if done == room:
                self._write()

    def flush(self) -> None:
        """Write what was collected, wait for it, and raise what has failed.

        A forked child leaves that to its parent.
        """
        if self.is_forked:
            return
        self._write()
        while self._under_way:
            self._finish_oldest()
        self.raise_failed()

    def drain(self) -> None:
        """Write what was collected and wait for it, for the last time; keep what has failed."""
        if self.is_forked:
            return
        try:
            self._write()
        except Exception as refusal:
            self._failed.append(refusal)
            self._block = None
        while self._under_way:
            self._finish_oldest()

    def raise_failed(self) -> None:
        """Raise what has failed and was not raised yet."""
        failed, self._failed = self._failed, []
        errors = [error for error in failed if isinstance(error, NVMeError)]
        if len(errors) > 1:
            raise BatchError(errors)
        if failed:
            raise failed[0]

    def _write(self) -> None:
        block = self._block
        if block is None:
            return
        try:
            write = once_there_is_room(
                partial(self._file.pwrite, block[: self._nbytes], self._start)
            )
        except BaseException:
            # The next call writes these bytes.
            self._block = _instead_of(block)
            self._block[: self._nbytes] = block[: self._nbytes]
            raise
        self._block = None
        self._under_way.append((block, write))

    def _free_buffer(self) -> memoryview:
        if not self._buffers:
            self._finish_oldest()
            self.raise_failed()
        return self._buffers.pop()

    def _finish_oldest(self) -> None:
        buffer, write = self._under_way[0]
        # Interrupted, the block stays: the drive may still read it.
        error = write.exception()
        # Before the write is forgotten, and once: a signal may come in between.
        if isinstance(error, Exception) and error not in self._failed:
            self._failed.append(error)
        self._under_way.popleft()
        self._buffers.append(buffer)


def _bytes_asked(size: int | None) -> int:
    """Return how many bytes are asked for at most."""
    wanted = -1 if size is None else operator.index(size)
    return wanted if wanted >= 0 else sys.maxsize


def _instead_of(buffer: memoryview) -> memoryview:
    """Return new memory in place of a buffer whose submission was refused or interrupted.

    The drive may be at work on the old one all the same. The operation keeps it.
    """
    new: memoryview = empty("U8", (buffer.nbytes,), Returns.BYTES)
    return new


def _bytes_of(data: Any) -> memoryview:
    memory = memoryview(data)
    # Python casts no shape with a zero in it.
    return memory.cast("B") if memory.nbytes else memoryview(bytearray())
