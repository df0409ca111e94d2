"""Shares the gradient norm's block sums: with all, each rank computes what one rank would.

Moves doubles as bytes and adds nothing. [Note: where parameters are cut] in shard.py says why no
block has two owners.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from infinity_engine import _native
from infinity_engine.errors import ConfigError
from infinity_engine.partition.collectives import Collectives
from infinity_engine.partition.shard import Shard, ShardSpec

__all__ = ["share_block_sums"]

_Sums = npt.NDArray[np.float64]


def share_block_sums(
    collectives: Collectives, specs: Sequence[ShardSpec], mine: Sequence[_Sums]
) -> list[_Sums]:
    """Return the sums of all blocks of each parameter; `mine` has those of this rank's shards.

    Blocks.

    Raises:
        CollectiveError: not all ranks came to it.
        ConfigError: `mine` has not one sum for each block of the shards.
    """
    for number, (spec, sums) in enumerate(zip(specs, mine, strict=True)):
        wanted = _blocks(spec.shards[collectives.rank])
        if len(sums) != wanted:
            expected = f"{wanted}, one for each block of this rank's shard"
            raise ConfigError(
                field=f"block sums of parameter {number}", value=len(sums), expected=expected
            )
    # Without parameters there would be no array, which concatenate refuses.
    payload = np.concatenate([np.zeros(0), *mine]).tobytes()
    payloads = [
        np.frombuffer(of_rank)
        for of_rank in collectives.share("block sums of the gradient norm", payload)
    ]
    whole = [np.zeros(-(-spec.numel // _native.NORM_BLOCK)) for spec in specs]
    for rank, sums in enumerate(payloads):
        at = 0
        for spec, blocks in zip(specs, whole, strict=True):
            shard = spec.shards[rank]
            count, first = _blocks(shard), shard.first_element // _native.NORM_BLOCK
            blocks[first : first + count] = sums[at : at + count]
            at += count
    return whole


def _blocks(shard: Shard) -> int:
    return -(-shard.numel // _native.NORM_BLOCK)
