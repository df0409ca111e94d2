"""A source of streams that lie in plain arrays, cut over made-up ranks: what an engine is to
checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deepnvme import IOQueue
from infinity_engine.checkpoint import (
    CheckpointDirectory,
    Kind,
    Manifest,
    SavedTensor,
    Slice,
    SliceSink,
    write_shard,
)
from infinity_engine.checkpoint.objects import RankObjects, objects_file

Streams = Mapping[tuple[str, str], npt.NDArray[Any]]


@dataclass(frozen=True)
class ArraySource:
    """Hands out the slices of one rank; each stream is cut into `ranks` parts and each part into
    pieces.
    """

    parameters: Sequence[SavedTensor]
    values: Streams
    rank: int = 0
    ranks: int = 1
    piece_numel: int = 1 << 30

    def slices(self) -> list[Slice]:
        """Return the slices of this rank."""
        found = []
        for parameter in self.parameters:
            for name in parameter.streams:
                stream = parameter.stream(name)
                start, end = (
                    stream.numel * number // self.ranks for number in (self.rank, self.rank + 1)
                )
                for first in range(start, end, self.piece_numel):
                    found.append(Slice(stream, first, min(self.piece_numel, end - first)))
        return found

    def hand_out(self, sink: SliceSink) -> None:
        """Hand out the slices and their bytes."""
        for part in self.slices():
            values = self.values[part.stream.parameter, part.stream.name]
            sink.take(part, values[part.first : part.first + part.numel].view(np.uint8).data)


def parameters_of(shapes: Mapping[str, tuple[int, ...]]) -> tuple[SavedTensor, ...]:
    """Return parameters of these shapes, with a master and two moments each."""
    streams = {"master": "F32", "exp_avg": "F32", "exp_avg_sq": "F32"}
    return tuple(
        SavedTensor(
            name=name, kind=Kind.TRAINED, shape=shape, dtype="BF16", streams=streams, steps=3
        )
        for name, shape in shapes.items()
    )


def values_of(parameters: Sequence[SavedTensor], seed: int = 0) -> Streams:
    """Return values for every stream."""
    random = np.random.default_rng(seed)
    return {
        (parameter.name, name): random.standard_normal(parameter.numel, dtype=np.float32)
        for parameter in parameters
        for name in parameter.streams
    }


def save(
    path: Path,
    tag: str,
    parameters: Sequence[SavedTensor],
    values: Streams,
    *,
    ranks: int = 1,
    piece_numel: int = 1 << 30,
    file_bytes: int = 1 << 30,
    step: int = 3,
    created: str = "2026-01-01T00:00:00+00:00",
    objects: Mapping[str, Any] | None = None,
) -> Path:
    """Save a checkpoint as its ranks would, one after another; rank 0 has the objects."""
    directory = CheckpointDirectory(path)
    draft = directory.begin(tag)
    try:
        with IOQueue() as queue:
            files = [
                saved
                for rank in range(ranks)
                for saved in write_shard(
                    draft,
                    rank,
                    ArraySource(parameters, values, rank, ranks, piece_numel),
                    queue=queue,
                    file_bytes=file_bytes,
                )
            ]
            structures = {}
            if objects is not None:
                kept = RankObjects(objects)
                structures[objects_file(0)] = kept.structure
                files.append(kept.write(draft, 0, queue=queue, staging_bytes=1 << 20))
    except BaseException:
        directory.abandon(tag)
        raise
    manifest = Manifest(
        tag=tag,
        step=step,
        created=created,
        ranks=ranks,
        tensors=tuple(parameters),
        files=tuple(files),
        run={"loss_scale": 1.0},
        objects=structures,
    )
    return directory.commit(tag, manifest)
