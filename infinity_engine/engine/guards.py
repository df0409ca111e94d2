"""`Guards`: what a model and an optimizer refuse while an engine has what they had.

Each refusal says what to call.

Looks, and lets torch's hooks ask it; changes nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from infinity_engine.parameters.hooks import Hooks
from infinity_engine.parameters.parameters import ModelParameter, TrainedParameter

__all__ = ["Guards"]

_LEFT_WITH_THE_ENGINE = "updates whose states an engine has"
"""What the state dict of an engine's optimizer has beside torch's entries: how many updates made
the states it lacks.
"""


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
        updates: Callable[[], int],
    ) -> None:
        """Begin; `whole`: all parameters are there all the time.

        `updates` returns how many were made.
        """
        self._optimizer = optimizer
        self._updates = updates
        # Adagrad makes states before its first step, which it needs again when the engine is
        # closed.
        self._unused = {
            id(parameter) for parameter, state in optimizer.state.items() if state.get("step") == 0
        }
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
        """Let schedulers and step hooks see a step of the user's optimizer, which has no gradients
        and does nothing.
        """
        self._stepping = True
        try:
            self._optimizer.step()
        finally:
            self._stepping = False

    def check_gradients(self) -> None:
        """Refuse gradients that the engine did not take: the optimizer's own step would use
        them.
        """
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    raise RuntimeError(
                        f"a parameter of shape {tuple(parameter.shape)} has a gradient that the "
                        "engine did not take: it was frozen when the engine was initialized, or "
                        "not the optimizer's then, or its gradient was set by hand. Close the "
                        "engine and initialize another one after parameters are unfrozen or added"
                    )

    def _check_stepping(self) -> None:
        if not self._stepping:
            raise RuntimeError(
                "the engine steps this optimizer: call engine.step(), as the optimizer itself has "
                "no gradients"
            )

    def check_states(self) -> None:
        """Refuse to go on where the optimizer has states: nothing uses them."""
        for parameter, state in self._optimizer.state.items():
            known = self._known.get(id(parameter))
            if state and isinstance(known, TrainedParameter) and id(parameter) not in self._unused:
                raise RuntimeError(
                    f"the optimizer was given states of {known.name} since the engine was "
                    "initialized. The engine has states of its own and would ignore these. To "
                    "train with them, close the engine and initialize another one, which takes "
                    "them over. To drop them, call optimizer.state.clear()"
                )

    def _warn_of_states(self, state_dict: dict[str, Any]) -> None:
        state_dict[_LEFT_WITH_THE_ENGINE] = self._updates()
        warnings.warn(
            "the state dict of an engine's optimizer has its groups and no states, which the "
            "engine has: engine.state_of(parameter) shows them",
            RuntimeWarning,
            stacklevel=6,  # torch has two functions around its own
        )

    def _check_states(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse states that the engine would not see, and a state dict whose states stayed with an
        engine.
        """
        updates = state_dict.get(_LEFT_WITH_THE_ENGINE)
        if updates:
            raise RuntimeError(
                "this state dict has no states: when it was made, an engine had the states, of "
                f"{updates} update{'s' if updates > 1 else ''}. Training that goes on from it "
                "would begin with new moments. To load its groups alone, call "
                'optimizer.load_state_dict({"state": {}, "param_groups": '
                f'state_dict["param_groups"]}})'
            )
        if state_dict.get("state"):
            raise RuntimeError(
                "the engine has the optimizer's states, and this version cannot load others: what "
                "the optimizer loads would not be used. Load them before initialize, which takes "
                "them over. To load its groups alone, their learning rates and such, call "
                'optimizer.load_state_dict({**state_dict, "state": {}})'
            )

    def _refuse_state_dict(self) -> None:
        if not self._listing:
            raise RuntimeError(
                "the values of this model's parameters are where the engine fetches them from, on "
                "the host or on other ranks: call engine.state_dict(), which has them"
            )

    def _check_loading(self, module: torch.nn.Module) -> None:
        """Refuse to load values into parameters that are not there."""
        for parameter in module.parameters():
            known = self._known.get(id(parameter))
            if known is not None and not known.is_there:
                raise RuntimeError(
                    f"{known.name} is not there to be loaded, as the engine fetches parameters "
                    "around modules: load under `with engine.gathered(model.parameters(), "
                    "modify=True)`, or parts of the model under as much"
                )
