"""Means with one kind of rate faster or slower, everything else as it is.

Pure. Called by purchases.py and doubt.py, and for what-ifs of `infinity simulate`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from infinity_engine.placement.training import Means
from infinity_engine.plan import BlockRates, ComputeRate, DriveRates, Rates

__all__ = [
    "with_compute",
    "with_drives",
    "with_faster_writes",
    "with_links",
    "with_more_drives",
    "with_updates",
    "with_wire",
]

_LINKS = (
    "h2d_bytes_per_s",
    "d2h_bytes_per_s",
    "duplex_h2d_bytes_per_s",
    "duplex_d2h_bytes_per_s",
)


def with_compute(means: Means, times: float) -> Means:
    """Return the means with modules that compute so many times as fast."""
    blocks = means.blocks
    if blocks is not None:
        rates = blocks.measured.items()
        blocks = BlockRates(
            {
                shape: ComputeRate(*(times * flops_per_s for flops_per_s in rate))
                for shape, rate in rates
            }
        )
    return replace(means, flops_per_s=_times(means.flops_per_s, times), blocks=blocks)


def with_links(means: Means, times: float) -> Means:
    """Return the means with links between host and device that are so many times as fast."""
    return _with_rates(means, lambda rates: _scaled(rates, _LINKS, times))


def with_updates(means: Means, times: float) -> Means:
    """Return the means with a host that updates so many times as fast."""
    return _with_rates(means, lambda rates: _scaled(rates, ("host_update_params_per_s",), times))


def with_drives(means: Means, times: float) -> Means:
    """Return the means with drives that read and write so many times as fast."""
    return _with_rates(
        means,
        lambda rates: replace(
            rates, nvme={name: _drive(drive, times) for name, drive in rates.nvme.items()}
        ),
    )


def with_faster_writes(means: Means, times: float) -> Means:
    """Return the means with drives that write so many times as fast, and read as before."""

    def faster(drive: DriveRates) -> DriveRates:
        write, mixed = drive.write_bytes_per_s, drive.mixed_bytes_per_s
        if write is None:
            return drive
        more = (times - 1) * write
        return replace(
            drive,
            write_bytes_per_s=write + more,
            mixed_bytes_per_s=None if mixed is None else mixed + more,
        )

    return _with_rates(
        means,
        lambda rates: replace(
            rates, nvme={name: faster(drive) for name, drive in rates.nvme.items()}
        ),
    )


def with_wire(means: Means, times: float) -> Means:
    """Return the means with ranks that exchange so many times as fast."""
    return replace(means, wire_bytes_per_s=_times(means.wire_bytes_per_s, times))


def with_more_drives(means: Means, times: float) -> Means:
    """Return the means with so many times as many drives, which hold and move that much more."""
    nvme = {name: int(times * limit) for name, limit in means.budget.nvme.items()}
    return with_drives(replace(means, budget=replace(means.budget, nvme=nvme)), times)


def _drive(drive: DriveRates, times: float) -> DriveRates:
    return DriveRates(
        read_bytes_per_s=_times(drive.read_bytes_per_s, times),
        write_bytes_per_s=_times(drive.write_bytes_per_s, times),
        mixed_bytes_per_s=_times(drive.mixed_bytes_per_s, times),
    )


def _with_rates(means: Means, changed: Callable[[Rates], Rates]) -> Means:
    # rates while nothing else works are of the same hardware, so they change with the others
    alone = None if means.alone is None else changed(means.alone)
    return replace(means, rates=changed(means.rates), alone=alone)


def _scaled(rates: Rates, names: tuple[str, ...], times: float) -> Rates:
    changed = {name: _times(getattr(rates, name), times) for name in names}
    return replace(rates, **changed)  # type: ignore[arg-type]


def _times(rate: float | None, times: float) -> float | None:
    return None if rate is None else times * rate
