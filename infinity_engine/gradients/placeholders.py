"""`PlaceholderGradient`: what a parameter shows as its gradient when the engine has taken that.

Who computes with it is told.

torch.nn.utils.clip_grad_norm_ and whatever else works on gradients leaves out parameters that show
none: it would do nothing, and say nothing. Shown by one parameter of each group from its gradient
on until the engine is called again.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from infinity_engine.parameters.hooks import Hooks
from infinity_engine.parameters.parameters import TrainedParameter

__all__ = ["GradientPlaceholders", "PlaceholderGradient", "set_to_none_message"]


class PlaceholderGradient(torch.Tensor):
    """A gradient of a parameter's shape and type that has no values and takes no memory."""

    def __new__(cls, of: torch.Tensor) -> PlaceholderGradient:
        """Return one for this parameter."""
        made: PlaceholderGradient = torch.Tensor._make_wrapper_subclass(
            cls, of.shape, dtype=of.dtype, device=of.device
        )
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: object) -> Any:
        """Refuse.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "this gradient is not here: the engine has taken it, as all others, when it was made. "
            "To clip gradients, or to know their norm, call engine.clip_grad_norm_(max_norm) or "
            "set max_grad_norm; to see one, call engine.state_of(parameter) before the step; to "
            f"drop them, call engine.zero_grad(). What was asked for is {func}"
        )

    # torch's takes contents, of which there are none
    def __repr__(self) -> str:  # type: ignore[override]
        """Say what it is."""
        return f"PlaceholderGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


class GradientPlaceholders:
    """Those that parameters show, one of each group."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._watched: set[int] = set()  # parameters, by their numbers
        self._shown: dict[int, tuple[torch.nn.Parameter, PlaceholderGradient]] = {}  # by groups

    def show(self, of: TrainedParameter) -> None:
        """Let this parameter show that its gradient was taken, if none of its group does."""
        if of.group in self._shown:
            return
        taken = PlaceholderGradient(of.parameter)
        self._shown[of.group] = of.parameter, taken
        of.parameter.grad = taken
        if of.number not in self._watched:
            self._watched.add(of.number)
            self._hooks.before_accumulating(of.parameter, partial(self._make_way, of))

    def _make_way(self, of: TrainedParameter) -> None:
        """Let no gradient be added to what is none."""
        if (
            of.group in self._shown
            and self._shown[of.group][0] is of.parameter
            and self._hide(of.group)
        ):
            raise RuntimeError(f"{set_to_none_message()}. Call it now, and do this backward again")

    def hide(self) -> bool:
        """Let nothing be shown; tell whether somebody has dropped what was."""
        if not self._watched:
            return False
        dropped = [self._hide(group) for group in list(self._shown)]
        self._hooks.remove()
        self._watched.clear()
        return any(dropped)

    def _hide(self, group: int) -> bool:
        parameter, taken = self._shown.pop(group)
        if parameter.grad is not taken:
            return True
        parameter.grad = None
        return False


def set_to_none_message() -> str:
    """Return what is said where gradients were dropped past the engine, which still has them."""
    return (
        "a gradient was set to None between backward and step, as optimizer.zero_grad() and "
        "model.zero_grad() do, and the engine, which has taken all gradients, still has them: what "
        "drops them is engine.zero_grad()"
    )
