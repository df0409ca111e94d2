"""`EngineOptimizer`: an engine as a torch optimizer, for loops and libraries that step one.

Passes calls on; holds no state beside the newest result. Made by `Engine.as_optimizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from infinity_engine.errors import ConfigError
from infinity_engine.outcome import Outcome, StepResult

__all__ = ["EngineOptimizer", "SteppedEngine"]


class SteppedEngine(Protocol):
    """What an `EngineOptimizer` calls of its engine."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer whose groups the engine reads."""

    def step(self, update: bool | None = None) -> StepResult:
        """Update with the gradients that have come."""

    def zero_grad(self) -> None:
        """Drop the gradients since the last step."""

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip the gradients in the next step; return their norm."""

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return the states as torch's optimizer would have them."""

    def load_optimizer_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with such states."""


class EngineOptimizer(torch.optim.Optimizer):
    """Steps an engine. Groups, defaults and hooks are those of the engine's own optimizer.

    As with torch's optimizers, the caller decides when a step is complete: `step` updates with all
    gradients that have come, however many micro-batches that is. `zero_grad` drops gradients that
    no step has used, so after `step` it changes nothing.
    """

    # Not torch's own, which would make groups of its own: what is not here is asked of the engine's
    # optimizer.
    def __init__(self, engine: SteppedEngine) -> None:
        self.engine = engine
        self.result: StepResult | None = None
        """What the newest `step` did."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the engine's optimizer, such as its groups."""
        # Python calls this only for what this object does not have.
        if name == "engine":
            raise AttributeError(name)
        return getattr(self.engine.optimizer, name)

    @property
    def was_skipped(self) -> bool:
        """Whether the newest step updated nothing because gradients were not finite (fp16)."""
        return self.result is not None and self.result.outcome is Outcome.SKIPPED

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update with all gradients that have come; return what `closure` returned.

        Raises:
            RuntimeError: no gradient has come since the last step. See `Engine.step`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.result = self.engine.step(update=True)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last step: `set_to_none` changes nothing."""
        self.engine.zero_grad()

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip the gradients to `max_norm` in the next step; return their norm.

        Use it instead of torch.nn.utils.clip_grad_norm_, which sees no gradients here. With
        `math.inf` nothing is clipped, and you know the norm.
        """
        return self.engine.clip_grad_norm_(max_norm)

    def state_dict(self) -> dict[str, Any]:
        """Return what a plain optimizer's would be, as copies on the host. All ranks call this."""
        return self.engine.optimizer_state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with the states of a plain optimizer or of an engine. All ranks call this."""
        self.engine.load_optimizer_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the engine has planned for the parameters that it trains.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            field="add_param_group",
            value=f"{len(list(param_group.get('params', ())))} parameters",
            expected="all groups in the optimizer before initialize. Close the engine, add the "
            "group to its optimizer, and initialize another one",
        )
