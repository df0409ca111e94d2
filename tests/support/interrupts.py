"""Ctrl-C at each place where Python would notice it, or at any line, one after the other and
without luck.

Those places are where a function begins, and where a call of C code has returned: in no variable is
then what it returned. The signal is a true one: whoever holds it back sees it later.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import count
from types import FrameType, ModuleType
from typing import Any

import pytest

__all__ = ["interrupted", "interrupted_at", "interruptions", "walks"]


def walks(*first: int) -> list[Any]:
    """Return the lines at which walks through code begin, for parametrize: each begins a test.

    Walks of one stride that begin at different lines stop at different lines of the same
    functions. By default, the middle one runs; the others are slow.
    """
    by_default = first[len(first) // 2]
    return [
        pytest.param(line, marks=[] if line == by_default else pytest.mark.slow) for line in first
    ]


def interruptions(
    prepare: Callable[[], Callable[[], object]], *modules: ModuleType
) -> Iterator[int]:
    """Do what `prepare` returns, anew each time, and yield after each time that it was interrupted
    in these modules.

    At first at the first place that there is, then at the second, until there are no more.
    """
    for nth in count():
        if not interrupted(prepare(), nth, modules):
            assert nth, "nothing of it was in these modules"
            return
        yield nth


def interrupted(act: Callable[[], object], nth: int, modules: Collection[ModuleType]) -> bool:
    """Do something, with Ctrl-C at place `nth`, from 0, that is in these modules; False where it
    has not so many.
    """
    files = {module.__file__ for module in modules}
    left = nth

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        if event in ("call", "c_return") and frame.f_code.co_filename in files:
            left -= 1
            if left < 0:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(before)
    return False


@contextmanager
def interrupted_at(
    line: int,
    files: tuple[str, ...],
    function: str | None = None,
    *,
    number: signal.Signals = signal.SIGINT,
) -> Iterator[list[bool]]:
    """Interrupt the body where the n-th line, from 1, of files that end so begins; tell whether it
    was.

    With `function`, only the lines of functions of that name count.
    """
    seen, told = 0, [False]

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal seen
        if not frame.f_code.co_filename.endswith(files) or function not in {
            None,
            frame.f_code.co_name,
        }:
            return None
        seen += event == "line"
        if event == "line" and seen == line:
            told[0] = True
            signal.raise_signal(number)
        return trace

    sys.settrace(trace)
    try:
        yield told
    except KeyboardInterrupt:
        assert told[0], "nobody else interrupts"
    finally:
        sys.settrace(None)
