"""Finds the repeated blocks of a model in its module tree.

Pure functions of the tree: they read no values and run nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import NamedTuple

import torch

__all__ = [
    "ModuleMembers",
    "RepeatedBlock",
    "blocks_held_whole",
    "find_blocks",
    "members_of",
    "recomputing_modules",
]

_LISTS = (torch.nn.ModuleList, torch.nn.Sequential)


@dataclass(frozen=True, slots=True, eq=False)
class RepeatedBlock:
    """A module that is one of several alike; `kind` numbers those of one class and shape."""

    name: str
    module: torch.nn.Module
    kind: int
    parameters: tuple[torch.nn.Parameter, ...]

    def has_its_parameters(self, now: ModuleMembers) -> bool:
        """Tell whether the module has the parameters that it had when it was found.

        `functional_call` runs it with others, and code may add or replace one.
        """
        return list(map(id, now.parameters.values())) == list(map(id, self.parameters))


class ModuleMembers(NamedTuple):
    """A module and the modules inside it, and their parameters and buffers: each once, by name."""

    modules: Mapping[str, torch.nn.Module]
    parameters: Mapping[str, torch.nn.Parameter]
    buffers: Mapping[str, torch.Tensor]


def members_of(module: torch.nn.Module) -> ModuleMembers:
    """Return what `named_modules`, `named_parameters` and `named_buffers` of a module list now.

    In one walk, for what is asked at each call of a block: torch's nested generators take a hundred
    times as many calls.
    """
    modules: dict[str, torch.nn.Module] = {}
    # By id, as tensors are not to be compared by value; with their names.
    parameters: dict[int, tuple[str, torch.nn.Parameter]] = {}
    buffers: dict[int, tuple[str, torch.Tensor]] = {}
    seen, left = set(), [("", module)]
    while left:
        prefix, inner = left.pop()
        if id(inner) in seen:
            continue
        seen.add(id(inner))
        modules[prefix.removesuffix(".")] = inner
        for name, parameter in inner._parameters.items():
            if parameter is not None:
                parameters.setdefault(id(parameter), (prefix + name, parameter))
        for name, buffer in inner._buffers.items():
            if buffer is not None:
                buffers.setdefault(id(buffer), (prefix + name, buffer))
        # The first one is the next to be looked at.
        for name, child in reversed(inner._modules.items()):
            if child is not None:
                left.append((f"{prefix}{name}.", child))
    return ModuleMembers(modules, dict(parameters.values()), dict(buffers.values()))


def find_blocks(model: torch.nn.Module) -> tuple[RepeatedBlock, ...]:
    """Return the repeated blocks of a model, in the order of its modules.

    A block is a child of a `ModuleList` or `Sequential`, has modules of its own with parameters,
    and shares its class with other children of that list, of which two are alike: the parameters of
    one are those of the other, or some of them. (T5's first block has one parameter more.) Of lists
    within one another the outermost counts. A module that is listed twice is one block.
    """
    kinds: dict[object, int] = {}
    found: dict[int, RepeatedBlock] = {}
    for name, module in _candidates("", model):
        if id(module) not in found:
            kind = kinds.setdefault(_shape_of(module), len(kinds))
            parameters = members_of(module).parameters.values()
            found[id(module)] = RepeatedBlock(name, module, kind, tuple(parameters))
    return tuple(found.values())


def recomputing_modules(model: torch.nn.Module) -> tuple[str, ...]:
    """Return the names of the modules that recompute themselves, as Transformers marks them."""
    return tuple(
        name or "the model"
        for name, module in model.named_modules()
        if getattr(module, "gradient_checkpointing", False) is True
    )


def blocks_held_whole(model: torch.nn.Module) -> frozenset[str]:
    """Return the names of the blocks whose parameters a backward needs together.

    Torch's checkpoint, by which a model recomputes itself, holds all that a block has read until
    its backward ends. Its reentrant kind does not.
    """
    marked = {
        name: module
        for name, module in model.named_modules()
        if getattr(module, "gradient_checkpointing", False) is True
    }
    # Where Transformers keeps what a layer recomputes itself by.
    kinds = [getattr(module, "_gradient_checkpointing_func", None) for module in marked.values()]
    if all(isinstance(kind, partial) and kind.keywords.get("use_reentrant") for kind in kinds):
        return frozenset()
    blocks = [block.name for block in find_blocks(model)]
    found = {block for block in blocks if any(_is_within(block, name) for name in marked)}
    # A layer that is marked itself, but is like no other one.
    innermost = (
        name
        for name in marked
        if not any(name != other and _is_within(other, name) for other in (*marked, *blocks))
    )
    return frozenset(found.union(filter(None, innermost)))


def _is_within(name: str, other: str) -> bool:
    """Tell whether a module is another one, or within it; by their names."""
    return not other or name == other or name.startswith(f"{other}.")


def _candidates(name: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the blocks in a module, by their names."""
    children = list(module.named_children())
    chosen = _repeated_classes(module) if isinstance(module, _LISTS) else frozenset()
    for child_name, child in children:
        path = f"{name}.{child_name}" if name else child_name
        if type(child) in chosen and _is_composite(child):
            yield path, child
        else:
            yield from _candidates(path, child)


def _repeated_classes(modules: torch.nn.Module) -> frozenset[type]:
    """Return the classes of which the list has two modules that are alike."""
    by_class: dict[type, list[frozenset[object]]] = {}
    for child in modules.children():
        if _is_composite(child):
            by_class.setdefault(type(child), []).append(frozenset(_parameters_of(child)))
    return frozenset(
        kind
        for kind, children in by_class.items()
        if any(one <= other or other <= one for one, other in combinations(children, 2))
    )


def _is_composite(module: torch.nn.Module) -> bool:
    """Tell whether a module is called as one, and has modules and parameters.

    A ModuleList or ModuleDict has no forward of its own.
    """
    return (
        not isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict)
        and next(module.children(), None) is not None
        and next(module.parameters(), None) is not None
    )


def _shape_of(module: torch.nn.Module) -> object:
    """Return what two modules have in common that compute the same."""
    return (
        type(module),
        tuple((name, type(inner)) for name, inner in module.named_modules()),
        tuple(_parameters_of(module)),
    )


def _parameters_of(module: torch.nn.Module) -> Iterator[object]:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad
