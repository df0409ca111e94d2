"""A model in numbers with its large layers in tiles: nothing is lost, and no tile is too large."""

from __future__ import annotations

from dataclasses import replace

import pytest

from infinity_engine.placement.adapters import freeze
from infinity_engine.placement.tiles import largest_tile, tiled_by_room
from infinity_engine.sim.presets import PRESETS, preset

MIB = 1 << 20


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("room", [64 * MIB, 777 * MIB])
def test_tiles_have_all_parameters_and_all_arithmetic(name: str, room: int) -> None:
    whole = preset(name)
    tiled = tiled_by_room(whole, width=2, room=room)
    if tiled is None:
        return
    model = tiled.model
    assert model.numel == whole.numel
    assert sum(module.flops(9) for module in model.modules) == sum(
        module.flops(9) for module in whole.modules
    )
    assert sum(module.shared_numel for module in model.modules) == sum(
        module.shared_numel for module in whole.modules
    )
    tiles = [module for module in model.modules if ".tiles." in module.name]
    # A tile is rounded up by one element of each of its parameters at most.
    assert max(2 * module.numel for module in tiles) == tiled.tile_bytes <= largest_tile(room) + 4
    assert model.deepest_numel <= whole.deepest_numel  # experts of mixtures are not cut
    assert tiled_by_room(model, width=2, room=room) is None


def test_a_model_that_fits_is_not_cut() -> None:
    assert tiled_by_room(preset("llama-3-8b"), width=2, room=100_000 * MIB) is None


def test_a_frozen_layer_needs_half_of_the_room() -> None:
    model = preset("llama-3-8b")
    head = 2 * model.modules[-1].numel
    frozen = freeze(model, "lm_head|embed_tokens")
    assert tiled_by_room(model, width=2, room=4 * head - 2) is not None
    assert tiled_by_room(frozen, width=2, room=4 * head - 2) is None
    assert tiled_by_room(frozen, width=2, room=2 * head - 2) is not None


def test_a_tied_output_layer_is_in_as_many_tiles_as_its_embedding() -> None:
    tied = next(
        model for model in map(preset, PRESETS) if any(it.shared_numel for it in model.modules)
    )
    [head] = [module for module in tied.modules if module.shared_numel]
    room = 3 * head.shared_numel
    tiled = tiled_by_room(tied, width=2, room=room)
    assert tiled is not None
    parts = [module for module in tiled.model.modules if module.shared_numel]
    assert len(parts) > 1
    assert max(part.shared_numel for part in parts) * 2 <= tiled.tile_bytes


def test_so_little_room_that_tiles_would_be_too_many_cuts_nothing() -> None:
    assert tiled_by_room(preset("llama-3-8b"), width=2, room=1000) is None


def test_nested_modules_keep_what_they_need_together() -> None:
    model = replace(preset("llama-3-8b"), deepest_numel=10**9)
    tiled = tiled_by_room(model, width=2, room=777 * MIB)
    assert tiled is not None
    assert tiled.model.deepest_numel == 10**9
