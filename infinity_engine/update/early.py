"""`EarlyUpdates`: updates subgroups on the drives in the backward, once their gradients are there.

See decision 0015.

Loads the subgroups that are expected next into host buffers, keeps their gradients in those
buffers, updates what is complete and writes it to new places. It never waits in a backward: what it
does not get to is left to the step. What it has made counts only when the step adopts it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from infinity_engine.errors import TransferError
from infinity_engine.lanes.meter import Meter, Wait
from infinity_engine.optim import FloatFormat, Rule
from infinity_engine.storage import Hops
from infinity_engine.update.states import StateKeeper
from infinity_engine.update.swapping import BufferedSubgroup, SwappedStates
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

    buffer: int
    buffered: BufferedSubgroup
    loading: Hops
    # By segment: which piece it is, and the micro-batch of the gradient that is there.
    arrived: dict[int, tuple[_Piece, int]] = field(default_factory=dict)
    # An update that fails leaves a mixture of old and new values.
    update_has_begun: bool = False

    @property
    def can_update(self) -> bool:
        """Whether all its gradients have come, and no update of it has begun."""
        return not self.update_has_begun and len(self.arrived) == len(self.buffered.wanted)

    def begin_update(self) -> None:
        """Note that the buffer no longer has what was loaded."""
        self.update_has_begun = True


class EarlyUpdates:
    """The early updates of one engine, in `buffers` host buffers.

    `order` lists the subgroups in the order of their gradients, and `segments` gives the subgroup
    and the segment number of each piece of a gradient.
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
    ) -> None:
        self._states = states
        self._swapped = swapped
        self._meter = meter
        self._order = tuple(order)
        self._segments = segments
        self._buffers = buffers
        # Of one backward; None where none has begun to update.
        self._inputs: StepInputs | None = None
        self._early: dict[int, _Early] = {}  # subgroups in buffers
        self._left: deque[int] = deque()  # subgroups that were not loaded yet
        self._missed: set[int] = set()  # left to the step: some gradient is on the drives
        self.made: dict[int, list[int]] = {}
        """The subgroups that were updated, with their step counts; on the drives after `finish`."""

    enabled = True
    """Whether some updates are made before their step."""

    @property
    def begun(self) -> bool:
        """Whether the backward of this step has begun to update."""
        return self._inputs is not None

    def check_rules(self, rules: Sequence[Rule]) -> None:
        """Refuse hyperparameters other than those that the backward has updated with.

        Raises:
            RuntimeError: they were changed since.
        """
        # As lists: a caller may pass another kind of sequence.
        if self._inputs is not None and list(self._inputs.rules) != list(rules):
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
        if self.begun:
            raise RuntimeError(
                "gathered(modify=True) came between backward() and step(). With "
                "storage.early_updates, the backward has already computed new values from those "
                "that would be changed. Change parameters after step() or before backward(), or "
                "call zero_grad() first, which takes the update back"
            )

    # --- in a backward ----------------------------------------------------------------------------

    def begin(self, inputs: StepInputs) -> None:
        """Begin a backward's early updates: load the subgroups with the first gradients."""
        self._swapped.begin_early(self._buffers)
        self._inputs = inputs
        self._left.extend(self._order)
        self._fill(inputs)

    def intercept(
        self, piece: _Piece, gradient: torch.Tensor, format_: FloatFormat, micro_batch: int
    ) -> bool:
        """Keep a piece of a gradient, as bytes, in its subgroup's buffer. Tell whether it did.

        Raises:
            RuntimeError: the subgroup was updated without it.
        """
        inputs, where = self._inputs, self._segments.get(piece)
        if inputs is None or where is None:
            return False
        subgroup, segment = where
        # First: reads and writes that have ended since the last gradient change what follows.
        self.go_on()
        # Its update has used the first gradient alone.
        if subgroup in self.made:
            raise RuntimeError(
                "A second gradient came for a parameter that this step has already updated. With "
                "storage.early_updates, each micro-batch has one backward(), and each parameter "
                "one gradient in it; reentrant checkpointing makes more. Call zero_grad(), which "
                "takes the update back, or turn the setting off"
            )
        early = self._early.get(subgroup)
        if early is None:
            # Left to the step, as one of its gradients goes to the drives.
            self._missed.add(subgroup)
            return False
        # Without a place, in another dtype, or a second time: it goes the way to the drives.
        fits = early.buffered.has_place(segment, micro_batch) and format_ is _FORMAT
        if not fits or segment in early.arrived:
            self._abandon(subgroup, early, inputs)
            return False
        early.buffered.gradient(segment, micro_batch, gradient.numel()).copy_(gradient)
        # Not updated here: the keeper has yet to count this gradient. The next go_on() does it.
        early.arrived[segment] = piece, micro_batch
        return True

    def go_on(self) -> None:
        """Do what can be done without waiting for the drives: update, store, load the next."""
        if self._inputs is None:
            return
        # A copy: a subgroup leaves the dict when its buffer is free.
        for subgroup, early in list(self._early.items()):
            if early.loading.done():
                self._advance(subgroup, early, self._inputs)
        self._fill(self._inputs)

    def _fill(self, inputs: StepInputs) -> None:
        """Begin to load a subgroup into every free buffer."""
        taken = [early.buffer for early in self._early.values()]
        free = [number for number in range(self._buffers) if number not in taken]
        while free and self._left:
            subgroup = self._left.popleft()
            # Missed before its turn came: loading it would be of no use.
            if subgroup not in self._missed:
                buffer = free.pop()
                self._early[subgroup] = _Early(
                    buffer, *self._swapped.load_early(subgroup, buffer, inputs.gradients)
                )

    def _advance(self, subgroup: int, early: _Early, inputs: StepInputs) -> None:
        """Update a subgroup that is loaded, store it, or free its buffer, as far as it has come."""
        try:
            early.loading.wait()
            if early.can_update:
                early.begin_update()
                self.made[subgroup] = self._states.update_early(subgroup, inputs)
        # The drive's, or damage that the update has found. The step loads it again, and raises if
        # that fails too.
        except TransferError:
            self._abandon(subgroup, early, inputs)
            return
        if subgroup not in self.made:
            return
        storing = early.buffered.storing or self._swapped.store_early(subgroup, early.buffer)
        if storing.done():
            # finish() writes it again, and raises if that fails too.
            with suppress(TransferError):
                storing.wait()
                self._leave(subgroup)

    def _leave(self, subgroup: int) -> None:
        """Free a subgroup's buffer."""
        self._swapped.leave_early(subgroup)
        del self._early[subgroup]

    def _abandon(self, subgroup: int, early: _Early, inputs: StepInputs) -> None:
        """Free the buffer of a subgroup that is not updated, and write its gradients to the
        drives.
        """
        self._missed.add(subgroup)
        # The gradients leave the buffer first: the step reads them from the drives.
        for segment, (piece, micro_batch) in early.arrived.items():
            memory = early.buffered.gradient_memory(segment, micro_batch)
            inputs.gradients.write_back(*piece, memory)
        # A read that goes on would write into the buffer of the next subgroup.
        self._wait_for(early.loading, Wait.READS)
        self._leave(subgroup)

    def _wait_for(self, event: Hops, wait: Wait) -> None:
        """Wait for an I/O to end, whether it succeeds or not."""
        with self._meter.timed_wait(wait), suppress(TransferError):
            event.wait()

    # --- after it ---------------------------------------------------------------------------------

    def finish(self) -> None:
        """Empty all buffers: update and write what is complete, and leave the rest to the step.

        Raises:
            TransferError: a write failed twice. The next call tries it again.
        """
        if self._inputs is None:
            return
        # Nothing is loaded any more.
        self._left.clear()
        for subgroup, early in list(self._early.items()):
            self._wait_for(early.loading, Wait.READS)
            self._advance(subgroup, early, self._inputs)
            if subgroup not in self._early:
                continue
            storing = early.buffered.storing
            if storing is None:
                self._abandon(subgroup, early, self._inputs)
                continue
            self._wait_for(storing, Wait.WRITES)
            try:
                storing.wait()
            # Once more: what the drive refused for a moment is not lost.
            except TransferError:
                self._swapped.store_early(subgroup, early.buffer).wait()
            self._leave(subgroup)
        self._swapped.end_early()

    def end(self) -> None:
        """Forget the backward: what it has updated is the step's now, or dropped."""
        self._inputs = None
        self._left.clear()
        self._missed.clear()
        self.made = {}

    def drop(self) -> None:
        """Forget the backward and its updates: the old places still have the old values."""
        # Failures are not raised: what was moved is dropped.
        for subgroup in list(self._early):
            # Waits for all of its reads and writes.
            self._leave(subgroup)
        self._swapped.end_early()
        self.end()


class NoEarlyUpdates:
    """Stands where every update is made in its step."""

    enabled = begun = False
    made: Mapping[int, list[int]] = MappingProxyType({})

    def check_rules(self, rules: Sequence[Rule]) -> None:
        """Do nothing: no update was made."""

    def check_not_begun(self) -> None:
        """Do nothing."""

    def begin(self, inputs: StepInputs) -> None:
        """Do nothing."""

    def go_on(self) -> None:
        """Do nothing."""

    def intercept(
        self, piece: _Piece, gradient: torch.Tensor, format_: FloatFormat, micro_batch: int
    ) -> bool:
        """Keep no gradient."""
        return False

    def finish(self) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""

    def drop(self) -> None:
        """Do nothing."""
