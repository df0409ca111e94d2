"""What scripts/bench/step_host compares, and how it hears of failures.

DeepSpeed and FSDP2 stay out.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import rival_step_host
from rival_step_host import PHASES, Answer, Job, Program, Training

import bench
from support.scripts import load_script

SHAPE = {"width": 64, "depth": 1, "context": 16, "threads": 1}
ANSWER = Answer([dict.fromkeys(PHASES, 0.5)], [2.0], {"peak": 16.0})


STEP_HOST = load_script("bench/step_host")


@pytest.fixture(scope="module")
def answers() -> dict[str, Answer]:
    """Three steps of the systems that the project's own environment has without a process group."""
    torch = pytest.importorskip("torch", reason="trains")
    threads = torch.get_num_threads()
    found = {}
    try:
        for system in ("ours", "plain"):
            with contextlib.closing(Training(Job(system, **SHAPE))) as training:
                found[system] = training.train(3)
        return found
    finally:
        torch.set_num_threads(threads)


def test_ours_and_plain_torch_train_alike(answers: dict[str, Answer]) -> None:
    assert answers["ours"].losses == answers["plain"].losses
    assert len(set(answers["ours"].losses)) == 3


def test_every_phase_of_every_step_is_timed(answers: dict[str, Answer]) -> None:
    for answer in answers.values():
        assert len(answer.seconds) == 3
        for seconds in answer.seconds:
            assert tuple(seconds) == PHASES
            assert min(seconds.values()) > 0


def test_memory_is_per_parameter_and_its_peak_is_the_most(answers: dict[str, Answer]) -> None:
    for answer in answers.values():
        memory = answer.bytes_per_parameter
        assert memory["peak"] >= memory["peak of initialization"]
    assert answers["ours"].bytes_per_parameter["by its own accounts"] >= 8  # both moments
    assert "by its own accounts" not in answers["plain"].bytes_per_parameter


# --- losses ---------------------------------------------------------------------------------------


def test_losses_within_the_tolerance_are_the_same_work() -> None:
    losses = STEP_HOST.Losses(1e-2)

    losses.add("ours", [5.0, 4.0])
    losses.add("DeepSpeed", [5.01, 4.01])


def test_a_loss_that_parts_from_another_systems_fails_and_names_both() -> None:
    losses = STEP_HOST.Losses(1e-2)
    losses.add("ours", [5.0])
    losses.add("DeepSpeed", [5.0, 4.0])

    with pytest.raises(
        RuntimeError, match=r"in step 2 the loss is 4\.5 with ours and 4\.0 with DeepSpeed"
    ):
        losses.add("ours", [4.5])


def test_a_loss_that_is_not_a_number_fails() -> None:
    losses = STEP_HOST.Losses(1e-2)
    losses.add("ours", [5.0])

    with pytest.raises(RuntimeError, match="loss is nan with DeepSpeed"):
        losses.add("DeepSpeed", [float("nan")])


# --- one system -----------------------------------------------------------------------------------


def test_a_system_is_warmed_up_and_then_measured_by_its_last_step() -> None:
    asked: list[int] = []

    def train(steps: int) -> Answer:
        asked.append(steps)
        return Answer(
            [dict.fromkeys(PHASES, 9.0), dict.fromkeys(PHASES, 0.5)], [2.0] * steps, {"peak": 16.0}
        )

    compared = STEP_HOST.Compared("ours", train, STEP_HOST.Losses(1e-2))

    assert [compared.step()["step"] for _ in range(3)] == [1.5, 1.5, 1.5]
    assert asked == [STEP_HOST.WARM_UP_STEPS, STEP_HOST.STEPS, STEP_HOST.STEPS]
    assert compared.memory() == {"peak": 16.0}


def test_a_rival_that_fails_has_neither_times_nor_memory_and_the_same_reason_for_both() -> None:
    def fails(_steps: int) -> Answer:
        raise RuntimeError("ValueError: no CPU")

    compared = STEP_HOST.Compared("FSDP2", STEP_HOST.excused(fails), STEP_HOST.Losses(1e-2))

    for measure in (compared.step, compared.memory):
        with pytest.raises(bench.UnavailableError, match="ValueError: no CPU"):
            measure()


# --- its program ----------------------------------------------------------------------------------


class FakeTraining:
    """Answers with the steps that it was asked for as the loss; fails at none."""

    def train(self, steps: int) -> Answer:
        """Answer."""
        if steps == 0:
            raise ValueError("no steps\nat all")
        return Answer([], [float(steps)], {})


def served(orders: str) -> list[dict[str, Any]]:
    """Serve the orders; return the answers."""
    answers = io.StringIO()
    rival_step_host.serve(FakeTraining, io.StringIO(orders), answers)  # type: ignore[arg-type]
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def test_each_order_gets_one_line_of_answer() -> None:
    assert [Answer(**answer) for answer in served("1\n2\n")] == [
        Answer([], [1.0], {}),
        Answer([], [2.0], {}),
    ]


def test_a_failure_is_the_last_answer() -> None:
    assert served("1\n0\n1\n") == [
        asdict(Answer([], [1.0], {})),
        {"failed": "ValueError: no steps at all"},
    ]


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Starts programs whose Python is a shell script, and ends them."""
    begun = []

    def start(source: str, limit_s: float = 60.0) -> Program:
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{source}\n")
        python.chmod(0o755)
        begun.append(
            Program(python, os.environ, Job("ours", **SHAPE), tmp_path / "its.log", limit_s)
        )
        return begun[-1]

    yield start
    for each in begun:
        each.close()


def test_a_program_answers_its_orders(program: Callable[..., Program]) -> None:
    started = program(f"while read steps; do echo '{json.dumps(asdict(ANSWER))}'; done")

    assert [started.train(1), started.train(1)] == [ANSWER, ANSWER]


def test_what_a_program_failed_with_is_an_error(program: Callable[..., Program]) -> None:
    started = program("""read steps; echo '{"failed": "ValueError: no CPU"}'""")

    with pytest.raises(RuntimeError, match=r"ValueError: no CPU \(its\.log has the rest\)"):
        started.train(1)


def test_a_program_that_dies_is_an_error_with_its_last_words(
    program: Callable[..., Program],
) -> None:
    started = program("read steps; echo out of memory >&2; kill -ABRT $$")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="status -6; its last words: out of memory"):
            started.train(1)


def test_a_program_that_hangs_is_killed_at_its_limit(program: Callable[..., Program]) -> None:
    with pytest.raises(RuntimeError, match="status -9"):
        program("exec sleep 600", limit_s=0.2).train(1)
