"""The errors of queues, memory, volumes and stores: OSErrors that say which operation, on which
file, where, how much, why.

NVMeError(OSError)              op, path, offset, asked, done, errno, backend
  ShortReadError(EOFError)      the file ended before the bytes that were asked for
  DeadlineError(TimeoutError)   deadline_s was over before all of the operation had begun
  BatchError                    more than one operation of a batch failed; `errors` has them all
  QueueFull                     as many operations as the queue holds are pending
  ClosedError(ValueError)       the queue, file, volume or store is closed
  ForkedError(RuntimeError)     the queue belongs to the parent process
  PoolExhaustedError(MemoryError)   the pool has no free piece of that size
  BackendUnavailableError       the kernel or this process refuses the backend asked for
  VolumeError                   a volume's directory is missing, damaged or another volume's
    VolumeLockedError           it is open for `use` already; `pid`, where the kernel says which
    VolumeFullError             the volume has no room; asked, free, largest
  StoreError                    a store's directory holds no store, or a damaged one
    PoisonedError               an fsync failed: nothing can be made durable any more
  ChecksumError                 the drive returned other bytes than were put; `name`, `offset`
"""

from __future__ import annotations

import errno as errno_names
import os
from collections.abc import Sequence
from types import MappingProxyType

__all__ = [
    "BackendUnavailableError",
    "BatchError",
    "ChecksumError",
    "ClosedError",
    "DeadlineError",
    "ForkedError",
    "NVMeError",
    "PoisonedError",
    "PoolExhaustedError",
    "QueueFull",
    "ShortReadError",
    "StoreError",
    "VolumeError",
    "VolumeFullError",
    "VolumeLockedError",
    "file_error",
    "io_error",
]

_HINTS = MappingProxyType(
    {
        errno_names.ENOSPC: "the file system is full",
        errno_names.EDQUOT: "the quota is used up",
        errno_names.EFBIG: "the file may not grow that large (file system, or ulimit -f)",
        errno_names.EIO: "the device or file system failed; the kernel's log says more",
        errno_names.EROFS: "the file system is read-only",
        errno_names.ENOMEM: "out of memory, or over the memlock limit (ulimit -l)",
        errno_names.EBADF: "the file was opened for reading only: open it with mode 'r+'",
        errno_names.ETIMEDOUT: "deadline_s was over before all of it had begun",
        errno_names.ECANCELED: "stop() was called",
    }
)

_MOST_PATHS = 8  # in the message of a BatchError; its `errors` have all


class NVMeError(OSError):
    """An operation failed: `op`, on `asked` bytes of `path` at `offset`, through `backend`.

    `done` is how many bytes from its start were certainly moved. `errno` is the kernel's.
    """

    def __init__(
        self,
        errno: int,
        message: str,
        *,
        op: str = "",
        path: str = "",
        offset: int = 0,
        asked: int = 0,
        done: int = 0,
        backend: str = "",
    ) -> None:
        # OSError shows a third argument behind the message, as the file's name.
        super().__init__(errno, message, *([path] if path else []))
        self.op = op
        self.path = path
        self.offset = offset
        self.asked = asked
        self.done = done
        self.backend = backend

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with every field, as OSError itself would forget ours."""
        return (_rebuilt, (type(self), self.errno, self.strerror, self.filename, self.__dict__))


class ShortReadError(NVMeError, EOFError):
    """The file ended before the bytes that were asked for."""


class DeadlineError(NVMeError, TimeoutError):
    """`deadline_s` was over before all of the operation had begun."""


class BatchError(NVMeError):
    """More than one operation of a batch failed: `errors` has them, the fields are the first's."""

    def __init__(self, errors: Sequence[NVMeError]) -> None:
        first = errors[0]
        others = [
            path
            for path in dict.fromkeys(error.path for error in errors)
            if path not in ("", first.path)
        ]
        also = f"; others on {', '.join(others[:_MOST_PATHS])}" if others else ""
        more = ", ..." if len(others) > _MOST_PATHS else ""
        super().__init__(
            first.errno or 0,
            f"{len(errors)} operations of the batch failed; the first: {first}{also}{more}",
            op=first.op,
            offset=first.offset,
            asked=first.asked,
            done=first.done,
            backend=first.backend,
        )
        self.path = first.path  # the message has it already
        self.errors = tuple(errors)


class QueueFull(NVMeError):  # noqa: N818 - as queue.Full, and what users expect to catch
    """The queue holds as many pending operations as it may, and refuses instead of waiting."""

    def __init__(self, max_pending: int) -> None:
        super().__init__(
            errno_names.EAGAIN,
            f"{max_pending} operations are pending, the most this queue holds: wait for some, "
            "raise max_pending, or use when_full=WhenFull.BLOCK",
        )


class ClosedError(NVMeError, ValueError):
    """The queue, file, volume or store is closed."""

    def __init__(self, message: str) -> None:
        super().__init__(errno_names.EBADF, message)


class ForkedError(NVMeError, RuntimeError):
    """The queue belongs to the parent process."""

    def __init__(self, message: str) -> None:
        super().__init__(errno_names.ENXIO, message)


class PoolExhaustedError(NVMeError, MemoryError):
    """The pool has no free piece of that size."""

    def __init__(self, message: str) -> None:
        super().__init__(errno_names.ENOMEM, message)


class BackendUnavailableError(NVMeError):
    """The kernel or this process refuses the backend asked for."""


class VolumeError(NVMeError):
    """The directory `path` is not what the volume needs there; the message says what to do."""

    def __init__(self, errno: int, message: str, *, path: str = "") -> None:
        super().__init__(errno, message, path=path)


class VolumeLockedError(VolumeError):
    """Another process or handle has the directory open for `use`.

    `pid` is that process; None where the kernel does not say which.
    """

    def __init__(self, path: str, pid: int | None, use: str = "writing") -> None:
        who = {None: "another process", os.getpid(): "this process"}.get(pid, f"process {pid}")
        super().__init__(
            errno_names.EWOULDBLOCK,
            f"{who} has this volume open for {use}. Close it there first: several processes may "
            "read a volume at once, and none may open it while one writes.",
            path=path,
        )
        self.pid = pid
        self.use = use


class VolumeFullError(VolumeError):
    """The volume has no room for `asked` bytes: `free` are, `largest` of them in one piece."""

    def __init__(self, directories: Sequence[str], *, asked: int, free: int, largest: int) -> None:
        super().__init__(
            errno_names.ENOSPC,
            f"no room for {asked} B in the volume of {', '.join(directories)}: {free} B are free, "
            f"{largest} B of them "
            "in one piece; release or delete something, or let the volume grow (Volume.grow)",
        )
        self.asked, self.free, self.largest = asked, free, largest


class StoreError(NVMeError):
    """A directory holds no store, or a damaged one; the message says what can be opened."""


class PoisonedError(StoreError):
    """An fsync failed, and the kernel may have dropped what it could not write.

    Nothing is durable any more: open the store again, at its last commit.
    """


class ChecksumError(NVMeError):
    """The drive returned other bytes than were put: `nbytes` of tensor `name`, from `offset`."""

    def __init__(self, name: str, offset: int, nbytes: int) -> None:
        super().__init__(
            errno_names.EBADMSG,
            f"tensor {name!r}: bytes {offset} to {offset + nbytes} are not those that were put "
            "(crc32c differs); TensorStore.verify() and `deepnvme verify` list all damage",
            op="read",
            offset=offset,
            asked=nbytes,
        )
        self.name = name
        self.nbytes = nbytes


def io_error(
    errno: int, *, op: str, path: str, offset: int, asked: int, done: int, backend: str
) -> NVMeError:
    """Compose the error of a failed operation."""
    hint = f" ({_HINTS[errno]})" if errno in _HINTS else ""
    message = (
        f"{op} of {asked} B at offset {offset} stopped after {done} B: {os.strerror(errno)}{hint} "
        f"[{backend}]"
    )
    kind = DeadlineError if errno == errno_names.ETIMEDOUT else NVMeError
    return kind(
        errno, message, op=op, path=path, offset=offset, asked=asked, done=done, backend=backend
    )


def file_error(errno: int, call: str, path: str) -> OSError:
    """Compose the error of a failed open, stat, preallocate or truncate, by its errno."""
    hint = f" ({_HINTS[errno]})" if errno in _HINTS else ""
    return OSError(errno, f"{call}: {os.strerror(errno)}{hint}", path)


def _rebuilt(
    kind: type[NVMeError], errno: int, message: str, path: str | None, fields: dict[str, object]
) -> NVMeError:
    # Not by the constructor: its arguments differ from class to class.
    error = kind.__new__(kind)
    OSError.__init__(error, errno, message, *([path] if path else []))
    error.__dict__.update(fields)
    return error
