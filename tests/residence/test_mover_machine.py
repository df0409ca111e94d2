"""Random moves with injected faults, against a dictionary of what each shard's bytes must be."""

from __future__ import annotations

import errno
import random
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from deepnvme import FaultPlan
from infinity_engine.accel import StreamKind
from infinity_engine.errors import CapacityError, IllegalTransition, TransferError
from infinity_engine.plan import Tier
from infinity_engine.residence import Residency, ShardRecord, Source
from support.tiers import KiB, lease_of, some_bytes, tiers

FAILED = (TransferError, CapacityError, IllegalTransition)
SETTLED = (Residency.NVME, Residency.HOST, Residency.DEVICE)


class Moves(RuleBasedStateMachine):
    """Small tiers, so that they are often full; every seventh copy and some of the I/O fails."""

    records = Bundle("records")

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.stack = ExitStack()
        self.content: dict[str, bytes] = {}
        self.living: dict[str, ShardRecord] = {}
        self.made = 0

    @initialize(seed=st.integers(0, 1000), faulty=st.booleans(), unified=st.booleans())
    def begin(self, seed: int, faulty: bool, unified: bool) -> None:
        chance = random.Random(seed)

        def fault(_: StreamKind) -> Exception | None:
            return RuntimeError("the link is down") if faulty and chance.random() < 1 / 7 else None

        plan = FaultPlan(seed).fail(every=9, errno=errno.EIO) if faulty else None
        self.unified = unified
        self.tiers = self.stack.enter_context(
            tiers(
                self.directory,
                device=64 * KiB,
                host=96 * KiB,
                nvme=128 * KiB,
                fault=fault,
                io_faults=plan,
                unified=unified,
                seed=seed,
            )
        )

    @rule(target=records, nbytes=st.integers(0, 40 * KiB))
    def make(self, nbytes: int) -> ShardRecord | None:
        name = f"shard {self.made}"
        self.made += 1
        try:
            record = self.tiers.shard(name, some_bytes(nbytes, seed=self.made))
        except CapacityError:
            return None
        self.content[name] = some_bytes(nbytes, seed=self.made)
        self.living[name] = record
        return record

    @rule(record=records, to=st.sampled_from(Tier), source=st.sampled_from(Source))
    def move(self, record: ShardRecord | None, to: Tier, source: Source) -> None:
        if record is None or record.name not in self.content:
            return
        try:
            self.tiers.mover.move(record, to, source=source)
        except IllegalTransition:
            assert record.residency not in SETTLED

    @rule(record=records, to=st.sampled_from(Tier), source=st.sampled_from(Source))
    def move_and_wait(self, record: ShardRecord | None, to: Tier, source: Source) -> None:
        if record is None or record.name not in self.content or record.residency not in SETTLED:
            return
        try:
            self.tiers.mover.move(record, to, source=source).result()
        except FAILED:
            assert record.residency in SETTLED
        else:
            assert record.residency is Residency[to.name]

    @rule(record=records, seed=st.integers(0, 1000))
    def change(self, record: ShardRecord | None, seed: int) -> None:
        if (
            record is None
            or record.name not in self.content
            or record.residency is not Residency.HOST
        ):
            return
        content = some_bytes(record.nbytes, seed=seed)
        if content:
            lease_of(record, Tier.HOST).memory()[:] = content
        record.changed()
        self.content[record.name] = content

    @rule(record=records, tier=st.sampled_from(Tier))
    def release(self, record: ShardRecord | None, tier: Tier) -> None:
        if record is None or record.name not in self.content:
            return
        spare = any(record.is_current(other) for other in Tier if other is not tier)
        try:
            self.tiers.mover.release(record, tier)
        except IllegalTransition:
            assert (
                record.residency not in SETTLED or record.residency.name == tier.name or not spare
            )

    @rule(record=consumes(records))
    def forget(self, record: ShardRecord | None) -> None:
        if record is None or record.name not in self.content:
            return
        self.tiers.mover.drain()
        self.tiers.mover.forget(record)
        del self.content[record.name], self.living[record.name]

    @rule()
    def poll(self) -> None:
        self.tiers.mover.poll()

    @rule(record=records)
    def read(self, record: ShardRecord | None) -> None:
        if record is None or record.name not in self.content:
            return
        self.tiers.mover.drain()
        try:
            assert self.tiers.content(record) == self.content[record.name]
        except FAILED:
            assert record.residency in SETTLED

    @invariant()
    def no_tier_holds_more_than_its_budget(self) -> None:
        if hasattr(self, "tiers"):
            for usage in self.tiers.ledger.usage():
                assert usage.peak_held <= usage.peak_reserved <= usage.limit

    def teardown(self) -> None:
        if hasattr(self, "tiers"):
            mover, host, device, swap = (
                self.tiers.mover,
                self.tiers.host,
                self.tiers.device,
                self.tiers.swap,
            )
            mover.drain()
            for record in self.living.values():
                mover.forget(record)
            host.release_ended()
            device.release_ended()
            if not self.unified:
                assert device.reservation.held == 0
            assert (host.stats().held, swap.free_bytes) == (0, swap.capacity)
        self.stack.close()
        shutil.rmtree(self.directory)


Moves.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestMoves = Moves.TestCase
