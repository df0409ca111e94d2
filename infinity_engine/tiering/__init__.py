"""Where every shard is, and how one move of it is carried out.

Knows no policy: plans say what moves when.
"""

from infinity_engine.tiering.mover import Mover, Source
from infinity_engine.tiering.record import ShardRecord
from infinity_engine.tiering.residency import Residency

__all__ = ["Mover", "Residency", "ShardRecord", "Source"]
