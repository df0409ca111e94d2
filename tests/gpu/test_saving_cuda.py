"""A run that is saved on a GPU goes on with the same bits: there, placed in another way, and on the
CPU.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from infinity_engine.accel import Accelerator
from infinity_engine.engine.engine import Engine
from infinity_engine.plan import HostOnly, Interleaved, NvmeStreamed, StaticSplit
from infinity_engine.plan.strategy import DeviceOnly
from support.engine_bits import Bits, bits_of, differing
from support.exact_training import opened_exact
from support.nvme_training import Case, opened, train
from support.small_models import Task

pytest.importorskip("cupy")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    pytest.mark.usefixtures("exact"),
    # what `exact` asks for, where torch has it not
    pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"),
    # torch, in a backward's own thread
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]
# cuBLAS takes 32 MiB of it for each thread that computes, and for some products as much again
DEVICE = "1GiB"
BEFORE, AFTER = 4, 3
PLACES = {
    "host only": Case(strategy=HostOnly(), parameters="device"),
    "device only": Case(strategy=DeviceOnly(), parameters="device"),
    "split": Case(strategy=StaticSplit(ratio=0.4), parameters="host"),
    "interleaved": Case(strategy=Interleaved(share=0.5, resident=0.3), parameters="host"),
    "nvme": Case(
        strategy=NvmeStreamed(update=Interleaved(share=0.5)),
        parameters="nvme",
        small_bytes=0,
        host="32MiB",
    ),
}


def place(name: str, precision: str) -> Case:
    return replace(PLACES[name], precision=precision, device=DEVICE, steps=AFTER)


def drive_of(name: str, folder: Path) -> Path | None:
    if name != "nvme":
        return None
    drive = folder / "drive"
    drive.mkdir(exist_ok=True)
    return drive


def goes_on(engine: Engine, task: Task, case: Case) -> Bits:
    train(engine, task, case, first=BEFORE)
    return bits_of(engine)


@cache
def uninterrupted(precision: str) -> Bits:
    """Return what the CPU makes of all steps."""
    case = Case(precision=precision, steps=BEFORE + AFTER)
    with opened_exact(case, None, None) as (engine, task):
        train(engine, task, case)
        return bits_of(engine)


@pytest.mark.parametrize(
    ("origin", "to"),
    [
        ("host only", "interleaved"),
        ("interleaved", "device only"),
        ("device only", "nvme"),
        ("nvme", "split"),
        ("split", "host only"),
        ("nvme", "nvme"),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_saved_run_goes_on_in_any_place_and_on_the_cpu(
    precision: str, origin: str, to: str, device: Accelerator, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    expected = uninterrupted(precision)
    case = place(origin, precision)
    with opened_exact(case, device, drive_of(origin, tmp_path)) as (engine, task):
        train(engine, task, replace(case, steps=BEFORE))
        engine.save(saved)
        assert differing(expected, goes_on(engine, task, case)) == []  # saving changes nothing

    case = place(to, precision)
    with opened_exact(case, device, drive_of(to, tmp_path)) as (engine, task):
        train(engine, task, replace(case, steps=1), first=50)  # another run, until the load
        assert engine.load(saved).step == BEFORE
        assert differing(expected, goes_on(engine, task, case)) == []

    with opened_exact(replace(Case(precision=precision), steps=AFTER), None, None) as (
        engine,
        task,
    ):
        engine.load(saved)
        assert differing(expected, goes_on(engine, task, case)) == []


@pytest.mark.parametrize("to", ["interleaved", "device only", "nvme"])
def test_a_run_saved_on_the_cpu_goes_on_on_the_device(
    to: str, device: Accelerator, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    case = Case(precision="bf16", steps=BEFORE)
    with opened_exact(case, None, None) as (engine, task):
        train(engine, task, case)
        engine.save(saved)

    case = place(to, "bf16")
    with opened_exact(case, device, drive_of(to, tmp_path)) as (engine, task):
        engine.load(saved)
        assert differing(uninterrupted("bf16"), goes_on(engine, task, case)) == []


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_is_saved_beside_training_and_loaded(
    precision: str, name: str, device: Accelerator, tmp_path: Path
) -> None:
    # All that the exact model has not: matrix products on the device.
    case = replace(place(name, precision), steps=2, host="256MiB")
    drive = drive_of(name, tmp_path)
    found: list[tuple[Bits, list[float], Bits]] = []
    for tag in ("first", "second"):
        with opened(case, device, drive) as (engine, task):
            if tag == "second":
                engine.load(tmp_path / "saved")
            else:
                train(engine, task, case)
            saved = bits_of(engine)
            if tag == "first":
                engine.save(tmp_path / "saved", tag, wait=False)
            losses = train(engine, task, case, first=2)
            found.append((saved, losses, bits_of(engine)))

    first, second = found
    assert differing(first[0], second[0]) == []
    assert first[1] == second[1]
    assert differing(first[2], second[2]) == []
