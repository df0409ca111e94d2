"""Ranks that have not as many batches: evaluated in step, or named where they go another way.

Gloo.
"""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch

from support import rank_training as programs
from support.engine_bits import differing
from support.ranks import launched

LITTLE = 200 << 10  # of the device, on which little more is whole than what a module needs


@pytest.mark.parametrize(
    "counts",
    [*(pytest.param(few, marks=pytest.mark.slow) for few in ([3, 1], [2, 2])), [1, 4, 2], [0, 0]],
)
def test_ranks_with_fewer_batches_use_their_last_again_and_do_not_count_it(
    counts: list[int],
) -> None:
    ranks = launched(len(counts), partial(programs.evaluate, in_step=True), counts, LITTLE)

    for rank, count in zip(ranks, counts, strict=True):
        assert len(rank["losses"]) == count
        assert rank["rounds"] == max(counts)
        assert rank["steps"] == 1
    even = launched(
        len(counts), partial(programs.evaluate, in_step=False), [max(counts)] * len(counts), LITTLE
    )
    for rank, other in zip(ranks, even, strict=True):
        assert rank["losses"] == other["losses"][: len(rank["losses"])]


def test_a_rank_without_any_batch_is_named_on_all() -> None:
    for told in launched(2, partial(programs.evaluate, in_step=True), [2, 0], LITTLE):
        assert told.startswith("ConfigError: batches: expected at least one on each rank")
        assert "none on rank 1" in told


def test_a_rank_that_ends_its_evaluation_before_others_is_told_apart_and_does_not_hang() -> None:
    for told in launched(2, partial(programs.evaluate, in_step=False), [3, 1], LITTLE):
        assert re.match(
            "CollectiveError: .*the ranks have started different collectives.*rank 0: .*rank 1: ",
            told,
        ), told


@pytest.mark.parametrize("stage", ["optimizer", pytest.param("parameters", marks=pytest.mark.slow)])
def test_ranks_update_alike_whoever_counts_micro_batches(stage: str) -> None:
    [found, other] = launched(2, programs.accumulate_as_called, {"stage": stage})

    for states in (*found.values(), *other.values()):
        assert differing(states, found["step after each backward"]) == []


@pytest.mark.parametrize(
    ("stage", "differs"),
    [
        ("optimizer", "the ranks differ in micro-batches of this step: 2 on rank 0, 1 on rank 1"),
        (
            "parameters",
            "rank 0: what has a gradient .*; rank 1: whether all agree on what the update is made "
            "with",
        ),
    ],
)
def test_all_ranks_are_told_where_one_updates_alone(stage: str, differs: str) -> None:
    for told in launched(2, programs.updates_alone, {"stage": stage}):
        assert re.search(differs, told), told


def test_gradients_that_share_their_memory_are_summed_once() -> None:
    summed, expected = (
        launched(2, programs.adds_through_views, stage) for stage in ("optimizer", "gradients")
    )

    for rank, other in zip(summed, expected, strict=True):
        for name, gradient in rank.items():  # summed in another order
            torch.testing.assert_close(gradient, other[name], rtol=1e-5, atol=1e-7)
