"""What tests do on the far device, for a process of its own: torch counts it as this process's
accelerator for ever.
"""

from __future__ import annotations

import errno
import gc
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme.queue import queue
from infinity_engine.accel import Emulation
from infinity_engine.activation.memories import SavedMemory
from infinity_engine.activation.moving import ActivationMoves
from infinity_engine.errors import CapacityError, TransferError
from infinity_engine.plan import Strategy, Tier
from infinity_engine.storage import Hop, Place, SwapFile
from support.determinism import deterministic_compute
from support.device_training import wide_engine
from support.engine_bits import Bits, bits_of, differing
from support.exact_training import trained_exact
from support.far import (
    FAR,
    FarAccelerator,
    allocated,
    compiled_far_device,
    far_array_of,
    far_device_is_missing,
    load_far_device,
)
from support.nvme_training import RATES, Case, Trained, opened, train, trained
from support.scripts import load_script

__all__ = [
    "MIB",
    "exact_far",
    "failed_write_far",
    "far_process",
    "gpu_bench",
    "gradients_seen",
    "limits_of_modules",
    "offloaded_far",
    "room_for_modules",
    "saved_beside_training",
    "trained_far",
]

MIB = 1 << 20


@contextmanager
def far_process(folder: Path) -> Iterator[ProcessPoolExecutor]:
    """Return a process that has the device, compiled into the folder if nobody has yet.

    Skips where it cannot be.
    """
    missing = far_device_is_missing()
    if missing is not None:
        pytest.skip(missing)
    library = compiled_far_device(folder)
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        1, spawned, initializer=load_far_device, initargs=(library,)
    ) as process:
        yield process


def _device() -> FarAccelerator:
    return FarAccelerator(Emulation(rates=RATES, capacity_bytes=64 * MIB))


def trained_far(case: Case, drive: Path | None = None) -> Trained:
    """Train with the engine on the far device; see `trained`."""
    with deterministic_compute():
        return trained(case, _device(), drive)


def exact_far(case: Case) -> Bits:
    """Train on the far device what has the same bits on every one."""
    return trained_exact(case, _device())


def offloaded_far(case: Case, drive: Path, activations: dict[str, object]) -> tuple[Bits, str]:
    """Train with saved tensors that leave the far device; return the bits and the last report."""
    with (
        deterministic_compute(),
        _device() as device,
        opened(case, device, drive, activations=activations) as (engine, task),
    ):
        train(engine, task, case)
        return bits_of(engine), str(engine.report())


def failed_write_far(
    case: Case, drive: Path, activations: dict[str, object]
) -> tuple[Bits, list[bool]]:
    """Train with a write of saved tensors that fails on the way from the device through the host,
    and run that batch again; return the bits, and whether what was to leave is still on the device.
    """
    real, end, left = SwapFile.write, ActivationMoves._end_eviction, [1]
    still_there = []

    def ended(moves: ActivationMoves, memory: SavedMemory) -> None:
        try:
            end(moves, memory)
        except TransferError:
            still_there.append(memory.record.home() is Tier.DEVICE)
            raise

    def write(swap: SwapFile, place: Place, memory: memoryview, *, what: str = "") -> Hop:
        if what.startswith("activation") and left[0]:
            left[0] -= 1
            raise TransferError(errno=errno.EIO, path="drive", offset=0, asked=1, done=0, what=what)
        return real(swap, place, memory, what=what)

    with (
        deterministic_compute(),
        _device() as device,
        opened(case, device, drive, activations=activations) as (engine, task),
    ):
        train(engine, task, replace(case, steps=1))
        batch = task.batch(1).to(engine.device)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SwapFile, "write", write)
            patch.setattr(ActivationMoves, "_end_eviction", ended)
            with pytest.raises(TransferError, match="activation"):
                engine.backward(engine(batch))
        engine.zero_grad()
        train(engine, task, replace(case, steps=case.steps - 1), first=1)
        return bits_of(engine), still_there


def saved_beside_training(case: Case, folder: Path, drive: Path | None) -> list[str]:
    """Save beside training and go on; load, and go on again; return what differs."""
    found = []
    case = replace(case, steps=2)
    with deterministic_compute():
        for tag in ("first", "second"):
            with _device() as device, opened(case, device, drive) as (engine, task):
                if tag == "second":
                    engine.load(folder)
                else:
                    train(engine, task, case)
                saved = bits_of(engine)
                if tag == "first":
                    engine.save(folder, tag, wait=False)
                losses = train(engine, task, case, first=2)
                found.append((saved, losses, bits_of(engine)))
    first, second = found
    same = ["losses"] if first[1] != second[1] else []
    return same + differing(first[0], second[0]) + differing(first[2], second[2])


def limits_of_modules() -> dict[str, Any]:
    """Let modules ask for more than the device's budget has, and for less; return what was told and
    taken.
    """
    found: dict[str, Any] = {}
    gc.collect()
    before = allocated()
    with _device() as device, wide_engine(device) as engine:
        try:
            engine(torch.randn(32_768, 16, device=FAR))
        except CapacityError as told:
            found["told"] = (told.tier, told.asked, told.limit, dict(told.holders), told.change)
            found["cause"] = type(told.__cause__)
        gc.collect()  # the error's frames have tensors
        found["taken"] = allocated() - before
        engine.backward(engine(torch.randn(1024, 16, device=FAR)))
        found["outcome"] = engine.step().outcome
    del engine, device  # what is absent has an element there
    gc.collect()
    found["left"] = allocated() - before
    found["beyond it"] = torch.empty(8 * MIB, device=FAR).numel()
    return found


def gradients_seen(strategy: Strategy) -> dict[str, torch.Tensor]:
    """Return the gradients that state_of has after two micro-batches of three, wherever they
    are.
    """
    with deterministic_compute(), _device() as device:
        torch.manual_seed(0)
        with wide_engine(
            device, strategy=strategy, accumulation_steps=3, precision="bf16"
        ) as engine:
            for _ in range(2):
                engine.backward(engine(torch.randn(64, 16, dtype=torch.bfloat16).to(FAR)))
                engine.step()
            named = engine.model.named_parameters()
            return {
                name: torch.as_tensor(engine.state_of(each)["gradient"]) for name, each in named
            }


def room_for_modules() -> dict[str, Any]:
    """Let the plan leave modules all of the device's budget, and most of it; return what was told
    and reserved.
    """
    found: dict[str, Any] = {}
    with _device() as device:
        try:
            wide_engine(device, activation_bytes="4MiB")
        except CapacityError as told:
            found["nothing left"] = told.tier
        with wide_engine(device, activation_bytes="3MiB") as engine:
            [usage] = [each for each in engine.usage() if each.tier.name == "DEVICE"]
            found["reserved"] = usage.reserved
    return found


def gpu_bench(name: str, scale: tuple[Any, ...], folder: Path | None) -> dict[str, float | None]:
    """Run a bench of scripts/bench at another scale, on the far device; return its figures.

    One that uses drives gets a folder for its files, and closes what it has opened at the end.
    """
    import gpu_training

    import bench

    module = load_script(f"bench/{name}")
    with pytest.MonkeyPatch.context() as patched, ExitStack() as until_end:
        patched.setattr(gpu_training, "gpu", _device)
        patched.setattr(gpu_training, "rates_of", lambda _: RATES)
        patched.setattr(queue, "device_array_of", far_array_of)
        patched.setenv("INFINITY_BENCH_DIR", str(folder))
        run = bench.Bench(name, True, frozenset(), bench.ROUNDS)
        module.define(run, *([] if folder is None else [until_end]), module.Scale(*scale))
        return {figure.name: figure.value for figure in run.run(1)}
