"""The wheel as users get it: built from the start of the session, while other tests run; the tests
of it come last.

Compiling it takes minutes, and most other tests wait more than they compute: the build gives way to
them.
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

from support.session import SHARED

ROOT = Path(__file__).resolve().parents[2]


class WheelBuild:
    """A build in a folder that all workers of a session share: whoever begins it first builds for
    all.
    """

    def __init__(self, shared: Path, source: str) -> None:
        self._source = source
        self._folder = shared / f"wheel-build-{Path(source).name or 'both'}"
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(FileExistsError):
            self._folder.mkdir()
            self._process = self._begin()

    def result(self) -> Path:
        """Wait for the wheel; fail with what the build said if it failed."""
        while not self._status.exists():
            time.sleep(0.1)
        status = self._status.read_text().strip()
        log = self._folder / "log"
        assert status == "0", f"exit status {status}\n{log.read_text(errors='replace')}"
        (wheel,) = (self._folder / "wheels").iterdir()
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
            # or others would wait for it
            self._status.write_text("of none: the worker that built was stopped")
        self._process.wait()

    @property
    def _status(self) -> Path:
        return self._folder / "status"

    def _begin(self) -> subprocess.Popen[bytes]:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "wheel",
            self._source,
            "--no-deps",
        ]
        line = shlex.join(
            ["nice", *pip, "--no-build-isolation", "--wheel-dir", str(self._folder / "wheels")]
        )
        status = shlex.quote(str(self._status))
        with (self._folder / "log").open("wb") as log:
            return subprocess.Popen(
                ["sh", "-c", f"{line}; echo $? > {status}.new; mv {status}.new {status}"],
                cwd=ROOT,
                # a compiler takes much memory, too
                env={**os.environ, "CMAKE_BUILD_PARALLEL_LEVEL": "2"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )


# What is built for each fixture: the wheel of both packages, and that of deepnvme alone.
SOURCES = {"wheel": ".", "deepnvme_wheel": "./distributions/deepnvme"}
BUILDS = pytest.StashKey[dict[str, WheelBuild]]()


def wheels_of(item: pytest.Item) -> set[str]:
    return SOURCES.keys() & getattr(item, "fixturenames", ())


def needs_wheel(item: pytest.Item) -> bool:
    return bool(wheels_of(item))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let what needs a wheel run last."""
    items.sort(key=needs_wheel)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the builds that selected tests need."""
    needed = set().union(*map(wheels_of, session.items))
    if session.config.option.collectonly:
        return
    shared = session.config.stash[SHARED]
    session.config.stash[BUILDS] = {
        name: WheelBuild(shared, SOURCES[name]) for name in sorted(needed)
    }


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Leave nothing running, whichever way the session ends."""
    ended = exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}
    early = not ended or bool(session.shouldfail or session.shouldstop)
    for build in session.config.stash.get(BUILDS, {}).values():
        build.end(early=early)


@pytest.fixture(scope="session")
def wheel(request: pytest.FixtureRequest) -> Path:
    """Return the wheel of both packages, built by pip from this checkout."""
    return request.config.stash[BUILDS]["wheel"].result()


@pytest.fixture(scope="session")
def deepnvme_wheel(request: pytest.FixtureRequest) -> Path:
    """Return the wheel of deepnvme alone, built by pip from the same sources."""
    return request.config.stash[BUILDS]["deepnvme_wheel"].result()
