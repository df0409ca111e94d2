"""`TileAdvice`: what `tiling="auto"` would cut for a plan, why, and what more memory would change.

Pure. Called by the command line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from infinity_engine.placement.tiles import TiledShape, tiled_by_room
from infinity_engine.placement.training import Training
from infinity_engine.units import GiB

__all__ = ["TileAdvice", "tile_advice"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TileAdvice:
    """What is cut; the same with 1 GiB more of the device, None where nothing is cut then; and the
    seconds of a step with whole layers, None where these do not fit.
    """

    tiled: TiledShape
    with_more: TiledShape | None
    whole_s: float | None

    def to_mapping(self) -> dict[str, object]:
        """Return it as lists and mappings, ready for JSON."""
        return {
            "layers": list(self.tiled.names),
            "tiles": self.tiled.tiles,
            "largest_tile_bytes": self.tiled.tile_bytes,
            "largest_layer_bytes": self.tiled.working,
            "room_bytes": self.tiled.room,
            "tiles_with_1_gib": 0 if self.with_more is None else self.with_more.tiles,
            "step_s_with_whole_layers": self.whole_s,
        }


def tile_advice(
    training: Training, tiled: TiledShape, step_s_of: Callable[[Training], float | None]
) -> TileAdvice:
    """Return the advice for a training with whole layers; `step_s_of` plans one."""
    return TileAdvice(
        tiled=tiled,
        with_more=tiled_by_room(training.model, width=training.width, room=tiled.room + GiB),
        whole_s=step_s_of(training),
    )
