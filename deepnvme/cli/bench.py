"""`deepnvme bench`: how fast files in one directory are read and overwritten through the public
API, and by fio.

Exit status: 0 measured, 1 not (no room, no right to write, an I/O error).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from deepnvme.cli import fio
from deepnvme.cli.arguments import directory_argument, seconds_argument, size_argument
from deepnvme.cli.doctor import settings_record, settings_text
from deepnvme.cli.report import Output
from deepnvme.cli.scratch import (
    PIECE_BYTES,
    data_file,
    progress_bar,
    usable_backend,
    usable_directory,
)
from deepnvme.machine.backends import CHAIN
from deepnvme.machine.profile import Settings, effective_settings, load_profile
from deepnvme.measuring.measure import (
    MIB,
    Load,
    Measured,
    Workload,
    cut,
    fill,
    in_turn,
    measure,
    pending_for,
)
from deepnvme.measuring.plain_threads import MOST_THREADS, measure_threads
from deepnvme.memory.pool import Pool
from deepnvme.sizes import format_bytes

__all__ = [
    "HELP",
    "NAME",
    "OPERATIONS",
    "SCHEMA",
    "Figures",
    "Row",
    "add_arguments",
    "medians",
    "run",
    "slower_than",
]

NAME = "bench"
HELP = (
    "Measure reads and overwrites in a directory: throughput, CPU time, latency; beside fio where "
    "it is installed."
)
SCHEMA = 1  # of the JSON object: raised when a field changes its meaning or goes
OPERATIONS = (MIB // 256, MIB // 64, MIB // 16, MIB, 16 * MIB)

_ROUNDS = 3
_AS_FAST = 0.95  # of a rival's rate counts as equal: rounds differ by more than 5%


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The numbers of one measurement, or the medians of several."""

    gb_per_s: float
    cpu_s_per_gib: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table: one load, measured of deepnvme and of its rivals."""

    workload: Workload
    operation_bytes: int
    deepnvme: Figures
    fio: Figures | None
    threads: Figures


@dataclass(frozen=True)
class _ByThreads:
    """A load that plain threads carry out."""

    load: Load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `deepnvme bench`."""
    parser.add_argument(
        "directory",
        type=directory_argument,
        metavar="DIR",
        help="where to measure; the file made there is removed",
    )
    parser.add_argument(
        "--size",
        type=_file_size,
        default="1GiB",
        help=f"of that file, a multiple of {format_bytes(PIECE_BYTES)} (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=seconds_argument,
        default=1.5,
        help=f"that each figure is measured for, in {_ROUNDS} rounds (default: %(default)s)",
    )
    parser.add_argument(
        "--backend", choices=("auto", *CHAIN), default="auto", help="default: %(default)s"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )


def run(options: argparse.Namespace) -> int:
    """Write the file, measure, print, remove the file."""
    directory = usable_directory(options.directory, options.size)
    backend = usable_backend(options.backend)
    tuned = load_profile().for_path(directory)
    rows, yardstick = _measure(
        directory, options.size, options.seconds, backend, effective_settings(tuned)
    )
    if options.json:
        report = {
            "schema": SCHEMA,
            "directory": str(directory),
            "file_bytes": options.size,
            "backend": backend,
            "settings": settings_record(tuned),
            "fio": yardstick,
            "figures": [{**asdict(row), "workload": row.workload.value} for row in rows],
        }
        print(json.dumps(report, indent=2))
    else:
        console = Output()
        console.print(Text(f"{directory}, {backend}: {settings_text(tuned)}"))
        console.print()
        console.print(_table(rows))
        console.print()
        console.print(
            Text("p50 and p99: of whole operations, from submission to end, waiting included.")
        )
        console.print(Text(f"fio: {yardstick}"))
        console.print(
            Text(f"threads: preadv and pwritev in at most {MOST_THREADS} plain Python threads.")
        )
        console.print(
            Text("Each operation is a call of its own. pread_many moves small ones together.")
        )
        for rival in ("fio", "threads"):
            slower = slower_than(rows, rival) or ["nothing"]
            console.print(Text(f"Slower than {rival}, with the ratio: {', '.join(slower)}."))
    return 0


def medians(measurements: Sequence[Measured]) -> Figures:
    """Return the median of each number."""
    return Figures(
        gb_per_s=statistics.median(measurement.bytes_per_s / 1e9 for measurement in measurements),
        cpu_s_per_gib=statistics.median(measurement.cpu_s_per_gib for measurement in measurements),
        p50_ms=statistics.median(measurement.p50_us / 1e3 for measurement in measurements),
        p99_ms=statistics.median(measurement.p99_us / 1e3 for measurement in measurements),
    )


def _file_size(text: str) -> int:
    size = size_argument(text)
    if size == 0 or size % PIECE_BYTES != 0:
        raise argparse.ArgumentTypeError(
            f"expected a multiple of {format_bytes(PIECE_BYTES)}, got {text!r}"
        )
    return size


def _measure(
    directory: Path, file_bytes: int, seconds: float, backend: str, settings: Settings
) -> tuple[list[Row], str]:
    """Return the rows, and fio's version or why it is missing from them."""
    pool = Pool(max(size * pending_for(size, settings.inflight_bytes) for size in OPERATIONS))
    memory = pool.buffer(pool.capacity)
    fill(memory)
    steps = file_bytes // PIECE_BYTES + _ROUNDS * len(Workload) * 3 * len(OPERATIONS)
    with (
        progress_bar(steps) as advance,
        data_file(directory, file_bytes, backend=backend, advance=advance) as made,
    ):
        path, _ = made
        loads = [
            Load(
                path=path,
                file_bytes=file_bytes,
                workload=workload,
                operation_bytes=size,
                seconds=seconds / _ROUNDS,
            )
            for workload in Workload
            for size in OPERATIONS
        ]
        jobs = {load: fio.job_beside(load, settings) for load in loads}
        yardstick, fio_works = _try_fio(jobs[loads[0]])

        def measure_one(point: Load | fio.Job | _ByThreads) -> Measured:
            if isinstance(point, fio.Job):
                advance(f"{point.workload.value} by fio")
                return fio.run(point)
            if isinstance(point, _ByThreads):
                advance(f"{point.load.workload.value} by threads")
                size = point.load.operation_bytes
                threads = min(MOST_THREADS, pending_for(size, settings.inflight_bytes))
                return measure_threads(point.load, cut(memory, size, threads))
            advance(f"{point.workload.value} by deepnvme")
            count = pending_for(point.operation_bytes, settings.inflight_bytes)
            buffers = cut(memory, point.operation_bytes, count)
            return measure(point, buffers, settings, backend=backend, pool=pool)

        points: list[Load | fio.Job | _ByThreads] = [
            *loads,
            # Each job once: loads of more than a chunk lead to the same one.
            *dict.fromkeys(jobs.values() if fio_works else ()),
            *map(_ByThreads, loads),
        ]
        found = in_turn(points, measure_one, rounds=_ROUNDS)
    rows = [
        Row(
            workload=load.workload,
            operation_bytes=load.operation_bytes,
            deepnvme=medians(found[load]),
            fio=medians(found[jobs[load]]) if fio_works else None,
            threads=medians(found[_ByThreads(load)]),
        )
        for load in loads
    ]
    return rows, yardstick


def slower_than(rows: Sequence[Row], rival: str) -> list[str]:
    """Return the loads that the rival does faster: workload, size and our share of its rate."""
    found = []
    for row in rows:
        theirs: Figures | None = getattr(row, rival)
        ratio = 1.0 if theirs is None else row.deepnvme.gb_per_s / theirs.gb_per_s
        if ratio < _AS_FAST:
            size = format_bytes(row.operation_bytes)
            found.append(f"{row.workload.value} of {size} ({ratio:.2f})")
    return found


def _try_fio(job: fio.Job) -> tuple[str, bool]:
    """Return which fio measures how, and True; or why it cannot measure here, and False."""
    try:
        version = fio.find()
        # It may be installed and be refused io_uring here: only a run tells.
        fio.run(job)
    except fio.FioError as reason:
        return str(reason), False
    return f"{version} with io_uring, requests of the same size, the same bytes in flight.", True


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, padding=(0, 0, 0, 2), pad_edge=False)
    for title in (
        "",
        "size",
        "GB/s",
        "CPU\ns/GiB",
        "p50\nms",
        "p99\nms",
        "fio\nGB/s",
        "threads\nGB/s",
    ):
        table.add_column(title, justify="left" if title == "" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.workload.value if row.operation_bytes == OPERATIONS[0] else "",
            format_bytes(row.operation_bytes),
            f"{row.deepnvme.gb_per_s:.2f}",
            f"{row.deepnvme.cpu_s_per_gib:.3f}",
            _milliseconds(row.deepnvme.p50_ms),
            _milliseconds(row.deepnvme.p99_ms),
            f"{row.fio.gb_per_s:.2f}" if row.fio else "-",
            f"{row.threads.gb_per_s:.2f}",
        )
    return table


def _milliseconds(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
