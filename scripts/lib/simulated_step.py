"""What a simulated update leaves for the forward behind it: benches and tests ask that."""

from __future__ import annotations

from infinity_engine.sim import Simulation

__all__ = ["ready_ns", "step_ns"]


def ready_ns(simulation: Simulation) -> dict[int, int]:
    """Return, by the index of each subgroup, when its new parameters are where the plan leaves
    them.
    """
    arrivals = simulation.plan.arrivals().items()
    return {subgroup: simulation.times[number].end_ns for subgroup, number in arrivals}


def step_ns(simulation: Simulation, forward_ns: int) -> int:
    """Return when the next forward ends at the earliest, if it begins before the last updates are
    done.

    It takes `forward_ns` in all, the same for each parameter, in the order of the subgroups' first
    use, and cannot come to a subgroup before that one's parameters are ready.
    """
    subgroups = simulation.plan.subgroups
    total = sum(subgroup.numel for subgroup in subgroups)
    ready, now_ns, seen = ready_ns(simulation), 0, 0
    for subgroup in sorted(subgroups, key=lambda one: (one.first_use, one.index)):
        start_ns = max(now_ns, ready[subgroup.index])
        seen_after = seen + subgroup.numel
        now_ns = start_ns + forward_ns * seen_after // total - forward_ns * seen // total
        seen = seen_after
    return max(now_ns, simulation.end_ns)
