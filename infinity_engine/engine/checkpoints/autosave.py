"""`Autosave`: when a run saves by itself, and when it ends because the machine is wanted back.

Decides; saves nothing. The handler of SIGTERM sets a flag and does nothing else (decision 0030).
"""

from __future__ import annotations

import math
import re
import signal
import threading
import time
from types import FrameType, MappingProxyType

from infinity_engine.errors import ConfigError
from infinity_engine.ranks.together import ManyRanks

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
        self._last_step = max(self._last_step, steps)
        if saved:
            self._last_s = time.monotonic()


class Autosave:
    """The schedule of one engine's saves, and whether its process was told to stop."""

    def __init__(self, whole: ManyRanks | None) -> None:
        self._whole = whole
        self._due: Due | None = None  # before the first call
        self._told_to_stop = False
        self._watches = False

    def stop(self) -> None:
        """Note that the process was told to stop. Signal handlers and other threads may call it."""
        self._told_to_stop = True

    def begin(self, every: int | str, steps: int) -> None:
        """Begin the schedule, or another one; watch for SIGTERM."""
        if self._due is None or self._due.every != every:
            self._due = Due(every, steps)
        self._watch()

    def decide(self, steps: int) -> tuple[bool, bool]:
        """Return whether it is time to save, and whether to stop; the same on all ranks."""
        assert self._due is not None, "the schedule has begun"
        due, stops = self._due.is_due(steps), self._told_to_stop
        if self._whole is not None:
            # Rank 0's clock decides, so that all save together; one rank's signal stops all.
            answers = self._whole.ranks.tell("autosave", [due, stops])
            due, stops = answers[0][0], any(answer[1] for answer in answers)
        self._due.note(steps, saved=due or stops)
        return due, stops

    def close(self) -> None:
        """Let SIGTERM do what it did before."""
        # A handler that the program has installed since stays.
        if self._watches and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._watches = False

    def _watch(self) -> None:
        """Handle SIGTERM, unless the program does, or this is no main thread."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle)
            self._watches = True

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self.stop()
