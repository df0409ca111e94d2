"""What scripts/bench/checkpoint compares, and how it counts memory. Measures nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from training_place import environ_of_training

import bench
import env
from support.scripts import load_script

CHECKPOINT = load_script("bench/checkpoint")


@pytest.mark.parametrize("system", CHECKPOINT.SYSTEMS)
def test_malloc_keeps_no_holes_of_tensors_in_any_system(
    system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else how much malloc keeps counts as memory of saves, in whichever round it grows.
    monkeypatch.setattr(env, "rival_venv", lambda *_: Path(sys.executable))
    _, environ = CHECKPOINT.python_of(system)
    for name in ("MALLOC_MMAP_THRESHOLD_", "OMP_NUM_THREADS"):
        assert environ[name] == environ_of_training()[name]


def test_long_steps_are_those_of_our_states_on_the_drive_alone() -> None:
    run = bench.Bench("checkpoint", True, frozenset({CHECKPOINT.LONG_STEPS}))

    CHECKPOINT.define(run)

    assert run.units.keys() == {CHECKPOINT.DRIVE, CHECKPOINT.ON_DRIVES}
