"""`PlacesAside`: where updates write while a save still reads the place that they would overwrite.

A place on the drives is a home. An update that comes to it before the save has read it writes to a
place aside, and a later update writes home again.
"""

from __future__ import annotations

from infinity_engine.storage import Place, SwapFile
from infinity_engine.update.captured import CapturedBytes, CapturedStates

__all__ = ["PlacesAside"]


class PlacesAside:
    """The places aside of one engine's states in `swap`; None: it has none on drives."""

    def __init__(self, swap: SwapFile | None) -> None:
        self._drives = swap
        self._captured: CapturedBytes = CapturedStates.nothing()
        self._aside: dict[Place, Place] = {}  # by home
        self._homes: dict[Place, Place] = {}  # the other way round
        # Left for home. A save that began in between reads them.
        self._left: list[Place] = []

    def before_changes(self, captured: CapturedBytes) -> None:
        """Ask this which places have to stay as they are."""
        self._captured = captured

    @property
    def _swap(self) -> SwapFile:
        assert self._drives is not None, "only what is on drives is overwritten there"
        return self._drives

    def make_room(self, nbytes: int, leave: int, ranks: int) -> None:
        """Have up to so many bytes of the drives for places aside; see `SwapFile.have_spare`."""
        self._swap.have_spare(nbytes, leave=leave, ranks=ranks)

    def target(self, place: Place) -> Place:
        """Return where what lies at `place` may be written now: there, at home or aside.

        Waits for the save where there is no room for a place aside.
        """
        self._release_left()
        home = self._homes.get(place, place)
        if not self._captured.reads(home):
            if home != place:
                self._left.append(place)
                del self._homes[place], self._aside[home]
            return home
        # Whatever is aside already: the save began before that was written, and does not read it.
        if home != place or self._leave(home):
            return self._aside[home]
        self._captured.wait_for_place(home)
        return home

    def wait_for(self, place: Place) -> None:
        """Return when a place that has no place aside may be written."""
        if self._captured.reads(place):
            self._captured.wait_for_place(place)

    def close(self) -> None:
        """Give back the places that states have left, aside or at home."""
        for place in [*self._left, *self._aside]:
            self._swap.release_spare(place)
        self._left, self._aside, self._homes = [], {}, {}

    def _leave(self, home: Place) -> bool:
        """Find a place aside; tell whether there is one."""
        aside = self._swap.spare_place(home, holder="states beside a checkpoint")
        if aside is not None:
            self._aside[home], self._homes[aside] = aside, home
        return aside is not None

    def _release_left(self) -> None:
        if self._left:
            reads = self._captured.reads
            gone = [place for place in self._left if not reads(place)]
            self._left = [place for place in self._left if reads(place)]
            for place in gone:
                self._swap.release_spare(place)
