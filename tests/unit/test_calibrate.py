"""Measuring a machine: every figure is positive or says why there is none, and nothing is left
behind. No times.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepnvme import FaultPlan, IOQueue, Pool, Requests
from deepnvme.cli.scratch import UnusableError, scratch_file
from infinity_engine import calibration
from infinity_engine.accel import CpuAccelerator, Emulation, StreamKind, emulated_accelerator
from infinity_engine.calibration import (
    CalibrationCache,
    Effort,
    KeptFigures,
    calibrated,
    identity,
    kept_calibration,
    own_work,
)
from infinity_engine.calibration import calibrate as module
from infinity_engine.calibration.blocks import _Block
from infinity_engine.calibration.contention import meanwhile, part_kept
from infinity_engine.calibration.drives import FILE_PREFIX
from infinity_engine.calibration.effort import MeasuringTime, repeated, thread_counts
from infinity_engine.calibration.host import RULES, HostPoint, HostUpdates, name_of
from infinity_engine.calibration.links import Links, measure_links
from infinity_engine.calibration.own_work import measure_lease
from infinity_engine.cli.main import main
from infinity_engine.errors import ConfigError, MissingDependencyError
from infinity_engine.optim import SGD, AdamW, HostKernels, SummedMemory, Sums, Update
from infinity_engine.plan import BlockShape, Calibration, Figure, Rates, Unit
from infinity_engine.schedule import ResidentSet
from infinity_engine.units import MiB
from paced_device import PacedAccelerator
from support.calibrations import SMALL_BLOCKS, measure_small_blocks
from support.nvme_programs import output_of
from support.warm_programs import WarmProgram, run_warm

TINY = Effort(
    seconds=0.1, rounds=2, update_bytes=MiB, io_bytes=MiB, file_bytes=2 * MiB, shortest_s=0.001
)
RATES = Rates(h2d_bytes_per_s=1.2e9, d2h_bytes_per_s=1e9, device_update_params_per_s=20e9)

KEPT = ("calibrate", "--even-if-busy")  # whatever else runs on the machine of the tests


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Give every test a cache of its own, and nothing by environment."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setenv("DEEPNVME_PROFILE", "")
    monkeypatch.delenv("DEEPNVME_BACKEND", raising=False)
    return tmp_path / "caches" / "infinity_engine" / "calibration"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the usual blocks to the calibration that tests share, and to that of the memory."""
    measure_small_blocks(monkeypatch)


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    """Return an empty directory to measure in."""
    place = tmp_path / "drive"
    place.mkdir()
    return place


@pytest.fixture
def cpu() -> Iterator[CpuAccelerator]:
    with CpuAccelerator() as accelerator:
        yield accelerator


@dataclasses.dataclass(frozen=True)
class Measured:
    """A calibration of this machine and of one directory, which tests only look at."""

    calibration: Calibration
    directory: str


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    directory = str(tmp_path_factory.mktemp("measured"))
    with pytest.MonkeyPatch.context() as patch, CpuAccelerator() as accelerator:
        patch.setenv("DEEPNVME_PROFILE", "")
        patch.delenv("DEEPNVME_BACKEND", raising=False)
        found = calibrated(
            [directory], accelerator=accelerator, effort=TINY, cache=CalibrationCache(None)
        )
    return Measured(found, directory)


def figures(part: Any) -> Iterator[Figure]:
    """Yield every figure in a calibration, wherever it is."""
    if isinstance(part, Figure):
        yield part
    elif dataclasses.is_dataclass(part):
        for item in dataclasses.fields(part):
            yield from figures(getattr(part, item.name))
    elif hasattr(part, "values"):
        for value in part.values():
            yield from figures(value)


# --- what is measured ---


def test_every_figure_is_positive_or_says_why_there_is_none(measured: Measured) -> None:
    found = list(figures(measured.calibration))

    reasons = {figure.reason for figure in found if figure.median is None}
    assert len(found) > 30
    assert all(figure.median is None or figure.median > 0 for figure in found)
    assert reasons == {
        "device and host are one memory, so nothing is copied",
        "device and host are one memory, so the host updates",
        "one rank: nothing is gathered or scattered",
    }


@pytest.mark.parametrize(
    ("directory", "file_bytes", "told"),
    [
        ("/proc", 1 << 20, "no file can be written"),
        ("", 1 << 50, r"drive: the file to measure on needs 1 PiB, and .* are free"),
    ],
    ids=["not writable", "too little room"],
)
def test_a_directory_that_cannot_be_used_is_told_before_anything_is_measured(
    directory: str, file_bytes: int, told: str, cpu: CpuAccelerator, drive: Path
) -> None:
    begun: list[str] = []
    effort = dataclasses.replace(TINY, file_bytes=file_bytes)

    with pytest.raises(UnusableError, match=told):
        calibrated([directory or str(drive)], accelerator=cpu, effort=effort, report=begun.append)

    assert begun == []


def test_what_is_measured_are_all_optimizers_with_each_number_of_threads(
    measured: Measured,
) -> None:
    found = measured.calibration

    counts = list(found.dram)
    assert counts[0] == 1
    assert (
        list(found.host_updates)
        == list(found.device_updates)
        == ["adamw", "adam", "lion", "adagrad", "sgd"]
    )
    for row in (
        *found.host_updates.values(),
        *found.drives[measured.directory].host_updates.values(),
    ):
        assert list(row) == counts
    assert list(found.matmul) == list(found.blocks) == ["fp32", "bf16"]
    for blocks in found.blocks.values():  # in no time, the smallest one at least
        assert BlockShape(512, 256) in blocks


def test_what_drives_leave_to_modules_is_measured_where_these_compute_on_the_host(
    measured: Measured, drive: Path
) -> None:
    found = measured.calibration.drives[measured.directory].blocks
    assert found.median is not None
    assert 0 < measured.calibration.computing_beside_io() <= 1
    assert measured.calibration.drives[measured.directory].mixed_beside_blocks.median is not None

    with emulated_accelerator(Emulation(rates=RATES, capacity_bytes=4 * MiB)) as device:
        [elsewhere] = calibrated([str(drive)], accelerator=device, effort=TINY).drives.values()
    for figure in (elsewhere.blocks, elsewhere.mixed_beside_blocks):
        assert figure.reason == "no modules were measured on the host"


def test_a_part_that_is_kept_is_of_the_rates_before_and_after() -> None:
    rates = iter([4.0, 3.0, 8.0])
    part, done = part_kept(lambda _: next(rates), lambda stops: "worked", 0.0)
    assert (part, done) == (0.5, "worked")


def test_checksums_are_measured_over_all_that_an_update_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = HostKernels.update_and_sum
    summed: list[int] = []

    def note(kernels: HostKernels, update: Update, memories: Sequence[SummedMemory]) -> list[Sums]:
        summed[:] = [memory.nbytes for memory in memories]
        return original(kernels, update, memories)

    monkeypatch.setattr(HostKernels, "update_and_sum", note)
    updates = HostUpdates(Pool(MiB), MiB, [1])
    for name, rule in RULES.items():
        assert updates.summing_rate(HostPoint(name, 1), 0.0) > 0
        assert summed == [4 * updates.numel] * (1 + len(rule.states))


def test_rates_follow_for_every_optimizer(measured: Measured) -> None:
    for optimizer in RULES:
        rates = measured.calibration.rates(optimizer=optimizer, beside_io=True)
        assert rates.host_update_params_per_s is not None
        assert rates.dram_bytes_per_s is not None
        assert None not in dataclasses.asdict(rates.nvme[measured.directory]).values()


def test_a_calibration_that_was_measured_survives_the_way_through_json(
    measured: Measured,
) -> None:
    written = json.dumps(measured.calibration.to_mapping())

    assert Calibration.from_mapping(json.loads(written)) == measured.calibration


def test_links_are_measured_on_the_clock_of_an_emulated_device() -> None:
    emulation = Emulation(rates=RATES, capacity_bytes=4 * MiB)
    with emulated_accelerator(emulation) as device:
        measured = calibrated(accelerator=device, effort=TINY)

        links = measured.links
        assert links.h2d.median == pytest.approx(1.2e9, rel=1e-3)
        assert links.d2h.median == pytest.approx(1e9, rel=1e-3)
        assert measured.device_updates["lion"].median == pytest.approx(20e9, rel=1e-3)
        assert links.h2d_beside_updates.reason == (
            "the time of copies is computed: the host's work does not disturb them"
        )
        assert device.memory().free == 4 * MiB


def test_what_an_operation_costs_is_measured_on_the_clock_of_an_emulated_device() -> None:
    rates = dataclasses.replace(RATES, copy_start_s=1e-3, device_start_s=2e-3)
    with emulated_accelerator(Emulation(rates=rates, capacity_bytes=4 * MiB)) as device:
        measured = calibrated(accelerator=device, effort=TINY)

    found = measured.rates()
    assert found.copy_start_s == pytest.approx(1e-3, rel=0.01)
    assert found.device_start_s == pytest.approx(2e-3, rel=0.01)


def test_leases_are_measured_where_others_have_to_leave(
    cpu: CpuAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = 0

    def computing() -> None:  # far longer than a sample
        nonlocal computed
        computed += 1
        time.sleep(0.005)

    monkeypatch.setattr(own_work, "_products", lambda nbytes: computing)
    leases: list[bool] = []

    @contextmanager
    def noted(accelerator: CpuAccelerator) -> Iterator[Callable[[], bool]]:
        with uses(accelerator) as lease:

            def one() -> bool:
                removed.clear()
                is_new = lease()
                leases.append(is_new)
                assert len(removed) == is_new or len(leases) <= 32  # before others have to leave
                return is_new

            yield one

    removed: list[int] = []
    remove, uses = ResidentSet.remove, own_work._leases

    def noted_remove(resident: ResidentSet[object], number: int) -> object:
        removed.append(number)
        return remove(resident, number)

    monkeypatch.setattr(ResidentSet, "remove", noted_remove)
    monkeypatch.setattr(own_work, "_leases", noted)
    part = MeasuringTime(seconds=0.01, rounds=2, shortest_s=0.001)

    found = measure_lease(cpu, MiB, part)

    assert found.median
    assert sum(leases[32:]) >= 8
    assert computed == len(leases) - 32


def test_what_an_operation_costs_is_measured_of_the_host_and_of_drives(
    measured: Measured,
) -> None:
    calibration = measured.calibration

    found = calibration.rates()
    assert found.host_start_s is not None
    assert found.io_start_s == calibration.drives[measured.directory].start.median
    assert calibration.host_start.unit is Unit.SECONDS
    assert (found.copy_start_s, found.device_start_s) == (None, None)
    assert calibration.links.start.reason == "device and host are one memory, so nothing is copied"


@pytest.mark.parametrize("d2h", [0.4e9, 1e9, 2.9e9])
def test_links_of_different_speeds_do_not_hold_one_another_up(d2h: float) -> None:
    rates = dataclasses.replace(RATES, d2h_bytes_per_s=d2h)
    with (
        emulated_accelerator(Emulation(rates=rates, capacity_bytes=8 * MiB)) as device,
        Links.open(device, memoryview(bytearray(8 * MiB))) as links,
    ):
        found = measure_links(links, MeasuringTime(seconds=0.3, rounds=1, shortest_s=0.03))

    for kinds, both in found.items():
        for kind in kinds:
            rate = rates.h2d_bytes_per_s if kind is StreamKind.H2D else rates.d2h_bytes_per_s
            assert both[kind].median == pytest.approx(rate, rel=0.05)


def test_where_a_device_takes_its_time_updates_are_measured_beside_copies() -> None:
    with PacedAccelerator(Emulation(rates=RATES, capacity_bytes=4 * MiB)) as device:
        measured = calibrated(accelerator=device, effort=TINY)

    assert None not in [figure.median for figure in figures(measured.links)]
    assert all(
        each.beside_copies.median for row in measured.host_updates.values() for each in row.values()
    )


def test_a_device_without_room_has_no_links_to_measure() -> None:
    with emulated_accelerator(Emulation(rates=RATES, capacity_bytes=4096)) as device:
        measured = calibrated(accelerator=device, effort=TINY)

    assert str(measured.links.h2d.reason).startswith("there is no room on the device")


def test_without_torch_the_host_and_its_drives_are_measured(drive: Path) -> None:
    measured = calibrated([str(drive)], accelerator=None, effort=TINY)

    assert measured.host_updates["adamw"][1].alone.median
    assert measured.drives[str(drive)].read.median
    for figure in (
        measured.links.h2d,
        measured.matmul["bf16"],
        measured.device_updates["adamw"],
        measured.device_start,
    ):
        assert figure.reason == "torch is not installed"


def test_the_rules_have_the_names_of_a_calibration() -> None:
    assert [name_of(rule) for rule in (AdamW(), SGD())] == ["adamw", "sgd"]
    assert {name_of(rule) for rule in RULES.values()} == set(RULES)


# --- what is kept ---


def reported(*directories: Path, **arguments: Any) -> tuple[Calibration, list[str]]:
    """Return what is measured or kept, and what was reported."""
    lines: list[str] = []
    with CpuAccelerator() as device:
        found = calibrated(
            map(str, directories), accelerator=device, effort=TINY, report=lines.append, **arguments
        )
    return found, lines


def test_what_was_measured_is_not_measured_again(drive: Path) -> None:
    measured, first = reported(drive)
    again, second = reported(drive)

    assert again == measured
    assert first
    assert second == []


def test_what_is_to_be_replaced_is_measured_again(drive: Path) -> None:
    reported(drive)
    _, lines = reported(drive, kept=KeptFigures.REPLACED)

    assert any(line.startswith("updates of the host") for line in lines)
    assert any(line.startswith(str(drive)) for line in lines)


def test_for_another_directory_only_that_is_measured(drive: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    measured, _ = reported(drive)

    both, lines = reported(drive, other)

    assert all(line.startswith(str(other)) for line in lines)
    assert list(both.drives) == [str(drive), str(other)]
    assert both.drives[str(drive)] == measured.drives[str(drive)]


def test_a_machine_that_has_changed_is_measured_again(
    drive: Path, monkeypatch: pytest.MonkeyPatch, cpu: CpuAccelerator
) -> None:
    reported(drive)
    before = identity.machine_identity
    for name in ("cpu", "cores", "kernel", "torch", "device", "infinity_engine", "format"):
        changed = {name: "changed"}
        monkeypatch.setattr(
            module, "machine_identity", lambda device, changed=changed: before(device) | changed
        )

        assert kept_calibration([str(drive)], accelerator=cpu) is None, name

    _, lines = reported(drive)

    assert any(line.startswith("updates of the host") for line in lines)
    assert any(line.startswith(str(drive)) for line in lines)


def test_a_drive_that_has_changed_is_measured_again_and_the_machine_is_not(
    drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported(drive)
    before = identity.drive_identity
    monkeypatch.setattr(
        module, "drive_identity", lambda *a, **k: {**before(*a, **k), "drive": "another"}
    )

    _, lines = reported(drive)

    assert lines
    assert all(line.startswith(str(drive)) for line in lines)


def test_what_is_kept_is_found_without_measuring(
    drive: Path, cpu: CpuAccelerator, tmp_path: Path
) -> None:
    assert kept_calibration([str(drive)], accelerator=cpu) is None
    measured, _ = reported(drive)
    other = tmp_path / "other"
    other.mkdir()

    assert kept_calibration([str(drive)], accelerator=cpu) == measured
    assert kept_calibration([str(drive), str(other)], accelerator=cpu) == measured
    assert kept_calibration(accelerator=cpu) == measured.with_drives({})


def test_a_spoilt_file_is_told_and_measured_again(drive: Path, folder: Path) -> None:
    reported(drive)
    for path in folder.glob("*.json"):
        path.write_text(path.read_text()[:-20])

    with pytest.warns(RuntimeWarning, match="is not used"):
        _, lines = reported(drive)

    assert lines
    assert reported(drive)[1] == []


# --- failures, and what is left behind ---


def test_nothing_is_left_in_the_directory(drive: Path) -> None:
    reported(drive)

    assert list(drive.iterdir()) == []


def test_nothing_is_written_but_in_the_directory_and_the_cache(
    drive: Path, folder: Path, tmp_path: Path
) -> None:
    reported(drive)

    files = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.parent for path in files} == {folder}


def test_a_drive_is_measured_through_the_queue_that_is_given(
    drive: Path, cpu: CpuAccelerator
) -> None:
    with IOQueue("memory") as queue:
        measured = calibrated([str(drive)], accelerator=cpu, queue=queue, effort=TINY)

        assert queue.stats().drives
    assert measured.drives[str(drive)].drive["backend"] == "memory"
    assert measured.drives[str(drive)].mixed.median


@pytest.mark.parametrize("requests", [Requests.READS, Requests.WRITES])
@pytest.mark.parametrize("backend", ["memory", "auto"])
def test_an_operation_that_fails_is_an_error_and_leaves_no_file(
    backend: str, requests: Requests, drive: Path, cpu: CpuAccelerator
) -> None:
    with (
        IOQueue(backend, faults=FaultPlan().fail(nth=3, requests=requests)) as queue,
        pytest.raises(OSError, match="Input/output error"),
    ):
        calibrated([str(drive)], accelerator=cpu, queue=queue, effort=TINY)

    assert list(drive.iterdir()) == []


def test_what_goes_on_meanwhile_ends_with_the_body_and_tells_its_failure() -> None:
    def work(stops: Callable[[], bool]) -> int:
        while not stops():
            time.sleep(0.001)
        raise OSError("the drive is gone")

    with meanwhile(work) as going_on:
        assert not going_on.done()

    with pytest.raises(OSError, match="the drive is gone"):
        going_on.result()


def test_what_goes_on_meanwhile_ends_with_a_body_that_fails() -> None:
    def work(stops: Callable[[], bool]) -> int:
        while not stops():
            time.sleep(0.001)
        return 7

    with pytest.raises(KeyboardInterrupt), meanwhile(work) as going_on:
        raise KeyboardInterrupt

    assert going_on.result() == 7


def test_what_was_measured_before_a_failure_is_kept(drive: Path) -> None:
    with (
        CpuAccelerator() as device,
        IOQueue(faults=FaultPlan().fail(nth=3)) as queue,
        pytest.raises(OSError, match="Input/output error"),
    ):
        calibrated([str(drive)], accelerator=device, queue=queue, effort=TINY)

    _, lines = reported(drive)

    assert all(line.startswith(str(drive)) for line in lines)


@pytest.mark.parametrize("part", ["writing a file", "reads, writes", "updates beside"])
def test_an_interrupt_leaves_no_file(part: str, drive: Path, cpu: CpuAccelerator) -> None:
    def interrupt(line: str) -> None:
        if part in line and line.startswith(str(drive)):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrated([str(drive)], accelerator=cpu, effort=TINY, report=interrupt)

    assert list(drive.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_refused(cpu: CpuAccelerator) -> None:
    with pytest.raises(UnusableError, match="/proc: "):
        calibrated(["/proc"], accelerator=cpu, effort=TINY)


def test_a_directory_that_is_not_there_is_refused_before_anything_is_measured(drive: Path) -> None:
    def report(line: str) -> None:
        pytest.fail(line)

    with CpuAccelerator() as device, pytest.raises(FileNotFoundError, match="nowhere"):
        calibrated([str(drive / "nowhere")], accelerator=device, effort=TINY, report=report)


# --- the memory that it takes ---

MEASURED_MEMORY = """
import sys
import torch
from infinity_engine.accel import CpuAccelerator
from infinity_engine.calibration import FULL, CalibrationCache, calibrated
from dataclasses import replace

def status(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) << 10

def peak():
    return status("VmHWM") - status("RssFile")  # without pages of libraries' own files

small = [torch.ones(64, 64, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
[each @ each for each in small]  # what torch loads when it multiplies first
before = peak()
with CpuAccelerator() as device:
    effort = replace(FULL, seconds=1.0, rounds=1)
    calibrated([sys.argv[1]], accelerator=device, effort=effort, cache=CalibrationCache(None))
print(peak() - before, effort.memory_bytes)
"""


def test_measuring_takes_no_more_memory_than_it_says(drive: Path) -> None:
    grown, said = map(int, output_of(run_warm(MEASURED_MEMORY, drive, folder=drive)).split())
    assert grown <= said


# --- efforts ---


@given(st.integers(1, 2048))
def test_thread_counts_go_from_one_to_all_cores_in_small_steps(cores: int) -> None:
    counts = thread_counts(cores)

    assert counts[0] == 1
    assert counts[-1] == cores
    assert all(one < other <= max(one + 1, 1.5 * one) for one, other in pairwise(counts))
    assert len(counts) <= 24


def test_few_cores_are_measured_one_by_one() -> None:
    assert [thread_counts(cores) for cores in (1, 2, 4, 6)] == [
        (1,),
        (1, 2),
        (1, 2, 3, 4),
        (1, 2, 3, 4, 6),
    ]
    assert thread_counts(16) == (1, 2, 3, 4, 6, 8, 12, 16)


def test_no_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^cores: expected 1 or more"):
        thread_counts(0)


def test_work_is_repeated_until_its_time_is_over() -> None:
    ticks = count()
    done: list[int] = []

    rate = repeated(lambda: done.append(1), 10, 3.0, clock=lambda: float(next(ticks)))

    assert len(done) == 3
    assert rate == 10 * 3 / 3.0


def test_work_is_done_once_at_least() -> None:
    ticks = iter([0.0, 2.0])

    assert repeated(lambda: None, 8, 0.0, clock=lambda: next(ticks)) == 4.0


def test_samples_are_no_shorter_than_what_can_be_measured() -> None:
    part = MeasuringTime(seconds=10.0, rounds=2, shortest_s=0.25)

    assert part.sample_s(4) == pytest.approx(1.0)
    assert part.share(0.5).sample_s(4) == pytest.approx(0.5)
    assert part.share(0.1).sample_s(4) == 0.25


# --- the command ---

COMMAND = f"{SMALL_BLOCKS}from infinity_engine.cli.main import main\nraise SystemExit(main())"
TINY_COMMAND = (
    "from dataclasses import replace\n"
    "from infinity_engine import calibration\n"
    f"calibration.FULL = replace(calibration.FULL, **{dataclasses.asdict(TINY)!r})\n{COMMAND}"
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command measure little where what it says and keeps of it is tested."""
    monkeypatch.setattr(calibration, "FULL", TINY)
    monkeypatch.setattr(calibration, "QUICK", TINY)


def test_the_command_measures_prints_and_writes_all_figures(
    drive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"

    status = main(["calibrate", "--quick", "--seconds", "0.5", str(drive), "--json", str(file)])

    output, errors = capsys.readouterr()
    measured = Calibration.from_mapping(json.loads(file.read_text()))
    assert status == 0
    assert list(measured.drives) == [str(drive)]
    assert "adamw, 1 thread" in output
    assert f"Driveof{drive}" in "".join(output.split())  # a long name is cut into lines
    assert "not measured: one rank" in output
    assert "Not kept." in output
    assert "infinity: measuring matrix products\n" in errors
    assert list(drive.iterdir()) == []


@pytest.mark.usefixtures("tiny")
def test_a_quick_calibration_is_not_kept(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["calibrate", "--quick", "--seconds", "0.1"])

    assert not folder.exists()
    assert "Not kept." in capsys.readouterr().out


def test_another_calibration_is_kept_and_says_where(
    folder: Path, capsys: pytest.CaptureFixture[str], cpu: CpuAccelerator
) -> None:
    assert main([*KEPT, "--seconds", "0.1", "--accelerator", "cpu"]) == 0

    assert f"Kept in {folder}." in capsys.readouterr().out.replace("\n", "")
    assert kept_calibration(accelerator=cpu) is not None


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(("share", "kept"), [(0.5, False), (0.02, True)])
def test_figures_of_a_busy_machine_are_not_kept_and_say_it(
    share: float,
    kept: bool,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("infinity_engine.machine.busy.OthersWork.share", lambda _: share)

    file = tmp_path / "figures.json"
    options = ("--seconds", "0.1", "--accelerator", "cpu", "--json", str(file))
    assert main(["calibrate", *options]) == 0

    output, errors = capsys.readouterr()
    assert Calibration.from_mapping(json.loads(file.read_text())).others_share == share
    assert ("Kept in" in output) is kept
    assert ("other processes used 50% of this machine's processors" in errors) is not kept


def test_a_drive_measured_beside_other_processes_stays_marked_on_a_quiet_machine(
    drive: Path, monkeypatch: pytest.MonkeyPatch, cpu: CpuAccelerator
) -> None:
    shares = iter([0.0, 0.5])  # of the machine, of the drive
    monkeypatch.setattr("infinity_engine.machine.busy.OthersWork.share", lambda _: next(shares))

    measured = calibrated([str(drive)], accelerator=cpu, effort=TINY)

    assert measured.others_share == 0
    assert measured.drives[str(drive)].others_share == 0.5
    kept = kept_calibration([str(drive)], accelerator=cpu)
    assert kept == measured
    assert kept.is_disturbed


@pytest.mark.usefixtures("tiny")
@pytest.mark.filterwarnings("always::infinity_engine.calibration.cache.CalibrationWarning")
def test_what_cannot_be_kept_is_not_said_to_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")

    assert main([*KEPT, "--seconds", "0.1", "--accelerator", "cpu"]) == 0

    output, errors = capsys.readouterr()
    assert "Not kept." in output
    assert "cannot be kept in /proc/nowhere/infinity_engine/calibration" in errors


def test_a_calibration_that_waits_for_another_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read, written = os.pipe()
    with os.fdopen(read) as told:
        with CalibrationCache(folder).alone():
            with os.fdopen(written, "w") as errors:
                options = ("calibrate", "--seconds", "0.1", "--accelerator", "cpu")
                waits = WarmProgram(TINY_COMMAND, *options, errors=errors)
            line = told.readline()
        waits.communicate(timeout=250)

        assert line == "infinity: another process measures this machine: waiting for it\n"
        assert told.readline() == "infinity: measuring matrix products\n"


@pytest.mark.usefixtures("tiny")
def test_json_on_standard_output_stands_alone(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["calibrate", "--quick", "--seconds", "0.1", "--json", "-"])

    assert status == 0
    assert Calibration.from_mapping(json.loads(capsys.readouterr().out)).host_updates


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/proc"], "infinity: /proc: "),
        (["/nowhere"], "infinity: /nowhere: No such file or directory"),
        (["--json", "/nowhere/figures.json"], "infinity: /nowhere/figures.json cannot be written"),
        (["--json", "/tmp"], "infinity: /tmp cannot be written: it is a folder"),
        (
            ["--accelerator", "cuda"],
            "infinity: accelerator: expected a machine where torch sees a GPU",
        ),
        (["a/../b"], "infinity: directories: expected a path without '..'"),
    ],
)
def test_what_cannot_be_done_is_told_in_a_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["calibrate", "--quick", "--seconds", "0.1", *arguments])

    errors = capsys.readouterr().err.splitlines()
    assert status == 1
    assert errors[-1].startswith(said)


@pytest.mark.parametrize(
    "arguments", [["--seconds", "0"], ["--accelerator", "tpu"], ["--directory", "DIR"]]
)
def test_wrong_usage_gives_exit_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", *arguments])

    assert ended.value.code == 2
    assert "usage: infinity" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_the_command_and_leaves_no_file(
    number: signal.Signals, status: int, drive: Path
) -> None:
    read, written = os.pipe()
    with os.fdopen(read) as told:
        with os.fdopen(written, "w") as errors:
            options = ("calibrate", "--quick", "--seconds", "0.5", drive)
            running = WarmProgram(COMMAND, *options, errors=errors)
        assert any("writing a file" in line for line in told)
        files = list(drive.iterdir())
        running.send_signal(number)
        running.communicate(timeout=60)

    assert len(files) == 1
    assert running.returncode == status
    assert list(drive.iterdir()) == []


def test_an_interrupt_just_after_the_file_was_made_removes_it(
    drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch = Path.touch

    def interrupted(path: Path, **given: Any) -> None:
        touch(path, **given)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "touch", interrupted)
    with pytest.raises(KeyboardInterrupt), scratch_file(drive, FILE_PREFIX):
        pass

    assert list(drive.iterdir()) == []


def test_a_calibration_without_a_cache_leaves_nothing_there(
    folder: Path, cpu: CpuAccelerator
) -> None:
    calibrated(accelerator=cpu, effort=TINY, cache=CalibrationCache(None))

    assert not folder.exists()


def test_units_are_told_with_every_figure(measured: Measured) -> None:
    assert {figure.unit for figure in figures(measured.calibration.host_updates)} == {
        Unit.PARAMETERS,
        Unit.PART,
    }
    assert {figure.unit for figure in figures(measured.calibration.dram)} == {Unit.BYTES}


def test_a_block_that_runs_again_ends_before_its_last_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = torch.full((1 << 20,), 0.02)
    block = _Block(BlockShape(64, 16), weights)
    products = []
    linear = torch.nn.functional.linear

    def counted(*tensors: torch.Tensor) -> torch.Tensor:
        made = linear(*tensors)
        products.append(made)
        return made

    monkeypatch.setattr(torch.nn.functional, "linear", counted)
    saved, _ = block._save(block._saved)

    assert saved == block._saved
    assert len(products) == 3  # of four


def test_a_device_that_was_asked_for_is_not_left_out_without_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(needed_by: str) -> None:
        raise MissingDependencyError(
            needed_by=needed_by, package="PyTorch", found=None, extra="torch"
        )

    monkeypatch.setattr("infinity_engine.cli.calibrate.is_torch_new_enough", lambda _: False)
    monkeypatch.setattr("infinity_engine.cli.calibrate.require_torch", absent)

    assert main(["calibrate", "--quick", "--seconds", "0.1", "--accelerator", "cpu"]) == 1
    assert "--accelerator cpu" in capsys.readouterr().err
