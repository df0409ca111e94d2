"""What ranks save together, any number of ranks loads: the same bits in every stream, and the run
goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from deepnvme.memory.arrays import nbytes_of
from infinity_engine.checkpoint import CheckpointDirectory, CheckpointReader
from infinity_engine.engine.checkpoints.saving import FrozenParameters, SaveState
from support import rank_checkpoints
from support.rank_training import RATES, Run
from support.ranks import launch, launched

pytestmark = pytest.mark.usefixtures("deterministic")

FOLDERS: list[Path] = []  # of all tests here

ONE_BY_ONE: dict[str, Any] = {
    "storage": {"small_bytes": 0},
    "precision": "bf16",
    "budget": {"host": "256MiB"},
}
DRIVES = {**ONE_BY_ONE, "strategy": "nvme_streamed", "parameters": "nvme"}
RUNS: dict[str, Run] = {
    "parameters": Run(settings=ONE_BY_ONE),
    "gradients": Run(settings={**ONE_BY_ONE, "ranks": {"stage": "gradients"}}),
    "optimizer": Run(settings={**ONE_BY_ONE, "ranks": {"stage": "optimizer"}}),
    "drives": Run(settings=DRIVES),
    "odd": Run(model="odd", settings={"storage": {"small_bytes": 0}}),
}
MESH = Run(settings={**ONE_BY_ONE, "ranks": {"shard_ranks": 2}})  # of four ranks: two copies
ALL_RUNS = {**RUNS, "mesh": MESH}

WITH_DEVICE = {
    **ONE_BY_ONE,
    "rates": RATES,
    "budget": {"host": "256MiB", "device": "32MiB"},
}
INTERLEAVED = {"name": "interleaved", "share": 0.5, "resident": 0.3}
MIXED_RUNS: dict[str, Run] = {
    **{name: run for name, run in RUNS.items() if name != "odd"},
    "host only": Run(settings={**ONE_BY_ONE, "strategy": "host_only"}),
    "interleaved": Run(settings={**WITH_DEVICE, "strategy": INTERLEAVED}, emulated=True),
    "device only": Run(settings={**WITH_DEVICE, "strategy": "device_only"}, emulated=True),
    "mesh": MESH,
}


def differing(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


@pytest.fixture(scope="module", autouse=True)
def _folders_that_go() -> Iterator[None]:
    """Remove what tests of this module share, when the last of them has ended."""
    yield
    saved.cache_clear()
    while FOLDERS:
        rmtree(FOLDERS.pop())


def folder_for(what: str) -> Path:
    FOLDERS.append(Path(mkdtemp(prefix=f"{what}-")))
    return FOLDERS[-1]


@cache
def saved(size: int, name: str) -> tuple[Path, list[dict[str, Any]]]:
    """Return a checkpoint of so many ranks, and what they went on to."""
    folder = folder_for("ranks")
    return folder / "c", launched(
        size, rank_checkpoints.saves, ALL_RUNS[name], folder / "c", drive_of(name)
    )


def drive_of(name: str) -> Path | None:
    return folder_for("drive") if name == "drives" else None


def gone_on(size: int, name: str, path: Path) -> list[dict[str, Any]]:
    return launched(size, rank_checkpoints.goes_on, ALL_RUNS[name], path, drive_of(name))


@pytest.mark.parametrize("name", RUNS)
def test_as_many_ranks_go_on_with_the_same_bits(name: str) -> None:
    path, before = saved(2, name)
    assert {rank["tag"] for rank in before} == {"step-00000002"}
    for rank, found in zip(before, gone_on(2, name, path), strict=True):
        assert found["step"] == 2
        assert differing(rank["saved"], found["saved"]) == []
        assert torch.equal(rank["draws"], found["draws"])
        assert found["losses"] == rank["losses"]
        assert differing(rank["ended"], found["ended"]) == []


@pytest.mark.parametrize(
    ("origin", "name", "size", "to"),
    [
        (2, "parameters", 1, "parameters"),
        (2, "drives", 3, "gradients"),
        (1, "drives", 2, "drives"),
        pytest.param(3, "parameters", 2, "optimizer", marks=pytest.mark.slow),
        (2, "odd", 3, "odd"),
        (4, "mesh", 3, "parameters"),
        pytest.param(1, "parameters", 4, "drives", marks=pytest.mark.slow),
        pytest.param(4, "optimizer", 3, "parameters", marks=pytest.mark.slow),
        pytest.param(4, "drives", 1, "drives", marks=pytest.mark.slow),
    ],
)
def test_another_number_of_ranks_finds_every_stream_the_same(
    origin: int, name: str, size: int, to: str
) -> None:
    path, before = saved(origin, name)
    for found in gone_on(size, to, path):
        assert differing(before[0]["saved"], found["saved"]) == []
        for key, value in found["ended"].items():
            torch.testing.assert_close(value, before[0]["ended"][key], rtol=2e-2, atol=2e-3)


def streams_of(path: Path) -> dict[tuple[str, str], bytes]:
    """Return the bytes of every stream of the newest checkpoint, and the steps of each tensor."""
    found = {}
    with CheckpointReader(CheckpointDirectory(path).resolve()) as reader:
        for tensor in reader.manifest.tensors:
            found[tensor.name, "steps"] = str(tensor.steps).encode()
            for name, dtype in tensor.streams.items():
                values = bytearray(nbytes_of(dtype, tensor.shape))
                reader.read(tensor.stream(name), 0, values)
                found[tensor.name, name] = bytes(values)
    return found


SHORT = [(1, "drives"), (3, "interleaved"), (4, "mesh")]
MATRIX = [
    (size, name) for name in MIXED_RUNS for size in ((4,) if name == "mesh" else (3, 1, 4, 2))
]


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(SHORT, id="short"),
        pytest.param(MATRIX, id="all", marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
def test_streams_stay_the_same_through_all_ranks_strategies_and_tiers(
    tmp_path: Path, way: list[tuple[int, str]]
) -> None:
    launched(2, rank_checkpoints.saves, MIXED_RUNS["parameters"], tmp_path / "0", None)
    expected = streams_of(tmp_path / "0")
    for number, (size, name) in enumerate(way):
        origin, to = tmp_path / str(number), tmp_path / str(number + 1)
        run, drive = MIXED_RUNS[name], drive_of(name)
        assert launched(size, rank_checkpoints.passes_on, run, origin, to, drive) == [2] * size
        assert streams_of(to) == expected, (size, name)
    last = tmp_path / str(len(way))
    run = MIXED_RUNS["parameters"]
    straight = launched(2, rank_checkpoints.goes_on, run, tmp_path / "0", None)
    for mine, other in zip(straight, launched(2, rank_checkpoints.goes_on, run, last), strict=True):
        assert differing(mine["ended"], other["ended"]) == []


@pytest.mark.parametrize(
    "name", [pytest.param("parameters", marks=pytest.mark.slow), "optimizer", "drives"]
)
def test_ranks_save_one_step_beside_training(name: str, tmp_path: Path) -> None:
    program = rank_checkpoints.saves
    before = launched(2, program, RUNS[name], tmp_path / "c", drive_of(name), False)
    for rank, found in zip(before, gone_on(2, name, tmp_path / "c"), strict=True):
        assert differing(rank["saved"], found["saved"]) == []
        assert found["losses"] == rank["losses"]
        assert differing(rank["ended"], found["ended"]) == []


def test_ranks_of_which_one_cannot_write_beside_training_all_say_so(tmp_path: Path) -> None:
    program = rank_checkpoints.fails_beside_on_one_rank
    first, last = launched(2, program, RUNS["parameters"], tmp_path / "c")
    assert first[0].startswith("CollectiveError: ")
    assert "rank 1 failed" in first[0]
    assert last[0].startswith("TransferError: ")
    assert first[1:] == last[1:] == ["whole", "latest", "whole"]


def test_all_ranks_show_an_error_beside_training_at_the_same_step(tmp_path: Path) -> None:
    program = rank_checkpoints.steps_after_a_broken_save
    first, last = launched(2, program, RUNS["parameters"], tmp_path / "c")
    assert (first[0], last[0]) == ("CollectiveError", "TransferError")
    assert first[1:] == last[1:]
    assert last[2:] == ["failed", "latest", "whole"]


def test_ranks_that_write_where_rank_0_has_given_up_say_why(tmp_path: Path) -> None:
    program = rank_checkpoints.fails_beside_on_rank_0
    first, last = launched(2, program, RUNS["parameters"], tmp_path / "c")
    assert first.startswith("TransferError: ")
    assert last.startswith("CollectiveError: ")
    assert "rank 0 failed: " in last
    assert "Disk quota exceeded" in last


def test_all_ranks_stop_where_one_is_told_to(tmp_path: Path) -> None:
    ended = launched(2, rank_checkpoints.preempts, RUNS["parameters"], tmp_path / "c")
    assert ended == [(75, "step-00000004")] * 2
    assert CheckpointDirectory(tmp_path / "c").tags() == ["step-00000004"]


def test_all_ranks_save_again_to_stop_where_rank_0_failed_to_commit(tmp_path: Path) -> None:
    program = rank_checkpoints.stops_after_a_failed_commit
    ended = launched(2, program, RUNS["parameters"], tmp_path / "c")
    assert ended == [(75, "step-00000001")] * 2


def test_replicas_write_one_copy_and_all_load_it() -> None:
    path, before = saved(4, "mesh")
    with CheckpointReader(CheckpointDirectory(path).resolve()) as reader:
        reader.check_slices()
        assert [file.name for file in reader.manifest.files if file.name.startswith("rank-")] == [
            "rank-00000-00000.safetensors",
            "rank-00001-00000.safetensors",
        ]
    for rank, found in zip(before, gone_on(4, "mesh", path), strict=True):
        assert differing(rank["ended"], found["ended"]) == []


def test_a_rank_that_cannot_save_fails_all_and_leaves_nothing(tmp_path: Path) -> None:
    first, last = launched(
        2, rank_checkpoints.fails_on_one_rank, RUNS["parameters"], tmp_path / "c"
    )
    assert last.startswith("TypeError: ")
    assert first.startswith("CollectiveError: ")
    assert "rank 1 failed" in first
    assert list((tmp_path / "c").iterdir()) == []


@pytest.mark.parametrize(
    ("what", "error"), [("own state", "ValueError"), ("frozen weight", "TransferError")]
)
def test_a_rank_that_cannot_restore_its_state_fails_the_load_of_all(
    tmp_path: Path, what: str, error: str
) -> None:
    program = rank_checkpoints.fails_to_load_on_one_rank
    first, last = launched(2, program, RUNS["odd"], tmp_path / "c", what)
    assert first[0].startswith("CollectiveError: ")
    assert "rank 1 failed" in first[0]
    assert last[0].startswith(error)
    assert first[1] == last[1]
    assert "Call load() again" in first[1]


def test_a_rank_that_cannot_overwrite_states_fails_all() -> None:
    program = rank_checkpoints.fails_to_load_states_on_one_rank
    first, last = launched(2, program, RUNS["parameters"])
    assert first[0].startswith("CollectiveError: ")
    assert "rank 1 failed" in first[0]
    assert last[0].startswith("OSError: ")
    assert first[1] == last[1]
    assert "Call load_optimizer_state_dict() or load() again" in first[1]


def test_a_rank_that_fails_while_it_shares_blocks_fails_the_save_of_all(tmp_path: Path) -> None:
    program = rank_checkpoints.fails_to_share_on_one_rank
    first, last = launched(2, program, RUNS["parameters"], tmp_path / "c")
    assert first[0].startswith("CollectiveError: ")
    assert last[0].startswith("MemoryError")
    assert first[1:] == last[1:] == ["latest", "whole"]


def test_a_rank_without_memory_for_a_checkpoint_fails_all(tmp_path: Path) -> None:
    program = rank_checkpoints.lacks_memory_on_one_rank
    first, last = launched(2, program, RUNS["parameters"], tmp_path / "c")
    assert [error.split(":")[0] for error in first[:3]] == ["CollectiveError"] * 3
    assert all("rank 1 failed" in error for error in first[:3])
    assert [error.split(":")[0] for error in last[:3]] == ["CapacityError"] * 3
    assert first[3:] == last[3:] == ["first", "whole"]


def test_all_ranks_wait_for_a_save_where_one_rank_has_lent_memory(tmp_path: Path) -> None:
    program = rank_checkpoints.lends_memory_on_one_rank
    first, last = launched(2, program, RUNS["parameters"], tmp_path / "c")
    assert first[0] is last[0] is SaveState.COMMITTED


def test_ranks_that_load_other_checkpoints_are_told(tmp_path: Path) -> None:
    path, _ = saved(1, "parameters")
    ranks = launch(2, rank_checkpoints.goes_on, RUNS["parameters"], tmp_path / "nothing")
    assert all("any checkpoint" in str(rank.error) for rank in ranks)
    assert CheckpointDirectory(path).latest() == "step-00000002"


@pytest.mark.parametrize("name", ["parameters", "optimizer", "drives", "odd"])
def test_ranks_export_the_weights_that_they_have_together(name: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    before = launched(2, rank_checkpoints.exports, RUNS[name], tmp_path, drive_of(name))
    assert [rank["files"] for rank in before] == [["model.safetensors"]] * 2
    found = safetensors.load_file(tmp_path / "fp32" / "model.safetensors")
    masters = {
        state.removesuffix(": master"): tensor
        for state, tensor in before[0]["states"].items()
        if state.endswith(": master")
    }
    assert masters
    for weight, tensor in masters.items():
        assert torch.equal(found[weight].reshape(-1), tensor.reshape(-1)), weight
    assert sorted(file.name for file in tmp_path.rglob("*") if file.name.startswith(".")) == []


@pytest.mark.parametrize(
    ("run", "size"),
    [
        pytest.param(RUNS["odd"], 2, id="memory"),
        pytest.param(replace(RUNS["drives"], model="odd"), 2, id="drives"),
        pytest.param(replace(MESH, model="odd"), 4, id="mesh", marks=pytest.mark.slow),
    ],
)
def test_ranks_leave_out_frozen_values_and_go_on_with_the_same_bits(
    run: Run, size: int, tmp_path: Path
) -> None:
    path = tmp_path / "c"
    drive = drive_of("drives" if run.settings.get("parameters") == "nvme" else "memory")
    frozen = FrozenParameters.LEAVE_OUT
    before = launched(size, rank_checkpoints.saves, run, path, drive, False, frozen)
    with CheckpointReader(CheckpointDirectory(path).resolve()) as reader:
        left_out = [tensor.name for tensor in reader.manifest.left_out]
    assert left_out == ["frozen.weight", "frozen.bias"]
    after = launched(size, rank_checkpoints.goes_on, run, path, drive)
    for rank, found in zip(before, after, strict=True):
        assert found["losses"] == rank["losses"]
        assert differing(rank["ended"], found["ended"]) == []
    precision = {"precision": run.settings.get("precision", "model")}
    [alone] = launched(1, rank_checkpoints.goes_on, replace(RUNS["odd"], settings=precision), path)
    assert alone["step"] == 2


def test_all_ranks_refuse_another_frozen_base(tmp_path: Path) -> None:
    frozen, path = FrozenParameters.LEAVE_OUT, tmp_path / "c"
    launched(2, rank_checkpoints.saves, RUNS["odd"], path, None, True, frozen)
    first, last = launched(2, rank_checkpoints.has_another_base, RUNS["odd"], path)
    assert first == last
    assert first[0].startswith("ManifestMismatch: ")
    assert "frozen.weight should be 'values with the checksum" in first[0]
    assert [text.partition(":")[0] for text in first[1]] == ["frozen.weight"]
    assert first[2] == 3


def test_a_rank_that_cannot_read_frozen_values_fails_the_save_of_all(tmp_path: Path) -> None:
    program = rank_checkpoints.fails_to_read_frozen_values_on_rank_0
    first, last = launched(2, program, RUNS["odd"], tmp_path / "c")
    assert "Disk quota exceeded" in first[0]
    assert last[0].startswith("CollectiveError: ")
    assert first[1:] == last[1:] == ["latest", "part"]
