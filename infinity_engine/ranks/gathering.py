"""`ParameterGatherer`: parameters that are cut over the ranks, and which of them this rank has
whole.

Gathers what is asked for, ahead what the trace has next, and releases what is needed last. What is
here it shows to modules as the parameter's own data; else they see NaN. Shards are at home wherever
the fetcher below has them.

[Note: all ranks decide alike] A gather is a collective, so which ones are started, and in which
order, must be the same on all ranks. Everything here is decided by the order of uses, by whole
sizes and by a limit, which are the same; never by time, by what memory happens to be free, or by
what this rank's drives have got to.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from infinity_engine.errors import CapacityError, CollectiveError, TraceMismatch
from infinity_engine.kept_errors import again, kept
from infinity_engine.lanes.lanes import Lanes
from infinity_engine.lanes.meter import Wait
from infinity_engine.machine.capacity import free_for_copies
from infinity_engine.memory import DeviceMemory, Event, Lease, Views
from infinity_engine.parameters.deferred import DeferredUpdate
from infinity_engine.parameters.fetching import ParameterFetcher
from infinity_engine.parameters.parameters import ModelParameter, TrainedParameter, absent
from infinity_engine.parameters.providing import FetchingStats, stay_absent
from infinity_engine.partition import CollectiveEvent, GroupMember, ShardGroup, ShardSpec
from infinity_engine.ranks.ranks import Ranks, wire_of
from infinity_engine.schedule import TraceFollower, Use, choose_fetches, farthest_first
from infinity_engine.storage import Place

__all__ = ["WIRES", "CutParameter", "ParameterGatherer", "room_of_wires"]

WIRES = 2
"""So many gathers are under way at once, each with a buffer of its own."""
_LOOK_AHEAD = 2  # uses
_LETS_GO_S = 0.5  # for threads of torch.distributed, before there is no room
_PAUSE_S = 0.1e-3


@dataclass(frozen=True, kw_only=True)
class CutParameter:
    """A parameter of the model, this rank's shard of it, and how it is cut."""

    whole: ModelParameter
    shard: ModelParameter
    spec: ShardSpec

    @property
    def dtype(self) -> torch.dtype:
        """What modules compute with it in."""
        return self.whole.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of the whole."""
        return self.spec.numel * self.dtype.itemsize

    @property
    def largest_shard(self) -> int:
        """The bytes of the largest shard that a rank has."""
        return max(shard.numel for shard in self.spec.shards) * self.dtype.itemsize

    @property
    def member(self) -> GroupMember:
        """It as part of a group."""
        return GroupMember(self.whole.name, self.spec, self.dtype)


def room_of_wires(
    model: torch.nn.Module,
    parameters: Sequence[CutParameter],
    ranks: Ranks,
    leaves: Collection[str],
) -> int:
    """Return the bytes of each buffer that gathers go through, those of `leaves` as a whole."""
    known = {id(each.whole.parameter): each for each in parameters if each.spec.numel}
    groups = [
        [known[id(each)] for each in module.parameters(recurse=name in leaves) if id(each) in known]
        for name, module in model.named_modules()
    ]
    needed = max(
        ranks.group("all", [each.member for each in some]).gather_bytes() for some in groups if some
    )
    return wire_of(needed, ranks.shards.size + 1, ranks.config.bucket_bytes)


@dataclass(eq=False, slots=True)
class _Gather:
    """A gather that was started, and what it uses until it has ended."""

    group: ShardGroup
    numbers: Sequence[int]
    event: CollectiveEvent
    wire: Lease | None
    held: Sequence[int]  # shards that the fetcher below holds for it
    ended: bool = False

    def end(self) -> None:
        """Note that nobody needs what it used any more."""
        self.ended = True


@dataclass(frozen=True, slots=True)
class _Here:
    """A parameter that is whole here, or on its way to be."""

    lease: Lease
    gather: _Gather


class ParameterGatherer:
    """Gathers `parameters` into `memory`, of which it keeps `limit` bytes, through buffers of
    `wire_bytes` each.

    The limit is the same on all ranks. Parameters of `small` stay whole from one update to the
    next, and are gathered together. `below` brings the shards of `fetched`, which are at home
    elsewhere, to the device. Where some rank has such, gathers take no more than `below_bytes` of
    the largest shards on any. `beside` is called whenever modules ask for something.
    """

    def __init__(
        self,
        parameters: Sequence[CutParameter],
        ranks: Ranks,
        lanes: Lanes,
        memory: DeviceMemory[Any],
        *,
        limit: int,
        wire_bytes: int,
        small: Collection[int] = (),
        below: ParameterFetcher | None = None,
        below_bytes: int | None = None,
        fetched: Collection[int] = (),
        beside: Callable[[], None],
    ) -> None:
        self.limit = limit
        self._beside = beside
        self._ranks = ranks
        self._lanes = lanes
        self._memory = memory
        self._below = below
        self._below_bytes = below_bytes
        self._fetched_below = frozenset(fetched)
        self._parameters = {each.whole.number: each for each in parameters if each.spec.numel}
        self._wires = [
            memory.lease(wire_bytes, holder="buffers of collectives") for _ in range(WIRES)
        ]
        self._free_wires = list(self._wires)
        self._under_way: deque[_Gather] = deque()
        self._groups: dict[tuple[int, ...], ShardGroup] = {}
        self._trace = TraceFollower()
        self._here: dict[int, _Here] = {}
        self._shown: dict[int, int] = {}  # addresses, by parameter
        self._by_address: dict[int, int] = {}
        self._holders: dict[int, int] = {}
        self._nbytes = {number: each.nbytes for number, each in self._parameters.items()}
        self._small = tuple(number for number in sorted(small) if number in self._parameters)
        self._versions = dict.fromkeys(self._parameters, 0)
        self._taken = 0
        self._restores = True
        self._gathered = self._gathered_bytes = self._in_time = self._late = 0
        where = lanes.accelerator.torch_device
        self._absent = {
            number: absent(each.dtype, each.whole.parameter.shape, where)
            for number, each in self._parameters.items()
        }
        for each in parameters:
            each.whole.show(
                self._absent[each.whole.number]
                if each.spec.numel
                else torch.empty(each.whole.parameter.shape, dtype=each.dtype, device=where)
            )
            each.whole.note_values()
        memory.attach(self)

    # --- what modules need ------------------------------------------------------------------------

    def need(self, use: Use) -> None:
        """Let the parameters of `use` be whole and shown, and begin to gather what comes next.

        Raises:
            CapacityError: they and what is held do not fit into the limit together.
            CollectiveError: another rank does something else, or has failed.
            RuntimeError: a parameter that has to make room was changed by somebody else, or an
                update that was deferred has failed.
            TransferError: a shard could not be fetched.
        """
        self._trace.saw(use)
        self.hold(use.parameters)
        try:
            self._provide(use)
            self._gather_ahead()
            self._beside()
        finally:
            self.let_go(use.parameters)

    def hold(self, numbers: Iterable[int]) -> None:
        """Keep parameters whole, once they are, until they are let go as often."""
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
        """Have these whole, shown and held, within the body. What the trace says is not touched."""
        numbers = tuple(number for number in numbers if number in self._parameters)
        self.hold(numbers)
        try:
            if numbers:
                self._provide(Use("parameters that were asked for", numbers))
            yield
        finally:
            self.let_go(numbers)

    def is_shown(self, number: int) -> bool:
        """Tell whether modules see its values."""
        return number in self._shown

    def number_at(self, address: int) -> int | None:
        """Return which parameter's values begin at this address; None where no gathered one's
        do.
        """
        return self._by_address.get(address)

    def fetched(self, number: int) -> torch.Tensor:
        """Return the values of a parameter that is shown.

        Whoever has views of them keeps their memory.
        """
        return self._parameters[number].whole.parameter.data

    def version_of(self, number: int) -> int:
        """Return how often the values of a parameter were changed: what was saved before is of
        another version.
        """
        return self._versions[number]

    # --- what the memory asks ---------------------------------------------------------------------

    def give(self) -> bool:
        """Free what only dead objects have views of: [Note: all ranks decide alike].

        Those are cycles of the caller's own, and collectives that have ended: the thread of
        torch.distributed that carried one lets go of its tensors a moment after it has told so.
        """
        viewed = self._memory.kept_bytes
        gc.collect()
        late = time.monotonic() + _LETS_GO_S
        while viewed and self._memory.kept_bytes >= viewed and time.monotonic() < late:
            time.sleep(_PAUSE_S)
        return self._memory.kept_bytes < viewed

    def used(self) -> Event:
        """Return the end of all that was submitted so far and may use views of parameters."""
        return self._lanes.accelerator.record(self._lanes.compute)

    # --- steps ------------------------------------------------------------------------------------

    def give_up(self) -> None:
        """Release everything: an update is about to change the shards.

        Raises:
            RuntimeError: a parameter was changed by somebody else, or is held.
        """
        if self._holders:
            names = ", ".join(self._parameters[number].whole.name for number in self._holders)
            raise RuntimeError(
                f"engine.step() updates {names}, which somebody still uses: call it outside of "
                "`with engine.gathered(...)`"
            )
        for number in list(self._here):
            self._release(number)
        if self._below is not None:
            self._below.give_up()
        for number, each in self._parameters.items():
            if isinstance(each.whole, TrainedParameter):
                self._versions[number] += 1

    def follow(self, update: DeferredUpdate | None) -> None:
        """Gather nothing from here on that this update has not made yet; None: all of it is
        made.
        """
        if self._below is not None:
            self._below.follow(update)

    def moved(self, places: Mapping[int, Place]) -> None:
        """Note that the current values of these shards rest at other places."""
        if self._below is not None:
            self._below.moved(places)

    def changed(self, numbers: Iterable[int]) -> None:
        """Note that the values of these are others now, at home."""
        numbers = [number for number in numbers if number in self._parameters]
        for number in numbers:
            self._versions[number] += 1
        if self._below is not None:
            self._below.changed(numbers)

    def write_home(self, number: int) -> None:
        """Take this rank's shard of what somebody wrote into a parameter that is shown home, as its
        values.
        """
        if number not in self._parameters:
            return
        each = self._parameters[number]
        mine = self._ranks.own(each.spec, each.whole.parameter.data.reshape(-1))
        with self._shards([number]) as [shard]:
            shard.copy_(mine)
            if self._below is not None and number in self._fetched_below:
                self._below.write_home(number)
        self._versions[number] += 1
        each.whole.note_values()

    def copy_of(self, number: int) -> torch.Tensor:
        """Return a flat copy, on the host of every rank, of the values at home; all ranks ask for
        it.
        """
        each = self._parameters[number]
        with self._shards([number]) as [shard]:
            return self._ranks.whole(f"a copy of {each.whole.name}", each.spec, shard)

    def end_step(self) -> TraceMismatch | None:
        """Begin with the next step; return where this one went another way than the one before."""
        if self._below is not None:
            self._below.end_step()
        return self._trace.end_step()

    @property
    def stats(self) -> FetchingStats:
        """What was gathered."""
        return FetchingStats(
            fetched=self._gathered,
            fetched_bytes=self._gathered_bytes,
            in_time=self._in_time,
            late=self._late,
        )

    def leave_absent(self) -> None:
        """Let parameters show no values after `close`, on every rank; nothing is read, gathered or
        copied for it.
        """
        self._restores = False

    def close(self) -> None:
        """Give whole parameters ordinary memory, on every rank, and all leases back; all ranks
        close.

        They stay NaN where the ranks of a machine have no memory for all of them, of which a
        warning tells, and where the ranks have stopped to work together.

        Raises:
            CollectiveError: another rank does something else, or has failed. All else is done.
        """
        failed: CollectiveError | None = None
        try:
            values = self._whole_again()
        except CollectiveError as error:
            failed, values = kept(error), {}
        for here in self._here.values():
            here.lease.close()
        self._here.clear()
        for number, each in self._parameters.items():
            each.whole.show(values.get(number, self._absent[number]))
        self._by_address.clear()
        self._shown.clear()
        self._under_way.clear()
        for wire in self._wires:
            wire.close()
        if self._below is not None:
            self._below.leave_absent()  # nobody sees shards
        if failed is not None:
            raise again(failed)

    def _whole_again(self) -> dict[int, torch.Tensor]:
        """Return all values in ordinary memory, none where that cannot be."""
        if not self._restores or self._ranks.collectives.failed:
            return {}
        nbytes = sum(each.nbytes for each in self._parameters.values())
        free = self._ranks.least(
            "memory for whole parameters", free_for_copies() // self._ranks.neighbours
        )
        if free < nbytes:
            warnings.warn(stay_absent(nbytes, free), RuntimeWarning, stacklevel=2)
            return {}
        return {
            number: self.copy_of(number)
            .view(each.whole.parameter.shape)
            .to(each.whole.parameter.device)
            for number, each in self._parameters.items()
        }

    # --- several parameters -----------------------------------------------------------------------

    def _provide(self, use: Use) -> None:
        """Let the parameters of a use, which are held, be here and shown."""
        numbers = dict.fromkeys(number for number in use.parameters if number not in self._shown)
        missing = [number for number in numbers if number not in self._here]
        self._in_time += len(numbers) - len(missing)
        self._late += len(missing)
        missing = self._gather_small(missing)
        if missing:
            self._make_room(sum(self._nbytes[number] for number in missing))
            self._gather(use.name, missing)
        for number in numbers:
            self._show(number)

    def _gather_ahead(self) -> None:
        """Begin to gather what the next uses need, as far as there is room."""
        at = self._trace.at
        for position, use in self._trace.upcoming(at, at + _LOOK_AHEAD):
            missing = [
                number for number in dict.fromkeys(use.parameters) if number not in self._here
            ]
            missing = self._gather_small(missing)
            if not missing:
                continue
            chosen = choose_fetches(
                [(position, use)],
                nbytes=self._nbytes,
                cached=self._here,
                held={*self._holders, *self._small},
                free=self.limit - self._taken,
                next_use=self._trace.next_use,
            )
            if not chosen.provided:
                return
            for number in chosen.evicted:
                self._release(number)
            self._gather(use.name, missing)

    def _gather_small(self, missing: list[int]) -> list[int]:
        """Begin to gather all small ones where one is missing; return what else is."""
        if not any(number in self._small for number in missing):
            return missing
        small = [number for number in self._small if number not in self._here]
        self._make_room(sum(self._nbytes[number] for number in small))
        self._gather("small parameters", small)
        return [number for number in missing if number not in self._small]

    def _make_room(self, nbytes: int) -> None:
        """Let the limit have room for what is needed now, as far as there is something to give
        up.
        """
        if nbytes <= self.limit - self._taken:
            return
        idle = [
            number
            for number in self._here
            if number not in self._holders and number not in self._small
        ]
        for number in farthest_first(idle, self._trace.next_use):
            self._release(number)
            if nbytes <= self.limit - self._taken:
                return

    # --- one gather -------------------------------------------------------------------------------

    def _gather(self, name: str, numbers: Sequence[int]) -> None:
        """Begin to make these whole, none of which is here, in as many gathers as shards need to be
        on the device.

        What needs no buffer alone goes alone, where buffers, which are those of modules, have no
        room for all of these.
        """
        alone: list[int] = []
        if self._group(name, tuple(numbers)).gather_bytes() > self._wires[0].nbytes:
            alone = [
                number for number in numbers if not self._group(name, (number,)).gather_bytes()
            ]
        for number in alone:
            self._gather_part(name, [number])
        part: list[int] = []
        for number in numbers:
            if number in alone:
                continue
            if (
                part
                and self._below_bytes is not None
                and self._weight([*part, number]) > self._below_bytes
            ):
                self._gather_part(name, part)
                part = []
            part.append(number)
        if part:
            self._gather_part(name, part)

    def _gather_part(self, name: str, numbers: Sequence[int]) -> None:
        while (
            self._below_bytes is not None
            and self._under_way
            and self._weight_with(numbers) > self._below_bytes
        ):
            self._end(self._under_way[0])
        group = self._group(name, tuple(numbers))
        wire = self._wire() if group.gather_bytes() else None
        held: Sequence[int] = ()
        leases: list[Lease] = []
        try:
            held = self._hold_shards(name, numbers)
            leases += [self._lease(number) for number in numbers]
            into = [
                lease.tensor(self._parameters[number].dtype)
                for lease, number in zip(leases, numbers, strict=True)
            ]
            shards = [self._shard(number) for number in numbers]
            event = group.gather(shards, into, wire=None if wire is None else wire.flat())
        except BaseException:
            for lease in leases:
                lease.close()
            self._give_back(wire, held)
            raise
        gather = _Gather(group, tuple(numbers), event, wire, held)
        self._under_way.append(gather)
        for number, lease in zip(numbers, leases, strict=True):
            self._here[number] = _Here(lease, gather)
            self._taken += self._nbytes[number]
            self._gathered += 1
            self._gathered_bytes += self._nbytes[number]

    def _weight(self, numbers: Iterable[int]) -> int:
        """Return what shards of these take of the device on the rank that has most of each."""
        return sum(self._parameters[number].largest_shard for number in numbers)

    def _weight_with(self, numbers: Sequence[int]) -> int:
        """Return it of these and of all that is under way."""
        return self._weight(numbers) + sum(
            self._weight(gather.numbers) for gather in self._under_way
        )

    def _end(self, gather: _Gather) -> None:
        """Wait until a gather has ended, and let go of what it used."""
        if gather.ended:
            return
        try:
            if not gather.event.done():
                with self._lanes.meter.waits(Wait.PARAMETERS):
                    gather.event.wait()
            gather.event.wait()  # raises what failed
        finally:
            if gather in self._under_way and gather.event.done():
                self._under_way.remove(gather)
                self._give_back(gather.wire, gather.held)
        gather.end()
        gather.group.release()

    def _give_back(self, wire: Lease | None, held: Sequence[int]) -> None:
        """Let others have what a gather has used."""
        if wire is not None:
            self._free_wires.append(wire)
        if self._below is not None:
            self._below.let_go(held)

    def _wire(self) -> Lease:
        """Return a buffer, that of the oldest gather where none is free: [Note: all ranks decide
        alike].
        """
        while not self._free_wires:
            self._end(self._under_way[0])
        return self._free_wires.pop()

    def _group(self, name: str, numbers: tuple[int, ...]) -> ShardGroup:
        if numbers not in self._groups:
            members = [self._parameters[number].member for number in numbers]
            self._groups[numbers] = self._ranks.group(
                members[0].name if len(members) == 1 else name, members
            )
        return self._groups[numbers]

    def _lease(self, number: int) -> Lease:
        """Return memory for a whole parameter."""
        name = self._parameters[number].whole.name
        try:
            return self._memory.lease(
                self._nbytes[number], holder=f"parameter {name}", views=Views.KEEP
            )
        except CapacityError as error:
            raise CapacityError(
                tier=error.tier,
                asked=error.asked,
                free=error.free,
                limit=error.limit,
                holders=error.holders,
                change=f"raise the budget's {self._memory.reservation.tier.name.lower()}: {name} "
                "is needed whole while "
                "these are. What a module uses stays until it returns, and what is read outside of "
                "modules until "
                "engine.step()",
            ) from None

    def _show(self, number: int) -> None:
        here, each = self._here[number], self._parameters[number]
        self._end(here.gather)
        each.whole.show(here.lease.tensor(each.dtype, each.whole.parameter.shape))
        self._shown[number] = address = each.whole.parameter.data_ptr()
        self._by_address[address] = number

    def _release(self, number: int) -> None:
        here, each = self._here[number], self._parameters[number]
        self._end(here.gather)
        if number in self._shown:
            each.whole.check_untouched()
            each.whole.show(self._absent[number])
            del self._by_address[self._shown.pop(number)]
        del self._here[number]
        self._taken -= self._nbytes[number]
        here.lease.until(self.used())
        here.lease.close()

    # --- shards -----------------------------------------------------------------------------------

    @contextmanager
    def _shards(self, numbers: Sequence[int]) -> Iterator[list[torch.Tensor]]:
        """Have the flat shards of these where gathers find them, within the body."""
        mine = [number for number in numbers if number in self._fetched_below]
        with nullcontext() if self._below is None else self._below.gathered(mine):
            yield [self._shard(number) for number in numbers]

    def _hold_shards(self, name: str, numbers: Sequence[int]) -> Sequence[int]:
        """Bring the shards of these, and hold them; return which are held."""
        mine = tuple(number for number in numbers if number in self._fetched_below)
        if self._below is not None and mine:
            self._below.hold(mine)
            try:
                self._below.need(Use(name, mine))
            except BaseException:
                self._below.let_go(mine)
                raise
        return mine

    def _shard(self, number: int) -> torch.Tensor:
        each = self._parameters[number]
        if not each.shard.numel:
            return torch.empty(0, dtype=each.dtype, device=self._lanes.accelerator.torch_device)
        return (
            self._below.fetched(number)
            if self._below is not None and number in self._fetched_below
            else each.shard.values
        )
