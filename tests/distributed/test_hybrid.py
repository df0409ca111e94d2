"""Hybrid sharding: neighbours share one copy of the model and the others have replicas of it, over
Gloo.

As with one copy (test_engine_parity.py), within tolerance of one rank, as sums are in another
order; and on one mesh, whatever the strategy, to the bit. All replicas are to the bit the same.
"""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from support import rank_building, rank_programs, rank_training
from support.rank_training import RATES, Run
from support.ranks import launch, launched

pytestmark = pytest.mark.usefixtures("deterministic")

ONE_BY_ONE: dict[str, Any] = {"storage": {"small_bytes": 0}}
TIGHT: dict[str, Any] = {**ONE_BY_ONE, "budget": {"host": "1536KiB"}}
CLIPPED: dict[str, Any] = {"precision": "bf16", "max_grad_norm": 0.05}
RUNS: dict[str, tuple[Run, dict[str, Any]]] = {
    "small": (Run(), {}),
    "one by one": (Run(settings=TIGHT), {"bucket_bytes": 8192}),
    "stage gradients": (Run(), {"stage": "gradients", "bucket_bytes": 8192}),
    "stage optimizer": (Run(emulated=True), {"stage": "optimizer"}),
    "interleaved": (Run(emulated=True, settings={"strategy": "interleaved", "rates": RATES}), {}),
    "bf16": (Run(steps=2, accumulation=2, settings=CLIPPED), {}),
    "bf16, one by one": (
        Run(
            steps=2, accumulation=2, settings={**ONE_BY_ONE, **CLIPPED, "budget": {"host": "2MiB"}}
        ),
        {"bucket_bytes": 8192},
    ),
    "bf16, stage gradients": (
        Run(steps=2, accumulation=2, settings=CLIPPED),
        {"stage": "gradients"},
    ),
    "bf16, stage optimizer": (
        Run(steps=2, accumulation=2, settings=CLIPPED),
        {"stage": "optimizer"},
    ),
    "odd": (Run(model="odd", steps=2, settings=ONE_BY_ONE), {}),
    "routed": (Run(model="routed", settings=ONE_BY_ONE), {"leaf_modules": ["Experts"]}),
    # Ranks of both dimensions wait for what others have not come to.
    "routed, little room": (
        Run(model="routed", settings=ONE_BY_ONE),
        {"leaf_modules": ["Experts"], "bucket_bytes": 4096},
    ),
}
AS_SMALL = ("one by one", "stage gradients", "stage optimizer", "interleaved")
FEW = ("small", "stage gradients", "routed, little room", "routed")


def on_mesh(name: str, shard_ranks: int) -> Run:
    run, ranks = RUNS[name]
    return replace(run, settings={**run.settings, "ranks": {**ranks, "shard_ranks": shard_ranks}})


@cache
def ran(size: int, shard_ranks: int) -> list[dict[str, dict[str, Any]]]:
    """Return what each rank got, of one launch for all tests."""
    names = RUNS if size == 4 else FEW
    return launched(
        size, rank_training.train_all, {name: on_mesh(name, shard_ranks) for name in names}
    )


@cache
def alone(name: str) -> dict[str, Any]:
    run, _ = RUNS[name]
    settings = {key: value for key, value in run.settings.items() if key in CLIPPED}
    return rank_training.train(replace(run, emulated=False, settings=settings))


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


MESHES = [(4, 2), (2, 1), (2, 2)]


@pytest.mark.parametrize(("size", "shard_ranks"), MESHES)
def test_replicas_train_as_one_rank_does_on_the_same_batch(size: int, shard_ranks: int) -> None:
    for found in ran(size, shard_ranks):
        for name, each in found.items():
            rtol, atol = (2e-2, 4e-3) if "bf16" in name else (2e-4, 2e-5)
            one = alone(name)
            for key, values in one["states"].items():
                assert torch.allclose(
                    each["states"][key].float(), values.float(), rtol=rtol, atol=atol
                ), (name, key)
            assert each["within"], name
            if one["norms"][0] is not None:
                assert each["norms"] == pytest.approx(one["norms"], rel=1e-2)


@pytest.mark.parametrize(("size", "shard_ranks"), MESHES)
def test_all_replicas_have_the_same_bits_and_the_same_norm(size: int, shard_ranks: int) -> None:
    first, *others = ran(size, shard_ranks)

    for found in others:
        for name, each in found.items():
            assert differing(each["states"], first[name]["states"]) == [], name
            assert each["norms"] == first[name]["norms"]
            assert differing(each["after"], first[name]["after"]) == []


@pytest.mark.parametrize("name", AS_SMALL)
def test_strategies_and_stages_have_the_same_bits_on_one_mesh(name: str) -> None:
    [found, *_] = ran(4, 2)

    assert differing(found[name]["states"], found["small"]["states"]) == []
    assert found[name]["losses"] == found["small"]["losses"]


@pytest.mark.parametrize("name", ["bf16, one by one", "bf16, stage gradients"])
def test_buckets_and_stages_change_no_bit_of_accumulated_and_clipped_gradients(name: str) -> None:
    [found, *_] = ran(4, 2)

    assert differing(found[name]["states"], found["bf16"]["states"]) == []
    assert found[name]["norms"] == found["bf16"]["norms"]


@pytest.mark.parametrize(("size", "shard_ranks"), MESHES)
def test_little_room_for_gradients_changes_no_bit_and_an_expert_that_nobody_uses_makes_no_step(
    size: int, shard_ranks: int
) -> None:
    [found, *_] = ran(size, shard_ranks)

    assert differing(found["routed, little room"]["states"], found["routed"]["states"]) == []
    made = [
        int(found["routed"]["states"][f"blocks.0.experts.{number}.weight: step"])
        for number in range(4)
    ]
    assert made == [3, 3, 3, 0]


def test_a_mesh_of_one_copy_has_the_bits_of_none() -> None:
    [found, *_] = ran(2, 2)
    run, ranks = RUNS["small"]
    [other, _] = launched(2, rank_training.train, replace(run, settings={"ranks": ranks}))

    assert differing(found["small"]["states"], other["states"]) == []


@pytest.mark.parametrize("size", [2, 4])
def test_sums_over_replicas_are_those_of_a_loop_in_however_many_rounds(size: int) -> None:
    for found in launched(size, rank_programs.sums_of_replicas):
        assert found["equal"] == [True] * found["ways"]
        assert found["nobody has anything"]


def test_what_there_is_to_an_engine_works_with_replicas() -> None:
    for found in launched(4, rank_training.looks, {"shard_ranks": 2}):
        assert found["is nan"]
        assert found["gathered"]
        assert found["evaluated"] == found["outside"]
        assert found["doubled"]
        assert found["master"]
        assert found["stepped"].name == "UPDATED"
        assert "agreement on what gathered(modify=True) wrote" in found["other values"]


COUNTS = [4, 1, 3, 2]


def accumulated_by_pytorch() -> dict[str, torch.Tensor]:
    """Return the weights that PyTorch alone gets: the loss of a micro-batch is the mean over
    ranks.
    """
    task, optimizer = rank_training.made(Run())
    for number in range(max(COUNTS)):
        rows = torch.cat([task.batch(100 * number + part) for part in range(12)]).chunk(len(COUNTS))
        for rank, count in enumerate(COUNTS):
            if number < count:
                (task(rows[rank]) / (2 * len(COUNTS))).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return {name: values.detach().clone() for name, values in task.state_dict().items()}


def test_replicas_accumulate_in_step_where_ranks_have_not_as_many_batches() -> None:
    mesh = {"shard_ranks": 2}
    ways: list[dict[str, Any]] = [
        mesh,
        {**mesh, "stage": "gradients"},
        {**mesh, "stage": "optimizer"},
    ]
    expected = accumulated_by_pytorch()

    [first, *others] = ranks = launched(4, rank_training.accumulate_by_turns, COUNTS, ways)

    for rank, count in zip(ranks, COUNTS, strict=True):
        *reducing, adding_up = rank
        for found in rank:
            assert found["new"] == [number < count for number in range(4)]
            assert found["steps"] == 2
            for name, values in expected.items():
                assert torch.allclose(found["states"][name], values, rtol=2e-4, atol=2e-5), name
        assert all(min(found["reduced"]) > 0 for found in reducing)
        assert [reduces > 0 for reduces in adding_up["reduced"]] == [False, True, False, True]
    for other in others:
        for found, same in zip(other, first, strict=True):
            assert differing(found["states"], same["states"]) == []


@pytest.mark.parametrize(("size", "shard_ranks"), [(4, 2), (2, 1)])
def test_replicas_build_and_load_the_bits_of_one_rank_and_train_them_as_from_memory(
    size: int, shard_ranks: int, tmp_path: Path
) -> None:
    (drive := tmp_path / "drive").mkdir()
    machine = {"host": f"{64 * size}MiB", "nvme": {str(drive): f"{32 * size}MiB"}}
    run = Run(
        settings={
            "budget": machine,
            "parameters": "nvme",
            "strategy": "nvme_streamed",
            **ONE_BY_ONE,
        }
    )
    run = replace(run, settings={**run.settings, "ranks": {"shard_ranks": shard_ranks}})
    folder = rank_building.files_of(tmp_path / "files", "gpt")
    wide = rank_building.wide_files(tmp_path / "wide")

    ranks = launched(
        size, rank_building.on_a_mesh, shard_ranks, run, str(drive), str(folder), str(wide)
    )

    for rank in ranks:
        for name, found in rank["built"].items():
            assert found["differs"] == [], name
            assert found["random"]
        assert rank["read in the body"] == [True, True, True]
        assert rank["loaded values"]["differs"] == []
        for found in rank["trained"].values():
            assert found["losses"] == rank["trained"]["in memory"]["losses"]
            assert differing(found["states"], rank["trained"]["in memory"]["states"]) == []
    for name in rank_building.FEW_BUILDERS:  # each replica has all of it
        assert (
            size // shard_ranks * 0.99
            < sum(rank["built"][name]["taken"] for rank in ranks)
            < size // shard_ranks * 1.3
        )
    assert list(drive.iterdir()) == []


@pytest.mark.parametrize(("size", "shard_ranks", "fitting"), [(4, 3, "1, 2, 4"), (2, 4, "1, 2")])
def test_ranks_that_cannot_be_divided_are_all_told(
    size: int, shard_ranks: int, fitting: str
) -> None:
    for rank in launch(
        size, rank_training.train, Run(steps=1, settings={"ranks": {"shard_ranks": shard_ranks}})
    ):
        assert str(rank.error).startswith(
            f"ranks.shard_ranks: expected a divisor of the {size} ranks: {fitting}, got "
            f"{shard_ranks}"
        )


def test_ranks_that_want_other_meshes_are_all_told() -> None:
    for rank in launch(4, rank_training.wants_another_mesh):
        assert rank.error is None, rank.trace
        assert (
            "agreement on the mesh: the ranks differ in ranks.shard_ranks: 2 on ranks 0, 1, 2, "
            "None on rank 3" in rank.value
        )


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_ranks_of_every_replica_are_told_of_one_that_ends(how: str) -> None:
    ranks = launch(4, rank_training.ends, 3, 1, how, {"ranks": {"shard_ranks": 2}})

    ended = ranks.pop(3)
    if how == "killed":
        assert ended.exitcode == -signal.SIGKILL
        told = r"rank 3 \(process \d+ of this machine\) has ended without a report"
    else:
        told = "rank 3 has left with ZeroDivisionError: division by zero"
    for each in ranks:
        assert each.error is None, each.trace
        assert re.search(told, each.value), each.value


def test_replicas_on_drives_have_the_same_bits(tmp_path: Path) -> None:
    drives = {
        "strategy": "nvme_streamed",
        "parameters": "nvme",
        **ONE_BY_ONE,
        "budget": {"host": "256MiB", "nvme": {str(tmp_path): "64MiB"}},
        "ranks": {"shard_ranks": 2},
    }
    [small, *_] = ran(4, 2)

    for found in launched(4, rank_training.train, Run(settings=drives)):
        assert differing(found["states"], small["small"]["states"]) == []
    assert list(tmp_path.iterdir()) == []
