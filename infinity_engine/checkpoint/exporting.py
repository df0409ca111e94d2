"""Weights leave a running engine: all ranks write theirs into a draft, rank 0 makes the files.

The draft is a checkpoint of weights alone, in the dtype that was asked for, and goes when the files
are there. So memory does not grow with the model, whatever the number of ranks; the drive has to
hold the weights twice until then. Knows no engine, only a `StreamSource`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from deepnvme import IOQueue
from deepnvme.memory.arrays import ITEMSIZES
from infinity_engine.checkpoint.directory import CheckpointDirectory
from infinity_engine.checkpoint.export import Dtype, check_free, dtype_in, export, remove_killed
from infinity_engine.checkpoint.manifest import Kind, Manifest, SavedFile, SavedTensor
from infinity_engine.checkpoint.reader import CheckpointReader
from infinity_engine.checkpoint.rounding import converted
from infinity_engine.checkpoint.streams import Slice, SliceSink, StreamSource
from infinity_engine.checkpoint.writer import write_shard

__all__ = ["WeightDraft"]

_TAG = "weights"


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightDraft:
    """The weights of a model on their way into the directory `path`.

    `tensors` are those of the whole model; each rank writes what `source` has of them.
    """

    path: Path
    tensors: Sequence[SavedTensor]
    dtype: Dtype
    trainable_only: bool

    @property
    def _directory(self) -> CheckpointDirectory:
        return CheckpointDirectory(self.path / ".draft")

    def begin(self) -> None:
        """Make room for the draft. One rank does.

        Raises:
            ConfigError: `path` has weights already, which are left alone.
        """
        remove_killed(self.path)
        check_free(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        # What a killed export left.
        self.abandon()
        self._directory.begin(_TAG)

    def write(
        self, rank: int, source: StreamSource, queue: IOQueue, memory_bytes: int
    ) -> tuple[SavedFile, ...]:
        """Write the weights that this rank has; return the files for `finish`.

        Raises:
            TransferError: the drive is full or failed.
        """
        # One half for conversions here, the other for the writer.
        half = memory_bytes // 2
        weights = _Weights(source, self._drafted(), half)
        draft = self._directory.draft_of(_TAG)
        return write_shard(draft, rank, weights, queue=queue, staging_bytes=half)

    def finish(
        self,
        files: Sequence[SavedFile],
        queue: IOQueue,
        *,
        shard_bytes: int,
        read_bytes: int,
        write_bytes: int,
    ) -> tuple[Path, ...]:
        """Make the files of what all ranks wrote; return them. One rank does.

        Raises:
            TransferError: the drive is full or failed.
        """
        manifest = Manifest(
            tag=_TAG,
            step=0,
            created="",
            ranks=1,
            tensors=tuple(self._drafted()),
            files=tuple(files),
        )
        path = self._directory.commit(_TAG, manifest)
        with CheckpointReader(path, queue=queue, staging_bytes=read_bytes) as reader:
            return export(
                reader, self.path, shard_bytes=shard_bytes, queue=queue, memory_bytes=write_bytes
            )

    def abandon(self) -> None:
        """Remove the draft. One rank does."""
        shutil.rmtree(self._directory.path, ignore_errors=True)

    def _drafted(self) -> list[SavedTensor]:
        """Return the tensors of the draft: values alone, in the dtype that was asked for."""
        drafted = []
        for tensor in self.tensors:
            if tensor.kind is Kind.TRANSIENT:
                continue
            if self.trainable_only and tensor.kind is not Kind.TRAINED:
                continue
            # A trained tensor is its value alone here, and that is what a frozen one has.
            kind = Kind.BUFFER if tensor.kind is Kind.BUFFER else Kind.FROZEN
            code = dtype_in(self.dtype, tensor)
            drafted.append(replace(tensor, kind=kind, dtype=code, streams={"value": code}, steps=0))
        return drafted


class _Weights:
    """A source's masters and values, in other dtypes. What else it has is left out."""

    def __init__(
        self, source: StreamSource, drafted: Sequence[SavedTensor], memory_bytes: int
    ) -> None:
        self._source = source
        self._drafted = {tensor.name: tensor for tensor in drafted}
        self._memory_bytes = memory_bytes

    def slices(self) -> list[Slice]:
        return [
            self._drafted_slice(part) for part in self._source.slices() if self._is_weight(part)
        ]

    def hand_out(self, sink: SliceSink) -> None:
        self._source.hand_out(_Converting(self, sink))

    def take(self, part: Slice, values: memoryview, sink: SliceSink) -> None:
        """Hand out the next bytes of a slice, converted."""
        if not self._is_weight(part):
            return
        drafted = self._drafted_slice(part)
        have, want = part.stream.dtype, drafted.stream.dtype
        # No copy: `values` stay as they are until they are settled.
        raw = np.frombuffer(values, np.uint8)
        # Without a conversion the bytes go on as they are, in one call.
        if have == want:
            sink.take(drafted, raw.data)
            return
        step = self._step(have, want)
        for at in range(0, raw.nbytes, step):
            sink.take(drafted, converted(raw[at : at + step], have, want).data)
            # The converted bytes are gone after this.
            sink.settle()

    def _step(self, have: str, want: str) -> int:
        """Return how many bytes are converted at once; a conversion may need fp32 beside both."""
        wide = ITEMSIZES["F32"] + ITEMSIZES[want]
        return max(1, self._memory_bytes // (2 * wide)) * ITEMSIZES[have]

    def _is_weight(self, part: Slice) -> bool:
        is_wanted = part.stream.parameter in self._drafted
        return is_wanted and part.stream.name in ("master", "value")

    def _drafted_slice(self, part: Slice) -> Slice:
        tensor = self._drafted[part.stream.parameter]
        return Slice(tensor.stream("value"), part.first, part.numel)


@dataclass(frozen=True, slots=True)
class _Converting:
    """Hands out what it takes in other dtypes."""

    weights: _Weights
    sink: SliceSink

    def take(self, part: Slice, values: memoryview) -> None:
        self.weights.take(part, values, self.sink)

    def settle(self) -> None:
        self.sink.settle()
