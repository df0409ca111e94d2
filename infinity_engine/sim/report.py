"""`PlanReport`: the planner's answer as plain figures, ready to be printed, compared with what is
measured, or kept.

Pure. Says of each tier what it holds, of each phase what binds it, of each link what crosses it,
and what wears out. Made of a Decision; the command line prints it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from infinity_engine.placement.buffers import NO_LAYOUT
from infinity_engine.placement.training import Means, Training
from infinity_engine.plan import Interleaved, Lane, NvmeStreamed, Tier
from infinity_engine.plan.step import Home, StepPlan
from infinity_engine.sim.candidate import Candidate
from infinity_engine.sim.planner import Decision, Planner
from infinity_engine.sim.timeline import StepTimeline
from infinity_engine.units import DAY_S, format_bytes

__all__ = [
    "Alternative",
    "Holding",
    "PhaseReport",
    "PlanReport",
    "WearForecast",
    "notes_of_ranks",
    "report_of",
    "resource",
    "written_bytes",
]

_DAYS_PER_YEAR = 365.25
_SUMMED = 4  # bytes of an fp32 sum
_READS, _WRITES = "reads of the drives", "writes to the drives"
_AS_BUSY = 0.9  # times as busy as the other way
_COMPUTE = "compute"
_EXCHANGE = "exchange between ranks"


@dataclass(frozen=True, slots=True)
class Holding:
    """So many bytes of a tier, and what they are for.

    PyTorch's own are not the engine's to budget.
    """

    tier: Tier
    what: str
    nbytes: int
    of_pytorch: bool = False


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """A phase of the step, what works longest in it, and the part of it that each resource
    works.
    """

    name: str
    seconds: float
    binding: str
    utilisation: Mapping[str, float]

    @property
    def bound_by(self) -> str:
        """What works longest, in words; both ways of the drives, where both are as busy."""
        busy = [self.utilisation.get(way, 0.0) for way in (_READS, _WRITES)]
        if self.binding in (_READS, _WRITES) and min(busy) >= _AS_BUSY * max(busy):
            return "reads and writes of the drives"
        return self.binding


@dataclass(frozen=True, slots=True)
class WearForecast:
    """What a day of steps without a pause writes to all drives, and the years until so much is
    written.
    """

    written_per_day: float
    rated_bytes: int | None
    years: float | None


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another way that fits."""

    strategy: object
    parameters: Tier
    step_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport:
    """A plan in figures.

    Bytes are one rank's, as are links and phases; what wears out is the machine's.
    """

    model: str
    parameters: int
    ranks: int
    settings: Mapping[str, object]
    """Of the engine, with which it makes this very plan, in the form that `initialize` takes."""
    steps: StepPlan
    holdings: tuple[Holding, ...]
    limits: Mapping[Tier, int]
    subgroups: Mapping[Home, int]
    share: float
    """The part of all parameters that visit the device."""
    resident: float
    staging_sets: int
    host_buffers: int
    fetched_ahead: int
    """Bytes of the device for parameters that modules fetch."""
    step_s: float
    tokens_per_s: float | None
    """None where the rate of computing is not known: then `step_s` lacks its time."""
    gathering_s: float
    """Seconds of a step in which ranks exchange parameters and gradients."""
    phases: tuple[PhaseReport, ...]
    micro_batches: int
    update_s: float
    update_utilisation: Mapping[Lane, float]
    """The part of the update in which each lane works at it."""
    least_update_s: float | None
    moved: Mapping[Lane, int]
    timeline: StepTimeline
    host_bytes_per_parameter: float
    wear: WearForecast | None
    alternatives: tuple[Alternative, ...]
    notes: tuple[str, ...]

    @property
    def repeated_s(self) -> float:
        """Seconds of a step that forward and backward of its further micro-batches take."""
        return self.timeline.repeated_ns / 1e9

    @property
    def bound_by(self) -> str:
        """What works longest in the longest part of the step."""
        last = self.phases[-1]  # the backward: most of what further micro-batches repeat
        longest = max(
            self.phases,
            key=lambda phase: phase.seconds + (self.repeated_s if phase is last else 0),
        )
        return longest.bound_by

    def knows(self, phase: PhaseReport) -> bool:
        """Tell whether the time of a phase is known: all but updates need a rate of computing."""
        return self.tokens_per_s is not None or phase.name.startswith("update")

    def held(self, tier: Tier, *, of_pytorch: bool | None = None) -> int:
        """Return what is held of a tier; only PyTorch's or only the engine's, where that is asked
        for.
        """
        return sum(
            holding.nbytes
            for holding in self.holdings
            if holding.tier is tier and (of_pytorch is None or holding.of_pytorch is of_pytorch)
        )

    def to_mapping(self) -> dict[str, object]:
        """Return it as lists and mappings, ready for JSON."""
        return {
            "model": self.model,
            "parameters": self.parameters,
            "ranks": self.ranks,
            "settings": dict(self.settings),
            "subgroups": {home.value: count for home, count in self.subgroups.items()},
            "share": self.share,
            "resident": self.resident,
            "staging_sets": self.staging_sets,
            "host_buffers": self.host_buffers,
            "fetched_ahead_bytes": self.fetched_ahead,
            "memory": {
                tier.value: {
                    "limit_bytes": self.limits.get(tier, 0),
                    "held_bytes": self.held(tier),
                    "holdings": [
                        {
                            "what": holding.what,
                            "bytes": holding.nbytes,
                            "of_pytorch": holding.of_pytorch,
                        }
                        for holding in self.holdings
                        if holding.tier is tier
                    ],
                }
                for tier in Tier
            },
            "host_bytes_per_parameter": self.host_bytes_per_parameter,
            "step_s": self.step_s,
            "computing_is_known": self.tokens_per_s is not None,
            "tokens_per_s": self.tokens_per_s,
            "gathering_s": self.gathering_s,
            "micro_batches": self.micro_batches,
            "further_micro_batches_s": self.repeated_s,
            "phases": [
                {
                    "name": phase.name,
                    "seconds": phase.seconds,
                    "binding": phase.binding,
                    "bound_by": phase.bound_by,
                    "utilisation": dict(phase.utilisation),
                }
                for phase in self.phases
            ],
            "update_s": self.update_s,
            "update_utilisation": {
                lane.value: part for lane, part in self.update_utilisation.items()
            },
            "least_update_s": self.least_update_s,
            "moved_bytes": {lane.value: nbytes for lane, nbytes in self.moved.items()},
            "wear": None
            if self.wear is None
            else {
                "written_bytes_per_day": self.wear.written_per_day,
                "rated_bytes": self.wear.rated_bytes,
                "years": self.wear.years,
            },
            "alternatives": [
                {
                    "strategy": alternative.strategy,
                    "parameters": alternative.parameters.value,
                    "step_s": alternative.step_s,
                }
                for alternative in self.alternatives
            ],
            "notes": list(self.notes),
            "plan": self.steps.to_mapping(),
        }


def report_of(decision: Decision, *, rated_bytes: int | None = None) -> PlanReport:
    """Return the figures of a decision; `rated_bytes` is what all drives together may be written,
    their TBW.
    """
    best, training, means = decision.best, decision.training, decision.means
    steps, demand = best.plan.steps, best.plan.demand
    numel = sum(subgroup.numel for subgroup in steps.subgroups)
    homes = [*steps.homes().values()]
    tokens = training.tokens * training.accumulation_steps * means.ranks
    budget = means.of_one_rank()
    least = decision.least_update_ns
    computes = means.compute_rate(training) is not None
    return PlanReport(
        model=training.model.name,
        parameters=training.model.size,
        ranks=means.ranks,
        settings=_settings(best, training, means),
        steps=steps,
        holdings=tuple(_holdings(best, training, means)),
        limits=MappingProxyType(
            {
                Tier.DEVICE: 0 if means.unified else budget.device,
                Tier.HOST: budget.host,
                Tier.NVME: sum(budget.nvme.values()),
            }
        ),
        subgroups=MappingProxyType({home: homes.count(home) for home in Home}),
        share=steps.params_at(Home.VISITING) / numel,
        resident=steps.params_at(Home.RESIDENT) / numel,
        staging_sets=len(steps.staging_bytes),
        host_buffers=len(steps.buffer_bytes),
        fetched_ahead=demand.fetched,
        step_s=best.step_s,
        tokens_per_s=tokens / best.step_s if computes else None,
        gathering_s=best.timeline.gathering_ns / 1e9,
        phases=tuple(_phases(best, training, means)),
        micro_batches=training.accumulation_steps,
        update_s=best.timeline.update_ns / 1e9,
        update_utilisation=MappingProxyType(
            {
                lane: ns / best.timeline.update_ns
                for lane, ns in best.timeline.update_busy_ns.items()
                if ns
            }
        ),
        least_update_s=None if least is None else least / 1e9,
        moved=MappingProxyType(dict(best.timeline.moved)),
        timeline=best.timeline,
        host_bytes_per_parameter=_on_host(best, means) / numel,
        wear=_wear(decision, rated_bytes, computes=computes),
        alternatives=tuple(
            Alternative(other.choice.strategy.to_plain(), other.choice.parameters, other.step_s)
            for other in decision.others
        ),
        notes=tuple(_notes(decision)),
    )


def _settings(best: Candidate, training: Training, means: Means) -> Mapping[str, object]:
    choice = best.choice
    more: dict[str, object] = {}
    if means.for_all:
        more["activation_bytes"] = _left_to_modules(best, training, means)
    if not best.overlap:
        more["overlap"] = "off"
    strategy = choice.strategy
    update = strategy.update if isinstance(strategy, NvmeStreamed) else strategy
    if isinstance(update, Interleaved):
        # The engine itself lets drives read and write at once.
        rates = replace(means.rates.both_at_once(), nvme=means.rates.nvme)
        more["rates"] = rates.to_mapping()
    return MappingProxyType(
        {
            "strategy": strategy.to_plain(),
            "parameters": choice.parameters.value,
            "subgroup_numel": choice.subgroup_numel,
            **more,
        }
    )


def _left_to_modules(best: Candidate, training: Training, means: Means) -> int:
    """Return the `activation_bytes` with which the engine makes this plan."""
    sizing, demand = best.sizing, best.plan.demand
    # The engine itself makes room for the modules that it gathers.
    gathered = Planner(training, means).gathered(sizing)
    making = best.beside - sizing.of_backward(demand.staying) - gathered
    # What is fetched has all the rest of the device: not what a gradient in the making takes beside
    # those that stay.
    takes_rest = demand.fetched > 0 and not sizing.sums
    return making + max(sizing.activations, demand.staying if takes_rest else 0)


def _on_host(best: Candidate, means: Means) -> int:
    """Return what the engine takes of the host, gradients included where it is the only memory,
    activations not.
    """
    sizing, demand = best.sizing, best.plan.demand
    activations = sizing.of_backward(demand.staying) - demand.staying if sizing.unified else 0
    return sizing.held_on_host(demand) - activations + _io_bytes(best, means)


def _io_bytes(best: Candidate, means: Means) -> int:
    return means.io_bytes if best.plan.demand.nvme else 0


def written_bytes(timeline: StepTimeline, training: Training, means: Means) -> int:
    """Return what all ranks write to drives in a step, with the moved inputs of blocks."""
    inputs = training.accumulation_steps * means.moved_inputs()[Tier.NVME]
    return means.ranks * timeline.moved.get(Lane.NVME_WRITE, 0) + inputs


def _wear(decision: Decision, rated_bytes: int | None, *, computes: bool) -> WearForecast | None:
    """Return what wears out; None where nothing does, or a step lacks the time of computing."""
    best = decision.best
    written = written_bytes(best.timeline, decision.training, decision.means)
    if not written or not computes:
        return None
    per_day = written * DAY_S / best.step_s
    years = None if rated_bytes is None else rated_bytes / per_day / _DAYS_PER_YEAR
    return WearForecast(per_day, rated_bytes, years)


# --- phases ---------------------------------------------------------------------------------------


def _phases(best: Candidate, training: Training, means: Means) -> Iterator[PhaseReport]:
    exchanged_ns = _exchanged_ns(best.timeline, training)
    for phase in best.timeline.phases:
        busy_ns = {
            resource(lane, phase.name, unified=means.unified): ns
            for lane, ns in phase.busy_ns.items()
            if ns
        }
        exchanged = sum(ns for name, ns in exchanged_ns.items() if name in phase.name)
        if exchanged:
            busy_ns[_EXCHANGE] = min(exchanged, phase.ns)
        yield PhaseReport(
            phase.name,
            phase.ns / 1e9,
            max(busy_ns, key=lambda name: busy_ns[name], default="nothing"),
            MappingProxyType({name: ns / phase.ns for name, ns in busy_ns.items() if phase.ns}),
        )


def _exchanged_ns(timeline: StepTimeline, training: Training) -> Mapping[str, int]:
    """Return how long ranks exchange parameters and gradients in the passes of one micro-batch."""
    if not timeline.gathering_ns:
        return {}
    both_ns = timeline.gathering_ns // training.accumulation_steps
    forward_ns = timeline.forward_wire_ns
    return {"forward": forward_ns, "backward": both_ns - forward_ns}


def resource(lane: Lane, phase: str = "update", *, unified: bool = False) -> str:
    """Return what a lane is called in a phase, or in an update."""
    if lane is Lane.HOST:
        computes = unified and phase != "update"
        return (
            (_COMPUTE + " and updates" if "update" in phase else _COMPUTE)
            if computes
            else "CPU updates"
        )
    if lane is Lane.DEVICE:
        return (
            "device updates"
            if phase == "update"
            else _COMPUTE + (" and updates" if "update" in phase else "")
        )
    return {
        Lane.H2D: "link to the device",
        Lane.D2H: "link to the host",
        Lane.NVME_READ: _READS,
        Lane.NVME_WRITE: _WRITES,
    }[lane]


# --- bytes ----------------------------------------------------------------------------------------


def _holdings(best: Candidate, training: Training, means: Means) -> Iterator[Holding]:
    """Yield what each tier holds; of each tier all of it."""
    found = _Holdings(best).rows()
    sizing, demand = best.sizing, best.plan.demand
    io_bytes = _io_bytes(best, means)
    wholes = {
        Tier.DEVICE: 0 if sizing.unified else demand.device,
        Tier.HOST: sizing.held_on_host(demand)
        - (sizing.of_backward(demand.staying) if sizing.unified else 0),
        Tier.NVME: demand.nvme,
    }
    for tier, whole in wholes.items():
        rows = [
            (what, nbytes) for (where, what), nbytes in found.items() if where is tier and nbytes
        ]
        yield from (Holding(tier, what, nbytes) for what, nbytes in rows)
        rest = whole - sum(nbytes for _, nbytes in rows)
        if rest:
            yield Holding(
                tier,
                "ends of pages" if tier is not Tier.NVME else "ends of pages and spare room",
                rest,
            )
    if io_bytes:
        yield Holding(Tier.HOST, "the I/O queue's own", io_bytes)
    where = Tier.HOST if sizing.unified else Tier.DEVICE
    staying = best.plan.demand.staying
    if staying:
        yield Holding(where, "gradients that stay", staying)
    gathered = Planner(training, means).gathered(sizing)
    if gathered:
        yield Holding(where, "modules that are gathered", gathered, of_pytorch=True)
    # activations only as far as gradients do not take their place later
    making = best.beside - staying - gathered
    if making:
        remain = sizing.of_backward(staying) > staying
        yield Holding(
            where, "activations" if remain else "a gradient in the making", making, of_pytorch=True
        )


class _Holdings:
    """The bytes of one plan, by tier and by what they are."""

    def __init__(self, best: Candidate) -> None:
        self._sizing = best.sizing
        self._plan = best.plan
        self._found: dict[tuple[Tier, str], int] = {}

    def rows(self) -> dict[tuple[Tier, str], int]:
        plan, sizing = self._plan, self._sizing
        homes = plan.steps.homes()
        for subgroup in sizing.subgroups:
            self._states(subgroup.index, subgroup.numel, homes[subgroup.index])
        self._gradients(homes)
        self._parameters()
        staged, fetched = sum(plan.steps.staging_bytes), plan.demand.fetched
        here = Tier.HOST if sizing.unified else Tier.DEVICE
        if plan.steps.parameters is Tier.DEVICE:
            self._add(here, "staging sets", staged)
        elif staged > fetched:
            self._add(here, "staging sets, or parameters that are fetched", staged)
        else:
            self._add(
                here,
                "parameters that are fetched, or staging sets" if staged else "parameters fetched",
                fetched,
            )
        if not sizing.unified:
            self._add(here, "gradients on their way", sizing.on_their_way)
        if plan.demand.slots is not None:
            self._add(Tier.HOST, "buffers for what passes", plan.demand.slots.nbytes)
        self._add(Tier.HOST, "parameters on their way", plan.demand.window)
        return self._found

    def _add(self, tier: Tier, what: str, nbytes: int) -> None:
        self._found[tier, what] = self._found.get((tier, what), 0) + nbytes

    def _states(self, index: int, numel: int, home: Home) -> None:
        plan, sizing = self._plan, self._sizing
        parameters = plan.steps.parameters
        subgroup = sizing.subgroups[index]
        nbytes = sizing.states_bytes(subgroup, home, parameters)
        if home is Home.RESIDENT and not sizing.unified:
            self._add(Tier.DEVICE, "states", nbytes)
            if parameters is not Tier.DEVICE and subgroup.formats.has_copies:
                self._add(
                    Tier.DEVICE, "parameters of resident states", numel * subgroup.formats.width
                )
            return
        self._add(Tier.NVME if index in plan.resting.states else Tier.HOST, "states", nbytes)

    def _gradients(self, homes: Mapping[int, Home]) -> None:
        plan, sizing = self._plan, self._sizing
        drives = bool(plan.resting.states or plan.resting.values)
        for subgroup in sizing.subgroups:
            if homes[subgroup.index] is not Home.HOST and not sizing.unified:
                continue
            away = plan.layouts.get(subgroup.index, NO_LAYOUT).gradients
            for number, segment in enumerate(subgroup.segments):
                nbytes = sizing.wire(subgroup) * segment.numel
                if number in away:
                    self._add(Tier.NVME, "gradients", nbytes * plan.resting.gradients)
                elif drives or not sizing.unified:
                    self._add(Tier.HOST, "gradients", nbytes)
                    if sizing.sums:
                        self._add(Tier.HOST, "sums of gradients", _SUMMED * segment.numel)
            goes_up = plan.steps.parameters is Tier.DEVICE and not sizing.unified
            kept = subgroup.index not in plan.resting.states
            if goes_up and kept and subgroup.formats.has_copies:
                self._add(Tier.HOST, "new parameters", subgroup.formats.width * subgroup.numel)

    def _parameters(self) -> None:
        plan, sizing = self._plan, self._sizing
        resting = plan.resting.values
        for number, nbytes in enumerate(sizing.parameters):
            if number in resting:
                self._add(Tier.NVME, "parameters", nbytes)
            elif sizing.unified:
                self._add(Tier.HOST, "parameters", nbytes)
            else:
                tier = Tier.DEVICE if plan.steps.parameters is Tier.DEVICE else Tier.HOST
                self._add(tier, "parameters", nbytes)


def _notes(decision: Decision) -> Iterable[str]:
    training, means = decision.training, decision.means
    yield from training.model.notes
    if not training.model.activations.are_known:
        yield "activations of this model are not known, and not counted"
    if training.inputs_moved:
        place = "drives" if means.moved_inputs()[Tier.NVME] else "the host"
        yield (
            f"the {format_bytes(means.ranks * training.input_bytes())} of inputs of blocks that "
            f"wait on {place} are taken off the budget, but the time that they take on links and "
            "drives is in no phase"
        )
    if means.compute_rate(training) is None:
        yield (
            "the rate of computing is not known: seconds of a step, of forward and of backward "
            "are those of their transfers and updates alone"
        )
    if means.ranks > 1:
        timed = "" if means.wire_bytes_per_s else "; gathers between devices are not timed"
        yield (
            f"{means.ranks} ranks divide the host, the drives and their rates, parameters, states "
            f"and gradients among them, and keep sums of gradients in fp32{timed}"
        )
    yield from notes_of_ranks(means)


def notes_of_ranks(means: Means) -> Iterator[str]:
    """Yield what this version of the engine does not run of a plan for so many ranks."""
    if means.ranks > 1 and not means.unified:
        yield (
            "this version of the engine refuses several ranks on GPUs: it trains on one GPU, or on "
            "several ranks of the CPU"
        )
