"""Lets the `tie_weights()` of models, such as those of Transformers, work beside layers in tiles.

It knows whole weights only. Weights that were tied are still tied when they are in tiles.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from infinity_engine.tiling.weights import TiledWeight

__all__ = ["forget_tying", "tie_beside_tiles"]

_TIE = "tie_weights"


def tie_beside_tiles(model: torch.nn.Module) -> None:
    """Let `tie_weights()` of modules with tiles inside tie what is not in tiles."""
    for module in model.modules():
        if callable(getattr(type(module), _TIE, None)) and any(
            isinstance(inside, TiledWeight) for inside in module.modules()
        ):
            module.__dict__.setdefault(_TIE, _TyingBesideTiles(module))


def forget_tying(model: torch.nn.Module) -> None:
    """Let modules tie as their class does: the tiles have gone."""
    for module in model.modules():
        if isinstance(module.__dict__.get(_TIE), _TyingBesideTiles):
            module.__dict__.pop(_TIE)


class _TyingBesideTiles:
    """`tie_weights()` of a module that has it as an attribute, and is not kept by it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)

    def __reduce__(self) -> tuple[type[_TyingBesideTiles], tuple[torch.nn.Module | None]]:
        return _TyingBesideTiles, (self._module(),)  # so that a copy is of the module's copy

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        """Tie what is not in tiles.

        Raises:
            RuntimeError: it would tie a weight in tiles to another one. Nothing has changed.
        """
        module = self._module()
        assert module is not None, "it is an attribute of its module"
        with _stand_ins(module) as weights:
            before = dict(module.named_parameters(remove_duplicate=False))
            result: object = getattr(type(module), _TIE)(module, *args, **kwargs)
            after = dict(module.named_parameters(remove_duplicate=False))
            changed = [name for name in after if after[name] is not before.get(name)]
            refused = [
                name for name in changed if {id(after[name]), id(before.get(name))} & weights
            ]
            if refused:
                for name in changed:
                    owner, _, own = name.rpartition(".")
                    module.get_submodule(owner).register_parameter(own, before.get(name))
                raise RuntimeError(
                    f"{_TIE}() would tie {refused[0]} to a weight that it was not tied to when "
                    "layers were cut into tiles, and one of the two is in tiles. Call "
                    f"{_TIE}() before the layers are cut, by tile() or by "
                    'tiling="auto". Weights that were tied then are still tied'
                )
        return result


class _StandIn(torch.nn.Module):
    """A layer of a weight without values, in place of a tiled one."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


@contextmanager
def _stand_ins(module: torch.nn.Module) -> Iterator[set[int]]:
    """Have layers without values in place of tiled ones; yield the ids of their weights."""
    weights: dict[int, torch.nn.Parameter] = {}  # by the first tile: the same tiles are one weight
    places = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent._modules.items()
        if isinstance(child, TiledWeight)
    ]
    for parent, name, child in places:
        shape = child.rows.length, child.columns.length
        weight = torch.nn.Parameter(torch.empty(shape, device="meta"))
        first = id(child.whole_values().tiles[0])
        parent._modules[name] = _StandIn(weights.setdefault(first, weight))
    try:
        yield {id(weight) for weight in weights.values()}
    finally:
        for parent, name, child in places:
            parent._modules[name] = child
