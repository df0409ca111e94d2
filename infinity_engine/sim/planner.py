"""The planner: of all strategies that fit, the one with the shortest simulated step.

Pure. Each candidate is placed as the engine would place it, by the same policies and the same
bytes, and its StepPlan is simulated; nothing is taken from a formula alone. What does not fit is
for remedies.py to explain. Called by the command line, and by the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import inf

from infinity_engine.errors import ConfigError
from infinity_engine.placement.models import ModelShape
from infinity_engine.placement.training import Means, Training, beside_inputs
from infinity_engine.plan import Lane, Strategy, Tier
from infinity_engine.plan.step import BytesPerParameter, Home
from infinity_engine.sim.bound import update_bound
from infinity_engine.sim.candidate import Candidate, Evaluator
from infinity_engine.sim.forms import Forms
from infinity_engine.sim.search import Search
from infinity_engine.sim.simulate import simulate

__all__ = ["Decision", "Planner", "decide"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The best candidate, and what it was chosen from."""

    planner: Planner
    """What was asked."""
    best: Candidate
    others: tuple[Candidate, ...]
    """The best of each other strategy and tier, the fastest first."""
    least_update_ns: float | None
    """What no plan with as much resident can update in less, None where a rate is missing."""

    @property
    def training(self) -> Training:
        """What is trained."""
        return self.planner.training

    @property
    def means(self) -> Means:
        """What there is to train with."""
        return self.planner.means


def decide(
    training: Training,
    means: Means,
    *,
    strategy: Strategy | None = None,
    parameters: Tier | None = None,
    subgroup_numel: int | None = None,
    whole_model: ModelShape | None = None,
) -> Decision:
    """Return the best plan; of this strategy, tier and size of subgroups where they are given.

    `whole_model` is that of the training before `tiling="auto"` cut its layers, for advice, which
    asks for other memory.

    Raises:
        CapacityError: nothing fits; the error is that of what comes nearest.
        ConfigError: something is asked for that cannot be, or a rate is missing.
    """
    return Planner(
        training,
        means,
        strategy=strategy,
        parameters=parameters,
        subgroup_numel=subgroup_numel,
        whole_model=whole_model,
    ).decide()


@dataclass(frozen=True)
class Planner(Evaluator):
    """The search among choices, for one training with certain means."""

    def decide(self) -> Decision:
        """Return the best plan; `decide` says what is raised."""
        ranked = sorted(Search(self).run(), key=_place)
        best = ranked[0]
        kinds = {best.choice.kind: best}
        for candidate in ranked:
            kinds.setdefault(candidate.choice.kind, candidate)
        return Decision(
            planner=self,
            best=best,
            others=tuple(kinds.values())[1:],
            least_update_ns=self._least_ns(best),
        )

    def fits(self) -> bool:
        """Tell whether `decide` finds a plan; nothing is simulated."""
        return not self.missing(Tier.DEVICE)

    def missing(self, tier: Tier) -> float:
        """Return about how many bytes of a tier are missing, 0 where `decide` finds a plan; nothing
        is simulated.
        """
        return Search(self).missing(tier)

    def seems_to_fit(self) -> bool:
        """Tell the same by estimates alone, which are off by a hundredth or two."""
        return Forms(self).seems_to_fit()

    def least(self, tier: Tier) -> float:
        """Return by estimates about how many bytes of a tier are enough; inf: no amount is."""
        return Forms(self).least(tier)

    def look(self, *, below_ns: float = inf) -> Candidate | None:
        """Return the best of a short search; None: it finds nothing that fits.

        Of steps that take `below_ns` or more, it may be any.
        """
        return Search(self).look(below_ns=below_ns)

    def least_estimate_ns(self, subgroup_numel: int) -> float:
        """Return the best estimate of a step with subgroups of this size; inf: nothing seems to
        fit.
        """
        return Forms(self).least_estimate_ns(subgroup_numel)

    def may_take_less(self, subgroup_numel: int, ns: float) -> bool:
        """Tell whether the best estimate of such a step is less than `ns`."""
        return Forms(self).may_take_less(subgroup_numel, ns)

    def with_means(self, means: Means) -> Planner:
        """Return the same with other rates and other memory, for as many ranks; moved inputs take
        their part of the memory.
        """
        return self._given(beside_inputs(self.training, means))

    def _least_ns(self, best: Candidate) -> float | None:
        """Return what no plan can update in less, with as much resident and as much on the drives
        as this one.

        Each lane at its rate while nothing else disturbs it, and host memory as fast as needs be:
        plans are not timed by it, but by updates: their measured rates have it in them.
        """
        steps = best.plan.steps
        numel = sum(subgroup.numel for subgroup in steps.subgroups)
        states = 4 * (1 + len(best.sizing.state_names))
        means, drives = self.means, {Lane.NVME_READ: 0, Lane.NVME_WRITE: 0}
        for op in steps.ops:
            if op.lane in drives:
                drives[op.lane] += op.amount
        rates = replace(means.undisturbed(*drives.values()), dram_bytes_per_s=None)
        instead = means.lanes_instead()
        busy = simulate(steps, rates, free=means.free_lanes(), instead=instead).busy_ns
        if means.unified:
            updates = busy[Lane.HOST] + busy[Lane.DEVICE]
            return max(updates, busy[Lane.NVME_READ], busy[Lane.NVME_WRITE])
        try:
            bound = update_bound(
                rates,
                per_parameter=BytesPerParameter(states=states, parameter=best.sizing.width),
                resident=Fraction(steps.params_at(Home.RESIDENT), max(numel, 1)),
                at_home=steps.parameters is not Tier.DEVICE,
            )
        except ConfigError:
            return None
        return max(float(bound.least_ns(numel)), busy[Lane.NVME_READ], busy[Lane.NVME_WRITE])


def _place(candidate: Candidate) -> tuple[int, int, int]:
    """Return what candidates are sorted by: of equal steps, fewer subgroups come first."""
    timeline = candidate.timeline
    return timeline.ns, timeline.update_ns, len(candidate.plan.steps.subgroups)
