"""Writes checkpoints without an engine: for other numbers of ranks, and from foreign checkpoints.

Streams: one piece of one stream at a time is in memory, whatever the size of the model. Needs no
GPU and no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from deepnvme import IOQueue
from deepnvme.formats.safetensors import STAGING_BYTES
from deepnvme.volume.syncing import sync_file
from infinity_engine.checkpoint.directory import CheckpointDirectory, tag_of_step
from infinity_engine.checkpoint.exchange.found import ForeignCheckpoint, ForeignReader
from infinity_engine.checkpoint.manifest import Kind, Manifest, SavedFile, SavedTensor
from infinity_engine.checkpoint.objects import RankObjects, objects_file
from infinity_engine.checkpoint.reader import CheckpointReader
from infinity_engine.checkpoint.streams import SHARD, SavedStream, Slice, SliceSink
from infinity_engine.checkpoint.writer import FILE_BYTES, write_shard
from infinity_engine.errors import ConfigError

__all__ = ["import_foreign", "reshard"]

_PIECE_BYTES = 16 << 20
_CUT_ELEMENTS = 1 << 14  # shards begin at multiples of it: whole pages, whatever the dtype


class _StreamReader(Protocol):
    """Whatever hands out slices of streams."""

    def read(self, stream: SavedStream, first: int, into: Any) -> None:
        """Fill `into` with the elements of a stream from `first` on."""
        ...


def reshard(
    reader: CheckpointReader,
    directory: CheckpointDirectory,
    ranks: int,
    *,
    tag: str | None = None,
    file_bytes: int = FILE_BYTES,
) -> Path:
    """Write an open checkpoint as that of `ranks` ranks; return where it is.

    Its streams keep their bits, and it keeps its age. The state dicts of all ranks go along, also
    those of ranks that there will not be, so the way back loses nothing.

    Raises:
        ConfigError: `ranks` is below 1, or `directory` has a checkpoint of that tag.
        ChecksumError: bytes of the checkpoint are damaged. Nothing was written.
    """
    manifest = reader.manifest
    others = [file for file in manifest.files if not file.name.startswith(SHARD)]

    def copy_others(draft: Path, _: IOQueue) -> list[SavedFile]:
        for file in others:
            _copy(reader, file, draft)
        return others

    described = replace(manifest, tag=tag or manifest.tag, ranks=_checked(ranks))
    # Before anything is written.
    reader.check_slices()
    return _write(directory, described, reader, copy_others, file_bytes)


def import_foreign(
    foreign: ForeignCheckpoint,
    directory: CheckpointDirectory,
    ranks: int = 1,
    *,
    tag: str | None = None,
    file_bytes: int = FILE_BYTES,
) -> Path:
    """Write what another library has saved as a checkpoint; return where it is.

    Raises:
        ConfigError: `ranks` is below 1, or `directory` has a checkpoint of that tag.
        CheckpointError: bytes are missing or damaged. Nothing was written.
    """
    objects: dict[str, Any] = {"loss_scale": dict(foreign.loss_scale), "extra": {}}
    if foreign.groups:
        objects["optimizer_groups"] = [dict(group) for group in foreign.groups]
    structures: dict[str, Any] = {}

    def write_state(draft: Path, queue: IOQueue) -> list[SavedFile]:
        of_rank_0 = RankObjects(objects)
        structures[objects_file(0)] = of_rank_0.structure
        return [of_rank_0.write(draft, 0, queue=queue, staging_bytes=STAGING_BYTES)]

    # Before anything is written.
    foreign.check()
    described = Manifest(
        tag=tag or tag_of_step(foreign.step),
        step=foreign.step,
        created=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        ranks=_checked(ranks),
        tensors=foreign.tensors,
        files=(),
        run={
            "infinity_engine": metadata.version("infinity-engine"),
            "imported_from": foreign.format,
            "loss_scale": foreign.loss_scale["value"],
        },
        objects=structures,  # filled before the manifest is written
    )
    return _write(directory, described, ForeignReader(foreign), write_state, file_bytes)


def _write(
    directory: CheckpointDirectory,
    manifest: Manifest,
    streams: _StreamReader,
    write_others: Callable[[Path, IOQueue], Sequence[SavedFile]],
    file_bytes: int,
) -> Path:
    """Write a checkpoint that `manifest` describes but for its files: all of it or nothing."""
    tag = manifest.tag
    draft = directory.begin(tag)
    try:
        with IOQueue() as queue:
            # One piece at a time is in it: the writer is done with a slice before the next is read.
            room = np.empty(_PIECE_BYTES, np.uint8)
            files = [
                saved
                for rank in range(manifest.ranks)
                for saved in write_shard(
                    draft,
                    rank,
                    _CutStreams(manifest.tensors, streams, rank, manifest.ranks, room),
                    queue=queue,
                    file_bytes=file_bytes,
                )
            ]
            files += write_others(draft, queue)
        return directory.commit_rewritten(tag, replace(manifest, files=tuple(files)))
    # Ctrl-C ends here too.
    except BaseException:
        directory.abandon(tag)
        raise


@dataclass(frozen=True, slots=True)
class _CutStreams:
    """The slices that one of `ranks` ranks has, read into `room` one after another."""

    tensors: Sequence[SavedTensor]
    streams: _StreamReader
    rank: int
    ranks: int
    room: npt.NDArray[np.uint8]

    def slices(self) -> list[Slice]:
        return [part for tensor in self.tensors for part in self._slices_of(tensor)]

    def _slices_of(self, tensor: SavedTensor) -> Iterator[Slice]:
        start, end = self._shard(tensor)
        for name in tensor.streams:
            stream = tensor.stream(name)
            step = self.room.nbytes // Slice(stream, 0, 1).nbytes
            for first in range(start, end, step):
                yield Slice(stream, first, min(step, end - first))

    def _shard(self, tensor: SavedTensor) -> tuple[int, int]:
        """Return where this rank's part begins and ends. What is not trained is all rank 0's."""
        numel = tensor.numel
        if tensor.kind is not Kind.TRAINED:
            return (0, numel) if self.rank == 0 else (numel, numel)
        blocks = -(-numel // _CUT_ELEMENTS)
        start, end = (
            # Ranks differ by one block at most.
            min(numel, blocks * rank // self.ranks * _CUT_ELEMENTS)
            for rank in (self.rank, self.rank + 1)
        )
        return start, end

    def hand_out(self, sink: SliceSink) -> None:
        for part in self.slices():
            values = self.room[: part.nbytes]
            self.streams.read(part.stream, part.first, values)
            sink.take(part, values.data)
            sink.settle()


def _copy(reader: CheckpointReader, file: SavedFile, draft: Path) -> None:
    """Copy a file of a checkpoint, checked, and sync it."""
    with (draft / file.name).open("xb") as out:
        for offset in range(0, file.nbytes, _PIECE_BYTES):
            room = np.empty(min(_PIECE_BYTES, file.nbytes - offset), np.uint8)
            reader.read_file(file.name, offset, room)
            out.write(room.data)
    sync_file(draft / file.name)


def _checked(ranks: int) -> int:
    if ranks < 1:
        raise ConfigError(field="ranks", value=ranks, expected="1 or more")
    return ranks
