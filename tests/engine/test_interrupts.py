"""Ctrl-C at any line of the engine, wherever things rest: what it interrupts can be done again, with the same bits."""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

import infinity_engine
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import CapacityError
from infinity_engine.plan import Interleaved, NvmeStreamed
from support.interrupts import interrupted_at
from support.nvme_training import Bits, Case, bits_of, emulated, opened, train
from support.small_models import Task

pytestmark = pytest.mark.usefixtures("deterministic")

PACKAGE = Path(infinity_engine.__file__).parent
FILES = tuple(
    str(file)
    for layer in ("engine", "schedule", "tiering", "storage", "memory", "optim")
    for file in sorted((PACKAGE / layer).glob("*.py"))
    if file.name != "signals.py"  # who holds signals back is tested by itself
)
EVERY = {False: 3000, True: 800}  # lines, on average
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
        return bits_of(engine, task)


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


def is_interrupted(engine: Engine, task: Task, case: Case, line: int, *, in_step: bool) -> bool:
    """Make the second step, with Ctrl-C at a line of the step, or of what is before it; tell whether it came."""
    done = False
    if in_step:
        micro_batches(engine, task, case, 1)
        with interrupted_at(line, FILES) as told:
            engine.step()
    else:
        with interrupted_at(line, FILES) as told:
            micro_batches(engine, task, case, 1)
            done = True
        if not done:
            engine.zero_grad()
            micro_batches(engine, task, case, 1)
    if engine.steps == 1:
        engine.step()
    return told[0]


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("where", WHERE)
def test_what_ctrl_c_interrupts_anywhere_can_be_done_again(where: str, in_step: bool, tmp_path: Path) -> None:
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
            expected, found = in_memory(), bits_of(engine, task)
            assert [name for name in expected if not torch.equal(expected[name], found[name])] == [], line
        times += came
        line += chance.randrange(1, 2 * EVERY[in_step])
    assert times
