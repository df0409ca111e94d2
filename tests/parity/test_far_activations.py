"""What activations cost on a device with the link and the compute of a 4090.

Seconds are of a clock that is computed from rates, so they are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infinity_engine.placement.activations import BlockWay
from support.engine_bits import differing
from support.families import FAMILIES, saved
from support.far_activations import (
    DEPTH,
    GPUS,
    POSITIONS,
    SAVED,
    SEQUENCES,
    TOKENS,
    gated_shape,
    most_held,
    peak_of_gated,
    seconds_of_ways,
    train_family,
)
from support.far_programs import far_process
from support.plannings import training_of
from support.session import SHARED

GPU = GPUS["RTX 4090"]
HIDDEN = 8192  # where products take longer than moving what they save
HALF = SAVED * DEPTH // 2
OTHERS = ("qwen2-moe", "t5", "vit", "mamba")


@pytest.fixture(scope="module")
def far(request: pytest.FixtureRequest) -> Iterator[ProcessPoolExecutor]:
    with far_process(request.config.stash[SHARED]) as process:
        yield process


def test_half_the_memory_costs_a_tenth_at_most_where_compute_hides_moves(
    far: ProcessPoolExecutor,
) -> None:
    ways = {
        "kept": {},
        "host": {"at": "host", "resident_bytes": HALF},
        "auto": {"at": "auto", "resident_bytes": HALF},
    }

    seconds = far.submit(seconds_of_ways, GPU, HIDDEN, ways).result()

    assert seconds["host"] <= 1.1 * seconds["kept"], seconds
    assert seconds["auto"] <= 1.05 * min(seconds["kept"], seconds["host"]), seconds


@pytest.mark.parametrize(
    "others",
    [{}, {"tokens": (TOKENS, TOKENS // 2) * 2 + (TOKENS,)}, {"holds": 4}],
    ids=["alike", "after shorter steps", "beside a graph that is held"],
)
def test_a_link_that_just_carries_what_has_no_room_costs_a_tenth_at_most(
    far: ProcessPoolExecutor, others: dict[str, Any]
) -> None:
    # Here the link needs nearly all of the forward for the half that has no room.
    ways = {"kept": {}, "host": {"at": "host", "resident_bytes": HALF}}

    seconds = far.submit(seconds_of_ways, GPU, 2048, ways, **others).result()

    assert seconds["host"] <= 1.1 * seconds["kept"], seconds


@pytest.mark.parametrize("hidden", [2048, HIDDEN])
def test_auto_is_about_as_fast_as_the_best_fixed_choice_where_room_is_short(
    far: ProcessPoolExecutor, hidden: int
) -> None:
    # Two blocks of eight: the one that moves share has room for one tensor, and for the next.
    room = SAVED * DEPTH // 4
    fixed: dict[str, dict[str, Any]] = {
        "recomputed": {"recompute": "blocks"},
        "host": {"at": "host", "resident_bytes": room},
        "both": {"at": "host", "recompute": "blocks", "resident_bytes": room},
    }
    ways: dict[str, dict[str, Any]] = {**fixed, "auto": {"at": "auto", "resident_bytes": room}}

    seconds = far.submit(seconds_of_ways, GPU, hidden, ways).result()

    assert seconds["auto"] <= 1.05 * min(seconds[way] for way in fixed), seconds


@pytest.mark.parametrize(
    "moved",
    [
        [BlockWay.HOST, BlockWay.DRIVE, BlockWay.HOST, BlockWay.DRIVE, BlockWay.HOST],
        [BlockWay.HOST, BlockWay.HOST, BlockWay.HOST, BlockWay.DRIVE, BlockWay.DRIVE],
    ],
    ids=["in turn", "one after the other"],
)
def test_what_moves_to_host_and_drives_shares_one_staging(
    far: ProcessPoolExecutor, tmp_path: Path, moved: list[BlockWay]
) -> None:
    """As the choice counts it: half of the room, whether one home is used or both."""
    room = 2 * 3 * SAVED + SAVED // 2

    held = far.submit(most_held, [*moved, *[BlockWay.KEEP] * 3], room, tmp_path).result()

    assert 3 * SAVED < held <= room


def test_a_graph_without_room_on_the_host_goes_another_way(
    far: ProcessPoolExecutor,
) -> None:
    room, whole = SAVED * DEPTH, SAVED * DEPTH

    held = far.submit(
        most_held, [BlockWay.HOST] * DEPTH, room, None, host_bytes=whole, graphs=2
    ).result()

    assert held <= room


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("positions", [None, 32, 8])
def test_blocks_whole_or_in_tiles_of_the_sequence_take_what_is_planned(
    far: ProcessPoolExecutor, positions: int | None, recompute: bool
) -> None:
    training = replace(
        training_of(gated_shape(), bits=32, checkpointing=recompute),
        batch=SEQUENCES,
        sequence=POSITIONS,
        tile_positions=positions,
    )
    planned = training.activation_bytes() + 4 * training.gradients_in_the_making()

    took = far.submit(peak_of_gated, positions, recompute=recompute).result()

    # At the peak, not every sum of gradients is there yet.
    assert 0.8 * planned <= took <= planned


@pytest.mark.parametrize(
    "name",
    ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)],
)
def test_models_of_transformers_have_the_same_bits_wherever_activations_wait(
    far: ProcessPoolExecutor, name: str, tmp_path: Path
) -> None:
    directory, drive = saved(FAMILIES[name], tmp_path / "model", length=32), tmp_path / "drive"
    drive.mkdir()
    few = {"resident_bytes": 8192, "host_bytes": "16MiB", "small_bytes": 0}
    ways: dict[str, dict[str, Any]] = {
        "on the host": {**few, "at": "host"},
        "on drives": {**few, "at": "nvme"},
        "recomputed": {"recompute": "blocks", "at": "device"},
        "recomputed, inputs on the host": {**few, "at": "host", "recompute": "blocks"},
        "all in turn": {**few, "at": "auto", "resident_bytes": "4MiB"},
    }

    expected, losses, _ = far.submit(
        train_family, name, directory, drive, {"at": "device"}
    ).result()

    for way, activations in ways.items():
        bits, same, went = far.submit(train_family, name, directory, drive, activations).result()
        assert same == losses, way
        assert differing(expected, bits) == [], way
        if way == "all in turn":
            assert went == {every.value for every in BlockWay}
