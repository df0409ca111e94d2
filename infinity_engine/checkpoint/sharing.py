"""Files of a checkpoint that share their bytes with the swap file, where the file system can.

XFS and Btrfs let two files have the same blocks (reflinks). What rests on a drive is then in the
checkpoint at once, neither read nor written. Training may overwrite it: the file system gives the
file that is written to new blocks. Only the checksums are read, by the thread that writes the rest.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from deepnvme import IOFuture, IOQueue
from deepnvme.errors import NVMeError
from deepnvme.formats.safetensors import encoded_header
from deepnvme.memory.buffers import Memory, memory_of
from deepnvme.memory.checksum import BlockChecksums
from deepnvme.sizes import whole_pages
from infinity_engine.checkpoint.manifest import BLOCK_BYTES, SavedFile
from infinity_engine.checkpoint.streams import Slice, fill_name
from infinity_engine.errors import DamageError
from infinity_engine.storage import transfer_error

__all__ = ["LEAST_BYTES", "SharedFile", "SharedRun", "share_runs"]


LEAST_BYTES = 1 << 20
"""Shorter runs are copied: that is as fast, and sharing one costs up to a page."""


class SharedRun(Protocol):
    """Slices one after another on a drive. They own the whole of their last page."""

    @property
    def nbytes(self) -> int:
        """How many bytes they have together."""
        ...

    def share(self, descriptor: int, offset: int) -> Callable[[int, Memory], DamageError | None]:
        """Let a file have them from `offset` on; return what checks bytes read back from there."""
        ...


@dataclass(frozen=True)
class _SharedPart:
    """Pages of a shared file, and what checks the `nbytes` of a run in them."""

    offset: int
    nbytes: int
    check: Callable[[int, Memory], DamageError | None]

    @property
    def end(self) -> int:
        """Where the next part begins."""
        return self.offset + whole_pages(self.nbytes)

    def damage(self, start: int, memory: Memory) -> DamageError | None:
        """Return the error for pages that were read from `start` of the part on."""
        nbytes = min(memory.nbytes, self.nbytes - start)
        return self.check(start, memory.part(0, nbytes))


class SharedFile:
    """One shard file that shares all but its header. It lacks its checksums until `finish`."""

    def __init__(self, path: Path, header: bytes, runs: Sequence[SharedRun]) -> None:
        self._path = path
        self._parts = [_SharedPart(0, len(header), lambda _start, _memory: None)]
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _write_whole(self._descriptor, header)
            for run in runs:
                at = self.nbytes
                self._parts.append(_SharedPart(at, run.nbytes, run.share(self._descriptor, at)))
        except BaseException:
            self.remove()
            raise

    @property
    def name(self) -> str:
        """Its name in the checkpoint's directory."""
        return self._path.name

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return self._parts[-1].end

    def finish(self, queue: IOQueue, rooms: Sequence[memoryview]) -> SavedFile:
        """Read it through `rooms`, sync it; return what the manifest says of it.

        Raises:
            TransferError: the drive failed, or (DamageError) gave other bytes than were written.
        """
        sums = BlockChecksums(BLOCK_BYTES)
        memories = [memory_of(room, writable=True) for room in rooms]
        try:
            with queue.open(self._path) as file:
                for part, start, memory in _read(file.pread, self._parts, memories):
                    damage = part.damage(start, memory)
                    if damage is not None:
                        raise damage
                    sums.append(memory)
        except NVMeError as error:
            raise transfer_error(error, f"checkpoint {self._path.parent}") from None
        os.fsync(self._descriptor)
        self.close()
        return SavedFile(name=self.name, nbytes=self.nbytes, checksums=sums.checksums())

    def remove(self) -> None:
        """Delete it: what it shares stays where it came from."""
        self.close()
        with suppress(OSError):
            self._path.unlink()

    def close(self) -> None:
        """Let go of the file. Again: does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _write_whole(descriptor: int, header: bytes) -> None:
    """Write the first bytes of a file: one call may write fewer than it was given."""
    done = 0
    while done < len(header):
        done += os.pwrite(descriptor, memoryview(header)[done:], done)


def share_runs(
    directory: Path,
    names: Iterator[str],
    runs: Sequence[tuple[SharedRun, Sequence[Slice]]],
    file_bytes: int,
) -> list[SharedFile]:
    """Make files in `directory` that share these runs, `names` in turn; none where none can be.

    A file ends with the run that fills it up to `file_bytes`. All writes to the runs have ended.
    """
    files: list[SharedFile] = []
    left = deque(runs)
    try:
        while left:
            chosen: list[tuple[SharedRun, Sequence[Slice]]] = []
            while left and sum(run.nbytes for run, _ in chosen) < file_bytes:
                chosen.append(left.popleft())
            path = directory / next(names)
            header = encoded_header(_layout(chosen), {}, path)
            files.append(SharedFile(path, header, [run for run, _ in chosen]))
    except BaseException as error:
        for file in files:
            file.remove()
        if isinstance(error, OSError):  # whatever the reason: the caller copies
            return []
        raise
    return files


def _layout(
    runs: Sequence[tuple[SharedRun, Sequence[Slice]]],
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the tensors of a file. The format has no holes, so what fills up a page is one too."""
    layout: dict[str, tuple[str, tuple[int, ...]]] = {}
    for run, slices in runs:
        layout.update({part.tensor: (part.stream.dtype, (part.numel,)) for part in slices})
        fill = whole_pages(run.nbytes) - run.nbytes
        if fill:
            layout[fill_name(len(layout))] = ("U8", (fill,))
    return layout


def _read(
    pread: Callable[[Memory, int], IOFuture[int]],
    parts: Sequence[_SharedPart],
    rooms: Sequence[Memory],
) -> Iterator[tuple[_SharedPart, int, Memory]]:
    """Yield the bytes of all parts in order, with where they begin in their part.

    While the caller has some, the next ones are read. They are valid until the next are asked for.
    """
    step = min(room.nbytes for room in rooms) // BLOCK_BYTES * BLOCK_BYTES
    starts = deque(
        (part, start) for part in parts for start in range(0, part.end - part.offset, step)
    )
    free = deque(rooms)
    reading: deque[tuple[IOFuture[int], _SharedPart, int, Memory, Memory]] = deque()
    try:
        while starts or reading:
            while starts and free:
                (part, start), room = starts.popleft(), free.popleft()
                memory = room.part(0, min(step, part.end - part.offset - start))
                reading.append((pread(memory, part.offset + start), part, start, memory, room))
            future, part, start, memory, room = reading.popleft()
            future.result()
            yield part, start, memory
            free.append(room)
    finally:
        for future, *_ in reading:  # the rooms are used again after this
            future.exception()
