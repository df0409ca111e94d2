"""What a choice of ways is made from, on one rank or on several, which then choose alike.

Ranks gather the parameters of a block together, so all have to run the same blocks again. Each
chooses by the same pure function from the same values: those of the rank that is worst off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

from infinity_engine.placement.activations import ActivationRates, ActivationRoom, BlockCost

__all__ = ["Agreement", "ChoiceBasis", "ChosenAlone", "ChosenTogether"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceBasis:
    """All that a choice depends on."""

    costs: tuple[BlockCost, ...]
    room: ActivationRoom
    rates: ActivationRates


class Agreement(Protocol):
    """How the ranks come to one choice."""

    is_alone: bool

    def any_rank(self, what: str, *here: bool) -> tuple[bool, ...]:
        """Return for each of these whether it holds on any rank. All ranks call this."""

    def basis(self, own: ChoiceBasis) -> ChoiceBasis:
        """Return what all ranks choose from. All ranks call this."""


class ChosenAlone:
    """One rank chooses from what it has measured."""

    is_alone = True

    def any_rank(self, what: str, *here: bool) -> tuple[bool, ...]:
        """Return what holds on this rank."""
        return here

    def basis(self, own: ChoiceBasis) -> ChoiceBasis:
        """Return what this rank has measured."""
        return own


class ChosenTogether:
    """Several ranks choose; `tell(what, value)` returns what each rank passes, as JSON has it."""

    is_alone = False

    def __init__(self, tell: Callable[[str, object], list[Any]]) -> None:
        self._tell = tell

    def any_rank(self, what: str, *here: bool) -> tuple[bool, ...]:
        """Return for each of these whether it holds on any rank."""
        return tuple(any(answers) for answers in zip(*self._tell(what, here), strict=True))

    def basis(self, own: ChoiceBasis) -> ChoiceBasis:
        """Return the most that blocks take on any rank, and the least room and rates."""
        answers = self._tell("what blocks take", asdict(own))
        return ChoiceBasis(
            costs=tuple(
                _dearest([BlockCost(**cost) for cost in of_block])
                for of_block in zip(*(answer["costs"] for answer in answers), strict=True)
            ),
            room=_smallest([ActivationRoom(**answer["room"]) for answer in answers]),
            rates=_slowest([ActivationRates(**answer["rates"]) for answer in answers]),
        )


def _dearest(costs: Sequence[BlockCost]) -> BlockCost:
    again = [cost.recompute_s for cost in costs]
    return BlockCost(
        saved=max(cost.saved for cost in costs),
        inputs=max(cost.inputs for cost in costs),
        forward_s=max(cost.forward_s for cost in costs),
        backward_s=max(cost.backward_s for cost in costs),
        recompute_s=_unless_missing(max, again),
        calls=max(cost.calls for cost in costs),
    )


def _smallest(rooms: Sequence[ActivationRoom]) -> ActivationRoom:
    return ActivationRoom(
        device=min(room.device for room in rooms),
        host=min(room.host for room in rooms),
        drives=min(room.drives for room in rooms),
        staging=max(room.staging for room in rooms),
    )


def _slowest(rates: Sequence[ActivationRates]) -> ActivationRates:
    slowest = {
        item.name: _unless_missing(min, [getattr(rate, item.name) for rate in rates])
        for item in fields(ActivationRates)
        if item.name != "over_link"
    }
    return ActivationRates(over_link=any(rate.over_link for rate in rates), **slowest)


def _unless_missing(
    chosen: Callable[[list[float]], float], values: Sequence[float | None]
) -> float | None:
    """Return the chosen one of the values; None where a rank has none."""
    known = [value for value in values if value is not None]
    return chosen(known) if len(known) == len(values) else None
