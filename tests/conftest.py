"""What every test may rely on, however the suite was started and whatever else the machine does."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings


def pytest_configure() -> None:
    """Let Ctrl-C interrupt, and let no property fail for being slow."""
    # A shell's background job is started with SIGINT ignored, and its children inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy machine")


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Let torch compute the same bits each time."""
    from support.determinism import deterministic_compute  # imports torch, which not every test's environment has

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
