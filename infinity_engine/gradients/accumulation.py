"""`Accumulation`: the micro-batches since the last update, and how gradients are averaged.

Counts backwards, not calls of `Engine.step` (decision 0020). Holds no gradients. Called from one
thread.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Accumulation"]


class Accumulation:
    """The micro-batches of one engine's steps; `planned` is how many a step has.

    A micro-batch is open while more backwards may belong to it: those of a retained graph, and
    those that the caller starts past the engine with `loss.backward()`. `on_micro_batch` is called
    when one ends.
    """

    def __init__(self, planned: int, on_micro_batch: Callable[[], object]) -> None:
        self.planned = planned
        self._on_micro_batch = on_micro_batch
        self._ended = 0
        self._open = False
        self._averaged = True
        self._left_by_step = False  # step() was called before the last micro-batch had come
        self._just_left = False  # and the engine has not been called since
        # How often zero_grad() came right after such a step, since the last update. Once may be a
        # caller that begins a step again; twice is a loop that never updates anything.
        self._drops_after_step = 0

    @property
    def count(self) -> int:
        """How many micro-batches have come since the last update, the open one included."""
        return self._ended + self._open

    @property
    def is_reached(self) -> bool:
        """Whether all planned micro-batches have come."""
        return self.count >= self.planned

    @property
    def expects_last(self) -> bool:
        """Whether the open or next micro-batch is the last planned one, or a later one."""
        return self._ended >= self.planned - 1

    @property
    def is_full(self) -> bool:
        """Whether the next backward begins a micro-batch more than planned."""
        return self._ended >= self.planned and not self._open

    @property
    def left_by_step(self) -> bool:
        """Whether step() came before the last micro-batch and left the gradients for later."""
        return self._left_by_step

    @property
    def divisor(self) -> int:
        """What the sum of all gradients is divided by."""
        # A remainder is divided by `planned` too: a micro-batch weighs the same whenever it comes.
        return self.planned if self._averaged else 1

    # --- backwards --------------------------------------------------------------------------------

    def begin_backward(self, *, averaged: bool) -> None:
        """Note how the gradients of the next backward are averaged.

        Raises:
            RuntimeError: those of earlier micro-batches are averaged in the other way. Nothing has
                changed.
        """
        # With one planned micro-batch both ways divide by 1, so they may mix.
        if self.count and self.planned > 1 and averaged != self._averaged:
            have = f"divided by {self.planned}" if self._averaged else "not divided"
            raise RuntimeError(
                f"The gradients of {self.count} micro-batches of this step are {have}, and those "
                "of this backward would be the other way. Give each backward() of a step the same "
                "`scale`; a plain loss.backward() counts as scale=True. To begin the step again, "
                "call zero_grad()"
            )
        self._averaged = averaged

    def note_gradient(self) -> None:
        """Note that a gradient has come: its micro-batch is open."""
        self._open = True

    def end_backward(self, *, retains_graph: bool) -> None:
        """Note the end of a backward; a retained graph keeps its micro-batch open for more."""
        # Also where no parameter got a gradient: backwards are counted, not gradients.
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
        """Note a call of the engine other than zero_grad()."""
        self._just_left = False

    def leave(self) -> None:
        """Note a call of step() that leaves the gradients for a later one."""
        self._left_by_step = self._just_left = True

    def drops_in_vain(self) -> bool:
        """Note that zero_grad() drops gradients; tell whether the caller does so after every step.

        Then no step ever updates anything.
        """
        self._drops_after_step += self._just_left  # a bool counts as 0 or 1
        return self._just_left and self._drops_after_step > 1

    def drop(self) -> None:
        """Begin the step again."""
        self._ended, self._open, self._averaged = 0, False, True
        self._left_by_step = self._just_left = False

    def end_step(self) -> None:
        """Begin the next step."""
        self.drop()
        # Not in drop(), which zero_grad() calls in the midst of a step.
        self._drops_after_step = 0
