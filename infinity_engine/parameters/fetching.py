"""`ParameterFetcher`: parameters at home on host or drives, on the device while modules use them.

Fetches what is needed, prefetches what the trace has next, and evicts what is needed last. What to
prefetch and evict is decided by `ResidentSet`; how bytes move is the Mover's.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch

from infinity_engine.errors import CapacityError, TraceMismatch, TransferError
from infinity_engine.kept_errors import kept, raise_any
from infinity_engine.lanes.lanes import Lanes
from infinity_engine.lanes.meter import Cargo, Wait
from infinity_engine.machine.capacity import free_for_copies
from infinity_engine.memory import Lease, PinnedPool, Views
from infinity_engine.parameters.deferred import DeferredUpdate
from infinity_engine.parameters.parameters import ModelParameter, TrainedParameter
from infinity_engine.parameters.providing import WorkBeside, stay_absent
from infinity_engine.parameters.resident import ResidentParameters
from infinity_engine.parameters.updated_pieces import Fetched, UpdatedPieces
from infinity_engine.plan import Tier
from infinity_engine.plan.ops import Lane
from infinity_engine.residence import Mover, ShardRecord, Source
from infinity_engine.schedule import ResidentSet, Use
from infinity_engine.schedule.prefetch import LOOK_AHEAD
from infinity_engine.storage import Place, SwapFile, Transfer

__all__ = ["ParameterFetcher"]


class ParameterFetcher(ResidentParameters[Fetched]):
    """Fetches those of `parameters` that have a record in `records`, by number, to the device.

    Keeps `limit` bytes resident, views of evicted ones included; more only as long as more is in
    use and the device has it. Other users of the device's memory get what is idle. What comes from
    `swap` to a device with memory of its own goes through the pool `passing`. `beside` goes on
    whenever modules need something.
    """

    def __init__(
        self,
        parameters: Sequence[ModelParameter],
        records: Mapping[int, ShardRecord],
        lanes: Lanes,
        limit: int,
        *,
        swap: SwapFile | None,
        passing: PinnedPool | None,
        beside: WorkBeside,
    ) -> None:
        fetched = {known.number: known for known in parameters if known.number in records}
        nbytes = {number: record.nbytes for number, record in records.items()}
        resident = ResidentSet[Fetched](nbytes, limit, beside=lanes.device.kept_bytes)
        super().__init__(fetched, resident, lanes, lanes.device)
        self._passing = passing
        self._records = records
        self._mover = Mover(
            lanes.accelerator, lanes.host if passing is None else passing, lanes.device, swap
        )
        self._homes = {number: record.home() for number, record in records.items()}
        # Where fetching brings them: one memory is called HOST.
        self._there = Tier.HOST if lanes.accelerator.unified else Tier.DEVICE
        self._pieces = UpdatedPieces(
            fetched,
            records,
            resident,
            lanes,
            self._mover,
            collects=self._there is Tier.HOST,
        )
        self._beside = beside
        # Last: from here on leases that have no room may ask `evict_one`.
        lanes.device.attach(self)

    # --- what modules need ------------------------------------------------------------------------

    def need(self, use: Use) -> None:
        """Have the parameters of `use` resident and shown, and prefetch what comes next.

        Raises:
            CapacityError: they and what is held do not fit into the budget together.
            RuntimeError: code outside of the engine has changed a parameter that has to be evicted,
                or an update that was deferred has failed.
            TransferError: one could not be fetched; it can be asked for again.
        """
        self.resident.record_use(use)
        # What is held already was counted when it was first needed.
        fresh = [number for number in use.parameters if number not in self.resident.held]
        # Before anything is brought: making room for one must not evict another of them.
        self.resident.hold(use.parameters)
        try:
            self._beside.go_on()
            self._pieces.make(use.parameters)
            for number in fresh:
                if self._homes[number] is Tier.NVME:
                    # In memory since another use, or read for this one.
                    found = number in self.resident and self.resident[number].needed
                    nbytes = self._records[number].nbytes
                    self._lanes.meter.count_need(Cargo.PARAMETERS, nbytes, found=found)
            self._provide(use)
            for number in use.parameters:
                self.resident[number].note_need()
            self._prefetch()
        finally:
            self.resident.let_go(use.parameters)

    def begin_pass(self) -> None:
        """Note that the outermost call of a module begins."""
        self.resident.begin_pass()

    def end_pass(self) -> None:
        """Prefetch what this call, which no backward follows, needs first when it comes again."""
        self.resident.end_pass()
        self._prefetch()

    def version_of(self, number: int) -> int:
        """Return how often a parameter's values were changed.

        The backward of an earlier forward would need other values.
        """
        return self._records[number].version

    # --- what the device's memory asks ------------------------------------------------------------

    def evict_one(self) -> bool:
        """Evict what is needed last, for a lease that has no room; tell whether that frees some."""
        # One byte more than can ever be free, so something leaves whatever is free.
        for number in self.resident.evictions(self.resident.limit + 1):
            self._evict(number)
            return True
        viewed = self._lanes.device.kept_bytes()
        # The last resort: cycles of the caller's own may have views. The engine makes none.
        gc.collect()
        return self._lanes.device.kept_bytes() < viewed

    # --- steps ------------------------------------------------------------------------------------

    def give_up(self) -> None:
        """Evict everything: an update is about to change the values at home, and wants the memory.

        Raises:
            RuntimeError: code outside of the engine has changed a parameter, or it is held.
        """
        if not self.resident.held:
            self._pieces.follow_update(None)  # an update that has failed is begun anew
        self._evict_all()
        for number, record in self._records.items():
            if isinstance(self._parameters[number], TrainedParameter):
                # Graphs that were made so far see by the version that these values are gone.
                record.changed()

    def follow_update(self, update: DeferredUpdate | None) -> None:
        """Fetch nothing from here on that this update has not made yet; None: all of it is made."""
        self._pieces.follow_update(update)

    def receive(self, number: int, start: int, values: torch.Tensor) -> None:
        """Copy a piece of a parameter's new values, if there is room until it is needed.

        Nothing reads it back then. Its first byte is `start`.
        """
        if number not in self._pieces:
            self._expect(number)
        self._pieces.receive(number, start, values)

    def moved(self, places: Mapping[int, Place]) -> None:
        """Note where the current values of these rest now; none of them is resident."""
        for number, place in places.items():
            self._records[number].arrived(Tier.NVME, place)

    def changed(self, numbers: Iterable[int]) -> None:
        """Note that these have other values at home now."""
        for number in numbers:
            if number in self._records:
                self._records[number].changed()

    def write_home(self, number: int) -> None:
        """Bring the values home that code of the caller wrote into a parameter that is shown."""
        if number not in self._records:  # it has no elements
            return
        record = self._records[number]
        # A record cannot change while its transfer is under way.
        self.resident[number].transfer.result()
        record.changed()
        transfer = self._mover.move(record, self._homes[number], source=Source.KEPT)
        self._count(
            Lane.D2H if self._homes[number] is Tier.HOST else Lane.NVME_WRITE, number, transfer
        )
        transfer.result()
        # No bytes move here: the values are there already.
        self._mover.move(record, self._there, source=Source.KEPT).result()
        # The write passed the host and left a copy there.
        if self._homes[number] is Tier.NVME and self._there is Tier.DEVICE:
            self._mover.release(record, Tier.HOST)
        # The write is the engine's own from here on.
        self._parameters[number].note_values()

    def copy_of(self, number: int) -> torch.Tensor:
        """Return a flat copy, on the host, of the values at home. Modules do not see it.

        Raises:
            TransferError: they could not be read.
        """
        parameter = self._parameters[number]
        if not parameter.on_drives:
            return parameter.values.detach().cpu().clone()
        whole = torch.empty(parameter.numel, dtype=parameter.dtype)
        self._mover.read_from_drives(self._records[number], whole.view(torch.uint8).numpy().data)
        return whole

    def end_step(self) -> TraceMismatch | None:
        """Prefetch what the next step needs first; return where this one left the trace."""
        mismatch = self.resident.end_step()
        self._prefetch()
        return mismatch

    def close(self) -> None:
        """Give all values ordinary memory of their own, and all leases back.

        What the caller has changed without `gathered` stays. Where the machine has no memory for
        copies of all, or after `leave_absent`, parameters read as NaN; a warning says the former.

        Raises:
            TransferError: some could not be read from the drives, and are gone. All else is done.
        """
        # Waits for the reads of collected pieces: no module will get them.
        self._pieces.drop_all()
        self._mover.poll()
        restores = self._restores
        if restores:
            nbytes = sum(record.nbytes for record in self._records.values())
            free = free_for_copies()
            restores = nbytes <= free
            if not restores:
                warnings.warn(stay_absent(nbytes, free), RuntimeWarning, stacklevel=2)
        lost: TransferError | None = None
        for number, parameter in self._parameters.items():
            # What the caller has changed is what it wants to keep.
            values = None
            if restores and self.shown.is_as_shown(number):
                values = parameter.parameter.detach().cpu().clone()
            elif restores:
                try:
                    values = self.copy_of(number).view(parameter.parameter.shape)
                except TransferError as error:
                    lost = lost or kept(error)
            self.shown.end(number, values)
            # Its home is given back below.
            parameter.live_at(None)
        for number in list(self.resident):
            self._evict(number)
        for record in self._records.values():
            self._mover.forget(record)
        self._mover.drain()
        raise_any(lost)

    # --- several parameters -----------------------------------------------------------------------

    def _bring(self, name: str, numbers: Sequence[int]) -> None:
        # Hops that have become possible start first.
        self._mover.poll()
        for number in numbers:
            # It is needed now: all of it is read, not piece by piece.
            self._pieces.drop(number)
            self._make_room(self._records[number].nbytes)
            self._fetch(number, self._lease(number))

    def _prefetch(self) -> None:
        """Start to fetch what comes next.

        If the deferred update has failed, the module that needs what it has not made raises that,
        or the engine's next call, and not whichever module runs now.
        """
        update = self._pieces.update
        try:
            if update is None or not update.failed:
                self._prefetch_upcoming()
        except RuntimeError:
            if update is None or not update.failed:
                raise
            update.leave_untold()

    def _prefetch_upcoming(self) -> None:
        # Pieces that were written meanwhile can be read now.
        self._pieces.read_all()
        upcoming = self.resident.upcoming(LOOK_AHEAD)
        if not upcoming:
            return
        chosen = self.resident.choose(upcoming, is_unmade=self._pieces.is_unmade)
        for number in chosen.evicted:
            self._evict(number)
        for number in chosen.fetched:
            if self._pieces.is_unmade(number):
                self._expect(number)
                self._pieces.read(number)
            elif not self._prefetch_one(number):
                # Looked at again when there is room.
                self.resident.fetch_again(number)
                return

    def _prefetch_one(self, number: int) -> bool:
        """Start to fetch a parameter if there is room without evicting; tell whether so."""
        if not self._passes(number):
            return False
        # What its pieces hold is room for the whole.
        self._pieces.drop(number)
        parameter = self._parameters[number]
        lease = self._lanes.device.try_lease(
            self._records[number].nbytes,
            holder=f"parameter {parameter.name}",
            views=Views.KEEP,
        )
        if lease is not None:
            self._fetch(number, lease)
        return lease is not None

    def _expect(self, number: int) -> None:
        """Reserve memory for a parameter that the update is about to make, piece by piece.

        Not before what is needed sooner, and evicts for that only what is needed later.
        """
        if self._pieces.may_expect(number) and self.resident.may_reserve(number):
            for idle in self.resident.room_before(number):
                self._evict(idle)
            self._pieces.expect(number)

    # --- one parameter ----------------------------------------------------------------------------

    def _passes(self, number: int) -> bool:
        """Tell whether the host pool that reads go through has room for this one."""
        if self._passing is None or self._homes[number] is not Tier.NVME:
            return True
        self._passing.release_ended()
        # The largest run of free bytes counts, not their sum: a lease is one piece.
        return self._records[number].nbytes <= self._passing.stats().largest_free

    def _lease(self, number: int) -> Lease:
        try:
            return super()._lease(number)
        except CapacityError:
            if self._pieces.update is None:
                raise
            # Its staging sets may be in the way. Once it has ended, there is none any more.
            self._pieces.update.end()
        return self._lease(number)

    def _fetch(self, number: int, lease: Lease) -> None:
        # The mover closes the lease where the copy cannot begin or fails.
        record = self._records[number]
        if self._homes[number] is Tier.HOST:
            transfer = self._mover.upload(record, into=lease, source=Source.KEPT)
            self._count(Lane.H2D, number, transfer)
        # One that has ended may free the pool that reads go through.
        else:
            for other in list(self.resident):
                if self._passes(number):
                    break
                self._wait(self.resident[other])
            transfer = self._mover.move(record, self._there, into=lease)
            self._count(Lane.NVME_READ, number, transfer)
        # Only now: a move that could not begin leaves no member.
        self.resident.admit(number, Fetched(lease, transfer))

    def _count(self, lane: Lane, number: int, transfer: Transfer) -> None:
        self._lanes.meter.count_copy(
            lane,
            Cargo.PARAMETERS,
            self._records[number].nbytes,
            transfer.event,
            name="parameter",
            parameter=self._parameters[number].name,
        )

    def _arrived(self, number: int) -> Lease:
        """Wait for a parameter, or let the device's streams wait for it.

        One that could not come is as if it had not been asked for.
        """
        fetched, accelerator = self.resident[number], self._lanes.accelerator
        # A move from drives has an event only once its last hop is under way.
        event = fetched.transfer.event if self._homes[number] is Tier.HOST else None
        if event is not None and accelerator.torch_device.type != "cpu":
            accelerator.wait_for(self._lanes.compute, event)
            return fetched.lease
        self._wait(fetched)
        try:
            fetched.transfer.result()
        except Exception:
            # What was behind it on the link has failed with it.
            for other in [other for other in self.resident if other not in self.shown]:
                self._wait(self.resident[other])
                if self.resident[other].transfer.error is not None:
                    self._forget(other)
            raise
        return fetched.lease

    def _wait(self, fetched: Fetched) -> None:
        if not fetched.transfer.poll():
            with self._lanes.meter.timed_wait(Wait.PARAMETERS):
                fetched.transfer.wait()

    def _evict(self, number: int) -> None:
        if number in self._pieces:
            self._pieces.drop(number)
            return
        fetched = self.resident[number]
        self.shown.hide(number)
        # The transfer may still be writing to the memory.
        self._wait(fetched)
        if self._forget(number) is None:
            # Kernels that were given views may still run: the memory waits for them.
            fetched.lease.until(self.last_use())
            # Down to a copy that is current: no bytes move.
            self._mover.move(self._records[number], self._homes[number]).result()

    def _forget(self, number: int) -> BaseException | None:
        """Remove a member with a transfer that has ended; return the error that stopped it."""
        # Taken: else the mover keeps an error that nothing asks for.
        return self.resident.remove(number).transfer.take_error()
