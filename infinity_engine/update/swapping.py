"""`SwappedStates`: states and values on the drives, and the host buffers that they pass.

Reads into and writes from the buffers that the plan's ops name. Knows neither the arithmetic of
updates nor their order. A subgroup that was updated in a buffer stays there until it is written.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from deepnvme.memory.buffers import Memory, memory_of
from infinity_engine.errors import TransferError
from infinity_engine.gradients.keeper import GradientKeeper
from infinity_engine.lanes.lanes import Lanes
from infinity_engine.lanes.meter import Cargo
from infinity_engine.memory import Lease
from infinity_engine.optim import NORM_BLOCK, Subgroup, SummedMemory, Sums
from infinity_engine.placement.buffers import BufferLayout, buffer_slot, early_slot
from infinity_engine.plan.ops import Lane, LoadStates, StoreStates
from infinity_engine.storage import Hop, Hops, Place, SwapFile
from infinity_engine.update.aside import PlacesAside
from infinity_engine.update.captured import CapturedBytes, CheckShared

__all__ = ["BufferedSubgroup", "SwappedStates"]


_Piece = tuple[Place, Memory, str]
"""A place on the drives, the memory that is read into or written from, and a name for errors."""


@dataclass(slots=True)
class BufferedSubgroup:
    """A subgroup that is in a host buffer, or in flight between it and the drives."""

    layout: BufferLayout
    buffer: Lease
    wanted: Collection[int]
    """The numbers of its segments that are updated: the others have no gradient."""
    storing: Hops | None = None
    moving: list[Hop] = field(default_factory=list)
    uncompared: list[_Piece] = field(default_factory=list)
    """What was read, and not yet compared with what was written."""
    sums: dict[tuple[int, int], array[int]] = field(default_factory=dict)
    """The checksums after the update, by the memory's address and the bytes of a block."""

    # Each is noted before the next begins: an interrupt between two leaves one in flight that
    # `wait_for_io` has to know.
    def read(self, swap: SwapFile, pieces: Iterable[_Piece], *, compared: bool = True) -> list[Hop]:
        """Begin to read each piece; unless they are `compared` here, `uncompared` has them."""
        begun = len(self.moving)
        for place, memory, what in pieces:
            if not compared:
                self.uncompared.append((place, memory, what))
            self.moving.append(swap.read(place, memory, what=what, compared=compared))
        return self.moving[begun:]

    def write(self, swap: SwapFile, pieces: Iterable[_Piece]) -> list[Hop]:
        """Begin to write each piece, with the checksums that its update has made."""
        begun = len(self.moving)
        for place, memory, what in pieces:
            sums = self.sums.get((memory.address, place.block_bytes))
            self.moving.append(swap.write(place, memory, what=what, sums=sums))
        return self.moving[begun:]

    def wait_for_io(self) -> None:
        """Wait for all that reads or writes the buffer. A failure is not raised."""
        for hop in self.moving:
            with suppress(TransferError):
                hop.wait()

    def store(self, writing: Hops | None) -> None:
        """Note the write that is in flight, or None when it has ended."""
        self.storing = writing

    def states(self) -> torch.Tensor:
        """Return the bytes of its states."""
        return self.buffer.flat()[: self.layout.states_bytes]

    def values(self, segment: int, nbytes: int) -> torch.Tensor:
        """Return the bytes of a segment's values that are on the drives."""
        return self.buffer.flat()[self.layout.values[segment] :][:nbytes]

    def copies(self, nbytes: int) -> torch.Tensor:
        """Return the bytes for the new values that the device gets."""
        return self.buffer.flat()[self.layout.copies :][:nbytes]

    def gradient(self, segment: int, micro_batch: int, nbytes: int) -> torch.Tensor:
        """Return the bytes of a segment's gradient of one micro-batch; -1: of several's sum."""
        return self.buffer.flat()[self.layout.gradients[segment][micro_batch] :][:nbytes]

    def gradient_memory(self, segment: int, micro_batch: int) -> memoryview:
        """Return the memory that begins with that gradient."""
        return self.buffer.memory()[self.layout.gradients[segment][micro_batch] :]

    def has_place(self, segment: int, micro_batch: int) -> bool:
        """Tell whether that micro-batch's gradient has a place: behind the last one is the sum."""
        return micro_batch < max(len(self.layout.gradients[segment]) - 1, 1)


@dataclass(frozen=True, slots=True)
class _Places:
    """Where states and values are on the drives, and the new places that early updates write to.

    The two places of a subgroup swap roles when its early update is adopted: nothing is copied.
    """

    states: dict[int, Place]
    new_states: dict[int, Place]
    values: dict[int, Place]
    new_values: dict[int, Place]

    def adopt(self, indices: Collection[int], parameters: Collection[int]) -> None:
        """Adopt the early updates: the old places are the targets of the next ones."""
        for old, new, numbers in (
            (self.states, self.new_states, indices),
            (self.values, self.new_values, parameters),
        ):
            for number in numbers:
                old[number], new[number] = new[number], old[number]


class SwappedStates:
    """The parts of one engine's subgroups on the drives, and where parameters on drives are.

    `values` has the places of these parameters, and `names` the names of all that are trained.

    `pieces` gives, by subgroup, which piece of its parameter each segment is. `early` names the
    subgroups that may be updated before their step, which have a second place.
    """

    def __init__(
        self,
        swap: SwapFile | None,
        subgroups: Sequence[Subgroup],
        layouts: Mapping[int, BufferLayout],
        values: Mapping[int, Place],
        *,
        early: Collection[int] = (),
        names: Sequence[str],
        pieces: Mapping[int, Sequence[int]],
        lanes: Lanes,
    ) -> None:
        self._drives = swap  # None: there are no layouts, so nothing is read or written
        self._subgroups = {subgroup.index: subgroup for subgroup in subgroups}
        self._layouts = layouts
        self._names = names
        self._names_of_states = {
            subgroup.index: f"states of {_described(subgroup, names)}" for subgroup in subgroups
        }
        self._pieces = pieces
        self._lanes = lanes
        self._buffers: list[Lease] = []
        self._early_buffers: list[Lease] = []
        self._buffered: dict[int, BufferedSubgroup] = {}
        states = {
            index: self._swap.allocate(layout.states_bytes, holder=self._names_of_states[index])
            for index, layout in layouts.items()
            if layout.states_bytes
        }
        new_states = {
            index: self._swap.allocate(
                layouts[index].states_bytes, holder=f"new {self._names_of_states[index]}"
            )
            # Sorted, so that places are the same in every run.
            for index in sorted(early)
        }
        widths = {
            segment.parameter: self._subgroups[index].formats.width
            for index in early
            for segment in self._subgroups[index].segments
        }
        new_values = {
            parameter: self._swap.allocate(
                values[parameter].nbytes,
                holder=f"new values of {names[parameter]}",
                block_bytes=NORM_BLOCK * width,  # as subgroups cut it
            )
            for parameter, width in sorted(widths.items())
        }
        self._places = _Places(states, new_states, dict(values), new_values)
        self._aside = PlacesAside(swap)

    # --- a step -----------------------------------------------------------------------------------

    def begin_step(self, buffers: int, updated: Collection[int]) -> None:
        """Lease the host buffers. Forget what an interrupted step has loaded and not updated."""
        for number in range(len(self._buffers), buffers):
            self._buffers.append(self._lanes.host.lease_planned(buffer_slot(number)))
        # An updated subgroup stays in its buffer until it is stored.
        self._buffered = {
            index: buffered for index, buffered in self._buffered.items() if index in updated
        }

    def end_step(self) -> None:
        """Return the buffers."""
        # Before the leases close: nothing may find a subgroup in memory that is given back.
        self._buffered.clear()
        while self._buffers:
            self._buffers.pop().close()

    @property
    def _swap(self) -> SwapFile:
        assert self._drives is not None, "only what has a place on drives is read or written"
        return self._drives

    @property
    def any(self) -> bool:
        """Whether anything is on the drives."""
        return bool(self._layouts)

    def has(self, index: int) -> bool:
        """Tell whether a subgroup's states or values are on the drives."""
        return index in self._layouts

    def buffered(self, index: int) -> BufferedSubgroup | None:
        """Return a subgroup that is in a buffer, or None."""
        return self._buffered.get(index)

    def load(
        self, op: LoadStates, wanted: Collection[int], gradients: GradientKeeper
    ) -> Hops | None:
        """Begin to read a subgroup: its states, and what the update of `wanted` segments needs."""
        if op.subgroup in self._buffered:  # an interrupted step has updated it
            return None
        layout, buffer = self._layouts[op.subgroup], self._buffers[op.buffer]
        for index in [
            index for index, buffered in self._buffered.items() if buffered.buffer is buffer
        ]:
            # The plan reuses a buffer only after its subgroup was stored. Forget that one first:
            # the buffer's bytes belong to the next subgroup from here on.
            del self._buffered[index]
        # Noted before any read begins: an interrupt has to find it.
        buffered = self._buffered[op.subgroup] = BufferedSubgroup(layout, buffer, wanted)
        return self._read(op, buffered, gradients) if wanted else None

    def _read(self, op: LoadStates, buffered: BufferedSubgroup, gradients: GradientKeeper) -> Hops:
        pieces = self._pieces_of(op.subgroup, buffered, values=buffered.layout.in_place)
        # The update compares, while the caches have what it reads; see `update`.
        hops = buffered.read(self._swap, pieces, compared=False)
        self._count(Lane.NVME_READ, Cargo.STATES, buffered.layout.states_bytes, op)
        if buffered.layout.in_place:
            self._count(
                Lane.NVME_READ,
                Cargo.PARAMETERS,
                self._nbytes_of_values(op.subgroup, buffered.wanted),
                op,
            )
        moved = 0
        memory, places = buffered.buffer.memory(), buffered.layout.gradients
        for number in buffered.wanted:
            if number in places:
                segment = self._subgroups[op.subgroup].segments[number]
                several = len(places[number]) > 1
                # Without the last place where there are several: that is the sum's.
                into = [memory[at:] for at in places[number][: -1 if several else None]]
                read = gradients.read(segment.parameter, self._pieces[op.subgroup][number], into)
                buffered.moving.extend(read)
                hops += read
                formats = gradients.formats(segment.parameter, self._pieces[op.subgroup][number])
                # Only of those that were read: others may still be in memory.
                moved += sum(format_.nbytes * segment.numel for format_ in formats[: len(read)])
        self._count(Lane.NVME_READ, Cargo.GRADIENTS, moved, op)
        return Hops(hops)

    def compare(self, index: int) -> None:
        """Compare what was read of a subgroup with what was written, before it is used.

        Raises:
            DamageError: it differs.
        """
        buffered = self._buffered.get(index)
        while buffered is not None and buffered.uncompared:
            place, memory, what = buffered.uncompared[-1]
            self._swap.compare(place, memory, what=what)
            buffered.uncompared.pop()

    def update(
        self, index: int, carry_out: Callable[[Sequence[SummedMemory]], Sequence[Sums]]
    ) -> None:
        """Call what updates a subgroup in its buffer with the memory that it is to sum meanwhile.

        Raises:
            DamageError: what it has read differs from what was written. The buffer's content is
                undefined; what is on the drives is as it was.
        """
        buffered = self._buffered[index]
        uncompared = {memory.address for _, memory, _ in buffered.uncompared}
        pieces = [piece for piece in self._pieces_of(index, buffered) if piece[0].block_bytes]
        memories = [
            SummedMemory(
                memory.address,
                memory.nbytes,
                place.block_bytes,
                with_before=memory.address in uncompared,
            )
            for place, memory, _ in pieces
        ]
        for piece, summed, sums in zip(pieces, memories, carry_out(memories), strict=True):
            if summed.with_before:
                place, memory, what = piece
                self._swap.compare(place, memory, what=what, sums=sums.before)
            buffered.sums[summed.address, summed.block_bytes] = sums.after
        buffered.uncompared.clear()

    def store(self, op: StoreStates) -> Hops | None:
        """Begin to write an updated subgroup to the drives."""
        buffered = self._buffered.get(op.subgroup)
        # Without gradients nothing was updated.
        if buffered is None or not buffered.wanted:
            return None
        pieces = self._pieces_to_write(op.subgroup, buffered)
        buffered.store(Hops(buffered.write(self._swap, pieces)))
        self._count(Lane.NVME_WRITE, Cargo.STATES, buffered.layout.states_bytes, op)
        self._count(
            Lane.NVME_WRITE,
            Cargo.PARAMETERS,
            self._nbytes_of_values(op.subgroup, buffered.wanted),
            op,
        )
        return buffered.storing

    def note_arrivals(self) -> None:
        """Forget the buffers of subgroups that are stored."""
        for index, buffered in list(self._buffered.items()):
            if buffered.storing is not None:
                with suppress(Exception):  # the walk has raised it already
                    buffered.storing.wait()
                    del self._buffered[index]
                # Also after a failure: then it stays here, and the next step stores it again.
                buffered.store(None)

    # --- before a step ----------------------------------------------------------------------------

    def begin_early(self, buffers: int) -> None:
        """Lease the host buffers for early updates that are not leased yet."""
        for number in range(len(self._early_buffers), buffers):
            self._early_buffers.append(self._lanes.host.lease_planned(early_slot(number)))

    def end_early(self) -> None:
        """Return them. No read or write of them may be in flight."""
        while self._early_buffers:
            self._early_buffers.pop().close()

    def load_early(
        self, index: int, buffer: int, gradients: GradientKeeper
    ) -> tuple[BufferedSubgroup, Hops]:
        """Begin to read a subgroup, with its gradients on drives, into an early buffer."""
        layout, segments = self._layouts[index], self._subgroups[index].segments
        buffered = self._buffered[index] = BufferedSubgroup(
            layout, self._early_buffers[buffer], range(len(segments))
        )
        op = LoadStates(subgroup=index, nbytes=layout.load_bytes, buffer=buffer)
        try:
            return buffered, self._read(op, buffered, gradients)
        except BaseException:
            self.leave_early(index)
            raise

    def store_early(self, index: int, buffer: int) -> Hops:
        """Begin to write a subgroup that was updated early, to its new places."""
        buffered = self._buffered[index]
        places = self._places
        pieces = self._pieces_to_write(index, buffered, places.new_states, places.new_values)
        hops = buffered.write(self._swap, pieces)
        op = StoreStates(subgroup=index, nbytes=buffered.layout.store_bytes, buffer=buffer)
        self._count(Lane.NVME_WRITE, Cargo.STATES, buffered.layout.states_bytes, op)
        self._count(
            Lane.NVME_WRITE, Cargo.PARAMETERS, self._nbytes_of_values(index, buffered.wanted), op
        )
        writing = Hops(hops)
        buffered.store(writing)
        return writing

    def leave_early(self, index: int) -> None:
        """Free the buffer of a subgroup, after all its I/O has ended."""
        # Then the buffer may be given to another subgroup.
        self._buffered[index].wait_for_io()
        del self._buffered[index]

    def adopt(self, indices: Collection[int]) -> dict[int, Place]:
        """Make these subgroups' new places the current ones; return those of values."""
        parameters = {
            segment.parameter for index in indices for segment in self._subgroups[index].segments
        }
        self._places.adopt(indices, parameters)
        return {parameter: self._places.values[parameter] for parameter in parameters}

    # --- outside of steps -------------------------------------------------------------------------

    def borrowed(self, index: int) -> BufferedSubgroup:
        """Read a subgroup into a buffer of the caller's, who closes it."""
        buffered = self.empty(index, 0)
        # A borrowed buffer has no owner but this call until it returns.
        try:
            pieces = self._pieces_of(index, buffered, values=buffered.layout.in_place)
            Hops(buffered.read(self._swap, pieces)).wait()
        except BaseException:
            buffered.buffer.close()
            raise
        return buffered

    def empty(self, index: int, buffer: int) -> BufferedSubgroup:
        """Return a buffer for this subgroup with undefined content; the caller closes it."""
        lease = self._lanes.host.lease_planned(buffer_slot(buffer))
        return BufferedSubgroup(
            self._layouts[index], lease, range(len(self._subgroups[index].segments))
        )

    def give_back(self, index: int, buffered: BufferedSubgroup) -> Hops:
        """Begin to write a borrowed subgroup's states, and close its buffer.

        The buffer returns to the pool when they are written.
        """
        pieces = self._pieces_to_write(index, buffered, values=False)
        writing = Hops(buffered.write(self._swap, pieces))
        # The pool keeps the buffer until the write has ended.
        buffered.buffer.until(writing)
        buffered.buffer.close()
        return writing

    def write_back(self, index: int, buffered: BufferedSubgroup) -> Hops:
        """Begin to write a borrowed subgroup's states, and its values that are on the drives."""
        return Hops(buffered.write(self._swap, self._pieces_to_write(index, buffered)))

    # --- checkpoints ------------------------------------------------------------------------------

    def before_changes(self, captured: CapturedBytes) -> None:
        """Ask this before a place is overwritten."""
        self._aside.before_changes(captured)

    def make_room(self, nbytes: int, leave: int, ranks: int) -> None:
        """Have up to so many bytes of the drives for updates beside a save.

        See `SwapFile.have_spare`.
        """
        self._aside.make_room(nbytes, leave, ranks)

    def states_place(self, index: int) -> Place | None:
        """Return where the states of a subgroup are on the drives; None if they are in memory."""
        return self._places.states.get(index)

    def values_place(self, index: int, number: int) -> Place | None:
        """Return where the values of a segment are on the drives; None if they are in memory."""
        if index not in self._layouts or number not in self._layouts[index].values:
            return None
        segment = self._subgroups[index].segments[number]
        width = self._subgroups[index].formats.width
        place = self._places.values[segment.parameter]
        return place.part(width * segment.first_element, width * segment.numel)

    def read(self, place: Place, into: memoryview) -> Hop:
        """Begin to read a place, or a part of one. Any thread may call it."""
        return self._swap.read(place, into, what="states for a checkpoint")

    def share(self, place: Place, descriptor: int, offset: int) -> CheckShared:
        """Let another file have the bytes of a place without a copy; see `SwapFile.share`."""
        return self._swap.share(place, descriptor, offset)

    def close(self) -> None:
        """Return all memory and all places."""
        self.end_step()
        self.end_early()
        self._aside.close()
        # Taken away first: a second call releases nothing twice.
        places, self._places = self._places, _Places({}, {}, {}, {})
        for kind in (places.states, places.new_states, places.new_values):
            for place in kind.values():
                self._swap.release(place)

    # --- what goes where --------------------------------------------------------------------------

    def _pieces_of(
        self,
        index: int,
        buffered: BufferedSubgroup,
        states_at: Mapping[int, Place] | None = None,
        values_at: Mapping[int, Place] | None = None,
        *,
        values: bool = True,
    ) -> Iterator[_Piece]:
        """Yield the parts of a buffered subgroup that are on the drives: its states and, unless
        `values` is False, the values of its segments that are updated.

        They are where they are now, unless other places are given.
        """
        memory, layout = memory_of(buffered.buffer.memory(), writable=True), buffered.layout
        if layout.states_bytes:
            place = (states_at or self._places.states)[index]
            yield place, memory.part(0, layout.states_bytes), self._names_of_states[index]
        subgroup = self._subgroups[index]
        width = subgroup.formats.width
        for number, at in layout.values.items() if values else ():
            # Values of segments that are not updated stay as they are on the drives.
            if number in buffered.wanted:
                segment = subgroup.segments[number]
                nbytes = width * segment.numel
                whole = (values_at or self._places.values)[segment.parameter]
                place = whole.part(width * segment.first_element, nbytes)
                yield place, memory.part(at, nbytes), self._names[segment.parameter]

    def _pieces_to_write(
        self,
        index: int,
        buffered: BufferedSubgroup,
        states_at: dict[int, Place] | None = None,
        values_at: Mapping[int, Place] | None = None,
        *,
        values: bool = True,
    ) -> Iterator[_Piece]:
        """Yield what `_pieces_of` does, where a save that is under way lets it be written."""
        states_at = self._places.states if states_at is None else states_at
        if index in states_at:
            states_at[index] = self._aside.target(states_at[index])
        for piece in self._pieces_of(index, buffered, states_at, values_at, values=values):
            if buffered.layout.in_place:
                self._aside.wait_for(piece[0])  # a master that is a parameter has one place only
            yield piece

    def _nbytes_of_values(self, index: int, wanted: Collection[int]) -> int:
        subgroup, values = self._subgroups[index], self._layouts[index].values
        numels = [subgroup.segments[number].numel for number in values if number in wanted]
        return subgroup.formats.width * sum(numels)

    def _count(self, lane: Lane, cargo: Cargo, nbytes: int, op: LoadStates | StoreStates) -> None:
        if nbytes:
            self._lanes.meter.count_copy(
                lane, cargo, nbytes, None, name=op.name, subgroup=op.subgroup
            )


def _described(subgroup: Subgroup, names: Sequence[str]) -> str:
    found = dict.fromkeys(names[segment.parameter] for segment in subgroup.segments)
    # Three names are enough to find it; a subgroup may have thousands.
    listed = ", ".join(list(found)[:3]) + (
        f" and {len(found) - 3} others" if len(found) > 3 else ""
    )
    return f"subgroup {subgroup.index} ({listed})"
