"""`Progress`: how far long work before training is: told to a function of the user's, now and then.

Counts bytes that others move, and estimates nothing. What the function raises ends the work, as any
failure does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from infinity_engine.errors import ConfigError
from infinity_engine.units import format_bytes

__all__ = ["Progress", "Teller"]

_PERIOD_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How much of some work is done; `total` is None where nobody knows yet how much there is.

    As text, one line.
    """

    what: str
    done_bytes: int
    total_bytes: int | None

    def __str__(self) -> str:
        """Return it as in "loading values: 1.5 GiB of 4 GiB"."""
        total = "" if self.total_bytes is None else f" of {format_bytes(self.total_bytes)}"
        return f"{self.what}: {format_bytes(self.done_bytes)}{total}"


class Teller:
    """Tells `tell`, where there is one: once a second at most, and when a part of the work has
    ended.

    Raises:
        ConfigError: it cannot be called.
    """

    def __init__(self, tell: object = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._tell = tell if callable(tell) else None
        if tell is not None and self._tell is None:
            expected = "a function that takes one argument, such as print, or None"
            raise ConfigError(field="progress", value=tell, expected=expected)
        self._clock = clock
        self._told = clock()

    @contextmanager
    def part(self, what: str, total_bytes: int | None) -> Iterator[Callable[[int], None]]:
        """Yield what is called with the bytes that were done in the body since it was called
        last.
        """
        done = 0

        def more(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if self._clock() - self._told >= _PERIOD_S:
                tell()

        def tell() -> None:
            if self._tell is not None:
                self._tell(Progress(what=what, done_bytes=done, total_bytes=total_bytes))
            self._told = self._clock()

        yield more
        tell()
