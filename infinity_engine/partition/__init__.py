"""How parameters are cut over ranks, and the ranks' collectives.

Decides nothing about when; owns no memory.
"""

from infinity_engine.partition.collectives import CollectiveEvent, Collectives
from infinity_engine.partition.group import (
    MOST_ANNOUNCED,
    GroupMember,
    ShardGroup,
)
from infinity_engine.partition.replicas import HybridReduce, ReplicaSums
from infinity_engine.partition.shard import Partitioner, Shard, ShardSpec
from infinity_engine.partition.sums import share_block_sums

__all__ = [
    "MOST_ANNOUNCED",
    "CollectiveEvent",
    "Collectives",
    "GroupMember",
    "HybridReduce",
    "Partitioner",
    "ReplicaSums",
    "Shard",
    "ShardGroup",
    "ShardSpec",
    "share_block_sums",
]
