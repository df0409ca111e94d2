"""ShardRecord: which residencies lead where, and which copies can go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import cast

import pytest

from deepnvme.volume.extents import Extent
from infinity_engine.errors import ConfigError, IllegalTransition
from infinity_engine.memory import Lease
from infinity_engine.memory.lease import Backing, Lessor
from infinity_engine.plan import Tier
from infinity_engine.residence import Residency, ShardRecord
from infinity_engine.residence.residency import HOME_OF, MOVES, TRANSITIONS
from infinity_engine.storage import Place

PLACE = Place((Extent(0, 4096, 100),))


class NoLessor:
    """Takes leases back that never had memory."""

    def _close_lease(self, *_: object) -> None:
        pass


@dataclass
class Nowhere:
    """The memory of a lease that nobody looks into."""

    nbytes: int


class Held:
    """Makes leases without memory, and closes them at the end."""

    def __init__(self) -> None:
        self.leases: list[Lease] = []

    def __call__(self, tier: Tier, nbytes: int = 100) -> Lease:
        made = Lease(
            cast("Lessor", NoLessor()),
            cast("Backing", Nowhere(nbytes)),
            tier=tier,
            nbytes=nbytes,
            holder="w",
        )
        self.leases.append(made)
        return made


@pytest.fixture
def lease() -> Iterator[Held]:
    held = Held()
    yield held
    for each in held.leases:
        each.close()


@pytest.fixture
def host(lease: Held) -> Lease:
    return lease(Tier.HOST)


def test_a_shard_resides_where_it_was_made(host: Lease, lease: Held) -> None:
    assert ShardRecord("w", host).residency is Residency.HOST
    assert ShardRecord("w", lease(Tier.DEVICE)).residency is Residency.DEVICE
    assert ShardRecord("w", PLACE).residency is Residency.NVME


@pytest.mark.parametrize("start", list(Tier))
@pytest.mark.parametrize("to", list(Residency))
def test_a_record_goes_only_where_the_table_and_its_copies_allow(
    start: Tier, to: Residency, lease: Held
) -> None:
    record = ShardRecord("layers.3.mlp.w1", PLACE if start is Tier.NVME else lease(start))
    home = record.residency
    is_move = to in MOVES

    if to in TRANSITIONS[home] and is_move:
        record.advance(to)
        assert record.residency is to
    else:
        with pytest.raises(
            IllegalTransition,
            match=rf"layers\.3\.mlp\.w1: {to.name} is not reachable from {home.name}",
        ):
            record.advance(to)
        assert record.residency is home


@pytest.mark.parametrize(("moving", "end"), list(product(MOVES, Residency)))
def test_a_move_ends_at_its_target_once_that_is_current_or_where_it_came_from(
    moving: Residency, end: Residency, lease: Held
) -> None:
    leaves, goes_to = MOVES[moving]
    record = ShardRecord("w", PLACE if leaves is Tier.NVME else lease(leaves))
    record.advance(moving)
    record.arrived(goes_to, PLACE if goes_to is Tier.NVME else lease(goes_to))

    if end in (HOME_OF[leaves], HOME_OF[goes_to]):
        record.advance(end)
        assert record.residency is end
    else:
        with pytest.raises(IllegalTransition):
            record.advance(end)


def test_a_move_cannot_end_before_its_bytes_have_arrived(host: Lease) -> None:
    record = ShardRecord("w", host)
    record.advance(Residency.UPLOADING)

    with pytest.raises(IllegalTransition, match="allowed: HOST"):
        record.advance(Residency.DEVICE)


def test_a_move_names_the_memory_that_it_writes_to_until_it_ends(host: Lease, lease: Held) -> None:
    record = ShardRecord("w", host)
    target = lease(Tier.DEVICE)

    record.advance(Residency.UPLOADING, into=target)
    assert record.arriving is target
    record.advance(Residency.HOST)

    assert record.arriving is None


def test_a_place_that_is_written_to_is_no_memory_to_use(host: Lease) -> None:
    record = ShardRecord("w", host)

    record.advance(Residency.STORING, into=PLACE)

    assert record.arriving is None


@pytest.mark.parametrize("moving", list(MOVES))
def test_a_shard_on_its_way_is_at_home_nowhere(moving: Residency, lease: Held) -> None:
    leaves, _ = MOVES[moving]
    record = ShardRecord("w", PLACE if leaves is Tier.NVME else lease(leaves))
    assert record.home() is leaves

    record.advance(moving)

    with pytest.raises(IllegalTransition, match=f"waiting for the end of {moving.name}"):
        record.home()


def test_the_table_names_every_residency_and_only_leads_to_them() -> None:
    assert set(TRANSITIONS) == set(Residency)
    assert all(
        set(MOVES[moving]) == {tier for tier in Tier if HOME_OF[tier] in TRANSITIONS[moving]}
        for moving in MOVES
    )


def test_changed_bytes_make_the_other_copies_stale(host: Lease) -> None:
    record = ShardRecord("w", host)
    record.arrived(Tier.NVME, PLACE)

    record.changed()

    assert record.version == 1
    assert record.is_current(Tier.HOST)
    assert not record.is_current(Tier.NVME)
    assert record.place == PLACE


def test_a_stale_copy_is_no_home(host: Lease) -> None:
    record = ShardRecord("w", host)
    record.arrived(Tier.NVME, PLACE)
    record.changed()

    with pytest.raises(
        IllegalTransition, match="NVME is not reachable from HOST; allowed: UPLOADING, STORING"
    ):
        record.advance(Residency.NVME)


def test_a_current_copy_below_is_a_way_down_without_a_move(host: Lease) -> None:
    record = ShardRecord("w", host)
    record.arrived(Tier.NVME, PLACE)

    record.advance(Residency.NVME)

    assert record.drop(Tier.HOST) is host
    assert [tier for tier in Tier if record.where(tier)] == [Tier.NVME]


def test_bytes_on_the_drives_can_be_changed_there_and_copies_are_old_then(host: Lease) -> None:
    record = ShardRecord("w", PLACE)
    record.arrived(Tier.HOST, host)

    record.changed()

    assert record.is_current(Tier.NVME)
    assert not record.is_current(Tier.HOST)


def test_bytes_that_are_on_their_way_cannot_be_changed() -> None:
    record = ShardRecord("w", PLACE)
    record.advance(Residency.LOADING)

    with pytest.raises(IllegalTransition, match="a changed version"):
        record.changed()


def test_the_only_current_copy_cannot_be_dropped(host: Lease) -> None:
    record = ShardRecord("w", host)

    with pytest.raises(IllegalTransition, match="a drop of its copy in HOST, which is needed"):
        record.drop(Tier.HOST)

    assert record.where(Tier.HOST) is host


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
def test_neither_end_of_a_move_can_be_dropped(tier: Tier, host: Lease, lease: Held) -> None:
    record = ShardRecord("w", host)
    record.arrived(Tier.NVME, PLACE)
    record.arrived(Tier.DEVICE, lease(Tier.DEVICE))
    record.advance(Residency.STORING)

    with pytest.raises(IllegalTransition):
        record.drop(tier)


def test_dropping_what_is_not_there_is_nothing(host: Lease) -> None:
    assert ShardRecord("w", host).drop(Tier.DEVICE) is None


def test_a_buffer_of_another_size_does_not_arrive(host: Lease, lease: Held) -> None:
    with pytest.raises(ConfigError, match="the 100 B of the shard"):
        ShardRecord("w", host).arrived(Tier.DEVICE, lease(Tier.DEVICE, 101))


def test_a_shard_that_moves_cannot_be_abandoned(host: Lease) -> None:
    record = ShardRecord("w", host)
    record.advance(Residency.STORING)

    with pytest.raises(IllegalTransition, match="waiting for the move's end"):
        record.abandon()
