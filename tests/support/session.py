"""What the processes of one test session share, and which of its files they begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

__all__ = ["LONG", "SHARED"]

SHARED = pytest.StashKey[Path]()
"""The folder that all workers of the session see, and that goes with it."""

LONG = (
    "tests/scripts/test_demo.py",
    "tests/distributed/test_building.py",
    "tests/distributed/test_hybrid.py",
)
"""Files of tests that take 15 s or more each. They come first: a worker that comes to such a test
last would let all others wait."""
