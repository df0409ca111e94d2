"""`HostCache`: which shards of NVMe stay in host memory between their uses.

A step uses its shards in a known order, so what is needed last goes first; that is the best that any cache can do with
pieces of one size. Decides (`choose_evictions`, pure) and lets the Mover act; one thread calls it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
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


def choose_evictions(farthest_first: Iterable[tuple[str, int]], nbytes: int) -> list[str]:
    """Return which of these, names with their bytes, go so that `nbytes` become free: the first, and no more than need.

    The last ones chosen are spared where the rest is enough without them.

    Raises:
        ValueError: all of them together have not so many bytes.
    """
    chosen: list[tuple[str, int]] = []
    found = 0
    left = iter(farthest_first)
    while found < nbytes:
        following = next(left, None)
        if following is None:
            raise ValueError(f"{nbytes} B cannot become free: all that can go has {found} B")
        chosen.append(following)
        found += following[1]
    needed: list[str] = []
    for name, each in reversed(chosen):
        if found - each >= nbytes:
            found -= each
        else:
            needed.append(name)
    return needed[::-1]


class _Held:
    """A shard that the cache has in host memory, or is about to."""

    def __init__(self, record: ShardRecord) -> None:
        self.record = record
        self.counted = 0  # bytes of it that count against the limit
        self.users = 0
        self.next_use = 0  # as of the last time when nobody used it any more

    @property
    def missing(self) -> int:
        """How much more it counts than it does."""
        return _pages(self.record) - self.counted

    def count(self, nbytes: int) -> None:
        """Count so many bytes of it, or, where negative, no longer."""
        self.counted += nbytes

    def enter(self) -> None:
        """Note one more user."""
        self.users += 1

    def leave(self) -> None:
        """Note that one of them is done."""
        self.users -= 1

    def expect(self, next_use: int) -> tuple[int, str]:
        """Note when it is used next; return its entry among those that nobody uses."""
        self.next_use = next_use
        return self.entry

    @property
    def entry(self) -> tuple[int, str]:
        """What it is listed as among those that nobody uses."""
        return self.next_use, self.record.name


class HostCache:
    """Holds at most `limit` bytes of host memory, in whole pages, for the shards that `order` names.

    `order` is the cycle of uses: of one step, or of two where every other step goes backwards. `fetch` brings a shard
    to HOST and keeps it there until `done`. Several may fetch it, as whoever reads ahead and whoever computes do: it
    stays until all are done, and that is one use. What was changed is written when it is evicted, not before.
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
        self._now = -1  # the use that was the last to begin, counted through all cycles
        self._held: dict[str, _Held] = {}
        self._counted = 0
        self._idle: list[tuple[int, str]] = []  # what nobody uses, by its next use
        self._arriving: dict[str, Transfer] = {}
        self._leaving: dict[str, tuple[ShardRecord, Transfer]] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes of the pages that its shards have in host memory, those on their way in and out included."""
        moving = {name: self._held[name].record for name in self._arriving}
        resting = self._counted - sum(self._held[name].counted for name in moving)
        moving.update((name, record) for name, (record, _) in self._leaving.items())
        return resting + sum(_pages(record) for record in moving.values() if record.host or record.arriving)

    def fetch(self, record: ShardRecord) -> Transfer:
        """Begin to bring the shard to HOST, where it stays until `done`; others are evicted where need be.

        Raises:
            CapacityError: the rest of what is held is in use, or moving. Nothing has changed.
            ConfigError: the order does not name it.
            IllegalTransition: somebody else is moving it. Nothing has changed.
        """
        name = record.name
        if name not in self._uses:
            raise ConfigError.unknown_name(field="shard of the cache", name=name, known=self._uses)
        self._settle()
        held = self._held.get(name) or _Held(record)
        transfer = self._arriving.get(name)
        reads = transfer is None and self._is_read(record)
        if transfer is None:
            transfer = self._bring(held, reads)
        if not held.users:
            self._begin_use(held)
            hit = {"misses": 1, "missed_bytes": record.nbytes} if reads else {"hits": 1, "hit_bytes": record.nbytes}
            self._count(**hit)
        held.enter()
        return transfer

    def done(self, record: ShardRecord) -> None:
        """Note that whoever fetched the shard does not use it for now: it may be evicted once nobody does.

        Raises:
            ConfigError: nobody fetched it.
        """
        held = self._held.get(record.name)
        if held is None or not held.users:
            in_use = sorted(name for name, other in self._held.items() if other.users)
            raise ConfigError.unknown_name(field="shard in use", name=record.name, known=in_use)
        self._settle()
        held.leave()
        if held.users:
            return
        if record.host is None and record.name not in self._arriving:  # its load failed, or it went on without a copy
            self._forget(held)
        else:
            self._list(held)

    def flush(self) -> None:
        """Write what was changed and resides in host memory to the drives, and wait; the copies stay.

        Raises:
            CapacityError: the drives have no room for some. It is in host memory still, as below.
            TransferError: some could not be written, and is in host memory still. All others are written.
        """
        for transfer in (*self._arriving.values(), *(transfer for _, transfer in self._leaving.values())):
            transfer.wait()
        self._settle()
        changed = [
            held
            for held in self._held.values()
            if held.record.residency is Residency.HOST and not held.record.is_current(Tier.NVME)
        ]
        writes = [self._mover.store(held.record, source=Source.KEPT) for held in changed]
        for write in writes:
            write.wait()
        for held in changed:
            if held.users:  # and who uses it may change it again
                self._mover.move(held.record, Tier.HOST).result()
        for write in writes:
            write.result()

    def _is_read(self, record: ShardRecord) -> bool:
        """Tell whether bringing it reads from the drives: what is being written back is there when it has ended."""
        if record.name in self._leaving:
            return True
        return record.home() is Tier.NVME and not record.is_current(Tier.HOST)

    def _bring(self, held: _Held, reads: bool) -> Transfer:
        """Begin to bring a shard that is not on its way here, in room that others leave where it has none yet."""
        record = held.record
        after: list[Transfer] = []
        if held.missing:
            for name in self._victims(record, self._counted + held.missing - self.limit):
                self._evict(self._held[name])
            after = [transfer for _, transfer in self._leaving.values()]
        transfer = self._mover.load(record, after=after) if reads else self._mover.move(record, Tier.HOST, after=after)
        self._arriving[record.name] = transfer
        self._held[record.name] = held
        self._count_bytes(held, held.missing)
        return transfer

    def _victims(self, record: ShardRecord, short: int) -> list[str]:
        try:
            return choose_evictions(self._free_to_go(), short)
        except ValueError:
            free_to_go = dict(self._free_to_go())
            raise CapacityError(
                tier=Tier.HOST.name,
                asked=record.nbytes,
                free=max(0, self.limit - self._counted + sum(free_to_go.values())),
                limit=self.limit,
                holders=tuple(
                    (name, held.record.nbytes)
                    for name, held in self._held.items()
                    if held.counted and name not in free_to_go
                ),
                change=f"call done() for shards that are not needed while {record.name} is, or give the cache more",
            ) from None

    def _free_to_go(self) -> Iterator[tuple[str, int]]:
        """Yield what could be evicted, with its bytes: what is used last, first."""
        for _, name in reversed(self._idle):
            held = self._held[name]
            if name not in self._arriving and held.record.residency in TIER_OF:
                yield name, held.counted

    def _evict(self, held: _Held) -> None:
        record = held.record
        if record.residency is Residency.HOST and not record.is_current(Tier.NVME):
            self._count(written_back=1, written_back_bytes=record.nbytes)
            self._leaving[record.name] = record, self._mover.store(record)
        else:
            self._count(dropped=1)
            if record.residency is Residency.HOST:
                record.advance(Residency.NVME)
            self._mover.release(record, Tier.HOST)
        self._forget(held)

    def _settle(self) -> None:
        """Note what has ended: what could not be written is held as before, what could not be read is not held."""
        for name, (record, transfer) in list(self._leaving.items()):
            if transfer.poll():
                del self._leaving[name]
                if transfer.error is not None and name not in self._held:
                    self._held[name] = held = _Held(record)
                    self._count_bytes(held, held.missing)
                    self._list(held)
        for name, transfer in list(self._arriving.items()):
            if transfer.poll():
                del self._arriving[name]
                held = self._held[name]
                if transfer.error is not None and held.record.host is None:
                    self._count_bytes(held, -held.counted)

    def _begin_use(self, held: _Held) -> None:
        """Go on to the next use of this shard; the uses of others until there were left out."""
        self._unlist(held)
        self._now = self._next_use(held.record.name)
        passed = bisect_left(self._idle, (self._now + 1, ""))
        left_out, self._idle[:passed] = self._idle[:passed], []
        for _, name in left_out:
            self._list(self._held[name])

    def _next_use(self, name: str) -> int:
        cycle, position = divmod(self._now, self._length)
        positions = self._uses[name]
        later = bisect_right(positions, position)
        if later < len(positions):
            return cycle * self._length + positions[later]
        return (cycle + 1) * self._length + positions[0]

    def _list(self, held: _Held) -> None:
        insort(self._idle, held.expect(self._next_use(held.record.name)))

    def _unlist(self, held: _Held) -> None:
        at = bisect_left(self._idle, held.entry)
        if self._idle[at : at + 1] == [held.entry]:
            del self._idle[at]

    def _count_bytes(self, held: _Held, nbytes: int) -> None:
        held.count(nbytes)
        self._counted += nbytes

    def _forget(self, held: _Held) -> None:
        self._unlist(held)
        self._count_bytes(held, -held.counted)
        del self._held[held.record.name]

    def _count(self, **more: int) -> None:
        self.stats = replace(self.stats, **{name: getattr(self.stats, name) + n for name, n in more.items()})


def _pages(record: ShardRecord) -> int:
    return align_up(record.nbytes, PAGE)
