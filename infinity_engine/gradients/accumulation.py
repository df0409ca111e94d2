"""`Accumulation`: which micro-batches have come since the last update, and how their gradients are
averaged.

Counts backwards, not calls of `Engine.step` (decision 0020). Holds no gradients; called by
`Engine`, from one thread.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Accumulation"]


class Accumulation:
    """The micro-batches of one engine's steps, each of which is planned to have `planned`.

    A micro-batch is open while more backwards may belong to it: of a graph that is retained, or
    past the engine. `on_micro_batch` is called with the end of each.
    """

    def __init__(self, planned: int, on_micro_batch: Callable[[], object]) -> None:
        self.planned = planned
        self._on_micro_batch = on_micro_batch
        self._ended = 0
        self._open = False
        self._averaged = True
        self._left_by_step = False  # whether a step has left what came for a later one
        self._just_left = False  # whether that was the newest call of the engine
        # how often gradients were dropped right after that, since the last update
        self._drops_after_step = 0

    @property
    def count(self) -> int:
        """How many micro-batches have come since the last update, an open one among them."""
        return self._ended + self._open

    @property
    def is_reached(self) -> bool:
        """Whether as many have come as are planned."""
        return self.count >= self.planned

    @property
    def expects_last(self) -> bool:
        """Whether the micro-batch that is open, or the next one, is the last that is planned, or is
        beyond it.
        """
        return self._ended >= self.planned - 1

    @property
    def is_full(self) -> bool:
        """Whether the next backward begins a micro-batch that is not planned."""
        return self._ended >= self.planned and not self._open

    @property
    def left_by_step(self) -> bool:
        """Whether a call of step() has left micro-batches for a later one."""
        return self._left_by_step

    @property
    def divisor(self) -> int:
        """What the sum of all gradients is divided by."""
        return self.planned if self._averaged else 1

    # --- backwards --------------------------------------------------------------------------------

    def begin_backward(self, *, averaged: bool) -> None:
        """Note how the gradients of the next backward are averaged.

        Raises:
            RuntimeError: those that have come are averaged in the other way; nothing has changed.
        """
        if self.count and self.planned > 1 and averaged != self._averaged:
            have = f"divided by {self.planned}" if self._averaged else "not divided"
            raise RuntimeError(
                f"The gradients of {self.count} micro-batches of this step are {have}, and those "
                "of this backward would be the other way. One step divides all of them or none: "
                "give each backward() of a step the same `scale`. A backward past the engine, "
                "loss.backward(), has scale=True. To begin the step again, call zero_grad()"
            )
        self._averaged = averaged

    def note_gradient(self) -> None:
        """Note that a gradient has come: its micro-batch is open."""
        self._open = True

    def end_backward(self, *, retains_graph: bool) -> None:
        """Note the end of a backward.

        More backwards of the same micro-batch follow where it retains its graph.
        """
        self._open = True
        if not retains_graph:
            self.end_micro_batch()

    def end_micro_batch(self) -> None:
        """End the micro-batch that is open, if one is."""
        if self._open:
            self._open = False
            self._ended += 1
            self._on_micro_batch()

    # --- steps ------------------------------------------------------------------------------------

    def note_call(self) -> None:
        """Note that the engine is called to do anything but to drop gradients."""
        self._just_left = False

    def leave(self) -> None:
        """Note a step that leaves what came for a later one."""
        self._left_by_step = self._just_left = True

    def drops_in_vain(self) -> bool:
        """Note that what came is about to be dropped; tell whether a loop seems to do so after each
        step.
        """
        self._drops_after_step += self._just_left
        return self._just_left and self._drops_after_step > 1

    def drop(self) -> None:
        """Begin the step again."""
        self._ended, self._open, self._averaged = 0, False, True
        self._left_by_step = self._just_left = False

    def end_step(self) -> None:
        """Begin the next step."""
        self.drop()
        self._drops_after_step = 0
