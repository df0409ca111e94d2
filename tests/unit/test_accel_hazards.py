"""Planted bugs on the virtual clock: each is seen, whatever the seed and whatever the host waits
for first.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="accelerators move tensors of torch")

import torch

from infinity_engine.accel import (
    Buffer,
    Emulation,
    Event,
    StreamKind,
    UpdateCost,
    VirtualAccelerator,
)
from infinity_engine.plan import Rates

RATES = Rates(h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9, device_update_params_per_s=1e9)
FLOATS = 16
NBYTES = 4 * FLOATS
COST = UpdateCost(10)


class Bench:
    """A device with a stream of each kind, and host memory whose bytes are known."""

    def __init__(self, seed: int) -> None:
        self.device = VirtualAccelerator(Emulation(rates=RATES, capacity_bytes=1 << 20, seed=seed))
        self.up, self.down, self.compute = (
            self.device.stream(kind)
            for kind in (StreamKind.H2D, StreamKind.D2H, StreamKind.COMPUTE)
        )
        self.source = torch.arange(1.0, FLOATS + 1)
        self.target = torch.zeros(FLOATS)
        self.buffer = self.device.allocate(NBYTES)

    @property
    def there(self) -> torch.Tensor:
        return floats(self.buffer)

    def upload(self, *after: Event) -> Event:
        return self.device.copy(flat(self.there), flat(self.source), stream=self.up, after=after)

    def download(self, *after: Event) -> Event:
        return self.device.copy(flat(self.target), flat(self.there), stream=self.down, after=after)

    def run(self, work: Callable[[], object], *after: Event) -> Event:
        return self.device.run(work, stream=self.compute, cost=COST, after=after)


@pytest.fixture(params=range(20))
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(request.param)


@pytest.fixture(params=["in order", "last first"])
def wait(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return what waits for events, in one order or the other."""

    def wait(*events: Event) -> None:
        for event in events if request.param == "in order" else reversed(events):
            event.wait()

    return wait


def floats(buffer: Buffer) -> torch.Tensor:
    return buffer.tensor(torch.float32, FLOATS)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


# --- the host is too early ------------------------------------------------------------------------


def test_reading_the_device_before_the_event_gives_nan(bench: Bench) -> None:
    bench.upload()
    bench.device.host_work(10**9)
    assert bench.there.isnan().all()


def test_reading_the_target_of_a_download_before_the_event_gives_what_was_there(
    bench: Bench,
) -> None:
    bench.upload().wait()
    bench.download()
    bench.device.host_work(10**9)
    assert bench.target.eq(0).all()


def test_changing_the_source_before_the_event_gives_other_bytes(bench: Bench) -> None:
    event = bench.upload()
    bench.source.fill_(-1)
    event.wait()
    assert bench.there.eq(-1).all()


def test_changing_the_device_before_a_download_has_ended_gives_other_bytes(bench: Bench) -> None:
    bench.upload().wait()
    event = bench.download()
    bench.there.fill_(-1)
    event.wait()
    assert bench.target.eq(-1).all()


def test_freeing_the_source_of_a_download_before_its_event_gives_nan(bench: Bench) -> None:
    bench.upload().wait()
    event = bench.download()
    bench.device.free(bench.buffer)
    event.wait()
    assert bench.target.isnan().all()


def test_what_is_uploaded_to_a_buffer_freed_before_the_event_is_nan(bench: Bench) -> None:
    view, event = bench.there, bench.upload()
    bench.device.free(bench.buffer)
    event.wait()
    assert view.isnan().all()


def test_what_work_does_to_a_buffer_freed_before_its_event_is_nan(bench: Bench) -> None:
    view = bench.there
    event = bench.run(lambda: view.fill_(3))
    bench.device.free(bench.buffer)
    event.wait()
    assert view.isnan().all()


def test_reading_after_free_gives_nan(bench: Bench) -> None:
    bench.upload().wait()
    view = bench.there
    bench.device.free(bench.buffer)
    assert view.isnan().all()


def test_memory_that_is_taken_again_does_not_show_what_was_there(bench: Bench) -> None:
    bench.upload().wait()
    bench.device.free(bench.buffer)
    assert all(floats(bench.device.allocate(NBYTES)).isnan().all() for _ in range(4))


# --- streams that do not wait for one another -----------------------------------------------------


def test_work_that_does_not_wait_for_the_upload_of_what_it_reads_sees_nan(
    bench: Bench, wait: Callable[..., None]
) -> None:
    result = floats(bench.device.allocate(NBYTES))
    there = bench.there
    wait(bench.upload(), bench.run(lambda: result.copy_(there * 2)))
    assert result.isnan().all()
    assert torch.equal(there, bench.source)


def test_work_that_waits_for_the_upload_sees_it(bench: Bench, wait: Callable[..., None]) -> None:
    result = floats(bench.device.allocate(NBYTES))
    there = bench.there
    uploaded = bench.upload()
    wait(uploaded, bench.run(lambda: result.copy_(there * 2), uploaded))
    assert torch.equal(result, bench.source * 2)


def test_work_that_reads_what_an_upload_may_overwrite_sees_nan(
    bench: Bench, wait: Callable[..., None]
) -> None:
    bench.upload().wait()
    result = floats(bench.device.allocate(NBYTES))
    there = bench.there
    wait(bench.run(lambda: result.copy_(there)), bench.upload())
    assert result.isnan().all()


def test_work_that_writes_what_an_upload_may_overwrite_fails(
    bench: Bench, wait: Callable[..., None]
) -> None:
    there = bench.there
    worked, uploaded = bench.run(lambda: there.fill_(3)), bench.upload()
    with pytest.raises(RuntimeError, match=r"work 0 changed bytes of copy 1.*`after`"):
        wait(worked, uploaded)


def test_a_download_that_does_not_wait_for_the_work_is_seen(
    bench: Bench, wait: Callable[..., None]
) -> None:
    bench.upload().wait()
    there = bench.there
    worked, downloaded = bench.run(lambda: there.mul_(2)), bench.download()
    with pytest.raises(RuntimeError, match="neither waits"):
        wait(worked, downloaded)


def test_work_that_changes_what_a_download_may_still_read_is_seen(
    bench: Bench, wait: Callable[..., None]
) -> None:
    bench.upload().wait()
    there = bench.there
    downloaded, worked = bench.download(), bench.run(lambda: there.mul_(2))
    with pytest.raises(RuntimeError, match="neither waits"):
        wait(downloaded, worked)


def test_a_download_that_does_not_wait_for_the_upload_brings_nan(
    bench: Bench, wait: Callable[..., None]
) -> None:
    wait(bench.upload(), bench.download())
    assert bench.target.isnan().all()


def test_a_download_of_what_an_upload_may_overwrite_brings_nan(
    bench: Bench, wait: Callable[..., None]
) -> None:
    bench.upload().wait()
    wait(bench.download(), bench.upload())
    assert bench.target.isnan().all()


def test_an_upload_from_where_a_download_may_still_write_brings_nan(
    bench: Bench, wait: Callable[..., None]
) -> None:
    bench.upload().wait()
    other = bench.device.allocate(NBYTES)
    wait(
        bench.download(),
        bench.device.copy(flat(floats(other)), flat(bench.target), stream=bench.up),
    )
    assert floats(other).isnan().all()


def test_two_uploads_to_one_place_in_two_streams_leave_nan(
    bench: Bench, wait: Callable[..., None]
) -> None:
    second = bench.device.stream(StreamKind.H2D)
    half = flat(bench.there)[: NBYTES // 2]
    wait(bench.upload(), bench.device.copy(half, flat(bench.source)[: NBYTES // 2], stream=second))
    assert bench.there[: FLOATS // 2].isnan().all()


def test_only_the_bytes_that_overlap_are_lost(bench: Bench, wait: Callable[..., None]) -> None:
    half = flat(bench.there)[: NBYTES // 2]
    upload = bench.device.copy(half, flat(bench.source)[: NBYTES // 2], stream=bench.up)
    bench.device.host_work(1)
    bench.there[FLOATS // 2 :] = 5
    wait(upload, bench.download())
    assert bench.target[: FLOATS // 2].isnan().all()
    assert bench.target[FLOATS // 2 :].eq(5).all()


def test_what_the_host_waited_for_needs_no_other_order(bench: Bench) -> None:
    there = bench.there
    bench.upload().wait()
    bench.run(lambda: there.mul_(2)).wait()
    bench.download().wait()
    assert torch.equal(bench.target, bench.source * 2)


def test_what_the_host_waited_for_needs_no_other_order_while_older_work_is_left(
    bench: Bench,
) -> None:
    older = bench.device.run(
        lambda: None, stream=bench.device.stream(StreamKind.COMPUTE), cost=COST
    )
    there, seen = bench.there, list[torch.Tensor]()
    bench.upload().wait()
    bench.run(lambda: seen.append(there.clone())).wait()
    older.wait()
    assert torch.equal(seen[0], bench.source)


def test_what_the_host_saw_done_needs_no_other_order(bench: Bench) -> None:
    uploaded = bench.upload()
    bench.device.host_work(10**6)
    assert uploaded.done()
    bench.download().wait()
    assert torch.equal(bench.target, bench.source)


def test_what_nobody_shares_needs_no_order(bench: Bench, wait: Callable[..., None]) -> None:
    other = floats(bench.device.allocate(NBYTES))
    wait(bench.upload(), bench.run(lambda: other.fill_(3)))
    assert torch.equal(bench.there, bench.source)
    assert other.eq(3).all()


def test_host_memory_is_not_touched_by_work(bench: Bench) -> None:
    # A drive may be reading the target of a download that has ended, while older work is still to
    # be carried out.
    bench.upload().wait()
    seen: list[torch.Tensor] = []
    work = bench.run(lambda: seen.append(bench.target.clone()))
    bench.download().wait()
    work.wait()
    assert torch.equal(seen[0], bench.source)


def test_the_device_keeps_no_host_memory_once_a_copy_has_ended(bench: Bench) -> None:
    import weakref

    work = bench.run(lambda: None)
    source = flat(torch.ones(FLOATS))
    alive = weakref.ref(source)
    event = bench.device.copy(flat(bench.there), source, stream=bench.up)
    del source

    event.wait()

    assert alive() is None
    work.wait()


# --- any program: right if it waits, seen if it does not ------------------------------------------


@dataclass(eq=False)
class Step:
    """One operation on slots of device memory; every result is downloaded to a place of its own."""

    kind: StreamKind
    reads: int | None
    writes: int | None
    lane: int
    needs: set[int] = field(default_factory=set)

    def conflicts(self, other: Step) -> bool:
        mine, theirs = {self.reads, self.writes} - {None}, {other.reads, other.writes} - {None}
        written = {self.writes, other.writes} - {None}
        return bool(mine & theirs & written)

    @property
    def stream(self) -> tuple[StreamKind, int]:
        return self.kind, self.lane


SLOTS = 3
CHANGES = st.one_of(
    st.tuples(st.just(StreamKind.H2D), st.none(), st.integers(0, SLOTS - 1), st.integers(0, 1)),
    st.tuples(
        st.just(StreamKind.COMPUTE),
        st.integers(0, SLOTS - 1),
        st.integers(0, SLOTS - 1),
        st.just(0),
    ),
)


@st.composite
def programs(draw: st.DrawFn) -> list[Step]:
    """Draw a program in which every step waits for all that it conflicts with; it begins by filling
    every slot.
    """
    fill = [(StreamKind.H2D, None, slot, slot % 2) for slot in range(SLOTS)]
    steps: list[Step] = []
    for kind, reads, writes, lane in fill + draw(st.lists(CHANGES, min_size=1, max_size=6)):
        steps.append(Step(kind, reads, writes, lane))
        steps.append(Step(StreamKind.D2H, writes, None, draw(st.integers(0, 1))))
    for at, step in enumerate(steps):
        step.needs.update(number for number in range(at) if step.conflicts(steps[number]))
    return steps


@st.composite
def programs_that_miss_one_wait(draw: st.DrawFn) -> list[Step]:
    """Draw a program in which one wait is left out, and nothing else makes up for it."""
    steps = draw(programs())
    waits = [
        (first, last)
        for last, step in enumerate(steps)
        for first in step.needs
        if is_needed(steps, first, last)
    ]
    first, last = draw(st.sampled_from(sorted(waits)))
    steps[last].needs.remove(first)
    return steps


def is_needed(steps: list[Step], first: int, last: int) -> bool:
    """Tell whether step `last` comes after step `first` by nothing but its waiting for it."""
    reached, left = set[int](), [*(steps[last].needs - {first}), *in_stream_before(steps, last)]
    while left:
        at = left.pop()
        if at not in reached:
            reached.add(at)
            left += [*steps[at].needs, *in_stream_before(steps, at)]
    return first not in reached


def in_stream_before(steps: list[Step], at: int) -> list[int]:
    return [number for number in range(at) if steps[number].stream == steps[at].stream]


def outcome(steps: list[Step], seed: int) -> list[torch.Tensor]:
    """Run the steps and return what was downloaded; the host waits in some order."""
    device = VirtualAccelerator(Emulation(rates=RATES, capacity_bytes=1 << 16, seed=seed))
    streams = {step.stream: device.stream(step.kind) for step in steps}
    slots = [floats(device.allocate(NBYTES)) for _ in range(SLOTS)]
    events: list[Event] = []
    results: list[torch.Tensor] = []
    for number, step in enumerate(steps):
        after, stream = [events[at] for at in sorted(step.needs)], streams[step.stream]
        if step.kind is StreamKind.H2D and step.writes is not None:
            source = flat(torch.full((FLOATS,), 100.0 + number))
            events.append(device.copy(flat(slots[step.writes]), source, stream=stream, after=after))
        elif step.kind is StreamKind.D2H and step.reads is not None:
            results.append(torch.zeros(FLOATS))
            events.append(
                device.copy(flat(results[-1]), flat(slots[step.reads]), stream=stream, after=after)
            )
        elif step.reads is not None and step.writes is not None:
            work = changing(slots[step.writes], slots[step.reads], number)
            events.append(device.run(work, stream=stream, cost=COST, after=after))
    for event in random.Random(seed).sample(events, len(events)):
        event.wait()
    return results


def changing(target: torch.Tensor, source: torch.Tensor, number: int) -> Callable[[], object]:
    return lambda: target.copy_(source / 2 + own(number))


def own(number: int) -> float:
    """Return what a step adds: such that no two ways through the steps give the same sum, which
    would hide a bug.
    """
    return math.exp(number / 7)


def one_after_another(steps: list[Step]) -> list[torch.Tensor]:
    """Return what the steps download when each ends before the next begins."""
    slots = [torch.full((FLOATS,), float("nan")) for _ in range(SLOTS)]
    results = []
    for number, step in enumerate(steps):
        if step.kind is StreamKind.H2D and step.writes is not None:
            slots[step.writes] = torch.full((FLOATS,), 100.0 + number)
        elif step.kind is StreamKind.D2H and step.reads is not None:
            results.append(slots[step.reads].clone())
        elif step.reads is not None and step.writes is not None:
            slots[step.writes] = slots[step.reads] / 2 + own(number)
    return results


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(
        torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        for a, b in zip(ours, theirs, strict=True)
    )


@given(programs(), st.integers(0, 2**32))
def test_a_program_that_waits_for_all_that_it_must_gives_what_one_after_another_gives(
    steps: list[Step], seed: int
) -> None:
    assert same(outcome(steps, seed), one_after_another(steps))


@given(programs_that_miss_one_wait(), st.integers(0, 2**32))
def test_a_program_that_misses_one_wait_is_always_seen(steps: list[Step], seed: int) -> None:
    try:
        seen = not same(outcome(steps, seed), one_after_another(steps))
    except RuntimeError as error:
        seen = "neither waits" in str(error)

    assert seen
