"""`export_weights`: writes the weights of one engine's run for other programs, wherever they lie.

Called between steps, with nothing under way. All ranks write what they own; rank 0 makes the files.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from deepnvme import IOQueue, Pool
from infinity_engine.checkpoint import SavedFile, SavedTensor, Slice, SliceSink
from infinity_engine.checkpoint.export import Dtype
from infinity_engine.checkpoint.exporting import WeightDraft
from infinity_engine.engine.checkpoints.checkpointing import (
    Run,
    as_transfer,
    reserve_together,
)
from infinity_engine.engine.checkpoints.sources import StateStreams, UntrainedStreams
from infinity_engine.errors import ConfigError
from infinity_engine.update.captured import CapturedStates

__all__ = ["export_dtype", "export_weights"]


def export_dtype(given: torch.dtype | str | None) -> Dtype:
    """Return what weights are exported in; None is what modules compute with.

    Raises:
        ConfigError: it is no dtype that they can be exported in.
    """
    name = "model" if given is None else str(given).removeprefix("torch.")
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    try:
        return Dtype(names.get(name, name))
    except ValueError:
        expected = "torch.float32, torch.bfloat16, torch.float16 or None"
        raise ConfigError(field="dtype", value=given, expected=expected) from None


def export_weights(
    run: Run, path: Path, dtype: Dtype, *, trainable_only: bool, shard_bytes: int
) -> tuple[Path, ...]:
    """Write the weights of a run; return the files. See `Engine.export`."""
    ranks = run.ranks
    said = [str(path.resolve()), dtype.value, trainable_only, shard_bytes]
    ranks.agree_on("what is exported", {"path, dtype, trainable_only, shard_bytes": said})
    with ExitStack() as ends:
        memory = reserve_together(run, ends)
        # An engine without drives has no queue.
        queue = run.queue or ends.enter_context(IOQueue())
        draft = WeightDraft(
            path=path,
            tensors=tuple(run.saved_tensors()),
            dtype=dtype,
            trainable_only=trainable_only,
        )

        def begin() -> None:
            with as_transfer(path, "weights for"):
                draft.begin()

        ranks.on_rank_0("beginning the export", begin)
        if ranks.rank == 0:
            # Also after finish(): what is left of the draft goes.
            ends.callback(draft.abandon)

        def write() -> list[list[object]]:
            count, nbytes = memory.rooms()
            pool = Pool(count * nbytes)
            rooms = [memoryview(pool.buffer(nbytes)) for _ in range(count)]
            source = _RunStreams(run, draft.tensors, rooms)
            files = draft.write(ranks.rank, source, queue, memory.small)
            # Lists: the ranks exchange JSON.
            return [[file.name, file.nbytes, list(file.checksums)] for file in files]

        written = ranks.on_all("writing the weights", write)
        files = [
            SavedFile(name=name, nbytes=nbytes, checksums=tuple(checksums))
            for rank in written
            for name, nbytes, checksums in rank
        ]

        def finish() -> list[str]:
            with as_transfer(path, "weights for"):
                made = draft.finish(
                    files,
                    queue,
                    shard_bytes=shard_bytes,
                    read_bytes=memory.large,
                    write_bytes=memory.small,
                )
            return [str(file) for file in made]

        return tuple(map(Path, ranks.on_rank_0("making the files", finish)))


class _RunStreams:
    """All streams of this rank, read through `rooms`."""

    def __init__(
        self, run: Run, tensors: Sequence[SavedTensor], rooms: Sequence[memoryview]
    ) -> None:
        by_name = {tensor.name: tensor for tensor in tensors}
        # Of replicas, the first one writes the states.
        captured = run.states.capture() if run.ranks.has_states else CapturedStates.nothing()
        self._states = StateStreams(run, captured, by_name)
        self._others = UntrainedStreams(run, by_name, run.frozen, is_first=run.ranks.rank == 0)
        self._others.use(rooms[0])
        self._rooms = rooms

    def slices(self) -> list[Slice]:
        """Return what there is."""
        return [*self._states.slices(), *self._others.slices()]

    def hand_out(self, sink: SliceSink) -> None:
        """Hand out the bytes of all slices; all ranks take part."""
        self._states.hand_out(sink, self._rooms)
        self._others.hand_out(sink)
