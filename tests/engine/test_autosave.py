"""A run saves by itself when it is time, and when its process is told to stop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity_engine.checkpoint import CheckpointDirectory
from infinity_engine.engine.checkpoints.autosave import PREEMPTED_EXIT_CODE, Autosave, Due
from infinity_engine.engine.checkpoints.saving import SaveState
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import ConfigError
from infinity_engine.outcome import Outcome
from infinity_engine.ranks.together import OneRank
from infinity_engine.update.states import StateKeeper
from support.engine_bits import bits_of, differing
from support.saved_engines import PLACES, engine_at, one_step, small, steps
from support.warm_programs import WITH_SUPPORT, WarmProgram

PROGRAM = """
import sys
from pathlib import Path

import torch

import infinity_engine
from support.nvme_training import digest_of
from support.saved_engines import one_step, small

path, bits = Path(sys.argv[1]), Path(sys.argv[2])
_, optimizer, engine = small()
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
with engine:
    if (path / "latest").exists():
        engine.load(path, extra={"scheduler": scheduler})
    while engine.steps < 12:
        one_step(engine)
        scheduler.step()
        print(engine.steps, flush=True)
        if sys.argv[3:] and engine.steps == 5:
            sys.stdin.readline()  # until the signal was sent
        engine.autosave(path, every=1000, extra={"scheduler": scheduler})
    found = engine.state_dict()
    bits.write_text(f"{digest_of(found)} {scheduler.last_epoch}")
"""


def run_of(program: str, *arguments: object) -> WarmProgram:
    return WarmProgram(program, *arguments, environment=WITH_SUPPORT)


def test_a_run_that_is_told_to_stop_saves_and_ends_with_its_own_code(tmp_path: Path) -> None:
    path, bits, whole = tmp_path / "c", tmp_path / "bits", tmp_path / "whole"
    run = run_of(PROGRAM, path, bits, "wait")
    while run.stdout.readline() != "5\n":
        pass
    run.send_signal(signal.SIGTERM)
    run.stdin.write("\n")
    run.stdin.flush()
    assert run.communicate(timeout=300)[0] == ""
    assert run.returncode == PREEMPTED_EXIT_CODE == 75
    assert CheckpointDirectory(path).tags() == ["step-00000005"]
    assert not bits.exists()
    for arguments in ((path, bits), (tmp_path / "none", whole)):
        run = run_of(PROGRAM, *arguments)
        run.communicate(timeout=300)
        assert run.returncode == 0
    assert bits.read_text() == whole.read_text()


def test_steps_are_counted_from_the_beginning_of_the_run() -> None:
    due = Due(3, 7)
    found = []
    for step in range(7, 16):
        is_due = due.is_due(step)
        due.note(step, saved=is_due)
        found += [step] if is_due else []
    assert found == [9, 12, 15]


def test_a_schedule_goes_on_from_where_the_run_went_back_to() -> None:
    due = Due(2, 1)
    due.note(10, saved=True)
    found = []
    for step in (4, 5, 6):
        found += [step] if due.is_due(step) else []
        due.note(step, saved=False)
    assert found == [6]


@pytest.mark.parametrize("steps_before", [2, 5])
def test_a_run_that_went_back_saves_at_the_same_steps_again(
    tmp_path: Path, steps_before: int
) -> None:
    _, _, engine = small()
    with engine:
        one_step(engine)
        engine.save(tmp_path, "first")
        while engine.steps < steps_before:
            one_step(engine)
            engine.autosave(tmp_path / "run", every=2)
        engine.load(tmp_path, "first")
        tags = []
        for _ in range(3):
            one_step(engine)
            tags.append(engine.autosave(tmp_path / "run", every=2))
    assert [bool(tag) for tag in tags] == [True, False, True]


@pytest.mark.parametrize(("every", "seconds"), [("30s", 30), ("2 min", 120), ("0.5h", 1800)])
def test_a_time_is_counted_from_the_save_before(
    every: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("infinity_engine.engine.checkpoints.autosave.time.monotonic", lambda: now)
    due = Due(every, 1)
    found = []
    for step in range(1, 40):
        now += seconds / 10
        is_due = due.is_due(step)
        due.note(step, saved=is_due)
        found += [step] if is_due else []
    assert found in ([10, 20, 30], [10, 21, 31], [11, 21, 31], [10, 20, 31])


@contextmanager
def sigterm_in_backward(engine: Engine, _: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Send SIGTERM in each backward of the body; yield how often it was sent."""
    sent: list[int] = []

    def send(_: torch.Tensor) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        sent.append(1)

    def watch(_module: torch.nn.Module, _inputs: Any, loss: torch.Tensor) -> None:
        loss.register_hook(send)  # type: ignore[no-untyped-call]  # torch is

    hook = engine.module.register_forward_hook(watch)
    yield sent
    hook.remove()


@contextmanager
def sigterm_in_update(_: Engine, patch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Send SIGTERM in each op of the body's updates; yield how often it was sent."""
    sent: list[int] = []
    carry_out = StateKeeper.carry_out

    def sends(self: StateKeeper, *told: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        sent.append(1)
        return carry_out(self, *told)

    with patch.context() as within:
        within.setattr(StateKeeper, "carry_out", sends)
        yield sent


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("sigterm", [sigterm_in_backward, sigterm_in_update])
@pytest.mark.parametrize("name", ["host", "drives", "drives, early updates"])
def test_sigterm_within_a_step_saves_the_whole_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, sigterm: Any
) -> None:
    with engine_at(PLACES[name], tmp_path) as (engine, run):
        steps(engine, run, 0, 4)
        expected = bits_of(engine)
    with engine_at(PLACES[name], tmp_path) as (engine, run):
        steps(engine, run, 0, 1)
        engine.autosave(tmp_path / "c", every=100)
        with sigterm(engine, monkeypatch) as sent:
            steps(engine, run, 1, 1)
        assert sent
        with pytest.raises(SystemExit) as ended:
            engine.autosave(tmp_path / "c", every=100)
    assert ended.value.code == PREEMPTED_EXIT_CODE
    assert CheckpointDirectory(tmp_path / "c").tags() == ["step-00000002"]
    with engine_at(PLACES[name], tmp_path) as (engine, run):
        assert engine.resume(tmp_path / "c")
        steps(engine, run, 2, 2)
        assert differing(expected, bits_of(engine)) == []


@pytest.mark.parametrize("every", [0, -1, True, 1.5, "", "soon", "0min", "5 days", None])
def test_what_is_neither_a_number_of_steps_nor_a_time_is_refused(
    tmp_path: Path, every: Any
) -> None:
    _, _, engine = small()
    with engine:
        one_step(engine)
        with pytest.raises(ConfigError, match=r"every.*30min"):
            engine.autosave(tmp_path, every=every)


def test_a_run_saves_every_so_many_steps_and_keeps_the_newest(tmp_path: Path) -> None:
    _, _, engine = small()
    with engine:
        assert engine.autosave(tmp_path, every=2) is None  # before the first step
        tags = []
        for _ in range(7):
            one_step(engine)
            tags.append(engine.autosave(tmp_path, every=2, keep=2))
    expected = [f"step-{step:08}" if step % 2 == 0 else None for step in range(1, 8)]
    assert tags == expected
    assert CheckpointDirectory(tmp_path).tags() == ["step-00000004", "step-00000006"]


@pytest.mark.parametrize("name", ["drives", "drives, early updates", "drives and device"])
def test_a_run_whose_update_goes_on_in_the_forward_saves_too(tmp_path: Path, name: str) -> None:
    with engine_at(PLACES[name], tmp_path) as (engine, run):
        for step in range(4):
            steps(engine, run, step, 1)
            assert (engine.autosave(tmp_path / "c", every=2) is None) == (step % 2 == 0)
    assert CheckpointDirectory(tmp_path / "c").tags() == ["step-00000002", "step-00000004"]


def test_an_autosave_between_micro_batches_waits_for_the_step(tmp_path: Path) -> None:
    _, _, engine = small(accumulation_steps=2)
    with engine:
        engine.preempt()
        for _ in range(3):
            one_step(engine)
            if engine.steps == 1 and not engine._window.accumulation.count:
                break
            assert engine.autosave(tmp_path, every=1) is None
        with pytest.raises(SystemExit) as ended:
            engine.autosave(tmp_path, every=1)
    assert ended.value.code == PREEMPTED_EXIT_CODE
    assert CheckpointDirectory(tmp_path).tags() == ["step-00000001"]


def test_a_step_that_was_just_saved_is_not_saved_again_to_stop(tmp_path: Path) -> None:
    _, _, engine = small()
    with engine:
        one_step(engine)
        engine.autosave(tmp_path, every=1)
        engine.preempt()
        with pytest.raises(SystemExit):
            engine.autosave(tmp_path, every=1)
    assert CheckpointDirectory(tmp_path).tags() == ["step-00000001"]


def goes_back(engine: Engine, path: Path) -> None:
    engine.load(path, "step-00000001")
    one_step(engine)


def takes_other_moments(engine: Engine, _: Path) -> None:
    states = engine.optimizer_state_dict()
    for state in states["state"].values():
        state["exp_avg"].zero_()
    engine.load_optimizer_state_dict(states)


def writes_to_parameters(engine: Engine, _: Path) -> None:
    with engine.gathered(engine.module.parameters(), modify=True), torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.zero_()


@pytest.mark.parametrize("change", [goes_back, takes_other_moments, writes_to_parameters])
def test_a_run_that_has_changed_since_its_save_is_saved_again_to_stop(
    tmp_path: Path, change: Callable[[Engine, Path], None]
) -> None:
    _, _, engine = small()
    with engine:
        for _ in range(2):
            one_step(engine)
            engine.save(tmp_path)
        change(engine, tmp_path)
        expected = bits_of(engine)
        engine.preempt()
        with pytest.raises(SystemExit):
            engine.autosave(tmp_path, every=100)
    assert CheckpointDirectory(tmp_path).latest() == "step-00000002.2"
    _, _, engine = small()
    with engine:
        assert engine.resume(tmp_path)
        assert differing(expected, bits_of(engine)) == []


def fp16_step(engine: Engine, *, overflows: bool) -> Outcome:
    """Make a step; where it overflows, the loss is finite and its gradient is not."""
    output = engine(torch.ones(3, 8, dtype=torch.float16)).float()
    loss = output.pow(2).mean()
    engine.backward(loss + (output * 0).sum().pow(2).sqrt() if overflows else loss)
    return engine.step().outcome


def test_a_skipped_step_is_saved_to_stop_as_the_loss_scale_has_changed(tmp_path: Path) -> None:
    _, _, engine = small(precision="fp16")
    with engine:
        while fp16_step(engine, overflows=False) is Outcome.SKIPPED:
            pass
        engine.save(tmp_path)
        assert fp16_step(engine, overflows=True) is Outcome.SKIPPED
        engine.preempt()
        with pytest.raises(SystemExit):
            engine.autosave(tmp_path, every=100)
    assert CheckpointDirectory(tmp_path).latest() == "step-00000001.2"


def test_a_save_elsewhere_or_of_less_does_not_stand_for_the_last_one(tmp_path: Path) -> None:
    _, optimizer, engine = small()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    with engine:
        one_step(engine)
        engine.save(tmp_path / "run", "without-the-scheduler")
        engine.save(tmp_path / "best", extra={"scheduler": scheduler})
        engine.preempt()
        with pytest.raises(SystemExit):
            engine.autosave(tmp_path / "run", every=100, extra={"scheduler": scheduler})
    assert CheckpointDirectory(tmp_path / "run").latest() == "step-00000001"


def test_an_earlier_save_that_failed_does_not_prevent_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    _, _, engine = small()
    with engine:
        one_step(engine)
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointDirectory, "commit", fails)
            engine.save(tmp_path, "too-large", wait=False)
            while engine.last_save().state is SaveState.WRITING:
                time.sleep(0.01)
        engine.preempt()
        with pytest.warns(RuntimeWarning, match="too-large"), pytest.raises(SystemExit) as ended:
            engine.autosave(tmp_path, every=100)
    assert ended.value.code == PREEMPTED_EXIT_CODE
    assert CheckpointDirectory(tmp_path).tags() == ["step-00000001"]


def test_sigterm_does_what_it_did_before_once_the_engine_is_closed(tmp_path: Path) -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    _, _, engine = small()
    with engine:
        one_step(engine)
        engine.autosave(tmp_path, every=100)
        assert callable(signal.getsignal(signal.SIGTERM))
        one_step(engine)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit):
            engine.autosave(tmp_path, every=100)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def watching(folder: Path) -> Engine:
    """Return an engine that has called autosave."""
    _, _, engine = small()
    one_step(engine)
    engine.autosave(folder, every=100)
    return engine


def stops(engine: Engine, folder: Path) -> bool:
    """Tell whether the next autosave ends the process."""
    try:
        one_step(engine)
        engine.autosave(folder, every=100)
    except SystemExit as ended:
        return ended.code == PREEMPTED_EXIT_CODE
    return False


@pytest.mark.filterwarnings("ignore:An engine for a Sequential was dropped:ResourceWarning")
def test_an_engine_that_was_dropped_leaves_sigterm_to_the_next_one(tmp_path: Path) -> None:
    engine = watching(tmp_path / "dropped")
    del engine
    with watching(tmp_path / "next") as engine:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stops(engine, tmp_path / "next")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_stops_all_engines_of_a_process(tmp_path: Path) -> None:
    with watching(tmp_path / "first") as first, watching(tmp_path / "second") as second:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stops(first, tmp_path / "first")
        assert stops(second, tmp_path / "second")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_engine_still_stops_after_another_one_was_closed(tmp_path: Path) -> None:
    first, second = watching(tmp_path / "first"), watching(tmp_path / "second")
    first.close()
    os.kill(os.getpid(), signal.SIGTERM)
    assert stops(second, tmp_path / "second")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_ends_a_process_whose_engine_was_dropped(tmp_path: Path) -> None:
    program = """
import os, signal, sys, warnings
from support.saved_engines import one_step, small

warnings.simplefilter("ignore", ResourceWarning)
_, _, engine = small()
one_step(engine)
engine.autosave(sys.argv[1], every=100)
del engine
os.kill(os.getpid(), signal.SIGTERM)
"""
    run = run_of(program, tmp_path)
    run.communicate(timeout=300)
    assert run.returncode == -signal.SIGTERM


def test_sigterm_ends_a_process_that_was_forked_from_a_run(tmp_path: Path) -> None:
    with watching(tmp_path):
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_a_handler_of_the_program_is_left_in_place_and_can_preempt(tmp_path: Path) -> None:
    _, _, engine = small()
    before = signal.signal(signal.SIGTERM, lambda *_: engine.preempt())
    try:
        with engine:
            mine = signal.getsignal(signal.SIGTERM)
            one_step(engine)
            engine.autosave(tmp_path, every=100)
            assert signal.getsignal(signal.SIGTERM) is mine
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(SystemExit):
                engine.autosave(tmp_path, every=100)
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_autosave_that_fails_is_a_warning_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from infinity_engine.update.captured import RunInMemory

    def fails(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    _, _, engine = small()
    with engine:
        one_step(engine)
        with monkeypatch.context() as patch:
            patch.setattr(RunInMemory, "hand_out", fails)
            engine.autosave(tmp_path, every=1)
            deadline = time.monotonic() + 60
            while not engine.last_save().error and time.monotonic() < deadline:
                time.sleep(0.01)
            with pytest.warns(RuntimeWarning, match="Saving the checkpoint step-00000001 failed"):
                one_step(engine)
        assert engine.autosave(tmp_path, every=1) == "step-00000002"


def test_a_schedule_without_a_main_thread_watches_no_signal() -> None:
    import threading

    schedule = Autosave(OneRank(None))  # type: ignore[arg-type]  # it is asked for no gradient
    thread = threading.Thread(target=schedule.watch)
    thread.start()
    thread.join()
    assert not schedule.watches
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
