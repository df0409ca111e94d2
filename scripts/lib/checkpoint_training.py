"""One training whose checkpoints are measured: ours, torch.save's, DCP's or DeepSpeed's.

A program of one system: trains a stack of linear layers in fp32 with AdamW, saves and loads it, and
prints one JSON object of numbers. Bytes count as saved when they are on the drive: what the rivals
leave in the page cache is synced within their time. Loads begin with cold files. Memory is what the
kernel says of the process, not what the engine counts.
Usage: system, layers, width, rows of a step, directory.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

__all__ = ["STATE_BYTES", "SYSTEMS", "Size", "parameters_of"]

STATE_BYTES = 12  # of a parameter: master and two moments, all fp32
WARM_UP, STEPS = 2, 4
SAVES = 3  # beside training; the first one warms up


def parameters_of(layers: int, width: int) -> int:
    """Return how many parameters are trained."""
    return layers * width * width


def _model(size: Size) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        *(torch.nn.Linear(size.width, size.width, bias=False) for _ in range(size.layers))
    )


@dataclass(frozen=True)
class Size:
    """How large the model is, and how many rows it is trained on in a step."""

    layers: int
    width: int
    rows: int


def _loss(model: Any, size: Size, step: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(step)
    loss: torch.Tensor = model(torch.randn(size.rows, size.width, generator=made)).pow(2).mean()
    return loss


def _timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _sync(folder: Path) -> None:
    """Let all files of a folder be on the drive."""
    for path in _files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _chill(folder: Path) -> None:
    """Let no file of a folder be in the page cache."""
    for path in _files(folder):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in _files(folder))


def _written_bytes() -> int:
    """Return what this process has written to drives since it began."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes:"))


def _peak_bytes() -> int:
    """Return the most that was resident since `_begin_peak_anew`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _begin_peak_anew() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _saved(save: Callable[[], object], folder: Path) -> dict[str, float]:
    """Save into a folder; return the seconds, and the bytes that it holds or that were written."""
    before = _written_bytes()
    seconds = _timed(save)
    return {"save": seconds, "bytes": max(_nbytes(folder), _written_bytes() - before)}


class _Steps:
    """Steps of a training, timed, and the memory that it takes without checkpoints."""

    def __init__(self, step: Callable[[int], object]) -> None:
        self._step = step
        for number in range(WARM_UP):
            step(number)
        _begin_peak_anew()
        self.seconds = statistics.median(_timed(partial(step, number)) for number in range(STEPS))
        self._peak = _peak_bytes()

    def added_bytes(self) -> int:
        """Return the most that checkpoints have added to the memory of a training."""
        return max(0, _peak_bytes() - self._peak)

    def beside(self, begin: Callable[[], object], is_going_on: Callable[[], bool]) -> float:
        """Train while a save goes on; return the seconds that it has cost, by the clock."""
        began, count = time.perf_counter(), 0
        begin()
        while is_going_on():
            self._step(count)
            count += 1
        return time.perf_counter() - began - count * self.seconds


def _ours(size: Size, folder: Path, *, drives: bool) -> dict[str, float]:
    engine_module: Any = import_module("infinity_engine")
    state = STATE_BYTES * parameters_of(size.layers, size.width)
    host = state * 5 // 6 if drives else (256 << 20) + state * 2
    settings: dict[str, Any] = {"strategy": "host_only", "budget": {"host": host}}
    if drives:
        (folder / "drive").mkdir()
        budget = {"host": host, "nvme": {str(folder / "drive"): 2 * state + (64 << 20)}}
        settings = {"strategy": "nvme_streamed", "budget": budget}
    model = _model(size)
    optimizer = torch.optim.AdamW(model.parameters())
    with engine_module.initialize(model, optimizer, accelerator="cpu", **settings) as engine:

        def step(number: int) -> None:
            engine.backward(_loss(engine, size, number))
            engine.step()

        steps = _Steps(step)
        usages = engine.usage()
        free = min(usage.limit - usage.reserved for usage in usages if usage.tier.name == "HOST")
        held = sum(usage.held for usage in usages if usage.tier.name == "NVME")
        if drives and not held:
            raise RuntimeError(f"no states lie on the drive: {host} bytes of host had room for all")
        saved = folder / "saved"
        numbers = _saved(lambda: engine.save(saved, "waited"), saved)

        def save_beside(number: int) -> tuple[float, float]:
            begin = partial(engine.save, saved, f"beside-{number}", wait=False)
            cost = steps.beside(begin, lambda: engine.last_save().state.value == "writing")
            return engine.last_save().stall_seconds, cost

        stalls, costs = zip(*map(save_beside, range(SAVES)), strict=True)
        _chill(saved)
        loading = _timed(lambda: engine.load(saved, "waited"))
        added = steps.added_bytes()
    return {
        **numbers,
        "step": steps.seconds,
        "load": loading,
        "stall": statistics.median(stalls[1:]),
        "cost": statistics.median(costs[1:]),
        "memory": added,
        "over": max(0, added - free),
    }


def _plain(size: Size) -> tuple[torch.nn.Module, torch.optim.Optimizer, _Steps]:
    model = _model(size)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(number: int) -> None:
        _loss(model, size, number).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, _Steps(step)


def _torch_save(size: Size, folder: Path) -> dict[str, float]:
    model, optimizer, steps = _plain(size)
    path = folder / "saved.pt"

    def save() -> None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        _sync(folder)

    def load() -> None:
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    numbers = _saved(save, folder)
    _chill(folder)
    loading = _timed(load)
    return {**numbers, "step": steps.seconds, "load": loading, "memory": steps.added_bytes()}


def _dcp(size: Size, folder: Path) -> dict[str, float]:
    dcp: Any = import_module("torch.distributed.checkpoint")
    states: Any = import_module("torch.distributed.checkpoint.state_dict")
    _one_rank()
    model, optimizer, steps = _plain(size)

    def state() -> dict[str, Any]:
        of_model, of_optimizer = states.get_state_dict(model, optimizer)
        return {"model": of_model, "optim": of_optimizer}

    def save() -> None:
        dcp.save(state(), checkpoint_id=str(folder / "saved"))
        _sync(folder)

    def load() -> None:
        target = state()
        dcp.load(target, checkpoint_id=str(folder / "saved"))
        states.set_state_dict(
            model,
            optimizer,
            model_state_dict=target["model"],
            optim_state_dict=target["optim"],
        )

    def save_beside(number: int) -> tuple[float, float]:
        saves, stalls = [], []

        def begin() -> None:  # DCP syncs the files of this save itself
            saves.append(dcp.async_save(state(), checkpoint_id=str(folder / f"beside-{number}")))

        cost = steps.beside(lambda: stalls.append(_timed(begin)), lambda: not saves[0].done())
        saves[0].result()
        return stalls[0], cost

    numbers = _saved(save, folder)
    stalls, costs = zip(*map(save_beside, range(SAVES)), strict=True)
    _chill(folder)
    loading = _timed(load)
    return {
        **numbers,
        "step": steps.seconds,
        "load": loading,
        "stall": statistics.median(stalls[1:]),
        "cost": statistics.median(costs[1:]),
        "memory": steps.added_bytes(),
    }


def _deepspeed(size: Size, folder: Path) -> dict[str, float]:
    deepspeed: Any = import_module("deepspeed")
    _one_rank()
    model = _model(size)
    optimizer = torch.optim.AdamW(model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": size.rows,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(number: int) -> None:
        engine.backward(_loss(engine, size, number))
        engine.step()

    def save() -> None:
        engine.save_checkpoint(str(folder))
        _sync(folder)

    steps = _Steps(step)
    numbers = _saved(save, folder)
    _chill(folder)
    loading = _timed(lambda: engine.load_checkpoint(str(folder)))
    return {**numbers, "step": steps.seconds, "load": loading, "memory": steps.added_bytes()}


def _one_rank() -> None:
    """Be a whole process group, without a port."""
    from torch import distributed

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    store = distributed.HashStore()  # type: ignore[attr-defined]  # its users' name for it
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


SYSTEMS: Mapping[str, Callable[[Size, Path], dict[str, float]]] = {
    "ours": lambda size, folder: _ours(size, folder, drives=False),
    "ours, on drives": lambda size, folder: _ours(size, folder, drives=True),
    "torch.save": _torch_save,
    "DCP": _dcp,
    "DeepSpeed": _deepspeed,
}


def main() -> None:
    """Measure one system once."""
    warnings.simplefilter("ignore")
    system, *numbers_of_size, folder = sys.argv[1:]
    said = os.dup(1)
    os.dup2(2, 1)  # whatever libraries print is no part of the answer
    numbers = SYSTEMS[system](Size(*map(int, numbers_of_size)), Path(folder))
    os.write(said, (json.dumps(numbers) + "\n").encode())


if __name__ == "__main__":
    main()
