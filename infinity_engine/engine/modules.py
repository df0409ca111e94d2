"""`ModuleParameters`: sees who needs which parameters, and lets the fetcher bring them.

A module that is about to run needs its own; whoever reads `module.weight` needs that one; the backward needs what was
saved for it. What a running module asked for stays until it returns, and is its caller's if it returns it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from infinity_engine.engine.fetching import ParameterFetcher
from infinity_engine.engine.hooks import Hooks
from infinity_engine.engine.parameters import ModelParameter
from infinity_engine.errors import ConfigError
from infinity_engine.schedule import Use

__all__ = ["ModuleParameters", "check_modules"]


def check_modules(model: torch.nn.Module) -> None:
    """Refuse modules whose parameters cannot be fetched.

    Raises:
        ConfigError: one does not run in Python.
    """
    for name, module in model.named_modules():
        compiled = "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
        if compiled or isinstance(module, torch.jit.ScriptModule):
            expected = (
                "a module that is not compiled, as parameters are fetched around modules: what is compiled reads them "
                'where no hook can fetch them. Give the device a larger budget and parameters="device", or do not '
                "compile it"
            )
            raise ConfigError(field=f"module {name or 'model'}", value=type(module).__name__, expected=expected)


@dataclass(slots=True)
class _Frame:
    """A module that is running, the parameters that are held for it, and what keeps them from being saved."""

    module: torch.nn.Module | None
    saving: AbstractContextManager[None] | None = None
    held: set[int] = field(default_factory=set)

    def save_with(self, saving: AbstractContextManager[None]) -> None:
        """Let these hooks be the ones that count until the frame's end."""
        saving.__enter__()
        self.saving = saving

    def take(self) -> tuple[AbstractContextManager[None] | None, set[int]]:
        """Return what is to be ended, and have nothing more."""
        saving, held = self.saving, self.held
        self.saving, self.held = None, set()
        return saving, held


@dataclass(frozen=True, slots=True)
class _SavedParameter:
    """What is saved for the backward in place of a view of a parameter."""

    number: int
    version: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements of dtype


@dataclass(frozen=True, slots=True)
class _SavedTensor:
    """Anything else that is saved, and the version that it had."""

    tensor: torch.Tensor
    version: int


class ModuleParameters:
    """The uses that the modules of one model make of `parameters`."""

    def __init__(
        self, model: torch.nn.Module, parameters: Sequence[ModelParameter], fetcher: ParameterFetcher, hooks: Hooks
    ) -> None:
        self._fetcher = fetcher
        self._hooks = hooks
        self._names = {each.number: each.name for each in parameters}
        self._saved_uses = {each.number: Use(f"{each.name}, as saved", (each.number,)) for each in parameters}
        self._read_uses = {each.number: Use(each.name, (each.number,)) for each in parameters}
        self._numbers = {id(each.parameter): each.number for each in parameters if each.numel}
        self._outside = _Frame(None)
        self._frames = [self._outside]
        for name, module in model.named_modules():
            own = tuple(
                self._numbers[id(each)] for each in module.parameters(recurse=False) if id(each) in self._numbers
            )
            if own:
                hooks.on_read(module, self._read)
            if own or any(id(each) in self._numbers for each in module.parameters()):
                hooks.on_call(module, self._before(Use(name or "the model", own)), self._after)

    def saving(self) -> AbstractContextManager[None]:
        """Let nothing in the body save parameters for the backward, which fetches them again instead."""
        return self._hooks.saving(self._pack, self._unpack)

    def let_go(self) -> None:
        """Let go of all that is held: no module is running, and nobody needs what was read outside of one any more."""
        frames, self._frames = self._frames, [self._outside]
        for frame in reversed(frames):
            self._end(frame)

    # --- modules --------------------------------------------------------------------------------------------------

    def _before(self, use: Use) -> Callable[[torch.nn.Module], None]:
        def before(module: torch.nn.Module) -> None:
            frame = _Frame(module)
            if len(self._frames) == 1 and self._hooks.nobody_saves():
                # A parameter that autograd saves as it is, it reads as modules see it by then.
                frame.save_with(self.saving())
            self._frames.append(frame)
            if use.parameters:
                self._ask(use, frame)

        return before

    def _after(self, module: torch.nn.Module, output: object) -> None:
        """End the module's frame, and those within that an exception left behind."""
        at = next((at for at in reversed(range(len(self._frames))) if self._frames[at].module is module), None)
        if at is None:
            return
        ended, self._frames = self._frames[at:], self._frames[:at]
        for number in self._returned(output):
            self._hold(number, self._frames[-1])
        for frame in reversed(ended):
            self._end(frame)

    def _end(self, frame: _Frame) -> None:
        saving, held = frame.take()
        if saving is not None:
            saving.__exit__(None, None, None)
        self._fetcher.let_go(held)

    def _read(self, parameter: object) -> None:
        number = self._numbers.get(id(parameter))
        frame = self._frames[-1]
        if number is None or (number in frame.held and self._fetcher.is_shown(number)):
            return
        self._ask(self._read_uses[number], frame)

    def _ask(self, use: Use, frame: _Frame) -> None:
        self._fetcher.need(use)
        for number in use.parameters:
            self._hold(number, frame)

    def _hold(self, number: int, frame: _Frame) -> None:
        if number not in frame.held:
            frame.held.add(number)
            self._fetcher.hold((number,))

    def _returned(self, output: object) -> Iterable[int]:
        """Yield the parameters that are in what a module returns."""
        if isinstance(output, torch.Tensor):
            number = self._numbers.get(id(output))
            return () if number is None else (number,)
        if isinstance(output, Mapping):
            output = tuple(output.values())
        if isinstance(output, list | tuple):
            return [number for each in output for number in self._returned(each)]
        return ()

    # --- what is saved --------------------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> object:
        number = None
        if tensor.layout == torch.strided and tensor.numel():
            number = self._fetcher.number_at(tensor.untyped_storage().data_ptr())
        if number is None:
            return _SavedTensor(tensor, tensor._version)
        return _SavedParameter(
            number=number,
            version=self._fetcher.version,
            dtype=tensor.dtype,
            size=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
        )

    def _unpack(self, saved: object) -> torch.Tensor:
        if isinstance(saved, _SavedTensor):
            if saved.tensor._version != saved.version:
                raise RuntimeError(
                    "a tensor that the backward needs was modified by an in-place operation after it was saved: it was "
                    f"at version {saved.version} and is at version {saved.tensor._version}, of shape "
                    f"{tuple(saved.tensor.shape)}"
                )
            return saved.tensor
        assert isinstance(saved, _SavedParameter), "what is saved is one of the two"
        if saved.version != self._fetcher.version:
            raise RuntimeError(
                f"the backward needs {self._names[saved.number]} as it was before engine.step(), which has updated it: "
                "call backward before step, and forward again for another backward"
            )
        self._fetcher.need(self._saved_uses[saved.number])
        flat = self._fetcher.fetched(saved.number).view(saved.dtype)
        return flat.as_strided(saved.size, saved.stride, saved.offset)
