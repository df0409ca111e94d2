"""Which torch the engine can run on. Reads the installed version without importing torch."""

from __future__ import annotations

from importlib import metadata

from infinity_engine.errors import MissingDependencyError
from infinity_engine.machine.packages import OLDEST_TORCH, is_torch_new_enough

__all__ = ["require_torch"]


def require_torch(needed_by: str) -> None:
    """Raise MissingDependencyError, naming the extra to install, unless a new enough torch is
    installed.
    """
    try:
        found = metadata.version("torch")
    except metadata.PackageNotFoundError:
        found = None
    if found is None or not is_torch_new_enough(found):
        raise MissingDependencyError(
            needed_by=needed_by,
            package=f"PyTorch >= {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}",
            found=found,
            extra="torch",
        )
