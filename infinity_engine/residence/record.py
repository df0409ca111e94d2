"""`ShardRecord`: the state of one shard: where its current version is, and its copies.

Only `advance` changes the residency. Starts no I/O and knows no policy; called by the Mover, and by
the code that changed the shard's bytes, from one thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from infinity_engine.errors import ConfigError, IllegalTransition
from infinity_engine.memory.lease import Lease
from infinity_engine.plan import Tier
from infinity_engine.residence.residency import HOME_OF, MOVES, TIER_OF, TRANSITIONS, Residency
from infinity_engine.storage.swapfile import Place

__all__ = ["ShardRecord"]


@dataclass(frozen=True, slots=True)
class _Copy:
    where: Lease | Place
    version: int


class ShardRecord:
    """One shard of `nbytes`; its only copy lies in `where` when the record is made."""

    __slots__ = ("_arriving", "_copies", "_residency", "name", "nbytes", "version")

    def __init__(self, name: str, where: Lease | Place) -> None:
        self.name = name
        self.nbytes = where.nbytes
        tier = where.tier if isinstance(where, Lease) else Tier.NVME
        self._residency = HOME_OF[tier]
        self.version = 0  # how often its bytes were changed
        self._copies = {tier: _Copy(where, 0)}
        self._arriving: Lease | Place | None = None

    @property
    def residency(self) -> Residency:
        """Where its current version is, or the move that it is in."""
        return self._residency

    @property
    def arriving(self) -> Lease | None:
        """The memory that a move under way writes to.

        During an upload, streams that wait for the transfer's `event` may use it. When the move has
        ended, it is `device`.
        """
        return self._arriving if isinstance(self._arriving, Lease) else None

    @property
    def place(self) -> Place | None:
        """Its place on the drives, whether its bytes there are current or not."""
        where = self.where(Tier.NVME)
        return where if isinstance(where, Place) else None

    def where(self, tier: Tier) -> Lease | Place | None:
        """Return its memory or place in `tier`, current or not; None where it has none."""
        return self._copies[tier].where if tier in self._copies else None

    def is_current(self, tier: Tier) -> bool:
        """Tell whether the copy in `tier` is there and of the current version."""
        return tier in self._copies and self._copies[tier].version == self.version

    def home(self) -> Tier:
        """Return the tier in which it resides.

        Raises:
            IllegalTransition: it is moving to one.
        """
        try:
            return TIER_OF[self._residency]
        except KeyError:
            raise self._is_moving("another move") from None

    def check(self, to: Residency) -> None:
        """Raise IllegalTransition unless `advance(to)` is allowed."""
        if not self._allows(to):
            allowed = filter(self._allows, TRANSITIONS[self._residency])
            raise IllegalTransition(
                shard=self.name,
                source=self._residency.name,
                target=to.name,
                allowed=tuple(target.name for target in allowed),
            )

    def _allows(self, to: Residency) -> bool:
        # To a tier only where it has a current copy: residing there means having it.
        return to in TRANSITIONS[self._residency] and (
            to not in TIER_OF or self.is_current(TIER_OF[to])
        )

    def advance(self, to: Residency, *, into: Lease | Place | None = None) -> None:
        """Change to another residency; where that is a move, it writes to `into`.

        Raises:
            IllegalTransition: none leads there from here, or the tier has no current copy to reside
                in.
        """
        self.check(to)
        self._residency = to
        self._arriving = into

    def arrived(self, tier: Tier, where: Lease | Place) -> None:
        """Note that `where` now holds the current version in `tier`."""
        if where.nbytes != self.nbytes:
            expected = f"the {self.nbytes} B of the shard"
            raise ConfigError(
                field=f"bytes of {self.name} in {tier.name}", value=where.nbytes, expected=expected
            )
        self._copies[tier] = _Copy(where, self.version)

    def changed(self) -> None:
        """Note that its bytes were changed where it resides: copies elsewhere are older now.

        Raises:
            IllegalTransition: it is moving.
        """
        try:
            tier = TIER_OF[self._residency]
        except KeyError:
            raise self._is_moving("a changed version") from None
        self.version += 1
        # Of the copy where it resides alone; all others are older from here on.
        self._copies[tier] = _Copy(self._copies[tier].where, self.version)

    def drop(self, tier: Tier) -> Lease | Place | None:
        """Forget the copy in `tier` and return where it was; None where there was none.

        Raises:
            IllegalTransition: it is the only current copy, or the shard resides there.
        """
        if tier not in self._copies:
            return None
        self._check_dispensable(tier)
        return self._copies.pop(tier).where

    def abandon(self) -> list[Lease | Place]:
        """Forget all copies and return where they were: the shard's bytes are not needed any more.

        Raises:
            IllegalTransition: a move is under way.
        """
        if self._residency in MOVES:
            raise IllegalTransition(
                shard=self.name,
                source=self._residency.name,
                target="nowhere",
                allowed=("waiting for the move's end",),
            )
        copies, self._copies = list(self._copies.values()), {}
        return [copy.where for copy in copies]

    def _is_moving(self, target: str) -> IllegalTransition:
        allowed = (f"waiting for the end of {self._residency.name}",)
        return IllegalTransition(
            shard=self.name, source=self._residency.name, target=target, allowed=allowed
        )

    def _check_dispensable(self, tier: Tier) -> None:
        # During a move both of its ends are needed: the source is whole until the target is.
        needed = MOVES.get(self._residency) or (TIER_OF[self._residency],)
        current = [other for other in self._copies if other is not tier and self.is_current(other)]
        if tier in needed or not current:
            raise IllegalTransition(
                shard=self.name,
                source=self._residency.name,
                target=f"a drop of its copy in {tier.name}, which is needed,",
                allowed=tuple(
                    f"a drop of its copy in {other.name}"
                    for other in self._copies
                    if other not in needed
                ),
            )

    def __repr__(self) -> str:
        """Show where it is."""
        copies = ", ".join(f"{tier.name} v{copy.version}" for tier, copy in self._copies.items())
        return (
            f"ShardRecord({self.name}: {self.nbytes} B, {self._residency.name}, v{self.version}; "
            f"copies: {copies})"
        )
