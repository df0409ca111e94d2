"""What a StepPlan takes at given rates, to the nanosecond: the plan that the executor runs, priced.

Pure: the rule is that of plan/timing.py, which is the emulated device's. Called by planner and
    benches.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from infinity_engine.plan.ops import Lane
from infinity_engine.plan.rates import Rates
from infinity_engine.plan.step import StepPlan
from infinity_engine.plan.timing import LaneClocks, OpTime

__all__ = ["Simulation", "simulate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """When each op of a plan runs: `times` in the order of its ops."""

    plan: StepPlan
    times: tuple[OpTime, ...]

    @property
    def end_ns(self) -> int:
        """When the last op ends."""
        return max((time.end_ns for time in self.times), default=0)

    @property
    def busy_ns(self) -> Mapping[Lane, int]:
        """How long each lane works."""
        busy = dict.fromkeys(Lane, 0)
        for op, time in zip(self.plan.ops, self.times, strict=True):
            busy[op.lane] += time.end_ns - time.start_ns
        return busy

    @property
    def utilisation(self) -> Mapping[Lane, float]:
        """The part of the update in which each lane works, of those that do."""
        end_ns = self.end_ns
        return {lane: ns / end_ns for lane, ns in self.busy_ns.items() if ns}

    def describe(self) -> str:
        """Return the plan as a table with its times, and what each lane has to do."""
        end_ns = self.end_ns
        lanes = (
            f"{lane.value} {ns / 1e6:.3f} ms ({ns / end_ns if end_ns else 0:.0%})"
            for lane, ns in self.busy_ns.items()
            if ns
        )
        return (
            f"{self.plan.describe(self.times)}\n\nends at {end_ns / 1e6:.3f} ms; busy: "
            f"{', '.join(lanes)}"
        )


def simulate(
    plan: StepPlan,
    rates: Rates,
    *,
    free: Collection[Lane] = (),
    instead: Mapping[Lane, Lane] = MappingProxyType({}),
) -> Simulation:
    """Return when each op of `plan` runs at these rates; what goes over `free` lanes takes no time,
    and ops of some lanes run in others `instead`.

    Raises:
        ConfigError: the plan uses a lane of unknown rate.
    """
    clocks = LaneClocks(rates, free=free, instead=instead)
    for op in plan.ops:
        clocks.run(op)
    return Simulation(plan=plan, times=tuple(clocks.times))
