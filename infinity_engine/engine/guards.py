"""`Guards`: what a model and an optimizer refuse while an engine has what they had. Each refusal says what to call.

Looks, and lets torch's hooks ask it; changes nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from infinity_engine.engine.hooks import Hooks
from infinity_engine.engine.parameters import ModelParameter

__all__ = ["Guards"]


class Guards:
    """Those of one engine, until its hooks are removed; `known` are its parameters, by id."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        known: Mapping[int, ModelParameter],
        hooks: Hooks,
        *,
        whole: bool,
    ) -> None:
        """Begin; `whole`: all parameters are there all the time."""
        self._optimizer = optimizer
        self._known = known
        self._stepping = self._listing = False
        if not whole:
            for module in model.modules():
                hooks.on_state_dict(module, self._refuse_state_dict)
                hooks.on_load_state_dict(module, partial(self._check_loading, module))
        hooks.on_optimizer_step(optimizer, self._check_stepping)
        hooks.on_optimizer_states(optimizer, self._warn_of_states, self._check_states)

    @contextmanager
    def listing(self) -> Iterator[None]:
        """Let the model list its state dict in the body."""
        self._listing = True
        try:
            yield
        finally:
            self._listing = False

    def step_optimizer(self) -> None:
        """Let schedulers and step hooks see a step of the user's optimizer, which has no gradients and does nothing."""
        self._stepping = True
        try:
            self._optimizer.step()
        finally:
            self._stepping = False

    def check_gradients(self) -> None:
        """Refuse gradients that the engine did not take: the optimizer's own step would use them."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    raise RuntimeError(
                        f"a parameter of shape {tuple(parameter.shape)} has a gradient that the engine did not take: "
                        "it was frozen when the engine was initialized, or not the optimizer's then, or its gradient "
                        "was set by hand. Close the engine and initialize another one after parameters are unfrozen or "
                        "added"
                    )

    def _check_stepping(self) -> None:
        if not self._stepping:
            raise RuntimeError(
                "the engine steps this optimizer: call engine.step(), as the optimizer itself has no gradients"
            )

    def _warn_of_states(self) -> None:
        warnings.warn(
            "the state dict of an engine's optimizer has its groups and no states, which the engine has: "
            "engine.state_of(parameter) shows them",
            RuntimeWarning,
            stacklevel=6,  # torch has two functions around its own
        )

    def _check_states(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse states that the engine would not see."""
        if state_dict.get("state"):
            raise RuntimeError(
                "the engine has the optimizer's states, and this version cannot load others: what the optimizer loads "
                "would not be used. To load its groups alone, their learning rates and such, call "
                'optimizer.load_state_dict({**state_dict, "state": {}})'
            )

    def _refuse_state_dict(self) -> None:
        if not self._listing:
            raise RuntimeError(
                "the values of this model's parameters are where the engine fetches them from, on the host or on other "
                "ranks: call engine.state_dict(), which has them"
            )

    def _check_loading(self, module: torch.nn.Module) -> None:
        """Refuse to load values into parameters that are not there."""
        for parameter in module.parameters():
            known = self._known.get(id(parameter))
            if known is not None and not known.is_there:
                raise RuntimeError(
                    f"{known.name} is not there to be loaded, as the engine fetches parameters around modules: load "
                    "under `with engine.gathered(model.parameters(), modify=True)`, or parts of the model under as much"
                )
