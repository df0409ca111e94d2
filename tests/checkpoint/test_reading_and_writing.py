"""What was saved comes back bit for bit, whoever reads which part of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepnvme import IOFuture, IOQueue
from deepnvme.queue.pipeline import once_there_is_room
from infinity_engine.checkpoint import (
    CheckpointDirectory,
    CheckpointReader,
    SavedStream,
    Slice,
    SliceSink,
    reader,
    write_shard,
)
from infinity_engine.checkpoint.manifest import BLOCK_BYTES
from infinity_engine.errors import ManifestMismatch
from support.interrupts import interrupted_at
from support.saved_streams import ArraySource, parameters_of, save, values_of

SHAPES = {
    "embed.weight": (700, 401),
    "a b/c#d@1.weight": (3, 5),
    "scale": (),
    "empty": (0, 4),
    "bias": (1_000_003,),
}


def test_every_stream_comes_back_with_the_same_bits(tmp_path: Path) -> None:
    parameters = parameters_of(SHAPES)
    values = values_of(parameters)
    save(tmp_path, "one", parameters, values)
    with CheckpointReader(CheckpointDirectory(tmp_path).resolve()) as reader:
        assert reader.manifest.tensors == parameters
        for parameter in parameters:
            for name in parameter.streams:
                found = np.empty(parameter.numel, np.float32)
                reader.read(parameter.stream(name), 0, found)
                assert np.array_equal(found, values[parameter.name, name])


@settings(max_examples=25)
@given(st.data())
def test_any_slice_can_be_read_from_any_cut(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    numels = data.draw(st.lists(st.integers(0, 600_000), min_size=1, max_size=4))
    parameters = parameters_of({f"p{number}": (numel,) for number, numel in enumerate(numels)})
    values = values_of(parameters)
    path = save(
        tmp_path_factory.mktemp("cut"),
        "tag",
        parameters,
        values,
        ranks=data.draw(st.integers(1, 4)),
        piece_numel=data.draw(st.sampled_from([1000, 262_144, 1 << 30])),
        file_bytes=data.draw(st.sampled_from([1 << 16, 1 << 22, 1 << 30])),
    )
    with CheckpointReader(path) as reader:
        for _ in range(8):
            parameter = data.draw(st.sampled_from(parameters))
            first = data.draw(st.integers(0, parameter.numel))
            numel = data.draw(st.integers(0, parameter.numel - first))
            found = np.empty(numel, np.float32)
            reader.read(parameter.stream("exp_avg"), first, found)
            assert np.array_equal(found, values[parameter.name, "exp_avg"][first : first + numel])


@pytest.mark.parametrize(("streams", "numel", "count"), [(3, 1000, 1500), (5, 300_000, 6)])
def test_streams_that_are_read_in_turns_read_the_drive_once(
    tmp_path: Path, streams: int, numel: int, count: int
) -> None:
    """As a load does: all streams of a parameter, then those of the next one."""
    names = [f"p{number}.stream{turn}" for turn in range(streams) for number in range(count)]
    parameters = [
        replace(parameter, streams={"master": "F32"})
        for parameter in parameters_of(dict.fromkeys(names, (numel,)))
    ]
    values = values_of(parameters)
    path = save(tmp_path, "tag", parameters, values)
    files = sum(file.stat().st_size for file in path.glob("rank-*"))
    with IOQueue() as queue, CheckpointReader(path, queue=queue) as reader:
        for number in range(count):
            for parameter in (parameters[number + turn * count] for turn in range(streams)):
                found = np.empty(parameter.numel, np.float32)
                reader.read(parameter.stream("master"), 0, found)
                assert np.array_equal(found, values[parameter.name, "master"])
        read = sum(drive.read_bytes for drive in queue.stats().drives.values())
    # Blocks with the end of one stream's part and the beginning of the next are read twice.
    assert read <= files + (streams + 1) * BLOCK_BYTES


def test_any_safetensors_reader_opens_a_shard(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    parameters = parameters_of({"weight": (30, 7)})
    values = values_of(parameters)
    path = save(tmp_path, "tag", parameters, values, piece_numel=100)
    found = safetensors.load_file(path / "rank-00000-00000.safetensors")
    whole = np.concatenate([found[f"weight#master@{first}"] for first in (0, 100, 200)])
    assert np.array_equal(whole, values["weight", "master"])


@pytest.mark.parametrize(
    "stream",
    [
        SavedStream("weight", "master", "F32", 9),
        SavedStream("weight", "master", "BF16", 8),
        SavedStream("weight", "velocity", "F32", 8),
    ],
)
def test_a_stream_that_is_not_in_the_checkpoint_is_refused(
    tmp_path: Path, stream: SavedStream
) -> None:
    parameters = parameters_of({"weight": (8,)})
    path = save(tmp_path, "tag", parameters, values_of(parameters))
    with (
        CheckpointReader(path) as reader,
        pytest.raises(ManifestMismatch, match=rf"{stream.name} of weight"),
    ):
        reader.read(stream, 0, memoryview(bytearray(8)))


@dataclass(frozen=True)
class EndingEarly(ArraySource):
    """Announces all slices, and hands out so many bytes."""

    left: int = 0

    def hand_out(self, sink: SliceSink) -> None:
        super().hand_out(_Cut(sink, self.left))


@dataclass
class _Cut:
    sink: SliceSink
    left: int

    def take(self, part: Slice, values: memoryview) -> None:
        if self.left:
            values = values[: self.left]
            self.left -= len(values)
            self.sink.take(part, values)

    def settle(self) -> None:
        self.sink.settle()


@pytest.mark.parametrize("file_bytes", [40, 1 << 30], ids=["files", "one file"])
@pytest.mark.parametrize("nbytes", [0, 4, 40, 116])
def test_a_source_that_ends_too_early_writes_no_shard(
    tmp_path: Path, nbytes: int, file_bytes: int
) -> None:
    parameters = parameters_of({"weight": (10,)})
    source = EndingEarly(parameters, values_of(parameters), left=nbytes)
    with IOQueue() as queue, pytest.raises(AssertionError, match="all of its slices"):
        write_shard(tmp_path, 0, source, queue=queue, file_bytes=file_bytes)
    assert len(list(tmp_path.iterdir())) == (nbytes // 40 if file_bytes == 40 else 0)


class _Reading:
    """A read that Ctrl-C interrupts the first wait for; tells whether its end was waited for."""

    def __init__(self, future: IOFuture[int]) -> None:
        self._future = future
        self.ended = False

    def result(self) -> int:
        raise KeyboardInterrupt

    def exception(self) -> BaseException | None:
        self.ended = True
        return self._future.exception()


def test_an_interrupted_read_leaves_none_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = parameters_of({"weight": (3 * BLOCK_BYTES,)})
    path = save(tmp_path, "tag", parameters, values_of(parameters))
    into = np.empty(3 * BLOCK_BYTES, np.float32)
    begun: list[_Reading] = []

    def begin(submit: Callable[[], IOFuture[int]]) -> _Reading:
        begun.append(_Reading(once_there_is_room(submit)))
        return begun[-1]

    with CheckpointReader(path) as opened:
        opened.check_slices()
        monkeypatch.setattr(reader, "once_there_is_room", begin)
        for first in (0, 2 * BLOCK_BYTES):  # its block is kept, and is not
            with pytest.raises(KeyboardInterrupt):
                opened.read(parameters[0].stream("master"), first, into[: -first or None])
        with pytest.raises(KeyboardInterrupt):
            list(opened.verify())

    assert len(begun) > 3
    assert all(reading.ended for reading in begun)


def test_an_interrupt_while_a_file_ends_leaves_nothing_open(tmp_path: Path) -> None:
    parameters = parameters_of({"weight": (10,)})
    source = ArraySource(parameters, values_of(parameters))
    with IOQueue() as queue:
        for line in count(1):
            folder = tmp_path / str(line)
            folder.mkdir()
            with interrupted_at(line, ("checkpoint/writer.py",), "_end") as told:
                write_shard(folder, 0, source, queue=queue)
            left = [file.name for file in folder.iterdir()]
            assert left in ([], ["rank-00000-00000.safetensors"]), line
            if not told[0]:
                break
    assert line > 1
