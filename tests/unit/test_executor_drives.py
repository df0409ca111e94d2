"""Walks along plans with drives, whose I/O ends late, in any order, or fails: nothing begins before
what it needs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity_engine.accel import Event
from infinity_engine.errors import CapacityError
from infinity_engine.optim.policies import HOST_ONLY, interleaved, static_split, two_ended
from infinity_engine.optim.policy import Limits, OffloadPolicy
from infinity_engine.plan import (
    BytesPerParameter,
    DriveRates,
    Lane,
    Op,
    Rates,
    StepPlan,
    SubgroupSpec,
    Tier,
)
from infinity_engine.plan.ops import LoadStates, StoreStates, UpdateOnHost
from infinity_engine.schedule import Executor, Walk
from infinity_engine.schedule.executor import WAIT_FOR_READS, WAIT_FOR_WRITES
from infinity_engine.telemetry import NullTelemetry, Telemetry

RATES = Rates(
    host_update_params_per_s=1e9,
    device_update_params_per_s=1e10,
    h2d_bytes_per_s=1e10,
    d2h_bytes_per_s=1e10,
    nvme={"/": DriveRates(read_bytes_per_s=2e9, write_bytes_per_s=1e9)},
)
AT_HOME = Limits(
    resident_bytes=0,
    staging_bytes=0,
    staging_sets=1,
    per_parameter=BytesPerParameter(states=12, parameter=2),
    parameters=Tier.HOST,
    host_buffers=3,
)
LINKS = {Lane.H2D, Lane.D2H}
STREAMS = {Lane.DEVICE, *LINKS}


class DriveError(Exception):
    """What an op fails with."""


@dataclass(eq=False)
class Late(Event):
    """An event that has passed after so many looks at it, which may be never, or once somebody
    waits for it.
    """

    looks: float
    behind: list[Late]
    fails: bool = False
    passed: bool = False
    waited: bool = False
    slept: bool = False

    def done(self) -> bool:
        self.looks -= 1
        self.passed = self.passed or (self.looks < 0 and all(each.done() for each in self.behind))
        return self.passed

    def wait(self) -> None:
        self.slept = self.slept or not self.passed
        self.passed = self.waited = True
        for each in self.behind:
            each.wait()
        if self.fails:
            raise DriveError


@dataclass
class Checking:
    """A carrier that knows what may be under way."""

    plan: StepPlan
    chance: random.Random
    failing: int | None = None
    beside: bool = False
    """Whether the host's updates are made on a thread of their own."""
    queued: int = 1000
    """Ops in one direction of the device's link that may be under way."""
    events: dict[int, Late | None] = field(default_factory=dict)
    buffers: dict[int, int] = field(default_factory=dict)

    def carry_out(self, op: Op, after: Sequence[object]) -> Late | None:
        number = self.plan.ops.index(op)
        assert number not in self.events
        lane = [other for other, each in enumerate(self.plan.ops[:number]) if each.lane is op.lane]
        assert all(other in self.events for other in lane)
        for other in op.after:
            event = self.events[other]
            if event is not None and not event.passed:
                lanes = {op.lane, self.plan.ops[other].lane}
                assert lanes <= STREAMS or lanes == {Lane.HOST}
                assert event in after
        if op.lane in LINKS:
            assert len(
                [late for late in map(self.events.get, lane) if late and not late.passed]
            ) < (self.queued)
        self._check_buffer(number, op)
        event = None
        if op.lane is Lane.HOST and self.beside:
            earlier = [late for late in map(self.events.get, lane) if late is not None]
            assert sum(not late.passed for late in earlier) < 2, "no more than two are ahead"
            looks = self.chance.choice([0, 1, 3, 10, float("inf")])
            event = Late(looks, earlier[-1:], fails=number == self.failing)
        elif op.lane is Lane.HOST or (op.lane not in STREAMS and self.chance.random() < 0.1):
            if number == self.failing:
                raise DriveError
        else:
            looks = self.chance.choice([0, 1, 3, 10, float("inf")])
            behind = (
                [each for each in after if isinstance(each, Late)] if op.lane in STREAMS else []
            )
            if op.lane in STREAMS and lane:
                before = self.events[lane[-1]]
                behind += [] if before is None else [before]
            event = Late(looks, behind, fails=number == self.failing)
        self.events[number] = event
        return event

    def _check_buffer(self, number: int, op: Op) -> None:
        if isinstance(op, LoadStates):
            left = self.buffers.get(op.buffer)
            if left is not None:
                assert isinstance(self.plan.ops[left], StoreStates)
                event = self.events[left]
                assert event is None or event.passed
            self.buffers[op.buffer] = number
        elif isinstance(op, StoreStates):
            assert self.plan.ops[self.buffers[op.buffer]].subgroup == op.subgroup
            self.buffers[op.buffer] = number


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """Return the plan of some policy for subgroups of which some rest on drives."""
    sizes = draw(st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=9))
    specs = [
        SubgroupSpec(
            index=at,
            numel=numel,
            first_use=at,
            buffer_bytes=12 * numel if rests else 0,
            load_bytes=12 * numel if rests else 0,
            store_bytes=12 * numel if rests else 0,
        )
        for at, (numel, rests) in enumerate(sizes)
    ]
    limits = Limits(
        resident_bytes=draw(st.integers(0, 2000)),
        staging_bytes=draw(st.integers(0, 5000)),
        staging_sets=draw(st.integers(1, 3)),
        per_parameter=BytesPerParameter(states=12, parameter=2),
        parameters=draw(st.sampled_from(Tier)),
        host_buffers=draw(st.integers(1, 4)),
    )
    policy: OffloadPolicy = draw(
        st.one_of(
            st.just(HOST_ONLY),
            st.builds(static_split, st.floats(0, 1)),
            st.builds(
                interleaved,
                st.fractions(0, 1, max_denominator=9),
                resident=st.sampled_from([0.0, 0.3]),
            ),
            st.builds(two_ended, resident=st.sampled_from([0.0, 0.3])),
        )
    )
    try:
        return policy(specs, RATES, limits)
    except CapacityError:
        return HOST_ONLY(specs, RATES, limits)


def some_of(walk: Walk, plan: StepPlan, chance: random.Random) -> None:
    """Go on with a walk now and then, as whoever defers an update does."""
    for _ in range(chance.randrange(8)):
        if chance.random() < 0.7:
            walk.poll()
        else:
            walk.arrive([chance.choice(plan.subgroups).index])


@settings(max_examples=100, deadline=None)
@given(plans(), st.randoms(use_true_random=False))
def test_every_op_is_carried_out_once_and_after_what_it_needs(
    plan: StepPlan, chance: random.Random
) -> None:
    queued = chance.choice([1, 2, 5, 1000])
    carrier = Checking(plan, chance, beside=chance.random() < 0.5, queued=queued)
    walk = Executor(carrier, NullTelemetry(), queued=queued).begin(plan)

    some_of(walk, plan, chance)
    walk.finish()

    assert sorted(carrier.events) == list(range(len(plan.ops)))
    assert all(event is None or event.passed for event in carrier.events.values())


def test_a_poll_leaves_what_a_full_link_has_no_room_for() -> None:
    specs = [SubgroupSpec(index=at, numel=10, first_use=at) for at in range(9)]
    limits = replace(AT_HOME, staging_bytes=5000, staging_sets=2)
    plan = interleaved(Fraction(1))(specs, RATES, limits)
    carrier = Checking(plan, random.Random(1), queued=3)
    walk = Executor(carrier, NullTelemetry(), queued=3).begin(plan)

    walk.poll()
    begun = len(carrier.events)
    walk.finish()

    assert begun <= 3 * len(STREAMS)
    assert len(carrier.events) == len(plan.ops) == 36


def test_a_lane_goes_on_after_its_first_op_waited_for_an_op_and_then_for_its_end() -> None:
    specs = [
        SubgroupSpec(
            index=at, numel=1, first_use=at, buffer_bytes=12, load_bytes=12, store_bytes=12
        )
        for at in range(3)
    ]
    plan = StepPlan(
        subgroups=tuple(specs),
        ops=(
            LoadStates(subgroup=0, nbytes=12, buffer=0),
            UpdateOnHost(subgroup=0, params=1, after=(0,)),
            StoreStates(subgroup=0, nbytes=12, buffer=0, after=(1,)),
            LoadStates(subgroup=1, nbytes=12, buffer=0, after=(2,)),
            LoadStates(subgroup=2, nbytes=12, buffer=1),
            UpdateOnHost(subgroup=1, params=1, after=(3,)),
            StoreStates(subgroup=1, nbytes=12, buffer=0, after=(5,)),
            UpdateOnHost(subgroup=2, params=1, after=(4,)),
            StoreStates(subgroup=2, nbytes=12, buffer=1, after=(7,)),
        ),
        parameters=Tier.HOST,
        buffer_bytes=(12, 12),
    )
    begun: list[int] = []
    events: list[Late] = []

    class Slow:
        def carry_out(self, op: Op, after: Sequence[object]) -> Late:
            begun.append(plan.ops.index(op))
            events.append(Late(float("inf"), []))
            return events[-1]

    walk = Executor(Slow(), NullTelemetry()).begin(plan)
    walk.poll()
    events[0].passed = True
    walk.poll()
    # Op 3 waits for op 2, which is held back, and op 4 comes behind it in its lane.
    assert begun == [0, 1]
    events[1].passed = True
    walk.poll()
    # Now op 3 waits for the end of op 2.
    assert begun == [0, 1, 2]
    events[2].passed = True
    walk.poll()
    assert begun == [0, 1, 2, 3, 4]
    walk.finish()

    assert sorted(begun) == list(range(9))


def test_lanes_keep_their_order_while_the_hosts_thread_is_ahead() -> None:
    specs = [
        SubgroupSpec(
            index=at, numel=1, first_use=at, buffer_bytes=12, load_bytes=12, store_bytes=12
        )
        for at in range(5)
    ]
    plan = HOST_ONLY(specs, RATES, AT_HOME)
    for seed in range(200):
        chance = random.Random(seed)
        walk = Executor(Checking(plan, chance, beside=True), NullTelemetry()).begin(plan)

        some_of(walk, plan, chance)
        walk.finish()


@settings(max_examples=100, deadline=None)
@given(plans(), st.randoms(use_true_random=False))
def test_after_an_op_has_failed_all_that_began_has_ended_and_nothing_that_needs_it_began(
    plan: StepPlan, chance: random.Random
) -> None:
    failing = chance.randrange(len(plan.ops))
    carrier = Checking(plan, chance, failing, beside=chance.random() < 0.5)
    walk = Executor(carrier, NullTelemetry()).begin(plan)

    def all_of_it() -> None:
        some_of(walk, plan, chance)
        walk.finish()

    with pytest.raises(RuntimeError, match=f"op {failing} of the plan") as told:
        all_of_it()

    assert isinstance(told.value.__cause__, DriveError)
    assert walk.failed
    assert all(event is None or event.waited for event in carrier.events.values())
    updates = [number for number, op in enumerate(plan.ops) if op.lane is Lane.HOST]
    if carrier.beside and failing in updates:
        assert sum(number > failing for number in updates if number in carrier.events) <= 1
    for number, op in enumerate(plan.ops):
        lanes = {op.lane, plan.ops[failing].lane}
        if (
            failing in op.after
            and lanes - STREAMS
            and not (carrier.beside and lanes == {Lane.HOST})
        ):
            assert number not in carrier.events


@settings(max_examples=30, deadline=None)
@given(plans(), st.randoms(use_true_random=False))
def test_an_interrupt_leaves_nothing_under_way_and_ends_the_walk(
    plan: StepPlan, chance: random.Random
) -> None:
    stop = chance.randrange(len(plan.ops))

    class Interrupted(Checking):
        def carry_out(self, op: Op, after: Sequence[object]) -> Late | None:
            if self.plan.ops.index(op) == stop:
                raise KeyboardInterrupt
            return super().carry_out(op, after)

    carrier = Interrupted(plan, chance, beside=chance.random() < 0.5)
    walk = Executor(carrier, NullTelemetry()).begin(plan)

    with pytest.raises(KeyboardInterrupt):
        walk.finish()

    assert walk.failed
    assert all(event is None or event.waited for event in carrier.events.values())
    with pytest.raises(RuntimeError, match="interrupted"):
        walk.finish()


@given(plan=plans(), chance=st.randoms(use_true_random=False), data=st.data())
@settings(deadline=None)
def test_a_walk_that_goes_as_far_as_an_update_waits_for_nothing_that_follows_it(
    plan: StepPlan, chance: random.Random, data: st.DataObject
) -> None:
    carrier = Checking(plan, chance, beside=chance.random() < 0.5)
    walk = Executor(carrier, NullTelemetry()).begin(plan)
    wanted = data.draw(st.sampled_from([each.index for each in plan.subgroups]))

    walk.reach([wanted])

    of_it = {number: op for number, op in enumerate(plan.ops) if op.subgroup == wanted}
    updates = [number for number, op in of_it.items() if op.lane is Lane.HOST]
    assert all(number in carrier.events for number in updates)
    for number, op in of_it.items():
        event = carrier.events.get(number)
        assert not (updates and isinstance(op, StoreStates) and event is not None and event.slept)
    walk.finish()
    assert len(carrier.events) == len(plan.ops)


def test_what_is_waited_for_is_recorded_as_reads_or_as_writes() -> None:
    class Drives:
        def carry_out(self, op: Op, after: Sequence[object]) -> Late | None:
            return None if op.lane is Lane.HOST else Late(float("inf"), [])

    specs = [
        SubgroupSpec(
            index=at, numel=10, first_use=at, buffer_bytes=120, load_bytes=120, store_bytes=120
        )
        for at in range(5)
    ]
    limits = replace(AT_HOME, host_buffers=2)
    telemetry = Telemetry(keep_steps=1, keep_spans=100)

    Executor(Drives(), telemetry).begin(HOST_ONLY(specs, RATES, limits)).finish()

    waits = [span.name for span in telemetry.timeline().between_steps]
    assert sorted(waits) == [WAIT_FOR_READS] * 5 + [WAIT_FOR_WRITES] * 5
