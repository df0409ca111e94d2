"""Puts a calibration together: what was kept of this machine and directories, and what is measured.

One process of a user measures at a time. Reports what it does through a function; prints nothing.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from deepnvme import IOQueue, Pool
from deepnvme.cli.scratch import usable_directory
from deepnvme.machine.backends import choose_backend
from deepnvme.machine.profile import effective_settings, load_profile
from infinity_engine.calibration.cache import CalibrationCache
from infinity_engine.calibration.drives import measure_drive
from infinity_engine.calibration.effort import FULL, Effort, MeasuringTime, thread_counts
from infinity_engine.calibration.host import RULES, STATE_BYTES, HostPoint, HostUpdates
from infinity_engine.calibration.identity import (
    default_device,
    drive_identity,
    machine_identity,
    usable_cores,
)
from infinity_engine.machine.busy import OthersWork
from infinity_engine.memory.freed import return_freed_memory
from infinity_engine.plan import (
    BlockFigures,
    BlockShape,
    Calibration,
    DriveFigures,
    Figure,
    HostUpdateFigures,
    LinkFigures,
    Unit,
)
from infinity_engine.plan.mappings import Directories

if TYPE_CHECKING:
    from infinity_engine.accel import Accelerator

__all__ = ["KeptFigures", "calibrated", "kept_calibration"]

_MATMUL_SHARE, _BLOCKS_SHARE, _START_SHARE = 0.05, 0.2, 0.01  # of the time
_LEASE_SHARE = 0.04
_HOST_SHARE, _SUMMING_SHARE = 0.18, 0.05
_LINKS_SHARE, _DEVICE_SHARE, _DRIVES_SHARE = 0.1, 0.05, 0.35
_ONE_RANK = "one rank: nothing is gathered or scattered"
_NO_DEVICE = "torch is not installed"
_Report = Callable[[str], object]


class KeptFigures(Enum):
    """What becomes of figures that were kept."""

    USED = "used"  # only what is missing is measured
    REPLACED = "replaced"  # everything is measured


def kept_calibration(
    directories: Iterable[str] = (),
    *,
    accelerator: Accelerator | None = None,
    queue: IOQueue | None = None,
    cache: CalibrationCache | None = None,
) -> Calibration | None:
    """Return what was kept of this machine and of those directories with figures; None: nothing.

    Without an accelerator and a queue, of those that an engine would have here by default. Measures
    nothing.

    Raises:
        OSError: there is no such directory.
    """
    cache = cache or CalibrationCache.of_user()
    machine = cache.machine(machine_identity(_device(accelerator)))
    if machine is None:
        return None
    found = {name: cache.drive(machine.machine, _drive(name, queue)) for name in directories}
    return machine.with_drives({name: drive for name, drive in found.items() if drive is not None})


def calibrated(
    directories: Iterable[str] = (),
    *,
    accelerator: Accelerator | None,
    queue: IOQueue | None = None,
    effort: Effort = FULL,
    kept: KeptFigures = KeptFigures.USED,
    cache: CalibrationCache | None = None,
    report: _Report = lambda _: None,
    waiting: Callable[[], object] = lambda: None,
) -> Calibration:
    """Return the figures of this machine and directories; measure what is not kept.

    With None for an accelerator, which is for where torch is missing, links, device and matrix
    products are not measured. `queue` is used for the drives where given, and stays open. What is
    measured is kept in `cache`, by default the user's. `report` gets each part of the work before
    it begins; `waiting` is called where another process is at it, which is waited for.

    Raises:
        OSError: a directory cannot be used, which is seen before anything is measured, or an
            operation failed there. What was measured before is kept.
    """
    # Each once, in the order given.
    names = list(Directories(dict.fromkeys(directories), field="directories"))
    cache = cache or CalibrationCache.of_user()
    identity = machine_identity(_device(accelerator))
    with ExitStack() as resources:
        if queue is None and names:
            queue = resources.enter_context(IOQueue())
        drives = {name: _drive(name, queue) for name in names}
        # Until everything is measured: two processes at once would measure each other.
        resources.enter_context(cache.alone(waiting))
        known = cache if kept is KeptFigures.USED else CalibrationCache(None)
        # Looked up under the lock: the process that was waited for may have measured it.
        found = {name: known.drive(identity, drive) for name, drive in drives.items()}
        missing = {  # looked at before anything takes its time
            name: usable_directory(Path(name), effort.file_bytes)
            for name, drive in found.items()
            if drive is None
        }
        bench = _Bench(effort, report)
        # From here on, so that waiting for another process does not count. One for all parts: in a
        # drive's alone, what the kernel does for its I/O, such as encryption, would be too much.
        others = OthersWork()
        machine = known.machine(identity)
        if machine is None:
            machine = bench.machine(identity, accelerator)
            machine = replace(machine, others_share=others.share())
            # Kept at once: a drive that fails does not cost what was measured before.
            cache.keep_machine(machine)
        computing = bench.host_computing(accelerator) if missing else None
        for name, place in missing.items():
            assert queue is not None, "there is a queue for directories"
            # Equal parts of the time, whatever is missing.
            part = effort.part(_DRIVES_SHARE / len(missing))
            measured = bench.drive(name, place, drives[name], queue, part=part, computing=computing)
            measured = replace(measured, others_share=others.share())
            found[name] = measured
            cache.keep_drive(identity, measured)
    return machine.with_drives({name: drive for name, drive in found.items() if drive is not None})


class _Bench:
    """Measures; takes its memory when it is needed first, after what needs none of it."""

    def __init__(self, effort: Effort, report: _Report) -> None:
        self._effort = effort
        self._report = report
        self._memory: _Memory | None = None

    def machine(self, identity: Mapping[str, str], accelerator: Accelerator | None) -> Calibration:
        """Measure all but drives."""
        effort = self._effort
        # Before the pool is taken: `Effort.memory_bytes` counts the larger of the two.
        matmul = self._matmul(accelerator)
        # Needs the rates of the products: they say which shapes take too long.
        blocks = self._blocks(accelerator, matmul)
        lease = self._lease(accelerator)
        return_freed_memory()  # of what was computed: malloc keeps tens of megabytes
        memory = self._taken()
        self._report("updates of the host, and sweeps over its memory")
        host = memory.updates.measure(effort.part(_HOST_SHARE))
        summing = memory.updates.measure_summing(effort.part(_SUMMING_SHARE))
        links = _measured_links(accelerator, memory, effort, self._report)
        return Calibration(
            machine=identity,
            date=datetime.datetime.now(tz=datetime.timezone.utc).isoformat(timespec="seconds"),
            # The state that the host's updates were measured on.
            memory_bytes=memory.updates.numel * STATE_BYTES,
            links=links.figures,
            dram={
                point.threads: figure for point, figure in host.items() if point.optimizer is None
            },
            host_updates={
                name: {
                    point.threads: HostUpdateFigures(
                        alone=figure,
                        beside_copies=links.beside(point),
                        summing=summing[point],
                    )
                    for point, figure in host.items()
                    if point.optimizer == name
                }
                for name in RULES
            },
            device_updates=self._device_updates(accelerator),
            host_start=memory.updates.measure_start(effort.part(_START_SHARE)),
            device_start=self._device_start(accelerator),
            lease=lease,
            matmul=matmul,
            blocks=blocks,
            all_gather=Figure.missing(_ONE_RANK, Unit.BYTES),
            reduce_scatter=Figure.missing(_ONE_RANK, Unit.BYTES),
        )

    def drive(
        self,
        directory: str,
        place: Path,
        identity: Mapping[str, str],
        queue: IOQueue,
        *,
        part: MeasuringTime,
        computing: Callable[[float], float] | None,
    ) -> DriveFigures:
        """Measure the drive of a directory, in `place`, which is its real path."""
        memory = self._taken()
        # Registered with the queue, as an engine's pool is.
        queue.use_pool(memory.pool)
        try:
            return measure_drive(
                directory,
                place,
                identity,
                queue=queue,
                memory=memory.io,
                updates=memory.updates,
                computing=computing,
                effort=self._effort,
                part=part,
                report=self._report,
            )
        finally:
            # Also after a failure: the queue may be the caller's, and the pool is ours.
            queue.forget_pool(memory.pool)

    def host_computing(self, accelerator: Accelerator | None) -> Callable[[float], float] | None:
        """Return what lets modules compute on the host, None where they compute elsewhere."""
        if accelerator is None or not accelerator.unified:
            return None
        from infinity_engine.calibration.blocks import host_computing

        return host_computing(self._effort.beside_bytes)

    def _taken(self) -> _Memory:
        if self._memory is None:
            self._memory = _Memory.of(self._effort)
        return self._memory

    def _matmul(self, accelerator: Accelerator | None) -> dict[str, Figure]:
        if accelerator is None:
            return {dtype: Figure.missing(_NO_DEVICE, Unit.FLOPS) for dtype in ("fp32", "bf16")}
        from infinity_engine.calibration.device import measure_matmul

        self._report("matrix products")
        return measure_matmul(accelerator.torch_device, self._effort.part(_MATMUL_SHARE))

    def _blocks(
        self, accelerator: Accelerator | None, matmul: Mapping[str, Figure]
    ) -> dict[str, dict[BlockShape, BlockFigures]]:
        if accelerator is None:
            return {dtype: {} for dtype in matmul}
        from infinity_engine.calibration.blocks import measure_blocks

        self._report("transformer blocks")
        return measure_blocks(
            accelerator.torch_device,
            matmul,
            # One memory has no links and no updates of its own, which leaves their time. Speeds
            # change for seconds at a time on shared machines.
            self._effort.part(
                _BLOCKS_SHARE + (_LINKS_SHARE + _DEVICE_SHARE - _LEASE_SHARE) * accelerator.unified
            ),
            self._effort.compute_bytes,
        )

    def _lease(self, accelerator: Accelerator | None) -> Figure:
        if accelerator is None:
            return Figure.missing(_NO_DEVICE, Unit.SECONDS)
        if not accelerator.unified:
            reason = "modules do not compute where the engine works: it works beside them"
            return Figure.missing(reason, Unit.SECONDS)
        from infinity_engine.calibration.own_work import measure_lease

        self._report("the engine's own work between modules")
        part = self._effort.part(_LEASE_SHARE)
        return measure_lease(accelerator, self._effort.beside_bytes, part)

    def _device_updates(self, accelerator: Accelerator | None) -> dict[str, Figure]:
        if accelerator is None:
            return {name: Figure.missing(_NO_DEVICE, Unit.PARAMETERS) for name in RULES}
        from infinity_engine.calibration.device import measure_device_updates

        self._report("updates of the device")
        effort = self._effort
        return measure_device_updates(accelerator, effort.update_bytes, effort.part(_DEVICE_SHARE))

    def _device_start(self, accelerator: Accelerator | None) -> Figure:
        if accelerator is None:
            return Figure.missing(_NO_DEVICE, Unit.SECONDS)
        from infinity_engine.calibration.device import measure_device_start

        return measure_device_start(accelerator, self._effort.part(_START_SHARE))


@dataclass(frozen=True)
class _Memory:
    """The memory for all but matrix products: a part for updates, one for I/O and copies."""

    pool: Pool
    updates: HostUpdates
    io: memoryview

    @classmethod
    def of(cls, effort: Effort) -> _Memory:
        # One pool of whole pages for both parts, as an engine has.
        pool = Pool(effort.update_bytes + effort.io_bytes)
        updates = HostUpdates(pool, effort.update_bytes, thread_counts(usable_cores()))
        return cls(pool, updates, pool.buffer(effort.io_bytes))


@dataclass(frozen=True)
class _LinkFigures:
    """What was measured of links, and of updates beside copies over them."""

    figures: LinkFigures
    updates: Mapping[HostPoint, Figure]
    reason: str

    def beside(self, point: HostPoint) -> Figure:
        """Return what updates get beside copies."""
        return self.updates.get(point) or Figure.missing(self.reason, Unit.PART)


def _measured_links(
    accelerator: Accelerator | None, memory: _Memory, effort: Effort, report: _Report
) -> _LinkFigures:
    if accelerator is None:
        return _no_links(_NO_DEVICE)
    from infinity_engine.accel import StreamKind
    from infinity_engine.calibration.links import (
        Links,
        NoLinksError,
        measure_beside_updates,
        measure_copy_start,
        measure_links,
    )

    h2d, d2h = StreamKind.H2D, StreamKind.D2H
    # Half of the time for copies alone, half for copies beside updates.
    part = effort.part(_LINKS_SHARE / 2)
    try:
        with Links.open(accelerator, memory.io) as links:
            report("copies between host and device")
            found = measure_links(links, part)
            start = measure_copy_start(links, effort.part(_START_SHARE))
            # For a virtual clock, where nothing is measured beside updates.
            reason = "the time of copies is computed: the host's work does not disturb them"
            updates: Mapping[HostPoint, Figure] = {}
            copies = {kind: Figure.missing(reason, Unit.PART) for kind in (h2d, d2h)}
            if links.beside_updates:
                report("updates of the host beside copies")
                updates, copies = measure_beside_updates(links, memory.updates, part)
    except NoLinksError as why:
        return _no_links(str(why))
    figures = LinkFigures(
        h2d=found[(h2d,)][h2d],
        d2h=found[(d2h,)][d2h],
        duplex_h2d=found[(h2d, d2h)][h2d],
        duplex_d2h=found[(h2d, d2h)][d2h],
        h2d_beside_updates=copies[h2d],
        d2h_beside_updates=copies[d2h],
        start=start,
    )
    return _LinkFigures(figures, updates, reason)


def _no_links(reason: str) -> _LinkFigures:
    rate, part = Figure.missing(reason, Unit.BYTES), Figure.missing(reason, Unit.PART)
    figures = LinkFigures(
        h2d=rate,
        d2h=rate,
        duplex_h2d=rate,
        duplex_d2h=rate,
        h2d_beside_updates=part,
        d2h_beside_updates=part,
        start=Figure.missing(reason, Unit.SECONDS),
    )
    return _LinkFigures(figures, {}, reason)


def _device(accelerator: Accelerator | None) -> str:
    if accelerator is None:
        return default_device()
    from infinity_engine.calibration.device import device_identity

    return device_identity(accelerator)


def _drive(directory: str, queue: IOQueue | None) -> Mapping[str, str]:
    if queue is not None:
        return drive_identity(
            directory, backend=queue.backend, settings=queue.settings_for(directory)
        )
    # What a queue with no settings of its own would choose here.
    settings = effective_settings(load_profile().for_path(directory))
    return drive_identity(directory, backend=choose_backend("auto"), settings=settings)
