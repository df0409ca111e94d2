"""The only registrar of hooks: whatever the engine hangs on the user's objects is hung here, and taken off again.

Hooks call what they are given and decide nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Hooks"]


class Hooks:
    """The hooks of one engine."""

    def __init__(self) -> None:
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def on_gradient(self, parameter: torch.nn.Parameter, take: Callable[[torch.Tensor], None]) -> None:
        """Call `take` with each gradient of a parameter, which then has none."""

        def hook(owner: torch.Tensor) -> None:
            gradient, owner.grad = owner.grad, None
            if gradient is not None:
                take(gradient)

        handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch is
        self._handles.append(handle)

    def on_optimizer_step(self, optimizer: torch.optim.Optimizer, check: Callable[[], None]) -> None:
        """Call `check` before each of the optimizer's own steps."""

        def hook(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
            check()

        self._handles.append(optimizer.register_step_pre_hook(hook))

    def remove(self) -> None:
        """Take all hooks off."""
        while self._handles:
            self._handles.pop().remove()
