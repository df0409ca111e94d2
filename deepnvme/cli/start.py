"""The way into the command line, which says in one sentence what it lacks where it cannot run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import MappingProxyType

__all__ = ["main"]

_CANNOT_RUN = 1
_NEEDED = MappingProxyType({"rich": "tables", "numpy": "tensors"})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default this process's, and return the exit status."""
    if sys.platform != "linux":
        print(f"deepnvme: needs Linux; this is {sys.platform}", file=sys.stderr)
        return _CANNOT_RUN
    try:
        from deepnvme.cli.main import main as run
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name not in _NEEDED:
            raise
        print(
            f"deepnvme: the command line needs {missing.name}, for {_NEEDED[missing.name]}. "
            "Install it with: pip install 'deepnvme[cli]'",
            file=sys.stderr,
        )
        return _CANNOT_RUN
    return run(argv)
