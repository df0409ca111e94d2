"""scripts/demo, under the Python of these tests: a few steps, what it prints, what it leaves."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import env
from infinity_engine.checkpoint import CheckpointDirectory
from infinity_engine.units import MiB, parse_bytes

SCRIPT = env.ROOT / "scripts" / "demo"


def leftovers() -> set[Path]:
    return set(env.BUILD.glob("demo*"))


AS_SCRIPT = """
import runpy, sys
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
TWO_RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


# CI runs the demo on one rank before the suite, with the layers that exceed its budget.
@pytest.mark.parametrize(
    ("launcher", "layers"),
    [
        pytest.param([], 8, id="one rank", marks=pytest.mark.slow),
        pytest.param(TWO_RANKS, 8, id="two, all layers", marks=pytest.mark.slow),
        pytest.param(TWO_RANKS, 2, id="two"),
    ],
)
def test_two_steps_train_and_end_with_the_report(launcher: list[str], layers: int) -> None:
    pytest.importorskip("torch", reason="the demo trains with torch")
    environ = {**os.environ, env.THIS_PYTHON: "1", "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    before = leftovers()

    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), "--steps", "2", "--layers", str(layers)],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    first, _, last, *_ = done.stdout.split("\nloss ")[-1].split()
    assert 0 < float(last) < float(first) < 10
    for said in (
        "where the bytes lived",
        "states",
        "nvme read",
        "update",
        "drive of this checkout",
        "peak memory",
    ):
        assert said in done.stdout
    assert ("on 2 ranks" in done.stdout) == bool(launcher)
    lines = done.stdout.splitlines()
    assert any(
        re.match(r"parameters, gradients and states: .* host budget: \d+MiB$", line)
        for line in lines
    )
    assert [line for line in lines if len(line) > 80] == []
    told = re.search(
        r"peak memory of the process: (.*), of which (.*) before training", done.stdout
    )
    assert told is not None
    peak, before_training = map(parse_bytes, told.groups())
    # Training takes 420 to 530 MiB with what torch imports by then; the bandwidth test would
    # add 512.
    assert peak - before_training < 768 * MiB
    last_step = lines[lines.index("the last step:") + 1 :]
    starts = (
        "step",
        "micro",
        "time",
        "wait",
        "nvme",
        "updates",
        "busy",
        "param",
        "found",
        "drive",
        "wear",
        "peak",
        " ",
    )
    assert [line for line in last_step if line.strip() and not line.startswith(starts)] == []
    assert leftovers() == before


def test_a_demo_that_was_killed_goes_on_and_ends_as_a_whole_one() -> None:
    pytest.importorskip("torch", reason="the demo trains with torch")
    from support.warm_programs import WarmProgram

    environ = {env.THIS_PYTHON: "1", "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    before = leftovers()

    # One layer: more take longer to build, train and save, and nothing here is about size.
    small = ["--layers", "1", "--steps", "3", "--save-every", "1"]

    def demo(*options: str) -> WarmProgram:
        return WarmProgram(AS_SCRIPT, SCRIPT, *small, *options, environment=environ)

    def loss_of(process: WarmProgram, *said: str) -> str:
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0
        assert [line for line in said if line not in out] == []
        return out.split("\nloss ")[-1].splitlines()[0]

    whole = loss_of(demo("--resume"), "no earlier demo has left a checkpoint: beginning anew")
    killed = demo()
    checkpoints = CheckpointDirectory(env.BUILD / "demo-checkpoints")
    while checkpoints.latest() is None and Path(f"/proc/{killed.pid}").exists():
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    found = loss_of(demo("--resume"), "going on after step ")

    assert killed.returncode == -signal.SIGKILL
    assert found == whole
    assert leftovers() == before


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ("0", "--steps must be at least 1, got 0"),
        ("-3", "at least 1, got -3"),
        ("many", "invalid int value: 'many'"),
    ],
)
def test_a_number_of_steps_that_makes_no_sense_is_told_before_anything_is_made(
    steps: str, said: str
) -> None:
    environ = {name: value for name, value in os.environ.items() if name != env.THIS_PYTHON}

    done = subprocess.run(
        [sys.executable, str(SCRIPT), f"--steps={steps}"],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
