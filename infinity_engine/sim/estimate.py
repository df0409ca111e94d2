"""A step's time estimated from totals alone: it ranks what is worth simulating.

Pure. Adds up the bytes, updates and operations of each lane for a family of plans, and the memory
that they need, as if states could be cut anywhere. Chooses nothing: what the search picks is always
placed and simulated. Called by search.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from infinity_engine.errors import ConfigError
from infinity_engine.optim.policy import HOST_BUFFERS
from infinity_engine.placement.sizing import Sizing
from infinity_engine.placement.training import Means, Training
from infinity_engine.plan import Lane, LaneClocks, ResolvedBudget, Tier
from infinity_engine.plan.step import Home
from infinity_engine.sim.room import Parts

__all__ = ["StepEstimate"]

_STAGING_SETS = 3
_PASSING = 4  # of the largest parameters that pass the host at once
_SOME_RATE = 1.0  # bytes of each nanosecond, for what was not measured


class _Spill(NamedTuple):
    """Bytes that rest on the drives, and the host buffers for them; `fits`: the host has room."""

    fits: bool
    states: float = 0.0
    gradients: float = 0.0
    buffers: int = HOST_BUFFERS


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


@dataclass(frozen=True, slots=True)
class _Computing:
    """How long modules compute in one micro-batch, and in which lane."""

    lane: Lane
    forward_ns: float
    backward_ns: float

    @classmethod
    def of(cls, training: Training, means: Means) -> _Computing:
        """Return that of a training; no time where the rate is unknown."""
        lane, rate = Lane.HOST if means.unified else Lane.DEVICE, means.compute_rate(training)
        if rate is None:
            return cls(lane, 0.0, 0.0)
        modules = training.model.modules
        flops = [module.flops(training.sequence) * training.tokens for module in modules]
        backward = [module.backward_flops(training.sequence) for module in modules]
        again = sum(flops[:-1]) if training.checkpointing else 0
        return cls(
            lane,
            forward_ns=1e9 * sum(flops) / rate.forward,
            backward_ns=1e9
            * (again / rate.forward + training.tokens * sum(backward) / rate.backward),
        )


class StepEstimate:
    """Estimates for parameters in one tier, states on drives or not, and one size of subgroups."""

    def __init__(
        self,
        sizing: Sizing,
        training: Training,
        means: Means,
        budget: ResolvedBudget,
        *,
        tier: Tier,
        drives: bool,
    ) -> None:
        self._sizing = sizing
        self._means = means
        self._budget = budget
        self._tier = tier
        self._drives = drives
        self._micro_batches = training.accumulation_steps
        self._numel = sizing.numel
        largest = sizing.largest
        self._largest = largest.numel
        self._at_home = tier is not Tier.DEVICE
        self._parameters = sum(sizing.parameters)
        gradient = sum(sizing.all_gradients.values()) / self._numel
        has_copies = sizing.formats.parameter is not None and not sizing.unified
        width = sizing.width if has_copies else 0
        self._bytes = _OpBytes(
            host=sizing.states_bytes(largest, Home.HOST, tier) / largest.numel,
            visiting=sizing.states_bytes(largest, Home.VISITING, tier) / largest.numel,
            resident=sizing.states_bytes(largest, Home.RESIDENT, tier) / largest.numel
            + (width if self._at_home else 0),
            copied=0 if self._at_home else width,
            gradient=gradient,
            kept=4 + gradient if sizing.sums else gradient,
        )
        self._update = LaneClocks(means.rates.both_at_once(), free=means.free_lanes())
        self._pass = LaneClocks(means.alone or means.rates, free=means.free_lanes())
        self._computing = _Computing.of(training, means)
        self._overlaps = {None: (True, False), True: (True,), False: (False,)}[training.overlap]

    def ns(self, parts: Parts) -> float:
        """Return about how many nanoseconds a step takes; inf where the parts do not fit."""
        fetched = self._device_left(parts)
        spill = self._spill(parts)
        if fetched < 0 or not spill.fits or self._rests(spill) > self._drives_there:
            return inf
        return self._ns(parts, fetched, spill)

    @property
    def _drives_there(self) -> float:
        return sum(self._budget.nvme.values())

    def _rests(self, spill: _Spill) -> float:
        values = self._parameters if self._tier is Tier.NVME else 0
        return spill.states + spill.gradients * self._micro_batches + values

    # --- memory -----------------------------------------------------------------------------------

    def _device_left(self, parts: Parts) -> float:
        """Return the device bytes left for fetched parameters; negative where it is too small."""
        if self._means.unified:
            return 0.0
        sizing, at = self._sizing, self._bytes
        gradients = (
            (4 if sizing.sums else at.gradient) * (parts.resident + parts.visiting) * self._numel
        )
        staying = (
            sizing.activations + gradients if sizing.sums else max(sizing.activations, gradients)
        )
        left = self._budget.device - at.resident * parts.resident * self._numel
        left -= sizing.on_their_way + staying + (0 if self._at_home else self._parameters)
        needed = max(
            sizing.deepest if self._at_home else 0, self._set_bytes if parts.visiting > 0 else 0
        )
        return -1.0 if left < needed else left

    @property
    def _set_bytes(self) -> float:
        sizing = self._sizing
        copied = sizing.width if self._at_home and sizing.formats.parameter is not None else 0
        return self._largest * (4 * (1 + len(sizing.state_names)) + copied)

    def _sets(self, left: float) -> int:
        return max(min(int(left // self._set_bytes), _STAGING_SETS), 1)

    def _spill(self, parts: Parts) -> _Spill:
        """Return what the host has no room for."""
        sizing, at, numel = self._sizing, self._bytes, self._numel
        on_host = max(1 - parts.resident - parts.visiting, 0) * numel
        states = at.host * on_host + at.visiting * parts.visiting * numel
        gradients = at.kept * (numel if sizing.unified else on_host)
        left = self._budget.host - self._host_for_modules(gradients)
        copies = at.copied * on_host
        if not self._drives and (sizing.unified or self._tier is not Tier.NVME):
            return _Spill(states + copies + (0 if sizing.unified else gradients) <= left)
        left -= self._means.io_bytes
        if self._tier is Tier.NVME and not sizing.unified:
            left -= sum(sorted(sizing.parameters)[-_PASSING:])
        passing = sizing.width if self._tier is Tier.NVME else at.copied
        widest = max(at.host if on_host else 0, at.visiting if parts.visiting > 0 else 0)
        one = self._largest * (widest + passing)
        for buffers in range(HOST_BUFFERS, 1, -1):
            room = left - gradients - buffers * one
            if room >= 0 and self._drives:
                kept = min(room * states / (states + copies), states) if states else 0.0
                return _Spill(True, states=states - kept, buffers=buffers)
            if room >= states:
                return _Spill(True, buffers=buffers)
        return self._with_gradients_on_drives(left, one, states, gradients, copies)

    def _host_for_modules(self, gradients: float) -> float:
        """Return what parameters take of the host, and in one memory what a backward does."""
        sizing = self._sizing
        if not sizing.unified:
            return self._parameters if self._tier is Tier.HOST else 0
        held = 0 if sizing.own else self._parameters
        if self._tier is Tier.NVME:
            held = 2 * sizing.deepest
        if self._drives:
            return held + sizing.activations
        both = sizing.activations + gradients
        return held + (both if sizing.sums else max(sizing.activations, gradients))

    def _with_gradients_on_drives(
        self, left: float, one: float, states: float, gradients: float, copies: float
    ) -> _Spill:
        one += self._largest * self._bytes.gradient * self._micro_batches
        for buffers in range(HOST_BUFFERS if self._drives else 0, 0, -1):
            room = left - buffers * one
            if room >= 0:
                away = 1 - min(room / max(states + gradients + copies, 1), 1.0)
                wire = gradients * self._bytes.gradient / self._bytes.kept
                return _Spill(True, states=states * away, gradients=wire * away, buffers=buffers)
        return _Spill(False)

    # --- time -------------------------------------------------------------------------------------

    def _ns(self, parts: Parts, fetched: float, spill: _Spill) -> float:
        sizing, numel = self._sizing, self._numel
        states = 4 * (1 + len(sizing.state_names))
        visiting, resident = parts.visiting * numel, parts.resident * numel
        on_host = max(numel - visiting - resident, 0)
        values = self._parameters if self._tier is Tier.NVME else 0
        update = {
            Lane.HOST: on_host,
            Lane.DEVICE: visiting + resident,
            Lane.H2D: states * visiting + (0 if self._at_home else sizing.width * on_host),
            Lane.D2H: states * visiting
            + (sizing.width * (visiting + resident) if self._at_home else 0),
            Lane.NVME_READ: spill.states + spill.gradients * self._micro_batches,
            Lane.NVME_WRITE: spill.states + values,
        }
        lanes = {
            lane: self._took(self._update, lane, amount)
            + self._starts(lane, on_host, visiting, resident)
            for lane, amount in update.items()
        }
        updating = self._pipelined(
            lanes, spill, fetched, on_host + visiting, visiting / max(numel, 1)
        )
        come = self._parameters if self._at_home and not self._means.unified else 0
        again = max(come - fetched, 0)
        forward = {
            self._computing.lane: self._computing.forward_ns,
            Lane.H2D: self._took(self._pass, Lane.H2D, come),
            Lane.NVME_READ: self._took(self._pass, Lane.NVME_READ, values),
        }
        backward = {
            self._computing.lane: self._computing.backward_ns,
            Lane.H2D: self._took(self._pass, Lane.H2D, again),
            Lane.D2H: self._took(self._pass, Lane.D2H, self._bytes.gradient * on_host),
            Lane.NVME_READ: self._took(self._pass, Lane.NVME_READ, again if values else 0),
            Lane.NVME_WRITE: self._took(self._pass, Lane.NVME_WRITE, spill.gradients),
        }
        passes = max(forward.values()) + max(backward.values())
        found = inf
        for overlap in self._overlaps:
            first = updating + max(forward.values())
            if overlap:
                both = (lanes.get(lane, 0) + forward.get(lane, 0) for lane in Lane)
                first = max(updating, *both, *forward.values())
            found = min(found, first + max(backward.values()))
        return found + (self._micro_batches - 1) * passes

    def _pipelined(
        self, lanes: dict[Lane, float], spill: _Spill, left: float, moving: float, visits: float
    ) -> float:
        """Return the update's time: lanes overlap as far as buffers and staging sets allow."""
        longest, every = max(lanes.values()), sum(lanes.values())
        count = max(moving / self._largest, 1)
        found = longest + (every - longest) / count
        if spill.states or spill.gradients:
            rests = lanes[Lane.NVME_READ] + lanes[Lane.NVME_WRITE] + lanes[Lane.HOST]
            found = max(found, rests / spill.buffers)
        if visits:
            crossing = lanes[Lane.H2D] + lanes[Lane.D2H] + lanes[Lane.DEVICE]
            found = max(found, crossing / self._sets(left))
        return found

    def _starts(self, lane: Lane, on_host: float, visiting: float, resident: float) -> float:
        """Return the nanoseconds that starting the ops of a lane in an update takes."""
        ops = {
            Lane.HOST: on_host,
            Lane.DEVICE: visiting + resident,
            Lane.H2D: visiting + (0 if self._at_home else on_host),
            Lane.D2H: visiting + (visiting + resident if self._at_home else 0),
        }.get(lane, on_host + visiting if self._drives else 0)
        return self._took(self._update, lane, 0) * ops / self._largest

    @staticmethod
    def _took(clocks: LaneClocks, lane: Lane, amount: float) -> float:
        try:
            return clocks.duration_ns(lane, int(amount))
        except ConfigError:  # a rate is missing: simulating a step will say so
            return amount / _SOME_RATE
