"""`HostThread`: makes updates of the host beside the thread that gives a device its work.

One after the other, in the order in which they came. What an update changes in the engine's books
is noted by the thread that asks for its end, never here.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

__all__ = ["HostThread", "HostUpdate", "Times"]


class Times(NamedTuple):
    """When an update was under way."""

    start_ns: int
    end_ns: int


class HostUpdate:
    """An update that the thread was given; `note` is called once, when its end is first seen."""

    def __init__(self, making: Future[Times], note: Callable[[Times], None]) -> None:
        self._making = making
        self._note: Callable[[Times], None] | None = note

    def done(self) -> bool:
        """Tell whether it has ended."""
        ended = self._making.done()
        if ended and self._making.exception() is None:
            self.wait()
        return ended

    def wait(self) -> None:
        """Wait until it has ended; raise what it failed with."""
        times = self._making.result()
        if self._note is not None:
            self._note(times)
            self._note = None


class HostThread:
    """Has one thread, from the first update on."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="updates on the host")

    def begin(self, update: Callable[[], object], note: Callable[[Times], None]) -> HostUpdate:
        """Make an update after those that were begun before."""
        return HostUpdate(self._executor.submit(self._make, update), note)

    def close(self) -> None:
        """Wait for the update under way, and make no other."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _make(self, update: Callable[[], object]) -> Times:
        start_ns = self._clock_ns()
        update()
        return Times(start_ns, self._clock_ns())
