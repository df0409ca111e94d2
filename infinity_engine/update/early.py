"""`EarlyUpdates`: subgroups that are updated in a backward, as soon as their gradients are there
(decision 0015).

Fills host buffers with what is expected next, takes gradients into them, updates what is complete
and writes it to new places. Waits for nothing in a backward: what it does not get to is left to the
step. What it has made counts only when the step makes it count.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from infinity_engine.errors import TransferError
from infinity_engine.lanes.meter import Meter, Wait
from infinity_engine.optim import FloatFormat, Rule
from infinity_engine.storage import IOEvent
from infinity_engine.update.states import StateKeeper, StepInputs
from infinity_engine.update.swapping import SwappedStates

__all__ = ["EarlyUpdates", "NoEarlyUpdates"]

_FORMAT = FloatFormat.BF16
"""Of gradients: fp32 parameters, which are masters, are not updated early, nor fp16 ones, whose
scale may fall.
"""
_Piece = tuple[int, int]  # a parameter, and which piece of it


@dataclass(slots=True)
class _Early:
    """A subgroup that is in a buffer."""

    count: int  # of its segments
    loading: IOEvent | None = None
    loaded: bool = False
    updating: bool = False  # or updated: an update that was interrupted has left nobody knows what
    # those whose gradient is there: of which micro-batch
    arrived: dict[int, int] = field(default_factory=dict)
    steps: list[int] | None = None  # of each segment, once it is updated
    storing: IOEvent | None = None

    @property
    def complete(self) -> bool:
        """Whether it is here with all its gradients, and no update of it was begun."""
        return self.loaded and not self.updating and len(self.arrived) == self.count

    def load(self, reading: IOEvent) -> None:
        """Note what reads it."""
        self.loading = reading

    def note_arrival(self) -> None:
        """Note that what was loaded is here."""
        self.loaded = True

    def begin_update(self) -> None:
        """Note that it is not what was loaded any more."""
        self.updating = True

    def note_update(self, steps: list[int]) -> None:
        """Note that it is new here, with these step counts."""
        self.steps = steps

    def store(self, writing: IOEvent) -> None:
        """Note what writes it."""
        self.storing = writing


@dataclass(slots=True)
class _Window:
    """One backward, and what was made in it."""

    inputs: StepInputs
    left: deque[int]  # subgroups that have not had their turn
    here: dict[int, int] = field(default_factory=dict)  # the buffer of each subgroup that is in one
    missed: set[int] = field(default_factory=set)  # some of whose gradients have gone to the drives
    # written; the step counts that they will have
    made: dict[int, list[int]] = field(default_factory=dict)


class EarlyUpdates:
    """What may be updated early, `order` says in which order it is expected; `buffers` are how many
    there are for it.

    `segments` has the subgroup and the number of the segment of each piece of a gradient.
    `write_back` writes a gradient to the drives that was taken into a buffer: (parameter, piece,
    its bytes).
    """

    def __init__(
        self,
        states: StateKeeper,
        swapped: SwappedStates,
        meter: Meter,
        *,
        order: Sequence[int],
        segments: Mapping[_Piece, tuple[int, int]],
        buffers: int,
        write_back: Callable[[int, int, memoryview], None],
    ) -> None:
        self._states = states
        self._swapped = swapped
        self._meter = meter
        self._order = tuple(order)
        self._segments = segments
        self._pieces = {where: piece for piece, where in segments.items()}
        self._segment_counts = Counter(subgroup for subgroup, _ in segments.values())
        self._buffers = buffers
        self._write_back = write_back
        self._window: _Window | None = None
        self._early: dict[int, _Early] = {}

    enabled = True
    """Whether some updates are made before their step."""

    @property
    def begun(self) -> bool:
        """Whether the backward of this step has begun to update."""
        return self._window is not None

    @property
    def can_begin(self) -> bool:
        """Whether the next backward may begin to update."""
        return self._window is None

    def check_rules(self, rules: Sequence[Rule]) -> None:
        """Refuse hyperparameters other than those that the backward has updated with.

        Raises:
            RuntimeError: they were changed since.
        """
        if self._window is not None and list(self._window.inputs.rules) != list(rules):
            raise RuntimeError(
                "Hyperparameters were changed between backward() and step(). With "
                "storage.early_updates, the backward has updated with the old ones. Change them "
                "after step() or before backward(). To go on now, set them as they were, or call "
                "zero_grad(), which takes the update back, and repeat the backward"
            )

    def check_not_begun(self) -> None:
        """Refuse to change parameters after the backward has made new values from them.

        Raises:
            RuntimeError: it has.
        """
        if self._window is not None:
            raise RuntimeError(
                "gathered(modify=True) came between backward() and step(). With "
                "storage.early_updates, the backward has already computed new values from those "
                "that would be changed. Change parameters after step() or before backward(), or "
                "call zero_grad() first, which takes the update back"
            )

    # --- in a backward ----------------------------------------------------------------------------

    def begin(self, inputs: StepInputs) -> None:
        """Begin to load what is expected first. What was begun already goes on."""
        if self._window is None:
            self._swapped.begin_early(self._buffers)
            self._window = _Window(inputs, deque(self._order))
            self._fill()

    def intercept(
        self,
        parameter: int,
        piece: int,
        gradient: torch.Tensor,
        format_: FloatFormat,
        micro_batch: int,
    ) -> bool:
        """Take a piece of a gradient, as bytes, if its subgroup is in a buffer; tell whether it was
        taken.

        Raises:
            RuntimeError: its subgroup was updated without it.
        """
        window, where = self._window, self._segments.get((parameter, piece))
        if window is None or where is None:
            return False
        subgroup, segment = where
        self.go_on()
        early = self._early.get(subgroup)
        if subgroup in window.made or (early is not None and early.steps is not None):
            raise RuntimeError(
                "a gradient came for a parameter that this step has updated already: with "
                "storage.early_updates there is one backward() for each micro-batch, and no second "
                "gradient of one parameter in it (as with reentrant checkpointing). Call "
                "zero_grad(), which takes the update back, or turn the setting off"
            )
        buffered = None if early is None else self._swapped.buffered(subgroup)
        takes = (
            buffered is not None and buffered.has_place(segment, micro_batch) and format_ is _FORMAT
        )
        if early is None or buffered is None or not takes or segment in early.arrived:
            self._miss(subgroup)
            return False
        buffered.gradient(segment, micro_batch, gradient.numel()).copy_(gradient)
        # its update waits for the next go_on: the taker's caller notes it first
        early.arrived[segment] = micro_batch
        return True

    def go_on(self) -> None:
        """Do what can be done without waiting for the drives."""
        if self._window is None:
            return
        for subgroup, early in list(self._early.items()):
            self._advance(subgroup, early)
        self._fill()

    def _fill(self) -> None:
        """Begin to load into every buffer that is free."""
        window = self._window
        assert window is not None, "there is a backward"
        free = [number for number in range(self._buffers) if number not in window.here.values()]
        while free and window.left:
            subgroup = window.left.popleft()
            if subgroup in window.missed:
                continue
            window.here[subgroup] = number = free.pop()
            self._early[subgroup] = early = _Early(self._segment_counts[subgroup])
            early.load(self._swapped.load_early(subgroup, number, window.inputs.gradients))

    def _advance(self, subgroup: int, early: _Early) -> None:
        if early.loading is not None and not early.loaded:
            if not early.loading.done():
                return
            try:
                early.loading.wait()
            except TransferError:  # the step loads it again, and says so if it cannot
                self._abandon(subgroup)
                return
            early.note_arrival()
        if early.complete:
            self._update(subgroup, early)
        if early.steps is not None and early.storing is None:
            self._store(subgroup, early)
        if early.storing is not None and early.storing.done():
            try:
                early.storing.wait()
            except TransferError:  # the step writes it again, and says so if it cannot
                return
            self._leave(subgroup, early.steps)

    def _update(self, subgroup: int, early: _Early) -> None:
        assert self._window is not None, "there is a backward"
        early.begin_update()
        early.note_update(self._states.update_early(subgroup, self._window.inputs))

    def _store(self, subgroup: int, early: _Early) -> None:
        assert self._window is not None, "there is a backward"
        early.store(self._swapped.store_early(subgroup, self._window.here[subgroup]))

    def _leave(self, subgroup: int, steps: list[int] | None) -> None:
        """Let a subgroup's buffer be free; `steps`: it was made.

        Interrupted, it can be done again.
        """
        assert self._window is not None, "there is a backward"
        if steps is not None:
            self._window.made[subgroup] = steps
        self._swapped.leave_early(subgroup)
        self._early.pop(subgroup, None)
        self._window.here.pop(subgroup, None)

    def _miss(self, subgroup: int) -> None:
        """Leave a subgroup to the step, one of whose gradients goes to the drives."""
        assert self._window is not None, "there is a backward"
        self._window.missed.add(subgroup)
        if subgroup in self._early:
            self._abandon(subgroup)

    def _abandon(self, subgroup: int) -> None:
        """Free a buffer of what is not updated; the gradients that are in it go to the drives."""
        assert self._window is not None, "there is a backward"
        self._window.missed.add(subgroup)
        early, buffered = self._early[subgroup], self._swapped.buffered(subgroup)
        if buffered is not None:
            for segment, micro_batch in early.arrived.items():
                self._write_back(
                    *self._pieces[subgroup, segment], buffered.gradient_memory(segment, micro_batch)
                )
        self._wait_for(early.loading, Wait.READS)
        self._leave(subgroup, None)

    def _wait_for(self, event: IOEvent | None, wait: Wait) -> None:
        """Wait for the end of I/O, whichever."""
        if event is not None:
            with self._meter.waits(wait), suppress(TransferError):
                event.wait()

    # --- after it ---------------------------------------------------------------------------------

    def finish(self) -> None:
        """Let no subgroup be in a buffer: what is complete is updated and written, the rest is left
        to the step.

        Raises:
            TransferError: something could not be written. It is tried again the next time.
        """
        if self._window is None:
            return
        self._window.left.clear()
        for subgroup, early in list(self._early.items()):
            self._wait_for(early.loading, Wait.READS)
            self._advance(subgroup, early)
            if subgroup not in self._early:
                continue
            if early.steps is None:
                self._abandon(subgroup)
                continue
            self._wait_for(early.storing, Wait.WRITES)
            assert early.storing is not None, "what was updated is stored"
            try:
                early.storing.wait()
            except TransferError:
                self._store(subgroup, early)
                early.storing.wait()
            self._leave(subgroup, early.steps)
        self._swapped.end_early()

    @property
    def made(self) -> Mapping[int, list[int]]:
        """The subgroups that were made in the backward, which is settled, with their step
        counts.
        """
        return {} if self._window is None else self._window.made

    def end(self) -> None:
        """Forget the backward: what was made in it counts."""
        self._window = None

    def drop(self) -> None:
        """Forget the backward and what was made in it."""
        for subgroup, early in list(self._early.items()):
            self._wait_for(early.loading, Wait.READS)
            self._wait_for(early.storing, Wait.WRITES)
            self._swapped.leave_early(subgroup)
        self._early.clear()
        self._swapped.end_early()
        self._window = None


class NoEarlyUpdates:
    """Stands where every update is made in its step."""

    enabled = begun = can_begin = False
    made: Mapping[int, list[int]] = MappingProxyType({})

    def check_rules(self, rules: Sequence[Rule]) -> None:
        """Do nothing: no update was made."""

    def check_not_begun(self) -> None:
        """Do nothing."""

    def begin(self, inputs: StepInputs) -> None:
        """Do nothing."""

    def go_on(self) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""

    def drop(self) -> None:
        """Do nothing."""
