"""`deepnvme tune`: measures which settings suit one drive best, and keeps them where every IOQueue
finds them.

What to choose is decided by pure functions over measured medians. Exit status: 0 measured and kept,
1 not.
"""

from __future__ import annotations

import argparse
import datetime
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deepnvme.cli.arguments import directory_argument, seconds_argument
from deepnvme.cli.doctor import settings_text
from deepnvme.cli.report import Output
from deepnvme.cli.scratch import (
    OPERATION_BYTES,
    PIECE_BYTES,
    data_file,
    progress_bar,
    usable_backend,
    usable_directory,
)
from deepnvme.machine.profile import (
    PROFILE_VARIABLE,
    ProfileError,
    Settings,
    UserMemory,
    drive_key,
    profile_path,
    read_profile,
    write_profile,
)
from deepnvme.measuring.measure import (
    GIB,
    MIB,
    Load,
    Workload,
    cut,
    fill,
    in_turn,
    measure,
    pending_for,
    small_pages,
)
from deepnvme.memory.pool import Pool
from deepnvme.sizes import format_bytes

__all__ = [
    "CHUNKS",
    "HELP",
    "INFLIGHT",
    "NAME",
    "Rates",
    "add_arguments",
    "choose_memory",
    "choose_sizes",
    "run",
]

NAME = "tune"
HELP = (
    "Measure which settings suit the drive of a directory best, and keep them for every queue that "
    "uses it."
)
CHUNKS = (MIB // 4, MIB // 2, MIB, 2 * MIB, 4 * MIB)
INFLIGHT = (4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB)

_FILE_BYTES = GIB
_WORKLOADS = (Workload.READ, Workload.OVERWRITE)
_ROUNDS = 3
# Shares of the time: to write the file, to measure the sizes, to measure the memory. Of the latter
# two, the share of the measurements themselves; the rest passes between them.
_FILE_SHARE, _SIZES_SHARE, _MEMORY_SHARE, _MEASURING_SHARE = 0.1, 0.75, 0.15, 0.8
_WORTH_A_CHANGE = 1.1  # times faster: the best of many noisy figures is some percent too good


@dataclass(frozen=True)
class Rates:
    """Measured medians, in bytes per second."""

    read: float
    overwrite: float

    @property
    def both(self) -> float:
        """Their geometric mean: a share won or lost in either counts the same."""
        return math.sqrt(self.read * self.overwrite)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `deepnvme tune`."""
    parser.add_argument(
        "directory",
        type=directory_argument,
        metavar="DIR",
        help="on the drive; the file made there is removed",
    )
    parser.add_argument(
        "--seconds",
        type=seconds_argument,
        default=20.0,
        help="to take about that long (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    """Measure, print, keep."""
    kept_in = profile_path()
    if kept_in is None:
        raise ProfileError(
            f"there is no place for a profile: let the environment variable {PROFILE_VARIABLE} "
            "name one"
        )
    read_profile(kept_in)  # fails before the measurement, where the file cannot be read
    directory = usable_directory(options.directory, _FILE_BYTES)
    key, backend = drive_key(directory), usable_backend("auto")
    sizes, ways = _measure(directory, options.seconds, backend)
    best = choose_sizes(sizes)
    chosen = replace(best, user_memory=choose_memory(ways))
    console = Output()
    _show(console, sizes, ways, best)
    measured = {
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        "directory": str(directory),
        "backend": backend,
        "read_gb_per_s": round(sizes[best].read / 1e9, 2),
        "overwrite_gb_per_s": round(sizes[best].overwrite / 1e9, 2),
    }
    write_profile(kept_in, key, chosen, measured)
    console.print(Text(f"Chosen: {settings_text(chosen)}."))
    console.print(Text(f"Queues that are not told otherwise use this on the drive known as: {key}"))
    return 0


def choose_sizes(measured: Mapping[Settings, Rates]) -> Settings:
    """Return the fastest settings; within noise the default, else the least in flight."""
    fastest = max(rates.both for rates in measured.values())
    good = [
        settings for settings, rates in measured.items() if rates.both * _WORTH_A_CHANGE >= fastest
    ]
    if Settings() in good:
        return Settings()
    return min(good, key=lambda settings: (settings.inflight_bytes, -settings.chunk_bytes))


def choose_memory(measured: Mapping[UserMemory, Rates]) -> UserMemory:
    """Return the faster way for ordinary memory; copying it must be worth the CPU time."""
    copied, direct = measured[UserMemory.BOUNCE], measured[UserMemory.ZERO_COPY]
    return (
        UserMemory.BOUNCE if copied.both > direct.both * _WORTH_A_CHANGE else UserMemory.ZERO_COPY
    )


def _measure(
    directory: Path, seconds: float, backend: str
) -> tuple[dict[Settings, Rates], dict[UserMemory, Rates]]:
    """Return the rates of each pair of sizes and, at the best, of each way for ordinary memory."""
    grid = [Settings(chunk, inflight) for inflight in INFLIGHT for chunk in CHUNKS]
    pool = Pool(OPERATION_BYTES * pending_for(OPERATION_BYTES, max(INFLIGHT)))
    memory, ordinary = pool.buffer(pool.capacity), small_pages(pool.capacity)
    fill(memory)
    fill(ordinary)
    steps = _FILE_BYTES // PIECE_BYTES + _ROUNDS * len(_WORKLOADS) * (len(grid) + len(UserMemory))
    with (
        progress_bar(steps) as advance,
        data_file(
            directory, _FILE_BYTES, backend=backend, advance=advance, seconds=seconds * _FILE_SHARE
        ) as (
            path,
            file_bytes,
        ),
    ):

        def rates(
            choices: Sequence[Settings], memory: memoryview, pool: Pool | None, most_s: float
        ) -> list[Rates]:
            points = [(settings, workload) for settings in choices for workload in _WORKLOADS]

            def bytes_per_s(point: tuple[Settings, Workload]) -> float:
                settings, workload = point
                advance(f"measuring {workload.value}s")
                load = Load(
                    path=path,
                    file_bytes=file_bytes,
                    workload=workload,
                    operation_bytes=OPERATION_BYTES,
                    seconds=most_s * _MEASURING_SHARE / (_ROUNDS * len(points)),
                )
                buffers = cut(
                    memory, OPERATION_BYTES, pending_for(OPERATION_BYTES, settings.inflight_bytes)
                )
                return measure(load, buffers, settings, backend=backend, pool=pool).bytes_per_s

            found = in_turn(points, bytes_per_s, rounds=_ROUNDS, seconds=most_s)
            medians = {point: statistics.median(results) for point, results in found.items()}
            return [
                Rates(*(medians[settings, workload] for workload in _WORKLOADS))
                for settings in choices
            ]

        sizes = dict(zip(grid, rates(grid, memory, pool, seconds * _SIZES_SHARE), strict=True))
        ways = [replace(choose_sizes(sizes), user_memory=way) for way in UserMemory]
        travel = rates(ways, ordinary, None, seconds * _MEMORY_SHARE)
    return sizes, dict(zip(UserMemory, travel, strict=True))


def _show(
    console: Console,
    sizes: Mapping[Settings, Rates],
    ways: Mapping[UserMemory, Rates],
    best: Settings,
) -> None:
    table = Table(box=None, padding=(0, 0, 0, 2), pad_edge=False)
    table.add_column("chunk", justify="right", no_wrap=True)
    for inflight in INFLIGHT:
        table.add_column(format_bytes(inflight), justify="right", no_wrap=True)
    for chunk in CHUNKS:
        row = [Settings(chunk, inflight) for inflight in INFLIGHT]
        cells = [f"{'*' if settings == best else ''}{_cell(sizes[settings])}" for settings in row]
        table.add_row(format_bytes(chunk), *cells)
    console.print(Text("GB/s read/overwritten, by chunk and bytes in flight (*: chosen)"))
    console.print(table)
    console.print()
    console.print(Text("the same for ordinary memory, by the way it travels"))
    for way, rates in ways.items():
        console.print(Text(f"  {_words(way):<9}  {_cell(rates)}"))
    console.print()


def _cell(rates: Rates) -> str:
    return f"{rates.read / 1e9:.2f}/{rates.overwrite / 1e9:.2f}"


def _words(way: UserMemory) -> str:
    return way.name.lower().replace("_", " ")
