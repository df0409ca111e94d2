"""`Partitioning`: how parameters are divided among the ranks.

Pure data, so that settings need no native code.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["Partitioning"]


class Partitioning(Enum):
    """Which ranks own a parameter."""

    # Every rank owns 1/N: the links and drives of all carry it at once.
    BANDWIDTH_CENTRIC = "bandwidth_centric"
    BROADCAST = "broadcast"  # One rank owns all of it, and sends it to the others.
