"""Where every shard is, and how one move is carried out. Knows no policy: plans say what moves."""

from infinity_engine.residence.mover import Mover, Source
from infinity_engine.residence.record import ShardRecord
from infinity_engine.residence.residency import Residency

__all__ = ["Mover", "Residency", "ShardRecord", "Source"]
