"""`DriveMeter`: the bytes that one engine reads from and writes to each directory, step by step.

Asks the swap file, which counts all that it submits; moves nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from infinity_engine.lanes.meter import lane_counter
from infinity_engine.plan import DriveRates, Lane, Rates
from infinity_engine.reporting.wear import Endurance, Wear
from infinity_engine.storage import SwapFile, Traffic
from infinity_engine.telemetry import StepRecord, Telemetry

__all__ = ["DriveMeter", "DriveUse"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DriveUse:
    """The bytes of one directory in a step, and those written in all since the engine's start.

    `calibrated_share` is how much of the step's time the bytes take at the drive's calibrated
    rates, None where these are not known: near 1, the step takes as long as the drive does.
    """

    read_bytes: int
    written_bytes: int
    written_in_all: int
    calibrated_share: float | None
    endurance: Endurance | None  # None: it was not stated


class DriveMeter:
    """Counts for one engine; its `swap` is None where nothing is offloaded to drives.

    `rates` are the calibrated rates of directories, and `rated` the bytes that may be written to
    them: of some, or none.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        swap: SwapFile | None,
        *,
        rates: Mapping[str, DriveRates],
        rated: Mapping[str, int],
    ) -> None:
        self._telemetry = telemetry
        self._swap = swap
        self._rates = rates
        self._counted: dict[str, Traffic] = {}
        self.count()
        self._wear = Wear(rated, self._written())

    def count(self) -> None:
        """Count the bytes read and written since the last call, in the step that is recorded."""
        traffic = {} if self._swap is None else self._swap.traffic()
        for directory, now in traffic.items():
            # A directory that is seen for the first time counts from 0.
            before = self._counted.get(directory, Traffic(0, 0))
            self._telemetry.counter(_read_from(directory)).add(now.read_bytes - before.read_bytes)
            self._telemetry.counter(_written_to(directory)).add(
                now.written_bytes - before.written_bytes
            )
            self._counted[directory] = now

    def warn_of_wear(self) -> None:
        """Warn where much of a drive's rating has been written."""
        self._wear.warn(self._written())

    def uses(self, step: StepRecord) -> dict[str, DriveUse]:
        """Return the use of each directory in a step that has ended."""
        return {
            directory: self._use(directory, now, step) for directory, now in self._counted.items()
        }

    def rates_of_update(self, step: StepRecord) -> dict[Lane, float]:
        """Return the bytes per second of all drives together in the update of a step, if all are
        known.
        """
        read, written = (
            step.counters.get(lane_counter(lane, "bytes"), 0)
            for lane in (Lane.NVME_READ, Lane.NVME_WRITE)
        )
        drives = Rates(nvme=self._rates).both_at_once(read, written).nvme
        known = [drives[directory] for directory in self._counted if directory in drives]
        found = {}
        for lane, rates in (
            (Lane.NVME_READ, [rates_of_drive.read_bytes_per_s for rates_of_drive in known]),
            (Lane.NVME_WRITE, [rates_of_drive.write_bytes_per_s for rates_of_drive in known]),
        ):
            total = sum(rate for rate in rates if rate is not None)
            # One drive with an unknown rate makes the sum unknown.
            if rates and len(rates) == len(self._counted) and None not in rates:
                found[lane] = total
        return found

    def _use(self, directory: str, now: Traffic, step: StepRecord) -> DriveUse:
        read, written = (
            step.counters.get(name(directory), 0) for name in (_read_from, _written_to)
        )
        rates, ns = self._rates.get(directory), (step.end_ns or step.start_ns) - step.start_ns
        takes = None if rates is None else rates.seconds(read, written)
        return DriveUse(
            read_bytes=read,
            written_bytes=written,
            written_in_all=now.written_bytes,
            calibrated_share=None if takes is None or not ns else takes * 1e9 / ns,
            endurance=self._wear.endurance(directory, now.written_bytes),
        )

    def _written(self) -> dict[str, int]:
        return {directory: traffic.written_bytes for directory, traffic in self._counted.items()}


def _read_from(directory: str) -> str:
    return f"bytes read from {directory}"


def _written_to(directory: str) -> str:
    return f"bytes written to {directory}"
