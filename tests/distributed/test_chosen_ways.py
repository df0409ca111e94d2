"""activations="auto" on several ranks: they choose alike, whatever each of them has measured. Gloo.

Rank 0 has longer batches than rank 1, and longer ones still at the end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.rank_activations import SAVED, train_with_ways
from support.ranks import launched

STEPS = 7
AUTO = {"at": "auto", "small_bytes": 0}
SOME = {**AUTO, "resident_bytes": 7 * SAVED // 2}  # of rank 0, not of rank 1, which has less


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """Return what each of two ranks got, of one launch for all tests."""
    drive = str(tmp_path_factory.mktemp("drive"))
    budget = {"host": "64MiB", "nvme": {drive: "64MiB"}}
    gradients = {"stage": "gradients"}
    runs: dict[str, dict[str, Any]] = {
        "kept": {},
        "kept, stage gradients": {"ranks": gradients},
        "all": {"activations": AUTO},
        "some": {"activations": SOME},
        "some, stage gradients": {"activations": SOME, "ranks": gradients},
        "drives": {"activations": SOME, "budget": budget, "strategy": "host_only"},
    }
    found: list[dict[str, dict[str, Any]]] = launched(2, _train, runs)
    assert list(Path(drive).iterdir()) == []
    return found


def _train(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return train_with_ways(runs, steps=STEPS)


def test_all_ranks_run_the_same_blocks_again(ran: list[dict[str, dict[str, Any]]]) -> None:
    first, second = ran
    for name in first:
        again = [
            [[(block, "recomputed" in way) for block, way in step] for step in rank[name]["ways"]]
            for rank in (first, second)
        ]
        assert again[0] == again[1], name


def test_what_one_rank_has_no_room_for_no_rank_keeps(ran: list[dict[str, dict[str, Any]]]) -> None:
    for rank in ran:
        assert {way for _, way in rank["some"]["ways"][1]} == {"recomputed"}
        assert {way for _, way in rank["some"]["ways"][2]} == {"kept", "recomputed"}
        assert {way for _, way in rank["all"]["ways"][2]} == {"kept"}


def test_ranks_measure_again_where_one_of_them_saves_more(
    ran: list[dict[str, dict[str, Any]]],
) -> None:
    for rank in ran:
        # The step that saves more ends with the old ways, the next one holds as little as can be.
        assert {way for _, way in rank["some"]["ways"][STEPS - 2]} == {"recomputed"}


@pytest.mark.parametrize("name", ["all", "some", "some, stage gradients", "drives"])
def test_ways_that_ranks_chose_train_with_the_same_bits(
    ran: list[dict[str, dict[str, Any]]], name: str
) -> None:
    plain = "kept, stage gradients" if "stage" in name else "kept"
    for rank in ran:
        assert rank[name]["losses"] == rank[plain]["losses"]
        expected = rank[plain]["weights"]
        assert all(torch.equal(rank[name]["weights"][key], expected[key]) for key in expected)
        assert rank[name]["within"]
