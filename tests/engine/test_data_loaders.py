"""Data loaders whose workers are forked from a process that trains: the same bits, nothing held,
nobody hangs.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from infinity_engine.engine.engine import Engine
from infinity_engine.plan import Interleaved
from support.engine_bits import Bits, bits_of, differing
from support.nvme_training import STREAMED, Case, emulated, opened
from support.small_models import Task
from support.unnamed_files import unnamed_files

pytestmark = [
    pytest.mark.usefixtures("deterministic"),
    # newer Pythons
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

EPOCH, EPOCHS = 3, 2
MEMORY = Case(precision="bf16")
HALF = Interleaved(share=0.5, resident=0.25)
WHERE: dict[str, tuple[Case, bool]] = {  # and whether on a device with memory of its own
    "one memory": (MEMORY, False),
    "the host": (replace(MEMORY, strategy=HALF, parameters="host", device=2 << 20), True),
    "drives": (replace(STREAMED, clip=None), False),
}


class Batches(Dataset[torch.Tensor]):
    """The batches of a task, which it holds on to as datasets do; its worker is killed at the one
    of number `last`.
    """

    def __init__(self, task: Task, last: int | None = None) -> None:
        self._task = task
        self._last = last

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, number: int) -> torch.Tensor:
        if number == self._last:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._task.batch(number)


def loader_of(
    batches: Batches, *, persistent: bool = False, collate: Callable[[Any], Any] | None = None
) -> DataLoader[torch.Tensor]:
    return DataLoader(
        batches,
        batch_size=None,
        num_workers=2,
        persistent_workers=persistent,
        collate_fn=collate,
        multiprocessing_context="fork",
        timeout=100,  # rather than hang
    )


@contextmanager
def opened_in(where: str, drive: Path) -> Iterator[tuple[Engine, Task]]:
    case, device = WHERE[where]
    with ExitStack() as around:
        on = around.enter_context(emulated(0)) if device else None
        yield around.enter_context(opened(case, on, drive if where == "drives" else None))


def train(engine: Engine, batches: Sequence[torch.Tensor] | DataLoader[torch.Tensor]) -> None:
    for batch in batches:
        engine.backward(engine(batch))
        engine.step()


@cache
def without_workers() -> Bits:
    with opened(MEMORY, None, None) as (engine, task):
        for _ in range(EPOCHS):
            train(engine, [task.batch(number) for number in range(EPOCH)])
        return bits_of(engine)


def blocks_in(folder: Path, process: int) -> int:
    """Return the blocks on drives of what a process has open that is, or was, in a folder."""
    opened = [
        each for each in os.scandir(f"/proc/{process}/fd") if str(folder) in os.readlink(each.path)
    ]
    return sum(os.stat(each.path).st_blocks for each in opened)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("where", WHERE)
def test_an_engine_trains_to_the_same_bits_beside_workers_that_come_and_go(
    where: str, persistent: bool, tmp_path: Path
) -> None:
    with opened_in(where, tmp_path) as (engine, task):
        loader = loader_of(Batches(task), persistent=persistent)
        for _ in range(EPOCHS):
            train(engine, loader)

        assert differing(without_workers(), bits_of(engine)) == []


def test_workers_that_outlive_the_engine_keep_no_space_on_its_drives(tmp_path: Path) -> None:
    with opened_in("drives", tmp_path) as (engine, task):
        loader = loader_of(Batches(task), persistent=True)
        train(engine, loader)
        # it is there
        workers = [each.pid for each in loader._iterator._workers]  # type: ignore[union-attr]
        assert all(blocks_in(tmp_path, worker) for worker in workers)

    for number, batch in enumerate(loader):
        assert torch.equal(batch, task.batch(number))
    assert unnamed_files(tmp_path) == []
    assert [blocks_in(tmp_path, worker) for worker in workers] == [0, 0]


# The handler of torch's loaders raises wherever it is called, also where the loader itself ends.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("where", WHERE)
def test_a_worker_that_is_killed_is_told_and_the_engine_goes_on(where: str, tmp_path: Path) -> None:
    with opened_in(where, tmp_path) as (engine, task):
        # who meets it first: the signal's handler or a read
        with pytest.raises((RuntimeError, OSError, EOFError)):
            train(engine, loader_of(Batches(task, last=EPOCH - 1)))
        engine.zero_grad()
        rest = [task.batch(number % EPOCH) for number in range(engine.steps, EPOCHS * EPOCH)]
        train(engine, rest)

        assert differing(without_workers(), bits_of(engine)) == []


@pytest.mark.parametrize("where", WHERE)
def test_an_engine_that_is_used_in_a_worker_says_whose_it_is(where: str, tmp_path: Path) -> None:
    with opened_in(where, tmp_path) as (engine, task):
        train(engine, [task.batch(0)])
        batches = iter(loader_of(Batches(task), collate=engine))

        with pytest.raises(
            RuntimeError,
            match=rf"engine belongs to process {os.getpid()}\. This process, \d+, was forked",
        ):
            next(batches)
        # what collects it with its error waits 10 s
        batches._shutdown_workers()  # type: ignore[attr-defined]
        train(engine, [task.batch(1)])

        assert engine.steps == 2


def told_in_a_child(call: Callable[[], object]) -> str:
    """Return what a call raises in a forked process, or nothing."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            call()
        except BaseException as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        said = told.read()
    assert os.waitpid(child, 0)[1] == 0
    return said


@pytest.mark.parametrize("where", WHERE)
def test_a_forked_process_is_told_at_every_door_and_closes_nothing(
    where: str, tmp_path: Path
) -> None:
    with opened_in(where, tmp_path) as (engine, task):
        train(engine, [task.batch(0)])
        batch, weight = task.batch(1), next(task.parameters())
        loss = engine(batch)

        def look() -> None:
            with engine.gathered(weight):
                pass

        doors: list[Callable[[], object]] = [
            partial(engine, batch),
            partial(engine.backward, loss),
            engine.step,
            engine.zero_grad,
            engine.state_dict,
            partial(engine.state_of, weight),
            partial(engine.clip_grad_norm_, 1.0),
            partial(engine.register_external, task, weight),
            look,
        ]
        for door in doors:
            assert f"belongs to process {os.getpid()}" in told_in_a_child(door), door
        assert told_in_a_child(engine.close) == ""
        engine.backward(loss)
        engine.step()

        assert engine.steps == 2
