"""`Wear`: the bytes that an engine has written to each drive, against the drive's rated endurance.

Knows numbers only and asks no drive. Writes of other programs, before or beside, are not counted:
the user who states the rating can subtract them.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from infinity_engine.units import DAY_S, format_decimal_bytes

__all__ = ["Endurance", "Wear"]

_WARNED_AT = (0.01, 0.1, 0.5, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Endurance:
    """The written share of a drive's rating, and the days until the rest is written at this rate.
    The days are None as long as there is no rate.
    """

    rated_bytes: int
    share: float
    days_left: float | None

    def __str__(self) -> str:
        """Return both in words."""
        days = self.days_left
        until = (
            # Below ten days, tenths of a day matter.
            ""
            if days is None
            else f"; at this rate the rest lasts {days:.{0 if days >= 10 else 1}f} days"
        )
        return (
            f"{self.share:.2%} of the {format_decimal_bytes(self.rated_bytes)} that its drive is "
            f"rated for{until}"
        )


class Wear:
    """The ratings of some directories, by name; `written` is what was written before."""

    def __init__(
        self,
        rated: Mapping[str, int],
        written: Mapping[str, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rated = dict(rated)
        self._at_first = dict(written)
        self._clock = clock
        # Monotonic: a clock that is set back must not make the rate negative.
        self._began = clock()
        self._warned = dict.fromkeys(self._rated, 0)  # how many of the shares were warned of

    def endurance(self, directory: str, written: int) -> Endurance | None:
        """Return a drive's endurance after so many bytes; None where its rating is not known."""
        rated = self._rated.get(directory)
        if rated is None:
            return None
        # The rate is the engine's; the share counts all that was written.
        new, seconds = written - self._at_first.get(directory, 0), self._clock() - self._began
        days = (
            # At the rate at which the engine has written since it began.
            max(rated - written, 0) * seconds / new / DAY_S if new > 0 and seconds > 0 else None
        )
        return Endurance(rated_bytes=rated, share=written / rated, days_left=days)

    def warn(self, written: Mapping[str, int]) -> None:
        """Warn when 1%, 10%, 50% and all of a drive's rating is written, once for each."""
        for directory, nbytes in written.items():
            stands = self.endurance(directory, nbytes)
            # How many of the thresholds are passed: each is warned of once.
            passed = 0 if stands is None else sum(stands.share >= share for share in _WARNED_AT)
            if passed > self._warned.get(directory, 0):
                self._warned[directory] = passed
                warnings.warn(
                    f"This engine has written {format_decimal_bytes(nbytes)} to {directory}, "
                    f"{stands}. A larger host budget means fewer writes. If the rating is wrong, "
                    "correct storage.endurance",
                    RuntimeWarning,
                    stacklevel=5,
                )
