"""fio as a bench's yardstick: what `deepnvme.cli.fio` measures, in the units of the benches.

Imports deepnvme only when called: benches load this before they have entered the environment that holds it.
Called by scripts/bench/nvme_vs_fio.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import bench

if TYPE_CHECKING:
    from deepnvme.cli.fio import Job

__all__ = ["CPU", "GIB", "P99", "RATE", "fastest", "run", "version"]

GIB = 1 << 30
RATE, CPU, P99 = "GiB/s", "CPU s/GiB", "p99 ms"


def version() -> str:
    """Return fio's name and version.

    Raises:
        bench.UnavailableError: fio is not installed.
    """
    from deepnvme.cli import fio

    try:
        return fio.find()
    except fio.FioError as reason:
        raise bench.UnavailableError(str(reason)) from None


def run(job: Job) -> dict[str, float]:
    """Run one measurement and return its numbers; the latency is that of one block.

    Raises:
        bench.UnavailableError: fio cannot do it here, for example because io_uring is refused.
    """
    from deepnvme.cli import fio

    try:
        measured = fio.run(job)
    except fio.FioError as reason:
        raise bench.UnavailableError(str(reason)) from None
    return {RATE: measured.bytes_per_s / GIB, CPU: measured.cpu_s_per_gib, P99: measured.p99_us / 1e3}


def fastest(sweep: Mapping[Job, Sequence[Mapping[str, float]]]) -> Job:
    """Return the job with the highest median rate."""
    return max(sweep, key=lambda job: statistics.median(numbers[RATE] for numbers in sweep[job]))
