"""How fast bytes go between host and device: each way, both at once, and beside the host's updates.

Copies by an accelerator's own streams, on the clock that its times are on. Called from one thread
at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from infinity_engine.accel import Accelerator, Event, StreamKind, VirtualAccelerator
from infinity_engine.accel.virtual import clock_of
from infinity_engine.calibration.contention import Stops, measure_contention
from infinity_engine.calibration.effort import MeasuringTime
from infinity_engine.calibration.host import RULES, HostPoint, HostUpdates
from infinity_engine.errors import CapacityError
from infinity_engine.plan import Figure, Unit
from infinity_engine.units import KiB, align_down

__all__ = [
    "LinkRates",
    "Links",
    "NoLinksError",
    "measure_beside_updates",
    "measure_copy_start",
    "measure_links",
]

_H2D, _D2H = StreamKind.H2D, StreamKind.D2H
_SMALLEST, _ALIGNED = 64 * KiB, 4 * KiB
_LONG_ENOUGH_NS = 1_000_000  # of one copy: what starting it costs does not count then
_PENDING = 3  # copies in each direction

LinkRates = dict[StreamKind, float]
"""Bytes per second of each direction."""


class NoLinksError(Exception):
    """There are no links to be measured; the message says why."""


class Links:
    """Both ways between `host`, page-locked where that matters, and as much device memory."""

    def __init__(self, accelerator: Accelerator, host: torch.Tensor, device: torch.Tensor) -> None:
        # One half for each direction: copies of the two never touch the same bytes.
        half = align_down(min(host.numel(), device.numel()) // 2, _ALIGNED)
        self._accelerator = accelerator
        self._clock_ns = clock_of(accelerator)
        self._streams = {kind: accelerator.stream(kind) for kind in (_H2D, _D2H)}
        self._ends = {
            _H2D: (device[:half], host[:half]),
            _D2H: (host[half : 2 * half], device[half : 2 * half]),
        }
        # Doubled until a copy takes long enough, at this device's rate.
        self._nbytes = {kind: min(_SMALLEST, half) for kind in (_H2D, _D2H)}
        for kind in (_H2D, _D2H):
            while self._nbytes[kind] < half and self._one_copy_ns(kind) < _LONG_ENOUGH_NS:
                self._nbytes[kind] = min(2 * self._nbytes[kind], half)

    @classmethod
    @contextmanager
    def open(cls, accelerator: Accelerator, memory: memoryview) -> Iterator[Links]:
        """Yield the links between `memory` and memory of the device, which goes back afterwards.

        Raises:
            NoLinksError: there are none, or no room on the device.
        """
        if accelerator.unified:
            raise NoLinksError("device and host are one memory, so nothing is copied")
        # Leaves half of the free memory to others.
        nbytes = align_down(min(memory.nbytes, accelerator.memory().free // 2), 2 * _ALIGNED)
        try:
            buffer = accelerator.allocate(nbytes)
        except (CapacityError, ValueError) as problem:
            raise NoLinksError(f"there is no room on the device: {problem}") from None
        try:
            host, device = (
                torch.frombuffer(memory, dtype=torch.uint8),
                buffer.tensor(torch.uint8, nbytes),
            )
            yield cls(accelerator, host, device)
            # Raises what a copy failed with that nothing has waited for.
            accelerator.synchronize()
        finally:
            accelerator.free(buffer)

    @property
    def beside_updates(self) -> bool:
        """Whether copies take time while the host works, as they do unless time is computed."""
        return not isinstance(self._accelerator, VirtualAccelerator)

    def rates(self, kinds: Sequence[StreamKind], seconds: float) -> LinkRates:
        """Copy in these directions at once until that took so long, on the device's clock."""
        end_ns = self._clock_ns() + round(seconds * 1e9)
        return self.copy_until(lambda: self._clock_ns() >= end_ns, kinds)

    def copy_until(self, stops: Stops, kinds: Sequence[StreamKind] = (_H2D, _D2H)) -> LinkRates:
        """Keep copies pending in each direction until it stops, and one has ended in each."""
        start_ns = self._clock_ns()
        last_ns = dict.fromkeys(kinds, start_ns)
        moved = dict.fromkeys(kinds, 0)
        pending = {kind: deque(self._start(kind) for _ in range(_PENDING)) for kind in kinds}
        while not all(moved.values()) or not stops():
            pending[kinds[0]][0].wait()  # copies take about as long in both directions
            for kind in kinds:
                # All that have ended: the direction waited for above may be the slower one.
                while pending[kind][0].done():
                    # Ended, so this does not block: it raises what the copy failed with.
                    pending[kind].popleft().wait()
                    pending[kind].append(self._start(kind))
                    moved[kind] += self._nbytes[kind]
                    last_ns[kind] = self._clock_ns()
        for event in (event for events in pending.values() for event in events):
            event.wait()
        return {kind: moved[kind] * 1e9 / max(last_ns[kind] - start_ns, 1) for kind in kinds}

    def start_s(self, seconds: float) -> float:
        """Return what a copy costs, however small it is: copy one page after the other for so
        long.
        """
        target, source = self._ends[_H2D]
        begun_ns = self._clock_ns()
        copies = 0
        while not copies or self._clock_ns() - begun_ns < seconds * 1e9:
            self._accelerator.copy(
                target[:_ALIGNED], source[:_ALIGNED], stream=self._streams[_H2D]
            ).wait()
            copies += 1
        return max(self._clock_ns() - begun_ns, 1) / copies / 1e9

    def _start(self, kind: StreamKind) -> Event:
        target, source = self._ends[kind]
        nbytes = self._nbytes[kind]
        return self._accelerator.copy(target[:nbytes], source[:nbytes], stream=self._streams[kind])

    def _one_copy_ns(self, kind: StreamKind) -> int:
        start_ns = self._clock_ns()
        self._start(kind).wait()
        return self._clock_ns() - start_ns


def measure_links(
    links: Links, part: MeasuringTime
) -> dict[tuple[StreamKind, ...], dict[StreamKind, Figure]]:
    """Measure each direction alone, and both at once; the keys say which were at work."""
    points: list[tuple[StreamKind, ...]] = [(_H2D,), (_D2H,), (_H2D, _D2H)]
    found = part.in_turn(points, links.rates)
    return {
        kinds: {kind: Figure.of([sample[kind] for sample in samples], Unit.BYTES) for kind in kinds}
        for kinds, samples in found.items()
    }


def measure_copy_start(links: Links, part: MeasuringTime) -> Figure:
    """Measure what a copy costs, however small it is."""
    [samples] = part.in_turn(["start"], lambda _, seconds: links.start_s(seconds)).values()
    return Figure.of(samples, Unit.SECONDS)


def measure_beside_updates(
    links: Links, updates: HostUpdates, part: MeasuringTime
) -> tuple[dict[HostPoint, Figure], dict[StreamKind, Figure]]:
    """Return what updates, and both directions, keep of their rates where all are at work."""
    found = measure_contention(updates, updates.points(RULES), links.copy_until, part)
    parts = {
        kind: Figure.of([pair.beside[kind] / pair.alone[kind] for pair in found.others], Unit.PART)
        for kind in (_H2D, _D2H)
    }
    return found.updates, parts
