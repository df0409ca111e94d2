"""Sizes in bytes as people write and read them: "1GiB" is 1073741824.

A leaf: works without the native module.
"""

from __future__ import annotations

import re
from types import MappingProxyType

__all__ = ["PAGE", "SMALL_BYTES", "format_bytes", "parse_size", "whole_pages"]

PAGE = 4096
"""Bytes of a page: direct I/O moves whole pages, and space on drives is allocated in them."""

SMALL_BYTES = 256 << 10
"""Tensors up to this size share operations within a call, through staging memory."""

_UNITS = MappingProxyType({"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1})


def whole_pages(nbytes: int) -> int:
    """Return the bytes of the pages that `nbytes` take."""
    return -(-nbytes // PAGE) * PAGE


def parse_size(text: str) -> int:
    """Return the bytes that `text`, such as "512MiB", stands for.

    Raises:
        ValueError: it is not a whole number and one of the units.
    """
    parts = re.fullmatch(r"([0-9]{1,15}) ?([KMGT]iB|B)", text)
    if parts is None:
        raise ValueError(f"expected a whole number and one of {', '.join(_UNITS)}; got {text!r}")
    return int(parts[1]) * _UNITS[parts[2]]


def format_bytes(nbytes: int) -> str:
    """Return `nbytes` as short text, such as "1.5 GiB"."""
    amount, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if round(amount, 2) < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{round(amount, 2):g} {unit}"
