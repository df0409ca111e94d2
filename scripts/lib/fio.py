"""fio as a bench's yardstick: what `deepnvme.cli.fio` measures, in the units of the benches.

Imports deepnvme only when called: benches load this before they have entered the environment that
holds it. Called by scripts/bench/nvme_vs_fio and by nvme_streams.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import bench

if TYPE_CHECKING:
    from deepnvme.cli.fio import Job

__all__ = ["CPU", "GIB", "P99", "RATE", "THREAD_CPU", "best", "run", "version", "watched"]

GIB = 1 << 30
_NOISE = 0.02
_LOOKS = 2
_Settings = TypeVar("_Settings")
RATE, CPU, P99 = "GiB/s", "CPU s/GiB", "p99 ms"
THREAD_CPU = "CPU s/GiB of the thread that does I/O"


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
    return _run(job, None)


def watched(job: Job) -> dict[str, float]:
    """Run one measurement as `run` does, and add what its whole process cost from half of its time
    to the end of it.

    So what fio does before its first block and after its last does not count.

    Raises:
        bench.UnavailableError: as in `run`.
    """
    looks: list[tuple[float, float]] = []
    numbers = _run(job, partial(_look, job.seconds, looks))
    if len(looks) < _LOOKS:
        raise bench.UnavailableError(f"fio ended before its {job.seconds:g} s were over")
    (start_s, start_cpu_s), (end_s, end_cpu_s) = looks
    return {**numbers, CPU: (end_cpu_s - start_cpu_s) / (numbers[RATE] * (end_s - start_s))}


def _run(job: Job, meanwhile: Callable[[subprocess.Popen[str]], object] | None) -> dict[str, float]:
    from deepnvme.cli import fio

    try:
        measured = fio.run(job, meanwhile)
    except fio.FioError as reason:
        raise bench.UnavailableError(str(reason)) from None
    return {
        RATE: measured.bytes_per_s / GIB,
        THREAD_CPU: measured.cpu_s_per_gib,
        P99: measured.p99_us / 1e3,
    }


def _look(seconds: float, looks: list[tuple[float, float]], process: subprocess.Popen[str]) -> None:
    """Note the time and the CPU time of a process, in half of so many seconds and at their end, if
    it lives so long.
    """
    # the CPU clock of that process, as clock_getcpuclockid(3) makes it
    clock = (~process.pid << 3) | 2
    for _ in range(_LOOKS):
        try:
            process.wait(seconds / _LOOKS)
            return
        except subprocess.TimeoutExpired:
            looks.append((time.perf_counter(), time.clock_gettime(clock)))


def best(sweep: Mapping[_Settings, Sequence[Mapping[str, float]]]) -> _Settings:
    """Return the settings with the highest median rate; of those within 2% of it, the ones that
    cost the least CPU.
    """
    rates = {each: statistics.median(numbers[RATE] for numbers in sweep[each]) for each in sweep}
    near = [each for each in sweep if rates[each] >= (1 - _NOISE) * max(rates.values())]
    return min(
        near, key=lambda each: statistics.median(numbers[THREAD_CPU] for numbers in sweep[each])
    )
