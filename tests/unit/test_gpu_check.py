"""scripts/gpu_check without a GPU: its driver, with a fake runner in place of pip, pytest and the
benches.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check"
TESTS_PASSED = (
    '<testsuites><testsuite><testcase name="a"/><testcase '
    'name="b"><skipped/></testcase></testsuite></testsuites>'
)
TESTS_SKIPPED = (
    '<testsuites><testsuite><testcase name="a"><skipped/></testcase></testsuite></testsuites>'
)
DOCUMENT = {
    "bench": "startup",
    "date": "2026-11-21T12:30:00+00:00",
    "machine": {"name": "Fake GPU, 4 cores"},
    "versions": {"python": "3.12.3"},
    "rounds": [{"ours": 0.5}],
    "figures": [
        {
            "name": "fast",
            "value": 0.5,
            "unit": "s",
            "target": "<= 1",
            "holds": True,
            "rounds": [0.5],
        },
        {
            "name": "small",
            "value": None,
            "unit": "B",
            "target": "<= 1",
            "holds": False,
            "rounds": [],
            "reason": "no",
        },
    ],
}


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module, working in a folder of its own."""
    module = load_script("gpu_check")
    for name, path in {"WORK": "work", "SITE": "work/site", "ELSEWHERE": "work/elsewhere"}.items():
        monkeypatch.setattr(module, name, tmp_path / path)
    monkeypatch.setattr(module, "BENCHES", (("startup", ("--quick",), 20.0, 120.0),))
    return module


@dataclass
class FakeRunner:
    """Stands for running commands: each step takes a minute and ends as told, status 0 where
    nothing is told.
    """

    check: Any
    endings: dict[str, int | None] = field(default_factory=dict)
    tests: str = TESTS_PASSED
    document: str = json.dumps(DOCUMENT)
    started: list[str] = field(default_factory=list)
    commands: list[Sequence[str]] = field(default_factory=list)
    environments: list[Mapping[str, str]] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)

    def __call__(
        self, command: Sequence[str], environ: Mapping[str, str], log: Path, limit_s: float
    ) -> int | None:
        step = log.stem
        self.started.append(step)
        self.commands.append(command)
        self.environments.append(environ)
        self.limits.append(limit_s)
        log.write_text(f"what {step} said\n")
        if step == "tests":
            (self.check.WORK / "tests.xml").write_text(self.tests)
        if step == "startup":
            (self.check.WORK / "startup.json").write_text(self.document)
        return self.endings.get(step, 0)

    def clock(self) -> float:
        return 60.0 * len(self.started)


def run(runner: FakeRunner, out: Path, minutes: float = 9) -> int:
    arguments = ["--out", str(out), "--minutes", str(minutes)]
    status: int = runner.check.main(arguments, runner, lambda: ["Fake GPU"], runner.clock)
    return status


def endings(out: Path) -> dict[str, str]:
    return {
        step["step"]: step["ended"]
        for step in json.loads((out / "report.json").read_text())["steps"]
    }


def test_all_steps_run_in_order_and_the_status_is_0(check: Any, tmp_path: Path) -> None:
    runner = FakeRunner(check)

    assert run(runner, tmp_path / "out") == 0
    assert runner.started == ["build", "import", "tests", "startup"]


def test_the_table_comes_last_and_ends_with_the_verdict(
    check: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(FakeRunner(check), tmp_path / "out")

    table = (tmp_path / "out" / "table.txt").read_text()
    assert capsys.readouterr().out.endswith(table)
    assert "1 passed, 1 skipped" in table
    assert "startup: small" in table
    assert "DOES NOT HOLD: no" in table
    assert table.endswith("passed: 4 steps\n")


def test_a_report_a_page_and_a_log_per_step_are_left(check: Any, tmp_path: Path) -> None:
    run(FakeRunner(check), tmp_path / "out")

    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "report.json",
        "table.txt",
        "startup_fake-gpu-4-cores_2026-11-21.md",
        "startup_fake-gpu-4-cores_2026-11-21.json",
        *(f"{step}.log" for step in ("build", "import", "tests", "startup")),
    }
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["gpus"] == ["Fake GPU"]
    assert report["benches"] == [DOCUMENT]


def test_the_build_asks_no_network_and_installs_into_its_own_folder(
    check: Any, tmp_path: Path
) -> None:
    runner = FakeRunner(check)
    (tmp_path / "work" / "site").mkdir(parents=True)
    (tmp_path / "work" / "site" / "stale.py").touch()

    run(runner, tmp_path / "out")

    build = list(runner.commands[0])
    assert {"--no-index", "--no-deps", "--no-build-isolation"} <= set(build)
    assert build[build.index("--target") + 1] == str(tmp_path / "work" / "site")
    assert not (tmp_path / "work" / "site" / "stale.py").exists()


def test_what_was_built_is_what_is_tested(check: Any, tmp_path: Path) -> None:
    runner = FakeRunner(check)

    run(runner, tmp_path / "out")

    assert {environ["PYTHONPATH"] for environ in runner.environments} == {
        str(tmp_path / "work" / "site")
    }
    assert {environ["INFINITY_THIS_PYTHON"] for environ in runner.environments} == {"1"}


def test_a_failed_test_run_fails_the_check_but_the_benches_still_run(
    check: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = FakeRunner(check, {"tests": 1})

    assert run(runner, tmp_path / "out") == 1
    assert endings(tmp_path / "out") == {
        "build": "passed",
        "import": "passed",
        "tests": "failed",
        "startup": "passed",
    }
    shown = capsys.readouterr().out
    assert "what tests said" in shown
    assert shown.endswith("FAILED: tests\n")


@pytest.mark.parametrize("broken", ["build", "import"])
def test_nothing_runs_after_a_failed_build_or_one_that_is_not_found(
    check: Any, broken: str, tmp_path: Path
) -> None:
    runner = FakeRunner(check, {broken: 1})

    assert run(runner, tmp_path / "out") == 1
    assert runner.started[-1] == broken
    assert endings(tmp_path / "out")["tests"] == "not started"
    assert f"{broken} failed" in (tmp_path / "out" / "table.txt").read_text()


def test_a_step_that_runs_out_of_time_fails_the_check(check: Any, tmp_path: Path) -> None:
    runner = FakeRunner(check, {"startup": None})

    assert run(runner, tmp_path / "out") == 1
    assert endings(tmp_path / "out")["startup"] == "timed out"


def test_a_step_gets_no_more_time_than_is_left_of_the_whole(check: Any, tmp_path: Path) -> None:
    runner = FakeRunner(check)

    run(runner, tmp_path / "out", minutes=3.5)

    assert runner.limits == [3.5 * 60, 60.0, 1.5 * 60, 0.5 * 60]


def test_steps_that_no_time_is_left_for_are_failures(check: Any, tmp_path: Path) -> None:
    runner = FakeRunner(check)

    assert run(runner, tmp_path / "out", minutes=2) == 1
    assert runner.started == ["build", "import"]
    assert "0 s left of 2 minutes, it takes 5 s" in (tmp_path / "out" / "table.txt").read_text()


def test_a_bench_is_not_started_in_less_time_than_it_takes(check: Any, tmp_path: Path) -> None:
    runner = FakeRunner(check)

    assert run(runner, tmp_path / "out", minutes=3.25) == 1
    assert runner.started == ["build", "import", "tests"]
    assert (
        "15 s left of 3.25 minutes, it takes 20 s" in (tmp_path / "out" / "table.txt").read_text()
    )


def test_what_is_asked_for_alone_is_built_first(check: Any, tmp_path: Path) -> None:
    runner = FakeRunner(check)

    check.main(
        ["--out", str(tmp_path), "--only", "startup"], runner, lambda: ["Fake GPU"], runner.clock
    )

    assert runner.started == ["build", "import", "startup"]


@pytest.mark.parametrize("tests", [TESTS_SKIPPED, "<testsuites/>", "not a report"])
def test_a_run_in_which_no_test_passed_proves_nothing(
    check: Any, tests: str, tmp_path: Path
) -> None:
    assert run(FakeRunner(check, tests=tests), tmp_path / "out") == 1
    assert endings(tmp_path / "out")["tests"] == "failed"


@pytest.mark.parametrize("document", ["", "{}"])
def test_a_bench_that_wrote_no_figures_failed(check: Any, document: str, tmp_path: Path) -> None:
    assert run(FakeRunner(check, document=document), tmp_path / "out") == 1
    assert endings(tmp_path / "out")["startup"] == "failed"


def test_without_a_gpu_nothing_is_built_and_the_status_is_2(
    check: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def none() -> list[str]:
        raise check.NoGpuError("the CUDA driver cannot be loaded")

    runner = FakeRunner(check)

    assert check.main(["--out", str(tmp_path / "out")], runner, none, runner.clock) == 2
    assert runner.started == []
    assert not (tmp_path / "out").exists()
    assert (
        "No GPU to check: the CUDA driver cannot be loaded.\nNothing was built."
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "int cuInit(unsigned f) { return 100; }",
            r"cuInit of the CUDA driver returned 100 \(no device\)",
        ),
        (
            "int cuInit(unsigned f) { return 0; } int cuDeviceGetCount(int *n) { *n = 0; return 0; "
            "}",
            "no device",
        ),
    ],
)
def test_a_driver_without_a_device_is_no_gpu(
    check: Any, source: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_driver(source, tmp_path, monkeypatch)

    with pytest.raises(check.NoGpuError, match=said):
        check.gpus_of_the_driver()


def test_the_driver_is_asked_for_the_names_of_its_gpus(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
        #include <stdio.h>
        int cuInit(unsigned flags) { return flags; }
        int cuDeviceGetCount(int *count) { *count = 2; return 0; }
        int cuDeviceGet(int *device, int ordinal) { *device = ordinal + 7; return 0; }
        int cuDeviceGetName(char *name, int size, int device) { return snprintf(name, size, "Fake %d", device) < 0; }
    """
    fake_driver(source, tmp_path, monkeypatch)

    assert check.gpus_of_the_driver() == ["Fake 7", "Fake 8"]


def fake_driver(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile `source` and let it be loaded in place of libcuda.so.1."""
    import ctypes
    import shutil

    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler on PATH to make a fake CUDA driver with")
    (folder / "fake.c").write_text(source)
    library = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "fake.c"], check=True)
    real = ctypes.CDLL
    monkeypatch.setattr(
        ctypes, "CDLL", lambda name: real(str(library) if name == "libcuda.so.1" else name)
    )


def test_a_check_begins_without_results_of_the_last_one(check: Any) -> None:
    check.WORK.mkdir(parents=True)
    for name in ("startup.json", "startup.json.part", "tests.xml", "kept.log"):
        (check.WORK / name).touch()

    check.prepare()

    assert [file.name for file in check.WORK.iterdir() if file.is_file()] == ["kept.log"]


# --- running real commands ------------------------------------------------------------------------


def test_a_command_runs_away_from_the_sources_and_its_output_goes_to_the_log(
    check: Any, tmp_path: Path
) -> None:
    source = "import os, sys; print(os.getcwd(), os.environ['SAID']); sys.exit('to stderr')"
    environ = {**os.environ, "SAID": "hello"}
    check.prepare()

    status = check.bounded([sys.executable, "-c", source], environ, tmp_path / "log", 60.0)

    assert status == 1
    # in either order: only one of the two is buffered
    said = set((tmp_path / "log").read_text().splitlines())
    assert said >= {f"{tmp_path / 'work' / 'elsewhere'} hello", "to stderr"}


def test_a_command_past_its_limit_is_ended_with_all_that_it_started(
    check: Any, tmp_path: Path
) -> None:
    source = "sleep 600 & echo $!; wait"
    check.prepare()

    status = check.bounded(["/bin/sh", "-c", source], os.environ, tmp_path / "log", 0.5)

    assert status is None
    assert ends(int((tmp_path / "log").read_text()))


def test_what_a_command_leaves_running_is_ended_too(check: Any, tmp_path: Path) -> None:
    check.prepare()

    status = check.bounded(
        ["/bin/sh", "-c", "sleep 600 & echo $!"], os.environ, tmp_path / "log", 60.0
    )

    assert status == 0
    assert ends(int((tmp_path / "log").read_text()))


def ends(process: int) -> bool:
    """Wait for a process that is not ours to reap until it is gone or a zombie."""
    stat = Path(f"/proc/{process}/stat")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.01)
    return False


def test_the_program_says_there_is_no_gpu_with_status_2(tmp_path: Path) -> None:
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "out")]

    done = subprocess.run(command, env=hidden, capture_output=True, text=True, check=False)

    assert done.returncode == 2, done.stderr
    assert "No GPU to check" in done.stdout
    assert not (tmp_path / "out").exists()


def test_the_benches_of_the_check_are_there() -> None:
    source = SCRIPT.read_text()
    named = re.findall(r'^    \("(\w+)", ', source, flags=re.MULTILINE)

    assert named
    assert all((SCRIPT.parent / "bench" / name).is_file() for name in named)
