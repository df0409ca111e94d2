"""`ModuleParameters`: knows which parameters each module needs, and asks the fetcher for them.

A module that is about to run needs its own parameters; code that reads `module.weight` needs that
one; a backward needs those that were saved for it. What a running module asked for stays until it
returns. A parameter that the module returns then stays for its caller.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from infinity_engine.activation import SavedTensors
from infinity_engine.activation.blocks import ModuleMembers, members_of
from infinity_engine.activation.saved import version_of
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.parameters.graphs import GraphParts, custom_functions, tensors_kept_by
from infinity_engine.parameters.hooks import Hooks
from infinity_engine.parameters.parameters import ModelParameter
from infinity_engine.parameters.providing import ModuleProvider
from infinity_engine.schedule import Use

__all__ = [
    "ModuleParameters",
    "UnwatchedModules",
    "check_modules",
    "is_compiled",
    "leaves_of",
    "listed",
    "tensors_in",
]

_MOST_NAMED = 5  # parameters in a message


def check_modules(modules: Mapping[str, torch.nn.Module]) -> None:
    """Refuse those of a model's modules, by name, with parameters that cannot be fetched.

    Raises:
        ConfigError: one does not run in Python.
    """
    for name, module in modules.items():
        if is_compiled(module):
            expected = (
                "a module that is not compiled, as the engine fetches parameters by hooks around "
                "modules and compiled code runs none: do not compile it, or give the device a "
                'larger budget and parameters="device"'
            )
            raise ConfigError(
                field=f"module {name or 'model'}", value=type(module).__name__, expected=expected
            )


def is_compiled(module: torch.nn.Module) -> bool:
    """Tell whether a module is compiled, so that hooks may not see what it reads."""
    # torch.compile wraps a module, or replaces how it is called.
    compiled = (
        "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
    )
    return compiled or isinstance(module, torch.jit.ScriptModule)


def leaves_of(model: torch.nn.Module, names: Iterable[str]) -> frozenset[str]:
    """Return the paths of the modules that `names` name, by path or class.

    Of nested ones, only the outermost.

    Raises:
        ConfigError: a name fits no module.
    """
    found: set[str] = set()
    for name in names:
        some = {
            path for path, module in model.named_modules() if name in (path, type(module).__name__)
        }
        if not some:
            expected = (
                "the name of a module of the model, as named_modules() has it, or of a module's "
                "class"
            )
            raise ConfigError(field="ranks.leaf_modules", value=name, expected=expected)
        found |= some
    # A module inside another leaf is whole with that one.
    return frozenset(path for path in found if not _within(path, found))


def _within(path: str, modules: Collection[str]) -> bool:
    """Tell whether a module is inside one of these."""
    return any(path != other and (not other or path.startswith(f"{other}.")) for other in modules)


@dataclass(slots=True)
class _Frame:
    """A running module, the parameters held for it, and the hooks for what autograd saves."""

    module: torch.nn.Module | None
    saving: AbstractContextManager[None] | None = None
    held: dict[int, None] = field(default_factory=dict)  # in the order in which they came

    def save_with(self, saving: AbstractContextManager[None]) -> None:
        """Use these hooks until the frame ends."""
        saving.__enter__()
        self.saving = saving

    def surrender(self) -> tuple[AbstractContextManager[None] | None, dict[int, None]]:
        """Return hooks and parameters to let go of, and forget them."""
        saving, held = self.saving, self.held
        # Forgotten first: an interrupted end is repeated by the next one, and nothing may be let go
        # of twice.
        self.saving, self.held = None, {}
        return saving, held


class _SavedParameter(NamedTuple):
    """What is saved in place of a view of a parameter, which the backward fetches again."""

    number: int
    version: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements of dtype


@dataclass(slots=True)
class _Leaves:
    """The modules that use all parameters inside them as one."""

    frame: _Frame = field(default_factory=lambda: _Frame(None))
    """Of the leaf that began its backward last."""
    uses: dict[int, Use] = field(default_factory=dict)
    """What the backward of each needs, by its id."""
    parameters: set[int] = field(default_factory=set)
    around: dict[int, torch.nn.Module] = field(default_factory=dict)
    """The leaf around each module, by the module's id; a leaf is around itself."""


class _WatchedParameter(NamedTuple):
    """A parameter that modules use, and how messages call its uses."""

    name: str
    parameter: torch.nn.Parameter
    read: Use
    """By code that reads it as an attribute."""
    saved: Use
    """By a backward."""

    def unseen(self) -> RuntimeError:
        """Return the error of a use that the engine did not see."""
        return RuntimeError(
            f"{self.name} was used where the engine could not see it, and read as NaN. "
            "The engine fetches a parameter when its module runs, or when code reads it as an "
            "attribute of a module; this one came from elsewhere, such as a variable, a list or "
            "model.parameters(). Call engine.register_external(module, parameter) once for the "
            "module that uses it, or use it under `with engine.gathered(parameter)`"
        )


class _Frames:
    """What the caller, running modules and running functions hold: each frame until it ends."""

    def __init__(self, fetcher: ModuleProvider) -> None:
        # The caller's own reads, outside of any module, at the bottom of the stack.
        self.outside = _Frame(None)
        self.modules = [self.outside]
        self.asked: set[int] = set()  # what a module or the caller has asked for so far
        self.asked_now: set[int] = set()  # what was asked for in the newest outermost call
        self._fetcher = fetcher

    def ask(self, use: Use, frame: _Frame) -> None:
        """Have these parameters on the device until the frame ends."""
        # Needed before it is held: a failed fetch leaves nothing to let go of.
        self.need(use)
        self.asked.update(use.parameters)
        self.asked_now.update(use.parameters)
        for number in use.parameters:
            self.hold(number, frame)

    def need(self, use: Use) -> None:
        """Have these on the device; what was read outside of modules makes way."""
        while True:
            try:
                self._fetcher.need(use)
                return
            except CapacityError:
                if not self.let_go_of_oldest_read(use.parameters):
                    raise

    def hold(self, number: int, frame: _Frame) -> None:
        """Let no parameter that is on the device be evicted until the frame ends."""
        if number not in frame.held:
            frame.held[number] = None
            self._fetcher.resident.hold((number,))

    def let_go_of_oldest_read(self, wanted: Collection[int]) -> bool:
        """Let go of the caller's oldest read that is not wanted. Tell whether there was one."""
        for number in self.outside.held:
            if number not in wanted:
                # Deleted first: an interrupt in between must not let go of it twice.
                del self.outside.held[number]
                self._fetcher.resident.let_go((number,))
                return True
        return False

    def end(self, frame: _Frame) -> None:
        """Let go of what a frame holds."""
        saving, held = frame.surrender()
        if saving is not None:
            saving.__exit__(None, None, None)
        self._fetcher.resident.let_go(held)

    def end_modules(self, at: int = 1) -> None:
        """End the frames of modules from `at` on, the innermost first."""
        while len(self.modules) > at:
            self.end(self.modules.pop())


class _CustomFunctions:
    """The custom functions in the graph of a model, whose backwards use what their `ctx` keeps.

    Autograd saves what a function gives to `save_for_backward`, and that is fetched when it is
    needed. What it keeps as an attribute of its `ctx` is fetched before its backward begins.
    """

    def __init__(self, frames: _Frames, hooks: Hooks, numbers: Mapping[int, int]) -> None:
        self._frames = frames
        self._hooks = hooks
        self._numbers = numbers  # of parameters, by their id
        self._running: list[_Frame] = []  # of those whose backward is running
        self._sees_graph = False  # whether the newest outermost call returned what has a graph

    def prepare(self, output: object) -> None:
        """Let the functions in the graph of `output` find parameters that their `ctx` keeps."""
        tensors = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        self._sees_graph = bool(tensors)
        for node in custom_functions(tensors):
            kept = (id(tensor) for tensor in tensors_kept_by(node))
            numbers = tuple(
                dict.fromkeys(self._numbers[key] for key in kept if key in self._numbers)
            )
            if numbers:
                use, frame = Use(f"{node.name()}, which keeps it", numbers), _Frame(None)
                self._hooks.around_backward(
                    node, partial(self._begin, use, frame), partial(self._end, frame)
                )

    def prepare_backward(self, loss: torch.Tensor) -> None:
        """Do the same for a loss of which no module has returned a part."""
        if not self._sees_graph:
            self.prepare(loss)

    def end(self) -> None:
        """Let go of what functions held whose backward failed."""
        while self._running:
            self._frames.end(self._running.pop())

    def _begin(self, use: Use, frame: _Frame) -> None:
        self._running.append(frame)
        self._frames.ask(use, frame)

    def _end(self, frame: _Frame) -> None:
        # An interrupted backward may have ended it already.
        if frame in self._running:
            self._running.remove(frame)
        self._frames.end(frame)


@dataclass(slots=True, kw_only=True)
class _SavedParameters:
    """Saves no parameter for a backward, which fetches it again; `activations` keep the rest."""

    parameters: Mapping[int, _WatchedParameter]
    frames: _Frames
    leaves: _Leaves
    fetcher: ModuleProvider
    hooks: Hooks
    activations: SavedTensors
    closed: bool = False

    def saving(self) -> AbstractContextManager[None]:
        """Return a context in which autograd saves no parameter."""
        return self.hooks.saving(self._pack, self._unpack)

    def close(self) -> None:
        """Refuse every backward from here on."""
        self.closed = True

    def _pack(self, tensor: torch.Tensor) -> object:
        number = None
        if (
            # A conjugated or negated view shows other values than its memory has.
            tensor.layout == torch.strided
            and tensor.numel()
            and not (tensor.is_conj() or tensor.is_neg())
        ):
            # By the storage's address: what is saved may be any view of the parameter.
            number = self.fetcher.shown.number_at(tensor.untyped_storage().data_ptr())
        if number is None:
            self._check_seen(tensor)
            return self.activations.pack(tensor)
        return _SavedParameter(
            number=number,
            version=self.fetcher.version_of(number),
            dtype=tensor.dtype,
            size=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
        )

    def _check_seen(self, tensor: torch.Tensor) -> None:
        """Refuse to save the NaN that is shown in place of a parameter."""
        if tensor.layout != torch.strided:
            return  # it has no storage, and is no parameter
        # One element expanded to a shape, which is how an absent parameter looks.
        storage = tensor.untyped_storage()
        if any(tensor.stride()) or storage.nbytes() != tensor.element_size() or tensor.numel() < 2:
            return
        for number, known in self.parameters.items():
            if (
                known.parameter.untyped_storage().data_ptr() == storage.data_ptr()
                and number not in self.fetcher.shown
            ):
                raise known.unseen()

    def _unpack(self, saved: object) -> torch.Tensor:
        if not isinstance(saved, _SavedParameter):
            return self.activations.unpack(saved)
        number, known = saved.number, self.parameters[saved.number]
        if self.closed:
            raise RuntimeError(
                f"The engine was closed before this backward, which needs {known.name}. A "
                "graph made under an engine cannot be differentiated after close(). Call "
                "backward() before close(), or run the model again"
            )
        if saved.version != self.fetcher.version_of(number):
            raise RuntimeError(
                f"The backward needs {known.name} as it was in the forward, and "
                "engine.step() or a body of engine.gathered(modify=True) has changed it since. "
                "Call backward() before that, or run the forward again"
            )
        # Ranks gather a leaf together when its backward begins. One that is shown must not be asked
        # for by one rank alone.
        if number not in self.leaves.parameters or number not in self.fetcher.shown:
            self.frames.need(known.saved)
        values = self.fetcher.shown.values(number)
        # What was saved is a view in another dtype.
        if values.dtype is not saved.dtype:
            values = values.view(-1).view(saved.dtype)
        # As autograd had it: shape, strides and offset of the view that was saved.
        return values.as_strided(saved.size, saved.stride, saved.offset)


class ModuleParameters:
    """Which of `parameters` the modules of one model use, and when.

    `activations` keep what else autograd saves. A module of `leaves` uses all parameters inside it
    as one: when it begins, and when its backward does.
    """

    fetches = True
    """Whether a parameter shows NaN where no module that needs it is running."""

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Sequence[ModelParameter],
        fetcher: ModuleProvider,
        hooks: Hooks,
        *,
        activations: SavedTensors,
        leaves: Collection[str] = (),
    ) -> None:
        # The engine has the model. This is among what closes an engine that was dropped.
        self._model = weakref.ref(model)
        self._fetcher = fetcher
        self._hooks = hooks
        self._parameters = {
            known.number: _WatchedParameter(
                known.name,
                known.parameter,
                read=Use(known.name, (known.number,)),
                saved=Use(f"{known.name}, as saved", (known.number,)),
            )
            for known in parameters
            if known.numel
        }
        self._numbers = {id(known.parameter): known.number for known in parameters if known.numel}
        self._frames = _Frames(fetcher)
        self._functions = _CustomFunctions(self._frames, hooks, self._numbers)
        self._uses: dict[int, Use] = {}  # what each module needs when it runs, by its id
        self._leaves = _Leaves()
        self._saved = _SavedParameters(
            parameters=self._parameters,
            frames=self._frames,
            leaves=self._leaves,
            fetcher=fetcher,
            hooks=hooks,
            activations=activations,
        )
        self._called: set[int] = set()  # ids of the modules that have hooks around their calls
        self._graph_parts = GraphParts()
        # Each module once: named_modules() lists a shared one by its first name.
        for name, module in model.named_modules():
            is_leaf = name in leaves
            own = tuple(
                self._numbers[id(parameter)]
                for parameter in module.parameters(recurse=is_leaf)
                if id(parameter) in self._numbers
            )
            if is_leaf:
                self._leaves.around.update((id(inner), module) for inner in module.modules())
            self._uses[id(module)] = Use(name or "the model", own)
            # Also of containers: the outermost call begins with one of them.
            if own or any(id(parameter) in self._numbers for parameter in module.parameters()):
                hooks.on_read(module, self._read)
                if is_leaf:
                    self._leaves.uses[id(module)] = Use(f"backward of {name or 'the model'}", own)
                    self._leaves.parameters.update(own)
                # A leaf is called as one: modules inside it need no hooks.
                if not _within(name, leaves):
                    hooks.on_call(module, self._before, self._after)
                    self._called.add(id(module))

    def register_external(self, module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
        """Let a module use a parameter from its next call on; a leaf for modules inside it.

        Raises:
            ConfigError: the module was added after the engine was made.
        """
        module = self._leaves.around.get(id(module), module)
        use, number = self._uses.get(id(module)), self._numbers.get(id(parameter))
        if use is None:
            expected = "one that was the model's when the engine was initialized"
            raise ConfigError(field="module", value=type(module).__name__, expected=expected)
        if number is None or number in use.parameters:
            return
        self._uses[id(module)] = replace(use, parameters=(*use.parameters, number))
        if id(module) in self._leaves.uses:
            leaf = self._leaves.uses[id(module)]
            self._leaves.uses[id(module)] = replace(leaf, parameters=(*leaf.parameters, number))
            self._leaves.parameters.add(number)
        if id(module) not in self._called:
            self._hooks.on_call(module, self._before, self._after)
            self._called.add(id(module))

    def gathered(self, numbers: Iterable[int]) -> None:
        """Note that the caller has asked for these."""
        self._frames.asked.update(numbers)

    def check_asked(self, number: int) -> None:
        """Refuse a gradient of a parameter that was never asked for, and so was read as NaN.

        Raises:
            RuntimeError: it was not.
        """
        if number in self._parameters and number not in self._frames.asked:
            raise self._parameters[number].unseen()

    def saving(self) -> AbstractContextManager[None]:
        """Save no parameters for the backward in the body: the backward fetches them again.

        The body calls the model. Frames that an interrupted call left behind end first.

        Raises:
            ConfigError: a module was compiled after the engine was made.
        """
        # Frames that an interrupted call has left would hold their parameters.
        self._frames.end_modules()
        self._functions.end()
        model = self._model()
        if model is not None:
            now = members_of(model)
            # At each call: a module may have been compiled since.
            check_modules(now.modules)
            self._saved.activations.begin_forward(_own_of(now))
        return self._saved.saving()

    def saving_again(self) -> AbstractContextManager[None]:
        """Save in the body as `saving` does. The body runs modules again for a backward."""
        return self._saved.saving()

    def versions_of(
        self, used: Mapping[str, torch.Tensor], modules: Mapping[str, torch.nn.Module]
    ) -> dict[str, int]:
        """Return how often each of these was changed, and each parameter that is registered as
        external of these modules, by its own name.
        """
        numbers, version_of_number = self._numbers, self._fetcher.version_of
        uses = [self._uses[id(module)] for module in modules.values() if id(module) in self._uses]
        needed = {number for use in uses for number in use.parameters}
        return {
            **{
                name: version_of_number(numbers[id(tensor)])
                if id(tensor) in numbers
                else version_of(tensor)
                for name, tensor in used.items()
            },
            **{self._parameters[number].name: version_of_number(number) for number in needed},
        }

    def close(self) -> None:
        """Let go of everything. No graph made so far can be differentiated any more."""
        self.let_go()
        self._saved.close()

    def let_go(self) -> None:
        """Let go of all parameters that are held. No module is running, and the caller's reads have
        ended.
        """
        self._frames.end_modules()
        self._frames.end(self._frames.outside)
        self._functions.end()
        self._graph_parts.clear()
        self.end_backward()

    def let_go_of_oldest_read(self, wanted: Collection[int] = ()) -> bool:
        """Let go of what the caller read first outside of modules, unless wanted; tell whether.

        Nothing shows when the caller has done with such a read, so it is held until its memory is
        needed.
        """
        return self._frames.let_go_of_oldest_read(wanted)

    def end_backward(self) -> None:
        """Let go of what the backward of a leaf holds. No backward is running."""
        self._frames.end(self._leaves.frame)

    def prepare_backward(self, loss: torch.Tensor) -> None:
        """Let custom functions in the graph of a loss find the parameters that they keep."""
        self._functions.prepare_backward(loss)

    def used_outside(self, loss: torch.Tensor) -> list[str]:
        """Return the names of the parameters that a loss uses and that no module used for it."""
        used = [id(tensor) for tensor in self._graph_parts.used_outside(loss)]
        numbers = sorted(self._numbers[key] for key in used if key in self._numbers)
        return [self._parameters[number].name for number in numbers]

    # --- modules ----------------------------------------------------------------------------------

    def _before(self, module: torch.nn.Module) -> None:
        use, frame = self._uses[id(module)], _Frame(module)
        # Only `_outside` is there: this is the outermost call.
        if len(self._frames.modules) == 1:
            self._frames.asked_now.clear()
            self._fetcher.begin_pass()
            self._graph_parts.begin()
            if self._hooks.can_save():
                # This module was called past the engine. Without the hooks, autograd would save
                # the parameter itself, and read NaN from it in the backward.
                frame.save_with(self._saved.saving())
        self._frames.modules.append(frame)
        if use.parameters:
            self._frames.ask(use, frame)

    def _after(self, module: torch.nn.Module, output: object) -> None:
        """End the module's frame, and frames inside it that an exception left behind."""
        frames = self._frames.modules
        # A module inside that raised may not have reached its own hook.
        at = len(frames) - 1
        while at and frames[at].module is not module:
            at -= 1
        # 0: the frame is gone, as frames of an interrupted call are ended.
        if at:
            # What the module returns stays for its caller, which may use it outside of any module.
            for number in self._returned(output):
                self._frames.hold(number, frames[at - 1])
            self._frames.end_modules(at)
        if at == 1:
            self._graph_parts.end()
            if self._hooks.transforms_nothing():
                self._check_output(output)
                self._functions.prepare(output)
            # None: it has raised, or its end cannot be predicted from what it returned.
            if output is not None and not any(
                tensor.requires_grad for tensor in tensors_in(output)
            ):
                self._fetcher.end_pass()
        use = self._leaves.uses.get(id(module))
        # Hooks of the outputs: full-backward hooks of modules do not see outputs in dicts.
        if use is not None:
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    self._hooks.before_backward(tensor, partial(self._before_backward, use))

    def _check_output(self, output: object) -> None:
        """Look for NaN in the outermost module's output: unseen parameters read as NaN.

        Raises:
            RuntimeError: there is NaN, and some parameters were never asked for; names them.
        """
        if output is None:
            return  # it has raised
        unseen = [number for number in self._parameters if number not in self._frames.asked_now]
        unseen = [number for number in unseen if number not in self._fetcher.shown]
        if not unseen or not any(map(_has_nan, tensors_in(output))):
            return
        never = [number for number in unseen if number not in self._frames.asked]
        named = listed([self._parameters[number].name for number in never or unseen])
        when = "yet" if never else "in this call"
        text = (
            f"The model returned NaN, and no module has asked for {named} {when}. If plain PyTorch "
            "returns other values, your code uses them where the engine cannot see it, such as "
            "through a list: they read as NaN. Call engine.register_external(module, parameter) "
            "once for the module that uses each, or call the model under `with "
            "engine.gathered(parameters)`"
        )
        if never:
            raise RuntimeError(text)
        warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _before_backward(self, use: Use) -> None:
        """Hold all parameters of a leaf on every rank, until another leaf's backward begins."""
        # Several outputs of one leaf come here: it is gathered once.
        if not self._leaves.frame.held.keys() >= set(use.parameters):
            self._frames.end(self._leaves.frame)
            self._frames.ask(use, self._leaves.frame)

    def _read(self, parameter: object) -> None:
        # By identity: buffers and other attributes are no parameters.
        number = self._numbers.get(id(parameter))
        held, shown = self._frames.modules[-1].held, self._fetcher.shown
        if number is not None and not (number in held and number in shown):
            self._hooks.signals.holding(self._ask_for)(number)

    def _ask_for(self, number: int) -> None:
        """Have a parameter that code reads until the running module returns."""
        self._frames.ask(self._parameters[number].read, self._frames.modules[-1])

    def _returned(self, output: object) -> Iterable[int]:
        """Return the parameters in the output of a module."""
        if isinstance(output, torch.Tensor):
            number = self._numbers.get(id(output))
            return () if number is None else (number,)
        found = (self._numbers.get(id(tensor)) for tensor in tensors_in(output))
        return [number for number in found if number is not None]


class UnwatchedModules:
    """Stands where modules have all their parameters all the time: no hook watches them."""

    fetches = False

    def __init__(self, model: torch.nn.Module, hooks: Hooks, activations: SavedTensors) -> None:
        self._model = weakref.ref(model)
        self._hooks = hooks
        self._activations = activations
        self._external: weakref.WeakKeyDictionary[torch.nn.Module, list[torch.nn.Parameter]] = (
            weakref.WeakKeyDictionary()
        )

    def register_external(self, module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
        """Note it for second runs: the module finds the parameter where it is."""
        known = self._external.setdefault(module, [])
        if all(other is not parameter for other in known):
            known.append(parameter)

    def gathered(self, numbers: Iterable[int]) -> None:
        """Do nothing."""

    def check_asked(self, number: int) -> None:
        """Do nothing: whatever used the parameter had its values."""

    def prepare_backward(self, loss: torch.Tensor) -> None:
        """Do nothing: custom functions find the parameters that they keep."""

    def used_outside(self, loss: torch.Tensor) -> list[str]:
        """Return nothing: what is used outside of modules has its values."""
        return []

    def saving(self) -> AbstractContextManager[None]:
        """Let autograd save parameters as they are in the body, and the rest where it is kept."""
        model = self._model()
        if model is None or not self._activations.offloads:
            return nullcontext()
        self._activations.begin_forward(_own_of(members_of(model)))
        return self.saving_again()

    def saving_again(self) -> AbstractContextManager[None]:
        """Save in the body as `saving` does. The body runs modules again for a backward."""
        return self._hooks.saving(self._activations.pack, self._activations.unpack)

    def versions_of(
        self, used: Mapping[str, torch.Tensor], modules: Mapping[str, torch.nn.Module]
    ) -> dict[str, int]:
        """Return how often each of these was changed, and each parameter that is registered as
        external of these modules.
        """
        return {
            **{name: version_of(tensor) for name, tensor in used.items()},
            **{
                f"external parameter {number} of {name or 'its own'}": version_of(parameter)
                for name, module in modules.items()
                for number, parameter in enumerate(self._external.get(module, ()))
            },
        }

    def let_go(self) -> None:
        """Do nothing."""

    def let_go_of_oldest_read(self, wanted: Collection[int] = ()) -> bool:
        """Return False: nothing is held."""
        return False

    def end_backward(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def _own_of(members: ModuleMembers) -> list[torch.Tensor]:
    """Return the tensors that are a model's own."""
    return [*members.parameters.values(), *members.buffers.values()]


def tensors_in(output: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in the output of a module."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for part in output.values():
            yield from tensors_in(part)
    elif isinstance(output, list | tuple):
        for part in output:
            yield from tensors_in(part)
    elif is_dataclass(output) and not isinstance(output, type):
        for part in fields(output):
            yield from tensors_in(getattr(output, part.name, None))


def _has_nan(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor that can be looked at without waiting for a device has NaN."""
    looks = tensor.is_floating_point() and tensor.device.type == "cpu"
    return looks and bool(tensor.isnan().any())


def listed(names: Sequence[str]) -> str:
    """Return the first names of several, for a message."""
    return ", ".join(names[:_MOST_NAMED]) + (" and others" if len(names) > _MOST_NAMED else "")
