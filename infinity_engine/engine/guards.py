"""`Guards`: what a model and its optimizer refuse while an engine has their parameters and states.

Each refusal says what to call instead. torch's hooks call it; it changes nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from infinity_engine.errors import ConfigError
from infinity_engine.parameters.hooks import Hooks
from infinity_engine.parameters.parameters import ModelParameter, TrainedParameter
from infinity_engine.update.updating import Updates

__all__ = ["LEFT_WITH_THE_ENGINE", "Guards", "check_schedule"]

LEFT_WITH_THE_ENGINE = "updates whose states an engine has"
"""An entry in the state dict of an engine's optimizer: how many updates made the missing states."""


def _groups_of(stepped: object, optimizer: torch.optim.Optimizer) -> object:
    """Return the groups of what a scheduler steps; the optimizer's where it does not say."""
    return optimizer.param_groups if stepped is None else getattr(stepped, "param_groups", None)


def check_schedule(
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    optimizer: torch.optim.Optimizer,
    followed: Sequence[torch.optim.lr_scheduler.LRScheduler],
) -> None:
    """Refuse a scheduler that cannot be stepped after each update, or that would change nothing,
    as far as it tells; those within another one are not looked at.

    Raises:
        ConfigError: that is so.
    """
    expected = ""
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        expected = "one that needs no metric: step this one yourself, and name it in `extra`"
    elif _groups_of(getattr(scheduler, "optimizer", None), optimizer) is not optimizer.param_groups:
        expected = "one of the engine's optimizer, or of as_optimizer()"
    elif any(scheduler is other for other in followed):
        expected = "one that is not stepped already"
    if expected:
        raise ConfigError(field="scheduler", value=type(scheduler).__name__, expected=expected)


class Guards:
    """The guards of one engine, until its hooks are removed; `known` has its parameters, by id."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        known: Mapping[int, ModelParameter],
        hooks: Hooks,
        *,
        whole: bool,
        updates: Updates,
    ) -> None:
        """Set the guards. `whole`: all parameters stay on the device; `updates` makes updates."""
        self._optimizer = optimizer
        self._updates = updates
        # Adagrad makes states before its first step. They stay: it needs them after close().
        self._unused = {
            id(parameter) for parameter, state in optimizer.state.items() if state.get("step") == 0
        }
        self._known = known
        self._stepping = self._listing = False
        # Parameters that stay on the device have their values: plain state dicts work.
        if not whole:
            for module in model.modules():
                hooks.on_state_dict(module, self._refuse_state_dict)
                hooks.on_load_state_dict(module, partial(self._check_loading, module))
        hooks.on_optimizer_step(optimizer, self._check_stepping)
        hooks.on_optimizer_states(optimizer, self._warn_of_states, self._check_states)

    @contextmanager
    def listing(self) -> Iterator[None]:
        """Allow the model's state_dict() in the body."""
        # Its body may copy the engine's state dict, which lists it too.
        before, self._listing = self._listing, True
        try:
            yield
        finally:
            self._listing = before

    def check_no_backward(self) -> None:
        """Refuse step() inside a backward, as from a gradient hook."""
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "step() was called in a hook, while a backward still makes gradients. Call it "
                "after backward() has returned"
            )

    def step_optimizer(self) -> None:
        """Call the optimizer's step() for its schedulers and hooks: it finds no gradients."""
        self._stepping = True
        try:
            self._optimizer.step()
        finally:
            self._stepping = False

    def check_gradients(self) -> None:
        """Refuse gradients that the engine does not have: the optimizer's step would use them."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    raise RuntimeError(
                        f"A parameter of shape {tuple(parameter.shape)} has a gradient that the "
                        "engine does not manage. Either it was frozen or not in the optimizer when "
                        "the engine was initialized, or your code set its gradient. After "
                        "unfreezing or adding parameters, close the engine and initialize another "
                        "one"
                    )

    def _check_stepping(self) -> None:
        if not self._stepping:
            raise RuntimeError(
                "This optimizer has no gradients: the engine has them. Call engine.step() instead "
                "of optimizer.step()"
            )

    def check_states(self) -> None:
        """Refuse to go on where the optimizer was given states, which nothing would use."""
        for parameter, state in self._optimizer.state.items():
            known = self._known.get(id(parameter))
            if state and isinstance(known, TrainedParameter) and id(parameter) not in self._unused:
                raise RuntimeError(
                    f"The optimizer was given states of {known.name} after the engine was "
                    "initialized. The engine has states of its own and would ignore these. To "
                    "train with them, close the engine and initialize another one, which adopts "
                    "them. To drop them, call optimizer.state.clear()"
                )

    def _warn_of_states(self, state_dict: dict[str, Any]) -> None:
        state_dict[LEFT_WITH_THE_ENGINE] = self._updates.made
        warnings.warn(
            "The state dict of an engine's optimizer has its groups but no states: the engine has "
            "those. engine.state_of(parameter) returns them, and engine.save() saves them",
            RuntimeWarning,
            stacklevel=6,  # torch has two functions around its own
        )

    def _check_states(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse a state dict with states that the engine would not see, or has kept itself."""
        updates = state_dict.get(LEFT_WITH_THE_ENGINE)
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
                "The engine has the optimizer's states and would ignore those that the optimizer "
                "loads. Load them before initialize, which adopts them. To load only the groups, "
                'such as learning rates, call optimizer.load_state_dict({**state_dict, "state": '
                "{}})"
            )

    def _refuse_state_dict(self) -> None:
        if not self._listing:
            raise RuntimeError(
                "This model's parameters are on the host, on drives or on other ranks, so its "
                "state_dict() would hold NaN. Call engine.state_dict() instead"
            )

    def _check_loading(self, module: torch.nn.Module) -> None:
        """Refuse to load values into parameters that are not on the device."""
        for parameter in module.parameters():
            known = self._known.get(id(parameter))
            if known is not None and not known.is_there:
                raise RuntimeError(
                    f"{known.name} is not on the device, so nothing can be loaded into it: the "
                    "engine fetches parameters only around modules. Load under `with "
                    "engine.gathered(model.parameters(), modify=True)`, or module by module"
                )
