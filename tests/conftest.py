"""What every test may rely on, however the suite was started and whatever else the machine does."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from support.session import LONG, SHARED

_FOLDER = pytest.StashKey["tempfile.TemporaryDirectory[str]"]()


def pytest_configure(config: pytest.Config) -> None:
    """Let Ctrl-C interrupt, let no property fail for being slow, and let bytecode be kept."""
    # A shell's background job is started with SIGINT ignored, and its children inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.register_profile(
        "busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("busy machine")
    # The tests start hundreds of programs, which would compile the package anew each time. Images
    # of containers often forbid to keep what was compiled.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    worker = getattr(config, "workerinput", None)  # of pytest-xdist
    # before any of them imports torch: threads of all would wait for one another's cores
    if worker is not None:
        cores = len(os.sched_getaffinity(0))
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // worker["workercount"])))
    if worker is None:
        config.stash[_FOLDER] = tempfile.TemporaryDirectory(prefix="tests-")
    config.stash[SHARED] = Path(config.stash[_FOLDER].name if worker is None else worker["shared"])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of pytest-xdist which folder it shares with the others."""
    node.workerinput["shared"] = str(node.config.stash[SHARED])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest."""
    # by the id: a location is looked up in the sources
    items.sort(key=lambda item: item.nodeid.partition("::")[0] not in LONG)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove what was shared."""
    if _FOLDER in config.stash:
        config.stash[_FOLDER].cleanup()


@pytest.fixture(scope="module", autouse=True)
def short_collections() -> None:
    """Leave what earlier modules imported and made out of garbage collections from now on.

    The engine collects where it looks for views that are left. With all objects of torch, pytest
    and hypothesis in the way, each collection took up to a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def no_kept_calibration(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let plans find no figures that this machine's user, or another module, has kept."""
    with pytest.MonkeyPatch.context() as patch:
        folder = request.config.stash[SHARED] / "caches" / request.node.nodeid.replace("/", ".")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Let torch compute the same bits each time."""
    # imports torch, which not every test's environment has
    from support.determinism import deterministic_compute

    with deterministic_compute():
        yield


@pytest.fixture(scope="session")
def pyproject() -> dict[str, Any]:
    """Return what pyproject.toml says."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # came with pytest
    return dict(tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text()))
