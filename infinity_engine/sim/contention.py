"""The rates of an update: both ways at once, and as much disturbed as its parts work together.

Pure. Called by timeline.py, by the search and by its bounds.
"""

from __future__ import annotations

from dataclasses import replace

from infinity_engine.placement.training import Means
from infinity_engine.plan import Rates

__all__ = ["between", "rates_of_update", "undisturbed"]


def rates_of_update(rates: Rates) -> Rates:
    """Return the rates while both directions of the links, and of the drives, are in use, as in an
    update.
    """
    drives = {name: drive.both_at_once() for name, drive in rates.nvme.items()}
    return replace(
        rates,
        h2d_bytes_per_s=rates.duplex_h2d_bytes_per_s or rates.h2d_bytes_per_s,
        d2h_bytes_per_s=rates.duplex_d2h_bytes_per_s or rates.d2h_bytes_per_s,
        nvme=drives,
    )


def undisturbed(means: Means) -> Rates:
    """Return the rates that no update exceeds, however little its parts work at the same time."""
    beside = rates_of_update(means.rates)
    if means.alone is None:
        return beside
    alone = rates_of_update(means.alone)

    def fastest(name: str, one: object, other: object) -> float | None:
        found: tuple[float | None, float | None] = getattr(one, name), getattr(other, name)
        return None if None in found else max(rate for rate in found if rate is not None)

    drives = {
        name: replace(
            drive,
            **{
                key: fastest(key, drive, beside.nvme[name])
                for key in ("read_bytes_per_s", "write_bytes_per_s")
            },
        )
        for name, drive in alone.nvme.items()
    }
    links = ("host_update_params_per_s", "h2d_bytes_per_s", "d2h_bytes_per_s")
    return replace(alone, **{key: fastest(key, alone, beside) for key in links}, nvme=drives)


def between(alone: Rates, beside: Rates, updates: float, moves: float) -> Rates:
    """Return the rates of updates and of moves that are disturbed for these parts of their time."""

    def mean(one: float | None, other: float | None, part: float) -> float | None:
        return None if one is None or other is None else 1 / ((1 - part) / one + part / other)

    drives = {
        name: replace(
            drive,
            read_bytes_per_s=mean(
                drive.read_bytes_per_s, beside.nvme[name].read_bytes_per_s, moves
            ),
            write_bytes_per_s=mean(
                drive.write_bytes_per_s, beside.nvme[name].write_bytes_per_s, moves
            ),
        )
        for name, drive in alone.nvme.items()
    }
    return replace(
        alone,
        host_update_params_per_s=mean(
            alone.host_update_params_per_s, beside.host_update_params_per_s, updates
        ),
        h2d_bytes_per_s=mean(alone.h2d_bytes_per_s, beside.h2d_bytes_per_s, moves),
        d2h_bytes_per_s=mean(alone.d2h_bytes_per_s, beside.d2h_bytes_per_s, moves),
        nvme=drives,
    )
