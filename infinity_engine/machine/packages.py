"""The installed packages that matter and how torch was built, without importing any of them.

Versions come from the installed metadata, torch's CUDA version from the text of its version.py.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from infinity_engine.errors import MissingDependencyError

if TYPE_CHECKING:
    from importlib.metadata import Distribution

__all__ = [
    "OLDEST_TORCH",
    "Packages",
    "TorchBuild",
    "is_torch_new_enough",
    "probe_packages",
    "require_torch",
]

OLDEST_TORCH = (2, 6)
# cupy has a distribution for each CUDA version it was compiled for.
_CUPY_NAMES = ("cupy-cuda13x", "cupy-cuda12x", "cupy")


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchBuild:
    """What torch was compiled for; `cuda` is None in a build for the CPU (or for other GPUs)."""

    cuda: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Packages:
    """Installed versions; None: not installed. `torch_build` is None where torch does not say."""

    torch: str | None
    torch_build: TorchBuild | None
    cupy: str | None
    numpy: str | None
    liburing: str | None
    safetensors: str | None


def probe_packages(path: Sequence[str] | None = None) -> Packages:
    """Look for the packages in the directories of `path`, by default where Python imports from."""
    torch = _distribution("torch", path)
    cupy = next((found for name in _CUPY_NAMES if (found := _distribution(name, path))), None)
    return Packages(
        torch=torch.version if torch else None,
        torch_build=_torch_build(torch) if torch else None,
        cupy=cupy.version if cupy else None,
        numpy=_version("numpy", path),
        liburing=_version("liburing", path),
        safetensors=_version("safetensors", path),
    )


def is_torch_new_enough(version: str) -> bool:
    """Tell whether the engine supports a torch of this version: "2.6.0", "2.13.0a0+git1234"."""
    # Two numbers decide: builds of one's own have anything behind them.
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= OLDEST_TORCH


def _distribution(name: str, path: Sequence[str] | None) -> Distribution | None:
    # Here, as importing it takes as long as some answers of the command line.
    from importlib.metadata import distributions

    where = list(sys.path if path is None else path)
    # The first on the path is the one that an import finds.
    return next(iter(distributions(name=name, path=where)), None)


def _version(name: str, path: Sequence[str] | None) -> str | None:
    found = _distribution(name, path)
    return found.version if found else None


def _torch_build(torch: Distribution) -> TorchBuild | None:
    # Parsed and not imported: importing torch takes seconds, and may fail for lack of a library.
    try:
        tree = ast.parse(Path(str(torch.locate_file("torch/version.py"))).read_text())
    except (OSError, SyntaxError, ValueError):
        return None
    # version.py assigns `cuda` with or without an annotation, depending on torch's version.
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if (
            "cuda" in names
            and isinstance(node, ast.Assign | ast.AnnAssign)
            and isinstance(node.value, ast.Constant)
        ):
            return TorchBuild(cuda=node.value.value if isinstance(node.value.value, str) else None)
    return None


def require_torch(needed_by: str) -> None:
    """Raise MissingDependencyError, naming the extra, unless a new enough torch is installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("torch")
    except PackageNotFoundError:
        found = None
    if found is None or not is_torch_new_enough(found):
        raise MissingDependencyError(
            needed_by=needed_by,
            package=f"PyTorch >= {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}",
            found=found,
            extra="torch",
        )
