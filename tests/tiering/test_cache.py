"""The host cache: what goes is what is used last, what was changed is written first, nothing is lost."""

from __future__ import annotations

import errno
from collections import OrderedDict
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepnvme import FaultPlan
from deepnvme.faults import Requests
from infinity_engine.errors import CapacityError, ConfigError, TransferError
from infinity_engine.plan import Tier
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
    assert choose_evictions({"a": 10, "b": 10, "c": 10}, {"a": 5, "b": 9, "c": 1}, 10) == ["b"]


def test_what_is_never_used_again_goes_before_all_others() -> None:
    assert choose_evictions({"a": 10, "b": 10}, {"a": 100}, 10) == ["b"]


def test_what_the_rest_is_enough_without_is_spared() -> None:
    assert choose_evictions({"far": 1, "near": 10}, {"far": 9, "near": 1}, 10) == ["near"]


def test_nothing_goes_where_nothing_is_needed() -> None:
    assert choose_evictions({"a": 10}, {"a": 1}, 0) == []


def test_more_than_all_cannot_become_free() -> None:
    with pytest.raises(ValueError, match="all that can go has 10 B"):
        choose_evictions({"a": 10}, {"a": 1}, 11)


@given(
    st.dictionaries(st.text(max_size=3), st.tuples(st.integers(1, 50), st.integers(1, 50)), max_size=12),
    st.integers(0, 200),
)
def test_evictions_make_enough_room_and_none_of_them_could_stay(cached: dict[str, tuple[int, int]], room: int) -> None:
    sizes = {name: nbytes for name, (nbytes, _) in cached.items()}
    next_use = {name: distance for name, (_, distance) in cached.items()}
    if sum(sizes.values()) < room:
        with pytest.raises(ValueError, match="cannot become free"):
            choose_evictions(sizes, next_use, room)
        return

    chosen = choose_evictions(sizes, next_use, room)

    found = sum(sizes[name] for name in chosen)
    assert found >= room
    assert all(found - sizes[name] < room for name in chosen)
    assert chosen == choose_evictions(dict(reversed(sizes.items())), next_use, room)


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


def test_a_fetch_waits_for_the_write_that_makes_its_room(tmp_path: Path) -> None:
    with tiers(tmp_path, io_faults=FaultPlan().delay(delay_us=3000, every=1, requests=Requests.WRITES)) as made:
        records = shards(made, 2)
        cache = HostCache(made.mover, SIZE, ["s0", "s1"])
        use(cache, records[0], content=some_bytes(SIZE, seed=9))

        transfer = cache.fetch(records[1])
        assert not transfer.done()
        assert transfer.result() == SIZE

        assert records[0].residency is Residency.NVME
        cache.done(records[1])
        assert use(cache, records[0]) == some_bytes(SIZE, seed=9)
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

        assert use(cache, records[1]) == some_bytes(SIZE, seed=1)
        made.mover.drain()
        assert use(cache, records[0]) == some_bytes(SIZE, seed=9)
        for record in records:
            made.mover.forget(record)


def test_a_fetch_of_what_is_being_written_back_finds_the_new_bytes(tmp_path: Path) -> None:
    with tiers(tmp_path, io_faults=FaultPlan().delay(delay_us=3000, every=1, requests=Requests.WRITES)) as made:
        records = shards(made, 3)
        cache = HostCache(made.mover, 2 * SIZE, ["s0", "s1", "s2"])
        use(cache, records[0], content=some_bytes(SIZE, seed=9))
        use(cache, records[2])
        cache.fetch(records[1])  # s0 comes before s2: it is s2 that goes, then s0 for it again
        cache.done(records[1])

        assert use(cache, records[0]) == some_bytes(SIZE, seed=9)
        made.mover.drain()
        for record in records:
            made.mover.forget(record)


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
    with tiers(tmp_path, io_faults=FaultPlan().delay(delay_us=3000, every=1, requests=Requests.READS)) as made:
        (record,) = shards(made, 1)
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
