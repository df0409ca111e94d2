"""Arguments of the `deepnvme` commands: `type=` functions for argparse, which raise its error."""

from __future__ import annotations

import argparse
from pathlib import Path

from deepnvme.sizes import parse_size

__all__ = ["directory_argument", "seconds_argument", "size_argument"]


def directory_argument(text: str) -> Path:
    """Return the directory. An empty text, as of a variable that is not set, names none."""
    if not text:
        raise argparse.ArgumentTypeError("expected a directory, got ''; the current one is .")
    return Path(text)


def size_argument(text: str) -> int:
    """Return the bytes that `text`, such as "512MiB", stands for."""
    try:
        return parse_size(text)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


def seconds_argument(text: str) -> float:
    """Return a time between a tenth of a second and an hour."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"expected 0.1 to 3600 seconds, got {text!r}")
    return seconds
