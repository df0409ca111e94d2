"""What a user gets: one wheel, installed in a fresh environment without torch and with no compiler
on PATH.

The wheels that it requires are kept in build/wheelhouse, in the versions that the project pins:
only the first run after a change of these asks the package index.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PINS = ROOT / "scripts" / "requirements.txt"
WHEELHOUSES = ROOT / "build" / "wheelhouse"


def pip(*arguments: str | Path) -> None:
    line = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--quiet",
        *map(str, arguments),
    ]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheelhouse(pyproject: dict[str, Any]) -> Path:
    """Return a folder with the wheels that ours requires, for this Python and platform and in the
    pinned versions.
    """
    wanted: list[str] = pyproject["project"]["dependencies"]
    recipe = "\n".join([*wanted, PINS.read_text(), sys.version, sysconfig.get_platform()])
    folder = WHEELHOUSES / hashlib.sha256(recipe.encode()).hexdigest()[:16]
    WHEELHOUSES.parent.mkdir(exist_ok=True)
    with WHEELHOUSES.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the workers of a session come here at once
        if not folder.exists():
            shutil.rmtree(WHEELHOUSES, ignore_errors=True)
            WHEELHOUSES.mkdir()
            draft = Path(tempfile.mkdtemp(dir=WHEELHOUSES))
            only = ("--only-binary", ":all:", "--constraint", PINS)
            pip("download", *only, "--dest", draft, *wanted)
            draft.rename(folder)  # a download that ends half-way is not believed later
    return folder


@pytest.fixture(scope="module")
def fresh_python(wheel: Path, wheelhouse: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment that holds the wheel and what it requires, nothing else,
    not even pip.
    """
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    # what is imported is compiled then
    install = ("--isolated", "--python", python, "install", "--no-compile")
    pip(*install, "--no-index", "--find-links", wheelhouse, wheel)
    return python


def run(python: Path, program: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a program with nothing on PATH but an empty folder: no compiler, no cmake, no git."""
    empty = cwd / "empty-path"
    empty.mkdir(exist_ok=True)
    environ = {"HOME": str(cwd), "PATH": str(empty), "LANG": os.environ.get("LANG", "C.UTF-8")}
    return subprocess.run(
        [python, "-c", program], cwd=cwd, env=environ, capture_output=True, text=True, check=False
    )


def test_one_wheel_holds_both_packages_their_types_and_native_modules(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    packages = {name.split("/")[0] for name in names}
    assert {name for name in packages if not name.endswith(".dist-info")} == {
        "deepnvme",
        "infinity_engine",
    }
    for package in ("deepnvme", "infinity_engine"):
        sources = {
            str(path.relative_to(ROOT))
            for path in (ROOT / package).rglob("*.py*")
            if path.suffix in {".py", ".pyi"}
        }
        assert sources <= names
        assert f"{package}/py.typed" in names
        assert (
            sum(name.startswith(f"{package}/_native.") and name.endswith(".so") for name in names)
            == 1
        )


def test_the_wheel_contains_no_code_of_the_papers(wheel: Path) -> None:
    papers = {path.name for path in (ROOT / "scripts" / "papers").glob("*.py")}
    papers -= {"__init__.py"}
    names = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    # the engine's own, of those names
    names -= {Path(f"infinity_engine/{room}/offloading.py") for room in ("gradients", "activation")}
    names -= {Path("infinity_engine/reporting/page.py")}

    assert papers
    assert [name for name in names if "papers" in name.parts or name.name in papers] == []


def test_the_wheel_requires_no_torch_and_offers_it_as_an_extra(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    requirements = [
        line.removeprefix("Requires-Dist: ")
        for line in archive.read(metadata).decode().splitlines()
        if line.startswith("Requires-Dist: ")
    ]
    plain = [requirement for requirement in requirements if "extra ==" not in requirement]
    assert not any(requirement.startswith(("torch", "cupy")) for requirement in plain)
    assert any(
        requirement.startswith("torch>=2.6") and 'extra == "torch"' in requirement
        for requirement in requirements
    )


def test_deepnvme_writes_and_reads_a_file_without_torch_and_without_a_compiler(
    fresh_python: Path, tmp_path: Path
) -> None:
    program = """
import deepnvme, sys, numpy as np
data = np.arange(300_000, dtype=np.uint32)
with deepnvme.IOQueue() as queue, queue.open("there.bin", "w") as file:
    assert file.pwrite(data, 7).result(60) == data.nbytes
    back = np.zeros_like(data)
    assert file.pread(back, 7).result(60) == data.nbytes
assert (back == data).all()
assert "torch" not in sys.modules
print("moved", data.nbytes)
"""
    done = run(fresh_python, program, tmp_path)
    assert (done.stdout, done.stderr) == ("moved 1200000\n", "")


def test_importing_the_engine_without_torch_works_and_using_it_names_the_extra(
    fresh_python: Path, tmp_path: Path
) -> None:
    program = """
import infinity_engine
from infinity_engine import engine
assert engine.initialize is infinity_engine.initialize
print(infinity_engine.Budget(host="1GiB") is not None)
try:
    infinity_engine.initialize(None, None)
except infinity_engine.MissingDependencyError as error:
    assert isinstance(error, ImportError)
    print(error)
"""
    done = run(fresh_python, program, tmp_path)
    assert done.stderr == ""
    first, *message = done.stdout.splitlines()
    assert first == "True"
    assert "infinity-engine[torch]" in " ".join(message)


def test_the_installed_doctor_runs_and_says_that_the_engine_cannot(
    fresh_python: Path, tmp_path: Path
) -> None:
    doctor = fresh_python.parent / "infinity"
    done = subprocess.run(
        [doctor, "doctor", tmp_path], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "torch" in done.stdout
