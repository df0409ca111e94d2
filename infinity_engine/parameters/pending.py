"""`PendingParameters`: parameters that show NaN until a deferred update has made their values.

They stay on the device.

A module that runs, and code that reads `module.weight`, wait for the parameters that they need.
Code that lists or copies parameters waits for the whole update. Only parameters that modules were
seen to ask for are left to the forward: the caller may hold any other one in a variable.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from infinity_engine.parameters.deferred import DeferredUpdate
from infinity_engine.parameters.hooks import Hooks
from infinity_engine.parameters.modules import is_compiled
from infinity_engine.parameters.parameters import TrainedParameter, absent

__all__ = ["Gradients", "PendingParameters"]


class Gradients(Protocol):
    """The gradients of a step."""

    def has(self, parameter: int) -> bool:
        """Tell whether there is one of a parameter."""


class PendingParameters:
    """The trained parameters of a model; a step changes those of which `gradients` has one.

    Hooks are set from a step to the end of its update, and before the first step.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        trained: Sequence[TrainedParameter],
        gradients: Gradients,
        hooks: Hooks,
    ) -> None:
        # The engine has the model. This is among what closes an engine that was dropped.
        self._model = weakref.ref(model)
        self._trained = trained
        self._gradients = gradients
        self._hooks = hooks
        self._numbers = {id(known.parameter): known.number for known in trained if known.numel}
        self._asked: set[int] = set()  # parameters that a module in Python has asked for
        self._unseen: set[int] = set()  # parameters that modules use where no hook sees it
        self._absent: dict[int, torch.Tensor] = {}
        # The values of parameters that show NaN at present.
        self._hidden: dict[int, torch.Tensor] = {}
        self._update: DeferredUpdate | None = None
        self._watch()

    def register_external(self, parameter: torch.nn.Parameter) -> None:
        """Update a parameter in the step: it is used where no hook sees it."""
        if id(parameter) in self._numbers:
            self._unseen.add(self._numbers[id(parameter)])

    def follow_update(self, update: DeferredUpdate | None) -> None:
        """Hide the parameters that this update has not made yet. None: show all, remove hooks.

        Raises:
            RuntimeError: an op of the update failed.
        """
        if update is None:
            # Before the hooks go: from then on nothing shows them.
            self._show(list(self._hidden))
            self._hooks.remove()
            self._update = None
            return
        self._hooks.remove()
        self._update = update
        # Compiled code runs without hooks.
        if any(map(is_compiled, self._modules())):
            update.end()
            return
        # Only what modules in Python ask for can wait: anything else would be read as NaN.
        waits = self._asked - self._unseen
        update.make(filter(self._gradients.has, set(self._numbers.values()) - waits))
        for number in filter(self._gradients.has, self._numbers.values()):
            if number not in self._hidden and not update.has_made(number):
                self._hide(number)
        self._watch()

    def _modules(self) -> Iterable[torch.nn.Module]:
        model = self._model()
        return () if model is None else model.modules()

    def _watch(self) -> None:
        for module in self._modules():
            own = [
                self._numbers[id(parameter)]
                for parameter in module._parameters.values()
                if id(parameter) in self._numbers
            ]
            if own and not is_compiled(module):
                self._hooks.before_call(module, self._before(tuple(own)))
                self._hooks.on_any_use(module, self._read, self._listed, self._copied)

    def _before(self, numbers: Sequence[int]) -> Callable[[torch.nn.Module, object], None]:
        return lambda _module, _inputs: self._need(numbers)

    def _read(self, parameter: object) -> None:
        number = self._numbers.get(id(parameter))
        if number is not None:
            self._need((number,))

    def _need(self, numbers: Iterable[int]) -> None:
        """Show these parameters when they are updated. Meanwhile the host makes other updates."""
        # The compiler reads them here, and its code will run without hooks. `follow_update` ends
        # the updates of models that have compiled modules.
        if torch.compiler.is_compiling():
            return
        self._asked.update(numbers)
        update = self._update
        missing = [number for number in numbers if number in self._hidden]
        if update is None or not missing:
            return
        # Signals are delayed here only: most reads find nothing to wait for.
        self._hooks.signals.holding(self._await)(update, missing)

    def _await(self, update: DeferredUpdate, missing: Sequence[int]) -> None:
        while not all(map(update.has_made, missing)):
            # Nothing can go on without a wait: then wait for these.
            if not update.go_on():
                update.make(missing)
        self._show(missing)

    def _listed(self) -> None:
        with self._hooks.signals:
            if self._update is not None:
                self._update.end()

    def _copied(self) -> None:
        self._listed()
        with self._hooks.signals:
            self._hooks.remove()

    def _hide(self, number: int) -> None:
        known = self._trained[number]
        values = known.parameter.data
        # Made once for each parameter: it is the same NaN at every step.
        if number not in self._absent:
            self._absent[number] = absent(known.dtype, known.parameter.shape, values.device)
        self._hidden[number] = values
        # The update writes to the old memory while modules see NaN.
        known.live_at(values.view(-1))
        known.show(self._absent[number])

    def _show(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            known = self._trained[number]
            # Otherwise the caller has set `data` meanwhile, and `step` is to refuse that change.
            if known.parameter.data_ptr() == self._absent[number].data_ptr():
                known.show(self._hidden[number])
                known.note_values()  # copies of the update may have raised the version
            known.live_at(None)
            del self._hidden[number]
