"""Where one rank has no room for more gradients than planned, all ranks refuse them. Gloo."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

from support import rank_room as programs
from support.engine_bits import differing
from support.ranks import launched

# Where gradients are, the stage, and the micro-batches of a step.
ON_HOST = ("host", "parameters", 1)
ON_DRIVES = ("drives", "parameters", 2)
SUMMED_FIRST = ("device", "optimizer", 2)

# Where gradients rest on drives, no rank has room: the first one is named.
NAMED = {"host": 1, "device": 1, "drives": 0}


@pytest.mark.parametrize("where", [ON_HOST, ON_DRIVES])
def test_all_ranks_refuse_a_backward_that_one_has_no_room_for(
    where: tuple[str, str, int], tmp_path: Path
) -> None:
    place, stage, planned = where
    expected = launched(2, programs.train_with_room, place, stage, tmp_path, planned)
    ranks = launched(2, programs.refuse_further, place, stage, tmp_path, planned)

    assert ranks[0]["told"] == ranks[1]["told"]
    assert re.match(
        rf"CapacityError: HOST of rank {NAMED[place]} cannot .* plans for {planned} in a step.*"
        "Nothing was lost",
        ranks[0]["told"],
    )
    for rank, plain in zip(ranks, expected, strict=True):
        assert differing(rank["states"], plain) == []


@pytest.mark.parametrize(
    ("where", "method"),
    [
        (ON_HOST, "backward"),
        (ON_HOST, "step"),
        (("device", "gradients", 1), "clip"),
        (ON_DRIVES, "backward"),
    ],
)
def test_all_ranks_refuse_gradients_that_one_has_no_room_to_sum(
    where: tuple[str, str, int], method: str, tmp_path: Path
) -> None:
    place, stage, planned = where
    expected = launched(2, programs.train_with_room, place, stage, tmp_path, planned)
    ranks = launched(2, programs.refuse_sums, place, stage, tmp_path, planned, method)

    assert ranks[0]["told"] == ranks[1]["told"]
    assert re.match(
        rf"CapacityError: HOST of rank {NAMED[place]} cannot .* no parameter more gradients",
        ranks[0]["told"],
    )
    for rank, plain in zip(ranks, expected, strict=True):
        assert f"gradient of a parameter on rank {NAMED[place]} was refused" in rank["step"]
        assert differing(rank["states"], plain) == []


@pytest.mark.parametrize("where", [SUMMED_FIRST, ON_DRIVES])
def test_a_clip_within_an_accumulation_takes_no_memory_beside_the_plan(
    where: tuple[str, str, int], tmp_path: Path
) -> None:
    place, stage, _ = where
    with_room, full = (
        launched(2, partial(programs.clip_within, full=full), place, stage, tmp_path)
        for full in (False, True)
    )

    for rank, plain in zip(full, with_room, strict=True):
        assert rank["norms"] == plain["norms"]
        assert differing(rank["states"], plain["states"]) == []
