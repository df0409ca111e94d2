"""Where a strategy asks for rates and none are given, `initialize` takes what was calibrated, or
measures it once.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import infinity_engine
from infinity_engine.accel import Accelerator, Emulation, emulated_accelerator
from infinity_engine.calibration import (
    FULL,
    CalibrationCache,
    CalibrationWarning,
    Effort,
    calibrated,
)
from infinity_engine.calibration.device import device_identity
from infinity_engine.calibration.identity import machine_identity
from infinity_engine.config import EngineConfig
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import ConfigError
from infinity_engine.plan import Calibration, Rates, parse_strategy
from infinity_engine.planning import calibrating
from infinity_engine.planning.calibrating import needs_rates, of_one_rank, with_rates_of_machine
from infinity_engine.planning.choosing import choose
from infinity_engine.units import GiB, MiB
from support.calibrations import calibration, measure_small_blocks

TINY = Effort(
    seconds=0.1,
    rounds=1,
    update_bytes=MiB,
    io_bytes=MiB,
    file_bytes=2 * MiB,
    beside_bytes=0,
    shortest_s=0.001,
)
DEVICE = Rates(h2d_bytes_per_s=1.2e9, d2h_bytes_per_s=1e9, device_update_params_per_s=20e9)
INTERLEAVED = {"strategy": "interleaved", "subgroup_numel": 4096, "precision": "bf16"}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CalibrationCache:
    """Give every test a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setenv("DEEPNVME_PROFILE", "")
    return CalibrationCache.of_user()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_small_blocks(monkeypatch)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the machine of the tests count as quiet, whatever else runs on it."""
    monkeypatch.setattr("infinity_engine.machine.busy.OthersWork.share", lambda _: 0.0)


@pytest.fixture
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrating, "calibrated", lambda *_, **__: pytest.fail("it measures"))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a calibration take little."""
    monkeypatch.setattr(calibrating, "FULL", TINY)
    monkeypatch.setattr(
        calibrating, "calibrated", lambda *a, **k: calibrated(*a, **{**k, "effort": TINY})
    )


@pytest.fixture
def device() -> Iterator[Accelerator]:
    with emulated_accelerator(Emulation(rates=DEVICE, capacity_bytes=32 * MiB)) as accelerator:
        yield accelerator


@contextmanager
def engine(device: Accelerator | None, **settings: Any) -> Iterator[Engine]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128, bias=False) for _ in range(6)))
    budget = {"host": "64MiB", "device": "8MiB"}
    given = {**INTERLEAVED, "update_threads": 2, "budget": budget, **settings}
    with infinity_engine.initialize(model, "adamw", device=device, **given) as made:
        yield made


def kept_for(device: Accelerator, measured: Calibration) -> Calibration:
    """Return the calibration as if it had been measured here."""
    return dataclasses.replace(measured, machine=machine_identity(device_identity(device)))


def both_ways(rates: Rates) -> Rates:
    return dataclasses.replace(
        rates,
        h2d_bytes_per_s=rates.duplex_h2d_bytes_per_s,
        d2h_bytes_per_s=rates.duplex_d2h_bytes_per_s,
    )


# --- when ---


@pytest.mark.parametrize(
    ("strategy", "needs"),
    [
        ("interleaved", True),
        ({"name": "nvme_streamed", "update": "interleaved"}, True),
        ({"name": "interleaved", "share": 0.5}, True),
        ({"name": "interleaved", "stride": 2}, True),
        ({"name": "nvme_streamed", "update": {"name": "interleaved", "share": 0.5}}, True),
        ("nvme_streamed", False),
        ("host_only", False),
        ("device_only", False),
        ({"name": "static_split", "ratio": 0.5}, False),
        ("auto", False),
    ],
)
def test_only_what_interleaves_needs_rates(strategy: object, needs: bool) -> None:
    assert needs_rates(parse_strategy(strategy)) is needs


@pytest.mark.usefixtures("nothing_is_measured")
def test_rates_that_are_given_are_used(device: Accelerator) -> None:
    with engine(device, rates=dataclasses.replace(DEVICE, host_update_params_per_s=1e9)) as made:
        assert made.plan.ops


@pytest.mark.usefixtures("nothing_is_measured")
@pytest.mark.parametrize(
    "settings", [{"calibration": "off"}, {"policy": "interleaved", "strategy": "auto"}]
)
def test_without_a_calibration_a_rate_that_is_missing_is_told(
    settings: dict[str, Any], device: Accelerator
) -> None:
    with (
        pytest.raises(ConfigError, match=r"Rates\.\w+: expected a rate"),
        engine(device, **settings),
    ):
        pass


@pytest.mark.usefixtures("nothing_is_measured")
def test_where_device_and_host_are_one_memory_nothing_is_measured() -> None:
    with (
        pytest.raises(ConfigError, match=r"Rates\.\w+: expected a rate"),
        engine(None, accelerator="cpu"),
    ):
        pass


# --- from a file ---


@pytest.mark.parametrize(("host", "update_bytes"), [("512MiB", FULL.update_bytes), ("2GiB", GiB)])
def test_beside_a_gpu_more_memory_is_measured_where_the_budget_has_it(
    host: str, update_bytes: int, device: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    efforts: list[Effort] = []

    def noting(*given: Any, effort: Effort, **more: Any) -> Any:
        efforts.append(effort)
        return calibrated(*given, effort=TINY, **more)

    monkeypatch.setattr(type(device), "works_beside_host", True)
    monkeypatch.setattr(calibrating, "calibrated", noting)

    with engine(device, budget={"host": host, "device": "8MiB"}):
        assert [effort.update_bytes for effort in efforts] == [update_bytes]


def test_a_file_that_the_command_wrote_gives_the_rates(device: Accelerator, tmp_path: Path) -> None:
    measured = kept_for(device, calibration())
    file = tmp_path / "figures.json"
    file.write_text(json.dumps(measured.to_mapping()))
    expected = both_ways(measured.rates(threads=2, beside_copies=True))

    with engine(device, calibration=file) as made, engine(device, rates=expected) as told:
        assert made.plan == told.plan


def test_a_file_of_another_machine_is_used_and_told(device: Accelerator, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    file.write_text(json.dumps(calibration().to_mapping()))

    with (
        pytest.warns(
            CalibrationWarning,
            match=r"is of another machine .*cpu: Imaginary 9000, here .*rates are used",
        ),
        engine(device, calibration=str(file)) as made,
    ):
        assert made.plan.ops


@pytest.mark.parametrize("content", [None, "", "[]", '{"version": 9}'])
def test_a_file_that_is_no_calibration_is_refused(
    content: str | None, device: Accelerator, tmp_path: Path
) -> None:
    file = tmp_path / "figures.json"
    if content is not None:
        file.write_text(content)

    with (
        pytest.raises(
            ConfigError,
            match=r"^calibration: expected .*a file that `infinity calibrate --json` wrote",
        ),
        engine(device, calibration=str(file)),
    ):
        pass


@pytest.mark.timeout(20)
def test_a_pipe_is_refused_as_a_calibration_unopened(device: Accelerator, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with (
        pytest.raises(ConfigError, match=r"^calibration: expected .*it is not a regular file"),
        engine(device, calibration=pipe),
    ):
        pass


@pytest.mark.parametrize("content", [None, "nonsense"])
@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "host_only"},
        {"strategy": "auto"},
        {"rates": dataclasses.replace(DEVICE, host_update_params_per_s=1e9)},
        {"policy": "host_only", "strategy": "auto"},
    ],
    ids=str,
)
def test_a_calibration_file_is_checked_where_no_plan_needs_it(
    settings: dict[str, Any], content: str | None, device: Accelerator, tmp_path: Path
) -> None:
    file = tmp_path / "figures.json"
    if content is not None:
        file.write_text(content)

    with (
        pytest.raises(
            ConfigError, match=r"^calibration: expected auto, off, or a file that .*figures\.json"
        ),
        engine(device, calibration=file, **settings),
    ):
        pass


# --- kept, or measured ---


def test_ranks_of_one_machine_share_what_one_at_a_time_was_measured_to_have() -> None:
    sharing: Any = SimpleNamespace(neighbours=2, users={"/mnt/a": 2})
    apart: Any = SimpleNamespace(neighbours=2, users={"/mnt/a": 1})
    asked: dict[str, Any] = {
        "optimizer": "adamw",
        "directories": ["/mnt/a"],
        "beside_io": True,
        "beside_copies": False,
    }

    mine = of_one_rank(calibration(), sharing, threads=2, **asked)
    on_own_drive = of_one_rank(calibration(), apart, threads=2, **asked)

    every = calibration().rates(threads=4, **asked)
    assert every.host_update_params_per_s
    assert every.nvme["/mnt/a"].read_bytes_per_s
    assert mine.host_update_params_per_s == every.host_update_params_per_s / 2
    assert mine.nvme["/mnt/a"].read_bytes_per_s == every.nvme["/mnt/a"].read_bytes_per_s / 2
    assert on_own_drive.nvme == every.nvme
    assert mine.h2d_bytes_per_s == every.h2d_bytes_per_s
    assert of_one_rank(calibration(), None, threads=4, **asked) == every


@pytest.mark.usefixtures("nothing_is_measured")
def test_what_was_kept_is_used(device: Accelerator, cache: CalibrationCache) -> None:
    measured = kept_for(device, calibration())
    cache.keep_machine(measured)
    expected = both_ways(measured.rates(threads=2, directories=(), beside_copies=True))

    with engine(device) as made, engine(device, rates=expected) as told:
        assert made.plan == told.plan


@pytest.mark.usefixtures("tiny")
def test_what_was_not_kept_is_measured_once_and_said(
    device: Accelerator, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), engine(device) as first:
        assert first.plan.ops
    [said] = caplog.messages
    assert said.startswith("measuring what this machine can do, in about a minute; kept in ")

    caplog.clear()
    with caplog.at_level(logging.WARNING), engine(device):
        assert caplog.messages == []


@pytest.mark.usefixtures("tiny")
def test_figures_that_other_processes_disturbed_are_told_also_when_kept(
    device: Accelerator, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinity_engine.machine.busy.OthersWork.share", lambda _: 0.4)
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING), engine(device) as made:
            assert made.plan.ops
        assert caplog.messages[-1].startswith("other processes used 40% of the processors while")


@pytest.mark.usefixtures("tiny")
def test_the_drives_of_a_streamed_strategy_are_measured_too(
    device: Accelerator, cache: CalibrationCache, tmp_path: Path
) -> None:
    place = tmp_path / "drive"
    place.mkdir()
    strategy = {"name": "nvme_streamed", "update": "interleaved"}
    budget = {"host": "64MiB", "device": "8MiB", "nvme": {str(place): "64MiB"}}

    with engine(device, strategy=strategy, budget=budget) as made:
        assert made.plan.ops

    assert cache.folder is not None
    assert len(list(cache.folder.glob("drive-*.json"))) == 1
    assert list(place.iterdir()) == []


@pytest.mark.usefixtures("nothing_is_measured")
def test_a_host_budget_that_measuring_would_exceed_is_refused_with_what_to_do(
    device: Accelerator,
) -> None:
    with (
        pytest.raises(
            ConfigError,
            match=r"^budget\.host: expected 320 MiB or more, .*`infinity calibrate` once before",
        ),
        engine(device),
    ):
        pass


@pytest.mark.usefixtures("nothing_is_measured")
def test_a_budget_of_a_drive_that_measuring_would_exceed_is_refused_with_what_to_do(
    device: Accelerator, tmp_path: Path
) -> None:
    strategy = {"name": "nvme_streamed", "update": "interleaved"}
    budget = {"host": GiB, "device": "8MiB", "nvme": {str(tmp_path): "64MiB"}}

    with (
        pytest.raises(
            ConfigError,
            match=r"^budget\.nvme\['.*'\]: expected 1 GiB or more, .*`infinity calibrate` once",
        ),
        engine(device, strategy=strategy, budget=budget),
    ):
        pass


def test_a_drive_that_cannot_be_measured_is_refused_and_the_model_is_as_it_was(
    device: Accelerator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("the drive is gone")

    monkeypatch.setattr(calibrating, "calibrated", fail)
    model = torch.nn.Linear(128, 128, bias=False)
    before = model.weight
    budget = {"host": GiB, "device": "8MiB", "nvme": {str(tmp_path): "2GiB"}}
    strategy = {"name": "nvme_streamed", "update": "interleaved"}

    with pytest.raises(
        ConfigError, match=r"^budget\.nvme: expected .*\(the drive is gone\); or give rates="
    ):
        infinity_engine.initialize(model, "adamw", device=device, strategy=strategy, budget=budget)

    assert model.weight is before
    assert not model.weight.isnan().any()


# --- strategy="auto" ------------------------------------------------------------------------------


@pytest.fixture
def worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let any training be large enough to measure for."""
    monkeypatch.setattr(calibrating, "_WORTH_MEASURING", 1)


AUTO = {"strategy": "auto", "budget": {"host": "64MiB", "device": "600KiB"}}


@pytest.mark.usefixtures("nothing_is_measured")
def test_auto_measures_nothing_for_a_small_training(device: Accelerator) -> None:
    with engine(device, **AUTO) as made:
        assert made.steps == 0


@pytest.mark.usefixtures("nothing_is_measured", "worth_it")
@pytest.mark.parametrize(
    "settings", [{"budget": {"host": "64MiB", "device": "8MiB"}}, {"calibration": "off"}]
)
def test_auto_measures_nothing_where_all_fits_on_the_device_or_where_that_is_off(
    settings: dict[str, Any], device: Accelerator
) -> None:
    with engine(device, **{**AUTO, **settings}) as made:
        assert made.steps == 0


@pytest.mark.usefixtures("tiny", "worth_it")
def test_auto_measures_once_where_there_is_a_choice_and_says_so(
    device: Accelerator, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        with caplog.at_level(logging.WARNING), engine(device, **AUTO) as made:
            assert made.steps == 0

    assert [record.message[:9] for record in caplog.records] == ["measuring"]


@pytest.mark.usefixtures("worth_it", "nothing_is_measured")
def test_auto_plans_by_what_fits_where_the_budget_is_too_small_to_measure(
    device: Accelerator, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), engine(device, **AUTO) as made:
        assert made.steps == 0

    assert "plans without rates, by what fits" in caplog.text


@pytest.mark.usefixtures("worth_it", "nothing_is_measured")
def test_auto_plans_with_what_was_kept(
    device: Accelerator, cache: CalibrationCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.keep_machine(kept_for(device, calibration()))
    seen: list[Rates | None] = []

    def noted(*given: Any, config: Any, **more: Any) -> Any:
        seen.append(config.rates)
        return choose(*given, config=config, **more)

    monkeypatch.setattr("infinity_engine.planning.planning.choose", noted)
    with engine(device, **AUTO):
        pass

    expected = calibration().with_drives({}).rates(optimizer="adamw", threads=2, beside_copies=True)
    assert seen == [expected]


@pytest.mark.parametrize(
    ("directories", "measures"),
    [(["/mnt/a"], False), (["/mnt/b"], True)],
    ids=["its drives", "drives of its own"],
)
def test_a_rank_takes_the_rates_of_its_machine_but_for_drives_of_its_own(
    directories: list[str], measures: bool
) -> None:
    first, own = Rates(h2d_bytes_per_s=1e9), Rates(h2d_bytes_per_s=2e9)
    ranks: Any = SimpleNamespace(
        once_a_machine=lambda *_: json.dumps([["/mnt/a"], first.to_mapping()])
    )

    found = with_rates_of_machine(
        EngineConfig(), ranks, directories, lambda: EngineConfig.from_mapping({"rates": own})
    )

    assert found.rates == (own if measures else first)


def test_a_rank_keeps_rates_that_it_was_given() -> None:
    given = EngineConfig.from_mapping({"rates": DEVICE})
    ranks: Any = SimpleNamespace(
        once_a_machine=lambda *_: json.dumps([[], Rates(h2d_bytes_per_s=1e9).to_mapping()])
    )

    assert with_rates_of_machine(given, ranks, [], lambda: given) is given
