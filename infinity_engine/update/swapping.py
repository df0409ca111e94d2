"""`SwappedStates`: what of subgroups rests on the drives, and the host buffers that it passes
through in an update.

Reads and writes what its caller's ops say, into and out of the buffers that they name. Knows no
arithmetic of updates and no order. What was updated in a buffer stays there until it has been
written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch

from infinity_engine.errors import TransferError
from infinity_engine.gradients.keeper import GradientKeeper
from infinity_engine.lanes.lanes import Lanes
from infinity_engine.lanes.meter import Cargo
from infinity_engine.memory import Lease
from infinity_engine.optim import NORM_BLOCK, Subgroup
from infinity_engine.placement.buffers import BufferLayout, buffer_slot, early_slot
from infinity_engine.plan.ops import Lane, LoadStates, StoreStates
from infinity_engine.storage import Hop, IOEvent, Place, SwapFile

__all__ = ["SwappedStates", "Visit"]


@dataclass(slots=True)
class Visit:
    """A subgroup that is in a host buffer, on its way there, or on its way back."""

    layout: BufferLayout
    buffer: Lease
    wanted: Collection[int]  # of its segments, those that are updated
    storing: IOEvent | None = None
    # each noted as it begins: whoever interrupts that is to wait
    moving: list[Hop] = field(default_factory=list)

    def settle(self) -> None:
        """Wait for all that reads or writes the buffer, whatever comes of it."""
        for hop in self.moving:
            with suppress(TransferError):
                hop.wait()

    def store(self, writing: IOEvent | None) -> None:
        """Note what writes it; None: nothing does any more."""
        self.storing = writing

    def states(self) -> torch.Tensor:
        """Return the bytes of its states."""
        return self.buffer.flat()[: self.layout.states_bytes]

    def values(self, segment: int, nbytes: int) -> torch.Tensor:
        """Return the bytes of a segment's values that rest on the drives."""
        return self.buffer.flat()[self.layout.values[segment] :][:nbytes]

    def copies(self, nbytes: int) -> torch.Tensor:
        """Return the bytes of what the update writes for the device."""
        return self.buffer.flat()[self.layout.copies :][:nbytes]

    def gradient(self, segment: int, micro_batch: int, nbytes: int) -> torch.Tensor:
        """Return the bytes of a segment's gradient of one micro-batch; with -1, those for the sum
        of several.
        """
        return self.buffer.flat()[self.layout.gradients[segment][micro_batch] :][:nbytes]

    def gradient_memory(self, segment: int, micro_batch: int) -> memoryview:
        """Return the memory that begins with that gradient."""
        return self.buffer.memory()[self.layout.gradients[segment][micro_batch] :]

    def has_place(self, segment: int, micro_batch: int) -> bool:
        """Tell whether there is one for the gradient of that micro-batch: what lies behind the last
        is the sum.
        """
        return micro_batch < max(len(self.layout.gradients[segment]) - 1, 1)


@dataclass(frozen=True, slots=True)
class _Places:
    """Where states of subgroups and values of parameters are, and where what is made early of them
    goes.
    """

    states: Mapping[int, Place]
    new_states: Mapping[int, Place]
    values: Mapping[int, Place]
    new_values: Mapping[int, Place]
    adopted: frozenset[int] = frozenset()  # the subgroups that this step has made early

    def adopting(self, indices: Collection[int], parameters: Collection[int]) -> _Places:
        """Return what is so when what was made early of these is what there is."""
        states = {index: self.new_states[index] for index in indices}
        values = {parameter: self.new_values[parameter] for parameter in parameters}
        return _Places(
            states={**self.states, **states},
            new_states={**self.new_states, **{index: self.states[index] for index in states}},
            values={**self.values, **values},
            new_values={
                **self.new_values,
                **{parameter: self.values[parameter] for parameter in values},
            },
            adopted=frozenset(indices),
        )


class SwappedStates:
    """The places of states on the drives, and where the values of parameters rest that do:
    `values`, by number.

    `pieces` has, by the index of each subgroup, which piece of its parameter each segment is.
    `early` are the subgroups that may be updated before their step, to new places.
    """

    def __init__(
        self,
        swap: SwapFile,
        subgroups: Sequence[Subgroup],
        layouts: Mapping[int, BufferLayout],
        values: Mapping[int, Place],
        *,
        early: Collection[int] = (),
        names: Callable[[int], str],
        pieces: Mapping[int, Sequence[int]],
        lanes: Lanes,
    ) -> None:
        self._swap = swap
        self._subgroups = {each.index: each for each in subgroups}
        self._layouts = layouts
        self._names = names
        self._pieces = pieces
        self._lanes = lanes
        self._buffers: list[Lease] = []
        self._early_buffers: list[Lease] = []
        self._visits: dict[int, Visit] = {}
        states = {
            index: swap.allocate(layout.states_bytes, holder=f"states of {self._about(index)}")
            for index, layout in layouts.items()
            if layout.states_bytes
        }
        new_states = {
            index: swap.allocate(
                layouts[index].states_bytes, holder=f"new states of {self._about(index)}"
            )
            for index in sorted(early)
        }
        widths = {
            segment.parameter: self._subgroups[index].formats.width
            for index in early
            for segment in self._subgroups[index].segments
        }
        new_values = {
            parameter: swap.allocate(
                values[parameter].nbytes,
                holder=f"new values of {names(parameter)}",
                block_bytes=NORM_BLOCK * width,  # as subgroups cut it
            )
            for parameter, width in sorted(widths.items())
        }
        self._places = _Places(states, new_states, dict(values), new_values)

    # --- a step -----------------------------------------------------------------------------------

    def begin_step(self, buffers: int, updated: Collection[int]) -> None:
        """Take the host buffers, and forget what an interrupted walk has loaded and not updated."""
        for number in range(len(self._buffers), buffers):
            self._buffers.append(self._lanes.host.lease_planned(buffer_slot(number)))
        self._visits = {index: visit for index, visit in self._visits.items() if index in updated}

    def end_step(self) -> None:
        """Give the buffers back. What was adopted is what there is from here on."""
        self._visits.clear()
        self._places = replace(self._places, adopted=frozenset())
        while self._buffers:
            self._buffers.pop().close()

    @property
    def adopted(self) -> Collection[int]:
        """The subgroups that this step has made early."""
        return self._places.adopted

    def has(self, index: int) -> bool:
        """Tell whether some of a subgroup rests on the drives."""
        return index in self._layouts

    def visit(self, index: int) -> Visit | None:
        """Return the visit of a subgroup that is in a buffer."""
        return self._visits.get(index)

    def load(
        self, op: LoadStates, wanted: Collection[int], gradients: GradientKeeper
    ) -> IOEvent | None:
        """Begin to read what of a subgroup rests on the drives and is needed to update its segments
        `wanted`.
        """
        if op.subgroup in self._visits:  # an interrupted step has updated it
            return None
        layout, buffer = self._layouts[op.subgroup], self._buffers[op.buffer]
        for index in [index for index, visit in self._visits.items() if visit.buffer is buffer]:
            # it is stored: what is in the buffer from here on is not its own
            del self._visits[index]
        visit = self._visits[op.subgroup] = Visit(layout, buffer, wanted)
        return self._read(op, visit, gradients) if wanted else None

    def _read(self, op: LoadStates, visit: Visit, gradients: GradientKeeper) -> IOEvent:
        hops = self._reads(op.subgroup, visit)
        self._count(Lane.NVME_READ, Cargo.STATES, visit.layout.states_bytes, op)
        if visit.layout.in_place:
            self._count(
                Lane.NVME_READ,
                Cargo.PARAMETERS,
                self._nbytes_of_values(op.subgroup, visit.wanted),
                op,
            )
        moved = 0
        memory, places = visit.buffer.memory(), visit.layout.gradients
        for number in visit.wanted:
            if number in places:
                segment = self._subgroups[op.subgroup].segments[number]
                several = len(places[number]) > 1
                into = [memory[at:] for at in places[number][: -1 if several else None]]
                read = gradients.read(segment.parameter, self._pieces[op.subgroup][number], into)
                visit.moving.extend(read)
                hops += read
                formats = gradients.formats(segment.parameter, self._pieces[op.subgroup][number])
                moved += sum(format_.nbytes * segment.numel for format_ in formats[: len(read)])
        self._count(Lane.NVME_READ, Cargo.GRADIENTS, moved, op)
        return IOEvent(hops)

    def store(self, op: StoreStates) -> IOEvent | None:
        """Begin to write a subgroup that was updated to the drives."""
        visit = self._visits.get(op.subgroup)
        if visit is None or not visit.wanted:
            return None
        visit.store(IOEvent(self._writes(op.subgroup, visit)))
        self._count(Lane.NVME_WRITE, Cargo.STATES, visit.layout.states_bytes, op)
        self._count(
            Lane.NVME_WRITE, Cargo.PARAMETERS, self._nbytes_of_values(op.subgroup, visit.wanted), op
        )
        return visit.storing

    def note_arrivals(self) -> list[int]:
        """Return the subgroups that are on the drives again since this was asked last."""
        stored = []
        for index, visit in list(self._visits.items()):
            if visit.storing is not None:
                with suppress(Exception):  # told by whoever walks the plan
                    visit.storing.wait()
                    del self._visits[index]
                    stored.append(index)
                visit.store(None)
        return stored

    # --- before a step ----------------------------------------------------------------------------

    def begin_early(self, buffers: int) -> None:
        """Take the host buffers for early updates, or what is missing of them."""
        for number in range(len(self._early_buffers), buffers):
            self._early_buffers.append(self._lanes.host.lease_planned(early_slot(number)))

    def end_early(self) -> None:
        """Give them back. Nobody reads or writes there any more."""
        while self._early_buffers:
            self._early_buffers.pop().close()

    def load_early(self, index: int, buffer: int, gradients: GradientKeeper) -> IOEvent:
        """Begin to read a subgroup, and what there is of its gradients, into a buffer for early
        updates.
        """
        layout, segments = self._layouts[index], self._subgroups[index].segments
        visit = self._visits[index] = Visit(
            layout, self._early_buffers[buffer], range(len(segments))
        )
        return self._read(
            LoadStates(subgroup=index, nbytes=layout.load_bytes, buffer=buffer), visit, gradients
        )

    def store_early(self, index: int, buffer: int) -> IOEvent:
        """Begin to write a subgroup that was updated to its new places."""
        visit = self._visits[index]
        hops = self._state_hops(index, visit, self._swap.write, self._places.new_states)
        hops += self._value_hops(index, visit, self._swap.write, self._places.new_values)
        op = StoreStates(subgroup=index, nbytes=visit.layout.store_bytes, buffer=buffer)
        self._count(Lane.NVME_WRITE, Cargo.STATES, visit.layout.states_bytes, op)
        self._count(
            Lane.NVME_WRITE, Cargo.PARAMETERS, self._nbytes_of_values(index, visit.wanted), op
        )
        return IOEvent(hops)

    def leave_early(self, index: int) -> None:
        """Let the buffer of a subgroup be free, once nobody reads or writes it any more."""
        visit = self._visits.get(index)
        if visit is not None:
            visit.settle()
            self._visits.pop(index, None)

    def adopt(self, indices: Collection[int]) -> dict[int, Place]:
        """Let what was written early be what there is; return the new places of values, by
        parameter.

        Again, before the step has ended: changes nothing, so that one that was interrupted can go
        on.
        """
        parameters = {
            segment.parameter for index in indices for segment in self._subgroups[index].segments
        }
        if not self._places.adopted:
            self._places = self._places.adopting(indices, parameters)
        return {parameter: self._places.values[parameter] for parameter in parameters}

    # --- outside of steps -------------------------------------------------------------------------

    def borrowed(self, index: int) -> Visit:
        """Return a subgroup as it is on the drives, in a buffer of the caller's own: to be
        closed.
        """
        visit = self.empty(index, 0)
        try:
            IOEvent(self._reads(index, visit)).wait()
        except BaseException:
            visit.buffer.close()
            raise
        return visit

    def empty(self, index: int, buffer: int) -> Visit:
        """Return a buffer as for a visit of this subgroup, with whatever is in it: to be closed."""
        lease = self._lanes.host.lease_planned(buffer_slot(buffer))
        return Visit(self._layouts[index], lease, range(len(self._subgroups[index].segments)))

    def give_back(self, index: int, visit: Visit) -> IOEvent:
        """Begin to write the states of such a visit; its buffer is closed, and goes back when they
        are written.
        """
        writing = IOEvent(self._state_hops(index, visit, self._swap.write))
        visit.buffer.until(writing)
        visit.buffer.close()
        return writing

    def write_back(self, index: int, visit: Visit) -> IOEvent:
        """Begin to write the states of such a visit, and its values that rest on drives."""
        return IOEvent(self._writes(index, visit))

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

    def close(self) -> None:
        """Give all memory and room back."""
        self.end_step()
        self.end_early()
        places, self._places = self._places, _Places({}, {}, {}, {})
        for each in (places.states, places.new_states, places.new_values):
            for place in each.values():
                self._swap.release(place)

    # --- what goes where --------------------------------------------------------------------------

    def _reads(self, index: int, visit: Visit) -> list[Hop]:
        hops = self._state_hops(index, visit, self._swap.read)
        return hops + (
            self._value_hops(index, visit, self._swap.read) if visit.layout.in_place else []
        )

    def _writes(self, index: int, visit: Visit) -> list[Hop]:
        return self._state_hops(index, visit, self._swap.write) + self._value_hops(
            index, visit, self._swap.write
        )

    def _state_hops(
        self,
        index: int,
        visit: Visit,
        move: Callable[..., Hop],
        places: Mapping[int, Place] | None = None,
    ) -> list[Hop]:
        nbytes = visit.layout.states_bytes
        if not nbytes:
            return []
        what = f"states of {self._about(index)}"
        visit.moving.append(
            move((places or self._places.states)[index], visit.buffer.memory()[:nbytes], what=what)
        )
        return visit.moving[-1:]

    def _value_hops(
        self,
        index: int,
        visit: Visit,
        move: Callable[..., Hop],
        places: Mapping[int, Place] | None = None,
    ) -> list[Hop]:
        memory, hops = visit.buffer.memory(), []
        width = self._subgroups[index].formats.width
        for number, at in visit.layout.values.items():
            if number in visit.wanted:
                segment = self._subgroups[index].segments[number]
                start, nbytes = (width * each for each in (segment.first_element, segment.numel))
                place = (places or self._places.values)[segment.parameter].part(start, nbytes)
                visit.moving.append(
                    move(place, memory[at : at + nbytes], what=self._names(segment.parameter))
                )
                hops.append(visit.moving[-1])
        return hops

    def _nbytes_of_values(self, index: int, wanted: Collection[int]) -> int:
        subgroup = self._subgroups[index]
        numbers = [number for number in self._layouts[index].values if number in wanted]
        return sum(subgroup.formats.width * subgroup.segments[number].numel for number in numbers)

    def _count(self, lane: Lane, cargo: Cargo, nbytes: int, op: LoadStates | StoreStates) -> None:
        if nbytes:
            self._lanes.meter.copies(lane, cargo, nbytes, None, name=op.name, subgroup=op.subgroup)

    def _about(self, index: int) -> str:
        names = dict.fromkeys(
            self._names(segment.parameter) for segment in self._subgroups[index].segments
        )
        listed = ", ".join(list(names)[:3]) + (
            f" and {len(names) - 3} others" if len(names) > 3 else ""
        )
        return f"subgroup {index} ({listed})"
