"""`StepReport`: one step in figures, and as a small table for people.

Reads the step that telemetry recorded; measures nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from types import MappingProxyType
from typing import cast

from infinity_engine.activation import BlockUse
from infinity_engine.lanes.meter import (
    FOUND,
    HELD,
    IN_TIME,
    LATE,
    MICRO_BATCHES,
    MISSING,
    UPDATE_NS,
    Cargo,
    Wait,
    busy_counter,
    bytes_counter,
    lane_counter,
    need_counter,
    peak_gauge,
    update_counter,
)
from infinity_engine.memory import Usage
from infinity_engine.outcome import Outcome
from infinity_engine.plan.ops import Lane, UpdateOnDevice, UpdateOnHost, UpdateOp
from infinity_engine.reporting.drives import DriveUse
from infinity_engine.reporting.over_time import HeldOverTime, HeldPart
from infinity_engine.telemetry import StepRecord
from infinity_engine.units import format_bytes, format_decimal_bytes, format_known, format_rate

__all__ = [
    "Hits",
    "LinkUse",
    "Over",
    "Peak",
    "StepReport",
    "UpdatePhase",
    "UpdateUse",
    "held_in",
    "report_of",
]

_PHASES = ("forward", "backward", "update")
_LINKS = (Lane.H2D, Lane.D2H, Lane.NVME_READ, Lane.NVME_WRITE)
_UPDATES: tuple[type[UpdateOp], ...] = (UpdateOnHost, UpdateOnDevice)


class Over(Enum):
    """The time that a link's rate is counted over."""

    BUSY = "while busy"  # the time in which it carried bytes, where the device knows that
    STEP = "over the step"  # the whole step, where the device does not know


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkUse:
    """The bytes over one link, and their rate, None where there were no bytes or no time."""

    nbytes: Mapping[Cargo, int]
    bytes_per_s: float | None
    over: Over


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateUse:
    """The parameters that were updated in one place, and the seconds that this took.

    Seconds are None where the device does not know.
    """

    params: int
    seconds: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdatePhase:
    """An update, from its first op's start to its last op's end, and how busy each lane was.

    A lane with unknown busy times is left out. A drive's part is the time of its bytes at its
    calibrated rates, where there are any.
    """

    seconds: float
    utilisation: Mapping[Lane, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hits:
    """The bytes that were needed and could be on drives: found in memory, or read from drives."""

    found: int
    missing: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The most that a tier, or a directory, held up to the step's end, against its budget."""

    name: str
    nbytes: int
    limit: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """One step in figures; as text, a table. `device` says how to read times: some have a clock.

    `waits` are the seconds in which the host waited; the phases contain them. `links` has the links
    that carried bytes. `update` is the one that has ended in this step: with overlap, that of the
    step before. Parameters in time were on the device, or on their way, when a module needed them.
    `hits` count what could be on drives, where anything is; `drives` is by directory.
    """

    index: int
    device: str
    outcome: Outcome
    micro_batches: int
    loss_scale: float
    gradient_norm: float | None
    seconds: float
    phases: Mapping[str, float]
    waits: Mapping[Wait, float]
    links: Mapping[Lane, LinkUse]
    updates: Mapping[Lane, UpdateUse]
    update: UpdatePhase | None
    # Why this step's update is the first of another plan; None: it is not.
    planned_again: str | None
    parameters_in_time: int
    parameters_late: int
    hits: Mapping[Cargo, Hits]
    drives: Mapping[str, DriveUse]
    peaks: tuple[Peak, ...]
    # What blocks saved, where the engine knows them; and how their ways were chosen.
    blocks: tuple[BlockUse, ...] = ()
    ways: str = ""
    held: HeldOverTime = field(default_factory=HeldOverTime)

    def to_mapping(self) -> dict[str, object]:
        """Return the figures as mappings of numbers and text, ready for JSON."""
        return {
            "device": self.device,
            "outcome": self.outcome.value,
            "micro_batches": self.micro_batches,
            "loss_scale": self.loss_scale,
            "gradient_norm": self.gradient_norm,
            "seconds": self.seconds,
            "phases": dict(self.phases),
            "waits": {wait.value: seconds for wait, seconds in self.waits.items() if seconds},
            "links": {
                lane.value: {
                    "bytes": {cargo.value: nbytes for cargo, nbytes in use.nbytes.items()},
                    "bytes_per_s": use.bytes_per_s,
                    "over": use.over.value,
                }
                for lane, use in self.links.items()
            },
            "updates": {
                lane.value: {"params": use.params, "seconds": use.seconds}
                for lane, use in self.updates.items()
            },
            "planned_again": self.planned_again,
            "parameters_in_time": self.parameters_in_time,
            "parameters_late": self.parameters_late,
            "drives": {directory: _drive_mapping(use) for directory, use in self.drives.items()},
            "activations": self.held.to_mapping() if self.held.parts else None,
            "peaks": {
                peak.name: {"bytes": peak.nbytes, "limit": peak.limit} for peak in self.peaks
            },
        }

    def __str__(self) -> str:
        """Return a table of two columns: names and figures."""
        norm = format_known(self.gradient_norm, ", gradient norm {:.4g}")
        scale = "" if self.loss_scale == 1.0 else f", loss scale {self.loss_scale:g}"
        # Rows without figures are left out below.
        rows = [
            (
                f"step {self.index}",
                f"{self.outcome.value} in {_time(self.seconds)} on {self.device}",
            ),
            ("micro-batches", f"{self.micro_batches}{norm}{scale}"),
            ("time", ", ".join(f"{name} {_time(took)}" for name, took in self.phases.items())),
        ]
        # Waits that took no time are left out.
        rows += [(wait.value, _time(seconds)) for wait, seconds in self.waits.items() if seconds]
        rows += [(lane.value, _link(use)) for lane, use in self.links.items()]
        for lane, updates in self.updates.items():
            if updates.params:
                took = f" in {_time(updates.seconds)}" if updates.seconds else ""
                rows.append((f"updates on {lane.value}", f"{updates.params} parameters{took}"))
        if self.update is not None and self.update.utilisation:
            parts = ", ".join(
                f"{on.value} {part:.0%}" for on, part in self.update.utilisation.items()
            )
            rows.append(("busy in the update", f"{parts} of {_time(self.update.seconds)}"))
        if self.planned_again:
            rows.append(("planned again", self.planned_again))
        if self.parameters_in_time + self.parameters_late:
            fetched = f"{self.parameters_in_time} in time, {self.parameters_late} late"
            rows.append(("parameters fetched", fetched))
        if self.hits:
            found = ", ".join(
                f"{cargo.value} {_part(hits.found, hits.found + hits.missing)}"
                for cargo, hits in self.hits.items()
            )
            rows.append(("found in memory", found))
        if self.ways:
            rows.append(("activations", self.ways))
        rows += self.held.rows()
        rows += [(f"activations of {names}", saved) for names, saved in _blocks(self.blocks)]
        rows += [(f"drive {directory}", _drive(use)) for directory, use in self.drives.items()]
        rows += [(f"wear of {directory}", _wear(use)) for directory, use in self.drives.items()]
        rows += [(f"peak of {peak.name}", _part(peak.nbytes, peak.limit)) for peak in self.peaks]
        width = max(len(what) for what, _ in rows)
        return "\n".join(f"{what:<{width}}  {how_much}" for what, how_much in rows)


def report_of(
    step: StepRecord,
    usage: Sequence[Usage],
    drives: Mapping[str, DriveUse] = MappingProxyType({}),
    drive_rates: Mapping[Lane, float] = MappingProxyType({}),
) -> StepReport:
    """Return the figures of a step that has ended; `usage` has budgets, `drives` the directories.

    `drive_rates` are the bytes per second of all drives together in an update, as far as they were
    calibrated.
    """
    assert step.end_ns is not None, "the step has ended"
    # Telemetry counts nanoseconds.
    seconds = (step.end_ns - step.start_ns) / 1e9
    notes, counted = step.notes, step.counters
    hits = {}
    for cargo in Cargo:
        found, missing = (counted.get(need_counter(cargo, where), 0) for where in (FOUND, MISSING))
        if found + missing:
            hits[cargo] = Hits(found=found, missing=missing)
    return StepReport(
        index=step.index,
        device=str(notes["device"]),
        outcome=Outcome(notes["outcome"]),
        micro_batches=counted.get(MICRO_BATCHES, 0),
        loss_scale=cast(float, notes["loss_scale"]),
        gradient_norm=cast("float | None", notes["gradient_norm"]),
        seconds=seconds,
        # A phase that a step did not have took no time.
        phases={name: counted.get(f"{name} ns", 0) / 1e9 for name in _PHASES},
        waits={wait: counted.get(f"{wait.value} ns", 0) / 1e9 for wait in Wait},
        links={
            lane: _link_use(lane, counted, seconds) for lane in _LINKS if _carried(lane, counted)
        },
        updates={op.lane: _update_use(op, counted) for op in _UPDATES},
        update=_update_phase(counted, drive_rates),
        planned_again=cast("str | None", notes.get("planned_again")),
        parameters_in_time=counted.get(IN_TIME, 0),
        parameters_late=counted.get(LATE, 0),
        hits=hits,
        drives=drives,
        peaks=tuple(
            Peak(
                # Each directory of NVMe has a limit of its own.
                name=tier_usage.directory or tier_usage.tier.name,
                nbytes=step.peaks.get(peak_gauge(tier_usage), 0),
                limit=tier_usage.limit,
            )
            for tier_usage in usage
        ),
        blocks=cast("tuple[BlockUse, ...]", notes.get("blocks", ())),
        ways=str(notes.get("ways", "")),
        held=held_in(step),
    )


def held_in(step: StepRecord) -> HeldOverTime:
    """Return what blocks held of their activations in a step, and when."""
    return HeldOverTime(
        [
            HeldPart(
                block=str(span.fields["block"]),
                held=str(span.fields[HELD]),
                nbytes=cast(int, span.fields["nbytes"]),
                start_ns=span.start_ns - step.start_ns,
                end_ns=span.end_ns - step.start_ns,
            )
            for span in sorted(step.spans, key=lambda span: span.start_ns)
            if HELD in span.fields
        ]
    )


def _carried(lane: Lane, counted: Mapping[str, int]) -> dict[Cargo, int]:
    # Only what was counted in this step.
    names = {cargo: bytes_counter(lane, cargo) for cargo in Cargo}
    return {cargo: counted[name] for cargo, name in names.items() if name in counted}


def _link_use(lane: Lane, counted: Mapping[str, int], seconds: float) -> LinkUse:
    nbytes = _carried(lane, counted)
    over, moved = Over.STEP, sum(nbytes.values())
    # Where the device knows when the link was busy, that time counts, not the step's.
    if busy_counter(lane, "ns") in counted:
        over, moved, seconds = (
            Over.BUSY,
            counted[busy_counter(lane, "bytes")],
            counted[busy_counter(lane, "ns")] / 1e9,
        )
    return LinkUse(
        nbytes=nbytes, bytes_per_s=moved / seconds if moved and seconds else None, over=over
    )


def _update_use(op: type[UpdateOp], counted: Mapping[str, int]) -> UpdateUse:
    params, ns = counted.get(update_counter(op, "params"), 0), counted.get(update_counter(op, "ns"))
    # No parameters take no time; parameters without a time have an unknown one.
    return UpdateUse(params=params, seconds=None if ns is None and params else (ns or 0) / 1e9)


def _update_phase(
    counted: Mapping[str, int], drive_rates: Mapping[Lane, float]
) -> UpdatePhase | None:
    # No update has ended in this step.
    whole_ns = counted.get(UPDATE_NS, 0)
    if not whole_ns:
        return None
    busy_ns: dict[Lane, float] = {}
    for lane in Lane:
        if lane_counter(lane, "ns") in counted:
            busy_ns[lane] = counted[lane_counter(lane, "ns")]
        # Drives do not report when they were busy: their calibrated rates stand in.
        elif lane in drive_rates and lane_counter(lane, "bytes") in counted:
            busy_ns[lane] = counted[lane_counter(lane, "bytes")] / drive_rates[lane] * 1e9
    utilisation = {lane: ns / whole_ns for lane, ns in busy_ns.items() if ns}
    return UpdatePhase(seconds=whole_ns / 1e9, utilisation=MappingProxyType(utilisation))


def _time(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.3f} ms"


def _link(use: LinkUse) -> str:
    carried = ", ".join(
        f"{cargo.value} {format_bytes(nbytes)}" for cargo, nbytes in use.nbytes.items() if nbytes
    )
    rate = "" if use.bytes_per_s is None else f"; {format_rate(use.bytes_per_s)} {use.over.value}"
    return f"{carried or 'nothing'}{rate}"


def _drive(use: DriveUse) -> str:
    share = format_known(use.calibrated_share, "; {:.0%} of its calibrated bandwidth")
    return f"{format_bytes(use.read_bytes)} read, {format_bytes(use.written_bytes)} written{share}"


def _drive_mapping(use: DriveUse) -> dict[str, object]:
    return {
        "read": use.read_bytes,
        "written": use.written_bytes,
        "written_in_all": use.written_in_all,
        "calibrated_share": use.calibrated_share,
        "rated_bytes": None if use.endurance is None else use.endurance.rated_bytes,
    }


def _wear(use: DriveUse) -> str:
    endurance = format_known(use.endurance, ", {}")
    return f"{format_decimal_bytes(use.written_in_all)} written in all{endurance}"


def _blocks(uses: Sequence[BlockUse]) -> Iterator[tuple[str, str]]:
    """Yield neighbouring blocks that did the same as one row, and what each of them saved."""
    for (way, saved, held), group in groupby(uses, key=lambda use: (use.way, use.saved, use.held)):
        names = [use.name for use in group]
        named = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        of_each = " each" if len(names) > 1 else ""
        yield named, f"{way}; saved {format_bytes(saved)}, kept {format_bytes(held)}{of_each}"


def _part(nbytes: int, whole: int) -> str:
    return f"{format_bytes(nbytes)} of {format_bytes(whole)}"
