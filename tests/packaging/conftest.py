"""The wheel as users get it: built from the start of the session, while other tests run; the tests of it come last.

Compiling it takes minutes, and most other tests wait more than they compute: the build gives way to them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]


class WheelBuild:
    """A build under way. It ends with the session at the latest, and takes what it made with it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="wheel-")
        self._wheels = Path(self._folder.name) / "wheels"
        self._log = Path(self._folder.name) / "log"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", ".", "--no-deps"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["nice", *pip, "--no-build-isolation", "--wheel-dir", self._wheels],
                cwd=ROOT,
                env={**os.environ, "CMAKE_BUILD_PARALLEL_LEVEL": "2"},  # a compiler takes much memory, too
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def result(self) -> Path:
        """Wait for the wheel; fail with what the build said if it failed."""
        status = self._process.wait()
        assert status == 0, f"exit status {status}\n{self._log.read_text(errors='replace')}"
        (wheel,) = self._wheels.iterdir()
        return wheel

    def end(self) -> None:
        """Stop what still runs, parents first, so that no more is started, and delete everything."""
        if self._process.poll() is None:
            pip = psutil.Process(self._process.pid)
            for each in [pip, *pip.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            self._process.wait()
        self._folder.cleanup()


BUILD = pytest.StashKey[WheelBuild]()


def needs_wheel(item: pytest.Item) -> bool:
    return "wheel" in getattr(item, "fixturenames", ())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let what needs the wheel run last."""
    items.sort(key=needs_wheel)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the build if a test that was selected needs it."""
    if any(map(needs_wheel, session.items)) and not session.config.option.collectonly:
        session.config.stash[BUILD] = WheelBuild()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Leave nothing running, whichever way the session ends."""
    build = session.config.stash.get(BUILD, None)
    if build is not None:
        build.end()


@pytest.fixture(scope="session")
def wheel(request: pytest.FixtureRequest) -> Path:
    """Return the wheel, built by pip from this checkout."""
    return request.config.stash[BUILD].result()
