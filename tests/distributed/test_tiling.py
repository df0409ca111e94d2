"""Tiled layers and a chunked loss on several ranks. Gloo."""

from __future__ import annotations

from functools import partial

import torch

from support.rank_tiling import train_in_tiles
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
