"""A checkpoint moves to another number of ranks and back with the same bits, in little memory."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deepnvme import IOQueue
from infinity_engine.checkpoint import (
    CheckpointDirectory,
    CheckpointReader,
    Kind,
    Manifest,
    SavedFile,
    SavedTensor,
    write_shard,
)
from infinity_engine.checkpoint.objects import RankObjects, objects_file, read_objects
from infinity_engine.checkpoint.rewriting import reshard
from infinity_engine.cli.main import main
from infinity_engine.errors import CheckpointError, ConfigError
from support.saved_streams import ArraySource, Streams, parameters_of, save, values_of

TRAINED = parameters_of(
    {"embed.weight": (701, 401), "a b/c#d@1.weight": (3, 5), "scale": (), "empty": (0, 4)}
)
FROZEN = replace(
    parameters_of({"frozen": (90_001,)})[0], kind=Kind.FROZEN, dtype="F32", streams={"value": "F32"}
)
TENSORS = (*TRAINED, FROZEN)


def saved_by(path: Path, ranks: int, values: Streams) -> Path:
    """Save a checkpoint of several ranks, each with objects of its own."""
    directory = CheckpointDirectory(path)
    draft = directory.begin("tag")
    files: list[SavedFile] = []
    objects = {}
    with IOQueue() as queue:
        for rank in range(ranks):
            source = ArraySource(TENSORS, values, rank, ranks, 30_000)
            files += write_shard(draft, rank, source, queue=queue, file_bytes=1 << 20)
            state = {"rank": rank, "random": np.full(9, rank)}
            kept = RankObjects(state)
            files.append(kept.write(draft, rank, queue=queue, staging_bytes=1 << 20))
            objects[objects_file(rank)] = kept.structure
    manifest = Manifest(
        tag="tag",
        step=3,
        created="2026-01-01T00:00:00+00:00",
        ranks=ranks,
        tensors=TENSORS,
        files=tuple(files),
        run={"loss_scale": 1.0},
        objects=objects,
    )
    return directory.commit("tag", manifest)


def resharded(path: Path, to: Path, ranks: int) -> Path:
    with CheckpointReader(path) as reader:
        return reshard(reader, CheckpointDirectory(to), ranks, file_bytes=300_000)


def assert_same(path: Path, values: Streams, tensors: tuple[SavedTensor, ...] = TENSORS) -> None:
    with CheckpointReader(path) as reader:
        assert list(reader.verify()) == []
        assert reader.manifest.tensors == tensors
        for tensor in tensors:
            for name in tensor.streams:
                found = np.empty(tensor.numel, np.float32)
                reader.read(tensor.stream(name), 0, found)
                assert found.tobytes() == values[tensor.name, name].tobytes()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("before", [1, 2, 3, 4])
def test_streams_keep_their_bits_on_the_way_there_and_back(
    tmp_path: Path, before: int, ranks: int
) -> None:
    values = values_of(TENSORS)
    path = saved_by(tmp_path / "run", before, values)
    there = resharded(path, tmp_path / "there", ranks)
    back = resharded(there, tmp_path / "back", before)
    for found, count in ((there, ranks), (back, before)):
        assert_same(found, values)
        with CheckpointReader(found) as reader:
            assert (reader.manifest.ranks, reader.manifest.step) == (count, 3)
            assert reader.manifest.run == {"loss_scale": 1.0}
            for rank in range(before):
                assert read_objects(reader, rank)["rank"] == rank


def test_each_rank_has_a_part_of_a_large_tensor(tmp_path: Path) -> None:
    path = saved_by(tmp_path / "run", 1, values_of(TENSORS))
    with CheckpointReader(resharded(path, tmp_path / "there", 3)) as reader:
        writers = {file.name[:10] for file in reader.manifest.files if file.name[:5] == "rank-"}
    assert writers == {"rank-00000", "rank-00001", "rank-00002"}


def test_a_damaged_checkpoint_leaves_nothing_where_it_was_to_go(tmp_path: Path) -> None:
    path = saved_by(tmp_path / "run", 2, values_of(TENSORS))
    shard = sorted(path.glob("rank-00001-*"))[0]
    data = bytearray(shard.read_bytes())
    data[-9] ^= 4
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match=re.escape(shard.name)):
        resharded(path, tmp_path / "there", 4)
    assert CheckpointDirectory(tmp_path / "there").tags() == []
    assert list((tmp_path / "there").iterdir()) == []


def test_the_tag_of_a_checkpoint_that_is_there_is_refused(tmp_path: Path) -> None:
    path = saved_by(tmp_path / "run", 2, values_of(TENSORS))
    with pytest.raises(ConfigError, match="tag"):
        resharded(path, tmp_path / "run", 1)
    assert_same(path, values_of(TENSORS))


def test_the_command_reshards_into_the_same_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = values_of(TENSORS)
    saved_by(tmp_path / "run", 2, values)
    run = str(tmp_path / "run")
    assert main(["checkpoint", "reshard", run, run, "--ranks", "3", "--to-tag", "three"]) == 0
    assert "as 3 ranks would have saved it, not 2" in capsys.readouterr().out
    assert_same(tmp_path / "run" / "three", values)
    assert CheckpointDirectory(tmp_path / "run").latest() == "three"


def test_an_older_checkpoint_that_is_resharded_does_not_become_the_newest(tmp_path: Path) -> None:
    values = values_of(TRAINED)
    old = save(tmp_path / "run", "old", TRAINED, values)
    save(tmp_path / "run", "new", TRAINED, values, step=5, created="2026-01-02T00:00:00+00:00")
    directory = CheckpointDirectory(tmp_path / "run")
    with CheckpointReader(old) as reader:
        reshard(reader, directory, 2, tag="old-for-2")
    assert directory.latest() == "new"
    assert directory.tags() == ["old", "old-for-2", "new"]
    with CheckpointReader(tmp_path / "run" / "old-for-2") as reader:
        assert reader.manifest.created == "2026-01-01T00:00:00+00:00"
    # Without the pointer, the checkpoints themselves say which is the newest.
    (tmp_path / "run" / "latest").unlink()
    with CheckpointReader(old) as reader:
        reshard(reader, directory, 3, tag="old-for-3")
    assert directory.latest() == "new"


@pytest.mark.parametrize("ranks", ["0", "-2"])
def test_a_number_of_ranks_below_one_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: str
) -> None:
    saved_by(tmp_path / "run", 2, values_of(TENSORS))
    command = ["checkpoint", "reshard", str(tmp_path / "run"), str(tmp_path / "to"), "--ranks"]
    assert main([*command, ranks]) == 2
    assert "ranks: expected 1 or more" in capsys.readouterr().err
