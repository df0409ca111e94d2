"""Saves beside training: what is saved is one step, whatever the updates do meanwhile."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import infinity_engine
from deepnvme import Pool
from infinity_engine.checkpoint import CheckpointDirectory, CheckpointReader
from infinity_engine.engine.checkpoints import saving
from infinity_engine.engine.checkpoints.checkpointing import CheckpointMemory
from infinity_engine.engine.checkpoints.saving import Saves, SaveState, _Save
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import TransferError
from infinity_engine.lanes.meter import Wait
from infinity_engine.plan import Tier
from infinity_engine.storage import SwapFile
from infinity_engine.update.captured import CapturedStates, PieceSink, RunInMemory, RunOnDrives
from support.engine_bits import bits_of, differing
from support.nvme_training import opened, train
from support.saved_engines import PLACES, engine_at, one_step, small, steps
from support.small_models import Task
from support.warm_programs import WITH_SUPPORT, run_warm

pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let saves go on beside training with memory for copies, which these runs do not make.

    The runs on drives have the least budget with which there is something on drives. Their saves
    would be waited for. Rooms are smaller than a subgroup's states.
    """
    monkeypatch.setattr(_Save, "has_lent_memory", False)
    monkeypatch.setattr(CheckpointMemory, "rooms", lambda _: (2, 8192))


@contextmanager
def slow_writer(
    monkeypatch: pytest.MonkeyPatch, pieces: int = 0, *, in_memory: bool = True
) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Let the thread of a save stop after so many pieces, and say so, until it is let go on.

    Pieces on drives alone count where those `in_memory` do not.
    """
    stopped, go_on = threading.Event(), threading.Event()
    handed = iter(range(1 << 30))

    def stopping(hand_out: Any) -> Any:
        def stops(self: Any, sink: PieceSink, rooms: Sequence[memoryview]) -> None:
            if next(handed) == pieces:
                stopped.set()
                assert go_on.wait(60)
            hand_out(self, sink, rooms)

        return stops

    with monkeypatch.context() as patch:
        if in_memory:
            patch.setattr(RunInMemory, "hand_out", stopping(RunInMemory.hand_out))
        patch.setattr(RunOnDrives, "hand_out", stopping(RunOnDrives.hand_out))
        try:
            yield stopped, go_on
        finally:
            go_on.set()


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_save_beside_training_has_the_content_of_one_step(
    tmp_path: Path, precision: str, name: str
) -> None:
    with engine_at(PLACES[name], tmp_path, precision=precision) as (engine, run):
        steps(engine, run, 0, 2)
        before = bits_of(engine)
        captured = engine._parts.states.capture()
        assert bool(captured.runs_on_drives()) == PLACES[name].drives
        tag = engine.save(tmp_path / "saved", wait=False)
        losses = steps(engine, run, 2, 3)
        ended = bits_of(engine)
        engine.close()
        assert engine.last_save().state is SaveState.COMMITTED
    with engine_at(PLACES["host"], tmp_path, precision=precision) as (engine, run):
        assert engine.load(tmp_path / "saved").tag == tag
        assert differing(before, bits_of(engine)) == []
        assert steps(engine, run, 2, 3) == losses
        assert differing(ended, bits_of(engine)) == []


def lets_writer_go_on(
    patch: pytest.MonkeyPatch, kind: type, name: str, go_on: threading.Event
) -> None:
    """Let a method that waits for the writer let it go on first."""
    wait = getattr(kind, name)

    def waits(*arguments: Any) -> Any:
        go_on.set()
        return wait(*arguments)

    patch.setattr(kind, name, waits)


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("steps_after", [0, 1])
@pytest.mark.parametrize("name", ["host", "drives"])
def test_sigterm_beside_a_save_lets_it_end_and_saves_what_is_newer(
    tmp_path: Path, name: str, steps_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_at(PLACES[name], tmp_path) as (engine, run):
        steps(engine, run, 0, 2)
        with slow_writer(monkeypatch) as (stopped, go_on):
            lets_writer_go_on(monkeypatch, CapturedStates, "wait_for", go_on)
            lets_writer_go_on(monkeypatch, CapturedStates, "wait_for_place", go_on)
            lets_writer_go_on(monkeypatch, Saves, "finish_before_last", go_on)
            assert engine.autosave(tmp_path / "saved", every=2) == "step-00000002"
            assert stopped.wait(60)
            os.kill(os.getpid(), signal.SIGTERM)
            assert engine.last_save().state is SaveState.WRITING
            steps(engine, run, 2, steps_after)
            expected = bits_of(engine)
            with pytest.raises(SystemExit):
                engine.autosave(tmp_path / "saved", every=2)
    tags = ["step-00000002", "step-00000003"][: 1 + steps_after]
    assert CheckpointDirectory(tmp_path / "saved").tags() == tags
    with engine_at(PLACES[name], tmp_path) as (engine, run):
        assert engine.load(tmp_path / "saved").tag == tags[-1]
        assert differing(expected, bits_of(engine)) == []


def notes_waits(
    patch: pytest.MonkeyPatch, name: str, waited: list[object], go_on: threading.Event
) -> None:
    """Let a method of captured states note that it waits, and let the writer go on first."""
    wait = getattr(CapturedStates, name)

    def noting(self: CapturedStates, what: object) -> None:
        waited.append(what)
        go_on.set()
        wait(self, what)

    patch.setattr(CapturedStates, name, noting)


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("name", ["host", "interleaved device", "drives", "drives, early updates"])
def test_an_update_waits_for_what_is_not_written_yet(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Drives that have no more than they need.
    monkeypatch.setattr(SwapFile, "have_spare", lambda *_, **__: None)
    with engine_at(PLACES[name], tmp_path) as (engine, run):
        steps(engine, run, 0, 2)
        before = bits_of(engine)
        with slow_writer(monkeypatch, pieces=2) as (stopped, go_on):
            engine.save(tmp_path / "saved", wait=False)
            assert stopped.wait(60)
            assert engine.last_save().state is SaveState.WRITING
            waited: list[object] = []
            for method in ("wait_for", "wait_for_place"):
                notes_waits(monkeypatch, method, waited, go_on)
            # An early update writes to a place of its own; the next one of that subgroup waits.
            steps(engine, run, 2, 2 if "early" in name else 1)
            engine.state_dict()  # ends the update
            assert waited
        if name == "host":  # elsewhere time is computed, or the update goes on after its step
            assert engine.report().waits[Wait.CHECKPOINT] > 0
            assert "wait for checkpoint" in str(engine.report())
        engine.save(tmp_path / "later")
    with engine_at(PLACES["host"], tmp_path) as (engine, _):
        engine.load(tmp_path / "saved")
        assert differing(before, bits_of(engine)) == []


def held_of_drives(engine: Engine) -> int:
    return sum(usage.held for usage in engine.usage() if usage.tier is Tier.NVME)


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("name", ["drives", "drives, early updates", "drives and device"])
def test_updates_of_states_on_drives_do_not_wait_for_a_save(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_at(PLACES[name], tmp_path) as (engine, run):
        losses = steps(engine, run, 0, 6)
        engine.state_dict()  # ends the update
        ended = bits_of(engine)
    with engine_at(PLACES[name], tmp_path) as (engine, run):
        assert steps(engine, run, 0, 2) == losses[:2]
        before, held = bits_of(engine), held_of_drives(engine)
        with slow_writer(monkeypatch, pieces=1, in_memory=False) as (stopped, _):
            engine.save(tmp_path / "saved", wait=False)
            assert stopped.wait(60)
            # The writer stands still. These steps end all the same.
            assert steps(engine, run, 2, 2) == losses[2:4]
            engine.state_dict()
            assert engine.last_save().state is SaveState.WRITING
            assert held_of_drives(engine) > held
        # A second save reads the states where they are now, while updates write them home again.
        tag = engine.save(tmp_path / "later", wait=False)
        assert steps(engine, run, 4, 2) == losses[4:]
        engine.state_dict()
        assert differing(ended, bits_of(engine)) == []
        engine.save(tmp_path / "last")
        steps(engine, run, 6, 2)
        engine.state_dict()
        assert held_of_drives(engine) > held  # kept for the next save
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
        engine.save(tmp_path / "full")  # which may need it
        assert held_of_drives(engine) == held
    with engine_at(PLACES["host"], tmp_path) as (engine, run):
        engine.load(tmp_path / "saved")
        assert differing(before, bits_of(engine)) == []
        assert engine.load(tmp_path / "later").tag == tag
        assert steps(engine, run, 4, 2) == losses[4:]
        engine.load(tmp_path / "last")
        assert differing(ended, bits_of(engine)) == []


@pytest.mark.usefixtures("beside")
def test_a_save_leaves_its_drive_more_than_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    monkeypatch.setattr(SwapFile, "have_spare", lambda *_, leave, **__: left.append(leave))
    with engine_at(PLACES["drives"], tmp_path) as (engine, _):
        engine.save(tmp_path / "saved", wait=False)
    files = [file for file in (tmp_path / "saved").rglob("*") if file.is_file()]
    assert left[0] > sum(512 * file.stat().st_blocks for file in files)


@pytest.mark.usefixtures("beside")
def test_activations_have_as_much_of_the_drives_as_without_saves(tmp_path: Path) -> None:
    case = replace(PLACES["drives"].case, steps=1)
    settings = {"activations": {"at": "nvme", "resident_bytes": 1024, "small_bytes": 0}}

    def one_step_with_many_graphs(engine: Engine, task: Task, step: int) -> list[float]:
        graphs = [engine(task.batch(seed)) for seed in range(4)]
        assert graphs
        return train(engine, task, case, first=step)

    with opened(case, None, tmp_path, **settings) as (engine, task):
        planned = held_of_drives(engine)
        losses = [one_step_with_many_graphs(engine, task, step) for step in range(2)]
        needed = held_of_drives(engine)
    assert needed > planned
    # How much it is differs with how fast the drive is.
    limit = needed + (64 << 10)
    with opened(replace(case, nvme=limit), None, tmp_path, **settings) as (engine, task):
        # It might take all that the budget has before activations ask for it.
        engine.save(tmp_path / "saved", wait=False)
        assert engine._saves.in_flight.save is not None
        engine._saves.in_flight.save.join()
        for step in range(2):
            assert one_step_with_many_graphs(engine, task, step) == losses[step]
            engine.save(tmp_path / "saved", wait=False)


def test_what_training_waited_is_in_the_report_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, engine = small()
    with engine:
        assert engine.last_save().state is SaveState.NONE
        one_step(engine)
        with slow_writer(monkeypatch) as (stopped, go_on):
            tag = engine.save(tmp_path, wait=False)
            assert stopped.wait(60)
            threading.Timer(0.2, go_on.set).start()
            one_step(engine)
        engine.save(tmp_path, "another")
        report = engine.last_save()
        assert (report.tag, report.step, report.state) == ("another", 2, SaveState.COMMITTED)
        assert report.nbytes == sum(
            path.stat().st_size for path in (tmp_path / "another").glob("*.safetensors")
        )
        assert 0 < report.stall_seconds <= report.seconds + 1
        assert CheckpointDirectory(tmp_path).tags() == [tag, "another"]


def test_a_save_with_nothing_to_write_at_once_takes_no_memory_in_its_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[threading.Thread] = []

    def noted(nbytes: int) -> Pool:
        made.append(threading.current_thread())
        return Pool(nbytes)

    monkeypatch.setattr(saving, "Pool", noted)
    _, _, engine = small()
    with engine:
        engine.save(tmp_path, wait=False)
    assert made
    assert threading.current_thread() not in made


def test_a_save_is_waited_for_by_the_next_one_by_load_and_by_close(tmp_path: Path) -> None:
    _, _, engine = small()
    with engine:
        one_step(engine)
        first = engine.save(tmp_path, wait=False)
        second = engine.save(tmp_path, wait=False)
        assert (first, second) == ("step-00000001", "step-00000001.2")
        assert engine.load(tmp_path).tag == second
        one_step(engine)
        engine.save(tmp_path, wait=False, keep=2)
    assert CheckpointDirectory(tmp_path).tags() == [second, "step-00000002"]
    assert engine.last_save().state is SaveState.COMMITTED


def test_parameters_that_the_user_changes_wait_for_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, engine = small()
    with engine:
        one_step(engine)
        before = engine.state_dict()
        with slow_writer(monkeypatch) as (stopped, go_on):
            engine.save(tmp_path, wait=False)
            assert stopped.wait(60)
            threading.Timer(0.1, go_on.set).start()
            with engine.gathered(model.parameters(), modify=True), torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
        one_step(engine)
        engine.load(tmp_path)
        assert all(torch.equal(before[name], value) for name, value in engine.state_dict().items())


def many_steps(engine: Engine) -> None:
    for _ in range(1000):
        one_step(engine)


def test_frozen_parameters_are_saved_beside_training_and_wait_for_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    frozen, trained = torch.nn.Linear(8, 16).requires_grad_(False), torch.nn.Linear(16, 4)
    before = frozen.weight.detach().clone()
    with infinity_engine.initialize(
        torch.nn.Sequential(frozen, trained),
        torch.optim.AdamW(trained.parameters()),
        budget={"host": "64MiB"},
        accelerator="cpu",
    ) as engine:
        one_step(engine)
        stopped, go_on = threading.Event(), threading.Event()
        hand_out = CapturedStates.hand_out

        def stops(self: CapturedStates, sink: PieceSink, rooms: Sequence[memoryview]) -> None:
            hand_out(self, sink, rooms)
            stopped.set()
            assert go_on.wait(60)

        monkeypatch.setattr(CapturedStates, "hand_out", stops)
        engine.save(tmp_path, wait=False)
        assert stopped.wait(60)
        threading.Timer(0.1, go_on.set).start()
        with engine.gathered(frozen.weight, modify=True), torch.no_grad():
            frozen.weight.zero_()
        engine.load(tmp_path)
        assert torch.equal(engine.state_dict()["0.weight"], before)


class Failing:
    """Lets the thread of a save fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(RunInMemory, "hand_out", fails)


def test_an_error_in_the_background_is_raised_by_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, engine = small()
    with engine:
        one_step(engine)
        kept = engine.save(tmp_path)
        with monkeypatch.context() as patch:
            Failing(patch)
            engine.save(tmp_path, "broken", wait=False)
            with pytest.raises(TransferError, match="No space left"):
                many_steps(engine)
        one_step(engine)  # it was raised once
        assert engine.last_save().state is SaveState.FAILED
        assert "No space left" in engine.last_save().error
        assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", kept]
        engine.load(tmp_path)
        engine.save(tmp_path, "whole")


def test_an_error_in_the_background_is_a_warning_where_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, engine = small()
    with engine:
        one_step(engine)
        with monkeypatch.context() as patch:
            Failing(patch)
            engine.save(tmp_path, "broken", wait=False, on_error="warn")
            with pytest.warns(RuntimeWarning, match=r"broken failed: .*No space left"):
                engine.close()


def test_an_error_in_the_background_is_raised_by_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, engine = small()
    one_step(engine)
    Failing(monkeypatch)
    engine.save(tmp_path, "broken", wait=False)
    with pytest.raises(TransferError, match="No space left"):
        engine.close()
    engine.close()
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_is_closed_for_an_error_still_ends_its_save(tmp_path: Path) -> None:
    _, _, engine = small()
    one_step(engine)
    tag = engine.save(tmp_path, wait=False)
    engine.__exit__(KeyError, KeyError("of the loop's own"), None)
    assert CheckpointDirectory(tmp_path).latest() == tag


@pytest.mark.filterwarnings("ignore:An engine for a Sequential was dropped:ResourceWarning")
def test_an_engine_that_the_program_drops_still_ends_its_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, engine = small()
    one_step(engine)
    with slow_writer(monkeypatch) as (stopped, go_on):
        engine.save(tmp_path, "mine", wait=False)
        assert stopped.wait(60)
        ending = engine._ending
        threading.Timer(0.3, go_on.set).start()
        del engine
        gc.collect()
        ending.close(None, restore=False)
    assert CheckpointDirectory(tmp_path).latest() == "mine"


def test_another_program_leaves_a_save_under_way_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, engine = small()
    with engine:
        one_step(engine)
        with slow_writer(monkeypatch) as (stopped, go_on):
            tag = engine.save(tmp_path, wait=False)
            assert stopped.wait(60)
            other = CheckpointDirectory(tmp_path)
            assert other.begin_step(1) == f"{tag}.2"  # removes what killed runs left
            go_on.set()
        one_step(engine)
        engine.save(tmp_path, "next")
        other.abandon(f"{tag}.2")
    assert CheckpointDirectory(tmp_path).tags() == [tag, "next"]


FORKS = """
import gc, os, signal, sys, threading
from pathlib import Path
from infinity_engine.checkpoint import CheckpointDirectory
from infinity_engine.update.captured import RunInMemory
from support.saved_engines import one_step, small

path, ending = Path(sys.argv[1]), sys.argv[2]
_, _, engine = small()
one_step(engine)
stopped, go_on = threading.Event(), threading.Event()
hand_out = RunInMemory.hand_out

def stops(self, take, rooms):
    stopped.set()
    assert go_on.wait(600)
    hand_out(self, take, rooms)

RunInMemory.hand_out = stops
engine.save(path, "mine", wait=False)
assert stopped.wait(600)
child = os.fork()
if not child:
    signal.alarm(120)  # it must not wait for what the parent's threads would do
    if ending == "exits":
        sys.exit(0)
    if ending == "exits a block":
        with engine:
            sys.exit(0)
    if ending == "uses":
        for call in (lambda: engine.save(path), lambda: engine.load(path), engine.close):
            try:
                call()
            except RuntimeError as error:
                assert "was forked" in str(error)
    elif ending == "closes":
        engine.close()
    del engine
    gc.collect()
    os._exit(0)  # as workers of data loaders end
assert os.waitpid(child, 0)[1] == 0
assert CheckpointDirectory(path).free_tag("mine") == "mine.2"  # it is still locked
go_on.set()
one_step(engine)
engine.save(path, "next")
engine.close()
assert CheckpointDirectory(path).tags() == ["mine", "next"]
"""


@pytest.mark.parametrize("ending", ["leaves", "closes", "uses", "exits", "exits a block"])
def test_a_process_forked_in_a_save_leaves_it_alone(tmp_path: Path, ending: str) -> None:
    done = run_warm(
        FORKS, tmp_path, ending, folder=tmp_path, environment=WITH_SUPPORT, timeout_s=600
    )
    assert done.returncode == 0, done.stderr
    with CheckpointReader(CheckpointDirectory(tmp_path).resolve("mine")) as reader:
        reader.check_slices()
        assert list(reader.verify()) == []


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("name", ["host", "drives", "drives, early updates", "drives and device"])
def test_saves_beside_training_stay_within_all_budgets(tmp_path: Path, name: str) -> None:
    with engine_at(PLACES[name], tmp_path) as (engine, run):
        for first in range(4):
            steps(engine, run, first, 1)
            engine.save(tmp_path / "saved", wait=False, keep=1)
        engine.save(tmp_path / "saved", wait=False, keep=1)
        steps(engine, run, 4, 1)
        for usage in engine.usage():
            assert usage.peak_reserved <= usage.limit


def test_a_save_without_free_memory_is_waited_for(tmp_path: Path) -> None:
    with engine_at(PLACES["drives"], tmp_path) as (engine, run):
        steps(engine, run, 0, 1)
        engine.save(tmp_path / "saved", wait=False)
        assert engine.last_save().state is SaveState.COMMITTED
        for usage in engine.usage():
            assert usage.peak_reserved <= usage.limit


def test_batch_statistics_are_those_of_the_saved_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with engine_at(PLACES["host"], tmp_path, model="conv net") as (engine, run):
        steps(engine, run, 0, 2)
        before = engine.state_dict()
        engine.save(tmp_path / "saved", wait=False)
        steps(engine, run, 2, 2)
        engine.load(tmp_path / "saved")
        assert all(torch.equal(before[name], value) for name, value in engine.state_dict().items())


def test_what_errors_may_become_is_checked(tmp_path: Path) -> None:
    _, _, engine = small()
    with engine, pytest.raises(ValueError, match=r"on_error.*'raise'.*'warn'.*got 'ignore'"):
        engine.save(tmp_path, on_error="ignore")
