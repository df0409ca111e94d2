"""Cuts the layers of a model that the device has no room for, before the engine is planned.

`tiling` decides which, and makes the tiles; this puts them in the model's and the optimizer's
place, and takes that back where the engine is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from infinity_engine.accel import Accelerator
from infinity_engine.building.built import built_model_of
from infinity_engine.config import EngineConfig, Tiling
from infinity_engine.errors import ConfigError
from infinity_engine.parameters.parameters import kept_bytes
from infinity_engine.parameters.precision import asked_dtype, dtypes_of
from infinity_engine.placement.tiles import largest_tile, needs_tiles
from infinity_engine.planning.planning import room_for_layers
from infinity_engine.ranks.ranks import Ranks
from infinity_engine.tiling import Tiled, replaceable, tile_those

__all__ = ["tiled_by_budget"]


@contextmanager
def tiled_by_budget(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    config: EngineConfig,
    accelerator: Accelerator,
    ranks: Ranks | None,
) -> Iterator[None]:
    """Cut the layers that are too large, where that is asked for; undo it where the body fails.

    Raises:
        ConfigError: the optimizer has states for the weight of such a layer.
    """
    if config.tiling is Tiling.OFF:
        yield
        return
    asked = asked_dtype(config.precision)
    dtypes, built = dtypes_of(model, config.precision), built_model_of(model)
    # Several ranks cut parameters, and keep no memory of theirs.
    parameters = model.parameters() if ranks is None else ()
    kept = kept_bytes(
        (parameter, dtypes[id(parameter)])
        for parameter in parameters
        if built is None or parameter not in built
    )
    room = room_for_layers(config, accelerator, ranks, kept=kept)

    def wide(parameter: torch.nn.Parameter) -> int:
        """Return the bytes of an element, as it is or as it computes."""
        return max(parameter.element_size(), 0 if asked is None else asked.itemsize)

    large = {
        id(parameter): parameter
        for parameter in replaceable(model)
        if needs_tiles(parameter.numel() * wide(parameter), room, trains=parameter.requires_grad)
    }
    _check(model, optimizer, large)
    if not large:
        yield
        return
    grows = max(wide(parameter) // parameter.element_size() for parameter in large.values())
    # Held until the engine has all values, so that a refusal leaves the model as it was.
    modules = [(parent, dict(parent.named_children())) for parent in model.modules()]
    groups = [(group, dict(group)) for group in optimizer.param_groups]
    try:
        tiled = tile_those(
            model,
            lambda parameter: id(parameter) in large,
            max(largest_tile(room) // grows, *(wide(parameter) for parameter in large.values())),
        )
        _give_tiles(model, optimizer, tiled)
        yield
    except BaseException:
        for parent, children in modules:
            for name, child in children.items():
                parent.add_module(name, child)
        for group, before in groups:
            group.update(before)
        raise


def _check(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    large: Mapping[int, torch.nn.Parameter],
) -> None:
    for name, parameter in model.named_parameters():
        if id(parameter) in large and optimizer.state.get(parameter):
            raise ConfigError(
                field="tiling",
                value=Tiling.AUTO.value,
                expected=f"off with an optimizer that has states for {name}, which the device has "
                "no room for (Adagrad makes states before its first step): cut the model with "
                "infinity_engine.tiling.tile() before the optimizer is made",
            )


def _give_tiles(model: torch.nn.Module, optimizer: torch.optim.Optimizer, tiled: Tiled) -> None:
    """Let the optimizer's groups have the tiles of a weight in its place."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    group: dict[str, Any]
    for group in optimizer.param_groups:
        before = {
            id(parameter): name
            for parameter, name in zip(group["params"], group.get("param_names", ()), strict=False)
        }
        group["params"] = tiled.in_place_of(group["params"])
        if "param_names" in group:
            group["param_names"] = [
                before.get(id(parameter)) or names[id(parameter)] for parameter in group["params"]
            ]
