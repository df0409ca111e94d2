"""Ctrl-C at any line of the engine, wherever things rest: what it interrupts can be done again,
with the same bits.
"""

from __future__ import annotations

import contextlib
import random
import signal
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity_engine
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import CapacityError
from infinity_engine.plan import Interleaved, NvmeStreamed
from support.engine_bits import Bits, bits_of, differing
from support.interrupts import interrupted, interrupted_at
from support.nvme_training import Case, emulated, opened, train
from support.small_models import Task
from support.unnamed_files import unnamed_files

pytestmark = pytest.mark.usefixtures("deterministic")

PACKAGE = Path(infinity_engine.__file__).parent
FILES = tuple(
    str(file)
    for room in (
        "engine",
        "gradients",
        "lanes",
        "memory",
        "optim",
        "parameters",
        "residence",
        "schedule",
        "storage",
        "update",
    )
    for file in sorted((PACKAGE / room).glob("*.py"))
)
# Files where more places are tried than anywhere, and every how many lines.
PASSES: dict[str, tuple[tuple[str, ...], int]] = {
    "gradients": (tuple(str(file) for file in sorted((PACKAGE / "gradients").glob("*.py"))), 1500),
    "update": (tuple(str(file) for file in sorted((PACKAGE / "update").glob("*.py"))), 1000),
    "checksums": (
        tuple(
            str(PACKAGE / file)
            for file in ("update/swapping.py", "optim/host.py", "storage/checksums.py")
        ),
        500,
    ),
}
EVERY = {False: 8000, True: 2000}  # lines, on average
WIDER = 5  # times as far apart, by default
HALF = Interleaved(share=0.5, resident=0.25)
MEMORY = Case(precision="bf16", accumulation=2, steps=1)
DRIVES = replace(MEMORY, strategy=NvmeStreamed(), parameters="nvme", host=1 << 20)
WHERE: dict[str, tuple[Case, bool]] = {  # and whether on a device with memory of its own
    "one memory": (MEMORY, False),
    "the host": (replace(MEMORY, strategy=HALF, parameters="host", device=2 << 20), True),
    "the device": (replace(MEMORY, strategy=HALF, parameters="device", device=8 << 20), True),
    "drives": (DRIVES, False),
    "drives, updated early": (replace(DRIVES, early=True), False),
    "drives and a device": (replace(DRIVES, strategy=HALF, device=2 << 20), True),
}


@cache
def in_memory() -> Bits:
    case = replace(MEMORY, steps=3)
    with opened(case, None, None) as (engine, task):
        train(engine, task, case)
        return bits_of(engine)


def fitting(case: Case, *, device: bool, drive: Path) -> Case:
    """Return the case with the least budget of the host that it can have, if it needs drives."""
    while case.parameters == "nvme":
        try:
            with ExitStack() as around:
                on = around.enter_context(emulated(0)) if device else None
                around.enter_context(opened(case, on, drive))
                break
        except CapacityError as error:
            case = replace(case, host=max(error.asked, int(case.host) + (32 << 10)))
    return case


def micro_batches(engine: Engine, task: Task, case: Case, step: int) -> None:
    for micro_batch in range(case.accumulation):
        engine.backward(engine(task.batch(step * case.accumulation + micro_batch)))
        if micro_batch + 1 < case.accumulation:
            engine.step()


def is_interrupted(
    engine: Engine,
    task: Task,
    case: Case,
    line: int,
    *,
    in_step: bool,
    files: tuple[str, ...] = FILES,
) -> bool:
    """Make the second step, with Ctrl-C at a line of the step, or of what is before it; tell
    whether it came.
    """
    done = False
    if in_step:
        micro_batches(engine, task, case, 1)
        with interrupted_at(line, files) as told:
            engine.step()
    else:
        with interrupted_at(line, files) as told:
            micro_batches(engine, task, case, 1)
            done = True
        if not done:
            engine.zero_grad()
            micro_batches(engine, task, case, 1)
    if engine.steps == 1:
        engine.step()
    return told[0]


@pytest.mark.parametrize("wider", [WIDER, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("where", WHERE)
def test_what_ctrl_c_interrupts_anywhere_can_be_done_again(
    where: str, in_step: bool, wider: int, tmp_path: Path
) -> None:
    case, device = WHERE[where]
    case = fitting(case, device=device, drive=tmp_path)
    chance = random.Random(where)
    line, came, times = chance.randrange(1, EVERY[in_step]), True, 0
    while came:
        with ExitStack() as around:
            on = around.enter_context(emulated(line)) if device else None
            drive = tmp_path if case.parameters == "nvme" else None
            engine, task = around.enter_context(opened(case, on, drive))
            train(engine, task, case)
            came = is_interrupted(engine, task, case, line, in_step=in_step)
            train(engine, task, case, first=2)
            assert differing(in_memory(), bits_of(engine)) == [], line
        times += came
        line += chance.randrange(1, 2 * wider * EVERY[in_step])
    assert times


@pytest.mark.parametrize("wider", [WIDER, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("where", ["drives", "drives, updated early"])
@pytest.mark.parametrize("place", PASSES)
def test_what_ctrl_c_interrupts_in_a_pass_can_be_done_again(
    place: str, where: str, in_step: bool, wider: int, tmp_path: Path
) -> None:
    files, every = PASSES[place]
    case = fitting(replace(WHERE[where][0], checksum="crc32c"), device=False, drive=tmp_path)
    chance = random.Random(f"{place} {where}")
    line, came, times = chance.randrange(1, every // 2), True, 0
    while came:
        with opened(case, None, tmp_path) as (engine, task):
            train(engine, task, case)
            came = is_interrupted(engine, task, case, line, in_step=in_step, files=files)
            train(engine, task, case, first=2)
            assert differing(in_memory(), bits_of(engine)) == [], line
        times += came
        line += chance.randrange(1, 2 * wider * every)
    assert times


@pytest.mark.parametrize("where", WHERE)
def test_a_handler_may_use_the_engine_that_was_in_the_midst_of_a_step(
    where: str, tmp_path: Path
) -> None:
    case, device = WHERE[where]
    case = fitting(case, device=device, drive=tmp_path)
    saved: list[dict[str, Any]] = []
    with ExitStack() as around:
        on = around.enter_context(emulated(0)) if device else None
        drive = tmp_path if case.parameters == "nvme" else None
        engine, task = around.enter_context(opened(case, on, drive))
        before = signal.signal(signal.SIGUSR1, lambda *_: saved.append(engine.state_dict()))
        around.callback(signal.signal, signal.SIGUSR1, before)
        train(engine, task, case)
        with interrupted_at(200, FILES, number=signal.SIGUSR1) as told:
            train(engine, task, case, first=1)
        train(engine, task, case, first=2)

        assert told[0]
        assert len(saved) == 1
        assert engine.steps == 3
        assert differing(in_memory(), bits_of(engine)) == []


@pytest.mark.parametrize("where", WHERE)
def test_what_was_changed_when_ctrl_c_came_can_be_taken_over(where: str, tmp_path: Path) -> None:
    case, device = WHERE[where]
    case = fitting(case, device=device, drive=tmp_path)
    with ExitStack() as around:
        on = around.enter_context(emulated(0)) if device else None
        drive = tmp_path if case.parameters == "nvme" else None
        engine, task = around.enter_context(opened(case, on, drive))
        train(engine, task, case)
        changed = max(task.parameters(), key=torch.nn.Parameter.numel)

        def change() -> None:
            with torch.no_grad(), engine.gathered(changed, modify=True):
                changed.zero_()
                signal.raise_signal(signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            change()
        with engine.gathered(changed, modify=True):
            assert not changed.count_nonzero()
        train(engine, task, case, first=1)

        assert engine.steps == 2


def test_ctrl_c_while_an_engine_is_closed_comes_when_it_is(tmp_path: Path) -> None:
    case = fitting(DRIVES, device=False, drive=tmp_path)
    with opened(case, None, tmp_path) as (engine, task):
        micro_batches(engine, task, case, 0)
        engine.step()
        with interrupted_at(300, FILES) as told:
            engine.close()
        assert told[0]
        assert unnamed_files(tmp_path) == []


def test_a_forward_that_is_interrupted_leaves_no_context_behind(tmp_path: Path) -> None:
    case = replace(MEMORY, precision="bf16_autocast")
    with opened(case, None, None) as (engine, task):
        for nth in range(40):
            interrupted(
                lambda: engine(task.batch(0)), 3 * nth, [contextlib, torch.amp.autocast_mode]
            )
            assert not torch.is_autocast_enabled("cpu"), nth
            assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None, nth
        engine.zero_grad()
        train(engine, task, case)
