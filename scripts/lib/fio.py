"""fio as the yardstick of a drive: the command of one measurement, and what fio's JSON says of it.

fio gets every advantage: io_uring with registered buffers and files, huge pages, one thread, no time spent on filling
buffers. Never writes outside the file it is given. Called by scripts/bench/nvme_vs_fio.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import bench

__all__ = ["CPU", "GIB", "P99", "RATE", "Job", "Workload", "fastest", "parse", "run", "version"]

GIB = 1 << 30
RATE, CPU, P99 = "GiB/s", "CPU s/GiB", "p99 ms"


class Workload(Enum):
    """What is done to the file, from its start to its end and again, by fio's name for it."""

    READ = "read"
    OVERWRITE = "write"  # of blocks that were written before
    MIXED = "rw"  # half reads, half overwrites, each going through the file on its own


@dataclass(frozen=True)
class Job:
    """One measurement: blocks of one size, as many at a time as keep the bytes in flight."""

    path: Path
    file_bytes: int
    workload: Workload
    block_bytes: int
    inflight_bytes: int
    seconds: int

    def command(self) -> list[str]:
        """Return fio's command line."""
        return [
            "fio",
            "--name=yardstick",
            f"--filename={self.path}",
            f"--size={self.file_bytes}",
            f"--rw={self.workload.value}",
            f"--bs={self.block_bytes}",
            f"--iodepth={self.inflight_bytes // self.block_bytes}",
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
            f"--runtime={self.seconds}",
            "--eta=never",
            "--output-format=json",
        ]


def version() -> str:
    """Return fio's name and version.

    Raises:
        bench.UnavailableError: fio is not installed.
    """
    if shutil.which("fio") is None:
        raise bench.UnavailableError("fio is not installed (Debian, Ubuntu: apt install fio; Fedora: dnf install fio)")
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()


def run(job: Job) -> dict[str, float]:
    """Run one measurement and return its numbers.

    Raises:
        bench.UnavailableError: fio cannot do it here, for example because io_uring is refused.
    """
    # With this, glibc 2.35 and newer puts fio's buffers into huge pages where those are given on request.
    environ = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    done = subprocess.run(job.command(), capture_output=True, text=True, check=False, env=environ)
    if done.returncode != 0:
        told = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise bench.UnavailableError(f"fio ended with status {done.returncode}: {' | '.join(told)}")
    return parse(done.stdout)


def parse(report: str) -> dict[str, float]:
    """Return what fio's JSON says: GiB/s, CPU seconds per GiB, and the 99th percentile of a block's latency in ms."""
    (job,) = json.loads(report[report.index("{") :])["jobs"]
    seconds = job["job_runtime"] / 1e3
    gib = sum(job[direction]["io_bytes"] for direction in ("read", "write")) / GIB
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds
    return {RATE: gib / seconds, CPU: cpu_s / gib, P99: max(_p99_ns(job[way]) for way in ("read", "write")) / 1e6}


def _p99_ns(direction: Mapping[str, Any]) -> float:
    percentiles = direction["clat_ns"].get("percentile", {})  # absent where nothing was done
    return float(percentiles.get("99.000000", 0.0))


def fastest(sweep: Mapping[Job, Sequence[Mapping[str, float]]]) -> Job:
    """Return the job with the highest median rate."""
    return max(sweep, key=lambda job: statistics.median(numbers[RATE] for numbers in sweep[job]))
