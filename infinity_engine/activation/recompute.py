"""`BlockCall`: one call of a block whose saved tensors are made again by running it again.

Autograd holds a `Placeholder` for each tensor that the block saved. The first one that a backward
asks for runs the block once more, which fills all of them. Decision 0049.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeVar

import torch

from infinity_engine.activation.blocks import ModuleMembers, RepeatedBlock
from infinity_engine.activation.lifetimes import CallLife
from infinity_engine.activation.saved import (
    ChangedInPlaceError,
    KeptActivations,
    SavedTensors,
)
from infinity_engine.activation.surroundings import Surroundings

__all__ = ["AllMadeAgain", "BlockCall", "Placeholder", "UnknownArgument", "without_cache"]

# What is the same for a second run, whatever happens between.
_CONSTANT = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    slice,
    Enum,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.nn.Module,
    torch.nn.Parameter,
    types.FunctionType,
    types.BuiltinFunctionType,
)
_CACHE = ("transformers.cache_utils", "Cache")
_Kind = TypeVar("_Kind")


# An Exception: torch runs the hooks that end a module's call after these only.
class AllMadeAgain(Exception):  # noqa: N818  # no error: it ends the second run early
    """Everything that the block has saved is there again."""


class UnknownArgument(Exception):  # noqa: N818  # never leaves this room
    """An argument of a block is an object that may have changed when the block runs again."""


class Placeholder:
    """What autograd holds in place of a tensor that a block has saved."""

    __slots__ = ("__weakref__", "asked_in", "call", "like", "packed")

    def __init__(self, call: BlockCall, tensor: torch.Tensor, packed: object) -> None:
        self.call = call
        self.like = _Like.of(tensor)
        self.packed: object | None = packed  # None: the block has to run again
        self.asked_in: int | None = None  # the backward that has had it

    def fill(self, packed: object) -> None:
        """Have what was made again."""
        self.packed = packed

    def drop(self) -> None:
        """Hold the tensor no longer: it is made again when it is asked for."""
        self.packed = None

    def ask_again(self) -> None:
        """Let the next second run fill it, whichever backward that is for."""
        self.asked_in = None

    def take(self, task: int) -> object:
        """Return what was made, and hold it no longer: most backwards ask once."""
        packed, self.packed, self.asked_in = self.packed, None, task
        return packed


class _Like(NamedTuple):
    """What a tensor that was made again must have in common with the first one."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Like:
        # A nested tensor has no shape, but a number of parts.
        shape = (tensor.size(0),) if tensor.is_nested else tuple(tensor.shape)
        # Without the call in Python that a NamedTuple's own constructor costs: one for each tensor.
        return tuple.__new__(cls, (tensor.dtype, shape, tensor.device))


class BlockCall:
    """One call of a block; `life` counts what it holds."""

    def __init__(self, block: RepeatedBlock, arguments: _Arguments, life: CallLife) -> None:
        self.block = block
        self.life = life
        self.runs_again = True
        self._arguments = arguments
        self._kept = KeptActivations()
        modules = (block.module, *(module for module, _ in arguments.modules))
        self._surroundings = Surroundings.now(modules, arguments.device)
        self._placeholders: list[weakref.ref[Placeholder]] = []
        self._made = 0  # of a second run
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # to a second run
        self._task = -1  # the backward that a second run is for
        self.has_dropped = False  # the first run has ended, and what it saved is made again
        # What the first run used, by name, and its versions after it.
        self._first: tuple[Mapping[str, torch.Tensor], Mapping[str, int]] = ({}, {})

    @staticmethod
    def arguments(
        block: RepeatedBlock,
        given: tuple[tuple[Any, ...], Mapping[str, Any]],
        save: Callable[[torch.Tensor], tuple[SavedTensors, object]],
    ) -> _Arguments:
        """Return the arguments of a call, each tensor as `save` keeps it.

        Raises:
            UnknownArgument: one is an object that the engine does not know.
        """
        return _Arguments.of(block, given, save)

    # --- the first run ----------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Placeholder:
        """Return what is saved in place of a tensor, which stays until the block has ended."""
        placeholder = Placeholder(self, tensor, self._kept.pack(tensor))
        self._placeholders.append(weakref.ref(placeholder))
        return placeholder

    @property
    def given_buffers(self) -> bool:
        """Whether a module among its arguments has buffers."""
        return self._arguments.have_buffers

    def given(self) -> dict[str, torch.Tensor]:
        """Return the parameters that modules among its arguments have now, by name."""
        return self._arguments.parameters_of_modules()

    def used(self, now: ModuleMembers) -> dict[str, torch.Tensor]:
        """Return by name what the block uses and what is not saved: the parameters and buffers that
        it has `now`, and parameters that it was given.
        """
        return {
            **now.parameters,
            **now.buffers,
            **self._arguments.parameters,
            **self.given(),
        }

    def modules(self, now: ModuleMembers) -> dict[str, torch.nn.Module]:
        """Return by name the modules in the block `now`, and those that it was given with it."""
        return {**now.modules, **self._arguments.single_modules()}

    @property
    def saves_nothing(self) -> bool:
        """Whether nothing that this call has saved is asked for again."""
        return not self._placeholders

    def keep(self) -> None:
        """Keep what the block has saved: it cannot run again, or need not."""
        self.runs_again = False

    def drop_saved(self, used: Mapping[str, torch.Tensor], versions: Mapping[str, int]) -> None:
        """Let what the block has saved go: from here on, it is made again, with what it has `used`,
        in these versions.
        """
        self._first, self.has_dropped = (used, versions), True
        for reference in self._placeholders:
            placeholder = reference()
            if placeholder is not None:
                placeholder.drop()

    # --- the second run ---------------------------------------------------------------------------

    def check_values(self, now: Mapping[str, torch.Tensor], versions: Mapping[str, int]) -> None:
        """Refuse a second run with other parameters or buffers than those of the first.

        Raises:
            ChangedInPlaceError: one of them has changed since.
            RuntimeError: one was added, removed or replaced since.
        """
        before, then = self._first
        names = (*now, *before)
        replaced = next((name for name in names if now.get(name) is not before.get(name)), None)
        if replaced is not None:
            raise RuntimeError(
                f"{self.block.name} has to run again for the backward, but its {replaced} is "
                "another tensor than when it ran. Call backward() before your code replaces it, or "
                'let blocks keep what they save: set activations.at to "device" and '
                'activations.recompute to "nothing"'
            )
        # One that was registered as external since is of later calls.
        changed = next((name for name in then if versions.get(name) != then[name]), None)
        if changed is not None:
            raise ChangedInPlaceError(
                f"{self.block.name} has to run again for the backward, but its {changed} has "
                "changed since it ran, by engine.step(), by a body of engine.gathered(modify=True) "
                "or by your code. Call backward() before that, or run the model again. Or let "
                'blocks keep what they save: set activations.at to "device" and '
                'activations.recompute to "nothing"'
            )

    def unpack(
        self, placeholder: Placeholder, saving: Callable[[], AbstractContextManager[None]]
    ) -> object:
        """Return what autograd asks for, made again where that is needed.

        Raises:
            RuntimeError: the second run did something else than the first.
            TransferError: an input could not be read back.
        """
        if not self.runs_again:
            assert placeholder.packed is not None, "it is kept"
            return placeholder.packed
        self._task = torch._C._current_graph_task_id()
        if placeholder.packed is None:
            # Also one that this backward has had already gets its tensor once more.
            placeholder.ask_again()
            self._run_again(saving)
        if placeholder.packed is None:
            raise self._differs("it saved fewer tensors than before")
        return placeholder.take(self._task)

    def pack_again(self, tensor: torch.Tensor) -> object:
        """Fill the next placeholder.

        Raises:
            AllMadeAgain: it was the last one.
            RuntimeError: the tensor is another one than in the first run.
        """
        packed = self._kept.pack(tensor)
        if self._made < len(self._placeholders):
            placeholder = self._placeholders[self._made]()
            # What this backward has had is not made again for later ones.
            if placeholder is not None and placeholder.asked_in != self._task:
                if placeholder.like != _Like.of(tensor):
                    raise self._differs(
                        f"it saved a tensor of shape {tuple(tensor.shape)} and {tensor.dtype} in "
                        f"place of one of shape {placeholder.like.shape} and "
                        f"{placeholder.like.dtype}"
                    )
                placeholder.fill(packed)
        self._made += 1
        if self._made == len(self._placeholders):
            raise AllMadeAgain
        return packed

    def take_given(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments of the second run as they were in the first, once."""
        given, self._given = self._given, None
        return given

    def _run_again(self, saving: Callable[[], AbstractContextManager[None]]) -> None:
        try:
            args, kwargs = self._given = self._arguments.restored()
        except ChangedInPlaceError as error:
            raise ChangedInPlaceError(
                f"{self.block.name} has to run again for the backward, but its input has changed "
                f"since it ran. {error}. Or let blocks keep what they save: set activations.at to "
                '"device" and activations.recompute to "nothing"'
            ) from None
        self._made = 0
        around = self._surroundings.restored()
        with around, torch.enable_grad(), saving(), suppress(AllMadeAgain):
            self.block.module(*args, **kwargs)

    def _differs(self, how: str) -> RuntimeError:
        return RuntimeError(
            f"{self.block.name} was run again for the backward, and {how}. Its forward depends on "
            "something that has changed since, such as an attribute of a module, so its gradients "
            'would be wrong. Set activations.at to "device" and activations.recompute to '
            '"nothing", or let the forward depend on its arguments only'
        )


# --- arguments ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Saved:
    """A tensor among the arguments."""

    keeper: SavedTensors
    packed: object
    requires_grad: bool

    def tensor(self) -> torch.Tensor:
        # Without its graph: the second run ends at the block's inputs.
        return self.keeper.unpack(self.packed).detach().requires_grad_(self.requires_grad)


@dataclass(frozen=True, slots=True)
class _Arguments:
    """Positional and keyword arguments with `_Saved` in place of tensors, and the device of one.

    `parameters`, by name, are not saved, nor is anything of `modules`: they stay anyway. Each of
    these has its way to the block, if that is inside it.
    """

    given: Any
    device: torch.device
    parameters: Mapping[str, torch.Tensor]
    modules: Sequence[tuple[torch.nn.Module, Sequence[torch.nn.Module] | None]]

    @classmethod
    def of(
        cls,
        block: RepeatedBlock,
        given: tuple[tuple[Any, ...], Mapping[str, Any]],
        save: Callable[[torch.Tensor], tuple[SavedTensors, object]],
    ) -> _Arguments:
        devices: list[torch.device] = []
        by_id: dict[int, _Saved] = {}

        # One tensor stays one: attention computes otherwise where its keys are its queries.
        def saved(tensor: torch.Tensor) -> _Saved:
            if id(tensor) not in by_id:
                devices.append(tensor.device)
                by_id[id(tensor)] = _Saved(*save(tensor), tensor.requires_grad)
            return by_id[id(tensor)]

        args, kwargs = given
        stored = _mapped((args, dict(kwargs)), torch.Tensor, saved)
        # A position or a mask may be on the CPU beside states on a device.
        on_device = (device for device in devices if device.type != "cpu")
        parameters = enumerate(_once(_within((args, kwargs), torch.nn.Parameter)))
        modules = _once(_within((args, kwargs), torch.nn.Module))
        return cls(
            stored,
            next(on_device, torch.device("cpu")),
            {f"parameter {number} among its arguments": tensor for number, tensor in parameters},
            tuple((module, _way_to(block.module, module, set())) for module in modules),
        )

    @property
    def have_buffers(self) -> bool:
        """Whether modules have buffers, but those that have the block inside."""
        outside = (module for module, way in self.modules if way is None)
        return any(next(module.buffers(), None) is not None for module in outside)

    def single_modules(self) -> dict[str, torch.nn.Module]:
        """Return by name the modules that the block may use: of one that has it inside, such as the
        model, those on the way to it. One block uses next to nothing of the others.
        """
        return {
            f"module {place} of module {number} among its arguments": inner
            for number, (module, way) in enumerate(self.modules)
            for place, inner in enumerate(module.modules() if way is None else way)
        }

    def parameters_of_modules(self) -> dict[str, torch.Tensor]:
        """Return the parameters that these have now, by name."""
        return {
            f"{name} of {place}": parameter
            for place, inner in self.single_modules().items()
            for name, parameter in inner.named_parameters(recurse=False)
        }

    def restored(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        by_id: dict[int, torch.Tensor] = {}

        def tensor(saved: _Saved) -> torch.Tensor:
            if id(saved) not in by_id:
                by_id[id(saved)] = saved.tensor()
            return by_id[id(saved)]

        args, kwargs = _mapped(self.given, _Saved, tensor)
        return args, kwargs


def _mapped(value: Any, kind: type, change: Callable[[Any], object]) -> Any:
    """Return the same containers with each value of a kind changed."""
    if isinstance(value, _CONSTANT):
        return value
    if isinstance(value, kind):
        return change(value)
    if type(value) in {tuple, list}:
        return type(value)(_mapped(part, kind, change) for part in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(part, kind, change) for part in value))
    if type(value) is dict:
        return {name: _mapped(part, kind, change) for name, part in value.items()}
    raise UnknownArgument(type(value).__name__)


def _within(value: object, kind: type[_Kind]) -> Iterator[_Kind]:
    """Yield what there is of a kind in containers within one another."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _within(part, kind)
    elif isinstance(value, Mapping):
        yield from _within(tuple(value.values()), kind)


def _once(found: Iterable[_Kind]) -> tuple[_Kind, ...]:
    """Return each object once: tensors are not to be compared by value."""
    return tuple({id(value): value for value in found}.values())


def _way_to(
    block: torch.nn.Module, module: torch.nn.Module, seen: set[int]
) -> list[torch.nn.Module] | None:
    """Return a module and those inside it that have a block inside them; None: it has not."""
    if module is block:
        return []
    if id(module) in seen:
        return None
    seen.add(id(module))
    for child in module.children():
        way = _way_to(block, child, seen)
        if way is not None:
            return [module, *way]
    return None


def without_cache(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a layer of Transformers without an empty cache of keys and values.

    A layer adds to it in each run. Transformers leaves it out as well where it recomputes.
    """
    if not any(map(_is_empty_cache, (*args, *kwargs.values()))):
        return args, dict(kwargs)
    changed = {name: None if _is_empty_cache(value) else value for name, value in kwargs.items()}
    if changed.get("use_cache") is True:
        changed["use_cache"] = False
    return tuple(None if _is_empty_cache(value) else value for value in args), changed


def _is_empty_cache(value: object) -> bool:
    # By name: a model of Transformers may not be among what is trained, and its import is slow.
    return (
        any((base.__module__, base.__name__) == _CACHE for base in type(value).__mro__)
        and int(value.get_seq_length()) == 0  # type: ignore[attr-defined]  # caches have it
    )
