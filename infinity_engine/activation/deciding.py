"""`MeasuredWays`: measures blocks in the first steps, then chooses the way of each.

The first steps hold as little as can be. A choice is made again where blocks save more than before.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from infinity_engine.activation.agreeing import Agreement, ChoiceBasis
from infinity_engine.activation.blocks import RepeatedBlock
from infinity_engine.activation.by_block import cannot_run_again
from infinity_engine.activation.probing import Homes
from infinity_engine.errors import CapacityError
from infinity_engine.placement.activations import (
    ActivationChoice,
    ActivationRates,
    ActivationRoom,
    BlockCost,
    BlockWay,
    choose_ways,
    gains_of_more,
    predict_step,
    safest_ways,
)
from infinity_engine.plan import Tier
from infinity_engine.units import format_bytes

__all__ = ["MeasuredWays"]

_MEASURED_STEPS = 2  # the first one also allocates, so the second counts
_GROWN = 1.1  # a block that saves more than so many times what was measured is measured again
_WORTH_SAYING = 0.005  # of the step's time, that more memory would save


@dataclass(slots=True)
class _MeasuredBlock:
    """What was seen of one block: bytes of a call and calls of a forward, at most, and seconds of
    each call; and the way that was chosen for it.
    """

    block: RepeatedBlock
    way: BlockWay = BlockWay.RECOMPUTE
    saved: int = 0
    inputs: int = 0
    calls: int = 1
    calls_now: int = 0
    forward_s: list[float] = field(default_factory=list)
    again_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)

    def go(self, way: BlockWay) -> None:
        """Go this way from here on."""
        self.way = way

    def note_call(self, saved: int, inputs: int) -> None:
        """Note what one call saved, and was given."""
        self.saved, self.inputs = max(self.saved, saved), max(self.inputs, inputs)
        self.calls_now += 1

    def end_forward(self) -> None:
        """Note that no more calls of this forward come."""
        self.calls, self.calls_now = max(self.calls, self.calls_now), 0

    def time_anew(self) -> None:
        """Forget the times of the step before."""
        self.forward_s, self.again_s, self.backward_s = [], [], []


class MeasuredWays:
    """Chooses within `room`, among ways to where modules compute and to `homes`.

    `clock` is the time in seconds, at which all work that was submitted has ended. `left_alone`
    says why there are no blocks. With several ranks, `agreement` lets all choose alike.
    """

    def __init__(
        self,
        blocks: Sequence[RepeatedBlock],
        room: ActivationRoom,
        homes: Homes,
        *,
        clock: Callable[[], float],
        agreement: Agreement,
        left_alone: str = "",
    ) -> None:
        self._blocks = {block.name: _MeasuredBlock(block) for block in blocks}
        self._agreement = agreement
        self._room = room
        self._refused: dict[str, str] = {}
        self._outside = 0
        self._clock = clock
        self._homes = homes
        self._again: list[tuple[float, float, int]] = []  # begin, seconds, block
        self._steps = 0
        self._known: dict[int, int] = {}  # saved bytes by kind, at the choice
        self.choice: ActivationChoice | None = None
        self._said = (
            left_alone
            or "every block holds as little as can be, until two steps have been measured"
        )

    # --- one call ---------------------------------------------------------------------------------

    def way(self, block: RepeatedBlock, *, inputs: int, held: int) -> BlockWay:
        """Return the way that was chosen, or one that keeps less where that would not fit now."""
        measured = self._blocks[block.name]
        possible = list(self._possible(measured))
        for way in possible:
            nbytes = inputs if way.recomputes else measured.saved
            if self._fits(way.home, nbytes, held=held):
                return way
        return possible[-1]

    def _fits(self, home: Tier, nbytes: int, *, held: int) -> bool:
        """Tell whether there is room now for what a call saves that goes there."""
        if home is Tier.DEVICE:
            return not nbytes or held + nbytes <= self._limit
        room = self._room.host if home is Tier.HOST else self._room.drives
        return nbytes <= room - self._homes.waiting(home)

    def _possible(self, measured: _MeasuredBlock) -> Iterator[BlockWay]:
        """Yield the ways of a block, from what was chosen to what keeps least."""
        ways = (
            measured.way,
            BlockWay.RECOMPUTE,
            BlockWay.RECOMPUTE_HOST,
            BlockWay.RECOMPUTE_DRIVE,
            BlockWay.HOST,
            BlockWay.DRIVE,
        )
        possible = [
            way
            for way in ways
            if way.home in (Tier.DEVICE, *self._homes.tiers)
            and not (way.recomputes and measured.block.name in self._refused)
        ]
        # What this rank holds now, the others do not know: the same blocks run again on all.
        alike = [way for way in possible if way.recomputes == measured.way.recomputes]
        yield from (possible if self._agreement.is_alone else alike or possible) or [BlockWay.KEEP]

    def expected(self, block: RepeatedBlock, way: BlockWay, *, inputs: int) -> int:
        """Return the bytes that a call that goes this way is going to keep where it computes."""
        if way.home is not Tier.DEVICE:
            return 0
        return inputs if way.recomputes else self._blocks[block.name].saved

    @property
    def _limit(self) -> int:
        moves = self.choice is None or any(way.home is not Tier.DEVICE for way in self.choice.ways)
        staging = self._room.staging if moves and self._homes.tiers else 0
        return self._room.device - staging - self._outside

    def _leave_rest(self) -> None:
        """Leave to moves what is beside their own part, whatever was chosen."""
        blocks = self._blocks.values()
        # What a second run makes again comes on top of what is held.
        again = max((known.saved for known in blocks if known.way.recomputes), default=0)
        self._homes.shared.leave(self._room.device - self._room.staging - self._outside - again)

    # --- what calls take --------------------------------------------------------------------------

    @property
    def _measures(self) -> bool:
        return self.choice is None

    def now(self) -> float:
        """Return the time while steps are measured, else 0."""
        return self._clock() if self._measures else 0.0

    def note_call(self, block: RepeatedBlock, *, saved: int, inputs: int, seconds: float) -> None:
        """Note what a call in a forward saved and took."""
        measured = self._blocks[block.name]
        has_grown = saved > measured.saved
        measured.note_call(saved, inputs)
        if has_grown:
            self._leave_rest()
        if self._measures:
            measured.forward_s.append(seconds)

    def note_run_again(self, block: RepeatedBlock, *, start: float, seconds: float) -> None:
        """Note that a block was run again, and when that began."""
        if not self._measures:
            return
        self._blocks[block.name].again_s.append(seconds)
        names = list(self._blocks)
        number = names.index(block.name)
        # From the begin of one block's backward to that of the block before it.
        if self._again and self._again[-1][2] == number + 1:
            began, took, _ = self._again[-1]
            self._blocks[names[number + 1]].backward_s.append(max(start - began - took, 0.0))
        self._again.append((start, seconds, number))

    def end_forward(self, outside: int) -> None:
        """Note that a forward has ended, and the bytes that it saved outside of blocks."""
        self._outside = max(self._outside, outside)
        self._leave_rest()
        for measured in self._blocks.values():
            measured.end_forward()

    def refuse_recompute(self, block: RepeatedBlock, why: str) -> None:
        """Note that a block cannot be run again."""
        self._refused[block.name] = why

    # --- the choice -------------------------------------------------------------------------------

    def end_step(self) -> None:
        """Choose, where enough steps were measured; measure again where blocks save more."""
        if not self._blocks:
            return
        called, grown = self._agreement.any_rank(
            "whether blocks were called, and save more",
            any(measured.saved for measured in self._blocks.values()),
            not self._measures and self._has_grown(),
        )
        if not called:
            self._said = (
                "no block of the model has saved anything yet: none was called in training, or the "
                "model's code checkpoints them. All that is saved is kept"
            )
            return
        self._steps += 1
        if self._measures and self._steps >= _MEASURED_STEPS:
            self._choose()
        elif grown:
            self.choice, self._steps = None, 0
            self.adopt([BlockWay.RECOMPUTE] * len(self._blocks))
            self._said = "blocks have saved more than before, and are measured again"
        if self._measures:
            for measured in self._blocks.values():
                measured.time_anew()
        self._again = []

    def _has_grown(self) -> bool:
        return any(
            saved > _GROWN * self._known.get(kind, saved)
            for kind, saved in self._most_saved().items()
        )

    def _most_saved(self) -> dict[int, int]:
        most: dict[int, int] = {}
        for measured in self._blocks.values():
            kind = measured.block.kind
            most[kind] = max(most.get(kind, 0), measured.calls * measured.saved)
        return most

    def costs(self) -> list[BlockCost]:
        """Return the costs of the blocks; those of one kind take the same."""
        of_kind: dict[int, list[_MeasuredBlock]] = {}
        for measured in self._blocks.values():
            of_kind.setdefault(measured.block.kind, []).append(measured)
        costs = []
        for own in self._blocks.values():
            alike = of_kind[own.block.kind]
            forward = _middle(alike, lambda one: one.forward_s) or 0.0
            again = _middle(alike, lambda one: one.again_s)
            back = _middle(alike, lambda one: one.backward_s)
            runs = own.saved and own.block.name not in self._refused
            costs.append(
                BlockCost(
                    saved=own.saved,
                    # The first block also has what all of them get, such as a mask.
                    inputs=own.inputs,
                    forward_s=forward,
                    backward_s=2 * forward if back is None else back,
                    recompute_s=(forward if again is None else again) if runs else None,
                    calls=own.calls,
                )
            )
        return costs

    def _choose(self) -> None:
        own = ChoiceBasis(
            costs=tuple(self.costs()),
            room=replace(self._room, device=max(self._room.device - self._outside, 0)),
            rates=self._homes.rates(),
        )
        basis = self._agreement.basis(own)
        costs, room, rates = basis.costs, basis.room, basis.rates
        try:
            self.choice = choose_ways(costs, room, rates)
            self._said = f"{self._why(self.choice)}{_worth(costs, room, rates, self.choice)}"
        except CapacityError as error:
            ways = safest_ways(costs, room, rates)
            predicted = predict_step(costs, ways, rates, staging=room.staging)
            self.choice = ActivationChoice(ways=ways, predicted=predicted)
            self._said = f"every block holds as little as can be, which is too much: {error}"
        self.adopt(self.choice.ways)
        self._known = self._most_saved()

    def adopt(self, ways: Sequence[BlockWay]) -> None:
        """Let each block go its way from here on, in the order of the model."""
        for measured, way in zip(self._blocks.values(), ways, strict=True):
            measured.go(way)
        self._leave_rest()

    def _why(self, choice: ActivationChoice) -> str:
        predicted = choice.predicted
        beside = (
            f", beside {format_bytes(self._outside)} outside of blocks" if self._outside else ""
        )
        return (
            f"{choice}: forward and backward of {predicted.seconds * 1e3:.3g} ms predicted, with "
            f"{format_bytes(predicted.device)} of {format_bytes(self._room.device)}{beside}"
        )

    def described(self) -> str:
        """Return what was chosen, and why."""
        return "; ".join(filter(None, (self._said, cannot_run_again(self._refused))))


def _middle(
    alike: Sequence[_MeasuredBlock], times: Callable[[_MeasuredBlock], list[float]]
) -> float | None:
    """Return the median of the times of blocks of one kind; None where none was timed."""
    seconds = [second for measured in alike for second in times(measured)]
    return statistics.median(seconds) if seconds else None


def _worth(
    costs: Sequence[BlockCost],
    room: ActivationRoom,
    rates: ActivationRates,
    choice: ActivationChoice,
) -> str:
    """Return what the next GiB would save, where that is worth saying."""
    gains = gains_of_more(choice, costs, room, rates)
    best = max(gains, key=lambda tier: gains[tier])
    saves = gains[best]
    if saves <= _WORTH_SAYING * choice.predicted.seconds:
        return "; 1 GiB more would save nothing"
    return f"; 1 GiB more of {best.name} would save {saves * 1e3:.3g} ms"
