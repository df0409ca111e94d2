"""What a bench takes from the checkout and the machine that it runs in, and what it must not
take.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import env

BENCH = """#!/usr/bin/env python3
'''A bench for tests.'''
import sys
from pathlib import Path
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
import bench

def measured():
    from deepnvme.machine.profile import profile_path
    return 0.0 if profile_path() is None else 1.0

def define(run):
    run.system("profiles in use", measured, unit="")
    run.figure("profiles in use", unit="", target="== 0", uses=["profiles in use"])

if __name__ == "__main__":
    raise SystemExit(bench.main(__file__, define, rounds=1, quick_rounds=1))
"""
GIT = ("git", "-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git checkout with the harness and one bench, everything committed."""
    monkeypatch.setenv(env.THIS_PYTHON, "1")
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    root = tmp_path / "checkout"
    for name in ("lib/bench.py", "lib/env.py", "bench/all"):
        (root / "scripts" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(env.ROOT / "scripts" / name, root / "scripts" / name)
    (root / "scripts" / "bench" / "mine").write_text(BENCH)
    (root / ".gitignore").write_text("/build/\n__pycache__/\n")
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "all"]):
        subprocess.run([*GIT, *command], cwd=root, check=True)
    return root


def run(checkout: Path, script: str, *arguments: str) -> str:
    """Run a script of the checkout, which must end well; return what it printed."""
    line = [sys.executable, str(checkout / "scripts" / "bench" / script), *arguments]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def commit_told(checkout: Path) -> str:
    """Return which commit a bench says that it ran at."""
    raw = checkout.with_name("raw.json")
    run(checkout, "mine", "--json", str(raw))
    return str(json.loads(raw.read_text())["versions"]["commit"])


def test_a_bench_names_its_commit_and_whether_there_are_changes(checkout: Path) -> None:
    commit = commit_told(checkout)
    (checkout / "scripts" / "bench" / "mine").write_text(BENCH + "# changed")

    assert len(commit) == 12
    assert commit_told(checkout) == f"{commit} (with changes)"


def test_the_page_of_an_earlier_bench_is_no_change_of_what_is_measured(checkout: Path) -> None:
    run(checkout, "all", "mine")
    assert len(list((checkout / "docs" / "benchmarks").iterdir())) == 2

    assert len(commit_told(checkout)) == 12


def test_pages_of_quick_runs_stay_out_of_the_documentation(checkout: Path) -> None:
    told = run(checkout, "all", "--quick", "mine")

    assert {path.suffix for path in (checkout / "build" / "benchmarks").iterdir()} == {
        ".md",
        ".json",
    }
    assert f"written: {checkout / 'build' / 'benchmarks'}" in told
    assert not (checkout / "docs").exists()


def test_what_was_tuned_on_this_machine_changes_no_bench(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPNVME_PROFILE", str(checkout / "profile.json"))
    raw = checkout.with_name("raw.json")

    run(checkout, "mine", "--json", str(raw))

    assert json.loads(raw.read_text())["figures"][0]["value"] == 0.0
