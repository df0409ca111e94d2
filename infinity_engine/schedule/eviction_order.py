"""`EvictionOrder`: which resident members leave first, kept sorted as members come and are used."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping

__all__ = ["EvictionOrder"]

# Sorted ascending, and the last one leaves first: whether it may leave between passes, its next
# use, its last use or arrival as 0 or less (the latest is the least), its number.
_Key = tuple[bool, int, int, int]


class EvictionOrder:
    """The order in which `members` leave: the farthest next use first, then the oldest last use.

    `pinned` members never leave, `held` ones not while they are held, and those of `let_stay` after
    all others. Most sets have room and never ask, so it sorts when it is first asked, and stays
    sorted until `restart`. The owner changes `members` and `held`; `members` are in the order of
    their last uses, of which an arrival is one.
    """

    def __init__(
        self,
        members: Mapping[int, object],
        held: Container[int],
        next_use: Callable[[int], int],
        pinned: Collection[int] = (),
    ) -> None:
        self._members = members
        self._held = held
        self._next_use = next_use
        self._pinned = frozenset(pinned)
        self._staying: Collection[int] = ()
        self._keys: dict[int, _Key] = {}
        self._sorted: list[_Key] = []  # the first to leave at the end
        self._uses = 0  # and arrivals
        self._is_sorted = False

    def idle(self, *, staying: bool) -> Iterator[int]:
        """Yield those that may leave, the first to leave first; of `let_stay` only if `staying`."""
        if not self._is_sorted:
            self._sort()
        for leaves, _, _, number in reversed(self._sorted):
            if not (leaves or staying):
                return
            if number not in self._held:
                yield number

    def restart(self) -> None:
        """Forget the order: any member's next use may have changed."""
        self._is_sorted = False

    def let_stay(self, numbers: Collection[int]) -> None:
        """Let these members leave after all others from now on; those of the call before do not."""
        self._staying = numbers
        self.restart()

    def add(self, number: int) -> None:
        """Note a member that has come."""
        if self._is_sorted and number not in self._pinned:
            self._insert(number)

    def remove(self, number: int) -> None:
        """Note a member that has left."""
        if self._is_sorted and number in self._keys:
            self._take_out(number)

    def note_use(self, numbers: Iterable[int]) -> None:
        """Note which members were used, as predicted: only their next uses have changed."""
        if self._is_sorted:
            for number in numbers:
                if number in self._keys:
                    self._take_out(number)
                    self._insert(number)

    def _sort(self) -> None:
        movable = [number for number in self._members if number not in self._pinned]
        self._keys = {number: self._key(number, at) for at, number in enumerate(movable)}
        self._sorted = sorted(self._keys.values())
        self._uses = len(movable)
        self._is_sorted = True

    def _key(self, number: int, last_use: int) -> _Key:
        return number not in self._staying, self._next_use(number), -last_use, number

    def _insert(self, number: int) -> None:
        key = self._keys[number] = self._key(number, self._uses)
        self._uses += 1
        insort(self._sorted, key)

    def _take_out(self, number: int) -> None:
        del self._sorted[bisect_left(self._sorted, self._keys.pop(number))]
