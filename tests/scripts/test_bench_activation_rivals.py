"""scripts/bench/activation_rivals measures time and memory of every way to keep activations."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

pytest.importorskip("torch", reason="trains")

import training_place
from training_place import Place

import bench
import env
from support.scripts import load_script
from support.warm_trainings import train_warm

RIVALS = load_script("bench/activation_rivals")
TINY = RIVALS.Scale(64, 2, 128, 3, 1 << 20)


def measured(scale: object) -> dict[str, bench.Figure]:
    env.BUILD.mkdir(exist_ok=True)
    with ExitStack() as until_end:
        run = bench.Bench("activation_rivals", True, frozenset(), bench.ROUNDS)
        RIVALS.define(run, Place(until_end), scale)
        return {figure.name: figure for figure in run.run(1)}


def test_each_way_of_ours_is_compared_with_each_rival(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise env.EnvironmentMissingError("not here")

    monkeypatch.setattr(env, "rival_venv", missing)
    monkeypatch.setattr(training_place, "train_apart", train_warm)
    figures = measured(TINY)

    assert len(figures) == 4 * 2 * len(RIVALS.RIVALS) + 1
    reasons = {name: figure.reason for name, figure in figures.items() if figure.value is None}
    assert all("DeepSpeed" in name for name in reasons), reasons
    assert all("not here" in str(reason) for reason in reasons.values())


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_deepspeed_is_among_the_rivals() -> None:
    figures = measured(RIVALS.QUICK)
    failed = {name: figure.reason for name, figure in figures.items() if figure.value is None}
    assert [name.startswith(RIVALS.ON_HOST) for name in failed] == [True], failed
