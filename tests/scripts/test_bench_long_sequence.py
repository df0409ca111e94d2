"""scripts/bench/long_sequence: what exceeds the budgets trains with drives within a memory limit."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

pytest.importorskip("torch", reason="trains")

import training_place
from training_place import Place

import bench
import env
from memory_group import GroupUnavailableError, memory_group
from support.scripts import load_script
from support.warm_trainings import train_warm

LONG = load_script("bench/long_sequence")


def needs_groups() -> None:
    try:
        with memory_group(None):
            pass
    except GroupUnavailableError as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize(
    "scale", [LONG.QUICK, pytest.param(LONG.FULL, marks=[pytest.mark.slow, pytest.mark.timeout(0)])]
)
def test_a_sequence_beyond_the_budgets_trains_where_plain_torch_is_killed(
    scale: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_groups()
    monkeypatch.setattr(training_place, "train_apart", train_warm)
    env.BUILD.mkdir(exist_ok=True)
    with ExitStack() as until_end:
        run = bench.Bench("long_sequence", True, frozenset(), bench.ROUNDS)
        LONG.define(run, Place(until_end), scale)
        figures = {figure.name: figure for figure in run.run(1)}

    assert len(figures) == 7
    assert {name: (f.value, f.reason) for name, f in figures.items() if not f.holds} == {}
