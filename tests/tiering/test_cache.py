"""The host cache: what goes is what is used last, what was changed is written first, nothing is lost."""

from __future__ import annotations

import errno
import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepnvme import FaultPlan
from deepnvme.faults import Requests
from infinity_engine.errors import CapacityError, ConfigError, IllegalTransition, TransferError
from infinity_engine.plan import Tier
from infinity_engine.storage import Transfer
from infinity_engine.tiering import HostCache, Residency, ShardRecord, choose_evictions
from support.tiers import KiB, Tiers, some_bytes, tiers

SIZE = 16 * KiB


def shards(made: Tiers, count: int, nbytes: int = SIZE) -> list[ShardRecord]:
    return [made.shard(f"s{index}", some_bytes(nbytes, seed=index), Tier.NVME) for index in range(count)]


def use(cache: HostCache, record: ShardRecord, *, content: bytes | None = None) -> bytes:
    """Fetch a shard, change it where there is new content, and return what it had."""
    cache.fetch(record).result()
    assert record.host is not None
    found = bytes(record.host.memory())
    if content is not None:
        record.host.memory()[:] = content
        record.changed()
    cache.done(record)
    return found


def test_what_is_used_last_goes_first() -> None:
    assert choose_evictions([("b", 10), ("a", 10), ("c", 10)], 10) == ["b"]


def test_what_the_rest_is_enough_without_is_spared() -> None:
    assert choose_evictions([("far", 1), ("near", 10)], 10) == ["near"]


def test_nothing_goes_where_nothing_is_needed() -> None:
    assert choose_evictions([("a", 10)], 0) == []


def test_more_than_all_cannot_become_free() -> None:
    with pytest.raises(ValueError, match="all that can go has 10 B"):
        choose_evictions([("a", 10)], 11)


def test_no_more_is_looked_at_than_is_needed() -> None:
    looked_at = iter([("a", 10), ("b", 10), ("c", 10)])

    choose_evictions(looked_at, 20)

    assert list(looked_at) == [("c", 10)]


@given(st.lists(st.integers(1, 50), max_size=12), st.integers(0, 200))
def test_evictions_make_enough_room_and_none_of_them_could_stay(sizes: list[int], room: int) -> None:
    farthest_first = [(f"s{index}", nbytes) for index, nbytes in enumerate(sizes)]
    if sum(sizes) < room:
        with pytest.raises(ValueError, match="cannot become free"):
            choose_evictions(farthest_first, room)
        return

    chosen = choose_evictions(farthest_first, room)

    size_of = dict(farthest_first)
    found = sum(size_of[name] for name in chosen)
    assert found >= room
    assert all(found - size_of[name] < room for name in chosen)


@pytest.mark.parametrize("room", range(1, 6))
def test_a_cycle_hits_as_often_as_any_cache_of_that_size_can(room: int, tmp_path: Path) -> None:
    count, cycles = 6, 8
    with tiers(tmp_path) as made:
        records = shards(made, count)
        cache = HostCache(made.mover, room * SIZE, [record.name for record in records])
        for _ in range(cycles):
            for index, record in enumerate(records):
                assert use(cache, record) == some_bytes(SIZE, seed=index)
                assert cache.held_bytes <= room * SIZE

        names = [record.name for record in records] * cycles
        assert (cache.stats.hits, cache.stats.misses) == best_hits(names, room)
        assert least_recently_used_hits(names, room) == 0
        for record in records:
            made.mover.forget(record)


def best_hits(uses: list[str], room: int) -> tuple[int, int]:
    """Return hits and misses of the cache that evicts what is used farthest in the future (Belady)."""
    held: set[str] = set()
    hits = 0
    for now, name in enumerate(uses):
        hits += name in held
        if name not in held and len(held) == room:
            held.remove(max(held, key=lambda other: next((i for i, u in enumerate(uses[now:]) if u == other), 10**6)))
        held.add(name)
    return hits, len(uses) - hits


def least_recently_used_hits(uses: list[str], room: int) -> int:
    held: OrderedDict[str, None] = OrderedDict()
    hits = 0
    for name in uses:
        hits += name in held
        held.pop(name, None)
        held[name] = None
        while len(held) > room:
            held.popitem(last=False)
    return hits


def test_what_was_changed_is_written_when_it_goes_and_not_before(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        records = shards(made, 3)
        cache = HostCache(made.mover, 2 * SIZE, ["s0", "s1", "s2"])
        use(cache, records[0], content=some_bytes(SIZE, seed=100))
        assert (cache.stats.written_back, records[0].is_current(Tier.NVME)) == (0, False)

        use(cache, records[1])
        use(cache, records[2])  # s1 is used after s0: it goes, unchanged
        assert (cache.stats.written_back, cache.stats.dropped) == (0, 1)
        use(cache, records[0])
        use(cache, records[1])
        made.mover.drain()

        assert use(cache, records[0]) == some_bytes(SIZE, seed=100)
        for record in records:
            made.mover.forget(record)


def test_flush_writes_what_was_changed_and_keeps_the_copies(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        records = shards(made, 2)
        cache = HostCache(made.mover, 2 * SIZE, ["s0", "s1"])
        for index, record in enumerate(records):
            use(cache, record, content=some_bytes(SIZE, seed=50 + index))

        cache.flush()

        assert all(record.is_current(Tier.NVME) and record.is_current(Tier.HOST) for record in records)
        assert [use(cache, record) for record in records] == [some_bytes(SIZE, seed=50 + index) for index in range(2)]
        assert (cache.stats.hits, cache.stats.misses) == (2, 2)
        for record in records:
            made.mover.forget(record)


def test_what_is_in_use_can_be_changed_after_a_flush(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        (record,) = shards(made, 1)
        cache = HostCache(made.mover, SIZE, ["s0"])
        cache.fetch(record).result()
        record.changed()

        cache.flush()

        record.changed()
        assert (record.residency, cache.held_bytes) == (Residency.HOST, SIZE)
        made.mover.forget(record)


def test_flush_says_that_there_was_no_room_to_write_to(tmp_path: Path) -> None:
    with tiers(tmp_path, nvme=3 * 4 * KiB) as made:
        record = made.shard("s0", some_bytes(SIZE, seed=0))
        cache = HostCache(made.mover, SIZE, ["s0"])
        use(cache, record)

        with pytest.raises(CapacityError, match=r"NVME \(.*\) cannot hold 16384 B"):
            cache.flush()

        assert record.residency is Residency.HOST
        assert made.mover.drain() == []  # flush has told it
        made.mover.forget(record)


def test_flush_writes_the_others_when_one_write_fails(tmp_path: Path) -> None:
    # Three shards are written when they are made.
    with tiers(tmp_path, io_faults=FaultPlan().fail(nth=4, requests=Requests.WRITES)) as made:
        records = shards(made, 3)
        cache = HostCache(made.mover, 3 * SIZE, ["s0", "s1", "s2"])
        for index, record in enumerate(records):
            use(cache, record, content=some_bytes(SIZE, seed=50 + index))

        with pytest.raises(TransferError):
            cache.flush()
        assert [record.is_current(Tier.NVME) for record in records] == [False, True, True]

        cache.flush()
        assert all(record.is_current(Tier.NVME) for record in records)
        for record in records:
            made.mover.forget(record)


def test_flush_waits_for_what_is_on_its_way_in_and_out(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        records = shards(made, 2)
        cache = HostCache(made.mover, SIZE, ["s0", "s1"])
        use(cache, records[0], content=some_bytes(SIZE, seed=9))
        made.hold_back(Requests.WRITES)
        cache.fetch(records[1])

        cache.flush()

        assert (records[0].residency, records[1].residency) == (Residency.NVME, Residency.HOST)
        for record in records:
            made.mover.forget(record)


def test_a_fetch_waits_for_the_write_that_makes_its_room(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        records = shards(made, 2)
        cache = HostCache(made.mover, SIZE, ["s0", "s1"])
        use(cache, records[0], content=some_bytes(SIZE, seed=9))
        made.hold_back(Requests.WRITES)

        transfer = cache.fetch(records[1])
        made.mover.poll()
        assert (records[0].residency, records[1].residency) == (Residency.STORING, Residency.NVME)
        assert transfer.result() == SIZE

        assert records[0].residency is Residency.NVME
        cache.done(records[1])
        assert use(cache, records[0]) == some_bytes(SIZE, seed=9)
        for record in records:
            made.mover.forget(record)


def test_what_is_being_written_back_is_held_until_it_has_gone(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        records = shards(made, 3)
        cache = HostCache(made.mover, 2 * SIZE, ["s0", "s1", "s2"])
        for record in records[:2]:
            use(cache, record, content=some_bytes(SIZE, seed=9))
        made.hold_back(Requests.WRITES)

        transfer = cache.fetch(records[2])

        assert cache.held_bytes == made.host.stats().held_pages_bytes == 2 * SIZE
        transfer.result()
        assert cache.held_bytes == made.host.stats().held_pages_bytes == 2 * SIZE
        for record in records:
            made.mover.forget(record)


def test_a_write_that_fails_fails_the_fetch_and_loses_nothing(tmp_path: Path) -> None:
    # Two shards are written when they are made; the third write is the one that makes room.
    plan = FaultPlan().fail(nth=3, requests=Requests.WRITES, errno=errno.EIO)
    with tiers(tmp_path, io_faults=plan) as made:
        records = shards(made, 2)
        cache = HostCache(made.mover, SIZE, ["s0", "s1"])
        use(cache, records[0], content=some_bytes(SIZE, seed=9))

        with pytest.raises(TransferError):
            cache.fetch(records[1]).result()
        cache.done(records[1])
        assert records[0].residency is Residency.HOST
        assert cache.held_bytes == made.host.stats().held_pages_bytes == SIZE

        assert use(cache, records[1]) == some_bytes(SIZE, seed=1)
        made.mover.drain()
        assert use(cache, records[0]) == some_bytes(SIZE, seed=9)
        for record in records:
            made.mover.forget(record)


def test_a_fetch_of_what_is_being_written_back_finds_the_new_bytes(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        records = shards(made, 3)
        cache = HostCache(made.mover, 2 * SIZE, ["s0", "s1", "s2"])
        use(cache, records[0])
        use(cache, records[1], content=some_bytes(SIZE, seed=9))
        made.hold_back(Requests.WRITES)
        cache.fetch(records[2])
        assert records[1].residency is Residency.STORING

        assert use(cache, records[1]) == some_bytes(SIZE, seed=9)

        assert made.mover.drain() == []
        assert made.host.stats().held_pages_bytes == cache.held_bytes <= 2 * SIZE
        for record in records:
            made.mover.forget(record)


def test_a_fetch_of_what_could_not_be_written_back_fails_and_the_next_has_the_new_bytes(tmp_path: Path) -> None:
    # Three shards are written when they are made; the fourth write is the one that makes room.
    with tiers(tmp_path, io_faults=FaultPlan().fail(nth=4, requests=Requests.WRITES)) as made:
        records = shards(made, 3)
        cache = HostCache(made.mover, 2 * SIZE, ["s1", "s0", "s2"])
        use(cache, records[1])
        use(cache, records[0], content=some_bytes(SIZE, seed=9))
        made.hold_back(Requests.WRITES)
        cache.fetch(records[2])
        assert records[0].residency is Residency.STORING

        with pytest.raises(TransferError):
            cache.fetch(records[0]).result()
        cache.done(records[0])
        cache.done(records[2])

        assert use(cache, records[0]) == some_bytes(SIZE, seed=9)
        assert cache.held_bytes == made.host.stats().held_pages_bytes == SIZE
        for record in records:
            made.mover.forget(record)


def test_a_fetch_of_what_somebody_else_moves_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        records = shards(made, 2)
        cache = HostCache(made.mover, SIZE, ["s0", "s1"])
        use(cache, records[0])
        made.hold_back(Requests.READS)
        elsewhere = made.mover.load(records[1])
        before = cache.stats, cache.held_bytes

        with pytest.raises(IllegalTransition, match="waiting for the end of LOADING"):
            cache.fetch(records[1])

        assert (cache.stats, cache.held_bytes) == before
        assert records[0].is_current(Tier.HOST)
        with pytest.raises(ConfigError, match="shard in use"):
            cache.done(records[1])
        elsewhere.result()
        for record in records:
            made.mover.forget(record)


def test_what_somebody_else_moves_is_not_evicted(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        records = shards(made, 2)
        cache = HostCache(made.mover, SIZE, ["s0", "s1"])
        use(cache, records[0])
        made.mover.upload(records[0])

        with pytest.raises(CapacityError, match="s0 holds"):
            cache.fetch(records[1])

        assert made.mover.drain() == []
        assert made.content(records[0]) == some_bytes(SIZE, seed=0)
        for record in records:
            made.mover.forget(record)


def test_a_shard_that_was_done_with_before_it_came_is_held_when_it_comes(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        records = shards(made, 2)
        cache = HostCache(made.mover, SIZE, ["s0", "s1"])
        gate = made.hold_back(Requests.READS)
        cache.fetch(records[0])

        cache.done(records[0])
        assert cache.held_bytes == SIZE
        with pytest.raises(CapacityError, match="s0 holds"):
            cache.fetch(records[1])
        gate.is_open = True

        assert use(cache, records[1]) == some_bytes(SIZE, seed=1)
        assert made.host.stats().held_pages_bytes == cache.held_bytes == SIZE
        for record in records:
            made.mover.forget(record)


def test_a_shard_that_was_done_with_before_its_load_began_is_not_evicted(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        records = shards(made, 3)
        cache = HostCache(made.mover, SIZE, ["s0", "s1", "s2"])
        use(cache, records[0], content=some_bytes(SIZE, seed=9))
        gate = made.hold_back(Requests.WRITES)
        cache.fetch(records[1])  # waits for the write of s0

        cache.done(records[1])
        with pytest.raises(CapacityError, match="s1 holds"):
            cache.fetch(records[2])

        gate.is_open = True
        made.mover.drain()
        assert use(cache, records[2]) == some_bytes(SIZE, seed=2)
        assert made.host.stats().held_pages_bytes == cache.held_bytes == SIZE
        for record in records:
            made.mover.forget(record)


def test_a_load_that_fails_after_its_use_has_ended_is_forgotten(tmp_path: Path) -> None:
    with tiers(tmp_path, io_faults=FaultPlan().fail(nth=1, requests=Requests.READS)) as made:
        records = shards(made, 2)
        cache = HostCache(made.mover, SIZE, ["s0", "s1"])
        made.hold_back(Requests.READS)
        transfer = cache.fetch(records[0])
        cache.done(records[0])

        transfer.wait()

        assert use(cache, records[1]) == some_bytes(SIZE, seed=1)
        assert (cache.held_bytes, cache.stats.dropped) == (SIZE, 0)
        assert made.mover.drain() == [transfer.error]
        for record in records:
            made.mover.forget(record)


def test_a_load_that_failed_takes_no_room_while_it_is_not_done_with(tmp_path: Path) -> None:
    with tiers(tmp_path, io_faults=FaultPlan().fail(nth=1, requests=Requests.READS)) as made:
        records = shards(made, 2)
        cache = HostCache(made.mover, SIZE, ["s0", "s1"])
        with pytest.raises(TransferError):
            cache.fetch(records[0]).result()

        assert use(cache, records[1]) == some_bytes(SIZE, seed=1)

        assert cache.fetch(records[0]).result() == SIZE  # and it is tried again
        cache.done(records[0])
        cache.done(records[0])
        assert cache.held_bytes == made.host.stats().held_pages_bytes == SIZE
        for record in records:
            made.mover.forget(record)


def test_a_shard_comes_from_the_device_too(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        record = made.shard("s0", some_bytes(SIZE, seed=0), Tier.DEVICE)
        cache = HostCache(made.mover, SIZE, ["s0"])

        assert use(cache, record) == some_bytes(SIZE, seed=0)

        assert (cache.stats.hits, cache.stats.misses) == (1, 0)  # nothing was read from the drives
        made.mover.forget(record)


def test_a_shard_that_two_fetched_stays_until_both_are_done(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        records = shards(made, 2)
        cache = HostCache(made.mover, SIZE, ["s0", "s1"])
        for _ in range(2):
            cache.fetch(records[0]).result()

        cache.done(records[0])
        with pytest.raises(CapacityError):
            cache.fetch(records[1])
        cache.done(records[0])

        assert use(cache, records[1]) == some_bytes(SIZE, seed=1)
        assert (cache.stats.hits, cache.stats.misses) == (0, 2)
        with pytest.raises(ConfigError, match="shard in use"):
            cache.done(records[0])
        for record in records:
            made.mover.forget(record)


def test_a_fetch_of_what_was_fetched_ahead_is_the_same_use(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        records = shards(made, 4)
        cache = HostCache(made.mover, 2 * SIZE, ["s0", "s1", "s2", "s3"])
        for ahead in (0, 1, 0):
            cache.fetch(records[ahead]).result()
        for used in (0, 0, 1):
            cache.done(records[used])

        use(cache, records[2])

        assert records[0].is_current(Tier.HOST)  # it is used before s1 is again
        assert not records[1].is_current(Tier.HOST)
        for record in records:
            made.mover.forget(record)


def test_a_use_that_was_left_out_counts_as_passed(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        records = shards(made, 4)
        cache = HostCache(made.mover, 3 * SIZE, ["s0", "s2", "s1", "s1", "s0", "s3"])
        for index in (0, 2, 1, 0):  # s1 only once
            use(cache, records[index])

        use(cache, records[3])

        assert [record.is_current(Tier.HOST) for record in records] == [True, False, True, True]
        for record in records:
            made.mover.forget(record)


def test_what_is_on_the_host_already_takes_room_like_all_others(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        (record,) = shards(made, 1)
        there = made.shard("there", some_bytes(SIZE, seed=7))
        cache = HostCache(made.mover, SIZE, ["s0", "there"])
        use(cache, record, content=some_bytes(SIZE, seed=9))
        made.hold_back(Requests.WRITES)

        transfer = cache.fetch(there)
        made.mover.poll()
        assert not transfer.done()  # both have memory still
        transfer.result()

        assert (cache.held_bytes, record.residency) == (SIZE, Residency.NVME)
        assert made.host.stats().held_pages_bytes == SIZE
        for each in (record, there):
            made.mover.forget(each)


def test_what_is_on_the_host_already_is_refused_where_it_has_no_room(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        (record,) = shards(made, 1)
        there = made.shard("there", some_bytes(SIZE, seed=7))
        cache = HostCache(made.mover, SIZE, ["s0", "there"])
        cache.fetch(record).result()

        with pytest.raises(CapacityError):
            cache.fetch(there)

        for each in (record, there):
            made.mover.forget(each)


def test_what_a_fetch_costs_does_not_grow_with_what_is_held(tmp_path: Path) -> None:
    def calls(count: int, directory: Path) -> int:
        """Return how many functions are called by a fetch into a full cache, its load's end not waited for."""
        directory.mkdir()
        with tiers(directory, host=4 * KiB * count) as made:
            records = shards(made, count, nbytes=64)
            cache = HostCache(made.mover, 4 * KiB * (count - 1), [record.name for record in records])
            for record in records[:-1]:
                use(cache, record)
            made.hold_back(Requests.READS)
            seen = 0

            def count_call(frame: object, event: str, argument: object) -> None:
                nonlocal seen
                seen += event in ("call", "c_call")

            sys.setprofile(count_call)
            try:
                cache.fetch(records[-1])
            finally:
                sys.setprofile(None)
            made.mover.drain()
            for record in records:
                made.mover.forget(record)
            return seen

    assert calls(200, tmp_path / "many") < calls(10, tmp_path / "few") + 100


def test_what_is_in_use_stays_and_too_much_of_it_is_told(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        records = shards(made, 3)
        cache = HostCache(made.mover, 2 * SIZE, ["s0", "s1", "s2"])
        for record in records[:2]:
            cache.fetch(record).result()

        with pytest.raises(CapacityError, match=r"call done\(\) for shards that are not needed while s2 is") as refused:
            cache.fetch(records[2])
        assert dict(refused.value.holders) == {"s0": SIZE, "s1": SIZE}

        cache.done(records[0])
        cache.fetch(records[2]).result()
        made.mover.drain()
        for record in records:
            made.mover.forget(record)


def test_a_second_fetch_before_the_first_has_ended_is_the_same_move(tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        (record,) = shards(made, 1)
        made.hold_back(Requests.READS)
        cache = HostCache(made.mover, SIZE, ["s0"])

        assert cache.fetch(record) is cache.fetch(record)

        made.mover.drain()
        assert cache.stats.misses == 1
        made.mover.forget(record)


@pytest.mark.parametrize("call", ["fetch", "done"])
def test_a_shard_that_the_cache_does_not_know_is_refused(call: str, tmp_path: Path) -> None:
    with tiers(tmp_path) as made:
        (record,) = shards(made, 1)
        cache = HostCache(made.mover, SIZE, ["other"])

        with pytest.raises(ConfigError):
            getattr(cache, call)(record)

        made.mover.forget(record)


def test_a_cache_without_an_order_is_refused(tmp_path: Path) -> None:
    with tiers(tmp_path) as made, pytest.raises(ConfigError, match="at least one"):
        HostCache(made.mover, SIZE, [])


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40 * KiB), min_size=1, max_size=8),
    room=st.integers(40 * KiB, 160 * KiB),
    changes=st.lists(st.booleans(), min_size=1, max_size=24),
    backwards=st.booleans(),
)
def test_contents_survive_any_room_and_any_changes(
    sizes: list[int], room: int, changes: list[bool], backwards: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with tiers(tmp_path_factory.mktemp("tiers")) as made:
        records = [made.shard(f"s{i}", some_bytes(n, seed=i), Tier.NVME) for i, n in enumerate(sizes)]
        content = {record.name: some_bytes(record.nbytes, seed=i) for i, record in enumerate(records)}
        cycle = [*records, *(reversed(records) if backwards else ())]
        cache = HostCache(made.mover, room, [record.name for record in cycle])
        uses = islice((record for _ in range(len(changes)) for record in cycle), len(changes))
        for step, (record, changed) in enumerate(zip(uses, changes, strict=False)):
            new = some_bytes(record.nbytes, seed=1000 + step) if changed else None
            assert use(cache, record, content=new) == content[record.name]
            content[record.name] = content[record.name] if new is None else new
            assert cache.held_bytes <= room
        cache.flush()
        made.mover.drain()
        assert {record.name: made.content(record) for record in records} == content
        for record in records:
            made.mover.forget(record)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 20 * KiB), min_size=2, max_size=6),
    room=st.integers(20, 60),
    actions=st.lists(
        st.tuples(st.sampled_from(["fetch", "fetch", "done", "change", "poll", "flush"]), st.integers(0, 5)),
        max_size=60,
    ),
    faulty=st.booleans(),
)
def test_no_order_of_calls_loses_bytes_or_passes_the_limit(
    sizes: list[int], room: int, actions: list[tuple[str, int]], faulty: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plan = FaultPlan().fail(every=11) if faulty else None
    with tiers(tmp_path_factory.mktemp("tiers"), io_faults=plan) as made:
        limit = room * KiB
        content = [some_bytes(nbytes, seed=index) for index, nbytes in enumerate(sizes)]
        records = [made.shard(f"s{index}", each) for index, each in enumerate(content)]
        for record in records:
            tried_again(partial(made.mover.move, record, Tier.NVME))
        cache = HostCache(made.mover, limit, [record.name for record in records])
        users = [0] * len(records)
        for step, (action, number) in enumerate(actions):
            index = number % len(records)
            record = records[index]
            if action == "fetch":
                with suppress(CapacityError):
                    cache.fetch(record)
                    users[index] += 1
            elif action == "done" and users[index]:
                cache.done(record)
                users[index] -= 1
            elif action == "change" and users[index] and record.residency is Residency.HOST:
                assert record.host is not None
                content[index] = some_bytes(sizes[index], seed=1000 + step)
                record.host.memory()[:] = content[index]
                record.changed()
            elif action == "poll":
                made.mover.poll()
            elif action == "flush":
                with suppress(TransferError):
                    cache.flush()
            assert made.host.stats().held_pages_bytes <= cache.held_bytes <= limit
        made.mover.drain()
        for record, expected in zip(records, content, strict=True):
            tried_again(partial(made.mover.move, record, Tier.HOST))
            assert made.content(record) == expected
            made.mover.forget(record)


def tried_again(move: Callable[[], Transfer]) -> None:
    """Carry out a move whose I/O may fail, but not twice in a row."""
    with suppress(TransferError):
        move().result()
        return
    move().result()
