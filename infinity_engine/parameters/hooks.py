"""The only module that registers hooks on the user's objects, and removes them again.

Hooks call the function that they were given, with signals delayed, and decide nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, ItemsView, Mapping, ValuesView
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from infinity_engine.signals import HeldSignals

__all__ = ["Hooks"]


class Hooks:
    """The hooks of one engine, or of one model that is being built."""

    def __init__(self, signals: HeldSignals | None = None) -> None:
        self.signals = signals or HeldSignals()
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._watched: list[tuple[torch.nn.Module, dict[str, torch.nn.Parameter | None]]] = []

    def on_gradient(
        self, parameter: torch.nn.Parameter, take: Callable[[torch.Tensor], None]
    ) -> None:
        """Call `take` with each gradient of a parameter; its `grad` is None from then on."""

        @self.signals.holding
        def hook(owner: torch.Tensor) -> None:
            # None at once: autograd would add the next gradient to it, and its memory would stay.
            gradient, owner.grad = owner.grad, None
            if gradient is not None:
                take(gradient)

        # torch has no annotations for it
        handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._handles.append(handle)

    @staticmethod
    def takes_gradients(parameter: torch.nn.Parameter) -> bool:
        """Tell whether this or another engine receives the gradients of a parameter."""
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        # Recognised by name: every engine's hooks are made by the same function.
        ours = f"{Hooks.on_gradient.__qualname__}.<locals>.hook"
        return any(
            (hook.__module__, getattr(hook, "__qualname__", "")) == (__name__, ours)
            for hook in hooks.values()
        )

    def before_accumulating(self, parameter: torch.nn.Parameter, call: Callable[[], None]) -> None:
        """Call `call` before autograd adds a gradient to the parameter's `grad`."""

        @self.signals.holding
        def hook(_gradient: torch.Tensor) -> None:
            call()

        # torch has no annotations for it
        self._handles.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]

    def on_optimizer_step(
        self, optimizer: torch.optim.Optimizer, check: Callable[[], None]
    ) -> None:
        """Call `check` before each of the optimizer's own steps."""

        def hook(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
            check()

        self._handles.append(optimizer.register_step_pre_hook(hook))

    def on_optimizer_states(
        self,
        optimizer: torch.optim.Optimizer,
        saved: Callable[[dict[str, Any]], None],
        loaded: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """Call `saved` with each state dict of the optimizer, `loaded` before it loads one."""

        def saved_hook(_optimizer: Any, state_dict: dict[str, Any]) -> None:
            saved(state_dict)

        def loaded_hook(_optimizer: Any, state_dict: dict[str, Any]) -> None:
            loaded(state_dict)

        self._handles.append(optimizer.register_state_dict_post_hook(saved_hook))
        self._handles.append(optimizer.register_load_state_dict_pre_hook(loaded_hook))

    def on_call(
        self,
        module: torch.nn.Module,
        before: Callable[[torch.nn.Module], None],
        after: Callable[[torch.nn.Module, object], None],
    ) -> None:
        """Call `before` when a module is about to run, and `after` with its output or an error."""

        @self.signals.holding
        def pre_hook(owner: torch.nn.Module, _args: Any) -> None:
            before(owner)

        @self.signals.holding
        def hook(owner: torch.nn.Module, _args: Any, output: Any) -> None:
            after(owner, output)

        self._handles.append(module.register_forward_pre_hook(pre_hook))
        # always_call: also where the forward raises, so that what is held for it is let go.
        self._handles.append(module.register_forward_hook(hook, always_call=True))

    def before_backward(self, tensor: torch.Tensor, call: Callable[[], None]) -> None:
        """Call `call` when a tensor's gradient is computed, before those of its inputs are."""

        @self.signals.holding
        def hook(_gradient: torch.Tensor) -> None:
            call()

        # torch has no annotations for it; it goes with the tensor
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def around_backward(
        self,
        node: torch.autograd.graph.Node,
        before: Callable[[], None],
        after: Callable[[], None],
    ) -> None:
        """Call `before` when the backward of a node begins, and `after` when it has ended."""

        @self.signals.holding
        def begins(_gradients: Any) -> None:
            before()

        @self.signals.holding
        def ended(_inputs: Any, _outputs: Any) -> None:
            after()

        node.register_prehook(begins)  # they go with the node
        node.register_hook(ended)

    def before_call(
        self, module: torch.nn.Module, hook: Callable[[torch.nn.Module, Any], None]
    ) -> None:
        """Call `hook` when the module is about to run. It is registered as it is: compilers can
        trace it, and callers can find it among the module's hooks.

        Signals are not delayed, here and in `on_any_use`.
        """
        self._handles.append(module.register_forward_pre_hook(hook))

    def around_call(
        self,
        module: torch.nn.Module,
        before: Callable[[torch.nn.Module, Any, Any], Any],
        after: Callable[[torch.nn.Module, Any, Any], Any],
    ) -> None:
        """Let `before` replace the arguments of a module's calls, and `after` their output.

        `before` gets the module, positional arguments and keywords, and returns both, or None to
        leave them. `after` gets the module, positional arguments and the output, or None after an
        error. Signals are not delayed.
        """
        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def around_block(
        self,
        module: torch.nn.Module,
        before: Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], Any],
        after: Callable[[torch.nn.Module, object], None],
    ) -> None:
        """Call `before` ahead of all other hooks of a module's calls; it may replace arguments.

        It returns positional arguments and keywords, or None to leave them. `after` comes behind
        the hooks that there are now, with the output, or with None after an error.
        """

        @self.signals.holding
        def hook(owner: torch.nn.Module, _args: Any, output: Any) -> None:
            after(owner, output)

        self._handles.append(
            module.register_forward_pre_hook(
                self.signals.holding(before), prepend=True, with_kwargs=True
            )
        )
        self._handles.append(module.register_forward_hook(hook, always_call=True))

    def on_registration(
        self,
        parameter: Callable[[torch.nn.Module, str, object], None],
        submodule: Callable[[torch.nn.Module, str, object], None],
    ) -> None:
        """Call `parameter` and `submodule` with each that any module is about to register.

        With the name, and in whatever thread that happens.

        A submodule's own `__init__` has run by then. Each may return a replacement, or None.
        """
        self._handles.append(register_module_parameter_registration_hook(parameter))
        self._handles.append(register_module_module_registration_hook(submodule))

    def on_read(self, module: torch.nn.Module, read: Callable[[object], None]) -> None:
        """Call `read` with a parameter of the module's own before code gets it as an attribute.

        Signals are not delayed: most reads find that the parameter is there.
        """
        parameters = module._parameters
        self._watched.append((module, parameters))
        module.__dict__["_parameters"] = _WatchedParameters(parameters, read)

    def on_any_use(
        self,
        module: torch.nn.Module,
        read: Callable[[object], None],
        listed: Callable[[], None],
        copied: Callable[[], None],
    ) -> None:
        """Like `on_read`; call `listed` before all are listed, and `copied` before copies."""
        parameters = module._parameters
        self._watched.append((module, parameters))
        module.__dict__["_parameters"] = _PendingParameters(parameters, read, listed, copied)

    def on_state_dict(self, module: torch.nn.Module, check: Callable[[], None]) -> None:
        """Call `check` before a state dict of the module is made."""

        def hook(*_: Any) -> None:
            check()

        # torch has no annotations for it
        self._handles.append(module.register_state_dict_pre_hook(hook))  # type: ignore[no-untyped-call]

    def on_load_state_dict(self, module: torch.nn.Module, check: Callable[[], None]) -> None:
        """Call `check` before the module loads values of a state dict."""

        def hook(*_: Any) -> None:
            check()

        # torch has no annotations for it
        self._handles.append(module.register_load_state_dict_pre_hook(hook))  # type: ignore[no-untyped-call]

    def saving(
        self, pack: Callable[[torch.Tensor], object], unpack: Callable[[Any], torch.Tensor]
    ) -> AbstractContextManager[None]:
        """Return a context in which autograd saves what `pack` returns, in this thread."""
        return torch.autograd.graph.saved_tensors_hooks(
            self.signals.holding(pack), self.signals.holding(unpack)
        )

    def can_save(self) -> bool:
        """Tell whether `saving` can be used here.

        Not under checkpointing: its own hooks must see what is saved, and ours would hide them.
        Not inside a transform of torch.func, which keeps what it needs itself.
        """
        if not self.transforms_nothing():
            return False
        try:
            # torch refuses this where a saved-tensor hook is set: there is no other way to ask.
            with torch.autograd.graph.disable_saved_tensors_hooks("asked whether there are any"):
                return True
        except RuntimeError:
            return False

    @staticmethod
    def transforms_nothing() -> bool:
        """Tell whether no transform of torch.func is under way: its tensors have no values."""
        return torch._C._functorch.peek_interpreter_stack() is None

    def remove(self) -> None:
        """Remove all hooks. It can be repeated after an interrupt."""
        # Each leaves the list only after it is removed: an interrupt between forgets none.
        while self._handles:
            self._handles[-1].remove()
            self._handles.pop()
        while self._watched:
            module, before = self._watched[-1]
            now = module._parameters
            if now is not before:
                before.clear()
                before.update(now)  # parameters may have been added or removed meanwhile
                module.__dict__["_parameters"] = before
            self._watched.pop()


class _WatchedParameters(dict[str, "torch.nn.Parameter | None"]):
    """The parameters of a module by name; calls a function when one is read.

    Listing all of them at once calls nothing.
    """

    def __init__(
        self, parameters: dict[str, torch.nn.Parameter | None], read: Callable[[object], None]
    ) -> None:
        super().__init__(parameters)
        self._read = read

    def __getitem__(self, name: str) -> torch.nn.Parameter | None:
        parameter = super().__getitem__(name)
        self._read(parameter)
        return parameter

    def __reduce_ex__(self, _protocol: object) -> Any:
        raise TypeError(
            "A model with parameters that an engine fetches cannot be copied or pickled: most of "
            "its parameters show NaN. Copy engine.state_dict(), or close the engine first"
        )

    def __deepcopy__(self, memo: object) -> Any:
        return self.__reduce_ex__(memo)


class _PendingParameters(_WatchedParameters):
    """The same; listing and copying them call functions first."""

    def __init__(
        self,
        parameters: dict[str, torch.nn.Parameter | None],
        read: Callable[[object], None],
        listed: Callable[[], None],
        copied: Callable[[], None],
    ) -> None:
        super().__init__(parameters, read)
        self._listed = listed
        self._copied = copied

    # dict's own view
    def items(self) -> ItemsView[str, torch.nn.Parameter | None]:  # type: ignore[override]
        self._listed()
        return super().items()

    # dict's own view
    def values(self) -> ValuesView[torch.nn.Parameter | None]:  # type: ignore[override]
        self._listed()
        return super().values()

    def __reduce_ex__(self, _protocol: object) -> Any:
        # As an ordinary dict: the copy belongs to no engine.
        self._copied()
        return dict, (dict(super().items()),)

    def __deepcopy__(self, memo: Any) -> Any:
        self._copied()
        return copy.deepcopy(dict(super().items()), memo)
