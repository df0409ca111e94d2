"""How much of this machine's processors others use while this process measures.

Reads what the kernel counts and starts nothing. Called around a calibration.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["OthersWork", "machine_busy_s"]

_STAT = Path("/proc/stat")
_IDLE = (3, 4)  # of the counters after the word "cpu": idle, and idle until I/O ends


def machine_busy_s() -> float | None:
    """Return the processor time that all processes had since the start; None: not known."""
    try:
        with _STAT.open(encoding="ascii") as file:
            # The fields after the eighth, of guests, are counted in the first two as well.
            counters = [int(text) for text in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    busy = sum(ticks for place, ticks in enumerate(counters) if place not in _IDLE)
    # The kernel counts in ticks; sysconf knows how many there are in a second.
    return busy / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    # With those of child processes that have ended: the kernel's sum has them too.
    return sum(os.times()[:4])


class OthersWork:
    """Compares processor time with wall time from its making on: what others used of all cores."""

    def __init__(
        self,
        *,
        busy_s: Callable[[], float | None] = machine_busy_s,
        own_s: Callable[[], float] = _own_s,
        clock_s: Callable[[], float] = time.monotonic,
        cores: int | None = None,
    ) -> None:
        self._busy_s, self._own_s, self._clock_s = busy_s, own_s, clock_s
        self._cores = cores or os.cpu_count() or 1
        self._start = busy_s(), own_s(), clock_s()

    def share(self) -> float:
        """Return the part of all cores' time that others used since; 0 where it is not known."""
        before_s, own_before_s, start_s = self._start
        now_s, passed_s = self._busy_s(), self._clock_s() - start_s
        # Where the kernel does not say, a measurement goes on as on an idle machine.
        if before_s is None or now_s is None or passed_s <= 0:
            return 0.0
        others_s = (now_s - before_s) - (self._own_s() - own_before_s)
        # The two clocks have different steps: small negative differences are nothing.
        return min(max(others_s / (passed_s * self._cores), 0.0), 1.0)
