"""The virtual clock: exact to the nanosecond, by hand and against a tick-by-tick simulation; and as
late as can be.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="accelerators move tensors of torch")

import torch

from infinity_engine.accel import (
    Emulation,
    Event,
    StreamKind,
    TimeCost,
    UpdateCost,
    VirtualAccelerator,
)
from infinity_engine.accel.emulated import NAN_BYTE
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.plan import Rates

# A byte up takes 1 ns, a byte down 3 1/3 ns, a parameter 2 ns.
RATES = Rates(h2d_bytes_per_s=1e9, d2h_bytes_per_s=3e8, device_update_params_per_s=5e8)
PER_BYTE_DOWN = (10, 3)


def opened(
    *,
    rates: Rates = RATES,
    seed: int = 0,
    capacity_bytes: int = 1 << 16,
    kept: int = 100,
    host_takes_time: bool = False,
) -> VirtualAccelerator:
    return VirtualAccelerator(
        Emulation(
            rates=rates,
            capacity_bytes=capacity_bytes,
            seed=seed,
            timeline_kept=kept,
            host_takes_time=host_takes_time,
        )
    )


def on_host(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def on_device(device: VirtualAccelerator, nbytes: int) -> torch.Tensor:
    return device.allocate(nbytes).tensor(torch.uint8, nbytes)


def times(device: VirtualAccelerator) -> list[tuple[str, int, int]]:
    return [(record.stream, record.start_ns, record.end_ns) for record in device.timeline()]


# --- by hand --------------------------------------------------------------------------------------


def test_a_copy_takes_its_bytes_over_the_rate_rounded_up() -> None:
    device = opened()
    device.copy(on_device(device, 100), on_host(100), stream=device.stream(StreamKind.H2D))
    device.copy(on_host(100), on_device(device, 100), stream=device.stream(StreamKind.D2H))
    assert times(device) == [("h2d 0", 0, 100), ("d2h 0", 0, 334)]


def test_a_copy_that_is_delayed_takes_so_much_longer() -> None:
    emulation = Emulation(
        rates=RATES,
        capacity_bytes=1 << 16,
        delay_ns=lambda kind: 7 if kind is StreamKind.H2D else 0,
    )
    device = VirtualAccelerator(emulation)
    device.copy(on_device(device, 100), on_host(100), stream=device.stream(StreamKind.H2D))
    device.copy(on_host(100), on_device(device, 100), stream=device.stream(StreamKind.D2H))
    assert times(device) == [("h2d 0", 0, 107), ("d2h 0", 0, 334)]


def test_durations_are_exact_where_floats_are_not() -> None:
    rates = Rates(h2d_bytes_per_s=0.1, d2h_bytes_per_s=1e9, device_update_params_per_s=3e9)
    device = opened(rates=rates)
    params = 3 * 10**18 + 1  # more than a float tells apart
    device.run(lambda: None, stream=device.stream(StreamKind.COMPUTE), cost=UpdateCost(params))
    device.copy(on_device(device, 1), on_host(1), stream=device.stream(StreamKind.H2D))
    # The float 0.1 is a little more than a tenth.
    assert [record.end_ns for record in device.timeline()] == [10**18 + 1, 10**10]


def test_two_streams_of_one_direction_share_the_link_in_the_order_of_submission() -> None:
    device = opened()
    first, second = device.stream(StreamKind.H2D), device.stream(StreamKind.H2D)
    for stream in (first, second, first):
        device.copy(on_device(device, 10), on_host(10), stream=stream)
    assert times(device) == [("h2d 0", 0, 10), ("h2d 1", 10, 20), ("h2d 0", 20, 30)]


def test_the_two_directions_do_not_slow_one_another() -> None:
    device = opened()
    up, down = device.stream(StreamKind.H2D), device.stream(StreamKind.D2H)
    device.copy(on_device(device, 30), on_host(30), stream=up)
    device.copy(on_host(3), on_device(device, 3), stream=down)
    assert times(device) == [("h2d 0", 0, 30), ("d2h 0", 0, 10)]


def test_an_operation_starts_when_the_last_that_it_waits_for_has_ended() -> None:
    device = opened()
    up, compute, down = (
        device.stream(kind) for kind in (StreamKind.H2D, StreamKind.COMPUTE, StreamKind.D2H)
    )
    there = on_device(device, 9)
    uploaded = device.copy(there, on_host(9), stream=up)
    updated = device.run(lambda: None, stream=compute, cost=UpdateCost(20), after=[uploaded])
    device.wait_for(down, updated)
    device.copy(on_host(9), there, stream=down)
    assert times(device) == [("h2d 0", 0, 9), ("compute 0", 9, 49), ("d2h 0", 49, 79)]


def test_an_operation_starts_no_earlier_than_the_host_submitted_it() -> None:
    device = opened()
    device.host_work(1_000)
    device.copy(on_device(device, 10), on_host(10), stream=device.stream(StreamKind.H2D))
    assert times(device) == [("h2d 0", 1_000, 1_010)]


def test_waiting_takes_the_host_to_the_end_of_the_event_and_never_back() -> None:
    device = opened()
    stream = device.stream(StreamKind.COMPUTE)
    first = device.run(lambda: None, stream=stream, cost=TimeCost(10))
    second = device.run(lambda: None, stream=stream, cost=TimeCost(5))

    second.wait()
    first.wait()

    assert device.now_ns == 15


def test_an_event_is_done_from_its_last_nanosecond_on() -> None:
    device = opened()
    event = device.run(lambda: None, stream=device.stream(StreamKind.COMPUTE), cost=TimeCost(10))
    device.host_work(9)
    assert not event.done()
    device.host_work(1)
    assert event.done()


def test_asking_whether_an_event_is_done_passes_no_time() -> None:
    device = opened()
    event = device.run(lambda: None, stream=device.stream(StreamKind.COMPUTE), cost=TimeCost(10))
    assert not any(event.done() for _ in range(100))
    assert device.now_ns == 0


def test_a_recorded_event_ends_with_what_its_stream_was_given_and_is_not_in_the_timeline() -> None:
    device = opened()
    stream = device.stream(StreamKind.COMPUTE)
    device.run(lambda: None, stream=stream, cost=TimeCost(10))
    event = device.record(stream)
    device.run(lambda: None, stream=stream, cost=TimeCost(90))

    event.wait()

    assert device.now_ns == 10
    assert times(device) == [("compute 0", 0, 10), ("compute 0", 10, 100)]


def test_synchronize_takes_the_host_to_the_end_of_everything() -> None:
    device = opened()
    device.run(lambda: None, stream=device.stream(StreamKind.COMPUTE), cost=TimeCost(70))
    device.run(lambda: None, stream=device.stream(StreamKind.COLLECTIVE), cost=TimeCost(30))
    device.synchronize()
    assert device.now_ns == 70


def test_the_timeline_keeps_the_newest_operations() -> None:
    device = opened(kept=2)
    for ns in (1, 2, 3):
        device.run(lambda: None, stream=device.stream(StreamKind.COMPUTE), cost=TimeCost(ns))
    assert [record.name for record in device.timeline()] == ["work 1", "work 2"]


def test_what_the_host_updates_takes_its_time_where_that_is_asked_for() -> None:
    rates = replace(RATES, host_update_params_per_s=3e8)
    device, without, unknown = (
        opened(rates=rates, host_takes_time=True),
        opened(rates=rates),
        opened(),
    )
    for each in (device, without, unknown):
        each.host_updated(100)

    assert (device.now_ns, without.now_ns, unknown.now_ns) == (334, 0, 0)


def test_the_host_cannot_work_backwards() -> None:
    with pytest.raises(ValueError, match="0 ns or more"):
        opened().host_work(-1)


# --- as late as can be ----------------------------------------------------------------------------


def test_nothing_is_carried_out_before_the_host_learns_of_its_end() -> None:
    device = opened()
    seen: list[str] = []
    event = device.run(
        lambda: seen.append("work"), stream=device.stream(StreamKind.COMPUTE), cost=TimeCost(10)
    )
    device.host_work(1_000)
    assert seen == []

    assert event.done()

    assert seen == ["work"]


def test_only_what_is_needed_is_carried_out() -> None:
    device = opened()
    seen: list[str] = []
    streams = [device.stream(StreamKind.COMPUTE) for _ in range(3)]
    needed = device.run(lambda: seen.append("needed"), stream=streams[0], cost=TimeCost(50))
    device.run(lambda: seen.append("not needed"), stream=streams[1], cost=TimeCost(1))
    wanted = device.run(
        lambda: seen.append("wanted"), stream=streams[2], cost=TimeCost(1), after=[needed]
    )

    wanted.wait()

    assert seen == ["needed", "wanted"]


def order(count: int, seed: int) -> tuple[int, ...]:
    """Return the order in which works that nothing orders are carried out."""
    device, seen = opened(seed=seed), list[int]()
    for number in range(count):
        stream = device.stream(StreamKind.COMPUTE)
        device.run(lambda number=number: seen.append(number), stream=stream, cost=TimeCost(1))  # type: ignore[misc]
    device.synchronize()
    return tuple(seen)


def test_what_nothing_orders_happens_in_every_order_over_the_seeds() -> None:
    assert len({order(3, seed) for seed in range(60)}) == 6


def test_a_seed_draws_the_same_order_every_time() -> None:
    assert all(order(6, seed) == order(6, seed) for seed in range(5))


def test_a_long_chain_is_carried_out() -> None:
    device = opened()
    stream = device.stream(StreamKind.COMPUTE)
    count = [0]

    def one_more() -> None:
        count[0] += 1

    for _ in range(5_000):
        event = device.run(one_more, stream=stream, cost=TimeCost(1))
    event.wait()
    assert (count[0], device.now_ns) == (5_000, 5_000)


def test_a_failure_takes_its_time_like_a_success() -> None:
    device = opened()
    event = device.run(lambda: 1 // 0, stream=device.stream(StreamKind.COMPUTE), cost=TimeCost(10))
    with pytest.raises(ZeroDivisionError):
        event.wait()
    assert device.now_ns == 10


# --- memory ---------------------------------------------------------------------------------------


def test_more_than_the_capacity_is_refused_with_the_numbers() -> None:
    device = opened(capacity_bytes=100)
    device.allocate(60)
    with pytest.raises(CapacityError) as refused:
        device.allocate(41)
    assert (refused.value.tier, refused.value.asked, refused.value.free, refused.value.limit) == (
        "DEVICE",
        41,
        40,
        100,
    )


def test_freed_bytes_can_be_taken_again() -> None:
    device = opened(capacity_bytes=100)
    device.free(device.allocate(100))
    assert device.memory() == (100, 100)
    device.allocate(100)
    assert device.memory() == (0, 100)


def test_what_modules_computed_is_there_until_its_copy_has_ended_beside_a_full_device() -> None:
    device = opened(capacity_bytes=300)
    device.allocate(300)
    down = device.stream(StreamKind.D2H)
    targets = [on_host(300) for _ in range(3)]

    for target in targets:
        computed = device.computed(on_host(300) + 7)
        last = device.copy(target, computed, stream=down)
        device.outlives(computed, down)
    now_ns = device.now_ns

    assert now_ns == 0  # nothing waited for room
    last.wait()
    assert [target.tolist() for target in targets] == [[7] * 300] * 3
    device.computed(on_host(1))
    assert computed.tolist() == [NAN_BYTE] * 300


def test_a_buffer_of_another_device_cannot_be_freed() -> None:
    with pytest.raises(ValueError, match="of this accelerator"):
        opened().free(opened().allocate(8))


@pytest.mark.parametrize(
    "missing", ["h2d_bytes_per_s", "d2h_bytes_per_s", "device_update_params_per_s"]
)
def test_a_rate_that_is_not_there_is_named(missing: str) -> None:
    rates = replace(RATES, **{missing: None})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=missing):
        opened(rates=rates)


# --- against a simulation that goes tick by tick --------------------------------------------------


@dataclass(eq=False)
class Job:
    """An operation of the simulation."""

    stream: int
    link: StreamKind | None
    ns: int
    after: list[Job]
    start: int | None = None
    end: int | None = None


@dataclass
class TickByTick:
    """What the virtual clock should do, the simplest way: look at every nanosecond who may start
    and who has ended.
    """

    now: int = 0
    jobs: list[Job] = field(default_factory=list)

    def look(self) -> None:
        """Let start and end whatever starts and ends at this nanosecond."""
        for _ in self.jobs:  # as many times as a chain of jobs of no length can be long
            for at, job in enumerate(self.jobs):
                earlier = self.jobs[:at]
                before = [other for other in earlier if other.stream == job.stream]
                before += [
                    other for other in earlier if job.link is not None and other.link is job.link
                ]
                if job.start is None and all(
                    other.end is not None for other in (*before, *job.after)
                ):
                    job.start = self.now
                if job.start is not None and job.end is None and self.now == job.start + job.ns:
                    job.end = self.now

    def host_work(self, ns: int) -> None:
        for _ in range(ns):
            self.look()
            self.now += 1
        self.look()

    def wait(self, job: Job) -> None:
        self.look()
        while job.end is None:
            self.host_work(1)


KINDS = [
    StreamKind.H2D,
    StreamKind.H2D,
    StreamKind.D2H,
    StreamKind.D2H,
    StreamKind.COMPUTE,
    StreamKind.COLLECTIVE,
]
ACTIONS = st.one_of(
    st.tuples(
        st.just("submit"),
        st.integers(0, 5),
        st.integers(1, 9),
        st.lists(st.integers(0, 99), max_size=2),
    ),
    st.tuples(st.just("wait_for"), st.integers(0, 5), st.integers(0, 99)),
    st.tuples(st.just("record"), st.integers(0, 5)),
    st.tuples(st.just("host_work"), st.integers(0, 12)),
    st.tuples(st.just("wait"), st.integers(0, 99)),
    st.tuples(st.just("done"), st.integers(0, 99)),
)


@dataclass
class Both:
    """The device and the simulation, given the same program."""

    device: VirtualAccelerator
    reference: TickByTick = field(default_factory=TickByTick)
    pairs: list[tuple[Event, Job]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.streams = [self.device.stream(kind) for kind in KINDS]
        self.waits: dict[int, list[Job]] = {number: [] for number in range(len(KINDS))}

    def play(self, name: str, *arguments: object) -> None:
        """Do one action of the program; those that need an operation do nothing while there is
        none.
        """
        if name in {"wait_for", "wait", "done"} and not self.pairs:
            return
        getattr(self, name)(*arguments)
        assert self.device.now_ns == self.reference.now

    def submit(self, number: int, amount: int, after: list[int]) -> None:
        device, stream, kind = self.device, self.streams[number], KINDS[number]
        chosen = [self.pairs[at % len(self.pairs)] for at in after] if self.pairs else []
        events, ns = [event for event, _ in chosen], amount
        link: StreamKind | None = kind
        if kind is StreamKind.H2D:
            event = device.copy(
                on_device(device, amount), on_host(amount), stream=stream, after=events
            )
        elif kind is StreamKind.D2H:
            event = device.copy(
                on_host(amount), on_device(device, amount), stream=stream, after=events
            )
            ns = -(-amount * PER_BYTE_DOWN[0] // PER_BYTE_DOWN[1])
        else:
            event = device.run(lambda: None, stream=stream, cost=TimeCost(amount - 1), after=events)
            link, ns = None, amount - 1
        self.add(event, Job(number, link, ns, [*(job for _, job in chosen), *self.take(number)]))

    def record(self, number: int) -> None:
        self.add(self.device.record(self.streams[number]), Job(number, None, 0, self.take(number)))

    def wait_for(self, number: int, at: int) -> None:
        event, job = self.pairs[at % len(self.pairs)]
        self.device.wait_for(self.streams[number], event)
        self.waits[number].append(job)

    def host_work(self, ns: int) -> None:
        self.device.host_work(ns)
        self.reference.host_work(ns)

    def wait(self, at: int) -> None:
        event, job = self.pairs[at % len(self.pairs)]
        event.wait()
        self.reference.wait(job)

    def done(self, at: int) -> None:
        event, job = self.pairs[at % len(self.pairs)]
        self.reference.look()
        assert event.done() == (job.end is not None)

    def add(self, event: Event, job: Job) -> None:
        self.reference.jobs.append(job)
        self.pairs.append((event, job))

    def take(self, number: int) -> list[Job]:
        waits, self.waits[number] = self.waits[number], []
        return waits


@given(st.lists(ACTIONS, min_size=5, max_size=25), st.integers(0, 3))
def test_any_program_takes_exactly_the_time_that_the_simulation_says(
    program: list[tuple[Any, ...]], seed: int
) -> None:
    both = Both(opened(seed=seed))

    for name, *arguments in program:
        both.play(name, *arguments)
    for at in range(len(both.pairs)):
        both.wait(at)

    ours = [(record.start_ns, record.end_ns) for record in both.device.timeline()]
    names = {record.name for record in both.device.timeline()}
    theirs = [
        (job.start, job.end)
        for at, (_, job) in enumerate(both.pairs)
        if {f"copy {at}", f"work {at}"} & names
    ]
    assert ours == theirs
    assert both.device.now_ns == both.reference.now
