"""`ShardGroup`: parameters that one collective gathers, and their gradients, which one reduces.

Lays out what goes over the wire; `Collectives` carries it. Owns no memory: the caller passes the
buffers, and what does not fit into them goes in several rounds. Called by the engine, which gathers
parameters and reduces gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from infinity_engine.errors import ConfigError
from infinity_engine.partition.collectives import CollectiveEvent, Collectives
from infinity_engine.partition.header import digest
from infinity_engine.partition.rounds import AllGather, Exchange, NoWire, Round, ignore, nothing
from infinity_engine.partition.shard import Shard, ShardSpec
from infinity_engine.partition.wire import WIRE_ALIGNMENT, Piece, Window, WireLayout
from infinity_engine.units import align_down

__all__ = [
    "MOST_ANNOUNCED",
    "Adder",
    "GroupMember",
    "ShardGroup",
]

# Ranks announce for so many members, the first ones, whether they have a gradient of each.
MOST_ANNOUNCED = 63


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One parameter of a group: its name, how it is cut, and its dtype on the wire."""

    name: str
    spec: ShardSpec
    dtype: torch.dtype


class Adder(Protocol):
    """Adds flat tensors of any floating-point dtype up in fp32, one operation for each element."""

    def begin(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """Write values to `into`, which is fp32."""

    def add(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """Add values to `into`, which is fp32."""


class ShardGroup:
    """The parameters `members`, cut over the ranks of `collectives`.

    Every rank contributes its part of all of them to one collective.
    """

    def __init__(
        self,
        name: str,
        members: Sequence[GroupMember],
        collectives: Collectives,
    ) -> None:
        for member in members:
            if member.spec.ranks != collectives.size:
                expected = (
                    f"a parameter that is cut over the {collectives.size} ranks of "
                    f"{collectives.name}"
                )
                raise ConfigError(
                    field=f"{name}: {member.name}",
                    value=f"{member.spec.ranks} ranks",
                    expected=expected,
                )
        if not members:
            raise ConfigError(
                field=f"members of {name}", value=(), expected="one parameter or more"
            )
        self.name = name
        self.members = tuple(members)
        self._collectives = collectives
        self._layout = WireLayout(
            [member.spec for member in members], [member.dtype.itemsize for member in members]
        )
        # Ranks compare it in the headers: another cut or dtype is another collective.
        self._key = digest(*((member.spec, member.dtype) for member in members))

    def shard(self, member: int) -> Shard:
        """Return this rank's shard of a member."""
        return self.members[member].spec.shards[self._collectives.rank]

    # --- parameters -------------------------------------------------------------------------------

    def gather_bytes(self) -> int:
        """Return the buffer size with which a gather goes in one round; 0 where none is needed."""
        return (
            0
            if self._layout.ranks == 1 or self._layout.is_one_run
            else self._layout.width * (self._layout.ranks + 1)
        )

    def gather(
        self,
        shards: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
        *,
        wire: torch.Tensor | None = None,
    ) -> CollectiveEvent:
        """Begin to assemble whole parameters from all ranks' shards. Returns at once.

        All tensors are flat: this rank's shards, the whole parameters, and `wire`, bytes that are
        used until the end; the more of them, up to `gather_bytes`, the fewer rounds.

        Raises:
            CollectiveError: an earlier collective has failed.
            ConfigError: a tensor does not fit.
        """
        self._check(
            "shards", shards, [self.shard(number).numel for number in range(len(self.members))]
        )
        self._check("into", into, [member.spec.numel for member in self.members])
        wire = _no_bytes() if wire is None else wire
        most = self._room(wire, self.gather_bytes(), self._layout.ranks + 1)
        rounds = self._gathering(shards, into, wire, most)
        # With `most`: buffers of other sizes would make other rounds.
        return self._collectives.start(
            f"gather of {self.name}", rounds, key=digest(self._key, most)
        )

    def _gathering(
        self,
        shards: Sequence[torch.Tensor],
        into: Sequence[torch.Tensor],
        wire: torch.Tensor,
        most: int,
    ) -> list[Round]:
        layout, rank = self._layout, self._collectives.rank
        if layout.ranks == 1:
            return [
                Round(NoWire(), partial(target.copy_, shard))
                for shard, target in zip(shards, into, strict=True)
                # Where the shard is the whole parameter already, nothing is to be done.
                if shard.numel() and shard.data_ptr() != target.data_ptr()
            ]
        if layout.is_one_run:
            # The segments are the parameter as it lies in memory, so nothing is copied.
            return [Round(AllGather(_bytes(shards[0]), _bytes(into[0])))]
        rounds = []
        for window in layout.windows(most) if most else ():
            width = window.end - window.start
            # A window of this rank, then those of all ranks, itself included.
            mine, all_ = wire[:width], wire[width : width * (layout.ranks + 1)]
            pack = partial(self._pack_shards, window, rank, shards, mine)
            unpack = partial(self._unpack_parameters, window, all_, width, into)
            rounds.append(Round(AllGather(mine, all_), pack, unpack))
        return rounds

    def _pack_shards(
        self, window: Window, rank: int, shards: Sequence[torch.Tensor], mine: torch.Tensor
    ) -> None:
        for piece in self._layout.pieces_in(window, rank):
            # The piece may begin in the middle of the shard, where a window cuts it.
            first = piece.first_element - self.shard(piece.member).first_element
            self._on_wire(mine, piece).copy_(shards[piece.member][first : first + piece.numel])

    def _unpack_parameters(
        self, window: Window, all_: torch.Tensor, width: int, into: Sequence[torch.Tensor]
    ) -> None:
        for rank in range(self._layout.ranks):
            segment = all_[rank * width : (rank + 1) * width]
            for piece in self._layout.pieces_in(window, rank):
                into[piece.member][piece.first_element :][: piece.numel].copy_(
                    self._on_wire(segment, piece)
                )

    # --- gradients --------------------------------------------------------------------------------

    def reduce_bytes(self) -> int:
        """Return the buffer size with which a reduce goes in one round; 0 where none is needed."""
        # One half for what is sent, the other for what comes.
        return 0 if self._layout.ranks == 1 else 2 * self._layout.width * self._layout.ranks

    def reduce(
        self,
        gradients: Sequence[torch.Tensor | None],
        into: Sequence[torch.Tensor],
        *,
        adder: Adder,
        wire: torch.Tensor | None = None,
        ended: Callable[[BaseException | None], object] = ignore,
    ) -> CollectiveEvent:
        """Begin to add up all ranks' gradients of this rank's shards, in fp32, into `into`.

        The order of the additions is that of the ranks.

        `gradients` are of the whole parameters, None where this rank has none; flat, as `wire` is.
        The bytes of `wire` are used until the end: the more of them, up to `reduce_bytes`, the
        fewer rounds. Returns at once. [Note: the order of sums]

        Each rank announces bits, one for each of the first MOST_ANNOUNCED members: whether it has a
        gradient of that. Where no rank has any, `into` stays as it is. `ended` is called at the
        end, with the error if there is one.

        Raises:
            CollectiveError: an earlier collective has failed.
            ConfigError: a tensor does not fit.
        """
        self._check("gradients", gradients, [member.spec.numel for member in self.members])
        mine = [self.shard(number).numel for number in range(len(self.members))]
        self._check("into", into, mine, dtype=torch.float32)
        wire = _no_bytes() if wire is None else wire
        most = self._room(wire, self.reduce_bytes(), 2 * self._layout.ranks)
        rounds = self._reducing(gradients, into, adder, wire, most)
        announces = 0
        for place, gradient in enumerate(gradients):
            if gradient is not None:
                # All further members share the last bit: a header has 64.
                announces |= 1 << min(place, MOST_ANNOUNCED)
        key = digest(self._key, most)
        return self._collectives.start(
            f"reduce of {self.name}", rounds, key=key, announces=announces, ended=ended
        )

    def _reducing(
        self,
        gradients: Sequence[torch.Tensor | None],
        into: Sequence[torch.Tensor],
        adder: Adder,
        wire: torch.Tensor,
        most: int,
    ) -> list[Round]:
        layout, rank = self._layout, self._collectives.rank
        if layout.ranks == 1:
            return [
                Round(
                    # One rank sends nothing: packing writes the sum.
                    NoWire(),
                    total.zero_ if gradient is None else partial(adder.begin, gradient, total),
                )
                for gradient, total in zip(gradients, into, strict=True)
            ]
        rounds = []
        for window in layout.windows(most) if most else ():
            sent = [layout.nbytes_in(window, other) for other in range(layout.ranks)]
            width = layout.nbytes_in(window, rank)
            # By the longest segment, so `got` begins at the same byte on every rank.
            half = (window.end - window.start) * layout.ranks
            mine, got = wire[: sum(sent)], wire[half : half + width * layout.ranks]
            pack: Callable[[], object] = partial(
                self._pack_gradients, window, sent, gradients, mine
            )
            # All of the one gradient in this window.
            if self._layout.is_one_run and width == layout.width and gradients[0] is not None:
                mine, pack = _bytes(gradients[0]), nothing  # sent from where it lies
            unpack = partial(self._add_up, window, got, width, into, adder)
            rounds.append(Round(Exchange(mine, got, sent, [width] * layout.ranks), pack, unpack))
        return rounds

    def _pack_gradients(
        self,
        window: Window,
        sent: Sequence[int],
        gradients: Sequence[torch.Tensor | None],
        mine: torch.Tensor,
    ) -> None:
        # Segments follow one another without gaps here, as an exchange sends them.
        at = 0
        for rank, nbytes in enumerate(sent):
            segment = mine[at : at + nbytes]
            for piece in self._layout.pieces_in(window, rank):
                gradient, place = gradients[piece.member], self._on_wire(segment, piece)
                if gradient is None:
                    # Other ranks have a gradient of it: this one adds nothing to theirs.
                    place.zero_()
                else:
                    place.copy_(gradient[piece.first_element :][: piece.numel])
            at += nbytes

    # [Note: the order of sums] A rank receives every other rank's gradient of its own shards
    # unchanged, in the dtype in which it was made, and adds them up in fp32 in the order of the
    # ranks, beginning with rank 0's. So the sum of an element is one chain of additions that no
    # bucket, no round and no algorithm of a backend changes. Nothing is scaled on the way: sums are
    # fp32, and 1/N belongs to the factor of the update. A rank without a gradient sends zeros.
    def _add_up(
        self,
        window: Window,
        got: torch.Tensor,
        width: int,
        into: Sequence[torch.Tensor],
        adder: Adder,
    ) -> None:
        for piece in self._layout.pieces_in(window, self._collectives.rank):
            first = piece.first_element - self.shard(piece.member).first_element
            total = into[piece.member][first : first + piece.numel]
            for rank in range(self._layout.ranks):
                values = self._on_wire(got[rank * width : (rank + 1) * width], piece)
                # Rank 0 begins the sum: adding to zeros would turn -0 into 0.
                (adder.add if rank else adder.begin)(values, total)

    # --- buffers ----------------------------------------------------------------------------------

    def _room(self, wire: torch.Tensor, enough: int, parts: int) -> int:
        """Return the bytes of each segment in one round; 0 where none is needed, as `enough` is."""
        if not enough:
            return 0
        is_flat = wire.dtype == torch.uint8 and wire.dim() == 1 and wire.is_contiguous()
        most = align_down(wire.nbytes // parts, WIRE_ALIGNMENT)
        if not most or not is_flat:
            raise ConfigError(
                field=f"wire of {self.name}",
                value=f"{wire.nbytes} B of {wire.dtype}, shape {tuple(wire.shape)}"
                if wire.nbytes
                else None,
                expected=f"flat, contiguous uint8 of {parts * WIRE_ALIGNMENT} B or more, {enough} "
                "B for one round",
            )
        # Longer windows than segments would only be empty.
        return min(most, self._layout.width)

    def _on_wire(self, segment: torch.Tensor, piece: Piece) -> torch.Tensor:
        dtype = self.members[piece.member].dtype
        return segment[piece.offset : piece.offset + piece.numel * dtype.itemsize].view(dtype)

    def _check(
        self,
        what: str,
        tensors: Sequence[torch.Tensor | None],
        numels: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Refuse tensors that do not match the members."""
        if len(tensors) != len(self.members):
            expected = f"{len(self.members)}, one for each member"
            raise ConfigError(
                field=f"{what} of {self.name}", value=f"{len(tensors)} tensors", expected=expected
            )
        for member, tensor, numel in zip(self.members, tensors, numels, strict=True):
            wanted = dtype or member.dtype
            if tensor is None or (
                tensor.shape == (numel,) and tensor.dtype == wanted and tensor.is_contiguous()
            ):
                continue
            raise ConfigError(
                field=f"{what} of {self.name}, {member.name}",
                value=f"{tensor.dtype}, shape {tuple(tensor.shape)}",
                expected=f"{wanted}, contiguous and flat, of {numel} elements",
            )


def _no_bytes() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
