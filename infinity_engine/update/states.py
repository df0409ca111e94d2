"""The optimizer's states: where each subgroup's masters and moments are, and ops on them.

Owns the leases of states and of staging sets. Knows no order: the plan has it, and the Executor
follows it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Protocol

import torch

from infinity_engine.accel import Event, Stream
from infinity_engine.building.initial_placement import InitialValues
from infinity_engine.building.previous import PreviousStates
from infinity_engine.errors import CapacityError
from infinity_engine.gradients.keeper import GradientKeeper, added_up
from infinity_engine.lanes.lanes import Lanes
from infinity_engine.lanes.meter import Cargo, Wait
from infinity_engine.memory import Lease
from infinity_engine.optim import (
    FloatFormat,
    Rule,
    Segment,
    Subgroup,
    SubgroupState,
    Update,
    Values,
    update_records,
)
from infinity_engine.parameters.parameters import TrainedParameter
from infinity_engine.plan import Tier
from infinity_engine.plan.ops import (
    DownloadParameters,
    DownloadStates,
    LoadStates,
    Op,
    StoreStates,
    UpdateOnDevice,
    UpdateOnHost,
    UpdateOp,
    UploadParameters,
    UploadStates,
)
from infinity_engine.plan.step import Home, StepPlan
from infinity_engine.progress import ProgressReporter
from infinity_engine.storage import Hops, Place
from infinity_engine.update.captured import (
    CapturedBytes,
    CapturedPiece,
    CapturedStates,
    CapturedSubgroup,
    RunInMemory,
    RunOnDrives,
)
from infinity_engine.update.host_thread import HostThread, HostUpdate, Times
from infinity_engine.update.swapping import BufferedSubgroup, SwappedStates
from infinity_engine.update.under_way import StepInputs, StepUnderWay

__all__ = ["Receiver", "StateKeeper", "piece_numbers"]

_COMPARED = 1 << 18  # elements of a master that are compared with changed values at once


class Receiver(Protocol):
    """An object that brings new values to modules before they go to the drives."""

    def receive(self, number: int, start: int, values: torch.Tensor) -> None:
        """Copy bytes of a parameter from `start` on: they are a view of a buffer that is reused."""


@dataclass(slots=True)
class _SubgroupStates:
    """One subgroup, and where its states are between steps."""

    subgroup: Subgroup
    home: Home
    pieces: tuple[int, ...]  # of each segment: which piece of its parameter it is
    steps: list[int]  # of each segment
    lease: Lease | None = None  # None: its states are on the drives, or it has only values
    # New 16-bit values on their way to the memory where modules compute.
    copies: Lease | None = None
    visit: list[int] = field(default_factory=list)  # its steps as its update in a staging set ends

    def stay_in(self, lease: Lease, copies: Lease | None) -> None:
        """Have its states in memory."""
        self.lease, self.copies = lease, copies

    def begin_visit(self, steps: list[int]) -> None:
        """Be updated in a staging set, which changes these step counts."""
        self.visit = steps

    def move(self, home: Home, copies: Lease | None) -> None:
        """Be updated elsewhere from the next step on."""
        _close([self.copies])
        self.home, self.copies = home, copies


class StateKeeper:
    """All states of one engine; carries out the ops of its plans.

    The fp32 parameter itself is the master where it lies in the memory in which it is updated.
    Staging sets exist from the beginning of a step to its end. `swapped` has what is on the drives.
    """

    def __init__(
        self,
        plan: StepPlan,
        subgroups: Sequence[Subgroup],
        trained: Sequence[TrainedParameter],
        *,
        state_names: Sequence[str],
        lanes: Lanes,
        swapped: SwappedStates,
        resting: Collection[int] = (),
        host_thread: HostThread | None = None,
    ) -> None:
        self._swapped = swapped
        self._host_thread = host_thread  # None: the host's updates are made where they are begun
        self._plan = plan
        self._trained = trained
        self._state_names = tuple(state_names)
        self._lanes = lanes
        self._under_way: StepUnderWay | None = None  # None between two steps
        self._receiver: Receiver | None = None
        self._captured: CapturedBytes = CapturedStates.nothing()
        # Updated on the device, and in flight back to the host.
        self._on_the_way: list[tuple[_SubgroupStates, Event]] = []
        homes = plan.homes()
        numbers = piece_numbers(subgroups)
        self._held = {
            subgroup.index: self._hold(
                subgroup,
                homes[subgroup.index],
                numbers[subgroup.index],
                on_drives=subgroup.index in resting,
            )
            for subgroup in subgroups
        }
        self._staging: list[Lease] = []

    # --- where things lie -------------------------------------------------------------------------

    def adopt_plan(self, plan: StepPlan) -> None:
        """Follow another plan from the next step on. States stay, so its residents are the same.

        Raises:
            CapacityError: the host has no room for the copies that it needs. Nothing has changed.
        """
        assert not self.begun, "a step goes by one plan"
        homes = plan.homes()
        moved = [held for index, held in self._held.items() if homes[index] is not held.home]
        assert all(
            Home.RESIDENT not in (held.home, homes[held.subgroup.index]) for held in moved
        ), "states stay"
        # All new leases first: a refusal must leave the old plan whole.
        copies: dict[int, Lease | None] = {}
        try:
            for held in moved:
                copies[held.subgroup.index] = self._copies(
                    held.subgroup, homes[held.subgroup.index]
                )
        except CapacityError:
            _close(copies.values())
            raise
        # Nothing can fail from here on.
        for held in moved:
            held.move(homes[held.subgroup.index], copies[held.subgroup.index])
        self._plan = plan

    def _copies(self, subgroup: Subgroup, home: Home) -> Lease | None:
        """Lease memory for a subgroup's new values, where modules compute in the other memory."""
        elsewhere = Home.RESIDENT if self._at_home else Home.HOST
        if home is not elsewhere or self._unified or not subgroup.formats.has_copies:
            return None
        pool = self._lanes.device if home is Home.RESIDENT else self._lanes.host
        return pool.lease(subgroup.formats.width * subgroup.numel, holder="updated parameters")

    def _hold(
        self, subgroup: Subgroup, home: Home, pieces: tuple[int, ...], *, on_drives: bool
    ) -> _SubgroupStates:
        pool = (
            self._lanes.device if home is Home.RESIDENT and not self._unified else self._lanes.host
        )
        held = _SubgroupStates(subgroup, home, pieces, [0] * len(subgroup.segments))
        # Those on drives need none here: they pass a step's buffers.
        if not on_drives:
            lease = pool.lease(self._nbytes(held), holder="optimizer states")
            held.stay_in(lease, self._copies(subgroup, home))
        return held

    def _nbytes(self, held: _SubgroupStates) -> int:
        """Return the bytes of a subgroup's states: moments, and masters that are not in place."""
        streams = len(self._state_names) + (not self._in_place(held))
        return 4 * held.subgroup.numel * streams

    def _state_in(self, flat: torch.Tensor, held: _SubgroupStates) -> SubgroupState:
        """Return a subgroup's states as they lie in `flat`: the masters first, then the moments."""
        subgroup = held.subgroup
        # One row for each stream, each as long as the subgroup.
        rows = flat[: self._nbytes(held)].view(torch.float32).view(-1, subgroup.numel)
        streams = [Values.of(row) for row in rows]
        masters = self._values_of(held) if self._in_place(held) else streams.pop(0)
        return SubgroupState(
            subgroup=subgroup, master=masters, states=tuple(streams), steps=list(held.steps)
        )

    def _states_of(self, held: _SubgroupStates) -> torch.Tensor:
        """Return the bytes of a subgroup's states: its lease, or the buffer of this step."""
        if held.lease is not None:
            return held.lease.flat()
        buffered = self._buffered(held)
        assert buffered is not None, "states on the drives were loaded"
        return buffered.states()

    def _buffered(self, held: _SubgroupStates) -> BufferedSubgroup | None:
        return self._swapped.buffered(held.subgroup.index)

    def _in_place(self, held: _SubgroupStates) -> bool:
        here = Home.HOST if self._at_home else Home.RESIDENT
        return not held.subgroup.formats.has_copies and (self._unified or held.home is here)

    @property
    def _at_home(self) -> bool:
        """Whether parameters are fetched from the host, so that updates leave new values there."""
        return self._plan.parameters is not Tier.DEVICE

    @property
    def _unified(self) -> bool:
        return self._lanes.accelerator.unified

    def _values_of(self, held: _SubgroupStates) -> tuple[Values, ...]:
        """Return what modules compute with, of every segment, in the buffer or in memory."""
        buffered, format_ = self._buffered(held), held.subgroup.formats.values
        width = format_.nbytes
        found = []  # of thousands of segments, so nothing is looked up twice
        for number, segment in enumerate(held.subgroup.segments):
            if buffered is not None and number in buffered.layout.values:
                values = buffered.values(number, width * segment.numel)
                address = values.data_ptr()
            else:
                values = self._trained[segment.parameter].home
                address = values.data_ptr() + width * segment.first_element
            found.append(Values(address, segment.numel, format_, values))
        return tuple(found)

    def _target_bytes(
        self, held: _SubgroupStates, number: int, buffered: BufferedSubgroup | None = None
    ) -> torch.Tensor:
        """Return a segment's values that modules compute with, as bytes."""
        segment, width = held.subgroup.segments[number], held.subgroup.formats.width
        # In a step, the copy in the buffer is the one that is updated.
        buffered = buffered or self._buffered(held)
        if buffered is not None and number in buffered.layout.values:
            return buffered.values(number, width * segment.numel)
        flat = self._trained[segment.parameter].values.view(torch.uint8)
        return flat[width * segment.first_element :][: width * segment.numel]

    def on_new_values(self, receiver: Receiver) -> None:
        """Let `receiver` have new values that go to the drives, while they are in a buffer."""
        self._receiver = receiver

    def begin(
        self,
        initial: InitialValues,
        rules: Sequence[Rule],
        previous: PreviousStates,
        reporter: ProgressReporter,
    ) -> None:
        """Write the first masters, from `initial` in fp32, and previous or initial moments."""
        total = sum(self._nbytes(held) for held in self._held.values())
        writing: deque[Hops] = deque()
        buffers, count = len(self._plan.buffer_bytes), 0
        with reporter.part("making optimizer states", total) as made:
            for held in self._held.values():
                if held.lease is not None:
                    self._fill(held, held.lease.flat(), initial, rules, previous)
                else:
                    # Every buffer has a write in flight: the oldest one frees the next buffer.
                    if len(writing) == buffers:
                        writing.popleft().wait()
                    buffered = self._swapped.empty(held.subgroup.index, count % buffers)
                    count += 1
                    self._fill(held, buffered.states(), initial, rules, previous)
                    writing.append(self._swapped.give_back(held.subgroup.index, buffered))
                made(self._nbytes(held))
            while writing:
                writing.popleft().wait()

    def _fill(
        self,
        held: _SubgroupStates,
        flat: torch.Tensor,
        initial: InitialValues,
        rules: Sequence[Rule],
        previous: PreviousStates,
    ) -> None:
        values = flat[: self._nbytes(held)].view(torch.float32)
        numel = held.subgroup.numel
        start = 0
        if not self._in_place(held):
            start = numel
            for segment in held.subgroup.segments:
                piece = values[segment.offset : segment.offset + segment.numel]
                initial.fill(self._trained[segment.parameter], segment.first_element, piece)
        for index, segment in enumerate(held.subgroup.segments):
            rule = rules[self._trained[segment.parameter].group]
            held.steps[index] = previous.steps_of(segment.parameter)
            for state, name in enumerate(self._state_names):
                offset = start + state * numel + segment.offset
                piece = values[offset : offset + segment.numel]
                # A rule with fewer states than the widest leaves the others at their initial value.
                if name not in rule.states or not previous.fill(
                    segment.parameter, name, segment.first_element, piece
                ):
                    piece.fill_(rule.initial_state)

    def state_of(self, number: int) -> Mapping[str, torch.Tensor]:
        """Return flat copies of a parameter's master and moments."""
        names = ("master", *self._state_names)
        whole = {name: torch.empty(self._trained[number].numel) for name in names}
        for held, index, segment in self._segments_of(number):
            self._copy_out(
                held,
                index,
                # Views of the whole: each segment is written into its part.
                {name: _part(whole_values, segment) for name, whole_values in whole.items()},
            )
        return whole

    def _copy_out(
        self, held: _SubgroupStates, index: int, into: Mapping[str, torch.Tensor]
    ) -> None:
        """Copy a segment's master and moments. No view of the buffer is left on return."""
        with self._in_memory(held) as (flat, buffered):
            for name, piece in self._pieces(held, index, flat, buffered):
                into[name].copy_(piece)

    # --- checkpoints ------------------------------------------------------------------------------

    @cached_property
    def groups(self) -> int:
        """How many groups the optimizer has at least: those that parameters are of."""
        return 1 + max((known.group for known in self._trained), default=-1)

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of the moments."""
        return self._state_names

    def before_changes(self, captured: CapturedBytes) -> None:
        """Ask this before states change where they rest."""
        self._captured = captured
        self._swapped.before_changes(captured)

    def capture(self) -> CapturedStates:
        """Return the states as they are now, in the order in which the next update changes them."""
        updates = [op for op in self._plan.ops if isinstance(op, UpdateOnHost | UpdateOnDevice)]
        # In the order of updates, so that an update waits for what is saved next, not for all.
        order = dict.fromkeys([*(op.subgroup for op in updates), *self._held])
        in_memory: list[CapturedSubgroup] = []
        on_drives: list[RunOnDrives] = []
        for index in order:
            runs = self._runs(self._held[index])
            mine = tuple(run for run in runs if isinstance(run, RunInMemory))
            if mine:
                in_memory.append(CapturedSubgroup(index, mine))
            on_drives += (run for run in runs if isinstance(run, RunOnDrives))
        return CapturedStates(in_memory, on_drives)

    def _runs(self, held: _SubgroupStates) -> list[RunInMemory | RunOnDrives]:
        index, swapped, names = held.subgroup.index, self._swapped, self._state_names
        numbered = [
            (number, segment)
            for number, segment in enumerate(held.subgroup.segments)
            if segment.numel
        ]
        runs: list[RunInMemory | RunOnDrives] = []
        if not self._in_place(held):
            names = ("master", *names)
        else:
            # Masters in place lie with the parameters, each at a place of its own.
            for number, segment in numbered:
                master = CapturedPiece(segment, "master")
                place = swapped.values_place(index, number)
                if place is not None:
                    runs.append(RunOnDrives((master,), place, swapped))
                else:
                    runs.append(RunInMemory(master, self._target_bytes(held, number)))
        pieces = [CapturedPiece(segment, name) for name in names for _, segment in numbered]
        if held.lease is not None:
            flat = held.lease.flat()
            for piece in pieces:
                # The streams follow one another in the lease.
                first = names.index(piece.stream) * held.subgroup.numel + piece.segment.offset
                runs.append(RunInMemory(piece, flat[4 * first :][: piece.nbytes]))
        elif (place := swapped.states_place(index)) is not None:
            runs.append(RunOnDrives(tuple(pieces), place, swapped))
        return runs

    def overwrite_segments(
        self, fill: Callable[[Segment, Mapping[str, torch.Tensor]], None]
    ) -> None:
        """Let `fill` overwrite each segment's master and moments.

        What modules compute with follows from the masters. What is written is kept like the
        results of an update: tell the provider of parameters. `fill` may keep no view.
        """
        for held in self._held.values():
            self._fill_segments(held, fill)

    def _fill_segments(
        self, held: _SubgroupStates, fill: Callable[[Segment, Mapping[str, torch.Tensor]], None]
    ) -> None:
        with self._in_memory(held, write_values=True) as (flat, buffered):
            for index, segment in enumerate(held.subgroup.segments):
                pieces = dict(self._pieces(held, index, flat, buffered))
                # Given views: what `fill` writes is in the states at once.
                fill(segment, pieces)
                if not self._in_place(held):
                    # Always: a buffer for the drives has no values yet.
                    values = self._target_bytes(held, index, buffered)
                    dtype = self._trained[segment.parameter].dtype
                    values.view(dtype).copy_(pieces["master"])

    def set_steps(self, number: int, steps: int) -> None:
        """Set how many updates a parameter has had."""
        for held, index, _ in self._segments_of(number):
            held.steps[index] = steps

    def steps_of(self, number: int) -> int:
        """Return how many updates a parameter has had."""
        return max((held.steps[index] for held, index, _ in self._segments_of(number)), default=0)

    def set_master(self, number: int, values: torch.Tensor) -> None:
        """Overwrite a parameter's master with `values`, which the caller changed; they are flat.

        An element that equals the rounded master was not changed, and its master keeps all its
        bits.
        """
        for held, index, segment in self._segments_of(number):
            if not self._in_place(held):
                self._write_master(held, index, _part(values, segment))

    def _write_master(self, held: _SubgroupStates, index: int, values: torch.Tensor) -> None:
        with self._in_memory(held, write_states=True) as (flat, buffered):
            master = dict(self._pieces(held, index, flat, buffered))["master"]
            # In parts: a comparison needs memory of its own.
            for first in range(0, len(values), _COMPARED):
                old = master[first : first + _COMPARED]
                new = values[first : first + _COMPARED].to(old.device)
                # Compared in the dtype that modules saw: equal there means that it was not changed.
                old.copy_(torch.where(old.to(new.dtype) == new, old, new.to(old.dtype)))

    def _segments_of(self, number: int) -> Iterator[tuple[_SubgroupStates, int, Segment]]:
        """Yield the subgroup, number and segment of each segment of a parameter."""
        for subgroup, index in self._places_of_segments.get(number, ()):
            held = self._held.get(subgroup)
            if held is not None:  # else it was closed
                yield held, index, held.subgroup.segments[index]

    @cached_property
    def _places_of_segments(self) -> Mapping[int, Sequence[tuple[int, int]]]:
        """The subgroup and number of each segment, by its parameter: there may be thousands."""
        places: dict[int, list[tuple[int, int]]] = {}
        for subgroup, held in self._held.items():
            for index, segment in enumerate(held.subgroup.segments):
                places.setdefault(segment.parameter, []).append((subgroup, index))
        return places

    @contextmanager
    def _in_memory(
        self, held: _SubgroupStates, *, write_states: bool = False, write_values: bool = False
    ) -> Iterator[tuple[torch.Tensor, BufferedSubgroup | None]]:
        """Have a subgroup's states in memory between steps.

        At the end, those that are on the drives are written back: with `write_states` the states,
        with `write_values` also the values that modules compute with.
        """
        index = held.subgroup.index
        if write_states or write_values:
            # A save may still be reading these bytes.
            self._captured.wait_for(index)
        if not self._swapped.has(index):
            assert held.lease is not None, "states that are not on drives have a lease"
            yield held.lease.flat(), None
            return
        buffered = self._swapped.borrowed(index)
        try:
            yield (buffered.states() if held.lease is None else held.lease.flat()), buffered
            if write_values:
                # Waited for: the buffer goes back to the pool below.
                self._swapped.write_back(index, buffered).wait()
            elif write_states and held.lease is None:
                self._swapped.give_back(index, buffered).wait()
        finally:
            buffered.buffer.close()

    def _pieces(
        self,
        held: _SubgroupStates,
        number: int,
        flat: torch.Tensor,
        buffered: BufferedSubgroup | None,
    ) -> list[tuple[str, torch.Tensor]]:
        """Return views of a segment's master and moments."""
        segment, numel = held.subgroup.segments[number], held.subgroup.numel
        values = flat[: self._nbytes(held)].view(torch.float32)
        names: tuple[str, ...] = self._state_names
        found = []
        if self._in_place(held):
            found.append(("master", self._target_bytes(held, number, buffered).view(torch.float32)))
        else:
            names = ("master", *names)
        for place, name in enumerate(names):
            offset = place * numel + segment.offset
            found.append((name, values[offset : offset + segment.numel]))
        return found

    def close(self) -> None:
        """Return all memory."""
        for held in self._held.values():
            _close([held.lease, held.copies])
        self._held.clear()
        self._close_staging()
        self._swapped.close()

    def _close_staging(self) -> None:
        while self._staging:
            self._staging.pop().close()

    # --- ops --------------------------------------------------------------------------------------

    def begin_step(self, step: StepUnderWay) -> dict[int, Place]:
        """Begin a step; return where the values are that its backward has updated, by parameter."""
        self._under_way = step
        return self._swapped.adopt(step.made_early) if step.made_early else {}

    def lease_for_step(self) -> None:
        """Lease the memory of a step that it does not have yet."""
        if not self._unified:
            with self._lanes.meter.timed_wait(Wait.OPS):  # for evicted parameters
                # Only those that are missing: a refusal may have come between two leases.
                for nbytes in self._plan.staging_bytes[len(self._staging) :]:
                    self._staging.append(self._lanes.device.lease(nbytes, holder="staging sets"))
        self._swapped.begin_step(len(self._plan.buffer_bytes), self.step.updated)

    def note_arrivals(self) -> None:
        """Count subgroups that are back from the device as updated, but for failed copies."""
        for held, event in self._on_the_way:
            with suppress(Exception):  # the walk has raised it already
                event.wait()
                self._note_update(held, held.visit)
        self._on_the_way.clear()
        self._swapped.note_arrivals()

    def end_step(self) -> None:
        """End a step in which every subgroup was updated."""
        for index, steps in self.step.updated.items():
            self._held[index].steps[:] = steps
        self._close_staging()
        self._swapped.end_step()
        self._under_way = None

    # --- before a step ----------------------------------------------------------------------------

    def update_early(self, index: int, inputs: StepInputs) -> list[int]:
        """Update a subgroup in its buffer; return the step counts for when it is adopted."""
        held = self._held[index]
        state = self._state_in(self._states_of(held), held)
        op = UpdateOnHost(subgroup=index, params=held.subgroup.numel)
        self._apply(op, held, state, self._targets(held), inputs)
        return list(state.steps)

    # --- in a step --------------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """Whether a step has begun and not ended: some values may be new and the rest old."""
        return self._under_way is not None

    @property
    def step(self) -> StepUnderWay:
        """The step that was begun."""
        assert self._under_way is not None, "a step has begun"
        return self._under_way

    def carry_out(self, op: Op, after: Sequence[Event]) -> Event | Hops | HostUpdate | None:
        """Submit an op. Without a thread for it, an update on the host is done on return."""
        held = self._held[op.subgroup]
        if isinstance(op, UpdateOnHost | UpdateOnDevice | DownloadStates):
            # A save of the step before may not have written what this subgroup has in memory.
            self._captured.wait_for(op.subgroup)
        if isinstance(op, StoreStates):
            return self._swapped.store(op)
        # After an interrupted step, only what it has left undone is done. What was updated waits in
        # its buffer until it is stored.
        updated = op.subgroup in self.step.updated
        if isinstance(op, LoadStates):
            return None if updated else self._load(op, held)
        if self._was_done(held) or (updated and isinstance(op, UpdateOnHost)):
            return None
        if isinstance(op, UpdateOnHost):
            return self._update_on_host(op, held)
        self._swapped.compare(op.subgroup)
        if isinstance(op, UpdateOnDevice):
            return self._update_on_device(op, held, after)
        # In one memory there is nothing to move.
        return None if self._unified else self._move(op, held, after)

    def _update_on_host(self, op: UpdateOnHost, held: _SubgroupStates) -> HostUpdate | None:
        """Update a subgroup, or let the thread do it."""
        state = self._state_in(self._states_of(held), held)
        targets, thread = self._targets(held), self._host_thread
        if thread is None:
            self._update(op, held, state, targets)
            return None
        update = self._records(held, state, targets, self.step.inputs)

        def note(times: Times) -> None:
            self._lanes.meter.count_host_update(op, *times)
            self._note_update(held, list(update.steps))

        return thread.begin(partial(self._lanes.kernels.update, update), note)

    def _was_done(self, held: _SubgroupStates) -> bool:
        """Tell whether an interrupted step has left nothing to do for a subgroup but to store it.

        One that is updated on the device counts as done when its states are back on the host. Its
        staging set may hold another subgroup by then.
        """
        index = held.subgroup.index
        if self._swapped.has(index) and self._buffered(held) is None:
            return True
        return held.home is Home.VISITING and index in self.step.updated

    def _load(self, op: LoadStates, held: _SubgroupStates) -> Hops | None:
        gradients, segments = self.step.inputs.gradients, held.subgroup.segments
        # Segments without a gradient are neither updated nor stored.
        wanted = [
            number for number, segment in enumerate(segments) if gradients.has(segment.parameter)
        ]
        return self._swapped.load(op, wanted, gradients)

    def _move(self, op: Op, held: _SubgroupStates, after: Sequence[Event]) -> Event:
        if isinstance(op, UploadStates):
            staged = self._on_device(op.staging, held)
            return self._copy(op, Cargo.STATES, staged, self._states_of(held), after)
        if isinstance(op, DownloadStates):
            staged = self._on_device(op.staging, held)
            event = self._copy(op, Cargo.STATES, self._states_of(held), staged, after)
            # Done when the copy has ended: until then the host has old bytes.
            self._on_the_way.append((held, event))
            return event
        if isinstance(op, UploadParameters):
            return self._upload_parameters(op, held, after)
        if isinstance(op, DownloadParameters):
            # To where modules fetch it, or into a buffer to store.
            for values, piece in self._copied(held, self._updated_on_device(op.staging, held)):
                self._copy(op, Cargo.PARAMETERS, values, piece, after)
            return self._behind(self._lanes.download, after)
        raise TypeError(f"there is no way to carry out {op.name}")

    def _update_on_device(
        self, op: UpdateOnDevice, held: _SubgroupStates, after: Sequence[Event]
    ) -> Event:
        inputs = self.step.inputs
        visits = op.staging is not None and not self._unified
        state = self._state_in(self._on_device(op.staging, held), held)
        if visits:
            held.begin_visit(state.steps)
        targets = self._targets_on_device(op.staging, held)

        # The stream calls it, perhaps after this method has returned.
        def work() -> None:
            self._update(op, held, state, targets, arrives=visits)
            subgroup = held.subgroup
            if not subgroup.formats.has_copies and not self._at_home and not self._in_place(held):
                self._copy_masters(subgroup, state, inputs.gradients)

        return self._lanes.on_device(
            work, op.params, after=after, name=op.name, subgroup=op.subgroup
        )

    def _update(
        self,
        op: UpdateOp,
        held: _SubgroupStates,
        state: SubgroupState,
        targets: Sequence[Values | None],
        *,
        arrives: bool = False,
    ) -> None:
        """Update a subgroup with its states in `state`.

        With `arrives`, it counts as updated only when it is back on the host.
        """
        step = self.step
        if held.subgroup.index in step.updated:
            return
        self._apply(op, held, state, targets, step.inputs)
        if arrives:
            return
        self._note_update(held, state.steps)
        buffered, width = self._buffered(held), held.subgroup.formats.width
        # New values go straight to modules only where these fetch and a buffer is passed.
        if self._receiver is None or buffered is None or not self._at_home:
            return
        # Modules that wait for these values get them from the buffer, before they are written.
        for number, segment in enumerate(held.subgroup.segments):
            if number in buffered.layout.values and number in buffered.wanted:
                values = buffered.values(number, width * segment.numel)
                self._receiver.receive(segment.parameter, width * segment.first_element, values)

    def _apply(
        self,
        op: UpdateOp,
        held: _SubgroupStates,
        state: SubgroupState,
        targets: Sequence[Values | None],
        inputs: StepInputs,
    ) -> None:
        """Update a subgroup and its step counts."""
        update = self._records(held, state, targets, inputs)
        self._lanes.meter.run_update(op, self._updating(op, held, update))
        # In place: of a visitor, `visit` is this very list.
        state.steps[:] = update.steps
        if self._swapped.any:
            nbytes = self._nbytes(held)
            self._lanes.meter.count_need(Cargo.STATES, nbytes, found=held.lease is not None)

    def _records(
        self,
        held: _SubgroupStates,
        state: SubgroupState,
        targets: Sequence[Values | None],
        inputs: StepInputs,
    ) -> Update:
        segments = held.subgroup.segments
        return update_records(
            state,
            rules=[inputs.rules[self._trained[segment.parameter].group] for segment in segments],
            gradients=self._gradients_of(held, inputs),
            parameters=targets,
            gradient_factor=inputs.gradient_factor,
        )

    def _updating(self, op: UpdateOp, held: _SubgroupStates, update: Update) -> Callable[[], None]:
        """Return what carries out an update."""
        if isinstance(op, UpdateOnDevice):
            return partial(self._lanes.device_kernels.update, update)
        kernels, index = self._lanes.kernels, held.subgroup.index
        buffered = self._buffered(held)
        if buffered is None:
            return partial(kernels.update, update)
        # What is changed in place elsewhere could not be taken back.
        if not self._changes_its_buffer_alone(held, buffered):
            self._swapped.compare(index)
        return partial(self._swapped.update, index, partial(kernels.update_and_sum, update))

    def _changes_its_buffer_alone(self, held: _SubgroupStates, buffered: BufferedSubgroup) -> bool:
        """Tell whether an update of a buffered subgroup changes nothing that modules see."""
        formats = held.subgroup.formats
        if held.lease is not None:
            return False
        is_apart = not formats.has_copies and not self._in_place(held)
        if is_apart or self._copies_of(held) is not None:
            return True
        return len(buffered.layout.values) == len(held.subgroup.segments)

    def _gradients_of(self, held: _SubgroupStates, inputs: StepInputs) -> list[Values | None]:
        """Return the gradients of all segments in the memory where their update runs."""
        kept, buffered = inputs.gradients, self._buffered(held)
        pieces = list(zip(held.subgroup.segments, held.pieces, strict=True))
        if buffered is None:
            return [kept.values(segment.parameter, piece) for segment, piece in pieces]
        places = buffered.layout.gradients
        found: list[Values | None] = []
        for number, (segment, piece) in enumerate(pieces):
            formats = kept.formats(segment.parameter, piece) if number in places else ()
            if formats:
                found.append(self._summed(buffered, number, segment, formats))
            else:
                found.append(kept.values(segment.parameter, piece))
        return found

    def _summed(
        self,
        buffered: BufferedSubgroup,
        number: int,
        segment: Segment,
        formats: Sequence[FloatFormat],
    ) -> Values:
        """Return the sum of a segment's gradients that were read into a buffer."""

        def lies_at(place: int, format_: FloatFormat) -> Values:
            flat = buffered.gradient(number, place, format_.nbytes * segment.numel)
            return Values(flat.data_ptr(), segment.numel, format_, flat)

        read = [lies_at(place, format_) for place, format_ in enumerate(formats)]
        # One micro-batch needs no sum: its gradient is used as it came.
        if len(read) == 1:
            return read[0]
        # Place -1 is the sum's.
        total = lies_at(-1, FloatFormat.FP32)
        added_up(self._lanes.kernels, read, total)
        return total

    def _note_update(self, held: _SubgroupStates, steps: list[int]) -> None:
        step = self.step
        step.updated[held.subgroup.index] = list(steps)
        # The update has read them, and their memory may serve others.
        for segment, piece in zip(held.subgroup.segments, held.pieces, strict=True):
            step.inputs.gradients.release(segment.parameter, piece)

    def _targets(self, held: _SubgroupStates) -> tuple[Values | None, ...]:
        """Return where the host's update writes new values for modules."""
        copies = self._copies_of(held)
        return self._computed_with(held) if copies is None else self._parts_of(copies, held)

    def _copies_of(self, held: _SubgroupStates) -> torch.Tensor | None:
        """Return the bytes where the host leaves values for the device; None if it does not."""
        if held.copies is not None:
            return held.copies.flat()
        buffered, formats = self._buffered(held), held.subgroup.formats
        if buffered is None or not formats.has_copies or self._unified or self._at_home:
            return None
        return buffered.copies(formats.width * held.subgroup.numel)

    def _targets_on_device(
        self, staging: int | None, held: _SubgroupStates
    ) -> tuple[Values | None, ...]:
        """Return where the device's update writes new values for modules."""
        if self._unified or not self._at_home:
            return self._computed_with(held)
        # New masters are what is downloaded.
        if not held.subgroup.formats.has_copies:
            return (None,) * len(held.subgroup.segments)
        return self._parts_of(self._updated_on_device(staging, held), held)

    def _parts_of(self, flat: torch.Tensor, held: _SubgroupStates) -> tuple[Values, ...]:
        whole = Values(flat.data_ptr(), held.subgroup.numel, held.subgroup.formats.values, flat)
        return tuple(
            whole.part(segment.offset, segment.numel) for segment in held.subgroup.segments
        )

    def _updated_on_device(self, staging: int | None, held: _SubgroupStates) -> torch.Tensor:
        """Return the new values as the device's update leaves them: 16-bit values, or masters."""
        subgroup = held.subgroup
        if not subgroup.formats.has_copies:
            return self._on_device(staging, held)[: 4 * subgroup.numel]
        if held.copies is not None:
            return held.copies.flat()
        assert staging is not None, "what is not staged has copies of its own"
        # Behind the states, in the same staging set.
        behind = self._staging[staging].flat()[self._nbytes(held) :]
        return behind[: subgroup.formats.width * subgroup.numel]

    def _computed_with(self, held: _SubgroupStates) -> tuple[Values | None, ...]:
        if not held.subgroup.formats.has_copies:
            return (None,) * len(held.subgroup.segments)
        return self._values_of(held)

    def _copy_masters(
        self, subgroup: Subgroup, state: SubgroupState, gradients: GradientKeeper
    ) -> None:
        """Copy new fp32 masters to the parameters in device memory, which modules compute with.

        Only those that have a gradient: the memory of others may be in use by a module.
        """
        assert isinstance(state.master, Values), "masters that are not in place are one stream"
        whole = state.master.owner
        assert isinstance(whole, torch.Tensor), "streams of states are made of tensors"
        for segment in subgroup.segments:
            if not gradients.has(segment.parameter):
                continue
            target = self._trained[segment.parameter].values
            piece = whole[segment.offset : segment.offset + segment.numel]
            target[segment.first_element : segment.first_element + segment.numel].copy_(piece)

    def _on_device(self, staging: int | None, held: _SubgroupStates) -> torch.Tensor:
        """Return the bytes of a subgroup's states where the device updates them."""
        if staging is None or self._unified:
            return self._states_of(held)
        return self._staging[staging].flat()[: self._nbytes(held)]

    def _copy(
        self,
        op: Op,
        cargo: Cargo,
        target: torch.Tensor | Lease,
        source: torch.Tensor | Lease,
        after: Sequence[Event],
    ) -> Event:
        return self._lanes.copy(
            op.lane, cargo, target, source, after=after, name=op.name, subgroup=op.subgroup
        )

    def _upload_parameters(
        self, op: UploadParameters, held: _SubgroupStates, after: Sequence[Event]
    ) -> Event:
        """Copy what the host updated to where modules compute with it."""
        copies = self._copies_of(held)
        for values, piece in self._copied(
            held, self._states_of(held) if copies is None else copies
        ):
            self._copy(op, Cargo.PARAMETERS, values, piece, after)
        return self._behind(self._lanes.upload, after)

    def _behind(self, stream: Stream, after: Sequence[Event]) -> Event:
        """Return an event after all copies of `stream`, perhaps none, and after `after`."""
        for event in after:
            self._lanes.accelerator.wait_for(stream, event)
        return self._lanes.accelerator.record(stream)

    def _copied(
        self, held: _SubgroupStates, source: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield, for each updated segment, the bytes where modules have it and in `source`."""
        gradients = self.step.inputs.gradients
        width = held.subgroup.formats.width
        for number, segment in enumerate(held.subgroup.segments):
            # Others have no new values, and a module may be using their memory.
            if gradients.has(segment.parameter):
                yield (
                    self._target_bytes(held, number),
                    source[width * segment.offset :][: width * segment.numel],
                )


def _close(leases: Iterable[Lease | None]) -> None:
    for lease in leases:
        if lease is not None:
            lease.close()


def _part(values: torch.Tensor, segment: Segment) -> torch.Tensor:
    return values[segment.first_element : segment.first_element + segment.numel]


def piece_numbers(subgroups: Sequence[Subgroup]) -> dict[int, tuple[int, ...]]:
    """Return which piece of its parameter each segment of each subgroup is."""
    counts: dict[int, int] = {}
    found = {}
    for subgroup in subgroups:
        numbers = []
        # Counted in the order of the subgroups.
        for segment in subgroup.segments:
            numbers.append(counts.get(segment.parameter, 0))
            counts[segment.parameter] = numbers[-1] + 1
        found[subgroup.index] = tuple(numbers)
    return found
