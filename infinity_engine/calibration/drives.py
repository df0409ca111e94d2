"""How fast the drive behind a directory is, alone and beside work of the host, through deepnvme.

Writes one file there, and removes it when it is done, fails or is interrupted. Imports no torch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from deepnvme import File, IOQueue
from deepnvme.cli.scratch import scratch_file
from deepnvme.measuring.measure import Workload, cut, fill, pending_for, transfers
from deepnvme.sizes import PAGE
from infinity_engine.calibration.contention import Stops, measure_contention, part_kept, until
from infinity_engine.calibration.effort import Effort, MeasuringTime
from infinity_engine.calibration.host import RULES, HostUpdates
from infinity_engine.plan import DriveFigures, Figure, Unit
from infinity_engine.units import MiB, format_bytes

__all__ = ["FILE_PREFIX", "measure_drive"]

FILE_PREFIX = "infinity-calibrate-"
_OPERATION_BYTES = 4 * MiB
_APART_BYTES = 5 * MiB + PAGE  # of single reads
_FILE_SHARE, _ALONE_SHARE, _START_SHARE = 0.15, 0.25, 0.03  # of the time for a directory
# Samples of modules of 0.08 s kept 0.63 of their rate where those of a second kept 0.55.
_BESIDE_SHARE, _COMPUTING_SHARE = 0.22, 0.35
_SAMPLES = 4  # of modules: alone, beside the drive, and alone again; of the drive: alone
_Report = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class _DriveLoad:
    """A file and the buffers for operations on it; as many are pending as there are buffers."""

    file: File
    file_bytes: int
    buffers: Sequence[memoryview]

    def bytes_per_s(self, workload: Workload, stops: Stops) -> float:
        """Keep operations pending until told to stop, one having ended; later ones do not count."""
        verbs = (self.file.pread, self.file.pwrite)
        course = transfers(workload, self.file_bytes, self.buffers[0].nbytes)
        starts = (partial(verbs[writes], offset=offset) for writes, offset in course)
        begun = last = time.perf_counter()
        moved = 0
        # All buffers at once: the drive has its full queue from the first moment on.
        pending = deque((buffer, next(starts)(buffer)) for buffer in self.buffers)
        while moved == 0 or not stops():
            buffer, future = pending.popleft()
            moved += future.result()
            # The end of what counts: noticing the stop takes no part in the rate.
            last = time.perf_counter()
            pending.append((buffer, next(starts)(buffer)))
        # Not counted: they end while nothing new is started.
        for _, future in pending:
            future.result()
        return moved / (last - begun)

    def start_s(self, seconds: float) -> float:
        """Return what a read costs, however small it is: read one page after the other for so
        long.
        """
        page = self.buffers[0][:PAGE]
        begun = time.perf_counter()
        reads = 0
        while not reads or time.perf_counter() - begun < seconds:
            # Far apart, so that no read is of what the one before it has brought.
            offset = reads * _APART_BYTES % max(self.file_bytes - PAGE, 1)
            self.file.pread(page, offset=offset - offset % PAGE).result()
            reads += 1
        return (time.perf_counter() - begun) / reads


def measure_drive(
    directory: str,
    place: Path,
    identity: Mapping[str, str],
    *,
    queue: IOQueue,
    memory: memoryview,
    updates: HostUpdates,
    computing: Callable[[float], float] | None,
    effort: Effort,
    part: MeasuringTime,
    report: _Report,
) -> DriveFigures:
    """Measure a directory in `place`, its real path, through `memory`, which the queue's pool has.

    `computing` lets modules compute on the host for so many seconds and gives their rate; None
    where they compute elsewhere.

    Raises:
        OSError: an operation failed there.
    """
    # Two buffers at least, so that one is moved while the other waits for its turn.
    operation_bytes = min(_OPERATION_BYTES, memory.nbytes // 2, effort.file_bytes)
    pending = pending_for(operation_bytes, queue.settings_for(place).inflight_bytes)
    buffers = cut(memory, operation_bytes, min(pending, memory.nbytes // operation_bytes))
    for buffer in buffers:
        # Random bytes: a drive may compress others.
        fill(buffer)
    nbytes = effort.file_bytes
    with scratch_file(place, FILE_PREFIX) as path, queue.open(path, "w", size=nbytes) as file:
        report(f"{directory}: writing a file of {format_bytes(effort.file_bytes)}")
        file_bytes = _write(file, buffers, effort.file_bytes, part.seconds * _FILE_SHARE)
        load = _DriveLoad(file=file, file_bytes=file_bytes, buffers=buffers)
        report(f"{directory}: reads, writes, both at once")
        alone = _alone(load, part.share(_ALONE_SHARE))
        report(f"{directory}: single reads of a page")
        start = _start(load, part.share(_START_SHARE))
        report(f"{directory}: updates beside its reads and writes")
        drive, beside = _beside(load, updates, part.share(_BESIDE_SHARE))
        blocks = beside_blocks = Figure.missing("no modules were measured on the host", Unit.PART)
        if computing is not None:
            report(f"{directory}: modules beside its reads and writes")
            blocks, beside_blocks = _computing(load, computing, part.share(_COMPUTING_SHARE))
    return DriveFigures(
        drive=identity,
        read=alone[Workload.READ],
        write=alone[Workload.OVERWRITE],
        mixed=alone[Workload.MIXED],
        mixed_beside_updates=drive,
        mixed_beside_blocks=beside_blocks,
        start=start,
        host_updates=beside,
        blocks=blocks,
    )


def _alone(load: _DriveLoad, part: MeasuringTime) -> dict[Workload, Figure]:
    """Return what is read, written, and moved both ways, while nothing else is done here."""
    found = part.in_turn(
        tuple(Workload), lambda each, sample_s: load.bytes_per_s(each, until(sample_s))
    )
    return {workload: Figure.of(samples, Unit.BYTES) for workload, samples in found.items()}


def _start(load: _DriveLoad, part: MeasuringTime) -> Figure:
    """Return what one read costs, however small it is."""
    [samples] = part.in_turn(["start"], lambda _, seconds: load.start_s(seconds)).values()
    return Figure.of(samples, Unit.SECONDS)


def _beside(
    load: _DriveLoad, updates: HostUpdates, part: MeasuringTime
) -> tuple[Figure, dict[str, dict[int, Figure]]]:
    """Return the parts that the drive, and that updates keep of their rates where both work."""
    points = updates.points(RULES)
    found = measure_contention(updates, points, partial(load.bytes_per_s, Workload.MIXED), part)
    parts: dict[str, dict[int, Figure]] = {name: {} for name in RULES}
    for point, left in found.updates.items():
        parts[str(point.optimizer)][point.threads] = left
    # The part that is left, not the rate: rates of two moments on a shared machine do not compare.
    return Figure.of([pair.beside / pair.alone for pair in found.others], Unit.PART), parts


def _computing(
    load: _DriveLoad, computing: Callable[[float], float], part: MeasuringTime
) -> tuple[Figure, Figure]:
    """Return the parts of their rates that modules, and that the drive keep where both work."""
    work = partial(load.bytes_per_s, Workload.MIXED)

    def parts_left(_: str, sample_s: float) -> tuple[float, float]:
        left, moved = part_kept(computing, work, sample_s)
        return left, moved / work(until(sample_s))

    [parts] = part.in_turn(["modules"], parts_left, samples=_SAMPLES).values()
    modules, drive = (Figure.of(list(figures), Unit.PART) for figures in zip(*parts, strict=True))
    return modules, drive


def _write(file: File, buffers: Sequence[memoryview], nbytes: int, seconds: float) -> int:
    """Write what there is time for, at least one operation a buffer; return the file's length."""
    end = time.perf_counter() + seconds
    step = buffers[0].nbytes
    written = 0
    while written + step <= nbytes and (written == 0 or time.perf_counter() < end):
        # In rounds, so that the time is looked at often enough.
        round_of = [(buffer, written + number * step) for number, buffer in enumerate(buffers)]
        pending = [
            file.pwrite(buffer, offset) for buffer, offset in round_of if offset + step <= nbytes
        ]
        for future in pending:
            future.result()
        written += len(pending) * step
    # Down to what was written: no drive is needed to read a hole.
    file.truncate(written)
    file.sync().result()
    return written
