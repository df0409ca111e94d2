"""Tiled layers and a chunked loss on several ranks. Gloo."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from support.rank_tiling import load_tiles, train_in_tiles, train_with_device
from support.ranks import launched

LIMIT = 1024
train = partial(train_in_tiles, limit=LIMIT)


def test_tiles_that_are_cut_over_ranks_train_with_the_bits_of_replicas() -> None:
    whole = launched(2, train, {"ranks": {"stage": "gradients"}})
    cut = launched(2, train, {"ranks": {}})

    for replica, gathered in zip(whole, cut, strict=True):
        assert set(replica["names"]) == {"embed", "head"}
        assert gathered["losses"] == replica["losses"]
        states = replica["states"]
        assert list(states) == ["embed.weight", "body.weight", "body.bias", "head.weight"]
        assert all(torch.equal(gathered["states"][name], states[name]) for name in states)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_run_of_two_ranks_goes_on_with_other_tiles_on_others(ranks: int, tmp_path: Path) -> None:
    saved = launched(2, partial(train, save=tmp_path), {"ranks": {}})[0]

    for rank in launched(ranks, partial(load_tiles, limit=2 * LIMIT), tmp_path):
        assert all(map(torch.equal, rank["states"].values(), saved["states"].values()))
        assert torch.equal(rank["moments"], saved["moments"])


def test_ranks_cut_alike_by_the_device_that_has_least() -> None:
    ranks = {"bucket_bytes": 1 << 15}
    settings = {"strategy": "host_only", "subgroup_numel": 1 << 15, "ranks": ranks}
    auto = {**settings, "tiling": "auto"}
    whole = launched(2, train_with_device, [32 << 20, 32 << 20], auto)
    cut = launched(2, train_with_device, [32 << 20, 1 << 20], auto)

    assert [rank["tiles"] for rank in whole] == [0, 0]
    assert [rank["tiles"] for rank in cut] == [8, 8]
    for one, other in zip(whole, cut, strict=True):
        assert list(one["states"]) == list(other["states"])
        torch.testing.assert_close(one["losses"], other["losses"])
