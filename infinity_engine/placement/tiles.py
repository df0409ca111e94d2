"""Which weights are cut, and into tiles of which size, by bytes alone (decision 0056); and what a
model in numbers is then.

Pure. The engine cuts live modules by the same two functions, and plans the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

from infinity_engine.placement.models import ModelShape, ModuleShape
from infinity_engine.units import format_bytes

__all__ = ["TiledShape", "has_large_layers", "largest_tile", "needs_tiles", "tiled_by_room"]

_PART_FOR_LAYERS = 2  # of the room; the rest is for buffers that updates and copies pass
_MOST_TILES = 4096  # that are planned
_TILES_AT_ONCE = 4  # a tile, its gradient, the next tile, and the gradient of the one before


def needs_tiles(nbytes: int, room: int, *, trains: bool) -> bool:
    """Tell whether a layer has too large a weight: its working memory is above half of `room`.

    `trains`: the weight has a gradient, which is on the device at the same time.
    """
    return nbytes * (2 if trains else 1) > room // _PART_FOR_LAYERS


def largest_tile(room: int) -> int:
    """Return the bytes that a tile may have."""
    return room // _PART_FOR_LAYERS // _TILES_AT_ONCE


@dataclass(frozen=True, kw_only=True, slots=True)
class TiledShape:
    """A model with its large layers in tiles. `working` are the bytes of the largest of these, its
    gradient included; `room` is what layers and what updates pass have together.
    """

    model: ModelShape
    names: tuple[str, ...]
    tiles: int
    tile_bytes: int
    working: int
    room: int

    def __str__(self) -> str:
        """Return which layers are cut, and into how many tiles."""
        first, *others = self.names
        cut = {0: first, 1: " and ".join(self.names)}.get(
            len(others), f"{first} and {len(others)} more layers"
        )
        return f"{cut} in {self.tiles} tiles of at most {format_bytes(self.tile_bytes)}"


def has_large_layers(model: ModelShape, *, width: int, room: int) -> bool:
    """Tell whether `tiling="auto"` has something to cut, however many tiles that takes."""
    return any(_is_large(module, width, room) for module in model.modules)


def tiled_by_room(model: ModelShape, *, width: int, room: int) -> TiledShape | None:
    """Return the model as `tiling="auto"` cuts it, with elements of `width` bytes; None: as it is,
    or there is so little room that tiles would be too many to plan.

    Tiles of equal size are an estimate: the engine's have whole rows.
    """
    large = {module.name: module for module in model.modules if _is_large(module, width, room)}
    if not large:
        return None
    limit = max(largest_tile(room), width)
    counts = {name: -(-_nbytes(module, width) // limit) for name, module in large.items()}
    if sum(counts.values()) > _MOST_TILES:
        return None
    # An output layer that uses an embedding's weight uses it tile by tile.
    tied = {module.numel: counts[module.name] for module in large.values()}
    cut = {
        module.name: tuple(
            _parts(module, counts.get(module.name) or tied.get(module.shared_numel, 1))
        )
        for module in model.modules
    }
    modules = tuple(chain.from_iterable(cut.values()))
    before, after = (
        max(module.numel for module in registered) for registered in (model.modules, modules)
    )
    working = max(
        _nbytes(module, width) * (2 if _trains(module) else 1) for module in large.values()
    )
    return TiledShape(
        model=replace(
            model,
            modules=modules,
            deepest_numel=after if model.deepest_numel == before else model.deepest_numel,
        ),
        names=tuple(large),
        tiles=sum(counts.values()),
        tile_bytes=max(_nbytes(part, width) for name in large for part in cut[name]),
        working=working,
        room=room,
    )


def _is_large(module: ModuleShape, width: int, room: int) -> bool:
    """Tell whether a module is a linear layer or an embedding, and too large for this room."""
    parameters = module.parameters
    is_embedding = not module.flops_per_token and len(parameters) == 1
    if not parameters or not (module.sides[1] or is_embedding):
        return False
    nbytes, trains = 0, False
    for parameter in parameters:  # a refusal asks of all modules, again and again
        nbytes += parameter.numel * (parameter.element_bytes or width)
        trains = trains or parameter.trained
    return needs_tiles(nbytes, room, trains=trains)


def _nbytes(module: ModuleShape, width: int) -> int:
    return sum(
        parameter.numel * (parameter.element_bytes or width) for parameter in module.parameters
    )


def _trains(module: ModuleShape) -> bool:
    return any(parameter.trained for parameter in module.parameters)


def _parts(module: ModuleShape, count: int) -> Iterator[ModuleShape]:
    """Yield so many modules that have equal parts of this one."""
    if count == 1:
        yield module
        return

    def part(whole: int, number: int) -> int:
        return whole * (number + 1) // count - whole * number // count

    for number in range(count):
        yield replace(
            module,
            name=f"{module.name}.tiles.{number}",
            parameters=tuple(
                replace(
                    parameter,
                    name=f"{module.name}.tiles.{number}.{parameter.name.rpartition('.')[2]}",
                    numel=part(parameter.numel, number),
                )
                for parameter in module.parameters
            ),
            flops_per_token=part(module.flops_per_token, number),
            attention_width=part(module.attention_width, number),
            shared_numel=part(module.shared_numel, number),
            sides=(part(module.sides[0], number), module.sides[1]),
        )
