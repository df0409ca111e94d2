"""`HostThread`: makes updates of the host beside the thread that gives a device its work.

One after the other, in the order in which they came. What an update changes in the engine's books
is noted by the thread that asks for its end, never here.
"""

from __future__ import annotations

import os
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

    def __init__(self, making: Future[Times], note: Callable[[Times], None], process: int) -> None:
        self._making = making
        self._note: Callable[[Times], None] | None = note
        self._process = process

    def done(self) -> bool:
        """Tell whether it has ended."""
        ended = self._making.done()
        if ended and self._making.exception() is None:
            self.wait()
        return ended

    def wait(self) -> None:
        """Wait until it has ended; raise what it failed with."""
        if not self._making.done():
            _check_process(self._process)
        times = self._making.result()
        if self._note is not None:
            self._note(times)
            self._note = None


class HostThread:
    """Has one thread, from the first update on."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._process = os.getpid()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="updates on the host")

    def begin(self, update: Callable[[], object], note: Callable[[Times], None]) -> HostUpdate:
        """Make an update after those that were begun before."""
        _check_process(self._process)
        try:
            making = self._executor.submit(self._make, update)
        except RuntimeError:  # Python ends and begins nothing more there: it is made here
            making = Future()
            making.set_result(self._make(update))
        return HostUpdate(making, note, self._process)

    def close(self) -> None:
        """Wait for the update under way, and make no other."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _make(self, update: Callable[[], object]) -> Times:
        start_ns = self._clock_ns()
        update()
        return Times(start_ns, self._clock_ns())


def _check_process(process: int) -> None:
    """Refuse to wait in a forked process for a thread that it does not have."""
    if os.getpid() != process:
        raise RuntimeError(
            f"this engine belongs to process {process}; this one was forked from it and has no "
            "thread for its updates: train in the process that made the engine"
        )
