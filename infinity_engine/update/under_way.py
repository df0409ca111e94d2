"""`StepUnderWay`: the one place that says whether an update is under way, and what it has done.

Made when the norm is known and dropped when the last op has ended. Whatever interrupts a step, the
next call goes on from this object alone. `StateKeeper` has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinity_engine.gradients.keeper import GradientKeeper
from infinity_engine.optim import Rule
from infinity_engine.outcome import StepResult

__all__ = ["StepInputs", "StepUnderWay"]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What all updates of one step have in common."""

    gradients: GradientKeeper
    rules: Sequence[Rule]  # of each parameter group
    gradient_factor: float


@dataclass(slots=True)
class StepUnderWay:
    """An update that has begun and not ended: some values may be new and the rest old."""

    inputs: StepInputs
    result: StepResult
    """What its call of `Engine.step` returns."""
    updated: dict[int, list[int]]
    """The new step counts of each subgroup that is updated. They count from the step's end on: what
    an interrupted step has left undone is updated with the counts before."""
    made_early: frozenset[int]
    """The subgroups that its backward has updated."""
    is_counted: bool = False
    """Whether it counts as made: nothing can stop it, and no call of `Engine.step` repeats it."""

    def count(self) -> bool:
        """Let it count as made; tell whether it does so only now."""
        was_counted, self.is_counted = self.is_counted, True
        return not was_counted
