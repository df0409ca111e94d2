"""Ctrl-C at each place where Python would notice it, one after the other, without signals and without luck.

Those are where a function begins, and where a call of C code has returned: in no variable is then what it returned.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from itertools import count
from types import FrameType, ModuleType

__all__ = ["interrupted", "interruptions"]


def interruptions(prepare: Callable[[], Callable[[], object]], *modules: ModuleType) -> Iterator[int]:
    """Do what `prepare` returns, anew each time, and yield after each time that it was interrupted in these modules.

    At first at the first place that there is, then at the second, until there are no more.
    """
    for nth in count():
        if not interrupted(prepare(), nth, modules):
            assert nth, "nothing of it was in these modules"
            return
        yield nth


def interrupted(act: Callable[[], object], nth: int, modules: Collection[ModuleType]) -> bool:
    """Do something, with Ctrl-C at place `nth`, from 0, that is in these modules; False where it has not so many."""
    files = {module.__file__ for module in modules}
    left = nth

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        if event in ("call", "c_return") and frame.f_code.co_filename in files:
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(before)
    return False
