"""`Originals`: the parameters of a model that is being built, which of them are in host memory, and
which leave.

A parameter whose values are on the drives alone keeps identity, shape and dtype, and reads as NaN
(integers: 0). Knows parameters and no modules. Called while a model is built and until an engine
has taken it over, from one thread.

[Note: what is made of absent parameters] `torch.nn.Parameter(parameter)` shares the memory and
calls nothing that could be seen. Made of one that is absent, it shows the same NaN in the same
storage, by which it is found when it is used or registered, and gets the memory that it should have
shared. So until the model is built, parameters are kept even where nobody else has them, but for
those that nobody has made another of when there has to be more room.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from deepnvme.memory.buffers import memory_of
from infinity_engine.building.original import Original, is_plain, nbytes_of, plainly
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.memory import Ledger, return_freed_memory
from infinity_engine.partition import ShardSpec
from infinity_engine.plan import Tier
from infinity_engine.storage import Place, SwapFile
from infinity_engine.units import MiB, align_down, align_up

__all__ = ["CACHE_PART", "Originals", "first_sizes"]

CACHE_PART = 4
"""Of what is free of the host's budget, the cache is one in so many, where nobody says how large it
is.
"""
_PAGE = 4096
_STEP = 256 * MiB  # by so much the swap file grows at least, where the budget has it
# so much that has left goes back to the system at once, rather than lie about in holes
_RETURNED = 16 * MiB
_MANY = 64  # so many new parameters are worth a look for those that nobody has any more
_HOLDER = "parameters being built"


class Originals:
    """Keeps `cache` bytes of values in host memory, more only as long as one call needs or views
    hold more.

    Without `cache` it is a quarter of what is free of the host's budget.

    `budget` says how many bytes of each directory `swap` may grow to. `written` is told of those
    that were written.
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
        self._originals: dict[int, Original] = {}
        # by parameters' ids, the one that was used last at the end
        self._here: dict[int, None] = {}
        self._in_use: frozenset[int] = frozenset()
        self._gone: deque[tuple[int, Original]] = deque()
        # by its address
        self._shown: dict[int, tuple[weakref.ref[torch.UntypedStorage], Original]] = {}
        self._freed = 0  # bytes since freed memory last went back to the system
        self._new = 0  # how many were added since nobody's were last looked for
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
        self._host = ledger.reserve(Tier.HOST, free, holder=_HOLDER)

    # --- which there are --------------------------------------------------------------------------

    def adopt(self, parameter: torch.Tensor, name: str) -> None:
        """Take over a parameter as it is.

        One that has no dense values in host memory is left alone.

        Raises:
            CapacityError: the host's budget has no room for it.
        """
        if parameter in self or not is_plain(parameter):
            return
        self.revive(parameter)
        self._add(parameter, Original(parameter, name)).keep()
        with self._using([parameter]):
            self._note(parameter)

    def adopt_absent(self, parameter: torch.Tensor, name: str, place: Place) -> None:
        """Take over a parameter that shows no values: they are in this place, in the order of its
        dimensions.
        """
        self._add(parameter, Original(parameter, name, place))

    def revive(self, tensor: torch.Tensor) -> None:
        """Give a tensor that was made of an absent parameter its memory: [Note: what is made of
        absent parameters].
        """
        if not is_plain(tensor) or tensor.numel() < 2 or any(tensor.stride()):
            return
        storage = tensor.untyped_storage()
        shown, original = self._shown.get(storage.data_ptr(), (None, None))
        parameter = None if original is None else original.parameter
        if (
            shown is not None
            and shown() is storage
            and parameter is not None
            and parameter is not tensor
        ):
            with self.using([parameter]), plainly():
                tensor.data = parameter.data

    def keep_no_others(self) -> None:
        """Let parameters go that nobody else has: the model is built."""
        for original in self._originals.values():
            original.let_go()
        self._bury()

    def forget(self, parameter: torch.Tensor) -> None:
        """Let a parameter be as it is, and have nothing of it on the drives any more."""
        self._drop(id(parameter), self._of(parameter))

    def __contains__(self, parameter: object) -> bool:
        """Tell whether a parameter's values are kept here."""
        self._bury()
        original = self._originals.get(id(parameter))
        return original is not None and original.parameter is parameter

    def parameters(self) -> list[torch.Tensor]:
        """Return those that live."""
        self._bury()
        found = [original.parameter for original in self._originals.values()]
        return [each for each in found if each is not None]

    # --- where they are ---------------------------------------------------------------------------

    @contextmanager
    def using(
        self, parameters: Collection[torch.Tensor], replaced: torch.Tensor | None = None
    ) -> Iterator[None]:
        """Have the values of these in host memory within the body, which may change them, their
        shape and dtype.

        Those of `replaced`, one of them, the body gives anew: they need not be there before.

        Raises:
            CapacityError: the host's budget has no room for all of them.
            TransferError: one could not be read, or what had to make room not be written.
        """
        with self._using(parameters):
            missing = [each for each in parameters if each is not replaced and self.is_absent(each)]
            self._make_room(sum(nbytes_of(each) for each in missing))
            for each in missing:
                self._fill(self._of(each), each)
                self._note(each)
            yield
            for each in parameters:
                self._note(each)

    def pin(self, parameter: torch.Tensor) -> None:
        """Let a parameter stay in host memory: somebody has its address."""
        self._of(parameter).pin()

    def leave(self, parameters: Iterable[torch.Tensor]) -> None:
        """Let the values of these leave host memory, as far as nobody has views of it."""
        left = [each for each in parameters if not self.is_absent(each)]
        for again in (False, True):
            left = [
                each for each in left if self._of(each).may_leave(each) and not self._leave(each)
            ]
            if left and not again:
                # what was only used while the model was built often has views, in a cycle
                gc.collect()

    def leave_all(self) -> None:
        """Let all values leave host memory, as far as nobody has views of them: the model is
        built.
        """
        self.leave(self.parameters())

    def settle(self, room: int = 0) -> None:
        """Keep no more of the budget than values take: of the host's, those that could not leave
        and `room` bytes.
        """
        self._swap.trim()
        held = self._host.held
        self._host.release(held)
        self._host.close()
        self._host = self._ledger.reserve(Tier.HOST, held + room, holder=_HOLDER)
        self._host.hold(held)
        self._cache = 0
        return_freed_memory()

    def is_absent(self, parameter: torch.Tensor) -> bool:
        """Tell whether its values are on the drives alone."""
        return self._of(parameter).is_absent

    def bring(self, parameter: torch.Tensor) -> None:
        """Give a parameter ordinary memory with its values, and forget it.

        Whoever has it counts the memory.
        """
        original = self._of(parameter)
        if original.is_absent:
            self._fill(original, parameter)
        self.forget(parameter)

    def read_into(self, parameter: torch.Tensor, first_element: int, values: torch.Tensor) -> None:
        """Fill a flat, contiguous tensor with its elements from the first on, in the order of its
        dimensions.

        Of one that is cut, the first element is that of this rank's part.
        """
        original = self._of(parameter)
        start, nbytes = first_element * parameter.element_size(), nbytes_of(values)
        if not nbytes:
            return
        if original.place is None or not original.is_absent:
            _copy_of(
                parameter,
                first_element + (0 if original.part is None else original.part.first_element),
                values,
            )
            return
        original.check_untouched(parameter)
        page = align_down(start, _PAGE)
        if page == start:
            self._read_part(original, original.place.part(start, nbytes), values)
        else:
            room = torch.empty(start - page + nbytes, dtype=torch.uint8, device="cpu")
            self._read_part(original, original.place.part(page, room.nbytes), room)
            values.view(torch.uint8).copy_(room[start - page :])

    def read_whole(self, parameter: torch.Tensor, first_element: int, values: torch.Tensor) -> None:
        """Do as `read_into`, whatever rank has the elements: the first element is that of the
        parameter.
        """
        if self.is_absent(parameter):
            self.read_into(parameter, first_element, values)
        else:
            _copy_of(parameter, first_element, values)

    def room_for(self, parameters: Iterable[torch.Tensor]) -> tuple[int, int]:
        """Return how many bytes values of these need that are not in memory, and how many the
        host's budget has.
        """
        return sum(
            nbytes_of(each) for each in parameters if self.is_absent(each)
        ), self._ledger.free(Tier.HOST)

    def spec_of(self, parameter: torch.Tensor) -> ShardSpec | None:
        """Return how a parameter is cut over the ranks; None: it is not."""
        return self._of(parameter).spec

    def digest_of(self, parameter: torch.Tensor) -> str:
        """Return words that differ where values of a parameter that is cut do, as far as this rank
        has seen them.
        """
        return self._of(parameter).digest

    def agree(self) -> None:
        """Nothing: there is nobody to agree with. Of several ranks, all have built the same."""

    def allocate(self, nbytes: int, name: str) -> Place:
        """Return room on the drives; the swap file grows where it has none.

        Raises:
            CapacityError: the budget's nvme, or a drive, has no more.
        """
        if align_up(nbytes, _PAGE) > self._swap.free_bytes:
            self._prune()
        missing = align_up(nbytes, _PAGE) - self._swap.free_bytes
        if missing > 0:
            left = {
                each: align_down(self._ledger.free(Tier.NVME, directory=each), _PAGE)
                for each in self._budget
            }
            if missing > sum(left.values()):
                raise CapacityError(
                    tier=Tier.NVME.name,
                    directory=", ".join(self._budget),
                    asked=nbytes,
                    free=self._swap.free_bytes + sum(left.values()),
                    limit=sum(self._budget.values()),
                    change=f"raise the budget's nvme, or name more directories in it: {name} is "
                    "the parameter that has "
                    f"no room, beside those that are there already",
                )
            self._swap.grow(_shares(max(missing, _STEP, self._swap.capacity // 4), left))
        return self._swap.allocate(nbytes, holder=name)

    def close(self) -> None:
        """Give the host's budget back.

        What was in memory is as it is; what was not cannot be had any more.
        """
        self._originals.clear()
        self._here.clear()
        self._shown.clear()
        self._host.release(self._host.held)
        self._host.close()

    # --- one parameter ----------------------------------------------------------------------------

    def _add(self, parameter: torch.Tensor, original: Original) -> Original:
        self._new += 1
        self._originals[id(parameter)] = original
        weakref.finalize(parameter, self._gone.append, (id(parameter), original))
        return original

    def _of(self, parameter: torch.Tensor) -> Original:
        if parameter not in self:
            raise ConfigError(
                field="parameter",
                value=f"one of shape {tuple(parameter.shape)}",
                expected="one that was built in this init_context and is not released",
            )
        return self._originals[id(parameter)]

    @contextmanager
    def _using(self, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
        before = self._in_use
        self._in_use = before | {id(each) for each in parameters}
        try:
            yield
        finally:
            self._in_use = before

    def _fill(self, original: Original, parameter: torch.Tensor) -> None:
        """Give a parameter that is absent memory with its values."""
        original.fill(parameter, self._swap)

    def _note(self, parameter: torch.Tensor) -> None:
        """Count the host memory that a parameter has now, and let it be the one that was used
        last.
        """
        original = self._of(parameter)
        nbytes = parameter.untyped_storage().nbytes()
        if nbytes > original.held:
            self._make_room(nbytes - original.held)
            self._host.hold(nbytes - original.held)
        else:
            self._host.release(original.held - nbytes)
        original.holds(nbytes)
        self._here.pop(id(parameter), None)
        if nbytes:
            self._here[id(parameter)] = None
        else:
            self._give_back(original)  # it has become empty

    def _leave(self, parameter: torch.Tensor) -> bool:
        """Let a parameter leave that may; tell whether it has."""
        original = self._of(parameter)
        nbytes, held = original.bytes_to_store(parameter), original.held
        if original.place is not None and original.place.nbytes != nbytes:
            self._give_back(original)
        if original.place is None and nbytes:
            original.lies_at(self.allocate(nbytes, original.name))
        with self._copying(parameter):
            original.store(parameter, self._swap)
        self._written(nbytes)
        if not original.leave(parameter):
            return False
        self._remember_shown(original)
        del self._here[id(parameter)]
        self._host.release(held)
        self._has_freed(held)
        return True

    def _has_freed(self, nbytes: int) -> None:
        """Let the system have freed memory again, where it is worth the call."""
        self._freed += nbytes
        if self._freed >= _RETURNED:
            return_freed_memory()
            self._freed = 0

    @contextmanager
    def _copying(self, parameter: torch.Tensor) -> Iterator[None]:
        """Count the copy that is made of a parameter whose elements do not lie in order."""
        nbytes = 0 if parameter.is_contiguous() else nbytes_of(parameter)
        self._host.hold(nbytes)
        try:
            yield
        finally:
            self._host.release(nbytes)

    def _remember_shown(self, original: Original) -> None:
        storage = original.shown()
        if storage is not None:
            self._shown[storage.data_ptr()] = original.shown, original

    def _read_part(self, original: Original, part: Place, into: torch.Tensor) -> None:
        self._swap.read(part, memory_of(into, writable=True), what=original.name).wait()

    # --- room -------------------------------------------------------------------------------------

    def _make_room(self, nbytes: int) -> None:
        """Let so much fit into the cache, as far as there is something that can leave.

        Raises:
            CapacityError: it does not even fit into the host's budget.
        """
        self._shrink(self._cache - nbytes)
        if self._host.held > self._cache - nbytes and self._new >= _MANY:
            self._prune()
            self._shrink(self._cache - nbytes)
        if self._host.held + nbytes > self._host.nbytes:
            self._prune()
            self.leave([each for number in self._here if (each := self._idle(number)) is not None])
        if self._host.held + nbytes > self._host.nbytes:
            raise CapacityError(
                tier=Tier.HOST.name,
                asked=nbytes,
                free=self._host.nbytes - self._host.held,
                limit=self._host.nbytes,
                holders=tuple(
                    (self._originals[each].name, self._originals[each].held) for each in self._here
                ),
                change="raise the budget's host, or let init_context's body use less at once: what "
                "stays in memory is "
                "what one call needs, and what somebody has views of, such as `weight.data` in a "
                "variable",
            )

    def _shrink(self, nbytes: int) -> None:
        """Let what was used longest ago leave until so much is held, as far as it can."""
        for number in list(self._here):
            if self._host.held <= nbytes:
                return
            parameter = self._idle(number)
            if parameter is not None:
                original = self._of(parameter)
                if original.is_asked_again() and original.may_leave(parameter):
                    self._leave(parameter)

    def _idle(self, number: int) -> torch.Tensor | None:
        """Return a parameter that is in memory, if nobody uses it just now."""
        original = self._originals.get(number)  # it may have gone meanwhile
        return None if original is None or number in self._in_use else original.parameter

    def _prune(self) -> None:
        """Let parameters go that nobody else has, nor has made another of."""
        self._new = 0
        for original in self._originals.values():
            parameter = original.parameter
            if original.is_kept and original.is_absent and parameter is not None:
                original.hide(parameter)  # anew: what it showed before is then of others alone
                self._remember_shown(original)
        self._shown = {at: each for at, each in self._shown.items() if each[0]() is not None}
        shown = Counter(id(original) for _, original in self._shown.values())
        for number, original in self._originals.items():
            own = 1 if original.is_absent else 0
            if original.is_kept and number not in self._in_use and shown[id(original)] == own:
                original.let_go()
                original.keep()
        self._bury()

    def _bury(self) -> None:
        """Give back what parameters had that nobody has any more."""
        while self._gone:
            number, original = self._gone.popleft()
            if self._originals.get(number) is original:
                self._drop(number, original)

    def _drop(self, number: int, original: Original) -> None:
        del self._originals[number]
        self._here.pop(number, None)
        self._host.release(original.held)
        self._give_back(original)

    def _give_back(self, original: Original) -> None:
        """Give back what it has on the drives."""
        place = original.lies_at(None)
        if place is not None:
            self._swap.release(place)


def _copy_of(parameter: torch.Tensor, first_element: int, values: torch.Tensor) -> None:
    """Fill a flat tensor with elements of a parameter that is in memory."""
    with plainly():
        values.copy_(parameter.detach().reshape(-1)[first_element : first_element + values.numel()])


def first_sizes(budget: Mapping[str, int]) -> dict[str, int]:
    """Return what a swap file takes of each directory before anybody knows how much it will have to
    hold.
    """
    shares = _shares(_STEP, budget)
    return {name: min(nbytes, max(2 * _PAGE, shares[name])) for name, nbytes in budget.items()}


def _shares(nbytes: int, left: Mapping[str, int]) -> dict[str, int]:
    """Return `nbytes` at least, or all that is left, in whole pages: of each directory by what is
    left there.
    """
    total = sum(left.values())
    if nbytes >= total:
        return dict(left)
    return {
        name: min(free, align_up(-(-nbytes * free // total), _PAGE)) for name, free in left.items()
    }
