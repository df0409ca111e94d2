"""What the planner has said of a training, as the report of its run compares it. Never torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infinity_engine.plan import Lane, Rates, Tier
from infinity_engine.reporting.page import binned

if TYPE_CHECKING:
    from infinity_engine.sim.report import PlanReport

__all__ = ["prediction_of"]


def prediction_of(report: PlanReport, rates: Rates, source: str) -> dict[str, object]:
    """Return a plan's figures, ready for JSON; `source` says where its rates are from.

    Times are left out where the rate of computing is not known: they would be of updates alone.
    """
    timeline, spans = report.timeline, report.timeline.spans
    known = report.tokens_per_s is not None
    end_ns = max((end for _, _, end in timeline.cuts), default=0)
    return {
        "step_s": report.step_s if known else None,
        "tokens_per_s": report.tokens_per_s,
        "update_s": report.update_s,
        "phases": {phase.name: phase.seconds for phase in report.phases} if known else {},
        "binding": {phase.name: phase.binding for phase in report.phases},
        "moved": {lane.value: nbytes for lane, nbytes in report.moved.items()},
        "held": {tier.name: report.held(tier) for tier in Tier if report.limits[tier]},
        "rates_are": source,
        "rates": {
            Lane.H2D.value: rates.h2d_bytes_per_s,
            Lane.D2H.value: rates.d2h_bytes_per_s,
            Lane.NVME_READ.value: _sum([drive.read_bytes_per_s for drive in rates.nvme.values()]),
            Lane.NVME_WRITE.value: _sum([drive.write_bytes_per_s for drive in rates.nvme.values()]),
        },
        "strips": {
            lane.value: [
                round(part, 3)
                for part in binned(
                    [(span.start_ns, span.end_ns) for span in spans if span.lane is lane],
                    end_ns,
                )
            ]
            for lane in Lane
            if known and end_ns and any(span.lane is lane for span in spans)
        },
        "shown_s": end_ns / 1e9 if known else None,
    }


def _sum(rates: list[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    # One drive with an unknown rate makes the sum unknown.
    return sum(known) if known and len(known) == len(rates) else None
