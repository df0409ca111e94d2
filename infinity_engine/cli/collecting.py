"""Commands without the garbage collector: what a plan is made of has no cycles, and much of it.

Called by plan.py, compare.py and simulate.py.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_collecting"]


@contextmanager
def without_collecting() -> Iterator[None]:
    """Look for no cycles while the body runs, which takes a tenth of the time of a plan."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
