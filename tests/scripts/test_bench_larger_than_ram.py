"""What scripts/bench/larger_than_ram makes of trainings that end one way or the other.

DeepSpeed stays out.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rival_step_host import PHASES

import bench
import env
from memory_group import GroupUnavailableError
from support.scripts import load_script
from support.warm_trainings import train_warm
from trained_apart import (
    Ending,
    Job,
    Ran,
    Result,
    Step,
    deepspeed_config,
    parameters_of,
    train_apart,
    words_of,
)

MIB = 1 << 20
IN_MEMORY = {"strategy": "host_only", "precision": "bf16"}


RAM = load_script("bench/larger_than_ram")


def a_step(loss: float, seconds: float = 0.5) -> Step:
    return Step(loss, dict.fromkeys(PHASES, seconds))


RESULT = Result(
    parameters=100,
    baseline_bytes=300_000_000,
    computing_bytes=10_000_000,
    peak_bytes=340_000_000,
    read_bytes=0,
    written_bytes=0,
    tiers={"HOST": (30_000_000, 40_000_000)},
    digests={"weight": "aa", "bias": "bb"},
)
TRAINED = Ran(Ending.TRAINED, "", [a_step(5.0), a_step(4.0)], RESULT, 400_000_000)
KILLED = Ran(Ending.OUT_OF_MEMORY, "in update 1", [], None, 400_000_000)
FAILED = Ran(Ending.FAILED, "ConfigError: no such strategy", [], None, None)


# --- a training in a process of its own -----------------------------------------------------------


def a_job(folder: Path) -> Job:
    text = folder / "text"
    text.write_bytes(bytes(range(256)) * 4)
    return Job(
        "ours", 64, 1, 16, 2, 1, str(text), str(folder / "nvme"), IN_MEMORY, wants_digests=True
    )


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return a_job(tmp_path)


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Ran]:
    def run(job: Job, python: Path = Path(sys.executable), **options: Any) -> Ran:
        return train_apart(
            python, os.environ, job, **{"log": tmp_path / "its.log", "within_s": 120.0, **options}
        )

    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """Trainings of the systems that the project's own environment has."""
    pytest.importorskip("torch", reason="trains")
    folder = tmp_path_factory.mktemp("trained")
    job = a_job(folder)
    jobs = {
        "one": job,
        "another": job,
        "shorter": replace(job, steps=1),
        "plain": replace(job, system="plain", steps=1, settings={}, wants_digests=False),
    }
    python, log = Path(sys.executable), folder / "its.log"
    # The first is a process as the bench starts it; the others only have to train.
    return {
        name: (train_apart if name == "one" else train_warm)(
            python, os.environ, each, log=log, within_s=120.0
        )
        for name, each in jobs.items()
    }


def test_the_same_training_ends_with_the_same_losses_and_digests(trained: dict[str, Ran]) -> None:
    assert [trained[name].words for name in ("one", "another")] == ["", ""]
    assert RAM.differences(trained["one"], trained["another"], 2) == {"losses": 0, "parameters": 0}


def test_one_more_step_changes_losses_and_every_digest(trained: dict[str, Ran]) -> None:
    assert trained["shorter"].steps[0].loss == trained["one"].steps[0].loss
    assert RAM.differences(trained["shorter"], trained["one"], 2) == {"losses": 1, "parameters": 16}


def test_a_training_tells_its_size_its_memory_and_what_each_tier_held(
    trained: dict[str, Ran],
) -> None:
    result = trained["one"].result

    assert result is not None
    assert result.parameters == parameters_of(64, 1, 16)
    assert result.peak_bytes > result.baseline_bytes
    assert result.computing_bytes >= 0
    assert result.tiers["HOST"][0] >= 14 * result.parameters


def test_plain_torch_trains_on_the_same_batches(trained: dict[str, Ran]) -> None:
    assert trained["plain"].words == ""
    assert trained["plain"].steps[0].loss == pytest.approx(trained["one"].steps[0].loss, rel=1e-2)


def test_settings_that_the_engine_refuses_are_a_failure_in_its_words(
    job: Job, tmp_path: Path
) -> None:
    pytest.importorskip("torch", reason="trains")
    refused = replace(job, settings={"strategy": "nowhere"})

    ran = train_warm(
        Path(sys.executable), os.environ, refused, log=tmp_path / "its.log", within_s=120.0
    )

    assert ran.ending is Ending.FAILED
    assert "ConfigError" in ran.words
    assert "nowhere" in ran.words


def test_a_failure_names_what_it_began_with_and_what_it_ended_with() -> None:
    closing = RuntimeError("cannot be closed")
    closing.__context__ = ValueError("too\nlarge")

    assert words_of(closing) == "ValueError: too large, then RuntimeError: cannot be closed"
    assert words_of(ValueError("alone")) == "ValueError: alone"


def program(folder: Path, source: str) -> Path:
    """Return a Python that is a shell script."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{source}\n")
    python.chmod(0o755)
    return python


def test_a_training_that_the_kernel_kills_is_a_result_that_says_what_it_was_at(
    job: Job, train: Callable[..., Ran], tmp_path: Path
) -> None:
    eats = f"""exec {sys.executable} -c '
print("{{\\"step\\": {{\\"loss\\": 5.0, \\"seconds\\": {{}}}}}}")
print("{{\\"at\\": \\"in update 2\\"}}", flush=True)
b"x" * (1 << 28)'"""

    try:
        ran = train(job, program(tmp_path, eats), limit_bytes=64 * MIB)
    except GroupUnavailableError as reason:
        pytest.skip(str(reason))

    assert (ran.ending, ran.words, ran.steps) == (
        Ending.OUT_OF_MEMORY,
        "in update 2",
        [Step(5.0, {})],
    )


def test_a_training_that_dies_otherwise_has_failed_with_its_last_words(
    job: Job, train: Callable[..., Ran], tmp_path: Path
) -> None:
    ran = train(
        job,
        program(tmp_path, """echo '{"at": "starting over"}'; echo a bus error >&2; kill -BUS $$"""),
    )

    assert ran.ending is Ending.FAILED
    assert "status -7 while it was starting over; its last words: a bus error (its.log" in ran.words


def test_half_a_line_of_one_that_was_killed_is_no_event(
    job: Job, train: Callable[..., Ran], tmp_path: Path
) -> None:
    ran = train(
        job, program(tmp_path, """echo '{"at": "there"}'; printf '{"at": "he'; kill -KILL $$""")
    )

    assert "while it was there" in ran.words


def test_a_training_that_takes_too_long_is_ended_and_has_failed(
    job: Job, train: Callable[..., Ran], tmp_path: Path
) -> None:
    ran = train(job, program(tmp_path, "exec sleep 600"), within_s=0.2)

    assert ran.ending is Ending.FAILED
    assert "status -9" in ran.words


# --- what is made of them -------------------------------------------------------------------------


def test_losses_and_parameters_that_are_missing_differ() -> None:
    assert RAM.differences(TRAINED, KILLED, 2) == {"losses": 2, "parameters": 2}


def test_a_parameter_with_another_digest_differs() -> None:
    other = replace(TRAINED, result=replace(RESULT, digests={"weight": "aa", "bias": "cc"}))

    assert RAM.differences(TRAINED, other, 2) == {"losses": 0, "parameters": 1}


def test_nothing_is_compared_with_a_training_that_failed() -> None:
    with pytest.raises(bench.UnavailableError, match="no such strategy"):
        RAM.differences(TRAINED, FAILED, 2)


class Played:
    """Stands for the place of trainings: plays what is to come of them, by system and whether there
    is a limit.
    """

    def __init__(self, endings: Callable[[Job, bool], Ran]) -> None:
        self._endings = endings
        self.runs = 0

    def job(self, name: str, width: int, depth: int, steps: int) -> Job:
        return Job(RAM.SYSTEM_OF[name], width, depth, 256, steps, 1, "", "/nvme")

    def run(self, job: Job, _log: str, *, within_s: float, limit_bytes: int | None) -> Ran:
        self.runs += 1
        return self._endings(job, limit_bytes is not None)


def figures(endings: Callable[[Job, bool], Ran], *flags: str) -> dict[str, bench.Figure]:
    """Run the bench with what is played."""
    pytest.importorskip("torch", reason="counts parameters")
    run = bench.Bench("larger_than_ram", quick=True, flags=frozenset(flags))
    RAM.define(run, Played(endings))
    return {figure.name: figure for figure in run.run(1)}


def as_hoped(job: Job, limited: bool) -> Ran:
    return KILLED if limited and job.system != "ours" else TRAINED


def test_every_target_holds_where_ours_trains_alike_and_the_others_are_killed() -> None:
    told = figures(as_hoped)

    assert len(told) == 10
    assert all(figure.holds for figure in told.values())


def test_each_training_happens_once() -> None:
    pytest.importorskip("torch", reason="counts parameters")
    run, played = bench.Bench("larger_than_ram", quick=False), Played(as_hoped)
    RAM.define(run, played)

    run.run(1)

    assert played.runs == 11  # with and without a limit: ours, plain torch, DeepSpeed; five sizes


def test_a_rival_that_trains_within_the_limit_is_said_to() -> None:
    told = figures(
        lambda job, limited: TRAINED if job.system == "deepspeed" else as_hoped(job, limited)
    )

    assert told["DeepSpeed: killed by the memory limit"].value == 0
    assert not told["DeepSpeed: killed by the memory limit"].holds
    assert told["plain torch: killed by the memory limit"].holds


def test_a_rival_that_does_not_train_without_a_limit_either_is_not_said_to_be_killed_by_it() -> (
    None
):
    told = figures(
        lambda job, limited: (
            FAILED if job.system == "deepspeed" and not limited else as_hoped(job, limited)
        )
    )

    figure = told["DeepSpeed: killed by the memory limit"]
    assert figure.value is None
    assert "does not train without a limit either: ConfigError" in str(figure.reason)


def test_ours_that_is_killed_meets_nothing_that_is_said_of_the_limit() -> None:
    told = figures(lambda job, limited: KILLED if limited else TRAINED)

    assert told["ours: losses unlike those without a limit"].value == 2
    assert "killed by the memory limit: in update 1" in str(
        told["ours: steps within the limit"].reason
    )
    assert not any(figure.holds for name, figure in told.items() if name.startswith("ours"))


def test_memory_that_grows_with_the_model_does_not_hold() -> None:
    def growing(job: Job, limited: bool) -> Ran:
        grown = replace(RESULT, peak_bytes=RESULT.baseline_bytes + job.depth * 10_000_000)
        return (
            replace(TRAINED, result=grown)
            if job.system == "ours" and not limited
            else as_hoped(job, limited)
        )

    told = figures(growing)

    most_over_least = told["growth of memory with 1 to 16 times the parameters: most / least"]
    assert most_over_least.value == pytest.approx(17)
    assert not told[
        "growth of memory with 1 to 16 times the parameters: most / host budget and computing"
    ].holds


def test_memory_may_grow_by_the_budget_and_by_what_computing_takes() -> None:
    assert RAM.most_of_allowed(100 * RAM.MB, 110.0, 60.0, 10.0, 20.0) == pytest.approx(1.0)
    assert RAM.most_of_allowed(100 * RAM.MB, 60.0, 180.0, 10.0, 20.0) == pytest.approx(1.5)


def test_once_trains_one_model_and_nothing_else() -> None:
    told = figures(as_hoped, "once")

    assert list(told) == [
        "parameters",
        "bytes of the model's states",
        "steps",
        "growth of memory / host budget and computing",
        "memory by its own accounts / host budget",
        "loss of the last steps / of the first",
    ]
    assert all(figure.holds for figure in told.values())


def test_sizes_are_what_is_asked_for() -> None:
    pytest.importorskip("torch", reason="counts parameters")

    full, once = RAM.FULL, RAM.ONCE
    assert full.steps >= 20
    assert RAM.CONTEXT >= 256
    smallest, *_, largest = (
        parameters_of(full.growing_width, depth, 16) for depth in full.growing_depths
    )
    assert (len(full.growing_depths), largest / smallest >= 16) == (5, True)
    assert smallest * 12 > full.growing_budget
    assert parameters_of(once.width, once.depth, 256) >= 3e9
    assert parameters_of(once.width, once.depth, 256) * 14 >= 42e9
    assert once.host_budget == 12 * RAM.GIB


def test_settings_of_trainings_survive_json(job: Job) -> None:
    pytest.importorskip("torch", reason="counts parameters")
    settings = RAM.streamed(job, MIB, 1 << 20)

    assert json.loads(json.dumps(settings)) == settings


@pytest.mark.parametrize(
    ("dtype", "precision", "state_bytes"), [("bfloat16", "bf16", 14), ("float32", "fp32", 12)]
)
def test_all_systems_train_in_what_the_job_says(
    job: Job, dtype: str, precision: str, state_bytes: int
) -> None:
    pytest.importorskip("torch", reason="counts parameters")
    job = replace(job, dtype=dtype)

    assert RAM.streamed(job, MIB, 1 << 20)["precision"] == precision
    assert deepspeed_config(job)["bf16"] == {"enabled": precision == "bf16"}
    assert job.state_bytes == state_bytes


# --- where they happen ----------------------------------------------------------------------------


def test_a_training_that_the_drive_has_no_room_for_is_refused_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("torch", reason="counts parameters")
    monkeypatch.setattr(env, "BUILD", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
    with ExitStack() as until_end:
        place = RAM.Place(until_end)
        job = place.job("ours", 64, 1, 10)
        settings = RAM.streamed(job, MIB, 1 << 20)
        settings["budget"]["nvme"] = {job.folder: 49 * 10**9}

        with pytest.raises(
            bench.UnavailableError,
            match=r"it takes 49\.0 GB .*, where 1\.0 GB are free; make 48\.0 GB",
        ):
            place.run(replace(job, settings=settings), "its.log", within_s=1.0, limit_bytes=None)

        assert len(Path(job.text).read_bytes()) > 10_000
    assert list(tmp_path.iterdir()) == []
