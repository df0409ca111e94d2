"""`Volume`: reserved space in one or several directories.

Hands out extents, and moves bytes to and from them.

The one class for extents and striping (decision 0004). Knows no names, no checksums and no
generations. It remembers which bytes are in use only while it is open: a caller that opens one says
again which are (`reserve`).
"""

from __future__ import annotations

import errno
import math
import os
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeAlias

from deepnvme.choices import as_bytes, byte_count, chosen
from deepnvme.closing import Closing
from deepnvme.errors import (
    ClosedError,
    ForkedError,
    VolumeError,
    VolumeFullError,
    VolumeLockedError,
)
from deepnvme.memory.buffers import Memory, memory_of
from deepnvme.queue.future import IOFuture
from deepnvme.queue.leftovers import Leftover, at_end_of
from deepnvme.queue.pipeline import once_there_is_room
from deepnvme.queue.queue import Batch, IOQueue
from deepnvme.sizes import PAGE, whole_pages
from deepnvme.volume.extents import Extent, SpaceMap
from deepnvme.volume.member import MEASURED_BYTES, Access, Header, MemberFile, measure_rates

__all__ = ["Member", "MemberStats", "Members", "Volume", "members_of"]

_Directory: TypeAlias = "Member | str | bytes | os.PathLike[str]"
_Verb = Callable[[MemberFile, Memory, int], IOFuture[int]]

_LARGEST = (1 << 63) - 2 * PAGE  # bytes that a file can hold behind the header
_DIRECTORIES = "expected a directory, or a list of directories, one per drive; got {got}"
_STRIPED = 1 << 20  # bytes per member from which on an allocation is split over all members


@dataclass(frozen=True)
class Member:
    """A directory of a volume, where it needs more than its path.

    `queue`: its own IOQueue, else the volume's.
    `rate`: its speed, in any unit that all members use; measured where no member gives one.
    `capacity`: its bytes for use, where the volume is given none; then every member gives one.
    """

    path: str | os.PathLike[str]
    queue: IOQueue | None = None
    rate: float | None = None
    capacity: int | str | None = None


Members: TypeAlias = "_Directory | Iterable[_Directory]"
"""One directory, or several, one per drive."""


@dataclass(frozen=True)
class MemberStats:
    """One member: its space, in bytes of whole pages; the bytes submitted since it was opened."""

    directory: str
    capacity: int
    free_bytes: int
    largest_free: int
    share: float  # its part of an allocation that is split over all members
    read_bytes: int
    written_bytes: int

    @property
    def used_bytes(self) -> int:
        """Bytes in use."""
        return self.capacity - self.free_bytes


@dataclass(frozen=True)
class _Part:
    """A member of an open volume."""

    member: MemberFile
    space: SpaceMap
    share: float


class Volume(Closing):
    """Space on drives.

    Made by `create`, `open` and `temporary`; closed by `close()` or as a context manager.

    An `allocate` of 1 MiB per member or more is split over the members in the ratio of their
    speeds; a smaller one goes whole to the member that is furthest behind its share. Any thread may
    call.
    """

    def __init__(
        self, files: Sequence[MemberFile], headers: Sequence[Header], own: IOQueue | None
    ) -> None:
        self.uuid = headers[0].volume
        self.rates = headers[0].rates
        total = sum(self.rates)
        self._parts = tuple(
            _Part(file, SpaceMap(PAGE, PAGE + header.capacity), rate / total)
            for file, header, rate in zip(files, headers, self.rates, strict=True)
        )
        # Guards the space maps. Not held while an operation is submitted: that may wait for room.
        self._changing = threading.Lock()
        self._owner = os.getpid()
        # Held for a whole growth or trim, which waits for drives. Space is taken meanwhile.
        self._growing = threading.Lock()
        self._closed = False
        # Refers to the files, not to the volume: one that is dropped without close() is closed.
        self._finalizer = at_end_of(self, partial(_shut_down, tuple(files), own))

    @classmethod
    def create(
        cls,
        members: Members,
        capacity: int | str | None = None,
        *,
        queue: IOQueue | None = None,
    ) -> Volume:
        """Make a volume in directories that are empty, or new in a parent that exists.

        `capacity` is the bytes for use in all, split in the ratio of the members' speeds, unless
        each `Member` has its own. Each file is one page longer. When this fails, nothing is left
        behind.

        Raises:
            VolumeError: a directory holds something, or its drive has no such room.
        """
        return _made(members, capacity, queue, MemberFile.make)

    @classmethod
    def temporary(
        cls,
        members: Members,
        capacity: int | str | None = None,
        *,
        queue: IOQueue | None = None,
    ) -> Volume:
        """Make a volume of files without names, one on the drive of each directory given.

        They end when it is closed, or with the process, also where that is killed. On a file system
        that cannot make such files, a process that is killed while it makes one may leave an empty
        file `.deepnvme-<32 hex digits>`.

        Raises:
            VolumeError: there is no such directory, or its drive has no such room.
        """
        return _made(members, capacity, queue, MemberFile.make_temporary)

    @classmethod
    def open(
        cls,
        members: Members,
        *,
        access: Access = Access.WRITE,
        queue: IOQueue | None = None,
    ) -> Volume:
        """Open a volume by all of its directories, in any order.

        All its space is free until `reserve` takes it.

        Raises:
            VolumeError: one is missing, damaged or of another volume.
            VolumeLockedError: another process has it open for writing, or for reading where
                `access` is for writing.
        """
        specs = members_of(members)
        access = chosen(Access, access, "access")
        _check_apart(specs)
        for spec in specs:
            if spec.rate is not None or spec.capacity is not None:
                raise ValueError(
                    f"{os.fspath(spec.path)}: rate and capacity were settled when the volume was "
                    "made. Leave them out to open it"
                )
        Leftover.end_if_many()
        with ExitStack() as undo:
            # Made first, so closed last: the files close while their queue still works.
            own = _own_queue(specs, queue, undo)
            held = []
            for spec in specs:
                file = _held(Path(spec.path), access)
                undo.callback(file.close)
                held.append((file.read_header(), file, spec.queue or queue or own))
            # By number, which extents name members by.
            held.sort(key=lambda entry: entry[0].member)
            _check_together([(header, file.directory) for header, file, _ in held])
            for _, file, through in held:
                assert through is not None
                file.open(through)
            volume = cls([file for _, file, _ in held], [header for header, *_ in held], own)
            undo.pop_all()  # the volume closes them from here on
        return volume

    @property
    def access(self) -> Access:
        """Whether it is open for reading or for writing."""
        return self._parts[0].member.access

    @property
    def directories(self) -> tuple[Path, ...]:
        """The members' directories, in order."""
        return tuple(part.member.directory for part in self._parts)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The members' files as errors name them, in order."""
        return tuple(part.member.path for part in self._parts)

    @property
    def queues(self) -> tuple[IOQueue, ...]:
        """The queues of the members, in order; often one and the same."""
        return tuple(part.member.queue for part in self._parts)

    @property
    def capacities(self) -> tuple[int, ...]:
        """The bytes for use of each member, in order."""
        return tuple(part.space.end - part.space.start for part in self._parts)

    @property
    def free_bytes(self) -> int:
        """Bytes of the pages that are not in use."""
        self._refuse_if_forked()
        with self._changing:
            return self._free()

    def stats(self) -> tuple[MemberStats, ...]:
        """Return the state of each member."""
        self._refuse_if_forked()
        with self._changing:
            return tuple(
                MemberStats(
                    directory=str(part.member.directory),
                    capacity=part.space.end - part.space.start,
                    free_bytes=part.space.free_bytes,
                    largest_free=part.space.largest,
                    share=part.share,
                    read_bytes=part.member.read_bytes,
                    written_bytes=part.member.written_bytes,
                )
                for part in self._parts
            )

    def allocate(self, nbytes: int) -> tuple[Extent, ...]:
        """Take `nbytes` of space, in one extent or one per member, or more where it is in pieces.

        All extents but the last are whole pages.

        Raises:
            VolumeFullError: so much is not free. Nothing was taken.
        """
        if nbytes < 0:
            raise ValueError(f"nbytes must not be negative, got {nbytes}")
        self._check_writable()
        with self._changing:
            # First, and of all members: nothing is taken that would have to be given back.
            if whole_pages(nbytes) > self._free():
                raise self._full(nbytes)
            return tuple(
                extent
                for index, wanted in self._split(nbytes)
                for extent in self._take(index, wanted)
            )

    def allocate_run(self, sizes: Sequence[int]) -> list[Extent]:
        """Take an extent for each of `sizes`, side by side: one operation moves such a run.

        Where no free piece holds all, there are several runs: as many extents as the largest piece
        holds, then the next. Extents are in one run where the next begins at the `end` of the one
        before, in the same member.

        Raises:
            VolumeFullError: no free piece holds one of them, where `allocate` may use several
                pieces. Nothing was taken.
        """
        if min(sizes, default=1) < 1:
            raise ValueError(f"sizes must be at least 1 byte each, got {min(sizes)}")
        self._check_writable()
        taken: list[Extent] = []
        with self._changing:
            while len(taken) < len(sizes):
                # Without releasing the lock: another thread's piece would part the run.
                run = self._take_run(sizes[len(taken) :])
                taken += run
                if not run:
                    failed = self._full(sum(map(whole_pages, sizes)))
                    self._give(taken)
                    raise failed
        return taken

    def release(self, extents: Iterable[Extent]) -> None:
        """Give space back. The caller has waited for all reads and writes of it.

        Raises:
            ValueError: some of it is not in use, or not of this volume; those before it are
                released.
        """
        self._check_open()
        with self._changing:
            self._give(extents)

    def reserve(self, extents: Iterable[Extent]) -> None:
        """Take exactly this space, which holds something by the caller's records.

        Raises:
            ValueError: some of it is in use, or not of this volume; those before it are reserved.
        """
        self._check_open()
        with self._changing:
            for extent in extents:
                part = self._part_of(extent)
                try:
                    part.space.reserve(extent.offset, extent.nbytes)
                except ValueError as error:
                    raise ValueError(f"{part.member.directory}: {error}") from None

    def pread(self, extents: Sequence[Extent], buffer: Any) -> list[IOFuture[int]]:
        """Fill `buffer` from the extents, one after the other. One future per extent."""
        return self._submit(extents, memory_of(buffer, writable=True), MemberFile.pread)

    def pwrite(self, extents: Sequence[Extent], buffer: Any) -> list[IOFuture[int]]:
        """Write `buffer` to the extents, one after the other. One future per extent."""
        self._check_writable()
        return self._submit(extents, memory_of(buffer, writable=False), MemberFile.pwrite)

    def share(self, extents: Sequence[Extent], descriptor: int, offset: int) -> None:
        """Let another file have the pages of these extents from `offset` on.

        Nothing is copied: it is a reflink. When either file is written to later, the file system
        gives that file new blocks, so neither sees the change. All writes to the extents must have
        ended.

        Raises:
            OSError: the file system cannot share (EOPNOTSUPP), or the file is on another (EXDEV).
        """
        self._check_open()
        for extent in extents:
            pages = whole_pages(extent.nbytes)
            self._part_of(extent).member.share(extent.offset, pages, descriptor, offset)
            offset += pages

    def sync(self) -> None:
        """Make every write submitted before durable, on all members at once, and wait for that.

        Raises:
            NVMeError: a member failed; a BatchError where several did.
        """
        batch = Batch()
        with batch:
            # All are asked before any is waited for: the drives sync at the same time.
            for part in self._parts:
                # A queue that refuses when it is full would leave a member without its sync.
                batch.futures.append(once_there_is_room(part.member.file.sync))

    def grow(self, nbytes: int | str) -> None:
        """Reserve `nbytes` more on the drives, split in the ratio of the members' speeds.

        Durable when it returns. Reserving is slow: do it while nothing waits for the drives.

        Raises:
            VolumeError: a drive has no such room; nothing has changed.
        """
        more = byte_count("the bytes that a volume grows by", nbytes, 1)
        self.grow_members(_shared_out(more, self.rates))

    def grow_members(self, sizes: Sequence[int]) -> None:
        """Reserve more on the drives: `sizes` has bytes for each member, in order; some may be 0.

        Rounds them up to whole pages.

        Raises:
            VolumeError: a drive has no such room; nothing has changed.
        """
        if len(sizes) != len(self._parts) or min(sizes) < 0 or not any(sizes):
            raise ValueError(
                f"sizes must have one number for each of {len(self._parts)} members, none negative "
                f"and not all 0; got {sizes}"
            )
        self._check_writable()
        with self._growing:
            # Only a growth or a trim moves an end, so these stay right without `_changing`.
            ends = [
                part.space.end + whole_pages(more)
                for part, more in zip(self._parts, sizes, strict=True)
            ]
            headers = [
                Header(self.uuid, index, end - PAGE, self.rates) for index, end in enumerate(ends)
            ]
            grown = [
                member
                for member in zip(self._parts, ends, headers, strict=True)
                if member[1] > member[0].space.end
            ]
            with ExitStack() as undo:
                for part, end, header in grown:
                    part.member.check_replaceable(header)
                    # Before it is lengthened, which may fail half done.
                    undo.callback(part.member.cut_off, part.member.length)
                    part.member.lengthen(part.space.end, end)
                undo.pop_all()  # a header on a drive may count on the new bytes from here on
            for part, end, header in grown:
                # A crash between two headers leaves members of old and of new capacity, all of them
                # sound.
                part.member.write_header(header)
                # Not before the header is durable: `open` ignores bytes that it does not count.
                with self._changing:
                    part.space.extend(end)

    def trim(self, most: Sequence[int] = ()) -> tuple[int, ...]:
        """Give the drives back what is free behind the last piece in use; return these bytes for
        each member, in order.

        A member keeps at least one page for use. With `most`, bytes of whole pages for each member,
        it gives back no more than these. Free pieces between others in use stay the volume's.

        Raises:
            ValueError: `most` has not one number of whole pages for each member.
            VolumeError: the volume has too many members for its headers to be changed; nothing has
                changed.
        """
        if most and len(most) != len(self._parts):
            raise ValueError(
                f"most must have a number for each of {len(self._parts)} members, got {len(most)}"
            )
        # A header whose capacity is no whole pages would not open again.
        wrong = [nbytes for nbytes in most or () if nbytes < 0 or nbytes % PAGE]
        if wrong:
            raise ValueError(f"most must have whole pages of {PAGE} B, got {wrong[0]}")
        self._check_writable()
        with self._growing:
            for index, part in enumerate(self._parts):
                part.member.check_replaceable(
                    Header(self.uuid, index, part.space.end - PAGE, self.rates)
                )
            # The maps first: nothing is placed in bytes that are about to be cut off.
            with self._changing:
                limits: Sequence[int | None] = most or (None,) * len(self._parts)
                trimmed = tuple(
                    part.space.trim(limit) for part, limit in zip(self._parts, limits, strict=True)
                )
            for index, part in enumerate(self._parts):
                if trimmed[index]:
                    # Before the file is cut: one that is longer than its header says is sound.
                    part.member.write_header(
                        Header(self.uuid, index, part.space.end - PAGE, self.rates)
                    )
                    part.member.cut_off(part.space.end)
        return trimmed

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return self._closed

    def close(self) -> None:
        """Wait for reads and writes, unlock the directories; remove them if temporary.

        Again: does what is left.
        """
        # First: other threads take no space and write no more while the files are being closed.
        self._closed = True
        if state := self._finalizer.peek():
            # Not by calling the finalizer, which is dead from its first line on: after Ctrl-C, a
            # second close() could not go on.
            _, _, (_, shut_down, *_), _ = state
            shut_down()
            self._finalizer.detach()  # last: interrupted before, it is done again

    def __del__(self) -> None:
        """Close, unless the garbage collector has found it: another thread does it then."""
        finalizer = getattr(self, "_finalizer", None)  # none where __init__ raised
        if finalizer is not None and finalizer.alive:
            self.close()

    def discard(self) -> None:
        """Close, and remove the members' files: what was made is not wanted after all."""
        self._check_access()
        for part in self._parts:
            part.member.discard()
        self.close()

    def __repr__(self) -> str:
        """Show where it is and how much is free."""
        where = ", ".join(str(directory) for directory in self.directories)
        if os.getpid() != self._owner:
            return f"Volume({where}; of process {self._owner})"
        return f"Volume({where}; {'closed' if self.closed else f'{self.free_bytes} B free'})"

    def _refuse_if_forked(self) -> None:
        """Refuse in a forked child: the thread that holds the lock may not exist there."""
        if os.getpid() != self._owner:
            raise ForkedError(
                f"this volume belongs to process {self._owner}; a forked child opens one of its own"
            )

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(
                f"the volume in {self.directories[0]} is closed: open it again to use it"
            )

    def _check_writable(self) -> None:
        self._check_open()
        self._check_access()

    def _check_access(self) -> None:
        if self.access is Access.READ:
            raise VolumeError(
                errno.EBADF, "it was opened for reading: open it with Access.WRITE to change it",
                path=str(self.directories[0]),
            )  # fmt: skip

    def _free(self) -> int:
        """Return the free bytes, with the lock held."""
        return sum(part.space.free_bytes for part in self._parts)

    def _split(self, nbytes: int) -> list[tuple[int, int]]:
        """Return the members that the bytes go to, and how many go to each, in order."""
        # Less goes whole to one drive: more operations would cost more than several drives gain.
        if nbytes < _STRIPED * len(self._parts) or len(self._parts) == 1:
            return [(self._by_need(nbytes)[0], nbytes)] if nbytes else []
        shares = accumulate(part.share for part in self._parts[:-1])
        # At pages: every piece but the last then goes past the page cache.
        cuts = [0, *(min(nbytes, round(nbytes * share / PAGE) * PAGE) for share in shares), nbytes]
        return [
            (index, end - start) for index, (start, end) in enumerate(pairwise(cuts)) if start < end
        ]

    def _by_need(self, nbytes: int) -> list[int]:
        """Return the members; first the one furthest behind its share, were there `nbytes` more."""
        used = [part.space.end - part.space.start - part.space.free_bytes for part in self._parts]
        total = sum(used) + nbytes
        # Below 0: behind its share.
        return sorted(
            range(len(used)), key=lambda index: used[index] - self._parts[index].share * total
        )

    def _take(self, first: int, nbytes: int) -> list[Extent]:
        """Take `nbytes`, which are free: in one piece, if possible of member `first`; else in the
        largest pieces.
        """
        # One piece of any member rather than several of `first`: each piece is one more operation.
        for index in (first, *self._by_need(nbytes)):
            offset = self._parts[index].space.take(nbytes)
            if offset is not None:
                return [Extent(index, offset, nbytes)]
        taken = []
        while nbytes:
            index = self._roomiest()
            piece = self._parts[index].space.take_most(nbytes)
            assert piece is not None, "the caller saw that there is room"
            taken.append(Extent(index, *piece))
            nbytes -= piece[1]
        return taken

    def _take_run(self, sizes: Sequence[int]) -> list[Extent]:
        """Take a run of as many of `sizes`, from the first on, as fit in one piece."""
        ends = list(accumulate(map(whole_pages, sizes)))
        fitting = [
            index
            for index in self._by_need(ends[-1])
            if self._parts[index].space.largest >= ends[-1]
        ]
        index = fitting[0] if fitting else self._roomiest()
        space = self._parts[index].space
        # The ends ascend, so those that fit are the first ones.
        count = sum(end <= space.largest for end in ends)
        start = space.take(ends[count - 1]) if count else None
        if start is None:
            return []
        return [
            Extent(index, start + end - whole_pages(nbytes), nbytes)
            for nbytes, end in zip(sizes[:count], ends, strict=False)
        ]

    def _roomiest(self) -> int:
        """Return the member that has the largest free piece."""
        return max(range(len(self._parts)), key=lambda index: self._parts[index].space.largest)

    def _give(self, extents: Iterable[Extent]) -> None:
        for extent in extents:
            part = self._part_of(extent)
            try:
                part.space.give(extent.offset, extent.nbytes)
            except ValueError as error:
                raise ValueError(f"{part.member.directory}: {error}") from None

    def _part_of(self, extent: Extent) -> _Part:
        """Return the member of an extent; refuse one that is not within it."""
        if extent.member >= len(self._parts):
            raise ValueError(
                f"{extent} is of another volume: this one has {len(self._parts)} members"
            )
        part = self._parts[extent.member]
        # As an extent and a space begin and end on pages, the rest of the last page is within too.
        space = part.space
        if not space.start <= extent.offset < extent.offset + extent.nbytes <= space.end:
            raise ValueError(
                f"{extent} is not within bytes {space.start} to {space.end} of "
                f"{part.member.directory}"
            )
        return part

    def _full(self, asked: int) -> VolumeFullError:
        largest = max(part.space.largest for part in self._parts)
        directories = [str(directory) for directory in self.directories]
        return VolumeFullError(directories, asked=asked, free=self._free(), largest=largest)

    def _submit(
        self, extents: Sequence[Extent], memory: Memory, verb: _Verb
    ) -> list[IOFuture[int]]:
        # All are checked first, so that a wrong extent leaves no operation under way.
        parts = [self._part_of(extent) for extent in extents]
        nbytes = sum([extent.nbytes for extent in extents])
        if nbytes != memory.nbytes:
            raise ValueError(
                f"the extents have {nbytes} B and the memory has {memory.nbytes} B: both must be "
                "equal"
            )
        futures: list[IOFuture[int]] = []
        start = 0
        try:
            for part, extent in zip(parts, extents, strict=True):
                futures.append(verb(part.member, memory.part(start, extent.nbytes), extent.offset))
                start += extent.nbytes
        except BaseException:
            # The caller never gets these futures, and may reuse their memory and space.
            for future in futures:
                with suppress(CancelledError):
                    future.exception()
            raise
        return futures


def _made(
    members: Members,
    capacity: int | str | None,
    queue: IOQueue | None,
    make: Callable[[Path], MemberFile],
) -> Volume:
    specs = members_of(members)
    capacity = None if capacity is None else as_bytes(capacity)
    _check_asked(specs, capacity)
    with ExitStack() as undo:
        own = _own_queue(specs, queue, undo)
        files = []
        for spec in specs:
            file = make(Path(spec.path))
            undo.callback(file.discard)
            through = spec.queue or queue or own
            assert through is not None
            file.open(through)
            files.append(file)
        # First: the capacity is shared out by the rates.
        rates = _rates(specs, files, capacity)
        name = uuid.uuid4().hex
        capacities = (
            [whole_pages(as_bytes(spec.capacity or 0)) for spec in specs]
            if capacity is None
            else _shared_out(capacity, rates)
        )
        headers = [Header(name, index, nbytes, rates) for index, nbytes in enumerate(capacities)]
        for file, header in zip(files, headers, strict=True):
            file.reserve_space(PAGE + header.capacity)
            file.write_header(header)
            # The name last: where a power failure interrupts this, the directory holds no volume.
            file.finish_making()
        volume = Volume(files, headers, own)
        undo.pop_all()
    return volume


def members_of(members: Members) -> list[Member]:
    """Return a `Member` for every directory that is given.

    Raises:
        TypeError: something there names no directory.
    """
    if isinstance(members, (str, bytes, os.PathLike, Member)):
        members = [members]
    try:
        specs = [_spec(member) for member in members]
    except TypeError:
        raise TypeError(_DIRECTORIES.format(got=repr(members))) from None
    if not specs:
        raise ValueError("a volume has at least one member; got none")
    return specs


def _spec(member: _Directory) -> Member:
    if not isinstance(member, Member):
        return Member(os.fsdecode(member))
    if isinstance(member.capacity, str):
        member = replace(member, capacity=as_bytes(member.capacity))
    return replace(member, path=os.fsdecode(member.path))


def _check_apart(specs: Sequence[Member]) -> None:
    [(place, count)] = Counter(os.path.realpath(spec.path) for spec in specs).most_common(1)
    if count > 1:
        raise ValueError(f"members must be in different directories; got {place} {count} times")


def _own_queue(specs: Sequence[Member], queue: IOQueue | None, undo: ExitStack) -> IOQueue | None:
    """Return a new queue if a member would have none, else None."""
    if queue is not None or all(spec.queue is not None for spec in specs):
        return None
    return undo.enter_context(IOQueue())


def _check_asked(specs: Sequence[Member], capacity: int | None) -> None:
    own = [spec.capacity for spec in specs if spec.capacity is not None]
    if len(own) not in (0, len(specs)) or bool(own) == (capacity is not None):
        raise ValueError(
            f"give the volume a capacity, or every Member its own; got {capacity} for the volume, "
            f"and {len(own)} of {len(specs)} members have their own"
        )
    for nbytes in [*own, *([] if capacity is None else [capacity])]:
        if not isinstance(nbytes, int):
            raise TypeError(
                f"a capacity is a whole number of bytes, such as 1 << 30; got {nbytes!r}"
            )
        if not 1 <= nbytes <= _LARGEST:
            raise ValueError(
                f"a capacity is at least one byte, and at most {_LARGEST}; got {nbytes}"
            )
    rates = [spec.rate for spec in specs if spec.rate is not None]
    if len(rates) not in (0, len(specs)) or not all(
        math.isfinite(rate) and rate > 0 for rate in rates
    ):
        raise ValueError(
            f"give every Member a positive rate, or none, to have them measured; got {rates}"
        )


def _rates(
    specs: Sequence[Member], files: Sequence[MemberFile], capacity: int | None
) -> tuple[float, ...]:
    """Return the members' speeds: as given, or measured where there are several."""
    given = tuple(spec.rate for spec in specs if spec.rate is not None)
    if given or len(specs) == 1:
        return given or (1.0,)
    smallest = (
        min(as_bytes(spec.capacity) for spec in specs if spec.capacity)
        if capacity is None
        else capacity // len(specs)
    )
    nbytes = whole_pages(max(1, min(smallest, MEASURED_BYTES)))
    # Reserved first: a write that also allocates is slower than later ones.
    for file in files:
        file.reserve_space(nbytes)
    return tuple(measure_rates([file.file for file in files], nbytes))


def _shared_out(nbytes: int, rates: Sequence[float]) -> list[int]:
    """Return each member's part of `nbytes`, rounded up to whole pages."""
    return [whole_pages(max(1, math.ceil(nbytes * rate / sum(rates)))) for rate in rates]


def _check_together(held: Sequence[tuple[Header, Path]]) -> None:
    """Check that these are all members of one volume. They are in the order of their numbers."""
    first, home = held[0]
    for header, directory in held:
        # Not the capacities: an interrupted growth leaves members with more than their share.
        if (header.volume, header.rates) != (first.volume, first.rates):
            raise VolumeError(
                errno.EINVAL,
                f"it is of volume {header.volume}, and {home} of volume {first.volume}: open one "
                "volume's directories",
                path=str(directory),
            )
    count = len(first.rates)
    for index in range(count):
        found = [str(directory) for header, directory in held if header.member == index]
        if len(found) > 1:
            raise VolumeError(
                errno.EINVAL,
                f"it is a copy of {found[0]}, member {index} of the same volume: give only one",
                path=found[1],
            )
        if not found:
            raise VolumeError(
                errno.ENOENT,
                f"member {index} of {count} of the volume that this is part of is missing: give "
                "all its directories",
                path=str(home),
            )


def _held(directory: Path, access: Access) -> MemberFile:
    """Lock the member; first end a volume of this process that the collector has found there."""
    try:
        return MemberFile.hold(directory, access)
    except VolumeLockedError as locked:
        if locked.pid not in (os.getpid(), None):  # None: the kernel does not say
            raise
    Leftover.end_waiting()
    return MemberFile.hold(directory, access)


def _shut_down(files: Sequence[MemberFile], own: IOQueue | None) -> None:
    """Close the members; the queue ends last, when it has nothing to do."""
    # It calls the last one first, and all of them, whatever one raises.
    with ExitStack() as ends:
        if own is not None:
            ends.callback(own.close)
        for file in files:
            ends.callback(file.close)
