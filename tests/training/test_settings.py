"""Settings of a training are checked when they are made, and the rate follows from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infinity_engine.engine.checkpoints.saving import FrozenParameters
from infinity_engine.errors import ConfigError
from infinity_engine.training.rate import rate_factor
from infinity_engine.training.settings import FROZEN, Decay, TrainingSettings

GIVEN: dict[str, Any] = {
    "model": Path("m"),
    "data": (Path("d"),),
    "run": Path("r"),
    "sequence": 8,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sequence", 0),
        ("sequence", 1),
        ("batch", 0),
        ("accumulation_steps", -1),
        ("epochs", 0.0),
        ("epochs", float("nan")),
        ("steps", 0),
        ("lr", 0.0),
        ("lr", float("inf")),
        ("weight_decay", -0.1),
        ("warmup", 1.5),
        ("warmup", -1),
        ("seed", -1),
        ("lora", 0),
        ("keep", 0),
        ("optimizer", "adamx"),
        ("export_dtype", "int8"),
        ("data", ()),
        ("decay", "constant"),
        ("framing", None),
        ("frozen", "drop"),
    ],
)
def test_a_setting_that_cannot_be_right_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        TrainingSettings(**{**GIVEN, name: value})

    assert error.value.field == name


def test_what_decides_no_bit_may_change_when_a_run_is_resumed() -> None:
    one = TrainingSettings(**GIVEN, save_every=3, keep=1, frozen="leave_out")
    other = TrainingSettings(**{**GIVEN, "run": Path("x")}, resume=True, export_dtype="float32")

    assert one.deciding() == other.deciding()
    assert TrainingSettings(**GIVEN, seed=1).deciding() != one.deciding()


def test_frozen_parameters_are_saved_as_an_engine_knows_it() -> None:
    assert tuple(choice.value for choice in FrozenParameters) == FROZEN


def test_warm_up_is_a_number_of_steps_or_a_part_of_all() -> None:
    assert TrainingSettings(**GIVEN, warmup=0.03).warmup_steps(200) == 6
    assert TrainingSettings(**GIVEN, warmup=0.03).warmup_steps(10) == 1
    assert TrainingSettings(**GIVEN, warmup=50).warmup_steps(10) == 50
    assert TrainingSettings(**GIVEN, warmup=0).warmup_steps(10) == 0


@pytest.mark.parametrize(
    ("decay", "factors"),
    [
        (Decay.CONSTANT, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        (Decay.LINEAR, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        (Decay.COSINE, [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447]),
    ],
)
def test_the_rate_rises_in_the_warm_up_and_decays_after_it(
    decay: Decay, factors: list[float]
) -> None:
    found = [rate_factor(step, steps=6, warmup=2, decay=decay) for step in range(6)]

    assert found == pytest.approx(factors, abs=1e-6)


def test_a_rate_without_warm_up_begins_at_its_height() -> None:
    assert rate_factor(0, steps=1, warmup=0, decay=Decay.COSINE) == 1.0
    assert rate_factor(99, steps=10, warmup=0, decay=Decay.LINEAR) == 0.0
