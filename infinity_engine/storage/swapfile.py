"""`SwapFile`: this rank's bytes on the drives: one `deepnvme.Volume`, without names.

Its space goes back when it is closed.

Reserves bytes of the budget's NVMe, allocates places in them and moves bytes between these and host
memory. Records know what lies where.
"""

from __future__ import annotations

import errno
import shutil
import threading
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from deepnvme import Checksum, IOQueue, Member, Volume, VolumeError, VolumeFullError
from deepnvme.closing import Closing
from deepnvme.memory.buffers import Memory, memory_of
from deepnvme.memory.checksum import CHECKSUM_BYTES
from deepnvme.sizes import PAGE, whole_pages
from deepnvme.volume.extents import Extent, slices
from infinity_engine.errors import CapacityError, ConfigError, DamageError
from infinity_engine.kept_errors import again
from infinity_engine.memory.ledger import Ledger, Reservation
from infinity_engine.plan import Tier
from infinity_engine.storage.checksums import BlockSums
from infinity_engine.storage.shares import shares_by_rate
from infinity_engine.storage.spare import SpareBytes
from infinity_engine.storage.transfer import IOHop
from infinity_engine.units import align_down

__all__ = ["Place", "SwapFile", "Traffic"]

# A drive without room, a quota that is reached, a file as large as its file system allows.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FORBIDDEN = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


@dataclass(frozen=True, slots=True)
class Place:
    """Where `nbytes` lie on the drives, from byte `start` on of the data that `sums` are of."""

    extents: tuple[Extent, ...]
    sums: BlockSums | None = field(default=None, compare=False, repr=False)
    start: int = field(default=0, compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        """How many bytes there are."""
        return sum([extent.nbytes for extent in self.extents])

    @property
    def block_bytes(self) -> int:
        """How many bytes each checksum is of; 0 without checksums."""
        return 0 if self.sums is None else self.sums.block_bytes

    def part(self, start: int, nbytes: int) -> Place:
        """Return where part of it lies; a part begins on a page, and with checksums on a block."""
        if not start and nbytes == self.nbytes:
            return self
        if self.sums is not None:
            self.sums.check_cut(self.start + start, nbytes)
        return Place(slices(self.extents, start, nbytes), self.sums, self.start + start)


class Traffic(NamedTuple):
    """The bytes that were read from and written to one directory."""

    read_bytes: int
    written_bytes: int


class SwapFile(Closing):
    """Space for swapped bytes: `sizes` are the bytes of each directory, a header page included.

    `rates` are the directories' speeds relative to one another, in any unit; measured where they
    are not given. A given `queue` stays open; otherwise the swap file has its own. The buffers
    through which the queue may copy count as HOST; two swap files with one queue both count them.
    With a `checksum`, what is read is compared with what was written. A context manager.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        ledger: Ledger,
        *,
        holder: str = "swap file",
        rates: Mapping[str, float] | None = None,
        queue: IOQueue | None = None,
        checksum: Checksum = Checksum.NONE,
    ) -> None:
        if not sizes:
            raise ConfigError(
                field="sizes of the swap file", value=dict(sizes), expected="at least one directory"
            )
        for directory, nbytes in sizes.items():
            # One page for the header, one for data.
            if nbytes < 2 * PAGE:
                raise ConfigError(
                    field=f"bytes of the swap file in {directory}",
                    value=nbytes,
                    expected=f"at least {2 * PAGE} B",
                )
        if rates is not None and not sizes.keys() <= rates.keys():
            raise ConfigError(
                field="rates of the swap file",
                value=dict(rates),
                expected=f"a rate for each of {', '.join(sizes)}",
            )
        self._directories = tuple(sizes)
        self._ledger = ledger
        self._checksum = checksum
        self._grows_in_steps = False
        self._spare = SpareBytes(len(self._directories))
        # Guards them. Held while the drives give or get bytes: what is free is unknown meanwhile.
        self._counting = threading.Lock()
        # For errors alone: who holds how much when the drives are full.
        self._holders: dict[Place, str] = {}
        self._host: Reservation | None = None
        self._drives: dict[str, Reservation] = {}
        self.queue = queue or IOQueue()
        self._owns_queue = queue is None
        # What fails below gives back what is reserved by then.
        try:
            # The queue seldom has to copy, but then it takes all of this for each drive.
            nbytes = self.host_bytes(sizes, self.queue)
            self._host = ledger.reserve(Tier.HOST, nbytes, holder=f"I/O of the {holder}")
            # Held at once: the queue may take it at any time, and asks no ledger.
            self._host.hold(nbytes)
            for directory, nbytes in sizes.items():
                self._drives[directory] = ledger.reserve(
                    Tier.NVME, nbytes, holder=holder, directory=directory
                )
                # Rounded down to pages: a file has no use for part of one.
                self._drives[directory].hold(align_down(nbytes, PAGE))
            # The first page of each file is its header, so the members have one page less.
            self._volume = Volume.temporary(
                [
                    Member(
                        directory,
                        capacity=align_down(nbytes, PAGE) - PAGE,
                        rate=rates[directory] if rates else None,
                    )
                    for directory, nbytes in sizes.items()
                ],
                queue=self.queue,
            )
        except BaseException as error:
            # Also for an interrupt: a reservation that no object owns would stay for ever.
            self._release_reservations()
            if isinstance(error, OSError) and error.errno in _FORBIDDEN:
                expected = (
                    f"directories that this user may write to ({error.strerror}: {error.filename})"
                )
                raise ConfigError(
                    field="Budget.nvme", value=", ".join(sizes), expected=expected
                ) from error
            raise

    @staticmethod
    def host_bytes(directories: Iterable[str], queue: IOQueue) -> int:
        """Return the host bytes that the queue may take to copy for these drives."""
        # By device number: directories of one file system share their drive's buffers.
        drives = {
            Path(directory).stat().st_dev: queue.settings_for(directory)
            for directory in directories
        }
        return sum(settings.inflight_bytes for settings in drives.values())

    @property
    def io_bytes(self) -> int:
        """What is reserved of the host for copies that the queue makes."""
        return 0 if self._host is None else self._host.nbytes

    @property
    def capacity(self) -> int:
        """Bytes for use, in whole pages."""
        return sum(self._volume.capacities)

    @property
    def free_bytes(self) -> int:
        """Bytes of the pages that are not in use, without the spare ones."""
        with self._counting:
            return self._volume.free_bytes - self._spare.unused

    def traffic(self) -> dict[str, Traffic]:
        """Return the bytes submitted so far, by directory. Works after close(), too."""
        members = zip(self._directories, self._volume.stats(), strict=True)
        return {
            directory: Traffic(stats.read_bytes, stats.written_bytes)
            for directory, stats in members
        }

    def keep_room_to_grow(self) -> None:
        """Let spare bytes leave it room, as it may have to grow at any time from now on."""
        self._grows_in_steps = True

    def grow(self, sizes: Mapping[str, int]) -> None:
        """Have more for use: so many bytes, in whole pages, of each directory named.

        Spare bytes that no place uses come first, the rest is taken of the drives. What lies there
        stays.

        Raises:
            CapacityError: the budget, or a drive, has less left. Nothing was taken.
        """
        unknown = sizes.keys() - set(self._directories)
        if unknown:
            raise ConfigError.unknown_name(
                field="directory of the swap file", name=min(unknown), known=self._directories
            )
        more = [align_down(sizes.get(directory, 0), PAGE) for directory in self._directories]
        with self._counting:
            self._use_spare_and_grow(more)

    def grow_by(self, nbytes: int) -> None:
        """Have so many bytes more for use, by the speed of the drives that have room.

        Raises:
            CapacityError: the budget, or a drive, has less left. Nothing was taken.
        """
        pages = whole_pages(nbytes) // PAGE
        with self._counting:
            room = {
                directory: (
                    self._ledger.free(Tier.NVME, directory=directory)
                    + min(spare, self._spare.unused)
                )
                // PAGE
                for directory, spare in zip(self._directories, self._spare.sizes, strict=True)
            }
            free = PAGE * sum(room.values())
            if pages * PAGE > free:
                raise CapacityError(
                    tier=Tier.NVME.name,
                    directory=", ".join(self._directories),
                    asked=pages * PAGE,
                    free=free,
                    limit=self.capacity + free,
                    change="raise the budget's nvme, or name another directory there",
                )
            rates = dict(zip(self._directories, self._volume.rates, strict=True))
            shares = shares_by_rate(pages, room, rates)
            self._use_spare_and_grow([PAGE * shares[name] for name in self._directories])

    def _use_spare_and_grow(self, sizes: Sequence[int]) -> None:
        """Have so many bytes more of each directory, of which spare ones come first."""
        from_spare = self._spare.remove(sizes)
        try:
            self._grow([nbytes - had for nbytes, had in zip(sizes, from_spare, strict=True)])
        except BaseException:
            self._spare.add(from_spare)
            raise

    def trim(self) -> None:
        """Give the drives the free space behind the last place; a directory keeps one page."""
        with self._counting:
            trimmed = self._volume.trim()
            self._spare.remove(trimmed)
            self._shrink_drives(trimmed)

    def have_spare(self, nbytes: int, *, leave: int, ranks: int = 1) -> None:
        """Have up to so many bytes of the drives for `spare_place` alone, beside what there is.

        So many `ranks` may do the same at once: together they leave at least `leave` bytes of each
        file system free. Where it has less already, it gets back what no spare place uses. Where a
        drive refuses, there are no more than before. Any thread may call this.
        """
        with suppress(CapacityError, OSError), self._counting:
            drives = {directory: Path(directory).stat().st_dev for directory in self._directories}
            free = {
                drive: shutil.disk_usage(directory).free - leave
                for directory, drive in drives.items()
            }
            if min(free.values()) < 0:
                for drive, gone in zip(drives.values(), self._give_spare_back(), strict=True):
                    free[drive] += gone
            missing = max(nbytes - self._spare.nbytes, 0)
            both = zip(self._volume.capacities, self._spare.sizes, strict=True)
            others = [capacity - spare for capacity, spare in both]
            room: dict[str, int] = {}
            for (directory, drive), other in zip(drives.items(), others, strict=True):
                left = min(self._ledger.free(Tier.NVME, directory=directory), free[drive] // ranks)
                # How much it will need is not known: as much again is more than it ever did.
                left -= other if self._grows_in_steps else 0
                room[directory] = max(left // PAGE, 0)
                free[drive] -= PAGE * room[directory] * ranks
            rates = dict(zip(self._directories, self._volume.rates, strict=True))
            shares = shares_by_rate(whole_pages(missing) // PAGE, room, rates)
            more = [PAGE * shares[directory] for directory in self._directories]
            self._grow(more)
            self._spare.add(more)

    def _give_spare_back(self) -> tuple[int, ...]:
        """Give the drives the spare bytes that lie behind all places; return those of each."""
        unused = self._spare.remove(self._spare.sizes)
        trimmed = self._volume.trim(unused)
        # What cannot go yet stays spare.
        self._spare.add([nbytes - gone for nbytes, gone in zip(unused, trimmed, strict=True)])
        self._shrink_drives(trimmed)
        return trimmed

    def _grow(self, sizes: Sequence[int]) -> None:
        """Take so many bytes more of each directory's drive; see `grow`."""
        if not any(sizes):
            return
        taken = [0] * len(sizes)
        # The budget first, then the drive; what was taken is given back if either refuses.
        try:
            for index, (directory, nbytes) in enumerate(zip(self._directories, sizes, strict=True)):
                self._drives[directory].grow(nbytes)
                taken[index] = nbytes
                self._drives[directory].hold(nbytes)
            self._volume.grow_members(sizes)
        except BaseException as error:
            self._shrink_drives(taken)
            if isinstance(error, VolumeError) and error.errno in _FULL:
                raise self._drive_is_full(error, sizes) from error
            raise

    def allocate(self, nbytes: int, *, holder: str, block_bytes: int = CHECKSUM_BYTES) -> Place:
        """Allocate a place for `nbytes`, written and read whole or in blocks of `block_bytes`.

        Raises:
            CapacityError: there is not so much. Nothing was taken.
        """
        sums = BlockSums(nbytes, block_bytes) if self._checksum is Checksum.CRC32C else None
        try:
            place = Place(self._volume.allocate(nbytes), sums)
        except VolumeFullError as full:
            held: dict[str, int] = {}
            # Added up by holder: an error that lists every place would be unreadable.
            for taken, name in self._holders.items():
                held[name] = held.get(name, 0) + taken.nbytes
            raise CapacityError(
                tier=Tier.NVME.name,
                directory=", ".join(self._directories),
                asked=nbytes,
                free=full.free,
                limit=self.capacity,
                holders=tuple(held.items()),
                change=f"give the swap file more bytes of the drives, or store less for {holder}",
            ) from full
        # Places of no bytes are all equal, and hold nothing that an error would have to name.
        if place.extents:
            self._holders[place] = holder
        return place

    def release(self, place: Place) -> None:
        """Give back a place as it was allocated. All reads and writes of it must have ended."""
        self._volume.release(place.extents)
        self._holders.pop(place, None)

    def spare_place(self, like: Place, *, holder: str) -> Place | None:
        """Allocate a place as large as another one, out of the spare bytes; None: there are not so
        many.
        """
        nbytes = whole_pages(like.nbytes)
        with self._counting:
            if not self._spare.take(nbytes):
                return None
        try:
            return self.allocate(
                like.nbytes, holder=holder, block_bytes=like.block_bytes or CHECKSUM_BYTES
            )
        except CapacityError:
            # Other places have taken more than was for them.
            with self._counting:
                self._spare.give(nbytes)
            return None

    def release_spare(self, place: Place) -> None:
        """Give back such a place, or the one instead of which it was allocated."""
        self.release(place)
        with self._counting:
            self._spare.give(whole_pages(place.nbytes))

    def read(
        self, place: Place, into: memoryview | Memory, *, what: str = "", compared: bool = True
    ) -> IOHop:
        """Begin to read all of `place`; an error names the data by `what`.

        With checksums, the first wait for it compares, which must be before any code changes what
        was read. Where it is not to be `compared`, the caller does so by `compare`.
        """
        memory = memory_of(into, writable=True)
        futures = self._volume.pread(place.extents, memory)
        if place.sums is None or not compared:
            return IOHop(futures, what)
        return IOHop(futures, what, partial(self._damage, place, place.sums, memory, what))

    def compare(
        self,
        place: Place,
        memory: memoryview | Memory,
        *,
        what: str = "",
        sums: array[int] | None = None,
    ) -> None:
        """Compare what was read of `place` with what was written, by its `sums` if they are known.

        Raises:
            DamageError: it differs.
        """
        if place.sums is None:
            return
        damage = self._damage(place, place.sums, memory_of(memory, writable=True), what, sums)
        if damage is not None:
            raise again(damage)

    def write(
        self,
        place: Place,
        source: memoryview | Memory,
        *,
        what: str = "",
        sums: array[int] | None = None,
    ) -> IOHop:
        """Begin to write all of `place`; an error names the data by `what`.

        `sums` are the source's checksums where they are known already.
        """
        memory = memory_of(source, writable=False)
        futures = self._volume.pwrite(place.extents, memory)
        if place.sums is not None:
            # Beside the write that is under way already: both only read the memory.
            place.sums.put(place.start, sums or place.sums.of(memory))
        return IOHop(futures, what)

    def share(
        self, place: Place, descriptor: int, offset: int
    ) -> Callable[[int, Memory], DamageError | None]:
        """Let another file have the bytes of `place` from `offset` on, without a copy.

        Returns what compares them, as that file gives them back, with what was written: it takes
        where in `place` they begin, and the bytes. All writes to `place` must have ended.

        Raises:
            OSError: the file system cannot share blocks, or the file is on another one.
        """
        self._volume.share(place.extents, descriptor, offset)
        if place.sums is None:
            return lambda _start, _memory: None
        # A copy: the next update overwrites the place, and its checksums with it.
        sums = place.sums.copy()
        return lambda start, memory: self._damage(
            place.part(start, memory.nbytes), sums, memory, "states for a checkpoint"
        )

    def close(self) -> None:
        """Wait for reads and writes, and give the drives' space back. Twice: does the rest."""
        # The volume first: I/O that is still under way uses what is given back.
        self._volume.close()
        self._release_reservations()

    def _damage(
        self,
        place: Place,
        written: BlockSums,
        memory: Memory,
        what: str,
        sums: array[int] | None = None,
    ) -> DamageError | None:
        """Return the error for what was read into this memory; None where it is as written."""
        found = sums or written.of(memory)
        damage = written.damage(place.start, memory.nbytes, found)
        if damage is None:
            return None
        # The block may lie on several drives: the error names the first and lists the others.
        lies = slices(place.extents, damage.start - place.start, damage.nbytes)
        (path, offset), *others = [
            (str(self._volume.paths[extent.member]), extent.offset) for extent in lies
        ]
        return DamageError(
            # EBADMSG, as Linux's own file systems report a wrong checksum.
            errno=errno.EBADMSG,
            path=path,
            offset=offset,
            asked=damage.nbytes,
            done=damage.nbytes,
            what=what,
            expected=damage.expected,
            found=damage.found,
            others=tuple(others),
        )

    def _drive_is_full(self, error: VolumeError, sizes: Sequence[int]) -> CapacityError:
        """Return the error for a drive that has less free than the budget says."""
        directories = dict(zip(self._directories, sizes, strict=True))
        directory = next(
            (name for name in directories if Path(name) == Path(error.filename or "")),
            self._directories[0],
        )
        return CapacityError(
            tier=Tier.NVME.name,
            directory=directory,
            asked=directories[directory],
            free=shutil.disk_usage(directory).free,
            limit=shutil.disk_usage(directory).total,
            change=f"free space on the drive of {directory}, or name others in the budget's nvme "
            f"({error.strerror})",
        )

    def _shrink_drives(self, sizes: Sequence[int]) -> None:
        for directory, nbytes in zip(self._directories, sizes, strict=True):
            # Released before it is shrunk: a reservation cannot be smaller than what it holds.
            self._drives[directory].release(nbytes)
            self._drives[directory].shrink(nbytes)

    def _release_reservations(self) -> None:
        for reservation in (self._host, *self._drives.values()):
            if reservation is not None:
                reservation.release(reservation.held)
                reservation.close()
        self._host = None
        self._drives.clear()
        if self._owns_queue:
            self.queue.close()
