"""Large operators in tiles: linear layers, embeddings and blocks over the sequence.

Each tile is a module, so an engine fetches and releases its parameters one tile at a time.
"""

from infinity_engine.tiling.cuts import TileCut, cut_evenly, cut_into
from infinity_engine.tiling.embedding import TiledEmbedding
from infinity_engine.tiling.linear import TiledLinear
from infinity_engine.tiling.replacing import (
    Tiled,
    plan_tiles,
    replaceable,
    tile,
    tile_sequence,
    tile_those,
)
from infinity_engine.tiling.sequence import SequenceTiles
from infinity_engine.tiling.weights import (
    PlaceInWeight,
    TiledValues,
    WeightTile,
    places_of_tiles,
)

__all__ = [
    "PlaceInWeight",
    "SequenceTiles",
    "TileCut",
    "Tiled",
    "TiledEmbedding",
    "TiledLinear",
    "TiledValues",
    "WeightTile",
    "cut_evenly",
    "cut_into",
    "places_of_tiles",
    "plan_tiles",
    "replaceable",
    "tile",
    "tile_sequence",
    "tile_those",
]
