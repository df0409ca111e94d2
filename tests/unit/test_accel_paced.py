"""The real clock: the right bytes in the right order under load.

How fast, `scripts/bench/emulated_clock` says.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="accelerators move tensors of torch")

import torch

from infinity_engine.accel import (
    Emulation,
    Event,
    StreamKind,
    TimeCost,
    UpdateCost,
)
from infinity_engine.plan import Rates
from paced_device import PacedAccelerator

RATES = Rates(h2d_bytes_per_s=2e9, d2h_bytes_per_s=2e9, device_update_params_per_s=1e9)
NBYTES = 256 << 10


@pytest.fixture
def device() -> Iterator[PacedAccelerator]:
    accelerator = PacedAccelerator(Emulation(rates=RATES, capacity_bytes=64 << 20))
    yield accelerator
    accelerator.stop()


def noisy(seed: int, nbytes: int = NBYTES) -> torch.Tensor:
    return torch.randint(
        0, 250, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def test_a_pipeline_of_uploads_updates_and_downloads_moves_the_right_bytes(
    device: PacedAccelerator,
) -> None:
    up, compute, down = (
        device.stream(kind) for kind in (StreamKind.H2D, StreamKind.COMPUTE, StreamKind.D2H)
    )
    slots = [device.allocate(NBYTES).tensor(torch.uint8, NBYTES) for _ in range(3)]
    targets = [torch.zeros(NBYTES, dtype=torch.uint8) for _ in range(24)]
    free: list[list[Event]] = [[], [], []]
    for number, target in enumerate(targets):
        slot = slots[number % 3]
        uploaded = device.copy(slot, noisy(number), stream=up, after=free[number % 3])
        updated = device.run(
            lambda slot=slot: slot.add_(1),  # type: ignore[misc]
            stream=compute,
            cost=UpdateCost(NBYTES // 4),
            after=[uploaded],
        )
        free[number % 3] = [device.copy(target, slot, stream=down, after=[updated])]

    device.synchronize()

    assert all(torch.equal(target, noisy(number) + 1) for number, target in enumerate(targets))


def test_both_directions_at_once_move_the_right_bytes(device: PacedAccelerator) -> None:
    up, down = device.stream(StreamKind.H2D), device.stream(StreamKind.D2H)
    there = [device.allocate(NBYTES).tensor(torch.uint8, NBYTES) for _ in range(16)]
    back = [
        device.allocate(NBYTES).tensor(torch.uint8, NBYTES).copy_(noisy(100 + at))
        for at in range(16)
    ]
    targets = [torch.zeros(NBYTES, dtype=torch.uint8) for _ in range(16)]
    for at in range(16):
        device.copy(there[at], noisy(at), stream=up)
        device.copy(targets[at], back[at], stream=down)

    device.synchronize()

    assert all(torch.equal(there[at], noisy(at)) for at in range(16))
    assert all(torch.equal(targets[at], noisy(100 + at)) for at in range(16))


def test_random_chains_over_many_streams_keep_their_order(device: PacedAccelerator) -> None:
    draw = random.Random(7)
    streams = [
        device.stream(draw.choice([StreamKind.COMPUTE, StreamKind.COLLECTIVE])) for _ in range(6)
    ]
    events: list[Event] = []
    needs: list[list[int]] = []
    ended: list[int] = []
    for number in range(200):
        chosen = draw.sample(range(number), min(number, draw.randrange(3)))
        needs.append(chosen)
        events.append(
            device.run(
                lambda number=number: ended.append(number),  # type: ignore[misc]
                stream=draw.choice(streams),
                cost=TimeCost(draw.randrange(200_000)),
                after=[events[at] for at in chosen],
            )
        )

    device.synchronize()

    place = {number: at for at, number in enumerate(ended)}
    assert sorted(ended) == list(range(200))
    assert all(place[first] < place[last] for last, before in enumerate(needs) for first in before)


def test_an_event_is_not_done_while_its_work_goes_on(device: PacedAccelerator) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait(60)

    event = device.run(work, stream=device.stream(StreamKind.COMPUTE), cost=TimeCost(0))
    assert begun.wait(60)
    assert not event.done()

    may_end.set()
    event.wait()

    assert event.done()


def test_the_host_goes_on_while_the_device_waits_for_it(device: PacedAccelerator) -> None:
    gate = threading.Event()
    held = device.run(
        lambda: gate.wait(60), stream=device.stream(StreamKind.COMPUTE), cost=TimeCost(0)
    )
    there = device.allocate(NBYTES).tensor(torch.uint8, NBYTES)
    copied = device.copy(there, noisy(1), stream=device.stream(StreamKind.H2D), after=[held])

    gate.set()
    copied.wait()

    assert torch.equal(there, noisy(1))


def test_a_failure_stops_what_depends_on_it_and_nothing_else(device: PacedAccelerator) -> None:
    up, other, compute = (
        device.stream(StreamKind.H2D),
        device.stream(StreamKind.H2D),
        device.stream(StreamKind.COMPUTE),
    )
    first, second = (device.allocate(NBYTES).tensor(torch.uint8, NBYTES) for _ in range(2))
    failed = device.run(lambda: 1 // 0, stream=compute, cost=TimeCost(1_000_000))
    dependent = device.copy(first, noisy(1), stream=up, after=[failed])
    independent = device.copy(second, noisy(2), stream=other)

    independent.wait()
    with pytest.raises(ZeroDivisionError):
        dependent.wait()

    assert torch.equal(second, noisy(2))
    assert first.eq(0xFF).all()


def test_closing_under_load_carries_out_all_of_it(device: PacedAccelerator) -> None:
    up = [device.stream(StreamKind.H2D) for _ in range(2)]
    there = [device.allocate(NBYTES).tensor(torch.uint8, NBYTES) for _ in range(40)]
    for at, target in enumerate(there):
        device.copy(target, noisy(at), stream=up[at % 2])

    device.close()

    assert all(torch.equal(target, noisy(at)) for at, target in enumerate(there))


def test_the_timeline_shows_what_one_link_carried_one_after_another(
    device: PacedAccelerator,
) -> None:
    there = device.allocate(NBYTES).tensor(torch.uint8, NBYTES)
    for number in range(2):
        device.copy(there, noisy(number), stream=device.stream(StreamKind.H2D))
    device.synchronize()
    first, second = device.timeline()
    assert (first.name, second.stream) == ("copy 0", "h2d 1")
    assert first.start_ns < first.end_ns <= second.start_ns < second.end_ns


def test_the_bytes_move_while_the_host_computes_in_python(device: PacedAccelerator) -> None:
    there = device.allocate(NBYTES).tensor(torch.uint8, NBYTES)
    event = device.copy(there, noisy(3), stream=device.stream(StreamKind.H2D))
    give_up = time.monotonic() + 60
    while not event.done() and time.monotonic() < give_up:
        sum(range(1_000))
    assert torch.equal(there, noisy(3))
