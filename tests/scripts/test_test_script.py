"""scripts/test as a module: how it judges its steps, what it takes from the command line, what it
refuses to pass.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

import env
from support.scripts import load_script
from support.session import LONG

MODES = ("sanitize", "slow", "matrix", "oldest", "aarch64")
JUNIT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"/><testcase name="c"><failure/></testcase><testcase name="d"><error/></testcase>
<testcase name="e"><skipped/></testcase><testcase name="f" status="notrun"/><testcase name="g" status="disabled"/>
</testsuite></testsuites>"""


@pytest.fixture
def script() -> Any:
    return load_script("test")


def step(script: Any, tmp_path: Path, program: str, *, report: bool) -> Any:
    """Run a Python program as a step."""
    path = tmp_path / "report.xml" if report else None
    return script.command("step", [sys.executable, "-S", "-c", program], path, tmp_path)


# --- steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "passed"), [(0, True), (1, False), (3, False)])
def test_a_step_passes_by_its_exit_status(
    status: int, passed: bool, script: Any, tmp_path: Path
) -> None:
    assert step(script, tmp_path, f"raise SystemExit({status})", report=False).passed is passed


def test_tests_are_counted_by_how_they_ended(script: Any, tmp_path: Path) -> None:
    outcome = step(script, tmp_path, f"open('report.xml', 'w').write('''{JUNIT}''')", report=True)

    assert outcome.tests == {"passed": 2, "failed": 2, "skipped": 3}


def test_a_missing_tool_fails_its_step_and_the_summary_says_what_to_do(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = script.command("step", [tmp_path / "mypy"], None, tmp_path)

    assert script.summarise([outcome]) == 1
    told = (
        f"{tmp_path}/mypy cannot be started: No such file or directory. Delete .venv and run again."
    )
    assert told in capsys.readouterr().out


def test_a_tool_that_is_there_and_cannot_be_started_is_not_blamed_on_the_environment(
    script: Any, tmp_path: Path
) -> None:
    (tmp_path / "mypy").touch(mode=0o600)

    forbidden = script.command("step", [tmp_path / "mypy"], None, tmp_path)
    nowhere = script.command("step", [sys.executable], None, tmp_path / "nowhere")

    assert forbidden.note == f"[Errno 13] Permission denied: '{tmp_path}/mypy'"
    assert nowhere.note == f"[Errno 2] No such file or directory: '{tmp_path}/nowhere'"


def test_a_step_in_which_no_test_ran_fails(script: Any, tmp_path: Path) -> None:
    outcome = step(script, tmp_path, "open('report.xml', 'w').write('<testsuites/>')", report=True)

    assert (outcome.passed, outcome.note) == (False, "no test ran")


def test_the_files_that_come_first_exist() -> None:
    assert [name for name in LONG if not (env.ROOT / name).is_file()] == []


def test_the_report_of_an_earlier_run_is_not_counted(script: Any, tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(JUNIT)

    assert step(script, tmp_path, "raise SystemExit(4)", report=True).tests == {}


@pytest.mark.parametrize(("last", "status"), [(True, 0), (False, 1)])
def test_the_summary_names_every_step_and_one_failure_is_enough(
    last: bool, status: int, script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = {"passed": 2, "failed": 0, "skipped": 1}
    outcomes = [
        script.Outcome("first", True, 1.0, counts),
        script.Outcome("last", last, 2.0, note="why"),
    ]

    assert script.summarise(outcomes) == status

    told = capsys.readouterr().out
    assert re.search(r"^  ok +first +1\.0 s  2 passed, 0 failed, 1 skipped$", told, re.MULTILINE)
    assert re.search(rf"^  {'ok' if last else 'FAILED'} +last +2\.0 s  why$", told, re.MULTILINE)
    assert told.endswith("tests: 2 passed, 0 failed, 1 skipped\n")


# --- modes ----------------------------------------------------------------------------------------


def test_what_follows_two_dashes_goes_to_pytest(script: Any) -> None:
    options = script.parse(["--slow", "--", "-k", "volume", "--", "-x"])

    assert (options.slow, options.pytest) == (True, ["-k", "volume", "--", "-x"])


@pytest.mark.parametrize("arguments", [["--slow", "--matrix"], ["--unknown"], ["tests/unit"]])
def test_two_modes_or_unknown_arguments_are_refused(arguments: list[str], script: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        script.parse(arguments)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_described_in_its_help_and_for_contributors(mode: str, script: Any) -> None:
    assert getattr(script.parse([f"--{mode}"]), mode)
    assert f"    scripts/test --{mode} " in script.__doc__
    assert f"| `scripts/test --{mode}` |" in (env.ROOT / "CONTRIBUTING.md").read_text()


def test_the_oldest_versions_are_taken_from_what_the_package_requires(script: Any) -> None:
    requirements = [
        "numpy>=1.24",
        'torch>=2.6; extra == "torch"',
        'a.b-c>=2026.3.25; sys_platform == "linux"',
        "any",
    ]

    assert script.lowest(requirements) == ["numpy==1.24", "torch==2.6", "a.b-c==2026.3.25"]


def test_without_any_python_neither_the_matrix_nor_the_oldest_versions_pass(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")

    outcomes = script.matrix()

    assert [outcome.passed for outcome in outcomes] == [True] * len(env.SUPPORTED) + [False]
    assert outcomes[0].note == "skipped: no working python3.10 on PATH"
    assert [outcome.passed for outcome in script.oldest(Path(sys.executable))] == [False]


# --- what it runs ---------------------------------------------------------------------------------


def test_scripts_without_an_ending_are_found_by_their_first_line(script: Any) -> None:
    folder = env.ROOT / "scripts"

    found = {
        str(path.relative_to(folder)) for path in folder.rglob("*") if script.is_python_script(path)
    }

    assert {"test", "demo", "gpu_check", "bench/all", "bench/startup"} <= found
    assert not any("." in name or "__pycache__" in name for name in found)
