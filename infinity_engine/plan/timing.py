"""When a plan's ops start and end at given rates: the rule that policies and simulator share.

The emulated device goes by it too.

Whole nanoseconds, exact: an op starts when its lane is free and what it comes after has ended, and
takes its amount over its lane's rate, rounded up, after what its starts cost. Lanes do not slow
one another. Decides nothing; knows no policy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

from infinity_engine.errors import ConfigError
from infinity_engine.plan.ops import Lane, Op
from infinity_engine.plan.rates import Rates
from infinity_engine.units import NS_PER_S

__all__ = ["LaneClocks", "OpTime"]

_RATE = (
    (Lane.HOST, "host_update_params_per_s"),
    (Lane.DEVICE, "device_update_params_per_s"),
    (Lane.H2D, "h2d_bytes_per_s"),
    (Lane.D2H, "d2h_bytes_per_s"),
)
_DRIVES = ((Lane.NVME_READ, "read_bytes_per_s"), (Lane.NVME_WRITE, "write_bytes_per_s"))
_STARTS = MappingProxyType(
    {
        Lane.HOST: "host_start_s",
        Lane.DEVICE: "device_start_s",
        Lane.H2D: "copy_start_s",
        Lane.D2H: "copy_start_s",
        Lane.NVME_READ: "io_start_s",
        Lane.NVME_WRITE: "io_start_s",
    }
)


class OpTime(NamedTuple):
    """When an op starts and ends, from the start of the plan."""

    start_ns: int
    end_ns: int


# A named tuple's own __new__ is a Python function: with it, a search would spend a tenth of its
# time on making times and spans.
_new = tuple.__new__


class LaneClocks:
    """The clocks of the lanes, wound on op by op in the plan's order.

    What goes over `free` ones takes no time; ops of some lanes may run in others `instead`.
    """

    def __init__(
        self,
        rates: Rates,
        *,
        free: Collection[Lane] = (),
        instead: Mapping[Lane, Lane] = MappingProxyType({}),
    ) -> None:
        self._rates = rates
        self._free = frozenset(free)
        self._instead = {lane: instead.get(lane, lane) for lane in Lane}
        self._ratios: dict[Lane, tuple[int, int]] = {}  # what a lane does in how many nanoseconds
        self._start_ns = {
            lane: 0 if lane in self._free else round((getattr(rates, name) or 0) * NS_PER_S)
            for lane, name in _STARTS.items()
        }
        self._free_ns = dict.fromkeys(Lane, 0)
        self._idle_ns = dict.fromkeys(Lane, 0)
        self.times: list[OpTime] = []

    @property
    def end_ns(self) -> int:
        """When the last op so far ends."""
        return max(self._free_ns.values())

    def free_ns(self, lane: Lane) -> int:
        """Return when the lane has done all of its ops so far."""
        return self._free_ns[lane]

    def idle_ns(self, lane: Lane) -> int:
        """Return how long the lane has waited before its ops so far."""
        return self._idle_ns[lane]

    def duration_ns(self, lane: Lane, amount: int, starts: int = 1) -> int:
        """Return how long so many bytes or parameters take in a lane, with so many starts."""
        numerator, denominator = self._ratios.get(lane) or self._ratio(lane)
        # Rounded up, in whole numbers, as the emulated device's clock rounds.
        return -(-amount * denominator // numerator) + starts * self._start_ns[lane]

    def run(self, op: Op) -> OpTime:
        """Take the plan's next op and return when it runs."""
        lane, times = self._instead[op.lane], self.times
        free_ns = start_ns = self._free_ns[lane]
        # A search takes this way for each op of each plan: no call that can be spared.
        for number in op.after:
            other_ns = times[number][1]
            start_ns = other_ns if other_ns > start_ns else start_ns
        if start_ns > free_ns:
            self._idle_ns[lane] += start_ns - free_ns
        numerator, denominator = self._ratios.get(lane) or self._ratio(lane)
        end_ns = start_ns - (-op.amount * denominator // numerator)
        if self._start_ns[lane]:  # most rates have none
            end_ns += op.starts * self._start_ns[lane]
        time = _new(OpTime, (start_ns, end_ns))
        self._free_ns[lane] = end_ns
        times.append(time)
        return time

    def carry(self, op: Op, after_ns: int) -> OpTime:
        """Let an op's lane do it next, not before `after_ns`; return when it does.

        It takes as long as in `run`, whatever ops it comes after.
        """
        lane = op.lane
        start_ns = self._free_ns[lane]
        if after_ns > start_ns:
            self._idle_ns[lane] += after_ns - start_ns
            start_ns = after_ns
        numerator, denominator = self._ratios.get(lane) or self._ratio(lane)
        end_ns = start_ns - (-op.amount * denominator // numerator)
        if self._start_ns[lane]:
            end_ns += op.starts * self._start_ns[lane]
        self._free_ns[lane] = end_ns
        return _new(OpTime, (start_ns, end_ns))

    def work(self, lane: Lane, duration_ns: int, after_ns: int) -> int:
        """Let a lane do other work next, not before `after_ns`; return when it has."""
        start_ns = self._free_ns[lane]
        if after_ns > start_ns:
            self._idle_ns[lane] += after_ns - start_ns
            start_ns = after_ns
        end_ns = self._free_ns[lane] = start_ns + duration_ns
        return end_ns

    def _ratio(self, lane: Lane) -> tuple[int, int]:
        if lane in self._free:
            self._ratios[lane] = 1, 0
        # Worked out at its first use: a plan that leaves a lane alone needs no rate for it.
        elif lane not in self._ratios:
            name, rate = self._rate(lane)
            if rate is None:
                expected = (
                    f"a rate, as the plan uses the lane {lane.name}: measure it, or set it by hand"
                )
                raise ConfigError(field=f"Rates.{name}", value=None, expected=expected)
            # As an exact fraction: durations then need whole numbers only.
            numerator, denominator = rate.as_integer_ratio()
            self._ratios[lane] = numerator, denominator * NS_PER_S
        return self._ratios[lane]

    def _rate(self, lane: Lane) -> tuple[str, float | None]:
        """Return what a lane's rate is called, and the rate; drives work side by side."""
        drives = dict(_DRIVES)
        if lane not in drives:
            name = dict(_RATE)[lane]
            return name, getattr(self._rates, name)
        name = drives[lane]
        rates = [getattr(drive, name) for drive in self._rates.nvme.values()]
        # With one unknown drive the sum is unknown.
        return f"nvme.{name}", sum(rates) if rates and None not in rates else None
