"""fio as a bench's yardstick: what `deepnvme.cli.fio` measures, in the units of the benches.

Imports deepnvme only when called: benches load this before they have entered the environment that
holds it. Called by scripts/bench/nvme_vs_fio and by nvme_streams.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import bench

if TYPE_CHECKING:
    from deepnvme.cli.fio import Job

__all__ = ["CPU", "GIB", "P99", "RATE", "THREAD_CPU", "best", "run", "version", "watched"]

GIB = 1 << 30
_NOISE = 0.02
_LOOKS = 2
_LOOK_EVERY_S = 0.005
_BEGUN_BYTES = 256 << 10  # more than what a thread loads of the program itself
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
    """Run one measurement as `run` does, and add what its whole process cost from its first blocks
    on, for half of its time.

    So what fio does before its first block and after its last does not count.

    Raises:
        bench.UnavailableError: as in `run`.
    """
    looks: list[_Look] = []
    numbers = _run(job, partial(_watch, job, looks))
    if len(looks) < _LOOKS:
        raise bench.UnavailableError(
            f"fio ended before its {job.seconds:g} s were over, or /proc does not count its bytes"
        )
    first, last = looks
    gib = (last.moved_bytes - first.moved_bytes) / GIB
    return {**numbers, CPU: (last.cpu_s - first.cpu_s) / gib}


@dataclass(frozen=True)
class _Look:
    """What a process has used and moved so far."""

    cpu_s: float
    moved_bytes: int  # to and from drives; what the page cache has does not count


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


def _watch(job: Job, looks: list[_Look], process: subprocess.Popen[str]) -> None:
    """Look at fio when it moves blocks, and half of its time later, if it lives so long."""
    least = job.inflight_bytes + _BEGUN_BYTES
    patience = _LOOK_EVERY_S
    while len(looks) < _LOOKS:
        try:
            process.wait(patience)
            return
        except subprocess.TimeoutExpired:
            look = _look(process.pid)
        if look.moved_bytes > (looks[-1].moved_bytes if looks else least):
            looks.append(look)
            patience = job.seconds / 2


def _look(pid: int) -> _Look:
    # the CPU clock of that process, as clock_getcpuclockid(3) makes it
    cpu_s = time.clock_gettime((~pid << 3) | 2)
    # Not those of the first thread, which loads the program from a drive and does not move blocks.
    # Those of threads that have ended count.
    moved_bytes = _moved_bytes(f"/proc/{pid}/io") - _moved_bytes(f"/proc/{pid}/task/{pid}/io")
    return _Look(cpu_s, moved_bytes)


def _moved_bytes(counts: str) -> int:
    try:
        lines = Path(counts).read_text().splitlines()
    except OSError:  # this kernel does not count them
        return 0
    numbers = dict(line.split(": ") for line in lines)
    return int(numbers["read_bytes"]) + int(numbers["write_bytes"])


def best(sweep: Mapping[_Settings, Sequence[Mapping[str, float]]]) -> _Settings:
    """Return the settings with the highest median rate; of those within 2% of it, the ones that
    cost the least CPU.
    """
    rates = {each: statistics.median(numbers[RATE] for numbers in sweep[each]) for each in sweep}
    near = [each for each in sweep if rates[each] >= (1 - _NOISE) * max(rates.values())]
    return min(
        near, key=lambda each: statistics.median(numbers[THREAD_CPU] for numbers in sweep[each])
    )
