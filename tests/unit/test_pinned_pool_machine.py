"""Random leases of one pool, planned and not, with events and views that outlive them, against a
model of it.
"""

from __future__ import annotations

import ctypes
import warnings
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from infinity_engine.errors import CapacityError
from infinity_engine.memory import Lease, Ledger, PinnedPool
from infinity_engine.plan import Extent, ResolvedBudget, Tier
from layout_search import Request, layout
from support.extents import overlap

pytest.importorskip("torch", reason="leases give tensors of torch")

import torch

PAGE = 4096
UNPLANNED_PAGES = 6
SIZES = st.one_of(st.integers(0, 3 * PAGE), st.sampled_from([1, PAGE, PAGE + 1, 2 * PAGE]))
LIVES = st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted)
STEPS = st.lists(st.tuples(SIZES, LIVES), min_size=1, max_size=8)


@dataclass
class Work:
    """What is done with a buffer after its lease was closed; ends when the test says so, or when
    somebody waits.
    """

    ended: bool = False
    waits: int = 0

    def done(self) -> bool:
        return self.ended

    def wait(self) -> None:
        self.waits += 1
        self.ended = True


@dataclass
class Buffer:
    """A lease as the model knows it; `place` is None where it is not planned."""

    lease: Lease | None
    nbytes: int
    address: int
    byte: int
    place: Extent | None
    works: list[Work] = field(default_factory=list)
    views: list[torch.Tensor] = field(default_factory=list)

    @property
    def in_use(self) -> bool:
        """Whether somebody may read or write its bytes."""
        return bool(self.nbytes) and bool(
            self.lease is not None or self.views or not all(work.ended for work in self.works)
        )

    @property
    def is_awaited(self) -> bool:
        """Whether only the end of work keeps it."""
        return self.in_use and self.lease is None and not self.views


class Leases(RuleBasedStateMachine):
    """A small pool, so that it is often full; each buffer is filled with a byte of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: list[Buffer] = []
        self.made = 0
        self.base: int | None = None  # where the planned places begin

    @initialize(steps=STEPS)
    def begin(self, steps: list[tuple[int, list[int]]]) -> None:
        self.plan = layout(
            [Request(f"slot {n}", size, *lives) for n, (size, lives) in enumerate(steps)]
        )
        nbytes = self.plan.nbytes + UNPLANNED_PAGES * PAGE
        self.reservation = Ledger(ResolvedBudget(device=0, host=nbytes)).reserve(
            Tier.HOST, nbytes, holder="pool"
        )
        self.pool = PinnedPool(self.reservation, layout=self.plan)

    # --- leases ---

    @rule(nbytes=SIZES)
    def lease(self, nbytes: int) -> None:
        rivals = [buffer for buffer in self.buffers if buffer.place is None]
        waits = self.waits_elsewhere(rivals)
        try:
            lease = self.pool.lease(nbytes, holder=f"buffer {self.made}")
        except CapacityError:
            assert not any(buffer.is_awaited for buffer in rivals)
            assert self.pool.stats().largest_free < nbytes
        else:
            self.take(lease, None)
        assert self.waits_elsewhere(rivals) == waits

    @rule(data=st.data())
    def lease_planned(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.plan.places)))
        place = self.plan.places[slot]
        rivals = [
            buffer
            for buffer in self.buffers
            if buffer.place is not None and overlap(buffer.place, place)
        ]
        waits = self.waits_elsewhere(rivals)
        try:
            lease = self.pool.lease_planned(slot)
        except CapacityError:
            assert any(buffer.in_use and not buffer.is_awaited for buffer in rivals)
        else:
            assert not any(buffer.in_use for buffer in rivals)
            self.take(lease, place)
        assert self.waits_elsewhere(rivals) == waits

    def waits_elsewhere(self, rivals: list[Buffer]) -> int:
        """Return how often somebody waited for buffers other than these."""
        others = [buffer for buffer in self.buffers if not any(buffer is rival for rival in rivals)]
        return sum(work.waits for buffer in others for work in buffer.works)

    def take(self, lease: Lease, place: Extent | None) -> None:
        self.made += 1
        buffer = Buffer(lease, lease.nbytes, lease.flat().data_ptr(), self.made % 255 + 1, place)
        if buffer.nbytes:
            end = buffer.address + buffer.nbytes
            for other in self.buffers:
                if other.in_use:
                    assert end <= other.address or other.address + other.nbytes <= buffer.address
            lease.flat().fill_(buffer.byte)
            if place is not None:
                begins = buffer.address - place.offset
                self.base = self.base or begins
                assert begins == self.base
        self.buffers.append(buffer)

    # --- what is done with them ---

    def any_open(self) -> bool:
        return any(buffer.lease is not None for buffer in self.buffers)

    def draw(self, data: st.DataObject, among: list[Buffer]) -> Buffer:
        return among[data.draw(st.integers(0, len(among) - 1))]

    def one_open(self, data: st.DataObject) -> tuple[Buffer, Lease]:
        buffer = self.draw(data, [buffer for buffer in self.buffers if buffer.lease is not None])
        assert buffer.lease is not None
        return buffer, buffer.lease

    @precondition(any_open)
    @rule(data=st.data())
    def attach_work(self, data: st.DataObject) -> None:
        buffer, lease = self.one_open(data)
        buffer.works.append(Work())
        lease.until(buffer.works[-1])

    @precondition(any_open)
    @rule(data=st.data())
    def take_a_view(self, data: st.DataObject) -> None:
        buffer, lease = self.one_open(data)
        buffer.views.append(lease.flat()[buffer.nbytes // 2 :])

    @precondition(any_open)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        buffer, lease = self.one_open(data)
        lease.close()
        buffer.lease = None

    @precondition(any_open)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        buffer, lease = self.one_open(data)
        buffer.lease = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del lease

    @rule(data=st.data())
    def end_work(self, data: st.DataObject) -> None:
        under_way = [work for buffer in self.buffers for work in buffer.works if not work.ended]
        if under_way:
            under_way[data.draw(st.integers(0, len(under_way) - 1))].ended = True

    @rule(data=st.data())
    def drop_views(self, data: st.DataObject) -> None:
        viewed = [buffer for buffer in self.buffers if buffer.views]
        if viewed:
            self.draw(data, viewed).views.clear()

    @rule()
    def settle(self) -> None:
        self.pool.release_ended()

        assert self.pool.stats().held == self.bytes_in_use()
        assert self.pool.stats().closing_leases == len(
            [b for b in self.buffers if b.nbytes and self.waits_for_work(b)]
        )

    def waits_for_work(self, buffer: Buffer) -> bool:
        return buffer.lease is None and not all(work.ended for work in buffer.works)

    # --- what always holds ---

    def bytes_in_use(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers if buffer.in_use)

    @invariant()
    def every_buffer_in_use_has_its_own_bytes(self) -> None:
        for buffer in self.buffers:
            if buffer.in_use:
                assert (
                    ctypes.string_at(buffer.address, buffer.nbytes)
                    == bytes([buffer.byte]) * buffer.nbytes
                )

    @invariant()
    def nothing_in_use_is_taken_for_free(self) -> None:
        if hasattr(self, "pool"):
            stats = self.pool.stats()
            assert self.bytes_in_use() <= stats.held <= stats.peak_held
            assert stats.open_leases == sum(buffer.lease is not None for buffer in self.buffers)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for buffer in self.buffers:
            buffer.views.clear()
            if buffer.lease is not None:
                buffer.lease.close()
        self.pool.close()
        assert all(work.ended for buffer in self.buffers if buffer.nbytes for work in buffer.works)
        assert self.reservation.held == 0


Leases.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLeases = Leases.TestCase
