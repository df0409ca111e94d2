"""What tests ask of extents."""

from __future__ import annotations

from infinity_engine.plan import Extent

__all__ = ["overlap"]


def overlap(one: Extent, other: Extent) -> bool:
    """Tell whether some byte lies in both."""
    return max(one.offset, other.offset) < min(one.end, other.end)
