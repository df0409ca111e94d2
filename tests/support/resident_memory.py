"""The process's real size in RAM, to compare with what the engine counts."""

from __future__ import annotations

import re
from pathlib import Path

import psutil

_HIGH_WATER = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


class ResidentMemory:
    """The process's resident bytes, compared with those at the moment when it was made."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self.baseline_bytes = self.now_bytes()

    def now_bytes(self) -> int:
        """Return what is resident now."""
        return int(self._process.memory_info().rss)

    def above_baseline(self) -> int:
        """Return what is resident now and was not at the baseline; 0 where it has become less."""
        return max(0, self.now_bytes() - self.baseline_bytes)

    def peak_bytes(self) -> int | None:
        """Return the most that was ever resident, since the process began; None: unknown."""
        found = _HIGH_WATER.search(Path("/proc/self/status").read_text())
        # The kernel writes kB and means KiB.
        return int(found[1]) * 1024 if found else None
