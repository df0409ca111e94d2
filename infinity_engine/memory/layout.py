"""Where a plan's buffers lie in a pool. PinnedPool gives leases at the places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from infinity_engine.plan import Extent

__all__ = ["Layout"]


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of all buffers, by name, in `nbytes` bytes."""

    places: Mapping[str, Extent]
    nbytes: int
