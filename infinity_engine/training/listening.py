"""`TrainingListener`: what a training tells while it goes on. Never imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infinity_engine.progress import Progress
    from infinity_engine.reporting.report import StepReport

__all__ = ["TrainedStep", "TrainingListener"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedStep:
    """A step that was made: its number from 1 on, of so many, and what it was like."""

    number: int
    steps: int
    loss: float
    lr: float
    tokens: int
    seconds: float
    """From the end of the step before to that of this one: what was saved in between counts."""
    report: StepReport

    @property
    def tokens_per_s(self) -> float:
        """Return how many tokens a second went through the model."""
        return self.tokens / self.seconds if self.seconds else 0.0


class TrainingListener:
    """What a training tells while it goes on. Subclass it and replace what you need."""

    def on_note(self, text: str) -> None:
        """Hear what the run does next, in a sentence."""

    def on_progress(self, progress: Progress) -> None:
        """Hear how far loading has come."""

    def on_step(self, step: TrainedStep) -> None:
        """Hear of a step that was made."""
