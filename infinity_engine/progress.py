"""`Progress`: how far long work before training has come, reported to the user's function.


Counts bytes that its callers move, and estimates nothing. An exception of that function ends the
work, as any failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from infinity_engine.errors import ConfigError
from infinity_engine.units import format_bytes

__all__ = ["Progress", "ProgressReporter"]

_PERIOD_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How much of some work is done, as one line of text; `total_bytes` is None while unknown."""

    what: str
    done_bytes: int
    total_bytes: int | None

    def __str__(self) -> str:
        """Return it as in "loading values: 1.5 GiB of 4 GiB"."""
        total = "" if self.total_bytes is None else f" of {format_bytes(self.total_bytes)}"
        return f"{self.what}: {format_bytes(self.done_bytes)}{total}"


class ProgressReporter:
    """Calls `report`, where there is one: at most once a second, and at the end of each part.

    Raises:
        ConfigError: it cannot be called.
    """

    def __init__(self, report: object = None, clock: Callable[[], float] = time.monotonic) -> None:
        if report is not None and not callable(report):
            expected = "a function that takes one argument, such as print, or None"
            raise ConfigError(field="progress", value=report, expected=expected)
        self._report = report or _ignore
        self._clock = clock
        # As if reported now: work of less than a second says nothing in between.
        self._reported = clock()

    @contextmanager
    def part(self, what: str, total_bytes: int | None) -> Iterator[Callable[[int], None]]:
        """Yield a function; the body calls it with the bytes that were done since the last call."""
        done = 0

        def more(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if self._clock() - self._reported >= _PERIOD_S:
                report()

        def report() -> None:
            self._report(Progress(what=what, done_bytes=done, total_bytes=total_bytes))
            self._reported = self._clock()

        # Without try: a part that failed has no end to report.
        yield more
        report()


def _ignore(_progress: Progress) -> None:
    """Report nothing."""
