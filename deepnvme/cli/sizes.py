"""Sizes in bytes as people write and read them: "1GiB" is 1073741824. For the command line only."""

from __future__ import annotations

import argparse
import re
from types import MappingProxyType

__all__ = ["format_bytes", "parse_seconds", "parse_size"]

_UNITS = MappingProxyType({"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1})


def parse_size(text: str) -> int:
    """Return the bytes that `text`, such as "512MiB", stands for."""
    parts = re.fullmatch(r"([0-9]{1,15}) ?([KMGT]iB|B)", text)
    if parts is None:
        raise argparse.ArgumentTypeError(f"expected a whole number and one of {', '.join(_UNITS)}; got {text!r}")
    return int(parts[1]) * _UNITS[parts[2]]


def parse_seconds(text: str) -> float:
    """Return a time between a tenth of a second and an hour."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"expected 0.1 to 3600 seconds, got {text!r}")
    return seconds


def format_bytes(nbytes: int) -> str:
    """Return `nbytes` as short text, such as "1.5 GiB"."""
    unit, scale = next(((unit, scale) for unit, scale in _UNITS.items() if nbytes >= scale), ("B", 1))
    return f"{round(nbytes / scale, 2):g} {unit}"
