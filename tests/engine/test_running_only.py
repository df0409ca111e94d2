"""A frozen model runs in an engine without an optimizer, and each pass over it is prefetched by the
pass before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity_engine
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.schedule import ResidentSet, Use
from infinity_engine.schedule.passes import kept_between_passes
from support.nvme_training import RATES

pytestmark = pytest.mark.usefixtures("deterministic")

WIDTH = 256
LAYERS = 6
LAYER_BYTES = 4 * WIDTH * WIDTH


class Model(nn.Module):
    """Layers without biases, all of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = torch.tanh(layer(values))
        return values


def model(*, frozen: bool = True) -> Model:
    torch.manual_seed(0)
    return Model().requires_grad_(not frozen)


def opened(made: nn.Module, drive: Path, optimizer: Any = None, **settings: Any) -> Engine:
    drive.mkdir(exist_ok=True)
    given: dict[str, Any] = {
        # Room for some layers, and not for all.
        "budget": {"host": "24MiB", "nvme": {str(drive): "64MiB"}},
        "parameters": "nvme",
        "accelerator": "cpu",
        "calibration": "off",
        "storage": {"small_bytes": 0},
        **settings,
    }
    return infinity_engine.initialize(made, optimizer, **given)


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("parameters", ["nvme", "host", "auto"])
def test_a_frozen_model_computes_as_in_plain_torch(parameters: str, tmp_path: Path) -> None:
    expected = model()(batch())

    with opened(model(), tmp_path / "drive", parameters=parameters) as engine, torch.no_grad():
        assert torch.equal(engine(batch()), expected)
        assert torch.equal(engine.module(batch()), expected)
        assert engine.state_dict().keys() == model().state_dict().keys()


def test_a_frozen_model_has_its_values_back_at_the_end(tmp_path: Path) -> None:
    given = model()
    with opened(given, tmp_path / "drive") as engine:
        engine(batch())

    assert torch.equal(given(batch()), model()(batch()))


def test_an_optimizer_of_nothing_is_for_frozen_models_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.requires_grad_\(False\)"):
        opened(model(frozen=False), tmp_path / "drive")
    nothing = torch.optim.SGD([{"params": []}])
    with pytest.raises(ConfigError, match="no parameter that requires a gradient"):
        opened(model(frozen=False), tmp_path / "drive", nothing)
    frozen = model()
    with pytest.raises(ConfigError, match="no parameter that requires a gradient"):
        opened(frozen, tmp_path / "drive", torch.optim.SGD(frozen.parameters()))


def test_rates_change_nothing_where_nothing_is_updated(tmp_path: Path) -> None:
    with opened(model(), tmp_path / "drive", parameters="auto", rates=RATES) as engine:
        assert torch.equal(engine(batch()), model()(batch()))


def test_a_step_of_a_frozen_model_says_that_no_gradient_came(tmp_path: Path) -> None:
    with (
        opened(model(), tmp_path / "drive") as engine,
        pytest.raises(RuntimeError, match="no gradient"),
    ):
        engine.step()


# --- prefetching from pass to pass ----------------------------------------------------------------


def tight(drive: Path, made: nn.Module | None = None, optimizer: Any = None) -> Engine:
    """Return an engine with room for three of the six layers."""
    made = model() if made is None else made
    host = least(drive, made, optimizer)
    return opened(made, drive, optimizer, budget=budget(drive, host + 2 * LAYER_BYTES))


def least(drive: Path, made: nn.Module, optimizer: Any = None) -> int:
    """Return about the least host budget that is accepted."""
    host = 1 << 20
    while True:
        try:
            opened(made, drive, optimizer, budget=budget(drive, host)).close()
        except CapacityError as error:
            host = max(error.asked, host + (32 << 10))
        else:
            return host


def budget(drive: Path, host: int) -> dict[str, Any]:
    return {"host": host, "nvme": {str(drive): "64MiB"}}


def test_passes_after_the_first_find_every_parameter_fetched(tmp_path: Path) -> None:
    expected = [model()(batch(seed)) for seed in range(5)]
    with tight(tmp_path / "drive") as engine, torch.no_grad():
        assert torch.equal(engine(batch(0)), expected[0])
        assert engine.fetching().late == LAYERS

        for seed in range(1, 5):
            assert torch.equal(engine(batch(seed)), expected[seed])

        fetching = engine.fetching()
        assert fetching.late == LAYERS
        # The last pass has begun to read for one that does not come.
        assert fetching.fetched <= 6 * LAYERS


def test_a_forward_with_gradients_on_is_a_pass_of_a_frozen_model(tmp_path: Path) -> None:
    with tight(tmp_path / "drive") as engine:
        for seed in range(3):
            engine(batch(seed))

        assert engine.fetching().late == LAYERS


def test_evaluation_within_a_training_step_is_part_of_it(tmp_path: Path) -> None:
    # As preference training does: a pass without gradients, and then one with.
    made = model(frozen=False)
    with tight(tmp_path / "drive", made, torch.optim.SGD(made.parameters(), lr=0.1)) as engine:
        for step in range(4):
            with torch.no_grad():
                engine(batch(step))
            engine.backward(engine(batch(step)).square().mean())
            before = engine.fetching().late
            engine.step()
            if step == 1:
                learnt = before

        assert engine.fetching().late == learnt


# --- what comes next ------------------------------------------------------------------------------


def resident() -> ResidentSet[str]:
    return ResidentSet(dict.fromkeys(range(4), 1), 4)


def use(number: int) -> Use:
    return Use(f"layer {number}", (number,))


def passes(members: ResidentSet[str], *numbers: int) -> None:
    """Let a call use these, and end without a graph."""
    members.begin_pass()
    for number in numbers:
        members.record_use(use(number))
    members.end_pass()


def upcoming(members: ResidentSet[str]) -> list[int]:
    return [number for _, use in members.upcoming(32) for number in use.parameters]


def test_a_pass_is_predicted_twice_so_that_its_end_sees_the_next_beginning() -> None:
    members = resident()
    passes(members, 0, 1, 2)
    assert upcoming(members) == [0, 1, 2, 0, 1, 2]

    members.begin_pass()
    for number in range(3):
        members.record_use(use(number))
    assert upcoming(members) == [0, 1, 2]


def test_another_pass_is_predicted_once_it_was_seen() -> None:
    members = resident()
    passes(members, 0, 1)
    passes(members, 2, 3)
    assert upcoming(members) == [2, 3, 2, 3]


def test_uses_outside_of_a_call_are_no_part_of_a_pass() -> None:
    members = resident()
    members.record_use(use(3))
    passes(members, 0, 1)
    assert upcoming(members) == [0, 1, 0, 1]


def test_a_pass_within_a_known_step_leaves_the_rest_of_it_predicted() -> None:
    members = resident()
    for number in (0, 1, 2, 3):
        members.record_use(use(number))
    members.end_step()

    passes(members, 0, 1)

    assert upcoming(members) == [2, 3]


def test_a_step_that_began_with_a_pass_is_predicted_whole() -> None:
    members = resident()
    passes(members, 0, 1)
    members.begin_pass()
    for number in (2, 3):
        members.record_use(use(number))
    members.end_step()

    assert upcoming(members) == [0, 1, 2, 3]
    passes(members, 0, 1)
    assert upcoming(members) == [2, 3]


# --- what stays -----------------------------------------------------------------------------------


def one_of_each(count: int) -> list[Use]:
    return [use(number) for number in range(count)]


def test_everything_stays_where_it_fits() -> None:
    assert kept_between_passes(one_of_each(10), dict.fromkeys(range(10), 5), 50) == set(range(10))


def test_some_stay_evenly_spread_and_the_others_pass_through_a_window() -> None:
    # 13 have room; three pass at a time.
    kept = kept_between_passes(one_of_each(20), dict.fromkeys(range(20), 5), 65)

    assert len(kept) == 10
    assert kept == set(range(1, 20, 2))


def test_nothing_stays_where_only_the_window_has_room() -> None:
    assert kept_between_passes(one_of_each(20), dict.fromkeys(range(20), 5), 15) == set()


def test_a_member_that_is_used_twice_counts_once() -> None:
    uses = [Use("embedding", (0,)), *(use(number) for number in range(1, 9)), Use("head", (0,))]
    assert kept_between_passes(uses, dict.fromkeys(range(9), 1), 9) == set(range(9))


def test_members_that_stay_are_evicted_only_where_nothing_else_can_be() -> None:
    members = ResidentSet[str](dict.fromkeys(range(10), 1), 8)
    passes(members, *range(10))
    kept = kept_between_passes(
        [use(number) for number in range(10)], dict.fromkeys(range(10), 1), 8
    )
    assert kept
    for number in range(8):
        members.admit(number, "")

    idle, staying = list(members.idle()), kept & set(range(8))
    assert set(idle) == set(range(8))
    assert set(idle[-len(staying) :]) == staying
    chosen = members.choose(members.upcoming(32))
    assert not kept & set(chosen.evicted)


def test_memory_for_half_of_a_model_halves_what_each_pass_reads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(32)]
    made = nn.Sequential(*layers).requires_grad_(False)
    host, half = least(tmp_path / "drive", made), 16 * LAYER_BYTES
    with (
        opened(made, tmp_path / "drive", budget=budget(tmp_path / "drive", host + half)) as engine,
        torch.no_grad(),
    ):
        for seed in range(2):
            engine(batch(seed))
        before = engine.fetching().fetched
        for seed in range(4):
            engine(batch(seed))

        # The window takes some of the room, so a bit less than half stays.
        assert engine.fetching().fetched - before < 4 * 32 * 0.65
