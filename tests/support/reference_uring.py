"""A second implementation of reading and writing files on io_uring: pure Python on
python-liburing's library.

As plain as can be, and sharing nothing with deepnvme: no native code of ours, no direct I/O, no
threads. What both do to a file must be the same, which is what tests/nvme/test_differential.py
asks. The library's C functions are called by ctypes; its Python classes are compiled for CPUs with
AVX-512 and end the process elsewhere.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from types import TracebackType

import liburing.liburing

PIECE = 10_000
DEPTH = 8


class Completion(ctypes.Structure):
    """struct io_uring_cqe."""

    _fields_ = (("user_data", ctypes.c_uint64), ("res", ctypes.c_int32), ("flags", ctypes.c_uint32))


class Functions:
    """The library's functions, with the types that ctypes has to be told."""

    def __init__(self) -> None:
        library = ctypes.CDLL(liburing.liburing.__file__)
        pointer, count, moved = ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint64
        self.init = library.io_uring_queue_init
        self.init.argtypes = (count, pointer, count)
        self.exit = library.io_uring_queue_exit
        self.exit.argtypes = (pointer,)
        self.entry = library.io_uring_get_sqe
        self.entry.argtypes, self.entry.restype = (pointer,), pointer
        self.read, self.write = library.io_uring_prep_read, library.io_uring_prep_write
        self.read.argtypes = self.write.argtypes = (pointer, ctypes.c_int, pointer, count, moved)
        self.mark = library.io_uring_sqe_set_data64
        self.mark.argtypes = (pointer, moved)
        self.submit_and_wait = library.io_uring_submit_and_wait
        self.submit_and_wait.argtypes = (pointer, count)
        self.peek = library.io_uring_peek_cqe
        self.peek.argtypes = (pointer, ctypes.POINTER(ctypes.POINTER(Completion)))
        self.seen = library.io_uring_cqe_seen
        self.seen.argtypes = (pointer, ctypes.POINTER(Completion))


class ReferenceFile:
    """One file, read and written in small pieces, several in flight; short transfers are gone on
    with.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._lib = Functions()
        self._ring = ctypes.create_string_buffer(4096)
        error = self._lib.init(DEPTH, self._ring, 0)
        if error < 0:
            raise OSError(-error, os.strerror(-error))

    def pwrite(self, data: bytes, offset: int) -> int:
        """Write all of `data` at `offset`."""
        return self._move(bytearray(data), offset, self._lib.write)

    def readinto(self, buffer: bytearray, offset: int) -> int:
        """Read into `buffer` up to the end of the file."""
        return self._move(buffer, offset, self._lib.read)

    def truncate(self, nbytes: int) -> None:
        """Cut or extend the file."""
        os.ftruncate(self._fd, nbytes)

    def __enter__(self) -> ReferenceFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lib.exit(self._ring)
        os.close(self._fd)

    def _move(self, buffer: bytearray, offset: int, prepare: ctypes._NamedFuncPointer) -> int:
        if not buffer:
            return 0
        memory = (ctypes.c_char * len(buffer)).from_buffer(buffer)
        address = ctypes.addressof(memory)
        waiting = [(at, min(PIECE, len(buffer) - at)) for at in range(0, len(buffer), PIECE)]
        flying: dict[int, int] = {}
        completion = ctypes.POINTER(Completion)()
        total = 0
        while waiting or flying:
            while waiting and len(flying) < DEPTH:
                at, nbytes = waiting.pop(0)
                entry = self._lib.entry(self._ring)
                prepare(entry, self._fd, address + at, nbytes, offset + at)
                self._lib.mark(entry, at)
                flying[at] = nbytes
            self._lib.submit_and_wait(self._ring, 1)
            while flying and self._lib.peek(self._ring, ctypes.byref(completion)) == 0:
                at, moved = completion.contents.user_data, completion.contents.res
                self._lib.seen(self._ring, completion)
                nbytes = flying.pop(at)
                if moved < 0:
                    raise OSError(-moved, os.strerror(-moved))
                total += moved
                if 0 < moved < nbytes:
                    waiting.append((at + moved, nbytes - moved))
        return total
