"""`ActivationAdvice`: what `activations="auto"` would choose for a plan that fits.

Pure. The plan's own activations are all kept, or all recomputed; what it leaves of each tier is the
room that the choice has. Called by the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
)
from infinity_engine.placement.training import Means, Training
from infinity_engine.plan import Lane, Tier
from infinity_engine.sim.planner import Decision
from infinity_engine.sim.report import PlanReport, resource

__all__ = ["ActivationAdvice", "activation_advice"]

_LEAST_LEFT = 0.05  # of a link that is always busy
_STAGED_INPUTS = 3  # tensors of about that size that are on their way while a block computes


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationAdvice:
    """Bytes that one block saves and is given, the choice, and the seconds that it saves.

    `planned_s` are those of the plan, with what its moved inputs take, which its phases lack.
    `gains` are the seconds of a step that one GiB more of a tier would save.
    """

    saved: int
    inputs: int
    choice: ActivationChoice
    seconds: float
    planned_s: float
    gains: Mapping[Tier, float]

    def to_mapping(self) -> dict[str, object]:
        """Return it as lists and mappings, ready for JSON."""
        predicted = self.choice.predicted
        return {
            "block_saved_bytes": self.saved,
            "block_input_bytes": self.inputs,
            "blocks": {way.value: count for way, count in self.choice.counts().items()},
            "device_bytes": predicted.device,
            "host_bytes": predicted.host,
            "drive_bytes": predicted.drives,
            "forward_and_backward_s": self.seconds,
            "planned_forward_and_backward_s": self.planned_s,
            "saved_s_by_1_gib": {tier.value: gain for tier, gain in self.gains.items()},
        }


def activation_advice(decision: Decision, report: PlanReport) -> ActivationAdvice | None:
    """Return the advice; None where activations or the rate of computing are not known."""
    training, means = decision.training, decision.means
    known, rate = training.model.activations, means.compute_rate(training)
    if rate is None or not known.are_known:
        return None
    costs = _costs(training, means)
    room, rates = _room(training, means, report, costs[0]), _rates(means, report)
    try:
        choice = choose_ways(costs, room, rates)
        gains = gains_of_more(choice, costs, room, rates)
    # The plan fits by rounding of its own; there is nothing to add to it.
    except CapacityError:
        return None
    planned = BlockWay.RECOMPUTE if training.checkpointing else BlockWay.KEEP
    if training.inputs_moved:
        to_drives = bool(means.moved_inputs()[Tier.NVME])
        planned = BlockWay.RECOMPUTE_DRIVE if to_drives else BlockWay.RECOMPUTE_HOST
    micro_batches = training.accumulation_steps
    return ActivationAdvice(
        saved=costs[0].saved,
        inputs=costs[0].inputs,
        choice=choice,
        seconds=micro_batches * choice.predicted.seconds,
        planned_s=micro_batches * predict_step(costs, [planned] * len(costs), rates).seconds,
        gains={tier: micro_batches * gain for tier, gain in gains.items()},
    )


def _costs(training: Training, means: Means) -> list[BlockCost]:
    """Return equal costs for each block: all modules but the last one are in blocks."""
    known, rate = training.model.activations, means.compute_rate(training)
    assert rate is not None, "it was asked for"
    modules, tokens, sequence = training.model.modules[:-1], training.tokens, training.sequence
    forward = tokens * sum(module.flops(sequence) for module in modules) / rate.forward
    backward = tokens * sum(module.backward_flops(sequence) for module in modules) / rate.backward
    if training.tiles > 1:  # each tile of the sequence runs again, whatever its block does
        tiled = sum(module.flops(sequence) for module in modules if module.feed_forward)
        backward += tokens * tiled / rate.again
    cost = BlockCost(
        saved=known.block_bytes(tokens, width=training.width, tile_tokens=training.tile_tokens),
        inputs=known.input_bytes(tokens, width=training.width),
        forward_s=forward / known.blocks,
        backward_s=backward / known.blocks,
        recompute_s=forward * rate.forward / rate.again / known.blocks,
    )
    return [cost] * known.blocks


def _room(training: Training, means: Means, report: PlanReport, cost: BlockCost) -> ActivationRoom:
    """Return what the plan leaves of each tier, and what its own activations take."""
    # The choice decides anew whether inputs wait elsewhere, and where.
    moved = means.moved_inputs()
    left = {
        tier: max(report.limits[tier] - report.held(tier), 0) + moved.get(tier, 0) // means.ranks
        for tier in Tier
    }
    computes = Tier.HOST if means.unified else Tier.DEVICE
    # Not what the plan lists as theirs: gradients take their place as the backward goes on.
    planned = training.activation_bytes() if means.for_all else 0
    # Of one tile of the sequence at a time, whatever is done with what blocks save.
    tile = training.tile_bytes()
    device = max(left[computes] + max(planned - training.passing_bytes(), 0) - tile, 0)
    return ActivationRoom(
        device=device,
        host=0 if means.unified else left[Tier.HOST],
        drives=left[Tier.NVME],
        staging=_STAGED_INPUTS * cost.inputs,
    )


def _rates(means: Means, report: PlanReport) -> ActivationRates:
    """Return the rates of links and drives in the time that parameters and gradients leave them."""
    # Rates of a known machine have drives that there may be none of.
    there = sum(means.before_inputs().budget.nvme.values())
    drives = means.rates.nvme.values() if there else ()
    read = sum(drive.read_bytes_per_s or 0.0 for drive in drives)
    write = sum(drive.write_bytes_per_s or 0.0 for drive in drives)
    links = not means.unified

    def left(rate: float | None, lane: Lane, phase: str) -> float | None:
        busy = sum(
            found.utilisation.get(resource(lane), 0.0)
            for found in report.phases
            if phase in found.name.split(" and ")
        )
        return rate * max(1.0 - busy, _LEAST_LEFT) if rate else None

    return ActivationRates(
        to_host=left(means.rates.d2h_bytes_per_s, Lane.D2H, "forward") if links else None,
        from_host=left(means.rates.h2d_bytes_per_s, Lane.H2D, "backward") if links else None,
        to_drives=left(write, Lane.NVME_WRITE, "forward"),
        from_drives=left(read, Lane.NVME_READ, "backward"),
        over_link=links,
    )
