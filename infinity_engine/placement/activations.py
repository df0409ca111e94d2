"""Chooses how what each block saves gets to its backward: kept, recomputed, or moved and fetched.

Pure arithmetic on costs, rates and room, for the engine, which measures them, and for plans, which
estimate them. Decision 0049 has the model of a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import reduce
from math import inf
from operator import add
from types import MappingProxyType
from typing import NamedTuple

from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.plan import Tier
from infinity_engine.units import format_bytes

__all__ = [
    "ActivationChoice",
    "ActivationRates",
    "ActivationRoom",
    "BlockCost",
    "BlockWay",
    "StepPrediction",
    "choose_ways",
    "gains_of_more",
    "predict_step",
    "safest_ways",
]

_MOST_STATES = 2048  # that are walked; where there are more, near equals are merged
_MERGED_STATES = 216
_MOST_UNITS = 24  # of neighbouring blocks that are decided as one; single blocks are mended after
_AS_FAST = 1.01  # of the fastest: among these, the fewest bytes to drives


class BlockWay(Enum):
    """What happens to what a block saves for its backward."""

    KEEP = "kept"
    RECOMPUTE = "recomputed"  # the block's inputs are kept
    HOST = "on the host"
    DRIVE = "on drives"
    RECOMPUTE_HOST = "recomputed, inputs on the host"
    RECOMPUTE_DRIVE = "recomputed, inputs on drives"

    # By identity, as each member is one object: Enum's own hash runs in Python at each look-up.
    __hash__ = object.__hash__

    @property
    def recomputes(self) -> bool:
        """Whether the block runs again in the backward."""
        return self in _RECOMPUTED

    @property
    def home(self) -> Tier:
        """Where the tensors that it saves wait, or its inputs; DEVICE: where they were made."""
        return _HOMES.get(self, Tier.DEVICE)


_RECOMPUTED = frozenset({BlockWay.RECOMPUTE, BlockWay.RECOMPUTE_HOST, BlockWay.RECOMPUTE_DRIVE})
_HOMES = MappingProxyType(
    {
        BlockWay.HOST: Tier.HOST,
        BlockWay.RECOMPUTE_HOST: Tier.HOST,
        BlockWay.DRIVE: Tier.NVME,
        BlockWay.RECOMPUTE_DRIVE: Tier.NVME,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCost:
    """What one block saves and takes in each of its calls in a forward.

    `inputs` are the bytes that running it again needs, `recompute_s` the seconds of that: None
    where it cannot run again.
    """

    saved: int
    inputs: int
    forward_s: float
    backward_s: float
    recompute_s: float | None
    calls: int = 1

    def __post_init__(self) -> None:
        for name in ("saved", "inputs", "forward_s", "backward_s"):
            if getattr(self, name) < 0:
                raise ConfigError(field=name, value=getattr(self, name), expected="0 or more")
        if self.calls < 1:
            raise ConfigError(field="calls", value=self.calls, expected="1 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationRates:
    """Bytes per second of saved tensors to the host and to drives, and back; None: no such way.

    `over_link`: what goes to drives passes the link to the host as well.
    """

    to_host: float | None = None
    from_host: float | None = None
    to_drives: float | None = None
    from_drives: float | None = None
    over_link: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationRoom:
    """Bytes for what blocks save: where modules compute, on the host, and on drives.

    `staging` is what moves need where modules compute, as soon as one block uses them.
    """

    device: int
    host: int = 0
    drives: int = 0
    staging: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPrediction:
    """Seconds of forward and backward, and the most bytes in each place."""

    forward_s: float
    backward_s: float
    device: int
    host: int
    drives: int
    recompute_s: float

    @property
    def seconds(self) -> float:
        """Forward and backward together."""
        return self.forward_s + self.backward_s

    def fits(self, room: ActivationRoom) -> bool:
        """Tell whether no place holds more than it has."""
        return self.device <= room.device and self.host <= room.host and self.drives <= room.drives


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationChoice:
    """A way for each block, in forward order, and what that is predicted to take."""

    ways: tuple[BlockWay, ...]
    predicted: StepPrediction

    def counts(self) -> Mapping[BlockWay, int]:
        """Return how many blocks go each way, of those that are used."""
        counted = Counter(self.ways)
        return {way: counted[way] for way in BlockWay if counted[way]}

    def __str__(self) -> str:
        """Return the number of blocks that go each way."""
        return ", ".join(f"{count} {way.value}" for way, count in self.counts().items())


_new = tuple.__new__  # as in plan/timing.py


class _Effect(NamedTuple):
    """What one way of a block, or of neighbours, adds to a step."""

    resident: int  # that stays through the rest of the forward
    live: int  # while it runs, forward or backward, beside what earlier blocks keep
    host: int
    drives: int
    recompute_s: float

    def then(self, other: _Effect) -> _Effect:
        """Return the effect of both, one after the other."""
        resident, live, host, drives, recompute_s = self
        more, most, more_host, more_drives, more_s = other
        return _new(
            _Effect,
            (
                resident + more,
                live if live > resident + most else resident + most,
                host + more_host,
                drives + more_drives,
                recompute_s + more_s,
            ),
        )


_NO_EFFECT = _Effect(0, 0, 0, 0, 0.0)


def predict_step(
    costs: Sequence[BlockCost],
    ways: Sequence[BlockWay],
    rates: ActivationRates,
    *,
    staging: int = 0,
) -> StepPrediction:
    """Return what a step takes with a way for each block."""
    effect = _NO_EFFECT
    for cost, way in zip(costs, ways, strict=True):
        effect = effect.then(_effect_of(cost, way))
    forward_s, backward_s = _seconds_of(
        sum(cost.calls * cost.forward_s for cost in costs),
        sum(cost.calls * cost.backward_s for cost in costs),
        effect,
        rates,
    )
    moves = any(way.home is not Tier.DEVICE for way in ways)
    return StepPrediction(
        forward_s=forward_s,
        backward_s=backward_s,
        device=effect.live + (staging if moves else 0),
        host=effect.host,
        drives=effect.drives,
        recompute_s=effect.recompute_s,
    )


def choose_ways(
    costs: Sequence[BlockCost], room: ActivationRoom, rates: ActivationRates
) -> ActivationChoice:
    """Return the ways with the least predicted seconds that fit.

    Raises:
        CapacityError: none fits.
    """
    found = [
        choice
        for moves in (False, True)
        for choice in _Search(costs, room, rates, moves=moves).choices()
        if choice.predicted.fits(room)
    ]
    if not found:
        raise _nothing_fits(costs, room, rates)
    fastest = min(choice.predicted.seconds for choice in found)
    return min(
        (choice for choice in found if choice.predicted.seconds <= fastest * _AS_FAST),
        # Drives wear, and less work is less heat.
        key=lambda choice: (
            choice.predicted.drives,
            choice.predicted.seconds,
            choice.predicted.recompute_s,
            choice.predicted.host,
        ),
    )


def safest_ways(
    costs: Sequence[BlockCost], room: ActivationRoom, rates: ActivationRates
) -> tuple[BlockWay, ...]:
    """Return the way of each block that holds the least where modules compute."""
    return tuple(
        min(_ways_of(cost, room, rates, moves=True), key=lambda way: _held(_effect_of(cost, way)))
        for cost in costs
    )


def gains_of_more(
    choice: ActivationChoice,
    costs: Sequence[BlockCost],
    room: ActivationRoom,
    rates: ActivationRates,
    *,
    more: int = 1 << 30,
) -> Mapping[Tier, float]:
    """Return the seconds of a step that `more` bytes would save, by the tier that gets them;
    `choice` is what was chosen without them.
    """
    now = choice.predicted.seconds
    larger = {
        Tier.DEVICE: replace(room, device=room.device + more),
        Tier.HOST: replace(room, host=room.host + more),
        Tier.NVME: replace(room, drives=room.drives + more),
    }
    return {
        tier: max(now - choose_ways(costs, with_more, rates).predicted.seconds, 0.0)
        for tier, with_more in larger.items()
        if tier is Tier.DEVICE or _rate_to(tier, rates) is not None
    }


# --- one block ------------------------------------------------------------------------------------


def _effect_of(cost: BlockCost, way: BlockWay) -> _Effect:
    again = 0.0
    if way.recomputes:
        assert cost.recompute_s is not None, "it can run again"
        again = cost.recompute_s
    moved = cost.inputs if way.recomputes else cost.saved
    stays = moved if way.home is Tier.DEVICE else 0
    return _Effect(
        resident=cost.calls * stays,
        # While its last call runs, what the others keep is there too.
        live=(cost.calls - 1) * stays + cost.saved + (cost.inputs if way.recomputes else 0),
        host=cost.calls * moved if way.home is Tier.HOST else 0,
        drives=cost.calls * moved if way.home is Tier.NVME else 0,
        recompute_s=cost.calls * again,
    )


def _ways_of(
    cost: BlockCost, room: ActivationRoom, rates: ActivationRates, *, moves: bool
) -> Iterator[BlockWay]:
    """Yield the ways that a block can go."""
    for way in BlockWay:
        if way.recomputes and cost.recompute_s is None:
            continue
        there = room.host if way.home is Tier.HOST else room.drives
        if way.home is Tier.DEVICE or (moves and _rate_to(way.home, rates) is not None and there):
            yield way


def _held(effect: _Effect) -> tuple[int, int, float, int]:
    return effect.resident, effect.live, effect.recompute_s, effect.drives


def _rate_to(tier: Tier, rates: ActivationRates) -> float | None:
    return rates.to_host if tier is Tier.HOST else rates.to_drives


def _seconds_of(
    forward_s: float, backward_s: float, effect: _Effect, rates: ActivationRates
) -> tuple[float, float]:
    """Return the seconds of forward and backward, which compute for so long at least."""
    _, _, host, drives, recompute_s = effect
    linked = host + (drives if rates.over_link else 0)
    return (
        max(forward_s, linked / (rates.to_host or inf), drives / (rates.to_drives or inf)),
        max(
            backward_s + recompute_s,
            linked / (rates.from_host or inf),
            drives / (rates.from_drives or inf),
        ),
    )


# --- all blocks -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Walked:
    """Ways of the first units, as a chain that shares its beginning with others."""

    effect: _Effect
    way: BlockWay | None = None
    before: _Walked | None = None

    def ways(self) -> list[BlockWay]:
        """Return the way of each unit."""
        found: list[BlockWay] = []
        walked: _Walked | None = self
        while walked is not None and walked.way is not None:
            found.append(walked.way)
            walked = walked.before
        return found[::-1]


class _Search:
    """The search for the ways of some blocks, with moves or without."""

    def __init__(
        self,
        costs: Sequence[BlockCost],
        room: ActivationRoom,
        rates: ActivationRates,
        *,
        moves: bool,
    ) -> None:
        self._costs, self._rates = costs, rates
        self._staging = room.staging if moves else 0
        self._room = replace(room, device=room.device - self._staging)
        self._effects = [
            {way: _effect_of(cost, way) for way in _ways_of(cost, room, rates, moves=moves)}
            for cost in costs
        ]
        self._computes = sum(cost.calls * cost.forward_s for cost in costs)
        self._goes_back = sum(cost.calls * cost.backward_s for cost in costs)

    def choices(self) -> list[ActivationChoice]:
        """Return good choices: the best is among them where all could be looked at."""
        found = list(self._in_rows())
        limit = min((self._seconds(self._effect(ways)) for ways in found), default=inf)
        found += self._walked(limit)
        return [self._chosen(self._mended(ways)) for ways in self._shortlist(found)]

    def _chosen(self, ways: Sequence[BlockWay]) -> ActivationChoice:
        predicted = predict_step(self._costs, ways, self._rates, staging=self._staging)
        return ActivationChoice(ways=tuple(ways), predicted=predicted)

    def _effect(self, ways: Sequence[BlockWay]) -> _Effect:
        effect = _NO_EFFECT
        for effects, way in zip(self._effects, ways, strict=True):
            effect = effect.then(effects[way])
        return effect

    def _seconds(self, effect: _Effect) -> float:
        return sum(_seconds_of(self._computes, self._goes_back, effect, self._rates))

    def _fits(self, effect: _Effect) -> bool:
        return (
            effect.live <= self._room.device
            and effect.host <= self._room.host
            and effect.drives <= self._room.drives
        )

    def _shortlist(self, found: Sequence[list[BlockWay]]) -> Iterator[list[BlockWay]]:
        """Yield the fastest, and of those about as fast the one that writes least to drives."""
        if found:
            effects = [self._effect(ways) for ways in found]
            seconds = [self._seconds(effect) for effect in effects]
            by_time = min(range(len(found)), key=seconds.__getitem__)
            fast = [
                number
                for number in range(len(found))
                if seconds[number] <= seconds[by_time] * _AS_FAST
            ]
            by_wear = min(fast, key=lambda number: (effects[number].drives, seconds[number]))
            for number in dict.fromkeys((by_time, by_wear)):
                yield found[number]

    def _in_rows(self) -> Iterator[list[BlockWay]]:
        """Yield what fits of one way for the first blocks and one for the rest."""
        count = len(self._effects)
        # A way that no block can go gives the same rows as KEEP.
        ways = [way for way in BlockWay if any(way in effects for effects in self._effects)]
        ends_of = {way: self._ends(way) for way in ways}
        for first in ways:
            begins = [_NO_EFFECT]
            for effects in self._effects:
                begins.append(begins[-1].then(effects.get(first, effects[BlockWay.KEEP])))
            for last in ways:
                ends = ends_of[last]
                fits = [
                    (self._seconds(effect), at)
                    for at in range(count + 1)
                    if self._fits(effect := begins[at].then(ends[count - at]))
                ]
                if fits:
                    _, at = min(fits)
                    yield [
                        way if way in effects else BlockWay.KEEP
                        for way, effects in zip(
                            [first] * at + [last] * (count - at), self._effects, strict=True
                        )
                    ]

    def _ends(self, way: BlockWay) -> list[_Effect]:
        """Return the effects of no block, of the last one, of the last two, and so on."""
        ends = [_NO_EFFECT]
        for effects in reversed(self._effects):
            ends.append(effects.get(way, effects[BlockWay.KEEP]).then(ends[-1]))
        return ends

    def _walked(self, limit: float) -> Iterator[list[BlockWay]]:
        """Yield the ways that a walk over units of neighbours ends with, none slower than a
        limit.
        """
        count, room = len(self._effects), self._room
        size = max(-(-count // _MOST_UNITS), 1)
        units = [self._effects[begin : begin + size] for begin in range(0, count, size)]
        states = [_Walked(_NO_EFFECT)]
        for number, unit in enumerate(units):
            together = {
                way: _together(effects[way] for effects in unit)
                for way in BlockWay
                if all(way in effects for effects in unit)
            }
            after: dict[_Effect, _Walked] = {}
            for state in states:
                # As `then` and `_fits`, without calls: a hundred thousand are looked at.
                resident, live, host, drives, recompute_s = state.effect
                for way, (more, most, more_host, more_drives, more_s) in together.items():
                    most_live = live if live > resident + most else resident + most
                    if (
                        most_live > room.device
                        or host + more_host > room.host
                        or drives + more_drives > room.drives
                    ):
                        continue
                    both = _new(
                        _Effect,
                        (
                            resident + more,
                            most_live,
                            host + more_host,
                            drives + more_drives,
                            recompute_s + more_s,
                        ),
                    )
                    if both not in after and self._seconds(both) <= limit:
                        after[both] = _Walked(both, way, state)
            states = list(after.values())
            if number < len(units) - 1:
                states = self._merged(states)
        for state in states:
            yield [way for way in state.ways() for _ in range(size)][:count]

    def _merged(self, states: list[_Walked]) -> list[_Walked]:
        """Return so few that the walk ends soon: of near equals, the one that keeps least."""
        if len(states) <= _MOST_STATES:
            return states
        effects = [state.effect for state in states]
        most = [
            max(*amounts, 1e-30)
            for amounts in zip(
                *((effect.host, effect.drives, effect.recompute_s) for effect in effects),
                strict=True,
            )
        ]
        steps = max(int(_MERGED_STATES ** (1 / 3)), 1)
        kept: dict[tuple[int, ...], _Walked] = {}
        for state in states:
            effect = state.effect
            amounts = (effect.host, effect.drives, effect.recompute_s)
            near = tuple(
                round(steps * amount / whole) for amount, whole in zip(amounts, most, strict=True)
            )
            other = kept.get(near)
            if other is None or (effect.resident, effect.live) < (
                other.effect.resident,
                other.effect.live,
            ):
                kept[near] = state
        return list(kept.values())

    def _mended(self, ways: Sequence[BlockWay]) -> list[BlockWay]:
        """Change one block after another, as long as that is better."""
        mended = list(ways)
        best = self._rank(self._effect(mended))
        improved = True
        while improved:
            improved, before = False, _NO_EFFECT
            behind = [_NO_EFFECT]
            for effects, way in zip(reversed(self._effects), reversed(mended), strict=True):
                behind.append(effects[way].then(behind[-1]))
            again = [
                effects[way].recompute_s for effects, way in zip(self._effects, mended, strict=True)
            ]
            for number, effects in enumerate(self._effects):
                after = behind[len(mended) - number - 1]
                for way, effect in effects.items():
                    if way is mended[number]:
                        continue
                    until = before.then(effect)
                    whole = until.then(after)
                    if not self._fits(whole):
                        continue
                    # Added from the front, as everywhere: else rounding tells equals apart.
                    recompute_s = reduce(add, again[number + 1 :], until.recompute_s)
                    rank = self._rank(whole._replace(recompute_s=recompute_s))
                    if rank < best:
                        mended[number], best, improved = way, rank, True
                before = before.then(effects[mended[number]])
        return mended

    def _rank(self, effect: _Effect) -> tuple[float, ...]:
        if not self._fits(effect):
            return (inf,)
        return self._seconds(effect), effect.drives, effect.recompute_s, effect.host


def _together(effects: Iterable[_Effect]) -> _Effect:
    both = _NO_EFFECT
    for effect in effects:
        both = both.then(effect)
    return both


def _nothing_fits(
    costs: Sequence[BlockCost], room: ActivationRoom, rates: ActivationRates
) -> CapacityError:
    safest = safest_ways(costs, room, rates)
    least = predict_step(costs, safest, rates, staging=room.staging)
    return CapacityError(
        tier=Tier.DEVICE.name,
        asked=least.device,
        free=room.device,
        limit=room.device,
        change="use smaller batches or shorter sequences, or give a larger budget, and a larger "
        "activations.resident_bytes if you have set it: with as little in memory as possible, "
        f"activations take {format_bytes(least.device)} where modules compute, "
        f"{format_bytes(least.host)} of the host and {format_bytes(least.drives)} of drives",
    )
