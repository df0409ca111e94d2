"""How busy links, CPU and device are in an update: what the engine measures is what the simulator
says of its plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity_engine
from infinity_engine.accel import Emulation, emulated_accelerator
from infinity_engine.engine.engine import Engine
from infinity_engine.plan import DriveRates, Lane, Rates
from infinity_engine.reporting.report import UpdatePhase
from infinity_engine.sim import simulate

# As published for one GPU of the paper's node, a million times slower: so long do its subgroups of
# 4096 take.
RATES = Rates(
    h2d_bytes_per_s=55e6,
    d2h_bytes_per_s=55e6,
    host_update_params_per_s=2e6,
    device_update_params_per_s=25e6,
)
WIDTH = 64
SUBGROUP = WIDTH * WIDTH
LAYERS = 24
SHARES = [0.0, 0.1, 0.33, 0.5, 0.68, 0.9, 1.0]


@contextmanager
def engine(share: float, *, timeline_kept: int = 10_000, **settings: Any) -> Iterator[Engine]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    emulation = Emulation(
        rates=RATES, capacity_bytes=1 << 24, host_takes_time=True, timeline_kept=timeline_kept
    )
    given = {
        "budget": {"host": "16MiB", "device": "16MiB"},
        "overlap": "off",
        "precision": "bf16",
        **settings,
    }
    with (
        emulated_accelerator(emulation) as device,
        infinity_engine.initialize(
            model,
            optimizer,
            device=device,
            strategy={"name": "interleaved", "share": share},
            rates=RATES,
            subgroup_numel=SUBGROUP,
            **given,
        ) as made,
    ):
        yield made


def measured(made: Engine, steps: int = 2) -> UpdatePhase:
    """Train some steps and return the last one's update."""
    for _ in range(steps):
        made.backward(made(torch.ones(2, WIDTH, dtype=torch.bfloat16)).float().sum())
        made.step()
    update = made.report().update
    assert update is not None
    return update


@pytest.mark.parametrize("parameters", ["device", "host"])
@pytest.mark.parametrize("share", SHARES)
def test_the_engine_measures_what_the_simulator_says(share: float, parameters: str) -> None:
    with engine(share, parameters=parameters) as made:
        found = measured(made)
        simulated = simulate(made.plan, RATES)

    assert found.utilisation == pytest.approx(dict(simulated.utilisation), rel=0.05)
    assert found.seconds * 1e9 == pytest.approx(simulated.end_ns, rel=0.05)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_an_update_beside_the_next_forward_is_counted_where_it_ends(share: float) -> None:
    with engine(share, overlap="auto") as made:
        found = measured(made)
        simulated = simulate(made.plan, RATES)

    assert found.utilisation == pytest.approx(dict(simulated.utilisation), rel=0.05)


def test_a_step_in_which_no_update_ends_has_none() -> None:
    with engine(0.5, overlap="auto") as made:
        made.backward(made(torch.ones(2, WIDTH, dtype=torch.bfloat16)).float().sum())
        made.step()

        assert made.report().update is None


def test_a_lane_whose_times_the_device_has_forgotten_is_left_out() -> None:
    with engine(0.5, timeline_kept=2) as made:
        found = measured(made)

    assert set(found.utilisation) == {Lane.HOST}


def test_of_drives_the_part_is_what_their_bytes_take_at_calibrated_rates(tmp_path: Path) -> None:
    drive = DriveRates(read_bytes_per_s=4e9, write_bytes_per_s=2e9, mixed_bytes_per_s=2e9)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    with infinity_engine.initialize(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        accelerator="cpu",
        strategy="nvme_streamed",
        overlap="off",
        subgroup_numel=SUBGROUP,
        rates=Rates(nvme={str(tmp_path): drive}),
        storage={"small_bytes": 256},
        budget={"host": 17_000_000, "nvme": {str(tmp_path): "64MiB"}},
    ) as made:
        made.backward(made(torch.ones(2, WIDTH)).sum())
        made.step()
        update = made.report().update
        stored = sum(each.store_bytes for each in made.plan.subgroups)

    assert stored > 0
    assert update is not None
    assert update.utilisation[Lane.NVME_WRITE] == pytest.approx(stored / 1e9 / update.seconds)
    assert 0 < update.utilisation[Lane.HOST] <= 1


def test_without_telemetry_nothing_is_measured_and_nothing_fails() -> None:
    with engine(0.5, telemetry={"recording": "off"}) as made:
        made.backward(made(torch.ones(2, WIDTH, dtype=torch.bfloat16)).float().sum())
        made.step()
