"""`PlaceholderGradient`: what a parameter shows as its `grad` after the engine moved the real one.

Computing with it raises an error that names the engine's method instead. Without it, `grad` would
be None, and torch.nn.utils.clip_grad_norm_ and similar code would silently do nothing. One
parameter of each group shows one, from its gradient on until the engine is called again.
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
        # Without a storage: every operation on it arrives at __torch_dispatch__.
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
            "This parameter's gradient is a placeholder: the engine moved the real one into its "
            f"own memory when autograd made it. {func} cannot be computed with it. To clip "
            "gradients or to know their norm, call engine.clip_grad_norm_(max_norm) or set "
            "max_grad_norm. To see one, call engine.state_of(parameter) before the step. To drop "
            "all, call engine.zero_grad()"
        )

    # torch's own prints the values, and there are none.
    def __repr__(self) -> str:  # type: ignore[override]
        """Say what it is."""
        return f"PlaceholderGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


class GradientPlaceholders:
    """The placeholders of one model, at most one for each parameter group."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._watched: set[int] = set()  # parameters, by their numbers
        self._shown: dict[int, tuple[torch.nn.Parameter, PlaceholderGradient]] = {}  # by groups

    def show(self, of: TrainedParameter) -> None:
        """Show a placeholder at this parameter, unless another parameter of its group shows one."""
        if of.group in self._shown:
            return
        placeholder = PlaceholderGradient(of.parameter)
        self._shown[of.group] = of.parameter, placeholder
        # torch checks shape, dtype and device here: the placeholder has its parameter's.
        of.parameter.grad = placeholder
        if of.number not in self._watched:
            self._watched.add(of.number)
            self._hooks.before_accumulating(of.parameter, partial(self._make_way, of))

    def _make_way(self, of: TrainedParameter) -> None:
        """Remove the placeholder before autograd adds a gradient to it.

        Raises:
            RuntimeError: the caller had set `grad` to None. The engine still has the gradients.
        """
        # After an earlier call, another parameter of the group may show it.
        if (
            of.group in self._shown
            and self._shown[of.group][0] is of.parameter
            and self._hide(of.group)
        ):
            raise RuntimeError(f"{set_to_none_message()}. Call it now, and repeat this backward")

    def hide(self) -> bool:
        """Remove all placeholders; tell whether the caller replaced one, as `zero_grad` does."""
        if not self._watched:
            return False
        # A list: all placeholders go, also after one that the caller replaced.
        dropped = [self._hide(group) for group in list(self._shown)]
        # Hooks first: from here on autograd accumulates into the parameter as usual.
        self._hooks.remove()
        self._watched.clear()
        return any(dropped)

    def _hide(self, group: int) -> bool:
        parameter, placeholder = self._shown.pop(group)
        if parameter.grad is not placeholder:
            return True
        parameter.grad = None
        return False


def set_to_none_message() -> str:
    """Return the message for gradients that the caller dropped past the engine."""
    return (
        "A gradient was set to None between backward and step, as optimizer.zero_grad() and "
        "model.zero_grad() do. The engine still has all gradients, as it moved them into its own "
        "memory. To drop them, call engine.zero_grad()"
    )
