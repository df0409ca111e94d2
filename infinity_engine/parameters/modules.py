"""`ModuleParameters`: sees who needs which parameters, and lets the fetcher bring them.

A module that is about to run needs its own; whoever reads `module.weight` needs that one; the
backward needs what was saved for it. What a running module asked for stays until it returns, and is
its caller's if it returns it.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch

from infinity_engine.errors import CapacityError, ConfigError
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
    "tensors_in",
]


def check_modules(model: torch.nn.Module) -> None:
    """Refuse modules whose parameters cannot be fetched.

    Raises:
        ConfigError: one does not run in Python.
    """
    for name, module in model.named_modules():
        if is_compiled(module):
            expected = (
                "a module that is not compiled, as parameters are fetched around modules: what is "
                "compiled reads them where no hook can fetch them. Give the device a larger budget "
                'and parameters="device", or do not compile it'
            )
            raise ConfigError(
                field=f"module {name or 'model'}", value=type(module).__name__, expected=expected
            )


def is_compiled(module: torch.nn.Module) -> bool:
    """Tell whether a module does not run in Python, so that hooks may not see what it reads."""
    compiled = (
        "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
    )
    return compiled or isinstance(module, torch.jit.ScriptModule)


def leaves_of(model: torch.nn.Module, names: Iterable[str]) -> frozenset[str]:
    """Return the modules that these name, or whose classes they name: one within another is not
    one.

    Raises:
        ConfigError: a name is that of none.
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
    return frozenset(path for path in found if not _within(path, found))


def _within(path: str, modules: Collection[str]) -> bool:
    """Tell whether a module is in one of these."""
    return any(path != other and (not other or path.startswith(f"{other}.")) for other in modules)


@dataclass(slots=True)
class _Frame:
    """A module that is running, the parameters that are held for it, and what keeps them from being
    saved.
    """

    module: torch.nn.Module | None
    saving: AbstractContextManager[None] | None = None
    held: dict[int, None] = field(default_factory=dict)  # in the order in which they came

    def save_with(self, saving: AbstractContextManager[None]) -> None:
        """Let these hooks be the ones that count until the frame's end."""
        saving.__enter__()
        self.saving = saving

    def take(self) -> tuple[AbstractContextManager[None] | None, dict[int, None]]:
        """Return what is to be ended, and have nothing more."""
        saving, held = self.saving, self.held
        self.saving, self.held = None, {}
        return saving, held


class _SavedParameter(NamedTuple):
    """What is saved for the backward in place of a view of a parameter."""

    number: int
    version: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements of dtype


class _SavedTensor(NamedTuple):
    """Anything else that is saved, and the version that it had.

    Not the very tensor: its graph would hold itself.
    """

    tensor: torch.Tensor
    version: int


class ModuleParameters:
    """The uses that the modules of one model make of `parameters`.

    A module of `leaves` uses all that is within it, as a whole: when it begins, and when its
    backward does.
    """

    fetches = True
    """Whether a parameter shows NaN where no module that needs it is running."""

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Sequence[ModelParameter],
        fetcher: ModuleProvider,
        hooks: Hooks,
        leaves: Collection[str] = (),
    ) -> None:
        # The engine has the model. This is among what closes an engine that was dropped.
        self._model = weakref.ref(model)
        self._fetcher = fetcher
        self._hooks = hooks
        self._names = {known.number: known.name for known in parameters}
        self._parameters = {known.number: known.parameter for known in parameters if known.numel}
        self._saved_uses = {
            known.number: Use(f"{known.name}, as saved", (known.number,)) for known in parameters
        }
        self._read_uses = {known.number: Use(known.name, (known.number,)) for known in parameters}
        self._numbers = {id(known.parameter): known.number for known in parameters if known.numel}
        self._outside = _Frame(None)
        self._frames = [self._outside]
        self._leaf = _Frame(None)  # of the one whose backward began last
        self._uses: dict[int, Use] = {}  # by modules' ids: what each needs when it is about to run
        self._leaf_uses: dict[int, Use] = {}  # likewise
        self._in_leaves: set[int] = set()
        self._leaf_of: dict[int, torch.nn.Module] = {}  # by ids of modules within one, and its own
        self._called: set[int] = set()  # modules, of which it is seen when they run
        self._asked: set[int] = set()  # what anybody has ever asked for
        self._closed = False
        for name, module in model.named_modules():
            is_leaf = name in leaves
            own = tuple(
                self._numbers[id(parameter)]
                for parameter in module.parameters(recurse=is_leaf)
                if id(parameter) in self._numbers
            )
            if is_leaf:
                self._leaf_of.update((id(inner), module) for inner in module.modules())
            self._uses[id(module)] = Use(name or "the model", own)
            if own or any(id(parameter) in self._numbers for parameter in module.parameters()):
                hooks.on_read(module, self._read)
                if is_leaf:
                    self._leaf_uses[id(module)] = Use(f"backward of {name or 'the model'}", own)
                    self._in_leaves.update(own)
                if not _within(name, leaves):
                    hooks.on_call(module, self._before, self._after)
                    self._called.add(id(module))

    def register_external(self, module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
        """Let a module have a parameter, from its next call on, as it has its own; one in a leaf,
        as the leaf has.

        Raises:
            ConfigError: the module has come to the model since the engine was made.
        """
        module = self._leaf_of.get(id(module), module)
        use, number = self._uses.get(id(module)), self._numbers.get(id(parameter))
        if use is None:
            expected = "one that was the model's when the engine was initialized"
            raise ConfigError(field="module", value=type(module).__name__, expected=expected)
        if number is None or number in use.parameters:
            return
        self._uses[id(module)] = replace(use, parameters=(*use.parameters, number))
        if id(module) in self._leaf_uses:
            leaf = self._leaf_uses[id(module)]
            self._leaf_uses[id(module)] = replace(leaf, parameters=(*leaf.parameters, number))
            self._in_leaves.add(number)
        if id(module) not in self._called:
            self._hooks.on_call(module, self._before, self._after)
            self._called.add(id(module))

    def gathered(self, numbers: Iterable[int]) -> None:
        """Note that somebody has these outside of modules."""
        self._asked.update(numbers)

    def check_asked(self, number: int) -> None:
        """Refuse a gradient of a parameter that nobody has ever asked for: it was used as NaN.

        Raises:
            RuntimeError: that is so.
        """
        if number in self._parameters and number not in self._asked:
            raise self._unseen(number)

    def never_asked(self) -> list[str]:
        """Return the names of the parameters that neither a module nor the caller has asked for so
        far.
        """
        if len(self._asked) >= len(self._parameters):
            return []
        return [self._names[number] for number in self._parameters if number not in self._asked]

    def saving(self) -> AbstractContextManager[None]:
        """Let nothing in the body save parameters for the backward, which fetches them again
        instead.

        The body calls the model: what an interrupted call has left behind ends here.

        Raises:
            ConfigError: a module has been compiled since the engine took the model over.
        """
        self._end_frames(1)
        model = self._model()
        if model is not None:
            check_modules(model)
        return self._hooks.saving(self._pack, self._unpack)

    def close(self) -> None:
        """Let go of everything for good: no graph that was made until now can be differentiated any
        more.
        """
        self.let_go()
        self._closed = True

    def let_go(self) -> None:
        """Let go of all that is held: no module is running, and nobody needs what was read outside
        of one any more.
        """
        self._end_frames(1)
        self._end(self._outside)
        self.end_backward()

    def let_go_of_oldest_read(self, wanted: Collection[int] = ()) -> bool:
        """Let go of the parameter that was read outside of modules first, unless it is wanted; tell
        if there is one.

        Nothing says when the caller's code has done with such a read: the value stays until its
        room is needed.
        """
        for number in self._outside.held:
            if number not in wanted:
                del self._outside.held[number]
                self._fetcher.resident.let_go((number,))
                return True
        return False

    def end_backward(self) -> None:
        """Let go of what the backward of a leaf has held: no backward is running."""
        self._end(self._leaf)

    # --- modules ----------------------------------------------------------------------------------

    def _before(self, module: torch.nn.Module) -> None:
        use, frame = self._uses[id(module)], _Frame(module)
        if len(self._frames) == 1 and self._hooks.can_save():
            # A parameter that autograd saves as it is, it reads as modules see it by then.
            frame.save_with(self._hooks.saving(self._pack, self._unpack))
        self._frames.append(frame)
        if use.parameters:
            self._ask(use, frame)

    def _after(self, module: torch.nn.Module, output: object) -> None:
        """End the module's frame, and those within that an exception left behind."""
        frames = self._frames
        at = len(frames) - 1
        while at and frames[at].module is not module:
            at -= 1
        if at:
            for number in self._returned(output):
                self._hold(number, frames[at - 1])
            self._end_frames(at)
        use = self._leaf_uses.get(id(module))
        if use is not None:
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    self._hooks.before_backward(tensor, partial(self._before_backward, use))

    def _before_backward(self, use: Use) -> None:
        """Have all of a leaf, on every rank, until the backward of another begins."""
        if not self._leaf.held.keys() >= set(use.parameters):
            self._end(self._leaf)
            self._ask(use, self._leaf)

    def _end_frames(self, at: int) -> None:
        """End the frames from there on, the innermost first."""
        while len(self._frames) > at:
            self._end(self._frames.pop())

    def _end(self, frame: _Frame) -> None:
        saving, held = frame.take()
        if saving is not None:
            saving.__exit__(None, None, None)
        self._fetcher.resident.let_go(held)

    def _read(self, parameter: object) -> None:
        number = self._numbers.get(id(parameter))
        frame = self._frames[-1]
        if number is None or (number in frame.held and number in self._fetcher.shown):
            return
        self._ask(self._read_uses[number], frame)

    def _ask(self, use: Use, frame: _Frame) -> None:
        while True:
            try:
                self._fetcher.need(use)
                break
            except CapacityError:
                if not self.let_go_of_oldest_read(use.parameters):
                    raise
        self._asked.update(use.parameters)
        for number in use.parameters:
            self._hold(number, frame)

    def _hold(self, number: int, frame: _Frame) -> None:
        if number not in frame.held:
            frame.held[number] = None
            self._fetcher.resident.hold((number,))

    def _returned(self, output: object) -> Iterable[int]:
        """Yield the parameters that are in what a module returns."""
        if isinstance(output, torch.Tensor):
            number = self._numbers.get(id(output))
            return () if number is None else (number,)
        if isinstance(output, Mapping):
            output = tuple(output.values())
        if isinstance(output, list | tuple):
            return [number for part in output for number in self._returned(part)]
        return ()

    # --- what is saved ----------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> object:
        number = None
        if (
            tensor.layout == torch.strided
            and tensor.numel()
            and not (tensor.is_conj() or tensor.is_neg())
        ):
            number = self._fetcher.shown.number_at(tensor.untyped_storage().data_ptr())
        if number is None:
            self._check_seen(tensor)
            return _SavedTensor(tensor.detach(), tensor._version)
        return _SavedParameter(
            number=number,
            version=self._fetcher.version_of(number),
            dtype=tensor.dtype,
            size=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
        )

    def _check_seen(self, tensor: torch.Tensor) -> None:
        """Refuse to save what is shown in place of a parameter that is not there."""
        storage = tensor.untyped_storage()
        if any(tensor.stride()) or storage.nbytes() != tensor.element_size() or tensor.numel() < 2:
            return
        for number, parameter in self._parameters.items():
            if (
                parameter.untyped_storage().data_ptr() == storage.data_ptr()
                and number not in self._fetcher.shown
            ):
                raise self._unseen(number)

    def _unseen(self, number: int) -> RuntimeError:
        return RuntimeError(
            f"{self._names[number]} was used where nobody could see that it is needed, and read as "
            "NaN: what a module has is fetched when it runs, and what it reads as an attribute of "
            "another one when it reads it; this came another way, such as a variable, a list or "
            "model.parameters(). Call engine.register_external(module, parameter) once for the "
            "module that uses it, or use it under `with engine.gathered(parameter)`"
        )

    def _unpack(self, saved: object) -> torch.Tensor:
        if isinstance(saved, _SavedTensor):
            if saved.tensor._version != saved.version:
                raise RuntimeError(
                    "a tensor that the backward needs was modified by an in-place operation after "
                    f"it was saved: it was at version {saved.version} and is at version "
                    f"{saved.tensor._version}, of shape {tuple(saved.tensor.shape)}"
                )
            return saved.tensor
        assert isinstance(saved, _SavedParameter), "what is saved is one of the two"
        number = saved.number
        if self._closed:
            raise RuntimeError(
                f"The engine was closed before this backward, which needs {self._names[number]}. A "
                "graph that was made under the engine ends with it. Call backward() before "
                "close(), or run the model again"
            )
        if saved.version != self._fetcher.version_of(number):
            raise RuntimeError(
                f"the backward needs {self._names[number]} as it was in the forward, and "
                "engine.step(), or somebody under engine.gathered(), has changed it since: call "
                "backward before that, and forward again for another one"
            )
        if number not in self._in_leaves or number not in self._fetcher.shown:
            self._fetcher.need(self._saved_uses[number])
        values = self._fetcher.shown.values(number)
        if values.dtype is not saved.dtype:
            values = values.view(-1).view(saved.dtype)
        return values.as_strided(saved.size, saved.stride, saved.offset)


class UnwatchedModules:
    """Stands where modules have all their parameters all the time: no hook watches them."""

    fetches = False

    def register_external(self, module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
        """Do nothing: the module finds the parameter where it is."""

    def gathered(self, numbers: Iterable[int]) -> None:
        """Do nothing."""

    def check_asked(self, number: int) -> None:
        """Do nothing: whatever used the parameter had its values."""

    def never_asked(self) -> list[str]:
        """Return nothing."""
        return []

    def saving(self) -> AbstractContextManager[None]:
        """Do nothing around the body: autograd saves the parameters themselves."""
        return nullcontext()

    def let_go(self) -> None:
        """Do nothing."""

    def let_go_of_oldest_read(self, wanted: Collection[int] = ()) -> bool:
        """Return False: nothing is held."""
        return False

    def end_backward(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def tensors_in(output: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in what a module returns."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for part in output.values():
            yield from tensors_in(part)
    elif isinstance(output, list | tuple):
        for part in output:
            yield from tensors_in(part)
