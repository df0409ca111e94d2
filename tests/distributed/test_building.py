"""Models that several ranks build or load together: the bits of one, the whole on none, failures
told to all. Gloo.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme import read_safetensors, write_safetensors
from support import rank_building as programs
from support.rank_training import Run
from support.ranks import launch, launched

ONE_BY_ONE = {"small_bytes": 0}
LAYER_BYTES = 4 << 20


# --- building -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "size", "cache"),
    [
        (tuple(programs.BUILDERS), 2, 0),
        (programs.FEW_BUILDERS, 3, 100_000),
        (programs.FEW_BUILDERS, 4, None),
        # A cache and a third rank change where values are, and not how a model is made.
        pytest.param(tuple(programs.BUILDERS), 3, 100_000, marks=pytest.mark.slow),
    ],
    ids=["2 ranks", "3 ranks", "4 ranks", "3 ranks, all"],
)
def test_ranks_build_the_bits_of_one_and_write_a_shard_each(
    names: Sequence[str], size: int, cache: int | None, tmp_path: Path
) -> None:
    ranks = launched(size, programs.build, names, str(tmp_path), cache, {})

    for rank in ranks:
        for name, found in rank.items():
            assert found["differs"] == [], name
            assert found["random"]
            assert found["closed"]
    for name in names:
        assert 0.99 < sum(rank[name]["taken"] for rank in ranks) < 1.3  # in whole pages
        if cache is None:
            assert sum(rank[name]["written"] for rank in ranks) < 1.01
    assert list(tmp_path.iterdir()) == []


def test_ranks_can_read_parts_of_what_they_build_in_the_body(tmp_path: Path) -> None:
    assert launched(2, programs.read_in_the_body, str(tmp_path), {}) == [[True, True, True]] * 2


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (
            "seed",
            r"CollectiveError: .*the model that was built.*the ranks differ in parameter 0, Linear\.weight: "
            r"float32 \[100, 100\] with values of checksum \w+ on rank 0, .*; and \d+ more",
        ),
        (
            "order",
            r"CollectiveError: .*ranks? .*gather of Linear\.weight|the ranks differ in parameter",
        ),
        (
            "more",
            r"CollectiveError: .*the ranks differ in parameter 12, Linear\.weight: nothing on ranks 0, 1, float32",
        ),
        (
            "mesh",
            r"ConfigError: ranks\.shard_ranks: expected None, as init_context or load_into had it.*, got 1",
        ),
        (
            "alone",
            r"ConfigError: model: expected one in memory, or one that all ranks have built or loaded together",
        ),
    ],
)
def test_ranks_that_build_something_else_are_all_told_what(
    what: str, told: str, tmp_path: Path
) -> None:
    for rank in launched(3, programs.build_otherwise, what, str(tmp_path)):
        assert re.match(told, rank["told"]), rank["told"]


@pytest.mark.parametrize(
    ("what", "first", "cause"),
    [
        ("raises", "ZeroDivisionError: in its body", "ZeroDivisionError: in its body"),
        ("budget", r"CapacityError: NVME.*raise the budget's nvme", "CapacityError: NVME"),
        ("no directory", r"ConfigError: Budget\.nvme", "ConfigError: Budget.nvme"),
        ("write", "TransferError: .*errno 5", "TransferError: "),
        ("read", "TransferError: .*errno 5", "TransferError: "),
    ],
)
def test_what_fails_on_one_rank_in_the_body_is_told_to_all(
    what: str, first: str, cause: str, tmp_path: Path
) -> None:
    one, other, failed = launched(3, programs.fail, what, str(tmp_path))

    assert re.match(first, failed["told"], re.DOTALL), failed["told"]
    for rank in (one, other):
        assert f"rank 2 has left with {cause}" in rank["told"]
    for rank in (one, other, failed):
        assert all("This model has no values" in used for used in rank["used"]), rank["used"]
        assert rank["left"] == 0
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_is_killed_in_the_body_is_named_and_the_next_start_is_clean(
    tmp_path: Path,
) -> None:
    one, other, killed = launch(3, programs.fail, "killed", str(tmp_path))

    assert killed.exitcode == -signal.SIGKILL
    for rank in (one, other):
        assert rank.error is None, rank.trace
        assert re.search(
            r"rank 2 \(process \d+ of this machine\) has ended without a report", rank.value["told"]
        )
        assert rank.value["left"] == 0
    launched(2, programs.fail, "raises", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


# --- training -------------------------------------------------------------------------------------


def runs(drive: str) -> dict[str, Run]:
    """Return trainings of models that are built on a drive: in fp32 and bf16, on every tier, in all
    stages. The tests of replicas train in fp32 from drives.
    """
    machine = {"host": "128MiB", "nvme": {drive: "64MiB"}}
    streamed = {
        "strategy": "nvme_streamed",
        "parameters": "nvme",
        "storage": ONE_BY_ONE,
        "budget": machine,
    }
    kinds: dict[str, dict[str, Any]] = {
        "bf16, on drives": {"settings": {**streamed, "precision": "bf16"}},
        "bf16, stage gradients": {
            "settings": {"budget": machine, "precision": "bf16", "ranks": {"stage": "gradients"}}
        },
        "on a device": {
            "emulated": True,
            "settings": {"budget": {**machine, "device": "8MiB"}, "parameters": "host"},
        },
        "odd": {"model": "odd", "optimizer": "sgd", "settings": {"budget": machine}},
    }
    return {name: Run(steps=2, **kind) for name, kind in kinds.items()}


def test_models_that_ranks_have_built_or_loaded_train_as_those_from_memory(tmp_path: Path) -> None:
    (drive := tmp_path / "drive").mkdir()
    folder = programs.files_of(tmp_path / "files", "gpt", "odd")

    for rank in launched(2, programs.train_built, runs(str(drive)), str(folder)):
        for name, ways in rank.items():
            expected = ways["in memory"]
            for run in ways.values():
                assert run["losses"] == expected["losses"], name
                states = expected["states"]
                assert [
                    key for key, each in run["states"].items() if not torch.equal(each, states[key])
                ] == [], name
                assert run["within"]
    assert list(drive.iterdir()) == []


# --- loading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_reads_its_slices_of_the_files_and_no_more(size: int, tmp_path: Path) -> None:
    (drive := tmp_path / "drive").mkdir()
    folder = programs.wide_files(tmp_path / "files")
    model = programs.wide()
    nbytes = sum(each.numel() * each.element_size() for each in model.parameters())
    # small ones, and buffers
    by_all = 8 + sum(each.numel() * each.element_size() for each in model.buffers()) + 4

    ranks = launched(size, programs.load, str(folder), str(drive), {})

    for rank in ranks:
        assert rank["differs"] == []
        assert rank["tied"]
        # a block for each parameter
        assert rank["read"] < nbytes / size + by_all + 4096 * 4 * 6
        assert rank["written"] <= rank["read"]
    assert sum(rank["read"] for rank in ranks) <= nbytes + size * by_all
    assert list(drive.iterdir()) == []


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (
            "another dtype",
            r"CollectiveError: .*ranks differ in 0\.safetensors: \d+ B, header \w+ on ranks 0, 1, \d+ B",
        ),
        (
            "another value",
            r"CollectiveError: .*ranks differ in halved in \d\.safetensors: values of checksum \w+ on ranks 0, 1, "
            r"values of checksum \w+ on rank 2",
        ),
        (
            "missing",
            r"rank 2 has left with ConfigError: directory of the values|ConfigError: directory of the values",
        ),
        ("damaged", r"rank 2 has left with ConfigError: file|ConfigError: file: .*0\.safetensors"),
        ("read", r"rank 2 has left with TransferError: |TransferError: .*errno 5"),
    ],
)
def test_what_one_rank_cannot_load_or_has_otherwise_is_told_to_all(
    what: str, told: str, tmp_path: Path
) -> None:
    (drive := tmp_path / "drive").mkdir()
    folder, other = programs.wide_files(tmp_path / "files"), tmp_path / "other"
    if what == "missing":
        other.mkdir()
    else:
        programs.wide_files(other)
    if what == "another dtype":
        state = {
            name: torch.as_tensor(each)
            for name, each in read_safetensors(other / "0.safetensors").items()
        }
        halved = {
            name: each.half() if each.is_floating_point() else each for name, each in state.items()
        }
        write_safetensors(other / "0.safetensors", halved)
    if what == "another value":
        for path in other.iterdir():
            state = {name: torch.as_tensor(each) for name, each in read_safetensors(path).items()}
            if "halved" in state:
                state["halved"][len(state["halved"]) // 2] += 1
            write_safetensors(path, state)
    if what == "damaged":
        (other / "0.safetensors").write_bytes(b"damaged")

    for rank in launched(3, programs.load_otherwise, what, str(folder), str(other), str(drive)):
        assert re.search(told, rank["told"]), rank["told"]
        assert rank["meta"]
        assert rank["left"] == 0
    assert list(drive.iterdir()) == []


# --- how much it takes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "each_bytes", "times"),
    [(2, 64 << 20, 4), pytest.param(4, 96 << 20, 8, marks=pytest.mark.slow)],
)
def test_a_model_of_many_times_a_rank_s_budget_is_built_within_it(
    size: int, each_bytes: int, times: int, tmp_path: Path
) -> None:
    count = times * each_bytes // LAYER_BYTES

    for rank in launched(
        size, programs.measure_building, str(tmp_path), str(size * each_bytes), count
    ):
        assert rank["model"] == times * each_bytes
        assert rank["limit"] == each_bytes
        assert rank["host"] <= each_bytes
        assert rank["rise"] <= each_bytes
        assert rank["drives"] < rank["model"] / size * 1.3 + (1 << 28)  # the file grows in steps


@pytest.mark.parametrize(
    ("size", "each_bytes", "times"),
    [(2, 64 << 20, 4), pytest.param(4, 96 << 20, 8, marks=pytest.mark.slow)],
)
def test_a_model_of_many_times_a_rank_s_budget_is_loaded_within_it(
    size: int, each_bytes: int, times: int, tmp_path: Path
) -> None:
    count = times * each_bytes // LAYER_BYTES
    (drive := tmp_path / "drive").mkdir()
    (folder := tmp_path / "files").mkdir()
    for number in range(count):
        write_safetensors(
            folder / f"{number}.safetensors", {f"{number}.weight": torch.rand(1024, 1024)}
        )

    for rank in launched(
        size, programs.measure_loading, str(folder), str(drive), str(size * each_bytes), count
    ):
        assert rank["model"] == times * each_bytes
        assert rank["rise"] <= each_bytes
        assert rank["host"] <= each_bytes


@pytest.mark.parametrize(
    ("size", "each_bytes", "times", "width", "way"),
    [
        (2, 64 << 20, 4, 768, "built"),
        pytest.param(2, 64 << 20, 8, 768, "built", marks=pytest.mark.slow),
        pytest.param(2, 64 << 20, 8, 768, "loaded", marks=pytest.mark.slow),
    ],
)
def test_what_a_rank_has_in_ram_stays_within_its_budget_until_a_model_of_many_times_that_is_trained_and_near_it_then(
    size: int, each_bytes: int, times: int, width: int, way: str, tmp_path: Path
) -> None:
    count = -(-times * each_bytes // (4 * width * width))
    (drive := tmp_path / "drive").mkdir()
    (folder := tmp_path / "files").mkdir()
    for number in range(count if way == "loaded" else 0):
        # of a size that leaves what the layers compute finite, through hundreds of them
        weight = torch.randn(width, width) / width**0.5
        write_safetensors(folder / f"{number}.safetensors", {f"{number}.weight": weight})
    files = str(folder) if way == "loaded" else None

    for rank in launched(
        size, programs.measure_training, files, str(drive), str(size * each_bytes), count, width
    ):
        assert rank["model"] >= times * each_bytes
        assert rank["limit"] <= each_bytes
        assert rank["drives"] > 3 * rank["model"] / size
        for part in ("making", "initialize"):
            assert rank[part] <= each_bytes, part
        # with activations and gradients in the making, which are PyTorch's own
        for part in ("step 0", "step 1"):
            assert rank[part] <= each_bytes * 9 // 8, part
