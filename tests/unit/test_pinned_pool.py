"""A real pool: planned places, what is told where one is taken, its end, and the two limits of 2%
on real shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import cast

import pytest

from deepnvme import IOQueue, Pool
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.memory import (
    Layout,
    Lease,
    Ledger,
    PinnedPool,
    PoolStats,
    Reservation,
)
from infinity_engine.plan import Extent, ResolvedBudget, Tier
from layout_search import Request, layout
from support.model_traces import (
    Act,
    Gradients,
    Model,
    events_of,
    gpt2_xl,
    llama_3_8b,
    mixtral_8x7b,
    planned_step,
)

pytest.importorskip("torch", reason="leases give tensors of torch")

import torch

PAGE = 4096
SCALE = 16  # of all sizes, so that a test can have the memory
# Models, and how many steps of them. The largest has tens of thousands of leases in the first one
# alone; that a second one can follow the others show.
STEPS = [
    (gpt2_xl, 2),
    (llama_3_8b, 2),
    (mixtral_8x7b, 1),
    pytest.param(mixtral_8x7b, 2, marks=pytest.mark.slow),
]

# `a` lives throughout, `b` and `c` have one place, one after the other.
PLAN = layout([Request("a", 2 * PAGE, 0, 3), Request("b", PAGE, 0, 1), Request("c", PAGE, 2, 3)])


@dataclass
class ManualEvent:
    """An event that passes when the test says so, or when somebody waits."""

    passed: bool = False
    waits: int = 0

    def done(self) -> bool:
        return self.passed

    def wait(self) -> None:
        self.waits += 1
        self.passed = True


@dataclass
class RecordingQueue:
    """An IOQueue as far as pools know it, which remembers the bytes of the pools that it was told
    of.
    """

    closed: bool = False
    has: list[int] = field(default_factory=list)

    def use_pool(self, pool: Pool) -> None:
        self.has.append(pool.capacity)

    def forget_pool(self, pool: Pool) -> None:
        self.has.remove(pool.capacity)


def reservation(nbytes: int) -> Reservation:
    return Ledger(ResolvedBudget(device=0, host=nbytes)).reserve(
        Tier.HOST, nbytes, holder="the pool"
    )


def planned_pool(*, pages: int = 0, plan: Layout = PLAN) -> PinnedPool:
    """A pool of the plan's bytes and so many pages for what is not planned."""
    return PinnedPool(reservation(plan.nbytes + pages * PAGE), layout=plan)


def address(lease: Lease) -> int:
    return lease.flat().data_ptr()


# --- planned places ---


def test_planned_leases_lie_exactly_where_the_layout_has_them() -> None:
    memory = planned_pool()

    with memory.lease_planned("a") as a, memory.lease_planned("b") as b:
        assert address(b) - address(a) == PLAN.places["b"].offset - PLAN.places["a"].offset
        assert (a.nbytes, b.nbytes, a.holder) == (2 * PAGE, PAGE, "a")


def test_slots_of_one_place_are_given_one_after_the_other() -> None:
    memory = planned_pool()
    with memory.lease_planned("b") as b:
        there = address(b)

    with memory.lease_planned("c") as c:
        assert address(c) == there


def test_a_slot_that_the_layout_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="slot of the layout: expected one of a, b, c"):
        planned_pool().lease_planned("d")


def test_a_slot_whose_place_is_closing_is_waited_for() -> None:
    memory = planned_pool()
    event = ManualEvent()
    with memory.lease_planned("b") as b:
        b.until(event)

    memory.lease_planned("c").close()

    assert (event.waits, memory.stats().waits) == (1, 1)


def test_a_slot_that_is_held_is_refused_with_who_has_it_and_that_the_run_is_not_as_planned() -> (
    None
):
    memory = planned_pool(pages=8)

    with (
        memory.lease_planned("b", holder="layers.3.gradient"),
        pytest.raises(CapacityError) as refused,
    ):
        memory.lease_planned("c")

    error = refused.value
    assert (error.asked, error.free, error.limit) == (PAGE, 0, PAGE)
    assert error.holders == (("layers.3.gradient", PAGE),)
    assert "the step differs from its plan: slot 'c' of the layout" in str(error)


def test_the_refusal_of_a_slot_counts_what_of_it_is_free_and_names_nobody_else() -> None:
    places = {
        "small": Extent(0, PAGE),
        "other": Extent(2 * PAGE, PAGE),
        "large": Extent(0, 2 * PAGE),
    }
    memory = planned_pool(plan=Layout(places, 3 * PAGE))

    with (
        memory.lease_planned("small"),
        memory.lease_planned("other"),
        pytest.raises(CapacityError) as refused,
    ):
        memory.lease_planned("large")

    assert (refused.value.free, refused.value.holders) == (PAGE, (("small", PAGE),))


def test_a_slot_of_which_a_view_is_left_is_refused_and_says_so() -> None:
    memory = planned_pool()
    with memory.lease_planned("b") as b:
        view = b.flat()

    with pytest.raises(CapacityError, match="a view of b holds 4096 B"):
        memory.lease_planned("c")

    del view
    memory.lease_planned("c").close()


def test_a_slot_that_is_held_is_refused_without_waiting_for_events_elsewhere() -> None:
    memory = planned_pool(pages=1)
    elsewhere = [ManualEvent(), ManualEvent()]
    for event, lease in zip(
        elsewhere, (memory.lease_planned("a"), memory.lease(1, holder="w")), strict=True
    ):
        lease.until(event)
        lease.close()

    with memory.lease_planned("b"), pytest.raises(CapacityError):
        memory.lease_planned("c")

    assert [event.waits for event in elsewhere] == [0, 0]


def test_what_no_plan_knows_of_does_not_wait_for_planned_places() -> None:
    memory = planned_pool(pages=1)
    event = ManualEvent()
    with memory.lease_planned("a") as a:
        a.until(event)

    with memory.lease(PAGE, holder="w"), pytest.raises(CapacityError):
        memory.lease(PAGE, holder="next")

    assert event.waits == 0


@pytest.mark.parametrize(
    ("places", "said"),
    [
        (
            {"a": Extent(512, 100)},
            r"offset of 'a' in the layout: expected a multiple of 4096 B.*got 512",
        ),
        (
            {"a": Extent(4096, 4097)},
            r"place of 'a' in the layout: expected an end within the layout's 8192 B",
        ),
    ],
)
def test_a_layout_that_a_pool_cannot_serve_is_refused_when_the_pool_is_made(
    places: dict[str, Extent], said: str
) -> None:
    promised = reservation(4 * PAGE)

    with pytest.raises(ConfigError, match=said):
        PinnedPool(promised, layout=Layout(places, 8192))

    assert promised.held == 0


def test_a_pool_that_is_too_small_for_its_layout_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"at least {PLAN.nbytes} B"):
        PinnedPool(reservation(PLAN.nbytes - 1), layout=PLAN)


# --- figures ---


def test_the_peaks_are_of_the_bytes_asked_for_and_of_their_pages() -> None:
    memory = planned_pool(pages=4)
    with memory.lease(PAGE + 1, holder="w"), memory.lease_planned("b"):
        pass
    with memory.lease(10, holder="w"):
        stats = memory.stats()

    assert (stats.held, stats.held_pages_bytes) == (10, PAGE)
    assert (stats.peak_held, stats.peak_pages_bytes) == (2 * PAGE + 1, 3 * PAGE)


# --- the end ---


def test_a_closed_pool_is_forgotten_by_the_queues_that_it_served() -> None:
    memory = planned_pool(pages=2)
    queues = [RecordingQueue(), RecordingQueue()]
    for queue in queues:
        memory.register_with(cast("IOQueue", queue))
    served = [list(queue.has) for queue in queues]
    queues[1].closed = True  # has forgotten everything by itself

    memory.close()

    assert served == [[PLAN.nbytes, 2 * PAGE]] * 2
    assert [queue.has for queue in queues] == [[], served[1]]


def test_a_closed_pool_serves_no_queue_and_is_not_pinned() -> None:
    memory = planned_pool()
    memory.close()

    with pytest.raises(RuntimeError, match="the pool is closed"):
        memory.register_with(cast("IOQueue", RecordingQueue()))
    assert not memory.pinned


def test_the_memory_of_a_view_counts_as_held_after_the_pool_is_closed_and_until_the_view_is_gone() -> (
    None
):
    promised = reservation(4 * PAGE)
    memory = PinnedPool(promised)
    with memory.lease(100, holder="layers.7.gradient") as lease:
        view = lease.flat()

    memory.close()

    held = promised.held
    view.fill_(1)
    del view
    assert (held, promised.held) == (4 * PAGE, 0)


def test_only_the_region_that_somebody_still_has_a_piece_of_counts_as_held_after_close() -> None:
    promised = reservation(PLAN.nbytes + 5 * PAGE)
    memory = PinnedPool(promised, layout=PLAN)
    lease = memory.lease_planned("b")

    with pytest.raises(RuntimeError, match="1 leases open: b"):
        memory.close()

    held = promised.held
    lease.close()
    assert (held, promised.held) == (PLAN.nbytes, 0)


# --- on the shapes of real models ---


@cache
def small_step(model: Callable[[], Model]) -> tuple[Request, ...]:
    """Return the buffers of a step with smaller sizes."""
    step = planned_step(model(), gradients=Gradients.STREAMED)
    return tuple(
        Request(each.name, -(-each.nbytes // SCALE), each.first, each.last) for each in step
    )


def replay(
    memory: PinnedPool, requests: Sequence[Request], steps: int, lease: Callable[[Request], Lease]
) -> PoolStats:
    """Take and close the leases of some steps; every one has its own bytes at its end."""
    by_name = {request.name: (number % 251, request) for number, request in enumerate(requests)}
    held: dict[str, Lease] = {}
    for seed in range(steps):
        for event in events_of(requests, seed=seed):
            byte, request = by_name[event.name]
            if event.act is Act.LEASE:
                held[event.name] = lease(request)
                samples_of(held[event.name]).fill_(byte)
            else:
                ended = held.pop(event.name)
                assert bool((samples_of(ended) == byte).all())
                ended.close()
    stats = memory.stats()
    memory.close()
    return stats


def samples_of(lease: Lease) -> torch.Tensor:
    """Return the first byte of each of a lease's pages, in which another one would begin or lie if
    they overlapped.
    """
    return lease.flat()[::PAGE]


@pytest.mark.parametrize(("model", "steps"), STEPS)
def test_planned_steps_run_in_at_most_two_percent_more_than_their_peak(
    model: Callable[[], Model], steps: int
) -> None:
    requests = small_step(model)
    placed = layout(requests)
    promised = reservation(placed.nbytes)
    memory = PinnedPool(promised, layout=placed)

    stats = replay(memory, requests, steps, lambda request: memory.lease_planned(request.name))

    assert stats.peak_held == placed.peak_bytes
    assert promised.peak <= 1.02 * stats.peak_held
    assert (stats.waits, promised.held) == (0, 0)


@pytest.mark.parametrize(("model", "steps"), STEPS)
def test_the_leases_of_steps_take_at_most_two_percent_more_in_whole_pages(
    model: Callable[[], Model], steps: int
) -> None:
    requests = small_step(model)
    memory = PinnedPool(reservation(2 * layout(requests).peak_bytes))

    stats = replay(
        memory, requests, steps, lambda request: memory.lease(request.nbytes, holder=request.name)
    )

    assert stats.peak_held <= stats.peak_pages_bytes <= 1.02 * stats.peak_held
    assert stats.held == 0
