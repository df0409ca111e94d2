"""The three memories that the engine treats as one.

Names them and nothing more; used by everything that places bytes.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["Tier"]


class Tier(Enum):
    """Where bytes can live, fastest first."""

    DEVICE = "device"  # The accelerator's own memory: the only one that modules compute in.
    # The machine's RAM, pinned where the system allows: every byte on its way up or down passes
    # here.
    HOST = "host"
    # Files on the drives: the largest, the slowest, and the one that wears out by writing.
    NVME = "nvme"

    # By identity, as each member is one object: Enum's own hash runs in Python at each look-up.
    __hash__ = object.__hash__
