"""fsync of a file by its name, and of a directory, which makes the names in it durable.

For files that are not open for I/O through a queue. Called by the store's manifests, the writer of
safetensors files and `deepnvme cp`.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["sync_directory", "sync_file"]


def sync_file(path: Path) -> None:
    """Make a file durable, whichever process wrote it."""
    _sync(path, 0)


def sync_directory(folder: Path) -> None:
    """Make the names in a directory durable."""
    _sync(folder, os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    # fsync asks for no right to write, and covers what other descriptors wrote.
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
