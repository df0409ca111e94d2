"""What a whole step takes: update, forward and backward, module by module, as lanes that work at
the same time.

Pure. The update is the StepPlan's own ops, by the rules of plan/timing.py; forward and backward
fetch what they need through the memory that the plan has for it, and gradients go where the plan
has them. Called by the planner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import count, islice
from math import inf
from typing import NamedTuple

from infinity_engine.placement.buffers import NO_LAYOUT
from infinity_engine.placement.placing import Plan
from infinity_engine.placement.sizing import Sizing
from infinity_engine.placement.training import Means, Training
from infinity_engine.plan import Lane, LaneClocks, OpTime, OwnWork, Rates, Tier
from infinity_engine.plan.ops import CopyOp, Op, UpdateOp
from infinity_engine.plan.step import Home
from infinity_engine.schedule.executor import Executor, Walk
from infinity_engine.schedule.prefetch import LOOK_AHEAD
from infinity_engine.sim.walking import ComputeTime, FetchingRoom, RankWire, TimedCarrier
from infinity_engine.telemetry import NullTelemetry
from infinity_engine.units import NS_PER_S

__all__ = [
    "Phase",
    "Span",
    "StepTimeline",
    "least_step_ns",
    "time_quickest_step",
    "time_step",
]

_new = tuple.__new__  # as in plan/timing.py
_CHECKED = 16  # ops between two looks at how long a step takes at least
_ROUNDS = 8  # to find how much of their time updates and moves disturb one another


class Span(NamedTuple):
    """A lane works from here to there, in nanoseconds from the step's beginning; `nbytes` where it
    moves some.
    """

    lane: Lane
    start_ns: int
    end_ns: int
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the step, and how long each lane works in it."""

    name: str
    start_ns: int
    end_ns: int
    busy_ns: Mapping[Lane, int]

    @property
    def ns(self) -> int:
        """How long it takes."""
        return self.end_ns - self.start_ns

    @property
    def binding(self) -> Lane | None:
        """What works longest; None where nothing does."""
        lane = max(self.busy_ns, key=self.busy_ns.__getitem__)
        return lane if self.busy_ns[lane] else None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimeline:
    """A step in the steady state: the update that ends one, then forward and backward of the
    next.
    """

    cuts: tuple[tuple[str, int, int], ...]
    """The phases: what each is called, where it begins and where it ends."""
    ops: Sequence[tuple[Op, OpTime]]
    """Those of the update, and when each runs."""
    lanes: Mapping[Lane, Lane | None]
    """Where ops of each lane run; None where they take no time."""
    passes: Sequence[Span]
    """What modules do, and what is moved for them."""
    repeated_ns: int
    """What the further micro-batches add, each as long as the last forward and backward that
    `passes` shows.
    """
    update_ns: int
    repeated: Sequence[Span] = ()
    """What is done once for each further micro-batch, of which there are `repeats`."""
    repeats: int = 0
    gathering_ns: int = 0
    """How long ranks exchange parameters and gradients in the whole step, hidden or not."""
    forward_wire_ns: int = 0
    """How long they do in one forward."""

    @property
    def ns(self) -> int:
        """How long the step takes."""
        return max((end_ns for _, _, end_ns in self.cuts), default=0) + self.repeated_ns

    @property
    def update_spans(self) -> list[Span]:
        """What the update does. Made anew each time: a search shows one of the steps it times."""
        lanes = self.lanes
        return [
            _new(Span, (lane, *time, op.nbytes if isinstance(op, CopyOp) else 0))
            for op, time in self.ops
            if (lane := lanes[op.lane]) is not None
        ]

    @property
    def spans(self) -> list[Span]:
        """All that the step does, but for what is repeated."""
        return [*self.update_spans, *self.passes]

    @property
    def moved(self) -> Mapping[Lane, int]:
        """Bytes over each link, in the whole step, summed anew."""
        moved: dict[Lane, int] = {}
        for spans, times in ((self.spans, 1), (self.repeated, self.repeats)):
            for span in spans:
                if span.nbytes:
                    moved[span.lane] = moved.get(span.lane, 0) + times * span.nbytes
        return moved

    @property
    def update_busy_ns(self) -> Mapping[Lane, int]:
        """How long each lane works at the update itself."""
        return _busy(self.update_spans, 0, self.update_ns)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The parts of the step, one after the other."""
        spans = self.spans
        return tuple(
            Phase(name, start, end, _busy(spans, start, end)) for name, start, end in self.cuts
        )


def time_step(plan: Plan, sizing: Sizing, training: Training, means: Means) -> StepTimeline:
    """Return when everything of a step happens at the rates of `means`.

    Raises:
        ConfigError: a rate is missing of something that the plan uses.
    """
    return _TimedStep(plan, sizing, training, means, _work_of(plan, sizing, training, means)).run()


def least_step_ns(plan: Plan, sizing: Sizing, training: Training, means: Means) -> int:
    """Return nanoseconds that no step by this plan takes less than: no lane waits for another.

    0 on one memory, of which it knows nothing.
    """
    if means.unified:
        return 0
    work = _work_of(plan, sizing, training, means)
    return _TimedStep(plan, sizing, training, means, work).least().earliest_end_ns()


def time_quickest_step(
    plan: Plan,
    sizing: Sizing,
    training: Training,
    means: Means,
    *,
    below_ns: float = inf,
    alike_ns: float = inf,
) -> tuple[StepTimeline, bool]:
    """Return the same, and whether the update goes on beside the next forward, which the training
    may leave open.

    Some steps are longer so (decision 0016): the thread that updates also waits for parameters.
    Only the seconds of a forward tell, so without a rate of computing nothing is changed. The
    longer way may not be timed to its end. Where the step takes `below_ns` or more both ways, or
    more than `alike_ns`, which is that of a plan of its kind, only one may have been timed: apart.
    """
    work = _work_of(plan, sizing, training, means)

    def timed(overlap: bool | None, most_ns: float = inf) -> StepTimeline:
        asked = replace(training, overlap=overlap)
        return _TimedStep(plan, sizing, asked, means, work).run(most_ns)

    is_open = training.overlap is None and means.compute_rate(training) is not None
    if not (is_open and _defers(plan, work.modules, means)):
        return timed(training.overlap), training.overlap is not False
    apart = timed(overlap=False)
    # Beside one another, update and forward save no more than the shorter of the two takes.
    saved_ns = min((end_ns - begin_ns for _, begin_ns, end_ns in apart.cuts[:2]), default=0)
    if apart.ns - saved_ns >= below_ns:
        return apart, False
    try:
        beside = timed(overlap=True, most_ns=min(apart.ns, alike_ns))
    except _LongerStepError:
        return apart, False
    return (apart, False) if apart.ns < beside.ns else (beside, True)


class _LongerStepError(Exception):
    """A step takes longer than was asked: it was not timed to its end."""


class _Needs(NamedTuple):
    """What one module needs, and what it leaves: bytes, operations of a forward, and the subgroups
    that change it.
    """

    parameters: int
    """How many it has."""
    fetched: int
    fetched_copies: int
    """How many copies these bytes come in."""
    read: int
    flops: int
    backward_flops: int
    again: int
    """How often a backward runs it once more."""
    tiles: int
    """How many tiles of the sequence a forward runs it on, one after another."""
    stays: bool
    """Whether what is fetched for one tile is still there for the next one."""
    gradient_down: int
    gradient_copies: int
    """How many copies these bytes go down in."""
    gradient_written: int
    subgroups: tuple[int, ...]
    gathered: int
    """Bytes of its parameters that each rank sends the others."""
    reduced: int
    """Bytes of its gradients likewise."""

    def of_backward(self) -> _Needs:
        """Return what a backward needs of it: each tile of the sequence runs again first."""
        return self if self.tiles == 1 else self._replace(tiles=2 * self.tiles)

    @property
    def fetches(self) -> int:
        """How often it is fetched."""
        return 1 if self.stays else self.tiles


class _StepWork(NamedTuple):
    """What a step has to do, at whatever rates: of each module, and of each lane in the update."""

    modules: Sequence[_Needs]
    amounts: Mapping[Lane, int]
    summed: int
    """Of what the host updates, whose states come from drives."""


class _Lanes:
    """The lanes of a step by their `clocks`, and what has been written down of them.

    What moves takes at least as long as at the rates of `alone`, while nothing goes the other way.
    """

    def __init__(self, clocks: LaneClocks, alone: Rates) -> None:
        self.clocks = clocks
        self.spans: list[Span] = []
        self.alone = self.moving = LaneClocks(alone)

    def work(self, lane: Lane, duration_ns: int, after_ns: int, nbytes: int = 0) -> int:
        """Let a lane work, next and not before `after_ns`; return when it has."""
        end_ns = self.clocks.work(lane, duration_ns, after_ns)
        if duration_ns:
            self.spans.append(_new(Span, (lane, end_ns - duration_ns, end_ns, nbytes)))
        return end_ns

    def move(self, lane: Lane, nbytes: int, after_ns: int, *, copies: int = 1) -> int:
        """Let a lane move so many bytes in so many copies; return when it has."""
        return self.work(lane, self.moving.duration_ns(lane, nbytes, copies), after_ns, nbytes)

    def move_at(self, rates: Rates) -> None:
        """Let what moves from here on take as long as at these rates."""
        self.moving = LaneClocks(rates)

    def read(self, nbytes: int, after_ns: int, *, begin_ns: int) -> int:
        """Read a parameter, in a pass that begins then, and return when it is there.

        Until it can be read, the drives go on with what comes next.
        """
        duration_ns = self.moving.duration_ns(Lane.NVME_READ, nbytes)
        read_ns = self.work(Lane.NVME_READ, duration_ns, begin_ns, nbytes)
        return max(read_ns, after_ns + duration_ns)


class _LeastStep:
    """What a step takes at least, as its lanes have waited so far on these clocks.

    In `ready` is what each lane does until update and forward have ended, at least; a backward
    takes `after_ns` more. It fetches parameters `again`, which may begin before. All that ranks
    exchange in the step takes `wire_ns`.
    """

    def __init__(
        self,
        clocks: LaneClocks,
        wire: RankWire,
        ready: Mapping[Lane, int],
        *,
        after_ns: int,
        again: Mapping[Lane, int],
        wire_ns: int,
    ) -> None:
        self.after_ns = after_ns
        self._clocks = clocks
        self._wire = wire
        self._busy = [(lane, ns + max(after_ns, again.get(lane, 0))) for lane, ns in ready.items()]
        self._wire_ns = wire_ns

    def earliest_end_ns(self) -> int:
        """Return a time before which the step cannot end, from how long each lane has waited so
        far.
        """
        wire_ns = self._wire.idle_ns() + self._wire_ns
        return max([wire_ns, *(self._clocks.idle_ns(lane) + ns for lane, ns in self._busy)])


class _TimedUpdate:
    """The update of a step on the step's clocks: the ops of the plan, in the plan's order."""

    def __init__(self, ops: Sequence[Op], clocks: LaneClocks, means: Means) -> None:
        self.done: list[tuple[Op, OpTime]] = []
        instead, free = means.lanes_instead(), means.free_lanes()
        self.lanes = {
            lane: None if instead.get(lane, lane) in free else instead.get(lane, lane)
            for lane in Lane
        }
        self._ops = ops
        self._clocks = clocks

    @property
    def end_ns(self) -> int:
        """When the last op so far ends."""
        return max([time.end_ns for _, time in self.done], default=0)

    def run_until(self, number: int) -> None:
        """Run the ops up to this one, unless they have run."""
        # Thousands in a plan, and all plans of a search go this way.
        ops = self._ops[len(self.done) : number + 1]
        self.done += zip(ops, map(self._clocks.run, ops), strict=True)

    def finish(self) -> None:
        """Run the ops that are left."""
        self.run_until(len(self._ops) - 1)


class _Disturbance:
    """What the parts of a step on the host leave one another: updates, modules, what is moved."""

    def __init__(self, training: Training, means: Means, work: _StepWork) -> None:
        self._means = means
        self._work = work
        self._compute_rate = means.compute_rate(training)
        self.alone = ComputeTime(self._compute_rate)
        """How long modules compute while nothing disturbs them."""
        self.own = means.own if means.unified else OwnWork()
        """How long the engine itself takes between them."""

    def beside_update(self, *, deferred: bool) -> tuple[Rates, Rates, ComputeTime]:
        """Return the rates of an update, those of what modules fetch beside it, and how long these
        compute, where the update is `deferred` into the forward.
        """
        means, of_update = self._means, self._work.amounts
        read, written = (of_update.get(lane, 0) for lane in (Lane.NVME_READ, Lane.NVME_WRITE))
        # On one memory, modules are handed what is updated; the others read theirs.
        read_too = sum(
            needs.fetches * needs.read
            for needs in (self._work.modules if deferred else ())
            if not (means.unified and needs.subgroups)
        )

        def both_at_once(rates: Rates) -> tuple[Rates, Rates]:
            updating = rates.both_at_once(read, written)
            if not read_too:
                return self._swapping(updating), rates
            more = {
                name: drive.reading_more(read_too, reads=read, writes=written)
                for name, drive in rates.nvme.items()
            }
            drives = {
                name: replace(drive, write_bytes_per_s=more[name].write_bytes_per_s)
                for name, drive in updating.nvme.items()
            }
            return self._swapping(replace(updating, nvme=drives)), replace(rates, nvme=more)

        beside, fetching = both_at_once(means.rates)
        if means.alone is None:
            return beside, fetching, self.alone
        alone, fetching = both_at_once(means.alone)
        free, instead = means.free_lanes(), means.lanes_instead()
        amounts: dict[Lane, int] = {}
        for own, amount in of_update.items():
            lane = instead.get(own, own)
            if lane not in free and lane is not Lane.DEVICE:
                amounts[lane] = amounts.get(lane, 0) + amount
        if read_too:
            amounts[Lane.NVME_READ] = read + read_too
        computing_ns = 0
        if deferred and means.unified:
            computing_ns = self._computing_ns(backward=False)
        elif deferred:
            fetched = sum(needs.fetches * needs.fetched for needs in self._work.modules)
            amounts[Lane.H2D] = amounts.get(Lane.H2D, 0) + fetched
        rates, kept = self._shared(alone, beside, amounts, computing_ns)
        if fetching.h2d_bytes_per_s and alone.h2d_bytes_per_s and rates.h2d_bytes_per_s:
            left = rates.h2d_bytes_per_s / alone.h2d_bytes_per_s  # by updates, of what it has alone
            fetching = replace(fetching, h2d_bytes_per_s=left * fetching.h2d_bytes_per_s)
        return rates, fetching, ComputeTime(self._compute_rate, kept)

    def beside_moves(self, *, backward: bool, stays: int) -> tuple[Rates, ComputeTime]:
        """Return the rates of what modules fetch and leave in a pass without updates, and how long
        they compute. So many bytes are there already.
        """
        means, read, fetched, written, down = self._means, 0, 0, 0, 0
        for needs in self._work.modules:
            passing = needs.of_backward() if backward else needs
            read += passing.fetches * passing.read
            fetched += passing.fetches * passing.fetched
            if backward:
                written += passing.gradient_written
                down += passing.gradient_down
        read, fetched = max(read - stays, 0), max(fetched - stays, 0)
        both_ways = partial(
            Rates.both_at_once, reads=read, writes=written, up_and_down=(fetched, down)
        )
        alone = both_ways(means.alone or means.rates)
        moved = {
            lane: nbytes
            for lane, nbytes in ((Lane.NVME_READ, read), (Lane.NVME_WRITE, written))
            if nbytes
        }
        if not (means.unified and means.alone and moved):
            return alone, self.alone
        computing_ns = self._computing_ns(backward=backward)
        rates, kept = self._shared(alone, both_ways(means.rates), moved, computing_ns)
        return rates, ComputeTime(self._compute_rate, kept)

    def _swapping(self, rates: Rates) -> Rates:
        """Return the rates of updates that move states from and to drives, and make the checksums
        of these.
        """
        rate, means, work = rates.host_update_params_per_s, self._means, self._work
        if rate is None or not work.summed:
            return rates
        part = work.summed / work.amounts[Lane.HOST]
        return replace(
            rates,
            host_update_params_per_s=rate / (1 - part + part / means.summing),
            host_start_s=(rates.host_start_s or 0) + part * self.own.swapping_s or None,
        )

    def _computing_ns(self, *, backward: bool) -> int:
        """Return how long all modules compute in a pass while nothing disturbs them."""
        alone, modules = self.alone, self._work.modules
        if backward:
            return sum(
                alone(0, needs.backward_flops, needs.again * needs.flops) for needs in modules
            )
        return sum(alone(needs.flops) for needs in modules)

    def _shared(
        self, alone: Rates, beside: Rates, amounts: Mapping[Lane, int], computing_ns: int
    ) -> tuple[Rates, float]:
        """Return the rates of what is updated and moved while modules compute for so long on the
        host, and the part of their own that they keep.

        What the host does, and all that is moved, take the longer of the two together; each of them
        is disturbed for as much of its time as the other one works: drives by updates, and as
        far as they are, by modules.
        """
        means, rates, kept = self._means, alone, 1.0
        free, computing_s = means.free_lanes(), computing_ns / NS_PER_S
        disturbed, before = (0.0, 0.0, 0.0), (-1.0, 0.0, 0.0)
        slower = 1 / means.io_beside_computing - 1  # drives, while modules compute
        for _ in range(_ROUNDS):
            if disturbed == before:
                break
            before, of_host = disturbed, disturbed[0]
            rates = _rates_between(alone, beside, *disturbed)
            kept = 1 / (1 - of_host + of_host / means.computing_beside_io)
            clocks = LaneClocks(rates, free=free)
            seconds = {
                lane: clocks.duration_ns(lane, amount) / NS_PER_S
                for lane, amount in amounts.items()
            }
            updating_s, modules_s = seconds.pop(Lane.HOST, 0.0), computing_s / kept
            moving_s = max(seconds.values(), default=0.0)
            every_s = max(updating_s + modules_s, moving_s)
            if not every_s:
                break
            disturbed = moving_s / every_s, updating_s / every_s, slower * modules_s / every_s
        return rates, kept


class _TimedStep:
    """The clocks of one step, and what has been written down."""

    def __init__(
        self,
        plan: Plan,
        sizing: Sizing,
        training: Training,
        means: Means,
        work: _StepWork,
    ) -> None:
        self._plan = plan
        self._steps_micro_batches = training.accumulation_steps
        self._disturbance = _Disturbance(training, means, work)
        self._compute = Lane.HOST if means.unified else Lane.DEVICE
        self._work = work
        self._deferred = training.overlap is not False and _defers(plan, work.modules, means)
        rates, fetching, self._beside_update_ns = self._disturbance.beside_update(
            deferred=self._deferred
        )
        clocks = LaneClocks(rates, free=means.free_lanes(), instead=means.lanes_instead())
        self._lanes = _Lanes(clocks, means.alone or means.rates)
        self._lanes.move_at(fetching)
        self._room = FetchingRoom(
            {number: needs.fetched for number, needs in enumerate(work.modules) if needs.fetched},
            plan.demand.fetched,
            staged=sum(plan.steps.staging_bytes),
            on_their_way=0 if means.unified else sizing.on_their_way,
        )
        self._update = _TimedUpdate(plan.steps.ops, clocks, means)
        # The thread that calls the modules.
        self._thread = TimedCarrier(clocks, self._update.done)
        self._wire = RankWire(means.ranks, means.wire_bytes_per_s, training.small_bytes)

    def run(self, most_ns: float = inf) -> StepTimeline:
        """Return when everything happens.

        Raises:
            _LongerStepError: while it was timed, the step was seen to take more than `most_ns`.
        """
        deferred = self._deferred
        if not deferred:
            self._update.finish()
        begin_ns = 0 if deferred else self._update.end_ns
        if deferred and self._compute is Lane.DEVICE:
            computed_ns = self._forward_beside(most_ns)
        else:
            computed_ns = self._forward(begin_ns, deferred=deferred)
        updated_ns = self._update.end_ns if deferred else begin_ns
        middle_ns = max(computed_ns, updated_ns)
        made_ns, end_ns = self._backward(middle_ns)
        cuts = [
            ("update", 0, begin_ns),
            ("forward", begin_ns, middle_ns),
            ("backward", middle_ns, end_ns),
        ]
        if deferred:
            cuts[:2] = [("update and forward", 0, middle_ns)]
        once = len(self._lanes.spans)
        repeated_ns, gathering_ns = 0, self._wire.busy_ns
        more = self._steps_micro_batches - 1
        if more:
            gathered_ns = self._wire.busy_ns
            # The next forward does not wait for gradients to come down.
            again_ns, again_end_ns = self._backward(self._forward(made_ns, deferred=False))
            # Made, or sent: where a link is slower than computing, its gradients queue up.
            repeated_ns = more * max(again_ns - made_ns, again_end_ns - end_ns)
            gathering_ns += more * (self._wire.busy_ns - gathered_ns)
        return StepTimeline(
            cuts=tuple(cuts),
            ops=self._update.done,
            lanes=self._update.lanes,
            passes=self._lanes.spans[:once],
            repeated_ns=repeated_ns,
            update_ns=updated_ns,
            repeated=self._lanes.spans[once:],
            repeats=more,
            gathering_ns=gathering_ns,
            forward_wire_ns=self._wire_ns()[0],
        )

    def _beside_moves(self, *, backward: bool) -> ComputeTime:
        """Return how long modules compute in a pass without updates, and let what they read and
        write take its time beside them.
        """
        stays = self._room.resident.used  # of the last pass
        rates, computing_ns = self._disturbance.beside_moves(backward=backward, stays=stays)
        self._lanes.move_at(rates)
        return computing_ns

    def _forward(self, begin_ns: int, *, deferred: bool) -> int:
        """Run all modules, from `begin_ns` on at the earliest; return when the last has ended.

        Beside an update, modules are handed what it has made: they wait for no drive to have
        written it, and read none.
        """
        numbered = enumerate(self._plan.steps.ops if deferred else ())
        updates = {op.subgroup: number for number, op in numbered if isinstance(op, UpdateOp)}
        end_ns = begin_ns
        duration_ns = self._beside_update_ns if deferred else self._beside_moves(backward=False)
        self._room.begin_pass()
        for number, needs in enumerate(self._work.modules):
            fetched, ready_ns = needs, begin_ns
            if deferred and needs.subgroups:
                ops = [updates[index] for index in needs.subgroups]
                self._update.run_until(max(ops))
                ready_ns = max(self._lanes.clocks.times[op].end_ns for op in ops)
                fetched = needs._replace(read=0)
            arrived_ns = self._fetch(number, fetched, ready_ns, begin_ns=begin_ns)
            computing_ns = duration_ns(needs.flops) + self._disturbance.own.passing_ns(
                needs.parameters
            )
            end_ns = self._run(number, needs, computing_ns, self._gather(needs, arrived_ns))
        if deferred:
            self._update.finish()
        return end_ns

    # --- beside an update, on a device with memory of its own -------------------------------------

    def _forward_beside(self, most_ns: float) -> int:
        """Run all modules while the thread that calls them walks along the update; return when both
        have ended.

        As the engine does it: who needs a parameter goes on with the walk until that has arrived.
        While one waits that stays on the device, what comes later is updated on the host; while one
        waits that is fetched, one subgroup.
        """
        for lane in dict.fromkeys(op.lane for op in self._plan.steps.ops):
            # A missing rate is refused here: within the walk it would be a failed op.
            self._lanes.clocks.duration_ns(lane, 0)
        least, last = self.least(), len(self._work.modules) - 1
        number, ops = 0, count()

        def check() -> None:
            # Before the last module: what ends later is compared when it has ended.
            if number < last and not next(ops) % _CHECKED and least.earliest_end_ns() > most_ns:
                raise _LongerStepError

        # The first modules may wait for most of an update, so it is checked between its ops, too.
        walk = Executor(self._thread, NullTelemetry(), check).begin(self._plan.steps)
        self._room.begin_pass()
        walk.poll()
        self._fetch_ahead(walk)
        end_ns = 0
        for number, needs in enumerate(self._work.modules):
            if least.earliest_end_ns() > most_ns:
                raise _LongerStepError
            if needs.fetched:
                self._provide(number, walk)
            else:
                for subgroup in needs.subgroups:
                    while not walk.has_arrived(subgroup):
                        if not walk.poll():
                            walk.arrive(needs.subgroups)
            duration_ns = self._disturbance.alone(needs.flops)
            ready_ns = self._gather(needs, self._thread.now_ns)
            end_ns = self._run(number, needs, duration_ns, ready_ns)
        walk.finish()
        end_ns = max(end_ns, self._thread.now_ns)
        if end_ns + least.after_ns > most_ns:
            raise _LongerStepError
        return end_ns

    def least(self) -> _LeastStep:
        """Return what the step takes at least while its lanes wait for nothing; on a device with
        memory of its own.
        """
        computing_ns, alone = self._disturbance.alone, self._lanes.alone
        # Beside an update all is fetched at these rates; else with nothing beside it.
        fetching = self._lanes.moving if self._deferred else alone
        # If nothing stays from the forward. What stays is not read, and the rest of it more slowly:
        # as much is written beside less.
        again = LaneClocks(self._disturbance.beside_moves(backward=True, stays=0)[0])
        forward_ns = backward_ns = fetched = read = down = written = 0
        for needs in self._work.modules:
            forward_ns += computing_ns(needs.flops)
            backward_ns += computing_ns(0, needs.backward_flops, needs.again * needs.flops)
            fetched += needs.fetched
            read += needs.read
            down += needs.gradient_down
            written += needs.gradient_written
        ready = {
            lane: self._lanes.clocks.duration_ns(lane, amount)
            for lane, amount in self._work.amounts.items()
        }
        for lane, ns in (
            (Lane.H2D, _moving_ns(fetching, Lane.H2D, fetched)),
            (Lane.NVME_READ, _moving_ns(fetching, Lane.NVME_READ, read)),
            (self._compute, forward_ns),
        ):
            ready[lane] = ready.get(lane, 0) + ns
        stays = self._room.resident.limit  # from the forward at most, for the backward
        sent = (
            _moving_ns(alone, Lane.D2H, down),
            _moving_ns(alone, Lane.NVME_WRITE, written),
        )
        forward_wire_ns, backward_wire_ns = self._wire_ns()
        pass_ns = max(forward_ns + backward_ns, forward_wire_ns + backward_wire_ns)
        more_ns = (self._steps_micro_batches - 1) * pass_ns
        return _LeastStep(
            self._lanes.clocks,
            self._wire,
            ready,
            after_ns=max(backward_ns, backward_wire_ns, *sent) + more_ns,
            again={
                Lane.H2D: _moving_ns(again, Lane.H2D, fetched - stays),
                Lane.NVME_READ: _moving_ns(again, Lane.NVME_READ, read - stays),
            },
            wire_ns=forward_wire_ns + backward_wire_ns + more_ns,
        )

    def _wire_ns(self) -> tuple[int, int]:
        """Return how long ranks exchange in a forward, and in a backward."""
        forward_ns = backward_ns = 0
        if self._wire.is_timed:
            needed_ns = self._wire.duration_ns
            for needs in self._work.modules:
                forward_ns += needed_ns(needs.tiles * needs.gathered)
                backward_ns += needed_ns(needs.of_backward().tiles * needs.gathered)
                backward_ns += needed_ns(needs.reduced)
        return forward_ns, backward_ns

    def _provide(self, number: int, walk: Walk) -> None:
        """Let the thread wait until what a module needs has been updated, and is there; then begin
        to fetch what comes next.
        """
        needs, resident = self._work.modules[number], self._room.resident
        walk.poll()
        resident.hold((number,))
        if not self._room.need(number):
            walk.reach(needs.subgroups)
            walk.arrive(needs.subgroups)
            self._give_up(resident.evictions(needs.fetched))
            while not self._room.has_room(number, self._thread):
                if not self._give_up(islice(resident.idle(), 1)):
                    walk.finish()
                    self._room.end_update()
                    break
            self._fetch_now(number)
        self._thread.wait_until(self._room.used_ns[number])
        self._fetch_ahead(walk)
        resident.let_go((number,))

    def _fetch_ahead(self, walk: Walk) -> None:
        """Begin to fetch what the next modules need, as far as there is room for it and it has been
        updated.
        """
        resident, modules, has_arrived = self._room.resident, self._work.modules, walk.has_arrived
        chosen = resident.choose(resident.upcoming(LOOK_AHEAD))
        self._give_up(chosen.evicted)
        left_out = None  # the first of those that cannot be fetched yet: it is needed first
        for number in chosen.fetched:
            if all(map(has_arrived, modules[number].subgroups)):
                if not self._room.has_room(number, self._thread):
                    left_out = number if left_out is None else left_out
                    break
                self._fetch_now(number)
            elif left_out is None:
                left_out = number
        if left_out is not None:
            resident.fetch_again(left_out)

    def _fetch_now(self, number: int) -> None:
        needs, after_ns = self._work.modules[number], self._thread.now_ns
        if needs.read:
            after_ns = self._lanes.move(Lane.NVME_READ, needs.fetches * needs.read, after_ns)
        nbytes, copies = needs.fetches * needs.fetched, needs.fetches * needs.fetched_copies
        after_ns = self._lanes.move(Lane.H2D, nbytes, after_ns, copies=copies)
        self._room.admit(number, after_ns)

    def _give_up(self, modules: Iterable[int]) -> bool:
        """Let these make room, once the device has used them; tell whether there are any."""
        return self._room.evict(modules, self._lanes.clocks.free_ns(self._compute))

    # ----------------------------------------------------------------------------------------------

    def _backward(self, begin_ns: int) -> tuple[int, int]:
        """Run all modules backwards; return when every gradient is made, and when every one is
        where it is kept.
        """
        all_made_ns = end_ns = begin_ns
        computing_ns = self._beside_moves(backward=True)
        self._room.begin_pass(backward=True)
        before: tuple[_Needs, int] | None = None  # what the last module needs, and its end
        for number in reversed(range(len(self._work.modules))):
            needs = self._work.modules[number].of_backward()
            arrived_ns = self._fetch(number, needs, 0, begin_ns=begin_ns)
            ready_ns = self._gather(needs, arrived_ns)
            # Only now: a module is gathered while the one before it computes.
            if before is not None:
                made_ns, sent_ns = self._send(*before)
                all_made_ns, end_ns = max(made_ns, all_made_ns), max(sent_ns, end_ns)
            duration_ns = computing_ns(0, needs.backward_flops, needs.again * needs.flops)
            duration_ns += self._disturbance.own.passing_ns((1 + needs.again) * needs.parameters)
            before = needs, self._run(number, needs, duration_ns, ready_ns)
        if before is not None:
            made_ns, sent_ns = self._send(*before)
            all_made_ns, end_ns = max(made_ns, all_made_ns), max(sent_ns, end_ns)
        return all_made_ns, end_ns

    def _send(self, needs: _Needs, ended_ns: int) -> tuple[int, int]:
        """Send the gradients of a module that has ended where they are kept; return when they are
        made, and when they are there.
        """
        made_ns = sent_ns = self._wire.exchange(needs.reduced, ended_ns)
        if needs.gradient_down:
            sent_ns = self._lanes.move(
                Lane.D2H, needs.gradient_down, sent_ns, copies=needs.gradient_copies
            )
        if needs.gradient_written:
            sent_ns = self._lanes.move(Lane.NVME_WRITE, needs.gradient_written, sent_ns)
        return made_ns, sent_ns

    def _fetch(self, number: int, needs: _Needs, after_ns: int, *, begin_ns: int) -> int:
        """Let what a module needs be there in a pass that begins then; return when it is.

        Links may go on from the pass before; drives are at the rates of this one.
        """
        if not needs.fetched or self._room.need(number):
            return max(after_ns, begin_ns)
        after_ns, fetches = max(after_ns, self._room.make(number)), needs.fetches
        if needs.read:
            after_ns = self._lanes.read(fetches * needs.read, after_ns, begin_ns=begin_ns)
        nbytes, copies = fetches * needs.fetched, fetches * needs.fetched_copies
        if self._compute is Lane.DEVICE:
            after_ns = self._lanes.move(Lane.H2D, nbytes, after_ns, copies=copies)
        else:
            # The thread that computes fetches what comes next, between two modules.
            self._lanes.work(self._compute, self._disturbance.own.fetching_ns(copies), begin_ns)
        self._room.admit(number, after_ns)
        return max(after_ns, begin_ns)

    def _gather(self, needs: _Needs, arrived_ns: int) -> int:
        """Let a module be whole on each rank, whose parts are there then; return when it is."""
        if not self._wire.is_timed:
            return arrived_ns
        return self._wire.gather(needs.tiles * needs.gathered, arrived_ns)

    def _run(self, number: int, needs: _Needs, duration_ns: int, ready_ns: int) -> int:
        """Let a module compute; return when it has."""
        end_ns = self._lanes.work(self._compute, duration_ns, ready_ns)
        self._wire.note_use(needs.gathered, end_ns)
        if needs.fetched:
            self._room.used_ns[number] = end_ns
        return end_ns


def _moving_ns(clocks: LaneClocks, lane: Lane, nbytes: int) -> int:
    """Return how long a lane moves so many bytes at least; 0 where there are none."""
    return clocks.duration_ns(lane, nbytes) if nbytes > 0 else 0


def _work_of(plan: Plan, sizing: Sizing, training: Training, means: Means) -> _StepWork:
    amounts: dict[Lane, int] = {}
    summed, layouts = 0, plan.layouts
    for op in plan.steps.ops:
        lane, amount = op.lane, op.amount
        amounts[lane] = amounts.get(lane, 0) + amount
        if lane is Lane.HOST and op.subgroup in layouts:
            summed += amount
    return _StepWork(_needs(plan, sizing, training, means.ranks), amounts, summed)


class _ModuleWork(NamedTuple):
    """What a module has to do whatever the plan: its parameters by number, bytes that it shares
    with another one, and the fields of `_Needs` that no plan changes.
    """

    parameters: tuple[int, ...]
    feed_forward: str
    shared: int
    flops: int
    backward_flops: int
    again: int
    tiles: int


@lru_cache(maxsize=4)
def _work_of_modules(training: Training) -> Sequence[_ModuleWork]:
    """Return what each module of a micro-batch has to do.

    Kept, as a search asks for all modules of each plan.
    """
    numbers = {parameter.name: number for number, parameter in enumerate(training.ordered())}
    sequence, tokens, tiles = training.sequence, training.tokens, training.tiles
    return [
        _ModuleWork(
            parameters=tuple(numbers[parameter.name] for parameter in module.parameters),
            feed_forward=module.feed_forward,
            shared=training.width * module.shared_numel,
            flops=module.flops(sequence) * tokens,
            backward_flops=module.backward_flops(sequence) * tokens,
            again=training.runs_again(place),
            tiles=tiles if module.feed_forward else 1,
        )
        for place, module in enumerate(training.model.modules)
    ]


def _needs(plan: Plan, sizing: Sizing, training: Training, ranks: int) -> Sequence[_Needs]:
    """Return what each module needs of one micro-batch, on one of so many ranks."""
    down, written = _gradients(plan, sizing)
    at_home = plan.steps.parameters is not Tier.DEVICE
    resting = plan.resting.values
    sizes = sizing.parameters
    several = plan.demand.fetched < sum(sizes)
    modules = _work_of_modules(training)
    found = []
    subgroups, unified = sizing.subgroups_of, sizing.unified

    def fetched_of(module: _ModuleWork) -> int:
        own = module.parameters if at_home else ()
        return sum(sizes[number] for number in own if not unified or number in resting)

    together: dict[str, int] = {}
    for module in modules if training.tiles > 1 else ():
        block = module.feed_forward
        together[block] = together.get(block, 0) + fetched_of(module)
    nothing_down = 0, 0
    for module in modules:
        gathered = reduced = gradient_down = gradient_written = nbytes = read = 0
        copies = gradient_copies = 0
        changes: dict[int, None] = {}
        # Most modules have a parameter or two, and a search asks for all modules of each plan.
        for number in module.parameters:
            size = sizes[number]
            gathered += size
            nbytes_down, copies_down = down.get(number, nothing_down)
            gradient_down += nbytes_down
            gradient_copies += copies_down
            gradient_written += written.get(number, 0)
            if number in subgroups:
                reduced += size
                changes.update(dict.fromkeys(subgroups[number]))
            if at_home and number in resting:
                nbytes += size
                read += size
                copies += 1
            elif at_home and not unified:
                nbytes += size
                copies += 1
        if at_home and several and module.shared:  # another one's, which has gone meanwhile
            part = -(-module.shared // ranks)
            nbytes += part
            read += part if resting else 0
            copies += 1
        found.append(
            _Needs(
                parameters=len(module.parameters),
                fetched=nbytes,
                fetched_copies=copies,
                read=read,
                flops=module.flops,
                backward_flops=module.backward_flops,
                again=module.again,
                tiles=module.tiles,
                stays=together.get(module.feed_forward, 0) <= plan.demand.fetched,
                gradient_down=gradient_down,
                gradient_copies=gradient_copies,
                gradient_written=gradient_written,
                subgroups=tuple(changes),
                gathered=gathered,
                reduced=reduced,
            )
        )
    return found


def _gradients(plan: Plan, sizing: Sizing) -> tuple[dict[int, tuple[int, int]], dict[int, int]]:
    """Return, by parameter, the bytes of its gradient that go to the host and in how many copies,
    and those that go to the drives.
    """
    homes = plan.steps.homes()
    down: dict[int, tuple[int, int]] = {}
    written: dict[int, int] = {}
    layouts, unified = plan.layouts, sizing.unified
    for subgroup in sizing.subgroups:
        layout, width = layouts.get(subgroup.index, NO_LAYOUT), sizing.wire(subgroup)
        goes_down = homes[subgroup.index] is Home.HOST and not unified
        if not (goes_down or layout.gradients):
            continue
        for number, segment in enumerate(subgroup.segments):
            nbytes = width * segment.numel
            if goes_down:
                before, copies = down.get(segment.parameter, (0, 0))
                down[segment.parameter] = before + nbytes, copies + 1
            if number in layout.gradients:
                written[segment.parameter] = written.get(segment.parameter, 0) + nbytes
    return down, written


def _defers(plan: Plan, modules: Iterable[_Needs], means: Means) -> bool:
    """Tell whether the engine lets an update go on beside the next forward, where it may.

    On one memory what it changes has to be fetched; of several ranks as well, which else gather it
    when it is updated.
    """
    fetches = any(needs.fetched for needs in modules)
    if means.unified:
        return fetches and bool(plan.steps.buffer_bytes)
    return fetches or means.ranks == 1


def _rates_between(alone: Rates, beside: Rates, updates: float, moves: float, more: float) -> Rates:
    """Return the rates of updates and of moves that disturb one another for these parts of their
    time, and of drives that take so much of their time alone `more`.
    """

    def mean(
        one: float | None, other: float | None, part: float, more: float = 0.0
    ) -> float | None:
        if one is None or other is None:
            return None
        return 1 / ((1 - part + more) / one + part / other)

    drives = {
        name: replace(
            drive,
            read_bytes_per_s=mean(
                drive.read_bytes_per_s, beside.nvme[name].read_bytes_per_s, moves, more
            ),
            write_bytes_per_s=mean(
                drive.write_bytes_per_s, beside.nvme[name].write_bytes_per_s, moves, more
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


def _busy(spans: Iterable[Span], start_ns: int, end_ns: int) -> dict[Lane, int]:
    busy = dict.fromkeys(Lane, 0)
    for lane, begins_ns, ends_ns, _ in spans:
        if begins_ns < end_ns and ends_ns > start_ns:
            busy[lane] += min(ends_ns, end_ns) - max(begins_ns, start_ns)
    return busy
