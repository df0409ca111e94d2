"""`HostCache`: which shards of NVMe stay in host memory between their uses.

A step uses its shards in a known order, so what is needed last goes first; that is the best that any cache can do with
pieces of one size. Decides (`choose_evictions`, pure) and lets the Mover act; one thread calls it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from deepnvme.extents import PAGE
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.plan import Tier
from infinity_engine.storage import Transfer
from infinity_engine.tiering.mover import Mover, Source
from infinity_engine.tiering.record import ShardRecord
from infinity_engine.tiering.residency import TIER_OF, Residency
from infinity_engine.units import align_up

__all__ = ["CacheStats", "HostCache", "choose_evictions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheStats:
    """What the cache saved: a hit is a use that read nothing from the drives."""

    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    missed_bytes: int = 0
    dropped: int = 0  # copies that went without being written, as the drives had the same
    written_back: int = 0  # copies that had to be written first
    written_back_bytes: int = 0


def choose_evictions(cached: Mapping[str, int], next_use: Mapping[str, int], nbytes: int) -> list[str]:
    """Return which of `cached`, names with their bytes, go so that `nbytes` become free: those used last, first.

    What has no next use goes before all others. The last ones chosen are spared where the rest is enough without them.

    Raises:
        ValueError: all of them together have not so many bytes.
    """
    never = max(next_use.values(), default=0) + 1
    chosen: list[str] = []
    found = 0
    for name in sorted(cached, key=lambda name: (next_use.get(name, never), name), reverse=True):
        if found >= nbytes:
            break
        chosen.append(name)
        found += cached[name]
    if found < nbytes:
        raise ValueError(f"{nbytes} B cannot become free: all that can go has {found} B")
    for name in reversed(chosen):
        if found - cached[name] >= nbytes:
            chosen.remove(name)
            found -= cached[name]
    return chosen


class HostCache:
    """Holds at most `limit` bytes of host memory, in whole pages, for the shards that `order` names.

    `order` is the cycle of uses: of one step, or of two where every other step goes backwards. `fetch` brings a shard
    to HOST and keeps it there until `done`. What was changed in between is written when it is evicted, not before.
    """

    def __init__(self, mover: Mover, limit: int, order: Sequence[str]) -> None:
        if not order:
            raise ConfigError(field="order of the cache", value=list(order), expected="at least one shard's name")
        self.limit = limit
        self.stats = CacheStats()
        self._mover = mover
        self._length = len(order)
        self._uses: dict[str, list[int]] = {}
        for position, name in enumerate(order):
            self._uses.setdefault(name, []).append(position)
        self._now = -1
        self._held: dict[str, ShardRecord] = {}
        self._in_use: set[str] = set()
        self._arriving: dict[str, Transfer] = {}
        self._leaving: list[tuple[ShardRecord, Transfer]] = []

    @property
    def held_bytes(self) -> int:
        """Bytes of the pages that its shards take in host memory, those on their way in and out included."""
        leaving = [record for record, transfer in self._leaving if not transfer.done() or transfer.error]
        return sum(map(_pages, (*self._held.values(), *leaving)))

    def fetch(self, record: ShardRecord) -> Transfer:
        """Begin to bring the shard to HOST, where it stays until `done`; others are evicted where need be.

        Raises:
            CapacityError: the rest of what is held is in use. Nothing has changed.
            ConfigError: the order does not name it.
        """
        if record.name not in self._uses:
            raise ConfigError.unknown_name(field="shard of the cache", name=record.name, known=self._uses)
        self._take_in_what_stays()
        if record.name not in self._held:
            self._evict_for(record)
            self._held[record.name] = record
        self._in_use.add(record.name)
        self._now = (self._now + self._distance(record.name)) % self._length
        arriving = self._arriving.get(record.name)
        if arriving is not None and not arriving.done():
            return arriving
        if record.is_current(Tier.HOST):
            self._count(hits=1, hit_bytes=record.nbytes)
            return self._mover.move(record, Tier.HOST, source=Source.KEPT)
        self._count(misses=1, missed_bytes=record.nbytes)
        transfer = self._mover.load(record, after=[transfer for _, transfer in self._leaving])
        self._arriving[record.name] = transfer
        return transfer

    def done(self, record: ShardRecord) -> None:
        """Note that nobody uses the shard for now: it may be evicted.

        Raises:
            ConfigError: nobody fetched it.
        """
        if record.name not in self._in_use:
            raise ConfigError.unknown_name(field="shard in use", name=record.name, known=sorted(self._in_use))
        self._in_use.remove(record.name)
        self._arriving.pop(record.name, None)
        if record.host is None:  # its load failed, or it went on without a copy here
            del self._held[record.name]

    def flush(self) -> None:
        """Write what was changed to the drives and wait; the copies stay.

        Raises:
            TransferError: some could not be written, and is in host memory still.
        """
        for record in self._held.values():
            if record.residency is Residency.HOST:
                self._mover.store(record, source=Source.KEPT)
        errors = self._mover.drain()
        self._take_in_what_stays()
        if errors:
            raise errors[0]

    def _evict_for(self, record: ShardRecord) -> None:
        held = sum(map(_pages, self._held.values()))
        short = held + _pages(record) - self.limit
        if short <= 0:
            return
        free_to_go = {
            name: _pages(other)
            for name, other in self._held.items()
            if name not in self._in_use and other.residency in TIER_OF
        }
        distances = {name: self._distance(name) for name in free_to_go}
        try:
            victims = choose_evictions(free_to_go, distances, short)
        except ValueError:
            raise CapacityError(
                tier=Tier.HOST.name,
                asked=record.nbytes,
                free=self.limit - held + sum(free_to_go.values()),
                limit=self.limit,
                holders=tuple((name, self._held[name].nbytes) for name in self._in_use if name in self._held),
                change=f"call done() for shards that are not needed while {record.name} is, or give the cache more",
            ) from None
        for name in victims:
            self._evict(self._held.pop(name))

    def _evict(self, record: ShardRecord) -> None:
        if record.residency is Residency.HOST and not record.is_current(Tier.NVME):
            self._count(written_back=1, written_back_bytes=record.nbytes)
            self._leaving.append((record, self._mover.store(record)))
            return
        self._count(dropped=1)
        if record.residency is Residency.HOST:
            record.advance(Residency.NVME)
        self._mover.release(record, Tier.HOST)

    def _take_in_what_stays(self) -> None:
        """Forget the shards that have left; those that could not be written are held as before."""
        staying = []
        for record, transfer in self._leaving:
            if not transfer.poll():
                staying.append((record, transfer))
            elif transfer.error is not None:
                self._held[record.name] = record
        self._leaving = staying

    def _distance(self, name: str) -> int:
        """Return after how many uses the shard is used again."""
        positions = self._uses[name]
        later = bisect_right(positions, self._now)
        following = positions[later] if later < len(positions) else positions[0] + self._length
        return following - self._now

    def _count(self, **more: int) -> None:
        self.stats = replace(self.stats, **{name: getattr(self.stats, name) + n for name, n in more.items()})


def _pages(record: ShardRecord) -> int:
    return align_up(record.nbytes, PAGE)
