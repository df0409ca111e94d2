"""What ranks run where the last of them has no memory beside its plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from infinity_engine.engine.engine import Engine
from infinity_engine.errors import CapacityError
from infinity_engine.plan import Tier
from support.determinism import deterministic_compute
from support.rank_training import Run, batch_of, engine_of, made, states_of, where
from support.small_models import Task

__all__ = ["clip_within", "refuse_further", "refuse_sums", "train_with_room"]


def _run(place: str, stage: str, folder: Path, accumulation: int) -> Run:
    """Return a run with the gradients at `place`."""
    # A rank that waits in vain for another one ends soon.
    settings: dict[str, Any] = {"ranks": {"stage": stage, "timeout_s": 20}}
    if place == "drives":
        settings |= {
            "strategy": "nvme_streamed",
            "parameters": "nvme",
            "precision": "bf16",
            "storage": {"small_bytes": 0},
            # So little of the host that gradients do not stay there.
            "budget": {"host": 35_500_000, "nvme": {str(folder): "64MiB"}},
        }
    else:
        settings["strategy"] = "host_only"
    return Run(accumulation=accumulation, emulated=place == "host", settings=settings)


@contextmanager
def _opened(run: Run, *, full: bool) -> Iterator[tuple[Engine, Task]]:
    """Open an engine; where `full`, the last rank has no memory beside its plan."""
    task, optimizer = made(run)
    rank, size = where()
    with deterministic_compute(), ExitStack() as around:
        engine = engine_of(run, task, optimizer, around)
        if full and rank == size - 1:
            ledger = engine._parts.ledger
            for tier in (Tier.HOST, Tier.DEVICE):
                around.enter_context(ledger.reserve(tier, ledger.free(tier), holder="the test"))
        yield engine, task


def _loss(engine: Engine, task: Task, seed: int) -> torch.Tensor:
    return torch.as_tensor(engine(batch_of(task, seed).to(engine.device)))


def _backwards(engine: Engine, task: Task, count: int) -> None:
    for seed in range(count):
        engine.backward(_loss(engine, task, seed))


def _differentiate_twice(engine: Engine, task: Task, planned: int) -> None:
    for seed in range(planned):
        loss = _loss(engine, task, seed)
        engine.backward(loss, retain_graph=True)
        engine.backward(loss)


def _past_the_engine(engine: Engine, task: Task, planned: int) -> None:
    for seed in range(planned + 1):
        _loss(engine, task, seed).backward()  # type: ignore[no-untyped-call]  # torch is


def _clip(engine: Engine, task: Task, planned: int) -> None:
    _past_the_engine(engine, task, planned)
    engine.clip_grad_norm_(1.0)


def _step(engine: Engine, task: Task, planned: int) -> None:
    _past_the_engine(engine, task, planned)
    engine.step()


_SUMS: Mapping[str, Callable[[Engine, Task, int], None]] = MappingProxyType(
    {"backward": _differentiate_twice, "clip": _clip, "step": _step}
)


def _refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except (CapacityError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "it was not refused"


def _make_step(engine: Engine, task: Task, planned: int) -> None:
    _backwards(engine, task, planned)
    engine.step()


def refuse_further(place: str, stage: str, folder: Path, planned: int) -> dict[str, Any]:
    """Refuse a backward more than planned; make the step that was begun, and another one."""
    with _opened(_run(place, stage, folder, planned), full=True) as (engine, task):
        _backwards(engine, task, planned)
        told = _refusal(lambda: _backwards(engine, task, 1))
        engine.step()
        _make_step(engine, task, planned)
        return {"told": told, "states": states_of(engine, task)}


def refuse_sums(place: str, stage: str, folder: Path, planned: int, method: str) -> dict[str, Any]:
    """Refuse gradients in a method of the engine; drop them, and make two steps."""
    with _opened(_run(place, stage, folder, planned), full=True) as (engine, task):
        told = _refusal(lambda: _SUMS[method](engine, task, planned))
        step = _refusal(engine.step)
        engine.zero_grad()
        for _ in range(2):
            _make_step(engine, task, planned)
        return {"told": told, "step": step, "states": states_of(engine, task)}


def train_with_room(place: str, stage: str, folder: Path, planned: int) -> dict[str, torch.Tensor]:
    """Make two steps where there is room."""
    with _opened(_run(place, stage, folder, planned), full=False) as (engine, task):
        for _ in range(2):
            _make_step(engine, task, planned)
        return states_of(engine, task)


def clip_within(place: str, stage: str, folder: Path, *, full: bool) -> dict[str, Any]:
    """Clip after each of two micro-batches; return the norms and the states."""
    norms = []
    with _opened(_run(place, stage, folder, 2), full=full) as (engine, task):
        for step in range(2):
            for micro_batch in range(2):
                engine.backward(_loss(engine, task, 2 * step + micro_batch))
                norms.append(engine.clip_grad_norm_(0.05))
            engine.step()
        return {"norms": norms, "states": states_of(engine, task)}
