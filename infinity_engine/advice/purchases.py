"""What the next purchase would bring, and what a little more of each resource is worth.

Pure. A purchase is a change of the means: the planner is asked again, by a short search; today's
plan counts as well, so no purchase looks like a loss. What a GiB or a GB/s is worth comes from
estimates alone, scaled to the simulated step. Called by the command line where a plan fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import isinf, log2
from operator import attrgetter
from types import MappingProxyType

from infinity_engine.advice.doubt import least_retimed_ns, retimed
from infinity_engine.advice.means import (
    with_compute,
    with_faster_writes,
    with_links,
    with_more_drives,
)
from infinity_engine.machine.capacity import capacity_of
from infinity_engine.placement.training import Means
from infinity_engine.plan import Auto
from infinity_engine.sim.planner import Decision, Planner
from infinity_engine.sim.report import written_bytes
from infinity_engine.sim.timeline import StepTimeline
from infinity_engine.units import DAY_S, GB, GiB

__all__ = ["Purchase", "Worth", "purchases", "worths"]

_LITTLE = 0.05  # of a resource: what is added to find what it is worth
_NOTHING = 0.003  # of a step: a resource that saves less is worth nothing
_HOPELESS = 0.02  # of an estimate: what saves less is not simulated


@dataclass(frozen=True, slots=True)
class Purchase:
    """Something to buy, and the step and the writes with it.

    `written_per_day` counts bytes that a day of steps without a pause writes to all drives: None
    where the rate of computing is not known.
    """

    what: str
    step_s: float
    written_per_day: float | None
    saved: float
    """The part of today's step that it saves; 0: nothing."""


@dataclass(frozen=True, slots=True)
class Worth:
    """Seconds of a step that one more `unit` of a resource saves, near what there is."""

    unit: str
    seconds: float


@dataclass(frozen=True, slots=True)
class _Offer:
    what: str
    means: Means


def purchases(
    decision: Decision, better_gpus: Mapping[str, Means] = MappingProxyType({})
) -> tuple[Purchase, ...]:
    """Return what each purchase would bring, the best first; `better_gpus` as for `advise`."""
    best, means, training = decision.best, decision.means, decision.training
    planner = decision.planner
    numel = best.choice.subgroup_numel
    before_ns = planner.least_estimate_ns(numel)
    # Estimates know nothing of a strategy that was asked for.
    is_given = not isinstance(planner.strategy, Auto | None)
    found = []
    computes = means.compute_rate(training) is not None
    today = best.timeline.ns, written_bytes(best.timeline, training, means)
    for offer in _offers(means.before_inputs(), better_gpus, computes=computes):
        there = planner.with_means(offer.means)
        ns, written = today
        if is_given or isinf(before_ns) or there.may_take_less(numel, (1 - _HOPELESS) * before_ns):
            timeline = _quickest(decision, there)
            ns, written = timeline.ns, written_bytes(timeline, training, there.means)
        saved = max(1 - ns / best.timeline.ns, 0.0) if best.timeline.ns else 0.0
        per_day = written * DAY_S / (ns / 1e9) if ns else 0.0
        found.append(Purchase(offer.what, ns / 1e9, per_day if computes else None, saved))
    return tuple(sorted(found, key=lambda purchase: -purchase.saved))


def _quickest(decision: Decision, there: Planner) -> StepTimeline:
    """Return the shortest step there of a short search's plan and today's, which can still be
    carried out: so no purchase is a loss.
    """
    best, planned, training, means = decision.best, decision.means, decision.training, there.means
    look = there.look(below_ns=best.timeline.ns)
    found = [] if look is None else [look.timeline]
    if replace(means, budget=planned.budget, whole=planned.whole) == planned:
        found.insert(0, best.timeline)  # more memory alone changes nothing in it
    # Timing it again takes as long as a plan of a search.
    elif not found or least_retimed_ns(best, training, means) <= found[0].ns:
        found.insert(0, retimed(best, training, means))
    return min(found, key=attrgetter("ns"))


# --- what can be bought ---------------------------------------------------------------------------


def _offers(means: Means, better_gpus: Mapping[str, Means], *, computes: bool) -> Iterator[_Offer]:
    budget = means.budget
    # The power of two nearest to what there is: modules of memory are sold in such sizes.
    more = GiB << max(round(log2(max(budget.host / GiB, 1))), 2)
    usable = capacity_of(device=0, host=more, nvme={}).host
    host = replace(budget, host=budget.host + usable)
    yield _Offer(f"{more // GiB} GiB more RAM", replace(means, budget=host))
    if budget.nvme:
        yield _Offer("as many drives again", with_more_drives(means, 2))
    if means.unified:
        return
    yield from (_Offer(name, better) for name, better in better_gpus.items())
    if not better_gpus:
        larger = replace(means, budget=replace(budget, device=2 * budget.device))
        yield _Offer("twice the GPU memory", larger)
        if computes:
            yield _Offer("a GPU that computes twice as fast", with_compute(means, 2.0))
    yield _Offer("a link twice as fast", with_links(means, 2.0))


# --- what a little more is worth ------------------------------------------------------------------


def worths(decision: Decision) -> tuple[Worth, ...]:
    """Return what one more GiB or GB/s of each resource saves, of those that save something."""
    best = decision.best
    numel = best.choice.subgroup_numel
    planner = decision.planner
    before_ns = planner.least_estimate_ns(numel)
    if isinf(before_ns) or not before_ns:
        return ()
    # A simulated step is a little longer than its estimate: what is saved is taken to be so too.
    scale = best.timeline.ns / before_ns / 1e9

    found = []
    there = decision.means.before_inputs()
    twice = dict(_more(there, 1.0))
    for unit, (amount, means) in _more(there, _LITTLE):
        saved = before_ns - planner.with_means(means).least_estimate_ns(numel)
        # At an edge an estimate falls by more than steps do: what twice as much would not save
        # either is no worth of the first GiB.
        if saved > _NOTHING * before_ns and planner.with_means(twice[unit][1]).may_take_less(
            numel, (1 - _HOPELESS) * before_ns
        ):
            found.append(Worth(unit, scale * saved / amount))
    return tuple(found)


def _more(means: Means, part: float) -> Iterator[tuple[str, tuple[float, Means]]]:
    """Yield a unit, how many of it are added where all grow by this part, at least one, and the
    means then.
    """
    budget, rates = means.budget, means.rates

    def grown(there: float) -> float:
        """Return by which part to grow: `part`, or more where that adds less than one unit."""
        return max(part, 1 / there)

    if budget.host:
        host = int(grown(budget.host / GiB) * budget.host)
        roomier = replace(means, budget=replace(budget, host=budget.host + host))
        yield "GiB of RAM", (host / GiB, roomier)
    if not means.unified and budget.device:
        device = int(grown(budget.device / GiB) * budget.device)
        larger = replace(budget, device=budget.device + device)
        yield "GiB of GPU memory", (device / GiB, replace(means, budget=larger))
    writes = means.ranks * sum(drive.write_bytes_per_s or 0 for drive in rates.nvme.values()) / GB
    if budget.nvme and writes:
        faster = grown(writes)
        yield "GB/s of drive writes", (faster * writes, with_faster_writes(means, 1 + faster))
    if not means.unified and rates.h2d_bytes_per_s:
        link = rates.h2d_bytes_per_s / GB
        yield "GB/s of the link", (grown(link) * link, with_links(means, 1 + grown(link)))
