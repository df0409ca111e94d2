"""`ResidentSet`: which members are resident in one memory, who holds them, and which leave first.

Counts their bytes against one limit and follows the trace of uses. Every decision is a pure
function of these (schedule/prefetch.py). Starts no move: its owner brings members and evicts the
ones that are named here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from infinity_engine.errors import TraceMismatch
from infinity_engine.schedule.eviction_order import EvictionOrder
from infinity_engine.schedule.passes import PassCursor, kept_between_passes
from infinity_engine.schedule.prefetch import Fetches, choose_fetches
from infinity_engine.schedule.trace import NEVER, Use

__all__ = ["FetchingStats", "ResidentSet"]

_FURTHEST = 256  # uses that are looked at for what they lack

_Entry = TypeVar("_Entry")


@dataclass(kw_only=True, slots=True)
class FetchingStats:
    """What was brought since the beginning.

    `in_time` counts needs of members that were resident or in flight by then, `late` the others.
    """

    fetched: int = 0
    fetched_bytes: int = 0
    in_time: int = 0
    late: int = 0

    def count_brought(self, nbytes: int) -> None:
        """Count one more that was brought."""
        self.fetched += 1
        self.fetched_bytes += nbytes

    def count_needs(self, *, in_time: int, late: int) -> None:
        """Count needs."""
        self.in_time += in_time
        self.late += late


class ResidentSet(Generic[_Entry]):
    """Members by number, of `nbytes` each, within `limit` bytes.

    Each has an entry, which its owner defines. `pinned` members are never evicted for room, and
    `beside` tells how many bytes of the limit other things take at the moment.
    """

    def __init__(
        self,
        nbytes: Mapping[int, int],
        limit: int,
        *,
        pinned: Collection[int] = (),
        beside: Callable[[], int] | None = None,
    ) -> None:
        self.limit = limit
        self._nbytes = nbytes
        self._beside = beside
        self._entries: dict[int, _Entry] = {}
        self._reserved: dict[int, None] = {}  # in the order of their reservations
        self.held: dict[int, int] = {}  # members, resident or not, and how many holders each has
        self._used = 0  # bytes of members and reservations
        self._trace = PassCursor()
        self._order = EvictionOrder(self._entries, self.held, self._trace.next_use, pinned)
        # Every use before this position of the trace has its members, resident or in flight.
        self._ahead = 0
        self._taken = 0  # and before this one, reservations counted as well
        self.stats = FetchingStats()

    # --- uses -------------------------------------------------------------------------------------

    def record_use(self, use: Use) -> None:
        """Record that this use is now."""
        for number in use.parameters:
            if number in self._entries:
                self._entries[number] = self._entries.pop(number)  # now the one used last
        if self._trace.record_use(use):
            self._order.note_use(use.parameters)
        else:
            # After a jump in the trace, nothing ahead is known to be there.
            self._ahead = self._taken = self._trace.at
            self._order.restart()

    def next_use(self, number: int) -> int:
        """Return the position of the trace at which a member is needed next; NEVER if it is not."""
        return self._trace.next_use(number)

    def upcoming(self, look_ahead: int) -> Sequence[tuple[int, Use]]:
        """Return the next uses, with their positions, of which some may lack a member."""
        at = self._trace.at
        return self._trace.upcoming(max(self._ahead, at), at + look_ahead)

    def expect(self, uses: Sequence[Use]) -> None:
        """Predict these uses, of which the first is next, where no step has shown any."""
        self._trace.expect(uses)
        self._ahead = self._taken = 0
        self._order.restart()

    def begin_pass(self) -> None:
        """Note that the outermost call of a module begins."""
        self._trace.begin_pass()

    def end_pass(self) -> None:
        """Note that the outermost call has ended without a graph: it may come again."""
        repeated = self._trace.end_pass()
        if repeated:
            self._ahead = self._taken = 0
            self._order.let_stay(kept_between_passes(repeated, self._nbytes, self.limit))

    def end_step(self) -> TraceMismatch | None:
        """Start the next step's trace; return where this step left that of the one before."""
        mismatch = self._trace.end_step()
        self._ahead = self._taken = 0
        self._order.let_stay(())
        return mismatch

    # --- holders ----------------------------------------------------------------------------------

    def hold(self, numbers: Iterable[int]) -> None:
        """Keep members resident, once they are, until they are let go as often."""
        for number in numbers:
            self.held[number] = self.held.get(number, 0) + 1

    def let_go(self, numbers: Iterable[int]) -> None:
        """Undo one `hold` of each."""
        for number in numbers:
            self.held[number] -= 1
            if not self.held[number]:
                del self.held[number]

    # --- members ----------------------------------------------------------------------------------

    def __contains__(self, number: int) -> bool:
        return number in self._entries

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def __getitem__(self, number: int) -> _Entry:
        return self._entries[number]

    @property
    def free(self) -> int:
        """The bytes of the limit that are left: negative where more is in use than it allows."""
        left = self.limit - self._used
        return left if self._beside is None else left - self._beside()

    @property
    def used(self) -> int:
        """The bytes of members and reservations."""
        return self._used

    def admit(self, number: int, entry: _Entry) -> None:
        """Count a member that is resident from now on, or in flight."""
        self._entries[number] = entry
        self._order.add(number)
        self._used += self._nbytes[number]
        self.stats.count_brought(self._nbytes[number])

    def remove(self, number: int) -> _Entry:
        """Count a member no more, and return its entry."""
        self._used -= self._nbytes[number]
        # Its next use lacks a member from now on.
        self.fetch_again(number)
        self._order.remove(number)
        return self._entries.pop(number)

    def reserve(self, number: int) -> None:
        """Take room for a member with values that arrive piece by piece."""
        self._reserved[number] = None
        self._used += self._nbytes[number]

    def complete(self, number: int, entry: _Entry) -> None:
        """Turn a reservation into a member: all of its pieces are here, or in flight."""
        del self._reserved[number]
        self._entries[number] = entry
        self._order.add(number)

    def cancel(self, number: int) -> None:
        """Give the room of a reservation back."""
        del self._reserved[number]
        self._used -= self._nbytes[number]
        self.fetch_again(number)

    def fetch_again(self, number: int) -> None:
        """Look again, when prefetching, at the next use of a member that could not come yet."""
        position = self._trace.next_use(number)
        if self._ahead > self._trace.at:
            self._ahead = min(self._ahead, position)
        self._taken = min(self._taken, position)

    # --- decisions --------------------------------------------------------------------------------

    def idle(self) -> Iterator[int]:
        """Yield the members that may be evicted, the farthest next use first.

        Those that stay from pass to pass come last. The order is that of now: it ends where a
        member comes or leaves.
        """
        return self._order.idle(staying=True)

    def evictions(self, nbytes: int) -> Iterator[int]:
        """Yield what is to leave, one at a time, until `nbytes` are free or nothing can leave.

        Reservations leave last, and the newest of them first: something else still makes their
        values. The caller evicts each before it asks for the next.
        """
        while nbytes > self.free:
            leaving = next(self.idle(), None)
            if leaving is None:
                leaving = next(reversed(self._reserved), None)
            if leaving is None:
                return
            yield leaving

    def may_reserve(self, number: int) -> bool:
        """Tell whether room for a member would be none that others need sooner.

        What is needed now comes first, then the uses of the trace in their order. Out of order it
        may come where there is room for all of these as well.
        """
        if number in self.held:
            return True
        if not all(map(self._has_room, self.held)):
            return False
        uses = self._trace.trace.uses
        self._taken = at = max(self._taken, self._trace.at)
        position = min(self._trace.next_use(number), len(uses))
        lacking = 0
        # From there on as far as is known, and not for ever: asked for each piece of each member.
        while at < position:
            for other in uses[at].parameters:
                lacking += 0 if self._has_room(other) else self._nbytes[other]
            at += 1
            if not lacking:
                self._taken = at
            elif lacking + self._nbytes[number] > self.free or at > self._taken + _FURTHEST:
                return False
        return True

    def _has_room(self, number: int) -> bool:
        return number in self._entries or number in self._reserved

    def room_before(self, number: int) -> Iterator[int]:
        """Yield what is to leave for a member that is not needed yet: only what is needed later."""
        at = self._trace.next_use(number)
        while at != NEVER and self._nbytes[number] > self.free:
            idle = next(self.idle(), None)
            # Behind this one all are needed sooner.
            if idle is None or self.next_use(idle) <= at:
                return
            yield idle

    def choose(
        self,
        upcoming: Sequence[tuple[int, Use]],
        *,
        is_unmade: Callable[[int], bool] | None = None,
    ) -> Fetches:
        """Decide what to bring for upcoming uses, and what leaves for that.

        An unmade member does not have all of its new values yet, so it cannot be brought whole.
        """
        chosen = choose_fetches(
            upcoming,
            nbytes=self._nbytes,
            # A reservation cannot be evicted for a prefetch: values are on their way to it.
            cached=self._entries.keys() | self._reserved if self._reserved else self._entries,
            idle=self._order.idle(staying=False),
            free=self.free,
            next_use=self._trace.next_use,
            is_unmade=is_unmade,
        )
        if upcoming:
            self._ahead = upcoming[0][0] + chosen.provided
        return chosen

    def note_needs(self, numbers: Collection[int]) -> list[int]:
        """Count members that are needed now; return those that are neither resident nor in flight.

        `numbers` has no duplicates; the result keeps their order.
        """
        late = [number for number in numbers if number not in self._entries]
        self.stats.count_needs(in_time=len(numbers) - len(late), late=len(late))
        return late
