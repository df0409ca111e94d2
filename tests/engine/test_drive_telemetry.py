"""What a step did with the drives can be read afterwards: of each of them, and against what it can
do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import infinity_engine
from deepnvme.sizes import PAGE
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import ConfigError
from infinity_engine.lanes.meter import Cargo
from infinity_engine.plan import DriveRates, Tier
from infinity_engine.plan.ops import Lane
from infinity_engine.reporting.report import StepReport
from infinity_engine.units import TB
from support.nvme_training import RATES, STREAMED, made
from support.small_models import Task

pytestmark = pytest.mark.usefixtures("deterministic")


@contextmanager
def on_drives(
    *drives: Path, host: int | str = 17_100_000, **settings: Any
) -> Iterator[tuple[Engine, Task]]:
    """Open an engine with states, gradients and parameters on these drives."""
    task, optimizer = made("gpt")
    for drive in drives:
        drive.mkdir()
    given: dict[str, Any] = {
        "accelerator": "cpu",
        "strategy": STREAMED.strategy,
        "parameters": "nvme",
        "precision": "bf16",
        "subgroup_numel": 4096,
        "storage": {"small_bytes": 256},
        "budget": {"host": host, "nvme": {str(drive): "64MiB" for drive in drives}},
    }
    with infinity_engine.initialize(task, optimizer, **{**given, **settings}) as engine:
        yield engine, task


def step(engine: Engine, task: Task, seed: int) -> StepReport:
    engine.backward(engine(task.batch(seed)))
    engine.step()
    return engine.report()


def test_the_bytes_of_each_drive_are_those_that_the_links_carried(tmp_path: Path) -> None:
    drives = [tmp_path / "a", tmp_path / "b"]
    with on_drives(*drives) as (engine, task):
        for seed in range(3):
            report = step(engine, task, seed)

            assert list(report.drives) == [str(drive) for drive in drives]
            moved = {lane: sum(use.nbytes.values()) for lane, use in report.links.items()}
            assert (
                sum(use.read_bytes for use in report.drives.values()) == moved[Lane.NVME_READ] > 0
            )
            assert (
                sum(use.written_bytes for use in report.drives.values())
                == moved[Lane.NVME_WRITE]
                > 0
            )
    assert all(use.written_in_all for use in report.drives.values())


def test_what_was_written_in_all_has_what_the_engine_began_with_and_what_each_step_wrote(
    tmp_path: Path,
) -> None:
    drive = tmp_path / "a"
    with on_drives(drive) as (engine, task):
        first = step(engine, task, 0).drives[str(drive)]
        second = step(engine, task, 1).drives[str(drive)]

    assert first.written_in_all > first.written_bytes > 0
    assert second.written_in_all == first.written_in_all + second.written_bytes


@pytest.mark.parametrize("faster", [None, 3])
def test_drives_share_what_rests_on_them_by_their_rates_whatever_their_budgets(
    faster: int | None, tmp_path: Path
) -> None:
    drives = first, second = tmp_path / "a", tmp_path / "b"
    budget = {"host": "64MiB", "nvme": {str(first): "64MiB", str(second): "4MiB"}}
    rates = replace(
        RATES,
        nvme={
            str(drive): DriveRates(read_bytes_per_s=rate, write_bytes_per_s=rate)
            for drive, rate in zip(drives, (1e9, 1e9 * (faster or 0)), strict=True)
            if rate
        },
    )
    with on_drives(*drives, budget=budget, rates=rates) as (engine, task):
        step(engine, task, 0)
        held = [use.held - 2 * PAGE for use in engine.usage() if use.tier is Tier.NVME]

    assert min(held) > 0
    assert held[1] == pytest.approx((faster or 1) * held[0], abs=4 * PAGE)


def test_a_drive_is_compared_with_its_calibrated_rates(tmp_path: Path) -> None:
    known = DriveRates(read_bytes_per_s=3e9, write_bytes_per_s=1e9, mixed_bytes_per_s=2e9)
    rates = replace(RATES, nvme={str(tmp_path / "a"): known})
    with on_drives(tmp_path / "a", tmp_path / "b", rates=rates) as (engine, task):
        report = step(engine, task, 0)

    calibrated, unknown = report.drives.values()
    takes = known.seconds(calibrated.read_bytes, calibrated.written_bytes)
    assert takes
    assert calibrated.calibrated_share == pytest.approx(takes / report.seconds)
    assert unknown.calibrated_share is None


def test_a_report_without_drives_has_none_and_one_with_drives_shows_each(tmp_path: Path) -> None:
    with on_drives(strategy="host_only", parameters="auto") as (engine, task):
        assert "drive" not in str(step(engine, task, 0))
    rates = replace(
        RATES, nvme={str(tmp_path / "a"): DriveRates(read_bytes_per_s=1.0, write_bytes_per_s=1.0)}
    )
    with on_drives(tmp_path / "a", rates=rates) as (engine, task):
        shown = str(step(engine, task, 0))

    [line] = [line for line in shown.splitlines() if line.startswith("drive ")]
    assert line.startswith(f"drive {tmp_path / 'a'}  ")


def test_states_that_an_update_needs_were_in_memory_or_had_to_be_read(tmp_path: Path) -> None:
    with on_drives(tmp_path / "a", host=17_500_000, parameters="device") as (engine, task):
        for seed in range(2):
            report = step(engine, task, seed)

            states = report.hits[Cargo.STATES]
            params = sum(use.params for use in report.updates.values())
            assert states.found + states.missing == 12 * params
            assert states.missing == report.links[Lane.NVME_READ].nbytes[Cargo.STATES] > 0
            assert states.found > 0


def test_parameters_are_found_where_an_earlier_use_has_left_them_and_else_read(
    tmp_path: Path,
) -> None:
    needed = set()
    for name, host in (("little", "17100000 B"), ("much", "64MiB")):
        with on_drives(tmp_path / name, host=host) as (engine, task):
            step(engine, task, 0)
            report = step(engine, task, 1)  # which begins and ends with as many fetched ahead

        hits = report.hits[Cargo.PARAMETERS]
        # what is needed and what is read differ by the pieces that come from the update
        if name == "little":
            assert hits.missing > 0
            assert report.links[Lane.NVME_READ].nbytes[Cargo.PARAMETERS] > 0
        needed.add(hits.found + hits.missing)
    assert len(needed) == 1
    on_the_drives = sum(2 * each.numel() for each in task.parameters() if 2 * each.numel() >= 256)
    # the forward has most from the update, and the backward finds all of them
    assert hits.missing < on_the_drives / 4


def test_nothing_is_found_where_nothing_rests_on_drives(tmp_path: Path) -> None:
    with on_drives(strategy="host_only", parameters="auto") as (engine, task):
        report = step(engine, task, 0)

    assert report.hits == {}
    assert "found in memory" not in str(report)


def test_what_was_written_is_compared_with_what_the_drive_is_rated_for_and_warned_of(
    tmp_path: Path,
) -> None:
    little, much = tmp_path / "little", tmp_path / "much"
    storage = {"small_bytes": 256, "endurance": {f"{little}/": "2MB", str(much): "600TB"}}
    with on_drives(little, much, storage=storage) as (engine, task):
        with pytest.warns(
            RuntimeWarning, match=rf"to {little}, .*of the 2 MB that its drive is rated for"
        ) as warned:
            report = step(engine, task, 0)
        assert len(warned) == 1
        assert warned[0].filename == __file__
        worn, fresh = (report.drives[str(drive)].endurance for drive in (little, much))

    assert worn is not None
    assert fresh is not None
    assert worn.share == report.drives[str(little)].written_in_all / 2_000_000
    assert (worn.rated_bytes, fresh.rated_bytes) == (2_000_000, 600 * TB)
    [line] = [line for line in str(report).splitlines() if line.startswith(f"wear of {little}")]
    assert line.endswith(str(worn))


def test_one_rating_is_that_of_every_directory(tmp_path: Path) -> None:
    drives = [tmp_path / "a", tmp_path / "b"]
    with on_drives(*drives, storage={"small_bytes": 256, "endurance": "600TB"}) as (engine, task):
        report = step(engine, task, 0)

    assert [use.endurance.rated_bytes for use in report.drives.values() if use.endurance] == [
        600 * TB
    ] * 2


def test_the_rating_of_a_directory_that_is_not_used_is_refused(tmp_path: Path) -> None:
    storage = {"endurance": {str(tmp_path / "b"): "600TB"}}
    with (
        pytest.raises(ConfigError, match=rf"^storage\.endurance: expected one of {tmp_path}/a "),
        on_drives(tmp_path / "a", storage=storage),
    ):
        pass


def test_wear_is_warned_of_where_nothing_is_recorded(tmp_path: Path) -> None:
    storage = {"small_bytes": 256, "endurance": 1000}
    with on_drives(tmp_path / "a", storage=storage, telemetry={"recording": "off"}) as (
        engine,
        task,
    ):
        engine.backward(engine(task.batch(0)))
        with pytest.warns(RuntimeWarning, match="of the 1 KB that its drive is rated for"):
            engine.step()
