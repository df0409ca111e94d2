"""The optimizer's states: where each subgroup's masters and moments lie, and the ops of a plan
carried out on them.

Owns the leases of the states and of the staging sets. Knows no order: the plan has it, and the
Executor walks it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import torch

from infinity_engine.accel import Event, Stream
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
from infinity_engine.storage import IOEvent, Place
from infinity_engine.update.captured import (
    CapturedPiece,
    CapturedRun,
    CapturedStates,
    CapturedSubgroup,
    RunInMemory,
    RunOnDrives,
)
from infinity_engine.update.swapping import SwappedStates, Visit

__all__ = ["Receiver", "StateKeeper", "StepInputs", "piece_numbers"]

_COMPARED = 1 << 18  # elements at once, where a master is compared with what somebody has changed

_Originals = Callable[[TrainedParameter, int, torch.Tensor], None]
"""Fills a flat tensor with the elements of a parameter, from one on, as they were before the
engine.
"""

Receiver = Callable[[int, int, torch.Tensor], None]
"""Is shown new values of a parameter that go to the drives: (parameter, first byte, bytes, which
are not its own).
"""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What all updates of one step have in common."""

    gradients: GradientKeeper
    rules: Sequence[Rule]  # of each parameter group
    gradient_factor: float


@dataclass(slots=True)
class _Held:
    """One subgroup: its states where they stay between steps, which may be the drives."""

    subgroup: Subgroup
    home: Home
    lease: Lease | None  # None: its states rest on the drives, or it has none but its values
    pieces: tuple[int, ...]  # which piece of its parameter each segment is
    steps: list[int]  # of each segment
    # what its update writes for modules, where they have it in the other memory
    copies: Lease | None = None

    def move(self, home: Home, copies: Lease | None) -> None:
        """Be updated elsewhere from the next step on."""
        if self.copies is not None:
            self.copies.close()
        self.home, self.copies = home, copies


class StateKeeper:
    """All states of one engine, and the Carrier of its plans.

    A master lies in place, as the fp32 parameter itself, where that is in the memory in which it is
    updated. Staging sets are there from the beginning of a step to its end. What rests on the
    drives is the business of `swapped`.
    """

    def __init__(
        self,
        plan: StepPlan,
        subgroups: Sequence[Subgroup],
        trained: Sequence[TrainedParameter],
        *,
        state_names: Sequence[str],
        lanes: Lanes,
        swapped: SwappedStates | None = None,
        resting: Collection[int] = (),
    ) -> None:
        self._swapped = swapped
        self._resting = frozenset(resting)  # the subgroups whose states are on the drives
        self._plan = plan
        self._trained = trained
        self._state_names = tuple(state_names)
        self._lanes = lanes
        self._inputs: StepInputs | None = None
        self._receiver: Receiver | None = None
        self._before_change: Callable[[int], None] = _nothing
        # subgroups that this step has updated: their step counts from its end on
        self._done: dict[int, list[int]] = {}
        # updated, and not yet home again
        self._on_the_way: list[tuple[_Held, list[int], Event]] = []
        homes = plan.homes()
        # the step counts of what visits, as its update will leave them
        self._visits: dict[int, list[int]] = {}
        numbers = piece_numbers(subgroups)
        self._held = {
            subgroup.index: self._hold(subgroup, homes[subgroup.index], numbers[subgroup.index])
            for subgroup in subgroups
        }
        self._staging: list[Lease] = []

    # --- where things lie -------------------------------------------------------------------------

    def follow(self, plan: StepPlan) -> None:
        """Go by another plan from the next step on.

        States stay where they are, so that residents are the same.

        Raises:
            CapacityError: the host has no room for what it needs; nothing has changed.
        """
        assert not self.begun, "a step goes by one plan"
        homes = plan.homes()
        moved = [held for index, held in self._held.items() if homes[index] is not held.home]
        assert all(
            Home.RESIDENT not in (held.home, homes[held.subgroup.index]) for held in moved
        ), "states stay"
        copies: dict[int, Lease | None] = {}
        try:
            for held in moved:
                copies[held.subgroup.index] = self._copies(
                    held.subgroup, homes[held.subgroup.index]
                )
        except CapacityError:
            for lease in copies.values():
                if lease is not None:
                    lease.close()
            raise
        for held in moved:
            held.move(homes[held.subgroup.index], copies[held.subgroup.index])
        self._plan = plan

    def _copies(self, subgroup: Subgroup, home: Home) -> Lease | None:
        """Return the memory for what its update writes for modules, where they have it in the other
        memory.
        """
        elsewhere = Home.RESIDENT if self._at_home else Home.HOST
        if home is not elsewhere or self._unified or subgroup.formats.parameter is None:
            return None
        pool = self._lanes.device if home is Home.RESIDENT else self._lanes.host
        return pool.lease(subgroup.formats.width * subgroup.numel, holder="updated parameters")

    def _hold(self, subgroup: Subgroup, home: Home, pieces: tuple[int, ...]) -> _Held:
        pool = (
            self._lanes.device if home is Home.RESIDENT and not self._unified else self._lanes.host
        )
        lease = copies = None
        if subgroup.index not in self._resting:
            lease = pool.lease(self._nbytes(subgroup, home), holder="optimizer states")
            copies = self._copies(subgroup, home)
        return _Held(subgroup, home, lease, pieces, [0] * len(subgroup.segments), copies)

    def _nbytes(self, subgroup: Subgroup, home: Home) -> int:
        """Return the bytes of a subgroup's states: the masters, unless they are in place, then the
        moments.
        """
        return (
            4
            * subgroup.numel
            * (len(self._state_names) + (0 if self._in_place(subgroup, home) else 1))
        )

    def _state_in(self, flat: torch.Tensor, held: _Held, steps: Sequence[int]) -> SubgroupState:
        """Return the subgroup's states as they lie in these bytes: the masters first, then the
        moments.
        """
        subgroup = held.subgroup
        values = (
            flat[: self._nbytes(subgroup, held.home)].view(torch.float32).view(-1, subgroup.numel)
        )
        streams = [Values.of(each) for each in values]
        masters: Values | tuple[Values, ...]
        if self._in_place(subgroup, held.home):
            masters = tuple(
                self._values_of(held, number) for number in range(len(subgroup.segments))
            )
        else:
            masters = streams.pop(0)
        return SubgroupState(
            subgroup=subgroup, master=masters, states=tuple(streams), steps=list(steps)
        )

    def _states_of(self, held: _Held) -> torch.Tensor:
        """Return the bytes of a subgroup's states where they are: at home, or in a buffer of this
        step.
        """
        if held.lease is not None:
            return held.lease.flat()
        visit = self._visit(held)
        assert visit is not None, "what rests on the drives was loaded"
        return visit.states()

    def _visit(self, held: _Held) -> Visit | None:
        return None if self._swapped is None else self._swapped.visit(held.subgroup.index)

    def _in_place(self, subgroup: Subgroup, home: Home) -> bool:
        here = Home.HOST if self._at_home else Home.RESIDENT
        return subgroup.formats.parameter is None and (self._unified or home is here)

    @property
    def _at_home(self) -> bool:
        """Whether updates leave what modules compute with on the host, from where it is fetched."""
        return self._plan.parameters is not Tier.DEVICE

    @property
    def _unified(self) -> bool:
        return self._lanes.accelerator.unified

    def _values_of(self, held: _Held, number: int, visit: Visit | None = None) -> Values:
        """Return the values that modules compute with: in memory, or of a segment that is in a
        buffer, there.
        """
        segment, format_ = held.subgroup.segments[number], held.subgroup.formats.values
        visit = visit or self._visit(held)
        if visit is not None and number in visit.layout.values:
            target = visit.values(number, format_.nbytes * segment.numel)
            return Values(target.data_ptr(), segment.numel, format_, target)
        whole = self._trained[segment.parameter].home
        return Values(
            whole.data_ptr() + format_.nbytes * segment.first_element, segment.numel, format_, whole
        )

    def _target_bytes(self, held: _Held, number: int, visit: Visit | None = None) -> torch.Tensor:
        """Return the bytes of those values."""
        segment, width = held.subgroup.segments[number], held.subgroup.formats.width
        visit = visit or self._visit(held)
        if visit is not None and number in visit.layout.values:
            return visit.values(number, width * segment.numel)
        flat = self._trained[segment.parameter].values.view(torch.uint8)
        return flat[width * segment.first_element :][: width * segment.numel]

    def hand_to(self, receiver: Receiver) -> None:
        """Show what a step makes of values that rest on the drives to somebody, before it is
        written there.
        """
        self._receiver = receiver

    def begin(
        self,
        originals: _Originals,
        rules: Sequence[Rule],
        previous: PreviousStates,
        reporter: ProgressReporter,
    ) -> None:
        """Write the first masters, of `originals` in fp32, and states: `previous`, or what each
        rule begins with.
        """
        total = sum(self._nbytes(held.subgroup, held.home) for held in self._held.values())
        with reporter.part("making optimizer states", total) as made:
            self._begin(originals, rules, previous, made)

    def _begin(
        self,
        originals: _Originals,
        rules: Sequence[Rule],
        previous: PreviousStates,
        made: Callable[[int], None],
    ) -> None:
        writing: deque[IOEvent] = deque()
        buffers, count = len(self._plan.buffer_bytes), 0
        for held in self._held.values():
            if held.lease is not None:
                self._fill(held, held.lease.flat(), originals, rules, previous)
            elif held.subgroup.index in self._resting:
                assert self._swapped is not None, "states rest on drives that there are"
                if len(writing) == buffers:
                    writing.popleft().wait()
                visit = self._swapped.empty(held.subgroup.index, count % buffers)
                count += 1
                self._fill(held, visit.states(), originals, rules, previous)
                writing.append(self._swapped.give_back(held.subgroup.index, visit))
            made(self._nbytes(held.subgroup, held.home))
        while writing:
            writing.popleft().wait()

    def _fill(
        self,
        held: _Held,
        flat: torch.Tensor,
        originals: _Originals,
        rules: Sequence[Rule],
        previous: PreviousStates,
    ) -> None:
        values = flat[: self._nbytes(held.subgroup, held.home)].view(torch.float32)
        numel = held.subgroup.numel
        start = 0
        if not self._in_place(held.subgroup, held.home):
            start = numel
            for segment in held.subgroup.segments:
                piece = values[segment.offset : segment.offset + segment.numel]
                originals(self._trained[segment.parameter], segment.first_element, piece)
        for index, segment in enumerate(held.subgroup.segments):
            rule = rules[self._trained[segment.parameter].group]
            held.steps[index] = previous.steps_of(segment.parameter)
            for state, name in enumerate(self._state_names):
                offset = start + state * numel + segment.offset
                piece = values[offset : offset + segment.numel]
                if name not in rule.states or not previous.fill(
                    segment.parameter, name, segment.first_element, piece
                ):
                    piece.fill_(rule.initial_state)

    def state_of(self, number: int) -> Mapping[str, torch.Tensor]:
        """Return copies of a parameter's master and moments, flat."""
        names = ("master", *self._state_names)
        whole = {name: torch.empty(self._trained[number].numel) for name in names}
        for held, index, segment in self._segments_of(number):
            self._copy_out(
                held, index, {name: _part(each, segment) for name, each in whole.items()}
            )
        return whole

    def _copy_out(self, held: _Held, index: int, into: Mapping[str, torch.Tensor]) -> None:
        """Copy a segment's master and moments; on return there are no views of where they were."""
        with self._looking_at(held) as (flat, visit):
            for name, piece in self._pieces(held, index, flat, visit):
                into[name].copy_(piece)

    # --- checkpoints ------------------------------------------------------------------------------

    @property
    def state_names(self) -> tuple[str, ...]:
        """What the states beside the master are called."""
        return self._state_names

    def before_changes(self, call: Callable[[int], None]) -> None:
        """Call this with the index of each subgroup before its states change where they rest."""
        self._before_change = call

    def capture(self) -> CapturedStates:
        """Return the states as they are now, in the order in which the next update changes them."""
        updates = [op for op in self._plan.ops if isinstance(op, UpdateOnHost | UpdateOnDevice)]
        order = dict.fromkeys([*(op.subgroup for op in updates), *self._held])
        return CapturedStates([self._captured(self._held[index]) for index in order])

    def _captured(self, held: _Held) -> CapturedSubgroup:
        index, swapped, names = held.subgroup.index, self._swapped, self._state_names
        numbered = [
            (number, segment)
            for number, segment in enumerate(held.subgroup.segments)
            if segment.numel
        ]
        runs: list[CapturedRun] = []
        if not self._in_place(held.subgroup, held.home):
            names = ("master", *names)
        else:
            for number, segment in numbered:
                master = CapturedPiece(segment, "master")
                place = None if swapped is None else swapped.values_place(index, number)
                if swapped is not None and place is not None:
                    runs.append(RunOnDrives((master,), place, swapped.read))
                else:
                    runs.append(RunInMemory(master, self._target_bytes(held, number)))
        pieces = [CapturedPiece(segment, name) for name in names for _, segment in numbered]
        if held.lease is not None:
            flat = held.lease.flat()
            for piece in pieces:
                first = names.index(piece.stream) * held.subgroup.numel + piece.segment.offset
                runs.append(RunInMemory(piece, flat[4 * first :][: piece.nbytes]))
        elif swapped is not None and (place := swapped.states_place(index)) is not None:
            runs.append(RunOnDrives(tuple(pieces), place, swapped.read))
        return CapturedSubgroup(index, tuple(runs))

    def overwrite_segments(
        self, fill: Callable[[Segment, Mapping[str, torch.Tensor], torch.Tensor | None], None]
    ) -> None:
        """Let `fill` overwrite each segment's master and moments, and the values that modules
        compute with.

        The values are None where the master is what modules compute with. What is written is kept
        as an update's results are; tell the provider of it as of an update. No view may be left
        when `fill` returns.
        """
        for held in self._held.values():
            self._fill_segments(held, fill)

    def _fill_segments(
        self,
        held: _Held,
        fill: Callable[[Segment, Mapping[str, torch.Tensor], torch.Tensor | None], None],
    ) -> None:
        with self._overwriting(held) as (flat, visit):
            for index, segment in enumerate(held.subgroup.segments):
                values = None
                if not self._in_place(held.subgroup, held.home):
                    values = self._target_bytes(held, index, visit).view(
                        self._trained[segment.parameter].dtype
                    )
                fill(segment, dict(self._pieces(held, index, flat, visit)), values)

    @contextmanager
    def _overwriting(self, held: _Held) -> Iterator[tuple[torch.Tensor, Visit | None]]:
        """Have a subgroup's states in memory; they and the values that rest on drives are written
        there at the end.
        """
        index = held.subgroup.index
        self._before_change(index)
        if self._swapped is None or not self._swapped.has(index):
            assert held.lease is not None, "states that do not rest on drives have a lease"
            yield held.lease.flat(), None
            return
        visit = self._swapped.borrowed(index)
        try:
            yield (visit.states() if held.lease is None else held.lease.flat()), visit
            self._swapped.write_back(index, visit).wait()
        finally:
            visit.buffer.close()

    def set_steps(self, number: int, steps: int) -> None:
        """Let a parameter have had so many updates."""
        for held, index, _ in self._segments_of(number):
            held.steps[index] = steps

    def steps_of(self, number: int) -> int:
        """Return how many updates a parameter has had."""
        return max((held.steps[index] for held, index, _ in self._segments_of(number)), default=0)

    def set_master(self, number: int, values: torch.Tensor) -> None:
        """Let a parameter's master be flat values of its own, which somebody has changed, where
        they are others.

        Where the master rounds to what is there, it was not changed, and keeps what rounding takes
        of it.
        """
        for held, index, segment in self._segments_of(number):
            if not self._in_place(held.subgroup, held.home):
                self._write_master(held, index, _part(values, segment))

    def _write_master(self, held: _Held, index: int, values: torch.Tensor) -> None:
        with self._looking_at(held, changing=True) as (flat, visit):
            master = dict(self._pieces(held, index, flat, visit))["master"]
            for first in range(0, len(values), _COMPARED):
                mine = master[first : first + _COMPARED]
                theirs = values[first : first + _COMPARED].to(mine.device)
                mine.copy_(
                    torch.where(mine.to(theirs.dtype) == theirs, mine, theirs.to(mine.dtype))
                )

    def _segments_of(self, number: int) -> Iterator[tuple[_Held, int, Segment]]:
        """Yield where a parameter's segments are, with their numbers there."""
        for held in self._held.values():
            for index, segment in enumerate(held.subgroup.segments):
                if segment.parameter == number:
                    yield held, index, segment

    @contextmanager
    def _looking_at(
        self, held: _Held, *, changing: bool = False
    ) -> Iterator[tuple[torch.Tensor, Visit | None]]:
        """Have a subgroup's states in memory, between steps; what is changed of them is written
        where they rest.
        """
        index = held.subgroup.index
        if changing:
            self._before_change(index)
        if self._swapped is None or not self._swapped.has(index):
            assert held.lease is not None, "states that do not rest on drives have a lease"
            yield held.lease.flat(), None
            return
        visit = self._swapped.borrowed(index)
        try:
            yield (visit.states() if held.lease is None else held.lease.flat()), visit
            if changing and held.lease is None:
                self._swapped.give_back(index, visit).wait()
        finally:
            visit.buffer.close()

    def _pieces(
        self, held: _Held, number: int, flat: torch.Tensor, visit: Visit | None
    ) -> list[tuple[str, torch.Tensor]]:
        """Return views of a segment's master and moments."""
        segment, numel = held.subgroup.segments[number], held.subgroup.numel
        values = flat[: self._nbytes(held.subgroup, held.home)].view(torch.float32)
        names: tuple[str, ...] = self._state_names
        found = []
        if self._in_place(held.subgroup, held.home):
            found.append(("master", self._target_bytes(held, number, visit).view(torch.float32)))
        else:
            names = ("master", *names)
        for place, name in enumerate(names):
            offset = place * numel + segment.offset
            found.append((name, values[offset : offset + segment.numel]))
        return found

    def close(self) -> None:
        """Give all memory back."""
        for held in self._held.values():
            if held.lease is not None:
                held.lease.close()
            if held.copies is not None:
                held.copies.close()
        self._held.clear()
        self._close_staging()
        if self._swapped is not None:
            self._swapped.close()

    def _close_staging(self) -> None:
        while self._staging:
            self._staging.pop().close()

    # --- ops --------------------------------------------------------------------------------------

    def begin_step(self, inputs: StepInputs) -> None:
        """Take what the updates of a step need.

        One that was interrupted goes on with what it began with.
        """
        self._inputs = self._inputs or inputs
        self.resume_step()

    def resume_step(self) -> None:
        """Take the memory that a step needs, or what is missing of it."""
        if not self._unified:
            with self._lanes.meter.waits(Wait.OPS):  # until what has made way for them is gone
                for nbytes in self._plan.staging_bytes[len(self._staging) :]:
                    self._staging.append(self._lanes.device.lease(nbytes, holder="staging sets"))
        if self._swapped is not None:
            self._swapped.begin_step(len(self._plan.buffer_bytes), self._done)

    def note_arrivals(self) -> None:
        """Count what visited the device and is home again as updated; what failed on the way is as
        it was.
        """
        for held, steps, event in self._on_the_way:
            with suppress(Exception):  # told by whoever walks the plan
                event.wait()
                self._note_update(held, steps)
        self._on_the_way.clear()
        if self._swapped is not None:
            self._swapped.note_arrivals()

    def end_step(self) -> None:
        """Note that every subgroup was updated. Interrupted, it can be done again."""
        for index, steps in self._done.items():
            self._held[index].steps[:] = steps
        self._close_staging()
        if self._swapped is not None:
            self._swapped.end_step()
        self._inputs, self._done = None, {}

    # --- before a step ----------------------------------------------------------------------------

    def update_early(self, index: int, inputs: StepInputs) -> list[int]:
        """Update a subgroup that is in a buffer; return the step counts that it has once it is
        adopted.
        """
        self._before_change(index)
        held = self._held[index]
        state = self._state_in(self._states_of(held), held, held.steps)
        op = UpdateOnHost(subgroup=index, params=held.subgroup.numel)
        self._apply(op, held, state, self._targets(held), inputs)
        return list(state.steps)

    def adopt(self, made: Mapping[int, Sequence[int]]) -> dict[int, Place]:
        """Let updates that were made early be this step's; return where the values of parameters
        are now.
        """
        if not made:
            return {}
        assert self._swapped is not None, "what is updated early rests on drives"
        for index, steps in made.items():
            self._done[index] = list(steps)
        return self._swapped.adopt(made)

    # --- in a step --------------------------------------------------------------------------------

    @property
    def made_early(self) -> Collection[int]:
        """The subgroups of which this step's update was made before it."""
        return () if self._swapped is None else self._swapped.adopted

    @property
    def begun(self) -> bool:
        """Whether a step was begun and not ended: some of what modules compute with may be new, and
        the rest old.
        """
        return self._inputs is not None

    def carry_out(self, op: Op, after: Sequence[Event]) -> Event | IOEvent | None:
        """Submit an op; updates on the host are done on return."""
        held = self._held[op.subgroup]
        if isinstance(op, UpdateOnHost | UpdateOnDevice | DownloadStates | StoreStates):
            self._before_change(op.subgroup)
        if isinstance(op, LoadStates | StoreStates):
            return self._load_or_store(op, held)
        if self._was_done(held):
            return None
        if isinstance(op, UpdateOnHost):
            self._update(
                op,
                held,
                self._state_in(self._states_of(held), held, held.steps),
                self._targets(held),
            )
            return None
        if isinstance(op, UpdateOnDevice):
            return self._update_on_device(op, held, after)
        if self._unified:
            return None
        return self._move(op, held, after)

    def _was_done(self, held: _Held) -> bool:
        """Tell whether an interrupted step has left nothing of a subgroup but, where it rests on
        drives, to store it.

        What visits is updated when it is home again, and staging sets have others' bytes by then.
        """
        index = held.subgroup.index
        if self._swapped is not None and self._swapped.has(index) and self._visit(held) is None:
            return True
        return held.home is Home.VISITING and index in self._done

    def _load_or_store(self, op: LoadStates | StoreStates, held: _Held) -> IOEvent | None:
        inputs, swapped = self._inputs, self._swapped
        assert inputs is not None, "a step has begun"
        assert swapped is not None, "there are drives"
        if isinstance(op, StoreStates):
            return swapped.store(op)
        if op.subgroup in self._done:
            return None
        segments = enumerate(held.subgroup.segments)
        wanted = [number for number, segment in segments if inputs.gradients.has(segment.parameter)]
        return swapped.load(op, wanted, inputs.gradients)

    def _move(self, op: Op, held: _Held, after: Sequence[Event]) -> Event:
        if isinstance(op, UploadStates):
            return self._copy(
                op, Cargo.STATES, self._staged(op.staging, held), self._home_of(held), after
            )
        if isinstance(op, DownloadStates):
            event = self._copy(
                op, Cargo.STATES, self._home_of(held), self._staged(op.staging, held), after
            )
            self._on_the_way.append((held, self._visits.pop(op.subgroup), event))
            return event
        if isinstance(op, UploadParameters):
            return self._upload_parameters(op, held, after)
        if isinstance(op, DownloadParameters):
            return self._download_parameters(op, held, after)
        raise TypeError(f"there is no way to carry out {op.name}")

    def _home_of(self, held: _Held) -> Lease | torch.Tensor:
        return held.lease if held.lease is not None else self._states_of(held)

    def _update_on_device(self, op: UpdateOnDevice, held: _Held, after: Sequence[Event]) -> Event:
        inputs = self._inputs
        assert inputs is not None, "a step has begun"
        visits = op.staging is not None and not self._unified
        flat = (
            self._staging[op.staging].flat()
            if visits and op.staging is not None
            else self._states_of(held)
        )
        state = self._state_in(flat, held, held.steps)
        if visits:
            self._visits[op.subgroup] = state.steps
        targets = self._targets_on_device(op.staging, held)

        def work() -> None:
            self._update(op, held, state, targets, arrives=visits)
            subgroup = held.subgroup
            if (
                subgroup.formats.parameter is None
                and not self._at_home
                and not self._in_place(subgroup, held.home)
            ):
                self._copy_masters(subgroup, state, inputs.gradients)

        return self._lanes.on_device(
            work, op.params, after=after, name=op.name, subgroup=op.subgroup
        )

    def _update(
        self,
        op: UpdateOp,
        held: _Held,
        state: SubgroupState,
        targets: Sequence[Values | None],
        *,
        arrives: bool = False,
    ) -> None:
        """Update a subgroup whose states are in `state`; `arrives`: it counts as updated when it is
        home again.
        """
        inputs = self._inputs
        assert inputs is not None, "a step has begun"
        if held.subgroup.index in self._done:
            return
        self._apply(op, held, state, targets, inputs)
        if not arrives:
            self._note_update(held, state.steps)
            self._hand_over(held)

    def _hand_over(self, held: _Held) -> None:
        visit, width = self._visit(held), held.subgroup.formats.width
        if self._receiver is None or visit is None or not self._at_home:
            return
        for number, segment in enumerate(held.subgroup.segments):
            if number in visit.layout.values and number in visit.wanted:
                values = visit.values(number, width * segment.numel)
                self._receiver(segment.parameter, width * segment.first_element, values)

    def _apply(
        self,
        op: UpdateOp,
        held: _Held,
        state: SubgroupState,
        targets: Sequence[Values | None],
        inputs: StepInputs,
    ) -> None:
        """Update a subgroup and its step counts."""
        segments = held.subgroup.segments
        update = update_records(
            state,
            rules=[inputs.rules[self._trained[segment.parameter].group] for segment in segments],
            gradients=[self._gradient(held, number, inputs) for number in range(len(segments))],
            parameters=targets,
            gradient_factor=inputs.gradient_factor,
        )
        on_device = isinstance(op, UpdateOnDevice)
        kernels = self._lanes.device_kernels if on_device else self._lanes.kernels
        self._lanes.meter.updates(op, partial(kernels.update, update))
        state.steps[:] = update.steps
        if self._swapped is not None:
            nbytes = self._nbytes(held.subgroup, held.home)
            self._lanes.meter.needs(Cargo.STATES, nbytes, found=held.lease is not None)

    def _gradient(self, held: _Held, number: int, inputs: StepInputs) -> Values | None:
        """Return the gradient of a segment where its update runs."""
        visit = self._visit(held)
        segment, piece = held.subgroup.segments[number], held.pieces[number]
        if visit is None or number not in visit.layout.gradients:
            return inputs.gradients.values(segment.parameter, piece)
        formats = inputs.gradients.formats(segment.parameter, piece)
        if not formats:
            return inputs.gradients.values(segment.parameter, piece)
        if len(formats) == 1:
            return self._wire(visit, number, segment, formats[0], 0)
        wires = [
            self._wire(visit, number, segment, format_, place)
            for place, format_ in enumerate(formats)
        ]
        total = self._wire(visit, number, segment, FloatFormat.FP32, -1)
        added_up(self._lanes.kernels, wires, total)
        return total

    def _wire(
        self, visit: Visit, number: int, segment: Segment, format_: FloatFormat, micro_batch: int
    ) -> Values:
        flat = visit.gradient(number, micro_batch, format_.nbytes * segment.numel)
        return Values(flat.data_ptr(), segment.numel, format_, flat)

    def _note_update(self, held: _Held, steps: list[int]) -> None:
        inputs = self._inputs
        assert inputs is not None, "a step has begun"
        self._done[held.subgroup.index] = list(steps)
        for segment, piece in zip(held.subgroup.segments, held.pieces, strict=True):
            inputs.gradients.used(segment.parameter, piece)

    def _targets(self, held: _Held) -> tuple[Values | None, ...]:
        """Return where the host's update writes what modules compute with."""
        copies = self._copies_of(held)
        return self._computed_with(held) if copies is None else self._parts_of(copies, held)

    def _copies_of(self, held: _Held) -> torch.Tensor | None:
        """Return the bytes of what the host's update writes for the device, where that is another
        memory.
        """
        if held.copies is not None:
            return held.copies.flat()
        visit, formats = self._visit(held), held.subgroup.formats
        if visit is None or formats.parameter is None or self._unified or self._at_home:
            return None
        return visit.copies(formats.width * held.subgroup.numel)

    def _targets_on_device(self, staging: int | None, held: _Held) -> tuple[Values | None, ...]:
        """Return where the device's update writes it."""
        if self._unified or not self._at_home:
            return self._computed_with(held)
        if held.subgroup.formats.parameter is None:
            return (None,) * len(held.subgroup.segments)
        return self._parts_of(self._updated_on_device(staging, held), held)

    def _parts_of(self, flat: torch.Tensor, held: _Held) -> tuple[Values, ...]:
        whole = Values(flat.data_ptr(), held.subgroup.numel, held.subgroup.formats.values, flat)
        return tuple(
            whole.part(segment.offset, segment.numel) for segment in held.subgroup.segments
        )

    def _updated_on_device(self, staging: int | None, held: _Held) -> torch.Tensor:
        """Return the bytes of what modules compute with as the device's update leaves them: 16
        bits, or the masters.
        """
        subgroup = held.subgroup
        states = self._staging[staging].flat() if staging is not None else self._states_of(held)
        if subgroup.formats.parameter is None:
            return states[: 4 * subgroup.numel]
        if held.copies is not None:
            return held.copies.flat()
        return states[self._nbytes(subgroup, held.home) :][
            : subgroup.formats.width * subgroup.numel
        ]

    def _computed_with(self, held: _Held) -> tuple[Values | None, ...]:
        numbers = range(len(held.subgroup.segments))
        if held.subgroup.formats.parameter is None:
            return (None,) * len(numbers)
        return tuple(self._values_of(held, number) for number in numbers)

    def _copy_masters(
        self, subgroup: Subgroup, state: SubgroupState, gradients: GradientKeeper
    ) -> None:
        """Give modules the fp32 values that were updated beside them, in device memory.

        Others may not be there.
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

    def _staged(self, staging: int, held: _Held) -> torch.Tensor:
        return self._staging[staging].flat()[: self._nbytes(held.subgroup, held.home)]

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
        self, op: UploadParameters, held: _Held, after: Sequence[Event]
    ) -> Event:
        """Take what the host updated to where modules compute with it."""
        copies = self._copies_of(held)
        for values, piece in self._copied(
            held, self._states_of(held) if copies is None else copies
        ):
            self._copy(op, Cargo.PARAMETERS, values, piece, after)
        return self._behind(self._lanes.upload, after)

    def _download_parameters(
        self, op: DownloadParameters, held: _Held, after: Sequence[Event]
    ) -> Event:
        """Take what the device updated to where modules fetch it from, or into the buffer that is
        stored.
        """
        for values, piece in self._copied(held, self._updated_on_device(op.staging, held)):
            self._copy(op, Cargo.PARAMETERS, values, piece, after)
        return self._behind(self._lanes.download, after)

    def _behind(self, stream: Stream | None, after: Sequence[Event]) -> Event:
        """Return the end of what `stream` was given, and of `after`: there may have been nothing to
        copy.
        """
        assert stream is not None, "copies are between two memories"
        for event in after:
            self._lanes.accelerator.wait_for(stream, event)
        return self._lanes.accelerator.record(stream)

    def _copied(
        self, held: _Held, source: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the bytes of each segment that was updated: as modules have them, and in `source`,
        which has all.
        """
        inputs = self._inputs
        assert inputs is not None, "a step has begun"
        width = held.subgroup.formats.width
        for number, segment in enumerate(held.subgroup.segments):
            if inputs.gradients.has(segment.parameter):
                yield (
                    self._target_bytes(held, number),
                    source[width * segment.offset :][: width * segment.numel],
                )


def _nothing(_index: int) -> None:
    """Let a subgroup change at once."""


def _part(values: torch.Tensor, segment: Segment) -> torch.Tensor:
    return values[segment.first_element : segment.first_element + segment.numel]


def piece_numbers(subgroups: Sequence[Subgroup]) -> dict[int, tuple[int, ...]]:
    """Return, for each segment of each subgroup, which piece of its parameter it is."""
    counts: dict[int, int] = {}
    found = {}
    for subgroup in subgroups:
        numbers = []
        for segment in subgroup.segments:
            numbers.append(counts.get(segment.parameter, 0))
            counts[segment.parameter] = numbers[-1] + 1
        found[subgroup.index] = tuple(numbers)
    return found
