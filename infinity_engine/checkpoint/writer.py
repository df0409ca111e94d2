"""Writes one rank's shard of a checkpoint: its slices, in safetensors files, as the source hands them out.

Holds one slice at a time beside the queue's staging memory. Commits nothing: `CheckpointDirectory` does that once all
ranks have written.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from pathlib import Path

from deepnvme import IOQueue
from deepnvme.arrays import Description
from deepnvme.buffers import memory_of
from deepnvme.checksum import BlockChecksums
from deepnvme.errors import NVMeError
from deepnvme.safetensors import Order, SafetensorsWriter
from infinity_engine.checkpoint.manifest import BLOCK_BYTES, SavedFile
from infinity_engine.checkpoint.streams import Slice, StreamSource
from infinity_engine.errors import TransferError
from infinity_engine.storage import transfer_error

__all__ = ["FILE_BYTES", "write_shard"]

FILE_BYTES = 4 << 30
"""A file ends with the slice that fills it up to here."""


def write_shard(
    directory: Path, rank: int, source: StreamSource, *, queue: IOQueue, file_bytes: int = FILE_BYTES
) -> tuple[SavedFile, ...]:
    """Write what `source` has into files of `directory`, synced; return what the manifest says of them.

    Raises:
        TransferError: the drive is full or failed. What was written is no checkpoint and stays for `abandon`.
    """
    contents = source.contents()
    return tuple(
        _write_file(directory / f"rank-{rank:05d}-{number:05d}.safetensors", slices, contents, queue)
        for number, slices in enumerate(_files(source.slices(), file_bytes))
    )


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


def _write_file(
    path: Path, slices: Sequence[Slice], contents: Iterator[tuple[Slice, memoryview]], queue: IOQueue
) -> SavedFile:
    sums = BlockChecksums(BLOCK_BYTES)
    layout = {part.tensor: (part.stream.dtype, (part.numel,)) for part in slices}
    try:
        with SafetensorsWriter(path, layout, order=Order.GIVEN, sums=sums, queue=queue) as writer:
            for expected in slices:
                part, values = next(contents)
                assert part == expected, "a source hands out its slices in their order"
                memory = memory_of(values, writable=False)
                writer.write({part.tensor: Description(part.stream.dtype, (part.numel,), memory)})
            nbytes = writer.nbytes
    except TransferError:  # of the source, which reads its own drives
        raise
    except NVMeError as error:
        raise transfer_error(error, f"checkpoint {path.parent}") from None
    except OSError as error:
        raise TransferError(
            errno=error.errno or errno.EIO,
            path=str(path),
            offset=0,
            asked=sum(part.nbytes for part in slices),
            done=0,
            what=f"checkpoint {path.parent}",
        ) from None
    return SavedFile(name=path.name, nbytes=nbytes, checksums=sums.checksums())
