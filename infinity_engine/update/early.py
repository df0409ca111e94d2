"""`EarlyUpdates`: updates subgroups on the drives in the backward, once their gradients are there.

See decision 0015.

Loads the subgroups that are expected next into host buffers, keeps their gradients in those
buffers, updates what is complete and writes it to new places. It never waits in a backward: what it
does not get to is left to the step. What it has made counts only when the step adopts it.
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
from infinity_engine.update.states import StateKeeper
from infinity_engine.update.swapping import SwappedStates
from infinity_engine.update.under_way import StepInputs

__all__ = ["EarlyUpdates", "NoEarlyUpdates"]

_FORMAT = FloatFormat.BF16
"""The dtype of gradients that are accepted. fp32 parameters are their own masters and would change
in the backward; fp16 gradients depend on a loss scale that may still be halved.
"""
_Piece = tuple[int, int]  # a parameter, and which piece of it


@dataclass(slots=True)
class _Early:
    """A subgroup in a buffer for early updates."""

    count: int  # of its segments
    loading: IOEvent | None = None
    loaded: bool = False
    # Set before the update: one that was interrupted leaves a mixture of old and new values.
    updating: bool = False
    # By segment, the micro-batch of the gradient that is there.
    arrived: dict[int, int] = field(default_factory=dict)
    steps: list[int] | None = None  # of each segment, once it is updated
    storing: IOEvent | None = None

    @property
    def complete(self) -> bool:
        """Whether it is loaded with all its gradients, and no update of it has begun."""
        return self.loaded and not self.updating and len(self.arrived) == self.count

    def load(self, reading: IOEvent) -> None:
        """Note the read that fills the buffer."""
        self.loading = reading

    def note_arrival(self) -> None:
        """Note that the read has ended."""
        self.loaded = True

    def begin_update(self) -> None:
        """Note that the buffer no longer has what was loaded."""
        self.updating = True

    def note_update(self, steps: list[int]) -> None:
        """Note that it is updated, with these step counts."""
        self.steps = steps

    def store(self, writing: IOEvent) -> None:
        """Note the write to its new place."""
        self.storing = writing


@dataclass(slots=True)
class _Window:
    """One backward, and the updates made in it."""

    inputs: StepInputs
    left: deque[int]  # subgroups that were not loaded yet
    here: dict[int, int] = field(default_factory=dict)  # the buffer of each subgroup that is in one
    # Left to the step: some gradient is on the drives.
    missed: set[int] = field(default_factory=set)
    # Those that are written, with the step counts that they get when they are adopted.
    made: dict[int, list[int]] = field(default_factory=dict)


class EarlyUpdates:
    """The early updates of one engine, in `buffers` host buffers.

    `order` lists the subgroups in the order of their gradients.

    `segments` gives the subgroup and the segment number of each piece of a gradient. `write_back`
    writes a gradient that was kept in a buffer to the drives: (parameter, piece, its bytes).
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
        # As lists: a caller may pass another kind of sequence.
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
        """Begin a backward's early updates: load the subgroups with the first gradients."""
        if self._window is None:
            # Before anything is noted: leasing buffers may be interrupted, and is then repeated.
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
        """Keep a piece of a gradient, as bytes, in its subgroup's buffer. Tell whether it did.

        Raises:
            RuntimeError: the subgroup was updated without it.
        """
        window, where = self._window, self._segments.get((parameter, piece))
        if window is None or where is None:
            return False
        subgroup, segment = where
        # First: reads and writes that have ended since the last gradient change what follows.
        self.go_on()
        early = self._early.get(subgroup)
        # Its update has used the first gradient alone.
        if subgroup in window.made or (early is not None and early.steps is not None):
            raise RuntimeError(
                "A second gradient came for a parameter that this step has already updated. With "
                "storage.early_updates, each micro-batch has one backward(), and each parameter "
                "one gradient in it; reentrant checkpointing makes more. Call zero_grad(), which "
                "takes the update back, or turn the setting off"
            )
        buffered = None if early is None else self._swapped.buffered(subgroup)
        fits = (
            buffered is not None and buffered.has_place(segment, micro_batch) and format_ is _FORMAT
        )
        # Without a buffer, in another dtype, or a second time: it goes the way to the drives.
        if early is None or buffered is None or not fits or segment in early.arrived:
            # Left to the step, as one of its gradients goes to the drives.
            window.missed.add(subgroup)
            if early is not None:
                self._abandon(subgroup)
            return False
        buffered.gradient(segment, micro_batch, gradient.numel()).copy_(gradient)
        # Not updated here: the keeper has yet to count this gradient. The next go_on() does it.
        early.arrived[segment] = micro_batch
        return True

    def go_on(self) -> None:
        """Do what can be done without waiting for the drives: update, store, load the next."""
        if self._window is None:
            return
        # A copy: a subgroup leaves the dict when its buffer is free.
        for subgroup, early in list(self._early.items()):
            self._advance(subgroup, early)
        self._fill()

    def _fill(self) -> None:
        """Begin to load a subgroup into every free buffer."""
        window = self._window
        assert window is not None, "there is a backward"
        free = [number for number in range(self._buffers) if number not in window.here.values()]
        while free and window.left:
            subgroup = window.left.popleft()
            # Missed before its turn came: loading it would be of no use.
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
            except TransferError:  # the step loads it again, and raises if that fails too
                self._abandon(subgroup)
                return
            early.note_arrival()
        if early.complete:
            # Damage is found while it updates. The step loads it again, and raises if it is still
            # there.
            with suppress(TransferError):
                self._update(subgroup, early)
            if early.steps is None:
                self._abandon(subgroup)
                return
        if early.steps is not None and early.storing is None:
            self._store(subgroup, early)
        if early.storing is not None and early.storing.done():
            try:
                early.storing.wait()
            except TransferError:  # finish() writes it again, and raises if that fails too
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
        """Free a subgroup's buffer. `steps` are its step counts where it was updated.

        It can be repeated after an interrupt.
        """
        assert self._window is not None, "there is a backward"
        # Recorded before the buffer is free: an interrupt between the two must not lose the update.
        if steps is not None:
            self._window.made[subgroup] = steps
        self._swapped.leave_early(subgroup)
        self._early.pop(subgroup, None)
        self._window.here.pop(subgroup, None)

    def _abandon(self, subgroup: int) -> None:
        """Free the buffer of a subgroup that is not updated, and write its gradients to the
        drives.
        """
        assert self._window is not None, "there is a backward"
        self._window.missed.add(subgroup)
        early, buffered = self._early[subgroup], self._swapped.buffered(subgroup)
        # The gradients leave the buffer first: the step reads them from the drives.
        if buffered is not None:
            for segment, micro_batch in early.arrived.items():
                self._write_back(
                    *self._pieces[subgroup, segment], buffered.gradient_memory(segment, micro_batch)
                )
        # A read that goes on would write into the buffer of the next subgroup.
        self._wait_for(early.loading, Wait.READS)
        self._leave(subgroup, None)

    def _wait_for(self, event: IOEvent | None, wait: Wait) -> None:
        """Wait for an I/O to end, whether it succeeds or not."""
        if event is not None:
            with self._meter.waits(wait), suppress(TransferError):
                event.wait()

    # --- after it ---------------------------------------------------------------------------------

    def finish(self) -> None:
        """Empty all buffers: update and write what is complete, and leave the rest to the step.

        Raises:
            TransferError: a write failed twice. The next call tries it again.
        """
        if self._window is None:
            return
        # Nothing is loaded any more.
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
            # Once more: what the drive refused for a moment is not lost.
            except TransferError:
                self._store(subgroup, early)
                early.storing.wait()
            self._leave(subgroup, early.steps)
        self._swapped.end_early()

    @property
    def made(self) -> Mapping[int, list[int]]:
        """The subgroups that were updated, with their step counts, after `finish`."""
        return {} if self._window is None else self._window.made

    def end(self) -> None:
        """Forget the backward: the step has adopted its updates."""
        self._window = None

    def drop(self) -> None:
        """Forget the backward and its updates: the old places still have the old values."""
        # Failures are not raised: what was moved is dropped.
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
