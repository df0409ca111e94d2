"""Engines that are dropped without close(): closed with a warning, at once, and nothing of them is left."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity_engine
from deepnvme import IOQueue
from infinity_engine.engine.engine import Engine
from infinity_engine.storage import SwapFile
from infinity_engine.update.updating import Updates
from support.nvme_held import until
from support.nvme_training import RATES, emulated
from support.unnamed_files import unnamed_files
from support.warm_programs import run_warm

PLACES = ["host", "device", "drives", "drives of a device"]
DROPPED = "An engine for a Sequential was dropped without close"


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Let nothing be freed but by its last reference."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as until_end:
        yield until_end


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(96, 96) for _ in range(4)]).to(torch.bfloat16)


def engine_at(place: str, model: nn.Module, drive: Path, stack: ExitStack, **more: Any) -> Engine:
    """Return an engine with the model's parameters at `place`."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "rates": RATES,
        "subgroup_numel": 4096,
        "update_threads": 2,
    }
    settings["budget"] = {"host": "24MiB"}
    if "device" in place:
        settings["device"] = on = emulated(0)
        settings["budget"]["device"] = "8MiB"
        stack.callback(on.close)
    if "drives" in place:
        settings |= {
            "strategy": "nvme_streamed",
            "parameters": "nvme",
            "storage": {"small_bytes": 64},
        }
        settings["budget"]["nvme"] = {str(drive): "64MiB"}
    return infinity_engine.initialize(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), **settings, **more
    )


def train(engine: Engine, steps: int = 2) -> None:
    for seed in range(steps):
        engine.backward(loss_of(engine, seed))
        engine.step()


def loss_of(engine: Engine, seed: int) -> torch.Tensor:
    batch = torch.randn(2, 96, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    loss: torch.Tensor = engine(batch.to(engine.device)).float().pow(2).mean()
    return loss


def held_by_process() -> tuple[int, int]:
    """Return the descriptors and threads that this process has."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def trained_and_closed(place: str, drive: Path) -> dict[str, torch.Tensor]:
    """Return the weights that two steps give."""
    model = small()
    with ExitStack() as stack, engine_at(place, model, drive, stack) as engine:
        train(engine)
        engine.close()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("place", PLACES)
def test_a_dropped_engine_leaves_an_ordinary_trained_model(
    place: str, tmp_path: Path, stack: ExitStack
) -> None:
    expected, model = trained_and_closed(place, tmp_path), small()
    engine = engine_at(place, model, tmp_path, stack)
    train(engine)

    with pytest.warns(ResourceWarning, match=f"{DROPPED}.*after 2 updates"):
        del engine

    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    model(torch.randn(2, 96).to(torch.bfloat16)).float().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert unnamed_files(tmp_path) == []


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("place", PLACES)
def test_dropped_engines_leave_no_descriptor_thread_or_memory(
    place: str, tmp_path: Path, stack: ExitStack
) -> None:
    with engine_at(place, small(), tmp_path, stack) as first:  # torch's threads stay
        train(first)
    del first
    descriptors, threads = held_by_process()
    parts: list[weakref.ref[Any]] = []
    for _ in range(3):
        engine = engine_at(place, small(), tmp_path, stack)
        train(engine)
        parts += [weakref.ref(engine), weakref.ref(engine.model), weakref.ref(engine.optimizer)]
        with pytest.warns(ResourceWarning, match=DROPPED):
            del engine

    def nothing_more_is_held() -> bool:
        now = held_by_process()
        return now[0] <= descriptors and now[1] <= threads

    until(nothing_more_is_held)  # the kernel forgets a thread after Python does
    assert [part() for part in parts] == [None] * len(parts)


@pytest.mark.usefixtures("without_collector")
def test_an_engine_that_is_dropped_with_its_model_reads_nothing(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_at("drives", small(), tmp_path, stack)
    train(engine)
    engine.state_dict()  # ends the update, which reads
    monkeypatch.setattr(SwapFile, "read", None)

    with pytest.warns(ResourceWarning, match=DROPPED):
        del engine

    assert unnamed_files(tmp_path) == []


@pytest.mark.usefixtures("without_collector")
def test_an_engine_goes_when_its_name_is_given_to_another(tmp_path: Path, stack: ExitStack) -> None:
    engine = engine_at("drives", small(), tmp_path, stack)
    train(engine)
    with pytest.warns(ResourceWarning, match=DROPPED):
        engine = engine_at("drives", small(), tmp_path, stack)
    assert len(unnamed_files(tmp_path)) == 1

    train(engine)
    engine.close()


MOMENTS: dict[str, Callable[[Engine], object]] = {
    "before its first step": lambda engine: None,
    "with a graph alive": lambda engine: loss_of(engine, 0),
    "with gradients that wait": lambda engine: engine.backward(loss_of(engine, 0)),
    "with an update beside": train,
    "with a method of the model kept": lambda engine: engine.parameters,
}


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("place", ["host", "drives of a device"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_engine_can_be_dropped_at_any_moment(
    moment: str, place: str, tmp_path: Path, stack: ExitStack
) -> None:
    model = small()
    engine = engine_at(place, model, tmp_path, stack)
    kept = MOMENTS[moment](engine)

    with pytest.warns(ResourceWarning, match=DROPPED):
        del engine

    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert unnamed_files(tmp_path) == []
    del kept


def test_an_engine_that_fails_to_close_gives_everything_back(
    tmp_path: Path,
    stack: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = engine_at("drives", small(), tmp_path, stack)
    train(engine)

    def fail(_: object) -> None:
        raise RuntimeError("as a test wants it")

    monkeypatch.setattr(Updates, "end", fail)
    with pytest.warns(ResourceWarning, match=DROPPED):
        del engine

    assert "failed to close" in caplog.text
    assert unnamed_files(tmp_path) == []


def test_an_engine_in_a_cycle_goes_with_it(tmp_path: Path, stack: ExitStack) -> None:
    class Trainer:
        def __init__(self, engine: Engine) -> None:
            self.engine = engine
            self.itself = self

    trainer = Trainer(engine_at("drives", small(), tmp_path, stack))
    train(trainer.engine)
    del trainer
    with pytest.warns(ResourceWarning, match=DROPPED):
        gc.collect()

    assert unnamed_files(tmp_path) == []


def test_the_last_reference_may_go_in_a_thread_that_closing_waits_for(
    tmp_path: Path, stack: ExitStack
) -> None:
    with IOQueue() as queue, queue.open(tmp_path / "other", "w", size=4096) as file:
        engines = [engine_at("drives", small(), tmp_path, stack, queue=queue)]
        train(engines[0])
        gone = threading.Event()

        def drop(_: object) -> None:
            engines.clear()
            gone.set()

        written = file.pwrite(bytes(4096))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            written.add_done_callback(drop)
            gone.wait()
        assert [DROPPED in str(warning.message) for warning in told] == [True]
        assert unnamed_files(tmp_path) == []


@pytest.mark.parametrize("place", PLACES)
def test_an_engine_that_was_closed_is_dropped_in_silence(
    place: str, tmp_path: Path, stack: ExitStack
) -> None:
    engine = engine_at(place, small(), tmp_path, stack)
    train(engine)
    engine.close()
    del engine  # pytest makes errors of warnings
    gc.collect()


def test_an_engine_that_could_not_be_made_warns_of_nothing(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("as a test wants it")

    monkeypatch.setattr("infinity_engine.engine.assemble.release_initial_values", fail)
    model = small()
    with pytest.raises(OSError, match="as a test wants it"):
        engine_at("drives", model, tmp_path, stack)
    gc.collect()
    assert unnamed_files(tmp_path) == []


@pytest.mark.parametrize("place", ["host", "drives"])
def test_a_forked_process_drops_nothing_of_its_parent(
    place: str, tmp_path: Path, stack: ExitStack
) -> None:
    model = small()
    engines = [engine_at(place, model, tmp_path, stack)]
    train(engines[0])
    child = os.fork()
    if not child:
        try:
            engines.clear()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

    train(engines[0])
    engines[0].close()


FORKED = """
import os, signal, sys, torch
from multiprocessing import get_context
import infinity_engine

place, ending = sys.argv[1:]
model = torch.nn.Linear(64, 64)
drives = {"strategy": "nvme_streamed", "parameters": "nvme", "storage": {"small_bytes": 64}}
engine = infinity_engine.initialize(model, "adamw", accelerator="cpu", calibration="off",
    subgroup_numel=4096, **(drives if place else {"strategy": "host_only"}),
    budget={"host": "24MiB", **({"nvme": {place: "16MiB"}} if place else {})})
engine.backward(engine(torch.ones(1, 64)).sum())
engine.step()
if ending == "multiprocessing":
    child = get_context("fork").Process(target=sys.exit)
    child.start()
    child.join(60)
    assert child.exitcode == 0, child.exitcode
else:
    child = os.fork()
    if not child:
        signal.alarm(60)  # it must not wait for threads that it does not have
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
engine.backward(engine(torch.ones(1, 64)).sum())
engine.step()
engine.close()
print(engine.steps)
"""


@pytest.mark.parametrize("ending", ["sys.exit", "multiprocessing"])
@pytest.mark.parametrize("place", ["host", "drives"])
def test_a_forked_process_ends_as_python_does(tmp_path: Path, place: str, ending: str) -> None:
    drive = str(tmp_path) if place == "drives" else ""
    warned = ["ignore::DeprecationWarning"]
    ended = run_warm(FORKED, drive, ending, folder=tmp_path, warned=warned, timeout_s=240)

    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "2\n", "")


PROGRAM = """
import sys, torch, infinity_engine
model = torch.nn.Linear(64, 64)
engine = infinity_engine.initialize(model, "adamw", accelerator="cpu", calibration="off",
    strategy="nvme_streamed", parameters="nvme", storage={"small_bytes": 64}, subgroup_numel=4096,
    budget={"host": "24MiB", "nvme": {sys.argv[1]: "16MiB"}})
engine.backward(engine(torch.ones(1, 64)).sum())
engine.step()
"""


def test_a_process_may_end_with_an_engine(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    assert (ended.returncode, ended.stderr) == (0, "")
    assert not list(tmp_path.iterdir())
