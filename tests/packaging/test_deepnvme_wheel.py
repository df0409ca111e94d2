"""deepnvme as a distribution of its own: its wheel alone in a bare environment, without numpy."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import deepnvme

ROOT = Path(__file__).resolve().parents[2]

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.fixture(scope="module")
def own() -> dict[str, Any]:
    """Return what the pyproject.toml of the distribution says."""
    text = (ROOT / "distributions/deepnvme/pyproject.toml").read_text()
    found: dict[str, Any] = tomllib.loads(text)
    return found


@pytest.fixture(scope="module")
def bare_python(deepnvme_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment that holds this wheel and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--isolated", "--quiet"]
    install = ["--python", str(python), "install", "--no-deps", "--no-index", str(deepnvme_wheel)]
    done = subprocess.run([*pip, *install], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return python


def run(python: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = {"HOME": str(cwd), "PATH": os.devnull, "LANG": os.environ.get("LANG", "C.UTF-8")}
    return subprocess.run(
        [python, *arguments], cwd=cwd, env=environ, capture_output=True, text=True, check=False
    )


def test_the_wheel_holds_deepnvme_and_nothing_of_the_engine(deepnvme_wheel: Path) -> None:
    names = set(zipfile.ZipFile(deepnvme_wheel).namelist())
    packages = {name.split("/")[0] for name in names}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "deepnvme").rglob("*.py")}

    assert {name for name in packages if not name.endswith(".dist-info")} == {"deepnvme"}
    assert sources <= names
    assert "deepnvme/py.typed" in names
    assert sum(name.endswith(".so") for name in names) == 1


def test_both_distributions_and_the_package_have_one_version(
    own: dict[str, Any], pyproject: dict[str, Any]
) -> None:
    versions = {own["project"]["version"], pyproject["project"]["version"], deepnvme.__version__}

    assert len(versions) == 1


def test_both_distributions_ask_for_the_same_pythons_and_build_tools(
    own: dict[str, Any], pyproject: dict[str, Any]
) -> None:
    for key in ("requires-python", "license"):
        assert own["project"][key] == pyproject["project"][key]
    assert own["build-system"] == pyproject["build-system"]
    assert (
        own["tool"]["scikit-build"]["cmake"]["version"]
        == (pyproject["tool"]["scikit-build"]["cmake"]["version"])
    )


def test_whatever_it_requires_the_engine_requires_as_well(
    own: dict[str, Any], pyproject: dict[str, Any]
) -> None:
    extras = own["project"]["optional-dependencies"].values()
    wanted = {*own["project"]["dependencies"], *(line for lines in extras for line in lines)}
    engine = pyproject["project"]
    known = {
        *engine["dependencies"],
        *(line for lines in engine["optional-dependencies"].values() for line in lines),
    }

    assert wanted <= known


def test_alone_it_moves_bytes_and_keeps_a_store(bare_python: Path, tmp_path: Path) -> None:
    program = """
import deepnvme, sys
data = bytes(range(256)) * 1000
with deepnvme.IOQueue() as queue, queue.open("there.bin", "w") as file:
    assert file.pwrite(data, 7).result(60) == len(data)
    back = bytearray(len(data))
    assert file.pread(back, 7).result(60) == len(data)
assert back == data
with deepnvme.TensorStore.create(["store"], 8 << 20) as store:
    store.put("bytes", data)
    store.commit()
    assert bytes(store.get("bytes")) == data
deepnvme.save({"step": 1, "note": b"kept"}, "state")
assert deepnvme.load("state") == {"step": 1, "note": b"kept"}
deepnvme.write_safetensors("large.safetensors", {"bytes": 2 * data})
assert bytes(deepnvme.read_safetensors("large.safetensors")["bytes"]) == 2 * data
assert not {"numpy", "torch", "psutil", "rich", "infinity_engine"} & set(sys.modules)
print(deepnvme.__version__)
"""
    done = run(bare_python, "-W", "ignore", "-c", program, cwd=tmp_path)

    assert (done.stdout, done.stderr) == (f"{deepnvme.__version__}\n", "")


def test_the_command_line_says_what_it_lacks(bare_python: Path, tmp_path: Path) -> None:
    done = run(bare_python, "-m", "deepnvme", "--version", cwd=tmp_path)

    assert done.returncode == 1
    assert "pip install 'deepnvme[cli]'" in done.stderr
    assert "Traceback" not in done.stderr
