"""Faults on demand: a plan of what goes wrong with which request, the same every time for the same
seed.

For the tests of your program: `IOQueue(faults=FaultPlan(seed=1).fail(nth=3, errno=errno.EIO))`.
The faults happen below the queue, where a device's would, so that all code above runs as usual.
"""

from __future__ import annotations

import errno as errno_names
import math
from collections.abc import Collection
from enum import Enum

from deepnvme import _native
from deepnvme.choices import chosen, whole_number

__all__ = ["FaultPlan", "Requests"]


class Requests(Enum):
    """Which requests a rule counts and applies to."""

    ALL = tuple(_native.Verb)  # not (): Python 3.11.2 makes an object() of that value
    READS = (_native.Verb.READ,)
    WRITES = (_native.Verb.WRITE,)
    SYNCS = (_native.Verb.SYNC_DATA, _native.Verb.SYNC_ALL)


class FaultPlan:
    """Rules, applied in the order they were added; each method adds one and returns the plan.

    Every rule but `throttle` takes exactly one of `nth` (the n-th matching request, from 1),
    `every` (each every-th) and `probability` (drawn per request from the seed). An operation makes
    one request for each of its chunks.
    """

    def __init__(self, seed: int = 0) -> None:
        # A queue copies it when it is made, and each of its drives counts for itself.
        self.native = _native.FaultPlan(whole_number("seed", seed))

    def fail(
        self, *, nth: int = 0, every: int = 0, probability: float = 0.0,
        errno: int = errno_names.EIO, requests: Requests = Requests.ALL,
    ) -> FaultPlan:  # fmt: skip
        """Let requests end with `errno` and move nothing."""
        return self._add(
            _native.FaultKind.FAIL,
            nth,
            every,
            probability,
            requests,
            error=whole_number("errno", errno, 1),
        )

    def shorten(
        self, *, nth: int = 0, every: int = 0, probability: float = 0.0, length: int = 0,
        requests: Requests = Requests.ALL,
    ) -> FaultPlan:  # fmt: skip
        """Let requests move at most `length` bytes (0: half of what was asked)."""
        return self._add(
            _native.FaultKind.SHORTEN,
            nth,
            every,
            probability,
            requests,
            length=whole_number("length", length),
        )

    def delay(
        self, *, delay_us: int, nth: int = 0, every: int = 0, probability: float = 0.0,
        requests: Requests = Requests.ALL,
    ) -> FaultPlan:  # fmt: skip
        """Let requests end `delay_us` microseconds later."""
        return self._add(
            _native.FaultKind.DELAY,
            nth,
            every,
            probability,
            requests,
            delay_us=whole_number("delay_us", delay_us),
        )

    def reorder(
        self, *, hold: int, nth: int = 0, every: int = 0, probability: float = 0.0,
        requests: Requests = Requests.ALL,
    ) -> FaultPlan:  # fmt: skip
        """Hold requests' ends back until `hold` others have passed, or none else is under way."""
        return self._add(
            _native.FaultKind.REORDER,
            nth,
            every,
            probability,
            requests,
            hold=whole_number("hold", hold, 1),
        )

    def throttle(self, *, bytes_per_s: float, requests: Requests = Requests.ALL) -> FaultPlan:
        """Spread the ends of all matching requests so that no more than `bytes_per_s` pass."""
        if not (math.isfinite(bytes_per_s) and bytes_per_s > 0):
            raise ValueError(f"bytes_per_s must be a positive rate, got {bytes_per_s}")
        return self._add(_native.FaultKind.THROTTLE, 0, 1, 0.0, requests, bytes_per_s=bytes_per_s)

    def _add(
        self, kind: _native.FaultKind, nth: int, every: int, probability: float, requests: Requests,
        *, error: int = 0, length: int = 0, delay_us: int = 0, hold: int = 0,
        bytes_per_s: float = 0.0,
    ) -> FaultPlan:  # fmt: skip
        if sum((nth > 0, every > 0, probability > 0)) != 1:
            raise ValueError(
                "expected exactly one positive number among nth, every and probability; got "
                f"nth={nth}, every={every}, probability={probability}"
            )
        if probability > 1:
            raise ValueError(f"probability must be at most 1, got {probability}")
        verbs: Collection[_native.Verb] = chosen(Requests, requests, "requests").value
        self.native.add(
            kind, verbs=list(verbs), nth=nth, every=every, probability=probability, error=error,
            length=length, delay_us=delay_us, hold=hold, bytes_per_s=bytes_per_s,
        )  # fmt: skip
        return self
