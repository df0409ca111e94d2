"""Which torch the engine can run on. Reads the installed version without importing torch."""

from __future__ import annotations

import re
from importlib import metadata

from infinity_engine.errors import MissingDependencyError

__all__ = ["OLDEST_TORCH", "require_torch"]

OLDEST_TORCH = (2, 6)


def require_torch(needed_by: str) -> None:
    """Raise MissingDependencyError, naming the extra to install, unless a new enough torch is installed."""
    try:
        found = metadata.version("torch")
    except metadata.PackageNotFoundError:
        found = None
    numbers = re.match(r"(\d+)\.(\d+)", found or "")
    if numbers is None or (int(numbers[1]), int(numbers[2])) < OLDEST_TORCH:
        raise MissingDependencyError(
            needed_by=needed_by,
            package=f"PyTorch >= {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}",
            found=found,
            extra="torch",
        )
