"""`CapturedStates`: the optimizer's states between two steps, handed out while training goes on.

Copies nothing: it knows where each subgroup's states lie. What is in memory is handed out first, as
an update has to wait for it. What is on drives an update can leave there: it writes to another
place (`PlacesAside`). One thread hands out, and the engine's own thread waits. Made by
`StateKeeper.capture`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch

from deepnvme.memory.buffers import Memory
from infinity_engine.errors import DamageError, TransferError
from infinity_engine.optim import Segment
from infinity_engine.storage import Hop, Place

__all__ = [
    "CapturedBytes",
    "CapturedPiece",
    "CapturedRun",
    "CapturedStates",
    "CapturedSubgroup",
    "CheckShared",
    "PieceSink",
    "RunInMemory",
    "RunOnDrives",
    "StateDrives",
    "bytes_of",
]

_BYTES = 4  # of an element: masters and moments are fp32


@dataclass(frozen=True, slots=True)
class CapturedPiece:
    """One stream of one segment: its master or one of its moments."""

    segment: Segment
    stream: str

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return _BYTES * self.segment.numel


class PieceSink(Protocol):
    """What pieces are handed out to."""

    def take(self, piece: CapturedPiece, values: memoryview) -> None:
        """Take the next bytes of a piece. They must not change before `settle` returns."""
        ...

    def settle(self) -> None:
        """Return when all that was taken may change."""
        ...


CheckShared = Callable[[int, Memory], DamageError | None]
"""Compares the bytes from a place of a run on with what was written; returns the error."""


class StateDrives(Protocol):
    """The drives with states, as a save sees them. Any thread may call it."""

    def read(self, place: Place, into: memoryview) -> Hop:
        """Begin to read a place, or a part of one."""
        ...

    def share(self, place: Place, descriptor: int, offset: int) -> CheckShared:
        """Let another file have the bytes of a place without a copy."""
        ...

    def make_room(self, nbytes: int, leave: int, ranks: int) -> None:
        """Have up to so many bytes more for updates that a save would hold up.

        So many ranks do this: at least `leave` bytes of each drive stay free for their save.
        """
        ...


class CapturedBytes(Protocol):
    """Bytes that a save has still to read, as updates see them."""

    def wait_for(self, index: int) -> None:
        """Return when what a subgroup has in memory may change."""
        ...

    def reads(self, place: Place) -> bool:
        """Tell whether what is at this place on the drives has to stay there."""
        ...

    def wait_for_place(self, place: Place) -> None:
        """Return when that may change."""
        ...


class CapturedRun(Protocol):
    """Pieces with bytes that follow one another where they lie."""

    @property
    def pieces(self) -> Sequence[CapturedPiece]:
        """The pieces, in the order of their bytes."""
        ...

    def hand_out(self, sink: PieceSink, rooms: Sequence[memoryview]) -> None:
        """Hand out all bytes in order; `rooms` are for what has to be copied or read.

        What lies in rooms is settled at the end; the rest stays where it is.
        """
        ...


@dataclass(frozen=True, slots=True)
class RunInMemory:
    """One piece, in the memory of the host or of the device."""

    piece: CapturedPiece
    values: torch.Tensor

    @property
    def pieces(self) -> Sequence[CapturedPiece]:
        """The piece."""
        return (self.piece,)

    def hand_out(self, sink: PieceSink, rooms: Sequence[memoryview]) -> None:
        """Hand out the host's memory as it lies, that of a device through a room."""
        for part in bytes_of(self.values, rooms[0]):
            sink.take(self.piece, part)
            if self.values.device.type != "cpu":
                sink.settle()  # the room is filled again


@dataclass(frozen=True, slots=True)
class RunOnDrives:
    """Pieces at one place on the drives."""

    pieces: tuple[CapturedPiece, ...]
    place: Place
    drives: StateDrives

    @property
    def nbytes(self) -> int:
        """How many bytes there are."""
        return self.place.nbytes

    def share(self, descriptor: int, offset: int) -> CheckShared:
        """Let another file have the bytes without a copy; see `SwapFile.share`."""
        return self.drives.share(self.place, descriptor, offset)

    def hand_out(self, sink: PieceSink, rooms: Sequence[memoryview]) -> None:
        """Read through the rooms in turn, so that the next part is read while one is handed out."""
        pieces = _Cursor(self.pieces)
        for part in self._parts(rooms):
            done = 0
            while done < len(part):
                piece, nbytes = pieces.take(len(part) - done)
                sink.take(piece, part[done : done + nbytes])
                done += nbytes
            sink.settle()  # the room is filled again

    def _parts(self, rooms: Sequence[memoryview]) -> Iterator[memoryview]:
        step = min(map(len, rooms))  # whole MiB, and so whole blocks of checksums
        starts, free = deque(range(0, self.place.nbytes, step)), deque(rooms)
        reading: deque[tuple[Hop, memoryview, int]] = deque()
        try:
            while starts or reading:
                while starts and free:
                    start, room = starts.popleft(), free.popleft()
                    nbytes = min(step, self.place.nbytes - start)
                    hop = self.drives.read(self.place.part(start, nbytes), room[:nbytes])
                    reading.append((hop, room, nbytes))
                hop, room, nbytes = reading.popleft()
                hop.wait()
                # The other rooms are being filled while the caller has this one.
                yield room[:nbytes]
                # Only now: the caller is done with it.
                free.append(room)
        finally:
            for hop, _, _ in reading:  # no read may go on into rooms that are given back
                with suppress(TransferError):
                    hop.wait()


def bytes_of(values: torch.Tensor, room: memoryview) -> Iterator[memoryview]:
    """Yield the bytes of a flat tensor: as they lie on the host, else copied to `room` in parts."""
    flat = values.detach().view(torch.uint8)
    if flat.device.type == "cpu":
        # No copy: the tensor's own bytes.
        yield flat.numpy().data
        return
    copy = torch.frombuffer(room, dtype=torch.uint8)
    for first in range(0, len(flat), len(copy)):
        part = flat[first : first + len(copy)]
        # copy_ returns when the bytes are here.
        copy[: len(part)].copy_(part)
        yield room[: len(part)]


class _Cursor:
    """Walks along pieces by bytes."""

    def __init__(self, pieces: Sequence[CapturedPiece]) -> None:
        self._pieces = deque(pieces)
        self._left = pieces[0].nbytes

    def take(self, most: int) -> tuple[CapturedPiece, int]:
        """Return the next piece, and how many bytes of it are next: `most` or fewer."""
        piece, nbytes = self._pieces[0], min(most, self._left)
        self._left -= nbytes
        if not self._left:
            self._pieces.popleft()
            self._left = self._pieces[0].nbytes if self._pieces else 0
        return piece, nbytes


@dataclass(frozen=True, slots=True)
class CapturedSubgroup:
    """What one subgroup has in memory."""

    index: int
    runs: tuple[RunInMemory, ...]


class CapturedStates:
    """The states of all subgroups, in the order in which they are handed out."""

    def __init__(
        self, in_memory: Sequence[CapturedSubgroup], on_drives: Sequence[RunOnDrives]
    ) -> None:
        self._in_memory = deque(in_memory)
        self._on_drives = deque(on_drives)
        of_memory = (run for subgroup in in_memory for run in subgroup.runs)
        runs: list[CapturedRun] = [*of_memory, *on_drives]
        self.pieces = [piece for run in runs for piece in run.pieces]
        """What is handed out, in its order."""
        self._left = {subgroup.index for subgroup in in_memory}
        self._places = {run.place for run in on_drives}
        # Guards both sets: the saving thread takes out, and the engine's thread waits for that.
        self._changed = threading.Condition()

    def runs_on_drives(self) -> list[RunOnDrives]:
        """Return what lies on drives."""
        return list(self._on_drives)

    def without(self, runs: Sequence[RunOnDrives]) -> CapturedStates:
        """Return the states that are not in these runs."""
        gone = set(map(id, runs))
        left = [run for run in self._on_drives if id(run) not in gone]
        return CapturedStates(list(self._in_memory), left)

    @classmethod
    def nothing(cls) -> CapturedStates:
        """Return those of no subgroup, for which nothing waits."""
        return cls((), ())

    def make_room(self, leave: int, ranks: int, *, beside: bool) -> None:
        """Let updates `beside` this write elsewhere what they come to before it was handed out.

        So many ranks do this: at least `leave` bytes of each drive stay free for their save.
        """
        if self._on_drives:
            nbytes = sum(run.nbytes for run in self._on_drives) if beside else 0
            self._on_drives[0].drives.make_room(nbytes, leave, ranks)

    def hand_out(self, sink: PieceSink, rooms: Sequence[memoryview]) -> None:
        """Hand out the bytes of each piece, in the order of `pieces`. Once."""
        while self._in_memory:
            subgroup = self._in_memory.popleft()
            for run in subgroup.runs:
                run.hand_out(sink, rooms)
            sink.settle()
            # Last: from here on an update may change the bytes that were handed out.
            self._let_go([subgroup.index], [])
        while self._on_drives:
            on_drives = self._on_drives.popleft()
            on_drives.hand_out(sink, rooms)
            self._let_go([], [on_drives.place])

    def let_go(self) -> None:
        """Let all subgroups change: whatever was not handed out by now never is."""
        self._in_memory.clear()
        self._on_drives.clear()
        self._let_go(list(self._left), list(self._places))

    def is_left(self, index: int) -> bool:
        """Tell whether what a subgroup has in memory has to stay as it is."""
        return index in self._left

    def wait_for(self, index: int) -> None:
        """Return when what a subgroup has in memory may change."""
        with self._changed:
            self._changed.wait_for(lambda: index not in self._left)

    def reads(self, place: Place) -> bool:
        """Tell whether what is at this place on the drives has to stay there."""
        return place in self._places

    def wait_for_place(self, place: Place) -> None:
        """Return when that may change."""
        with self._changed:
            self._changed.wait_for(lambda: place not in self._places)

    def _let_go(self, indices: Sequence[int], places: Sequence[Place]) -> None:
        with self._changed:
            self._left.difference_update(indices)
            self._places.difference_update(places)
            self._changed.notify_all()
