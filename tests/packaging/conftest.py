"""The wheels as users get them: built from the start of the session, while other tests run; the
tests of them come last.

Both are built one after the other in the folder in which scripts/demo builds for itself: what it
has compiled is not compiled again. No two builds work there at once, also where pytest is killed.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import env
from support.session import SHARED

ROOT = Path(__file__).resolve().parents[2]


# What is built for each fixture: the wheel of both packages, and that of deepnvme alone.
SOURCES = {"wheel": ".", "deepnvme_wheel": "./distributions/deepnvme"}
BUILD = f"build/{env.Needs.RUN.value}"
# Waits for the lock in a process of its own, so that pytest goes on; pip keeps it.
BUILDING = """
import fcntl, os, sys
lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o666)
fcntl.flock(lock, fcntl.LOCK_EX)
os.set_inheritable(lock, True)
os.execvp("sh", ["sh", "-c", sys.argv[2]])
"""
COMPILING_S = 1200  # at most, on a machine that is slow or busy


class WheelBuilds:
    """Builds each wheel once for all pytest workers, in a folder that they share: the first worker
    starts pip, and the others wait for its wheels.
    """

    def __init__(self, shared: Path, needed: list[str]) -> None:
        self._folder = shared / "wheel-builds"
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(FileExistsError):
            self._folder.mkdir()
            self._process = self._begin(needed)

    def result(self, name: str) -> Path:
        """Wait for a wheel; fail with what its build said if it failed."""
        log = self._folder / "log"
        while not self._status(name).exists():
            if self._process is not None and self._process.poll() is not None:
                self._note_missing("of none: the build ended without one")
            time.sleep(0.1)
        status = self._status(name).read_text().strip()
        assert status == "0", f"exit status {status}\n{log.read_text(errors='replace')}"
        (wheel,) = (self._folder / name).iterdir()
        return wheel

    def end(self, *, early: bool) -> None:
        """Leave nothing running: wait for what was begun here, which others may want, or stop it if
        all end early.
        """
        if self._process is None:
            return
        if early and self._process.poll() is None:
            shell = psutil.Process(self._process.pid)
            # parents first, so that no more is started
            for each in [shell, *shell.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            self._note_missing("of none: the worker that built was stopped")
        self._process.wait()

    def _note_missing(self, status: str) -> None:
        """Write down how builds ended that say nothing of it: other workers wait for that."""
        for name in SOURCES:
            if not self._status(name).exists():
                self._status(name).write_text(status)

    def _status(self, name: str) -> Path:
        return self._folder / f"{name}.status"

    def _begin(self, needed: list[str]) -> subprocess.Popen[bytes]:
        env.BUILD.mkdir(exist_ok=True)  # where the lock is
        lines = map(self._building, needed)
        with (self._folder / "log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-c", BUILDING, env.lock_of(env.Needs.RUN), "\n".join(lines)],
                cwd=ROOT,
                # a compiler takes much memory, too
                env={**os.environ, "CMAKE_BUILD_PARALLEL_LEVEL": "2", "CMAKE_GENERATOR": "Ninja"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _building(self, name: str) -> str:
        """Return the shell's lines that build a wheel and write down how that ended."""
        line = shlex.join(
            [
                *(sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel"),
                *(SOURCES[name], "--no-deps", "--no-build-isolation"),
                *("--wheel-dir", str(self._folder / name), f"-Cbuild-dir={ROOT / BUILD}"),
                # whatever that folder was made with
                *("-Ccmake.define.INFINITY_DEV=OFF", "-Ccmake.define.INFINITY_TESTS=OFF"),
            ]
        )
        status = shlex.quote(str(self._status(name)))
        return f"{line}; echo $? > {status}.new; mv {status}.new {status}"


BUILDS = pytest.StashKey[WheelBuilds]()


def wheels_of(item: pytest.Item) -> set[str]:
    return SOURCES.keys() & getattr(item, "fixturenames", ())


def needs_wheel(item: pytest.Item) -> bool:
    return bool(wheels_of(item))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let what needs a wheel run last, with time to wait for it."""
    items.sort(key=needs_wheel)
    for item in filter(needs_wheel, items):
        item.add_marker(pytest.mark.timeout(COMPILING_S))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the builds that selected tests need."""
    needed = set().union(*map(wheels_of, session.items))
    if needed and not session.config.option.collectonly:
        shared = session.config.stash[SHARED]
        session.config.stash[BUILDS] = WheelBuilds(shared, sorted(needed, reverse=True))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Leave nothing running, whichever way the session ends."""
    ended = exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}
    early = not ended or bool(session.shouldfail or session.shouldstop)
    if (builds := session.config.stash.get(BUILDS, None)) is not None:
        builds.end(early=early)


@pytest.fixture(scope="session")
def wheel(request: pytest.FixtureRequest) -> Path:
    """Return the wheel of both packages, built by pip from this checkout."""
    return request.config.stash[BUILDS].result("wheel")


@pytest.fixture(scope="session")
def deepnvme_wheel(request: pytest.FixtureRequest) -> Path:
    """Return the wheel of deepnvme alone, built by pip from the same sources."""
    return request.config.stash[BUILDS].result("deepnvme_wheel")
