"""fio as the yardstick of a drive: the command of one measurement, and what fio's JSON says of it.

fio gets every advantage: io_uring with registered buffers and files, huge pages, one thread, no
time spent on filling buffers. Never writes outside the file it is given.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deepnvme.machine.profile import Settings
from deepnvme.measuring.measure import MOST_PENDING, Load, Measured, Workload

__all__ = ["FioError", "Job", "find", "job_beside", "parse", "run"]

_DIRECTIONS = ("read", "write")
_KINDS = MappingProxyType(
    {Workload.READ: "read", Workload.OVERWRITE: "write", Workload.MIXED: "rw"}
)


class FioError(OSError):
    """fio is not there or cannot measure here; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One measurement: blocks of one size, as many at a time as keep the bytes in flight."""

    path: Path
    file_bytes: int
    workload: Workload
    block_bytes: int
    inflight_bytes: int
    seconds: float
    random: bool = False  # at random places, else one after the other

    def command(self) -> list[str]:
        """Return fio's command line."""
        filename = str(self.path).replace(":", r"\:")  # a bare colon separates files
        return [
            "fio",
            "--name=yardstick",
            f"--filename={filename}",
            f"--size={self.file_bytes}",
            f"--rw={'rand' if self.random else ''}{_KINDS[self.workload]}",
            "--norandommap",
            f"--bs={self.block_bytes}",
            f"--iodepth={min(MOST_PENDING, self.inflight_bytes // self.block_bytes)}",
            "--ioengine=io_uring",
            "--fixedbufs=1",
            "--registerfiles=1",
            "--direct=1",
            "--thread",
            "--iomem_align=2m",
            "--refill_buffers=0",
            "--scramble_buffers=0",
            "--fallocate=none",
            "--overwrite=1",
            "--time_based",
            f"--runtime={round(self.seconds * 1e3)}ms",
            "--eta=never",
            "--output-format=json",
        ]


def job_beside(load: Load, settings: Settings) -> Job:
    """Return the job with the same requests: their size, and the bytes in flight."""
    return Job(
        path=load.path,
        file_bytes=load.file_bytes,
        workload=load.workload,
        block_bytes=min(load.operation_bytes, settings.chunk_bytes),
        inflight_bytes=settings.inflight_bytes,
        seconds=load.seconds,
    )


def find() -> str:
    """Return fio's name and version.

    Raises:
        FioError: it is not installed.
    """
    _require()
    return subprocess.run(
        ["fio", "--version"], capture_output=True, text=True, check=False
    ).stdout.strip()


def run(job: Job, meanwhile: Callable[[subprocess.Popen[str]], object] | None = None) -> Measured:
    """Run one measurement; `meanwhile` is called with fio's process while it runs.

    Raises:
        FioError: fio is not installed, or cannot do it here, for example because io_uring is
            refused.
    """
    _require()
    # With this, glibc 2.35 and newer puts fio's buffers into huge pages where those are given on
    # request.
    environ = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    # Its report repeats the file's name, which need not be text.
    pipe = subprocess.PIPE
    with subprocess.Popen(
        job.command(), stdout=pipe, stderr=pipe, text=True, errors="replace", env=environ
    ) as process:
        try:
            if meanwhile is not None:
                meanwhile(process)
            report, complaint = process.communicate()
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        last_line = (complaint or report).strip().splitlines()[-1:]
        raise FioError(f"fio ended with status {process.returncode}: {' '.join(last_line)}")
    try:
        return parse(report)
    except (ValueError, KeyError) as problem:
        raise FioError(
            f"fio's report is not understood ({type(problem).__name__}: {problem})"
        ) from None


def _require() -> None:
    if shutil.which("fio") is None:
        raise FioError(
            "fio is not installed (Debian, Ubuntu: apt install fio; Fedora: dnf install fio)"
        )


def parse(report: str) -> Measured:
    """Return what fio's JSON says.

    Its CPU seconds are those of its thread; its latencies, those of one block.
    """
    (job,) = json.loads(report[report.index("{") :])["jobs"]
    seconds = job["job_runtime"] / 1e3
    return Measured(
        nbytes=sum(job[direction]["io_bytes"] for direction in _DIRECTIONS),
        seconds=seconds,
        cpu_s=(job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds,
        p50_us=max(_percentile_us(job[direction], "50.000000") for direction in _DIRECTIONS),
        p99_us=max(_percentile_us(job[direction], "99.000000") for direction in _DIRECTIONS),
    )


def _percentile_us(direction: Mapping[str, Any], which: str) -> float:
    # absent where nothing was done
    return float(direction["clat_ns"].get("percentile", {}).get(which, 0.0)) / 1e3
