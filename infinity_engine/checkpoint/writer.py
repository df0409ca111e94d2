"""Writes one rank's shard: its slices, in safetensors files, as the source hands them out.

Holds one slice at a time beside the queue's staging memory. Commits nothing: `CheckpointDirectory`
does that once all ranks have written.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import TracebackType

from deepnvme import IOQueue
from deepnvme.errors import NVMeError
from deepnvme.formats.safetensors import STAGING_BYTES, Order, SafetensorsError, SafetensorsWriter
from deepnvme.memory.buffers import memory_of
from deepnvme.memory.checksum import BlockChecksums
from infinity_engine.checkpoint.manifest import BLOCK_BYTES, SavedFile
from infinity_engine.checkpoint.streams import SHARD, Slice, StreamSource
from infinity_engine.errors import TransferError
from infinity_engine.storage import transfer_error

__all__ = ["FILE_BYTES", "shard_names", "write_shard"]

FILE_BYTES = 4 << 30
"""A file that has reached this length gets no further tensor."""
"""A file ends with the slice that fills it up to here."""


def write_shard(
    directory: Path,
    rank: int,
    source: StreamSource,
    *,
    queue: IOQueue,
    staging_bytes: int = STAGING_BYTES,
    file_bytes: int = FILE_BYTES,
    first_file: int = 0,
) -> tuple[SavedFile, ...]:
    """Write what `source` has into synced files; return their entries for the manifest.

    The files are in `directory` and numbered from `first_file` on.

    Raises:
        TransferError: the drive is full or failed. What was written is no checkpoint and stays for
            `abandon`.
    """
    names = shard_names(rank, first_file)
    # Known before the first byte: a file begins with the names of all its tensors.
    to_write = list(_files(source.slices(), file_bytes))
    with _ShardFiles(directory, names, to_write, queue, staging_bytes) as files:
        source.hand_out(files)
    return tuple(files.saved)


def shard_names(rank: int, first: int) -> Iterator[str]:
    """Yield the names of a rank's shard files from number `first` on."""
    return (f"{SHARD}{rank:05d}-{number:05d}.safetensors" for number in count(first))


def _files(slices: Sequence[Slice], file_bytes: int) -> Iterator[list[Slice]]:
    """Yield the slices of each file."""
    found: list[Slice] = []
    nbytes = 0
    for part in slices:
        found.append(part)
        nbytes += part.nbytes
        if nbytes >= file_bytes:
            yield found
            found, nbytes = [], 0
    if found:
        yield found


class _ShardFiles:
    """The files of one shard, one of them open at a time.

    A context manager: all slices are in them at its end.
    """

    def __init__(
        self,
        directory: Path,
        names: Iterator[str],
        files: list[list[Slice]],
        queue: IOQueue,
        staging_bytes: int,
    ) -> None:
        self.saved: list[SavedFile] = []
        self._directory = directory
        self._names = names
        self._to_write = deque(files)
        self._queue = queue
        self._staging_bytes = staging_bytes
        self._left = 0  # bytes of the slice that is being written
        self._slices: deque[Slice] = deque()  # of the open file, those that are still to come
        self._sums = BlockChecksums(BLOCK_BYTES)
        self._writer: SafetensorsWriter | None = None

    def take(self, part: Slice, values: memoryview) -> None:
        """Begin to write the next bytes of the next slice. They must not change before `settle`."""
        with self._raising_transfer_errors():
            writer = self._writer or self._open()
            assert part == self._slices[0], "a source hands out its slices in their order"
            # It is 0 at the first bytes of a slice.
            self._left = self._left or part.nbytes
            if len(values):
                writer.begin(memory_of(values, writable=False))
            self._left -= len(values)
            assert self._left >= 0, "a source hands out the bytes that a slice has"
            if not self._left:
                writer.end_tensor()
                self._slices.popleft()
            if not self._slices:
                self._end()

    def settle(self) -> None:
        """Wait until the drive has what was taken."""
        # A file that has ended has waited for all.
        if self._writer is not None:
            with self._raising_transfer_errors():
                self._writer.settle()

    def _open(self) -> SafetensorsWriter:
        slices = self._to_write.popleft()
        self._slices, self._sums = deque(slices), BlockChecksums(BLOCK_BYTES)
        self._writer = SafetensorsWriter(
            self._directory / next(self._names),
            {part.tensor: (part.stream.dtype, (part.numel,)) for part in slices},
            order=Order.GIVEN,
            sums=self._sums,
            staging_bytes=self._staging_bytes,
            queue=self._queue,
        )
        return self._writer

    def _end(self) -> None:
        """Let the open file take its place."""
        writer = self._writer
        assert writer is not None, "a file is open"
        # Leaving the block gives the file its name, once it is on the drive.
        with writer:
            pass
        # Not before: should finishing fail, or Ctrl-C come, __exit__ closes what is still open.
        self._writer = None
        saved = SavedFile(
            name=writer.path.name, nbytes=writer.nbytes, checksums=self._sums.checksums()
        )
        self.saved.append(saved)

    @contextmanager
    def _raising_transfer_errors(self) -> Iterator[None]:
        """Raise what the drive refuses as the engine's own error."""
        what = f"checkpoint {self._directory}"
        try:
            yield
        except SafetensorsError:
            # No drive has failed: it says what the format refuses.
            raise
        except NVMeError as error:
            raise transfer_error(error, what) from None
        except OSError as error:
            raise TransferError(
                errno=error.errno or errno.EIO,
                path=str(error.filename or self._directory),
                offset=0,
                asked=sum(part.nbytes for part in self._slices),
                done=0,
                what=what,
            ) from None

    def __enter__(self) -> _ShardFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A source that ended too early raised nothing. The open file must not get its name then
        # either.
        if self._writer is not None:
            self._writer.__exit__(kind or RuntimeError, error, trace)
        all_written = self._writer is None and not self._to_write
        assert kind is not None or all_written, "a source hands out all of its slices"
