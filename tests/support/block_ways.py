"""Lets the blocks of a model go ways that a test says, in place of a choice."""

from __future__ import annotations

from infinity_engine.activation.blocks import RepeatedBlock
from infinity_engine.activation.by_block import BlockActivations, FixedWays
from infinity_engine.engine.engine import Engine
from infinity_engine.placement.activations import BlockWay

__all__ = ["activations_by_block", "take_turns"]

_ON_HOST = (BlockWay.HOST, BlockWay.RECOMPUTE_HOST)
_IN_TURN = (BlockWay.RECOMPUTE, BlockWay.DRIVE, BlockWay.KEEP, BlockWay.RECOMPUTE_DRIVE)


class _InTurn(FixedWays):
    """Another way for each call."""

    def __init__(self, ways: tuple[BlockWay, ...]) -> None:
        super().__init__(BlockWay.KEEP)
        self._ways = ways
        self._calls = 0

    def way(self, block: RepeatedBlock, *, inputs: int, held: int) -> BlockWay:
        """Return the next way."""
        self._calls += 1
        return self._ways[self._calls % len(self._ways)]


def activations_by_block(engine: Engine) -> BlockActivations:
    """Return what keeps the activations of an engine that knows blocks."""
    found = engine._parts.activations
    assert isinstance(found, BlockActivations)
    return found


def take_turns(engine: Engine, *, on_host: bool = False) -> None:
    """Let each call of a block go another way: kept, recomputed, on drives; or on the host too."""
    ways = (*_IN_TURN, *_ON_HOST) if on_host else _IN_TURN
    activations_by_block(engine)._decider = _InTurn(ways)
