"""The optimizer's states: where each subgroup's masters and moments lie, and the ops of a plan carried out on them.

Owns the leases of the states and of the staging sets. Knows no order: the plan has it, and the Executor walks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from infinity_engine.accel import Event, Stream
from infinity_engine.engine.gradients import GradientKeeper
from infinity_engine.engine.lanes import Lanes
from infinity_engine.engine.meter import Cargo, Wait
from infinity_engine.engine.parameters import TrainedParameter
from infinity_engine.memory import Lease
from infinity_engine.optim import FloatFormat, Formats, Rule, Segment, Subgroup, SubgroupState, update_records
from infinity_engine.optim import Stream as Values
from infinity_engine.plan import Tier
from infinity_engine.plan.ops import (
    DownloadParameters,
    DownloadStates,
    Op,
    UpdateOnDevice,
    UpdateOnHost,
    UpdateOp,
    UploadParameters,
    UploadStates,
)
from infinity_engine.plan.step import Home, StepPlan

__all__ = ["StateKeeper", "StepInputs"]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What all updates of one step have in common."""

    gradients: GradientKeeper
    rules: Sequence[Rule]  # of each parameter group
    gradient_factor: float


@dataclass(slots=True)
class _Held:
    """One subgroup: its states where they stay between steps."""

    subgroup: Subgroup
    home: Home
    lease: Lease
    state: SubgroupState
    pieces: tuple[int, ...]  # which piece of its parameter each segment is
    copies: Lease | None = None  # what its update writes for modules, where they have it in the other memory


class StateKeeper:
    """All states of one engine, and the Carrier of its plans.

    A master lies in place, as the fp32 parameter itself, where that is in the memory in which it is updated. Staging
    sets are there from the beginning of a step to its end.
    """

    def __init__(
        self,
        plan: StepPlan,
        subgroups: Sequence[Subgroup],
        trained: Sequence[TrainedParameter],
        *,
        formats: Formats,
        state_names: Sequence[str],
        lanes: Lanes,
    ) -> None:
        self._plan = plan
        self._trained = trained
        self._formats = formats
        self._state_names = tuple(state_names)
        self._lanes = lanes
        self._inputs: StepInputs | None = None
        self._done: set[int] = set()
        self._on_the_way: list[tuple[_Held, list[int], Event]] = []  # updated, and not yet home again
        homes = plan.homes()
        self._visits: dict[int, list[int]] = {}  # the step counts of what visits, as its update will leave them
        piece_numbers = _piece_numbers(subgroups)
        self._held = {
            subgroup.index: self._hold(subgroup, homes[subgroup.index], piece_numbers[subgroup.index])
            for subgroup in subgroups
        }
        self._staging: list[Lease] = []

    # --- where things lie -----------------------------------------------------------------------------------------

    def _hold(self, subgroup: Subgroup, home: Home, pieces: tuple[int, ...]) -> _Held:
        pool = self._lanes.device if home is Home.RESIDENT and not self._unified else self._lanes.host
        streams = len(self._state_names) + (0 if self._in_place(home) else 1)
        lease = pool.lease(4 * subgroup.numel * streams, holder="optimizer states")
        copies = None
        elsewhere = Home.RESIDENT if self._at_home else Home.HOST
        if home is elsewhere and not self._unified and self._formats.parameter is not None:
            copies = pool.lease(self._formats.parameter.nbytes * subgroup.numel, holder="updated parameters")
        state = self._state_in(lease, subgroup, home)
        return _Held(subgroup, home, lease, state, pieces, copies)

    def _state_in(self, lease: Lease, subgroup: Subgroup, home: Home, steps: Sequence[int] = ()) -> SubgroupState:
        """Return the subgroup's states as they lie in `lease`: the masters first, then the moments."""
        numel = subgroup.numel
        count = len(self._state_names) + (0 if self._in_place(home) else 1)
        values = lease.tensor(torch.float32, (count, numel))
        streams = [Values.of(values[place]) for place in range(count)]
        masters: Values | tuple[Values, ...]
        if self._in_place(home):
            masters = tuple(self._values_of(segment) for segment in subgroup.segments)
        else:
            masters = streams.pop(0)
        return SubgroupState(
            subgroup=subgroup, formats=self._formats, master=masters, states=tuple(streams), steps=list(steps)
        )

    def _in_place(self, home: Home) -> bool:
        here = Home.HOST if self._at_home else Home.RESIDENT
        return self._formats.parameter is None and (self._unified or home is here)

    @property
    def _at_home(self) -> bool:
        """Whether updates leave what modules compute with on the host, from where it is fetched."""
        return self._plan.parameters is Tier.HOST

    @property
    def _unified(self) -> bool:
        return self._lanes.accelerator.unified

    def _values_of(self, segment: Segment) -> Values:
        """Return the values that modules compute with."""
        values = self._trained[segment.parameter].values
        return Values.of(values[segment.first_element : segment.first_element + segment.numel])

    def begin(self, originals: Callable[[TrainedParameter], torch.Tensor], rules: Sequence[Rule]) -> None:
        """Write the first masters and states: fp32 values as `originals` has them, and what each rule begins with."""
        for held in self._held.values():
            values = held.lease.tensor(torch.float32)
            numel = held.subgroup.numel
            start = 0
            if not self._in_place(held.home):
                start = numel
                for segment in held.subgroup.segments:
                    original = originals(self._trained[segment.parameter]).reshape(-1)
                    piece = original[segment.first_element : segment.first_element + segment.numel]
                    values[segment.offset : segment.offset + segment.numel].copy_(piece)
            for segment in held.subgroup.segments:
                first = rules[self._trained[segment.parameter].group].initial_state
                for state in range(len(self._state_names)):
                    offset = start + state * numel + segment.offset
                    values[offset : offset + segment.numel].fill_(first)

    def state_of(self, number: int) -> Mapping[str, torch.Tensor]:
        """Return copies of a parameter's master and moments, flat."""
        names = ("master", *self._state_names)
        whole = {name: torch.empty(self._trained[number].numel) for name in names}
        for held in self._held.values():
            for segment in held.subgroup.segments:
                if segment.parameter == number:
                    for name, piece in self._pieces(held, segment):
                        whole[name][segment.first_element : segment.first_element + segment.numel].copy_(piece)
        return whole

    def steps_of(self, number: int) -> int:
        """Return how many updates a parameter has had."""
        steps = (
            held.state.steps[index]
            for held in self._held.values()
            for index, segment in enumerate(held.subgroup.segments)
            if segment.parameter == number
        )
        return max(steps, default=0)

    def set_master(self, number: int, values: torch.Tensor) -> None:
        """Replace a parameter's master, which modules' values were changed to, by flat fp32 values."""
        for held in self._held.values():
            for segment in held.subgroup.segments:
                if segment.parameter == number and not self._in_place(held.home):
                    master = next(piece for name, piece in self._pieces(held, segment) if name == "master")
                    master.copy_(values[segment.first_element : segment.first_element + segment.numel])

    def _pieces(self, held: _Held, segment: Segment) -> list[tuple[str, torch.Tensor]]:
        """Return views of a segment's master and moments."""
        values = held.lease.tensor(torch.float32)
        numel = held.subgroup.numel
        names: tuple[str, ...] = self._state_names
        found = []
        if self._in_place(held.home):
            own = self._trained[segment.parameter].values
            found.append(("master", own[segment.first_element : segment.first_element + segment.numel]))
        else:
            names = ("master", *names)
        for place, name in enumerate(names):
            offset = place * numel + segment.offset
            found.append((name, values[offset : offset + segment.numel]))
        return found

    def close(self) -> None:
        """Give all memory back."""
        for held in self._held.values():
            held.lease.close()
            if held.copies is not None:
                held.copies.close()
        self._held.clear()
        self._close_staging()

    def _close_staging(self) -> None:
        while self._staging:
            self._staging.pop().close()

    # --- ops ------------------------------------------------------------------------------------------------------

    def begin_step(self, inputs: StepInputs) -> None:
        """Take what the updates of a step need. One that was interrupted goes on with what it began with."""
        self._inputs = self._inputs or inputs
        if not self._unified:
            with self._lanes.meter.waits(Wait.OPS):  # until what has made way for them is gone
                for nbytes in self._plan.staging_bytes[len(self._staging) :]:
                    self._staging.append(self._lanes.device.lease(nbytes, holder="staging sets"))

    def note_arrivals(self) -> None:
        """Count what visited the device and is home again as updated; what failed on the way is as it was."""
        for held, steps, event in self._on_the_way:
            with suppress(Exception):  # told by whoever walks the plan
                event.wait()
                self._note_update(held, steps)
        self._on_the_way.clear()

    def end_step(self) -> None:
        """Note that every subgroup was updated."""
        self._inputs = None
        self._done.clear()
        self._close_staging()

    @property
    def begun(self) -> bool:
        """Whether a step was begun and not ended: some of what modules compute with may be new, and the rest old."""
        return self._inputs is not None

    def carry_out(self, op: Op, after: Sequence[Event]) -> Event | None:
        """Submit an op; updates on the host are done on return."""
        held = self._held[op.subgroup]
        if isinstance(op, UpdateOnHost):
            self._update(op, held, held.state, self._targets(held))
            return None
        if isinstance(op, UpdateOnDevice):
            return self._update_on_device(op, held, after)
        if self._unified:
            return None
        return self._move(op, held, after)

    def _move(self, op: Op, held: _Held, after: Sequence[Event]) -> Event:
        if isinstance(op, UploadStates):
            return self._copy(op, Cargo.STATES, self._staged(op.staging, held), held.lease, after)
        if isinstance(op, DownloadStates):
            event = self._copy(op, Cargo.STATES, held.lease, self._staged(op.staging, held), after)
            self._on_the_way.append((held, self._visits.pop(op.subgroup), event))
            return event
        if isinstance(op, UploadParameters):
            return self._upload_parameters(op, held, after)
        if isinstance(op, DownloadParameters):
            return self._download_parameters(op, held, after)
        raise TypeError(f"there is no way to carry out {op.name}")

    def _update_on_device(self, op: UpdateOnDevice, held: _Held, after: Sequence[Event]) -> Event:
        state = held.state
        if op.staging is not None and not self._unified:
            state = self._state_in(self._staging[op.staging], held.subgroup, held.home, steps=held.state.steps)

        if state is not held.state:
            self._visits[op.subgroup] = state.steps

        targets = self._targets_on_device(op.staging, held)

        def work() -> None:
            self._update(op, held, state, targets)
            if self._formats.parameter is None and not self._at_home and not self._in_place(held.home):
                self._copy_masters(held.subgroup, state)

        return self._lanes.on_device(work, op.params, after=after, name=op.name, subgroup=op.subgroup)

    def _update(self, op: UpdateOp, held: _Held, state: SubgroupState, targets: Sequence[Values | None]) -> None:
        inputs = self._inputs
        assert inputs is not None, "a step has begun"
        if held.subgroup.index in self._done:
            return
        segments = held.subgroup.segments
        update = update_records(
            state,
            rules=[inputs.rules[self._trained[segment.parameter].group] for segment in segments],
            gradients=[
                inputs.gradients.values(segment.parameter, piece)
                for segment, piece in zip(segments, held.pieces, strict=True)
            ],
            parameters=targets,
            gradient_factor=inputs.gradient_factor,
        )
        self._lanes.meter.updates(op, partial(self._lanes.kernels.update, update))
        state.steps[:] = update.steps
        if state is held.state:
            self._note_update(held, state.steps)

    def _note_update(self, held: _Held, steps: list[int]) -> None:
        held.state.steps[:] = steps
        self._done.add(held.subgroup.index)

    def _targets(self, held: _Held) -> tuple[Values | None, ...]:
        """Return where the host's update writes what modules compute with."""
        if held.copies is None:
            return tuple(self._computed_with(segment) for segment in held.subgroup.segments)
        return self._parts_of(held.copies.flat(), held)

    def _targets_on_device(self, staging: int | None, held: _Held) -> tuple[Values | None, ...]:
        """Return where the device's update writes it."""
        if self._unified or not self._at_home or self._formats.parameter is None:
            given = self._unified or not self._at_home
            return tuple(self._computed_with(segment) if given else None for segment in held.subgroup.segments)
        return self._parts_of(self._updated_on_device(staging, held), held)

    def _parts_of(self, flat: torch.Tensor, held: _Held) -> tuple[Values, ...]:
        assert self._formats.parameter is not None, "copies are of 16-bit parameters"
        whole = Values(flat.data_ptr(), held.subgroup.numel, self._formats.parameter, flat)
        return tuple(whole.part(segment.offset, segment.numel) for segment in held.subgroup.segments)

    def _updated_on_device(self, staging: int | None, held: _Held) -> torch.Tensor:
        """Return the bytes of what modules compute with as the device's update leaves them: 16 bits, or the masters."""
        states = held.lease if staging is None else self._staging[staging]
        if self._formats.parameter is None:
            return states.flat()[: 4 * held.subgroup.numel]
        if held.copies is not None:
            return held.copies.flat()
        return states.flat()[held.lease.nbytes :][: self._formats.parameter.nbytes * held.subgroup.numel]

    def _computed_with(self, segment: Segment) -> Values | None:
        return None if self._formats.parameter is None else self._values_of(segment)

    def _copy_masters(self, subgroup: Subgroup, state: SubgroupState) -> None:
        """Give modules the fp32 values that were updated beside them, in device memory."""
        assert isinstance(state.master, Values), "masters that are not in place are one stream"
        whole = state.master.owner
        assert isinstance(whole, torch.Tensor), "streams of states are made of tensors"
        for segment in subgroup.segments:
            target = self._trained[segment.parameter].values
            piece = whole[segment.offset : segment.offset + segment.numel]
            target[segment.first_element : segment.first_element + segment.numel].copy_(piece)

    def _staged(self, staging: int, held: _Held) -> torch.Tensor:
        return self._staging[staging].flat()[: held.lease.nbytes]

    def _copy(
        self,
        op: Op,
        cargo: Cargo,
        target: torch.Tensor | Lease,
        source: torch.Tensor | Lease,
        after: Sequence[Event],
    ) -> Event:
        return self._lanes.copy(op.lane, cargo, target, source, after=after, name=op.name, subgroup=op.subgroup)

    def _upload_parameters(self, op: UploadParameters, held: _Held, after: Sequence[Event]) -> Event:
        """Take what the host updated to where modules compute with it."""
        source = held.copies.flat() if held.copies is not None else held.lease.flat()
        for values, piece in self._copied(held.subgroup, source):
            self._copy(op, Cargo.PARAMETERS, values, piece, after)
        return self._behind(self._lanes.upload, after)

    def _download_parameters(self, op: DownloadParameters, held: _Held, after: Sequence[Event]) -> Event:
        """Take what the device updated to where modules fetch it from."""
        for values, piece in self._copied(held.subgroup, self._updated_on_device(op.staging, held)):
            self._copy(op, Cargo.PARAMETERS, values, piece, after)
        return self._behind(self._lanes.download, after)

    def _behind(self, stream: Stream | None, after: Sequence[Event]) -> Event:
        """Return the end of what `stream` was given, and of `after`: there may have been nothing to copy."""
        assert stream is not None, "copies are between two memories"
        for event in after:
            self._lanes.accelerator.wait_for(stream, event)
        return self._lanes.accelerator.record(stream)

    def _copied(self, subgroup: Subgroup, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the bytes of each segment that was updated: as modules have them, and in `source`, which has all."""
        inputs = self._inputs
        assert inputs is not None, "a step has begun"
        nbytes = (self._formats.parameter or FloatFormat.FP32).nbytes
        for segment in subgroup.segments:
            if not inputs.gradients.has(segment.parameter):
                continue
            values = self._trained[segment.parameter].values.view(torch.uint8)
            first, start, length = (nbytes * each for each in (segment.first_element, segment.offset, segment.numel))
            yield values[first : first + length], source[start : start + length]


def _piece_numbers(subgroups: Sequence[Subgroup]) -> dict[int, tuple[int, ...]]:
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
