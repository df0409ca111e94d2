"""Files without a name that this process has open: what temporary volumes are made of."""

from __future__ import annotations

import os
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")


def unnamed_files(directory: Path) -> list[Path]:
    """Return a path to each file that was made in the directory and has no name there, in the order
    of making.
    """
    found: dict[int, Path] = {}
    for descriptor in sorted(os.listdir(_DESCRIPTORS), key=int):
        path = _DESCRIPTORS / descriptor
        try:
            shown = os.readlink(path)
        except FileNotFoundError:  # the descriptor by which the list was read
            continue
        if Path(shown).parent == directory.resolve() and shown.endswith(" (deleted)"):
            found.setdefault(path.stat().st_ino, path)
    return list(found.values())
