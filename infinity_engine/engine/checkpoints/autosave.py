"""`Autosave`: when a run saves by itself, and when it ends because the machine is wanted back.

Decides; saves nothing. The handler of SIGTERM sets flags and does nothing else (decision 0030). All
engines of a process share it, and it keeps none of them alive.
"""

from __future__ import annotations

import math
import os
import re
import signal
import threading
import time
import weakref
from types import FrameType, MappingProxyType

from infinity_engine.errors import ConfigError
from infinity_engine.ranks.together import ManyRanks, OneRank

__all__ = ["PREEMPTED_EXIT_CODE", "Autosave", "Due"]

PREEMPTED_EXIT_CODE = 75
"""How a process ends that has saved since it was told to stop: EX_TEMPFAIL of sysexits.h."""

_UNITS = MappingProxyType({"s": 1.0, "min": 60.0, "h": 3600.0})
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(s|min|h)")
_EXPECTED = 'a number of steps, 1 or more, or a time such as "30min", "90s" or "1.5h"'


class Due:
    """Every how many steps, or seconds, it is time to save."""

    def __init__(self, every: int | str, steps: int) -> None:
        self.every = every
        self._steps, self._seconds = math.inf, math.inf
        if isinstance(every, int) and not isinstance(every, bool) and every > 0:
            self._steps = every
        else:
            found = _DURATION.fullmatch(every.strip()) if isinstance(every, str) else None
            if found is None or not float(found[1]):
                raise ConfigError(field="every", value=every, expected=_EXPECTED)
            self._seconds = float(found[1]) * _UNITS[found[2]]
        self._last_step = max(steps - 1, 0)  # the first call comes after a step
        self._last_s = time.monotonic()

    def is_due(self, steps: int) -> bool:
        """Tell whether it is time now, `steps` updates after the begin."""
        if math.isfinite(self._steps):
            # In multiples of `every`, so that a resumed run saves at the same steps.
            return steps // self._steps > self._last_step // self._steps
        return time.monotonic() - self._last_s >= self._seconds

    def note(self, steps: int, *, saved: bool) -> None:
        """Note a call, and whether it has saved."""
        self._last_step = steps
        if saved:
            self._last_s = time.monotonic()

    def continue_from(self, steps: int) -> None:
        """Note that the run has loaded a state in which it had made this many steps."""
        self._last_step = steps


class Autosave:
    """The schedule of one engine's saves, and whether its process was told to stop."""

    def __init__(self, ranks: OneRank | ManyRanks) -> None:
        self._ranks = ranks
        self._due: Due | None = None  # before the first call
        self._told_to_stop = False
        self._watching_process: int | None = None  # whose SIGTERM stops this run

    def stop(self) -> None:
        """Note that the process was told to stop. Signal handlers and other threads may call it."""
        self._told_to_stop = True

    def begin(self, every: int | str, steps: int) -> None:
        """Begin the schedule, or another one."""
        if self._due is None or self._due.every != every:
            self._due = Due(every, steps)

    def continue_from(self, steps: int) -> None:
        """Note that the run has loaded a state in which it had made this many steps."""
        if self._due is not None:
            self._due.continue_from(steps)

    def decide(self, steps: int) -> tuple[bool, bool]:
        """Return whether it is time to save, and whether to stop; the same on all ranks."""
        assert self._due is not None, "the schedule has begun"
        answers = self._ranks.tell("autosave", [self._due.is_due(steps), self._told_to_stop])
        # Rank 0's clock decides, so that all save together; one rank's signal stops all.
        due, stops = answers[0][0], any(answer[1] for answer in answers)
        self._due.note(steps, saved=due or stops)
        return due, stops

    @property
    def watches(self) -> bool:
        """Whether SIGTERM stops this run. A process that was forked from it has no run."""
        return self._watching_process == os.getpid()

    def watch(self) -> None:
        """Handle SIGTERM, unless the program does, or this is no main thread.

        Called where no signals are held: a hold replaces handlers.
        """
        if not _in_main_thread() or self.watches:
            return
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _stop_all)
        if signal.getsignal(signal.SIGTERM) is _stop_all:
            self._watching_process = os.getpid()
            _SCHEDULES.add(self)

    def close(self) -> None:
        """Let SIGTERM do what it did before, unless another engine's schedule watches for it."""
        self._watching_process = None
        # A handler that the program has installed since stays.
        if _in_main_thread() and signal.getsignal(signal.SIGTERM) is _stop_all and not _watching():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


_SCHEDULES: weakref.WeakSet[Autosave] = weakref.WeakSet()
"""All that have watched for SIGTERM: an engine may be dropped without close()."""


def _watching() -> list[Autosave]:
    return [schedule for schedule in _SCHEDULES if schedule.watches]


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _stop_all(number: int, _frame: FrameType | None) -> None:
    """Stop all runs of this process; where there is none, end it as SIGTERM does."""
    watching = _watching()
    for schedule in watching:
        schedule.stop()
    if not watching:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
