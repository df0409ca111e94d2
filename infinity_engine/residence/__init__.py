"""Where every shard is, what is resident under each byte limit, and how one move is carried out.

Knows no policy: plans say what moves when.
"""

from infinity_engine.residence.mover import Mover, Source
from infinity_engine.residence.record import ShardRecord
from infinity_engine.residence.residency import Residency
from infinity_engine.residence.resident_set import FetchingStats, ResidentSet

__all__ = ["FetchingStats", "Mover", "Residency", "ResidentSet", "ShardRecord", "Source"]
