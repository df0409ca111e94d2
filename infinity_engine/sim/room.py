"""Which states may be resident, and which may visit: the small program that memory makes, and
its corners.

Pure, and approximate: to whole subgroups, and with parameters of one size. It says what is worth
trying; what fits and how long it takes is for placing.py and timeline.py to say. Called by
forms.py and search.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.optim.policy import HOST_BUFFERS
from infinity_engine.placement.sizing import Sizing
from infinity_engine.placement.training import Means
from infinity_engine.plan import Rates, ResolvedBudget, Tier
from infinity_engine.plan.step import BytesPerParameter, Home
from infinity_engine.sim.bound import update_bound

__all__ = ["NO_ROOM", "MemoryEdges", "Parts"]

_ROUNDING = 1e-9  # of all: parts so little beyond an edge are at it
_AHEAD = 2  # of the largest modules at once: one computes, and the next one comes


class Parts(NamedTuple):
    """What part of all states stays on the device, and what part visits it for its update; the host
    has the rest.
    """

    resident: float = 0.0
    visiting: float = 0.0

    def moved(self, resident: float, visiting: float) -> Parts:
        """Return parts that differ by so much."""
        return Parts(self.resident + resident, self.visiting + visiting)

    def towards(self, other: Parts, distance: float) -> Parts:
        """Return parts that are nearer to others by so much, at most as near as them."""
        whole = self.distance(other)
        part = min(distance / whole, 1.0) if whole else 0.0
        return self.moved(
            part * (other.resident - self.resident), part * (other.visiting - self.visiting)
        )

    def distance(self, other: Parts) -> float:
        """Return by how much the one that differs most does."""
        return max(abs(self.resident - other.resident), abs(self.visiting - other.visiting))


@dataclass(frozen=True, slots=True)
class _Edge:
    """Where `resident` and `visiting`, times so much each, are `most`.

    Beyond a `hard` one there is no room.
    """

    resident: float
    visiting: float
    most: float
    hard: bool = True

    def left(self, parts: Parts, way: tuple[float, float]) -> float:
        """Return how much of the way from these parts on is within."""
        nearer = self.resident * way[0] + self.visiting * way[1]
        left = self.most - self.resident * parts.resident - self.visiting * parts.visiting
        return min(max(left / nearer, 0.0), 1.0) if nearer > 0 else 1.0

    def meets(self, other: _Edge) -> Parts | None:
        across = self.resident * other.visiting - self.visiting * other.resident
        if not across:
            return None
        return Parts(
            (self.most * other.visiting - self.visiting * other.most) / across,
            (self.resident * other.most - self.most * other.resident) / across,
        )


_NONE_RESIDENT = _Edge(-1, 0, 0)
_NONE_VISITING = _Edge(0, -1, 0)
_ALL = _Edge(1, 1, 1)


@dataclass(frozen=True)
class MemoryEdges:
    """The edges of what fits, with parameters in a certain tier, and states on drives or not, and
    the best share.
    """

    edges: tuple[_Edge, ...]
    most_resident: float
    """Where nothing visits, and so nothing is staged."""
    whole: float
    """The part of all that one subgroup is."""
    may_visit: bool

    @classmethod
    def of(
        cls, sizing: Sizing, means: Means, budget: ResolvedBudget, *, tier: Tier, drives: bool
    ) -> MemoryEdges:
        """Return it for the budget that plans are made with; NO_ROOM where parameters do not
        fit.
        """
        try:
            limits = sizing.limits(budget, tier)
        except CapacityError:
            return NO_ROOM
        if tier is Tier.HOST and sum(sizing.parameters) > budget.host:
            return NO_ROOM
        numel = sizing.numel
        largest = sizing.largest.numel
        all_states = limits.device_bytes(numel)
        staged = limits.device_bytes(largest)  # a set
        # Gradients that stay take the place of activations; sums of them do not, and one more is
        # there to be added.
        gradients = sizing.all_gradients.values()
        gradient = (4 * numel + max(gradients) if sizing.sums else sum(gradients)) / all_states
        activations = 0 if sizing.sums else sizing.activations
        at_home = tier is not Tier.DEVICE
        fetched = (
            [sizing.deepest, _AHEAD * sizing.deepest, sum(sizing.parameters)] if at_home else [0]
        )
        # Fp32 parameters that stay on the device are the masters of residents.
        one = sizing.largest
        states = sizing.states_bytes(one, Home.RESIDENT, tier) + limits.update_bytes * one.numel
        resident = states / limits.device_bytes(one.numel)
        allowed = limits.resident_bytes / all_states
        edges = [_NONE_RESIDENT, _NONE_VISITING, _ALL]
        if resident < 1:
            edges.append(_Edge(1, 0, allowed))
        # One set and one module are needed; with more of either, less waits.
        staging = [(sets, fetched[0]) for sets in range(1, limits.staging_sets)]
        staging += [(limits.staging_sets, nbytes) for nbytes in fetched]
        for number, (sets, nbytes) in enumerate(staging):
            left = (limits.staging_bytes - max(sets * staged, nbytes)) / all_states
            within = left + activations / all_states - gradient * largest / numel
            edges.append(_Edge(resident + gradient, gradient, within, hard=not number))
            if activations:
                edges.append(_Edge(resident, 0, left, hard=not number))
        edges += _on_host(sizing, means, budget, tier=tier, drives=drives)
        share = _best_share(means.rates, limits.per_parameter, at_home=at_home)
        if share is not None:
            edges.append(_Edge(share, 1, share, hard=False))
        return cls(
            edges=tuple(edges),
            most_resident=max(
                min(allowed, (allowed + activations / all_states) / (resident + gradient), 1.0), 0.0
            ),
            whole=largest / numel,
            may_visit=share is not None,
        )

    def holds(self, parts: Parts) -> bool:
        """Tell whether there is room for these."""
        resident, visiting = parts.resident, parts.visiting
        # A search asks hundreds of thousands of times.
        for of_resident, of_visiting, most in self._limits:
            if of_resident * resident + of_visiting * visiting > most:
                return False
        return True

    @cached_property
    def _limits(self) -> list[tuple[float, float, float]]:
        """The hard edges as numbers, each a little farther out."""
        return [(edge.resident, edge.visiting, edge.most + _ROUNDING) for edge in self._hard]

    @cached_property
    def _hard(self) -> tuple[_Edge, ...]:
        """The edges beyond which there is no room."""
        return tuple(edge for edge in self.edges if edge.hard)

    def nearby(self, parts: Parts, resident: float, visiting: float) -> Parts:
        """Return parts, none less than nothing, that differ by so much, or by as much of it as
        there is room for.

        Where there is none at once, and only one is to grow: along the edge, where the other one
        makes room.
        """
        other = Parts(max(parts.resident + resident, 0.0), max(parts.visiting + visiting, 0.0))
        found = self._on_the_way(parts, other)
        if found.distance(parts) < self.whole / 2 and 0 in (resident, visiting):
            found = self._on_the_way(parts, self._along(other, resident_gives=not resident))
        return found

    def _on_the_way(self, parts: Parts, other: Parts) -> Parts:
        """Return the last parts on the straight way from these to the others for which there is
        room.
        """
        way = other.resident - parts.resident, other.visiting - parts.visiting
        far = min((edge.left(parts, way) for edge in self._hard), default=1.0)
        return parts.moved(far * way[0], far * way[1])

    def _along(self, parts: Parts, *, resident_gives: bool) -> Parts:
        """Return parts of which this one is less, so that there is room for the other."""
        hard = self._hard
        if resident_gives:
            most = min(
                (edge.most - edge.visiting * parts.visiting) / edge.resident
                for edge in hard
                if edge.resident > 0
            )
            return parts._replace(resident=max(min(parts.resident, most), 0.0))
        most = min(
            (edge.most - edge.resident * parts.resident) / edge.visiting
            for edge in hard
            if edge.visiting > 0
        )
        return parts._replace(visiting=max(min(parts.visiting, most), 0.0))

    def corners(self) -> dict[str, Parts]:
        """Return where edges meet and all hard ones hold, under names by which those of other sizes
        are alike.

        And the middles of edges, as what a step takes is not straight along them.
        """
        found = {"nothing": Parts(), "most": Parts(resident=self.most_resident)}
        if not self.may_visit:
            return found
        ends: list[list[Parts]] = [[] for _ in self.edges]
        for (number, edge), (other_number, other) in itertools.combinations(
            enumerate(self.edges), 2
        ):
            parts = edge.meets(other)
            if parts is not None and self.holds(parts):
                found.setdefault(f"{number} and {other_number}", parts)
                ends[number].append(parts)
                ends[other_number].append(parts)
        for number, there in enumerate(ends):
            if len(there) > 1:
                first, last = min(there, key=_place), max(there, key=_place)
                found[f"middle of {number}"] = first.towards(last, first.distance(last) / 2)
        return found


NO_ROOM = MemoryEdges(edges=(), most_resident=0.0, whole=1.0, may_visit=False)
"""Where parameters do not fit: there is nothing to choose."""


def _place(parts: Parts) -> tuple[float, float]:
    return parts.resident, parts.visiting


def _on_host(
    sizing: Sizing, means: Means, budget: ResolvedBudget, *, tier: Tier, drives: bool
) -> Iterator[_Edge]:
    """Yield where the host has no more room: for states in memory, and with drives for gradients in
    memory.
    """
    numel = sizing.numel
    largest = sizing.largest
    states = {
        home: sizing.states_bytes(largest, home, tier) / largest.numel
        for home in (Home.HOST, Home.VISITING)
    }
    gradient = sum(sizing.all_gradients.values()) / numel
    gradient += 4 if sizing.sums else 0
    copied = tier is Tier.DEVICE and sizing.formats.has_copies
    host = states[Home.HOST] + gradient + (sizing.width if copied else 0)
    left = budget.host / numel - (sum(sizing.parameters) / numel if tier is Tier.HOST else 0)
    if drives:
        passing = HOST_BUFFERS * states[Home.VISITING] * largest.numel / numel
        left -= means.io_bytes / numel + passing
        yield _Edge(-gradient, -gradient, left - gradient, hard=False)
    yield _Edge(-host, states[Home.VISITING] - host, left - host, hard=not drives)


@lru_cache(maxsize=64)
def _best_share(rates: Rates, per_parameter: BytesPerParameter, *, at_home: bool) -> float | None:
    """Return the share of all that should visit where nothing is resident, by the bound; None: a
    rate is missing.

    Kept, as it is the same for all sizes of subgroups, and exact fractions take time.
    """
    try:
        both = rates.both_at_once()
        return float(update_bound(both, per_parameter=per_parameter, at_home=at_home).best_share)
    except ConfigError:
        return None
