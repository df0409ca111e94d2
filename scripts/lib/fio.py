"""fio as a bench's yardstick: what `deepnvme.cli.fio` measures, in the units of the benches.

Imports deepnvme only when called: benches load this before they have entered the environment that holds it.
Called by scripts/bench/nvme_vs_fio and by nvme_streams.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import bench

if TYPE_CHECKING:
    from deepnvme.cli.fio import Job

__all__ = ["CPU", "GIB", "P99", "RATE", "best", "run", "version"]

GIB = 1 << 30
_NOISE = 0.02
_Settings = TypeVar("_Settings")
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


def best(sweep: Mapping[_Settings, Sequence[Mapping[str, float]]]) -> _Settings:
    """Return the settings with the highest median rate; of those within 2% of it, the ones that cost the least CPU."""
    rates = {each: statistics.median(numbers[RATE] for numbers in sweep[each]) for each in sweep}
    near = [each for each in sweep if rates[each] >= (1 - _NOISE) * max(rates.values())]
    return min(near, key=lambda each: statistics.median(numbers[CPU] for numbers in sweep[each]))
