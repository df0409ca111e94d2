"""The shortest time that any assignment could take: the update phase as a linear program in one
variable.

Solved exactly: pure arithmetic on rates. Subgroups may be cut anywhere and every lane works all the
time, so no plan is faster; a policy is measured by how near it comes. Called by planner, benches
and tests.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from infinity_engine.errors import ConfigError
from infinity_engine.plan.rates import Rates
from infinity_engine.plan.step import ADAM_BYTES, BytesPerParameter
from infinity_engine.units import NS_PER_S

__all__ = ["HOST_UPDATE_BYTES", "VISIT_BYTES", "Resource", "UpdateBound", "update_bound"]

HOST_UPDATE_BYTES = 32
"""Host memory that Adam on the CPU reads and writes per parameter: master, both moments, gradient,
16-bit copy.
"""
VISIT_BYTES = 24
"""Host memory that is read and written per parameter, where states visit the device."""


class Resource(Enum):
    """What an update takes time of."""

    HOST = "host"  # The CPU's updates.
    DEVICE = "device"  # The device's updates.
    H2D = "h2d"  # The link from host to device.
    D2H = "d2h"  # The link from device to host.
    DRAM = "dram"  # The host's memory.


@dataclass(frozen=True, slots=True)
class _Line:
    """Seconds per parameter as a function of the share that visits."""

    resource: Resource
    at_zero: Fraction
    slope: Fraction

    def __call__(self, share: Fraction) -> Fraction:
        return self.at_zero + self.slope * share


@dataclass(frozen=True, slots=True)
class UpdateBound:
    """The update phase with a part of the states resident and any share of all visiting."""

    resident: Fraction
    lines: tuple[_Line, ...]

    def seconds_per_param(self, share: Fraction) -> Fraction:
        """Return what a parameter takes at least, on average over all, if `share` of all parameters
        visit.
        """
        if not 0 <= share <= 1 - self.resident:
            expected = f"a share from 0 to {1 - self.resident}, which is what is not resident"
            raise ConfigError(field="share", value=share, expected=expected)
        return max(line(share) for line in self.lines)

    @property
    def best_share(self) -> Fraction:
        """The share of all parameters that should visit; the smallest one where several do as
        well.
        """
        meetings = (
            (line.at_zero - other.at_zero) / (other.slope - line.slope)
            for line, other in itertools.combinations(self.lines, 2)
            if line.slope != other.slope
        )
        most = 1 - self.resident
        shares = {Fraction(0), most, *(share for share in meetings if 0 <= share <= most)}
        return min(shares, key=lambda share: (self.seconds_per_param(share), share))

    @property
    def binding(self) -> tuple[Resource, ...]:
        """What is busy all the time at the best share."""
        share = self.best_share
        least = self.seconds_per_param(share)
        return tuple(line.resource for line in self.lines if line(share) == least)

    @property
    def speedup(self) -> Fraction:
        """How much faster the best share is than no visitors at all."""
        return self.seconds_per_param(Fraction(0)) / self.seconds_per_param(self.best_share)

    def least_ns(self, params: int) -> Fraction:
        """Return the nanoseconds that so many parameters take at least."""
        return params * NS_PER_S * self.seconds_per_param(self.best_share)


def update_bound(
    rates: Rates,
    *,
    per_parameter: BytesPerParameter = ADAM_BYTES,
    resident: Fraction = Fraction(0),
    at_home: bool = False,
) -> UpdateBound:
    """Return the bound at these rates; host memory that was not measured is taken to be fast
    enough.

    `at_home`: parameters stay on the host or the drives. So nothing goes up of what the CPU
    updates, and what the device updates comes down.

    Raises:
        ConfigError: a rate is missing, or `resident` is no part of 1.
    """
    if not 0 <= resident <= 1:
        raise ConfigError(field="resident", value=resident, expected="a part from 0 to 1")
    stays = 1 - resident
    host, device = (_rate(rates, f"{home}_update_params_per_s") for home in ("host", "device"))
    h2d, d2h = (_rate(rates, f"{link}_bytes_per_s") for link in ("h2d", "d2h"))
    states = per_parameter.states
    new_up, new_down = (0, per_parameter.parameter) if at_home else (per_parameter.parameter, 0)
    lines = [
        _Line(Resource.HOST, stays / host, -1 / host),
        _Line(Resource.DEVICE, resident / device, 1 / device),
        _Line(Resource.H2D, new_up * stays / h2d, (states - new_up) / h2d),
        _Line(Resource.D2H, new_down * resident / d2h, (states + new_down) / d2h),
    ]
    if rates.dram_bytes_per_s is not None:
        dram = _rate(rates, "dram_bytes_per_s")
        slope = (VISIT_BYTES - HOST_UPDATE_BYTES) / dram
        lines.append(_Line(Resource.DRAM, HOST_UPDATE_BYTES * stays / dram, slope))
    return UpdateBound(resident, tuple(lines))


def _rate(rates: Rates, name: str) -> Fraction:
    rate = getattr(rates, name)
    if rate is None:
        raise ConfigError(field=f"Rates.{name}", value=None, expected="a rate: the bound needs it")
    return Fraction(rate)
