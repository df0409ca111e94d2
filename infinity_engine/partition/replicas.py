"""`ReplicaSums`: adds up sums of ranks that own the same shards, each summed among neighbours.

Lays out what goes over the wire; `Collectives` carries it. Owns no memory. `HybridReduce` puts it
behind a reduce.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from infinity_engine.errors import ConfigError
from infinity_engine.partition.collectives import CollectiveEvent, Collectives
from infinity_engine.partition.group import Adder
from infinity_engine.partition.header import digest
from infinity_engine.partition.rounds import AllGather, Exchange, Round
from infinity_engine.partition.wire import WIRE_ALIGNMENT
from infinity_engine.units import align_down, align_up

__all__ = ["HybridReduce", "ReplicaSums"]

_SIZE = torch.float32.itemsize
_Ended = Callable[[BaseException | None], object]


class ReplicaSums:
    """Sums over the ranks of `collectives`, two or more, which own the same shards."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def wire_bytes(self, numel: int) -> int:
        """Return the buffer size with which so many elements go in one round."""
        part = -(-numel // self._collectives.size)
        return 2 * self._collectives.size * align_up(part * _SIZE, WIRE_ALIGNMENT)

    def start(
        self,
        name: str,
        sums: Sequence[torch.Tensor],
        *,
        announces: int,
        adder: Adder,
        wire: torch.Tensor,
    ) -> CollectiveEvent:
        """Begin to replace flat fp32 tensors, alike on all ranks, by their sums over the ranks.

        `wire`, bytes that are used until the end, bounds what goes in one round. A rank that
        announces 0 has nothing: its tensors count as zeros, whatever is in them. Returns at once.

        Raises:
            CollectiveError: an earlier collective has failed.
            ConfigError: the wire has no room for anything.
        """
        ranks, numels = self._collectives.size, [tensor.numel() for tensor in sums]
        part = align_down(wire.numel() // (2 * ranks), WIRE_ALIGNMENT) // _SIZE
        if not part and any(numels):
            expected = f"{2 * ranks * WIRE_ALIGNMENT} B or more"
            raise ConfigError(field=f"wire of {name}", value=f"{wire.numel()} B", expected=expected)
        numel = sum(numels)
        # No more than one round needs, so that buffers larger than that cut alike.
        part = min(part, align_up(-(-numel // ranks) * _SIZE, WIRE_ALIGNMENT) // _SIZE)
        values = wire[: 2 * ranks * part * _SIZE].view(torch.float32)
        rounds: list[Round] = []
        # At least 1, as range() wants; without elements there is no round.
        for first in range(0, numel, max(ranks * part, 1)):
            in_round = min(ranks * part, numel - first)
            rounds += self._rounds(
                _pieces(sums, first, in_round), in_round, part, values, adder, has=bool(announces)
            )
        return self._collectives.start(
            f"sum of {name} over replicas", rounds, key=digest(numels, part), announces=announces
        )

    def _rounds(
        self,
        pieces: Sequence[torch.Tensor],
        numel: int,
        part: int,
        values: torch.Tensor,
        adder: Adder,
        *,
        has: bool,
    ) -> list[Round]:
        """Return the rounds for `numel` elements; a rank adds up `part` of them or what is left."""
        ranks, rank = self._collectives.size, self._collectives.rank
        # The last ranks may have fewer, or none.
        counts = [min(max(numel - owner * part, 0), part) for owner in range(ranks)]
        mine, got = values[: ranks * part], values[ranks * part :]
        own = counts[rank]
        sent = [count * _SIZE for count in counts]
        exchange = Exchange(
            mine[:numel].view(torch.uint8),
            got[: own * ranks].view(torch.uint8),
            sent,
            [own * _SIZE] * ranks,
        )
        # `got` is free again by then: the sums of the exchange are in `mine`.
        gather = AllGather(mine[:part].view(torch.uint8), got[: ranks * part].view(torch.uint8))
        return [
            Round(
                exchange,
                partial(_pack, pieces, mine, has=has),
                partial(_add_up, got, own, ranks, mine, adder),
            ),
            Round(gather, unpack=partial(_unpack, got, pieces)),
        ]


class HybridReduce:
    """A reduce among neighbours, and after it the sum of its results over the replicas.

    `reduce` begins the first and gets the function to call at its end. `sum_up` begins the second,
    and gets as bits which members any of the neighbours had a gradient of. Reduces may end in any
    order: `queue` has those that have not begun their second part, in the order in which they were
    started, which is that of all replicas.
    """

    def __init__(
        self,
        reduce: Callable[[_Ended], CollectiveEvent],
        sum_up: Callable[[int], CollectiveEvent],
        queue: deque[HybridReduce],
    ) -> None:
        self._sum_up = sum_up
        self._queue = queue
        self._reduced = False
        self._begun: list[CollectiveEvent] = []  # the reduce, then the sum
        # Before `reduce`, which may end at once and look for this in the queue.
        queue.append(self)
        self._begun.append(reduce(self._ended))
        self._begin_seconds()  # it may have ended before it was returned

    def done(self) -> bool:
        """Tell whether it has ended, or failed, without blocking."""
        return all(part.done() for part in self._begun)

    def wait(self) -> None:
        """Block until it has ended; it is the oldest of those that have not.

        Raises:
            CollectiveError: it failed, or one before it.
        """
        self._begun[0].wait()
        self._begin_seconds()  # raises why it could not begin
        self._begun[1].wait()

    @property
    def announced(self) -> Sequence[int]:
        """Of each replica, which members its ranks had gradients of, once it has ended well."""
        return self._begun[1].announced if len(self._begun) > 1 else ()

    def _ended(self, error: BaseException | None) -> None:
        if error is None:
            self._reduced = True
            self._begin_seconds()

    def _begin_seconds(self) -> None:
        # Only from the front: replicas start their second parts in one order.
        while self._queue and self._queue[0]._begin_second():
            self._queue.popleft()

    def _begin_second(self) -> bool:
        if not self._reduced or not self._begun:
            return False
        had = 0
        for bits in self._begun[0].announced:
            had |= bits
        self._begun.append(self._sum_up(had))
        return True


def _pieces(sums: Sequence[torch.Tensor], first: int, numel: int) -> list[torch.Tensor]:
    """Return the parts of consecutive tensors that lie between two elements."""
    found, at = [], 0
    for tensor in sums:
        start, end = max(first - at, 0), min(first + numel - at, tensor.numel())
        if start < end:
            found.append(tensor[start:end])
        at += tensor.numel()
    return found


def _pack(pieces: Sequence[torch.Tensor], mine: torch.Tensor, *, has: bool) -> None:
    at = 0
    for piece in pieces:
        place = mine[at : at + piece.numel()]
        if has:
            place.copy_(piece)
        else:
            place.zero_()
        at += piece.numel()


# [Note: the order of sums on a mesh] Each replica of the model sums its ranks' gradients first, as
# [Note: the order of sums] says. Then the ranks that own the same shards add these fp32 sums up,
# beginning with the first replica's. One rank adds up a part of them and all get its bits, so
# replicas hold the same bits, which no bucket and no round changes.
def _add_up(got: torch.Tensor, own: int, ranks: int, mine: torch.Tensor, adder: Adder) -> None:
    # Over what was sent: the exchange has ended, so `mine` is free.
    total = mine[:own]
    for rank in range(ranks):
        (adder.add if rank else adder.begin)(got[rank * own : (rank + 1) * own], total)


def _unpack(got: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    at = 0
    for piece in pieces:
        piece.copy_(got[at : at + piece.numel()])
        at += piece.numel()
