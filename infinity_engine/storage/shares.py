"""`shares_by_rate`: how many pages of a swap file each directory has, so that its drives end at
the same time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

__all__ = ["shares_by_rate"]


def shares_by_rate(
    pages: int, limits: Mapping[str, int], rates: Mapping[str, float]
) -> dict[str, int]:
    """Return how many of the pages each directory has: by its rate, and never above its limit.

    The others share what one has no room for. Where all limits together are less, these are it.
    """
    weights = {directory: Fraction(rates[directory]) for directory in limits}
    left, weight = pages, sum(weights.values())
    found = dict.fromkeys(limits, 0)
    # First where the limit is lowest for the rate: after one that is below it, all are.
    for directory in sorted(limits, key=lambda name: limits[name] / weights[name]):
        share = math.ceil(left * weights[directory] / weight)
        found[directory] = min(share, limits[directory])
        left -= found[directory]
        weight -= weights[directory]
    return found
