"""The project's own environment: makes `.venv`, installs what the requirements files pin, builds
the native code.

Needs nothing but a supported Python with venv, a C++20 compiler and a package index. Every script
of the project calls `ensure()` or `enter()`; both do nothing when the environment still has what
the script `Needs`. An environment that works is replaced only by one that is complete: after a
failure, Ctrl-C or a kill the earlier one is there again. A part that is added in place is marked as
unfinished until it is there. The next start that finds this mark checks that every package is
whole, and makes the environment anew if one is not. Outside the checkout only the caches of its
tools are written.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path

__all__ = [
    "BUILD",
    "ROOT",
    "SUPPORTED",
    "THIS_PYTHON",
    "TORCH",
    "VENV",
    "EnvironmentMissingError",
    "Needs",
    "child_env",
    "ensure",
    "enter",
    "lock_of",
    "plain_ending",
    "rival_venv",
    "run_logged",
    "version_in",
]

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
BUILD = ROOT / "build"
LOGS = BUILD / "logs"
REQUIREMENTS = ROOT / "scripts" / "requirements.txt"
CHECK_REQUIREMENTS = ROOT / "scripts" / "requirements-check.txt"
STAMP = "infinity-engine.json"
_PATIENCE_S = 10.0  # from then on a script that waits for another one says which programs those are
UNFINISHED = "unfinished"  # the key of a stamp that names what is being added
# Installed first and alone: where a CPU build of this version is at hand it satisfies the pin, and
# nothing later pulls the CUDA packages of a newer one. What the package itself asks for is older.
TORCH = "torch==2.13.0"
SUPPORTED = ("3.10", "3.11", "3.12", "3.13")
THIS_PYTHON = "INFINITY_THIS_PYTHON"
"""Set to 1, the environment variable that runs a script under the Python it was started with,
`.venv` left alone.
"""


class EnvironmentMissingError(Exception):
    """The environment cannot be made; the message says what is missing and what to do."""


class Needs(Enum):
    """What a script asks of the environment. The value names its build, a folder of build/."""

    RUN = "run"  # torch, the libraries, the native modules as a user's wheel has them
    # besides, linters, test tools and native tests; warnings of the compiler are errors
    CHECK = "dev"


def ensure(needs: Needs) -> Path:
    """Return the Python of `.venv`, after making or mending the environment and the native build
    where they differ.

    Raises:
        EnvironmentMissingError: that cannot be done here.
    """
    _require_compiler()
    with _changing_environments():
        python = _ensure_packages(needs)
        _ensure_build(python, needs)
    return python


@contextlib.contextmanager
def plain_ending() -> Iterator[None]:
    """End the script with one message and no traceback: status 3 without an environment, 130 after
    Ctrl-C.
    """
    try:
        yield
    except EnvironmentMissingError as problem:
        print(f"\n{problem}", file=sys.stderr)
        raise SystemExit(3) from None
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        raise SystemExit(130) from None


@plain_ending()
def enter(script: str | Path) -> None:
    """Re-execute `script` with its arguments under `.venv`'s Python, unless it runs there already
    or THIS_PYTHON is 1.

    A problem with the environment is one message and exit status 3.
    """
    if os.environ.get(THIS_PYTHON) == "1":
        return
    python = ensure(Needs.RUN)
    if Path(sys.prefix) != VENV:
        os.execve(python, [str(python), str(script), *sys.argv[1:]], child_env())


def rival_venv(name: str, requirements: Sequence[str]) -> Path:
    """Return the Python of `.venvs/<name>`, a rival's own environment, installed in the order of
    `requirements`.

    Raises:
        EnvironmentMissingError: it cannot be made here.
    """
    with _changing_environments():
        folder = ROOT / ".venvs" / name
        python = folder / "bin" / "python"
        recipe = _digest([name, *requirements])
        _put_back(folder)
        if _read_stamp(folder).get("packages") != recipe or not python.exists():
            with _replacing(folder):
                _make_venv(folder, _find_python())
                for requirement in requirements:
                    run_logged(
                        f"installing {requirement} into .venvs/{name}",
                        _pip(python, "install", requirement),
                    )
                _write_stamp(folder, {"packages": recipe})
    return python


def child_env(venv: Path = VENV) -> dict[str, str]:
    """Return this process's environment with the tools of `venv` first on PATH."""
    environ = dict(os.environ)
    environ["PATH"] = f"{venv / 'bin'}{os.pathsep}{environ.get('PATH', os.defpath)}"
    environ["VIRTUAL_ENV"] = str(venv)
    environ.pop("PYTHONHOME", None)
    return environ


def rival_environ(python: Path) -> dict[str, str]:
    """Return the environment for a rival's Python, whose modules are compiled below `build/`.

    A build that was killed has left a lock, for which torch waits without end: it is removed. One
    bench runs in a checkout at a time.
    """
    extensions = BUILD / "torch_extensions"
    for lock in extensions.glob("*/lock"):
        lock.unlink(missing_ok=True)
    return {
        **child_env(python.parents[1]),
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(extensions),
    }


def run_logged(what: str, command: Sequence[str | Path], **overrides: str) -> None:
    """Run `command`, saying `what` it does; its output goes to a log, whose end is shown if it
    fails.
    """
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
            # The lock of the environments goes along: where this script is killed and pip is not,
            # the next start waits for pip.
            close_fds=False,
        )
    print(f" {time.monotonic() - started:.0f} s", flush=True)
    if done.returncode != 0:
        tail = "\n".join(
            "    " + line for line in log.read_text(errors="replace").splitlines()[-40:]
        )
        raise EnvironmentMissingError(
            f"{what} failed with exit status {done.returncode}. The end of "
            f"{log.relative_to(ROOT)}:\n{tail}"
        )


def _ensure_packages(needs: Needs) -> Path:
    """Install what is not there yet.

    Whoever needs less finds it in an environment that has more.
    """
    python = VENV / "bin" / "python"
    _put_back(VENV)
    if _read_stamp(VENV).get("packages") != _packages_recipe(python) or not _is_finished():
        base = _find_python()
        print(
            f"making .venv with Python {version_in(base)} (once; kept for later runs)", flush=True
        )
        with _replacing(VENV):
            _make_venv(VENV, base)
            run_logged(f"installing {TORCH}", _pip(python, "install", TORCH))
            run_logged("installing the libraries", _pip(python, "install", "-r", REQUIREMENTS))
            _write_stamp(VENV, {"packages": _packages_recipe(python)})
    tools = _digest([CHECK_REQUIREMENTS.read_text()])
    if needs is Needs.CHECK and _read_stamp(VENV).get("tools") != tools:
        with _adding("tools", tools):
            run_logged(
                "installing the tools",
                _pip(python, "install", "-r", REQUIREMENTS, "-r", CHECK_REQUIREMENTS),
            )
    return python


@contextlib.contextmanager
def _adding(part: str, recipe: str) -> Iterator[None]:
    """Stamp `part` of `.venv` once the body has added it; mark it as unfinished until then."""
    stamp = {key: value for key, value in _read_stamp(VENV).items() if key != part}
    _write_stamp(VENV, {**stamp, UNFINISHED: part})
    yield
    _write_stamp(VENV, {**stamp, part: recipe})


def _is_finished() -> bool:
    """Tell whether every package of `.venv` is whole; look only where a part is unfinished."""
    stamp = _read_stamp(VENV)
    part = stamp.pop(UNFINISHED, None)
    if part is None:
        return True
    broken = _broken_package(VENV)
    if broken is None:
        _write_stamp(VENV, stamp)
        return True
    print(f"an earlier start was cut off as it added the {part}: {broken} is broken", flush=True)
    return False


def _broken_package(venv: Path) -> str | None:
    """Return the name of a package that pip has installed or removed only in part, None if all are
    whole.

    pip itself takes such a package for installed. Its last act is to list INSTALLER in the
    package's RECORD, and it moves what it will remove to a folder whose name begins with ~.
    """
    for site in venv.glob("lib/python3*/site-packages"):
        for leftover in site.glob("~*"):
            return leftover.name
        for package in site.glob("*.dist-info"):
            record = package / "RECORD"
            listed = record.read_text(errors="replace") if record.exists() else ""
            files = {row[0] for row in csv.reader(listed.splitlines()) if row}
            missing = (f for f in files if not f.endswith(".pyc") and not (site / f).exists())
            if f"{package.name}/INSTALLER" not in files or any(missing):
                return package.name.removesuffix(".dist-info")
    return None


def _packages_recipe(python: Path) -> str:
    """Tell apart what is installed; the checkout's own path counts, since environments do not
    survive a move.
    """
    return _digest([str(ROOT), TORCH, REQUIREMENTS.read_text(), version_in(python) or "none"])


def _ensure_build(python: Path, needs: Needs) -> None:
    """Build and install the package unless what is installed was built from these sources for as
    much or more.
    """
    built = _read_stamp(VENV).get("build")
    recipes = _build_recipes()
    if needs is Needs.RUN:
        is_enough = built in recipes.values()
    else:
        is_enough = (
            built == recipes[needs] and (BUILD / needs.value / "CTestTestfile.cmake").exists()
        )
    if is_enough:
        return
    checks = "ON" if needs is Needs.CHECK else "OFF"
    folder = f"build/{needs.value}"
    with _locked(lock_of(needs), "is building"), _adding("build", recipes[needs]):
        run_logged(
            "building the native modules and their "
            "tests" if needs is Needs.CHECK else "building the native modules",
            _pip(
                python, "install", "--no-deps", "--no-build-isolation", "--editable", ".",
                f"-Cbuild-dir={folder}", f"-Ccmake.define.INFINITY_DEV={checks}",
                f"-Ccmake.define.INFINITY_TESTS={checks}",
            ),
            CMAKE_GENERATOR="Ninja",
        )  # fmt: skip


def lock_of(needs: Needs) -> Path:
    """Return the lock file of the build folder of `needs`; a build holds it while it compiles."""
    return BUILD / f"{needs.value}.lock"


def _build_recipes() -> dict[Needs, str]:
    """Tell apart what is built: the sources, the compiler asked for, and what the build is for."""
    sources = [
        ROOT / "CMakeLists.txt",
        ROOT / "pyproject.toml",
        *sorted((ROOT / "native").rglob("*")),
    ]
    compilers = [os.environ.get(name, "") for name in ("CXX", "CXXFLAGS")]
    contents = [
        f"{path.relative_to(ROOT)}\0{path.read_bytes()!r}" for path in sources if path.is_file()
    ]
    return {needs: _digest([needs.value, str(ROOT), *compilers, *contents]) for needs in Needs}


def _require_compiler() -> None:
    """Ask before the downloads, not after them."""
    compiler = (
        os.environ.get("CXX")
        or shutil.which("c++")
        or shutil.which("g++")
        or shutil.which("clang++")
    )
    if compiler is None:
        raise EnvironmentMissingError(
            "No C++ compiler found: c++, g++ and clang++ are not on PATH and CXX is not set.\n"
            "Install one (Debian and Ubuntu: apt install g++; Fedora: dnf install gcc-c++), or set "
            "CXX."
        )


def _make_venv(folder: Path, base: str | Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    run_logged(f"creating {folder.relative_to(ROOT)}", [base, "-m", "venv", folder])
    python = folder / "bin" / "python"
    run_logged("updating pip", _pip(python, "install", "--upgrade", "pip"))


@contextlib.contextmanager
def _replacing(folder: Path) -> Iterator[None]:
    """Let a new environment be made and stamped at `folder`; if that fails, the earlier one is put
    back.

    Environments hold their own path, so the new one is made in its place while the earlier one
    waits aside.
    """
    aside = _aside(folder)
    if folder.exists():
        aside.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(aside)
    try:
        yield
    except BaseException:
        _remove(folder)
        _put_back(folder)
        raise
    _remove(aside)


def _put_back(folder: Path) -> None:
    """Undo what a run that failed or was killed left: one that was never stamped goes, the earlier
    one comes back.
    """
    aside = _aside(folder)
    if not aside.exists():
        return
    if _read_stamp(folder):
        _remove(aside)
    else:
        _remove(folder)
        aside.rename(folder)


def _aside(folder: Path) -> Path:
    return BUILD / "aside" / folder.name


def _remove(folder: Path) -> None:
    """Delete an environment; one that is half deleted stands nowhere where it could be taken for a
    whole one.
    """
    trash = BUILD / "trash"
    shutil.rmtree(trash, ignore_errors=True)
    if folder.exists():
        folder.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)


def _find_python() -> str:
    """Return a supported interpreter that can make environments: the one running this script, else
    the newest.
    """
    running = getattr(sys, "_base_executable", sys.executable)
    named = (shutil.which(f"python{version}") for version in reversed(SUPPORTED))
    for candidate in (running, *named):
        if candidate and version_in(candidate) and _can_make_venv(candidate):
            return str(candidate)
    raise EnvironmentMissingError(
        f"No Python {SUPPORTED[0]} to {SUPPORTED[-1]} with the venv module found; this script runs "
        "under "
        f"{sys.version.split()[0]} at {running}.\n"
        "Install one (Debian and Ubuntu: apt install python3-venv) and put it on PATH."
    )


def version_in(python: str | Path) -> str | None:
    """Return the version of a supported interpreter, None for one that is missing, broken or not
    supported.
    """
    report = "import sys; print(*sys.version_info[:3], sep='.')"
    try:
        done = subprocess.run(
            [str(python), "-c", report], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    version = done.stdout.strip()
    return version if version.rpartition(".")[0] in SUPPORTED else None


def _can_make_venv(python: str | Path) -> bool:
    return (
        subprocess.run(
            [str(python), "-c", "import venv, ensurepip"], capture_output=True, check=False
        ).returncode
        == 0
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


def _write_stamp(folder: Path, stamp: Mapping[str, str]) -> None:
    written = folder / f"{STAMP}.new"
    written.write_text(json.dumps(stamp))
    written.replace(folder / STAMP)


@contextlib.contextmanager
def _changing_environments() -> Iterator[None]:
    """Keep two scripts started together from changing the same environment; say what the disk
    refuses.
    """
    try:
        BUILD.mkdir(exist_ok=True)
        with _locked(BUILD / "environment.lock", "is making an environment"):
            yield
    except OSError as problem:
        raise EnvironmentMissingError(
            f"The environment cannot be made: {problem}.\n"
            f"It takes up to 5 GB in .venv, .venvs and build of {ROOT}, all of which you must be "
            "able to write to."
        ) from problem


@contextlib.contextmanager
def _locked(path: Path, doing: str) -> Iterator[None]:
    """Hold a lock, which programs started meanwhile hold too: they go on where this script is
    killed. Say what is waited for: `doing` is what its holder does.
    """
    with path.open("w") as lock:
        os.set_inheritable(lock.fileno(), True)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another script that {doing} in this checkout ...", flush=True)
            tells = threading.Timer(_PATIENCE_S, _tell_holders, [lock.fileno()])
            tells.start()
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            finally:
                tells.cancel()
                tells.join()
        yield


def _tell_holders(lock: int) -> None:
    """Say who keeps the lock: a program that an ended script has left may do so for ever."""
    processes = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    holders = [number for number in processes if _holds(number, lock)]
    if holders:
        print("still waiting for:")
        for number in holders:
            print(f"  process {number}: {_command_of(number)}")
        print("If none of them does that any more, end them with kill.", flush=True)


def _holds(process: int, lock: int) -> bool:
    """Tell whether a process keeps a lock, which it may have from a parent that has ended."""
    wanted = os.fstat(lock)
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        for file in Path(f"/proc/{process}/fd").iterdir():
            # Scripts that wait have the file open too.
            if os.path.samestat(file.stat(), wanted) and "lock:" in (
                Path(f"/proc/{process}/fdinfo/{file.name}").read_text()
            ):
                return True
    return False


def _command_of(process: int) -> str:
    with contextlib.suppress(OSError):  # it has ended
        words = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace")
        return words.replace("\0", " ").strip()[:120]
    return "has ended"
