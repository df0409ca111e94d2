"""scripts/lib/env.py in a checkout of its own, with a fake installer: what is made, what is kept,
what is repaired.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import env

ROOT = Path(__file__).resolve().parents[2]

# Stands for a script of the project: `script NEEDS [STEP DO]`. Each step of an installation is
# printed instead of taken; at the one whose description begins with STEP it fails, is killed, is
# killed with a package installed in part, or waits for a long time.
SCRIPT = """
import os, subprocess, sys
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent / "scripts" / "lib"))
import env

def installer(what, command, **overrides):
    print("ran:", what, flush=True)
    if what.startswith("creating"):
        (Path(command[-1]) / "bin").mkdir(parents=True)
        (Path(command[-1]) / "bin" / "python").touch()
    if at and what.startswith(at):
        if do == "fail":
            raise env.EnvironmentMissingError(what + " failed")
        if do == "kill in a package":
            (Path(sys.argv[0]).parent / ".venv/lib/python3.11/site-packages/a-1.dist-info").mkdir(
                parents=True
            )
        if do.startswith("kill"):
            os.kill(os.getpid(), 9)
        subprocess.run(["sleep", "120"])
    if what.endswith("tests"):
        (env.BUILD / "dev").mkdir(parents=True, exist_ok=True)
        (env.BUILD / "dev" / "CTestTestfile.cmake").touch()

needs, at, do, *_ = [*sys.argv[1:], "", ""]
env.run_logged = installer
env.version_in = lambda python: "3.11.7" if Path(python).exists() else None
env._can_make_venv = lambda python: True
with env.plain_ending():
    if do == "as nobody" and os.geteuid() == 0:
        os.seteuid(65534)
    print(env.rival_venv("rival", ["it"]) if needs == "rival" else env.ensure(env.Needs[needs]))
"""
CREATE = ["creating .venv", "updating pip"]
INSTALL = [*CREATE, "installing torch", "installing the libraries"]
BUILD, BUILD_TESTS = "building the native modules", "building the native modules and their tests"
TOOLS = "installing the tools"


def stand_in(path: Path, printed: str) -> Path:
    """Make a program that stands for an interpreter."""
    path.write_text(f"#!/bin/sh\necho {printed}\n")
    path.chmod(0o755)
    return path


@dataclass
class Checkout:
    """A checkout with nothing in it but what the environment is made from."""

    root: Path

    def line(self, *arguments: str) -> list[str]:
        return [sys.executable, "-S", "-E", str(self.root / "script"), *arguments]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.line(*arguments), capture_output=True, text=True, check=False, timeout=100
        )

    def steps(self, *arguments: str) -> list[str]:
        """Run the script, which must end well; return the steps that it took."""
        done = self.run(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return steps_in(done.stdout)

    @property
    def marker(self) -> Path:
        """Where a test leaves a file by which it knows an environment again."""
        return self.root / ".venv" / "marker"


def steps_in(output: str) -> list[str]:
    found = [line.removeprefix("ran: ") for line in output.splitlines() if line.startswith("ran: ")]
    return ["installing torch" if step.startswith("installing torch==") else step for step in found]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    root = tmp_path / "checkout"
    (root / "scripts" / "lib").mkdir(parents=True)
    (root / "native").mkdir()
    shutil.copy(ROOT / "scripts" / "lib" / "env.py", root / "scripts" / "lib")
    (root / "script").write_text(SCRIPT)
    for name in (
        "scripts/requirements.txt",
        "scripts/requirements-check.txt",
        "CMakeLists.txt",
        "pyproject.toml",
    ):
        (root / name).write_text(name)
    (root / "native" / "one.cpp").write_text("int one() { return 1; }")
    return Checkout(root)


@pytest.fixture
def complete(checkout: Checkout) -> Checkout:
    """A checkout in which scripts/test has run, its environment marked."""
    checkout.run("CHECK")
    checkout.marker.touch()
    return checkout


# --- what is made, and what is kept ---------------------------------------------------------------


def test_the_demo_gets_the_libraries_and_a_build_and_no_tools(checkout: Checkout) -> None:
    assert checkout.steps("RUN") == [*INSTALL, BUILD]


def test_the_tests_get_the_tools_and_the_native_tests_too(checkout: Checkout) -> None:
    assert checkout.steps("CHECK") == [*INSTALL, TOOLS, BUILD_TESTS]


@pytest.mark.parametrize("needs", ["RUN", "CHECK", "rival"])
def test_a_second_run_does_nothing_and_names_the_same_python(
    needs: str, checkout: Checkout
) -> None:
    first = checkout.run(needs)

    second = checkout.run(needs)

    assert second.stdout.splitlines() == first.stdout.splitlines()[-1:]
    assert Path(second.stdout.strip()).parent.name == "bin"


def test_the_tests_add_to_what_the_demo_made(checkout: Checkout) -> None:
    checkout.run("RUN")

    assert checkout.steps("CHECK") == [TOOLS, BUILD_TESTS]


def test_the_demo_changes_nothing_where_the_tests_have_run(complete: Checkout) -> None:
    assert complete.steps("RUN") == []
    assert complete.steps("CHECK") == []


def test_the_demo_builds_changed_sources_as_users_do_and_the_tests_build_them_again(
    complete: Checkout,
) -> None:
    (complete.root / "native" / "one.cpp").write_text("int one() { return 2 - 1; }")

    assert complete.steps("RUN") == [BUILD]
    assert complete.steps("CHECK") == [BUILD_TESTS]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("scripts/requirements.txt", [*INSTALL, TOOLS, BUILD_TESTS]),
        ("scripts/requirements-check.txt", [TOOLS]),
        ("pyproject.toml", [BUILD_TESTS]),
        ("CMakeLists.txt", [BUILD_TESTS]),
        ("native/one.cpp", [BUILD_TESTS]),
        ("native/new.hpp", [BUILD_TESTS]),
        (".venv/infinity-engine.json", [*INSTALL, TOOLS, BUILD_TESTS]),
        ("README.md", []),
    ],
)
def test_what_has_changed_is_made_again_and_nothing_else(
    changed: str, expected: list[str], complete: Checkout
) -> None:
    (complete.root / changed).write_text("changed")

    assert complete.steps("CHECK") == expected


def test_another_compiler_builds_again(complete: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "another-c++")

    assert complete.steps("CHECK") == [BUILD_TESTS]


def test_a_removed_build_folder_is_built_again(complete: Checkout) -> None:
    shutil.rmtree(complete.root / "build" / "dev")

    assert complete.steps("CHECK") == [BUILD_TESTS]


def test_an_environment_whose_python_is_gone_is_made_again(complete: Checkout) -> None:
    (complete.root / ".venv" / "bin" / "python").unlink()

    assert complete.steps("CHECK") == [*INSTALL, TOOLS, BUILD_TESTS]


def test_a_moved_checkout_makes_its_environment_again(complete: Checkout) -> None:
    moved = Checkout(complete.root.rename(complete.root.with_name("moved")))

    assert moved.steps("CHECK") == [*INSTALL, TOOLS, BUILD_TESTS]
    assert not moved.marker.exists()


def test_a_rival_is_installed_again_when_its_recipe_changes(checkout: Checkout) -> None:
    steps = checkout.steps("rival")

    assert steps == ["creating .venvs/rival", "updating pip", "installing it into .venvs/rival"]


# --- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("step", INSTALL)
def test_a_failure_while_replacing_leaves_the_earlier_environment(
    step: str, complete: Checkout
) -> None:
    (complete.root / "scripts" / "requirements.txt").write_text("changed")

    done = complete.run("CHECK", step, "fail")

    assert done.returncode == 3
    assert done.stderr.endswith(" failed\n")
    assert "Traceback" not in done.stderr
    assert complete.marker.exists()
    assert complete.steps("CHECK") == [*INSTALL, TOOLS, BUILD_TESTS]
    assert not complete.marker.exists()


@pytest.mark.parametrize("step", INSTALL)
def test_a_failure_of_the_first_installation_leaves_no_environment(
    step: str, checkout: Checkout
) -> None:
    assert checkout.run("CHECK", step, "fail").returncode == 3

    assert not (checkout.root / ".venv").exists()
    assert checkout.steps("CHECK") == [*INSTALL, TOOLS, BUILD_TESTS]


@pytest.mark.parametrize("do", ["kill", "kill in a package"])
@pytest.mark.parametrize("step", INSTALL)
def test_a_first_installation_that_was_killed_is_made_anew(
    step: str, do: str, checkout: Checkout
) -> None:
    assert checkout.run("CHECK", step, do).returncode == -signal.SIGKILL

    assert checkout.steps("CHECK") == [*INSTALL, TOOLS, BUILD_TESTS]
    assert not (checkout.root / ".venv" / "lib").exists()


@pytest.mark.parametrize("step", [TOOLS, BUILD_TESTS])
def test_a_package_that_was_added_only_half_makes_the_environment_anew(
    step: str, checkout: Checkout
) -> None:
    checkout.run("CHECK", step, "kill in a package")

    done = checkout.run("RUN")

    assert steps_in(done.stdout) == [*INSTALL, BUILD]
    part = "tools" if step == TOOLS else "build"
    told = f"an earlier start was cut off as it added the {part}: a-1 is broken\n"
    assert done.stdout.startswith(told)
    assert checkout.steps("CHECK") == [TOOLS, BUILD_TESTS]


def test_an_unfinished_part_is_looked_for_only_once(checkout: Checkout) -> None:
    checkout.run("CHECK", TOOLS, "kill")

    assert checkout.steps("RUN") == [BUILD]
    assert '"unfinished"' not in (checkout.root / ".venv" / env.STAMP).read_text()


@pytest.mark.parametrize(
    ("record", "leftover", "broken"),
    [
        ("a.py,,\na/b.pyc,,\na-1.dist-info/INSTALLER,,\n", "", None),
        ("a.py,,\nmissing.py,,\na-1.dist-info/INSTALLER,,\n", "", "a-1"),
        ("a.py,,\na-1.dist-info/RECORD,,\n", "", "a-1"),  # the wheel's own, not pip's
        ("", "", "a-1"),
        (None, "", "a-1"),
        ("a.py,,\na-1.dist-info/INSTALLER,,\n", "~b-1.dist-info", "~b-1.dist-info"),
    ],
)
def test_what_pip_leaves_between_its_steps_is_a_broken_package(
    record: str | None, leftover: str, broken: str | None, tmp_path: Path
) -> None:
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    package = site / "a-1.dist-info"
    package.mkdir(parents=True)
    (site / leftover).mkdir(exist_ok=True)
    for file in (site / "a.py", package / "INSTALLER"):
        file.touch()
    if record is not None:
        (package / "RECORD").write_text(record)

    assert env._broken_package(tmp_path) == broken


def test_every_package_of_this_environment_is_whole() -> None:
    assert env._broken_package(env.VENV) is None


@pytest.mark.parametrize("step", INSTALL)
def test_after_a_kill_while_replacing_the_earlier_environment_comes_back(
    step: str, complete: Checkout
) -> None:
    wanted = (complete.root / "scripts" / "requirements.txt").read_text()
    (complete.root / "scripts" / "requirements.txt").write_text("changed")
    assert complete.run("CHECK", step, "kill").returncode == -signal.SIGKILL
    assert not complete.marker.exists()
    (complete.root / "scripts" / "requirements.txt").write_text(wanted)

    assert complete.steps("CHECK") == []
    assert complete.marker.exists()


@pytest.mark.parametrize("do", ["fail", "kill"])
@pytest.mark.parametrize(
    ("step", "missing"), [(TOOLS, [TOOLS, BUILD_TESTS]), (BUILD, [BUILD_TESTS])]
)
def test_what_was_added_only_half_is_added_again(
    step: str, missing: list[str], do: str, checkout: Checkout
) -> None:
    checkout.run("RUN")

    checkout.run("CHECK", step, do)

    assert checkout.steps("CHECK") == missing


@pytest.mark.parametrize("do", ["fail", "kill"])
@pytest.mark.parametrize(
    ("changed", "step"),
    [("scripts/requirements-check.txt", TOOLS), ("native/one.cpp", BUILD_TESTS)],
)
def test_a_half_made_change_is_undone_when_its_cause_is_taken_back(
    changed: str, step: str, do: str, complete: Checkout
) -> None:
    before = (complete.root / changed).read_text()
    (complete.root / changed).write_text("changed")
    complete.run("CHECK", step, do)
    (complete.root / changed).write_text(before)

    assert step in complete.steps("CHECK")


def test_no_trace_of_a_replaced_environment_remains(complete: Checkout) -> None:
    (complete.root / "scripts" / "requirements.txt").write_text("changed")

    complete.run("CHECK")

    assert sorted(path.name for path in (complete.root / "build").iterdir()) == [
        "aside",
        "dev",
        "dev.lock",
        "environment.lock",
    ]
    assert list((complete.root / "build" / "aside").iterdir()) == []


def test_without_a_compiler_nothing_is_made_and_the_message_says_what_to_install(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))

    done = checkout.run("RUN")

    assert (done.returncode, done.stdout) == (3, "")
    assert "apt install g++" in done.stderr
    assert not (checkout.root / "build").exists()


def test_a_checkout_that_may_not_be_written_to_is_one_message(checkout: Checkout) -> None:
    checkout.root.chmod(0o555)

    done = checkout.run("RUN", "", "as nobody")

    checkout.root.chmod(0o755)
    assert (done.returncode, done.stdout) == (3, "")
    assert "Permission denied" in done.stderr
    assert "all of which you must be able to write to.\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_in_the_way_is_one_message(checkout: Checkout) -> None:
    (checkout.root / "build").touch()

    done = checkout.run("RUN")

    assert done.returncode == 3
    assert f"File exists: '{checkout.root}/build'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_failed_command_shows_the_end_of_its_log(checkout: Checkout) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(checkout.root / 'scripts' / 'lib')!r}); import env\n"
        "with env.plain_ending(): env.run_logged('trying it', [sys.executable, '-c', 'print(41 + "
        "1); exit(7)'])"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert done.returncode == 3
    assert (
        "trying it failed with exit status 7. The end of build/logs/trying-it.log:\n    42\n"
        in done.stderr
    )


@pytest.mark.parametrize(
    ("printed", "version"),
    [("3.10.0", "3.10.0"), ("3.13.14", "3.13.14"), ("3.9.18", None), ("3.14.0", None), ("", None)],
)
def test_only_supported_interpreters_that_work_are_used(
    printed: str, version: str | None, tmp_path: Path
) -> None:
    assert env.version_in(stand_in(tmp_path / "python", printed)) == version
    assert env.version_in(tmp_path / "missing") is None
    assert env.version_in(sys.executable) is not None


# --- two at a time, and Ctrl-C --------------------------------------------------------------------


@pytest.fixture
def waiting(checkout: Checkout) -> Iterator[subprocess.Popen[str]]:
    """A script in the middle of its installation, in a group of its own like the jobs of a
    terminal.
    """
    line = checkout.line("RUN", "installing the libraries", "wait")
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("ran: installing the libraries"):
            assert process.poll() is None
        yield process
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_second_script_says_that_it_waits_and_then_finds_the_rest_to_do(
    checkout: Checkout, waiting: subprocess.Popen[str]
) -> None:
    with subprocess.Popen(checkout.line("RUN"), stdout=subprocess.PIPE, text=True) as second:
        assert second.stdout is not None
        told = second.stdout.readline()
        os.killpg(waiting.pid, signal.SIGKILL)
        rest = second.stdout.read()

    assert told == "waiting for another script that is making an environment in this checkout ...\n"
    assert "waiting" not in rest
    assert steps_in(rest) == [*INSTALL, BUILD]


def test_a_second_script_waits_for_the_program_that_a_killed_one_has_left(
    checkout: Checkout,
) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(checkout.root / 'scripts' / 'lib')!r}); import env\n"
        "with env._changing_environments():\n"
        "    env.run_logged('pip', ['sh', '-c', 'touch begun; sleep 120'])"
    )
    line = [sys.executable, "-S", "-c", program]
    with subprocess.Popen(line, start_new_session=True) as first:
        while not (checkout.root / "begun").exists():
            assert first.poll() is None
        first.kill()
        first.wait()
        with subprocess.Popen(checkout.line("RUN"), stdout=subprocess.PIPE, text=True) as second:
            assert second.stdout is not None
            told = second.stdout.readline()
            os.killpg(first.pid, signal.SIGKILL)
            rest = second.stdout.read()

    assert told.startswith("waiting for another script")
    assert steps_in(rest) == [*INSTALL, BUILD]


def test_a_script_that_waits_for_long_names_the_program_that_an_ended_one_has_left(
    checkout: Checkout,
) -> None:
    start = (
        f"import sys; sys.path.insert(0, {str(checkout.root / 'scripts' / 'lib')!r}); import env\n"
        "env._PATIENCE_S = 0\n"
        "with env._changing_environments():\n"
        "    "
    )
    leave = f"{start}env.run_logged('pip', ['sh', '-c', 'touch begun; sleep 120'])"
    line = [sys.executable, "-S", "-c"]
    with subprocess.Popen([*line, leave], start_new_session=True) as first:
        while not (checkout.root / "begun").exists():
            assert first.poll() is None
        first.kill()
        first.wait()
        with subprocess.Popen([*line, f"{start}pass"], stdout=subprocess.PIPE, text=True) as second:
            assert second.stdout is not None
            told: list[str] = []
            while not (told and "end them with kill" in told[-1]):
                told.append(second.stdout.readline())
                assert told[-1], "it has ended"
            os.killpg(first.pid, signal.SIGKILL)

    assert second.returncode == 0
    assert told[1] == "still waiting for:\n"
    holders = [line for line in told if line.startswith("  process ")]
    assert any("sleep 120" in line for line in holders)
    assert not any(str(second.pid) in line for line in holders)


def test_ctrl_c_ends_an_installation_without_a_traceback_and_the_next_run_repairs(
    checkout: Checkout, waiting: subprocess.Popen[str]
) -> None:
    os.killpg(waiting.pid, signal.SIGINT)
    _, errors = waiting.communicate(timeout=60)

    assert (waiting.returncode, errors) == (130, "\nInterrupted.\n")
    assert not (checkout.root / ".venv").exists()
    assert checkout.steps("RUN") == [*INSTALL, BUILD]


def test_a_rival_does_not_wait_for_the_lock_of_a_build_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "BUILD", tmp_path)
    built = tmp_path / "torch_extensions" / "cpu_adam"
    built.mkdir(parents=True)
    for name in ("lock", "cpu_adam.so"):
        (built / name).touch()

    environ = env.rival_environ(tmp_path / "venv" / "bin" / "python")

    assert [path.name for path in built.iterdir()] == ["cpu_adam.so"]
    assert environ["TORCH_EXTENSIONS_DIR"] == str(built.parent)
    assert environ["VIRTUAL_ENV"] == str(tmp_path / "venv")
