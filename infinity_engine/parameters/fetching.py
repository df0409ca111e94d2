"""`ParameterFetcher`: parameters that are at home on the host or on drives, and which of them are
on the device.

Fetches what is asked for, ahead what the trace has next, and gives up what is needed last. What it
has fetched it shows to modules as the parameter's own data; else they see NaN. Decides nothing
about the order: trace and prefetch do.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch

from infinity_engine.errors import CapacityError, TraceMismatch, TransferError
from infinity_engine.kept_errors import again, kept
from infinity_engine.lanes.lanes import Lanes
from infinity_engine.lanes.meter import Cargo, Wait
from infinity_engine.machine.capacity import free_for_copies
from infinity_engine.memory import Event, Lease, PinnedPool, Views
from infinity_engine.parameters.deferred import DeferredUpdate
from infinity_engine.parameters.parameters import ModelParameter, TrainedParameter, absent
from infinity_engine.parameters.providing import FetchingStats, stay_absent
from infinity_engine.plan import Tier
from infinity_engine.plan.ops import Lane
from infinity_engine.schedule import NEVER, TraceFollower, Use, choose_fetches, farthest_first
from infinity_engine.storage import Hop, Hops, Place, SwapFile, Transfer
from infinity_engine.tiering import Mover, ShardRecord, Source

__all__ = ["ParameterFetcher"]

_LOOK_AHEAD = 32  # uses


@dataclass(frozen=True, slots=True)
class _Here:
    """A parameter that is on the device, or on its way there."""

    lease: Lease
    transfer: Transfer


@dataclass(slots=True)
class _Coming:
    """A parameter whose new values come piece by piece: some are read, others a deferred update is
    about to make.
    """

    lease: Lease
    missing: dict[int, int]  # the first byte of each piece that has not come, and its bytes
    reading: list[Hop] = field(default_factory=list)


class ParameterFetcher:
    """Fetches `parameters`, whose homes `records` has by their numbers, to the device.

    Keeps `limit` bytes there, of what is here and of what views have left of what was; more only as
    long as more is in use, and the device has it. Whoever else needs the device's memory gets what
    is not in use. What comes from `swap` to a device with memory of its own passes the pool
    `passing`, as much at a time as that has room for.
    """

    def __init__(
        self,
        parameters: Sequence[ModelParameter],
        records: Mapping[int, ShardRecord],
        lanes: Lanes,
        limit: int,
        *,
        swap: SwapFile | None = None,
        passing: PinnedPool | None = None,
    ) -> None:
        self.limit = limit
        self._passing = passing
        self._parameters = {each.number: each for each in parameters}
        self._records = records
        self._lanes = lanes
        self._mover = Mover(
            lanes.accelerator, lanes.host if passing is None else passing, lanes.device, swap
        )
        self._homes = {number: record.home() for number, record in records.items()}
        # what fetching brings them to
        self._there = Tier.HOST if lanes.accelerator.unified else Tier.DEVICE
        self._nbytes = {number: record.nbytes for number, record in records.items()}
        self._trace = TraceFollower()
        self._here: dict[int, _Here] = {}
        self._shown: dict[int, int] = {}  # addresses, by parameter
        self._by_address: dict[int, int] = {}
        self._holders: dict[int, int] = {}  # how many there are of each
        self._taken = 0
        self._update: DeferredUpdate | None = None
        self._beside: Callable[[], None] | None = None
        self._coming: dict[int, _Coming] = {}
        self._restores = True
        self._unused: set[int] = set()  # what was fetched and has not been needed since
        # all that is needed before this position of the trace is here, or on its way
        self._ahead = 0
        self._fetched = self._fetched_bytes = self._in_time = self._late = 0
        where = lanes.accelerator.torch_device
        self._absent = {}
        for number in records:
            each = self._parameters[number]
            self._absent[number] = absent(each.dtype, each.parameter.shape, where)
            each.show(self._absent[number])
            each.note_values()
        lanes.device.attach(self)

    # --- what modules need ------------------------------------------------------------------------

    def need(self, use: Use) -> None:
        """Let the parameters of `use` be on the device and shown, and fetch ahead what comes next.

        Raises:
            CapacityError: they and what is held do not fit into the limit together.
            RuntimeError: a parameter that has to make room was changed by somebody else, or an
                update that was deferred has failed.
            TransferError: one could not be fetched; it can be asked for again.
        """
        if not self._trace.saw(use):
            self._ahead = self._trace.at
        fresh = [number for number in use.parameters if number not in self._holders]
        self.hold(use.parameters)
        try:
            if self._beside is not None:
                self._beside()
            if self._update is not None:
                self._make(self._update, use.parameters)
            self._count_needs(fresh)
            self._provide(use.parameters)
            self._unused.difference_update(use.parameters)
            self._fetch_ahead()
        finally:
            self.let_go(use.parameters)

    def _make(self, update: DeferredUpdate, numbers: Iterable[int]) -> None:
        """Go on with an update until these are here, or at home."""
        update.go_on()
        update.reach(number for number in numbers if number not in self._here)
        self._complete_all()
        update.make(number for number in numbers if number not in self._here)
        self._complete_all()

    def hold(self, numbers: Iterable[int]) -> None:
        """Keep parameters on the device, once they are there, until they are let go as often."""
        for number in numbers:
            self._holders[number] = self._holders.get(number, 0) + 1

    def let_go(self, numbers: Iterable[int]) -> None:
        """Let go of parameters that were held."""
        for number in numbers:
            self._holders[number] -= 1
            if not self._holders[number]:
                del self._holders[number]

    @contextmanager
    def gathered(self, numbers: Iterable[int]) -> Iterator[None]:
        """Have these on the device, shown and held, within the body.

        What the trace says is not touched.
        """
        # not those without elements
        numbers = [number for number in numbers if number in self._records]
        self.hold(numbers)
        try:
            self._provide(numbers)
            yield
        finally:
            self.let_go(numbers)

    def is_shown(self, number: int) -> bool:
        """Tell whether modules see its values."""
        return number in self._shown

    def number_at(self, address: int) -> int | None:
        """Return which parameter's values begin at this address; None where no fetched one's do."""
        return self._by_address.get(address)

    def fetched(self, number: int) -> torch.Tensor:
        """Return the values of a parameter that is shown.

        Whoever has views of them keeps their memory.
        """
        return self._parameters[number].parameter.data

    def version_of(self, number: int) -> int:
        """Return how often the values of a parameter were changed: what was saved before is of
        another version.
        """
        return self._records[number].version

    # --- what the device's memory asks ------------------------------------------------------------

    def give(self) -> bool:
        """Give up what is needed last, for somebody who has no room; tell whether there was
        something to give.
        """
        idle = farthest_first(self._idle(), self._trace.next_use)
        if idle:
            self._release(idle[0])
            return True
        if self._coming:
            self._drop(next(reversed(self._coming)))
            return True
        viewed = self._lanes.device.kept_bytes
        # the last resort: cycles of the caller's own may have views. The engine makes none
        gc.collect()
        return self._lanes.device.kept_bytes < viewed

    def used(self) -> Event:
        """Return the end of all that was submitted so far and may use views of parameters."""
        return self._lanes.accelerator.record(self._lanes.compute)

    # --- steps ------------------------------------------------------------------------------------

    def give_up(self) -> None:
        """Release everything: an update is about to change the values at home, and wants the
        device's memory.

        Raises:
            RuntimeError: a parameter was changed by somebody else, or is held.
        """
        if self._holders:
            names = ", ".join(self._parameters[number].name for number in self._holders)
            raise RuntimeError(
                f"engine.step() updates {names}, which somebody still uses: call it outside of "
                "`with engine.gathered(...)`"
            )
        self._drop_all()
        self._update = None  # one that has failed is begun anew
        for number in list(self._here):
            self._release(number)
        for number, record in self._records.items():
            if isinstance(self._parameters[number], TrainedParameter):
                record.changed()

    def follow(self, update: DeferredUpdate | None) -> None:
        """Fetch nothing from here on that this update has not made yet; None: all of it is made."""
        self._drop_all()
        self._update = update

    def call_beside(self, go_on: Callable[[], None]) -> None:
        """Give somebody a turn whenever a module needs parameters, who waits for nothing."""
        self._beside = go_on

    def receive(self, number: int, start: int, values: torch.Tensor) -> None:
        """Copy a piece of the new values of a parameter, so that it need not be read, if there is
        room until its use.

        Its first byte is `start`. What was made before is read, and the rest is expected.
        """
        if number not in self._coming:
            self._expect(number)
        coming = self._coming.get(number)
        if coming is not None and start in coming.missing:
            coming.lease.flat()[start : start + values.numel()].copy_(values)
            del coming.missing[start]
            if not coming.missing:
                self._bring(number, coming)

    def moved(self, places: Mapping[int, Place]) -> None:
        """Note that the current values of these rest at other places; nothing of them is here."""
        for number, place in places.items():
            self._records[number].arrived(Tier.NVME, place)

    def changed(self, numbers: Iterable[int]) -> None:
        """Note that the values of these are others now, at home."""
        for number in numbers:
            if number in self._records:
                self._records[number].changed()

    def write_home(self, number: int) -> None:
        """Take what somebody wrote into a parameter that is shown home, as its values."""
        if number not in self._records:  # it has no elements
            return
        record, here = self._records[number], self._here[number]
        here.transfer.result()
        record.changed()
        transfer = self._mover.move(record, self._homes[number], source=Source.KEPT)
        self._count(
            Lane.D2H if self._homes[number] is Tier.HOST else Lane.NVME_WRITE, number, transfer
        )
        transfer.result()
        # no bytes move: it is there
        self._mover.move(record, self._there, source=Source.KEPT).result()
        if self._homes[number] is Tier.NVME and self._there is Tier.DEVICE:
            self._mover.release(record, Tier.HOST)
        self._parameters[number].note_values()

    def copy_of(self, number: int) -> torch.Tensor:
        """Return a flat copy, on the host, of the values at home. They are not shown for that.

        Raises:
            TransferError: they could not be read.
        """
        each = self._parameters[number]
        if not each.on_drives:
            return each.values.detach().cpu().clone()
        whole = torch.empty(each.numel, dtype=each.dtype)
        self._mover.read_home(self._records[number], whole.view(torch.uint8).numpy().data)
        return whole

    def end_step(self) -> TraceMismatch | None:
        """Begin to fetch what the next step needs first; return where this one went another way
        than the one before.
        """
        mismatch = self._trace.end_step()
        self._ahead = 0
        self._fetch_ahead()
        return mismatch

    @property
    def stats(self) -> FetchingStats:
        """What was fetched."""
        return FetchingStats(
            fetched=self._fetched,
            fetched_bytes=self._fetched_bytes,
            in_time=self._in_time,
            late=self._late,
        )

    def leave_absent(self) -> None:
        """Let parameters show no values after `close`, which then reads and copies nothing."""
        self._restores = False

    def close(self) -> None:
        """Give all values their own ordinary memory, and all leases back.

        What the caller has changed, unasked, stays.

        They get it only if there is memory for all of them: else they stay absent, and a warning
        says so.

        Raises:
            TransferError: some could not be read from the drives, and are gone. All else is done.
        """
        self._drop_all()
        self._mover.poll()
        restores = self._restores and self._there_is_room_for_all()
        lost: TransferError | None = None
        for number in self._records:
            each = self._parameters[number]
            is_shown = self._shown.pop(number, None) == each.parameter.data_ptr()
            if not restores:
                each.show(self._absent[number])
            elif is_shown:
                each.show(each.parameter.detach().cpu().clone())
            elif not each.on_drives:
                each.show(each.values.clone().view(each.parameter.shape))
            else:
                try:
                    each.show(self.copy_of(number).view(each.parameter.shape))
                except TransferError as error:
                    lost = lost or kept(error)
            each.live_at(None)
        self._by_address.clear()
        for number in list(self._here):
            self._release(number)
        for record in self._records.values():
            self._mover.forget(record)
        self._mover.drain()
        if lost is not None:
            raise again(lost)

    def _there_is_room_for_all(self) -> bool:
        """Tell whether the host, or the memory group of this process, has memory for copies of all;
        warn where not.
        """
        nbytes, free = sum(self._nbytes.values()), free_for_copies()
        if nbytes > free:
            warnings.warn(stay_absent(nbytes, free), RuntimeWarning, stacklevel=2)
        return nbytes <= free

    def _count_needs(self, numbers: Iterable[int]) -> None:
        """Count parameters on the drives that somebody begins to need: left here by another use, or
        read for this.
        """
        for number in numbers:
            if self._homes[number] is Tier.NVME:
                found = number in self._here and number not in self._unused
                self._lanes.meter.needs(Cargo.PARAMETERS, self._nbytes[number], found=found)

    # --- several parameters -----------------------------------------------------------------------

    def _provide(self, numbers: Iterable[int]) -> None:
        """Let parameters that are held be here and shown."""
        self._mover.poll()
        missing = dict.fromkeys(number for number in numbers if number not in self._shown)
        for number in missing:
            if number in self._here:
                self._in_time += 1
            else:
                self._late += 1
                self._drop(number)
                self._make_room(number)
                self._fetch(number, self._lease(number))
        for number in missing:
            self._show(number)

    def _unmade(self, upcoming: Iterable[tuple[int, Use]]) -> Collection[int]:
        """Return what of the parameters of these uses a deferred update has not made yet, and is
        not here.
        """
        update = self._update
        if update is None:
            return ()
        numbers = {number for _, use in upcoming for number in use.parameters}
        return {
            number for number in numbers if number not in self._here and not update.has_made(number)
        }

    def _fetch_ahead(self) -> None:
        """Begin to fetch what comes next.

        Who needs what an update has failed to make is told that, and nobody here.
        """
        try:
            if self._update is None or not self._update.failed:
                self._fetch_upcoming()
        except RuntimeError:
            if self._update is None or not self._update.failed:
                raise

    def _fetch_upcoming(self) -> None:
        self._complete_all()
        at = self._trace.at
        start = max(self._ahead, at)
        upcoming = self._trace.upcoming(start, at + _LOOK_AHEAD)
        if not upcoming:
            return
        unmade = self._unmade(upcoming)
        chosen = choose_fetches(
            upcoming,
            nbytes=self._nbytes,
            cached=self._here.keys() | self._coming.keys(),
            unmade=unmade,
            held=self._holders.keys() | self._coming.keys(),
            free=self._free,
            next_use=self._trace.next_use,
        )
        for number in chosen.evicted:
            self._release(number)
        self._ahead = start + chosen.provided
        for number in chosen.fetched:
            if number in unmade:
                self._expect(number)
                self._complete(number)
                continue
            if not self._passes(number):
                self._ahead = min(self._ahead, self._trace.next_use(number))
                return
            self._drop(number)
            lease = self._lanes.device.spare(
                self._nbytes[number], holder=self._holder(number), views=Views.KEEP
            )
            if lease is None:  # others have taken it, and nothing has to be ahead
                self._ahead = min(self._ahead, self._trace.next_use(number))
                return
            self._fetch(number, lease)

    # --- what an update makes ---------------------------------------------------------------------

    def _expect(self, number: int) -> None:
        """Have memory for a parameter of which a deferred update is about to make pieces, if that
        takes none's turn.
        """
        update, at = self._update, self._trace.next_use(number)
        known = number in self._records and number not in self._here and self._there is Tier.HOST
        if update is None or not known or self._homes[number] is not Tier.NVME or at == NEVER:
            return
        nbytes = self._nbytes[number]
        for idle in farthest_first(self._idle(), self._trace.next_use):
            if nbytes <= self._free or self._trace.next_use(idle) <= at:
                break
            self._release(idle)
        if nbytes > self._free:
            return
        lease = self._lanes.device.spare(nbytes, holder=self._holder(number), views=Views.KEEP)
        if lease is None:
            return
        self._taken += nbytes
        width = self._parameters[number].dtype.itemsize
        pieces = {width * part.first_element: width * part.numel for part in update.parts(number)}
        self._coming[number] = _Coming(lease, pieces)

    def _complete_all(self) -> None:
        """Begin to read the pieces that are at home of all that is expected in pieces."""
        for number in sorted(self._coming, key=self._trace.next_use):
            self._complete(number)

    def _complete(self, number: int) -> None:
        """Begin to read the pieces that are at home of what is expected in pieces; nothing where it
        is not.
        """
        update, coming = self._update, self._coming.get(number)
        if update is None or coming is None:
            return
        width = self._parameters[number].dtype.itemsize
        unmade = {width * part.first_element for part in update.missing(number)}
        memory = coming.lease.flat().numpy().data
        for start, nbytes in list(coming.missing.items()):
            if start not in unmade:
                self._read_piece(number, start, memory[start : start + nbytes], coming)
                del coming.missing[start]
        if not coming.missing:
            self._bring(number, coming)

    def _read_piece(self, number: int, start: int, memory: memoryview, coming: _Coming) -> None:
        coming.reading.append(self._mover.read_part(self._records[number], start, memory))
        name = self._parameters[number].name
        self._lanes.meter.copies(
            Lane.NVME_READ, Cargo.PARAMETERS, memory.nbytes, None, name="parameter", parameter=name
        )

    def _bring(self, number: int, coming: _Coming) -> None:
        """Let a parameter be here all of whose pieces have come, or are being read."""
        transfer = self._mover.bring(
            self._records[number], into=coming.lease, hop=Hops(coming.reading)
        )
        self._here[number] = _Here(coming.lease, transfer)
        del self._coming[number]
        if coming.reading:
            self._unused.add(number)

    def _drop(self, number: int) -> None:
        """Give the memory of a parameter back of which pieces are expected; nothing where none
        are.
        """
        coming = self._coming.get(number)
        if coming is not None:
            with suppress(TransferError):
                Hops(coming.reading).wait()
            coming.lease.close()
            del self._coming[number]
            self._taken -= self._nbytes[number]
            self._ahead = min(self._ahead, self._trace.next_use(number))

    def _drop_all(self) -> None:
        for number in list(self._coming):
            self._drop(number)

    # --- one parameter ----------------------------------------------------------------------------

    @property
    def _free(self) -> int:
        return self.limit - self._taken - self._lanes.device.kept_bytes

    def _make_room(self, number: int) -> None:
        """Let the limit have room for a parameter that is needed now, as far as there is something
        to give up.
        """
        nbytes = self._nbytes[number]
        if nbytes > self._free:
            for idle in farthest_first(self._idle(), self._trace.next_use):
                self._release(idle)
                if nbytes <= self._free:
                    return
            for coming in list(self._coming)[::-1]:
                self._drop(coming)
                if nbytes <= self._free:
                    return

    def _passes(self, number: int) -> bool:
        """Tell whether there is room on the way for a parameter that passes the host's memory."""
        if self._passing is None or self._homes[number] is not Tier.NVME:
            return True
        self._passing.settle()
        return self._nbytes[number] <= self._passing.stats().largest_free

    def _let_pass(self, number: int) -> None:
        """Wait until there is."""
        for here in list(self._here.values()):
            if self._passes(number):
                return
            self._wait(here)

    def _idle(self) -> list[int]:
        return [number for number in self._here if number not in self._holders]

    def _lease(self, number: int) -> Lease:
        """Return memory for a parameter that is needed now."""
        try:
            return self._lanes.device.lease(
                self._nbytes[number], holder=self._holder(number), views=Views.KEEP
            )
        except CapacityError as error:
            if self._update is not None:  # whose staging sets may be in the way
                self._update.end()
                return self._lease(number)
            raise CapacityError(
                tier=error.tier,
                asked=error.asked,
                free=error.free,
                limit=error.limit,
                holders=error.holders,
                change=f"raise the budget's {self._lanes.device.reservation.tier.name.lower()}: "
                f"{self._parameters[number].name} is needed while these are. What a module uses "
                "stays until "
                "it returns, and what is read outside of modules until engine.step()",
            ) from None

    def _holder(self, number: int) -> str:
        return f"parameter {self._parameters[number].name}"

    def _fetch(self, number: int, lease: Lease) -> None:
        # The mover closes the lease where the copy cannot begin or fails.
        record = self._records[number]
        if self._homes[number] is Tier.HOST:
            transfer = self._mover.upload(record, into=lease, source=Source.KEPT)
            self._count(Lane.H2D, number, transfer)
        else:
            self._let_pass(number)
            transfer = self._mover.move(record, self._there, into=lease)
            self._count(Lane.NVME_READ, number, transfer)
        self._here[number] = _Here(lease, transfer)
        self._unused.add(number)
        self._taken += self._nbytes[number]
        self._fetched += 1
        self._fetched_bytes += self._nbytes[number]

    def _count(self, lane: Lane, number: int, transfer: Transfer) -> None:
        nbytes, name = self._nbytes[number], self._parameters[number].name
        self._lanes.meter.copies(
            lane, Cargo.PARAMETERS, nbytes, transfer.event, name="parameter", parameter=name
        )

    def _show(self, number: int) -> None:
        here, each = self._here[number], self._parameters[number]
        each.check_untouched()
        event = here.transfer.event if self._homes[number] is Tier.HOST else None
        if event is not None and self._lanes.accelerator.torch_device.type != "cpu":
            self._lanes.accelerator.wait_for(self._lanes.compute, event)
        else:
            self._arrived(here)
        each.show(here.lease.tensor(each.dtype, each.parameter.shape))
        self._shown[number] = address = each.parameter.data_ptr()
        self._by_address[address] = number

    def _arrived(self, here: _Here) -> None:
        """Wait until a parameter is here; one that could not come is as if it had not been asked
        for.
        """
        self._wait(here)
        try:
            here.transfer.result()
        except Exception:
            # What was behind it on the link failed with it.
            for number in [number for number in self._here if number not in self._shown]:
                self._wait(self._here[number])
                if self._here[number].transfer.error is not None:
                    self._forget(number)
            raise

    def _wait(self, here: _Here) -> None:
        if not here.transfer.poll():
            with self._lanes.meter.waits(Wait.PARAMETERS):
                here.transfer.wait()

    def _release(self, number: int) -> None:
        here = self._here[number]
        if number in self._shown:
            each = self._parameters[number]
            each.check_untouched()
            each.show(self._absent[number])
            del self._by_address[self._shown.pop(number)]
        self._wait(here)
        self._forget(number)
        if here.transfer.error is None:
            here.lease.until(self.used())
            self._mover.move(self._records[number], self._homes[number]).result()

    def _forget(self, number: int) -> None:
        """Note that a parameter, whose transfer has ended, is not here any more."""
        here = self._here.pop(number)
        self._unused.discard(number)
        self._taken -= self._nbytes[number]
        self._ahead = min(self._ahead, self._trace.next_use(number))
        with suppress(Exception):
            here.transfer.result()  # else the mover keeps what nobody was told
