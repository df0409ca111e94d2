"""`Mover`: carries out moves of shards between NVMe, host and device, several at a time.

Decides nothing: plans say what moves when. A move that fails leaves the shard at its last true
residency with its bytes intact, so that it can be repeated. One thread calls it; nothing is started
in any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from infinity_engine.accel import Accelerator, Event, StreamKind
from infinity_engine.errors import ConfigError, IllegalTransition
from infinity_engine.memory import DeviceMemory, Lease, PinnedPool
from infinity_engine.plan import Tier
from infinity_engine.residence.record import ShardRecord
from infinity_engine.residence.residency import HOME_OF, MOVES, Residency
from infinity_engine.storage import CopyHop, Hop, Place, PlannedHop, SwapFile, Transfer

__all__ = ["Mover", "Source"]

_UPWARDS = (Tier.NVME, Tier.HOST, Tier.DEVICE)
_BY_TIERS = MappingProxyType({tiers: residency for residency, tiers in MOVES.items()})
_STREAM = MappingProxyType(
    {Residency.UPLOADING: StreamKind.H2D, Residency.DOWNLOADING: StreamKind.D2H}
)


class Source(Enum):
    """What happens to the memory that a move leaves; a place on the drives is kept anyway."""

    RELEASED = "released"  # it goes back to its pool when the move has ended
    KEPT = "kept"  # it stays, as a copy of the same version


class Mover:
    """Moves shards between `swap`, `host` and `device`; `swap` is None where nothing is on NVMe.

    Where the target is current already, no bytes move; nor do any between DEVICE and HOST where
    these are one memory.

    A move writes to a new lease, or to `into`, a lease of the caller's. `into` must have the
    shard's size and the right tier (either, where DEVICE and HOST are one memory), and the shard no
    memory there yet. The call checks that, and a refused lease stays the caller's. From then on the
    move owns the lease and closes it if it fails; when the move has ended, the record has it.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        host: PinnedPool,
        device: DeviceMemory[Any],
        swap: SwapFile | None = None,
    ) -> None:
        self._accelerator = accelerator
        self._host = host
        self._device = device
        self._swap = swap
        self._transfers: list[Transfer] = []
        # In one memory there is nothing to copy, so no streams are asked for.
        kinds = {} if accelerator.unified else _STREAM
        self._streams = {moving: accelerator.stream(kind) for moving, kind in kinds.items()}

    # --- moves ------------------------------------------------------------------------------------

    def load_with(self, record: ShardRecord, *, into: Lease, hop: Hop) -> Transfer:
        """Follow a read that the caller has begun: then the shard is on the host, in `into`."""
        return self._begin([self._stage(record, Residency.LOADING, Source.KEPT, into, by=hop)])

    def upload(
        self, record: ShardRecord, *, into: Lease | None = None, source: Source = Source.RELEASED
    ) -> Transfer:
        """Begin to copy the shard from host to device."""
        return self._begin([self._stage(record, Residency.UPLOADING, source, into)])

    def move(
        self,
        record: ShardRecord,
        to: Tier,
        *,
        into: Lease | None = None,
        source: Source = Source.RELEASED,
        after: Sequence[Event] = (),
    ) -> Transfer:
        """Begin to move the shard to `to`, hop by hop, the last one into `into` if given.

        Overwrites an older version of the shard on the drives. A copy between host and device
        begins after the events `after`.

        Raises:
            IllegalTransition: it is on its way somewhere, or `into` is given and it is in `to`.
        """
        here, there = _UPWARDS.index(record.home()), _UPWARDS.index(to)
        if into is not None and here == there:
            raise IllegalTransition(
                shard=record.name,
                source=to.name,
                target=f"{to.name}, in other memory",
                allowed=("another tier",),
            )
        # Down to a copy of the same version: nothing has to be written.
        if there < here and record.is_current(to):
            record.advance(HOME_OF[to])
            # Everything above the new home.
            for tier in _UPWARDS[there + 1 :] if source is Source.RELEASED else ():
                self.release(record, tier)
            return Transfer([])
        way = _UPWARDS[here : there + 1] if here <= there else _UPWARDS[there : here + 1][::-1]
        hops = [_BY_TIERS[hop] for hop in pairwise(way)]
        last = len(hops) - 1
        stages = [
            self._stage(record, hop, source, into if number == last else None, after=after)
            for number, hop in enumerate(hops)
        ]
        return self._begin(stages)

    def release(self, record: ShardRecord, tier: Tier) -> None:
        """Give back the shard's memory or place in `tier`; does nothing where it has none.

        Raises:
            IllegalTransition: the shard needs it: as its home, for a move, or because no other copy
                is current.
        """
        where = record.drop(tier)
        if where is not None:
            self._release_copy(where)

    def read_from_drives(self, record: ShardRecord, into: memoryview) -> None:
        """Read the shard from the drives into the caller's memory, and wait. Its residency stays.

        Raises:
            TransferError: it could not be read.
            IllegalTransition: the drives have an older version.
        """
        if not record.is_current(Tier.NVME) or record.place is None:
            raise IllegalTransition(
                shard=record.name,
                source=record.residency.name,
                target="a copy from NVMe",
                allowed=("moving it there",),
            )
        self._drives(record).read(record.place, into, what=record.name).wait()

    def read_part(self, record: ShardRecord, start: int, into: memoryview) -> Hop:
        """Begin to read a part of the shard's place on the drives. Its residency stays.

        Whatever version is there is read.
        """
        assert record.place is not None, "what is read of has a place"
        return self._drives(record).read(
            record.place.part(start, into.nbytes), into, what=record.name
        )

    def forget(self, record: ShardRecord) -> None:
        """Give back all that the shard has: its bytes are not needed any more."""
        for where in record.abandon():
            self._release_copy(where)

    # --- what is under way ------------------------------------------------------------------------

    def poll(self) -> None:
        """Start the hops that have become possible."""
        # In the order in which they were begun, so what starts next does not depend on timing.
        for transfer in self._transfers:
            transfer.poll()
        self._drop_ended()

    def drain(self) -> list[BaseException]:
        """Wait for the end of every move; return the errors that no `result` has raised."""
        for transfer in self._transfers:
            transfer.wait()
        # Emptied first: errors are returned once.
        ended, self._transfers = self._transfers, []
        return [transfer.unreported for transfer in ended if transfer.unreported is not None]

    def _begin(self, stages: list[PlannedHop]) -> Transfer:
        transfer = Transfer(stages)
        self._transfers.append(transfer)
        self._drop_ended()
        return transfer

    def _drop_ended(self) -> None:
        """Forget the moves that have ended, but for those with an error that is not raised yet."""
        self._transfers = [
            transfer
            for transfer in self._transfers
            if not transfer.done() or transfer.unreported is not None
        ]

    # --- one hop ----------------------------------------------------------------------------------

    def _stage(
        self,
        record: ShardRecord,
        moving: Residency,
        source: Source,
        into: Lease | None = None,
        *,
        by: Hop | None = None,
        after: Sequence[Event] = (),
    ) -> PlannedHop:
        leaves, goes_to = MOVES[moving]
        if into is not None:
            # Now, not when the hop starts: a lease that is refused stays the caller's.
            self._check_target(record, moving, into)
        # owned by the move until the record has it
        new: list[Lease | Place] = [] if into is None else [into]
        begun = False
        one_memory = self._is_one_memory(moving)

        def start() -> Hop | None:
            nonlocal begun
            # Asked when the hop starts: other moves may have changed the record since.
            record.check(moving)
            begun = True
            hop: Hop | None = None
            target: Lease | Place | None = None
            if one_memory:
                # a lease kept there makes room for the one that arrives
                self.release(record, goes_to)
            elif not record.is_current(goes_to):
                target = record.where(goes_to)
                if target is None:
                    if not new:
                        new.append(self._allocate(goes_to, record))
                    target = new[0]
                # `by` is the caller's own read, which is under way already.
                hop = by or self._hop(record, moving, target, after)
            # Last: what fails before this leaves the record as it was.
            record.advance(moving, into=target)
            return hop

        def finish() -> None:
            if one_memory:
                # DEVICE and HOST are the same bytes: the lease changes tiers.
                record.arrived(goes_to, _present(record, leaves))
                record.advance(HOME_OF[goes_to])
                record.drop(leaves)
            else:
                if not record.is_current(goes_to):
                    record.arrived(goes_to, new.pop() if new else _present(record, goes_to))
                record.advance(HOME_OF[goes_to])
                # A place on the drives stays: it can be read again without a write.
                if source is Source.RELEASED and leaves is not Tier.NVME:
                    self.release(record, leaves)

        def undo() -> None:
            # Not where it never began: then the record is in no move, or in another one's.
            if begun and record.residency is moving:
                record.advance(HOME_OF[leaves])
            for target in new:
                self._release_copy(target)

        return PlannedHop(start, finish, undo)

    def _check_target(self, record: ShardRecord, moving: Residency, into: Lease) -> None:
        """Raise ConfigError unless the shard can move there."""
        tier = MOVES[moving][1]
        if self._is_one_memory(moving):
            expected = "None, as DEVICE and HOST are one memory: no bytes are copied"
        elif record.where(tier) is not None:
            expected = f"None, as {record.name} has memory in {tier.name} already"
        elif (
            into.closed
            or into.nbytes != record.nbytes
            or not (into.tier is tier or self._accelerator.unified)
        ):
            expected = f"an open lease of {record.nbytes} B of {tier.name}"
        else:
            return
        raise ConfigError(
            field=f"into, where {record.name} is to move", value=into, expected=expected
        )

    def _hop(
        self,
        record: ShardRecord,
        moving: Residency,
        target: Lease | Place,
        after: Sequence[Event],
    ) -> Hop | None:
        """Begin to move the bytes, from where they are to `target`."""
        if not record.nbytes:
            return None
        origin = _present(record, MOVES[moving][0])
        if isinstance(origin, Place) and isinstance(target, Lease):
            return self._drives(record).read(origin, _memory(target), what=record.name)
        if isinstance(origin, Lease) and isinstance(target, Place):
            return self._drives(record).write(target, _memory(origin), what=record.name)
        assert isinstance(origin, Lease), "places are not copied to places"
        assert isinstance(target, Lease), "places are not copied to places"
        event = self._accelerator.copy(
            target.flat(), origin.flat(), stream=self._streams[moving], after=after
        )
        # Both stay taken until the copy has passed, also if their holders close them before.
        for lease in (origin, target):
            lease.until(event)
        return CopyHop(event, record.nbytes, record.name)

    def _is_one_memory(self, moving: Residency) -> bool:
        return self._accelerator.unified and moving in _STREAM

    def _allocate(self, tier: Tier, record: ShardRecord) -> Lease | Place:
        if tier is Tier.NVME:
            return self._drives(record).allocate(record.nbytes, holder=record.name)
        pool = self._host if tier is Tier.HOST else self._device
        return pool.lease(record.nbytes, holder=record.name)

    def _release_copy(self, where: Lease | Place) -> None:
        if isinstance(where, Lease):
            where.close()
        elif self._swap is not None:
            self._swap.release(where)

    def _drives(self, record: ShardRecord) -> SwapFile:
        if self._swap is None:
            raise ConfigError(
                field="Budget.nvme",
                value=None,
                expected=f"a directory and its size, as {record.name} moves to NVMe",
            )
        return self._swap


def _memory(lease: Lease) -> memoryview:
    """Return a lease's bytes for I/O: also those of a device that is the host itself."""
    return lease.memory() if lease.tier is Tier.HOST else lease.flat().numpy().data


def _present(record: ShardRecord, tier: Tier) -> Lease | Place:
    where = record.where(tier)
    if where is None:
        raise RuntimeError(
            f"{record!r} has no copy in {tier.name}, although its residency says so: this is a "
            "bug in the engine"
        )
    return where
