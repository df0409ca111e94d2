"""`ParameterFetcher`: parameters that are at home on the host, and which of them are on the device.

Fetches what is asked for, ahead what the trace has next, and gives up what is needed last. What it has fetched it shows
to modules as the parameter's own data; else they see NaN. Decides nothing about the order: trace and prefetch do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from infinity_engine.engine.lanes import Lanes
from infinity_engine.engine.meter import Cargo, Wait
from infinity_engine.engine.parameters import ModelParameter
from infinity_engine.errors import CapacityError, TraceMismatch
from infinity_engine.memory import Lease, Views
from infinity_engine.plan import Tier
from infinity_engine.plan.ops import Lane
from infinity_engine.schedule import TraceFollower, Use, choose_fetches, farthest_first
from infinity_engine.storage import Transfer
from infinity_engine.tiering import Mover, ShardRecord, Source

__all__ = ["FetchingStats", "ParameterFetcher"]

_LOOK_AHEAD = 32  # uses


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchingStats:
    """What was fetched since the beginning: in time is what was under way or there when it was asked for."""

    fetched: int
    fetched_bytes: int
    in_time: int
    late: int


@dataclass(frozen=True, slots=True)
class _Here:
    """A parameter that is on the device, or on its way there."""

    lease: Lease
    transfer: Transfer


class ParameterFetcher:
    """Keeps at most `limit` bytes of the device for `parameters`, which `records` has by their numbers."""

    def __init__(
        self, parameters: Sequence[ModelParameter], records: Mapping[int, ShardRecord], lanes: Lanes, limit: int
    ) -> None:
        self.limit = limit
        self._parameters = {each.number: each for each in parameters}
        self._records = records
        self._lanes = lanes
        self._mover = Mover(lanes.accelerator, lanes.host, lanes.device)
        self._nbytes = {number: record.nbytes for number, record in records.items()}
        self._trace = TraceFollower()
        self._here: dict[int, _Here] = {}
        self._shown: dict[int, int] = {}  # addresses, by parameter
        self._by_address: dict[int, int] = {}
        self._holders: Counter[int] = Counter()
        self._taken = 0
        self._fetched = self._fetched_bytes = self._in_time = self._late = 0
        self.version = 0
        """How often all values were given up, as updates do: what was saved before is of another version."""
        self._absent = {number: _absent(each) for number, each in self._parameters.items()}
        for number, each in self._parameters.items():
            each.show(self._absent[number])
            each.note_values()

    # --- what modules need ----------------------------------------------------------------------------------------

    def need(self, use: Use) -> None:
        """Let the parameters of `use` be on the device and shown, and fetch ahead what comes next.

        Raises:
            CapacityError: they and what is held do not fit into the limit together.
            RuntimeError: a parameter that has to make room was changed by somebody else.
            TransferError: one could not be fetched; it can be asked for again.
        """
        self._trace.saw(use)
        with self.gathered(use.parameters):
            self._fetch_ahead()

    def hold(self, numbers: Iterable[int]) -> None:
        """Keep parameters on the device, once they are there, until they are let go as often."""
        self._holders.update(numbers)

    def let_go(self, numbers: Iterable[int]) -> None:
        """Let go of parameters that were held."""
        for number in numbers:
            self._holders[number] -= 1
            if not self._holders[number]:
                del self._holders[number]

    @contextmanager
    def gathered(self, numbers: Iterable[int]) -> Iterator[None]:
        """Have these on the device, shown and held, within the body. What the trace says is not touched."""
        numbers = [number for number in numbers if number in self._records]  # not those without elements
        self.hold(numbers)
        try:
            for number in numbers:
                self._bring(number)
            for number in numbers:
                self._show(number)
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
        """Return the flat bytes of a parameter that is shown."""
        return self._here[number].lease.flat()

    # --- steps ----------------------------------------------------------------------------------------------------

    def give_up(self) -> None:
        """Release everything: the values at home are about to change, and the device's memory is wanted.

        Raises:
            RuntimeError: a parameter was changed by somebody else, or is held.
        """
        for number in list(self._here):
            self._release(number)
        self.version += 1

    def changed(self, numbers: Iterable[int]) -> None:
        """Note that the values of these are others now, at home."""
        for number in numbers:
            if number in self._records:
                self._records[number].changed()

    def write_home(self, number: int) -> None:
        """Take what somebody wrote into a parameter that is shown home, as its values."""
        if number not in self._here:  # it has no elements
            return
        record, here = self._records[number], self._here[number]
        here.transfer.result()
        record.changed()
        transfer = self._mover.download(record, source=Source.KEPT)
        self._count(Lane.D2H, number, transfer)
        transfer.result()
        self._parameters[number].note_values()

    def end_step(self) -> TraceMismatch | None:
        """Begin to fetch what the next step needs first; return where this one went another way than the one before."""
        mismatch = self._trace.end_step()
        self._fetch_ahead()
        return mismatch

    @property
    def stats(self) -> FetchingStats:
        """What was fetched."""
        return FetchingStats(
            fetched=self._fetched, fetched_bytes=self._fetched_bytes, in_time=self._in_time, late=self._late
        )

    def close(self) -> None:
        """Give all values their own ordinary memory, and all leases back."""
        for number in list(self._here):
            self._release(number, checked=False)
        for number, record in self._records.items():
            each = self._parameters[number]
            each.show(each.values.clone().view(each.parameter.shape))
            each.live_at(None)
            self._mover.forget(record)
        self._mover.drain()

    # --- one parameter --------------------------------------------------------------------------------------------

    def _bring(self, number: int) -> None:
        """Begin to fetch a parameter that is not here."""
        if number in self._here:
            self._in_time += number not in self._shown
            return
        self._late += 1
        self._make_room(self._nbytes[number] - (self.limit - self._taken), number)
        self._fetch(number)

    def _make_room(self, short: int, number: int) -> None:
        for idle in farthest_first(self._idle(), self._trace.next_use):
            if short <= 0:
                return
            short -= self._nbytes[idle]
            self._release(idle)
        if short > 0:
            raise CapacityError(
                tier=Tier.DEVICE.name,
                asked=self._nbytes[number],
                free=self._nbytes[number] - short,
                limit=self.limit,
                holders=tuple(
                    (self._parameters[each].name, self._nbytes[each]) for each in self._holders if each in self._here
                ),
                change=f"raise the budget's device: {self._parameters[number].name} is needed while these are",
            )

    def _idle(self) -> list[int]:
        return [number for number in self._here if number not in self._holders]

    def _fetch(self, number: int) -> None:
        lease = self._lease(number)
        # The mover closes the lease where the copy cannot begin or fails.
        transfer = self._mover.upload(self._records[number], into=lease, source=Source.KEPT)
        self._count(Lane.H2D, number, transfer)
        self._here[number] = _Here(lease, transfer)
        self._taken += self._nbytes[number]
        self._fetched += 1
        self._fetched_bytes += self._nbytes[number]

    def _count(self, lane: Lane, number: int, transfer: Transfer) -> None:
        nbytes, name = self._nbytes[number], self._parameters[number].name
        self._lanes.meter.copies(lane, Cargo.PARAMETERS, nbytes, transfer.event, name="parameter", parameter=name)

    def _lease(self, number: int) -> Lease:
        while True:
            try:
                holder = f"parameter {self._parameters[number].name}"
                with self._lanes.meter.waits(Wait.PARAMETERS):  # until what was released has gone
                    return self._lanes.device.lease(self._nbytes[number], holder=holder, views=Views.KEEP)
            except CapacityError:
                # Views of what was released keep its memory; others may have none.
                idle = farthest_first(self._idle(), self._trace.next_use)
                if not idle:
                    raise
                self._release(idle[0])

    def _show(self, number: int) -> None:
        here = self._here.get(number)
        if here is None or number in self._shown:
            return
        event = here.transfer.event
        if event is not None and self._lanes.accelerator.torch_device.type != "cpu":
            self._lanes.accelerator.wait_for(self._lanes.compute, event)
        else:
            self._arrived(number, here)
        each = self._parameters[number]
        each.show(here.lease.tensor(each.values.dtype, each.parameter.shape))
        self._shown[number] = address = each.parameter.data_ptr()
        self._by_address[address] = number

    def _arrived(self, number: int, here: _Here) -> None:
        """Wait until a parameter is here; one that could not come is as if it had not been asked for."""
        try:
            with self._lanes.meter.waits(Wait.PARAMETERS):
                here.transfer.result()
        except BaseException:
            if here.transfer.done():
                del self._here[number]
                self._taken -= self._nbytes[number]
            raise

    def _release(self, number: int, *, checked: bool = True) -> None:
        here = self._here[number]
        each, record = self._parameters[number], self._records[number]
        if number in self._shown:
            if checked:
                each.check_untouched()
            each.show(self._absent[number])
            del self._by_address[self._shown.pop(number)]
        if not here.transfer.done():
            with self._lanes.meter.waits(Wait.PARAMETERS):
                here.transfer.wait()
        del self._here[number]
        self._taken -= self._nbytes[number]
        if here.transfer.error is None:
            here.lease.until(self._lanes.accelerator.record(self._lanes.compute))
            self._mover.move(record, Tier.HOST).result()

    def _fetch_ahead(self) -> None:
        chosen = choose_fetches(
            self._trace.upcoming(_LOOK_AHEAD),
            nbytes=self._nbytes,
            cached=self._here,
            held=self._holders,
            free=self.limit - self._taken,
            next_use=self._trace.next_use,
        )
        for number in chosen.evicted:
            self._release(number)
        for number in chosen.fetched:
            try:
                self._fetch(number)
            except CapacityError:  # what was released is kept by views: nothing has to be ahead
                return


def _absent(each: ModelParameter) -> torch.Tensor:
    """Return what modules see of a parameter that is not here: who reads it gets NaN, who writes to it an error."""
    dtype = each.values.dtype
    one = torch.full((), math.nan if dtype.is_floating_point else 0, dtype=dtype)
    return one.expand(each.parameter.shape)
