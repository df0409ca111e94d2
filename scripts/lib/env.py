"""The project's own environment: makes `.venv`, installs what scripts/requirements.txt pins, builds the native code.

Needs nothing but a Python 3.10-3.13 with venv, a C++20 compiler and a package index. Every script of the project calls
`ensure()` or `enter()`; both do nothing when the environment still matches what the checkout asks for.
Outside the checkout only the caches of its tools are written.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = [
    "ROOT",
    "TORCH",
    "VENV",
    "EnvironmentMissingError",
    "child_env",
    "ensure",
    "enter",
    "rival_venv",
    "run_logged",
    "version_in",
]

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
BUILD = ROOT / "build"
LOGS = BUILD / "logs"
REQUIREMENTS = ROOT / "scripts" / "requirements.txt"
STAMP = "infinity-engine.json"
# Installed first and alone: where a CPU build of this version is at hand it satisfies the pin, and nothing later pulls
# the CUDA packages of a newer one. The package itself asks only for torch >= 2.6.
TORCH = "torch==2.13.0"
SUPPORTED = ((3, 10), (3, 11), (3, 12), (3, 13))


class EnvironmentMissingError(Exception):
    """The environment cannot be made; the message says what is missing and what to do."""


def ensure() -> Path:
    """Return the Python of `.venv`, after making or mending the environment and the native build where they differ."""
    _require_compiler()
    with _locked():
        python = _ensure_packages()
        _ensure_build(python)
    return python


def enter(script: str | Path) -> None:
    """Re-execute `script` with its arguments under `.venv`'s Python, unless it runs there already.

    A problem with the environment is one message and exit status 3.
    """
    try:
        python = ensure()
    except EnvironmentMissingError as problem:
        print(f"\n{problem}", file=sys.stderr)
        raise SystemExit(3) from None
    if Path(sys.prefix) != VENV:
        os.execve(python, [str(python), str(script), *sys.argv[1:]], child_env())


def rival_venv(name: str, requirements: Sequence[str]) -> Path:
    """Return the Python of `.venvs/<name>`, a rival's own environment, installed in the order of `requirements`."""
    with _locked():
        folder = ROOT / ".venvs" / name
        python = folder / "bin" / "python"
        recipe = _digest([name, *requirements])
        if _read_stamp(folder).get("packages") != recipe or not python.exists():
            _make_venv(folder, _find_python())
            for requirement in requirements:
                run_logged(f"installing {requirement} into .venvs/{name}", _pip(python, "install", requirement))
            _write_stamp(folder, packages=recipe)
    return python


def child_env(venv: Path = VENV) -> dict[str, str]:
    """Return this process's environment with the tools of `venv` first on PATH."""
    environ = dict(os.environ)
    environ["PATH"] = f"{venv / 'bin'}{os.pathsep}{environ.get('PATH', os.defpath)}"
    environ["VIRTUAL_ENV"] = str(venv)
    environ.pop("PYTHONHOME", None)
    return environ


def run_logged(what: str, command: Sequence[str | Path], **overrides: str) -> None:
    """Run `command`, saying `what` it does; its output goes to a log, whose end is shown if it fails."""
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / ("".join(c if c.isalnum() else "-" for c in what)[:60] + ".log")
    print(f"  {what} ...", end="", flush=True)
    started = time.monotonic()
    with log.open("w") as out:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=ROOT,
            env={**child_env(), **overrides},
            stdout=out,
            stderr=subprocess.STDOUT,
            check=False,
        )
    print(f" {time.monotonic() - started:.0f} s", flush=True)
    if done.returncode != 0:
        tail = "\n".join("    " + line for line in log.read_text(errors="replace").splitlines()[-40:])
        raise EnvironmentMissingError(
            f"{what} failed with exit status {done.returncode}. The end of {log.relative_to(ROOT)}:\n{tail}"
        )


def _ensure_packages() -> Path:
    python = VENV / "bin" / "python"
    recipe = _packages_recipe(python)
    if _read_stamp(VENV).get("packages") == recipe:
        return python
    base = _find_python()
    print(f"making .venv with Python {version_in(base)} (once; kept for later runs)")
    _make_venv(VENV, base)
    run_logged(f"installing {TORCH}", _pip(python, "install", TORCH))
    run_logged("installing tools and libraries", _pip(python, "install", "-r", REQUIREMENTS))
    _write_stamp(VENV, packages=_packages_recipe(python))
    return python


def _packages_recipe(python: Path) -> str:
    """Tell apart what is installed; the checkout's own path counts, since environments do not survive a move."""
    return _digest([str(ROOT), TORCH, REQUIREMENTS.read_text(), version_in(python) or "none"])


def _ensure_build(python: Path) -> None:
    sources = [ROOT / "CMakeLists.txt", ROOT / "pyproject.toml", *sorted((ROOT / "native").rglob("*"))]
    compilers = [os.environ.get(name, "") for name in ("CXX", "CXXFLAGS")]
    contents = [f"{path.relative_to(ROOT)}\0{path.read_bytes()!r}" for path in sources if path.is_file()]
    recipe = _digest([str(ROOT), *compilers, *contents])
    stamp = _read_stamp(VENV)
    if stamp.get("build") == recipe and (BUILD / "dev" / "CTestTestfile.cmake").exists():
        return
    _write_stamp(VENV, packages=stamp.get("packages", ""))  # a build that fails half-way is not believed later
    run_logged(
        "building the native modules and their tests",
        _pip(
            python, "install", "--no-deps", "--no-build-isolation", "--editable", ".",
            "-Cbuild-dir=build/dev", "-Ccmake.define.INFINITY_DEV=ON", "-Ccmake.define.INFINITY_TESTS=ON",
        ),
        CMAKE_GENERATOR="Ninja",
    )  # fmt: skip
    _write_stamp(VENV, packages=stamp.get("packages", ""), build=recipe)


def _require_compiler() -> None:
    """Ask before the downloads, not after them."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise EnvironmentMissingError(
            "No C++ compiler found: c++, g++ and clang++ are not on PATH and CXX is not set.\n"
            "Install one (Debian and Ubuntu: apt install g++; Fedora: dnf install gcc-c++), or set CXX."
        )


def _make_venv(folder: Path, base: str | Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    run_logged(f"creating {folder.relative_to(ROOT)}", [base, "-m", "venv", folder])
    python = folder / "bin" / "python"
    run_logged("updating pip", _pip(python, "install", "--upgrade", "pip"))


def _find_python() -> str:
    """Return the first supported interpreter that can make environments, the one running this script preferred."""
    running = getattr(sys, "_base_executable", sys.executable)
    named = (shutil.which(f"python3.{minor}") for minor in (11, 12, 13, 10))
    for candidate in (running, *named):
        if candidate and version_in(candidate) and _can_make_venv(candidate):
            return str(candidate)
    raise EnvironmentMissingError(
        f"No Python 3.10 to 3.13 with the venv module found; this script runs under {sys.version.split()[0]} at "
        f"{running}.\nInstall one (Debian and Ubuntu: apt install python3-venv) and put it on PATH."
    )


def version_in(python: str | Path) -> str | None:
    """Return the version of a supported interpreter, None for one that is missing, broken or not supported."""
    report = "import sys; print(*sys.version_info[:3])"
    try:
        done = subprocess.run([str(python), "-c", report], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    version = tuple(int(part) for part in done.stdout.split())
    return ".".join(map(str, version)) if version[:2] in SUPPORTED else None


def _can_make_venv(python: str | Path) -> bool:
    return (
        subprocess.run([str(python), "-c", "import venv, ensurepip"], capture_output=True, check=False).returncode == 0
    )


def _pip(python: Path, *arguments: str | Path) -> list[str | Path]:
    return [python, "-m", "pip", "--disable-pip-version-check", *arguments]


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _read_stamp(folder: Path) -> dict[str, str]:
    try:
        stamp = json.loads((folder / STAMP).read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def _write_stamp(folder: Path, **entries: str) -> None:
    (folder / STAMP).write_text(json.dumps(entries))


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Keep two scripts started together from making the same environment twice."""
    BUILD.mkdir(exist_ok=True)
    with (BUILD / "environment.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
