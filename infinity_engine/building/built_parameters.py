"""`BuiltParameters`: a model's parameters while it is being built, in host memory or evicted.

An evicted parameter, its values on the drives alone, keeps identity, shape and dtype, and reads as
NaN (integers: 0). Knows parameters and no modules. Called from one thread, while a model is built
and until an engine has taken it over.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from deepnvme.memory.buffers import memory_of
from deepnvme.sizes import PAGE
from infinity_engine.building.built_parameter import BuiltParameter, is_plain, nbytes_of, plainly
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.memory import FreedMemory, Ledger, return_freed_memory
from infinity_engine.partition import ShardSpec
from infinity_engine.plan import Tier
from infinity_engine.storage import Place, SwapFile
from infinity_engine.units import MiB, align_down, align_up

__all__ = ["CACHE_PART", "BuiltParameters", "first_sizes"]

CACHE_PART = 4  # Without a given size, the cache is this part of the free host budget: one in four.

_STEP = 256 * MiB  # the least that the swap file grows by, where the budget has it
# after so many freed bytes malloc returns its holes to the system
_RETURNED = 16 * MiB
_MANY = 64  # after so many new parameters, look for those that are not referenced any more
_HOLDER = "parameters being built"


class _Records(dict[int, BuiltParameter]):
    """The record of each parameter, by its id."""

    def __init__(self) -> None:
        super().__init__()
        self.new = 0
        """How many were added since `note_pruned` was called."""
        # Filled by finalizers, which may run anywhere.
        self._gone: deque[tuple[int, BuiltParameter]] = deque()

    def add(self, parameter: torch.Tensor, record: BuiltParameter) -> BuiltParameter:
        """Add the record of a parameter; return it."""
        self.new += 1
        self[id(parameter)] = record
        # The finalizer runs anywhere, so it only appends. It gets the record as well: by then the
        # id may be another parameter's.
        weakref.finalize(parameter, self._gone.append, (id(parameter), record))
        return record

    def note_pruned(self) -> None:
        """Note that the caller looks for parameters without references now."""
        self.new = 0

    def pop_gone(self) -> tuple[int, BuiltParameter] | None:
        """Return the record of a parameter that has died, which the caller drops; None: of none."""
        while self._gone:
            number, record = self._gone.popleft()
            # Another parameter may have got the id, and its record, since.
            if self.get(number) is record:
                return number, record
        return None


class BuiltParameters:
    """Keeps up to `cache` bytes of values in host memory; more where calls or tensors need it.

    Without `cache` it is a quarter of what is free of the host's budget.

    `budget` says how many bytes of each directory `swap` may grow to. `written` is called with the
    bytes that were written.
    """

    def __init__(
        self,
        swap: SwapFile,
        ledger: Ledger,
        budget: Mapping[str, int],
        cache: int | None,
        written: Callable[[int], None],
    ) -> None:
        self._swap = swap
        self._ledger = ledger
        self._budget = dict(budget)
        self._written = written
        self._records = _Records()
        # ids of the parameters in memory, least recently used first
        self._here: dict[int, None] = {}
        # Those of all calls that are under way: a hook may call torch within a call.
        self._in_use: frozenset[int] = frozenset()
        # By address, what shows NaN there: the storage, and the record that it stands for.
        self._shown: dict[int, tuple[weakref.ref[torch.UntypedStorage], BuiltParameter]] = {}
        self._freed = FreedMemory(_RETURNED)
        free = ledger.free(Tier.HOST)
        self._cache = free // CACHE_PART if cache is None else cache
        if self._cache > free:
            raise CapacityError(
                tier=Tier.HOST.name,
                asked=self._cache,
                free=free,
                limit=free,
                change="lower the cache of init_context, or raise the budget's host",
            )
        # All that is free, until shrink(): nothing but building uses this ledger.
        self._host = ledger.reserve(Tier.HOST, free, holder=_HOLDER)

    # --- which there are --------------------------------------------------------------------------

    def adopt(self, parameter: torch.Tensor, name: str) -> None:
        """Take over a parameter as it is. One without dense values in host memory is left alone.

        Raises:
            CapacityError: the host's budget has no room for it.
        """
        if parameter in self or not is_plain(parameter):
            return
        # Made of an evicted parameter, it gets the memory that it should share.
        self.revive(parameter)
        # Kept alive until the model is built: [Note: what is made of absent parameters].
        self._records.add(parameter, BuiltParameter(parameter, name)).keep_reference()
        with self._using([parameter]):
            # Counts it, which may evict others, but not this one: it is in use.
            self._note(parameter)

    def adopt_absent(self, parameter: torch.Tensor, name: str, place: Place) -> None:
        """Take over a parameter with its values in `place` alone, in its dimensions' order."""
        self._records.add(parameter, BuiltParameter(parameter, name, place))

    # [Note: what is made of absent parameters] `torch.nn.Parameter(parameter)` shares the memory
    # and makes no call that a mode could see. Made of an evicted parameter, the new one shows the
    # same NaN in the same storage. By that storage it is found when it is used or registered, and
    # gets the memory that it should have shared. So until the model is built, parameters are kept
    # alive even where no other code has them; where more room is needed, those are dropped that no
    # new one was made of.
    def revive(self, tensor: torch.Tensor) -> None:
        """Give a tensor made of an evicted parameter its memory.

        [Note: what is made of absent parameters]
        """
        # The stand-in is one element that is expanded: it has strides of 0 in all dimensions.
        if not is_plain(tensor) or tensor.numel() < 2 or any(tensor.stride()):
            return
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._shown:
            return
        shown, record = self._shown[storage.data_ptr()]
        parameter = record.parameter
        # An address can be used again: it counts only while the storage is the same object.
        if shown() is storage and parameter is not None and parameter is not tensor:
            with self.using([parameter]), plainly():
                # The memory itself, not a copy: what is written to either shows in both.
                tensor.data = parameter.data

    def drop_unreferenced(self) -> None:
        """Drop the references that keep parameters alive: the model is built."""
        for record in self._records.values():
            record.drop_reference()
        self._bury()

    def forget(self, parameter: torch.Tensor) -> None:
        """Leave a parameter as it is, and give its room on the drives back."""
        self._drop(id(parameter), self._of(parameter))

    def __contains__(self, parameter: object) -> bool:
        """Tell whether a parameter's values are kept here."""
        # The id may be another object's by now: those that have died are dropped first.
        self._bury()
        record = self._records.get(id(parameter))
        return record is not None and record.parameter is parameter

    @property
    def count(self) -> int:
        """How many parameters there are, those included that have just died."""
        return len(self._records)

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters that are alive."""
        self._bury()
        found = [record.parameter for record in self._records.values()]
        return [parameter for parameter in found if parameter is not None]

    # --- where they are ---------------------------------------------------------------------------

    @contextmanager
    def using(
        self, parameters: Collection[torch.Tensor], replaced: torch.Tensor | None = None
    ) -> Iterator[None]:
        """Have the values of these in host memory within the body, which may change them.

        It may change their shape and dtype as well.

        `replaced` is one of them. The body sets its data, so its old values need not be there.

        Raises:
            CapacityError: the host's budget has no room for all of them.
            TransferError: one could not be read, or one that had to make room could not be written.
        """
        # Marked as used first, so that making room evicts none of these.
        with self._using(parameters):
            missing = [
                parameter
                for parameter in parameters
                if parameter is not replaced and self.is_absent(parameter)
            ]
            self.make_room(sum(nbytes_of(parameter) for parameter in missing))
            for parameter in missing:
                self._fill(self._of(parameter), parameter)
                self._note(parameter)
            yield
            # The body may have given them other memory, another shape or dtype.
            for parameter in parameters:
                self._note(parameter)

    def pin(self, parameter: torch.Tensor) -> None:
        """Keep a parameter in host memory for good: other code has its address."""
        self._of(parameter).pin()

    def evict(self, parameters: Iterable[torch.Tensor]) -> None:
        """Evict the values of these from host memory, unless another tensor shows them."""
        left = [parameter for parameter in parameters if not self.is_absent(parameter)]
        for again in (False, True):
            left = [
                parameter
                for parameter in left
                if self._of(parameter).may_leave(parameter) and not self._leave(parameter)
            ]
            if left and not again:
                # code that built the model often leaves views behind in reference cycles
                gc.collect()

    def evict_all(self) -> None:
        """Evict all values, unless another tensor shows them: the model is built."""
        self.evict(self.parameters())

    def make_room(self, nbytes: int) -> None:
        """Make room for `nbytes` in the cache, as far as parameters can be evicted.

        Raises:
            CapacityError: not even the whole host budget has room for them.
        """
        self._shrink(self._cache - nbytes)
        # Only after many new ones: a look over all parameters each time would take quadratic time.
        if self._host.held > self._cache - nbytes and self._records.new >= _MANY:
            self._prune()
            self._shrink(self._cache - nbytes)
        # Beyond the whole budget, all that is idle has to go.
        if self._host.held + nbytes > self._host.nbytes:
            self._prune()
            self.evict(
                [
                    parameter
                    for number in self._here
                    if (parameter := self._idle(number)) is not None
                ]
            )
        # Nothing more can leave: these are in use, pinned or shown by views.
        if self._host.held + nbytes > self._host.nbytes:
            raise CapacityError(
                tier=Tier.HOST.name,
                asked=nbytes,
                free=self._host.nbytes - self._host.held,
                limit=self._host.nbytes,
                holders=tuple(
                    (self._records[number].name, self._records[number].held)
                    for number in self._here
                ),
                change=(
                    "raise the budget's host, or let init_context's body use less at once. The "
                    "parameters that one call uses stay in memory together, and so does one with "
                    "a view elsewhere, such as `weight.data` in a variable"
                ),
            )

    def shrink(self, room: int = 0) -> None:
        """Shrink the host's reservation to values that could not be evicted, and `room` bytes."""
        # Give back what the swap file grew by in advance.
        self._swap.trim()
        held = self._host.held
        self._host.release(held)
        self._host.close()
        self._host = self._ledger.reserve(Tier.HOST, held + room, holder=_HOLDER)
        self._host.hold(held)
        # No cache any more: what is read from here on is for its caller.
        self._cache = 0
        return_freed_memory()

    def is_absent(self, parameter: torch.Tensor) -> bool:
        """Tell whether its values are on the drives alone."""
        return self._of(parameter).is_absent

    def bring(self, parameter: torch.Tensor) -> None:
        """Give a parameter ordinary memory with its values, and forget it. The caller counts it."""
        record = self._of(parameter)
        if record.is_absent:
            self._fill(record, parameter)
        self.forget(parameter)

    def read_into(self, parameter: torch.Tensor, first_element: int, values: torch.Tensor) -> None:
        """Fill a flat, contiguous tensor with elements of a parameter, in its dimensions' order.

        The first is `first_element`: of a parameter that is cut, counted in this rank's part.
        """
        record = self._of(parameter)
        start, nbytes = first_element * parameter.element_size(), nbytes_of(values)
        if not nbytes:
            return
        # In memory the parameter is whole, so this rank's part begins at its first element.
        if record.place is None or not record.is_absent:
            _copy_of(
                parameter,
                first_element + (0 if record.part is None else record.part.first_element),
                values,
            )
            return
        record.check_untouched(parameter)
        # O_DIRECT reads whole pages: what begins with one is read straight into `values`.
        page = align_down(start, PAGE)
        if page == start:
            self._read_part(record, record.place.part(start, nbytes), values)
        else:
            room = torch.empty(start - page + nbytes, dtype=torch.uint8, device="cpu")
            self._read_part(record, record.place.part(page, room.nbytes), room)
            values.view(torch.uint8).copy_(room[start - page :])

    def read_whole(self, parameter: torch.Tensor, first_element: int, values: torch.Tensor) -> None:
        """Do as `read_into`, on any rank: the first element is that of the whole parameter."""
        if self.is_absent(parameter):
            self.read_into(parameter, first_element, values)
        else:
            _copy_of(parameter, first_element, values)

    def room_for(self, parameters: Iterable[torch.Tensor]) -> tuple[int, int]:
        """Return the bytes that these need and that are not in memory, and what the budget has."""
        return sum(
            nbytes_of(parameter) for parameter in parameters if self.is_absent(parameter)
        ), self._ledger.free(Tier.HOST)

    def spec_of(self, parameter: torch.Tensor) -> ShardSpec | None:
        """Return how a parameter is cut over the ranks; None: it is not."""
        return self._of(parameter).spec

    def own_numel(self, parameter: torch.Tensor) -> int:
        """Return how many elements of a parameter are this rank's."""
        return self._of(parameter).own_numel(parameter)

    def digest_of(self, parameter: torch.Tensor) -> str:
        """Return text that differs where ranks' values differ, as far as this rank saw them."""
        return self._of(parameter).digest

    def agree(self) -> None:
        """Check that all ranks have built the same model; one rank has nothing to check."""

    def allocate(self, nbytes: int, name: str) -> Place:
        """Return room on the drives; the swap file grows where it has none.

        Raises:
            CapacityError: the budget's nvme, or a drive, has no more.
        """
        # Places of parameters that have died are used before the file grows.
        if align_up(nbytes, PAGE) > self._swap.free_bytes:
            self._prune()
        missing = align_up(nbytes, PAGE) - self._swap.free_bytes
        if missing > 0:
            left = {
                directory: align_down(self._ledger.free(Tier.NVME, directory=directory), PAGE)
                for directory in self._budget
            }
            if missing > sum(left.values()):
                raise CapacityError(
                    tier=Tier.NVME.name,
                    directory=", ".join(self._budget),
                    asked=nbytes,
                    free=self._swap.free_bytes + sum(left.values()),
                    limit=sum(self._budget.values()),
                    change=(
                        "raise the budget's nvme, or name more directories in it: there is no "
                        f"room for the parameter {name}"
                    ),
                )
            # A quarter more at least, so that growths stay few.
            self._swap.grow(_shares(max(missing, _STEP, self._swap.capacity // 4), left))
        return self._swap.allocate(nbytes, holder=name)

    def close(self) -> None:
        """Give the host's budget back. Values in memory stay with their parameters.

        Values on the drives are lost.
        """
        self._records.clear()
        self._here.clear()
        self._shown.clear()
        self._host.release(self._host.held)
        self._host.close()

    # --- one parameter ----------------------------------------------------------------------------

    def _of(self, parameter: torch.Tensor) -> BuiltParameter:
        if parameter not in self:
            raise ConfigError(
                field="parameter",
                value=f"one of shape {tuple(parameter.shape)}",
                expected="a parameter that was built in this init_context and not released",
            )
        return self._records[id(parameter)]

    @contextmanager
    def _using(self, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
        # Restored and not emptied: calls nest.
        before = self._in_use
        self._in_use = before | {id(parameter) for parameter in parameters}
        try:
            yield
        finally:
            self._in_use = before

    def _fill(self, record: BuiltParameter, parameter: torch.Tensor) -> None:
        """Give a parameter that is absent memory with its values."""
        record.fill(parameter, self._swap)

    def _note(self, parameter: torch.Tensor) -> None:
        """Count a parameter's host memory of now, and make it the one used most recently."""
        record = self._of(parameter)
        # The whole storage: a parameter that is a view keeps all of it.
        nbytes = parameter.untyped_storage().nbytes()
        if nbytes > record.held:
            self.make_room(nbytes - record.held)
            self._host.hold(nbytes - record.held)
        else:
            self._host.release(record.held - nbytes)
        record.count(nbytes)
        # Moved to the end of the dict: it is the one used most recently.
        self._here.pop(id(parameter), None)
        if nbytes:
            self._here[id(parameter)] = None
        else:
            self._drop_place(record)  # it has become empty

    def _leave(self, parameter: torch.Tensor) -> bool:
        """Try to evict a parameter; tell whether its memory is free."""
        record = self._of(parameter)
        # `held` is read before evict() sets it to 0.
        nbytes, held = record.bytes_to_store(parameter), record.held
        # The body has changed its size since it was last written.
        if record.place is not None and record.place.nbytes != nbytes:
            self._drop_place(record)
        if record.place is None and nbytes:
            record.replace_place(self.allocate(nbytes, record.name))
        with self._copying(parameter):
            record.store(parameter, self._swap)
        # Whether or not the memory leaves: it was written.
        self._written(nbytes)
        # A view exists somewhere: it stays, and is tried again later.
        if not record.evict(parameter):
            return False
        self._remember_shown(record)
        del self._here[id(parameter)]
        self._host.release(held)
        self._freed.freed(held)
        return True

    @contextmanager
    def _copying(self, parameter: torch.Tensor) -> Iterator[None]:
        """Count the copy that is made of a parameter with elements that are not contiguous."""
        nbytes = 0 if parameter.is_contiguous() else nbytes_of(parameter)
        self._host.hold(nbytes)
        try:
            yield
        finally:
            self._host.release(nbytes)

    def _remember_shown(self, record: BuiltParameter) -> None:
        # By the storage of the NaN, which a parameter made of this one shares.
        storage = record.shown()
        if storage is not None:
            self._shown[storage.data_ptr()] = record.shown, record

    def _read_part(self, record: BuiltParameter, part: Place, into: torch.Tensor) -> None:
        self._swap.read(part, memory_of(into, writable=True), what=record.name).wait()

    # --- room -------------------------------------------------------------------------------------

    def _shrink(self, nbytes: int) -> None:
        """Evict what was used longest ago until `nbytes` are held, as far as it can be evicted."""
        # A copy, as _leave() takes entries out.
        for number in list(self._here):
            if self._host.held <= nbytes:
                return
            parameter = self._idle(number)
            if parameter is not None:
                record = self._of(parameter)
                # Each attempt writes it once more, so failed ones are repeated ever more rarely.
                if record.count_down_to_retry() and record.may_leave(parameter):
                    self._leave(parameter)

    def _idle(self, number: int) -> torch.Tensor | None:
        """Return a parameter that is in memory and that no call is using."""
        record = self._records.get(number)  # it may have gone meanwhile
        return None if record is None or number in self._in_use else record.parameter

    def _prune(self) -> None:
        """Drop parameters without references of which no other parameter was made."""
        self._records.note_pruned()
        for record in self._records.values():
            parameter = record.parameter
            if record.is_kept and record.is_absent and parameter is not None:
                # A new stand-in: only tensors made of this parameter still show the old one.
                record.show_nan(parameter)
                self._remember_shown(record)
        self._shown = {at: entry for at, entry in self._shown.items() if entry[0]() is not None}
        shown = Counter(id(record) for _, record in self._shown.values())
        for number, record in self._records.items():
            # Its own stand-in counts once; others were made of it.
            own = 1 if record.is_absent else 0
            if record.is_kept and number not in self._in_use and shown[id(record)] == own:
                # Dropped and kept again: a parameter without other references dies in between.
                record.drop_reference()
                record.keep_reference()
        self._bury()

    def _bury(self) -> None:
        """Give back the memory and room of parameters that are not alive any more."""
        while (gone := self._records.pop_gone()) is not None:
            self._drop(*gone)

    def _drop(self, number: int, record: BuiltParameter) -> None:
        del self._records[number]
        self._here.pop(number, None)
        self._host.release(record.held)
        self._drop_place(record)

    def _drop_place(self, record: BuiltParameter) -> None:
        """Give its room on the drives back."""
        place = record.replace_place(None)
        if place is not None:
            self._swap.release(place)


def _copy_of(parameter: torch.Tensor, first_element: int, values: torch.Tensor) -> None:
    """Fill a flat tensor with elements of a parameter that is in memory."""
    with plainly():
        values.copy_(parameter.detach().reshape(-1)[first_element : first_element + values.numel()])


def first_sizes(budget: Mapping[str, int]) -> dict[str, int]:
    """Return the first size of a swap file in each directory, before the model is known."""
    shares = _shares(_STEP, budget)
    # Two pages at least: the header's and one more.
    return {name: min(nbytes, max(2 * PAGE, shares[name])) for name, nbytes in budget.items()}


def _shares(nbytes: int, left: Mapping[str, int]) -> dict[str, int]:
    """Return shares of `nbytes` in proportion to what is left in each directory, in whole pages."""
    total = sum(left.values())
    if nbytes >= total:
        return dict(left)
    return {
        name: min(free, align_up(-(-nbytes * free // total), PAGE)) for name, free in left.items()
    }
