"""Replaces the large layers of a model by tiled ones, cut as a pure function of sizes decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch.utils.weak import WeakIdKeyDictionary

from infinity_engine.errors import ConfigError
from infinity_engine.tiling.cuts import TileCut, cut_evenly
from infinity_engine.tiling.embedding import TiledEmbedding
from infinity_engine.tiling.linear import TiledLinear
from infinity_engine.tiling.sequence import SequenceTiles
from infinity_engine.units import parse_bytes

__all__ = ["Tiled", "plan_tiles", "replaceable", "tile", "tile_sequence", "tile_those"]


@dataclass(frozen=True, slots=True)
class Tiled:
    """What was replaced, and what could not be."""

    names: tuple[str, ...]
    """The paths of the replaced modules, as `named_modules()` has them."""
    left: Mapping[str, str]
    """Why each other large parameter stays whole, by the parameter's path."""
    # Weak: this keeps no replaced parameter in memory.
    _tiles: WeakIdKeyDictionary = field(repr=False)

    def in_place_of(self, parameters: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Return these parameters with the tiles of a replaced one in its place."""
        found: list[torch.nn.Parameter] = []
        for parameter in parameters:
            # torch has no annotations for it
            found += self._tiles.get(parameter, (parameter,))  # type: ignore[no-untyped-call]
        return found


def plan_tiles(rows: int, columns: int, width: int, limit: int) -> tuple[TileCut, TileCut]:
    """Return how to cut a weight, so that no tile takes more than `limit` bytes.

    An element has `width` bytes. Rows are cut first: what computes with a whole row has the bits of
    the whole weight. Columns are cut only where one row is too large.

    Raises:
        ConfigError: one element is too large.
    """
    if width > limit:
        expected = f"at least {width} B, which one element takes"
        raise ConfigError(field="limit", value=limit, expected=expected)
    row = columns * width
    if row <= limit:
        return cut_evenly(rows, limit // max(row, 1), multiple=8), TileCut(columns, max(columns, 1))
    return TileCut(rows, 1), cut_evenly(columns, limit // width, multiple=8)


def tile(model: torch.nn.Module, limit: int | str) -> Tiled:
    """Replace the linear layers and embeddings of `model` with weights above `limit` by tiled ones.

    Call it before the optimizer is made; or give the optimizer the tiles that `in_place_of` names.
    Tied weights stay tied. Only modules of exactly the classes `torch.nn.Linear` and
    `torch.nn.Embedding` are replaced; `left` of the result says of other large parameters why they
    are not. One weight at a time is in memory beside its tiles.

    Raises:
        ConfigError: the model itself is such a layer, or `limit` is below one element.
    """
    nbytes = parse_bytes(limit, field="limit")
    return tile_those(model, lambda parameter: parameter.nbytes > nbytes, nbytes)


def tile_those(
    model: torch.nn.Module, are_large: Callable[[torch.nn.Parameter], bool], limit: int
) -> Tiled:
    """Replace the layers with weights that `are_large` by ones with tiles of at most `limit` bytes.

    Raises:
        ConfigError: as `tile` says.
    """
    holders: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    large: dict[int, tuple[str, torch.nn.Parameter]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if are_large(parameter):
                holders.setdefault(id(parameter), []).append((module, name))
                large.setdefault(id(parameter), (f"{path}.{name}" if path else name, parameter))
    left: dict[str, str] = {}
    names: list[str] = []
    tiles = WeakIdKeyDictionary()
    for number in list(large):
        # Popped, so that a weight goes as soon as its tiles are there.
        path, parameter = large.pop(number)
        of_this = holders.pop(number)
        reason = next((why for held in of_this if (why := _reason(model, *held))), "")
        if reason:
            left[path] = reason
            continue
        cuts = _cuts(parameter, [module for module, _ in of_this], limit)
        if cuts is None:
            left[path] = "one entry of the embedding is above the limit"
            continue
        tiles[parameter] = parts = _cut_parameter(parameter, *cuts)
        made = {id(module): _tiled(module, *cuts, list(parts)) for module, _ in of_this}
        names.extend(_replace(model, made))
    return Tiled(tuple(names), left, tiles)


def replaceable(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yield the weights of layers inside `model` that `tile` can cut, each once."""
    found: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if module is not model and not _reason(model, module, name):
                found[id(parameter)] = parameter
    yield from found.values()


def tile_sequence(model: torch.nn.Module, name: str, positions: int) -> tuple[str, ...]:
    """Let the modules that `name` names run on at most `positions` positions at a time.

    `name` is a path as `named_modules()` has it, or the name of a class. The modules must handle
    each position alone (`SequenceTiles`). Return their paths.

    Raises:
        ConfigError: the name fits no module, the model itself, or a module with parameters of its
            own.
    """
    found = {
        path: module
        for path, module in model.named_modules()
        if name in (path, type(module).__name__)
    }
    if not found or "" in found:
        expected = "the path or the class of modules inside the model"
        raise ConfigError(field="name", value=name, expected=expected)
    made = {id(module): SequenceTiles(module, positions) for module in found.values()}
    return _replace(model, made)


def _reason(model: torch.nn.Module, module: torch.nn.Module, name: str) -> str:
    """Return why a module cannot be replaced; nothing if it can."""
    if module is model and type(module) in {torch.nn.Linear, torch.nn.Embedding}:
        expected = "a model with this layer inside it: it is replaced in the module around it"
        raise ConfigError(field="model", value=type(module).__name__, expected=expected)
    if type(module) not in {torch.nn.Linear, torch.nn.Embedding} or name != "weight":
        return f"it is {name} of a {type(module).__name__}"
    if isinstance(module, torch.nn.Embedding):
        if module.max_norm is not None:
            return "the embedding has max_norm, which changes its weight"
        if module.sparse or module.scale_grad_by_freq:
            return "the embedding has sparse or scale_grad_by_freq"
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    if any(hooks):
        return f"hooks are registered on the {type(module).__name__}"
    weight = next(module.parameters(recurse=False))
    if type(weight) is not torch.nn.Parameter:
        return f"its weight is a {type(weight).__name__}"
    return ""


def _cuts(
    parameter: torch.nn.Parameter, modules: Iterable[torch.nn.Module], limit: int
) -> tuple[TileCut, TileCut] | None:
    """Return the tiles of a parameter; None: an embedding among the modules cannot have them."""
    height, width = parameter.shape
    rows, columns = plan_tiles(height, width, parameter.element_size(), limit)
    if len(columns) > 1 and any(isinstance(module, torch.nn.Embedding) for module in modules):
        return None
    return rows, columns


def _cut_parameter(
    parameter: torch.nn.Parameter, rows: TileCut, columns: TileCut
) -> tuple[torch.nn.Parameter, ...]:
    """Return copies of the tiles: views would keep the whole weight in memory."""
    return tuple(
        torch.nn.Parameter(
            parameter.detach()[of_rows, of_columns].clone(memory_format=torch.contiguous_format),
            requires_grad=parameter.requires_grad,
        )
        for of_rows in rows
        for of_columns in columns
    )


def _tiled(
    module: torch.nn.Module, rows: TileCut, columns: TileCut, parameters: list[torch.nn.Parameter]
) -> torch.nn.Module:
    """Return the tiled layer that takes a module's place."""
    found: torch.nn.Module
    if isinstance(module, torch.nn.Embedding):
        found = TiledEmbedding.of(rows, columns, parameters, module.padding_idx)
    else:
        assert isinstance(module, torch.nn.Linear), "only these two are replaced"
        found = TiledLinear.of(rows, columns, parameters, module.bias)
    return found.train(module.training)


def _replace(model: torch.nn.Module, made: Mapping[int, torch.nn.Module]) -> tuple[str, ...]:
    """Put each made module where the module of that id is; return the paths of these places."""
    places = [
        (path, parent, name, made[id(child)])
        for path, parent in model.named_modules()
        for name, child in parent._modules.items()
        if id(child) in made
    ]
    for _, parent, name, module in places:
        parent.add_module(name, module)
    return tuple(f"{path}.{name}" if path else name for path, _, name, _ in places)
