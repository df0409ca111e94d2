"""What the processes of one test session share."""

from __future__ import annotations

from pathlib import Path

import pytest

__all__ = ["SHARED"]

SHARED = pytest.StashKey[Path]()
"""The folder that all workers of the session see, and that goes with it."""
