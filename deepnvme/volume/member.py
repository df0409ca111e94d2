"""One directory of a volume: its `data` file made, locked, named by its first page, measured and
removed.

Owns the files and their locks. `Volume`, the only caller, knows which bytes hold what. Space is
reserved when a member is made, and later only by `lengthen`.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import re
import shutil
import stat
import struct
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, ClassVar

from deepnvme.errors import ClosedError, VolumeError, VolumeLockedError, file_error
from deepnvme.machine.probing import HOST_ROOTS, SystemRoots, read_kernel_file
from deepnvme.measuring.measure import Workload, cut, fill, in_turn, keep_pending, transfers
from deepnvme.memory.buffers import Memory
from deepnvme.memory.pool import Cuda, Pool
from deepnvme.queue.future import IOFuture
from deepnvme.queue.queue import File, IOQueue
from deepnvme.sizes import PAGE
from deepnvme.volume.framing import NewerVersionError, framed, strict_json, unframed

__all__ = [
    "DATA",
    "MEASURED_BYTES",
    "Access",
    "Header",
    "MemberFile",
    "lock_holder",
    "measure_rates",
]

DATA = "data"
"""The name of a member's one file."""

MEASURED_BYTES = 64 << 20
"""How many bytes of a member are read and overwritten, at most, to measure it."""

_UNNAMED = "(unnamed)"  # the name of a temporary member's file in errors
# The answers of file systems that cannot make a file without a name. EISDIR comes from those that
# do not know O_TMPFILE, whose other bit is O_DIRECTORY.
_NEED_A_NAME = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL})
_KIND = "deepnvme-volume"
_VERSION = 1
# FICLONERANGE of linux/fs.h, which is _IOW(0x94, 13, struct file_clone_range), and that structure:
# the source's descriptor, its offset and length, and the offset in the destination.
_FICLONERANGE = 0x4020940D
_CLONE_RANGE = struct.Struct("qQQQ")
_SECTOR = 512  # every drive writes so many bytes whole or not at all

# Measuring: enough in flight for any drive, short enough for a caller that waits.
_OPERATION = 2 << 20
_PENDING = 4
_ROUND_S = 0.04
_ROUNDS = 3

# By the words of /proc/locks.
_USES = MappingProxyType({"READ": "reading", "WRITE": "writing"})


class Access(Enum):
    """Whether a store or volume is opened for reading or for writing."""

    # by any number of processes at once, while none has it open for writing; also from a drive that
    # is mounted read-only
    READ = "read"
    WRITE = "write"  # by one process, while no other has it open


@dataclass(frozen=True)
class Header:
    """The first page of a member's file."""

    volume: str  # the name of the volume: 32 hexadecimal digits
    member: int  # its number among the members
    capacity: int  # bytes for use, behind this page
    rates: tuple[float, ...]  # one for each member, all in the same unit

    def encode(self) -> bytes:
        """Return the page.

        Raises:
            ValueError: the volume has too many members.
        """
        page = framed(_KIND, _VERSION, asdict(self))
        if len(page) > PAGE:
            raise ValueError(
                f"a volume of {len(self.rates)} members is too large; use fewer directories"
            )
        return page.ljust(PAGE, b"\0")

    @classmethod
    def parse(cls, page: bytes) -> Header:
        """Return the header in a page.

        Raises:
            ValueError: there is none, or a damaged one; the text says why.
        """
        if not any(page):
            raise ValueError("making it never finished")
        payload, rest = unframed(_KIND, _VERSION, page)
        if any(rest):
            raise ValueError("there is something behind the JSON in its first page: it is damaged")
        return _header_of(payload)


def _header_of(payload: bytes) -> Header:
    try:
        fields: Any = strict_json(payload)
        header = Header(
            fields["volume"], fields["member"], fields["capacity"], tuple(fields["rates"])
        )
        sound = (
            re.fullmatch("[0-9a-f]{32}", header.volume)
            and 0 <= header.member < len(header.rates)
            and header.capacity > 0
            and header.capacity % PAGE == 0
            and all(math.isfinite(rate) and rate > 0 for rate in header.rates)
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        sound = None
    if not sound:
        raise ValueError(
            "its first page has a valid checksum and makes no sense: it was not written by deepnvme"
        )
    return header


class MemberFile:
    """A member's directory, with `data` locked and, after `open()`, open for I/O.

    The lock belongs to this process: a forked child does not have it, and the end of the process
    releases it. The file of a temporary member has no name, so it ends with the process, also where
    that is killed.
    """

    _living: ClassVar[weakref.WeakSet[MemberFile]] = weakref.WeakSet()

    def __init__(
        self,
        directory: Path,
        lock: int,
        *,
        made_directory: bool = False,
        temporary: Path | None = None,
        access: Access = Access.WRITE,
    ) -> None:
        """Take over the descriptor `lock`; `open` opens a file without a name by `temporary`."""
        self.directory = directory
        self.path = directory / (DATA if temporary is None else _UNNAMED)
        self.access = access
        self.read_bytes = 0
        self.written_bytes = 0
        self._lock = lock
        self._made_directory = made_directory
        self._temporary = temporary
        self._file: File | None = None
        self._queue: IOQueue | None = None
        self._under_way: deque[IOFuture[int]] = deque()  # see drain()
        # Held from submitting an operation to noting it: drain() would miss it in between.
        self._changing = threading.Lock()
        MemberFile._living.add(self)

    @classmethod
    def make(cls, directory: Path) -> MemberFile:
        """Make `data` in a directory that is empty or does not exist yet; its parent does.

        Raises:
            VolumeError: the directory has something in it, or cannot be made.
        """
        try:
            # Made first and looked at after: two processes cannot both make it.
            directory.mkdir(mode=0o700)
            made = True
        except FileExistsError:
            made = False
            if not directory.is_dir():
                raise VolumeError(
                    errno.ENOTDIR, "it is no directory; name another", path=str(directory)
                ) from None
            if any(directory.iterdir()):
                raise _not_empty(directory) from None
        except FileNotFoundError:
            raise VolumeError(
                errno.ENOENT, "its parent directory does not exist: make that first (is the drive "
                              "mounted?)",
                path=str(directory),
            ) from None  # fmt: skip
        try:
            return cls(directory, _made_and_locked(directory / DATA), made_directory=made)
        except BaseException as error:
            if made:
                with suppress(OSError):
                    directory.rmdir()
            if isinstance(error, FileExistsError):
                raise _not_empty(directory) from None
            raise

    @classmethod
    def make_temporary(cls, parent: Path) -> MemberFile:
        """Make a file without a name on the drive of `parent`.

        Raises:
            VolumeError: there is no such directory.
        """
        try:
            descriptor = os.open(parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            path = Path(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:
            raise VolumeError(
                errno.ENOENT, "there is no such directory; is the drive mounted?", path=str(parent)
            ) from None
        except OSError as error:
            if error.errno not in _NEED_A_NAME:
                raise
            path = parent / f".deepnvme-{uuid.uuid4().hex}"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        return cls(parent, descriptor, temporary=path)

    @classmethod
    def hold(cls, directory: Path, access: Access) -> MemberFile:
        """Lock the `data` that is there.

        Raises:
            VolumeError: there is none.
            VolumeLockedError: another process has it open in a way that excludes this access.
        """
        lock = _opened_and_locked(directory, access)
        # It was removed before this process locked it, and another may be in its place.
        while not os.fstat(lock).st_nlink:
            os.close(lock)
            lock = _opened_and_locked(directory, access)
        return cls(directory, lock, access=access)

    @property
    def file(self) -> File:
        """The open file."""
        if self._file is None:
            raise ClosedError(f"the volume in {self.directory} is closed: open it again to use it")
        return self._file

    def open(self, queue: IOQueue) -> None:
        """Open the file for I/O through this queue."""
        try:
            self._file = queue.open(
                self._temporary or self.path, "r" if self.access is Access.READ else "r+"
            )
        finally:
            # Also where it could not be opened: no later run would remove it.
            self._drop_name()
        self._file.show_as(str(self.path.absolute()))
        self._queue = queue

    @property
    def queue(self) -> IOQueue:
        """The queue that it is open through."""
        if self._queue is None:
            raise ClosedError(f"the volume in {self.directory} is closed: open it again to use it")
        return self._queue

    def reserve_space(self, nbytes: int) -> None:
        """Make `data` that long, with all of it reserved on the drive.

        Raises:
            VolumeError: the drive has not so much.
        """
        with self._room_for(nbytes):
            # Measuring may have reserved more than the member gets. Never lengthens: where nothing
            # can be reserved, only bytes behind the end are written.
            self.file.truncate(min(self.length, nbytes))
            self.file.preallocate(nbytes)

    def lengthen(self, end: int, new_end: int) -> None:
        """Reserve the bytes from `end` to `new_end`, durably. A header then makes them usable.

        Raises:
            VolumeError: the drive has not so much.
        """
        with self._room_for(new_end):
            # Never shorter: after a failure, the header on the drive may count on more.
            self.file.truncate(max(self.length, new_end))
            # Only the new bytes: where the file system reserves by writing, it would overwrite what
            # other threads write to the old ones.
            try:
                os.posix_fallocate(self._lock, end, new_end - end)
            except OSError as error:
                raise file_error(error.errno or 0, "preallocate", self.file.path) from None
        if not self._temporary:
            with _naming(self.directory):
                # Durable before a header counts on these bytes.
                os.fsync(self._lock)

    def cut_off(self, length: int) -> None:
        """Shorten `data` to `length` bytes."""
        self.file.truncate(length)

    @property
    def length(self) -> int:
        """The bytes of `data`."""
        return os.fstat(self._lock).st_size

    @contextmanager
    def _room_for(self, nbytes: int) -> Iterator[None]:
        # Asked before: a reservation that fails can leave the file system full.
        free = shutil.disk_usage(self.directory).free
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise VolumeError(
                error.errno,
                f"{nbytes} B cannot be reserved here, {free} B are free "
                f"({error.strerror}); ask for less capacity, or give each Member its own",
                path=str(self.directory),
            ) from None

    def write_header(self, header: Header) -> None:
        """Write the first page; it is durable when this returns, unless temporary."""
        with _naming(self.directory):
            # Through the page cache: no direct operation of the queue touches this page, as extents
            # begin behind it.
            os.pwrite(self._lock, header.encode(), 0)
            if not self._temporary:
                os.fsync(self._lock)

    def finish_making(self) -> None:
        """Close the directory to other users and make its name durable, unless temporary."""
        if self._temporary:
            return
        self.directory.chmod(0o700)
        parent = [self.directory.absolute().parent] if self._made_directory else []
        for directory in (self.directory, *parent):
            # The name `data` is durable with its directory, a new directory's with its parent.
            with _opened(directory) as descriptor, _naming(directory):
                os.fsync(descriptor)

    def read_header(self) -> Header:
        """Return the header in the first page.

        Raises:
            VolumeError: it is damaged, or the file is shorter than it says.
        """
        with _naming(self.directory):
            page = os.pread(self._lock, PAGE, 0)
        try:
            header = Header.parse(page.ljust(PAGE, b"\0"))
            if self.length < PAGE + header.capacity:
                end = PAGE + header.capacity
                raise ValueError(
                    f"{DATA} was cut off: it has {self.length} B and should have {end} B"
                )
        except NewerVersionError as newer:
            raise VolumeError(
                errno.ENOTSUP, f"{newer}, and leave it as it is", path=str(self.directory)
            ) from None
        except ValueError as problem:
            raise VolumeError(
                errno.EBADMSG, _flawed(page, problem), path=str(self.directory)
            ) from None
        return header

    def check_replaceable(self, header: Header) -> None:
        """Refuse a header that cannot safely be overwritten with another one.

        Raises:
            VolumeError: it is longer than a sector, so that a power failure could leave a mixture.
        """
        if len(header.encode().rstrip(b"\0")) > _SECTOR:
            raise VolumeError(
                errno.ENOTSUP,
                "a volume of so many members cannot grow or be trimmed: its header has more than "
                f"the {_SECTOR} B that a drive writes whole or not at all. Make another volume of "
                "the right size",
                path=str(self.directory),
            )

    def pread(self, memory: Memory, offset: int) -> IOFuture[int]:
        """As `File.pread`, and counted."""
        with self._changing:
            future = self.file.pread(memory, offset)
            self.read_bytes += memory.nbytes
            self._note(future)
        return future

    def pwrite(self, memory: Memory, offset: int) -> IOFuture[int]:
        """As `File.pwrite`, and counted."""
        with self._changing:
            future = self.file.pwrite(memory, offset)
            self.written_bytes += memory.nbytes
            self._note(future)
        return future

    def share(self, start: int, nbytes: int, descriptor: int, offset: int) -> None:
        """Share whole pages of this file with another one, without a copy (a reflink)."""
        request = _CLONE_RANGE.pack(self._lock, start, nbytes, offset)
        fcntl.ioctl(descriptor, _FICLONERANGE, request)

    def drain(self) -> None:
        """Wait until every read and write has ended, also by failure or cancellation."""
        # Of a copy, so that after Ctrl-C another call waits for the same operations.
        for future in tuple(self._under_way):
            with suppress(CancelledError):
                future.exception()

    def close(self) -> None:
        """Wait for reads and writes, close and unlock the file; remove it if temporary.

        Again: does nothing.
        """
        if self._temporary:
            self.discard()
        else:
            self._let_go()

    def discard(self) -> None:
        """Remove what was made, and close."""
        if self._lock < 0:
            return
        self._stop()
        try:
            # First: forked children may keep the file open, and with it its space, as long as they
            # live. Errors are left to the next lines, which name the file.
            with suppress(OSError):
                os.ftruncate(self._lock, 0)
            if self._temporary is None:
                self.path.unlink(missing_ok=True)
            else:
                self._drop_name()
            if self._made_directory:
                with suppress(OSError):  # another program put something into it
                    self.directory.rmdir()
        except OSError:  # and not Ctrl-C, after which all of this is done again
            self._let_go()
            raise
        self._let_go()

    def _drop_name(self) -> None:
        """Remove the name of a temporary file, where its file system needs names to make files."""
        if self._temporary is not None and self._temporary.parent == self.directory:
            self._temporary.unlink(missing_ok=True)

    def _let_go(self) -> None:
        if self._lock < 0:
            return
        self._stop()
        if self._temporary is None:
            # Closing is not enough: a child forked just now may have a copy of the descriptor.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        self._close_lock()

    def _stop(self) -> None:
        """Refuse reads and writes, and wait for those under way: the lock is held until then."""
        with self._changing:
            if self._file is not None:
                self._file.close()
                self._file = None
        self.drain()

    def _note(self, future: IOFuture[int]) -> None:
        """Remember it until it has ended."""
        self._under_way.append(future)
        # Only from the front: looking at all would take longer the more are pending.
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft()

    def _close_lock(self) -> None:
        # Forgotten first: a second close could close another file that got the same number.
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def _not_empty(directory: Path) -> VolumeError:
    return VolumeError(
        errno.ENOTEMPTY, "a volume is made in a new or empty directory, and this one holds "
                         "something: name another",
        path=str(directory),
    )  # fmt: skip


def _made_and_locked(path: Path) -> int:
    """Return the descriptor of a new file that this process has locked.

    Raises:
        FileExistsError: there is one already.
        BlockingIOError: another process locked it first; this one has removed it again.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with _naming(path.parent):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(lock)
        # O_EXCL has made it, so it is this process's to remove.
        path.unlink(missing_ok=True)
        raise
    return lock


def _opened_and_locked(directory: Path, access: Access) -> int:
    lock = _opened_data(directory, access)
    try:
        with _naming(directory):
            fcntl.flock(
                lock, (fcntl.LOCK_SH if access is Access.READ else fcntl.LOCK_EX) | fcntl.LOCK_NB
            )
    except BaseException as error:
        # Before it is closed: /proc/locks has the numbers of the file, not its name.
        status = os.fstat(lock)
        os.close(lock)
        if isinstance(error, BlockingIOError):
            told = (_USES[kind] for kind, _ in _locks(status, HOST_ROOTS))
            use = "writing" if access is Access.READ else next(told, "reading or writing")
            raise VolumeLockedError(str(directory), lock_holder(status), use) from None
        raise
    return lock


def _opened_data(directory: Path, access: Access) -> int:
    flags = os.O_RDONLY if access is Access.READ else os.O_RDWR
    try:  # O_NONBLOCK: opening a pipe of that name would wait for its other end
        data = os.open(directory / DATA, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        if directory.is_dir():
            what = "it holds no volume: name the directory of a volume or a store"
        elif directory.exists():
            what = "it is not a directory: name the directory of a volume or a store"
        else:
            what = "there is no such directory; is the drive mounted?"
        raise VolumeError(errno.ENOENT, what, path=str(directory)) from None
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.ELOOP, errno.ENXIO):
            raise
        raise _foreign(directory) from None
    if not stat.S_ISREG(os.fstat(data).st_mode):
        os.close(data)
        raise _foreign(directory)
    return data


def _foreign(directory: Path) -> VolumeError:
    return VolumeError(
        errno.EBADMSG,
        f"its {DATA} is not a regular file, so it is no volume's: name another directory",
        path=str(directory),
    )


def _flawed(page: bytes, problem: ValueError) -> str:
    """Return what is wrong with a member, and what to do that spares another program's files."""
    if any(page) and not page.startswith(_KIND.encode()):
        return (
            f"its {DATA} is another program's file, or a volume's damaged one: {problem}. "
            "If it is not deepnvme's, name another directory; if it is, restore it from a copy"
        )
    return (
        f"it holds no volume that can be used: {problem}. Restore it from a copy, or remove it and "
        "make a new one"
    )


@contextmanager
def _naming(directory: Path) -> Iterator[None]:
    """Name the directory in errors of calls on descriptors, which name no file themselves."""
    try:
        yield
    except BlockingIOError:  # another process has the lock: the caller says which
        raise
    except OSError as error:
        raise VolumeError(
            error.errno or 0, os.strerror(error.errno or 0), path=str(directory)
        ) from error


def lock_holder(status: os.stat_result, roots: SystemRoots = HOST_ROOTS) -> int | None:
    """Return a process that holds an flock on the file, None where the kernel does not say."""
    # 0: a process of another namespace
    return next((pid or None for _, pid in _locks(status, roots)), None)


def _locks(status: os.stat_result, roots: SystemRoots) -> Iterator[tuple[str, int]]:
    """Yield kind and process of each flock on the file."""
    # Subvolumes of btrfs have device numbers of their own, so no line matches: it stays unknown.
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    for line in read_kernel_file(roots.proc / "locks").splitlines():
        fields = line.split()  # 1: FLOCK ADVISORY WRITE 4711 fe:00:1310733 0 EOF
        told = len(fields) == 8 and fields[1] == "FLOCK" and fields[3] in _USES
        if told and fields[5] == file and fields[4].isdecimal():
            yield fields[3], int(fields[4])


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    """Yield a descriptor of the directory, which stays the same if its name is given to another."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def measure_rates(files: Sequence[File], nbytes: int) -> list[float]:
    """Return the bytes per second of each file, its first `nbytes` read and overwritten in turn."""
    operation = min(_OPERATION, nbytes)
    # Not page-locked for CUDA: the memory lives for a fraction of a second.
    pool = Pool(_PENDING * operation, cuda=Cuda.NEVER)
    buffers = cut(pool.buffer(pool.capacity), operation, _PENDING)
    for buffer in buffers:
        fill(buffer)
    for file in files:  # first writes have another speed, which is not measured
        for future in [
            file.pwrite(buffers[0], offset)
            for offset in range(0, nbytes - operation + 1, operation)
        ]:
            future.result()
    loads = {file: _starts(file, nbytes, operation) for file in files}

    def rate(file: File) -> float:
        begin_s = time.perf_counter()
        return keep_pending(loads[file], buffers, _ROUND_S) / (time.perf_counter() - begin_s)

    return [median(rates) for rates in in_turn(files, rate, rounds=_ROUNDS).values()]


def _starts(
    file: File, nbytes: int, operation: int
) -> Iterator[Callable[[memoryview], IOFuture[int]]]:
    verbs = (file.pread, file.pwrite)
    for writes, offset in transfers(Workload.MIXED, nbytes, operation):
        yield partial(verbs[writes], offset=offset)


def _after_fork_in_child() -> None:
    for member in list(MemberFile._living):
        member._changing = threading.Lock()  # the thread that held it is not here
        with suppress(OSError):  # closed at that moment
            # This unlocks nothing: a flock belongs to the open file, which the parent has open too.
            # A copy left open here would keep the lock beyond the parent's end.
            member._close_lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
