"""`TiledWeight`: a module with a weight in tiles, each the parameter of a module of its own.

State dicts have the whole weight under its one name, and load it. Subclasses compute with the
tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from infinity_engine.errors import ConfigError
from infinity_engine.tiling.cuts import TileCut

__all__ = ["PlaceInWeight", "TiledValues", "TiledWeight", "WeightTile", "places_of_tiles"]

_Result = TypeVar("_Result")


class WeightTile(torch.nn.Module):
    """A part of a weight. A call has it for as long as the call takes."""

    weight: torch.nn.Parameter

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, compute: Callable[[torch.Tensor], _Result]) -> _Result:
        """Return what `compute` returns for this part of the weight."""
        return compute(self.weight)

    def values(self) -> torch.nn.Parameter:
        """Return the parameter without asking for its values: an engine may have them elsewhere."""
        return next(self.parameters(recurse=False))

    def replace(self, values: torch.Tensor) -> None:
        """Let these be the values, as `load_state_dict(assign=True)` asks for."""
        self.weight = torch.nn.Parameter(values, requires_grad=self.values().requires_grad)

    def extra_repr(self) -> str:
        """Return the shape."""
        return " x ".join(str(length) for length in self.values().shape)

    # The module around the tiles saves and loads the whole weight.

    def _save_to_state_dict(self, *_: Any) -> None: ...

    def _load_from_state_dict(self, *_: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class TiledValues:
    """A whole weight as its tiles: what `state_dict(keep_vars=True)` has in its place."""

    tiles: tuple[torch.nn.Parameter, ...]
    rows: TileCut
    columns: TileCut

    @property
    def nbytes(self) -> int:
        """The bytes of all tiles."""
        return sum(tile.numel() * tile.element_size() for tile in self.tiles)

    def places(self) -> Iterator[tuple[slice, slice]]:
        """Yield the rows and columns of each tile, in the tiles' order."""
        for rows in self.rows:
            for columns in self.columns:
                yield rows, columns

    def joined(self, values_of: Callable[[torch.nn.Parameter], torch.Tensor]) -> torch.Tensor:
        """Return the whole weight; the values of one tile at a time are asked for."""
        whole: torch.Tensor | None = None
        for tile, place in zip(self.tiles, self.places(), strict=True):
            values = values_of(tile)
            if whole is None:
                whole = values.new_empty(self.rows.length, self.columns.length)
            whole[place] = values
        assert whole is not None, "there is a tile at least"
        return whole


@dataclass(frozen=True, slots=True)
class PlaceInWeight:
    """Where a parameter lies in a whole weight: from `first_element` on, in the weight's order."""

    names: tuple[str, ...]
    """The whole weight's: more than one where it is tied."""
    shape: tuple[int, ...]
    first_element: int = 0


class _JoinedWeight(torch.Tensor):
    """A copy of a weight in tiles, to be read only: a change of it would be lost without a word."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # an operator of torch.ops has an overload in its name, such as "mul_.Tensor"
        name, given = func.__name__.partition(".")[0], (*args, *kwargs.values())
        changes = name in _CHANGING or (name.endswith("_") and not name.endswith("__"))
        changed = given[:1] if changes or kwargs.get("inplace") is True else ()
        if kwargs.get("max_norm") is not None:  # of embeddings, which then scale their weight
            changed = given[:2]
        if torch.compiler.is_compiling():  # which cannot trace what looks at storages
            is_refused = any(isinstance(tensor, cls) for tensor in changed)
        else:
            tensors = [*_tensors_in(changed), *_tensors_in(kwargs.get("out"))]
            is_refused = any(isinstance(tensor, cls) for tensor in tensors)
        if is_refused:
            raise RuntimeError(
                f"{name} would change a copy of a weight that is in tiles, and no tile. Change "
                "each tile: `for tile in layer.tiles: tile.weight`; merge adapters before layers "
                "are cut into tiles"
            )
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
            if not _has_storages():
                return found
            copies = {
                tensor.untyped_storage().data_ptr()
                for tensor in _tensors_in(given)
                if isinstance(tensor, cls)
            } - {0}  # memory that there is not, such as on the meta device
            # A view of the copy is not to be changed either; what is computed of it may.
            return _with_views_as(cls, found, copies)


def _has_storages() -> bool:
    """Tell whether tensors have memory here: none in a compiler, nor under torch.func."""
    return (
        not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is None
    )


_CHANGING = frozenset(
    {"__set__", "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"}
)


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors_in(part)


def _with_views_as(kind: type[torch.Tensor], found: Any, copies: Collection[int]) -> Any:
    """Return what a function has returned, with the tensors in these copies as ones of a kind."""
    if isinstance(found, torch.Tensor):
        is_view = found.layout == torch.strided and found.untyped_storage().data_ptr() in copies
        return found.as_subclass(kind) if is_view else found
    if type(found) in {tuple, list} and found and isinstance(found[0], torch.Tensor):
        return type(found)(_with_views_as(kind, part, copies) for part in found)
    return found


class TiledWeight(torch.nn.Module):
    """A weight of (rows, columns) in tiles, row by row."""

    def __init__(
        self, rows: TileCut, columns: TileCut, parameters: Sequence[torch.nn.Parameter]
    ) -> None:
        super().__init__()
        self.rows = rows
        self.columns = columns
        expected = [(height, width) for height in rows.lengths for width in columns.lengths]
        found = [tuple(parameter.shape) for parameter in parameters]
        if found != expected:
            raise ConfigError(field="parameters", value=found, expected=f"the shapes {expected}")
        self.tiles = torch.nn.ModuleList(WeightTile(parameter) for parameter in parameters)

    @property
    def is_trained(self) -> bool:
        """Whether a tile requires a gradient."""
        return any(parameter.requires_grad for parameter in self.tiles.parameters())

    @property
    def weight(self) -> torch.Tensor:
        """The whole weight, joined: all tiles are needed at one time, which tiles are to avoid.

        It cannot be changed: no tile would change with it.
        """
        whole = torch.cat(
            [
                torch.cat([tile(lambda weight: weight) for tile in self._row(number)], 1)
                for number in range(len(self.rows))
            ]
        )
        return whole.as_subclass(_JoinedWeight)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Register a parameter, but no whole weight beside the tiles."""
        if name == "weight":
            raise RuntimeError(
                f"The weight of a {type(self).__name__} is in tiles, so no other can take its "
                "place. Set or tie weights before the layer is cut into tiles; load_state_dict() "
                "loads a whole weight into the tiles"
            )
        super().register_parameter(name, param)

    def row_tiles(self) -> Iterator[tuple[WeightTile, slice]]:
        """Yield the tiles and their rows, where each has all columns."""
        assert len(self.columns) == 1, "a tile has all columns"
        for number, rows in enumerate(self.rows):
            yield self._row(number)[0], rows

    def whole_values(self) -> TiledValues:
        """Return the tiles' parameters, whose values may be elsewhere."""
        return TiledValues(
            tuple(tile.values() for tile in self._all_tiles()), self.rows, self.columns
        )

    def _row(self, number: int) -> list[WeightTile]:
        width = len(self.columns)
        return self._all_tiles()[number * width : (number + 1) * width]

    def _all_tiles(self) -> list[WeightTile]:
        # ModuleList has no type of its members.
        return list(self.tiles)  # type: ignore[arg-type]

    # --- state dicts ------------------------------------------------------------------------------

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        values = self.whole_values()
        destination[f"{prefix}weight"] = (
            values if keep_vars else values.joined(lambda tile: tile.detach())
        )
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(  # noqa: PLR0917  # torch calls it so
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = f"{prefix}weight"
        rest = {name: value for name, value in state_dict.items() if name != key}
        super()._load_from_state_dict(
            rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if key not in state_dict:
            missing_keys.extend([key] if strict else [])
            return
        whole, shape = state_dict[key], (self.rows.length, self.columns.length)
        if tuple(whole.shape) != shape:
            error_msgs.append(
                f"size mismatch for {key}: copying a param with shape {tuple(whole.shape)} from "
                f"checkpoint, the shape in current model is {shape}."
            )
            return
        assign = bool(local_metadata.get("assign_to_params_buffers", False))
        values = self.whole_values()
        with torch.no_grad():
            for tile, place in zip(self._all_tiles(), values.places(), strict=True):
                if assign:
                    tile.replace(whole[place].clone())
                else:
                    tile.values().copy_(whole[place])


def places_of_tiles(model: torch.nn.Module) -> dict[int, PlaceInWeight]:
    """Return the place of each tile of a model, by the id of its parameter.

    Tiles with a part of each row are left out: their elements are not one after another.
    """
    found: dict[int, PlaceInWeight] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, TiledWeight) or len(module.columns) > 1:
            continue
        values = module.whole_values()
        shape = (module.rows.length, module.columns.length)
        for parameter, (rows, _) in zip(values.tiles, values.places(), strict=True):
            before = found[id(parameter)].names if id(parameter) in found else ()
            name = f"{path}.weight" if path else "weight"
            found[id(parameter)] = PlaceInWeight((*before, name), shape, rows.start * shape[1])
    return found
