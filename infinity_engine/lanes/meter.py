"""`Meter`: counts a step's bytes over each link, updates in each place, and the host's waiting.

One for each engine; counts in its Telemetry, and knows the names of the counters there. Decides
nothing. Asks the device when it was at work, where it knows: emulated ones do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from infinity_engine.accel import (
    Accelerator,
    EmulatedAccelerator,
    Event,
    OperationRecord,
)
from infinity_engine.accel.operation import Operation
from infinity_engine.memory import Ledger, Usage
from infinity_engine.outcome import StepResult
from infinity_engine.plan.ops import (
    DownloadParameters,
    DownloadStates,
    Lane,
    LoadStates,
    StoreStates,
    UpdateOnDevice,
    UpdateOp,
    UploadParameters,
    UploadStates,
)
from infinity_engine.schedule.executor import WAIT_FOR_OPS, WAIT_FOR_READS, WAIT_FOR_WRITES
from infinity_engine.telemetry import NullTelemetry, Telemetry

__all__ = [
    "FOUND",
    "HELD",
    "IN_TIME",
    "LATE",
    "MICRO_BATCHES",
    "MISSING",
    "UPDATE_NS",
    "Cargo",
    "Meter",
    "Wait",
    "busy_counter",
    "bytes_counter",
    "lane_counter",
    "need_counter",
    "peak_gauge",
    "update_counter",
]

MICRO_BATCHES = "micro-batches"
IN_TIME = "parameters in time"
LATE = "parameters late"
FOUND = "found in memory"
MISSING = "read from drives"
HELD = "held"  # the field of a span that tells how a block's activations were held
UPDATE_NS = "ns of the update"  # from its first op until its last one has ended


_DRIVES = (Lane.NVME_READ, Lane.NVME_WRITE)
_SUBMITTED = (
    UploadStates,
    UploadParameters,
    UpdateOnDevice,
    DownloadStates,
    DownloadParameters,
    LoadStates,
    StoreStates,
)
_OPS = frozenset(kind.__name__ for kind in _SUBMITTED)  # spans with these names belong to an update


class Cargo(Enum):
    """What a copy carries."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    STATES = "states"
    ACTIVATIONS = "activations"

    # By identity, as each member is one object: Enum's own hash runs in Python at each look-up.
    __hash__ = object.__hash__


class Wait(Enum):
    """What the host waits for; the value names the span of that time."""

    PARAMETERS = "wait for parameters"  # parameters that a module needs, or room for them
    # gradients in flight to where they are summed or used, or room for them
    GRADIENTS = "wait for gradients"
    # what autograd has saved, in flight from drives or to them
    ACTIVATIONS = "wait for activations"
    READS = WAIT_FOR_READS  # reads from the drives that the update needs
    WRITES = WAIT_FOR_WRITES  # writes to the drives of what the update made
    CHECKPOINT = "wait for checkpoint"  # until a save has written what the update changes
    OPS = WAIT_FOR_OPS  # other ops of the update, or room for what they move


# Made once, as these two are asked for at each copy and each need.
_OF_BYTES = MappingProxyType(
    {(lane, cargo): f"{lane.value} bytes of {cargo.value}" for lane in Lane for cargo in Cargo}
)
_OF_NEEDS = MappingProxyType(
    {
        (cargo, found): f"bytes of {cargo.value} {found}"
        for cargo in Cargo
        for found in (FOUND, MISSING)
    }
)


def bytes_counter(lane: Lane, cargo: Cargo) -> str:
    """Return the name of the counter of one cargo's bytes over a link."""
    return _OF_BYTES[lane, cargo]


def need_counter(cargo: Cargo, found: str) -> str:
    """Return the counter of bytes that were needed and were `FOUND` in memory, or `MISSING`."""
    return _OF_NEEDS[cargo, found]


def busy_counter(lane: Lane, unit: str) -> str:
    """Return the counter of a link's busy ns, or of the bytes that it carried in them."""
    return f"{lane.value} busy {unit}"


def update_counter(op: type[UpdateOp], unit: str) -> str:
    """Return the counter of the params that ops of a kind updated, or of the ns they took."""
    return f"{op.__name__} {unit}"


def lane_counter(lane: Lane, unit: str) -> str:
    """Return the counter of a lane's ns of work for an update, or of a drive's bytes."""
    return f"{lane.value} {unit} of the update"


def peak_gauge(usage: Usage) -> str:
    """Return the name of the gauge of a tier, or of a directory of NVMe."""
    return f"peak of {usage.directory or usage.tier.name}"  # one gauge a directory of NVMe


@dataclass(slots=True)
class _Update:
    """One update: when its ops were at work, and for how many ops that is not known yet."""

    begin_ns: int
    end_ns: int
    busy_ns: Counter[Lane] = field(default_factory=Counter)
    # of drives, where busy times are unknown
    nbytes: Counter[Lane] = field(default_factory=Counter)
    unknown: Counter[Lane] = field(default_factory=Counter)

    def note_work(self, lane: Lane, start_ns: int, end_ns: int) -> None:
        """Note that an op was at work between these times."""
        self.busy_ns[lane] += end_ns - start_ns
        self.end_ns = max(self.end_ns, end_ns)

    def know(self, lane: Lane, start_ns: int, end_ns: int) -> None:
        """Note the times of an op that were unknown so far."""
        self.unknown[lane] -= 1
        self.note_work(lane, start_ns, end_ns)


@dataclass(frozen=True, slots=True)
class _Submitted:
    """A copy or work that the device was given, with what is recorded once its times are known."""

    name: str
    lane: Lane
    fields: Mapping[str, object]
    nbytes: int | None  # None: it is no copy
    update: _Update


class Meter:
    """Counts for one engine. Where `telemetry` records nothing, this does next to nothing."""

    def __init__(self, telemetry: Telemetry, accelerator: Accelerator, ledger: Ledger) -> None:
        self._telemetry = telemetry
        self._accelerator = accelerator
        self._ledger = ledger
        # Without telemetry nothing is remembered, so that nothing grows.
        self._on = not isinstance(telemetry, NullTelemetry)
        self._device_times = _device_times(accelerator) if self._on else None
        # By the operation's name, which the device's timeline has as well.
        self._submitted: dict[str, _Submitted] = {}
        self._left: dict[str, _Submitted] = {}  # operations that had not ended when their step did
        self._in_time = self._late = 0
        # What belongs to no update is counted in one that is never looked at.
        self._no_update = _Update(0, 0)
        self._update = self._no_update  # the one under way
        # the update that ended in this step, and when
        self._ended: tuple[_Update, int] | None = None

    # --- as it happens ----------------------------------------------------------------------------

    def now_ns(self) -> int:
        """Return the time on the clock of what it counts."""
        return self._telemetry.now_ns()

    def timed_wait(self, wait: Wait) -> AbstractContextManager[None]:
        """Return the span that counts the time in which the host waits for this."""
        return self._telemetry.timed(wait.value)

    def count_copy(
        self,
        lane: Lane,
        cargo: Cargo,
        nbytes: int,
        event: Event | None,
        *,
        name: str,
        **fields: object,
    ) -> None:
        """Count a copy over a link; `event` is its end, None where it has ended."""
        if self._on:
            self._telemetry.counter(bytes_counter(lane, cargo)).add(nbytes)
            update = self._update_of(name)
            if lane in _DRIVES:
                # Bytes only: nothing measures when a drive was busy for this engine.
                update.nbytes[lane] += nbytes
            else:
                update.unknown[lane] += 1
            if self._device_times is not None:
                self._note(event, _Submitted(name, lane, fields, nbytes, update))

    def count_need(self, cargo: Cargo, nbytes: int, *, found: bool) -> None:
        """Count bytes that could be on drives and were needed: found in memory, or read."""
        self._telemetry.counter(need_counter(cargo, FOUND if found else MISSING)).add(nbytes)

    def record_hold(
        self, block: str, held: str, nbytes: int, *, start_ns: int, end_ns: int
    ) -> None:
        """Record for which time a block's activations were held; `held` says how, and where."""
        self._telemetry.record(
            f"{held}: {block}",
            track=f"activations of {block}",
            start_ns=start_ns,
            end_ns=end_ns,
            **{HELD: held, "block": block, "nbytes": nbytes},
        )

    def note_work(self, event: Event, *, name: str, **fields: object) -> None:
        """Note work on the device; `event` is its end."""
        if self._on:
            # In one memory `run_update` times it on the host: the device's time would count twice.
            update = self._no_update if self._accelerator.unified else self._update_of(name)
            update.unknown[Lane.DEVICE] += 1
            if self._device_times is not None:
                self._note(event, _Submitted(name, Lane.DEVICE, fields, None, update))

    def run_update(self, op: UpdateOp, update: Callable[[], None]) -> None:
        """Make an update and count it, and its time where the host makes it."""
        if op.lane is Lane.HOST or self._accelerator.unified:
            with self._telemetry.timed(
                op.name, track=op.lane.value, subgroup=op.subgroup, params=op.params
            ):
                start_ns = self._telemetry.now_ns()
                update()
                if op.lane is Lane.HOST:
                    # Within the span: a virtual clock advances here.
                    self._accelerator.host_updated(op.params)
                self._update.note_work(op.lane, start_ns, self._telemetry.now_ns())
        else:
            update()
        self._telemetry.counter(update_counter(type(op), "params")).add(op.params)

    def count_host_update(self, op: UpdateOp, start_ns: int, end_ns: int) -> None:
        """Count an update that the host has made on a thread of its own."""
        track, fields = op.lane.value, {"subgroup": op.subgroup, "params": op.params}
        self._telemetry.record(op.name, track=track, start_ns=start_ns, end_ns=end_ns, **fields)
        self._telemetry.counter(f"{op.name} ns").add(end_ns - start_ns)
        self._update.note_work(op.lane, start_ns, end_ns)
        self._telemetry.counter(update_counter(type(op), "params")).add(op.params)

    def micro_batch(self) -> None:
        """Count a micro-batch."""
        self._telemetry.counter(MICRO_BATCHES).add(1)

    def begin_update(self) -> None:
        """Note that an update begins, or that an interrupted one goes on."""
        # An update that was interrupted keeps its beginning.
        if self._on and self._update is self._no_update:
            now_ns = self._telemetry.now_ns()
            self._update = _Update(now_ns, now_ns)

    def end_update(self) -> None:
        """Note that every op of the update has ended."""
        if self._update is not self._no_update:
            # Counted in end_step() only: the device may report its times later.
            self._ended = self._update, self._telemetry.now_ns()
            self._update = self._no_update

    # --- at the end of a step ---------------------------------------------------------------------

    def end_step(self, result: StepResult, *, in_time: int, late: int) -> None:
        """End the step that is recorded; `in_time` and `late` count fetches since the start."""
        if not self._on:
            return
        telemetry = self._telemetry
        # In this order: an update is counted with the times that its ops turn out to have.
        self._ask_the_device()
        self._count_update()
        # Counters are of one step; the fetcher counts from its beginning on.
        telemetry.counter(IN_TIME).add(in_time - self._in_time)
        telemetry.counter(LATE).add(late - self._late)
        self._in_time, self._late = in_time, late
        for usage in self._ledger.usage():
            telemetry.gauge(peak_gauge(usage)).set(usage.peak_held)
        telemetry.note(
            device=_described(self._accelerator),
            outcome=result.outcome.value,
            loss_scale=result.loss_scale,
            gradient_norm=result.gradient_norm,
        )
        telemetry.end_step()

    def _update_of(self, name: str) -> _Update:
        """Return the update that the span `name` belongs to."""
        return self._update if name in _OPS else self._no_update

    def _count_update(self) -> None:
        """Count how long lanes were busy with the update that ended in this step, where known."""
        if self._ended is None:
            return
        (update, ended_ns), self._ended = self._ended, None
        # A lane with an op of unknown time gets no number: the sum would be too small.
        unknown = {lane for lane, ops in update.unknown.items() if ops}
        # Drives report no times, so the end is when the host saw that all ops had ended.
        end_ns = ended_ns if unknown or update.nbytes else update.end_ns
        self._telemetry.counter(UPDATE_NS).add(end_ns - update.begin_ns)
        for lane, ns in update.busy_ns.items():
            if lane not in unknown:
                self._telemetry.counter(lane_counter(lane, "ns")).add(ns)
        for lane, nbytes in update.nbytes.items():
            self._telemetry.counter(lane_counter(lane, "bytes")).add(nbytes)

    def _note(self, event: Event | None, submitted: _Submitted) -> None:
        # Only emulated devices have a timeline; other events are not remembered.
        if isinstance(event, Operation):
            self._submitted[event.name] = submitted

    def _ask_the_device(self) -> None:
        """Record when the device carried out the operations, as far as its timeline goes back."""
        if self._device_times is None:
            return
        wanted, known = {**self._left, **self._submitted}, []
        # Newest first: the list may be long, and what is wanted stands at its end.
        for record in reversed(self._device_times()):
            if not wanted:
                break
            if record.name in wanted:
                known.append((record, wanted.pop(record.name)))
        # Spans are recorded in the order in which they were carried out.
        for record, submitted in reversed(known):
            self._record(submitted, record.start_ns, record.end_ns)
        # Looked for once more, in the next step: the timeline forgets old operations.
        self._left = {
            name: submitted for name, submitted in wanted.items() if name in self._submitted
        }
        self._submitted = {}

    def _record(self, submitted: _Submitted, start_ns: int, end_ns: int) -> None:
        lane, nbytes, fields = submitted.lane, submitted.nbytes, submitted.fields
        counted_as = f"{submitted.name} ns"
        if nbytes is not None:
            fields = {**fields, "nbytes": nbytes}
            counted_as = busy_counter(lane, "ns")
            self._telemetry.counter(busy_counter(lane, "bytes")).add(nbytes)
        self._telemetry.counter(counted_as).add(end_ns - start_ns)
        submitted.update.know(lane, start_ns, end_ns)
        self._telemetry.record(
            submitted.name, track=lane.value, start_ns=start_ns, end_ns=end_ns, **fields
        )


def _device_times(accelerator: Accelerator) -> Callable[[], Sequence[OperationRecord]] | None:
    """Return what lists the device's operations with their times; None where it does not know."""
    if isinstance(accelerator, EmulatedAccelerator):
        return accelerator.timeline
    return None


def _described(accelerator: Accelerator) -> str:
    """Return how to read this accelerator's times: an emulated one says that it is emulated."""
    if isinstance(accelerator, EmulatedAccelerator):
        return f"emulated, on its {accelerator.clock} clock"
    if accelerator.works_beside_host:
        return f"{accelerator.name}, whose phases are those of the host that launches its work"
    return accelerator.name
