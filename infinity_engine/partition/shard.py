"""`Shard` and `ShardSpec`: which rank owns which piece of a parameter.

Pure arithmetic over numbers of elements, the same on every rank; knows no tensors and starts
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from infinity_engine import _native
from infinity_engine.errors import ConfigError

__all__ = ["Partitioner", "Shard", "ShardSpec"]


@dataclass(frozen=True, slots=True)
class Shard:
    """The piece of one parameter that one rank owns. It may have no elements."""

    first_element: int
    numel: int

    @property
    def end(self) -> int:
        """The element behind its last one."""
        return self.first_element + self.numel


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """How one parameter of `numel` elements is cut: the shard of each rank, in the ranks' order."""

    numel: int
    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        block, at = _native.NORM_BLOCK, 0
        # No gaps and no overlaps, cuts at blocks, and all elements to the last.
        for shard in self.in_order():
            if shard.first_element != at or shard.numel < 0 or at % block:
                self._refuse()
            at = shard.end
        if at != self.numel or not self.shards:
            self._refuse()

    @property
    def ranks(self) -> int:
        """How many ranks it is cut over."""
        return len(self.shards)

    def in_order(self) -> list[Shard]:
        """Return the shards that have elements, as they follow one another in the parameter."""
        return sorted(
            (shard for shard in self.shards if shard.numel), key=lambda shard: shard.first_element
        )

    def _refuse(self) -> None:
        raise ConfigError(
            field="ShardSpec.shards",
            value=self.shards,
            expected=(
                f"one shard for each rank, which together have each of the {self.numel} elements "
                f"once, cut at multiples of {_native.NORM_BLOCK}"
            ),
        )


class Partitioner:
    """Cuts parameters over `ranks`, one after another, so that each rank owns about as much.

    The cut of a parameter depends on those before it and on nothing else, so code that builds a
    model can cut while it grows. At any time no rank owns more than a block (NORM_BLOCK elements)
    more than another.
    """

    def __init__(self, ranks: int) -> None:
        if ranks < 1:
            raise ConfigError(field="ranks", value=ranks, expected="1 or more")
        self._owned = [0] * ranks

    def cut(self, numel: int) -> ShardSpec:
        """Return how the next parameter is cut.

        Raises:
            ConfigError: `numel` is negative.
        """
        if numel < 0:
            raise ConfigError(field="numel", value=numel, expected="0 or more")
        shards = self._pieces(numel)
        for rank, shard in enumerate(shards):
            self._owned[rank] += shard.numel
        return ShardSpec(numel, tuple(shards))

    # [Note: where parameters are cut] Only at multiples of NORM_BLOCK elements from the parameter's
    # first one. So no block of the gradient norm has two owners, and its sum is the same bits on
    # any number of ranks; and every piece but a parameter's last is whole pages, which drives read
    # and write without a detour.
    def _pieces(self, numel: int) -> list[Shard]:
        """Give each rank as many blocks, and the left-over ones to the ranks that own least.

        A short last block goes to the richest of those with the most blocks, so that no two ranks
        grow apart.
        """
        block, ranks = _native.NORM_BLOCK, len(self._owned)
        # sorted is stable: among equals the lower rank comes first, on every rank alike.
        poorest_first = sorted(range(ranks), key=lambda rank: self._owned[rank])
        per_rank, left_over = divmod(-(-numel // block), ranks)
        blocks = dict.fromkeys(range(ranks), per_rank)
        for rank in poorest_first[:left_over]:
            blocks[rank] += 1
        order = list(blocks)
        if numel % block:
            # Where no block is left over, index -1 is the richest rank.
            order.remove(last := poorest_first[left_over - 1])
            order.append(last)
        shards, at = {}, 0
        for rank in order:
            end = min(at + blocks[rank] * block, numel)
            shards[rank] = Shard(at, end - at) if end > at else Shard(0, 0)
            at = end
        return [shards[rank] for rank in range(ranks)]
