"""A step's time estimated from totals alone: it ranks what is worth simulating.

Pure. Adds up the bytes, updates and operations of each lane for a family of plans, and the memory
that they need. Chooses nothing: what the search picks is always placed and simulated. Called by
forms.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from math import inf, sqrt
from typing import NamedTuple

from infinity_engine.errors import ConfigError
from infinity_engine.optim.policy import HOST_BUFFERS
from infinity_engine.placement.sizing import PASSING, Sizing
from infinity_engine.placement.training import Means, Training
from infinity_engine.plan import Lane, LaneClocks, ResolvedBudget, Tier
from infinity_engine.plan.step import Home
from infinity_engine.sim.room import Parts

__all__ = ["Pace", "StepEstimate"]

_STAGING_SETS = 3
_LEAST_BUFFERS = 2  # for states on drives where gradients stay in memory; else 1 is enough
_MUCH = 10**15  # bytes or parameters: enough to find what each takes
_MOVING = (Lane.H2D, Lane.D2H, Lane.NVME_READ, Lane.NVME_WRITE)
_SOME_RATE = 1.0  # bytes of each nanosecond, for what was not measured


class _Spill(NamedTuple):
    """Bytes that rest on the drives, and the host buffers for them; `fits`: the host has room."""

    fits: bool
    states: float = 0.0
    gradients: float = 0.0
    buffers: int = HOST_BUFFERS


class _Wire(NamedTuple):
    """How long ranks exchange in a forward, and in a backward."""

    forward_ns: float
    backward_ns: float


class _HostPart(NamedTuple):
    """What parts take of the host, where all of it stays there; `buffer` is for what spills."""

    states: float
    gradients: float
    copies: float
    fixed: float
    buffer: float


@dataclass(frozen=True, slots=True)
class _OpBytes:
    """Bytes of one parameter that the host updates, that visits the device, or is resident."""

    host: float
    visiting: float
    resident: float
    copied: float
    """What an update on the host writes for the device."""
    gradient: float
    kept: float
    """A gradient where it is kept, with the sum of several."""
    largest_gradient: int
    """The whole one of the largest parameter."""


@dataclass(frozen=True, slots=True)
class _Computing:
    """How long modules compute in one micro-batch, and in which lane."""

    lane: Lane
    modules: int
    forward_ns: float
    backward_ns: float

    @classmethod
    def of(cls, training: Training, means: Means) -> _Computing:
        """Return that of a training; no time where the rate is unknown."""
        lane, rate = Lane.HOST if means.unified else Lane.DEVICE, means.compute_rate(training)
        count = len(training.model.modules)
        if rate is None:
            return cls(lane, count, 0.0, 0.0)
        forward, again, backward = _operations(training)
        return cls(
            lane,
            count,
            forward_ns=1e9 * forward / rate.forward,
            backward_ns=1e9 * (again / rate.again + backward / rate.backward),
        )


@lru_cache(maxsize=4)
def _operations(training: Training) -> tuple[int, int, int]:
    """Return those of a micro-batch's forward, of what its backward runs again, and of the rest.

    Kept, as advice asks for many machines and one training.
    """
    modules = training.model.modules
    flops = [module.flops(training.sequence) * training.tokens for module in modules]
    again = sum(work * training.runs_again(place) for place, work in enumerate(flops))
    backward = sum(module.backward_flops(training.sequence) for module in modules)
    return sum(flops), again, training.tokens * backward


@lru_cache(maxsize=4)
def _times_gathered(training: Training) -> tuple[float, float]:
    """Return how often a forward and a backward gather a parameter: tiles of the sequence gather
    theirs again.
    """
    once, forward, backward = 1, 1, 1
    for module in training.model.modules:
        nbytes = sum(
            parameter.numel * (parameter.element_bytes or training.width)
            for parameter in module.parameters
        )
        tiles = training.tiles if module.feed_forward else 1
        once += nbytes
        forward += tiles * nbytes
        backward += (tiles if tiles == 1 else 2 * tiles) * nbytes
    return forward / once, backward / once


@dataclass(frozen=True, slots=True)
class Pace:
    """How long lanes and modules take: alike for all families of plans and sizes of subgroups."""

    update: Mapping[Lane, _LaneTime]
    """While an update goes both ways."""
    passing: Mapping[Lane, _LaneTime]
    """In a forward or a backward."""
    one_way: Mapping[Lane, float]
    """What drives take for a byte that they only read, or write, as a part of `update`'s."""
    both_ways: Mapping[Lane, float]
    """How many times what it takes in `passing` a byte takes while others go the other way."""
    alone: Mapping[Lane, float]
    """What updates take while nothing moves, and moves while nothing is updated, as a part of
    `update`'s."""
    computing: _Computing

    @classmethod
    def of(cls, training: Training, means: Means) -> Pace:
        """Return that of a training with certain means."""
        free = means.free_lanes()
        update = _lane_times(LaneClocks(means.rates.both_at_once(), free=free))
        one_way = LaneClocks(means.rates, free=free)
        drives = Lane.NVME_READ, Lane.NVME_WRITE
        alone = means.alone or means.rates
        passing = _lane_times(LaneClocks(alone, free=free))
        both = _lane_times(LaneClocks(alone.both_at_once(), free=free))
        return cls(
            update,
            passing,
            {lane: _lane_time(one_way, lane).each_ns / update[lane].each_ns for lane in drives},
            {
                lane: both[lane].each_ns / time.each_ns if time.each_ns else 1.0
                for lane, time in passing.items()
            },
            {
                lane: min(both[lane].each_ns / time.each_ns, 1.0) if time.each_ns else 1.0
                for lane, time in update.items()
            },
            _Computing.of(training, means),
        )


class StepEstimate:
    """Estimates for parameters in one tier, states on drives or not, and one size of subgroups."""

    def __init__(
        self,
        sizing: Sizing,
        training: Training,
        means: Means,
        budget: ResolvedBudget,
        pace: Pace,
        *,
        tier: Tier,
        drives: bool,
    ) -> None:
        self._sizing = sizing
        self._pace = pace
        self._means = means
        self._budget = budget
        self._tier = tier
        self._drives = drives
        self._micro_batches = training.accumulation_steps
        largest = sizing.largest
        gradient = sum(sizing.all_gradients.values()) / sizing.numel
        has_copies = sizing.formats.has_copies and not sizing.unified
        width = sizing.width if has_copies else 0
        self._bytes = _OpBytes(
            host=sizing.states_bytes(largest, Home.HOST, tier) / largest.numel,
            visiting=sizing.states_bytes(largest, Home.VISITING, tier) / largest.numel,
            resident=sizing.states_bytes(largest, Home.RESIDENT, tier) / largest.numel
            + (width if tier is not Tier.DEVICE else 0),
            copied=width if tier is Tier.DEVICE else 0,
            gradient=gradient,
            kept=4 + gradient if sizing.sums else gradient,
            largest_gradient=max(sizing.all_gradients.values()),
        )
        # A search comes by the same parts again and again.
        self._known_ns: dict[tuple[float, float], float] = {}
        self._forward_ns: dict[bool, float] = {}  # by whether it waits for what it fetches
        self._overlaps = {None: (True, False), True: (True,), False: (False,)}[training.overlap]
        self._wire = self._wire_of(training)

    def ns(self, parts: Parts) -> float:
        """Return about how many nanoseconds a step takes; inf where the parts do not fit."""
        parts = self._in_whole_subgroups(parts)
        known = parts.resident, parts.visiting
        if known not in self._known_ns:
            self._known_ns[known] = self._ns_of_whole_subgroups(parts)
        return self._known_ns[known]

    def _ns_of_whole_subgroups(self, parts: Parts) -> float:
        held, needed = self._on_device(parts)
        fetched = self._budget.device - held
        spill = self._spill(parts)
        if fetched < needed or not spill.fits or self._rests(spill) > self._drives_there:
            return inf
        return self._ns(parts, fetched, spill)

    def least(self, tier: Tier, parts: Parts) -> float:
        """Return about how many bytes of a tier these parts need; inf: another one is too small."""
        device = sum(self._on_device(parts))
        if tier is not Tier.DEVICE and device > self._budget.device:
            return inf
        if tier is Tier.NVME:
            spill = self._spill(parts)
            return self._rests(spill) if spill.fits else inf
        host = self._least_host(parts)
        if tier is Tier.HOST:
            return host
        return device if host <= self._budget.host else inf

    def roominess(self, parts: Parts) -> float:
        """Return how many times what the parts need is there, of the tier that has least of it.

        Below 1 they do not fit.
        """
        device, host = sum(self._on_device(parts)), self._least_host(parts)
        of_device = self._budget.device / device if device else inf
        return min(of_device, self._budget.host / max(host, 1))

    def _rests(self, spill: _Spill) -> float:
        return spill.states + spill.gradients * self._micro_batches + self._values_on_drives

    @cached_property
    def _at_home(self) -> bool:
        """Whether parameters reside elsewhere, and come to the device for their modules."""
        return self._tier is not Tier.DEVICE

    @cached_property
    def _largest(self) -> int:
        return self._sizing.largest.numel

    @cached_property
    def _parameters(self) -> int:
        return sum(self._sizing.parameters)

    @cached_property
    def _largest_passing(self) -> int:
        return sum(sorted(self._sizing.parameters)[-PASSING:])

    @cached_property
    def _drives_there(self) -> int:
        return sum(self._budget.nvme.values())

    @cached_property
    def _values_on_drives(self) -> int:
        return self._parameters if self._tier is Tier.NVME else 0

    # --- memory -----------------------------------------------------------------------------------

    def _on_device(self, parts: Parts) -> tuple[float, float]:
        """Return the device bytes that are held, and those needed for modules and staging."""
        if self._means.unified:
            return 0.0, 0.0
        sizing, at = self._sizing, self._bytes
        updated = (parts.resident + parts.visiting) * sizing.numel
        gradients = at.gradient * updated
        staying = max(sizing.activations, gradients)
        if sizing.sums:  # a new sum has its first gradient beside it: as much of it as stays
            share = parts.visiting / max(1 - parts.resident, parts.visiting, 1e-9)
            whole = at.gradient * parts.resident * sizing.numel
            staying = sizing.activations + 4 * updated + self._largest_staying(whole, share)
        held = at.resident * parts.resident * sizing.numel
        held += sizing.on_their_way + staying + (0 if self._at_home else self._parameters)
        needed = max(
            sizing.deepest if self._at_home else 0, self._set_bytes if parts.visiting > 0 else 0
        )
        return held, needed

    def _largest_staying(self, whole: float, share: float) -> float:
        """Return the most bytes of one gradient that stay on the device.

        The last `whole` bytes of all gradients stay whole; of the others, `share` stays.
        """
        # Residents are the last ones.
        number = bisect_right(self._gradients_from_end, whole)
        before = self._gradients_from_end[number - 1] if number else 0
        most = share * self._bytes.largest_gradient
        if number:
            most = max(most, self._largest_from_end[number - 1])
        if number < len(self._gradients_from_end):
            nbytes = self._gradients_from_end[number] - before
            here = whole - before
            most = max(most, here + share * (nbytes - here))
        return most

    @cached_property
    def _gradients_from_end(self) -> list[int]:
        """The bytes of the last gradient, of the last two, and so on."""
        return list(accumulate([*self._sizing.all_gradients.values()][::-1]))

    @cached_property
    def _largest_from_end(self) -> list[int]:
        """The largest of these."""
        return list(accumulate([*self._sizing.all_gradients.values()][::-1], max))

    def _in_whole_subgroups(self, parts: Parts) -> Parts:
        """Return the parts as a plan will have them."""
        count = self._sizing.numel / self._largest
        resident = int(count * parts.resident + 1e-6) / count
        return Parts(resident, min(round(count * parts.visiting) / count, 1 - resident))

    @cached_property
    def _set_bytes(self) -> float:
        sizing = self._sizing
        copied = sizing.width if self._at_home and sizing.formats.has_copies else 0
        return self._largest * (4 * (1 + len(sizing.state_names)) + copied)

    def _on_host(self, parts: Parts) -> _HostPart:
        sizing, at, numel = self._sizing, self._bytes, self._sizing.numel
        on_host = max(1 - parts.resident - parts.visiting, 0) * numel
        gradients = at.kept * (numel if sizing.unified else on_host)
        if sizing.unified and sizing.sums and not self._drives and self._tier is not Tier.NVME:
            # They stay where modules compute, as on a device: sums, and one more gradient.
            gradients = 4 * numel + at.largest_gradient
        fixed: float = self._host_for_modules(gradients)
        if self._uses_drives:
            fixed += self._means.io_bytes
        if self._tier is Tier.NVME and not sizing.unified:
            fixed += self._largest_passing
        passing = sizing.width if self._tier is Tier.NVME else at.copied
        widest = max(at.host if on_host else 0, at.visiting if parts.visiting > 0 else 0)
        return _HostPart(
            states=at.host * on_host + at.visiting * parts.visiting * numel,
            gradients=gradients,
            copies=at.copied * on_host,
            fixed=fixed,
            buffer=self._largest * (widest + passing),
        )

    @cached_property
    def _uses_drives(self) -> bool:
        return self._drives or (self._tier is Tier.NVME and not self._sizing.unified)

    def _least_host(self, parts: Parts) -> float:
        """Return the least of the host with which these parts fit; inf: drives are too small."""
        there = self._on_host(parts)
        states, gradients, copies = there.states, there.gradients, there.copies
        if not self._uses_drives:
            return there.fixed + states + copies + (0 if self._sizing.unified else gradients)
        left = self._drives_there - self._values_on_drives
        if left < 0:
            return inf
        in_memory = there.fixed + gradients + _LEAST_BUFFERS * there.buffer
        if not self._drives:
            return in_memory + states
        kept = max(states - left, 0)
        if kept:
            in_memory += kept * (states + copies) / states
        rests = states + gradients * self._wire_part * self._micro_batches
        here = 1 - min(left / rests, 1) if rests else 0
        on_drives = there.fixed + there.buffer + self._gradients_in_a_buffer
        return min(in_memory, on_drives + here * (states + gradients + copies))

    def _spill(self, parts: Parts) -> _Spill:
        """Return what the host has no room for."""
        there = self._on_host(parts)
        states, gradients, copies = there.states, there.gradients, there.copies
        left = self._budget.host - there.fixed
        if not self._uses_drives:
            return _Spill(states + copies + (0 if self._sizing.unified else gradients) <= left)
        for buffers in range(HOST_BUFFERS, _LEAST_BUFFERS - 1, -1):
            room = left - gradients - buffers * there.buffer
            if room >= 0 and self._drives:
                kept = min(room * states / (states + copies), states) if states else 0.0
                return _Spill(True, states=states - kept, buffers=buffers)
            if room >= states:
                return _Spill(True, buffers=buffers)
        # Gradients on the drives as well.
        for buffers in range(HOST_BUFFERS if self._drives else 0, 0, -1):
            room = left - buffers * (there.buffer + self._gradients_in_a_buffer)
            if room >= 0:
                away = 1 - min(room / max(states + gradients + copies, 1), 1.0)
                wire = gradients * self._wire_part
                return _Spill(True, states=states * away, gradients=wire * away, buffers=buffers)
        return _Spill(False)

    @cached_property
    def _gradients_in_a_buffer(self) -> float:
        return self._largest * self._bytes.gradient * self._micro_batches

    @cached_property
    def _wire_part(self) -> float:
        """The part of a kept gradient, with its sum, that is the gradient as it came."""
        return self._bytes.gradient / self._bytes.kept

    def _host_for_modules(self, gradients: float) -> float:
        """Return what parameters take of the host, and in one memory what a backward does."""
        sizing = self._sizing
        if not sizing.unified:
            return self._parameters if self._tier is Tier.HOST else 0
        held = self._parameters
        if self._tier is Tier.NVME:
            held = 2 * sizing.deepest
        if self._drives:
            return held + sizing.activations
        both = sizing.activations + gradients
        return held + (both if sizing.sums else max(sizing.activations, gradients))

    # --- time -------------------------------------------------------------------------------------

    def _ns(self, parts: Parts, fetched: float, spill: _Spill) -> float:
        sizing, numel = self._sizing, self._sizing.numel
        visiting, resident = parts.visiting * numel, parts.resident * numel
        on_host = max(numel - visiting - resident, 0)
        values = self._values_on_drives
        lanes = self._lanes_of_update(on_host, visiting, resident, spill)
        crossing_ns = self._crossing_ns(lanes, fetched) if visiting else 0.0
        updating = self._pipelined(lanes, spill, crossing_ns, parts)
        computing = self._pace.computing
        come = self._parameters if self._at_home and not self._means.unified else 0
        again = max(come - fetched, 0)
        read_again = again if values else 0
        if values and self._means.unified and (spill.states or spill.gradients):
            read_again = max(values - 2 * sizing.deepest, 0)  # the host has no room for more
        two_modules = sizing.deepest / self._means.ranks + self._parameters / computing.modules
        waits = bool(again) and fetched < two_modules
        passing, time = partial(self._passing_ns, waits=waits), self._pace.passing
        fetching = time[Lane.H2D].of(come), time[Lane.NVME_READ].of(values)
        if waits not in self._forward_ns:
            self._forward_ns[waits] = passing(computing.forward_ns, self._wire.forward_ns, fetching)
        forward_ns = self._forward_ns[waits]
        gradients = self._bytes.gradient * on_host
        up_ns, down_ns = self._both_ways_ns((Lane.H2D, again), (Lane.D2H, gradients))
        read_ns, written_ns = self._both_ways_ns(
            (Lane.NVME_READ, read_again), (Lane.NVME_WRITE, spill.gradients)
        )
        making_ns = passing(computing.backward_ns, self._wire.backward_ns, (up_ns, read_ns))
        sending_ns = self._sending_ns((down_ns, written_ns), parts)
        backward_ns = max(making_ns, sending_ns)
        updating_ns = updating + forward_ns
        if True in self._overlaps:
            if self._means.unified:
                # Modules are handed what the update has made: they read none of it from drives.
                is_handed = bool(values) and self._drives
                beside_ns = self._beside_ns(lanes, updating, parts) if is_handed else updating_ns
            elif not self._at_home and self._means.ranks == 1:
                beside_ns = self._beside_ns(lanes, updating, parts)
            elif self._wire.forward_ns and self._tier is Tier.HOST and not visiting:
                # The thread that updates waits for parameters, and not for what ranks exchange.
                fetched_ns = passing(computing.forward_ns, 0.0, fetching)
                beside_ns = max(
                    updating,
                    lanes[Lane.HOST] + fetched_ns,
                    lanes[Lane.DEVICE] + computing.forward_ns,
                    self._gathered_beside_ns(lanes, parts),
                )
            elif self._at_home and visiting and on_host and not self._is_tight(fetched):
                # The thread that updates waits for parameters too, so that visitors hold it up.
                beside_ns = max(updating_ns, lanes[Lane.HOST] + crossing_ns)
            else:
                beside_ns = updating_ns
            updating_ns = min(updating_ns, beside_ns) if False in self._overlaps else beside_ns
        more = self._micro_batches - 1
        if not more:
            return updating_ns + backward_ns
        # What the device has room for stays from one micro-batch to the next.
        fetching = time[Lane.H2D].of(again), time[Lane.NVME_READ].of(read_again)
        next_forward_ns = passing(computing.forward_ns, self._wire.forward_ns, fetching)
        # The next forward does not wait for gradients to come down.
        return updating_ns + backward_ns + more * max(next_forward_ns + making_ns, sending_ns)

    def _lanes_of_update(
        self, on_host: float, visiting: float, resident: float, spill: _Spill
    ) -> dict[Lane, float]:
        """Return how long each lane works in an update of so many parameters."""
        sizing, values = self._sizing, self._values_on_drives
        states = 4 * (1 + len(sizing.state_names))
        # Values without copies are the masters: an update on the host reads its own.
        masters = sizing.width * on_host if values and not sizing.formats.has_copies else 0
        on_device = visiting + resident
        io = on_host + visiting if self._drives else 0
        # What a lane moves or updates, and of how many parameters: each subgroup costs a start.
        work = {
            Lane.HOST: (on_host, on_host),
            Lane.DEVICE: (on_device, on_device),
            Lane.H2D: (
                states * visiting + (0 if self._at_home else sizing.width * on_host),
                visiting + (0 if self._at_home else on_host),
            ),
            Lane.D2H: (
                states * visiting + (sizing.width * on_device if self._at_home else 0),
                visiting + (on_device if self._at_home else 0),
            ),
            Lane.NVME_READ: (spill.states + masters + spill.gradients * self._micro_batches, io),
            Lane.NVME_WRITE: (spill.states + values, io),
        }
        pace, largest = self._pace.update, self._largest
        lanes = {}
        for lane, (amount, moved) in work.items():
            each_ns, start_ns = pace[lane]
            lanes[lane] = each_ns * amount + start_ns + start_ns * moved / largest
        longer = max(self._pace.one_way, key=lanes.__getitem__)
        both_ns = min(lanes[lane] for lane in self._pace.one_way)
        lanes[longer] = both_ns + self._pace.one_way[longer] * (lanes[longer] - both_ns)
        self._disturb(lanes)
        return lanes

    def _disturb(self, lanes: dict[Lane, float]) -> None:
        """Let the host's updates be disturbed only while something moves, and what moves while the
        host updates: the shorter of the two is so all the time.
        """
        moving = max(_MOVING, key=lanes.__getitem__)
        longer, shorter_ns = (Lane.HOST, lanes[moving])
        if lanes[Lane.HOST] < lanes[moving]:
            longer, shorter_ns = moving, lanes[Lane.HOST]
        beside_ns, alone = lanes[longer], self._pace.alone[longer]
        if alone == 1 or not beside_ns:
            return
        alone_ns = alone * beside_ns
        # t = alone + (beside - alone) shorter / t
        found_ns = (alone_ns + sqrt(alone_ns**2 + 4 * (beside_ns - alone_ns) * shorter_ns)) / 2
        for lane in (Lane.HOST,) if longer is Lane.HOST else _MOVING:
            lanes[lane] *= max(found_ns / beside_ns, self._pace.alone[lane])

    def _both_ways_ns(
        self, one: tuple[Lane, float], other: tuple[Lane, float]
    ) -> tuple[float, float]:
        """Return how long a pass takes for so much each way: both at once, then one alone."""
        one_ns, other_ns = (self._pace.passing[lane].of(amount) for lane, amount in (one, other))
        if not (one[1] and other[1]):
            return one_ns, other_ns
        slower, other_slower = (self._pace.both_ways[lane] for lane, _ in (one, other))
        one_ns, other_ns = slower * one_ns, other_slower * other_ns
        both_ns = min(one_ns, other_ns)
        return (
            both_ns + (one_ns - both_ns) / slower,
            both_ns + (other_ns - both_ns) / other_slower,
        )

    def _passing_ns(
        self,
        computing_ns: float,
        wire_ns: float,
        fetching: tuple[float, float],
        *,
        waits: bool,
    ) -> float:
        """Return how long all modules take that fetch over the link and from drives for so long.

        `waits`: there is no room to fetch the next module while one computes.
        """
        if waits:
            return max(computing_ns + max(fetching), wire_ns)
        return _overlapped([computing_ns, wire_ns, *fetching], self._pace.computing.modules)

    def _wire_of(self, training: Training) -> _Wire:
        """Return how long ranks exchange in a forward, and in a backward."""
        means, sizing = self._means, self._sizing
        if means.ranks == 1 or not means.wire_bytes_per_s:
            return _Wire(0.0, 0.0)
        each_ns = 1e9 * (means.ranks - 1) / means.wire_bytes_per_s
        forward, backward = _times_gathered(training)
        reduced = sum(sizing.parameters[number] for number in sizing.subgroups_of)
        gathered_ns = each_ns * self._parameters
        return _Wire(forward * gathered_ns, backward * gathered_ns + each_ns * reduced)

    def _sending_ns(self, sending: tuple[float, float], parts: Parts) -> float:
        """Return how long a backward takes with gradients that go down, and to drives, for so
        long.
        """
        resident_ns = parts.resident * self._pace.computing.backward_ns
        times = [self._pace.computing.backward_ns - resident_ns, *sending]
        # Residents are the last modules: their gradients stay, and those of others come after them.
        return resident_ns + _overlapped(times, (1 - parts.resident) * self._pace.computing.modules)

    def _beside_ns(self, lanes: Mapping[Lane, float], updating: float, parts: Parts) -> float:
        """Return how long an update takes with a forward that begins before its end."""
        forward_ns = self._pace.computing.forward_ns
        resident_ns = parts.resident * forward_ns  # their modules come last, after all others
        count = (1 - parts.resident) * self._pace.computing.modules
        waiting_ns = resident_ns + _overlapped([updating, forward_ns - resident_ns], count)
        return max(waiting_ns, lanes[self._pace.computing.lane] + forward_ns)

    def _gathered_beside_ns(self, lanes: Mapping[Lane, float], parts: Parts) -> float:
        """Return how long ranks take to gather all modules beside an update on the host.

        With each module goes one update, which may wait for drives, until there is none left.
        """
        updating_ns = max(lanes[lane] for lane in (Lane.HOST, Lane.NVME_READ, Lane.NVME_WRITE))
        updates = (1 - parts.resident) * self._sizing.numel / self._largest
        paced = min(updates / self._pace.computing.modules, 1.0)  # the part of the modules
        gathering_ns = self._wire.forward_ns
        return max(updating_ns, paced * gathering_ns) + (1 - paced) * gathering_ns

    def _pipelined(
        self, lanes: Mapping[Lane, float], spill: _Spill, crossing_ns: float, parts: Parts
    ) -> float:
        """Return the update's time: lanes overlap as far as buffers and staging sets allow."""
        moving = (1 - parts.resident) * self._sizing.numel
        found = max(_overlapped(lanes.values(), moving / self._largest), crossing_ns)
        if not (spill.states or spill.gradients):
            return found
        # The host and the device each have a queue, which begins with what stayed in memory: until
        # one of them is through with that, drives do nothing.
        read_ns, write_ns = lanes[Lane.NVME_READ], lanes[Lane.NVME_WRITE]
        away = min(spill.states / (self._bytes.host * max(moving, 1)), 1.0)
        through = (read_ns + write_ns + away * lanes[Lane.HOST]) / spill.buffers
        drives_ns = max(read_ns, write_ns, through)
        part = min(parts.visiting * self._sizing.numel / max(moving, 1), 1.0)
        queues = [(lanes[Lane.HOST], 1 - part), (crossing_ns, part)]
        here = [((1 - away) * ns, part) for ns, part in queues if part > 0]
        begin_ns = min(ns for ns, _ in here)
        return max(found, begin_ns + drives_ns, *(ns + part * drives_ns for ns, part in here))

    def _crossing_ns(self, lanes: Mapping[Lane, float], left: float) -> float:
        """Return how long visitors take, with as many staging sets as there is room for."""
        times = [lanes[lane] for lane in (Lane.H2D, Lane.DEVICE, Lane.D2H)]
        return max(*times, sum(times) / self._sets(left))

    def _sets(self, left: float) -> int:
        return max(min(int(left // self._set_bytes), _STAGING_SETS), 1)

    def _is_tight(self, left: float) -> bool:
        """Tell whether staging sets leave no module room: the first one ends the update then."""
        room = left + self._sizing.on_their_way - self._sets(left) * self._set_bytes
        return room < self._sizing.deepest


class _LaneTime(NamedTuple):
    """What a lane takes: for each byte or parameter, and to start."""

    each_ns: float
    start_ns: float

    def of(self, amount: float) -> float:
        """Return the nanoseconds that so much takes."""
        return self.each_ns * amount + self.start_ns


def _overlapped(times: Collection[float], count: float) -> float:
    """Return how long so many pieces of work take that pass from one lane to the next."""
    longest = max(times)
    return longest + (sum(times) - longest) / (count if count > 1 else 1)


def _lane_times(clocks: LaneClocks) -> dict[Lane, _LaneTime]:
    """Return what each lane takes, worked out once: a search asks thousands of times."""
    return {lane: _lane_time(clocks, lane) for lane in Lane}


def _lane_time(clocks: LaneClocks, lane: Lane) -> _LaneTime:
    try:
        start_ns = clocks.duration_ns(lane, 0)
        return _LaneTime((clocks.duration_ns(lane, _MUCH) - start_ns) / _MUCH, start_ns)
    except ConfigError:  # a rate is missing: simulating a step will say so
        return _LaneTime(1 / _SOME_RATE, 0.0)
